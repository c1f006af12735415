"""Before a volunteer's machine reads what a stranger's manifest names, its user has seen what, and has agreed."""

import io
import json
import sys

import pytest
from hub_server import hub_of

from spes_p2p.config import RunConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.swarm.manifest import Manifest

FOUNDER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def manifest_of(**data) -> Manifest:
    config = RunConfig.model_validate({"data": data})
    return Manifest(
        **{"run_id": "run", "founder": FOUNDER, "software": "0.1", "config": config, "vocab_size": 300},
        **{"tokenizer_digest": "0" * 64, "tokenizer_bytes": 100},
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    folder = tmp_path / "hub" / "alice" / "texts"
    folder.mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: odc-by\n---\n")
    (folder / "rows.jsonl").write_text(json.dumps({"text": "x" * 2_000_000}))
    with hub_of(tmp_path / "hub", monkeypatch) as server:
        yield server


def ask(monkeypatch, manifest, answer=None, **settings) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO() if answer is None else Terminal(answer))
    ask_to_read(manifest, 5_000_000, **{"yes": False, **settings})


@pytest.mark.parametrize("answer", ["", "\n", "n\n", "no\n", "maybe\n"])
def test_nothing_is_read_without_a_yes(hub, monkeypatch, capsys, answer):
    with pytest.raises(ConfigError, match="nothing was read"):
        ask(monkeypatch, manifest_of(source="hub", name="alice/texts"), answer)
    assert "[y/N]" in capsys.readouterr().err and not any("/resolve/" in path for path in hub.asked)


@pytest.mark.parametrize("answer", ["y\n", "Yes\n"])
def test_source_licence_and_size_are_shown_and_one_yes_is_enough(hub, monkeypatch, caplog, answer):
    with caplog.at_level("INFO", "spes_p2p"):
        ask(monkeypatch, manifest_of(source="hub", name="alice/texts", tokenizer="bob/words"), answer)
    data, tokenizer = caplog.messages
    assert "alice/texts" in data and "odc-by" in data and "2.0 MB" in data and "1 files" in data
    assert "bob/words" in tokenizer and "300 entries" in tokenizer and "5.0 MB" in tokenizer


def test_without_a_terminal_one_line_names_the_flag(hub, monkeypatch):
    manifest = manifest_of(source="hub", name="alice/texts")
    with pytest.raises(ConfigError, match=r"alice/texts.*odc-by.*--yes") as caught:
        ask(monkeypatch, manifest)
    assert "\n" not in str(caught.value)
    ask(monkeypatch, manifest, yes=True)


@pytest.mark.parametrize("data", [{}, {"source": "files"}, {"vocab_size": 8000}])
def test_a_run_that_names_nothing_asks_nothing(monkeypatch, data):
    ask(monkeypatch, manifest_of(**data))


def test_a_monitor_that_evaluates_nothing_is_not_asked_about_the_data(monkeypatch):
    ask(monkeypatch, manifest_of(source="hub", name="alice/texts"), reads_data=False)


def test_a_licence_that_steers_a_terminal_is_shown_as_escapes(hub, monkeypatch, caplog):
    (hub.root / "alice" / "texts" / "README.md").write_text('---\nlicense: "mit\\e[2J"\n---\n')
    with caplog.at_level("INFO", "spes_p2p"):
        ask(monkeypatch, manifest_of(source="hub", name="alice/texts"), yes=True)
    assert "mit" in caplog.messages[0] and "\x1b" not in caplog.messages[0]
