"""One matchmaking per round, every group derived from its roster, each averaged whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.clock import Patience
from spes_p2p.swarm.group_work import Buffers, GroupWork, expected_of, finish_all, read_roster
from spes_p2p.swarm.meeting import Meeting
from spes_p2p.swarm.outcome import Attempt, quorum
from spes_p2p.swarm.processes import BoundDHT, die_with_parent
from spes_p2p.swarm.reduce import GroupPlan
from spes_p2p.swarm.roster import SHARED, Groups, Member, derive_groups, slot_name, uplinks
from spes_p2p.swarm.validation import matchmaking_prefix
from spes_p2p.swarm.wire import Wire

log = logging.getLogger(__name__)

LEAST_ATTEMPT_SECONDS = 10.0
LEAST_SILENCE_SECONDS = 5.0
"""Of a busy machine that is well."""
SILENCE_SHARE = 1 / 4
"""Of an attempt's longest duration; what a member may be silent for until some have been seen."""


class SparseAverager(DecentralizedAverager):
    """Averages `shared` with everyone and each slot with its holders, in a process of its own.

    Precedent: hivemind's PowerSGD averager, which also runs several all-reduces under ids derived from one group.
    Deltas wait in one set of shared-memory buffers and results land in another, so that a failed attempt leaves
    the deltas untouched for the next.

    Args:
        dht: This peer's DHT node.
        run_id: Names the matchmaking.
        wire: How vectors travel.
        max_slots: Slots this peer may hold at once.
        deadlines: The run's round settings.
    """

    _matchmaking: Matchmaking

    def __init__(self, dht: BoundDHT, *, run_id: str, wire: Wire, max_slots: int, deadlines: RoundConfig) -> None:
        self._wire = wire
        formats = [wire.largest(SHARED), *[wire.largest(slot_name(0))] * max_slots]
        self._buffers = [Buffers(format) for format in formats]
        self._held: tuple[int, ...] = ()
        most = deadlines.averaging_seconds
        self._patience = Patience(LEAST_ATTEMPT_SECONDS, most)
        self._silence = Patience(LEAST_SILENCE_SECONDS, SILENCE_SHARE * most)
        self._most_seconds = most
        self._work: dict[bytes, GroupWork] = {}
        self._last_work: dict[bytes, GroupWork] = {}
        self._is_redone = False
        self._survivors: list[PeerID] = []
        super().__init__(
            [torch.zeros(1)],
            dht,
            start=False,
            prefix=matchmaking_prefix(run_id),
            min_group_size=2,
            min_matchmaking_time=deadlines.matchmaking_seconds,
            request_timeout=deadlines.matchmaking_seconds / 3,
            allow_state_sharing=False,
        )
        # Members hold different slots, so stock's hash over all tensors would refuse everybody.
        self.schema_hash = hashlib.sha256(f"{run_id} {wire.description}".encode()).digest()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        super().run()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # Stock silences SIGINT in the host process; ours wants to hear it.
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def attempt(
        self,
        member: Member,
        encoded: Mapping[str, Tensor],
        *,
        expected: int,
        starts_at: float,
        is_redone: bool = False,
    ) -> Attempt:
        """Meet and average once.

        Args:
            member: This peer's roster entry; `encoded` holds `shared` and its slots.
            encoded: What it sends, uint8, in the formats of the round after the member's.
            expected: Group size at which the roster stands at once.
            starts_at: DHT time at which it stands anyway.
            is_redone: Meet those who were not lost in the last attempt, and nobody else.

        Returns:
            The attempt's outcome; `averaged` are copies.
        """
        names = self._place(member.slots)
        for buffers, name in zip(self._buffers, names, strict=False):
            buffers.source[: encoded[name].numel()].copy_(encoded[name])
        self._outer_pipe.send(("_prepare", [is_redone], {}))
        started = get_dht_time()
        scheduled = max(starts_at, get_dht_time()) + self.matchmaking_kwargs["min_matchmaking_time"]
        patience = scheduled - get_dht_time() + self.matchmaking_kwargs["min_matchmaking_time"]
        control = self.step(
            gather=[expected, member.model_dump_json()],
            scheduled_time=scheduled,
            timeout=patience,
            allow_retries=False,
            wait=False,
        )
        try:
            outcome = control.result(timeout=patience + 2 * self._most_seconds)
        except Exception as error:  # noqa: BLE001 - hivemind reports "nobody came" by a dozen types
            control.cancel()
            failure = f"no roster of {quorum(expected)} of {expected} peers or more: {error!r}"
            return Attempt(failure=failure, matchmaking_seconds=get_dht_time() - started)
        places = {name: buffers for buffers, name in zip(self._buffers, names, strict=False)}
        done = [name for name, reason in outcome["status"].items() if not reason]
        formats = {name: self._wire.format(name, outcome["round"]) for name in done}
        return Attempt(
            roster=tuple(Member.decode(peer, data) for peer, data in outcome["roster"]),
            refused=outcome["refused"],
            status=outcome["status"],
            averaged={name: places[name].result[: formats[name].num_bytes].clone() for name in done},
            left={name: places[name].left(*outcome["spans"][name]) for name in done if not formats[name].is_exact},
            lost=frozenset(outcome["lost"]),
            matchmaking_seconds=outcome["met_at"] - started,
            averaging_seconds=get_dht_time() - outcome["met_at"],
        )

    def keep_errors(self, left: Mapping[str, tuple[int, Tensor]]) -> None:
        """Let what the means of committed groups have left over go with a later round's.

        Args:
            left: As in the attempt.
        """
        names = [SHARED, *map(slot_name, self._held)]
        for name, (start, error) in left.items():
            self._buffers[names.index(name)].keep(start, error)

    def forget_errors(self) -> None:
        """Give up what was left over, because the anchors have been replaced."""
        for buffers in self._buffers:
            buffers.forget_error()

    def _place(self, slots: tuple[int, ...]) -> list[str]:
        """Return which group each of the buffers is for; errors of slots that move are given up."""
        if slots != self._held:
            for buffers in self._buffers[1:]:
                buffers.forget_error()
            self._held = slots
        return [SHARED, *map(slot_name, slots)]

    # ------------------------------------------------------------------ in the averager's process

    async def _prepare(self, is_redone: bool) -> None:
        self._is_redone = is_redone

    async def _step(self, *, step, future_for_init) -> None:
        target = expected_of(step.data_for_gather)
        if not isinstance(self._matchmaking, Meeting):
            self._matchmaking = Meeting(
                self._p2p, self.schema_hash, self.dht, client_mode=self.client_mode, **self.matchmaking_kwargs
            )
        # A group below quorum would only be thrown away, and take its members from a larger one.
        self._matchmaking.prepare(target, max(2, quorum(target or 2)), self._survivors if self._is_redone else None)
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        # The groups follow from the roster, so all are known before the first byte can arrive.
        roster, _ = read_roster(group_info)
        groups = derive_groups(roster)
        self._last_work, self._work = (
            self._work,
            {
                _group_id(group_info, name): self._group_work(name, groups, roster, _group_id(group_info, name))
                for name in groups.members
            },
        )
        self._pending_groups_registered.set()
        try:
            yield
        finally:
            for work in self._work.values():
                work.close()

    def _group_work(self, name: str, groups: Groups, roster: Sequence[Member], gid: bytes) -> GroupWork:
        """Return what this peer does in a group; for groups of others, nothing but to say so."""
        tokens, speeds = {member.peer_id: float(member.tokens) for member in roster}, uplinks(roster)
        peers = groups.members[name]
        plan = GroupPlan.of(
            peers,
            [tokens[peer] for peer in peers],
            [speeds[peer] for peer in peers],
            self._wire.format(name, groups.round + 1),
        )
        return GroupWork(plan, self.peer_id.to_base58(), gid, self._ask)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, weight: float, **kwargs) -> dict:
        met_at, began = get_dht_time(), time.monotonic()
        roster, refused = read_roster(group_info)
        me = self.peer_id.to_base58()
        slots = next((member.slots for member in roster if member.peer_id == me), ())
        mine: dict[str, GroupWork] = {}
        running: dict[str, asyncio.Task[str]] = {}
        for place, name in enumerate([SHARED, *map(slot_name, slots)]):
            work = self._work.get(_group_id(group_info, name))
            if work is not None and me in work.plan.peers:
                mine[name] = work
                running[name] = asyncio.create_task(work.run(self._buffers[place], self._patience, self._silence))
        status = await finish_all(running)
        lost = mine[SHARED].lost if SHARED in mine else ""
        self._survivors = [peer for peer in group_info.peer_ids if peer.to_base58() not in (lost, me)]
        if not any(status.values()):
            self._patience.observe(time.monotonic() - began)
        return {
            "roster": [(member.peer_id, member.model_dump_json()) for member in roster],
            "refused": refused,
            "round": derive_groups(roster).round + 1,
            "status": status,
            "lost": [lost] if lost else [],
            "spans": {name: work.plan.span(me) for name, work in mine.items()},
            "met_at": met_at,
        }

    def _ask(self, peer: str) -> StubBase:
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)

    async def _work_on(self, gid: bytes) -> GroupWork | None:
        """Return a group of the newest roster or of the last; who asks may have heard of the roster before us."""
        if gid not in self._work and gid not in self._last_work:
            await asyncio.wait_for(self._pending_groups_registered.wait(), self._most_seconds)
        return self._work.get(gid) or self._last_work.get(gid)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Lead a member's stream to its group; if that has failed already, say because of whom."""
        greeting = await anext(stream)
        work = await self._work_on(greeting.group_id)
        if work is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        await asyncio.wait({work.reduction}, timeout=self._most_seconds)
        if not work.reduction.done() or work.reduction.cancelled():
            yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=work.lost.encode())
            return
        async for message in work.reduction.result().rpc_aggregate_part(stream, context, greeting.weight):
            yield message

    async def rpc_confirm(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        """Tell a member the digest of our result in a group, once there is one; empty if we failed."""
        work = await self._work_on(bytes.fromhex(request.uid[:256]))
        answer = await work.confirmed(self._most_seconds) if work is not None else b""
        return runtime_pb2.ExpertResponse(metadata=answer)


def _group_id(group_info: GroupInfo, name: str) -> bytes:
    return group_info.group_id + name.encode()
