"""The local experiment beside stock Hugging Face training.

    .venv/bin/python benchmarks/local_experiment.py [--experiment runs/local] [--pace] [--write]

Stock training before and after the swarm: as many processes as peers, of one thread each, on the peers' own batches.
"""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from threading import Barrier

import numpy as np
import torch
import yaml
from torch import LongTensor

from benchmarks.accounts import Account, account
from benchmarks.cluster import ROOT
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import RESULTS, say_rows, write_rows
from benchmarks.stock import default_stock_model, stock_step
from benchmarks.tables import Row
from spes_p2p.cli import entry_point, load_settings
from spes_p2p.commands.evaluate import load_checkpoint
from spes_p2p.commands.local import RUN_FILE, ExperimentConfig
from spes_p2p.commands.monitor import EVALUATION_BATCH, MODEL_DIRECTORY, MonitorConfig
from spes_p2p.config import CommandConfig, LogLevel, RunConfig
from spes_p2p.data.packing import TokenSource, held_out_batches, train_sources
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import stock_model
from spes_p2p.model.loss import held_out_loss
from spes_p2p.monitor.events import METRICS_FILE, replay
from spes_p2p.monitor.view import PHASES, SwarmView
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

STOCK_SECONDS, READY_SECONDS, EXPERIMENT_SECONDS = 60.0, 300.0, 3600.0
WARM_UP_STEPS, LR_STEPS = 5, 50
"""Steps before the window opens, and steps of linear warm-up of the learning rate."""
MIN_PACE, MAX_NOT_TRAINING, MIN_FALL, SAME_LOSS = 0.70, 0.25, 2.0, 1e-3
QUIET = 0.93
"""Share of the cores below which another process must have been at work."""


class BenchmarkConfig(CommandConfig):
    """The local experiment, measured: throughput, time not spent training, and held-out loss beside baselines."""

    output: Path = Path("runs/benchmark")
    """Directory of the experiment; what an earlier one left there is replaced."""
    experiment: Path | None = None
    """A finished experiment's directory to measure, instead of running one."""
    pace: bool = False
    """Only print the time not training and the share of stock training's throughput."""
    write: bool = False
    """Keep the figures in benchmarks/results/local_experiment.json and .md."""
    log_level: LogLevel = "warning"


@dataclass(frozen=True)
class Subject:
    """The experiment that everything is compared with; peer i reads its data in the order of seed i."""

    run: RunConfig
    peers: int
    text: tuple[Path, ...]
    cache: Path

    @functools.cached_property
    def vocab_size(self) -> int:
        """Size of the run's tokenizer."""
        return len(resolve_tokenizer(self.run.data, self.text, self.cache))

    def source(self, peer: int) -> TokenSource:
        """Return a peer's training sequences from their start."""
        tokenizer = resolve_tokenizer(self.run.data, self.text, self.cache)
        return train_sources(self.run.data, tokenizer, paths=self.text, cache=self.cache)(peer)

    def held_out(self) -> list[LongTensor]:
        """Return the batches that the experiment's monitor evaluates on."""
        return held_out_batches(
            self.run.data,
            resolve_tokenizer(self.run.data, self.text, self.cache),
            paths=self.text,
            cache=self.cache,
            num_sequences=MonitorConfig.model_fields["held_out_sequences"].default,
            batch_size=EVALUATION_BATCH,
            seed=self.run.seed,
        )


def main(config: BenchmarkConfig) -> int:
    """Measure, print the table, and keep it if asked to; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    load_before, stock = load_average(), list[StockPace]()
    directory = config.experiment or config.output / "experiment"
    if config.experiment is None:
        planned = load_settings(ExperimentConfig, ["--config", str(ROOT / "configs/local_experiment.yaml")])
        stock.append(measure_stock(Subject(planned.run, planned.peers, (), planned.cache)))
        command = ["./scripts/run_local_experiment.sh", "--output", str(directory.resolve()), "--overwrite"]
        dies = functools.partial(die_with_parent, os.getpid())
        subprocess.run(command, cwd=ROOT, check=True, timeout=EXPERIMENT_SECONDS, preexec_fn=dies)
    subject, view = read_swarm(directory)
    stock.append(measure_stock(subject))
    sums = account(view)
    pace = sums.tokens_per_second / median(each.total for each in stock)
    if config.pace:
        say(f"{directory}: wall time not training {sums.not_training:.1%}, {pace:.3f} of stock throughput")
        return 0
    rows = say_rows(measured_rows(subject, view, sums, stock, pace, directory))
    if config.write:
        where, kept = Circumstances.now(load_before, None), {"held_out": dict(view.held_out)}
        write_rows(RESULTS / "local_experiment", where, "The local experiment, measured", rows, **kept)
    return 0 if all(row.is_reached is not False for row in rows) else 1


def read_swarm(directory: Path) -> tuple[Subject, SwarmView]:
    """Return a finished experiment, and its monitor's view.

    Raises:
        ConfigError: it did not reach its last round.
    """
    kept = yaml.safe_load((directory / RUN_FILE).read_text())
    view, _ = replay(directory / METRICS_FILE)
    if view.published < view.total_rounds:
        raise ConfigError(f"--experiment {directory} ended in round {view.published} of {view.total_rounds}")
    cache = ExperimentConfig.model_fields["cache"].default.expanduser()
    peers = len(list(directory.glob("peer-[0-9]*")))
    return Subject(RunConfig.model_validate(kept["run"]), peers, tuple(map(Path, kept["text"])), cache), view


# ---------------------------------------------------------------------- stock training


@dataclass(frozen=True)
class StockPace:
    """Tokens per second of all processes in one window, and the cores that they had."""

    total: float
    cores: float


def measure_stock(subject: Subject) -> StockPace:
    """Let one process per peer train on the peer's batches; steps that the window's end cuts count in proportion."""
    say(f"stock training, {subject.peers} processes for {STOCK_SECONDS:.0f} s")
    subject.held_out()  # tokenizer and tokens, once
    context = get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(subject.peers, context) as pool:
        barrier = manager.Barrier(subject.peers + 1)
        futures = [pool.submit(train_stock, subject, peer, barrier) for peer in range(subject.peers)]
        barrier.wait(READY_SECONDS)
        start, results = time.monotonic(), [future.result(STOCK_SECONDS + READY_SECONDS) for future in futures]
    window, total, cpu = [start, start + STOCK_SECONDS], 0.0, 0.0
    tokens = subject.run.train.batch_size * subject.run.data.sequence_length
    for ends, seconds in results:
        assert ends[-1] >= window[1], "a process did not train throughout the window"
        total += float(np.diff(np.interp(window, ends, np.arange(len(ends))))[0]) * tokens / STOCK_SECONDS
        cpu += float(np.diff(np.interp(window, ends, seconds))[0])
    return StockPace(total, cpu / STOCK_SECONDS)


def train_stock(subject: Subject, peer: int, barrier: Barrier) -> tuple[list[float], list[float]]:
    """Train until after the window; return when it opened and each step ended, and the processor seconds by then."""
    torch.set_num_threads(1)
    run, train = subject.run, subject.run.train
    module, source = default_stock_model(run, subject.vocab_size), subject.source(peer)
    betas = train.beta1, train.beta2
    kinds = {"lr": train.lr, "betas": betas, "eps": train.eps, "weight_decay": train.weight_decay}
    optimizer = torch.optim.AdamW(module.parameters(), fused=True, **kinds)  # type: ignore[arg-type]
    ends: list[float] = []
    cpu: list[float] = []
    number = 0
    while not ends or ends[-1] < ends[0] + STOCK_SECONDS + 1:
        number += 1
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, number / LR_STEPS)
        stock_step(module, optimizer, source.next_batch(train.batch_size), run)
        if number == WARM_UP_STEPS:
            barrier.wait(READY_SECONDS)
        if number >= WARM_UP_STEPS:
            ends.append(time.monotonic())
            cpu.append(time.process_time())
    return ends, cpu


# ---------------------------------------------------------------------- the table


def measured_rows(
    subject: Subject,
    view: SwarmView,
    sums: Account,
    stock: Sequence[StockPace],
    pace: float,
    directory: Path,
) -> Iterator[Row]:
    """Yield the table's rows."""
    first, last = sums.rounds
    told = f"{sums.tokens_per_second:,.0f} ({sums.tokens:,} in {sums.wall_seconds:.1f} s)"
    yield Row(f"swarm of {subject.peers}, tokens/s, rounds {first}-{last}", told)
    told = ", ".join(f"{each.total:,.0f} on {each.cores:.2f} cores" for each in stock)
    is_quiet = all(each.cores >= QUIET * min(subject.peers, len(os.sched_getaffinity(0))) for each in stock)
    yield Row(f"{subject.peers} processes of stock HF training, tokens/s", told + ("" if is_quiet else "; NOT QUIET"))
    yield Row("summed training throughput, swarm / stock", f"{pace:.1%}", ">= 70 %", pace >= MIN_PACE)
    share = sums.not_training
    yield Row("wall time not spent training", f"{share:.1%}", "< 25 %", share < MAX_NOT_TRAINING)
    for phase in PHASES[1:]:
        yield Row(f"- {phase}", f"{sums.shares[phase]:.1%}")
    run, held_out = subject.run, subject.held_out()
    module = stock_model(run.model, subject.vocab_size, run.data.sequence_length, run.seed)
    start, end = held_out_loss(module, held_out), view.held_out[max(view.held_out)]
    yield Row("held-out loss, random start", f"{start:.3f}")
    yield Row("held-out loss, the swarm's model", f"{end:.3f}")
    yield Row("- fall from the random start, nats", f"{start - end:.3f}", ">= 2", start - end >= MIN_FALL)
    loss = held_out_loss(load_checkpoint(directory / MODEL_DIRECTORY)[0], held_out)
    yield Row("- of its checkpoint, by the stock class", f"{loss:.3f}", "the same", abs(loss - end) < SAME_LOSS)


if __name__ == "__main__":
    entry_point(BenchmarkConfig, main)
