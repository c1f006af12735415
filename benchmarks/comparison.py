"""The local experiment beside stock training and beside other ways to train the same model: one command, one table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import yaml

from benchmarks import tables
from benchmarks.accounts import Account, account, local_steps, observed_seconds
from benchmarks.baselines import checkpoint_loss, measure_baselines, start_loss
from benchmarks.cluster import ROOT, run_script
from benchmarks.machine import Circumstances, load_average
from benchmarks.stock import StockPace, measure_stock
from benchmarks.tasks import Subject
from spes_p2p.cli import load_settings
from spes_p2p.commands.local import RUN_FILE, ExperimentConfig
from spes_p2p.commands.monitor import MODEL_DIRECTORY
from spes_p2p.config import CommandConfig, RunConfig
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor.events import METRICS_FILE, replay
from spes_p2p.monitor.report import write_report
from spes_p2p.monitor.view import SwarmView
from spes_p2p.monitor.watch import Ending
from spes_p2p.presentation import say

EXPERIMENT_SECONDS = 3600.0
STOCK_SECONDS, SHORT_STOCK_SECONDS = 60.0, 10.0
SHORT_FLAGS = ("--run.round.total", "3", "--run.round.tokens", "50000", "--run.round.max-seconds", "12")
RESULTS = ROOT / "benchmarks" / "results"


class BenchmarkConfig(CommandConfig):
    """The local experiment, measured: throughput, time not spent training, and held-out loss beside baselines."""

    output: Path = Path("runs/benchmark")
    """Directory for the experiment and the work of the baselines; what an earlier benchmark left there is replaced."""
    short: bool = False
    """A trial of the command in a few minutes: three small rounds; its results stay in `output`."""
    experiment: Path | None = None
    """A finished experiment's directory to measure, instead of running one."""
    pace: bool = False
    """Only print the time not training and the throughput, of stock training's: no baselines, no results on record."""
    log_level: str = "warning"
    """Least severe event to log."""


@dataclass(frozen=True)
class Swarm:
    """A finished experiment.

    Attributes:
        directory: Where it is.
        subject: Its settings.
        view: What its monitor saw.
        account: Its pace, and where its time went.
        founder: Its first peer's id.
    """

    directory: Path
    subject: Subject
    view: SwarmView
    account: Account
    founder: str

    @property
    def founder_slots(self) -> tuple[int, ...]:
        """Slots that peer 0 held in the last round it reported."""
        own = [report for (_, peer), report in sorted(self.view.reports.items()) if peer == self.founder]
        if not own:
            raise DataError(f"{self.directory}: its first peer never finished a round; measure another experiment")
        return own[-1].slots


def main(config: BenchmarkConfig) -> int:
    """Measure, print the table, write the results; return the exit code."""
    torch.set_num_threads(1)
    load_before = load_average()
    work, seconds = config.output.resolve() / "work", SHORT_STOCK_SECONDS if config.short else STOCK_SECONDS
    stock: dict[str, StockPace] = {}
    if config.experiment is None:
        flags = SHORT_FLAGS if config.short else ()
        subject = _planned(flags)
        subject.held_out()  # tokenizer and tokens, once, before processes with deadlines need them
        say(f"stock training before the swarm, {subject.peers} processes for {seconds:.0f} s")
        stock["before"] = measure_stock(subject, work / "stock-before", seconds)
        directory = config.output.resolve() / "experiment"
        command = ["./scripts/run_local_experiment.sh", "--output", str(directory), "--overwrite", *flags]
        say(f"the swarm: {' '.join(command)}")
        run_script("the local experiment", command, work / "experiment.log", EXPERIMENT_SECONDS)
    else:
        directory, command = config.experiment.resolve(), None
    swarm = read_swarm(directory)
    say(f"stock training after the swarm, {swarm.subject.peers} processes for {seconds:.0f} s")
    stock["after"] = measure_stock(swarm.subject, work / "stock-after", seconds)
    if config.pace:
        pace = swarm.account.tokens_per_second / median(each.total for each in stock.values())
        say(f"{directory}: wall time not training {swarm.account.not_training:.1%}, {pace:.3f} of stock throughput")
        return 0
    circumstances = Circumstances.now(load_before, command)
    measured = _measure(swarm, stock, work / "baselines")
    _publish(measured, circumstances, swarm, config.output.resolve() / "results" if config.short else RESULTS)
    return 0


def _planned(flags: tuple[str, ...]) -> Subject:
    """Return what the experiment will be, before it has run."""
    experiment = load_settings(ExperimentConfig, ["--config", str(ROOT / "configs/local_experiment.yaml"), *flags])
    return Subject(run=experiment.run, peers=experiment.peers, cache=experiment.cache)


def read_swarm(directory: Path) -> Swarm:
    """Return a finished experiment.

    Raises:
        ConfigError: the directory holds none, or one that did not reach its last round.
        DataError: its metrics do not allow an account.
    """
    try:
        kept = yaml.safe_load((directory / RUN_FILE).read_text())
    except OSError as error:
        raise ConfigError(f"--experiment {directory} holds no experiment: {error.strerror} {RUN_FILE}") from error
    view, facts = replay(directory / METRICS_FILE)
    if view.published < view.total_rounds or not (directory / MODEL_DIRECTORY).is_dir():
        raise ConfigError(
            f"--experiment {directory} ended in round {view.published} of {view.total_rounds}; "
            f"continue it: ./scripts/run_local_experiment.sh --resume --output {directory}"
        )
    subject = Subject(
        run=RunConfig.model_validate(kept["run"]),
        peers=len(list(directory.glob("peer-[0-9]*"))),
        text=tuple(Path(path) for path in kept["text"]),
        cache=ExperimentConfig.model_fields["cache"].default.expanduser(),
    )
    if len(subject.tokenizer()) != facts["vocab_size"]:
        raise ConfigError(f"--experiment {directory} used another tokenizer than this machine has; run it here")
    return Swarm(directory, subject, view, account(view), facts["founder"])


def _measure(swarm: Swarm, stock: dict[str, StockPace], folder: Path) -> tables.Measured:
    subject, view = swarm.subject, swarm.view
    say("other ways to train the same model")
    steps = local_steps(view, subject.tokens_per_step)
    baselines = measure_baselines(subject, folder, steps, swarm.founder_slots)
    return tables.Measured(
        account=swarm.account,
        observed_seconds=observed_seconds(swarm.directory / METRICS_FILE, swarm.account.rounds),
        stock=stock,
        stock_tokens_per_second=median(pace.total for pace in stock.values()),
        held_out=dict(view.held_out),
        start_loss=start_loss(subject),
        checkpoint_loss=checkpoint_loss(subject, swarm.directory / MODEL_DIRECTORY),
        baselines=baselines,
        steps=tuple(steps),
        swarm_tokens=tuple(view.tokens_until(number) for number in range(view.published + 1)),
        peers=subject.peers,
    )


def _publish(measured: tables.Measured, circumstances: Circumstances, swarm: Swarm, results: Path) -> None:
    """Print the table, write it as .json and .md, and redraw the experiment's report with the baselines."""
    results.mkdir(parents=True, exist_ok=True)
    (results / "local_experiment.json").write_text(tables.as_json(measured, circumstances, swarm.subject))
    (results / "local_experiment.md").write_text(tables.as_markdown(measured, circumstances, swarm.subject))
    curves = {
        name: list(zip(measured.swarm_tokens, baseline["losses"], strict=True))
        for name, baseline in measured.baselines.items()
    }
    note = (
        "dashed in the held-out loss, each drawn where the swarm was after as many rounds; a solo peer makes "
        "one peer's local steps, so it has read one peer's share of these tokens"
    )
    report = write_report(swarm.directory, facts={"run": Ending.FINISHED.value, "baselines": note}, baselines=curves)
    say("\n" + tables.as_text(measured, circumstances))
    say(f"\nresults  {results / 'local_experiment.md'}\nreport   {report}")
