"""An object in a process of its own, its methods called through a pipe: what a benchmark's peers are."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any, Self

import psutil
from hivemind.utils.mpfuture import MPFuture

from benchmarks.testbed import start_process
from spes_p2p.errors import SpesError

Start = Callable[..., ForkProcess]
"""Runs a function with its arguments in a process: `start_process`, or `TestBed.run_in` with the peer filled in."""
START_SECONDS = 120.0
CLOSE_SECONDS = 20.0


class Actor:
    """An object made and used in a forked process.

    The fork spares the imports: whatever `build` needs should be imported before. Leaving the context, or `close`, ends
    the process and what it has started.

    Args:
        name: For errors.
        build: Makes the object, in that process.
        args: Its arguments.
        start: Starts the process.
    """

    def __init__(self, name: str, build: Callable[..., Any], *args: Any, start: Start = start_process) -> None:
        self.name = name
        self._pipe, theirs = multiprocessing.Pipe()
        self._process = start(_serve, theirs, build, args)
        theirs.close()

    def ready(self, seconds: float = START_SECONDS) -> Actor:
        """Wait until the object is made.

        Raises:
            SpesError: it could not be, or not in time.
        """
        self.finish(seconds)
        return self

    def begin(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Call a method; `finish` returns its result."""
        self._pipe.send((method, args, kwargs))

    def finish(self, seconds: float) -> Any:
        """Return the result of the call under way.

        Raises:
            SpesError: it failed, or took longer than `seconds`.
        """
        if not self._pipe.poll(seconds):
            raise SpesError(f"{self.name} did not answer within {seconds:.0f} s")
        try:
            is_fine, result = self._pipe.recv()
        except EOFError as error:
            raise SpesError(f"{self.name} died; see above") from error
        if not is_fine:
            raise SpesError(f"{self.name} failed: {result}")
        return result

    def call(self, method: str, *args: Any, seconds: float, **kwargs: Any) -> Any:
        """Call a method and return its result."""
        self.begin(method, *args, **kwargs)
        return self.finish(seconds)

    def cpu_seconds(self) -> float:
        """Return what this process and all that it has started have computed."""
        times = []
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                times.append(process.cpu_times())
        return sum(each.user + each.system for each in times)

    def dismiss(self) -> None:
        """Tell the object to close; `close` waits until it has."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)

    def kill(self) -> None:
        """End the process and all that it has started at once."""
        family = self._family()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join(CLOSE_SECONDS)
        self._pipe.close()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Let the object close and the process end; kill it if it does not, and whatever it leaves behind."""
        family = self._family()
        self.dismiss()
        self._process.join(seconds)
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join(CLOSE_SECONDS)
        self._pipe.close()

    def _family(self) -> list[psutil.Process]:
        try:
            main = psutil.Process(self._process.pid)
            return [main, *main.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


class Actors(ABC):
    """Actors that live as long as a context, which leaves no process behind, not even where one of them fails to start.

    Attributes:
        members: Those started so far.
    """

    def __init__(self) -> None:
        self.members: list[Actor] = []

    def __enter__(self) -> Self:
        try:
            self._start_all()
        except BaseException:
            close_all(self.members)
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        close_all(self.members)

    @abstractmethod
    def _start_all(self) -> None:
        """Start the members and wait until they are ready."""


def finish_all(actors: Sequence[Actor], seconds: float) -> list[Any]:
    """Return the results of the calls under way; `seconds` is for all of them together."""
    deadline = time.monotonic() + seconds
    return [actor.finish(max(deadline - time.monotonic(), 0.1)) for actor in actors]


def call_all(actors: Sequence[Actor], method: str, *args: Any, seconds: float, **kwargs: Any) -> list[Any]:
    """Call a method of all at once; return the results in the same order."""
    for actor in actors:
        actor.begin(method, *args, **kwargs)
    return finish_all(actors, seconds)


def close_all(actors: Sequence[Actor]) -> None:
    """Close actors, all at once."""
    for actor in actors:
        actor.dismiss()
    deadline = time.monotonic() + CLOSE_SECONDS
    for actor in actors:
        actor.close(max(deadline - time.monotonic(), 0.1))


def _serve(pipe: Connection, build: Callable[..., Any], args: Sequence[Any]) -> None:
    MPFuture.reset_backend()  # a killed process may hold the locks
    try:
        made = build(*args)
    except Exception as error:  # noqa: BLE001 - the parent decides what to make of it
        pipe.send((False, f"{type(error).__name__}: {error}"))
        os._exit(1)
    pipe.send((True, None))
    while (call := pipe.recv()) is not None:
        method, arguments, options = call
        try:
            pipe.send((True, getattr(made, method)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001 - the parent decides what to make of it
            pipe.send((False, f"{type(error).__name__}: {error}"))
    if hasattr(made, "close"):
        made.close()
