"""What is kept of a run is what the simulation did and what the planner says; nothing damaged or outdated counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.planner import SCRATCH_BYTES, TRAINED_BYTES, ModelSize
from spes_p2p.simulator import SimulationResult, simulate
from spes_p2p.study.results import RunResult, load_result, result_file, run_result, save_result, this_machine
from spes_p2p.study.runs import Job, run_job
from spes_p2p.study.settings import load_study
from tests.unit.study.studies import PAIR, SOLO, made_up, made_up_study, write_study


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("study")


@pytest.fixture(scope="module")
def job(folder: Path) -> Job:
    study = load_study(write_study(folder, {"ours": {**PAIR, "max_slots": [1, 3]}}))
    return Job("ours", 0, study.variants["ours"].scenarios[0], 1, folder / "cache", folder / "ours-0.log")


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


def test_memory_is_what_a_peer_trains_and_what_it_keeps_frozen(result):
    slot = 3 * 16 * 8  # one layer's gate, up and down projections
    trained = TRAINED_BYTES + SCRATCH_BYTES
    one, three = result.peers
    assert (one.max_slots, three.max_slots) == (1, 3)
    assert one.expert_bytes == trained * slot + 2 * 3 * slot
    assert three.expert_bytes == trained * 3 * slot + 2 * slot
    assert three.trained_bytes - one.trained_bytes == trained * 2 * slot
    for peer in (one, three):
        shared_bytes = peer.trained_bytes - peer.max_slots * trained * slot
        assert peer.memory_bytes - peer.expert_bytes == shared_bytes > 0


def test_a_result_survives_its_file(result, job, tmp_path):
    file = save_result(tmp_path, result)
    assert file == tmp_path / "results" / "ours-0.json" and [p.name for p in file.parent.iterdir()] == [file.name]
    assert load_result(tmp_path, "ours", 0, job.scenario) == result
    content = json.loads(file.read_text())
    assert content["scenario"]["run"]["train"]["batch_size"] == 2
    assert content["machine"]["cpu"] and content["machine"]["torch"] and content["software"]


def test_a_loss_that_is_no_number_survives_its_file(tmp_path):
    study = made_up_study(tmp_path)
    save_result(tmp_path, made_up(study, "ours", 0, [float("inf"), float("nan")]))
    found = load_result(tmp_path, "ours", 0, study.variants["ours"].scenarios[0])
    assert found is not None and [repr(point.loss) for point in found.evaluations] == ["inf", "nan"]


@pytest.mark.parametrize("damage", ["torn", "empty", "not json", "a field too few", "no evaluation", "another digest"])
def test_a_damaged_or_outdated_result_counts_as_none(tmp_path, damage):
    study = made_up_study(tmp_path)
    scenario = study.variants["ours"].scenarios[0]
    file = save_result(tmp_path, made_up(study, "ours", 0, [5.0]))
    whole, content = file.read_text(), json.loads(file.read_text())
    assert load_result(tmp_path, "ours", 0, scenario) is not None
    content.pop("peers")
    contents = {
        "torn": whole[: len(whole) // 2],
        "empty": "",
        "not json": "\x00",
        "a field too few": json.dumps(content),
        "no evaluation": json.dumps(json.loads(whole) | {"evaluations": []}),
        "another digest": json.dumps(json.loads(whole) | {"digest": "0" * 64}),
    }
    file.write_text(contents[damage])
    assert load_result(tmp_path, "ours", 0, scenario) is None


def test_a_result_counts_for_its_own_variant_seed_and_scenario_only(tmp_path):
    study = made_up_study(tmp_path, {"ours": PAIR, "twin": PAIR, "solo": SOLO}, seeds=[0, 1])
    file = save_result(tmp_path, made_up(study, "ours", 0, [5.0]))
    assert load_result(tmp_path, "ours", 1, study.variants["ours"].scenarios[1]) is None
    assert load_result(tmp_path, "ours", 0, study.variants["solo"].scenarios[0]) is None
    result_file(tmp_path, "twin", 0).write_bytes(file.read_bytes())
    assert load_result(tmp_path, "twin", 0, study.variants["twin"].scenarios[0]) is None


def test_a_simulation_that_measured_nothing_is_no_result(job):
    nothing = SimulationResult([], [[], []], {}, [(), ()], [0, 0], [0, 0], 0.0, 0.0)
    with pytest.raises(SimulationError, match="no peer finished a round"):
        run_result("ours", 0, job.scenario, nothing, ModelSize(1, 1, 4), this_machine("cpu", 1))


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    study = made_up_study(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a writable --output"):
        save_result(tmp_path / "file", made_up(study, "ours", 0, [5.0]))
