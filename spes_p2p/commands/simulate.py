"""`spes simulate`: make the runs of a sweep that are missing, each in its own process, then compare all runs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

from spes_p2p.cli import set_up_logging
from spes_p2p.config.commands import SimulateConfig
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.presentation import say
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import Evaluation, simulate
from spes_p2p.sim.sweep.report import REPORT_FILE, missing_lines, write_report
from spes_p2p.sim.sweep.results import (
    RESULTS_FOLDER,
    RunResult,
    finished_runs,
    missing_runs,
    run_result,
    save_failure,
    save_result,
    this_machine,
)
from spes_p2p.sim.sweep.settings import Sweep, in_sweep_words, load_sweep
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent
from spes_p2p.training.process_group import ProcessGroup

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STOP_SECONDS = 10.0
LOGS_FOLDER = "logs"


def main(config: SimulateConfig) -> int:
    """Run a sweep; return 0, or 1 if a run failed."""
    sweep = load_sweep(config.study)
    chosen = sweep.chosen(config.only, config.seeds)
    absent = missing_runs(sweep, config.output)
    missing = [] if config.report_only else [key for key in chosen if key in absent]
    progress = Progress(config.output, len(missing))
    if missing:
        default = default_workers(sweep)  # raises for a missing GPU even if --workers is set
        workers = min(config.workers or default, len(missing))
        _prepare(config.output)
        jobs = [_job(config, sweep, variant, seed, workers) for variant, seed in missing]
        say(_opening(sweep, len(chosen) - len(missing), jobs, workers))
        for line in missing_lines({key: absent[key] for key in missing if absent[key].kind != "not made"}):
            say(f"made again: {line}")
        try:
            run_all(jobs, workers, progress)
        except KeyboardInterrupt:
            say(f"\nstopped; the finished runs are in {config.output / RESULTS_FOLDER}, the same command does the rest")
            raise
    return _conclude(sweep, config.output, progress.num_failed)


def default_workers(sweep: Sweep) -> int:
    """Return one worker per usable core, or a single one if a run uses a GPU, which runs share badly.

    Raises:
        ConfigError: a variant wants a GPU and there is none.
    """
    devices = {scenario.device for variant in sweep.variants.values() for scenario in variant.scenarios.values()}
    try:
        on_gpu = any(ProcessGroup(device).device.type == "cuda" for device in devices)
    except ConfigError as error:
        raise ConfigError(in_sweep_words(str(error))) from error
    return 1 if on_gpu else num_cores()


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _prepare(output: Path) -> None:
    try:
        for folder in (RESULTS_FOLDER, LOGS_FOLDER):
            (output / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}; name a writable folder") from error


class Progress:
    """Stores the results of runs and prints the progress of the sweep."""

    def __init__(self, output: Path, num_runs: int) -> None:
        self._output = output
        self._left = num_runs
        self._began = time.monotonic()
        self.num_failed = 0

    def __call__(self, job: Job, news: News, seconds: float) -> None:
        """Record an event of a run, `seconds` after its start."""
        total = job.scenario.run.round.total
        if isinstance(news, Evaluation):
            what = f"round {news.round:>{len(str(total))}}/{total}  loss {news.loss:.4f}"
        elif isinstance(news, RunResult):
            self._left -= 1
            save_result(self._output, news)
            end = "finished" if news.stopped_at is None else "ended early"
            what = "; ".join([f"{end}, loss {news.loss:.4f}", *news.remarks])
        else:
            self._left -= 1
            self.num_failed += 1
            save_failure(self._output, job.variant, job.seed, job.scenario, news.reason)
            what = f"failed: {news.reason}"
        elapsed = f"{_duration(seconds)} of {_duration(time.monotonic() - self._began)}"
        say(f"{job.variant} seed {job.seed}  {what}  [{elapsed}, {self._left} {_runs(self._left)} left]")


def _opening(sweep: Sweep, num_finished: int, jobs: list[Job], workers: int) -> str:
    done = f", {num_finished} finished before" if num_finished else ""
    threads = sorted({job.scenario.threads or job.threads for job in jobs})
    each = f"{threads[0]} {'thread' if threads == [1] else 'threads'} each"
    if len(threads) > 1:
        each = f"{threads[0]} to {threads[-1]} threads each"
    return (
        f"{sweep.title}: {len(jobs)} {_runs(len(jobs))} to make{done}; {workers} at a time, {each}; "
        f"logs in {jobs[0].log.parent}"
    )


def _conclude(sweep: Sweep, output: Path, num_failed: int) -> int:
    results, missing = finished_runs(sweep, output), missing_runs(sweep, output)
    if results:
        table = write_report(sweep, results, output, missing)
        say(f"\n{table}\n\nreport  {output / REPORT_FILE}")
    elif num_failed:
        say("\n" + "\n".join(missing_lines(missing)))
    else:
        lines = missing_lines({key: run for key, run in missing.items() if run.kind != "not made"})
        where = f"{output / RESULTS_FOLDER} holds no finished run of this sweep{f' ({lines[0]})' if lines else ''}"
        raise ConfigError(f"{where}; drop --report-only or name its --output")
    return 1 if num_failed else 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"


# ------------------------------------------------------------------ runs in processes of their own


@dataclass(frozen=True)
class Job:
    """One run to make.

    Attributes:
        variant: Name of the variant.
        seed: The run's seed.
        scenario: The scenario to simulate.
        threads: CPU threads, unless the scenario sets them.
        cache: Folder of tokenizers and tokenised text.
        log: The run's log file, which is appended to.
        log_level: Least severe event in the log.
    """

    variant: str
    seed: int
    scenario: Scenario
    threads: int
    cache: Path
    log: Path
    log_level: str = "info"


def _job(config: SimulateConfig, sweep: Sweep, variant: str, seed: int, workers: int) -> Job:
    return Job(
        variant=variant,
        seed=seed,
        scenario=sweep.variants[variant].scenarios[seed],
        threads=max(1, num_cores() // workers),
        cache=config.cache,
        log=config.output / LOGS_FOLDER / f"{variant}-{seed}.log",
        log_level=config.log_level,
    )


@dataclass(frozen=True)
class Failure:
    """The end of a run without a result."""

    reason: str


News = Evaluation | RunResult | Failure


def run_job(job: Job, tell: Callable[[News], None]) -> RunResult:
    """Make one run in this process.

    Args:
        job: The run.
        tell: Called with each evaluation.

    Raises:
        SpesError: see `simulate`.
    """
    device = ProcessGroup(job.scenario.device).device.type
    threads = job.scenario.threads or job.threads
    result = simulate(job.scenario.model_copy(update={"threads": threads}), cache=job.cache, on_evaluation=tell)
    machine = this_machine("cuda" if device == "cuda" else "cpu", threads)
    return run_result(job.variant, job.seed, job.scenario, result, machine)


def _work(job: Job, pipe: Connection, parent_pid: int) -> None:
    """Make one run in its own process; any exception but a SpesError ends the process with a traceback in the log."""
    die_with_parent(parent_pid)
    log_file = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_up_logging(job.log_level)
    try:
        pipe.send(run_job(job, pipe.send))
    except SpesError as error:
        reason = in_sweep_words(str(error))
        log.error("%s", reason)
        pipe.send(Failure(reason))


class Worker:
    """A job's process, as its parent sees it."""

    def __init__(self, job: Job) -> None:
        job.log.parent.mkdir(parents=True, exist_ok=True)
        self._log_start = job.log.stat().st_size if job.log.exists() else 0
        self.job = job
        self.started_at = time.monotonic()
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("spawn")
        self._process: SpawnProcess = context.Process(target=_work, args=(job, theirs, os.getpid()), daemon=True)
        with _without_interrupts():
            self._process.start()
        theirs.close()  # so that the pipe ends when the process does

    def news(self) -> News:
        """Return the process's next message, or the reason why it ended without one; call it when `pipe` is ready."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):  # OSError: it died in the middle of a message
            self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return Failure(f"killed by {signal.Signals(-code).name}; where memory is short, use fewer --workers")
        return Failure(f"{self._last_words()}; see {self.job.log}")

    def _last_words(self) -> str:
        log = self.job.log.read_bytes()[self._log_start :] if self.job.log.exists() else b""
        return last_words(log.decode(errors="replace")) or f"ended with exit code {self._process.exitcode}"

    def terminate(self) -> None:
        """Send SIGTERM to the process."""
        self._process.terminate()

    def stop(self, seconds: float) -> None:
        """Wait for the process to end; kill it after `seconds`."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


def last_words(log: str) -> str:
    """Return the cause of a run's end from its log: the exception of its last traceback, or the last line.

    Of an exception's message with many lines, the first says most.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback ")]
    said = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")] if tracebacks else lines[-1:]
    return said[0] if said else ""


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Block Ctrl-C for processes that start in the block; the parent gets a pending one afterwards and ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_all(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
    """Make runs in order, `num_workers` at a time; on any exit, no process is left behind.

    Args:
        jobs: The runs.
        num_workers: Number of processes at a time.
        on_news: Called with a job, its message, and the seconds since its start. A job's last message is its result
            or its failure.
    """
    waiting, running = list(reversed(jobs)), dict[Connection, Worker]()
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                worker = Worker(waiting.pop())
                running[worker.pipe] = worker
            for pipe in wait(list(running), POLL_SECONDS):
                assert isinstance(pipe, Connection)
                worker = running[pipe]
                news = worker.news()
                on_news(worker.job, news, time.monotonic() - worker.started_at)
                if not isinstance(news, Evaluation):
                    running.pop(pipe).stop(STOP_SECONDS)
    finally:
        for worker in running.values():
            worker.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for worker in running.values():
            worker.stop(max(0.0, deadline - time.monotonic()))
