"""A round on real links: how near the line rate, how few bytes, how many peers. Every figure beside its floor.

    .venv/bin/python benchmarks/network.py [--only rounds low_bits ...] [--repeats 3] [--write]

Real peers, each in a network namespace of its own, with an emulated internet between them (`testbed.py`). Counted is
what lies between the roster standing and the last pulled slot verified and stored; matchmaking is told apart. Medians
of so many rounds after one to warm up. The floors are those of `wan/floors.py`. For comparison, on the same links:
hivemind's own averaging of the whole model (`stock_averaging.py`), a server as SPES has it (`star.py`), and plain TCP.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import torch
from pydantic_settings import SettingsConfigDict

from benchmarks import network_rows, planned_rows
from benchmarks.machine import Circumstances, load_average
from benchmarks.network_rows import Bench
from benchmarks.tables import HEAD, Row, fill, markdown_table
from benchmarks.testbed import available
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say

RESULTS, README, MARKER = Path("benchmarks/results/network.json"), Path("README.md"), "NETWORK"
Part = Literal["rounds", "low_bits", "scaling", "slow_uplink", "loopback", "joiners", "overlapped", "planned"]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "rounds": network_rows.rounds,
    "low_bits": network_rows.low_bits,
    "scaling": network_rows.scaling,
    "slow_uplink": network_rows.slow_uplink,
    "loopback": network_rows.loopback,
    "joiners": network_rows.joiners,
    "overlapped": network_rows.overlapped,
    "planned": planned_rows.planned,
}


class NetworkConfig(CommandConfig):
    """Rounds on an emulated internet."""

    model_config = SettingsConfigDict(cli_prog_name="network.py")

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 3
    """Rounds counted of each."""
    congestion: str = "cubic"
    """TCP's congestion control: `cubic`, which most machines have, or `bbr`."""
    write: bool = False
    """Leave the figures in benchmarks/results/network.json and, between its markers, in README.md."""
    log_level: Literal["debug", "info", "warning"] = "warning"
    """Least severe event to log."""


def main(config: NetworkConfig) -> int:
    """Measure and print; return the exit code."""
    if config.write and config.only:
        raise ConfigError(f"--write would leave only {', '.join(config.only)} in {RESULTS}; drop --only")
    if reason := available():
        raise ConfigError(f"no test bed on this machine: {reason}")
    torch.set_num_threads(1)
    load_before = load_average()
    say(f"TCP congestion control {config.congestion}; {config.repeats} rounds each; load before {load_before:.2f}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        bench = Bench(Path(folder), config.repeats, config.congestion)
        for name in config.only or PARTS:
            for row in measured(name, bench):
                say("  ".join(cell for cell in row.cells if cell))
                rows.append(row)
    if config.write:
        write(rows, bench, Circumstances.now(load_before, None))
    return 0


def measured(name: str, bench: Bench) -> Iterator[Row]:
    """Yield a part's rows; where it fails, one that says why, so that the others can be measured."""
    try:
        yield from PARTS[name](bench)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told in the table
        yield Row(f"{name}: could not be measured", f"{type(error).__name__}: {error}", is_reached=False)


def write(rows: list[Row], bench: Bench, circumstances: Circumstances) -> None:
    """Leave the figures, and everything that they were worked out from."""
    document = {
        "figures": [row._asdict() for row in rows],
        "rounds": bench.seen,
        "congestion": bench.congestion,
        "circumstances": asdict(circumstances),
    }
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    fill(README, MARKER, markdown_table(HEAD, [row.cells for row in rows]))


if __name__ == "__main__":
    entry_point(NetworkConfig, main)
