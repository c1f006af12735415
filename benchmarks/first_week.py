"""What a user meets in the first week: `python -m benchmarks.first_week [--write]`.

Released checkpoints against stock transformers, the cost of an error in a flag, and the tests of the swarm's doors.
"""

from __future__ import annotations

import argparse
import re
import resource
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import say_rows, write_rows
from benchmarks.tables import Row

BASE = "ee3ac7a"
"""The commit before these mends."""
DOORS = [
    "tests/unit/swarm/test_swarm_decision.py",
    "tests/unit/swarm/test_swarm_revision.py",
    "tests/swarm/test_consensus.py",
    "tests/unit/test_link.py",
]
MAX_SECONDS, MAX_DIFFERENCE, MAX_LINES = 1.0, 1e-5, 500


def tested(*words: str) -> tuple[int, int, str]:
    """Return how many tests have passed and failed, and what they printed."""
    command = [sys.executable, "-m", "pytest", "-q", "-s", "-m", "not full", *words]
    text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1800).stdout
    passed, failed = (
        sum(map(int, re.findall(rf"(\d+) {kind}", text.splitlines()[-1]))) for kind in ("passed", "failed")
    )
    return passed, failed, text


def seconds_of(*words: str) -> float:
    """Return the processor seconds of a command of the program."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        environment = {"PYTHONPATH": str(ROOT), "HOME": folder, "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-m", "spes_p2p", *words]
        subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows() -> Iterator[Row]:
    """Yield the table's rows."""
    passed, failed, _ = tested(*DOORS)
    yield Row("tests of the files that hold the five doors", f"{passed} of {passed + failed}", "all", not failed)
    passed, failed, _ = tested("tests/unit/model/test_released_checkpoints.py")
    yield Row(
        "released checkpoints: start, export, logits; upcycled", f"{passed} of {passed + failed}", "all", not failed
    )
    _, failed, text = tested("tests/unit/model/test_start.py", "-k", "twenty_steps")
    found = {name: float(most) for name, most in re.findall(r"(\w+): largest difference (\S+)", text)}
    told = ", ".join(f"{name} {most:.1e}" for name, most in found.items())
    is_close = not failed and max(found.values(), default=1.0) <= MAX_DIFFERENCE
    yield Row("a stock loop, 20 steps: largest difference of the loss", told, f"{MAX_DIFFERENCE:.0e}", is_close)
    seconds_of("export", "runs/nothere")  # compiles what it imports
    seconds = sorted(seconds_of("export", "runs/nothere") for _ in range(3))[1]
    yield Row(
        "`spes export runs/nothere`, processor seconds", f"{seconds:.2f}", f"{MAX_SECONDS}", seconds <= MAX_SECONDS
    )
    counted = subprocess.run(
        ["git", "diff", "--shortstat", BASE, "--", "spes_p2p"], cwd=ROOT, capture_output=True, text=True, timeout=60
    ).stdout
    added, removed = (int(each) for each in re.findall(r"(\d+) (?:insertion|deletion)", counted))
    lines = f"{added - removed:+} ({added} added, {removed} removed)"
    yield Row(f"lines of the package since {BASE}", lines, f"+{MAX_LINES}", added - removed <= MAX_LINES)


def main() -> None:
    """Print the table; with `--write` keep it in `benchmarks/results`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    is_kept = parser.parse_args().write
    where = Circumstances.now(load_average(), None)
    found = say_rows(rows())
    if is_kept:
        write_rows(Path(ROOT) / "benchmarks/results/first_week", where, "A user's first week", found)


if __name__ == "__main__":
    main()
