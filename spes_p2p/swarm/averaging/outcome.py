"""From one attempt at a round to what training may commit: the same rules for every kind of swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member, Roster


@dataclass(frozen=True)
class Attempt:
    """Outcome of one attempt to meet and average.

    Attributes:
        roster: The members that met; empty if the matchmaking failed.
        refused: Why others that met are not on the roster, by peer.
        status: Reason of failure by group that this peer was in; "" for success.
        averaged: Encoded mean by group, for the successes; valid until the next attempt.
        residuals: Rounding error of the means in this reducer's slices, by group: first element of the delta, and fp32
            values.
        lost: Members that failed in the `shared` group, as far as this peer knows.
        evidence: This peer's evidence against members.
        clipped: Parts that this peer has clipped as a reducer, over all its groups, by sender.
        failure: Why there is no roster.
        matchmaking_seconds: Until the roster stood.
        averaging_seconds: From there on.
    """

    roster: Roster = field(default_factory=Roster)
    refused: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[VectorName, str] = field(default_factory=dict)
    averaged: Mapping[VectorName, Tensor] = field(default_factory=dict)
    residuals: Mapping[VectorName, tuple[int, Tensor]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    clipped: Mapping[str, int] = field(default_factory=dict)
    failure: str = ""
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


def means_of(attempt: Attempt, contribution: Contribution, encoding: DeltaEncoding) -> RoundResult:
    """Return the means of an attempt that this peer could commit, and why the others are dropped.

    - A mean must be finite: a reducer may lie, and finite deltas may overflow in their sum.
    - `shared` must be averaged: a slot trained against a router that is rolled back would no longer fit it.

    Which of them count is decided by the round's certificate.
    """
    roster, me = attempt.roster, contribution.member.peer_id
    if not roster:
        reason = attempt.failure or "all entries of the peers that met were refused"
        return RoundResult(
            roster=Roster(),
            dropped=dict.fromkeys(contribution.deltas, reason),
            matchmaking_seconds=attempt.matchmaking_seconds,
        )
    means: dict[VectorName, Tensor] = {}
    dropped = {name: reason for name, reason in attempt.status.items() if reason and name in contribution.deltas}
    for name, data in attempt.averaged.items():
        try:
            means[name] = encoding.decode(name, roster.round + 1, data)
        except ExchangeError as error:
            dropped[name] = f"the mean cannot be used: {error}"
    for name in contribution.deltas:
        if name not in means:
            dropped.setdefault(name, attempt.refused.get(me, "this peer does not start from the last certificate"))
    if SHARED not in means:  # guard: shared-committed
        dropped |= dict.fromkeys(means, "shared was dropped")
        means = {}
    return RoundResult(
        roster=roster,
        means=means,
        dropped=dropped,
        num_clipped=sum(attempt.clipped.values()),
        matchmaking_seconds=attempt.matchmaking_seconds,
        averaging_seconds=attempt.averaging_seconds,
    )


def alone(member: Member, last: Body, encoded: Mapping[VectorName, Tensor]) -> Attempt:
    """Return the attempt of a peer that has no others to meet: what it would send is the mean."""
    status = dict.fromkeys(encoded, "" if member.tokens else "no member trained")
    return Attempt(Roster([member], last), status=status, averaged=encoded if member.tokens else {})


def averaged_bytes(result: RoundResult, me: str, encoding: DeltaEncoding) -> tuple[int, int]:
    """Return the bytes that a member receives and sends in the averaged groups.

    A holder sends, and receives, 2 (n - 1) / n of each vector, and sends each replica a share; these receive the whole.
    """
    received = sent = 0
    for name in result.means:
        num_bytes = encoding.format(name, result.roster.round + 1).num_bytes
        count, replicas = len(result.roster.members_of(name)), result.roster.replicas.get(name, ())
        averaged = int(2 * (count - 1) / count * num_bytes) if count else 0
        received += num_bytes if me in replicas else averaged
        sent += 0 if me in replicas else averaged + len(replicas) * num_bytes // max(count, 1)
    return received, sent
