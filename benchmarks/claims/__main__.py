"""Many simulated swarms, what went wrong in them, and how long an orphan waits.

    python -m benchmarks.claims --seeds 300 --peers 4-64 [--large 0] [--first-seed 0] [--output benchmarks/results]

A seed decides everything; `--seeds 1 --first-seed N` with the same `--peers` repeats one.
"""

from __future__ import annotations

import dataclasses
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import Field

from benchmarks.claims.faults import live_through
from benchmarks.claims.summary import Summary
from benchmarks.machine import Circumstances, load_average
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say

SWARMS_PER_WRITING = 100


class ClaimsConfig(CommandConfig):
    """Simulated swarms that claim slots."""

    seeds: PositiveInt = 300
    """Swarms to simulate."""
    first_seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the first; the others follow."""
    peers: str = "4-64"
    """Fewest and most peers at the start."""
    large: Annotated[int, Field(ge=0)] = 0
    """Swarms of 1 000 peers to simulate before these."""
    minutes: Annotated[float, Field(gt=0)] = 1440.0
    """Time after which no other swarm is begun."""
    output: Path | None = None
    """Folder for claims.json and claims.md, which are written as the swarms go by."""
    log_level: LogLevel = "warning"


def main(config: ClaimsConfig) -> int:
    """Simulate, and say what came of it; return 1 if anything was violated."""
    if not (match := re.fullmatch(r"(\d+)-(\d+)", config.peers)) or not 2 <= int(match[1]) <= int(match[2]):
        raise ConfigError(f"peers={config.peers} is no range; set it to fewest-most, like 4-64")
    peers, load, began = (int(match[1]), int(match[2])), load_average(), time.monotonic()
    summaries = {config.peers: Summary()}
    plan = [(config.first_seed + index, config.peers, peers) for index in range(config.seeds)]
    if config.large:
        summaries["1000"] = Summary()
        plan = [(config.first_seed + index, "1000", (1000, 1000)) for index in range(config.large)] + plan
    for index, (seed, name, (fewest, most)) in enumerate(plan):
        if time.monotonic() - began > 60 * config.minutes:
            break
        if config.output is not None and index % SWARMS_PER_WRITING == 0:
            _write(config.output, summaries, began, load)
        summaries[name].add(seed, live_through(seed, (fewest, most)))
        if summaries[name].faulty.get(seed):
            say(f"seed {seed}, {name} peers: {summaries[name].faulty[seed][0]}")
    say(_text(summaries))
    if config.output is not None:
        _write(config.output, summaries, began, load)
    return int(any(summary.faulty for summary in summaries.values()))


def _text(summaries: Mapping[str, Summary]) -> str:
    return "\n\n".join(summary.markdown(name) for name, summary in summaries.items() if summary.seeds)


def _write(folder: Path, summaries: Mapping[str, Summary], began: float, load: float) -> None:
    circumstances = dataclasses.asdict(Circumstances.now(load, None))
    results = {name: summary.figures() for name, summary in summaries.items() if summary.seeds}
    document = {"swarms": results, "seconds": time.monotonic() - began, "circumstances": circumstances}
    (folder / "claims.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "claims.md").write_text(_page(_text(summaries), circumstances))


def _page(text: str, circumstances: dict) -> str:
    return (
        f"# Claims, simulated\n\n{text}\n\n{circumstances['cores']} cores of an {circumstances['cpu']}, no "
        f"accelerator, {circumstances['date']}; lease 30 s, heartbeat 10 s. What is simulated, and checked: "
        f"[docs/claims.md](../../docs/claims.md).\n"
    )


if __name__ == "__main__":
    entry_point(ClaimsConfig, main)
