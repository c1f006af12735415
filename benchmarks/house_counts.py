"""What the redrawn house counts in the sources: every figure is a function of a repository's root."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

LIBRARY = ("spes_p2p", "monitor")
CODE = (*LIBRARY, "peers", "scripts", "benchmarks")
WORDS = ("whoever", "whom", "who", "nobody")
MAX_FUNCTION_LINES, MAX_PARAMETERS = 60, 8


def sources(root: Path, folders: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield path and text of each Python file in some of the repository's folders."""
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            yield path, path.read_text(encoding="utf-8")


def nodes(root: Path, folders: Sequence[str]) -> Iterator[ast.AST]:
    """Yield each node of the syntax trees of these files."""
    for _, text in sources(root, folders):
        yield from ast.walk(ast.parse(text))


def num_lines(root: Path) -> int:
    """Count the library's lines."""
    return sum(len(text.splitlines()) for _, text in sources(root, LIBRARY))


def num_files(root: Path) -> int:
    """Count the library's files."""
    return sum(1 for _ in sources(root, LIBRARY))


def lone_modules(root: Path) -> dict[str, str]:
    """Map each module that exactly one other module of the library imports to this importer.

    Imports inside functions count, and so does an `__init__` that re-exports a name.
    """
    texts = {_module_name(path.relative_to(root)): (path, text) for path, text in sources(root, LIBRARY)}
    importers = defaultdict(set)
    for importer, (path, text) in texts.items():
        package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
        for node in ast.walk(ast.parse(text)):
            for name in _imported(node, package, texts):
                if name in texts and name != importer:
                    importers[name].add(importer)
    return {name: min(found) for name, found in sorted(importers.items()) if len(found) == 1}


def _module_name(path: Path) -> str:
    return ".".join(path.parent.parts if path.name == "__init__.py" else path.with_suffix("").parts)


def _imported(node: ast.AST, package: str, modules: Mapping[str, object]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*above, *([node.module] if node.module else [])])
        for alias in node.names:
            yield name if (name := f"{base}.{alias.name}") in modules else base


def num_tuple_assignments(root: Path) -> int:
    """Count the library's statements such as `self.a, self.b = a, b`."""
    targets = (t for node in nodes(root, LIBRARY) if isinstance(node, ast.Assign) for t in node.targets)
    tuples = (target.elts for target in targets if isinstance(target, ast.Tuple))
    return sum(sum(isinstance(element, ast.Attribute) for element in elements) >= 2 for elements in tuples)


def _num_with_words(text: str) -> int:
    pattern = re.compile(rf"\b({'|'.join(WORDS)})\b", re.IGNORECASE)
    return sum(bool(pattern.search(line)) for line in text.splitlines())


def num_odd_lines_of_code(root: Path) -> int:
    """Count lines with one of `WORDS` in all code but the tests."""
    return sum(_num_with_words(text) for _, text in sources(root, CODE))


def num_odd_lines_of_docs(root: Path) -> int:
    """Count lines with one of `WORDS` in docs/ and README.md."""
    pages = [*(root / "docs").rglob("*.md"), root / "README.md"]
    return sum(_num_with_words(page.read_text(encoding="utf-8")) for page in pages)


def num_stubs(root: Path, num_words: int) -> int:
    """Count entries of the library's docstrings whose text has exactly `num_words` words."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) for node in nodes(root, LIBRARY) if isinstance(node, documented))
    return sum(len(entry.split()) == num_words for text in docstrings for entry in _entries(text or ""))


def _entries(docstring: str) -> Iterator[str]:
    """Yield the texts, without their names, of a docstring's Args, Attributes and Returns."""
    for section in re.findall(r"^(?:Args|Attributes|Returns):\n((?: .*\n?|\n)+)", docstring, re.MULTILINE):
        for entry in re.split(r"^ {4}(?! )", section, flags=re.MULTILINE)[1:]:
            yield entry.partition(": ")[2] or entry


def num_long_functions(root: Path) -> int:
    """Count functions of more than 60 lines, docstrings not counted, in all code but the tests."""
    functions = (node for node in nodes(root, CODE) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return sum(_num_body_lines(function) > MAX_FUNCTION_LINES for function in functions)


def _num_body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    docstring = function.body[:1] if ast.get_docstring(function) is not None else []
    whole, *without = ((node.end_lineno or node.lineno) - node.lineno + 1 for node in (function, *docstring))
    return whole - sum(without)


def num_long_constructors(root: Path) -> int:
    """Count the `__init__` with more than 8 parameters, `self` excluded, in all code but the tests."""
    classes = (node for node in nodes(root, CODE) if isinstance(node, ast.ClassDef))
    members = (member for class_ in classes for member in class_.body if isinstance(member, ast.FunctionDef))
    arguments = (member.args for member in members if member.name == "__init__")
    return sum(len([*a.posonlyargs, *a.args, *a.kwonlyargs]) - 1 > MAX_PARAMETERS for a in arguments)


def readme_lines(root: Path) -> list[str]:
    """Return README's lines."""
    return (root / "README.md").read_text(encoding="utf-8").splitlines()


def first_command_line(root: Path) -> int:
    """Return the number of the first command's line in README; the number of lines if there is none."""
    lines, is_inside = readme_lines(root), False
    for number, line in enumerate(lines, start=1):
        if line.startswith("```"):
            is_inside = line.strip() == "```bash"
        elif is_inside and line.strip() and not line.startswith("#"):
            return number
    return len(lines)


def table_share(root: Path, size: Callable[[str], int]) -> float:
    """Return the percentage of README that stands in tables, by a line's size."""
    lines = readme_lines(root)
    return 100 * sum(size(line) for line in lines if line.startswith("|")) / sum(map(size, lines))
