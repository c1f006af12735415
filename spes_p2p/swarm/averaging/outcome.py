"""From one attempt at a round to what training may commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.averaging import Averaged
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Roster


@dataclass(frozen=True)
class RoundResult:
    """What one attempt to average has brought a member; the round's certificate decides what of it counts.

    Attributes:
        roster: Entries of all members, the same on each of them; none if no others were met.
        means: Averaged flat vectors; bit-identical on all members of a group.
        dropped: Reasons for this peer's groups that return to their anchor.
        num_clipped: Parts of others' vectors that this peer has clipped.
        matchmaking_seconds: Time until the roster was complete.
        averaging_seconds: Time from there to the last mean.
    """

    roster: Roster = field(default_factory=Roster)
    means: Mapping[VectorName, Tensor] = field(default_factory=dict)
    dropped: Mapping[VectorName, str] = field(default_factory=dict)
    num_clipped: int = 0
    matchmaking_seconds: float = 0.0
    averaging_seconds: float = 0.0


Staged = tuple[Mapping[VectorName, str], float]
"""Digests of the versions that would follow from a result, and of their kept forms, empty if it brought none of
`shared`; and the DHT time at which the next round's training should end."""


def result_of(
    roster: Roster,
    averaged: Averaged,
    contribution: Contribution,
    encoding: DeltaEncoding,
    matchmaking_seconds: float,
) -> RoundResult:
    """Return the means of an attempt that this peer could commit, and why the others are dropped.

    - A mean must be finite: a reducer may lie, and finite deltas may overflow in their sum.
    - `shared` must be averaged: a slot trained against a router that is rolled back would no longer fit it.
    """
    means: dict[VectorName, Tensor] = {}
    dropped = {name: reason for name, reason in averaged.failures.items() if name in contribution.deltas}
    for name, data in averaged.means.items():
        try:
            means[name] = encoding.decode(name, roster.round + 1, data)
        except ExchangeError as error:
            dropped[name] = f"the mean cannot be used: {error}"
    for name in contribution.deltas:
        if name not in means:
            dropped.setdefault(name, "this peer does not start from the last certificate")
    if SHARED not in means:  # guard: never
        dropped |= dict.fromkeys(means, "shared was dropped")
        means = {}
    return RoundResult(
        roster=roster,
        means=means,
        dropped=dropped,
        num_clipped=sum(averaged.clipped.values()),
        matchmaking_seconds=matchmaking_seconds,
        averaging_seconds=averaged.seconds,
    )


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
