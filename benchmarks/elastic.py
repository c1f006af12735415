"""An elastic swarm's scoreboard: what is lost when peers die, how fast others take over, what coming and going costs.

    .venv/bin/python benchmarks/elastic.py [--only kills newcomer ...] [--repeats 25] [--write]

Eight real peers die in each phase of their lives, one at a time, and come back; their history is then held against four
promises (`tests/support/history.py`). The other parts are told where they are measured.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch
from pydantic_settings import SettingsConfigDict

from benchmarks import elastic_rows
from benchmarks.elastic_rows import Bench
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.presentation import say

Part = Literal["kills", "claims", "churn", "newcomer", "connection", "saving"]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "kills": elastic_rows.kills,
    "claims": elastic_rows.claims,
    "churn": elastic_rows.churn,
    "newcomer": elastic_rows.newcomer,
    "connection": elastic_rows.connection,
    "saving": elastic_rows.saving,
}
BOARD = Scoreboard(elastic_rows.RESULTS, Path("docs/benchmarks.md"), "ELASTIC", PARTS)


class ElasticConfig(CommandConfig):
    """Peers that come, go and die."""

    model_config = SettingsConfigDict(cli_prog_name="elastic.py")

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 25
    """Kills in each of the nine phases, beside those that are on record with the same code."""
    seed: int | None = None
    """Of all that is drawn; drawn itself by default."""
    write: bool = False
    """Leave what was measured in benchmarks/results/elastic.json and, between its markers, in docs/benchmarks.md."""
    log_level: Literal["debug", "info", "warning"] = "warning"
    """Least severe event to log."""


def main(config: ElasticConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    say(f"seed {seed}")
    is_reached = BOARD.run(
        config.only,
        lambda name: Bench(config.repeats, seed),
        (lambda bench: {"seed": seed, "seen": bench.seen}) if config.write else None,
    )
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(ElasticConfig, main)
