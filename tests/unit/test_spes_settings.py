"""The shipped SPES configs have SPES's released settings, and SPES's names lead to ours."""

from typing import Any

import pytest
import yaml
from transformers import PretrainedConfig

from spes_p2p.cli import load_settings
from spes_p2p.config import PeerConfig, RunConfig
from spes_p2p.config.checkpoint import Frozen
from spes_p2p.config.machine import shipped
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import hf_config

TABLE: dict[str, Any] = yaml.safe_load(shipped("spes_1b").parents[1].joinpath("config/spes_settings.yaml").read_text())
CONFIGS, SETTINGS = list(TABLE["files"]), TABLE["settings"]
"""A setting has its name and value in SPES (`key`, `theirs`), our name (`ours`), and our value if another (`here`)."""


def value_of(setting: dict[str, Any], config: str) -> Any:
    """Return the value that a config must have."""
    value = setting.get("here", setting.get("theirs"))
    return value.get(config) if isinstance(value, dict) else value


def peer_of(config: str) -> PeerConfig:
    return load_settings(PeerConfig, ["--run-id", "r", "--config", str(shipped(config))])


def read(peer: PeerConfig, name: str) -> Any:
    """Return the value of a setting as `spes_settings.yaml` names it."""
    assert peer.run is not None
    place, _, rest = name.partition(".")
    value: Any = peer
    if place == "hf":
        value, name = hf_config(peer.run.model, 64, peer.run.data.sequence_length), rest
    for part in name.split("."):
        assert isinstance(value, PretrainedConfig) or part in type(value).model_fields, f"{name} is no setting"
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("config", CONFIGS)
def test_a_shipped_config_has_the_released_settings(config):
    peer = peer_of(config)
    concerned = [
        setting
        for setting in SETTINGS
        if setting.get("ours") and (not isinstance(setting.get("theirs"), dict) or config in setting["theirs"])
    ]
    wrong = {
        setting["key"]: (found, value_of(setting, config))
        for setting in concerned
        if (found := read(peer, setting["ours"])) != value_of(setting, config)
    }
    assert concerned and not wrong


def test_what_differs_from_spes_has_a_reason():
    assert not [each["key"] for each in SETTINGS if not each.get("note") and ("here" in each or not each.get("ours"))]


def test_every_setting_that_a_spes_config_sets_for_the_run_is_in_the_table():
    """Those of the model, the training and the merge are SPES's; rounds, codecs and storage are this project's."""
    compared = {setting.get("ours") for setting in SETTINGS}
    for config in CONFIGS:
        run = yaml.safe_load(shipped(config).read_text())["run"]
        for section in ("model", "train", "merge"):
            assert {f"run.{section}.{name}" for name in run[section]} <= compared


@pytest.mark.parametrize(
    "text",
    [
        "spes_config: {sync_steps: 50}",
        "run: {spes_config: {sync_steps: 50}}",
        "optimizer: {betas: [0.9, 0.95], learning_rate: 1.0}",
        "model: {rope: true}",
        "run: {model: {d_model: 64}}",
    ],
)
def test_a_config_of_spes_is_refused_with_the_page_that_has_our_names(tmp_path, text):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    page = "benchmarks/results/spes_settings.md"
    with pytest.raises(ConfigError, match=f"SPES's settings are beside ours in {page}; remove it"):
        load_settings(PeerConfig, ["--run-id", "r", "--config", str(file)])


def test_a_flag_of_spes_is_refused_so_too_and_others_are_not():
    with pytest.raises(ConfigError, match=r"unknown flag --spes_config.sync_steps; SPES's settings are beside ours"):
        load_settings(PeerConfig, ["--run-id", "r", "--spes_config.sync_steps=50"])
    with pytest.raises(ConfigError, match=r"unknown flag --colour.sync_steps; see"):
        load_settings(PeerConfig, ["--run-id", "r", "--colour.sync_steps=50"])


@pytest.mark.parametrize("name", sorted(RunConfig.model_fields))
def test_no_hint_stands_in_the_way_of_a_setting_of_ours(name):
    """A dotted name that is ours must never be a key of SPES with another meaning."""
    section = RunConfig.model_fields[name].annotation
    own = section.model_fields if isinstance(section, type) and issubclass(section, Frozen) else {}
    keys = {setting["key"]: setting.get("ours") for setting in SETTINGS}
    same = {key: ours for key, ours in keys.items() if key in {f"{name}.{each}" for each in own}}
    assert all(ours == f"run.{key}" or ours is None for key, ours in same.items()), same
