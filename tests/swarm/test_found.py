"""`spes found` on a real terminal: five questions, the plan, and a founder that others can join."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spes_p2p.cli import load_settings
from spes_p2p.commands.found import _name, _over
from spes_p2p.config import PeerConfig

SECONDS = 150.0
QUICK = ["--run.round.min-peers", "1", "--host", "127.0.0.1"]
MOST_KEYS = 12


class Terminal:
    """`spes found` on a pseudo-terminal of its own, with its keys counted."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.keys, self.text = 0, ""
        self._end, end = pty.openpty()
        words = [sys.executable, "-m", "spes_p2p", "found", "--tokens-per-second", "3000", *flags]
        environment = {**os.environ, "HOME": str(folder), "TERM": "dumb"}
        files = {"stdin": end, "stdout": end, "stderr": end}
        self.process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True, **files)
        os.close(end)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read until the text since the last match has the pattern."""
        deadline = time.monotonic() + SECONDS
        while not (found := re.search(pattern, self.text)):
            assert select.select([self._end], [], [], deadline - time.monotonic())[0], f"no {pattern!r}: {self.text}"
            self.text += os.read(self._end, 65536).decode()
        self.text = self.text[found.end() :]
        return found

    def type(self, keys: str) -> None:
        self.keys += len(keys)
        os.write(self._end, keys.encode())

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        os.close(self._end)


@pytest.fixture
def terminal(tmp_path):
    terminal = Terminal(tmp_path, *QUICK)
    yield terminal
    terminal.close()


def test_a_founder_runs_after_at_most_twelve_keys(terminal, tmp_path):
    terminal.wait_for(r"what is the run for\? \[my-run\]")
    terminal.type("\n")
    terminal.wait_for(r"1 local_experiment \([\d.]+ M\), 2 home_1b \(1.17 B\), 3 home_7b \(7.33 B\), or a file \[2\]")
    terminal.type("1\n")
    terminal.wait_for("whose text.*settings say]")
    terminal.type("\n")
    terminal.wait_for(r"who may join\? all, or invited \[all\]")
    terminal.type("\n")
    terminal.wait_for(r"upload rate of this link, Mbit/s\? \[20\]")
    terminal.type("\n")
    terminal.wait_for(r"8 such peers: \d+ (minutes|hours)")
    terminal.wait_for(r"found it now\? \[y\]")
    terminal.type("\n")
    terminal.wait_for("others join with: spes join spes:my-run")
    terminal.wait_for("friends: spes join spes:my-run")
    terminal.wait_for("round 1: 1 peers")
    print(f"{terminal.keys} keys")
    assert terminal.keys <= MOST_KEYS
    founded = load_settings(PeerConfig, ["--run-id", "x", "--config", str(tmp_path / "runs" / "my-run.yaml")])
    assert founded.run.round.min_peers == 1 and founded.run.round.total == 40, "flags are over the model's file"
    assert founded.uplink_mbit == 20 and founded.run.codecs.shared == "int4", "as its link asks for"


def test_answers_are_checked_and_taken(terminal, tmp_path):
    (tmp_path / "poems").mkdir()
    (tmp_path / "poems" / "a.txt").write_text("a poem\n")
    for question, answer in {
        "run for": "poems in Latin",
        "which model.*\n?.*]": "4",
        "4 is no answer": "local_experiment",
        "whose text": "nowhere",
        "nowhere is no answer": "poems",
        "who may join": "invited",
        "Mbit/s": "-3",
        "-3 is no answer": "50",
        "found it now": "n",
    }.items():
        terminal.wait_for(question)
        terminal.type(f"{answer}\n")
    assert terminal.process.wait(SECONDS) == 0
    written = load_settings(PeerConfig, ["--run-id", "x", "--config", str(tmp_path / "runs" / "poems-in-Latin.yaml")])
    assert written.text == [Path("poems")] and written.run.data.source == "files"
    assert written.run.invite_only and written.uplink_mbit == 50


def test_a_flag_answers_each_question(tmp_path):
    (tmp_path / "a.txt").write_text("a poem\n")
    flags = ["--config", "home_1b", "--text", "a.txt", "--run-id", "x", "--run.invite-only", "--uplink-mbit", "50"]
    terminal = Terminal(tmp_path, *QUICK, *flags)
    terminal.wait_for(r"8 such peers: \d+ days[^?]*found it now\? ")
    terminal.type("n\n")
    assert terminal.process.wait(SECONDS) == 0
    terminal.close()
    written = load_settings(PeerConfig, ["--run-id", "x", "--config", str(tmp_path / "runs" / "x.yaml")])
    assert written.run.data.source == "files" and written.run.data.name is None, "own text is in place of the hub's"
    assert written.run.invite_only and written.uplink_mbit == 50 and written.max_slots == 4


def test_names_and_settings_are_put_together():
    assert _name("poems, in Latin!") == "poems-in-Latin" and _name("...") == ""
    assert _over({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": 4}, "e": 5}) == {"a": {"b": 4, "c": 2}, "d": 3, "e": 5}
