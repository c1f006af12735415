"""Virtual time: every peer has a thread, exactly one runs at a time, and virtual times alone decide the order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from spes_p2p.errors import SimulationError

EPOCH_SECONDS = 1_000_000.0
"""Start of virtual time; not 0, which means "unknown" in records."""
STUCK_SECONDS = 3600.0
"""Virtual time without any work or notification after which the simulation counts as stuck."""


class Abandoned(BaseException):
    """Ends a peer's thread after a failure in another thread; not an Exception, so that no handler catches it."""


class VirtualClock:
    """Gives turns to the peers' threads: the earliest wake time runs next, and of equal times the lowest index.

    A running thread keeps its turn until it lets time pass or ends. Data that peers share therefore need no lock, and
    the result does not depend on the scheduling of threads. Outside
    `run` the caller is the only thread, and time passes as it asks.
    """

    def __init__(self) -> None:
        self._now = self._active_at = EPOCH_SECONDS
        self._running: int | None = None
        self._wakes: dict[int, float] = {}
        self._listening: set[int] = set()
        self._batons: dict[int, threading.Lock] = {}
        self._failure: BaseException | None = None

    def now(self) -> float:
        """Return the virtual time in seconds: DHT time and every peer's monotonic clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let the calling peer work for `seconds`; peers with earlier wake times run meanwhile."""
        self._pause(self._now + seconds)
        self._active_at = self._now

    def wait(self, seconds: float) -> None:
        """Wait for a notification, at most `seconds`, which may be infinite."""
        self._pause(self._now + seconds, listening=True)

    def notify_all(self) -> None:
        """Wake all waiting threads at the present time."""
        self._active_at = self._now
        self._wakes.update(dict.fromkeys(self._listening, self._now))
        self._listening.clear()

    def run(self, lives: Sequence[Callable[[], None]]) -> None:
        """Run peers until all have ended; the first exception ends them all.

        Args:
            lives: Each peer's work, by its index.

        Raises:
            SimulationError: all remaining peers wait for events that cannot happen.
            BaseException: a peer's exception.
        """
        assert self._running is None, "a clock runs one simulation at a time"
        self._failure = None
        self._active_at = self._now
        self._wakes = dict.fromkeys(range(len(lives)), self._now)
        self._batons = {index: threading.Lock() for index in self._wakes}
        threads = [threading.Thread(target=self._live, args=each, daemon=True) for each in enumerate(lives)]
        for index, thread in enumerate(threads):
            self._batons[index].acquire()
            thread.start()
        self._hand_on()
        while alive := [thread for thread in threads if thread.is_alive()]:
            try:
                alive[0].join()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C; the peers must end before their data are freed
                self._failure = error
        self._running = None
        if self._failure is not None:
            raise self._failure

    def _live(self, index: int, life: Callable[[], None]) -> None:
        self._batons[index].acquire()
        try:
            if self._failure is None:
                life()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - `run` raises it
            self._failure = error if self._failure is None else self._failure
        del self._wakes[index], self._batons[index]
        self._listening.discard(index)
        self._hand_on()

    def _pause(self, until: float, *, listening: bool = False) -> None:
        me = self._running
        if me is None:
            if math.isinf(until):
                raise SimulationError("an infinite wait outside of a simulation cannot end")
            self._now = max(self._now, until)
            return
        self._wakes[me] = until
        if listening:
            self._listening.add(me)
        if self._hand_on() != me:
            self._batons[me].acquire()
        self._listening.discard(me)
        if self._failure is not None:
            raise Abandoned

    def _hand_on(self) -> int | None:
        """Give the turn to the next thread and return its index; the calling thread needs no wake-up."""
        me = self._running
        if not self._wakes:
            return None
        chosen = min(self._wakes, key=lambda index: (self._wakes[index], index))
        wake = self._wakes[chosen]
        is_idle = len(self._listening) == len(self._wakes) and wake > self._active_at + STUCK_SECONDS
        if self._failure is None and (math.isinf(wake) or is_idle):
            names = ", ".join(map(str, sorted(self._wakes)))
            self._failure = SimulationError(
                f"virtual peers {names} wait for what no peer is left to do; see the events"
            )
        if self._failure is None:
            self._now = max(self._now, wake)
        self._running = chosen
        if chosen != me:
            self._batons[chosen].release()
        return chosen
