"""Tokens per second of simulated peers, all together, over those of plain training in one process.

    .venv/bin/python benchmarks/simulator_speed.py [--peers 4] [--pairs 5]

Both train the local experiment with the same Trainer, data, batch and number of slots, in turns. Whole rounds count,
from the end of the first to the end of the last.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch

from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt, RunConfig
from spes_p2p.data.packing import train_sources
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.model.build import build_slot_model
from spes_p2p.presentation import say
from spes_p2p.sim.simulator import Scenario, simulate
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

MAX_SLOTS, STEPS, ROUNDS = 8, 10, 3


class SpeedConfig(CommandConfig):
    """Simulated peers against plain training."""

    config: Path = Path("configs/local_experiment.yaml")
    """YAML file with the run's settings under `run`."""
    run: RunConfig = RunConfig()
    """The run's settings; its rounds are replaced."""
    peers: PositiveInt = 4
    """Virtual peers."""
    pairs: PositiveInt = 5
    """Measurements of each."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where tokenizers and tokenised text are kept."""
    log_level: LogLevel = "warning"


def main(config: SpeedConfig) -> int:
    """Measure and print the ratio of each pair, and the median."""
    torch.set_num_threads(1)
    rounds = config.run.round.model_copy(update={"mode": "steps", "steps": STEPS, "total": ROUNDS + 1})
    train = config.run.train.model_copy(update={"warmup_rounds": 0.0})  # may be longer than these few rounds
    run = config.run.model_copy(update={"round": rounds, "train": train})
    fields = {"held_out_tokens": run.data.sequence_length, "threads": 1}  # the loss only marks the rounds' ends
    scenario = Scenario(run=run, peers=config.peers, max_slots=MAX_SLOTS, **fields)  # type: ignore[arg-type]
    trainer, ratios = _trainer(run, config.cache), []
    for pair in range(config.pairs):
        began = time.monotonic()
        for _ in range(config.peers * ROUNDS * STEPS):
            trainer.step(1e-3)
        plain, ends = time.monotonic() - began, list[float]()
        simulate(scenario, cache=config.cache, on_evaluation=lambda _, ends=ends: ends.append(time.monotonic()))  # type: ignore[misc]
        ratios.append(plain / (ends[-1] - ends[0]))
        say(f"pair {pair + 1}: ratio {ratios[-1]:.3f}")
    say(f"median of {len(ratios)} pairs: ratio {statistics.median(ratios):.3f}")
    return 0


def _trainer(run: RunConfig, cache: Path) -> Trainer:
    tokenizer = resolve_tokenizer(run.data, (), cache)
    model = build_slot_model(
        run.model,
        vocab_size=len(tokenizer),
        sequence_length=run.data.sequence_length,
        seed=0,
        claimed=range(MAX_SLOTS),
        storage=run.frozen_storage,
    )
    trainer = Trainer(model, run.train, train_sources(run.data, tokenizer, paths=(), cache=cache)(0), Ranks("auto"))
    trainer.calibrate()  # the first use allocates
    return trainer


if __name__ == "__main__":
    entry_point(SpeedConfig, main)
