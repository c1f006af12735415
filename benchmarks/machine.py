"""Where and when something was measured, and on what code."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil

from benchmarks.cluster import ROOT

PACKAGES = ("torch", "transformers", "hivemind", "numpy")


@dataclass(frozen=True)
class Circumstances:
    """What a reader must know to judge a number.

    The cores are those that this process may use, the load is the average of the minute before the start (about 0 on a
    quiet machine), and the commit tells whether files differed from it.
    """

    cpu: str
    cores: int
    memory_gib: float
    python: str
    packages: dict[str, str]
    date: str
    commit: str
    load_before: float
    command: tuple[str, ...] | None

    @property
    def where(self) -> str:
        """They as a line of a page, without Python and packages."""
        return (
            f"{self.date}, {self.cpu}, {self.cores} cores, {self.memory_gib:g} GiB, commit {self.commit}, "
            f"load average {self.load_before:.2f} before"
        )

    @classmethod
    def now(cls, load_before: float, command: Sequence[str] | None) -> Circumstances:
        """Return this machine's, at this moment."""
        return cls(
            cpu=cpu_name(),
            cores=len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1,
            memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
            python=platform.python_version(),
            packages={name: version(name) for name in PACKAGES},
            date=datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            commit=_commit(),
            load_before=load_before,
            command=tuple(command) if command else None,
        )


def cpu_name() -> str:
    """Return the processor's name, on Linux from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def load_average() -> float:
    """Return the machine's load average over the last minute."""
    return os.getloadavg()[0]


def _commit() -> str:
    try:
        commit = _git("rev-parse", "--short", "HEAD").strip()
        changes = _git("status", "--porcelain", "--", "spes_p2p", "monitor", "peers", "scripts", "configs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit} with uncommitted changes" if changes.strip() else commit


def _git(*arguments: str) -> str:
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True, timeout=30).stdout
