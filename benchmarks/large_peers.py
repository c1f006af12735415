"""Real peers as processes beside each other, and what each has taken so far.

Memory is the proportional set size over all processes of a peer, every half second: pages that processes share are
divided among them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.cluster import ROOT
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

SAMPLE_SECONDS = 0.5
LEAST_FREE_BYTES = 10**9
DEADLINE_SECONDS = 1800.0
TOGETHER = re.compile(r"round \d+: 2 peers, ")
FETCHED = re.compile(r"entered the run at round \d+: fetched ([\d.]+) MB")
SPENT = re.compile(
    r"round \d+: 2 peers, .*? ([\d.]+) s training, ([\d.]+) matchmaking, ([\d.]+) averaging, ([\d.]+) exchange, "
    r"([\d.]+) other"
)
"""Seconds of a round of two peers, by what they went into."""
_ROUND = re.compile(r"round (\d+): \d+ peers, ")


@dataclass
class Peer:
    """A peer as a process, and what it has taken so far."""

    folder: Path
    log: Path
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)
    peak_bytes: int = 0
    peak_seconds: float = 0.0
    first_round_seconds: float | None = None
    rounds: int = 0

    def look(self) -> None:
        """Measure it, and read how far it is."""
        taken = sum(map(proportional_bytes, family(self.process.pid)))
        seconds = time.monotonic() - self.began
        if taken > self.peak_bytes:
            self.peak_bytes = taken
            self.peak_seconds = seconds
        self.rounds = max(map(int, _ROUND.findall(self.log.read_text(errors="replace"))), default=0)
        if self.rounds and self.first_round_seconds is None:
            self.first_round_seconds = seconds

    def processor_seconds(self) -> float:
        """Return the processor time of all its processes so far."""
        return processor_seconds(self.process.pid)

    def end(self) -> None:
        """End it with all its processes, if it has not ended by itself."""
        processes = family(self.process.pid)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=10)
        self.process.wait()


def processor_seconds(pid: int) -> float:
    """Return the processor time so far of a process and all below it, of those that have ended too."""
    seconds = 0.0
    for process in family(pid):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended, and counts as its parent's
            seconds += sum(process.cpu_times()[:4])
    return seconds


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all below it; nothing if it has ended."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def proportional_bytes(process: psutil.Process) -> int:
    """Return a process's proportional set size; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def start(work: Path, name: str, *flags: str, folder: Path | None = None) -> Peer:
    """Start a peer, whose log has this name; with a folder, it goes on there."""
    command = [sys.executable, "-m", "spes_p2p", "peer", "--run-id", "real-size", "--seed-seconds", "0"]
    command += ["--output", str(work / name)] if folder is None else ["--output", str(folder), "--resume"]
    log = (work / name).with_suffix(".log")
    with log.open("wb") as stream:
        dies = functools.partial(die_with_parent, os.getpid())
        process = subprocess.Popen([*command, *flags], cwd=ROOT, stdout=stream, stderr=stream, preexec_fn=dies)
    return Peer(folder or work / name, log, process)


def watch(peers: Sequence[Peer], is_done: Callable[[Peer], bool], least: Peer | None = None) -> str:
    """Measure peers until each, or `least`, is done or has ended; return why that failed, or ""."""
    began, watched = time.monotonic(), peers if least is None else [least]
    while any(peer.process.poll() is None and not is_done(peer) for peer in watched):
        for peer in peers:
            peer.look()
        if psutil.virtual_memory().available < LEAST_FREE_BYTES:
            return "the machine ran out of memory"
        if time.monotonic() > began + DEADLINE_SECONDS:
            return f"not done after {DEADLINE_SECONDS:.0f} s"
        time.sleep(SAMPLE_SECONDS)
    short = [peer for peer in watched if not is_done(peer)]
    return f"{short[0].log.stem} ended with {short[0].process.returncode}; see {short[0].log}" if short else ""


def committed(rounds: int) -> Callable[[Peer], bool]:
    """Return what tells whether a peer has committed so many rounds."""
    return lambda peer: peer.rounds >= rounds


def said(pattern: re.Pattern[str], times: int = 1) -> Callable[[Peer], bool]:
    """Return what tells whether a peer's log has so many matches of a pattern."""
    return lambda peer: len(pattern.findall(peer.log.read_text(errors="replace"))) >= times


def wait_for(path: Path, peer: Peer) -> None:
    """Measure a peer until a file exists, the peer has ended, or it has had too long."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not path.exists() and peer.process.poll() is None and time.monotonic() < deadline:
        peer.look()
        time.sleep(SAMPLE_SECONDS)


def gigabytes(peer: Peer) -> str:
    """Return a peer's peak, and when it was."""
    return f"{peer.peak_bytes / 1e9:.1f} GB after {peer.peak_seconds:.0f} s"
