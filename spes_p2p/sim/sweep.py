"""A sweep: variants of one scenario, each with several seeds, and the results that its runs leave."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from spes_p2p import __version__
from spes_p2p.cli import explain
from spes_p2p.config import Frozen, MachineConfig
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.fs import write_atomic
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import ModelSize
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import SimulationResult

EXAMPLE = "configs/scenarios.yaml"
RESULTS_FOLDER = "results"


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
    """Name of the sweep."""
    base: Settings = {}
    """Scenario settings shared by all variants, with the run's settings under `run`."""
    seeds: Seeds = [0]
    """Each variant runs once with each seed, which seeds the initial weights and the peers' data orders."""
    variants: Annotated[dict[VariantName, Settings | None], Field(min_length=1)]
    """By name, the settings that differ from `base`; `title` names the variant in tables."""
    gaps: list[Gap] = []
    """Gaps between two variants, of which other variants close a share."""


class Titled(Frozen):
    title: Title


class Variant(NamedTuple):
    """One way to train: its title in tables, and its scenarios by seed."""

    title: str
    scenarios: Mapping[int, Scenario]


@dataclass(frozen=True)
class Sweep:
    """A checked sweep; variants and gaps are in the file's order."""

    title: str
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
    return Sweep(file.title, file.seeds, variants, file.gaps)


def _variant(name: str, settings: Settings, file: SweepFile, path: Path) -> Variant:
    where = f"sweep {path}: variant {name}"
    merged = deep_merge(file.base, {key: value for key, value in settings.items() if key != "title"})
    run = merged.get("run") or {}
    if not isinstance(run, dict):
        raise ConfigError(f"{where}: run={run!r} holds no settings; see {EXAMPLE}")
    for key, value in (("seed", merged.get("seed")), ("run.seed", run.get("seed"))):
        if value is not None:
            raise ConfigError(f"{where}: {key}={value!r} is set by the sweep; list it under seeds instead")
    try:
        title = Titled(title=settings.get("title", name)).title
        scenarios = {
            seed: Scenario.model_validate(deep_merge(merged, {"seed": seed, "run": {"seed": seed}}))
            for seed in file.seeds
        }
    except ValidationError as error:
        raise ConfigError(f"{where}: {explain(error, EXAMPLE)}") from error
    return Variant(title, scenarios)


def deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` applied: mappings merge key by key; other values, also lists, are replaced."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = deep_merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


# ---------------------------------------------------------------------- results


class Point(Frozen):
    """The swarm's model after one round."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    round: int
    """Rounds committed."""
    tokens_per_peer: int
    """Tokens trained so far, mean over peers."""
    committed_tokens: int | None = None
    """Tokens of all peers that are in the model, without dropped rounds and dead peers; None in older results."""
    bytes_out_per_peer: float
    """Bytes sent so far, mean over peers."""
    loss: float
    """Held-out loss, nats per token."""


class PeerAccount(Frozen):
    """Work, traffic and memory of one virtual peer."""

    model_config = ConfigDict(extra="ignore")

    tokens: int
    """Tokens trained."""
    begun_rounds: int | None = None
    """Number of times that the peer began to train a round; None in older results."""
    committed_rounds: int | None = None
    """Rounds that include the peer's work."""
    bytes_in: int
    bytes_out: int
    expert_bytes: int
    """Memory of all experts: trained ones with gradients, moments, anchor and delta, the others as stored."""
    memory_bytes: int
    """All memory that the planner counts, without activations."""


class RunResult(Frozen):
    """A finished run; fields of other versions of the program are ignored."""

    model_config = ConfigDict(extra="ignore")

    variant: str
    seed: int
    scenario: Settings
    """All settings of the run."""
    evaluations: Annotated[list[Point], Field(min_length=1)]
    """Ascending by round; the last one is of the last committed round."""
    peers: list[PeerAccount]
    virtual_seconds: float
    wall_seconds: float
    software: str
    """Versions of spes_p2p and torch."""
    finished_at: str
    """UTC, ISO 8601."""

    @property
    def loss(self) -> float:
        """Held-out loss at the end, nats per token."""
        return self.evaluations[-1].loss

    @property
    def remarks(self) -> list[str]:
        """Caveats of the loss: that the run ended early, and peers that trained nothing."""
        last, total = self.evaluations[-1].round, self.scenario["run"]["round"]["total"]
        late = [str(index) for index, peer in enumerate(self.peers) if not peer.tokens]
        subject = f"{'peer' if len(late) == 1 else 'peers'} {', '.join(late)}"
        stopped = [f"stopped at round {last}/{total}: no peer was left"] if last < total else []
        return stopped + ([f"{subject} came too late to train"] if late else [])


def run_result(variant: str, seed: int, scenario: Scenario, result: SimulationResult) -> RunResult:
    """Return a simulation's result in the form in which it is stored.

    Raises:
        SimulationError: no peer finished a round.
    """
    if not result.evaluations:
        raise SimulationError("no peer finished a round; see the scenario's events and attacks")

    def sent(round: int) -> int:  # a report counts from its peer's start
        return sum(max((one.bytes_out for one in own if one.round <= round), default=0) for own in result.reports)

    def committed(round: int) -> int:
        return sum(one.tokens for own in result.reports for one in own if one.round <= round and one.committed)

    return RunResult(
        variant=variant,
        seed=seed,
        scenario=scenario.model_dump(mode="json"),
        evaluations=[
            Point(
                round=one.round,
                tokens_per_peer=one.tokens_per_peer,
                committed_tokens=committed(one.round),
                bytes_out_per_peer=sent(one.round) / len(result.reports),
                loss=one.loss,
            )
            for one in result.evaluations
        ],
        peers=[_account(scenario, result, peer) for peer in range(scenario.peers)],
        virtual_seconds=result.virtual_seconds,
        wall_seconds=result.wall_seconds,
        software=f"spes_p2p {__version__}, torch {torch.__version__}",
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _account(scenario: Scenario, result: SimulationResult, peer: int) -> PeerAccount:
    slots = scenario.max_slots[peer] if isinstance(scenario.max_slots, list) else scenario.max_slots
    size, setup = result.size, Setup.of(result.run, MachineConfig(), None)
    memory = peer_memory(size, min(slots, size.num_slots), setup).host_bytes
    return PeerAccount(
        tokens=sum(report.tokens for report in result.reports[peer]),
        begun_rounds=result.begun_rounds[peer],
        committed_rounds=sum(report.committed > 0 for report in result.reports[peer]),
        bytes_in=result.bytes_in[peer],
        bytes_out=result.bytes_out[peer],
        expert_bytes=memory - peer_memory(ModelSize(size.shared_params, 0, 0), 0, setup).host_bytes,
        memory_bytes=memory,
    )


Results = Mapping[tuple[str, int], RunResult]
"""By variant and seed."""


def result_file(output: Path, variant: str, seed: int) -> Path:
    """Return the path of a run's result."""
    return output / RESULTS_FOLDER / f"{variant}-{seed}.json"


def save_result(output: Path, result: RunResult) -> None:
    """Store a result as `write_file` does."""
    content = result.model_dump_json(indent=1).encode() + b"\n"
    write_file(result_file(output, result.variant, result.seed), content)


def write_file(file: Path, content: bytes) -> None:
    """Write a file of the output, whole or not at all; make its folder if necessary.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomic(file) as stream:
            stream.write(content)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}; choose a writable --output") from error


def stored_runs(sweep: Sweep, output: Path) -> dict[tuple[str, int], RunResult]:
    """Return the whole results in a folder whose settings are the sweep's."""
    stored = {}
    for name, variant in sweep.variants.items():
        for seed, scenario in variant.scenarios.items():
            try:
                result = RunResult.model_validate_json(result_file(output, name, seed).read_bytes())
                is_valid = Scenario.model_validate(result.scenario) == scenario  # a newer setting has its default there
            except (OSError, ValidationError):
                continue
            if is_valid and (result.variant, result.seed) == (name, seed):
                stored[name, seed] = result
    return stored
