"""Remove each guard of the library in a copy of the repository and check that a test then fails.

    .venv/bin/python benchmarks/guards.py [--only H1 invites decode-depth ...]

A guard is a check whose absence would let a peer do harm. A trailing comment `# guard: <id>` marks its line, and
`tests/attacks/guards.yaml` says how to remove it and which tests must notice. These tests must pass before the removal.
A guard whose removal no test notices is untested.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.cluster import ROOT
from benchmarks.passing import FAILED, PASSED, Outcome, run_tests
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.errors import DataError
from spes_p2p.presentation import say

GUARDS = ROOT / "tests" / "attacks" / "guards.yaml"
SECONDS, ALL_SECONDS = 300.0, 1200.0
"""Time limits: for the tests of one guard, and for the tests of all guards before any removal."""


MARKED_FOLDERS, MARKED_FILES = ("spes_p2p", "monitor", "peers"), ("compose.yaml", "Dockerfile")
"""Where markers are searched for: the Python files of the folders, and two files more."""
MARKER = re.compile(r"[ \t]*# *guard: *(.*?)[ \t]*$", re.MULTILINE)
GUARD_ID = re.compile(r"[a-z0-9]+(-[a-z0-9]+){1,4}")
KINDS = ("never", "always", "skip", "operand", "first")
"""Removals other than a replacement of text; `removed_from` defines them."""
_Statement = ast.stmt | ast.ExceptHandler
NO_CONTEXT = '__import__("contextlib").nullcontext()'


@dataclass(frozen=True)
class Guard:
    """An entry of the list.

    Attributes:
        id: The marker's id: two to five lower-case words with hyphens.
        name: The property that the guard ensures.
        closes: The weakness, by its number in the threat model or in words.
        remove: One of `KINDS`, or the text to replace in the marked statement and its replacement.
        tests: pytest ids; at least one of these tests must fail without the guard.
    """

    id: str
    name: str
    closes: str
    remove: str | tuple[str, str]
    tests: tuple[str, ...]


class Marker(NamedTuple):
    """A `# guard: <id>` comment: its file, relative to the root, and its line, counted from 1."""

    file: str
    line: int


Markers = Mapping[str, Sequence[Marker]]
"""Markers by id; an id that occurs several times is an error."""


class GuardsConfig(CommandConfig):
    """Select guards to remove."""

    only: list[str] = []
    """Ids, weaknesses, words of names, or parts of file names of the guards to remove; all guards by default."""
    log_level: LogLevel = "warning"


def main(config: GuardsConfig) -> int:
    """Remove the selected guards one by one and print the results; return 1 if a removal goes unnoticed."""
    markers = find_markers()
    guards = [guard for guard in load_guards() if _is_selected(guard, markers, config.only)]
    row = guard_row(guards, not_missed(guards))
    say("  ".join(row.cells))
    return 0 if row.is_reached else 1


def _is_selected(guard: Guard, markers: Markers, words: Sequence[str]) -> bool:
    names = (guard.id, guard.closes, *guard.name.split())
    files = [marker.file for marker in markers.get(guard.id, ())]
    return not words or any(word in names or any(word in file for file in files) for word in words)


def guard_row(guards: Sequence[Guard], missing: Sequence[Guard]) -> Row:
    """Return the table's row."""
    red = len(guards) - len(missing)
    is_reached = bool(guards) and not missing
    return Row("guards whose removal turns a test red", f"{red} of {len(guards)}", "all", is_reached)


def load_guards(path: Path = GUARDS) -> list[Guard]:
    """Read the list of guards, in the file's order."""
    entries: list[dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return [Guard(**{**entry, "remove": _removal(entry), "tests": tuple(entry["tests"])}) for entry in entries]


def _removal(entry: Mapping[str, Any]) -> str | tuple[str, str]:
    remove = entry["remove"]
    if isinstance(remove, str):
        return remove
    old, new = remove["replace"]
    return old, new


def find_markers(root: Path = ROOT) -> dict[str, list[Marker]]:
    """Find all `# guard: <id>` comments of a repository."""
    found: dict[str, list[Marker]] = defaultdict(list)
    files = [file for folder in MARKED_FOLDERS for file in sorted((root / folder).rglob("*.py"))]
    for file in [*files, *(root / name for name in MARKED_FILES if (root / name).exists())]:
        for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), 1):
            if match := MARKER.search(line):
                found[match[1]].append(Marker(str(file.relative_to(root)), number))
    return dict(found)


def without(guard: Guard, markers: Markers, root: Path = ROOT) -> tuple[Path, str]:
    """Return the guard's file, and its content without the guard.

    Raises:
        DataError: the marker is missing or occurs twice, or the removal does not fit the marked line.
    """
    places = markers.get(guard.id, ())
    if len(places) != 1:
        raise DataError(f"the comment `# guard: {guard.id}` occurs {len(places)} times; it must occur once")
    file = root / places[0].file
    edit = removed_from if file.suffix == ".py" else _replaced_on_line
    try:
        return file, edit(file.read_text(encoding="utf-8"), places[0].line, guard.remove)
    except DataError as error:
        raise DataError(f"{places[0].file}:{places[0].line}: {error}") from error


def removed_from(source: str, line: int, remove: str | tuple[str, str]) -> str:
    """Remove the guard on a line of Python.

    - `never`, `always`: a condition becomes False or True: the test of an `if`, `elif`, `while` or conditional
      expression, or a comprehension's filter. The outermost condition that begins on the line counts, otherwise that of
      the statement whose header the line belongs to. `never` also makes a `for` run over nothing, and an `except` catch
      nothing.
    - `skip`: the statement becomes `pass`; the body of a `with` runs without the context.
    - `operand`: the last operand of `and` or `or` that ends on the line is dropped, in the outermost such operation.
    - `first`: the outermost call that begins on the line becomes its first argument, `Annotated[int, ...]` `int`.
    - a pair: the first text, found once in the statement (of a compound statement: its header), becomes the second.

    Raises:
        DataError: the line holds nothing to remove, or several candidates.
    """
    statement = _statement_at(_parse(source), line)
    if isinstance(remove, tuple):
        start, end = _span(statement, source)
        if body := getattr(statement, "body", None):
            end = _span(body[0], source)[0]
        return _splice(source, start, end, _replaced_once(_cut(source, start, end), *remove))
    if remove == "skip":
        node, text = _skipped(statement, line)
    elif remove == "operand":
        node, text = _without_operand(statement, line)
    elif remove == "first":
        node, text = _first_argument(statement, line)
    elif remove in ("never", "always"):
        node, text = _decided(statement, line, remove == "always")
    else:
        raise DataError(f"unknown removal {remove!r}; use one of {', '.join(KINDS)}, or replace: [old, new]")
    return _splice(source, *_span(node, source), text)


def _replaced_on_line(content: str, line: int, remove: str | tuple[str, str]) -> str:
    if not isinstance(remove, tuple):
        raise DataError(f"{remove!r} is for Python; use replace: [old, new]")
    lines = content.split("\n")
    lines[line - 1] = _replaced_once(lines[line - 1], *remove)
    return "\n".join(lines)


def _replaced_once(text: str, old: str, new: str) -> str:
    text = MARKER.sub("", text)  # an id may hold the text to replace
    if text.count(old) != 1:
        raise DataError(f"the marked code holds {old!r} {text.count(old)} times; it must occur once")
    return text.replace(old, new)


@functools.cache
def _parse(source: str) -> ast.Module:
    """Return a file's syntax tree; a file has many guards, and a test file many of their tests."""
    return ast.parse(source)


def _statement_at(tree: ast.Module, line: int) -> _Statement:
    """Return the innermost statement, or `except` clause, with code on a line; of a compound one only the header."""
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.ExceptHandler) and _first_line(node) <= line <= (node.end_lineno or 0)
    ]
    if not found or (getattr(found[-1], "body", None) and _first_line(found[-1].body[0]) <= line):  # type: ignore[union-attr]
        raise DataError("the marker is not on a statement's line")
    return found[-1]


def _first_line(node: ast.AST) -> int:
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))  # type: ignore[attr-defined]


def _expressions(statement: _Statement) -> list[ast.AST]:
    children = ast.iter_child_nodes(statement)
    return [node for node in children if not isinstance(node, ast.stmt | ast.ExceptHandler | ast.match_case)]


def _outermost(nodes: Iterable[ast.AST], found_in: Callable[[ast.AST], list[ast.AST]]) -> list[ast.AST]:
    """Return what `found_in` finds in nodes; the children of a node in which it finds something are not searched."""
    return [part for node in nodes for part in found_in(node) or _outermost(ast.iter_child_nodes(node), found_in)]


def _only(nodes: Sequence[ast.AST], what: str) -> ast.AST:
    if len(nodes) != 1:
        raise DataError(f"{len(nodes)} {what} on the marked line; there must be one")
    return nodes[0]


def _decided(statement: _Statement, line: int, value: bool) -> tuple[ast.AST, str]:
    def conditions(node: ast.AST) -> list[ast.AST]:
        tests = [node.test] if isinstance(node, ast.IfExp) else node.ifs if isinstance(node, ast.comprehension) else []
        return [test for test in tests if test.lineno == line]

    own = next((getattr(statement, name) for name in ("test", "iter", "type") if hasattr(statement, name)), None)
    found = [] if own is None or own.lineno != line else [own]
    found = found or _outermost(_expressions(statement), conditions) or ([] if own is None else [own])
    node = _only(found, "conditions")
    if node is own and not isinstance(statement, ast.If | ast.While):
        if value:
            raise DataError("`always` needs a condition")
        return node, "()"
    return node, str(value)


def _skipped(statement: _Statement, line: int) -> tuple[ast.AST, str]:
    if isinstance(statement, ast.With | ast.AsyncWith):
        contexts = [item.context_expr for item in statement.items]
        return _only([node for node in contexts if node.lineno == line], "contexts"), NO_CONTEXT
    return statement, "pass"


def _without_operand(statement: _Statement, line: int) -> tuple[ast.AST, str]:
    def operations(node: ast.AST) -> list[ast.AST]:
        return [node] if isinstance(node, ast.BoolOp) and any(value.end_lineno == line for value in node.values) else []

    node = _only(_outermost(_expressions(statement), operations), "operations with `and` or `or`")
    assert isinstance(node, ast.BoolOp)
    dropped = [value for value in node.values if value.end_lineno == line][-1]
    others = [value for value in node.values if value is not dropped]
    return node, f"({ast.unparse(others[0] if len(others) == 1 else ast.BoolOp(node.op, others))})"


def _first_argument(statement: _Statement, line: int) -> tuple[ast.AST, str]:
    def calls(node: ast.AST) -> list[ast.AST]:
        return [node] if getattr(node, "lineno", None) == line and _arguments(node) else []

    node = _only(_outermost(_expressions(statement), calls), "calls")
    return node, f"({ast.unparse(_arguments(node)[0])})"


def _arguments(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple):
        return node.slice.elts
    return node.args if isinstance(node, ast.Call) else []


def _span(node: ast.AST, source: str) -> tuple[int, int]:
    """Return the byte offsets of a node's start, decorators included, and end."""
    starts = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]
    position: Any = node
    return starts[_first_line(node) - 1] + position.col_offset, starts[
        position.end_lineno - 1
    ] + position.end_col_offset


def _cut(source: str, start: int, end: int) -> str:
    return source.encode()[start:end].decode()


def _splice(source: str, start: int, end: int, text: str) -> str:
    data = source.encode()
    return (data[:start] + text.encode() + data[end:]).decode()


def unlisted(guards: Sequence[Guard], markers: Markers) -> list[str]:
    """Return the ids that mark code and have no entry."""
    return sorted(set(markers) - {guard.id for guard in guards})


def faults_of(guard: Guard, markers: Markers, root: Path = ROOT) -> Iterator[str]:
    """Yield the errors of an entry: a bad id, a missing marker, a removal that does not parse, a missing test."""
    if not GUARD_ID.fullmatch(guard.id):
        yield f"{guard.id}: an id is two to five lower-case words with hyphens"
    try:
        file, content = without(guard, markers, root)
        if file.suffix == ".py":
            ast.parse(content)
        if MARKER.sub("", content) == MARKER.sub("", file.read_text(encoding="utf-8")):
            yield f"{guard.id}: the removal changes nothing"
    except (DataError, SyntaxError) as error:
        yield f"{guard.id}: {error}"
    if not guard.tests:
        yield f"{guard.id}: names no test"
    for test in guard.tests:
        name, _, function = test.partition("::")
        if function.partition("[")[0] not in _functions(root / name):
            yield f"{guard.id}: there is no test {test}"


def _functions(file: Path) -> frozenset[str]:
    return _functions_in(file.read_text(encoding="utf-8")) if file.exists() else frozenset()


@functools.cache
def _functions_in(source: str) -> frozenset[str]:
    nodes = ast.walk(_parse(source))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def not_missed(guards: Sequence[Guard]) -> list[Guard]:
    """Remove guards one by one, print the results, and return the guards whose removal no test notices.

    Raises:
        DataError: an entry is out of date, or a test fails before any removal.
    """
    markers = find_markers()
    if faults := [fault for guard in guards for fault in faults_of(guard, markers)]:
        raise DataError("; ".join(faults))
    found: list[Guard] = []
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        root = copy_tree(Path(folder) / "tree")
        tests = list(dict.fromkeys(test for guard in guards for test in guard.tests))
        whole = run_tests(root, tests, ALL_SECONDS, Path(folder))
        if whole.code != PASSED:
            raise DataError(f"the tests fail before any removal, so they prove nothing: {whole.output}")
        say(f"{whole.tests} tests pass before any removal")
        for guard in guards:
            began = time.monotonic()
            outcome = _run_without(root, guard, markers)
            is_red = outcome.code == FAILED and outcome.failures > 0
            say(f"{'red' if is_red else 'NOT MISSED'}  {guard.id}: {guard.name} ({time.monotonic() - began:.0f} s)")
            if not is_red:
                say(f"  exit code {outcome.code}: {outcome.output}")
                found.append(guard)
    return found


def copy_tree(target: Path) -> Path:
    """Copy the repository's files, without those that git ignores; return the copy's root."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def _run_without(root: Path, guard: Guard, markers: Markers) -> Outcome:
    file, content = without(guard, markers, root)
    whole = file.read_text(encoding="utf-8")
    file.write_text(content, encoding="utf-8")
    try:
        return run_tests(root, guard.tests, SECONDS, root.parent, "--exitfirst")
    finally:
        file.write_text(whole, encoding="utf-8")


if __name__ == "__main__":
    entry_point(GuardsConfig, main)
