"""A synchronisation that runs while the next round trains, and how its result is applied.

A peer brings its parameters `theta_s` to the synchronisation and trains on to `theta`. The new anchor A is applied as
`theta + (A - theta_s)`: the steps made meanwhile are kept, and the next round's delta, A minus the parameters at its
end, contains them. If a group was dropped, A is the old anchor: the same formula takes back the round's work and keeps
the steps made since.

Source: the overlapped communication of Streaming DiLoCo (https://arxiv.org/abs/2501.18512), without its mixing of local
and global parameters; hivemind's `delta_rule_averaging` does the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.round_work import RoundWork, StateUpdate, StoredVectors

log = logging.getLogger(__name__)

T = TypeVar("T")

POLL_SECONDS = 60.0
"""Interval at which a peer that waits for a synchronisation checks whether it has ended."""


class Task(Future[T]):
    """Work in another thread."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, at most so long; return whether it has."""
        return bool(wait([self], seconds).done)


class ThreadTask(Task[T]):
    """A task in a daemon thread, so that an interrupted peer does not stay for its deadlines.

    Args:
        work: What to do. It must touch neither the model nor a device: training uses both.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        super().__init__()
        threading.Thread(target=self._run, args=(work,), name="synchronisation", daemon=True).start()

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
