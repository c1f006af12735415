"""A benchmark's child processes: started from task files, watched, and none left behind."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tasks import Task, read_result, write_task
from spes_p2p.commands.local import Child, stop
from spes_p2p.errors import SpesError
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

POLL_SECONDS = 0.2
ROOT = Path(__file__).resolve().parent.parent
SUPPORT = ROOT / "tests" / "support"


def support(module: str) -> Any:
    """Return a module of the tests: real peers that misbehave, or die, are theirs."""
    if str(SUPPORT) not in sys.path:
        sys.path.insert(0, str(SUPPORT))  # for good: processes that they start import by it, too
    return importlib.import_module(module)


class LocalCluster:
    """Child processes that work on tasks; leaving the context ends those that are left, whatever happened.

    Args:
        folder: For tasks, results and logs; emptied first.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._children: dict[str, Child] = {}

    def __enter__(self) -> LocalCluster:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)
        return self

    def __exit__(self, *exception: object) -> None:
        stop(list(self._children.values()))

    def start(self, name: str, task: Task) -> None:
        """Start a process on a task."""
        write_task(path := self._task_path(name), task)
        log = self._folder / f"{name}.log"
        command = [sys.executable, str(ROOT / "benchmarks" / "child.py"), str(path)]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("SPES_")}
        environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with log.open("ab") as file:
            self._children[name] = Child(name, _start(command, stdout=file, stderr=file, env=environment), log)

    def num_running(self) -> int:
        """Return how many still work.

        Raises:
            SpesError: one has failed; with the end of its log.
        """
        return sum(has_not_failed(child) for child in self._children.values())

    def wait_until(self, done: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait until `done`, as long as no process fails.

        Raises:
            SpesError: a process failed, or `seconds` have passed.
        """
        deadline = time.monotonic() + seconds
        while not done():
            self.num_running()
            if time.monotonic() > deadline:
                raise SpesError(f"waited {seconds:.0f} s for {what}; see {self._folder}")
            time.sleep(POLL_SECONDS)

    def results(self, seconds: float) -> list[dict[str, Any]]:
        """Wait for all; return their results in the order in which they were started.

        Raises:
            SpesError: a process failed, or `seconds` have passed.
        """
        self.wait_until(lambda: self.num_running() == 0, seconds, "the processes to end")
        return [read_result(self._task_path(name)) for name in self._children]

    def _task_path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


def has_not_failed(child: Child) -> bool:
    """Tell whether a child still runs.

    Raises:
        SpesError: it failed, or was killed.
    """
    if killer := child.killer():
        raise SpesError(f"{child.name} was killed by {killer}; the end of {child.log}:\n{child.tail()}")
    return child.is_running()


def _start(command: Sequence[str], **how: Any) -> subprocess.Popen[bytes]:
    """Start a process in a session of its own, which dies with this one."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=functools.partial(die_with_parent, os.getpid()),
        **how,
    )


def run_script(name: str, command: Sequence[str], log: Path, seconds: float) -> None:
    """Run a command to its end, its output on the terminal, its standard error in a log.

    Raises:
        SpesError: it failed, or took longer than `seconds`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        child = Child(name, _start(command, cwd=ROOT, stderr=file), log)
    deadline = time.monotonic() + seconds
    try:
        while has_not_failed(child):
            if time.monotonic() > deadline:
                raise SpesError(f"{name} took longer than {seconds:.0f} s; see {log}")
            child.wait(POLL_SECONDS)
    finally:
        stop([child])
