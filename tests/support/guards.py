"""Remove each guard of the library in a copy of the repository and check that a test then fails.

    .venv/bin/python tests/support/guards.py [FILE[:LINE] ... [-- TESTS ...]]

A guard is a check whose absence would let a peer do harm. A comment `# guard: KIND` at the end of its line, or alone on
the line above, says how the guard is removed:

- `never`, `always`: a condition becomes False or True: of an `if`, `while`, conditional expression or filter. It is the
  outermost one that begins on the line, otherwise that of the statement whose header the line belongs to. `never` also
  makes a `for` run over nothing, and an `except` catch nothing.
- `operand`: the last operand of `and` or `or` that ends on the line is dropped, in the outermost such operation.
- `first`: the outermost call that begins on the line becomes its first argument, `Annotated[int, ...]` `int`.
- `skip`: the body of a `with` runs without the context; any other statement becomes `pass`.
- `OLD -> NEW`: this text, found once in the statement (of a compound statement: in its header), is replaced.
- `return X`, or any other statement with a blank in it: it takes the marked statement's place.

The tests of the commit lane, and others marked `guard`, first run with a note in each guard. This finds the tests in
which its removal makes a difference. They run again without the guard, cheapest first, until one fails.
"""

from __future__ import annotations

import ast
import functools
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
MARK = re.compile(r"[ \t]*# guard: (.*)$", re.MULTILINE)
_parse = functools.cache(ast.parse)
NO_CONTEXT = '__import__("contextlib").nullcontext()'
NOT_COPIED = ".git", ".venv", "runs", "wandb", "__pycache__", "*_cache"
AT_IMPORT = {
    "config": "unit/(test_config|swarm/test_swarm_bounds|data/|monitor/)|attacks/test_corpus",
    "swarm": "unit/swarm/test_swarm_(certificate|following)|attacks/|swarm/test_processes",
    "data": "unit/data/",
    "monitor": "unit/monitor/",
}
"""Tests of a package's guards that leave no note, because they act at import or where no file can be written."""
NUM_TESTS, TEST_SECONDS, ALL_SECONDS = 200, 120, 4 * 3600
"""Limits: tests of one guard, seconds of one of them, and seconds of all tests before any removal."""
NOTES = """
import contextlib, os
from time import monotonic
log, last = {log!r} + os.environ.get("PYTEST_XDIST_WORKER", ""), {{}}
def note(*words):
    with contextlib.suppress(OSError), open(log, "a") as file:  # a confined process may not
        file.write(" ".join(map(str, words)) + "\\n")
def at(guard, value=None, fires=None):
    if fires in (None, bool(value)) and monotonic() - last.get(guard, -1) > 0.05:
        last[guard] = monotonic()
        note("guard", guard)
    return value
def pytest_runtest_logstart(nodeid, location):
    last.clear()
    note("test", nodeid)
def pytest_runtest_logreport(report):
    if report.when == "call" and report.passed:
        note("passed", report.duration, report.nodeid)
"""
"""A module of the copy, and a plugin of pytest. All processes of a test write to one file, after the test's line."""


class Guard(NamedTuple):
    """A mark: its file, relative to the root, the line of the guard, counted from 1, and how to remove it."""

    file: str
    line: int
    kind: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def find_guards(root: Path = ROOT) -> Iterator[Guard]:
    for path in [*sorted(root.glob("spes_p2p/**/*.py")), *root.glob("compose.yaml"), *root.glob("Dockerfile")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
            if mark := MARK.search(line):
                yield Guard(str(path.relative_to(root)), number + (not line[: mark.start()].strip()), mark[1])


def edits(source: str, guard: Guard) -> tuple[str, str]:
    """Return a file's text without a guard, and with a note if the guard makes a difference (none at import)."""
    file, line, kind = guard
    if not file.endswith(".py"):
        lines = source.split("\n")
        lines[line - 1] = _replaced(lines[line - 1], kind)
        return "\n".join(lines), source
    nodes = [node for node in ast.walk(_parse(source)) if isinstance(node, ast.stmt | ast.ExceptHandler)]
    *outer, statement = [node for node in nodes if _first_line(node) <= line <= (node.end_lineno or 0)]
    body = getattr(statement, "body", None)
    if body and _first_line(body[0]) <= line:
        raise ValueError("the mark is not on a statement's line")
    parts = [node for node in ast.iter_child_nodes(statement) if not isinstance(node, ast.stmt | ast.ExceptHandler)]
    found = list(_outermost(parts, kind, line))
    own = next((getattr(statement, name) for name in ("test", "iter", "type") if hasattr(statement, name)), None)
    is_condition = isinstance(statement, ast.If | ast.While)
    if own and (own.lineno == line or not found) and (kind == "never" or (kind == "always" and is_condition)):
        found = [(own, str(kind == "always") if is_condition else "()", own, kind == "never" if is_condition else None)]
    probe, fires = own or next((item.context_expr for item in getattr(statement, "items", ())), None), None
    start, end = _span(source, statement)
    if found or kind in ("never", "always", "operand", "first"):
        ((node, text, probe, fires),) = found
        start, end = _span(source, node)
    elif " -> " in f"{kind} ":
        end = _span(source, body[0])[0] if body else end
        text = _replaced(source.encode()[start:end].decode(), kind)
    elif kind == "skip" or (" " in kind and not body):
        text = "pass" if kind == "skip" else kind
    else:
        raise ValueError(f"{kind!r} does not remove such a statement")
    without, note = _spliced(source, start, end, text), f'__import__("guards_seen").at("{guard}"'
    functions = (node for node in outer if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    if (body and not probe) or not any(_first_line(node.body[0]) <= line for node in functions):
        return without, source
    if not probe:
        return without, _spliced(source, start, start, f"{note}); ")
    start, end = _span(source, probe)
    old = source.encode()[start:end].decode()
    return without, _spliced(
        source, start, end, f"({note}) or ({old}))" if fires is None else f"{note}, ({old}), {fires})"
    )


def _outermost(nodes: Iterable[ast.AST], kind: str, line: int) -> Iterator[tuple[Any, str, Any, bool | None]]:
    """Yield what a kind of removal fits: the node, its replacement, what tells if that differs, and its value then."""
    for node in nodes:
        match kind, node:
            case "operand", ast.BoolOp(op, values) if any(each.end_lineno == line for each in values):
                dropped = [each for each in values if each.end_lineno == line][-1]
                rest = ast.unparse(ast.BoolOp(op, [each for each in values if each is not dropped]))
                yield node, f"({rest})", dropped, isinstance(op, ast.Or)
            case "first", ast.Call(_, [first, *_]) | ast.Subscript(_, ast.Tuple([first, *_])) if node.lineno == line:
                yield node, f"({ast.unparse(first)})", node, None
            case "skip", ast.withitem(context) if context.lineno == line:
                yield context, NO_CONTEXT, context, None
            case "never" | "always", ast.IfExp(test) | ast.comprehension(ifs=[test]) if test.lineno == line:
                yield test, str(kind == "always"), test, kind == "never"
            case _:
                yield from _outermost(ast.iter_child_nodes(node), kind, line)


def _first_line(node: Any) -> int:
    return min(part.lineno for part in (node, *getattr(node, "decorator_list", ())))


def _span(source: str, node: Any) -> tuple[int, int]:
    """Return the byte offsets of a node's start, decorators included, and end."""
    starts = [0, *itertools.accumulate(map(len, source.encode().splitlines(keepends=True)))]
    return starts[_first_line(node) - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset


def _spliced(source: str, start: int, end: int, text: str) -> str:
    return (source.encode()[:start] + text.encode() + source.encode()[end:]).decode()


def _replaced(text: str, kind: str) -> str:
    old, arrow, new = f"{kind} ".partition(" -> ")
    text = MARK.sub("", text)  # it holds the text to replace as well
    if not arrow or text.count(old) != 1:
        raise ValueError(f"the marked code holds {old!r} {text.count(old)} times; it must occur once")
    return text.replace(old, new.strip())


def run_tests(root: Path, *words: str) -> str:
    """Run pytest in the copy; return the end of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-rf", "--tb=line", "-p", "no:cacheprovider"]
    command += ["--disable-warnings", "-m", "not full or guard", *words]
    # No compiled files: two edits of equal length within one second would share one.
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(command, cwd=root, env=environment, stdout=subprocess.PIPE, text=True, timeout=ALL_SECONDS)
    return ended.stdout[-3000:]


def find_tests(guards: Sequence[Guard], sources: Mapping[str, str], root: Path, *tests: str) -> Iterator[list[str]]:
    """Run tests with notes in the guards; yield for each guard the passed tests to try, cheapest first."""
    noted = {**sources, "guards_seen.py": NOTES.format(log=str(root.parent / "log"))}
    for guard in guards:
        noted[guard.file] = edits(noted[guard.file], guard)[1]
    for name, source in noted.items():
        (root / name).write_text(source, encoding="utf-8")
    print(run_tests(root, "-p", "guards_seen", "-n", "2", "--dist", "loadfile", *tests), flush=True)
    for name, source in sources.items():
        (root / name).write_text(source, encoding="utf-8")
    seconds: dict[str, float] = {}
    seen: defaultdict[str, set[str]] = defaultdict(set)
    for line in (line for log in root.parent.glob("log*") for line in log.read_text(encoding="utf-8").splitlines()):
        match line.split(" ", 2):
            case "passed", taken, test:
                seconds[test] = float(taken)
            case "guard", place:
                seen[place].add(test)
            case _:
                test = line.removeprefix("test ")
    for guard in guards:
        package = guard.file.removeprefix("spes_p2p/").split("/")[0]
        others = f"tests/({AT_IMPORT.get(package, 'swarm/test_peer_confined')})"
        found = seen[str(guard)] & seconds.keys() or {test for test in seconds if re.match(others, test)}
        yield sorted(found, key=lambda test: (not test.startswith("tests/unit/"), seconds[test]))[:NUM_TESTS]


def main(words: Sequence[str]) -> int:
    """Remove the selected guards one by one and print the results; return 1 if a removal goes unnoticed."""
    names = list(itertools.takewhile("--".__ne__, words))
    guards = [guard for guard in find_guards() if not names or {guard.file, str(guard)} & {*names}]
    sources = {guard.file: (ROOT / guard.file).read_text(encoding="utf-8") for guard in guards}
    missed = 0
    with tempfile.TemporaryDirectory(prefix="guards-") as folder:
        root = Path(folder) / "tree"
        shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for guard, tests in zip(guards, find_tests(guards, sources, root, *words[len(names) + 1 :]), strict=True):
            (root / guard.file).write_text(edits(sources[guard.file], guard)[0], encoding="utf-8")
            output = run_tests(root, "-x", f"--timeout={TEST_SECONDS}", *tests) if tests else "no test"
            (root / guard.file).write_text(sources[guard.file], encoding="utf-8")
            failed = re.search(r"^FAILED (.*)", output, re.MULTILINE)
            print(f"{guard} ({guard.kind}):", failed[1] if failed else f"NOT MISSED {output}", flush=True)
            missed += not failed
    print(f"guards whose removal turns a test red: {len(guards) - missed} of {len(guards)}")
    return 1 if missed or not guards else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
