"""The averager's process: one matchmaking per round, and an all-reduce for every group that follows from its roster."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

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
from spes_p2p.swarm.averaging.allreduce import GroupAllreduce, Limits, finish_all
from spes_p2p.swarm.averaging.buffers import BufferPool
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.matchmaking import Survivors, SwarmMatchmaking, expected_of, read_roster
from spes_p2p.swarm.averaging.outcome import Attempt
from spes_p2p.swarm.averaging.partition import LANES, GroupPlan
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.hivemind_fixes.dht import SPARE_STREAMS, SwarmDHT
from spes_p2p.swarm.hivemind_fixes.processes import (
    BlockingConnection,
    die_with_parent,
    keep_current_task_alive,
    leave_process_group,
)
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.rate_limit import RateLimit
from spes_p2p.swarm.roster import Member
from spes_p2p.swarm.validation import matchmaking_prefix

REDONE = 2
"""Attempts at a round whose streams may be open at once."""
MAX_QUESTION_BYTES = 512
"""Longest question for a result; it may wait for the length of an attempt."""
MIN_ATTEMPT_SECONDS = 10.0
MIN_SILENCE_SECONDS = 5.0
"""A healthy member on a busy machine may be silent for this long."""
SILENCE_SHARE = 1 / 4
"""Longest silence of a member, as a share of an attempt's longest duration; used until some have been observed."""


class SparseAverager(DecentralizedAverager):
    """Averages `shared` with all members and each slot with its holders, in a process of its own.

    Precedent: hivemind's PowerSGD averager, which also runs several all-reduces under ids derived from one group.
    Deltas are read from one set of shared-memory buffers and means written to another, so that a failed attempt leaves
    the deltas as they are for the next.

    Args:
        dht: This peer's DHT node.
        run_id: Name of the run, and so of its matchmaking.
        encoding: Formats of the vectors.
        max_slots: Slots that this peer may hold at once.
        max_replicated: Slots that it may replicate.
        deadlines: The run's round settings.
        uplink_mbit: Upload rate of this peer, in 10^6 bits per second; None for no limit.
        guests: Peers that may take part; None for all.

    Attributes:
        buffers: Shared memory for the vectors.
    """

    _matchmaking: Matchmaking
    _inner_pipe: Any
    _limits: Limits
    """Limits of one attempt, made anew for each, so that unsent bytes of a failed one do not slow the next."""

    def __init__(
        self,
        dht: SwarmDHT,
        *,
        run_id: str,
        encoding: DeltaEncoding,
        max_slots: int,
        max_replicated: int,
        deadlines: RoundConfig,
        uplink_mbit: float | None = None,
        guests: GuestList | None = None,
    ) -> None:
        self.buffers = BufferPool(encoding, max_slots + max_replicated)
        self._encoding = encoding
        self._guests = guests
        self._uplink_mbit = uplink_mbit
        self._max_seconds = deadlines.averaging_seconds
        self._attempt_timeouts: dict[int, AdaptiveTimeout] = {}
        self._silence_timeout = AdaptiveTimeout(MIN_SILENCE_SECONDS, SILENCE_SHARE * self._max_seconds)
        dht.streams_per_peer = SPARE_STREAMS + REDONE * (LANES * (1 + max_slots) + max_replicated)
        self._groups: dict[bytes, GroupAllreduce] = {}
        self._last_groups: dict[bytes, GroupAllreduce] = {}
        self._is_redone = False
        self._survivors = Survivors(frozenset(), ())
        super().__init__(
            [torch.zeros(1)],
            dht,
            start=False,
            prefix=matchmaking_prefix(run_id),
            min_group_size=2,
            min_matchmaking_time=deadlines.matchmaking_seconds,
            request_timeout=deadlines.matchmaking_seconds / 3,
            allow_state_sharing=False,
            client_mode=False,  # a peer in client mode answers those that it has called; it leads no group (below)
        )
        # Members hold different slots, so that stock's hash over all tensors would keep all peers apart.
        self.schema_hash = hashlib.sha256(f"{run_id} {encoding.description}".encode()).digest()

    def run(self) -> None:
        die_with_parent(self._parent_pid)
        leave_process_group()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._inner_pipe = BlockingConnection(self._inner_pipe)
        # Parts are small: threads that wait for each other, while others have the cores, take four times as long.
        torch.set_num_threads(1)
        super().run()

    async def remove_p2p_handlers(self, *args: Any, **kwargs: Any) -> None:
        with contextlib.suppress(OSError, EOFError):  # p2pd cannot be reached any more, and nor can they
            await super().remove_p2p_handlers(*args, **kwargs)

    def attempt(
        self,
        member: Member,
        last: Body,
        encoded: dict[VectorName, Tensor],
        *,
        expected: int,
        least: int,
        num_known: int = 0,
        closes_from: float,
        is_redone: bool = False,
    ) -> Attempt:
        """Meet and average once.

        Args:
            member: This peer's roster entry.
            last: Body of the last certificate, which all deltas start from.
            encoded: The vectors to send: `shared` and the member's slots, uint8, in the formats of the round after the
                member's; they are in the buffers from then on.
            expected: Group size at which the roster is complete.
            least: Smallest size of a roster.
            num_known: Voters and candidates among the expected.
            closes_from: DHT time from which the roster may be closed without the rest.
            is_redone: Meet only the members that were not lost in the last attempt.

        Returns:
            The attempt's outcome; its tensors lie in the buffers.
        """
        buffers = self.buffers.assign(member.slots, member.replicates)
        self.buffers.take(member.slots, encoded)
        self._outer_pipe.send(("_prepare", [is_redone, least, num_known, last], {}))
        began = get_dht_time()
        scheduled = max(closes_from, get_dht_time()) + self.matchmaking_kwargs["min_matchmaking_time"]
        timeout = scheduled - get_dht_time() + self.matchmaking_kwargs["min_matchmaking_time"]
        control = self.step(
            gather=[expected, member.model_dump_json()],
            scheduled_time=scheduled,
            timeout=timeout,
            allow_retries=False,
            wait=False,
        )
        try:
            attempt, met_at, spans = control.result(timeout=timeout + 2 * self._max_seconds)
        except Exception as error:  # noqa: BLE001 - hivemind reports a missing group by a dozen types
            control.cancel()
            failure = f"no roster of {least} of {expected} peers or more: {error!r}"
            return Attempt(failure=failure, matchmaking_seconds=get_dht_time() - began)
        formats = {name: self._encoding.format(name, attempt.roster.round + 1) for name in spans}
        return replace(
            attempt,
            averaged={
                name: buffers[name].mean(is_own=attempt.roster.groups[name] == (member.peer_id,))[: format.num_bytes]
                for name, format in formats.items()
            },
            residuals={
                name: (start, buffers[name].new_residual[start:stop])
                for name, (start, stop) in spans.items()
                if not formats[name].is_exact
            },
            matchmaking_seconds=met_at - began,
            averaging_seconds=get_dht_time() - met_at,
        )

    def room(self, slots: tuple[int, ...], round: int) -> dict[VectorName, Tensor]:
        """Return the memory from which vectors of `shared` and these slots are sent in a round, where they are fp32."""
        formats = {name: self._encoding.format(name, round) for name in self.buffers.of(slots)}
        return {
            name: buffers.source[: formats[name].num_bytes].view(torch.float32)
            for name, buffers in self.buffers.of(slots).items()
            if formats[name].is_exact and len(formats[name].segments) == 1
        }

    # ------------------------------------------------------------------ in the averager's process

    async def _prepare(self, is_redone: bool, least: int, num_known: int, last: Body) -> None:
        self._is_redone = is_redone
        self._least = least
        self._num_known = num_known
        self._last = last
        self._p2p.reserve_half_for(lambda peer: not last.is_stranger(peer.to_base58()))
        patience = self._attempt_timeout(last.round + 1)
        self._limits = Limits(patience, self._silence_timeout, RateLimit(self._uplink_mbit), learns=not is_redone)

    def _attempt_timeout(self, round: int) -> AdaptiveTimeout:
        """Return the timeout of attempts that move as much as those at a round: every so many carry moments, too."""
        num_bytes = self._encoding.format(SHARED, round).num_bytes
        return self._attempt_timeouts.setdefault(num_bytes, AdaptiveTimeout(MIN_ATTEMPT_SECONDS, self._max_seconds))

    async def _step(self, *, step, future_for_init) -> None:
        keep_current_task_alive()
        target = expected_of(step.data_for_gather)
        if not isinstance(self._matchmaking, SwarmMatchmaking):
            self._matchmaking = SwarmMatchmaking(
                self._p2p, self.schema_hash, self.dht, client_mode=self.dht.client_mode, **self.matchmaking_kwargs
            )
        # A group below quorum would be dropped, and would take its members from a larger one.
        survivors = self._survivors if self._is_redone else None
        self._matchmaking.prepare(target, self._least, survivors, self._last, self._num_known)
        await super()._step(step=step, future_for_init=future_for_init)

    @contextlib.contextmanager
    def _register_allreduce_group(self, group_info: GroupInfo) -> Iterator[None]:
        # The groups follow from the roster, so that all are known before the first byte can arrive.
        roster, refused = read_roster(group_info, self._last, self._guests)
        groups: dict[bytes, GroupAllreduce] = {}
        for name, members in roster.groups.items():
            format = self._encoding.format(name, roster.round + 1)
            plan = GroupPlan.in_roster(roster, members, format, roster.replicas.get(name, ()))
            group_id = group_info.group_id + name.encode()
            groups[group_id] = GroupAllreduce(plan, self.peer_id.to_base58(), group_id, self._limits, self._stub)
        self._roster = roster
        self._refused = refused
        self._last_groups = self._groups
        self._groups = groups
        self._pending_groups_registered.set()
        try:
            yield
        finally:
            for group in self._groups.values():
                group.close()

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, weight: float, **kwargs
    ) -> tuple[Attempt, float, dict[VectorName, tuple[int, int]]]:
        """Return the attempt, the DHT time of its roster, and by averaged vector the span of the delta reduced here."""
        met_at, began = get_dht_time(), time.monotonic()
        me = self.peer_id.to_base58()
        slots = next(((*member.slots, *member.replicates) for member in self._roster if member.peer_id == me), ())
        mine: dict[VectorName, GroupAllreduce] = {}
        running: dict[VectorName, asyncio.Task[str]] = {}
        for name, buffers in self.buffers.of(slots).items():
            group = self._groups.get(group_info.group_id + name.encode())
            if group is not None and me in group.plan.peers:
                mine[name] = group
                running[name] = asyncio.create_task(group.run(buffers))
        status = await finish_all(running)
        lost = mine[SHARED].lost if SHARED in mine else ""
        self._survivors = Survivors.of(
            self._roster, me=me, lost=lost, proposer=self._last.proposer(0), is_redone=self._is_redone
        )
        seconds = time.monotonic() - began
        if any(group.was_silent for group in mine.values()):  # once for an attempt, however many groups it has
            self._silence_timeout.was_exceeded()
        if not any(status.values()):
            if self._limits.learns:
                self._limits.attempt.observe(seconds)
        elif seconds >= self._limits.attempt.seconds:
            self._limits.attempt.was_exceeded()
        attempt = Attempt(
            self._roster,
            self._refused,
            status,
            lost=frozenset([lost] if lost else []),
            evidence={peer: seen for group in mine.values() for peer, seen in group.evidence.items()},
            clipped=sum((Counter(group.clipped) for group in mine.values()), Counter()),
        )
        return attempt, met_at, {name: mine[name].plan.span(me) for name, reason in status.items() if not reason}

    def _stub(self, peer: str) -> StubBase:
        return self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)

    async def _group(self, group_id: bytes) -> GroupAllreduce | None:
        """Return a group of the newest roster or the last one; the caller may know a roster before this peer does."""
        if group_id not in self._groups and group_id not in self._last_groups:
            await asyncio.wait_for(self._pending_groups_registered.wait(), self._max_seconds)
        return self._groups.get(group_id) or self._last_groups.get(group_id)

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """Pass a member's stream to its group; if the group has failed already, answer with the member to blame."""
        greeting = await anext(stream)
        group = await self._group(greeting.group_id)
        if group is None:
            yield averaging_pb2.AveragingData(code=averaging_pb2.BAD_GROUP_ID)
            return
        await asyncio.wait({group.running}, timeout=self._max_seconds)
        if not group.running.done() or group.running.cancelled():
            yield averaging_pb2.AveragingData(code=averaging_pb2.CANCELLED, peer_id=group.lost.encode())
            return
        async for message in group.running.result().rpc_aggregate_part(stream, context, greeting.weight):
            yield message

    async def rpc_confirm(self, request: runtime_pb2.ExpertRequest, context: P2PContext) -> runtime_pb2.ExpertResponse:
        """Answer with the digests of our result in a group, once there is one; empty if we failed."""
        answer = b""
        if request.ByteSize() <= MAX_QUESTION_BYTES:  # guard: long-question
            group = await self._group(bytes.fromhex(request.uid))
            answer = await group.answer(self._max_seconds) if group is not None else b""
        return runtime_pb2.ExpertResponse(metadata=answer)
