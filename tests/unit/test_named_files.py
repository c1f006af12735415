"""Files that a person names: what exists is taken as it is called, and what is not found is said with the remedy."""

import json
import shutil
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from spes_p2p.cli import EXIT_USER_ERROR, entry_point, load_settings
from spes_p2p.config import DataConfig, PeerConfig
from spes_p2p.config.commands import EvaluateConfig, ExperimentConfig, MonitorConfig, TokenizeConfig
from spes_p2p.data.chat_rows import conversation_files
from spes_p2p.data.shards import locate
from spes_p2p.data.sources import corpus_files, documents
from spes_p2p.data.tokenise import find_files
from spes_p2p.errors import ConfigError

SHARDS = Path(__file__).parents[1] / "fixtures" / "shards"
FOLDERS = ["data[1]", "data[!1]", "a * b", "what?", "[draft]", "in [brackets] {and} more, all"]


@pytest.fixture(params=FOLDERS)
def folder(request, tmp_path, monkeypatch):
    """A folder with a name like a pattern, beside one that the pattern would match, from the working directory."""
    for name, text in ((request.param, "here"), ("data1", "elsewhere"), ("data2", "elsewhere"), ("a x b", "elsewhere")):
        (tmp_path / name / "below").mkdir(parents=True)
        for file in (tmp_path / name / "rows.jsonl", tmp_path / name / "below" / "rows.jsonl"):
            file.write_text(json.dumps({"text": text}) + "\n")
        shutil.copy(SHARDS / "npy" / "flat.npy", tmp_path / name / "flat.npy")
        for file in (SHARDS / "megatron_int32").iterdir():
            shutil.copy(file, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    return Path(request.param)


def test_what_exists_is_taken_literally(folder):
    rows, deep = folder / "rows.jsonl", folder / "below" / "rows.jsonl"
    for pattern, found in (
        (rows, [rows]),
        (folder / "*.jsonl", [rows]),
        (folder / "*" / "r*.jsonl", [deep]),
        (folder / "**" / "*.jsonl", [deep, rows]),
        (folder / "below", [deep]),
    ):
        assert [path for path, _ in corpus_files([pattern])] == found == find_files([pattern]), pattern
        assert conversation_files([pattern]) == found, pattern
    assert locate([folder / "*.npy"]) == [folder / "flat.npy"]
    assert locate([folder / "text_document"]) == [folder / "text_document.idx"], "Megatron's prefix"
    data = DataConfig(source="files")
    assert {document.text for document in documents(data, [folder / "**" / "*.jsonl"])} == {"here"}


@pytest.mark.parametrize("flag", ["--text", "--data", "--file-glob"])
def test_a_flag_takes_the_name_of_any_file(folder, flag):
    cls, more = (TokenizeConfig, ["--output-prefix", "s/"]) if flag == "--file-glob" else (ExperimentConfig, [])
    for words in ([flag, str(folder), str(folder / "*.jsonl")], [f"{flag}={folder}", f"{flag}={folder / '*.jsonl'}"]):
        config = load_settings(cls, [*words, *more])
        assert getattr(config, flag[2:].replace("-", "_")) == [folder, folder / "*.jsonl"], words


@pytest.mark.parametrize("find", [corpus_files, find_files, locate], ids=["--text", "--file-glob", "--data"])
def test_what_is_not_found_is_said_with_the_place_and_the_remedy(folder, find):
    flag = {corpus_files: "--text", find_files: "--file-glob", locate: "--data"}[find]
    for pattern, where, rest in (
        (folder / "*.parquet", folder.absolute(), "*.parquet"),
        (Path("data[9]") / "*", Path.cwd(), "data[9]/*"),
        (Path("data[9]"), Path.cwd(), "data[9]"),
        (folder / "below" / "x?", folder.absolute() / "below", "x?"),
    ):
        with pytest.raises(ConfigError) as caught:
            find([pattern])
        said = str(caught.value)
        assert f"{pattern} matches no file: {where} has no {rest}" in said and f"give {flag} " in said, said
    with pytest.raises(ConfigError, match=f"absent does not exist; give {flag} an existing"):
        find([Path("absent")])


def said_by(cls, monkeypatch, capsys, argv: list[str], run) -> str:
    """Return what a command prints when its work ends with an error."""
    with pytest.raises(SystemExit) as ended:
        entry_point(cls, run, argv)
    assert ended.value.code == EXIT_USER_ERROR
    return capsys.readouterr().err


OF_COMMANDS = {
    "tokenize": (TokenizeConfig, ["--file-glob", "x", "--output-prefix", "y"], "set --text-field"),
    "local": (ExperimentConfig, [], "set --run.data.text-field"),
    "peer": (PeerConfig, ["--run-id", "r"], "set --run.data.text-field"),
    "evaluate": (EvaluateConfig, ["x"], "rename one"),
    "monitor": (MonitorConfig, ["--run-id", "r", "--initial-peers", "/ip4/127.0.0.1/tcp/1"], "rename one"),
}


@pytest.mark.parametrize("command", OF_COMMANDS)
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_a_missing_column_is_said_with_the_flag_of_the_command(tmp_path, monkeypatch, capsys, command, suffix):
    cls, argv, remedy = OF_COMMANDS[command]
    file = tmp_path / f"rows{suffix}"
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"body": ["x"]}), file)
    else:
        file.write_text('{"body": "x"}\n' if suffix == ".jsonl" else '[{"body": "x"}]')
    said = said_by(cls, monkeypatch, capsys, argv, lambda config: [*documents(DataConfig(source="files"), [file])])
    assert f"{file} " in said and "no field 'text' (it has: body)" in said and remedy in said, said


def test_other_settings_of_the_data_are_named_by_their_flags_too(monkeypatch, capsys):
    def ends(config):
        raise ConfigError(
            "held-out text has 0 tokens; raise data.held_out_fraction, or lower data.sequence_length "
            "(data.tokenizer in /x/data.tokenizer; data.vocab_size=9)"
        )

    said = said_by(ExperimentConfig, monkeypatch, capsys, [], ends)
    assert "raise --run.data.held-out-fraction, or lower --run.data.sequence-length" in said
    assert "(--run.data.tokenizer in /x/data.tokenizer; data.vocab_size=9)" in said
    said = said_by(EvaluateConfig, monkeypatch, capsys, ["x"], ends)
    assert "lower --sequence-length" in said and "raise data.held_out_fraction" in said
