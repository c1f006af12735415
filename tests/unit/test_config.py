"""The settings that ship load, and every setting of a run explains itself and survives the manifest."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel, ValidationError

from spes_p2p.cli import load_settings
from spes_p2p.commands.local import ExperimentConfig
from spes_p2p.config import (
    FOUNDED,
    CommandConfig,
    Frozen,
    MachineConfig,
    ModelConfig,
    OptimizerName,
    PeerConfig,
    RunConfig,
    TrainConfig,
    check_machine,
)
from spes_p2p.config.commands import AmendConfig
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import hf_config
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.sim.sweep import load_sweep

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
SHIPPED = [path for path in CONFIGS if "variants" not in yaml.safe_load(path.read_text())]
SWEEPS = [path for path in CONFIGS if path not in SHIPPED] + sorted((ROOT / "benchmarks" / "studies").glob("*.yaml"))


def sections(cls: type[BaseModel]) -> list[type[BaseModel]]:
    inner = [field.annotation for field in cls.model_fields.values()]
    return [cls, *(c for a in inner if isinstance(a, type) and issubclass(a, Frozen) for c in sections(a))]


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under dotted names: `{"run": {"seed": 1}}` as `{"run.seed": 1}`."""
    rows: dict[str, Any] = {}
    for key, value in settings.items():
        is_section = isinstance(value, Mapping) and value
        rows |= flat(value, f"{prefix}{key}.") if is_section else {f"{prefix}{key}": value}
    return rows


def test_there_are_configs_to_ship():
    assert SHIPPED and SWEEPS


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_founds_a_run_as_it_says(path):
    content = yaml.safe_load(path.read_text())
    peer = load_settings(PeerConfig, ["--run-id", "r", "--config", str(path)])
    assert peer.run is not None
    for section, values in content["run"].items():
        for name, value in values.items() if isinstance(values, dict) else []:
            assert getattr(getattr(peer.run, section), name) == value, f"{section}.{name}"
    hf_config(peer.run.model, 64, peer.run.data.sequence_length)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_starts_a_local_experiment(path):
    experiment = load_settings(ExperimentConfig, ["--config", str(path)])
    assert experiment.run.model_dump() != RunConfig().model_dump()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_a_shipped_sweep_is_made_of_scenarios_that_say_what_it_says(path):
    sweep, content = load_sweep(path), yaml.safe_load(path.read_text())
    assert list(sweep.variants) == list(content["variants"])
    for name, settings in content["variants"].items():
        for seed in content["seeds"]:
            loaded = sweep.variants[name].scenarios[seed]
            scenario = loaded.model_dump() | {"text": list(map(str, loaded.text))}
            scenario["peer_text"] = [list(map(str, paths)) for paths in loaded.peer_text]
            scenario["events"] = [event.model_dump(exclude_unset=True) for event in loaded.events]
            assert scenario["seed"] == scenario["run"]["seed"] == seed
            wanted = flat(content["base"]) | {key: v for key, v in flat(settings or {}).items() if key != "title"}
            assert {key: flat(scenario)[key] for key in wanted} == wanted
        hf_config(sweep.variants[name].scenarios[seed].run.model, 64, 64)


def test_a_run_survives_the_manifests_json():
    run = RunConfig.model_validate({"model": {"num_experts": 8}, "train": {"lr": 1 / 3}, "outer": {"momentum": 0.1}})
    assert RunConfig.model_validate(json.loads(json.dumps(run.model_dump(mode="json")))) == run


def test_a_runs_settings_cannot_be_changed_afterwards():
    with pytest.raises(ValidationError):
        RunConfig().seed = 1  # type: ignore[misc]


@pytest.mark.parametrize("section", sections(RunConfig), ids=lambda section: section.__name__)
def test_no_section_takes_an_unknown_key(section):
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        section.model_validate({"unknown_key": 1})


@pytest.mark.parametrize("cls", [*sections(RunConfig)[1:], PeerConfig, ExperimentConfig], ids=lambda c: c.__name__)
def test_every_setting_is_explained(cls):
    unexplained = [name for name, field in cls.model_fields.items() if not field.description]
    assert not unexplained


@pytest.mark.parametrize("value", [float("nan"), -1.0])
@pytest.mark.parametrize("setting", ["train.lr", "train.weight_decay", "train.warmup_rounds", "train.balance_loss"])
def test_no_rate_is_negative_or_not_a_number(setting, value):
    section, name = setting.split(".")
    with pytest.raises(ValidationError):
        RunConfig.model_validate({section: {name: value}})


@pytest.mark.parametrize("setting", ["train.beta1", "train.beta2", "outer.momentum"])
def test_no_moving_average_keeps_everything(setting):
    section, name = setting.split(".")
    with pytest.raises(ValidationError, match="less than 1"):
        RunConfig.model_validate({section: {name: 1.0}})


@pytest.mark.parametrize(
    ("warmup", "decay", "remedy"), [(6, 0.5, "5"), (0.5, 1.0, "0"), (12, 0.25, "7.5")], ids=["half", "all", "too-long"]
)
def test_a_warm_up_that_reaches_into_the_decay_is_refused_with_the_remedy(warmup, decay, remedy):
    train = {"schedule": "wsd", "warmup_rounds": warmup, "decay_fraction": decay}
    with pytest.raises(ValidationError, match=rf"train.warmup_rounds={warmup} reaches .* set it to {remedy} or less"):
        RunConfig.model_validate({"train": train, "round": {"total": 10}})
    RunConfig.model_validate({"train": train | {"warmup_rounds": float(remedy)}, "round": {"total": 10}})
    RunConfig.model_validate({"train": train | {"schedule": "cosine"}, "round": {"total": 12}})


@pytest.mark.parametrize("schedule", ["cosine", "constant", "wsd"])
@pytest.mark.parametrize(
    ("warmup", "total", "others", "end"),
    [
        (50, 4, {}, "4"),
        (4.5, 4, {}, "4"),
        (11, 500, {"train": {"schedule_rounds": 10}}, "10"),
        (8, 6, {"train": {"schedule_rounds": 10}}, "6"),
        (3, 9, {"round": {"growing": 9}}, "(9|1.482)"),
    ],
    ids=["run", "just", "schedule", "run-before-schedule", "growing-rounds"],
)
def test_a_warm_up_longer_than_the_run_or_its_schedule_is_refused_with_both_numbers(
    schedule, warmup, total, others, end
):
    train = {"schedule": schedule, "warmup_rounds": warmup, "decay_fraction": 1e-6} | others.get("train", {})
    settings = {"train": train, "round": {"total": total} | others.get("round", {})}
    with pytest.raises(ValidationError, match=rf"train.warmup_rounds={warmup} .*\b{end}\b.*; set it to") as refused:
        RunConfig.model_validate(settings)
    longest = float(re.search(r"set it to ([\d.]+) or less", str(refused.value))[1])
    run = RunConfig.model_validate(settings | {"train": train | {"warmup_rounds": longest}})
    assert max(rate_of_step(run, total * step / 1000) for step in range(1001)) > 0.9 * run.train.lr
    RunConfig.model_validate(settings, context=FOUNDED)  # a run from before this check goes on


@pytest.mark.parametrize(
    ("optimizer", "moments", "of_shared", "of_slot"),
    [
        ("adamw", "both", ("exp_avg", "exp_avg_sq"), ("exp_avg", "exp_avg_sq")),
        ("adamw", "second", ("exp_avg_sq",), ("exp_avg_sq",)),
        ("muon", "both", ("exp_avg", "exp_avg_sq"), ("exp_avg",)),
        ("muon", "local", (), ()),
        ("adamw8bit", "local", (), ()),
    ],
)
def test_a_run_averages_what_its_optimizer_has_of_what_it_asks_for(optimizer, moments, of_shared, of_slot):
    run = RunConfig.model_validate({"train": {"optimizer": optimizer}, "outer": {"moments": moments}})
    assert (run.averaged_moments("shared"), run.averaged_moments("slot")) == (of_shared, of_slot)


def test_the_warm_up_of_a_simulated_variant_fits_its_rounds(tmp_path):
    base = {"run": {"train": {"warmup_rounds": 4}}}
    study = tmp_path / "study.yaml"
    study.write_text(yaml.safe_dump({"base": base, "variants": {"short": {"run": {"round": {"total": 3}}}}}))
    with pytest.raises(ConfigError, match=r"variant short: train.warmup_rounds=4 is longer than round.total=3; set it"):
        load_sweep(study)


def test_heads_of_odd_width_are_refused_with_the_remedy():
    with pytest.raises(ConfigError, match=r"hidden_size=30 over model.num_heads=10 .* choose another number of heads"):
        hf_config(ModelConfig(hidden_size=30, num_heads=10, num_kv_heads=10), 64, 16)


def test_an_amendment_reads_the_file_that_its_founder_started_from(tmp_path):
    """It has a machine's settings, too, which an amendment leaves alone."""
    given = load_settings(AmendConfig, ["folder", "--config", "configs/home_1b.yaml", "--run.round.total", "9"])
    assert given.run.round.total == 9 and given.run.model.num_experts > 1
    (tmp_path / "odd.yaml").write_text("run: {}\nhub_token: secret\n")
    with pytest.raises(ConfigError, match="unknown setting hub_token; remove it"):
        load_settings(AmendConfig, ["folder", "--config", str(tmp_path / "odd.yaml")])


def test_a_pipe_is_no_configuration_file(tmp_path):
    """It can be read once; a run began with the defaults in place of what it held."""
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is no file; write the settings into one"):
        load_settings(PeerConfig, ["--run-id", "run", "--config", str(tmp_path / "pipe")])


def test_no_command_takes_an_unknown_setting():
    """A secret that stands in a configuration file by mistake is an error there, and goes nowhere."""

    class Command(CommandConfig):
        peers: int = 1

    assert Command(peers=2).peers == 2
    with pytest.raises(ValidationError, match="hub_token"):
        Command(hub_token="a secret")


NAMES = get_args(OptimizerName)


@pytest.mark.parametrize("of_run", NAMES)
@pytest.mark.parametrize("of_machine", NAMES)
def test_a_machine_may_only_choose_the_same_steps_in_other_bits(of_run, of_machine):
    run, machine = RunConfig(train=TrainConfig(optimizer=of_run)), MachineConfig(inner_optimizer=of_machine)
    if of_run == of_machine or {of_run, of_machine} == {"adamw", "adamw8bit"}:
        check_machine(run, machine)
        return
    with pytest.raises(ConfigError, match=rf"inner_optimizer={of_machine} .*train.optimizer={of_run}; leave it out"):
        check_machine(run, machine)


NARROW = {"gradients": "bf16", "inner_optimizer": "adamw8bit"}


@pytest.mark.parametrize(
    ("choices", "ranks"),
    [
        ({"shard": "fsdp"}, 2),
        ({"shard": "fsdp", "inner_optimizer": "adamw8bit"}, 1),
        (NARROW, 1),
        ({**NARROW, "micro_batch_size": 2}, 1),
    ],
)
def test_what_the_remedies_name_is_taken(choices, ranks):
    check_machine(RunConfig(train=TrainConfig(batch_size=16)), MachineConfig(**choices), ranks)
