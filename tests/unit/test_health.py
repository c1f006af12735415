"""A peer is healthy while it saves rounds as often as its run's settings let it, or while its owner has paused it."""

import json
import os
import time
from pathlib import Path

import pytest

from spes_p2p.cli import load_settings
from spes_p2p.commands.health import is_paused, longest_minutes, main
from spes_p2p.config import RoundConfig
from spes_p2p.config.commands import HealthConfig
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, PageState
from tests.unit.monitor.swarms import small_history


def folder(path: Path, minutes: float, **rounds: object) -> Path:
    """Return a peer's folder whose newest checkpoint is so old."""
    state = path / "checkpoint" / "round-1-step-1" / "state.json"
    state.parent.mkdir(parents=True)
    state.touch()
    then = time.time() - 60 * minutes
    os.utime(state, (then, then))
    (path / "versions").mkdir()
    manifest = {"config": {"round": RoundConfig(**rounds).model_dump()}}  # type: ignore[arg-type]
    (path / "versions" / "manifest.0.bin").write_text(json.dumps(manifest))
    return path


def code(path: Path, *words: str) -> int:
    return main(load_settings(HealthConfig, ["--output", str(path), *words]))


@pytest.mark.parametrize(("minutes", "expected"), [(34.0, 0), (35.0, 1)])
def test_the_runs_own_rounds_say_how_long_one_may_take(minutes, expected, tmp_path):
    assert code(folder(tmp_path, minutes)) == expected, "3 x (600 + 3 + 30 + 60) s are 34.65 minutes"


def test_short_rounds_make_a_short_wait_and_a_flag_comes_first(tmp_path):
    path = folder(tmp_path, 6.0, max_seconds=20.0, exchange_seconds=10.0, averaging_seconds=5.0)
    assert longest_minutes(path) == 5.0 and code(path) == 1 and code(path, "--minutes", "7") == 0


def test_rounds_without_a_longest_time_and_folders_without_a_manifest_have_half_an_hour(tmp_path):
    assert longest_minutes(folder(tmp_path / "a", 0.0, mode="steps")) == 30.0
    assert longest_minutes(tmp_path / "none") == 30.0
    (tmp_path / "a" / "versions" / "manifest.0.bin").write_text("{")
    assert longest_minutes(tmp_path / "a") == 30.0


def test_a_peer_that_has_not_joined_is_not_healthy(tmp_path):
    assert code(tmp_path) == 1


@pytest.mark.parametrize(("stage", "expected"), [("paused", 0), ("", 1)])
def test_a_paused_peer_is_healthy(stage, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which has no part in it
    path = folder(tmp_path, 600.0)
    assert not is_paused(path)
    view = small_history(3)[-1]
    page = Page("127.0.0.1", PageState(view, {"run_id": "run"}, Own("Qm", stage=stage)), path)
    assert code(path) == expected
    page.close()
    assert code(path) == 1, "its page has gone, and with it whether it is paused"
