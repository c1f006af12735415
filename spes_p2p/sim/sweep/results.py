"""Storage of a sweep's runs: a JSON file for each, valid as long as its settings equal the sweep's."""

from __future__ import annotations

import datetime
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import ConfigDict, Field, ValidationError

from spes_p2p import __version__
from spes_p2p.config import Frozen, MachineConfig
from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.fs import write_atomic
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import ModelSize
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.simulator import SimulationResult
from spes_p2p.sim.sweep.settings import Sweep, flat
from spes_p2p.swarm.records import Metrics


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

    tokens: int
    """Tokens trained."""
    begun_rounds: int | None = None
    """Number of times that the peer began to train a round; None in older results."""
    committed_rounds: int | None = None
    """Rounds that include the peer's work."""
    bytes_in: int
    bytes_out: int
    max_slots: int
    """Number of slots that the peer could train."""
    trained_bytes: int
    """Memory of the trained parameters, with gradients, moments, anchor and delta."""
    expert_bytes: int
    """Memory of all experts: trained ones as above, the others as stored."""
    memory_bytes: int
    """All memory that the planner counts, without activations."""


class Machine(Frozen):
    """Hardware and software of a run."""

    cpu: str
    device: str
    threads: int
    python: str
    torch: str


def _stopped_at(known: Mapping[str, Any]) -> int | None:
    """Return the last committed round if it is not the scenario's last, from a result's other fields."""
    evaluations: Sequence[Point] = known["evaluations"]
    total = known["scenario"].get("run", {}).get("round", {}).get("total", 0)
    return evaluations[-1].round if evaluations and evaluations[-1].round < total else None


class RunResult(Frozen):
    """A finished run; fields of other versions of the program are ignored."""

    model_config = ConfigDict(extra="ignore")

    variant: str
    seed: int
    scenario: dict[str, Any]
    """All settings of the run."""
    evaluations: list[Point]
    """Ascending by round; the last one is of the last committed round."""
    stopped_at: int | None = Field(default_factory=_stopped_at)
    """The last committed round, if all peers were gone before the scenario's last round."""
    peers: list[PeerAccount]
    virtual_seconds: float
    wall_seconds: float
    software: str
    """Version of spes_p2p."""
    machine: Machine
    finished_at: str
    """UTC, ISO 8601."""

    @property
    def loss(self) -> float:
        """Held-out loss at the end, nats per token."""
        return self.evaluations[-1].loss

    @property
    def remarks(self) -> list[str]:
        """Caveats of the loss: that the run ended early, and peers that trained nothing."""
        total = self.scenario["run"]["round"]["total"]
        stopped = [] if self.stopped_at is None else [f"stopped at round {self.stopped_at}/{total}: no peer was left"]
        late = [str(index) for index, peer in enumerate(self.peers) if not peer.tokens]
        subject = f"{'peer' if len(late) == 1 else 'peers'} {', '.join(late)}"
        return stopped + ([f"{subject} came too late to train"] if late else [])


def run_result(variant: str, seed: int, scenario: Scenario, result: SimulationResult, machine: Machine) -> RunResult:
    """Return a simulation's result in the form in which it is stored.

    Raises:
        SimulationError: no peer finished a round.
    """
    if not result.evaluations:
        raise SimulationError("no peer finished a round; see the scenario's events and attacks")
    return RunResult(
        variant=variant,
        seed=seed,
        scenario=scenario.model_dump(mode="json"),
        evaluations=[
            Point(
                round=evaluation.round,
                tokens_per_peer=evaluation.tokens_per_peer,
                committed_tokens=committed_until(result.reports, evaluation.round),
                bytes_out_per_peer=sent_until(result.reports, evaluation.round) / len(result.reports),
                loss=evaluation.loss,
            )
            for evaluation in result.evaluations
        ],
        peers=[_account(scenario, result, peer) for peer in range(scenario.peers)],
        virtual_seconds=result.virtual_seconds,
        wall_seconds=result.wall_seconds,
        software=__version__,
        machine=machine,
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def sent_until(reports: Sequence[Sequence[Metrics]], round: int) -> int:
    """Return the bytes that all peers had sent by the end of a round; reports count from a peer's start."""
    return sum(max((report.bytes_out for report in own if report.round <= round), default=0) for own in reports)


def committed_until(reports: Sequence[Sequence[Metrics]], round: int) -> int:
    """Return the tokens of all peers that are committed in the model of a round."""
    return sum(report.tokens for own in reports for report in own if report.round <= round and report.committed)


def _account(scenario: Scenario, result: SimulationResult, peer: int) -> PeerAccount:
    slots = scenario.max_slots[peer] if isinstance(scenario.max_slots, list) else scenario.max_slots
    slots = min(slots, result.size.num_slots)
    size, setup = result.size, Setup.of(result.run, MachineConfig(), None)
    memory = peer_memory(size, slots, setup)
    without_experts = peer_memory(ModelSize(size.shared_params, 0, 0), 0, setup)
    return PeerAccount(
        tokens=sum(report.tokens for report in result.reports[peer]),
        begun_rounds=result.begun_rounds[peer],
        committed_rounds=sum(report.committed > 0 for report in result.reports[peer]),
        bytes_in=result.bytes_in[peer],
        bytes_out=result.bytes_out[peer],
        max_slots=slots,
        trained_bytes=memory.host_bytes - memory.frozen,
        expert_bytes=memory.host_bytes - without_experts.host_bytes,
        memory_bytes=memory.host_bytes,
    )


def this_machine(device: Literal["cpu", "cuda"], threads: int) -> Machine:
    """Describe this process's hardware and software."""
    name = f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device
    return Machine(
        cpu=cpu_name(), device=name, threads=threads, python=platform.python_version(), torch=torch.__version__
    )


def cpu_name() -> str:
    """Return the processor's name, on Linux from /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


Kept = TypeVar("Kept", bound=Frozen)

RESULTS_FOLDER, FAILURES_FOLDER = "results", "failures"
MAX_CHANGES = 3
"""Most changed settings that a message names."""


@dataclass(frozen=True)
class Missing:
    """The reason why a run has no valid result.

    Attributes:
        kind: Never made, failed, made with other settings, or stored in an unreadable file.
        reason: Details, if there are any.
    """

    kind: Literal["not made", "failed", "outdated", "damaged"]
    reason: str = ""


class FailedRun(Frozen):
    """A failed run."""

    variant: str
    seed: int
    scenario: dict[str, Any]
    """All settings of the run."""
    reason: str


def result_file(output: Path, variant: str, seed: int) -> Path:
    """Return the path of a run's result."""
    return output / RESULTS_FOLDER / f"{variant}-{seed}.json"


def failure_file(output: Path, variant: str, seed: int) -> Path:
    """Return the path of a run's failure."""
    return output / FAILURES_FOLDER / f"{variant}-{seed}.json"


def save_result(output: Path, result: RunResult) -> Path:
    """Store a result, whole or not at all, in place of an earlier failure; return its file.

    Raises:
        ConfigError: it cannot be written.
    """
    file = result_file(output, result.variant, result.seed)
    write_file(file, result.model_dump_json(indent=1).encode() + b"\n")
    failure_file(output, result.variant, result.seed).unlink(missing_ok=True)
    return file


def save_failure(output: Path, variant: str, seed: int, scenario: Scenario, reason: str) -> None:
    """Store the reason of a failure; a result of the run with other settings stays.

    Raises:
        ConfigError: it cannot be written.
    """
    failed = FailedRun(variant=variant, seed=seed, scenario=scenario.model_dump(mode="json"), reason=reason)
    write_file(failure_file(output, variant, seed), failed.model_dump_json(indent=1).encode() + b"\n")


def load_result(output: Path, variant: str, seed: int, scenario: Scenario) -> RunResult | Missing:
    """Return a run's result if it was made with `scenario`, else the reason why there is none."""
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


def stored_runs(sweep: Sweep, output: Path) -> tuple[dict[tuple[str, int], RunResult], dict[tuple[str, int], Missing]]:
    """Return, by variant and seed, the valid results in a folder, and why the sweep's other runs have none."""
    finished, missing = dict[tuple[str, int], RunResult](), dict[tuple[str, int], Missing]()
    for variant in sweep.variants.values():
        for seed, scenario in variant.scenarios.items():
            found = load_result(output, variant.name, seed, scenario)
            if isinstance(found, RunResult):
                finished[variant.name, seed] = found
            else:
                missing[variant.name, seed] = found
    return finished, missing


def _read(kind: type[Kept], file: Path) -> Kept | None:
    try:
        return kind.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        return None


def changes(stored: Mapping[str, Any], scenario: Scenario) -> list[str]:
    """Return the differences of a scenario from stored settings, such as "run.train.lr was 0.002, is 0.1".

    A setting that the stored ones lack is newer and counts as its default; a setting that only they have differs.
    """
    try:
        was = flat(Scenario.model_validate(stored).model_dump(mode="json"))
    except ValidationError as error:
        refused = dict.fromkeys(".".join(map(str, problem["loc"])) for problem in error.errors())
        return [f"{name or 'the scenario'} is no longer what it was" for name in refused]
    now = flat(scenario.model_dump(mode="json"))
    names = [name for name in {**was, **now} if name not in was or name not in now or was[name] != now[name]]
    return [f"{name} was {plain(was.get(name))}, is {plain(now.get(name))}" for name in names]


def plain(value: object) -> str:
    """Return a setting's value as a reader would write it."""
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


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
