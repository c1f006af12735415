"""What passes between a peer's rounds and its synchroniser."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from spes_p2p.swarm.interface import RoundResult


@dataclass(frozen=True)
class Update:
    """What every rank must do after the leader has synchronised.

    Attributes:
        slots: Slots to train from now on.
        flats: Flat fp32 weights to put into the model, by name, and moments to put into its optimizer.
        ends_at: DHT time at which the next round's training stops.
    """

    slots: tuple[int, ...]
    flats: Mapping[str, Tensor] = field(default_factory=dict)
    ends_at: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What this peer brings to the end of a round.

    Attributes:
        local: Flat parameters of `shared` and the held slots as they are now.
        tokens: Tokens trained since the anchors.
        tokens_per_second: This peer's speed.
        seconds: Spent training them.
        moments: Flat optimizer moments of the same groups, where the run averages or keeps them.
        routed: Tokens routed to each slot meanwhile, over all layers; those that are not in it got none.
    """

    local: Mapping[str, Tensor]
    tokens: int
    tokens_per_second: float
    seconds: float
    moments: Mapping[str, Tensor] = field(default_factory=dict)
    routed: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Synchronised:
    """How a synchronisation went; without its tensors, which must not outlive it.

    Attributes:
        num_members: Members of the roster.
        num_committed: Groups of this peer that were committed.
        num_dropped: Groups that were not.
        matchmaking_seconds: As in the averaging's result.
        averaging_seconds: As in the averaging's result.
        exchange_seconds: Spent on everything after it.
        stale_rounds: Most rounds between a slot of this peer's model and its holders', behind or ahead.
    """

    num_members: int
    num_committed: int
    num_dropped: int
    matchmaking_seconds: float
    averaging_seconds: float
    exchange_seconds: float
    stale_rounds: int = 0

    @classmethod
    def of(cls, result: RoundResult, exchange_seconds: float, stale_rounds: int = 0) -> Synchronised:
        return cls(
            num_members=len(result.roster),
            num_committed=len(result.committed),
            num_dropped=len(result.dropped),
            matchmaking_seconds=max(0.0, result.matchmaking_seconds),
            averaging_seconds=max(0.0, result.averaging_seconds),
            exchange_seconds=exchange_seconds,
            stale_rounds=stale_rounds,
        )
