"""`spes_p2p simulate`: make what runs of a study are missing, then compare all of them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import psutil
from pydantic_settings import CliPositionalArg, SettingsConfigDict

from spes_p2p.config import CommandConfig, PositiveInt
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import check_plotting, say
from spes_p2p.simulator import Evaluation
from spes_p2p.study.report import REPORT_FILE, write_report
from spes_p2p.study.results import RESULTS_FOLDER, RunResult, load_result, save_result
from spes_p2p.study.runs import LOGS_FOLDER, Job, News, run_all
from spes_p2p.study.settings import Study, load_study
from spes_p2p.training.process_group import ProcessGroup


class SimulateConfig(CommandConfig):
    """Compare ways to train in a simulation: `spes_p2p simulate configs/convergence.yaml --output runs/convergence`."""

    model_config = SettingsConfigDict(env_prefix="SPES_SIMULATE_", cli_prog_name="spes_p2p simulate")

    study: CliPositionalArg[Path]
    """YAML file with the study's base, seeds and variants."""
    output: Path = Path("runs/study")
    """Folder for results, pictures and report; runs that are finished in it are not made again."""
    only: list[str] = []
    """Variants to run, such as `solo,ours`; all by default."""
    seeds: list[int] = []
    """Seeds of the study to run; all by default."""
    workers: PositiveInt | None = None
    """Runs at a time; by default one for each CPU core, and one on a GPU."""
    report_only: bool = False
    """Run nothing; make table, pictures and report anew from what is finished."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where trained tokenizers and tokenised text are kept."""
    log_level: Literal["debug", "info", "warning"] = "info"
    """Least severe event in the runs' logs."""


def main(config: SimulateConfig) -> int:
    """Run a study; return 0, or 1 if a run failed."""
    check_plotting()
    study = load_study(config.study)
    chosen = study.chosen(config.only, config.seeds)
    finished = finished_runs(study, config.output)
    missing = [] if config.report_only else [key for key in chosen if key not in finished]
    progress = Progress(config.output, len(missing))
    if missing:
        default = default_workers(study)
        workers = min(config.workers or default, len(chosen))
        _prepare(config.output)
        jobs = [_job(config, study, variant, seed, workers) for variant, seed in missing]
        say(_opening(study, len(chosen) - len(missing), jobs, workers))
        try:
            run_all(jobs, workers, progress)
        except KeyboardInterrupt:
            say(f"\nstopped; the finished runs are in {config.output / RESULTS_FOLDER}, the same command does the rest")
            raise
    return _conclude(study, config.output, progress.failures)


def finished_runs(study: Study, output: Path) -> dict[tuple[str, int], RunResult]:
    """Return the results in a folder that the study's scenarios made, by variant and seed, in the study's order."""
    found = {
        (variant.name, seed): load_result(output, variant.name, seed, scenario)
        for variant in study.variants.values()
        for seed, scenario in variant.scenarios.items()
    }
    return {key: result for key, result in found.items() if result is not None}


def default_workers(study: Study) -> int:
    """Return one for each core that this process may use; one if any run would use a GPU, which is shared badly.

    Raises:
        ConfigError: a variant wants a GPU where there is none.
    """
    devices = {scenario.device for variant in study.variants.values() for scenario in variant.scenarios.values()}
    on_gpu = any(ProcessGroup(device).device.type == "cuda" for device in devices)
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
        self.failures: dict[tuple[str, int], str] = {}

    def __call__(self, job: Job, news: News, seconds: float) -> None:
        """Take note of a run's news, `seconds` after its start."""
        total = job.scenario.run.round.total
        if isinstance(news, Evaluation):
            what = f"round {news.round:>{len(str(total))}}/{total}  loss {news.loss:.4f}"
        elif isinstance(news, RunResult):
            self._left -= 1
            save_result(self._output, news)
            what = f"finished, loss {news.loss:.4f}"
        else:
            self._left -= 1
            self.failures[job.variant, job.seed] = news.reason
            what = f"failed: {news.reason}"
        elapsed = f"{_duration(seconds)} of {_duration(time.monotonic() - self._began)}"
        say(f"{job.variant} seed {job.seed}  {what}  [{elapsed}, {self._left} {_runs(self._left)} left]")


def _opening(study: Study, num_finished: int, jobs: list[Job], workers: int) -> str:
    done = f", {num_finished} finished before" if num_finished else ""
    threads = jobs[0].threads
    return (
        f"{study.title}: {len(jobs)} {_runs(len(jobs))} to make{done}; {workers} at a time, "
        f"{threads} {'thread' if threads == 1 else 'threads'} each; logs in {jobs[0].log.parent}"
    )


def _conclude(study: Study, output: Path, failures: Mapping[tuple[str, int], str]) -> int:
    results = finished_runs(study, output)
    if results:
        table = write_report(study, results, output)
        say(f"\n{table}\n\nreport  {output / REPORT_FILE}")
    elif not failures:
        where = output / RESULTS_FOLDER
        raise ConfigError(f"{where} holds no finished run of this study; drop --report-only or name its --output")
    for (variant, seed), reason in failures.items():
        say(f"failed: {variant} seed {seed}: {reason}")
    return 1 if failures else 0


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def _runs(count: int) -> str:
    return "run" if count == 1 else "runs"
