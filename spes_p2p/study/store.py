"""Where a study keeps its runs: a JSON file for each, which counts as long as its settings do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ValidationError

from spes_p2p.config import Frozen
from spes_p2p.data.cache import write_atomically
from spes_p2p.errors import ConfigError
from spes_p2p.scenario import Scenario
from spes_p2p.study.results import RunResult
from spes_p2p.study.settings import flat

Kept = TypeVar("Kept", bound=Frozen)

RESULTS_FOLDER, FAILURES_FOLDER = "results", "failures"
MAX_CHANGES = 3
"""Settings named where more may differ."""


@dataclass(frozen=True)
class Missing:
    """Why a run has no result that counts.

    Attributes:
        kind: What became of it: no trace, an error, a result of other settings, or a file that cannot be read.
        reason: More of it, where there is more to tell.
    """

    kind: Literal["not made", "failed", "outdated", "damaged"]
    reason: str = ""


class FailedRun(Frozen):
    """One run that failed."""

    variant: str
    seed: int
    scenario: dict[str, Any]
    """All settings that made it."""
    reason: str


def result_file(output: Path, variant: str, seed: int) -> Path:
    """Return where a run's result is kept."""
    return output / RESULTS_FOLDER / f"{variant}-{seed}.json"


def failure_file(output: Path, variant: str, seed: int) -> Path:
    """Return where it is kept that a run has failed."""
    return output / FAILURES_FOLDER / f"{variant}-{seed}.json"


def save_result(output: Path, result: RunResult) -> Path:
    """Keep a result, whole or not at all, in place of an earlier failure; return its file.

    Raises:
        ConfigError: it cannot be written.
    """
    file = result_file(output, result.variant, result.seed)
    write_file(file, result.model_dump_json(indent=1).encode() + b"\n")
    failure_file(output, result.variant, result.seed).unlink(missing_ok=True)
    return file


def save_failure(output: Path, variant: str, seed: int, scenario: Scenario, reason: str) -> None:
    """Keep why a run failed; a result of it from other settings stays where it is.

    Raises:
        ConfigError: it cannot be written.
    """
    failed = FailedRun(variant=variant, seed=seed, scenario=scenario.model_dump(mode="json"), reason=reason)
    write_file(failure_file(output, variant, seed), failed.model_dump_json(indent=1).encode() + b"\n")


def load_result(output: Path, variant: str, seed: int, scenario: Scenario) -> RunResult | Missing:
    """Return a run's result if the scenario made it, otherwise what became of it.

    Args:
        output: The study's folder.
        variant: The variant's name.
        seed: The run's.
        scenario: As the study has it now.
    """
    file, changed = result_file(output, variant, seed), list[str]()
    result = _read(RunResult, file)
    if result is not None and (result.variant, result.seed) == (variant, seed) and result.evaluations:
        changed = changes(result.scenario, scenario)
        if not changed:
            return result
    failed = _read(FailedRun, failure_file(output, variant, seed))
    if failed is not None and not changes(failed.scenario, scenario):
        return Missing("failed", failed.reason)
    if changed:
        more = len(changed) - MAX_CHANGES
        return Missing("outdated", ", ".join(changed[:MAX_CHANGES]) + (f", and {more} more" if more > 0 else ""))
    return Missing("damaged", f"{file} is no whole result of this run") if file.exists() else Missing("not made")


def _read(kind: type[Kept], file: Path) -> Kept | None:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def changes(stored: Mapping[str, Any], scenario: Scenario) -> list[str]:
    """Return in what a scenario differs from stored settings, such as "run.train.lr was 0.002, is 0.1".

    A setting that the stored ones lack is newer than they are, and was what it is by default; one that only they have
    differs.
    """
    try:
        was = flat(Scenario.model_validate(stored).model_dump(mode="json"))
    except ValidationError as error:
        refused = dict.fromkeys(".".join(map(str, problem["loc"])) for problem in error.errors())
        return [f"{name or 'the scenario'} is no longer what it was" for name in refused]
    now = flat(scenario.model_dump(mode="json"))
    names = [name for name in {**was, **now} if name not in was or name not in now or was[name] != now[name]]
    return [f"{name} was {_plain(was.get(name))}, is {_plain(now.get(name))}" for name in names]


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def write_file(file: Path, content: bytes) -> None:
    """Write a file of the output, whole or not at all, and its folder if there is none.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(file) as stream:
            stream.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose a writable --output") from error
