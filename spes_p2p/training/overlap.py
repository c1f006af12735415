"""A synchronisation that runs while training goes on, and what its result means for parameters that moved meanwhile.

With theta_s the parameters that a peer brought to the round's end and theta those that it has trained on to since, the
new anchor A is applied as `theta + (A - theta_s)`: the steps since are kept, and the next round's delta, `A` minus the
parameters at its end, is those steps and the ones to come. Where a group was dropped, A is the old anchor, and the same
formula takes back the round's work and keeps the steps since.

Source: the overlapped communication of Streaming DiLoCo (https://arxiv.org/abs/2501.18512), without its mixing of local
and global parameters; hivemind's `delta_rule_averaging` is the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from spes_p2p.swarm.roster import SHARED, moments_name, slot_name
from spes_p2p.training.reports import Work
from spes_p2p.training.round_work import Trained, Update

log = logging.getLogger(__name__)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LOOK_SECONDS = 60.0
"""How often who waits for a synchronisation looks whether it has ended."""


class Task(Protocol[T_co]):
    """Work under way in another thread."""

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""

    def wait(self, seconds: float) -> bool:
        """Wait until it has ended, for so long at most; return whether it has."""

    def result(self) -> T_co:
        """Return what the work returned, once it has ended, or raise what it raised."""


class ThreadTask(Generic[T]):
    """A task in a thread of this process.

    The thread is a daemon's: all it waits for has a deadline, but a peer that is interrupted does not stay for that.

    Args:
        work: What to do. It must touch neither the model nor a device, which are training's.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._value: T
        self._error: BaseException | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="synchronisation", daemon=True).start()

    def _run(self) -> None:
        try:
            self._value = self._work()
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self._ended.set()

    @property
    def is_done(self) -> bool:
        return self._ended.is_set()

    def wait(self, seconds: float) -> bool:
        return self._ended.wait(seconds)

    def result(self) -> T:
        if self._error is not None:
            raise self._error
        return self._value


@dataclass(frozen=True)
class Correction:
    """What a finished synchronisation changes in a model that was trained on meanwhile.

    Attributes:
        update: What to do all the same; its `flats` are those that replace what is there.
        shifts: By name, new anchor minus what was brought; added to what is there.
        moments: Averaged optimizer moments of the same names, where there are any, as of the round's end.
        before: The peer's own then.
    """

    update: Update
    shifts: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    before: Mapping[str, Tensor]

    @classmethod
    def of(cls, update: Update, trained: Trained) -> Correction:
        """Return what an update means; slots that are held no longer are not in it, new ones replace what is there.

        Whatever was not finite when it was brought is replaced, too, or it would never be finite again.
        """
        held = {SHARED, *map(slot_name, update.slots)}
        moved = {name: update.flats[name] - local for name, local in trained.local.items() if name in held}
        shifts = {name: shift for name, shift in moved.items() if shift.isfinite().all()}
        moments = {name: update.flats[moments_name(name)] for name in shifts if moments_name(name) in update.flats}
        corrected = {*shifts, *map(moments_name, moments)}
        return cls(
            Update(update.slots, {n: flat for n, flat in update.flats.items() if n not in corrected}, update.ends_at),
            shifts,
            moments,
            {name: trained.moments[name] for name in moments},
        )


class Flight:
    """A synchronisation on its way, as each rank sees it.

    Args:
        work: The round's work that is being synchronised.
        delay_steps: Local steps before its result may be applied.
        task: The leader's; None on other ranks.
    """

    def __init__(self, work: Work, delay_steps: int, task: Task[Correction] | None) -> None:
        self.work, self._delay, self._task = work, delay_steps, task
        self._steps = 0
        self.optimizer_steps = 0

    def advance(self, tokens: int) -> None:
        """Take note of a local step; one without tokens has changed nothing."""
        self._steps += 1
        self.optimizer_steps += tokens > 0

    def is_due(self, now: float | None) -> bool:
        """Tell whether the result is to be applied; on the leader.

        Before the delay is over, a failure is, and what says that the round has ended already.

        Args:
            now: DHT time; None where a round does not end by it.

        Raises:
            SpesError: what the synchronisation raised.
        """
        assert self._task is not None
        if not self._task.is_done:
            return False
        update = self._task.result().update
        return self._steps >= self._delay or (now is not None and update.ends_at <= now)

    def land(self) -> Correction:
        """Wait for the result, as long as it takes: whoever has lost all others waits for them; on the leader.

        Raises:
            SpesError: what the synchronisation raised.
        """
        assert self._task is not None
        while not self._task.wait(LOOK_SECONDS):
            pass
        return self._task.result()

    def abandon(self, seconds: float) -> None:
        """Give a synchronisation whose result nobody here will use so long to end."""
        if self._task is not None and not self._task.is_done:
            log.info("letting a synchronisation end first, at most %.0f s; Ctrl-C again ends at once", seconds)
            self._task.wait(seconds)
