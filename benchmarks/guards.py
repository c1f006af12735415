"""Takes each guard of the library away, in a copy, and demands that a test turns red: what nobody misses is no guard.

    .venv/bin/python benchmarks/guards.py [--only H1 invites ...]

The guards are data, `tests/attacks/guards.yaml`: which text, in which file, is the guard, what stands there without it,
and the tests of which at least one must fail then. They must pass before.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

import yaml
from pydantic_settings import SettingsConfigDict

from benchmarks.crew import ROOT
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig
from spes_p2p.errors import DataError
from spes_p2p.presentation import say

GUARDS = ROOT / "tests" / "attacks" / "guards.yaml"
SECONDS, ALL_SECONDS = 300.0, 1200.0
"""For the tests of one guard, and for those of all while nothing is missing."""
PASSED, FAILED = 0, 1
"""pytest's exit codes; any other says that it could not run the tests, which proves nothing."""


@dataclass(frozen=True)
class Guard:
    """One guard.

    Attributes:
        name: What it sees to.
        closes: The weakness, by its number in the threat model or by a word.
        file: Where it is, from the root of the repository.
        text: It; found there exactly once.
        without: What stands there when it is removed.
        tests: Those of which one must fail then, as pytest calls them.
    """

    name: str
    closes: str
    file: str
    text: str
    without: str
    tests: tuple[str, ...]

    def removed_from(self, content: str) -> str:
        """Return the file's content without the guard.

        Raises:
            DataError: it is not there, or not the only one.
        """
        if content.count(self.text) != 1:
            raise DataError(f"{self.file} holds {content.count(self.text)} times {self.text!r}; mend {GUARDS.name}")
        return content.replace(self.text, self.without)


@dataclass(frozen=True)
class Outcome:
    """What came of some tests.

    Attributes:
        code: pytest's exit code; None if it was not done in time.
        failures: Tests that failed; errors of fixtures are none.
        tests: Tests that ran.
        output: The end of what pytest has said.
    """

    code: int | None
    failures: int
    tests: int
    output: str


class GuardsConfig(CommandConfig):
    """Which guards would be missed."""

    model_config = SettingsConfigDict(cli_prog_name="guards.py")

    only: list[str] = []
    """Words of the names, weaknesses or files of the guards to remove; by default all are."""
    log_level: Literal["debug", "info", "warning"] = "warning"
    """Least severe event to log."""


def main(config: GuardsConfig) -> int:
    """Remove guards and print what the tests say; return 1 if one is not missed."""
    guards = [guard for guard in load_guards() if _is_meant(guard, config.only)]
    row = guard_row(guards, not_missed(guards))
    say("  ".join(row.cells))
    return 0 if row.is_reached else 1


def _is_meant(guard: Guard, words: Sequence[str]) -> bool:
    return not words or any(word in (guard.closes, *guard.name.split()) or word in guard.file for word in words)


def guard_row(guards: Sequence[Guard], missing: Sequence[Guard]) -> Row:
    """Return the table's row."""
    red = len(guards) - len(missing)
    is_reached = bool(guards) and not missing
    return Row("guards whose removal turns a test red", f"{red} of {len(guards)}", "all", is_reached)


def load_guards(path: Path = GUARDS) -> list[Guard]:
    """Return all guards, in the file's order."""
    groups: dict[str, list[dict[str, Any]]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [
        Guard(file=file, **{**entry, "tests": tuple(entry["tests"])})
        for file, entries in groups.items()
        for entry in entries
    ]


def faults_of(guard: Guard, root: Path = ROOT) -> Iterator[str]:
    """Yield what is wrong with an entry: a text that has moved, a removal that is no program, a test that is gone."""
    try:
        without = guard.removed_from((root / guard.file).read_text(encoding="utf-8"))
        if guard.file.endswith(".py"):
            ast.parse(without)
    except (OSError, DataError, SyntaxError) as error:
        yield f"{guard.name}: {error}"
    if guard.text == guard.without or not guard.tests:
        yield f"{guard.name}: takes nothing away, or names no test"
    for test in guard.tests:
        file, _, name = test.partition("::")
        if name.partition("[")[0] not in _functions(root / file):
            yield f"{guard.name}: there is no test {test}"


def _functions(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8")) if file.exists() else ast.Module([], [])
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def not_missed(guards: Sequence[Guard]) -> list[Guard]:
    """Return the guards without which all tests still pass, and say of each what became of it.

    Raises:
        DataError: an entry is out of date, or a test fails while nothing is missing.
    """
    if faults := [fault for guard in guards for fault in faults_of(guard)]:
        raise DataError("; ".join(faults))
    found: list[Guard] = []
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        root = copy_tree(Path(folder) / "tree")
        tests = list(dict.fromkeys(test for guard in guards for test in guard.tests))
        whole = run_tests(root, tests, ALL_SECONDS, Path(folder))
        if whole.code != PASSED:
            raise DataError(f"the tests fail while nothing is missing, so they prove nothing: {whole.output}")
        say(f"{whole.tests} tests pass while nothing is missing")
        for guard in guards:
            began = time.monotonic()
            outcome = _without(root, guard)
            is_red = outcome.code == FAILED and outcome.failures > 0
            say(f"{'red' if is_red else 'NOT MISSED'}  {guard.closes}: {guard.name} ({time.monotonic() - began:.0f} s)")
            if not is_red:
                say(f"  exit code {outcome.code}: {outcome.output}")
                found.append(guard)
    return found


def copy_tree(target: Path) -> Path:
    """Copy what git knows of the repository, or would if it were told; return where to."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _without(root: Path, guard: Guard) -> Outcome:
    file = root / guard.file
    content = file.read_text(encoding="utf-8")
    file.write_text(guard.removed_from(content), encoding="utf-8")
    try:
        return run_tests(root, guard.tests, SECONDS, root.parent, "--exitfirst")
    finally:
        file.write_text(content, encoding="utf-8")


def run_tests(root: Path, tests: Sequence[str], seconds: float, folder: Path, *flags: str) -> Outcome:
    """Return what came of some tests, run by themselves.

    Args:
        root: The repository, or a copy of it.
        tests: As pytest calls them.
        seconds: When they are given up.
        folder: Takes what they leave.
        flags: For pytest.
    """
    report, scratch = folder / "report.xml", folder / "scratch"
    report.unlink(missing_ok=True)
    words = [sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider"]
    words += [f"--basetemp={scratch}", f"--junitxml={report}", *flags, *tests]
    # No compiled files: the next guard's text may be as long as this one's, and come within the same second.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(words, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return Outcome(None, 0, 0, f"not done within {seconds:.0f} s")
    counts = {"failures": 0, "tests": 0}
    if report.exists():
        for suite in ElementTree.parse(report).iter("testsuite"):
            counts = {name: count + int(suite.get(name, "0")) for name, count in counts.items()}
    return Outcome(ended.returncode, output=(ended.stdout + ended.stderr)[-1500:].strip(), **counts)


if __name__ == "__main__":
    entry_point(GuardsConfig, main)
