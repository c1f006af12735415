"""What simulating peers costs: their tokens per second, all together, against plain training in one process.

    .venv/bin/python benchmarks/simulator_speed.py [--peers 4] [--steps 10] [--rounds 3] [--pairs 5]

Both use the same Trainer, data, batch and number of trained slots, in pairs, one after the other. Counted are whole
rounds, from the end of the first to the end of the last: training, averaging, versions, everything but the start.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.machine import Circumstances, load_average
from benchmarks.records import write_json
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, PositiveInt, RunConfig
from spes_p2p.data.packing import train_sources
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.model.build import build_slot_model
from spes_p2p.presentation import say
from spes_p2p.sim.simulator import Evaluation, Scenario, simulate
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer


class SpeedConfig(CommandConfig):
    """Tokens per second of simulated peers against plain training."""

    config: Path = Path("configs/local_experiment.yaml")
    """YAML file with the run's settings under `run`."""
    run: RunConfig = RunConfig()
    """The run's settings; its rounds are replaced."""
    peers: PositiveInt = 4
    """Virtual peers."""
    max_slots: PositiveInt = 8
    """Slots of each, and of plain training."""
    steps: PositiveInt = 10
    """Local steps of a round."""
    rounds: PositiveInt = 3
    """Rounds counted."""
    pairs: PositiveInt = 5
    """Measurements of each."""
    threads: PositiveInt = 1
    """CPU threads."""
    output: Path | None = None
    """JSON file to write."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where tokenizers and tokenised text are kept."""
    log_level: LogLevel = "warning"


class Cost(NamedTuple):
    """Seconds by the wall's clock, and of this process on a CPU: those that other processes cannot take away."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Cost:
        """Return both clocks."""
        return cls(time.monotonic(), time.process_time())

    def __sub__(self, earlier: Cost) -> Cost:
        return Cost(self.wall - earlier.wall, self.cpu - earlier.cpu)


def main(config: SpeedConfig) -> int:
    """Measure, and say what came of it; return the exit code."""
    torch.set_num_threads(config.threads)
    load_before = load_average()
    rounds = config.run.round.model_copy(update={"mode": "steps", "steps": config.steps, "total": config.rounds + 1})
    train = config.run.train.model_copy(update={"warmup_rounds": 0.0})  # may be longer than these few rounds
    run = config.run.model_copy(update={"round": rounds, "train": train})
    # The loss is measured on next to nothing: it marks the rounds' ends.
    scenario = Scenario(
        run=run,
        peers=config.peers,
        max_slots=config.max_slots,
        held_out_tokens=run.data.sequence_length,
        threads=config.threads,
    )
    trainer = _trainer(config, run)
    num_steps = config.peers * config.rounds * config.steps
    tokens = num_steps * run.train.batch_size * run.data.sequence_length
    ratios = []
    for pair in range(config.pairs):
        plain, simulated = _plain(trainer, num_steps), _simulated(config, scenario)
        ratios.append(Cost(plain.wall / simulated.wall, plain.cpu / simulated.cpu))
        say(
            f"pair {pair + 1}: plain {tokens / plain.wall:.0f} tokens/s, simulated {tokens / simulated.wall:.0f}; "
            f"ratio {ratios[-1].wall:.3f}, by CPU seconds {ratios[-1].cpu:.3f}"
        )
    wall, cpu = (statistics.median(values) for values in zip(*ratios, strict=True))
    say(f"median of {len(ratios)} pairs: ratio {wall:.3f}, by CPU seconds {cpu:.3f}")
    if config.output is not None:
        measured = {"ratio": wall, "cpu_ratio": cpu, "pairs": [ratio._asdict() for ratio in ratios]}
        write_json(config.output, Circumstances.now(load_before, None), **measured)
    return 0


def _trainer(config: SpeedConfig, run: RunConfig) -> Trainer:
    cache = config.cache
    tokenizer = resolve_tokenizer(run.data, (), cache)
    data = train_sources(run.data, tokenizer, paths=(), cache=cache)(0)
    model = build_slot_model(
        run.model,
        vocab_size=len(tokenizer),
        sequence_length=run.data.sequence_length,
        seed=0,
        claimed=range(config.max_slots),
        storage=run.frozen_storage,
    )
    trainer = Trainer(model, run.train, data, Ranks("auto"))
    trainer.calibrate()  # the first use allocates
    return trainer


def _plain(trainer: Trainer, num_steps: int) -> Cost:
    began = Cost.now()
    for _ in range(num_steps):
        trainer.step(1e-3)
    return Cost.now() - began


def _simulated(config: SpeedConfig, scenario: Scenario) -> Cost:
    ends: list[Cost] = []

    def note(_: Evaluation) -> None:
        ends.append(Cost.now())

    simulate(scenario, cache=config.cache, on_evaluation=note)
    return ends[-1] - ends[0]


if __name__ == "__main__":
    entry_point(SpeedConfig, main)
