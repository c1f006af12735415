"""Child processes of a command: started with a log, watched, and none left behind."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.errors import SpesError
from spes_p2p.swarm.processes import die_with_parent

STOP_SECONDS = 30.0
TAIL_LINES = 12


@dataclass
class Child:
    """A process, its name and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait(self, seconds: float) -> bool:
        """Wait for the end; tell whether it has come."""
        try:
            self.process.wait(max(seconds, 0.0))
        except subprocess.TimeoutExpired:
            return False
        return True

    def is_running(self) -> bool:
        """Tell whether it still runs.

        Raises:
            SpesError: it ended with an error of its own. A process that was killed is a fact of life, not an error.
        """
        code = self.process.poll()
        if code is not None and code > 0:
            raise SpesError(f"{self.name} failed with exit code {code}; the end of {self.log}:\n{self.tail()}")
        return code is None

    def killer(self) -> str | None:
        """Return the name of the signal that killed it, if one did."""
        code = self.process.poll()
        return signal.Signals(-code).name if code is not None and code < 0 else None

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def start(name: str, script: Path, arguments: Sequence[str], log: Path, *, on_terminal: bool = False) -> Child:
    """Start a Python script in a session of its own, so that the terminal's Ctrl-C reaches only its parent.

    It does not see this command's `SPES_` variables: they configure the parent, which passes on what is meant for it.

    Args:
        name: For messages.
        script: The script to run.
        arguments: Its arguments.
        log: File for its standard error, and its output unless `on_terminal`; appended to.
        on_terminal: Let it write to this process's standard output.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPES_")}
    environment |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            stdin=subprocess.DEVNULL,
            stdout=None if on_terminal else file,
            stderr=file,
            env=environment,
            start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
    return Child(name, process, log)


def stop(children: Sequence[Child]) -> None:
    """Ask all to end, and kill those that have not after STOP_SECONDS."""
    for child in children:
        if child.process.poll() is None:
            child.process.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        if not child.wait(deadline - time.monotonic()):
            child.process.kill()
            child.process.wait()
