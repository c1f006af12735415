"""Commands of this repository as real processes of this machine, none of which outlives its test."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import yaml

from spes_p2p.config import JoinLink
from spes_p2p.monitor.model_folder import ModelFolder
from spes_p2p.peer.joining import FRIENDS_FILE
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.chain import Link
from spes_p2p.swarm.consensus import CERTIFICATES
from spes_p2p.swarm.invites import issue
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys

ROOT = Path(__file__).resolve().parents[2]
MARK = "TEST_PROCESSES_MARK"
"""Environment variable that all descendants inherit: it finds them even where they were orphaned."""

MODEL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
TINY = {
    "model": {**MODEL, "num_experts": 4, "top_k": 2},
    "data": {"source": "files", "sequence_length": 16, "vocab_size": 300, "held_out_fraction": 0.3},
    "train": {"batch_size": 4, "lr": 1e-2},
    "round": {
        **{"mode": "steps", "steps": 5, "total": 3, "min_peers": 1, "max_seconds": 60, "exchange_seconds": 20},
        **{"matchmaking_seconds": 2.0, "averaging_seconds": 20, "lease_seconds": 6.0, "heartbeat_seconds": 2.0},
    },
}


def write_settings(path: Path, **changes: dict) -> Path:
    """Write the YAML of a tiny run; `changes` go into its sections."""
    run = {section: {**values, **changes.pop(section, {})} for section, values in TINY.items()}
    path.write_text(yaml.safe_dump({"run": {**run, **changes}}))
    return path


def write_corpus(path: Path) -> Path:
    """Write some hundred small documents."""
    lines = (f'{{"text": "{number} plus {number} is {2 * number}, as everybody knows"}}' for number in range(400))
    path.write_text("\n".join(lines))
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def files_of(directory: Path) -> dict[str, bytes]:
    """Return everything under a directory; nothing of one that does not exist."""
    return {str(file.relative_to(directory)): file.read_bytes() for file in directory.rglob("*") if file.is_file()}


def saved_state(output: Path) -> dict | None:
    """Return the state in a peer's newest checkpoint; None if there is none yet."""
    folders = [folder for folder in (output / "checkpoint").glob("round-*") if not folder.suffix]
    states = []
    for folder in folders:
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            states.append(json.loads((folder / "state.json").read_text()))
    return max(states, key=lambda state: (state["steps"], state["round"]), default=None)


def last_certificate(output: Path) -> Body | None:
    """Return the body of the newest certificate of a peer; None if it has none yet."""
    file = output / "consensus" / CERTIFICATES
    lines = (
        [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if file.exists() else []
    )
    return Link.model_validate_json(lines[-1]).certificate.body if lines else None


class Command:
    """A running command, its lines as they come.

    Args:
        words: Program and arguments.
        environment: Added to the test's own.
    """

    def __init__(self, words: Sequence[str | Path], environment: dict[str, str]) -> None:
        self.lines: list[str] = []
        self._arrived = threading.Condition()
        self.process = subprocess.Popen(
            list(map(str, words)),
            cwd=ROOT,
            env={**os.environ, "PYTHONFAULTHANDLER": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._arrived:
                self.lines.append(line.rstrip("\n"))
                self._arrived.notify_all()
        with self._arrived:
            self.lines.append("<end of output>")
            self._arrived.notify_all()

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, pattern: str, seconds: float = 120.0, *, after: int = 0) -> re.Match[str]:
        """Return the first line's match of `pattern`, from line number `after` on, once it is there."""
        deadline = time.monotonic() + seconds
        with self._arrived:
            while True:
                for line in self.lines[after:]:
                    if found := re.search(pattern, line):
                        return found
                is_over = bool(self.lines) and self.lines[-1] == "<end of output>"
                assert not is_over, f"{pattern!r} never came; the output was:\n{self.tail()}"
                remaining = deadline - time.monotonic()
                assert remaining > 0, f"{pattern!r} did not come in {seconds:.0f} s; the output was:\n{self.tail()}"
                self._arrived.wait(remaining)

    def matches(self, pattern: str) -> list[re.Match[str]]:
        """Return all matches so far."""
        with self._arrived:
            return [found for line in self.lines if (found := re.search(pattern, line))]

    def faults(self, pattern: str = "Traceback") -> list[str]:
        """Return what it has said around each line in which `pattern` is found; nothing if it is in none."""
        lines = list(self.lines)
        found = (index for index, line in enumerate(lines) if re.search(pattern, line))
        return ["\n".join(lines[max(0, index - 3) : index + 40]) for index in found]

    def tail(self, num_lines: int = 40) -> str:
        return "\n".join(self.lines[-num_lines:])

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self, seconds: float = 120.0) -> int:
        """Return the exit code, once it has ended."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            told = self.tail()
            self.signal(signal.SIGABRT)  # it says where each of its threads is
            self._reader.join(10)
            message = f"did not end in {seconds:.0f} s; the output was:\n{told}\nand it was at:\n{self.tail(200)}"
            raise AssertionError(message) from None
        self._reader.join(10)
        return code


def friends_words(directory: Path, words: Sequence[str | Path]) -> list[str | Path]:
    """Return the flags by which a peer votes in a run whose founder's folder is in a directory."""
    if "--initial-peers" not in words or "--invite" in words:
        return []
    links = {file.parent: JoinLink.parse(file.read_text()) for file in sorted(directory.glob(f"*/{FRIENDS_FILE}"))}
    called = [folder for folder, link in links.items() if {*link.addresses} & {*words}] or [*links]
    if not called:
        return []
    founder, invite = IdentityKeys(Identity(called[0] / "identity.key")), called[0] / "many_friends"
    if not invite.exists():
        invite.write_text(issue(founder, ModelFolder(called[0]).manifest.digest, 2**31, places=32, votes=True))
    return ["--invite", invite]


class Commands:
    """Starts commands, and finds whatever is left of them."""

    def __init__(self, directory: Path) -> None:
        self.mark = uuid.uuid4().hex
        self._directory = directory

    def start(self, *words: str | Path, **environment: str) -> Command:
        """Start a script of this repository, in a session of its own."""
        return Command([sys.executable, *words], {**environment, MARK: self.mark})

    def peer(self, name: str, *words: str | Path, **environment: str) -> Command:
        """Start a peer with its output in a folder of its name."""
        return self.start(*self.peer_words(name, *words), **environment)

    def peer_words(self, name: str, *words: str | Path) -> list[str | Path]:
        common: list[str | Path] = ["--output", self._directory / name, "--cache", self._directory / "cache"]
        common += [] if "--host" in words else ["--host", "127.0.0.1"]  # tests stay on this machine
        common += friends_words(self._directory, words)
        return ["peers/run_peer.py", *common, "--device", "cpu", "--threads", "1", *words]

    def alive(self) -> list[psutil.Process]:
        """Return all running processes that descend from these commands."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def wait_until_gone(self, seconds: float = 30.0) -> None:
        """Return once nothing is left; fail after `seconds`."""
        _, alive = psutil.wait_procs(self.alive(), seconds)
        assert not alive, f"left behind: {[' '.join(process.cmdline())[:120] for process in alive]}"

    def kill_all(self) -> None:
        while processes := self.alive():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(processes, 10)


@contextlib.contextmanager
def commands_in(directory: Path) -> Iterator[Commands]:
    """Yield Commands; in the end kill what they left."""
    commands = Commands(directory)
    try:
        yield commands
    finally:
        commands.kill_all()
