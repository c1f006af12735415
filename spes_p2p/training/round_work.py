"""What one round of local training brings to the synchronisation, and what the synchronisation gives back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from spes_p2p.swarm.interface import RoundResult
from spes_p2p.swarm.names import VectorName


@dataclass(frozen=True)
class RoundWork:
    """Local training since the anchors.

    Attributes:
        vectors: Flat fp32 parameters of `shared` and the held slots as they are now; empty if nothing was trained.
            The synchronisation turns them into deltas.
        tokens: Tokens trained.
        tokens_per_second: Speed of this peer.
        places_per_second: The same counted in positions of its sequences, with padding and what is not learned.
        seconds: Time spent training.
        moments: Flat optimizer moments of the same names, where the run averages them.
        routed: Tokens routed to each slot, over all layers; slots without tokens are left out.
        loss: Mean cross entropy, nats per token; None if no step had a finite gradient.
        steps: Local steps since this peer joined.
        total_tokens: Tokens trained since this peer joined.
        data: State of the token source.
        batches: Batches trained.
    """

    vectors: Mapping[VectorName, Tensor]
    tokens: int
    tokens_per_second: float
    seconds: float
    places_per_second: float = 0.0
    moments: Mapping[VectorName, Tensor] = field(default_factory=dict)
    routed: Mapping[int, int] = field(default_factory=dict)
    loss: float | None = None
    steps: int = 0
    total_tokens: int = 0
    data: Mapping[str, Any] = field(default_factory=dict)
    batches: int = 0


class StoredVectors(Mapping[VectorName, Tensor]):
    """Flat vectors by name, each read from its version when it is asked for: none is in memory meanwhile.

    `|` makes a new mapping, of which the right side's vectors count, as with dictionaries.

    Args:
        names: Vectors to read.
        load: Reads one; called anew each time.
    """

    def __init__(self, names: Iterable[VectorName] = (), load: Callable[[VectorName], Tensor] | None = None) -> None:
        self._loads: dict[VectorName, Callable[[], Tensor]] = {}
        for name in names:
            assert load is not None
            self._loads[name] = partial(load, name)

    def __getitem__(self, name: VectorName) -> Tensor:
        return self._loads[name]()

    def __contains__(self, name: object) -> bool:
        return name in self._loads  # without reading it, as `Mapping` would

    def __iter__(self) -> Iterator[VectorName]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)

    def __or__(self, other: Mapping[VectorName, Tensor]) -> StoredVectors:
        both = StoredVectors()
        both._loads = {**self._loads, **_loads_of(other)}
        return both

    def only(self, is_wanted: Callable[[VectorName], bool]) -> StoredVectors:
        """Return the vectors whose name is wanted."""
        wanted = StoredVectors()
        wanted._loads = {name: load for name, load in self._loads.items() if is_wanted(name)}
        return wanted


def _loads_of(vectors: Mapping[VectorName, Tensor]) -> Mapping[VectorName, Callable[[], Tensor]]:
    if isinstance(vectors, StoredVectors):
        return vectors._loads
    return {name: partial(_itself, vector) for name, vector in vectors.items()}


def _itself(vector: Tensor) -> Tensor:
    return vector


@dataclass(frozen=True)
class StateUpdate:
    """What every rank loads after the leader has synchronised.

    Attributes:
        slots: Slots to train from now on.
        vectors: Flat fp32 weights for the model, and moments for the optimizer.
        ends_at: DHT time at which the next round's training ends.
    """

    slots: tuple[int, ...]
    vectors: Mapping[VectorName, Tensor] = field(default_factory=dict)
    ends_at: float = 0.0


@dataclass(frozen=True)
class SyncStats:
    """How a synchronisation went, without its tensors: they must not outlive it.

    Attributes:
        num_members: Members of the roster.
        num_committed: Groups of this peer that were committed.
        num_dropped: Groups of this peer that were dropped.
        num_clipped: Parts of others' vectors that this peer has clipped.
        matchmaking_seconds: Time until the roster stood.
        averaging_seconds: Time from there to the last confirmed digest.
        exchange_seconds: Time spent publishing and fetching.
        stale_rounds: Largest distance in rounds between a slot of this peer's model and its holders' version.
    """

    num_members: int
    num_committed: int
    num_dropped: int
    num_clipped: int
    matchmaking_seconds: float
    averaging_seconds: float
    exchange_seconds: float
    stale_rounds: int = 0

    @classmethod
    def of(cls, result: RoundResult, num_committed: int, exchange_seconds: float, stale_rounds: int = 0) -> SyncStats:
        return cls(
            num_members=len(result.roster),
            num_committed=num_committed,
            num_dropped=len(result.dropped),
            num_clipped=result.num_clipped,
            matchmaking_seconds=max(0.0, result.matchmaking_seconds),
            averaging_seconds=max(0.0, result.averaging_seconds),
            exchange_seconds=exchange_seconds,
            stale_rounds=stale_rounds,
        )
