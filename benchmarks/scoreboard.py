"""A table whose parts are measured one at a time, each leaving the others' figures as they were."""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import Circumstances, load_average
from benchmarks.records import say_rows
from benchmarks.tables import HEAD, Row, fill, markdown_table

BUSY_LOAD = 1.5
"""Load average from which a part is called measured beside other processes."""


@dataclass(frozen=True)
class Scoreboard:
    """The table's place.

    Attributes:
        results: Its figures as JSON, by part.
        page: The page that shows it.
        marker: Between which markers.
        parts: What measures each part, by its name, in the table's order.
    """

    results: Path
    page: Path
    marker: str
    parts: Mapping[str, Callable[[Any], Iterator[Row]]]

    def run(
        self, only: Sequence[str], bench_of: Callable[[str], Any], details_of: Callable[[Any], dict[str, Any]] | None
    ) -> bool:
        """Measure parts and print their rows; tell whether no goal was missed.

        Args:
            only: Their names; without any, all are measured.
            bench_of: Returns what a part is measured with.
            details_of: Returns what is written beside its rows; None writes nothing.
        """
        is_reached = True
        for name in only or self.parts:
            bench = bench_of(name)
            rows, circumstances = self.measure(name, functools.partial(self.parts[name], bench))
            is_reached &= all(row.is_reached is not False for row in rows)
            if details_of is not None:
                self.write(name, rows, circumstances, **details_of(bench))
        return is_reached

    def measure(self, name: str, rows: Callable[[], Iterator[Row]]) -> tuple[list[Row], Circumstances]:
        """Print a part's rows as they come; where it fails, one that says why, so that the others can be measured."""
        load_before = load_average()
        return say_rows(_rows(name, rows)), Circumstances.now(load_before, None)

    def write(self, name: str, rows: Sequence[Row], circumstances: Circumstances, **details: Any) -> None:
        """Leave a part's figures, and everything that they were worked out from, beside those of the other parts."""
        document = json.loads(self.results.read_text()) if self.results.exists() else {}
        figures = [row._asdict() for row in rows]
        document[name] = {"figures": figures, **details, "circumstances": asdict(circumstances)}
        known = {part: document[part] for part in self.parts if part in document}
        self.results.write_text(json.dumps(known, indent=1) + "\n")
        self.show()

    def show(self) -> None:
        """Put the figures on record into the page, and below them when each part was measured."""
        known: dict[str, Any] = json.loads(self.results.read_text())
        lines = [Row(**figure).cells for part in known.values() for figure in part["figures"]]
        parts = ", ".join(f"*{name}* {_when(**part['circumstances'])}" for name, part in known.items())
        told = textwrap.fill(f"Measured: {parts}.", 120, break_on_hyphens=False)
        fill(self.page, self.marker, f"{markdown_table(HEAD, lines)}\n{told}\n")


def _when(date: str, commit: str | None, load_before: float, **others: object) -> str:
    """Return the day, the commit, and whether other processes kept the cores busy when a part began."""
    busy = f", load {load_before:.0f}" if load_before >= BUSY_LOAD else ""
    return f"{date} ({commit or 'no commit'}{busy})"


def _rows(name: str, rows: Callable[[], Iterator[Row]]) -> Iterator[Row]:
    try:
        yield from rows()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the table
        yield Row(f"{name}: could not be measured", f"{type(error).__name__}: {error}", is_reached=False)
