"""A round on real links: how near the line rate, how few bytes, how many peers. Every figure beside its floor.

    .venv/bin/python benchmarks/network.py [--only rounds low_bits ...] [--repeats 3] [--write]

Real peers, each in a network namespace of its own, with an emulated internet between them (`testbed.py`). Counted is
what lies between the roster standing and the last pulled slot verified and stored; matchmaking is told apart. Medians
of so many rounds after one to warm up. The floors are those of `wan/floors.py`. For comparison, on the same links:
hivemind's own averaging of the whole model (`stock_averaging.py`), a server as SPES has it (`star.py`), and plain TCP.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import torch

from benchmarks import network_rows
from benchmarks.machine import load_average
from benchmarks.network_rows import Bench
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from benchmarks.testbed import available
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import say

Part = Literal[
    "rounds",
    "low_bits",
    "scaling",
    "slow_uplink",
    "loopback",
    "joiners",
    "planned",
    "meetings",
    "beside_tcp",
    "routed_rounds",
    "unmet_rounds",
    "introducer_killed",
    "punched_speed",
    "hostile_introducers",
]
PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "rounds": network_rows.rounds,
    "low_bits": network_rows.low_bits,
    "scaling": network_rows.scaling,
    "slow_uplink": network_rows.slow_uplink,
    "loopback": network_rows.loopback,
    "joiners": network_rows.joiners,
    "planned": network_rows.planned,
    "meetings": network_rows.meetings,
    "beside_tcp": network_rows.beside_tcp,
    "routed_rounds": network_rows.routed_rounds,
    "unmet_rounds": network_rows.unmet_rounds,
    "introducer_killed": network_rows.introducer_killed,
    "punched_speed": network_rows.punched_speed,
    "hostile_introducers": network_rows.hostile_introducers,
}
BOARD = Scoreboard(Path("benchmarks/results/network.json"), Path("benchmarks/results/network.md"), "NETWORK", PARTS)


class NetworkConfig(CommandConfig):
    """Rounds on an emulated internet."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    repeats: PositiveInt = 3
    """Rounds counted of each."""
    congestion: str = "cubic"
    """TCP's congestion control: `cubic`, which most machines have, or `bbr`."""
    write: bool = False
    """Leave what was measured in benchmarks/results/network.json, and in network.md beside it."""
    log_level: LogLevel = "warning"


def main(config: NetworkConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    if reason := available():
        raise ConfigError(f"no test bed on this machine: {reason}")
    torch.set_num_threads(1)
    say(f"TCP congestion control {config.congestion}; {config.repeats} rounds each; load before {load_average():.2f}")
    with tempfile.TemporaryDirectory(prefix="network-") as folder:
        is_reached = BOARD.run(
            config.only,
            lambda name: Bench(Path(folder) / name, config.repeats, config.congestion),
            (lambda bench: {"rounds": bench.seen, "congestion": bench.congestion}) if config.write else None,
        )
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(NetworkConfig, main)
