"""One matchmaking per round, every group derived from its roster, each averaged whole or not at all."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import torch
from hivemind.averaging.averager import DecentralizedAverager
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.averaging.partition import AllreduceException
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.servicer import StubBase
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.allreduce import LANES, GroupAllreduce, expected_of, finish_all, group_id, read_roster
from spes_p2p.swarm.averaging.buffers import BufferPool
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.matchmaking import SwarmMatchmaking
from spes_p2p.swarm.averaging.outcome import ATTEMPTS, Attempt
from spes_p2p.swarm.averaging.partition import GroupPlan
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.hivemind_fixes.dht import SPARE_STREAMS, SwarmDHT
from spes_p2p.swarm.hivemind_fixes.processes import (
    BlockingConnection,
    die_with_parent,
    keep_current_task_alive,
    leave_process_group,
)
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.p2p.rate_limit import RateLimit
from spes_p2p.swarm.roster import SHARED, Groups, Member, Roster, derive_groups, slot_name
from spes_p2p.swarm.validation import matchmaking_prefix

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
        encoding: How vectors travel.
        max_slots: Slots this peer may hold at once.
        deadlines: The run's round settings.
        uplink_mbit: What this peer's link carries, in 10^6 bits per second; None if it does not say.
        guests: Who may take part; None for everybody.

    Attributes:
        places: The buffers.
    """

    _matchmaking: Matchmaking
    _inner_pipe: Any
    _loaded: asyncio.Future[bool]
    """Whether what this peer said that it would send is in the buffers."""
    _pace: RateLimit
    """Of one attempt: what a failed one did not send is not waited for."""

    def __init__(
        self,
        dht: SwarmDHT,
        *,
        run_id: str,
        encoding: DeltaEncoding,
        max_slots: int,
        deadlines: RoundConfig,
        uplink_mbit: float | None = None,
        guests: GuestList | None = None,
    ) -> None:
        self._encoding, self._guests = encoding, guests
        self.places = BufferPool(encoding, max_slots)
        most = deadlines.averaging_seconds
        self._patience = AdaptiveTimeout(LEAST_ATTEMPT_SECONDS, most)
        self._silence = AdaptiveTimeout(LEAST_SILENCE_SECONDS, SILENCE_SHARE * most)
        self._most_seconds, self._uplink_mbit = most, uplink_mbit
        dht.streams_per_peer = SPARE_STREAMS + ATTEMPTS * LANES * (1 + max_slots)
        self._work: dict[bytes, GroupAllreduce] = {}
        self._last_work: dict[bytes, GroupAllreduce] = {}
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
            client_mode=False,  # who cannot be called answers those whom it has called; it leads no meeting (below)
        )
        # Members hold different slots, so stock's hash over all tensors would refuse everybody.
        self.schema_hash = hashlib.sha256(f"{run_id} {encoding.description}".encode()).digest()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        leave_process_group()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._inner_pipe = BlockingConnection(self._inner_pipe)
        super().run()

    def run_in_background(self, await_ready: bool = True, timeout: float | None = None) -> None:
        # Stock silences SIGINT in the host process; ours wants to hear it.
        self.start()
        if await_ready:
            self.wait_until_ready(timeout)

    def attempt(
        self,
        member: Member,
        encode: Callable[[], tuple[Member, Mapping[str, Tensor]]],
        *,
        expected: int,
        least: int,
        starts_at: float,
        is_redone: bool = False,
    ) -> Attempt:
        """Meet and average once.

        Args:
            member: This peer's roster entry.
            encode: Returns that entry again, and what this peer sends: `shared` and its slots, uint8, in the formats of
                the round after the member's. Called while the others are looked for. With another entry, what was
                promised to them cannot be sent, and the attempt fails.
            expected: Group size at which the roster stands at once.
            least: Members below which there is none.
            starts_at: DHT time at which it stands anyway.
            is_redone: Meet those who were not lost in the last attempt, and nobody else.

        Returns:
            The attempt's outcome; `averaged` are copies.
        """
        self.places.assign(member.slots)
        self._outer_pipe.send(("_prepare", [is_redone, least], {}))
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
        checked, encoded = encode()
        self.places.fill(encoded)
        self._outer_pipe.send(("_load", [checked.tokens == member.tokens], {}))
        try:
            outcome = control.result(timeout=patience + 2 * self._most_seconds)
        except Exception as error:  # noqa: BLE001 - hivemind reports "nobody came" by a dozen types
            control.cancel()
            failure = f"no roster of {least} of {expected} peers or more: {error!r}"
            return Attempt(failure=failure, matchmaking_seconds=get_dht_time() - started)
        places = self.places.by_name
        done = [name for name, reason in outcome["status"].items() if not reason]
        formats = {name: self._encoding.format(name, outcome["round"]) for name in done}
        return Attempt(
            roster=Roster(Member.decode(peer, data) for peer, data in outcome["roster"]),
            refused=outcome["refused"],
            status=outcome["status"],
            averaged={name: places[name].result[: formats[name].num_bytes].clone() for name in done},
            left={name: places[name].left(*outcome["spans"][name]) for name in done if not formats[name].is_exact},
            lost=frozenset(outcome["lost"]),
            evidence=outcome["evidence"],
            matchmaking_seconds=outcome["met_at"] - started,
            averaging_seconds=get_dht_time() - outcome["met_at"],
        )

    # ------------------------------------------------------------------ in the averager's process

    async def _prepare(self, is_redone: bool, least: int) -> None:
        self._is_redone, self._least, self._loaded = is_redone, least, asyncio.get_running_loop().create_future()
        self._pace = RateLimit(self._uplink_mbit)

    async def _load(self, is_as_promised: bool) -> None:
        self._loaded.set_result(is_as_promised)

    async def _step(self, *, step, future_for_init) -> None:
        keep_current_task_alive()
        target = expected_of(step.data_for_gather)
        if not isinstance(self._matchmaking, SwarmMatchmaking):
            self._matchmaking = SwarmMatchmaking(
                self._p2p, self.schema_hash, self.dht, client_mode=self.dht.client_mode, **self.matchmaking_kwargs
            )
        # A group below quorum would only be thrown away, and take its members from a larger one.
        self._matchmaking.prepare(target, self._least, self._survivors if self._is_redone else None)
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        # The groups follow from the roster, so all are known before the first byte can arrive.
        roster, _ = read_roster(group_info, self._guests)
        groups = derive_groups(roster)
        self._last_work, self._work = self._work, {}
        for name in groups.members:
            gid = group_id(group_info, name)
            self._work[gid] = self._group_work(name, groups, roster, gid)
        self._pending_groups_registered.set()
        try:
            yield
        finally:
            for work in self._work.values():
                work.close()

    def _group_work(self, name: str, groups: Groups, roster: Sequence[Member], gid: bytes) -> GroupAllreduce:
        """Return what this peer does in a group; for groups of others, nothing but to say so."""
        plan = GroupPlan.in_roster(roster, groups.members[name], self._encoding.format(name, groups.round + 1))
        return GroupAllreduce(plan, self.peer_id.to_base58(), gid, self._ask)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, weight: float, **kwargs) -> dict:
        met_at, began = get_dht_time(), time.monotonic()
        roster, refused = read_roster(group_info, self._guests)
        me = self.peer_id.to_base58()
        if not await asyncio.wait_for(self._loaded, self._most_seconds):
            for promised in self._work.values():
                promised.lost = me
            raise AllreduceException("this peer's vectors cannot be encoded")
        slots = next((member.slots for member in roster if member.peer_id == me), ())
        mine: dict[str, GroupAllreduce] = {}
        running: dict[str, asyncio.Task[str]] = {}
        for place, name in enumerate([SHARED, *map(slot_name, slots)]):
            work = self._work.get(group_id(group_info, name))
            if work is not None and me in work.plan.peers:
                mine[name] = work
                running[name] = asyncio.create_task(
                    work.run(self.places.all[place], self._patience, self._silence, self._pace)
                )
        status = await finish_all(running)
        lost = mine[SHARED].lost if SHARED in mine else ""
        self._survivors = [peer for peer in group_info.peer_ids if peer.to_base58() not in (lost, me)]
        seconds = time.monotonic() - began
        if not any(status.values()):
            self._patience.observe(seconds)
        elif seconds >= self._patience.seconds:
            self._patience.was_exceeded()
        return {
            "roster": [(member.peer_id, member.model_dump_json()) for member in roster],
            "refused": refused,
            "round": derive_groups(roster).round + 1,
            "status": status,
            "lost": [lost] if lost else [],
            "evidence": {peer: seen for work in mine.values() for peer, seen in work.evidence.items()},
            "spans": {name: work.plan.span(me) for name, work in mine.items()},
            "met_at": met_at,
        }

    def _ask(self, peer: str) -> StubBase:
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)

    async def _work_on(self, gid: bytes) -> GroupAllreduce | None:
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
        answer = await work.answer(request.metadata, self._most_seconds) if work is not None else b""
        return runtime_pb2.ExpertResponse(metadata=answer)
