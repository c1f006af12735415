"""The report stands alone, shows what happened, and runs no markup of others."""

from __future__ import annotations

import base64
import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor.report import summary, write_report
from spes_p2p.monitor.sinks import JsonlSink
from spes_p2p.monitor.view import fold, short_id
from spes_p2p.presentation import check_plotting
from tests.unit.monitor.swarms import (
    NUM_SLOTS,
    TOTAL_ROUNDS,
    claim,
    empty_view,
    peer_id,
    report,
    small_history,
    snapshot,
)

HOSTILE = "</h1><script>alert(1)</script><img src=x onerror='alert(2)'>\"&"


class Tags(HTMLParser):
    """Collects tags and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def watched(directory: Path, run_id: str = "run", num_rounds: int = 3) -> Path:
    """Leave the `metrics.jsonl` of a short watch in a directory."""
    facts = {"run_id": run_id, "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}
    sink = JsonlSink(directory / "metrics.jsonl", facts, empty_view())
    for view in small_history(num_rounds):
        sink.update(view)
        sink.evaluated(view, view.published, 6.0 - view.published)
    sink.close()
    return directory


def pictures(page: str) -> list[bytes]:
    sources = [attributes["src"] or "" for tag, attributes in Tags(page).tags if tag == "img"]
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    return [base64.b64decode(source.split(",", 1)[1], validate=True) for source in sources]


def test_the_report_holds_five_pictures_and_the_runs_figures(tmp_path: Path) -> None:
    baselines = {"solo peer": [(0, 6.0), (3000, 5.0)], "centralised": [(0, 6.0), (6000, 3.0)]}
    path = write_report(watched(tmp_path), facts={"run": "finished"}, baselines=baselines)
    page = path.read_text()
    shown = pictures(page)
    assert path == tmp_path / "report.html" and len(shown) == 5
    assert all(picture.startswith(b"\x89PNG") and len(picture) > 5000 for picture in shown)
    for text in ("6.000 → 3.000", "6,000", "3 of 20", "finished", short_id(peer_id(0)), short_id(peer_id(1))):
        assert text in page


def test_a_baseline_changes_the_picture(tmp_path: Path) -> None:
    plain = pictures(write_report(watched(tmp_path)).read_text())
    compared = pictures(write_report(tmp_path, baselines={"solo peer": [(0, 6.0), (3000, 5.0)]}).read_text())
    assert plain[0] != compared[0] and plain[1:] == compared[1:]


def test_hostile_strings_become_text(tmp_path: Path) -> None:
    path = write_report(
        watched(tmp_path, run_id=HOSTILE), facts={HOSTILE: HOSTILE}, baselines={HOSTILE: [(0, 6.0), (3000, 5.0)]}
    )
    page = Tags(path.read_text())
    assert "script" not in [tag for tag, _ in page.tags]
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_the_page_loads_nothing_and_forbids_scripts(tmp_path: Path) -> None:
    page = write_report(watched(tmp_path)).read_text()
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", page) and "@import" not in page and "url(" not in page
    policy = next(a for tag, a in Tags(page).tags if tag == "meta" and "http-equiv" in a)
    assert (policy["content"] or "").startswith("default-src 'none'")


def test_a_run_that_never_began_still_has_a_report(tmp_path: Path) -> None:
    facts = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}
    JsonlSink(tmp_path / "metrics.jsonl", facts, empty_view()).close()
    page = write_report(tmp_path).read_text()
    assert "0 of 20" in page and not pictures(page)


def test_the_summary_counts_what_the_swarm_did(seed: int) -> None:
    view = small_history(2)[-1]
    claims = [claim(0, [0, 1]), claim(1, [1, 2])]
    strays = [report(0, 3, shared_digest="b" * 16, slots=(0, 1)), report(1, 3, slots=(5,))]
    view = fold(view, snapshot(20.0, claims, strays)).evaluated(0, 6.0).evaluated(3, 3.0)
    figures = summary(view)
    assert figures["digests agreed"] == "2 of 3"
    assert figures["slots trained"] == "4 of 8"
    assert figures["time not training"] == "20%"
    assert figures["tokens per second"] == "200"


def test_many_peers_and_rounds_are_drawn(tmp_path: Path) -> None:
    view = empty_view()
    facts = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}
    sink = JsonlSink(tmp_path / "metrics.jsonl", facts, view)
    for number in range(1, TOTAL_ROUNDS + 1):
        reports = [report(i, number, loss=6.0 - number / 5, slots=(i % NUM_SLOTS,)) for i in range(80)]
        view = fold(view, snapshot(float(number), [claim(i, [i % NUM_SLOTS]) for i in range(80)], reports))
        sink.update(view)
    sink.close()
    assert len(pictures(write_report(tmp_path).read_text())) == 4


def test_a_round_in_which_a_peer_has_no_loss_is_a_gap_in_its_curve(tmp_path: Path) -> None:
    view = fold(empty_view(), snapshot(1.0, [claim(0), claim(1)]))
    sink = JsonlSink(tmp_path / "metrics.jsonl", {"run_id": "run", "num_slots": 8, "total_rounds": 20}, view)
    for number, loss in enumerate((5.0, None, 4.0), start=1):
        reports = [report(0, number), report(1, number, loss=loss, tokens=0 if loss is None else 1000)]
        view = fold(view, snapshot(1.0 + number, [claim(0), claim(1)], reports))
        sink.update(view)
    sink.close()
    page = write_report(tmp_path).read_text()
    assert len(pictures(page)) == 4 and "4.0000" in page


def test_a_missing_file_or_library_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="cannot read"):
        write_report(tmp_path)
    watched(tmp_path)
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "absent", tmp_path / "metrics.jsonl")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        check_plotting()
