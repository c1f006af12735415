"""What one round of local training brings to the synchronisation, and what the synchronisation gives back.

A synchronisation may run while the next round trains (`PendingSync`). A peer brings its parameters `theta_s` to it and
trains on to `theta`. The new anchor A is applied as `theta + (A - theta_s)`: the steps made meanwhile are kept, and the
next round's delta, A minus the parameters at its end, contains them. If a group was dropped, A is the old anchor: the
same formula takes back the round's work and keeps the steps made since.

Source: the overlapped communication of Streaming DiLoCo (https://arxiv.org/abs/2501.18512), without its mixing of local
and global parameters; hivemind's `delta_rule_averaging` does the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from spes_p2p.swarm.interface import RoundResult
from spes_p2p.swarm.names import SHARED, VectorName

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 60.0
"""Interval at which a peer that waits for a synchronisation checks whether it has ended."""


@dataclass(frozen=True)
class Dealt:
    """The batches of shared data that a peer may train in a round.

    Attributes:
        round: The round.
        source: Digest of the body that it was dealt from.
        ranges: The batches, in the order in which they are trained.
        spare: The spare range that they are; None if they are this peer's own.
    """

    round: int
    source: str
    ranges: tuple[range, ...]
    spare: int | None

    def words(self, drawn: int) -> str:
        """Return the first batches, as they are logged: first and last of each range."""
        words = []
        for each in self.ranges:
            some = each[:drawn]
            drawn -= len(some)
            if some:
                words.append(f"{some[0]}-{some[-1]}")
        return ", ".join(words) or "none"


@dataclass(frozen=True)
class RoundWork:
    """Local training since the anchors.

    Attributes:
        vectors: Flat fp32 parameters of `shared` and the held slots as they are now; empty if nothing was trained.
            Unless rounds overlap, the synchronisation turns them into deltas.
        tokens: Tokens trained.
        tokens_per_second: Speed of this peer.
        places_per_second: The same counted in positions of its sequences, with padding and what is not learned.
        seconds: Time spent training.
        moments: Flat optimizer moments of the same names, where the run averages or this round publishes them.
        routed: Tokens routed to each slot, over all layers; slots without tokens are left out.
        loss: Mean cross entropy, nats per token; None if no step had a finite gradient.
        steps: Local steps since this peer joined.
        total_tokens: Tokens trained since this peer joined.
        data: State of the token source.
        ended: Second of this peer's clock at which training ended.
        waited_seconds: Time for which training stood still until the previous synchronisation had ended.
        dealt: The range of shared data that was trained; None if peers do not share data.
        drawn: Batches of it that were trained.
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
    ended: float = 0.0
    waited_seconds: float = 0.0
    dealt: Dealt | None = None
    drawn: int = 0


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


class Task(Future[T]):
    """Work in another thread."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long; return whether it has."""
        return bool(wait([self], seconds).done)


class ThreadTask(Task[T]):
    """A task in a daemon thread, so that an interrupted process does not stay for its deadlines.

    Args:
        work: What to do. Beside training it must touch neither the model nor a device: training uses both.
        name: The thread's name.
    """

    def __init__(self, work: Callable[[], T], name: str = "synchronisation") -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(work,), name=name, daemon=True).start()

    def _run(self, work: Callable[[], T]) -> None:
        try:
            self.set_result(work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self.set_exception(error)


@dataclass(frozen=True)
class Correction:
    """What a finished synchronisation changes in a model that was trained on meanwhile.

    Attributes:
        update: What replaces the present state.
        shifts: New anchor minus what was brought; added to the present parameters.
        moments: Averaged optimizer moments of the same names, as of the round's end.
        before: This peer's own moments then.
    """

    update: StateUpdate
    shifts: Mapping[VectorName, Tensor]
    moments: Mapping[VectorName, Tensor]
    before: Mapping[VectorName, Tensor]

    @classmethod
    def of(cls, update: StateUpdate, work: RoundWork) -> Correction:
        """Split an update into what is added to the parameters and what replaces them.

        Released slots are in neither. Adopted slots are replaced, and so are vectors that were not finite when they
        were brought: a shift would keep them so.
        """
        held = {SHARED, *map(VectorName.of_slot, update.slots)}
        moved = {name: update.vectors[name] - own for name, own in work.vectors.items() if name in held}
        shifts = {name: shift for name, shift in moved.items() if shift.isfinite().all()}
        moments = {name: update.vectors[name.moments] for name in shifts if name.moments in update.vectors}
        corrected = {*shifts, *(name.moments for name in moments)}
        replaced = (StoredVectors() | update.vectors).only(lambda name: name not in corrected)
        before = {name: work.moments[name] for name in moments}
        return cls(StateUpdate(update.slots, replaced, update.ends_at), shifts, moments, before)


class PendingSync:
    """A synchronisation under way, as each rank sees it.

    Args:
        work: The round's work that is being synchronised.
        delay_steps: Local steps before its result may be applied.
        task: The leader's task; None on other ranks.
    """

    def __init__(self, work: RoundWork, delay_steps: int, task: Task[Correction] | None) -> None:
        self.work = work
        self.optimizer_steps = 0
        self._delay = delay_steps
        self._task = task
        self._steps = 0

    def advance(self, tokens: int) -> None:
        """Count a local step; a step without tokens has changed nothing."""
        self._steps += 1
        self.optimizer_steps += tokens > 0

    def is_due(self, now: float | None) -> bool:
        """Tell, on the leader, whether the result is to be applied.

        A failure is due before the delay is over, and so is a result which says that the round has ended already.

        Args:
            now: DHT time; None where rounds do not end by the clock.

        Raises:
            SpesError: what the synchronisation raised.
        """
        assert self._task is not None
        if not self._task.done():
            return False
        update = self._task.result().update
        return self._steps >= self._delay or (now is not None and update.ends_at <= now)

    def land(self) -> Correction:
        """Wait, on the leader rank, for the result; if all others are lost, for `round.shrink_seconds` or longer.

        Raises:
            SpesError: what the synchronisation raised.
        """
        assert self._task is not None
        while not self._task.wait(POLL_SECONDS):
            pass
        return self._task.result()

    def abandon(self, seconds: float) -> None:
        """Give a synchronisation whose result is not needed here any more so long to end."""
        if self._task is not None and not self._task.done():
            log.info("letting a synchronisation end first, at most %.0f s; Ctrl-C again ends at once", seconds)
            self._task.wait(seconds)
