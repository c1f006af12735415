"""What a benchmark leaves: its rows as JSON and as a page, each with machine, day, commit and load."""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.tables import HEAD, Row, markdown_table
from spes_p2p.presentation import say

RESULTS = ROOT / "benchmarks" / "results"


def say_rows(rows: Iterable[Row]) -> list[Row]:
    """Print each row as soon as it is measured; return all of them."""
    found = []
    for row in rows:
        say("  ".join(cell for cell in row.cells if cell))
        found.append(row)
    return found


def measure_parts(
    name: str, parts: Mapping[str, Callable[[], Iterator[Row]]], only: Sequence[str], is_kept: bool
) -> int:
    """Measure parts of a table and print their rows; return 1 if a goal was missed.

    Args:
        name: The table's, in `benchmarks/results`.
        parts: What measures each part.
        only: The parts to measure; all if empty.
        is_kept: Whether to keep the rows, beside those of the other parts.
    """
    is_reached = True
    for part in only or parts:
        load_before = load_average()
        rows = say_rows(parts[part]())
        is_reached &= all(row.is_reached is not False for row in rows)
        if is_kept:
            path = RESULTS / f"{name}.json"
            known = json.loads(path.read_text()) if path.exists() else {}
            where = Circumstances.now(load_before, None)
            known[part] = {"figures": [row._asdict() for row in rows], "circumstances": asdict(where)}
            path.write_text(json.dumps(known, indent=1) + "\n")
            write_parts_page(name)
    return 0 if is_reached else 1


def write_parts_page(name: str) -> None:
    """Write the page of a table from its JSON."""
    known = json.loads((RESULTS / f"{name}.json").read_text())
    rows = [Row(**figure).cells for part in known.values() for figure in part["figures"]]
    measured = [f"- {part}: {Circumstances(**found['circumstances']).where}" for part, found in known.items()]
    text = "\n".join([markdown_table(HEAD, rows), *measured])
    (RESULTS / f"{name}.md").write_text(f"# {name.replace('_', ' ').capitalize()}\n\n{text}\n", encoding="utf-8")


def write_rows(path: Path, circumstances: Circumstances, title: str, rows: Sequence[Row], **figures: Any) -> None:
    """Write rows, and what else was measured, to `path` with `.json`, and the rows as a page beside it."""
    document = {"figures": [row._asdict() for row in rows], **figures, "circumstances": asdict(circumstances)}
    path.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    table = markdown_table(HEAD, [row.cells for row in rows])
    path.with_suffix(".md").write_text(f"# {title}\n\n{circumstances.where}\n\n{table}", encoding="utf-8")


def program_digest(files: Iterable[Path]) -> str:
    """Return a digest of what Python files do: comments, layout and strings that stand alone change nothing."""
    programs = [_Bare().visit(ast.parse(file.read_bytes())) for file in files]
    return hashlib.sha256("\0".join(map(ast.dump, programs)).encode()).hexdigest()[:16]


class _Bare(ast.NodeTransformer):
    """Drops docstrings."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node
