"""What is kept of a run is what the simulation did, to its last committed round, and what the planner says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.commands.simulate import Job, run_job
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.errors import SimulationError
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import ModelSize, model_size
from spes_p2p.sim.simulator import SimulationResult, simulate
from spes_p2p.sim.sweep.results import RunResult, run_result, this_machine
from spes_p2p.sim.sweep.settings import load_sweep
from tests.unit.sweep.sweeps import PAIR, made_up, made_up_sweep, write_sweep


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("sweep")


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    sweep = load_sweep(write_sweep(folder, {"ours": {**PAIR, "max_slots": [1, 3]}}))
    return Job("ours", 0, sweep.variants["ours"].scenarios[0], 1, folder / "cache", folder / "ours-0.log")


@pytest.fixture(scope="module")
def simulated(job: Job, folder: Path) -> SimulationResult:
    return simulate(job.scenario.model_copy(update={"threads": 1}), cache=folder / "cache")


@pytest.fixture(scope="module")
def heard() -> list:
    return []


@pytest.fixture(scope="module")
def result(job: Job, heard: list) -> RunResult:
    return run_job(job, heard.append)


def test_a_result_is_what_the_same_scenario_gives_alone(result, simulated, heard):
    expected = [(point.round, point.tokens_per_peer, point.loss) for point in simulated.evaluations]
    assert [(point.round, point.tokens_per_peer, point.loss) for point in result.evaluations] == expected
    assert [(point.round, point.tokens_per_peer, point.loss) for point in heard] == expected
    assert [peer.bytes_out for peer in result.peers] == list(simulated.bytes_out)
    assert [peer.bytes_in for peer in result.peers] == list(simulated.bytes_in)


def test_tokens_and_bytes_are_counted_per_peer(result):
    assert [peer.tokens for peer in result.peers] == [2 * 1 * 2 * 16] * 2  # rounds, steps, sequences, tokens
    assert [point.tokens_per_peer for point in result.evaluations] == [32, 64]
    first, last = (point.bytes_out_per_peer for point in result.evaluations)
    assert 0 < first < last <= sum(peer.bytes_out for peer in result.peers) / 2


def test_memory_is_what_a_peer_trains_and_what_it_keeps_frozen(result, job):
    run = job.scenario.run
    size, setup = model_size(run.model, run.data.vocab_size), Setup.of(run, MachineConfig(), None)
    slot = 3 * 16 * 8  # one layer's gate, up and down projections
    one, three = result.peers
    assert (one.max_slots, three.max_slots) == (1, 3)
    for peer in (one, three):
        assert peer.memory_bytes == peer_memory(size, peer.max_slots, setup).host_bytes
        assert peer.memory_bytes - peer.trained_bytes == 2 * (4 - peer.max_slots) * slot
        assert peer.memory_bytes - peer.expert_bytes == one.memory_bytes - one.expert_bytes > 0
    assert three.memory_bytes > one.memory_bytes


def test_a_simulation_that_measured_nothing_is_no_result(job):
    nothing = SimulationResult(
        RunConfig(), ModelSize(1, 1, 4), [], [[], []], {}, {}, {}, [0, 0], [(), ()], [0, 0], [0, 0], 0.0, 0.0
    )
    with pytest.raises(SimulationError, match="no peer finished a round"):
        run_result("ours", 0, job.scenario, nothing, this_machine("cpu", 1))


def test_a_dense_model_has_no_slots(folder):
    dense = result_of(folder, run={"model": {"family": "llama", "num_experts": 0, "top_k": 0}, "round": {"total": 2}})
    assert [(peer.max_slots, peer.expert_bytes) for peer in dense.peers] == [(0, 0), (0, 0)]


def result_of(folder: Path, **settings: Any) -> RunResult:
    sweep = load_sweep(write_sweep(folder, {"ours": {**PAIR, **settings}}))
    job = Job("ours", 0, sweep.variants["ours"].scenarios[0], 1, folder / "cache", folder / "ours-0.log")
    return run_job(job, lambda news: None)


def test_a_run_that_everybody_left_is_measured_at_its_last_round_and_says_so(folder, result):
    leave = [{"peer": 0, "kind": "leave", "round": 3}, {"peer": 1, "kind": "kill", "round": 3}]
    left = result_of(folder, events=leave, evaluate_rounds=2, run={"round": {"total": 6}})
    assert [point.round for point in left.evaluations] == [2, 3] and left.stopped_at == 3
    assert left.remarks == ["stopped at round 3/6: no peer was left"]
    assert result.stopped_at is None and not result.remarks


def test_a_peer_that_came_too_late_is_named(folder):
    events = [{"peer": 1, "kind": "leave", "round": 1}, {"peer": 0, "kind": "join", "round": 3}]
    alone = result_of(folder, events=events, run={"round": {"total": 4}})
    assert [peer.tokens for peer in alone.peers] == [0, 32]
    assert alone.remarks == ["stopped at round 1/4: no peer was left", "peer 0 came too late to train"]


def test_an_older_result_says_itself_that_it_ended_early(tmp_path):
    sweep = made_up_sweep(tmp_path)
    kept = json.loads(made_up(sweep, "ours", 0, [5.0]).model_dump_json(exclude={"stopped_at"}))
    assert RunResult.model_validate(kept | {"digest": "0" * 64}).stopped_at == 1
    whole = json.loads(made_up(sweep, "ours", 0, [5.0, 4.0]).model_dump_json(exclude={"stopped_at"}))
    assert RunResult.model_validate(whole).stopped_at is None
