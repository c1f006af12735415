"""Runs of a study side by side: each in a process of its own, watched to its end, and none left behind."""

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
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import SpesError
from spes_p2p.planner import model_size
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import Evaluation, simulate
from spes_p2p.sim.sweep.results import RunResult, run_result, this_machine
from spes_p2p.sim.sweep.settings import in_study_words
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent
from spes_p2p.training.process_group import ProcessGroup

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
STOP_SECONDS = 10.0
LOGS_FOLDER = "logs"


@dataclass(frozen=True)
class Job:
    """One run to make.

    Attributes:
        variant: Its variant's name.
        seed: Its seed.
        scenario: What to simulate.
        threads: CPU threads, where the scenario does not say.
        cache: Where tokenizers and tokenised text are kept.
        log: File for what the run has to say; appended to.
        log_level: Least severe event in it.
    """

    variant: str
    seed: int
    scenario: Scenario
    threads: int
    cache: Path
    log: Path
    log_level: str = "info"


@dataclass(frozen=True)
class Failure:
    """Why there is no result."""

    reason: str


News = Evaluation | RunResult | Failure


def run_job(job: Job, tell: Callable[[News], None]) -> RunResult:
    """Make one run in this process.

    Args:
        job: The run.
        tell: Called with each evaluation.

    Raises:
        SpesError: as `simulate`.
    """
    device = ProcessGroup(job.scenario.device).device.type
    threads = job.scenario.threads or job.threads
    result = simulate(job.scenario.model_copy(update={"threads": threads}), cache=job.cache, on_evaluation=tell)
    tokenizer = resolve_tokenizer(job.scenario.run.data, job.scenario.text, job.cache.expanduser())
    size = model_size(job.scenario.run.model, len(tokenizer))
    machine = this_machine("cuda" if device == "cuda" else "cpu", threads)
    return run_result(job.variant, job.seed, job.scenario, result, size, machine)


def _work(job: Job, pipe: Connection, parent_pid: int) -> None:
    """Make one run in a process of its own; what is no SpesError ends it with a traceback in its log."""
    die_with_parent(parent_pid)
    log_file = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    set_up_logging(job.log_level)
    try:
        pipe.send(run_job(job, pipe.send))
    except SpesError as error:
        reason = in_study_words(str(error))
        log.error("%s", reason)
        pipe.send(Failure(reason))


class Worker:
    """A job's process, seen from its parent.

    Args:
        job: The job to start.
    """

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
        """Return what the process says, or that it has ended without a result; call it when `pipe` is ready."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):  # OSError: it died amid a message
            self._process.join(STOP_SECONDS)
        code = self._process.exitcode
        if code is not None and code < 0:
            return Failure(f"killed by {signal.Signals(-code).name}; where memory is short, use fewer --workers")
        return Failure(f"{self._last_words()}; see {self.job.log}")

    def _last_words(self) -> str:
        log = self.job.log.read_bytes()[self._log_start :] if self.job.log.exists() else b""
        return last_words(log.decode(errors="replace")) or f"ended with exit code {self._process.exitcode}"

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    def stop(self, seconds: float) -> None:
        """Wait for the process's end, and kill it when that takes too long."""
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self.pipe.close()


def last_words(log: str) -> str:
    """Return what a run's log says of its end: the exception of its last traceback, or its last line.

    An exception may have a message of many lines, the last of which tells the least.
    """
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tracebacks = [index for index, line in enumerate(lines) if line.startswith("Traceback ")]
    said = [line for line in lines[tracebacks[-1] + 1 :] if not line.startswith(" ")] if tracebacks else lines[-1:]
    return said[0] if said else ""


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """Keep Ctrl-C from processes started in the block: the parent alone decides; it gets its own afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def run_all(jobs: Sequence[Job], num_workers: int, on_news: Callable[[Job, News, float], None]) -> None:
    """Make runs, a few at a time and in order; whatever happens, no process is left.

    Args:
        jobs: The runs.
        num_workers: Processes at a time.
        on_news: Called with a job, what there is to say of it, and the seconds since its start. Each job's last news
            are its result or its failure.
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
