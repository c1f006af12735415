"""Settings of a run's data: a folder in place of a hub data set, and what a chosen source does not read is said."""

import itertools
import json
import logging
import random
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from datasets import load_dataset
from pydantic import ValidationError

from spes_p2p.cli import load_settings
from spes_p2p.commands.local import _with_data
from spes_p2p.config import DataConfig, PeerConfig
from spes_p2p.config.commands import ExperimentConfig, PlanConfig
from spes_p2p.data.conversations import founding
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import ConfigError

from .conftest import sentences, write_rows

FIXTURES = Path(__file__).parents[2] / "fixtures" / "shards"


@pytest.fixture(params=[".jsonl", ".parquet"])
def folder(request, tmp_path, monkeypatch):
    """Text in two splits and two configurations, with a card, below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    for config, split in itertools.product(("en", "de"), ("train", "test")):
        texts = [f"{config} {split} {text}" for text in sentences(random.Random(split), 20)]
        file = tmp_path / "set" / config / f"{split}-00000-of-00001{request.param}"
        write_rows(file, texts)
        if request.param == ".parquet":
            pyarrow.parquet.write_table(pyarrow.table({"text": texts, "n": [0] * 20}), file)
    configs = ", ".join(f"{{config_name: {name}, data_dir: {name}}}" for name in ("en", "de"))
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs: [{configs}]\n---\n# Texts\n")
    return Path("set")


@pytest.mark.parametrize("config, split", [("en", "train"), ("de", "test")])
def test_a_folder_is_read_as_load_dataset_reads_it(folder, config, split):
    argv = ["--run.data.source", "hub", "--run.data.name", f"./{folder}:{config}", "--run.data.split", split]
    expected = list(load_dataset(str(folder), config, split=split, streaming=True))
    for cls, more in ((PeerConfig, ["--run-id", "r"]), (ExperimentConfig, [])):
        given = load_settings(cls, [*argv, *more])
        assert given.run.data.source == "files" and given.run.data.name is None, "a manifest names no folder"
        assert [each.text for each in documents(given.run.data, given.text)] == [row["text"] for row in expected]
    folded = _with_data(given)
    assert folded.text == given.text and folded.run.data.source == "files"
    assert load_settings(PlanConfig, argv).run.data.source == "files"


def test_a_folder_of_conversations_is_read_as_conversations(tmp_path):
    (tmp_path / "chats").mkdir()
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "chats" / "train.jsonl").write_text((json.dumps(row) + "\n") * 3)
    argv = ["--run-id", "r", "--run.data.source", "hub", "--run.data.name", str(tmp_path / "chats")]
    given = load_settings(PeerConfig, argv)
    assert given.data == [tmp_path / "chats" / "train.jsonl"] and not given.text


@pytest.mark.parametrize(
    "name, said",
    [("./set:fr", "'fr'"), ("./set:en", "split 'absent'"), ("empty", "empty"), ("../absent/x", "is no data")],
)
def test_a_folder_that_cannot_be_read_is_said_in_one_line(folder, name, said):
    Path("empty").mkdir()
    argv = ["--run.data.source", "hub", "--run.data.name", name, "--run.data.split", "absent"]
    with pytest.raises(ConfigError, match=said) as caught:
        load_settings(ExperimentConfig, argv)
    assert "\n" not in str(caught.value)


def test_a_manifest_still_names_no_folder(folder):
    with pytest.raises(ValidationError):
        DataConfig(source="hub", name=f"./{folder}")


def said_of(caplog, data: DataConfig, tmp_path: Path) -> str:
    with caplog.at_level(logging.WARNING):
        founding(data, resolve_tokenizer(data, [], tmp_path))
    return caplog.text


def test_a_size_of_the_vocabulary_beside_a_given_tokenizer_is_said_with_both_numbers(tmp_path, caplog):
    named = {"tokenizer": str(FIXTURES / "tokenizer"), "source": "files"}
    for more in ({}, {"paths": [FIXTURES / "mds_raw"]}):
        caplog.clear()
        assert not said_of(caplog, DataConfig(**named, **more), tmp_path)
        size = len(resolve_tokenizer(DataConfig(**named), [], tmp_path))
        assert not said_of(caplog, DataConfig(**named, **more, vocab_size=size), tmp_path)
        said = said_of(caplog, DataConfig(**named, **more, vocab_size=8192), tmp_path)
        assert "data.vocab_size=8192 has no effect" in said and f"has {size} entries" in said


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"text_field": "body"}, "data.text_field=body has no effect"),
        ({"split": "validation"}, "data.split=validation has no effect"),
        ({"name": "alice/texts"}, "data.name=alice/texts has no effect"),
    ],
)
def test_a_setting_that_the_source_does_not_read_is_said(tmp_path, caplog, settings, said):
    shards = {"source": "files", "paths": [FIXTURES / "mds_raw"]}
    for source in ({"source": "embedded"}, shards):
        caplog.clear()
        data = DataConfig(**source, **settings, tokenizer=str(FIXTURES / "tokenizer"))
        assert said in said_of(caplog, data, tmp_path)
    rows = shutil.copy(FIXTURES / "texts.jsonl", tmp_path)
    text = DataConfig(source="files", paths=[Path(rows)], text_field="body", tokenizer=str(FIXTURES / "tokenizer"))
    caplog.clear()
    assert "text_field" not in said_of(caplog, text, tmp_path), "it is read of rows"
