"""Virtual time: every peer has a thread, exactly one runs at a time, and times alone decide in which order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence

from spes_p2p.errors import SimulationError

EPOCH_SECONDS = 1_000_000.0
"""Where virtual time starts: records take 0 for "unknown"."""
STUCK_SECONDS = 3600.0
"""Virtual time in which nobody works or tells anybody anything, and after which nobody is expected to."""


class Abandoned(BaseException):
    """Ends a peer's thread because the simulation has failed elsewhere; no error of its own, so nothing catches it."""


class VirtualClock:
    """Hands one baton among peers: whoever wakes earliest runs, and of those the one with the lowest index.

    A peer that runs is never interrupted; it hands the baton on when it says that time passes, or ends. So data that
    peers share need no lock, and nothing depends on how threads are scheduled. Outside `run` the caller is alone:
    time passes as it says.
    """

    def __init__(self) -> None:
        self._now = EPOCH_SECONDS
        self._running: int | None = None
        self._wakes: dict[int, float] = {}
        self._listening: set[int] = set()
        self._active_at = self._now
        self._batons: list[threading.Lock] = []
        self._over = threading.Lock()
        self._failure: BaseException | None = None

    def now(self) -> float:
        """Return the virtual time in seconds; it serves as DHT time and as every peer's monotonic clock."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let the calling peer be at work for so long; others whose time comes earlier run meanwhile."""
        self._pause(self._now + seconds)
        self._active_at = self._now

    def wait(self, seconds: float) -> None:
        """Wait until somebody notifies, or `seconds` have passed; infinitely many may."""
        self._pause(self._now + seconds, listening=True)

    def notify_all(self) -> None:
        """Let everybody who waits go on at the present time."""
        self._active_at = self._now
        self._wakes.update(dict.fromkeys(self._listening, self._now))
        self._listening.clear()

    def run(self, lives: Sequence[Callable[[], None]]) -> None:
        """Run peers until all of them have ended; the first exception of any ends all.

        Args:
            lives: What each peer does, by its index.

        Raises:
            SimulationError: everybody left waits for what nobody will do.
            BaseException: what a peer raised.
        """
        assert self._running is None, "a clock runs one simulation at a time"
        self._failure, self._active_at = None, self._now
        self._wakes = dict.fromkeys(range(len(lives)), self._now)
        self._batons = [_taken_lock() for _ in lives]
        self._over = _taken_lock()
        threads = [
            threading.Thread(target=self._live, args=(index, life), name=f"virtual-peer-{index}", daemon=True)
            for index, life in enumerate(lives)
        ]
        for thread in threads:
            thread.start()
        try:
            self._hand_on()
            self._over.acquire()
        except BaseException as error:  # noqa: BLE001 - Ctrl-C; the peers must end before their data go
            self._failure = error
        for thread in threads:
            thread.join()
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
        del self._wakes[index]
        self._listening.discard(index)
        self._hand_on()

    def _pause(self, until: float, *, listening: bool = False) -> None:
        me = self._running
        if me is None:
            if math.isinf(until):
                raise SimulationError("a wait without end outside of a simulation; nobody can end it")
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
        """Let the next peer run; return its index, without waking it if it is the one that runs already."""
        me = self._running
        if not self._wakes:
            self._over.release()
            return None
        chosen = min(self._wakes, key=lambda index: (self._wakes[index], index))
        wake = self._wakes[chosen]
        is_idle = len(self._listening) == len(self._wakes) and wake > self._active_at + STUCK_SECONDS
        if self._failure is None and (math.isinf(wake) or is_idle):
            names = ", ".join(map(str, sorted(self._wakes)))
            self._failure = SimulationError(f"virtual peers {names} wait for what nobody is left to do; see the events")
        if self._failure is None:
            self._now = max(self._now, wake)
        self._running = chosen
        if chosen != me:
            self._batons[chosen].release()
        return chosen


def _taken_lock() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock
