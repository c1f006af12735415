"""Settings of a sweep: variants of one scenario, each with several seeds, read from YAML and checked before any run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field, ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import Frozen
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError
from spes_p2p.sim.scenario import Scenario

EXAMPLE = "configs/convergence.yaml"
SCENARIO_EXAMPLE = "configs/scenarios.yaml"
"""Shows a scenario's settings beside the run's."""


def _distinct(seeds: list[int]) -> list[int]:
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds={seeds} holds a seed twice; list each once")
    return seeds


VariantName = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
Title = Annotated[str, Field(min_length=1, max_length=80, pattern=r"^[^\x00-\x1f\x7f]*$")]
Seeds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(min_length=1), AfterValidator(_distinct)]
Settings = dict[str, Any]


class Gap(Frozen):
    """The gap in loss between training alone and training in one place, of which variants close a share."""

    name: Title
    """Name in tables."""
    solo: str
    """The variant that closes 0 % of the gap."""
    centralised: str
    """The variant that closes 100 % of the gap."""
    of: Annotated[list[str], Field(min_length=1)]
    """The variants whose share is measured."""


class SweepFile(Frozen):
    """A sweep's YAML."""

    title: Title = "Convergence"
    """Heading of the report."""
    base: Settings = {}
    """Scenario settings shared by all variants, with the run's settings under `run`."""
    seeds: Seeds = [0]
    """Each variant runs once with each seed, which seeds the initial weights and the peers' data orders."""
    variants: Annotated[dict[VariantName, Settings | None], Field(min_length=1)]
    """By name, the settings that differ from `base`; `title` names the variant in plots."""
    gaps: list[Gap] = []
    """Gaps between two variants, of which other variants close a share."""


class VariantTitle(Frozen):
    """A variant's title, as its settings hold it."""

    title: Title


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        name: Name in files and flags.
        title: Name in tables and plots.
        settings: Settings that differ from the sweep's base.
        scenarios: By seed.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    scenarios: Mapping[int, Scenario]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep.

    Attributes:
        title: Heading of the report.
        base: Settings shared by all variants.
        seeds: Seeds with which every variant runs.
        variants: By name, in the file's order.
        gaps: In the file's order.
    """

    title: str
    base: Mapping[str, Any]
    seeds: Sequence[int]
    variants: Mapping[str, Variant]
    gaps: Sequence[Gap]

    def chosen(self, only: Sequence[str], seeds: Sequence[int]) -> list[tuple[str, int]]:
        """Return the runs, (variant, seed), of the named variants and seeds; an empty list selects all.

        Runs are ordered by seed: a sweep that is stopped halfway can compare all variants by its first seeds.

        Raises:
            ConfigError: the sweep has no such variant or seed.
        """
        for name in only:
            if name not in self.variants:
                raise ConfigError(f"--only {name}: no such variant; choose from {', '.join(self.variants)}")
        for seed in seeds:
            if seed not in self.seeds:
                raise ConfigError(f"--seeds {seed}: not in the sweep; choose from {', '.join(map(str, self.seeds))}")
        names = [name for name in self.variants if name in only or not only]
        return [(name, seed) for seed in self.seeds if seed in seeds or not seeds for name in names]


def load_sweep(path: Path) -> Sweep:
    """Read a sweep from a YAML file; make and check every scenario.

    Raises:
        ConfigError: the file or one of its settings cannot be used.
    """
    try:
        file = SweepFile.model_validate(read_settings(path, "sweep"))
    except ValidationError as error:
        raise ConfigError(f"sweep {path}: {explain(error, EXAMPLE)}") from error
    variants = {name: _variant(name, settings or {}, file, path) for name, settings in file.variants.items()}
    for gap in file.gaps:
        for name in (gap.solo, gap.centralised, *gap.of):
            if name not in variants:
                known = ", ".join(variants)
                raise ConfigError(f"sweep {path}: gap {gap.name!r} names variant {name!r}; choose from {known}")
    return Sweep(file.title, file.base, file.seeds, variants, file.gaps)


def _variant(name: str, settings: Settings, file: SweepFile, path: Path) -> Variant:
    where = f"sweep {path}: variant {name}"
    own = {key: value for key, value in settings.items() if key != "title"}
    merged = deep_merge(file.base, own)
    run = merged.get("run") or {}
    if not isinstance(run, dict):
        raise ConfigError(f"{where}: run={run!r} holds no settings; see {SCENARIO_EXAMPLE}")
    for key, value in (("seed", merged.get("seed")), ("run.seed", run.get("seed"))):
        if value is not None:
            raise ConfigError(f"{where}: {key}={value!r} is set by the sweep; list it under seeds instead")
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
    """Return `base` with `changes` applied: mappings merge key by key; other values, also lists, are replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings under dotted names: `{"run": {"seed": 1}}` as `{"run.seed": 1}`."""
    rows: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and value
        rows |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return rows


def in_sweep_words(message: str) -> str:
    """Replace a peer's flags in an error's message by the settings of a sweep."""
    message = re.sub(r"--(text) (?:PATH \.\.\.|FILE)", r"base.\1", message)
    message = re.sub(r"--(device) (\w+)", r"base.\1: \2", message)
    return re.sub(r"--(text|device)\b", r"base.\1", message)
