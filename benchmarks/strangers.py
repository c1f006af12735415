"""The scoreboard of a swarm among strangers: what is refused, what an attacker achieves, which guards would be missed.

    .venv/bin/python benchmarks/strangers.py [--only corpus guards ...] [--write]

Everything is real but the attackers' sweep, which is a simulation whose runs are kept (`benchmarks/attackers.py`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

import torch
from pydantic import Field
from pydantic_settings import SettingsConfigDict

from benchmarks import strangers_rows
from benchmarks.scoreboard import Scoreboard
from benchmarks.strangers_rows import MIN_EXECUTIONS, MIN_FLIPS, MIN_INPUTS, MIN_PROPERTIES, Bench
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.presentation import say

Part = Literal["corpus", "fuzz", "attackers", "streams", "downloads", "guards"]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "corpus": strangers_rows.corpus,
    "fuzz": strangers_rows.fuzz,
    "attackers": strangers_rows.attackers,
    "streams": strangers_rows.streams,
    "downloads": strangers_rows.downloads,
    "guards": strangers_rows.guards,
}
BOARD = Scoreboard(Path("benchmarks/results/strangers.json"), Path("docs/benchmarks.md"), "STRANGERS", PARTS)


class StrangersConfig(CommandConfig):
    """A swarm among strangers."""

    model_config = SettingsConfigDict(cli_prog_name="strangers.py")

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    inputs: Annotated[int, Field(ge=0)] = MIN_INPUTS
    """Mutants of sound messages that the fuzzer throws."""
    cases: Annotated[int, Field(ge=0)] = MIN_PROPERTIES
    """Property cases that the fuzzer draws."""
    executions: Annotated[int, Field(ge=0)] = MIN_EXECUTIONS
    """Executions that atheris guides by coverage; 0 does without it."""
    flips: PositiveInt = MIN_FLIPS
    """Bits to flip in downloads."""
    seed: Annotated[int, Field(ge=0)] | None = None
    """Of all that is drawn; drawn itself by default."""
    write: bool = False
    """Leave what was measured in benchmarks/results/strangers.json and, between its markers, in docs/benchmarks.md."""
    log_level: Literal["debug", "info", "warning", "error"] = "error"
    """Least severe event to log; peers that are attacked have much to warn of."""


def main(config: StrangersConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    seed = secrets.randbits(31) if config.seed is None else config.seed
    say(f"seed {seed}")
    is_reached = BOARD.run(
        config.only,
        lambda name: Bench(seed, config.inputs, config.cases, config.executions, config.flips),
        (lambda bench: {"seed": seed, "seen": bench.seen}) if config.write else None,
    )
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(StrangersConfig, main)
