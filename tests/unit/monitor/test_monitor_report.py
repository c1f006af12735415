"""The report stands alone: the page with its data inside, which loads nothing and runs no markup of others."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor.events import JsonlSink
from spes_p2p.monitor.report import standalone, write_report
from spes_p2p.monitor.sinks import Sinks
from spes_p2p.monitor.view import fold
from tests.unit.monitor.swarms import NUM_SLOTS, TOTAL_ROUNDS, claim, empty_view, peer_id, small_history, snapshot

FACTS = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"&<!--"


class Page(HTMLParser):
    """The tags of a page, the text of each script and style, and its data."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {"script": [], "style": []}
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in self.texts and data.strip():
            self.texts[self.tags[-1][0]].append(data)

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.texts["script"][0])

    @property
    def policy(self) -> str:
        return next(attributes["content"] or "" for tag, attributes in self.tags if "http-equiv" in attributes)


def watched(directory: Path, run_id: str = "run", num_rounds: int = 3) -> Path:
    """Leave the `metrics.jsonl` of a short watch in a directory."""
    sinks = Sinks(empty_view())
    sinks.add("metrics", lambda: JsonlSink(directory / "metrics.jsonl", FACTS | {"run_id": run_id}, 0.0))
    for view in small_history(num_rounds):
        sinks.update(view.evaluated(view.published, 6.0 - view.published))
    sinks.close()
    return directory


def test_the_report_holds_the_runs_figures_rounds_peers_and_baselines(tmp_path):
    baselines = {"solo peer": [(0, 6.0), (3000, 5.0)]}
    path = write_report(watched(tmp_path), facts={"run": "finished"}, baselines=baselines)
    data = Page(path).data
    assert path == tmp_path / "report.html"
    assert data["figures"]["tokens"] == 6000 and data["figures"]["held_out"] == 3.0
    assert data["rounds"]["3"][0] == 6000 and data["held_out"]["3"] == [6000, 3.0]
    assert {peer_id(index)[-10:] for index in range(2)} == set(data["peers"])
    assert data["baselines"] == {"solo peer": [[0, 6.0], [3000, 5.0]]} and data["run"]["facts"] == {"run": "finished"}
    assert any("round 3: 2 peers" in words for _, words in data["events"])


@pytest.mark.parametrize("num_rounds", [2, TOTAL_ROUNDS], ids=["stopped", "finished"])
def test_a_report_calls_no_peer_silent_and_shows_a_last_round_that_lacks_a_report(tmp_path, num_rounds):
    sinks = Sinks(empty_view())
    sinks.add("metrics", lambda: JsonlSink(tmp_path / "metrics.jsonl", FACTS, 0.0))
    history = small_history(num_rounds)
    dead = peer_id(1)
    reports = {key: value for key, value in history[-1].reports.items() if key != (num_rounds, dead)}
    last = replace(history[-1], reports=reports)
    for view in (*history[:-1], last, fold(last, snapshot(last.now + 7.0, [claim(0, [0])]))):
        sinks.update(view)
    sinks.close()
    data = Page(write_report(tmp_path)).data
    assert {peer[0] for peer in data["peers"].values()} == {"active"}
    assert data["now"]["state"] == ("finished" if num_rounds == TOTAL_ROUNDS else "training")
    assert str(num_rounds) in data["rounds"]


def test_hostile_strings_stay_inside_the_data(tmp_path):
    curves = {HOSTILE: [(0, 6.0), (3000, 5.0)]}
    page = Page(write_report(watched(tmp_path, run_id=HOSTILE), facts={HOSTILE: HOSTILE}, baselines=curves))
    assert page.data["run"]["id"] == HOSTILE and page.data["run"]["facts"] == {HOSTILE: HOSTILE}
    assert [tag for tag, _ in page.tags].count("script") == 5 and "img" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_the_report_loads_nothing_and_its_policy_names_each_of_its_scripts_and_styles(tmp_path):
    path = write_report(watched(tmp_path))
    page, html = Page(path), path.read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html) and "@import" not in html and "url(" not in html
    assert page.policy.startswith("default-src 'none'") and "unsafe" not in page.policy
    for text in (*page.texts["script"][1:], *page.texts["style"]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" in page.policy


def test_a_run_that_never_began_still_has_a_report(tmp_path):
    JsonlSink(tmp_path / "metrics.jsonl", FACTS, 0.0).close()
    data = Page(write_report(tmp_path)).data
    assert data["run"]["total"] == TOTAL_ROUNDS and data["rounds"] == {} and data["now"]["state"] == "waiting"


def test_a_missing_file_is_one_line(tmp_path):
    with pytest.raises(DataError, match="cannot read"):
        write_report(tmp_path)
    watched(tmp_path)
    (tmp_path / "report.html").mkdir()
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path)


def test_numbers_that_json_lacks_are_no_part_of_a_report():
    with pytest.raises(ValueError, match="JSON"):
        standalone({"figures": {"loss": float("nan")}})
