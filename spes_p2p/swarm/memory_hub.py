"""Where the peers of one process meet: records, versions, and the means of whoever is there."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.outcome import Attempt
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.reduce import GroupPlan, decode_message, reduce_message, weighted_mean
from spes_p2p.swarm.roster import Member, derive_groups, uplinks
from spes_p2p.swarm.versions import Version
from spes_p2p.swarm.virtual_clock import VirtualClock
from spes_p2p.swarm.wire import Wire


@dataclass(frozen=True)
class Entry:
    """What a peer brings to a meeting.

    Attributes:
        member: Its roster entry.
        encoded: Its vectors as they travel.
        wire: How they do.
        errors: What earlier means have left over with it, by group.
    """

    member: Member
    encoded: Mapping[str, Tensor]
    wire: Wire
    errors: dict[str, Tensor]

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
    """Return what each of those who met gets out of it, by peer; the entries are left as they are."""
    roster = tuple(met[peer].member for peer in sorted(met))
    groups = derive_groups(roster)
    tokens, speeds = {member.peer_id: float(member.tokens) for member in roster}, uplinks(roster)
    status: dict[str, dict[str, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[str, Tensor]] = {peer: {} for peer in met}
    lefts: dict[str, dict[str, tuple[int, Tensor]]] = {peer: {} for peer in met}
    for name, members in groups.members.items():
        weights = [tokens[peer] for peer in members]
        format = met[members[0]].wire.format(name, groups.round + 1)
        plan = GroupPlan.of(members, weights, [speeds[peer] for peer in members], format)
        reason = "" if sum(weights) else "nobody trained"
        mean = None
        if not reason:
            mean, left, reason = _reduce(plan, name, met)
        for peer in members:
            status[peer][name] = reason
            if mean is not None and not reason:
                averaged[peer][name] = mean
                if peer in left:
                    lefts[peer][name] = left[peer]
    return {peer: Attempt(roster, status=status[peer], averaged=averaged[peer], left=lefts[peer]) for peer in met}


def _reduce(plan: GroupPlan, name: str, met: Mapping[str, Entry]) -> tuple[Tensor, dict[str, tuple[int, Tensor]], str]:
    """Return a group's encoded mean, what that left over with each of its reducers, and why it failed."""
    if len(plan.peers) == 1:
        return met[plan.peers[0]].encoded[name], {}, ""
    senders = [(peer, weight) for peer, weight in zip(plan.peers, plan.weights, strict=True) if weight > 0]
    weights = [weight for _, weight in senders]
    mean, left = torch.empty(plan.format.num_bytes, dtype=torch.uint8), {}
    try:
        if plan.format.is_exact:
            values = [plan.format.decode(met[peer].encoded[name]) for peer, _ in senders]
            return plan.format.encode(weighted_mean(values, weights)), {}, ""
        for reducer, messages in zip(plan.peers, plan.slices, strict=True):
            errors = met[reducer].error(name, plan.delta_numel)
            start, stop = plan.span(reducer)
            new_errors = errors[start:stop].clone()
            for message in messages:
                span = slice(*(min(edge, plan.delta_numel) for edge in (message[0].start, message[-1].stop)))
                place = slice(message[0].byte_start, message[-1].byte_stop)
                decoded = [decode_message(plan.format, message, met[peer].encoded[name][place]) for peer, _ in senders]
                kept = errors[span] if span.start < span.stop else None
                mean[place], rest = reduce_message(plan.format, message, decoded, weights, kept)
                if rest is not None:
                    new_errors[span.start - start : span.stop - start] = rest
            left[reducer] = start, new_errors
    except (ValueError, ExchangeError) as error:
        return mean, {}, f"the mean cannot be sent: {error}"
    return mean, left, ""
