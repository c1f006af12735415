"""A kept run counts as long as its settings do, whatever settings the program has learnt since; if not, it says why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.sim.sweep.results import (
    Missing,
    RunResult,
    changes,
    failure_file,
    load_result,
    result_file,
    save_failure,
    save_result,
)
from spes_p2p.sim.sweep.settings import load_sweep
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep

REPOSITORY = Path(__file__).resolve().parents[3]
KEPT = REPOSITORY / "benchmarks" / "results" / "convergence"


def stored(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())


def without(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """Settings as a version of the program kept them that did not have one of them yet."""
    kept = json.loads(json.dumps(settings))
    *sections, key = name.split(".")
    section = kept
    for part in sections:
        section = section[int(part)] if isinstance(section, list) else section[part]
    del section[key]
    return kept


def test_a_result_survives_its_file(tmp_path):
    sweep = made_up_sweep(tmp_path)
    result = made_up(sweep, "ours", 0, [5.0])
    file = save_result(tmp_path, result)
    assert file == tmp_path / "results" / "ours-0.json" and [p.name for p in file.parent.iterdir()] == [file.name]
    assert load_result(tmp_path, "ours", 0, sweep.variants["ours"].scenarios[0]) == result
    content = stored(file)
    assert content["scenario"]["run"]["train"]["batch_size"] == 2
    assert content["machine"]["cpu"] and content["machine"]["torch"] and content["software"]


def test_a_loss_that_is_no_number_survives_its_file(tmp_path):
    sweep = made_up_sweep(tmp_path)
    save_result(tmp_path, made_up(sweep, "ours", 0, [float("inf"), float("nan")]))
    found = load_result(tmp_path, "ours", 0, sweep.variants["ours"].scenarios[0])
    assert isinstance(found, RunResult) and [repr(point.loss) for point in found.evaluations] == ["inf", "nan"]


@pytest.mark.parametrize("damage", ["torn", "empty", "not json", "a field too few", "no evaluation", "no settings"])
def test_a_damaged_result_counts_as_none(tmp_path, damage):
    sweep = made_up_sweep(tmp_path)
    scenario = sweep.variants["ours"].scenarios[0]
    assert load_result(tmp_path, "ours", 0, scenario) == Missing("not made")
    file = save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    whole, content = file.read_text(), stored(file)
    assert isinstance(load_result(tmp_path, "ours", 0, scenario), RunResult)
    content.pop("peers")
    contents = {
        "torn": whole[: len(whole) // 2],
        "empty": "",
        "not json": "\x00",
        "a field too few": json.dumps(content),
        "no evaluation": json.dumps(json.loads(whole) | {"evaluations": []}),
        "no settings": json.dumps(json.loads(whole) | {"scenario": 3}),
    }
    file.write_text(contents[damage])
    found = load_result(tmp_path, "ours", 0, scenario)
    assert isinstance(found, Missing) and found.kind == "damaged" and str(file) in found.reason


def test_a_result_counts_for_its_own_variant_seed_and_scenario_only(tmp_path):
    sweep = made_up_sweep(tmp_path, {"ours": PAIR, "twin": PAIR, "solo": SOLO}, seeds=[0, 1])
    file = save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    assert load_result(tmp_path, "ours", 1, sweep.variants["ours"].scenarios[1]) == Missing("not made")
    outdated = load_result(tmp_path, "ours", 0, sweep.variants["solo"].scenarios[0])
    assert outdated == Missing("outdated", "peers was 2, is 1, max_slots was 2, is 4")
    result_file(tmp_path, "twin", 0).write_bytes(file.read_bytes())
    twin = load_result(tmp_path, "twin", 0, sweep.variants["twin"].scenarios[0])
    assert isinstance(twin, Missing) and twin.kind == "damaged"


def test_the_first_settings_that_differ_are_named(tmp_path):
    save_result(tmp_path, made_up(made_up_sweep(tmp_path), "ours", 0, [5.0]))
    other = {"run": {"train": {"lr": 0.5, "beta1": 0.8}, "round": {"steps": 9}}, "split": "tuning", "events": [1]}
    other["events"] = [{"peer": 0, "kind": "leave", "round": 1}]
    scenario = made_up_sweep(tmp_path, {"ours": PAIR | other}).variants["ours"].scenarios[0]
    found = load_result(tmp_path, "ours", 0, scenario)
    assert found == Missing(
        "outdated",
        "run.train.lr was 0.002, is 0.5, run.train.beta1 was 0.9, is 0.8, run.round.steps was 1, is 9, and 2 more",
    )


# ---------------------------------------------------------------------- settings come and go


ATTACK = {"peer": 0, "kind": "scale", "from_round": 1}


@pytest.mark.parametrize("name", ["threads", "run.train.weight_decay", "run.merge", "attacks.0.factor"])
def test_a_setting_that_is_newer_than_a_result_was_then_what_it_is_by_default(tmp_path, name):
    def scenario(**settings: Any):
        return made_up_sweep(tmp_path, {"ours": PAIR | {"attacks": [ATTACK]} | settings}).variants["ours"].scenarios[0]

    kept = without(scenario().model_dump(mode="json"), name)
    assert changes(kept, scenario()) == []
    others = {
        "threads": {"threads": 3},
        "run.train.weight_decay": {"run": {"train": {"weight_decay": 0.2}}},
        "run.merge": {"run": {"merge": {"alpha": 0.3}}},
        "attacks.0.factor": {"attacks": [ATTACK | {"factor": 3.0}]},
    }
    [change] = changes(kept, scenario(**others[name]))
    assert change.startswith(name.split(".0.")[0])


def test_a_setting_that_is_gone_was_something(tmp_path):
    scenario = made_up_sweep(tmp_path).variants["ours"].scenarios[0]
    kept = scenario.model_dump(mode="json")
    kept["run"]["train"]["momentum_of_old"] = 0.5
    assert changes(kept, scenario) == ["run.train.momentum_of_old is no longer what it was"]
    assert changes({"run": {"train": {"lr": -1}}}, scenario) == ["run.train.lr is no longer what it was"]


@pytest.mark.parametrize("file", sorted((KEPT / "results").glob("*.json")), ids=lambda file: file.stem)
def test_the_results_behind_the_documentation_count_and_will_when_a_setting_is_added(file, tmp_path):
    variant, _, seed = file.stem.rpartition("-")
    scenario = load_sweep(REPOSITORY / "configs" / "convergence.yaml").variants[variant].scenarios[int(seed)]
    found = load_result(KEPT, variant, int(seed), scenario)
    assert isinstance(found, RunResult) and found.stopped_at is None
    kept = without(stored(file), "scenario.run.train.router_z_loss")
    copy = result_file(tmp_path, variant, int(seed))
    copy.parent.mkdir()
    copy.write_text(json.dumps(kept))
    assert load_result(tmp_path, variant, int(seed), scenario) == found.model_copy(
        update={"scenario": kept["scenario"]}
    )


# ---------------------------------------------------------------------- failures


def test_a_failure_is_kept_until_its_settings_change_or_the_run_succeeds(tmp_path):
    sweep = made_up_sweep(tmp_path, {"ours": PAIR, "solo": SOLO})
    scenario, other = (sweep.variants[name].scenarios[0] for name in ("ours", "solo"))
    save_failure(tmp_path, "ours", 0, scenario, "out of luck")
    assert load_result(tmp_path, "ours", 0, scenario) == Missing("failed", "out of luck")
    assert load_result(tmp_path, "ours", 0, other) == Missing("not made")
    assert load_result(tmp_path, "solo", 0, other) == Missing("not made")
    save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    assert isinstance(load_result(tmp_path, "ours", 0, scenario), RunResult)
    assert not failure_file(tmp_path, "ours", 0).exists()


def test_a_failure_tells_more_than_an_outdated_result_of_the_run(tmp_path):
    sweep = made_up_sweep(tmp_path, {"ours": PAIR, "solo": SOLO})
    save_result(tmp_path, made_up(sweep, "ours", 0, [5.0]))
    scenario = sweep.variants["solo"].scenarios[0]
    save_failure(tmp_path, "ours", 0, scenario, "out of luck")
    assert load_result(tmp_path, "ours", 0, scenario) == Missing("failed", "out of luck")


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    sweep = made_up_sweep(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a writable --output"):
        save_result(tmp_path / "file", made_up(sweep, "ours", 0, [5.0]))
    with pytest.raises(ConfigError, match="choose a writable --output"):
        save_failure(tmp_path / "file", "ours", 0, sweep.variants["ours"].scenarios[0], "no")
