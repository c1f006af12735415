"""Whatever a peer writes reaches a person as one line that only shows: in logs, errors, tracebacks, console and W&B."""

from __future__ import annotations

import re
import subprocess
import sys
import types

import pytest
from lanes import sample

from spes_p2p.monitor.curves import WandbSink

HOSTILE = "0.1\x1b[2J\x1b]0;owned\x07\r\n2026-11-25 10:00:00,000 I spes_p2p.peer.life: the run is finished \u202e\x9b"
LINE = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ [A-Z] [\w.]+: ")
PROGRAM = """
import logging, sys, threading
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig
from spes_p2p.errors import JoinError

hostile, what = {hostile!r}, {what!r}
foreign = logging.getLogger("a_library")
foreign.addHandler(logging.StreamHandler())
foreign.propagate = False

def fail():
    raise RuntimeError(hostile)

def main(config):
    if what == "log":
        logging.getLogger("spes_p2p.swarm").info("founded with %s", hostile)
    if what == "repeated":
        logging.getLogger("spes_p2p.swarm").warning("founded with " + hostile)
    if what == "library":
        foreign.warning("read %s", hostile)
    if what == "long":
        logging.getLogger("spes_p2p.swarm").warning("%s", hostile * 100_000)
    if what == "traceback":
        try:
            fail()
        except RuntimeError:
            logging.getLogger("spes_p2p.swarm").exception("failed with %s", hostile)
    if what == "thread":
        thread = threading.Thread(target=fail)
        thread.start()
        thread.join()
    if what == "error":
        raise JoinError(hostile)
    if what == "uncaught":
        fail()
    return 0

sys.argv[1:] = []
entry_point(CommandConfig, main)
"""
CODES = {"error": 2, "uncaught": 1}


WAYS = ["log", "repeated", "library", "long", "traceback", "thread", "error", "uncaught"]


@pytest.mark.parametrize("what", sample(WAYS, ["log", "traceback", "thread", "error"]))  # full: the same handlers
def test_no_output_of_a_command_shows_what_a_peer_wrote_as_it_is(what: str) -> None:
    program = PROGRAM.format(hostile=HOSTILE, what=what)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60, check=False)
    assert ended.returncode == CODES.get(what, 0), ended.stderr
    text = ended.stderr.decode()
    first, *others = text.splitlines()
    assert r"0.1\x1b[2J" in text and all(line.isprintable() for line in [first, *others])
    assert what in ("library", "error") or LINE.match(first)
    assert all(line.startswith("  | ") for line in others), "a line that could pass for a log line"
    assert len(text) < 30_000


def test_settings_of_a_stranger_reach_wandb_printable(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    started: dict = {}
    wandb = types.ModuleType("wandb")
    run = types.SimpleNamespace(define_metric=lambda *args, **kwargs: None)
    wandb.init = lambda **kwargs: started.update(kwargs) or run  # type: ignore[attr-defined]
    wandb.Settings = dict  # type: ignore[attr-defined]
    wandb.Error = OSError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    config = {HOSTILE: {"name": HOSTILE, "list": [HOSTILE, 3, None, True]}}
    WandbSink(tmp_path, project="p", name=HOSTILE, watch="w", config=config)
    [(key, inner)] = started["config"].items()
    assert inner["list"][1:] == [3, None, True]
    assert all(text.isprintable() for text in (started["name"], key, inner["name"], inner["list"][0]))
