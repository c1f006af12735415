"""From one attempt at a round to what training may commit: the same rules for every kind of swarm."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.roster import SHARED, Member, derive_groups


@dataclass(frozen=True)
class Attempt:
    """Outcome of one attempt to meet and average.

    Attributes:
        roster: Entries of everybody who met; empty when nobody did.
        status: Reason of failure by group that this peer was in; "" for success.
        averaged: Mean delta by group, for the successes.
        failure: Why there is no roster.
        matchmaking_seconds: Until the roster stood.
        averaging_seconds: From there on.
    """

    roster: tuple[Member, ...] = ()
    status: Mapping[str, str] = field(default_factory=dict)
    averaged: Mapping[str, Tensor] = field(default_factory=dict)
    failure: str = ""
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


def judge(attempt: Attempt, contribution: Contribution, expected: int) -> RoundResult:
    """Return what may be committed of an attempt.

    No mean that is not finite: a part may have come from a liar, and finite deltas may overflow in their sum.
    Nothing without a roster, with fewer than half of the peers expected (the other half may be committing something
    else), or without `shared`: a slot trained against a router that was rolled back would no longer fit it.
    """
    if not attempt.roster:
        dropped = dict.fromkeys(contribution.deltas, attempt.failure)
        return RoundResult(
            roster=(contribution.member,), dropped=dropped, matchmaking_seconds=attempt.matchmaking_seconds
        )
    committed = {name: mean for name, mean in attempt.averaged.items() if torch.isfinite(mean).all()}
    dropped = {name: reason for name, reason in attempt.status.items() if reason}
    dropped |= dict.fromkeys(attempt.averaged.keys() - committed.keys(), "the mean holds NaN or infinity")
    for name in contribution.deltas:
        if name not in committed:
            dropped.setdefault(name, "this peer's anchor is not the majority's")
    if 2 * len(attempt.roster) < expected:
        committed = {}
        dropped = dict.fromkeys(contribution.deltas, f"only {len(attempt.roster)} of {expected} peers met")
    elif SHARED not in committed:
        dropped |= dict.fromkeys(committed, "shared was dropped")
        committed = {}
    return RoundResult(
        roster=attempt.roster,
        committed=committed,
        dropped=dropped,
        is_behind=contribution.member.peer_id in derive_groups(attempt.roster).behind,
        matchmaking_seconds=attempt.matchmaking_seconds,
        averaging_seconds=attempt.averaging_seconds,
    )


def alone(contribution: Contribution) -> Attempt:
    """Return the attempt of a peer that has nobody to meet: its own deltas are the mean."""
    if not contribution.member.tokens:
        return Attempt((contribution.member,), status=dict.fromkeys(contribution.deltas, "nobody trained"))
    return Attempt(
        (contribution.member,), status=dict.fromkeys(contribution.deltas, ""), averaged=dict(contribution.deltas)
    )


def averaged_bytes(result: RoundResult, contribution: Contribution) -> int:
    """Return what an all-reduce of the committed groups costs: a member sends, and receives, 2 (n - 1) / n of each."""
    members = derive_groups(result.roster).members
    sizes = {name: (len(members[name]), contribution.deltas[name].nbytes) for name in result.committed}
    return sum(int(2 * (n - 1) / n * num_bytes) for n, num_bytes in sizes.values())
