"""Virtual time: every peer has a thread, exactly one runs at a time, and times alone decide in which order."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from spes_p2p.errors import SimulationError

T = TypeVar("T")

EPOCH_SECONDS = 1_000_000.0
"""Where virtual time starts: records take 0 for "unknown"."""
STUCK_SECONDS = 3600.0
"""Virtual time in which nobody works or tells anybody anything, and after which nobody is expected to."""


class Abandoned(BaseException):
    """Ends a peer's thread because the simulation has failed elsewhere; no error of its own, so nothing catches it."""


class VirtualTask(Generic[T]):
    """What a peer does beside its training, in a thread of its own with a baton of its own.

    Args:
        clock: The peer's.
        work: What to do.
    """

    def __init__(self, clock: VirtualClock, work: Callable[[], T]) -> None:
        self._clock, self._work = clock, work
        self._value: T
        self._error: Exception | None = None
        self.is_done = False

    def run(self) -> None:
        """Do it, and wake whoever waits for it."""
        try:
            self._value = self._work()
        except Exception as error:  # noqa: BLE001 - `result` raises it
            self._error = error
        self.is_done = True
        self._clock.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait until it is done, for so many virtual seconds at most; return whether it is."""
        deadline = self._clock.now() + seconds
        while not self.is_done and self._clock.now() < deadline:
            self._clock.wait(deadline - self._clock.now())
        return self.is_done

    def result(self) -> T:
        """Return what the work returned, once it is done, or raise what it raised."""
        if self._error is not None:
            raise self._error
        return self._value


class VirtualClock:
    """Hands one baton among peers: whoever wakes earliest runs, and of those the one with the lowest index.

    A peer that runs is never interrupted; it hands the baton on when it says that time passes, or ends. So data that
    peers share need no lock, and nothing depends on how threads are scheduled. Outside `run` the caller is alone:
    time passes as it says. What a peer starts beside itself takes part as if it were one more peer.
    """

    def __init__(self) -> None:
        self._now = EPOCH_SECONDS
        self._running: int | None = None
        self._wakes: dict[int, float] = {}
        self._listening: set[int] = set()
        self._active_at = self._now
        self._batons: dict[int, threading.Lock] = {}
        self._threads: list[threading.Thread] = []
        self._peers: list[int] = []
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
        self._wakes, self._batons, self._threads, self._peers = {}, {}, [], []
        self._over = _taken_lock()
        for index, life in enumerate(lives):
            self._spawn(index, life)
        try:
            self._hand_on()
            self._over.acquire()
        except BaseException as error:  # noqa: BLE001 - Ctrl-C; the peers must end before their data go
            self._failure = error
        while self._threads:
            self._threads.pop().join()
        self._running = None
        if self._failure is not None:
            raise self._failure

    def start(self, work: Callable[[], T]) -> VirtualTask[T]:
        """Begin work beside what the calling peer does, at the present time; outside of `run` it is done at once."""
        task = VirtualTask(self, work)
        if self._running is None:
            task.run()
        else:
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._spawn(self._peers[self._running], task.run)
        return task

    def _spawn(self, peer: int, life: Callable[[], None]) -> None:
        """Let a thread of a peer's take its turns, after all who came before it at the same time."""
        index = len(self._peers)
        self._peers.append(peer)
        self._wakes[index], self._batons[index] = self._now, _taken_lock()
        thread = threading.Thread(target=self._live, args=(index, life), name=f"virtual-peer-{peer}", daemon=True)
        self._threads.append(thread)
        thread.start()

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
            names = ", ".join(map(str, sorted({self._peers[index] for index in self._wakes})))
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
