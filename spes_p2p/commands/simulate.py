"""`spes simulate`: make what runs of a study are missing, then compare all of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from spes_p2p.config.commands import SimulateConfig
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import check_plotting, say
from spes_p2p.sim.simulator import Evaluation
from spes_p2p.sim.sweep.report import REPORT_FILE, missing_lines, write_report
from spes_p2p.sim.sweep.results import RESULTS_FOLDER, Missing, RunResult, load_result, save_failure, save_result
from spes_p2p.sim.sweep.runs import LOGS_FOLDER, Job, News, run_all
from spes_p2p.sim.sweep.settings import Study, in_study_words, load_study
from spes_p2p.training.process_group import ProcessGroup


def main(config: SimulateConfig) -> int:
    """Run a study; return 0, or 1 if a run failed."""
    check_plotting()
    study = load_study(config.study)
    chosen = study.chosen(config.only, config.seeds)
    absent = missing_runs(study, config.output)
    missing = [] if config.report_only else [key for key in chosen if key in absent]
    progress = Progress(config.output, len(missing))
    if missing:
        default = default_workers(study)
        workers = min(config.workers or default, len(missing))
        _prepare(config.output)
        jobs = [_job(config, study, variant, seed, workers) for variant, seed in missing]
        say(_opening(study, len(chosen) - len(missing), jobs, workers))
        for line in missing_lines({key: absent[key] for key in missing if absent[key].kind != "not made"}):
            say(f"made again: {line}")
        try:
            run_all(jobs, workers, progress)
        except KeyboardInterrupt:
            say(f"\nstopped; the finished runs are in {config.output / RESULTS_FOLDER}, the same command does the rest")
            raise
    return _conclude(study, config.output, progress.num_failed)


def finished_runs(study: Study, output: Path) -> dict[tuple[str, int], RunResult]:
    """Return the results in a folder that the study's scenarios made, by variant and seed, in the study's order."""
    return {key: run for key, run in _stored_runs(study, output) if isinstance(run, RunResult)}


def missing_runs(study: Study, output: Path) -> dict[tuple[str, int], Missing]:
    """Return the study's other runs, and why they have no result that counts."""
    return {key: run for key, run in _stored_runs(study, output) if isinstance(run, Missing)}


def _stored_runs(study: Study, output: Path) -> Iterator[tuple[tuple[str, int], RunResult | Missing]]:
    for variant in study.variants.values():
        for seed, scenario in variant.scenarios.items():
            yield (variant.name, seed), load_result(output, variant.name, seed, scenario)


def default_workers(study: Study) -> int:
    """Return one for each core that this process may use; one if any run would use a GPU, which is shared badly.

    Raises:
        ConfigError: a variant wants a GPU where there is none.
    """
    devices = {scenario.device for variant in study.variants.values() for scenario in variant.scenarios.values()}
    try:
        on_gpu = any(ProcessGroup(device).device.type == "cuda" for device in devices)
    except ConfigError as error:
        raise ConfigError(in_study_words(str(error))) from error
    return 1 if on_gpu else num_cores()


def num_cores() -> int:
    """Return the cores that this process may use."""
    process = psutil.Process()
    affinity = process.cpu_affinity() if hasattr(process, "cpu_affinity") else None
    return len(affinity or ()) or psutil.cpu_count() or 1


def _prepare(output: Path) -> None:
    try:
        for folder in (RESULTS_FOLDER, LOGS_FOLDER):
            (output / folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}; name a writable folder") from error


def _job(config: SimulateConfig, study: Study, variant: str, seed: int, workers: int) -> Job:
    return Job(
        variant=variant,
        seed=seed,
        scenario=study.variants[variant].scenarios[seed],
        threads=max(1, num_cores() // workers),
        cache=config.cache,
        log=config.output / LOGS_FOLDER / f"{variant}-{seed}.log",
        log_level=config.log_level,
    )


class Progress:
    """Keeps what runs bring and tells how far the study is.

    Args:
        output: The study's folder.
        num_runs: Runs to make.
    """

    def __init__(self, output: Path, num_runs: int) -> None:
        self._output, self._left = output, num_runs
        self._began = time.monotonic()
        self.num_failed = 0

    def __call__(self, job: Job, news: News, seconds: float) -> None:
        """Take note of a run's news, `seconds` after its start."""
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


def _opening(study: Study, num_finished: int, jobs: list[Job], workers: int) -> str:
    done = f", {num_finished} finished before" if num_finished else ""
    threads = sorted({job.scenario.threads or job.threads for job in jobs})
    each = f"{threads[0]} {'thread' if threads == [1] else 'threads'} each"
    if len(threads) > 1:
        each = f"{threads[0]} to {threads[-1]} threads each"
    return (
        f"{study.title}: {len(jobs)} {_runs(len(jobs))} to make{done}; {workers} at a time, {each}; "
        f"logs in {jobs[0].log.parent}"
    )


def _conclude(study: Study, output: Path, num_failed: int) -> int:
    results, missing = finished_runs(study, output), missing_runs(study, output)
    if results:
        table = write_report(study, results, output, missing)
        say(f"\n{table}\n\nreport  {output / REPORT_FILE}")
    elif num_failed:
        say("\n" + "\n".join(missing_lines(missing)))
    else:
        lines = missing_lines({key: run for key, run in missing.items() if run.kind != "not made"})
        where = f"{output / RESULTS_FOLDER} holds no finished run of this study{f' ({lines[0]})' if lines else ''}"
        raise ConfigError(f"{where}; drop --report-only or name its --output")
    return 1 if num_failed else 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"
