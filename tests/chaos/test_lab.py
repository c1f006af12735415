"""Real peers that die, stand still or are cut off lose nothing that two of them ever had.

The long form, with every phase and a table, is `benchmarks/elastic.py`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from history import History, events_of
from lab import Lab, Report, schedule

# Full: its set-up takes two minutes, and needs the processors to itself.
pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

NUM_PEERS, NUM_KILLS = 5, 4


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> tuple[Lab, Report]:
    """A laboratory after kills in half of the phases, a freeze and a cut, and what came of it."""
    lab = Lab(tmp_path_factory.mktemp("chaos") / "lab", seed=1, num_peers=NUM_PEERS)
    with lab.running():
        for phase, anew in schedule(1, seed=1)[:NUM_KILLS]:
            lab.kill(phase, anew=anew)
        lab.freeze(2.0)
        lab.cut(6.0)
        lab.recover()
    return lab, lab.judge()


def test_nothing_is_lost_whatever_phase_a_peer_dies_in(lived: tuple[Lab, Report]) -> None:
    report = lived[1]
    assert len(report.strikes) == NUM_KILLS + 2
    assert report.rounds >= NUM_KILLS + 2 and report.verdict.means > 50 and report.verdict.versions > 50
    assert report.verdict.accepted > 50
    assert not report.verdict.lost, report.verdict.story
    assert not report.verdict.wrong
    assert not report.verdict.refused, "everybody was honest: what is refused is training thrown away"


def another_mean(event: dict[str, Any]) -> None:
    first, second, *_ = event["means"]
    event["means"][first] = event["means"][second]


def another_parent(event: dict[str, Any]) -> None:
    event["before"]["shared"] = "0" * 16


def another_weight(event: dict[str, Any]) -> None:
    event["roster"][0]["tokens"] += 1000


@pytest.mark.parametrize("change", [another_mean, another_parent, another_weight])
def test_a_history_that_was_meddled_with_is_found_out(
    lived: tuple[Lab, Report], tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    lab, _ = lived
    shutil.copytree(lab.folder / "history", tmp_path / "history")
    path, line, event = last_commit(tmp_path / "history")
    change(event)
    lines = path.read_text().splitlines()
    lines[line] = json.dumps(event)
    path.write_text("\n".join(lines) + "\n")
    assert judged(lab, tmp_path).wrong


def test_a_version_that_nobody_published_is_found_out(lived: tuple[Lab, Report], tmp_path: Path) -> None:
    lab, _ = lived
    shutil.copytree(lab.folder / "history", tmp_path / "history")
    lives = {path: events_of(path) for path in (tmp_path / "history").glob("*.jsonl")}
    has = [event["versions"] for life in lives.values() for event in life if event["event"] == "has"]
    _, version = max(versions["shared"] for versions in has if "shared" in versions)
    for path, life in lives.items():  # whoever was in its group published it too
        for event in life:
            if event["event"] == "publishes" and event["versions"].get("shared") == version:
                del event["versions"]["shared"]
        path.write_text("".join(f"{json.dumps(event)}\n" for event in life))
    assert any(f"has {version[:8]}, which nobody published" in wrong for wrong in judged(lab, tmp_path).wrong)


def test_a_version_that_is_gone_is_missed(lived: tuple[Lab, Report], tmp_path: Path) -> None:
    lab, _ = lived
    shutil.copytree(lab.folder / "history", tmp_path / "history")
    for peer in lab.peers:
        kept = tmp_path / "left" / str(peer.index)
        shutil.copytree(peer.output / "versions", kept)
        for path in kept.glob("shared.*"):
            path.unlink()
    left = {peer.index: tmp_path / "left" / str(peer.index) for peer in lab.peers}
    verdict = History(tmp_path / "history", left).verdict()
    assert verdict.lost and all(version.startswith("shared ") for version in verdict.lost)
    assert all(f"has {version} of round" in verdict.story for version in verdict.lost)


def last_commit(history: Path) -> tuple[Path, int, dict[str, Any]]:
    """Return file, line number and event of a published commit of `shared` and of slots, with several members."""
    for path in sorted(history.glob("*.jsonl"), reverse=True):
        events = events_of(path)
        published = {event["round"] for event in events if event["event"] == "publishes"}
        for number, event in reversed(list(enumerate(events))):
            is_commit = event["event"] == "commits" and event["round"] in published
            if is_commit and len(event["roster"]) > 2 and {"shared"} < event["means"].keys():
                return path, number, event
    raise AssertionError("nobody committed anything with others")


def judged(lab: Lab, folder: Path) -> Any:
    return History(folder / "history", {peer.index: peer.output / "versions" for peer in lab.peers}).verdict()
