"""What the peers of one process share: records, versions, meetings, and the certificates of their rounds."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from spes_p2p.codecs.vectors import digest
from spes_p2p.errors import ExchangeError
from spes_p2p.sim.clock import VirtualClock
from spes_p2p.swarm.averaging.audit import Auditor, Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.outcome import Attempt
from spes_p2p.swarm.averaging.partition import (
    GroupPlan,
    Message,
    bytes_of,
    decode_message,
    encode_message,
    reduce_message,
)
from spes_p2p.swarm.certificate import (
    MAX_VOTERS,
    Body,
    MemberEntry,
    Result,
    genesis,
    make_body,
    max_leaving,
    roster_digest,
)
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.interface import RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import MAX_SLOTS, Claim, Record
from spes_p2p.swarm.roster import Member, Roster


@dataclass(frozen=True)
class Entry:
    """A peer's input to a round's averaging.

    Attributes:
        member: The peer's roster entry.
        encoded: The peer's vectors in their encoding.
        encoding: The encoding of all vectors.
        errors: Rounding errors of the means that the peer has reduced so far, by group.
        lie: Factor of the deltas in the means that a dishonest peer reduces; it accuses no other. None for an honest
            one.
    """

    member: Member
    encoded: Mapping[VectorName, Tensor]
    encoding: DeltaEncoding
    errors: dict[VectorName, Tensor]
    lie: float | None = None


class MemoryHub:
    """The state that the peers of one process share; only one of them runs at a time.

    Args:
        run_id: The run's name, for versions.
        matchmaking_seconds: Time that peers wait for others beyond a round's start.
        lease_seconds: Time that records outlive a peer that has vanished.
        founder: Id of the founding peer; by default the first peer that comes.
        min_peers: Most members that vote from the first certificate on; by default all that confirm it.
        num_slots: Experts per layer of the run's model.
        shrink_seconds: Time after which the run goes on without half of the voters or more.
    """

    def __init__(
        self,
        run_id: str,
        matchmaking_seconds: float = 3.0,
        lease_seconds: float = 30.0,
        *,
        founder: str = "",
        min_peers: int = MAX_VOTERS,
        num_slots: int = MAX_SLOTS,
        shrink_seconds: float = 600.0,
    ) -> None:
        self.run_id = run_id
        self.matchmaking_seconds = matchmaking_seconds
        self.lease_seconds = lease_seconds
        self.clock = VirtualClock()
        self.records: dict[type[Record], dict[str, tuple[Record, float]]] = {}
        self.bundles: dict[str, dict[VectorName, tuple[Version, Tensor]]] = {}
        self.bytes_out: dict[str, int] = {}
        self._flats: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Entry] = {}
        self._attempts: dict[str, Attempt] = {}
        self.bodies: list[Body] = []
        """Of the certificates, from the run's genesis on."""
        self._num_slots = num_slots
        if founder:
            self.found(founder)
        self.attempt = 0
        self._min_peers = min_peers
        self._shrink_seconds = shrink_seconds
        self._gone: set[str] = set()
        self._confirmations: dict[str, Result] = {}
        self._decided: set[str] = set()
        """Peers that have a result of this attempt, or have given it up."""
        self._ended: set[str] = set()
        self._averaged: Callable[[], None] = lambda: None
        """Decides on the last roster of this attempt once all of its members have a result, or have ended."""
        self._gave_up: set[str] = set()

    def copy(self, flat_N: Tensor, digest: str) -> Tensor:
        """Return a copy of a vector, shared by all peers that publish the same digest."""
        kept = self._flats.get(digest)
        if kept is None:
            kept = self._flats[digest] = flat_N.clone()
        return kept

    def meet(self, entry: Entry, expected: int, deadline: float) -> Attempt:
        """Wait for `expected` peers until `deadline` (virtual seconds); return this peer's outcome."""
        me, began = entry.member.peer_id, self.clock.now()
        self._waiting[me] = entry
        while me not in self._attempts:
            if len(self._waiting) >= expected or self.clock.now() >= deadline:
                self._assemble()
            else:
                self.clock.wait(deadline - self.clock.now())
        return replace(self._attempts.pop(me), matchmaking_seconds=self.clock.now() - began)

    def found(self, peer: str) -> None:
        """Make a peer the founder, unless there is one."""
        if not self.bodies:
            self.bodies.append(genesis(self.run_id, peer, digest(self.run_id.encode()), self._num_slots))

    def leave(self, peer: str) -> None:
        """Go on without a voter that says goodbye."""
        self._gone.add(peer)
        self._follow_quorum()

    def end(self, peer: str) -> None:
        """Wait for no result of a peer that has ended, perhaps between averaging and the decision."""
        self._ended.add(peer)
        self._averaged()
        self._follow_quorum()

    def enter(self, peer: str) -> None:
        """Take a peer's part in rounds from now on, also if it has ended before."""
        self._ended.discard(peer)
        self.found(peer)

    def decide(
        self,
        peer: str,
        last: Body,
        attempt: int,
        result: RoundResult,
        digests: Mapping[VectorName, str],
        ends_at: float,
    ) -> Body | None:
        """Decide on a round once all members of a roster have confirmed their results; None if too few voters agree.

        No message is lost here, so a certificate needs no votes: all peers see the same body.
        """
        members = result.roster.entries if result.roster else ()
        if self.bodies[-1].digest == last.digest and self.attempt == attempt:
            if SHARED in digests:
                self._confirmations[peer] = Result(
                    run=last.run,
                    round=last.round + 1,
                    previous=last.digest,
                    attempt=attempt,
                    peer_id=peer,
                    roster=roster_digest(members),
                    digests={str(name): each for name, each in digests.items()},
                )
            else:
                self._gave_up.add(peer)
            self._decided.add(peer)
            if members:
                self._averaged = partial(self._certify, last, members, ends_at)
                self._averaged()
            self._follow_quorum()
        shrinks_at = self.clock.now() + self._shrink_seconds
        while self.bodies[-1].digest == last.digest and self.attempt == attempt:
            self.clock.wait(shrinks_at - self.clock.now())
            if self.clock.now() >= shrinks_at:
                claims = self.records.get(Claim, {})
                here = {voter for voter, (_, expires_at) in claims.items() if expires_at > self.clock.now()}
                self._gone |= set(last.voters) - here
                self._follow_quorum()
                shrinks_at = math.inf
        return self.bodies[last.round + 1] if len(self.bodies) > last.round + 1 else None

    def _absent(self, last: Body) -> list[str]:
        """Return the voters to go on without, if they are half or more."""
        gone = [peer for peer in last.voters if peer in self._gone]
        return gone if len(last.voters) > len(gone) >= len(last.voters) / 2 else []

    def _certify(self, last: Body, members: Sequence[MemberEntry], ends_at: float) -> None:
        if not {member.peer_id for member in members} <= self._decided | self._ended:
            return
        roster, absent = roster_digest(members), self._absent(last)
        gone = [peer for peer in last.voters if peer in self._gone]
        body = make_body(
            last,
            members,
            [each for each in self._confirmations.values() if each.roster == roster],
            ends_at=ends_at,
            min_peers=self._min_peers,
            removed=[] if absent else gone[: max_leaving(len(last.voters))],
            shrunk=absent,
        )
        if body is None:
            self._gave_up |= {member.peer_id for member in members}
        else:
            self.bodies.append(body)
            self._open(0)

    def _follow_quorum(self) -> None:
        """Open the next attempt once a quorum of the voters has given this one up."""
        last = self.bodies[-1]
        absent = self._absent(last)
        quorum = len(last.voters) - len(absent) if absent else last.quorum
        if len(self._gave_up & set(last.voters)) >= quorum:
            self._open(self.attempt + 1)

    def _open(self, attempt: int) -> None:
        self.attempt = attempt
        self._confirmations.clear()
        self._decided.clear()
        self._averaged = lambda: None
        self._gave_up.clear()
        self.clock.notify_all()

    def _assemble(self) -> None:
        met, self._waiting = self._waiting, {}
        if len(met) == 1:
            self._attempts |= {peer: Attempt(failure="no roster: no other peer came") for peer in met}
        else:
            self._attempts |= average_entries(met, self.bodies[-1])
        self.clock.notify_all()


def average_entries(met: Mapping[str, Entry], last: Body, attempt: int = 0) -> dict[str, Attempt]:
    """Return each peer's outcome of averaging these entries, which stay unchanged.

    As in a real swarm, a reducer that is caught lying is excluded and the rest average again.
    """
    attempts = _attempt(met, last, attempt)
    liars = {peer for attempt in attempts.values() for peer in attempt.lost}
    rest = {peer: entry for peer, entry in met.items() if peer not in liars}
    if not liars or len(rest) < 2:
        return attempts
    failure = f"lost {' and '.join(sorted(liars))}"
    second = {
        peer: replace(each, evidence={**attempts[peer].evidence, **each.evidence})
        for peer, each in average_entries(rest, last, attempt).items()
    }
    return second | {peer: Attempt(failure=failure) for peer in liars}


def _attempt(met: Mapping[str, Entry], last: Body, number: int) -> dict[str, Attempt]:
    roster = Roster((met[peer].member for peer in sorted(met)), last)
    status: dict[str, dict[VectorName, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[VectorName, Tensor]] = {peer: {} for peer in met}
    residuals: dict[str, dict[VectorName, tuple[int, Tensor]]] = {peer: {} for peer in met}
    evidence: dict[str, dict[str, Evidence]] = {peer: {} for peer in met}
    lost: dict[str, set[str]] = {peer: set() for peer in met}
    for name, members in roster.groups.items():
        format = met[members[0]].encoding.format(name, roster.round + 1)
        plan = GroupPlan.in_roster(roster, members, format, roster.replicas.get(name, ()), number)
        work = GroupMean(plan, name, met)
        reason = work.reduce() if any(plan.weights) else "no member trained"
        for peer in plan.peers:
            status[peer][name] = reason
            evidence[peer] |= work.auditors[peer].evidence()
            if reason.startswith("lost") and name == SHARED:
                lost[peer] |= set(work.auditors[peer].liars())
            if not reason:
                averaged[peer][name] = work.mean
                if peer in work.residuals:
                    residuals[peer][name] = work.residuals[peer]
    return {
        peer: Attempt(
            roster,
            status=status[peer],
            averaged=averaged[peer],
            residuals=residuals[peer],
            lost=frozenset(lost[peer]),
            evidence=evidence[peer],
        )
        for peer in met
    }


class GroupMean:
    """One group's all-reduce, with all of its members in one process.

    Attributes:
        mean: The encoded mean, once it is reduced.
        residuals: Rounding error of the mean, by reducer: first element, and fp32 values.
        auditors: Each member's auditor.
    """

    def __init__(self, plan: GroupPlan, name: VectorName, met: Mapping[str, Entry]) -> None:
        self._plan = plan
        self._name = name
        self._met = met
        self.mean = torch.empty(plan.format.num_bytes, dtype=torch.uint8)
        self.residuals: dict[str, tuple[int, Tensor]] = {}
        self.auditors = {peer: Auditor(plan, peer) for peer in plan.peers}

    def reduce(self) -> str:
        """Reduce every slice; return the reason of a failure, or ""."""
        plan = self._plan
        if plan.is_sole:
            (holder,) = set(plan.peers) - plan.replicas
            self.mean = self._met[holder].encoded[self._name]
            return ""
        try:
            for reducer, messages in zip(plan.peers, plan.slices, strict=True):
                self._reduce_slice(reducer, messages)
        except (ValueError, ExchangeError) as error:
            return f"the mean cannot be sent: {error}"
        liars = {peer: seen for auditor in self.auditors.values() for peer, seen in auditor.liars().items()}
        return "; ".join(f"lost {peer}: {seen.reason}" for peer, seen in liars.items())

    def _reduce_slice(self, reducer: str, messages: Sequence[Message]) -> None:
        plan, entry = self._plan, self._met[reducer]
        start, stop = plan.span(reducer)
        errors = entry.errors.setdefault(self._name, torch.zeros(plan.delta_numel))
        new_errors = errors[start:stop].clone()
        auditor, peers = self.auditors[reducer], plan.peers
        for message in messages:
            span, place = plan.residual_span(message), bytes_of(message)
            sent = {sender: self._met[peers[sender]].encoded[self._name][place] for sender in plan.senders}
            decoded = [auditor.decode(sender, message, data) for sender, data in sent.items()]
            encoded, residual = reduce_message(plan, message, decoded, errors[span], auditor.weigh)
            if entry.lie not in (None, 1.0):
                values = decode_message(plan.format, message, encoded)
                factors = torch.cat([torch.full((p.numel,), 1.0 if p.segment else entry.lie) for p in message])
                encoded = encode_message(plan.format, message, values * factors)
            self.mean[place] = encoded
            new_errors[span.start - start : span.stop - start] = residual
            mean_N = decode_message(plan.format, message, self.mean[place])
            for peer, other in self.auditors.items():
                if peer != reducer and self._met[peer].lie is None and self._name in self._met[peer].encoded:
                    other.observe_mean(peers.index(reducer), message, mean_N, self._met[peer].encoded[self._name])
        if not plan.format.is_exact:
            self.residuals[reducer] = start, new_errors
