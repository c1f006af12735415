"""Figures that tests hold: tests run in a process of their own, and how many of them pass as a row of a table."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from benchmarks.cluster import ROOT
from benchmarks.tables import Row

PASSED, FAILED = 0, 1
"""pytest's exit codes; any other code means that the tests could not run."""
SECONDS = 3600.0
"""Time limit of the tests of one figure."""


@dataclass(frozen=True)
class Outcome:
    """Result of a pytest run.

    Attributes:
        code: pytest's exit code; None after a timeout.
        failures: Number of failed tests, without errors in fixtures.
        tests: Number of tests that ran; none that was skipped counts.
        output: The end of pytest's output.
    """

    code: int | None
    failures: int
    tests: int
    output: str


def run_tests(root: Path, tests: Sequence[str], seconds: float, folder: Path, *flags: str) -> Outcome:
    """Run tests in a process of their own.

    Args:
        root: The repository, or a copy of it.
        tests: pytest ids.
        seconds: Time limit.
        folder: Where the report and the temporary files go.
        flags: Further arguments of pytest.
    """
    report, scratch = folder / "report.xml", folder / "scratch"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "-m", "", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    words += [f"--basetemp={scratch}", f"--junitxml={report}", "--disable-warnings", *flags, *tests]
    # No compiled files: two edits of equal length within one second would share one.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Outcome(None, 0, 0, f"timeout after {seconds:.0f} s")
    counts = {"failures": 0, "skipped": 0, "tests": 0}
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts = {name: count + int(suite.get(name, "0")) for name, count in counts.items()}
    counts["tests"] -= counts.pop("skipped")
    output = (ended.stdout + ended.stderr).replace(f"{root}/", "")
    return Outcome(ended.returncode, output=output[-1500:].strip(), **counts)


def passing(what: str, goal: str, tests: Sequence[str], seen: dict[str, Any], least: int = 1) -> Row:
    """Run tests; return a row that tells how many pass, reached if all do and there are enough of them.

    Args:
        what: The figure's name.
        goal: What it has to reach, in words.
        tests: pytest ids.
        seen: Takes the outcome, by the figure's name.
        least: How many must run; a skipped test does not.
    """
    with tempfile.TemporaryDirectory(prefix="passing-") as folder:
        outcome = run_tests(ROOT, tests, SECONDS, Path(folder))
    seen[what] = asdict(outcome)
    measured = f"{outcome.tests - outcome.failures} of {outcome.tests} tests pass"
    is_passed = outcome.code == PASSED
    if not is_passed:
        measured += f"; pytest's exit code {outcome.code}"
    return Row(what, measured, goal, is_passed and outcome.tests >= least)
