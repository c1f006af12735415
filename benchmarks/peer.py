"""A peer's memory and speed, every figure beside what it had to reach.

    .venv/bin/python benchmarks/peer.py [--output benchmarks/results/peer]

The held-out losses are those that
`spes_p2p simulate configs/frozen_storage.yaml --output benchmarks/results/frozen_storage` has left.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks import memory
from benchmarks.experts import module_rows, step_rows
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import say_rows, write_rows
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.commands.simulate import Spread
from spes_p2p.config import CommandConfig, MachineConfig, PositiveInt, RunConfig
from spes_p2p.config_file import read_settings
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import model_size
from spes_p2p.sim.sweep import load_sweep, stored_runs

SEVEN_B = Path("configs/spes_7b.yaml")
MAX_LOSS = {"bf16": None, "int8": 0.1, "nf4": 0.5}
"""Per cent."""


class PeerBenchmarkConfig(CommandConfig):
    """A peer's memory and speed."""

    study: Path = Path("configs/frozen_storage.yaml")
    """The sweep of frozen experts' precision."""
    results: Path = Path("benchmarks/results/frozen_storage")
    """Its output."""
    pairs: PositiveInt = 15
    """Turns of each in the measurements of speed."""
    output: Path | None = None
    """Where to leave the figures: this name with `.md` and with `.json`."""


def main(config: PeerBenchmarkConfig) -> int:
    """Measure and print; return the exit code."""
    load_before = load_average()
    torch.set_num_threads(1)
    found = say_rows(rows(config))
    if config.output is not None:
        write_rows(config.output, Circumstances.now(load_before, None), "A peer's memory and speed", found)
    return 0


def rows(config: PeerBenchmarkConfig) -> Iterator[Row]:
    """Measure; yield the table's rows."""
    yield from memory.rows()
    yield from module_rows("cpu", config.pairs)
    yield from step_rows("cpu", config.pairs)
    yield from storage_rows(config)
    yield from planned_rows()


def storage_rows(config: PeerBenchmarkConfig) -> Iterator[Row]:
    """Yield what frozen experts' precision costs the swarm's model."""
    for storage, limit in MAX_LOSS.items():
        what = f"held-out loss after 300 steps, frozen experts in {storage} instead of fp32"
        yield from loss_rows(what, config.study, config.results, storage, limit)


def loss_rows(what: str, path: Path, results: Path, variant: str, limit: float | None) -> Iterator[Row]:
    """Yield by how much a sweep's variant is worse than its `fp32`, seed by seed; nothing if there are no results.

    Args:
        what: The row's name.
        path: The sweep.
        results: What it has left.
        variant: The variant.
        limit: To reach, in percent.
    """
    sweep = load_sweep(path)
    losses = {key: result.loss for key, result in stored_runs(sweep, results).items()}
    seeds = [seed for seed in sweep.seeds if (variant, seed) in losses and ("fp32", seed) in losses]
    if not seeds:
        return
    worse = Spread({seed: 100 * (losses[variant, seed] / losses["fp32", seed] - 1) for seed in seeds})
    deviation = f" ± {worse.deviation:.2f}" if worse.deviation is not None else ""
    yield Row(
        what,
        f"{worse.mean:+.2f} %{deviation} ({len(seeds)} seeds)",
        f"+{limit} %" if limit is not None else "",
        worse.mean <= limit if limit is not None else None,
    )


def planned_rows() -> Iterator[Row]:
    """Yield the planner's word on the SPES paper's model of 7 B parameters."""
    run = RunConfig.model_validate(read_settings(SEVEN_B, "config")["run"])
    size = model_size(run.model, run.data.vocab_size)
    for machine, limit in (
        (MachineConfig(storage="nf4"), 21.0),
        (MachineConfig(storage="nf4", inner_optimizer="adamw8bit"), None),
        (MachineConfig(storage="nf4", inner_optimizer="adamw8bit", gradients="bf16"), 12.5),
    ):
        gigabytes = peer_memory(size, 1, Setup.of(run, machine, None)).static_bytes / 1e9
        what = f"{machine.inner_optimizer or 'adamw'}, gradients in {machine.gradients}"
        yield Row(
            f"SPES 7B, 1 of 32 slots, the others in nf4, {what}: planned static memory",
            f"{gigabytes:.2f} GB",
            f"{limit} GB" if limit else "",
            gigabytes <= limit if limit else None,
        )


if __name__ == "__main__":
    entry_point(PeerBenchmarkConfig, main)
