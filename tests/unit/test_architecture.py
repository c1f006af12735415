"""The house rules that a machine can check: floors, sizes, no work at import, no code in data.

Every rule is a function of a tree's root, so that it is itself tested on small trees that break it.
"""

from __future__ import annotations

import ast
import functools
import io
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

HOUSES = ("spes_p2p", "monitor", "peers", "scripts", "benchmarks")
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ENTRY_LINES = 30

# Calls that only define something.
DEFINING_CALLS = {
    *("getLogger", "get_logger", "TypeVar", "ParamSpec", "ContextVar", "NewType", "namedtuple", "NamedTuple"),
    *("Family", "Form"),  # rows of tables
    *("Field", "ConfigDict", "StringConstraints", "TypeAdapter"),
    *("AfterValidator", "BeforeValidator", "PlainValidator", "TaskGroup", "WrapValidator"),
    *(
        *("frozenset", "tuple", "dict", "set", "len", "range", "zip", "VectorName", "ShardFormat", "float"),
        *("compile", "Struct", "MappingProxyType", "timedelta"),
    ),
}


@dataclass(frozen=True)
class Module:
    """One source file below a root."""

    path: Path
    root: Path

    @property
    def where(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def source(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def tree(self) -> ast.Module:
        return parse(self.source, str(self.path))


@functools.cache
def parse(source: str, path: str) -> ast.Module:
    """Return a file's syntax tree, which several rules walk."""
    return ast.parse(source, path)


def modules(root: Path, *houses: str) -> Iterator[Module]:
    for house in houses:
        for path in sorted((root / house).rglob("*.py")):
            yield Module(path, root)


def oversized(root: Path) -> list[str]:
    problems = []
    for module in modules(root, *HOUSES):
        if (num_lines := len(module.source.splitlines())) > MAX_MODULE_LINES:
            problems.append(f"{module.where}: {num_lines} lines, at most {MAX_MODULE_LINES}")
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = _body_lines(node)
                if num_lines > MAX_FUNCTION_LINES:
                    problems.append(
                        f"{module.where}:{node.lineno}: {node.name} has {num_lines} lines, at most {MAX_FUNCTION_LINES}"
                    )
    return problems


def _docstring(node: ast.AST) -> ast.Expr | None:
    body = getattr(node, "body", None)
    first = body[0] if isinstance(body, list) and body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return first
    return None


def _body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end without the docstring, whose length the style asks for."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    docstring = _docstring(function)
    return lines - (docstring.end_lineno - docstring.lineno + 1 if docstring and docstring.end_lineno else 0)


def entry_scripts(root: Path) -> Iterator[Module]:
    for path in [*(root / "peers").glob("*.py"), *(root / "scripts").glob("*.py"), root / "monitor" / "run_monitor.py"]:
        if path.exists():
            yield Module(path, root)


def long_entry_scripts(root: Path) -> list[str]:
    problems = []
    for module in entry_scripts(root):
        num_lines = _code_lines(module)
        if num_lines > MAX_ENTRY_LINES:
            problems.append(f"{module.where}: {num_lines} lines of code, at most {MAX_ENTRY_LINES}; move some out")
    return problems


def _code_lines(module: Module) -> int:
    """Lines that are neither blank nor comment nor docstring."""
    code: set[int] = set()
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(module.source).readline):
        if token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(module.tree):
        docstring = _docstring(node)
        if docstring and docstring.end_lineno:
            code.difference_update(range(docstring.lineno, docstring.end_lineno + 1))
    return len(code)


def work_at_import(root: Path) -> list[str]:
    problems: list[str] = []
    for module in modules(root, "spes_p2p"):
        for statement in module.tree.body:
            problems.extend(f"{module.where}:{line}: {reason}" for line, reason in _statement_problems(statement))
    return problems


def _statement_problems(statement: ast.stmt) -> Iterator[tuple[int, str]]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Import | ast.ImportFrom):
        return
    if isinstance(statement, ast.If) and ast.unparse(statement.test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
        return
    if not isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
        yield statement.lineno, f"{type(statement).__name__.lower()} statement runs at import; put it in a function"
        return
    lambdas = {id(child) for node in ast.walk(statement) if isinstance(node, ast.Lambda) for child in ast.walk(node)}
    for node in ast.walk(statement):
        if isinstance(node, ast.Call) and id(node) not in lambdas:
            name = dotted(node.func).rsplit(".", 1)[-1]
            if name not in DEFINING_CALLS:
                yield node.lineno, f"{name}() runs at import; call it in a function"


def dotted(node: ast.expr) -> str:
    """`torch.load` for the expression that reads so; what is no name becomes `?`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def silent_dangers(root: Path) -> list[str]:
    """Find what ruff has no rule for: pickles within arrays, waits for a time, and errors that nobody hears of."""
    problems = []
    for module in modules(root, "spes_p2p", "peers", "monitor"):
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.Call):
                continue
            if any(each.arg == "allow_pickle" and ast.unparse(each.value) != "False" for each in node.keywords):
                problems.append(f"{module.where}:{node.lineno}: allows pickle")
            if dotted(node.func) == "time.sleep":
                problems.append(f"{module.where}:{node.lineno}: sleeps; wait for what comes")
            is_blind = {"Exception", "BaseException"} & {dotted(argument) for argument in node.args}
            if is_blind and dotted(node.func) in ("suppress", "contextlib.suppress"):
                problems.append(f"{module.where}:{node.lineno}: suppresses every exception")
    return problems


RULES: list[Callable[[Path], list[str]]] = [oversized, long_entry_scripts, work_at_import, silent_dangers]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule):
    assert any(modules(REPOSITORY, "spes_p2p")), "found no modules to check"
    problems = rule(REPOSITORY)
    assert not problems, "\n".join(["", *problems])


# Rule, a file, its content, what is reported (None: nothing).
CASES: list[tuple[Callable[[Path], list[str]], str, str, str | None]] = [
    (oversized, "spes_p2p/peer/life.py", "\n" * 601, "601 lines, at most 600"),
    (oversized, "spes_p2p/peer/life.py", "\n" * 300, None),
    (
        oversized,
        "spes_p2p/monitor/view.py",
        "class A:\n    async def f(self):\n" + "        x = 1\n" * 60,
        "f has 61 lines",
    ),
    (
        oversized,
        "spes_p2p/monitor/view.py",
        'def f():\n    """\n' + "doc\n" * 30 + '    """\n' + "    x = 1\n" * 59,
        None,
    ),
    (long_entry_scripts, "scripts/plan.py", "x = 1\n" * 31, "31 lines of code, at most 30"),
    (long_entry_scripts, "monitor/run_monitor.py", "x = 1\n" * 31, "31 lines of code"),
    (long_entry_scripts, "peers/run_peer.py", '"""Doc\n\nmore\n"""\n# why\n\n' + "x = 1\n" * 30, None),
    (long_entry_scripts, "spes_p2p/monitor/view.py", "x = 1\n" * 100, None),
    (work_at_import, "spes_p2p/cli.py", "import logging\nlogging.basicConfig()", "basicConfig() runs at import"),
    (work_at_import, "spes_p2p/cli.py", "TABLE = [open(p) for p in ()]", "open() runs at import"),
    (work_at_import, "spes_p2p/cli.py", "for x in ():\n    y = x", "for statement runs at import"),
    (work_at_import, "spes_p2p/cli.py", "import logging\nlog = logging.getLogger(__name__)\nF = lambda: open(1)", None),
    (work_at_import, "spes_p2p/cli.py", "if DEBUG:\n    f()", "if statement runs at import"),
    (work_at_import, "spes_p2p/__main__.py", "if __name__ == '__main__':\n    main()", None),
    (work_at_import, "spes_p2p/cli.py", "class A:\n    x: int = Field(gt=1)\n\ndef f(): return open(1)", None),
    (silent_dangers, "spes_p2p/peer/life.py", "with contextlib.suppress(BaseException):\n    f()", "suppresses every"),
    (silent_dangers, "peers/run_peer.py", "import time\ntime.sleep(1)", "sleeps"),
    (silent_dangers, "spes_p2p/peer/life.py", "def f(p): return np.load(p, allow_pickle=True)", "allows pickle"),
    (silent_dangers, "spes_p2p/peer/life.py", "np.load(p, allow_pickle=False)\nsuppress(KeyError)", None),
]


@pytest.mark.parametrize(("rule", "file", "content", "expected"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_a_broken_rule_is_reported_with_its_place(tmp_path, rule, file, content, expected):
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    problems = rule(tmp_path)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1 and problems[0].startswith(file) and expected in problems[0], problems


def test_no_room_knows_those_above_it():
    """The rules are import-linter's contracts in pyproject.toml."""
    words = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint(['--no-cache'])"]
    ended = subprocess.run(words, cwd=REPOSITORY, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("import pickle", "TID251"),
        ("import torch\ntorch.load('x')", "TID251"),
        ("import yaml\nyaml.load('x')", "TID251"),
        ("eval('x')", "S307"),
        ("exec('x')", "S102"),
        ("try:\n    x = 1\nexcept:\n    pass", "E722"),
        ("try:\n    x = 1\nexcept (OSError, Exception):\n    pass", "BLE001"),
    ],
)
def test_code_in_data_and_silence_are_ruffs_to_refuse(code, rule):
    words = [sys.executable, "-m", "ruff", "check", "--stdin-filename", "spes_p2p/peer/life.py", "-"]
    ended = subprocess.run(words, input=code, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert rule in ended.stdout
