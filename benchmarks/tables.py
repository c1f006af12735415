"""A row of results, and the Markdown table that shows rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

HEAD = ("figure", "measured", "to reach", "reached")


class Row(NamedTuple):
    """A figure, its value, and, if it has one, the goal and whether it was reached."""

    figure: str
    measured: str
    goal: str = ""
    is_reached: bool | None = None

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The row as text."""
        return self.figure, self.measured, self.goal, {None: "", True: "yes", False: "NO"}[self.is_reached]


def markdown_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its first column flush left."""
    rule = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines)) + "\n"
