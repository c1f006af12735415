"""Rows of the network's table that need no network: what the planner counts, and what a sweep has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.network_rows import Bench
from benchmarks.peer import loss_rows
from benchmarks.tables import Row
from spes_p2p.cli import read_yaml
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.planner.memory import Setup
from spes_p2p.planner.size import model_size
from spes_p2p.planner.traffic import round_traffic, star_traffic

SEVEN_B = Path("configs/spes_7b.yaml")
SWEEP, SWEEP_RESULTS = Path("configs/low_bits.yaml"), Path("benchmarks/results/low_bits")
PEERS, SLOTS = 4, 8
MAX_SHARE, MAX_WORSE = 1 / 7, 0.5


def planned(bench: Bench) -> Iterator[Row]:
    """Yield the bytes of a round of the SPES paper's 7 B model, and what few bits cost a swarm's model."""
    run = RunConfig.model_validate(read_yaml(SEVEN_B, "config")["run"])
    codecs = run.codecs.model_copy(update={"shared": "int4", "slots": "int4"})
    low_bits = run.model_copy(update={"codecs": codecs})
    size = model_size(run.model, run.data.vocab_size)
    ours = round_traffic(size, SLOTS, PEERS, Setup.of(low_bits, MachineConfig(), None)).total
    star = star_traffic(size, SLOTS)
    what = f"SPES 7B, {PEERS} peers, int4, bytes of a peer's round / of a peer's with SPES's server in fp32"
    for way, share in (
        ("received", ours / star.received),
        ("sent and received", 2 * ours / (star.sent + star.received)),
    ):
        yield Row(f"{what}: {way}", f"1/{1 / share:.1f}", "1/7", share <= MAX_SHARE)
    name = "held-out loss after 300 steps, int4 deltas, int8 moments and frozen experts, instead of fp32 everywhere"
    yield from loss_rows(name, SWEEP, SWEEP_RESULTS, "low_bits", MAX_WORSE)
