"""The size of everything, beside what to reach: issue 62's table.

    .venv/bin/python -m benchmarks.rest [--write]
    .venv/bin/python -m benchmarks.rest --core    # lines and calls of the core, for `benchmarks.core`

The seconds are the median of five starts. Those of the commit lane come from the file $SPES_LANE_LOG, if it is set.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import RESULTS, write_rows
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.__main__ import COMMANDS
from spes_p2p.config import commands
from spes_p2p.presentation import say

PACKAGE, DOCS = ROOT / "spes_p2p", ROOT / "docs"
CORE = ("swarm", "training", "peer", "sim")
DECIDING = "agreement attempts certificate chain consensus following next_body part promises proposal statements voter"
PLACES = {"codec": 1, "data format": 1, "model family": 1}
"""Tables to change for a new one, by the recipes of CONTRIBUTING.md; its class or function is in a file of its own."""
STARTS = 5


def texts(*paths: Path) -> list[str]:
    """Return the text of each Python file among and below some paths."""
    files = [file for path in paths for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])]
    return [file.read_text(encoding="utf-8") for file in files]


def num_lines(*paths: Path) -> int:
    """Count lines of Python."""
    return sum(len(text.splitlines()) for text in texts(*paths))


def matches(pattern: str, found: Iterable[str]) -> list[str]:
    """Return what a pattern finds in texts."""
    return [match for text in found for match in re.findall(pattern, text)]


def docstring_lines(tree: ast.AST) -> int:
    """Count the lines of strings that stand alone."""
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    strings = [value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    return sum((string.end_lineno or 0) - string.lineno + 1 for string in strings)


def settings_fields() -> int:
    """Count the fields of all commands' settings; those of a class once."""
    waiting = [getattr(commands, name) for name, _, _ in COMMANDS.values()]
    own: dict[type, set[str]] = {}
    while waiting:
        cls = waiting.pop()
        if cls in own:
            continue
        own[cls] = set(cls.__annotations__) & set(cls.model_fields)
        waiting += [base for base in cls.__mro__ if issubclass(base, BaseModel) and base is not BaseModel]
        kinds = [kind for field in cls.model_fields.values() for kind in _kinds(field.annotation)]
        waiting += [kind for kind in kinds if issubclass(kind, BaseModel)]
    return sum(map(len, own.values()))


def _kinds(annotation: object) -> Iterator[type]:
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def seconds_of(*words: str) -> float:
    """Return the median wall seconds of a command of the program."""
    seconds = []
    for _ in range(STARTS):
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "spes_p2p", *words], cwd=ROOT, capture_output=True, timeout=120)
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds)


def most(figure: str, value: float, bound: float, form: str = ",") -> Row:
    """Return a row of a figure that may be so large at most."""
    return Row(figure, f"{value:{form}}", f"{bound:{form}}", value <= bound)


def rows() -> Iterator[Row]:
    """Yield the table's rows."""
    package, core = num_lines(PACKAGE), num_lines(*(PACKAGE / room for room in CORE))
    trees = list(map(ast.parse, texts(PACKAGE)))
    yield most("lines of the package", package, 31_500)
    yield most("- outside the core (swarm, training, peer, sim)", package - core, 17_000)
    share = sum(map(docstring_lines, trees)) / package
    yield Row("- share of docstrings", f"{share:.1%}", "15 to 20 %", 0.15 <= share <= 0.20)
    yield most("lines of benchmarks", num_lines(ROOT / "benchmarks"), 5_000)
    results = (file.read_text().splitlines() for file in RESULTS.rglob("*") if file.is_file())
    yield most("lines of benchmarks/results", sum(map(len, results)), 20_000)
    guards = ROOT / "tests" / "attacks" / "guards.yaml"
    num_guards = len(guards.read_text().splitlines()) if guards.exists() else 0
    yield most("lines of tests, with guards", num_lines(ROOT / "tests") + num_guards, 36_000)
    readme, docs = (ROOT / "README.md").read_text(), [page.read_text() for page in sorted(DOCS.rglob("*.md"))]
    changes = [page.read_text() for page in ROOT.glob("CHANGELOG.md")]
    yield most("words of docs, README, CHANGELOG", sum(len(text.split()) for text in (*docs, readme, *changes)), 30_000)
    yield most("- README: lines", len(readme.splitlines()), 110)
    yield most("- README: distinct flags", len(set(re.findall(r"(?<![\w-])--[a-z][\w.-]*", readme))), 15)
    in_tables = sum(len(line.split()) for text in docs for line in text.splitlines() if line.startswith("|"))
    yield most("- share of docs' words in tables", in_tables / sum(len(text.split()) for text in docs), 0.15, ".1%")
    yield most("fields of all settings", settings_fields(), 250)
    yield most("environment prefixes", len(set(matches(r'"(SPES_(?:[A-Z]+_)*)"', texts(PACKAGE)))), 1)
    raises = sum(isinstance(node, ast.Raise) for tree in trees for node in ast.walk(tree))
    yield most("`raise` statements", raises, 600)
    for kind, places in PLACES.items():
        yield most(f"places to change for a new {kind}", places, 1)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    yield most("dependencies of a plain install", len(project["dependencies"]), 25)
    yield most("`spes --help`, seconds", seconds_of("--help"), 0.5, ".2f")
    yield most("`spes peer --colour`, a wrong flag, seconds", seconds_of("peer", "--colour"), 0.5, ".2f")
    if log := os.environ.get("SPES_LANE_LOG"):
        lanes = [run for run in json.loads(Path(log).read_text()) if run["lane"] == "commit" and run["passed"]]
        if lanes:
            yield most("commit lane, minutes", lanes[-1]["seconds"] / 60, 7, ".1f")


def core_rows() -> Iterator[Row]:
    """Yield lines and calls of the core."""
    found = texts(*(PACKAGE / room for room in CORE))
    deciding = [PACKAGE / "swarm" / f"{name}.py" for name in DECIDING.split()]
    fixes = (PACKAGE / "swarm" / "hivemind_fixes" / "README.md").read_text()
    constants = matches(r"(?m)^(?:\w*_SECONDS|_?MAX_\w+)\b.*=", found)
    yield most("lines: swarm, training, peer, sim", num_lines(*(PACKAGE / room for room in CORE)), 14_500)
    yield most("calls of `from_leader`", len(matches(r"\.from_leader\(", found)), 0)
    yield most("tests of `sync` for None", len(matches(r"sync is (?:not )?None", found)), 0)
    yield most("functions that pull versions", len(matches(r"_swarm\.pull\(", found)), 1)
    yield most(
        "lines: decision, meeting and agreement", num_lines(*(file for file in deciding if file.exists())), 1_000
    )
    yield most("rows of hivemind_fixes/README.md", len(re.findall(r"(?m)^\| (?!hivemind's)", fixes)), 22)
    yield most("constants `*_SECONDS` and `MAX_*` in the core", len(constants), 95)
    yield most("lines: docs/certificate.md", len((DOCS / "certificate.md").read_text().splitlines()), 90)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the rows in benchmarks/results/rest.json and .md")
    parser.add_argument("--core", action="store_true", help="print the rows of the core alone")
    given, load_before = parser.parse_args(), load_average()
    measured = list(core_rows() if given.core else rows())
    say(markdown_table(HEAD, [row.cells for row in measured]))
    if given.write:
        write_rows(RESULTS / "rest", Circumstances.now(load_before, None), "The rest, halved", measured)
    sys.exit(any(row.is_reached is False for row in measured))
