"""How long peers take to find each other again after a split, and to notice that their p2pd is dead.

    .venv/bin/python -m benchmarks.connection [--repeats 5]

Four real peers on loopback. Each repeat freezes one half and then the other until they have forgotten each other, and
measures from the end of that; then it kills the p2pd of a fifth with SIGKILL.
"""

from __future__ import annotations

import random
import secrets
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import PositiveInt

from benchmarks.cluster import ROOT, support
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import write_json
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.presentation import say

NUM_PEERS = 4
HEAL_SECONDS, DEATH_SECONDS = 30.0, 15.0
"""What is promised."""


class ConnectionConfig(CommandConfig):
    """Splits of a swarm, and deaths of p2pd."""

    repeats: PositiveInt = 5
    """Times that each is measured."""
    seed: int | None = None
    """Of how the peers are halved; drawn by default."""
    output: Path = ROOT / "benchmarks" / "results"
    """Folder for connection.json."""
    log_level: LogLevel = "warning"


def main(config: ConnectionConfig) -> int:
    """Measure, write and say; return 1 if a promise was not kept."""
    load_before = load_average()
    seed = secrets.randbits(31) if config.seed is None else config.seed
    with tempfile.TemporaryDirectory(prefix="connection-") as folder:
        healing, deaths = measure(Path(folder), config.repeats, seed)
    measured: dict[str, Any] = {
        "seed": seed,
        "heal": summary(healing, HEAL_SECONDS),
        "death": summary(deaths, DEATH_SECONDS),
    }
    write_json(config.output / "connection.json", Circumstances.now(load_before, None), **measured)
    for what, name in (("heal", "two halves find each other"), ("death", "p2pd's death is noticed")):
        row = measured[what]
        say(f"{name}: median {row['median']:.1f} s, at most {row['maximum']:.1f} s of {row['repeats']}")
    return 0 if measured["heal"]["is_kept"] and measured["death"]["is_kept"] else 1


def measure(folder: Path, repeats: int, seed: int) -> tuple[list[float], list[float]]:
    """Return the seconds of each healing and of each noticed death."""
    peers, brains, draw = support("real_peers"), support("split_brain"), random.Random(seed)
    cluster = peers.start_swarm(folder, NUM_PEERS)
    healing, deaths = [], []
    try:
        for repeat in range(repeats):
            draw.shuffle(cluster)
            healing.append(brains.split_and_heal(cluster[: NUM_PEERS // 2], cluster[NUM_PEERS // 2 :]))
            victim = peers.PeerProcess(folder / f"victim{repeat}", cluster[0].addresses).wait_until_ready()
            deaths.append(brains.seconds_until_death_is_seen(victim))
            victim.kill()
            say(f"{repeat + 1}: healed after {healing[-1]:.1f} s, death noticed after {deaths[-1]:.1f} s")
    finally:
        peers.close_all(cluster)
    return healing, deaths


def summary(seconds: Sequence[float], promised: float) -> dict[str, Any]:
    """Return median and maximum of what was measured, and whether the promise was kept."""
    return {
        "repeats": len(seconds),
        "median": round(statistics.median(seconds), 2),
        "maximum": round(max(seconds), 2),
        "promised": promised,
        "is_kept": max(seconds) <= promised,
        "seconds": [round(value, 2) for value in seconds],
    }


if __name__ == "__main__":
    entry_point(ConnectionConfig, main)
