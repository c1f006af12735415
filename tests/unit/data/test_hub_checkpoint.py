"""A checkpoint of the hub is downloaded by its commit, without code and pickles, and read like a folder."""

import json
from pathlib import Path

import pytest
from checkpoints import VOCAB, saved
from hub_server import COMMIT, hub_of

from spes_p2p.config import DataConfig, RunConfig, StartConfig
from spes_p2p.data.hub import checkpoint_folder
from spes_p2p.errors import ConfigError, DataError, OutageError
from spes_p2p.model.start import model_of
from spes_p2p.training.build import with_digests


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    source = saved(tmp_path / "hub" / "models" / "someone" / "small", "llama")
    (source / "pytorch_model.bin").write_bytes(b"a pickle")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    with hub_of(tmp_path / "hub", monkeypatch) as server:
        yield server


@pytest.mark.parametrize("name", ["someone/small", f"someone/small@{COMMIT}"])
def test_a_run_starts_from_a_checkpoint_of_the_hub(hub, tmp_path, name):
    folder, full_name = checkpoint_folder(Path(name))
    assert full_name == f"someone/small@{COMMIT}"
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    run = RunConfig(data=DataConfig(sequence_length=16), model=model_of(folder))
    start = with_digests(run, VOCAB, folder, full_name).model.start
    local = tmp_path / "hub" / "models" / "someone" / "small"
    assert start is not None and start.source == full_name
    assert start.model_copy(update={"source": None}) == with_digests(run, VOCAB, local).model.start
    asked = len(hub.asked)
    again, _ = checkpoint_folder(Path(f"someone/small@{COMMIT}"))
    assert again == folder and not any("safetensors" in path for path in hub.asked[asked:]), "it is kept"


def test_a_model_that_no_run_trains_is_refused_before_its_weights_are_asked_for(hub, tmp_path):
    file = tmp_path / "hub" / "models" / "someone" / "small" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mlp_bias": True}))
    with pytest.raises(ConfigError, match="sets mlp_bias=True, where a run has False"):
        checkpoint_folder(Path("someone/small"), model_of)
    assert any("config.json" in path for path in hub.asked)
    assert not any("safetensors" in path and "GET" in path for path in hub.asked)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


@pytest.mark.parametrize("name", ["someone/nothing", f"someone/small@{'d' * 40}"])
def test_what_the_hub_has_not_is_one_line_with_the_remedy(hub, name):
    with pytest.raises(DataError, match=r"cannot download someone/.*; check name, commit and network, or give --from"):
        checkpoint_folder(Path(name))


@pytest.mark.parametrize(
    "name",
    # The hub's library asks again for 20 seconds.
    ["someone/small", pytest.param(f"someone/small@{COMMIT}", marks=pytest.mark.full)],
)
def test_a_hub_that_does_not_answer_now_may_answer_later(hub, name):
    hub.shutdown()
    hub.server_close()
    with pytest.raises(OutageError, match="cannot download someone/small") as caught:
        checkpoint_folder(Path(name))
    assert caught.value.exit_code == 75


def test_a_folder_goes_before_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "someone" / "small").mkdir(parents=True)
    assert checkpoint_folder(Path("someone/small")) == (Path("someone/small"), None)
    assert checkpoint_folder(Path("nothing")) == (Path("nothing"), None) and not hub.asked


@pytest.mark.parametrize("source", ["someone/small", "../small@" + "c" * 40, "a/b/c@" + "c" * 40, "someone/small@main"])
def test_a_manifest_names_a_checkpoint_of_the_hub_by_its_commit(source):
    whole = {"vocab_size": 8, "max_position_embeddings": 8, "shared": "0" * 64, "slots": []}
    assert StartConfig.model_validate(whole | {"source": f"someone/small@{COMMIT}"}).source
    with pytest.raises(ValueError, match="source"):
        StartConfig.model_validate(whole | {"source": source})
