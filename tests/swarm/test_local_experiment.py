"""The local experiment, start to end: interrupted, resumed, robbed of a peer, and still whole."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
import yaml
from peer_processes import Command, Commands, commands_in, saved_state, write_corpus, write_settings
from transformers import AutoModelForCausalLM, AutoTokenizer

from spes_p2p.config import RunConfig

# Long enough to be interrupted and to lose a peer, short enough to be finished.
ROUND = {"mode": "tokens", "tokens": 10**9, "min_seconds": 0.5, "max_seconds": 1.5}
TOTAL = 6


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus.jsonl")


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as commands:
        yield commands


def start(commands: Commands, folder: Path, corpus: Path, *words: str | Path, total: int) -> Command:
    settings = write_settings(folder / "settings.yaml", round={**ROUND, "total": total})
    flags = ["--output", folder / "out", "--cache", corpus.parent / "cache", "--peers", "2"]
    given = [] if "--resume" in words else ["--config", settings, "--text", corpus]
    return commands.start("-m", "spes_p2p", "local", *flags, *given, *words)


def wait_for_round(launcher: Command, peer: Path, number: int, seconds: float = 120.0) -> None:
    """Return once a peer has finished a round; its checkpoint says so. Fail as soon as the launcher has ended."""
    deadline = time.monotonic() + seconds
    while (state := saved_state(peer)) is None or state["round"] < number:
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.process.wait(0.1)
            raise AssertionError(f"ended before {peer} reached round {number}: {launcher.tail()}")
        assert time.monotonic() < deadline, f"{peer} did not reach round {number}: {launcher.tail()}"


def wait_for_file(launcher: Command, path: Path, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            launcher.process.wait(0.1)
            raise AssertionError(f"ended before it wrote {path}: {launcher.tail()}")
        assert time.monotonic() < deadline, f"no {path}: {launcher.tail()}"


def peer_writing(launcher: Command, log: Path) -> psutil.Process:
    """Return the child of the launcher whose output a log is: children are forks, which share its command line."""
    (peer,) = [
        child for child in psutil.Process(launcher.pid).children() if os.readlink(f"/proc/{child.pid}/fd/1") == str(log)
    ]
    return peer


# Three minutes of four starts. In the commit lane test_experiment has what an interrupted experiment starts again, and
# test_peer_life what Ctrl-C, SIGKILL and --resume do to the peers that it starts.
@pytest.mark.full
def test_an_experiment_survives_ctrl_c_and_a_killed_peer_and_leaves_all_it_promises(
    commands: Commands, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    early = start(commands, tmp_path, corpus, total=TOTAL)
    wait_for_file(early, out / "run.yaml")
    early.signal(signal.SIGINT)
    assert early.end() == 130 and early.matches("continue it")
    assert not (out / "model").exists() and not list(out.glob("peer-*")), (
        "it was interrupted before a peer had anything to resume"
    )

    first = start(commands, tmp_path, corpus, "--resume", total=TOTAL)
    wait_for_round(first, out / "peer-1", 1)
    first.signal(signal.SIGINT)
    assert first.end() == 130
    commands.wait_until_gone()
    assert first.matches(rf"continue it: .*--resume --output {re.escape(str(out))}")
    number = int(first.matches(r"^model .*: round (\d+) of run 'local'")[0][1])
    assert number >= 1 and f"Round: {number} of {TOTAL}" in (out / "model" / "README.md").read_text()
    assert type(AutoModelForCausalLM.from_pretrained(out / "model")).__name__ == "OlmoeForCausalLM"

    second = start(commands, tmp_path, corpus, "--resume", total=TOTAL)
    number = saved_state(out / "peer-1")["round"]
    wait_for_round(second, out / "peer-1", number + 1)
    check_pages(out, second)
    killed = peer_writing(second, out / "logs" / "peer-1.log")
    assert str(killed.pid) in (out / "logs" / "pids.txt").read_text().split()
    killed.kill()
    assert second.end(180) == 0, second.tail()
    commands.wait_until_gone()
    assert second.matches("peer-1 was killed by SIGKILL; the swarm goes on without it")
    check_results(out, second)

    third = start(commands, tmp_path, corpus, "--resume", total=TOTAL)
    assert third.end() == 0 and third.matches("the run is finished; to prolong it: .* amend")
    assert not third.matches("peers train run"), "it starts nothing"


def check_pages(out: Path, launcher: Command) -> None:
    """The monitor and each peer show the run on a page of their own, whose address is on the screen or in the log."""
    monitor, peer = (json.loads(fetched(folder, "state.json")) for folder in (out, out / "peer-1"))
    assert launcher.matches(f"page: {(out / 'page').read_text().strip()}")
    assert (out / "peer-1" / "page").read_text().strip() in (out / "logs" / "peer-1.log").read_text()
    assert monitor["run"]["me"] is None and peer["run"]["me"] in peer["peers"]
    assert monitor["run"]["total"] == peer["run"]["total"] == TOTAL and len(monitor["coverage"]) == 4
    assert peer["figures"]["memory"] > 1e8 and peer["figures"]["reach"].startswith("yes")
    assert b"# TYPE spes_peers gauge" in fetched(out, "metrics")


def fetched(folder: Path, name: str) -> bytes:
    """Return a file of the page whose address an output directory has."""
    with urllib.request.urlopen((folder / "page").read_text().strip() + name, timeout=30) as answer:
        return answer.read()


def check_results(out: Path, launcher: Command) -> None:
    run = RunConfig.model_validate(yaml.safe_load((out / "run.yaml").read_text())["run"])
    assert run.round.total == TOTAL and run.model.num_experts == 4 and run.data.source == "files"

    events = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert {0, TOTAL} <= {event["round"] for event in events if "round" in event}, "from the start to the last round"
    report = (out / "report.html").read_text()
    assert '<script type="application/json" id="data">' in report and '"state": "finished"' in report
    assert "sample" in {event["kind"] for event in events}
    for name in ("peer-0", "peer-1", "monitor"):
        assert (out / "logs" / f"{name}.log").stat().st_size

    model, tokenizer = (cls.from_pretrained(out / "model") for cls in (AutoModelForCausalLM, AutoTokenizer))
    assert type(model).__name__ == "OlmoeForCausalLM"
    tokens = tokenizer("7 plus 7 is", return_tensors="pt")
    with torch.no_grad():
        assert model.generate(**tokens, max_new_tokens=4, do_sample=False).shape[1] == tokens["input_ids"].shape[1] + 4

    summary = "\n".join(launcher.lines)
    assert f" evaluate {out / 'model'}" in summary
    assert f"--resume --output {out}" in summary
    assert re.search(r"spes join spes:local\.\S+ --output", summary)


@pytest.mark.full
def test_a_killed_launcher_leaves_no_process_and_a_failing_peer_stops_everything(
    commands: Commands, corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    launcher = start(commands, tmp_path, corpus, total=500)
    wait_for_round(launcher, out / "peer-1", 1)
    assert len(commands.alive()) > 4
    launcher.signal(signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL
    commands.wait_until_gone()

    for tensors in (out / "peer-1" / "checkpoint").glob("*/tensors.safetensors"):
        tensors.write_bytes(tensors.read_bytes()[:50])
    resumed = start(commands, tmp_path, corpus, "--resume", total=500)
    assert resumed.end() == 2
    commands.wait_until_gone()
    summary = "\n".join(resumed.lines)
    assert "peer-1 failed with exit code 2" in summary
    assert f"delete {out / 'peer-1' / 'checkpoint'}" in summary, summary
