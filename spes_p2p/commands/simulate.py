"""`spes simulate`: make the runs of a sweep that are missing, several at a time, and compare all runs in a table."""

from __future__ import annotations

import logging
import math
import multiprocessing
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev

import torch

from spes_p2p.cli import set_up_logging
from spes_p2p.config.commands import SimulateConfig
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import markdown_table, say
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import Evaluation, simulate
from spes_p2p.sim.sweep import (
    RESULTS_FOLDER,
    Gap,
    Results,
    RunResult,
    Sweep,
    load_sweep,
    run_result,
    save_result,
    stored_runs,
    write_file,
)
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent
from spes_p2p.training.ranks import Ranks

log = logging.getLogger(__name__)

LOGS_FOLDER, TABLE_FILE = "logs", "table.md"
TOKENS_TOLERANCE = 0.01
"""Relative tolerance: a round by tokens ends with a whole batch, not with the exact number."""


def main(config: SimulateConfig) -> int:
    """Run a sweep; return 0, or 1 if a run failed."""
    sweep, num_failed = load_sweep(config.study), 0
    chosen, stored = sweep.chosen(config.only, config.seeds), stored_runs(sweep, config.output)
    missing = [] if config.report_only else [key for key in chosen if key not in stored]
    if missing:
        default = default_workers(sweep)  # raises for a missing GPU even if --workers is set
        workers = min(config.workers or default, len(missing))
        _prepare(config.output)
        logs = config.output / LOGS_FOLDER
        say(f"{sweep.title}: {len(missing)} of {len(chosen)} runs to make, {workers} at a time; progress in {logs}")
        try:
            num_failed = run_all(config, sweep, missing, workers)
        except KeyboardInterrupt:
            say(f"\nstopped; the finished runs are in {config.output / RESULTS_FOLDER}, the same command does the rest")
            raise
    results = stored_runs(sweep, config.output)
    if not results and not num_failed:
        folder = config.output / RESULTS_FOLDER
        raise ConfigError(f"{folder} holds no finished run of this sweep; drop --report-only or name its --output")
    text = table(sweep, results)
    write_file(config.output / TABLE_FILE, f"{text}\n\n{NOTES}\n".encode())
    say(f"\n{text}")
    return 1 if num_failed else 0


def default_workers(sweep: Sweep) -> int:
    """Return one worker per usable core, or a single one if a run uses a GPU, which runs share badly.

    Raises:
        ConfigError: a variant wants a GPU and there is none.
    """
    devices = {scenario.device for variant in sweep.variants.values() for scenario in variant.scenarios.values()}
    try:
        on_gpu = any(Ranks(device).device.type == "cuda" for device in devices)
    except ConfigError as error:
        raise ConfigError(in_sweep_words(str(error))) from error
    return 1 if on_gpu else num_cores()


def in_sweep_words(message: str) -> str:
    """Replace a peer's flags in an error's message by the settings of a sweep."""
    message = re.sub(r"--(text) (?:PATH \.\.\.|FILE)", r"base.\1", message)
    message = re.sub(r"--(device) (\w+)", r"base.\1: \2", message)
    return re.sub(r"--(text|device)\b", r"base.\1", message)


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _prepare(output: Path) -> None:
    try:
        for folder in (RESULTS_FOLDER, LOGS_FOLDER):
            (output / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}; name a writable folder") from error


# ---------------------------------------------------------------------- runs in processes


def run_all(config: SimulateConfig, sweep: Sweep, missing: Sequence[tuple[str, int]], workers: int) -> int:
    """Make runs in order, `workers` at a time; return the number that failed. On any exit no process is left behind."""
    context, threads, began = multiprocessing.get_context("spawn"), max(1, num_cores() // workers), time.monotonic()
    pool = ProcessPoolExecutor(workers, context, _begin, (os.getpid(), threads, config.log_level))
    # Processes inherit the mask, so that Ctrl-C, which a terminal sends to all, is handled here and nowhere else.
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        runs = dict[Future[RunResult], tuple[str, int]]()
        for variant, seed in missing:
            scenario = sweep.variants[variant].scenarios[seed]
            runs[pool.submit(run, variant, seed, scenario, config.output, config.cache)] = variant, seed
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        num_failed = 0
        for num_ended, future in enumerate(as_completed(runs), 1):
            variant, seed = runs[future]
            minutes, seconds = divmod(round(time.monotonic() - began), 60)
            text, is_finished = _outcome(future, log_file(config.output, variant, seed))
            num_failed += not is_finished
            say(f"{variant} seed {seed}  {text}  [{num_ended} of {len(runs)}, {minutes}:{seconds:02}]")
        return num_failed
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
        pool.shutdown(cancel_futures=True)


def _outcome(future: Future[RunResult], log_file: Path) -> tuple[str, bool]:
    """Return the end of a run in words, and whether it has a result."""
    error = future.exception()
    if isinstance(error, BrokenProcessPool):
        return "failed: a process was killed, which ends all; where memory is short, use fewer --workers", False
    if error is not None:
        return f"failed: {in_sweep_words(str(error)) or type(error).__name__}; see {log_file}", False
    result = future.result()
    return "; ".join([f"loss {result.loss:.4f}", *result.remarks]), True


def log_file(output: Path, variant: str, seed: int) -> Path:
    """Return the path of a run's log."""
    return output / LOGS_FOLDER / f"{variant}-{seed}.log"


def _begin(parent_pid: int, threads: int, log_level: str) -> None:
    """Prepare a process of the pool."""
    die_with_parent(parent_pid)
    torch.set_num_threads(threads)  # unless the scenario sets them
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_up_logging(log_level)


def run(variant: str, seed: int, scenario: Scenario, output: Path, cache: Path) -> RunResult:
    """Make one run in a process of the pool, with a log of its own, and store its result.

    Raises:
        SpesError: see `simulate`.
    """
    file = os.open(log_file(output, variant, seed), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    try:
        result = run_result(variant, seed, scenario, simulate(scenario, cache=cache, on_evaluation=_log_evaluation))
    except Exception:
        log.exception("the run failed")
        raise
    save_result(output, result)
    return result


def _log_evaluation(evaluation: Evaluation) -> None:
    log.info("round %d  loss %.4f", evaluation.round, evaluation.loss)


# ---------------------------------------------------------------------- the table

TITLES = ("tokens/peer", "MB sent/peer", "expert MB/peer", "all MB/peer", "wall s/run", "remarks")
NOTES = (
    "Losses are means over seeds ± their sample standard deviation. Gap closed: (solo - x) / (solo - centralised), "
    "seed by seed; † some peer trained more or less than the lone one, or all together than the centralised one, by "
    f"more than {TOKENS_TOLERANCE:.0%}. Memory, of the experts and of all that is trained or kept, is the planner's, "
    "without activations, of the peer that needs most."
)


@dataclass(frozen=True)
class Spread:
    """A number measured with several seeds: its values by seed."""

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None for a single seed, or if a value is not finite."""
        values = list(self.values.values())
        return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None

    def text(self, form: str) -> str:
        """Return mean and deviation, each in a format such as ".1%"."""
        deviation = "" if self.deviation is None else f" ± {self.deviation:{form}}"
        return f"{self.mean:{form}}{deviation}"


def gap_spread(gap: Gap, variant: str, results: Results) -> Spread | None:
    """Return the share of a gap that a variant closed, by seed; None if no seed has a value.

    It is (solo - loss) / (solo - centralised): below 0 is worse than solo, above 1 better than centralised. A seed has
    none if centralised is not better than solo, or a loss is not finite.
    """
    shares: dict[int, float] = {}
    for seed in [seed for name, seed in results if name == variant]:
        runs = [results.get((name, seed)) for name in (gap.solo, gap.centralised, variant)]
        losses = [math.nan if run is None else run.loss for run in runs]
        solo, centralised, loss = losses
        if all(map(math.isfinite, losses)) and solo > centralised:
            shares[seed] = (solo - loss) / (solo - centralised)
    return Spread(shares) if shares else None


def table(sweep: Sweep, results: Results) -> str:
    """Return a Markdown table with a row for each variant that has a finished run, and the missing runs below it."""
    closed = [f"gap closed: {gap.name}" for gap in sweep.gaps]
    rows = [["variant", "seeds", "held-out loss", *closed, *TITLES]]
    for name, variant in sweep.variants.items():
        own = {seed: results[name, seed] for seed in sweep.seeds if (name, seed) in results}
        if own:
            gaps = [_gap_cell(gap, name, results) for gap in sweep.gaps]
            loss = Spread({seed: result.loss for seed, result in own.items()}).text(".4f")
            rows.append([variant.title, f"{len(own)} of {len(sweep.seeds)}", loss, *gaps, *_amounts(own)])
    missing = [f"{name} seed {seed}" for name, seed in sweep.chosen([], []) if (name, seed) not in results]
    without = f"\n\nwithout a result: {', '.join(missing)}" if missing else ""
    return markdown_table(rows, "<".ljust(len(rows[0]), ">")) + without


def has_equal_tokens(solo: RunResult, centralised: RunResult, ours: RunResult) -> bool:
    """Check whether each peer trained as many tokens as the solo peer, and all together as many as the centralised one.

    Otherwise a gap compares amounts of training, not ways to train.
    """
    of_solo, of_all, own = (sum(peer.tokens for peer in run.peers) for run in (solo, centralised, ours))
    each = [(peer.tokens, of_solo / len(solo.peers)) for peer in ours.peers]
    return all(math.isclose(*pair, rel_tol=TOKENS_TOLERANCE) for pair in [*each, (own, of_all)])


def _gap_cell(gap: Gap, name: str, results: Results) -> str:
    shares = gap_spread(gap, name, results) if name in gap.of else None
    if shares is None:
        return "-"
    ends = [[results[variant, seed] for variant in (gap.solo, gap.centralised, name)] for seed in shares.values]
    return shares.text(".1%") + ("" if all(has_equal_tokens(*runs) for runs in ends) else " †")


def _amounts(own: Mapping[int, RunResult]) -> list[str]:
    """Return a row's cells below `TITLES`."""
    peers = [peer for result in own.values() for peer in result.peers]
    tokens = [peer.tokens for peer in peers]
    spread = "" if min(tokens) == max(tokens) else f" ({min(tokens):,}–{max(tokens):,})"
    megabytes = (
        mean(peer.bytes_out for peer in peers) / 1e6,
        max(peer.expert_bytes for peer in peers) / 1e6,
        max(peer.memory_bytes for peer in peers) / 1e6,
    )
    seconds = mean(result.wall_seconds for result in own.values())
    by_text: dict[str, list[int]] = {}
    for seed, result in own.items():
        for text in result.remarks:
            by_text.setdefault(text, []).append(seed)
    remarks = [f"{text} (seeds {', '.join(map(str, seeds))})" for text, seeds in by_text.items()]
    return [f"{mean(tokens):,.0f}{spread}", *map(_quantity, (*megabytes, seconds)), "; ".join(remarks) or "-"]


def _quantity(value: float) -> str:
    """Return a number with about three digits: 1,234, 12.3, 0.012."""
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 or not value else 3
    return f"{value:,.{digits}f}"
