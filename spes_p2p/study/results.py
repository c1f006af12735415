"""What is kept of one run of a study: a JSON file of its own, whole or absent, that says what made it."""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ConfigDict, ValidationError

from spes_p2p import __version__
from spes_p2p.config import Frozen
from spes_p2p.data.cache import write_atomically
from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.planner import SCRATCH_BYTES, TRAINED_BYTES, ModelSize, peer_bytes
from spes_p2p.scenario import Scenario
from spes_p2p.simulator import SimulationResult
from spes_p2p.study.settings import scenario_digest
from spes_p2p.swarm.records import Metrics

RESULTS_FOLDER = "results"


class Point(Frozen):
    """The swarm's model after one round."""

    model_config = ConfigDict(ser_json_inf_nan="strings")

    round: int
    """Rounds committed."""
    tokens_per_peer: int
    """Trained until then, the peers' mean."""
    bytes_out_per_peer: float
    """Sent until then, the peers' mean."""
    loss: float
    """Held-out loss, nats per token."""


class PeerAccount(Frozen):
    """What one virtual peer gave and needed."""

    tokens: int
    """Trained."""
    bytes_in: int
    bytes_out: int
    max_slots: int
    """Slots it could train."""
    trained_bytes: int
    """Of the parameters it trains, with gradients, moments, anchor and delta."""
    expert_bytes: int
    """Of all experts: the trained ones as above, the others as they are stored."""
    memory_bytes: int
    """Of everything the planner counts; activations are not in it."""


class Machine(Frozen):
    """Where a run was made."""

    cpu: str
    device: str
    threads: int
    python: str
    torch: str


class RunResult(Frozen):
    """One finished run."""

    variant: str
    seed: int
    digest: str
    """Of the scenario."""
    scenario: dict[str, Any]
    """All settings that made it."""
    evaluations: list[Point]
    """By round, ascending."""
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


def run_result(
    variant: str, seed: int, scenario: Scenario, result: SimulationResult, size: ModelSize, machine: Machine
) -> RunResult:
    """Return what is kept of a simulation.

    Args:
        variant: Its variant's name.
        seed: Its seed.
        scenario: What was simulated, as the study has it.
        result: What came of it.
        size: Of the scenario's model.
        machine: Where.

    Raises:
        SimulationError: nobody finished a round.
    """
    if not result.evaluations:
        raise SimulationError("no peer finished a round; see the scenario's events and attacks")
    return RunResult(
        variant=variant,
        seed=seed,
        digest=scenario_digest(scenario),
        scenario=scenario.model_dump(mode="json"),
        evaluations=[
            Point(
                round=evaluation.round,
                tokens_per_peer=evaluation.tokens_per_peer,
                bytes_out_per_peer=sent_until(result.reports, evaluation.round) / len(result.reports),
                loss=evaluation.loss,
            )
            for evaluation in result.evaluations
        ],
        peers=[_account(scenario, result, size, peer) for peer in range(scenario.peers)],
        virtual_seconds=result.virtual_seconds,
        wall_seconds=result.wall_seconds,
        software=__version__,
        machine=machine,
        finished_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def sent_until(reports: Sequence[Sequence[Metrics]], round: int) -> int:
    """Return the bytes that all peers had sent by the end of a round; a peer's reports count from its start."""
    return sum(max((report.bytes_out for report in own if report.round <= round), default=0) for own in reports)


def _account(scenario: Scenario, result: SimulationResult, size: ModelSize, peer: int) -> PeerAccount:
    slots = scenario.max_slots[peer] if isinstance(scenario.max_slots, list) else scenario.max_slots
    per_parameter = TRAINED_BYTES + SCRATCH_BYTES
    memory = peer_bytes(size, slots, scenario.run.frozen_storage)
    return PeerAccount(
        tokens=sum(report.tokens for report in result.reports[peer]),
        bytes_in=result.bytes_in[peer],
        bytes_out=result.bytes_out[peer],
        max_slots=slots,
        trained_bytes=per_parameter * (size.shared_params + slots * size.slot_params),
        expert_bytes=memory - per_parameter * size.shared_params,
        memory_bytes=memory,
    )


def this_machine(device: Literal["cpu", "cuda"], threads: int) -> Machine:
    """Return where this process runs."""
    name = f"cuda ({torch.cuda.get_device_name()})" if device == "cuda" else device
    return Machine(
        cpu=cpu_name(), device=name, threads=threads, python=platform.python_version(), torch=torch.__version__
    )


def cpu_name() -> str:
    """Return the processor's name; Linux tells more than `platform` does."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def result_file(output: Path, variant: str, seed: int) -> Path:
    """Return where a run's result is kept."""
    return output / RESULTS_FOLDER / f"{variant}-{seed}.json"


def save_result(output: Path, result: RunResult) -> Path:
    """Keep a result, whole or not at all; return its file.

    Raises:
        ConfigError: it cannot be written.
    """
    file = result_file(output, result.variant, result.seed)
    write_file(file, result.model_dump_json(indent=1).encode() + b"\n")
    return file


def load_result(output: Path, variant: str, seed: int, scenario: Scenario) -> RunResult | None:
    """Return a run's result; None if there is none, it is damaged, or another scenario made it."""
    try:
        result = RunResult.model_validate_json(result_file(output, variant, seed).read_bytes())
    except (OSError, ValidationError):
        return None
    is_same = (result.variant, result.seed, result.digest) == (variant, seed, scenario_digest(scenario))
    return result if is_same and result.evaluations else None


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
