"""The house rules that a machine can check: floors, sizes, no work at import, no code in data.

Every rule is a function of a tree's root, so that it is itself tested on small trees that break it.
"""

from __future__ import annotations

import ast
import functools
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# Lowest first. A room may import rooms on its own floor and below, except what BARRED forbids.
FLOORS: list[set[str]] = [
    {"__init__"},
    {"errors", "fs", "dtensor"},
    {"config_file"},
    {"codecs", "presentation"},
    {"config"},
    {"cli"},
    {"planner"},
    {"data"},
    {"optim"},
    {"swarm", "model"},
    {"training"},
    {"peer", "monitor", "sim"},
    {"commands"},
    {"__main__"},
]
# The swarm knows tensors, not models; what learns knows no network.
BARRED = {"swarm": {"model", "optim", "data"}, "model": {"swarm"}}
# Each top-level folder may import those listed; everything may import other people's packages.
HOUSES = {
    "spes_p2p": set(),
    "monitor": {"spes_p2p"},
    "peers": {"spes_p2p"},
    "scripts": {"spes_p2p"},
    "benchmarks": {"spes_p2p"},
}
INHABITED = {*HOUSES, "tests"}

MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 60
MAX_ENTRY_LINES = 30

# Calls that only define something.
DEFINING_CALLS = {
    *("getLogger", "get_logger", "TypeVar", "ParamSpec", "ContextVar", "NewType", "namedtuple", "NamedTuple"),
    *("Family", "Form"),  # rows of tables
    *("Field", "ConfigDict", "StringConstraints", "TypeAdapter"),
    *("AfterValidator", "BeforeValidator", "PlainValidator", "WrapValidator"),
    *(
        "frozenset",
        "tuple",
        "dict",
        "set",
        "len",
        "range",
        "zip",
        "VectorName",
        "float",
        "compile",
        "Struct",
        "MappingProxyType",
        "timedelta",
    ),
}
CODE_IN_DATA = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
FORBIDDEN_CALLS = {"torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "time.sleep", "eval", "exec"}


@dataclass(frozen=True)
class Module:
    """One source file below a root."""

    path: Path
    root: Path

    @property
    def where(self) -> str:
        return self.path.relative_to(self.root).as_posix()

    @property
    def house(self) -> str:
        return self.path.relative_to(self.root).parts[0]

    @property
    def package(self) -> list[str]:
        return list(self.path.relative_to(self.root).parent.parts)

    @property
    def room(self) -> str:
        """The first name below `spes_p2p`: a module or a folder."""
        return self.path.relative_to(self.root).parts[1].removesuffix(".py")

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


def imported_names(module: Module) -> Iterator[tuple[int, list[str]]]:
    """Line and dotted parts of everything imported, lazily and for types too: knowledge is knowledge."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name.split(".")
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            if node.level:
                package = module.package
                base = package[: len(package) - node.level + 1] + base
            for alias in node.names:
                yield node.lineno, [*base, alias.name]


def floor_of(room: str) -> int | None:
    return next((number for number, rooms in enumerate(FLOORS) if room in rooms), None)


def upward_imports(root: Path) -> list[str]:
    problems = []
    for module in modules(root, *HOUSES):
        if module.house == "spes_p2p" and floor_of(module.room) is None:
            problems.append(f"{module.where}: {module.room} has no floor; give it one in FLOORS")
            continue
        for line, parts in imported_names(module):
            where = f"{module.where}:{line}"
            if parts[0] in INHABITED - {module.house} - HOUSES[module.house]:
                problems.append(f"{where}: {module.house}/ imports {parts[0]}/")
            elif parts[0] == module.house == "spes_p2p":
                problems.extend(f"{where}: {reason}" for reason in _room_problems(module.room, parts))
    return list(dict.fromkeys(problems))  # one for `from x import a, b`


def _room_problems(room: str, parts: list[str]) -> Iterator[str]:
    target = parts[1] if len(parts) > 1 else "__init__"
    own, other = floor_of(room), floor_of(target)
    assert own is not None
    if other is None:
        # `from spes_p2p import __version__`: a name of the package itself, or a room that does not exist.
        if not target.startswith("_"):
            yield f"imports {target}, which has no floor; give it one in FLOORS"
    elif other > own:
        yield f"{room} imports {target}, which is above it"
    elif target in BARRED.get(room, ()):
        yield f"{room} must not know {target}"


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


def dangerous_code(root: Path) -> list[str]:
    problems = []
    for module in modules(root, "spes_p2p", "peers", "monitor"):
        for line, parts in imported_names(module):
            if parts[0] in CODE_IN_DATA or ".".join(parts) in FORBIDDEN_CALLS:
                problems.append(f"{module.where}:{line}: imports {'.'.join(parts)}")
        for node in ast.walk(module.tree):
            problems.extend(f"{module.where}:{line}: {reason}" for line, reason in _node_dangers(node))
    return problems


def _node_dangers(node: ast.AST) -> Iterator[tuple[int, str]]:
    if isinstance(node, ast.Call):
        name = dotted(node.func)
        if name in FORBIDDEN_CALLS:
            yield node.lineno, f"calls {name}"
        if any(k.arg == "allow_pickle" and not _is_false(k.value) for k in node.keywords):
            yield node.lineno, "allows pickle"
        if name in {"suppress", "contextlib.suppress"} and any(_is_blind(argument) for argument in node.args):
            yield node.lineno, "suppresses every exception"
    elif isinstance(node, ast.ExceptHandler):
        silent = all(isinstance(child, ast.Pass) or _is_ellipsis(child) for child in node.body)
        if node.type is None or (silent and _is_blind(node.type)):
            yield node.lineno, "swallows every exception"


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


def _is_blind(node: ast.expr) -> bool:
    names = node.elts if isinstance(node, ast.Tuple) else [node]
    return any(dotted(name) in {"Exception", "BaseException"} for name in names)


RULES: list[Callable[[Path], list[str]]] = [
    upward_imports,
    oversized,
    long_entry_scripts,
    work_at_import,
    dangerous_code,
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_house_keeps_its_rules(rule: Callable[[Path], list[str]]) -> None:
    assert any(modules(REPOSITORY, "spes_p2p")), "found no modules to check"
    problems = rule(REPOSITORY)
    assert not problems, "\n".join(["", *problems])


# Rule, a file, its content, what is reported (None: nothing).
CASES: list[tuple[Callable[[Path], list[str]], str, str, str | None]] = [
    (
        upward_imports,
        "spes_p2p/model/bank.py",
        "from spes_p2p.training import loop",
        "model imports training",
    ),
    (upward_imports, "spes_p2p/errors.py", "import spes_p2p.config", "errors imports config, which is above it"),
    (upward_imports, "spes_p2p/config.py", "from spes_p2p import peer", "config imports peer, which is above it"),
    (upward_imports, "spes_p2p/model/bank.py", "from ..swarm import a, b", "model must not know swarm"),
    (upward_imports, "spes_p2p/swarm/dht.py", "def f():\n    import spes_p2p.model.bank", "swarm must not know model"),
    (upward_imports, "spes_p2p/swarm/dht.py", "from spes_p2p.optim.outer import x", "swarm must not know optim"),
    (upward_imports, "spes_p2p/peer/life.py", "import monitor.view", "spes_p2p/ imports monitor/"),
    (upward_imports, "spes_p2p/monitor/view.py", "from peers import run_peer", "spes_p2p/ imports peers/"),
    (upward_imports, "peers/run_peer.py", "from tests.swarm import local", "peers/ imports tests/"),
    (upward_imports, "spes_p2p/utils.py", "", "utils has no floor"),
    (upward_imports, "spes_p2p/cli.py", "from spes_p2p.helpers import x", "helpers, which has no floor"),
    (upward_imports, "spes_p2p/model/bank.py", "from spes_p2p.optim import merge\nfrom . import kernels", None),
    (upward_imports, "spes_p2p/swarm/dht.py", "from ..codecs import x\nfrom .claims import y\nimport torch", None),
    (upward_imports, "spes_p2p/__main__.py", "from spes_p2p import __version__, peer", None),
    (
        upward_imports,
        "spes_p2p/monitor/view.py",
        "from spes_p2p.swarm import records\nfrom spes_p2p.monitor.sinks import x",
        None,
    ),
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
    (dangerous_code, "spes_p2p/codecs.py", "def f():\n    import pickle", "imports pickle"),
    (dangerous_code, "spes_p2p/codecs.py", "import torch\ndef f(): return torch.load('x')", "calls torch.load"),
    (dangerous_code, "spes_p2p/codecs.py", "from torch import load", "imports torch.load"),
    (dangerous_code, "spes_p2p/monitor/view.py", "def f(s): return yaml.load(s)", "calls yaml.load"),
    (dangerous_code, "spes_p2p/monitor/view.py", "def f(s): return eval(s)", "calls eval"),
    (dangerous_code, "peers/run_peer.py", "import time\ntime.sleep(1)", "calls time.sleep"),
    (dangerous_code, "spes_p2p/peer/life.py", "try:\n    f()\nexcept:\n    raise", "swallows every exception"),
    (dangerous_code, "spes_p2p/peer/life.py", "try:\n    f()\nexcept (OSError, Exception):\n    ...", "swallows every"),
    (dangerous_code, "spes_p2p/peer/life.py", "with contextlib.suppress(BaseException):\n    f()", "suppresses every"),
    (dangerous_code, "spes_p2p/peer/life.py", "def f(p): return np.load(p, allow_pickle=True)", "allows pickle"),
    (dangerous_code, "spes_p2p/peer/life.py", "model.eval()\ntry:\n    f()\nexcept KeyError:\n    pass", None),
    (dangerous_code, "spes_p2p/peer/life.py", "np.load(p, allow_pickle=False)\nyaml.safe_load(p)", None),
]


@pytest.mark.parametrize(("rule", "file", "content", "expected"), CASES, ids=[str(n) for n in range(len(CASES))])
def test_a_broken_rule_is_reported_with_its_place(
    tmp_path: Path, rule: Callable[[Path], list[str]], file: str, content: str, expected: str | None
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text(content, encoding="utf-8")
    problems = rule(tmp_path)
    if expected is None:
        assert problems == []
    else:
        assert len(problems) == 1 and problems[0].startswith(file) and expected in problems[0], problems


def test_every_room_in_the_house_stands_on_one_floor() -> None:
    rooms = [room for floor in FLOORS for room in floor]
    assert len(rooms) == len(set(rooms))
