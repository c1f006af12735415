"""What a benchmark leaves: its figures as JSON and as a page, each with machine, day, commit and load."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.presentation import say


def say_rows(rows: Iterable[Row]) -> list[Row]:
    """Print each row as soon as it is measured; return all of them."""
    found = []
    for row in rows:
        say("  ".join(cell for cell in row.cells if cell))
        found.append(row)
    return found


def program_digest(files: Iterable[Path]) -> str:
    """Return a digest of what Python files do: comments, layout and strings that stand alone change nothing."""
    programs = [_Bare().visit(ast.parse(file.read_bytes())) for file in files]
    return hashlib.sha256("\0".join(map(ast.dump, programs)).encode()).hexdigest()[:16]


def swarm_digest(*judges: str) -> str:
    """Return a digest of what swarms do, and of the files of `tests/support` that judge them."""
    rooms = (sorted((ROOT / "spes_p2p" / room).rglob("*.py")) for room in ("codecs", "swarm", "training"))
    return program_digest([*chain.from_iterable(rooms), *(ROOT / "tests" / "support" / name for name in judges)])


class _Bare(ast.NodeTransformer):
    """Drops docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node


def write_json(path: Path, circumstances: Circumstances, **figures: Any) -> None:
    """Write what was measured, and where and when."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document: Mapping[str, Any] = {**figures, "circumstances": asdict(circumstances)}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def write_page(path: Path, circumstances: Circumstances, title: str, body: str) -> None:
    """Write a page of Markdown: its title, where and when, and what it shows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\n{circumstances.where}\n\n{body}", encoding="utf-8")


def write_rows(path: Path, circumstances: Circumstances, title: str, rows: Sequence[Row], **figures: Any) -> None:
    """Write rows, and what else was measured, to `path` with `.json`, and the rows as a page beside it."""
    found = [row._asdict() for row in rows]
    write_json(path.with_suffix(".json"), circumstances, figures=found, **figures)
    table = markdown_table(HEAD, [row.cells for row in rows])
    write_page(path.with_suffix(".md"), circumstances, title, table)
