"""Virtual time: an event loop whose clock jumps to the next timer, and peers' threads, of which one runs at a time."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import math
import selectors
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from spes_p2p.errors import SimulationError

EPOCH_SECONDS = 1_000_000.0
"""Start of virtual time; not 0, which means "unknown" in records."""
STUCK_SECONDS = 3600.0
"""Virtual time in which no peer works after which the simulation counts as stuck."""

T = TypeVar("T")


class Abandoned(BaseException):
    """Ends a peer's thread after a failure elsewhere; not an Exception, so that no handler catches it."""


class _Jumps(selectors.SelectSelector):
    """Has the loop's waits for sockets, of which it has none, pass in virtual time."""

    def __init__(self, let_pass: Callable[[float | None], None]) -> None:
        super().__init__()
        self._let_pass = let_pass

    def select(self, timeout: float | None = None) -> list[Any]:
        self._let_pass(timeout)
        return []


def _baton() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass(eq=False)
class _Life:
    """A peer's thread, which runs while it has its baton."""

    index: int
    baton: threading.Lock = field(default_factory=_baton)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in virtual time. Peers' threads may call into it: `call` hands the turn over, and takes it back.

    Either the loop or one thread runs, so that what they share needs no lock, and the result does not depend on the
    scheduling of threads. What `asyncio.to_thread` is given runs at once, in the loop.
    """

    def __init__(self) -> None:
        self._now = self._active_at = EPOCH_SECONDS
        self._num_working = 0
        self._running: _Life | None = None
        self._alive: list[_Life] = []
        self._turn = _baton()
        self._failure: BaseException | None = None
        super().__init__(_Jumps(self._let_pass))

    def time(self) -> float:
        """Return the virtual time in seconds: DHT time, and every peer's monotonic clock."""
        return self._now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Run a function now, in place of another thread."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the future has it
            future.set_exception(error)
        return future

    def close(self) -> None:
        """End all tasks, and close the loop. Idempotent."""
        if self.is_closed():
            return
        tasks = asyncio.all_tasks(self)
        for task in tasks:
            task.cancel()
        self.run_until_complete(_ended(tasks))
        super().close()

    def fail(self, error: BaseException) -> None:
        """End what the loop runs by an error; the first one counts."""
        self._failure = self._failure or error

    # ------------------------------------------------------------------ peers' threads

    def live(self, lives: Sequence[Callable[[], None]]) -> None:
        """Run peers until all have ended; the first exception ends them all.

        Args:
            lives: Each peer's work, by its index; called in a thread of its own.

        Raises:
            SimulationError: all remaining peers wait for events that cannot happen.
            BaseException: a peer's exception.
        """
        assert not self._alive, "a loop runs one simulation at a time"
        self._failure, self._active_at, self._num_working = None, self._now, 0
        self._alive = [_Life(index) for index in range(len(lives))]
        threads = [
            threading.Thread(target=self._live, args=each, name=f"peer {each[0].index}", daemon=True)
            for each in zip(self._alive, lives, strict=True)
        ]
        for life, thread in zip(self._alive, threads, strict=True):
            thread.start()
            self.call_soon(self._resume, life)
        try:
            if self._alive:
                self.run_forever()
        except BaseException as error:  # noqa: BLE001 - raised below; the peers must end before their data are freed
            self.fail(error)
        while self._alive:
            self._resume(self._alive[0])
        for thread in threads:
            thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def call(self, work: Coroutine[Any, Any, T], timeout: float, context: contextvars.Context | None = None) -> T:
        """Run a coroutine to its end, from a peer's thread, or while the loop stands still.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it is cancelled.
        """
        life = self._running
        if life is not None and self._failure is not None:
            work.close()
            raise Abandoned
        task, is_late = self.create_task(work, context=context), []
        timer = None if math.isinf(timeout) else self.call_later(timeout, lambda: is_late.append(task.cancel()))
        if life is None:
            with contextlib.suppress(asyncio.CancelledError):
                self.run_until_complete(task)
        else:
            task.add_done_callback(lambda _: self._resume(life))
            self._give_back()
            life.baton.acquire()
        if timer is not None:
            timer.cancel()
        if is_late and task.cancelled():
            raise TimeoutError
        if self._failure is not None or task.cancelled():
            raise Abandoned
        return task.result()

    def advance(self, seconds: float) -> None:
        """Let the calling peer work for `seconds`; what is due sooner happens meanwhile."""
        self._num_working += 1
        try:
            self.call(asyncio.sleep(seconds), math.inf)
        finally:
            self._num_working -= 1
        self._active_at = self._now

    def _live(self, life: _Life, work: Callable[[], None]) -> None:
        life.baton.acquire()
        try:
            if self._failure is None:
                work()
        except Abandoned:
            pass
        except BaseException as error:  # noqa: BLE001 - `live` raises it
            self.fail(error)
        self._alive.remove(life)
        self._active_at = self._now
        if not self._alive and self.is_running():
            self.stop()
        self._give_back()

    def _give_back(self) -> None:
        self._running = None
        if self._turn.locked():  # else the loop's thread was interrupted as it took the turn
            self._turn.release()

    def _resume(self, life: _Life) -> None:
        """Give a thread the turn, and wait until it is back."""
        if life not in self._alive:
            return
        self._running = life
        life.baton.release()
        while self._running is not None:
            try:
                self._turn.acquire()
            except BaseException as error:  # noqa: BLE001 - Ctrl-C; the thread goes on until it calls into the loop
                self.fail(error)

    def _let_pass(self, seconds: float | None) -> None:
        """Move the clock on to the next timer; raise an error that ends all."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        is_idle = self._alive and not self._num_working and self._now > self._active_at + STUCK_SECONDS
        if seconds is None or is_idle:
            names = ", ".join(str(life.index) for life in self._alive)
            waiting = f"virtual peers {names} wait" if names else "all that the loop runs waits"
            raise SimulationError(f"{waiting} for what no peer is left to do; see the events")
        self._now += seconds


async def _ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
