"""From one attempt at a round to what training may commit: the same rules for every kind of swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.roster import SHARED, Member, Roster, derive_groups, missing_votes

ATTEMPTS = 2


@dataclass(frozen=True)
class Attempt:
    """Outcome of one attempt to meet and average.

    Attributes:
        roster: Entries of everybody who met; empty when nobody did.
        refused: Why others who met are not on it.
        status: Reason of failure by group that this peer was in; "" for success.
        averaged: Encoded mean by group, for the successes.
        left: What encoding the means has left over of the slices that this peer reduced: first element, and errors.
        lost: Members that this peer knows to be lost.
        evidence: What this peer holds against members.
        failure: Why there is no roster.
        is_alone: Nobody was there to meet, and what this peer has counts without anybody's vote.
        matchmaking_seconds: Until the roster stood.
        averaging_seconds: From there on.
    """

    roster: Roster = Roster()
    refused: Mapping[str, str] = field(default_factory=dict)
    status: Mapping[str, str] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)
    left: Mapping[str, tuple[int, Tensor]] = field(default_factory=dict)
    lost: frozenset[str] = frozenset()
    evidence: Mapping[str, Evidence] = field(default_factory=dict)
    failure: str = ""
    is_alone: bool = False
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


def prepare(contribution: Contribution, expected: int, **changes: object) -> Contribution:
    """Return a contribution as it enters a round: its author counts on those it expects, if it knows nothing better."""
    member = contribution.member
    changes["electorate"] = member.electorate or expected
    return replace(contribution, member=member.model_copy(update=changes))


def decide_outcome(attempt: Attempt, contribution: Contribution, encoding: DeltaEncoding) -> RoundResult:
    """Return what may be committed of an attempt.

    No mean that is not finite: a part may have come from a liar, and finite deltas may overflow in their sum.
    Nothing without a roster, with no more than half of the votes (the other half may be committing something else), or
    without `shared`: a slot trained against a router that was rolled back would no longer fit it. Who averages `alone`
    has been told that it may; whom a leader gathered alone, as all others' entries are refused, has not.
    """
    if not attempt.roster:
        dropped = dict.fromkeys(contribution.deltas, attempt.failure or "everybody who met was refused")
        return RoundResult(
            roster=Roster([contribution.member]), dropped=dropped, matchmaking_seconds=attempt.matchmaking_seconds
        )
    groups = derive_groups(attempt.roster)
    me = contribution.member.peer_id
    committed: dict[str, Tensor] = {}
    dropped = {name: reason for name, reason in attempt.status.items() if reason}
    for name, data in attempt.averaged.items():
        try:
            committed[name] = encoding.decode(name, groups.round + 1, data)
        except ExchangeError as error:
            dropped[name] = f"the mean cannot be used: {error}"
    for name in contribution.deltas:
        if name not in committed:
            dropped.setdefault(name, attempt.refused.get(me, "this peer's anchor is not the majority's"))
    if (
        not attempt.is_alone  # guard: gathered-alone
        and (reason := missing_votes(attempt.roster))  # guard: quorum-votes
    ):
        committed, dropped = {}, dict.fromkeys(contribution.deltas, reason)
    elif SHARED not in committed:  # guard: shared-committed
        dropped |= dict.fromkeys(committed, "shared was dropped")
        committed = {}
    return RoundResult(
        roster=attempt.roster,
        committed=committed,
        encoded={name: delta for name in committed if (delta := encoding.delta_of(name, attempt.averaged[name]))},
        dropped=dropped,
        is_behind=me in groups.behind,
        matchmaking_seconds=attempt.matchmaking_seconds,
        averaging_seconds=attempt.averaging_seconds,
    )


def alone(member: Member, encoded: Mapping[str, Tensor]) -> Attempt:
    """Return the attempt of a peer that has nobody to meet: what it would send is the mean."""
    if not member.tokens:
        return Attempt(Roster([member]), status=dict.fromkeys(encoded, "nobody trained"), is_alone=True)
    return Attempt(Roster([member]), status=dict.fromkeys(encoded, ""), averaged=dict(encoded), is_alone=True)


def averaged_bytes(result: RoundResult, encoding: DeltaEncoding) -> int:
    """Return what an all-reduce of the committed groups costs: a member sends, and receives, 2 (n - 1) / n of each."""
    groups = derive_groups(result.roster)
    sizes = {
        name: (len(groups.members[name]), encoding.format(name, groups.round + 1).num_bytes)
        for name in result.committed
    }
    return sum(int(2 * (n - 1) / n * num_bytes) for n, num_bytes in sizes.values())
