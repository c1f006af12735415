"""SIGTERM: a peer hands its slots over and is gone within its grace, even where its main thread hangs.

Python runs a signal's handler between two steps of the main thread. A thread that waits in a collective for a rank
that hangs, or for a GPU, makes no step. The signal itself always arrives: C code writes its number to a pipe, and a
thread of this module reads it there.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence

from spes_p2p.cli import EXIT_INTERRUPTED, Terminated

log = logging.getLogger(__name__)

HANG_SECONDS = 5.0
"""After SIGTERM a main thread that has not begun to hand over counts as hung; less where the grace is short."""
LAST_SECONDS = 3.0
"""From a second SIGTERM to the end."""
SAME_SECONDS = 2.0
"""SIGTERMs within so long are one: a scheduler signals a job's batch script, which passes it on, and its tasks."""
CLOSE_SECONDS = 2.0
"""Part of the grace that is kept for leaving the swarm."""
STOP = b"\0"


class Termination:
    """Bounds a peer's end after SIGTERM.

    Args:
        grace: Seconds from SIGTERM to the end of this process. A second SIGTERM leaves LAST_SECONDS.
        is_leader: Whether SIGTERM interrupts the main thread. On other ranks it does not: their leader, which may need
            them until it has handed over, ends them.
        ranks: Ids of processes that SIGTERM is passed on to.
    """

    def __init__(self, grace: float, *, is_leader: bool = True, ranks: Sequence[int] = ()) -> None:
        self.is_asked = False
        self._grace = grace
        self._is_leader = is_leader
        self._ranks = ranks
        self._is_noticed = False
        self._due = math.inf
        self._hand_over: Callable[[float], None] | None = None
        self._begins = threading.Lock()
        self._is_handed_over = threading.Event()

    def __enter__(self) -> Termination:
        _forks_let_go()
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._handler = signal.signal(signal.SIGTERM, self._interrupt)
        threading.Thread(target=self._watch, name="termination", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_asked:  # else the watch lasts until this process has ended
            signal.signal(signal.SIGTERM, self._handler)
            signal.set_wakeup_fd(self._wakeup)
            os.write(self._write, STOP)

    def prepare(self, hand_over: Callable[[float], None]) -> None:
        """Set how this peer hands over, in the seconds that it is given."""
        self._hand_over = hand_over

    def hand_over(self) -> None:
        """Hand over once; return at the end of it, in whichever thread it goes on."""
        if self._hand_over is None:
            return
        left = max(0.0, self._due - time.monotonic())
        if not self._begins.acquire(blocking=False):
            self._is_handed_over.wait(min(left, threading.TIMEOUT_MAX))
            return
        try:
            self._hand_over(max(0.0, left - min(CLOSE_SECONDS, self._grace / 4)))
        finally:
            self._is_handed_over.set()

    def _interrupt(self, *_: object) -> None:
        is_first = not self._is_noticed
        self.is_asked = self._is_noticed = True
        if self._is_leader and is_first:
            raise Terminated

    # ------------------------------------------------------------------ the watch

    def _watch(self) -> None:
        asked_at = math.inf
        while STOP not in (got := os.read(self._read, 4096)):
            if signal.SIGTERM not in got:
                continue
            if self._due == math.inf:
                asked_at = time.monotonic()
                self.is_asked = True
                self._end_within(self._grace)
                for pid in self._ranks:
                    with contextlib.suppress(ProcessLookupError):  # it has ended
                        os.kill(pid, signal.SIGTERM)
                _after(min(HANG_SECONDS, self._grace / 4), self._rescue)
            elif time.monotonic() >= asked_at + SAME_SECONDS:
                self._end_within(LAST_SECONDS)

    def _end_within(self, seconds: float) -> None:
        self._due = min(self._due, time.monotonic() + seconds)
        left = max(0.0, self._due - time.monotonic())
        _after(left, lambda: os._exit(EXIT_INTERRUPTED))
        # The kernel ends this process soon after, also where the interpreter has stopped its threads.
        signal.setitimer(signal.ITIMER_REAL, left + 0.5)

    def _rescue(self) -> None:
        """Hand over in this thread, if the main thread has not begun to."""
        if self._begins.locked() or not self._is_leader:
            return
        try:
            if self._hand_over is not None:
                log.warning("the main thread has not answered SIGTERM: it waits for a rank or a device that hangs")
                self.hand_over()
        finally:
            if not self._is_noticed:
                os._exit(EXIT_INTERRUPTED)


def _after(seconds: float, act: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()


@functools.cache
def _forks_let_go() -> None:
    """Keep a fork's signals from this process's pipe, which it inherits."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
