"""What a study compares: variants of one scenario, each over some seeds, from a YAML and checked before any runs."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from spes_p2p.cli import explain, read_yaml
from spes_p2p.config import Frozen
from spes_p2p.errors import ConfigError
from spes_p2p.sim.scenario import Scenario

EXAMPLE = "configs/convergence.yaml"
SCENARIO_EXAMPLE = "configs/scenarios.yaml"
"""Which shows what a scenario can be beside a run."""


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} holds a seed twice; list each once")
    return seeds


VariantName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Title = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$")]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1), AfterValidator(_distinct)]
Settings = dict[str, Any]


class Gap(Frozen):
    """A question: how much of the way from training alone to training in one place do some variants go?"""

    name: Title
    """For the tables."""
    solo: str
    """The variant that closes 0 % of the gap."""
    centralised: str
    """The variant that closes 100 % of it."""
    of: Annotated[list[str], Field(min_length=1)]
    """The variants to ask it of."""


class StudyFile(Frozen):
    """A study as its YAML has it."""

    title: Title = "Convergence"
    """Heading of the report."""
    base: Settings = {}
    """Settings of a scenario that every variant starts from, the run's under `run`."""
    seeds: Seeds = [0]
    """Each variant runs once with each: it seeds the initial weights and the peers' data orders."""
    variants: Annotated[dict[VariantName, Settings | None], Field(min_length=1)]
    """By name, what differs from `base`; `title` names the variant in plots."""
    gaps: list[Gap] = []
    """Gaps between two variants, and which others close how much of them."""


class VariantTitle(Frozen):
    """What a variant holds beside settings."""

    title: Title


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: For files.
        title: For people.
        settings: What differs from the study's base.
        scenarios: By seed.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    scenarios: Mapping[int, Scenario]


@dataclass(frozen=True)
class Study:
    """What is compared, checked.

    Attributes:
        title: Heading of the report.
        base: What every variant starts from.
        seeds: Of every variant.
        variants: By name, in the file's order.
        gaps: In the file's order.
    """

    title: str
    base: Mapping[str, Any]
    seeds: Sequence[int]
    variants: Mapping[str, Variant]
    gaps: Sequence[Gap]

    def chosen(self, only: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
        """Return the runs, (variant, seed), of some variants and seeds; nothing chosen means all.

        Seeds come first: a study that is stopped halfway can compare all variants by the first of them.

        Raises:
            ConfigError: the study has no such variant or seed.
        """
        for name in only:
            if name not in self.variants:
                raise ConfigError(f"--only {name}: no such variant; choose from {', '.join(self.variants)}")
        for seed in seeds:
            if seed not in self.seeds:
                raise ConfigError(f"--seeds {seed}: not in the study; choose from {', '.join(map(str, self.seeds))}")
        names = [name for name in self.variants if name in only or not only]
        return [(name, seed) for seed in self.seeds if seed in seeds or not seeds for name in names]


def load_study(path: Path) -> Study:
    """Return the study in a YAML file, with every scenario of it made and checked.

    Raises:
        ConfigError: the file, or something in it, cannot be used.
    """
    try:
        file = StudyFile.model_validate(read_yaml(path, "study"))
    except ValidationError as error:
        raise ConfigError(f"study {path}: {explain(error, EXAMPLE)}") from error
    variants = {name: _variant(name, settings or {}, file, path) for name, settings in file.variants.items()}
    for gap in file.gaps:
        for name in (gap.solo, gap.centralised, *gap.of):
            if name not in variants:
                known = ", ".join(variants)
                raise ConfigError(f"study {path}: gap {gap.name!r} names variant {name!r}; choose from {known}")
    return Study(file.title, file.base, file.seeds, variants, file.gaps)


def _variant(name: str, settings: Settings, file: StudyFile, path: Path) -> Variant:
    where = f"study {path}: variant {name}"
    own = {key: value for key, value in settings.items() if key != "title"}
    merged = deep_merge(file.base, own)
    run = merged.get("run") or {}
    if not isinstance(run, dict):
        raise ConfigError(f"{where}: run={run!r} holds no settings; see {SCENARIO_EXAMPLE}")
    for key, value in (("seed", merged.get("seed")), ("run.seed", run.get("seed"))):
        if value is not None:
            raise ConfigError(f"{where}: {key}={value!r} is set by the study; list it under seeds instead")
    try:
        title = VariantTitle(title=settings.get("title", name)).title
        scenarios = {
            seed: Scenario.model_validate(deep_merge(merged, {"seed": seed, "run": {"seed": seed}}))
            for seed in file.seeds
        }
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, SCENARIO_EXAMPLE)}") from error
    return Variant(name, title, own, scenarios)


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` in it: mappings merge key by key, everything else, lists too, replaces."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by dotted names: `{"run": {"seed": 1}}` as `{"run.seed": 1}`."""
    rows: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and value
        rows |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return rows


def in_study_words(message: str) -> str:
    """Return an error's message with settings of the study in place of a peer's flags, which a study has not."""
    message = re.sub(r"--(text) (?:PATH \.\.\.|FILE)", r"base.\1", message)
    message = re.sub(r"--(device) (\w+)", r"base.\1: \2", message)
    return re.sub(r"--(text|device)\b", r"base.\1", message)
