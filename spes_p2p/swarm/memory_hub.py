"""Where the peers of one process meet: records, versions, and the means of whoever is there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spes_p2p.codecs import Format
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.outcome import Attempt
from spes_p2p.swarm.averaging.reduce import GroupPlan, Message, decode_message, reduce_message
from spes_p2p.swarm.averaging.wire import Wire
from spes_p2p.swarm.averaging.witness import Evidence
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.roster import SHARED, Member, derive_groups
from spes_p2p.swarm.virtual_clock import VirtualClock

Lie = Callable[[Format, Message, Tensor], Tensor]


@dataclass(frozen=True)
class Entry:
    """What a peer brings to a meeting.

    Attributes:
        member: Its roster entry.
        encoded: Its vectors as they travel.
        wire: How they do.
        errors: What earlier means have left over with it, by group.
        lie: Makes other bytes of the means that it reduces, of a dishonest peer, which blames nobody; else None.
    """

    member: Member
    encoded: Mapping[str, Tensor]
    wire: Wire
    errors: dict[str, Tensor]
    lie: Lie | None = None

    def error(self, name: str, numel: int) -> Tensor:
        """Return what is left over of a group's delta; nothing, at first."""
        return self.errors.setdefault(name, torch.zeros(numel))


class MemoryHub:
    """Where the peers of one process meet, one of them running at a time.

    Args:
        run_id: Names the run in versions.
        matchmaking_seconds: How long peers wait for others beyond a round's start.
        lease_seconds: How long records outlive a peer that has vanished.
        clock: Virtual time; a new one by default.
    """

    def __init__(
        self,
        run_id: str,
        matchmaking_seconds: float = 3.0,
        lease_seconds: float = 30.0,
        clock: VirtualClock | None = None,
    ) -> None:
        self.run_id, self.matchmaking_seconds, self.lease_seconds = run_id, matchmaking_seconds, lease_seconds
        self.clock = clock or VirtualClock()
        self.records: dict[type[Record], dict[str, tuple[Record, float]]] = {}
        self.bundles: dict[str, dict[str, tuple[Version, Tensor]]] = {}
        self.bytes_out: dict[str, int] = {}
        self.deltas: dict[str, tuple[str, int]] = {}
        self._flats: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Entry] = {}
        self._attempts: dict[str, Attempt] = {}

    def copy(self, flat_N: Tensor, digest: str) -> Tensor:
        """Return a copy to keep, one for all who publish the same."""
        kept = self._flats.get(digest)
        if kept is None:
            kept = self._flats[digest] = flat_N.clone()
        return kept

    def transfer_bytes(self, version: Version, have: str, keyframe_rounds: int) -> int:
        """Return what it takes to send a version to a peer that has the one with the digest `have`."""
        digest, num_bytes = version.digest, 0
        for _ in range(keyframe_rounds):
            if digest == have or digest not in self.deltas:
                break
            digest, delta_bytes = self.deltas[digest]
            num_bytes += delta_bytes
        return min(num_bytes, version.num_bytes) if digest == have else version.num_bytes

    def meet(self, entry: Entry, expected: int, deadline: float) -> Attempt:
        """Wait until `expected` peers are here, or `deadline` (virtual seconds); return this peer's outcome."""
        me, began = entry.member.peer_id, self.clock.now()
        self._waiting[me] = entry
        while me not in self._attempts:
            if len(self._waiting) >= expected or self.clock.now() >= deadline:
                self._assemble()
            else:
                self.clock.wait(deadline - self.clock.now())
        return replace(self._attempts.pop(me), matchmaking_seconds=self.clock.now() - began)

    def _assemble(self) -> None:
        met, self._waiting = self._waiting, {}
        if len(met) == 1:
            self._attempts |= {peer: Attempt(failure="no roster: nobody came") for peer in met}
        else:
            self._attempts |= average_entries(met)
        self.clock.notify_all()


def average_entries(met: Mapping[str, Entry]) -> dict[str, Attempt]:
    """Return what each of those who met gets out of it, by peer; the entries are left as they are.

    A reducer that is caught lying is left out of a second attempt, as everywhere.
    """
    attempts = _attempt(met)
    liars = {peer for attempt in attempts.values() for peer in attempt.lost}
    rest = {peer: entry for peer, entry in met.items() if peer not in liars}
    if not liars or len(rest) < 2:
        return attempts
    failure = f"lost {' and '.join(sorted(liars))}"
    second = {
        peer: replace(attempt, evidence={**attempts[peer].evidence, **attempt.evidence})
        for peer, attempt in average_entries(rest).items()
    }
    return second | {peer: Attempt(failure=failure) for peer in liars}


def _attempt(met: Mapping[str, Entry]) -> dict[str, Attempt]:
    roster = tuple(met[peer].member for peer in sorted(met))
    groups = derive_groups(roster)
    status: dict[str, dict[str, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[str, Tensor]] = {peer: {} for peer in met}
    lefts: dict[str, dict[str, tuple[int, Tensor]]] = {peer: {} for peer in met}
    evidence: dict[str, dict[str, Evidence]] = {peer: {} for peer in met}
    lost: dict[str, set[str]] = {peer: set() for peer in met}
    for name, members in groups.members.items():
        format = met[members[0]].wire.format(name, groups.round + 1)
        plan = GroupPlan.in_roster(roster, members, format)
        work = GroupMean(plan, name, met)
        reason = work.reduce() if any(plan.weights) else "nobody trained"
        for peer in members:
            status[peer][name] = reason
            evidence[peer] |= work.witnesses[peer].evidence()
            if reason.startswith("lost") and name == SHARED:
                lost[peer] |= set(work.witnesses[peer].liars())
            if not reason:
                averaged[peer][name] = work.mean
                if peer in work.left:
                    lefts[peer][name] = work.left[peer]
    return {
        peer: Attempt(
            roster,
            status=status[peer],
            averaged=averaged[peer],
            left=lefts[peer],
            lost=frozenset(lost[peer]),
            evidence=evidence[peer],
        )
        for peer in met
    }


class GroupMean:
    """One group's reduction, all of its members in one place.

    Args:
        plan: Who reduces what.
        name: The group.
        met: What everybody brings.

    Attributes:
        mean: Encoded, once it is reduced.
        left: What encoding it has left over with each of its reducers.
        witnesses: The members' eyes.
    """

    def __init__(self, plan: GroupPlan, name: str, met: Mapping[str, Entry]) -> None:
        self._plan, self._name, self._met = plan, name, met
        self._senders = [(peer, weight) for peer, weight in zip(plan.peers, plan.weights, strict=True) if weight > 0]
        self.mean = torch.empty(plan.format.num_bytes, dtype=torch.uint8)
        self.left: dict[str, tuple[int, Tensor]] = {}
        self.witnesses = {peer: plan.witness(peer) for peer in plan.peers}

    def reduce(self) -> str:
        """Reduce every slice; return why that failed, or ""."""
        plan = self._plan
        if len(plan.peers) == 1:
            self.mean = self._met[plan.peers[0]].encoded[self._name]
            return ""
        try:
            for reducer, messages in zip(plan.peers, plan.slices, strict=True):
                self._reduce_slice(reducer, messages)
        except (ValueError, ExchangeError) as error:
            return f"the mean cannot be sent: {error}"
        liars = {peer: seen for witness in self.witnesses.values() for peer, seen in witness.liars().items()}
        return "; ".join(f"lost {peer}: {seen.reason}" for peer, seen in liars.items())

    def _reduce_slice(self, reducer: str, messages: Sequence[Message]) -> None:
        plan, entry = self._plan, self._met[reducer]
        start, stop = plan.span(reducer)
        errors = entry.error(self._name, plan.delta_numel)
        new_errors = errors[start:stop].clone()
        for message in messages:
            span = slice(*(min(edge, plan.delta_numel) for edge in (message[0].start, message[-1].stop)))
            place = slice(message[0].byte_start, message[-1].byte_stop)
            kept = errors[span] if span.start < span.stop else None
            decoded = [self._sent(reducer, peer, message, place) for peer, _ in self._senders]
            weights = [weight for _, weight in self._senders]
            witness = self.witnesses[reducer]
            encoded, rest = reduce_message(plan.format, message, decoded, weights, kept, witness)
            self.mean[place] = encoded if entry.lie is None else entry.lie(plan.format, message, encoded)
            if rest is not None:
                new_errors[span.start - start : span.stop - start] = rest
            self._show(reducer, message, place)
        if not plan.format.is_exact:
            self.left[reducer] = start, new_errors

    def _sent(self, reducer: str, peer: str, message: Message, place: slice) -> Tensor | None:
        """Return what a member sends of a message; None where nobody can read it, but there are enough others."""
        try:
            return decode_message(self._plan.format, message, self._met[peer].encoded[self._name][place])
        except ExchangeError as error:
            witness = self.witnesses[reducer]
            witness.proves(self._plan.peers.index(peer), f"sent what is no delta: {error}")
            if not witness.can_judge:
                raise
            return None

    def _show(self, reducer: str, message: Message, place: slice) -> None:
        """Let all others look at a mean."""
        index, mean_N = self._plan.peers.index(reducer), decode_message(self._plan.format, message, self.mean[place])
        for peer, witness in self.witnesses.items():
            if peer != reducer and self._met[peer].lie is None:
                witness.receive(index, message, mean_N, self._met[peer].encoded[self._name])
