"""A sweep is read whole or refused in one line, before anything runs."""

import re
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from spes_p2p.cli import load_settings
from spes_p2p.commands.simulate import SimulateConfig, in_sweep_words
from spes_p2p.config_file import read_settings
from spes_p2p.errors import ConfigError
from spes_p2p.sim.attacks import Attack
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.sweep import EXAMPLE, deep_merge, load_sweep
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up_sweep, write_sweep

REPOSITORY = Path(__file__).resolve().parents[3]


def test_merging_goes_key_by_key_and_replaces_lists():
    base = {"a": {"b": 1, "c": {"d": 2, "e": 3}}, "f": [1, 2], "g": 4}
    changes = {"a": {"c": {"e": 5}, "h": 6}, "f": [7], "g": {"i": 8}, "j": None}
    before = repr(base)
    assert deep_merge(base, changes) == {
        "a": {"b": 1, "c": {"d": 2, "e": 5}, "h": 6},
        "f": [7],
        "g": {"i": 8},
        "j": None,
    }
    assert repr(base) == before


def test_every_variant_is_the_base_with_its_own_settings_and_a_seed(tmp_path):
    variants = {"solo": {**SOLO, "title": "Alone"}, "ours": {**PAIR, "run": {"train": {"lr": 0.5}}}, "base": None}
    sweep = load_sweep(write_sweep(tmp_path, variants, seeds=[3, 1], title="T"))
    assert sweep.title == "T" and list(sweep.variants) == ["solo", "ours", "base"]
    assert [sweep.variants[name].title for name in sweep.variants] == ["Alone", "ours", "base"]
    ours = sweep.variants["ours"].scenarios
    assert list(ours) == [3, 1]
    for seed, scenario in ours.items():
        assert scenario.seed == scenario.run.seed == seed
        assert scenario.run.train.lr == 0.5 and scenario.run.train.batch_size == 2 and scenario.peers == 2
    assert sweep.variants["base"].scenarios[1].peers == 4


def test_a_scenario_changes_with_any_setting_and_not_with_the_title(tmp_path):
    def scenario(**settings: Any) -> Scenario:
        return made_up_sweep(tmp_path, {"x": settings}).variants["x"].scenarios[0]

    plain = scenario(**PAIR)
    assert scenario(**PAIR, title="another") == plain
    assert scenario(**PAIR, run={"train": {"lr": 2e-3}}) == plain, "the default, written out"
    assert scenario(**PAIR, run={"train": {"lr": 1e-3}}) != plain
    assert scenario(**PAIR, split="tuning") != plain


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("x does not exist; give --text an existing file", "x does not exist; give base.text an existing file"),
        ("trains on files; name yours with --text PATH ...", "trains on files; name yours with base.text"),
        ("no sources; install them, or give --text FILE", "no sources; install them, or give base.text"),
        ("no CUDA device; set --device cpu", "no CUDA device; set base.device: cpu"),
        ("set --cache to a writable folder", "set --cache to a writable folder"),
    ],
)
def test_remedies_name_settings_of_a_sweep_and_no_flags_that_it_has_not(message, wanted):
    assert in_sweep_words(message) == wanted


@pytest.mark.parametrize(
    ("content", "value", "remedy"),
    [
        ({"variant": {}}, "variants is missing", "scenarios.yaml"),
        ({"variants": {}}, "variants={}", "at least 1"),
        ({"variants": {"x": {}}, "seed": 3}, "unknown setting seed", "remove it"),
        ({"variants": {"a/b": {}}}, "a/b", "match pattern"),
        ({"variants": {"x": {"peer": 3}}}, "variant x: unknown setting peer", "remove it"),
        ({"variants": {"x": {"run": {"train": {"rate": 3}}}}}, "run.train.rate", "remove it"),
        ({"variants": {"x": {"peers": 0}}}, "peers=0", "greater than"),
        ({"variants": {"x": {"max_slots": 99}}}, "max_slots=99", "16 or less"),
        ({"variants": {"x": {}}, "base": {"peers": "many"}}, "variant x: peers='many'", "scenarios.yaml"),
        (
            {"variants": {"x": {"max_slots": "all"}}},
            "variant x: max_slots='all': input should be a valid integer",
            "or a valid list",
        ),
        ({"variants": {"x": {"speeds": [1, 2, 0, 4]}}}, "variant x: speeds.2=0: ", "greater than"),
        ({"variants": {"x": {"run": {"train": 3}}}}, "run.train=3: input should be settings", "scenarios.yaml"),
        ({"variants": {"x": {"peer_ids": ["a", "b", "c", "d"]}}}, "peer_ids.0='a'", "at least 40 characters"),
        ({"variants": {"x": {"seed": 3}}}, "seed=3", "under seeds"),
        ({"variants": {"x": {"run": {"seed": 0}}}}, "run.seed=0", "under seeds"),
        ({"variants": {"x": {"run": 3}}, "base": {"run": {"train": {}}}}, "run=3", "scenarios.yaml"),
        ({"variants": {"x": {"title": "a\nb"}}}, "a\\nb", "match pattern"),
        ({"variants": {"x": 3}}, "variants.x=3", "dictionary"),
        ({"variants": {"x": {}}, "seeds": [1, 1]}, "seeds=[1, 1]", "once"),
        ({"variants": {"x": {}}, "seeds": []}, "seeds=[]", "at least 1"),
        ({"variants": {"x": {}}, "seeds": [-1]}, "-1", "greater than or equal to 0"),
        (
            {"variants": {"x": {}}, "gaps": [{"name": "g", "solo": "x", "centralised": "y", "of": ["x"]}]},
            "'y'",
            "choose from x",
        ),
        ({"variants": {"x": {}}, "gaps": [{"name": "g", "solo": "x"}]}, "gaps.0.centralised", "add it"),
        ([1], "list", "settings"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_a_sweep_cannot_be_is_one_line_with_value_and_remedy(tmp_path, content, value, remedy):
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(ConfigError) as raised:
        load_sweep(path)
    message = str(raised.value)
    assert "\n" not in message and "sweep.yaml" in message and value in message and remedy in message
    assert not re.search(r"constrained|list\[|Config\b", message), "names of types"


def test_the_example_of_scenarios_shows_all_that_can_befall_a_peer():
    sweep = load_sweep(REPOSITORY / EXAMPLE)
    scenarios = [variant.scenarios[0] for variant in sweep.variants.values()]
    events = {event.kind for scenario in scenarios for event in scenario.events}
    assert events == {"join", "leave", "kill"} and any(scenario.attacks for scenario in scenarios)
    assert any(isinstance(scenario.speeds, list) and len(set(scenario.speeds)) > 1 for scenario in scenarios)
    assert all(name in (REPOSITORY / EXAMPLE).read_text() for name in get_args(Attack.model_fields["kind"].annotation))


def test_a_key_that_is_set_twice_is_refused_with_its_lines(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text("variants:\n  x:\n    peers: 3\n    max_slots: 2\n    peers: 4\n")
    with pytest.raises(ConfigError, match=r"sweep.yaml sets 'peers' on line 3 and again on line 5; keep one$"):
        load_sweep(path)
    path.write_text("variants: {x: {peers: 1, peers: 1}}\n")
    with pytest.raises(ConfigError, match=r"sets 'peers' twice on line 1; keep one$"):
        load_sweep(path)
    path.write_text("base: {run: &run {seed: 1, lr: 2}}\nvariants:\n  x: {run: {<<: *run, seed: 2}}\n")
    assert read_settings(path, "sweep")["variants"]["x"]["run"] == {"seed": 2, "lr": 2}, "a merge may be overruled"
    # PyYAML 6.0.4 takes these two for one key where they are merged, so the test keeps them apart from a merge.
    path.write_text("run: {1: 2, '1': 3}\n")
    assert read_settings(path, "sweep")["run"] == {1: 2, "1": 3}, "a number and a text are two keys"


def test_what_is_chosen_runs_seed_by_seed(tmp_path):
    sweep = made_up_sweep(tmp_path, {"a": {}, "b": {}, "c": {}}, seeds=[0, 1])
    assert sweep.chosen([], []) == [(name, seed) for seed in (0, 1) for name in "abc"]
    assert sweep.chosen(["c", "a"], [1]) == [("a", 1), ("c", 1)]
    with pytest.raises(ConfigError, match=r"--only d: .* choose from a, b, c"):
        sweep.chosen(["a", "d"], [])
    with pytest.raises(ConfigError, match=r"--seeds 2: .* choose from 0, 1"):
        sweep.chosen([], [2])


@pytest.mark.parametrize("words", [["--only", "a,b", "--seeds", "0,1"], ["--only", "a", "b", "--seeds", "0", "1"]])
def test_lists_on_the_command_line_are_split_by_commas_or_spaces(words):
    config = load_settings(SimulateConfig, ["sweep.yaml", *words])
    assert (config.study, config.only, config.seeds) == (Path("sweep.yaml"), ["a", "b"], [0, 1])


def test_settings_come_from_variables_too(monkeypatch):
    monkeypatch.setenv("SPES_RUN_ID", "a peer's")
    monkeypatch.setenv("SPES_WORKERS", "3")
    assert load_settings(SimulateConfig, ["sweep.yaml"]).workers == 3
    monkeypatch.setenv("SPES_WORKER", "3")
    with pytest.raises(ConfigError, match="SPES_WORKER;"):
        load_settings(SimulateConfig, ["sweep.yaml"])
