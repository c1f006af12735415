"""A peer's part in the averaging of rosters: an all-reduce for each of its groups, all at once, in the swarm's loop."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, TypeVar

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.group import Group, Limits
from spes_p2p.swarm.averaging.partition import LANES, GroupPlan
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.names import SHARED, SLOT, VectorName
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.p2p.channel import Channel, Message
from spes_p2p.swarm.p2p.rate_limit import RateLimit
from spes_p2p.swarm.records import PROTOCOL, Digest
from spes_p2p.swarm.roster import Roster

MAX_GREETING_BYTES = 256
REMEMBERED = 2
"""Attempts whose streams are answered: members may be in different ones."""
MIN_ATTEMPT_SECONDS = 10.0
MIN_SILENCE_SECONDS = 5.0
"""A healthy member on a busy machine may be silent for this long."""
SILENCE_SHARE = 1 / 4
"""Longest silence of a member, as a share of an attempt's longest duration; used until some have been observed."""

T = TypeVar("T")


class Greeting(Message):
    """The first message of a stream: it says of what."""

    meeting: Digest
    group: Annotated[str, Field(pattern=rf"^(shared|{SLOT})$")]
    lane: Annotated[int, Field(ge=0, lt=LANES)]


@dataclass(frozen=True)
class Averaged:
    """Outcome of one attempt to average a roster; the round's certificate decides what of it counts.

    Attributes:
        means: Encoded mean by group, uint8, for the groups that were averaged.
        failures: Reason by group, for the others that this peer was in.
        lost: The member that made `shared` fail, as far as this peer knows; empty if none is known.
        clipped: Parts that this peer has clipped as a reducer, over all its groups, by sender.
        residuals: Rounding errors of the means in this peer's slices, by group: first element of the delta, and fp32
            values.
    """

    means: Mapping[VectorName, Tensor] = field(default_factory=dict)
    failures: Mapping[VectorName, str] = field(default_factory=dict)
    lost: str = ""
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    clipped: Mapping[str, int] = field(default_factory=dict)
    residuals: Mapping[VectorName, tuple[int, Tensor]] = field(default_factory=dict)
    seconds: float = 0.0


class Averaging:
    """One peer's part in the averaging of all rosters.

    Tensors are computed in one thread, message by message, so that the loop stays live. Deltas are read and means are
    written elsewhere, so that a failed attempt leaves the deltas as they are for the next.

    Args:
        network: This peer's network; `serve` must run before the first roster is averaged.
        uplink_mbit: Upload rate of this peer, in 10^6 bits per second; None for no limit.

    Attributes:
        group: Makes this peer's part in each group.
    """

    def __init__(
        self, network: Network, encoding: DeltaEncoding, rounds: RoundConfig, uplink_mbit: float | None = None
    ) -> None:
        self.group: Callable[..., Group] = Group
        self._network = network
        self._service = f"{network.run_id}::{PROTOCOL}.average"
        self._encoding = encoding
        self._uplink_mbit = uplink_mbit
        self._most_seconds = rounds.averaging_seconds
        self._attempt_timeouts: dict[int, AdaptiveTimeout] = {}
        self._silence = AdaptiveTimeout(MIN_SILENCE_SECONDS, SILENCE_SHARE * self._most_seconds)
        self._groups: dict[str, Mapping[VectorName, Group]] = {}
        """This peer's groups by meeting, of the newest attempts."""
        self._met = asyncio.Event()
        self._residuals: dict[VectorName, Tensor] = {}
        self._slots: tuple[int, ...] = ()
        self._worker = ThreadPoolExecutor(1, "averaging", initializer=_compute_in_one_thread)

    async def serve(self) -> None:
        """Answer the other members' streams from now on."""
        await self._network.serve(self._service, 2 * self._most_seconds, self._answer)

    async def average(self, roster: Roster, attempt: int, encoded: Mapping[VectorName, Tensor]) -> Averaged:
        """Average all groups of a roster that this peer is in. No other peer's fault raises an error.

        Args:
            roster: The members that met, the same on all of them.
            attempt: Number of the attempt at the round, from 0, the same on all of them.
            encoded: This peer's vectors of `shared` and of its slots, uint8, in the formats of the round after the
                roster's; they must not change before `keep_residuals`.
        """
        clock = asyncio.get_running_loop().time
        me, began, patience = self._network.peer_id, clock(), self._patience(roster.round + 1)
        # A new rate limit for each attempt: the unsent bytes of a failed one must not slow the next.
        limits = Limits(patience.seconds, self._silence.seconds, RateLimit(self._uplink_mbit))
        self._drop_residuals(next((member.slots for member in roster if member.peer_id == me), ()))
        meeting = meeting_of(roster, attempt)
        plans = await self._work(self._plans, roster, attempt)
        groups = {
            name: self.group(
                plan,
                me,
                encoded.get(name),
                self._residuals.get(name, _zeros(plan.delta_numel)),
                limits=limits,
                open=partial(self._open, meeting, name),
                work=self._work,
            )
            for name, plan in plans.items()
            if plan is not None
        }
        self._register(meeting, groups)
        failures = {name: "no member takes calls from all others" for name, plan in plans.items() if plan is None}
        failures |= {name: reason for name, reason in (await _run_all(groups)).items() if reason}
        averaged = Averaged(
            means={name: group.mean for name, group in groups.items() if name not in failures},
            failures=failures,
            lost=groups[SHARED].lost if SHARED in groups else "",
            evidence=await self._work(_evidence, groups),
            clipped=sum((group.auditor.clipped for group in groups.values()), Counter()),
            residuals={
                name: group.residuals
                for name, group in groups.items()
                if name not in failures and not group.plan.format.is_exact
            },
            seconds=clock() - began,
        )
        self._learn(groups, averaged, patience, learns=attempt == 0)
        return averaged

    async def keep_residuals(self, averaged: Averaged, committed: Collection[VectorName]) -> None:
        """Keep the residuals of a result's committed groups; all are dropped if `shared` is not among them.

        Streams of the round are answered no more, so that its vectors leave memory.
        """
        self._groups.clear()
        if SHARED not in committed:
            self._residuals.clear()
            return
        await self._work(self._keep, {name: each for name, each in averaged.residuals.items() if name in committed})

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ groups

    def _plans(self, roster: Roster, attempt: int) -> dict[VectorName, GroupPlan | None]:
        """Return the plans of the groups that this peer is in; None if none of the members can reduce."""
        plans: dict[VectorName, GroupPlan | None] = {}
        for name, members in roster.groups.items():
            replicas = roster.replicas.get(name, ())
            if self._network.peer_id not in (*members, *replicas):
                continue
            can_reduce = len(members) == 1 or any(roster.reducing((*members, *replicas), replicas))
            format = self._encoding.format(name, roster.round + 1)
            plans[name] = GroupPlan.in_roster(roster, members, format, replicas, attempt) if can_reduce else None
        return plans

    def _work(self, function: Callable[..., T], *args: object) -> asyncio.Future[T]:
        """Run a function in the thread for tensors."""
        return asyncio.get_running_loop().run_in_executor(self._worker, function, *args)

    def _register(self, meeting: str, groups: Mapping[VectorName, Group]) -> None:
        self._groups[meeting] = groups
        while len(self._groups) > REMEMBERED:
            del self._groups[next(iter(self._groups))]
        self._met.set()
        self._met = asyncio.Event()

    def _patience(self, round: int) -> AdaptiveTimeout:
        """Return the timeout of attempts that move as much as those at a round: some rounds carry moments, too."""
        num_bytes = self._encoding.format(SHARED, round).num_bytes
        return self._attempt_timeouts.setdefault(num_bytes, AdaptiveTimeout(MIN_ATTEMPT_SECONDS, self._most_seconds))

    def _learn(
        self, groups: Mapping[VectorName, Group], averaged: Averaged, patience: AdaptiveTimeout, *, learns: bool
    ) -> None:
        """Adapt the timeouts; they learn no durations from an attempt that is redone without the slow."""
        for name, group in groups.items():
            if learns and group.longest_gap and name not in averaged.failures:
                self._silence.observe(group.longest_gap)
        if any(group.was_silent for group in groups.values()):  # once for an attempt, however many groups it has
            self._silence.was_exceeded()
        if averaged.failures:
            if averaged.seconds >= patience.seconds:
                patience.was_exceeded()
        elif learns and groups:
            patience.observe(averaged.seconds)

    # ------------------------------------------------------------------ residuals

    def _drop_residuals(self, slots: tuple[int, ...]) -> None:
        """Drop the residuals of all slots if others are held now."""
        if slots != self._slots:
            self._residuals = {name: each for name, each in self._residuals.items() if name == SHARED}
            self._slots = slots

    def _keep(self, residuals: Mapping[VectorName, tuple[int, Tensor]]) -> None:
        for name, (start, error) in residuals.items():
            numel = self._encoding.format(name, 0).segments[0].numel
            kept = self._residuals[name] = _zeros(numel)  # what others reduce now has no residual here
            kept[start : start + error.numel()] = error

    # ------------------------------------------------------------------ streams

    async def _open(self, meeting: str, name: VectorName, peer: str, lane: int) -> Channel:
        channel = await self._network.open(peer, self._service, 2 * self._most_seconds)
        try:
            await channel.send_text(Greeting(meeting=meeting, group=name, lane=lane).model_dump_json())
        except BaseException:
            channel.close()
            raise
        return channel

    async def _answer(self, channel: Channel, peer: str) -> None:
        """Pass a member's stream to its group; the member may know the roster before this peer does."""
        async with asyncio.timeout(self._most_seconds):
            greeting = Greeting.parse(await channel.receive_text(MAX_GREETING_BYTES))
            while greeting.meeting not in self._groups:
                await self._met.wait()
        group = self._groups[greeting.meeting].get(VectorName(greeting.group))
        if group is None:
            raise ExchangeError(f"asked for {greeting.group}, whose group this peer is not in")
        async with asyncio.timeout(2 * self._most_seconds):
            await group.serve(channel, peer, greeting.lane)


def streams_per_peer(max_slots: int, max_replicated: int) -> int:
    """Return how many streams of one member may be open here, of a peer with so many slots and replicas."""
    return REMEMBERED * (LANES * (1 + max_slots) + max_replicated)


def meeting_of(roster: Roster, attempt: int) -> str:
    """Return the name of the streams of an attempt to average a roster: a digest of both."""
    entries = sorted((member.peer_id, member.model_dump_json()) for member in roster)
    return hashlib.sha256(repr((attempt, entries)).encode()).hexdigest()


async def _run_all(groups: Mapping[VectorName, Group]) -> dict[VectorName, str]:
    """Run groups; return each one's reason of failure, or "". Once `shared` has failed, end the others.

    Nothing counts without `shared`, and a peer that waits for a slot's group would miss the others' next attempt.
    """
    running = {name: asyncio.create_task(group.run()) for name, group in groups.items()}
    try:
        if SHARED in running and await running[SHARED]:
            for group in groups.values():
                group.fail("", "shared was dropped")
        if running:
            await asyncio.wait(running.values())
    finally:
        for task in running.values():
            task.cancel()
    return {name: task.result() for name, task in running.items()}


def _evidence(groups: Mapping[VectorName, Group]) -> dict[str, Evidence]:
    return {peer: seen for group in groups.values() for peer, seen in group.auditor.evidence().items()}


def _zeros(numel: int) -> Tensor:
    """Return fp32 zeros, which take memory where they are written."""
    return torch.from_numpy(np.zeros(numel, dtype=np.float32))


def _compute_in_one_thread() -> None:
    """Have the thread that calls this compute alone; the threads that start later have as many as before.

    Messages are small: threads that wait for each other, while others have the cores, take four times as long.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    others = threading.Thread(target=torch.set_num_threads, args=(num_threads,))
    others.start()
    others.join()
