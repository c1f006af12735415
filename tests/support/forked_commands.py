"""Commands as forks of one process that has imported everything: an import costs more than a command that fails.

Run as a script it reads one JSON request per line, {command, argv, environment, result}, and forks; the fork's stdout,
stderr and exit code appear in the folder `result`, the code last.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PID_SECONDS = 60.0
"""Longest that the server takes to fork."""
READY = b"ready\n"


def slots_in(shown: str) -> list[int]:
    """Return the slots of a round's line, shown as `0-3,7` or `none`."""
    ranges = [part.split("-") for part in shown.split(",") if part != "none"]
    return [slot for first, *last in ranges for slot in range(int(first), int((last or [first])[0]) + 1)]


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    stdout: str
    stderr: str


class Forked:
    """A command under way.

    Args:
        folder: Where its output and its exit code appear.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def pid(self) -> int:
        """Its process id, once it has one."""
        file = self._folder / "pid"
        deadline = time.monotonic() + PID_SECONDS
        while not file.exists():
            assert time.monotonic() < deadline, f"did not start in {PID_SECONDS:.0f} s"
            time.sleep(0.02)
        return int(file.read_text())

    @property
    def lines(self) -> list[str]:
        """What it has logged so far, without a line that is not whole."""
        return self.stderr().split("\n")[:-1]

    def wait_for(self, pattern: str, seconds: float = 120.0, *, after: int = 0) -> re.Match[str]:
        """Return the first match of `pattern` in a line, from line number `after` on, once it is there."""
        deadline = time.monotonic() + seconds
        while True:
            has_ended = (self._folder / "code").exists()  # before the lines are read, so that none is missed
            for line in self.lines[after:]:
                if found := re.search(pattern, line):
                    return found
            assert not has_ended, f"{pattern!r} never came; the log was:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{pattern!r} did not come in {seconds:.0f} s:\n{self.tail()}"
            time.sleep(0.02)

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Return all matches so far."""
        return [found for line in self.lines if (found := re.search(pattern, line))]

    def tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.lines[-num_lines:])

    def end(self, seconds: float) -> Ended:
        deadline = time.monotonic() + seconds
        code = self._folder / "code"
        while not code.exists():
            assert time.monotonic() < deadline, f"did not end in {seconds:.0f} s: {self.stderr()}"
            time.sleep(0.02)  # the server has no other way to tell
        return Ended(int(code.read_text()), (self._folder / "stdout").read_text(), self.stderr())

    def stderr(self) -> str:
        return (self._folder / "stderr").read_text()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


class ForkServer:
    """Starts commands by forking a process that has imported them.

    Args:
        folder: For results.
        environment: Of the server and its forks.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder, self._count = folder, 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        # A command's deadlines must not pay for the server's imports: on a busy machine those take half a minute.
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == READY, "the server has ended"

    def start(self, command: str, argv: Sequence[str | Path], **environment: str) -> Forked:
        """Start `peer`, `experiment`, `monitor`, `chat`, `export`, `credit` or `ctl`."""
        self._count += 1
        result = self._folder / str(self._count)
        result.mkdir(parents=True)
        request = {
            "command": command,
            "argv": list(map(str, argv)),
            "environment": environment,
            "result": str(result),
        }
        (result / "stderr").touch()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        self._process.stdin.flush()
        return Forked(result)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def serve() -> dict | None:
    """Fork for every request: return the request in the fork, None in the server when there are no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the waiters
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return wait_for_fork(request)
    return None


def wait_for_fork(request: dict) -> dict:
    """Fork once more: one waits and writes the exit code, the other becomes the command."""
    os.setsid()
    folder = Path(request["result"])
    if pid := os.fork():
        (folder / "pid.tmp").write_text(str(pid))
        (folder / "pid.tmp").replace(folder / "pid")
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (folder / "code.tmp").write_text(str(code))
        (folder / "code.tmp").replace(folder / "code")
        os._exit(0)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    return request


def run() -> None:
    sys.path.insert(0, str(ROOT))
    from hivemind.utils.mpfuture import MPFuture

    from spes_p2p.cli import entry_point
    from spes_p2p.commands import chat, credit, ctl, export, local, monitor
    from spes_p2p.config import PeerConfig
    from spes_p2p.config.commands import (
        ChatConfig,
        CreditConfig,
        CtlConfig,
        ExperimentConfig,
        ExportConfig,
        MonitorConfig,
    )
    from spes_p2p.peer import life as peer

    commands = {
        "peer": (PeerConfig, peer.main),
        "experiment": (ExperimentConfig, local.main),
        "monitor": (MonitorConfig, monitor.main),
        "chat": (ChatConfig, chat.main),
        "export": (ExportConfig, export.main),
        "credit": (CreditConfig, credit.main),
        "ctl": (CtlConfig, ctl.main),
    }
    gc.freeze()
    os.write(1, READY)
    request = serve()
    if request is not None:
        MPFuture.reset_backend()  # a killed process may hold the locks
        os.environ.update(request["environment"])
        sys.argv = [request["command"], *request["argv"]]
        try:
            entry_point(*commands[request["command"]])
        except SystemExit as ended:
            if multiprocessing.active_children():
                raise
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(int(ended.code or 0))  # the server's own memory need not be tidied up once per fork


if __name__ == "__main__":
    run()
