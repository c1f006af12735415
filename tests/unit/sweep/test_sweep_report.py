"""What a sweep leaves behind is whole, stands alone, and runs no markup of others."""

from __future__ import annotations

import base64
import html
import io
import json
import math
import re
from collections.abc import Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from spes_p2p import __version__
from spes_p2p.errors import ConfigError
from spes_p2p.sim.sweep.report import differences, markdown, summarise, table_cells, write_report
from spes_p2p.sim.sweep.results import Missing, RunResult
from spes_p2p.sim.sweep.settings import Sweep
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep

HOSTILE = "</h2><script>alert(1)</script><img src=x onerror='a'>$x_{$ | \\\"&"
GAP: dict[str, Any] = {"name": "all", "solo": "solo", "centralised": "central", "of": ["ours"]}
PICTURES = ["final_loss.png", "loss_by_bytes.png", "loss_by_steps.png"]


class Page(HTMLParser):
    """Collects tags, attributes and text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def pictures(self) -> list[bytes]:
        sources = [attributes["src"] or "" for tag, attributes in self.tags if tag == "img"]
        assert all(source.startswith("data:image/png;base64,") for source in sources)
        return [base64.b64decode(source.split(",", 1)[1], validate=True) for source in sources]


def sweep_of(folder: Path, **ours: Any) -> Sweep:
    variants = {"solo": SOLO, "central": SOLO, "ours": PAIR | ours}
    return made_up_sweep(folder, variants, seeds=[0, 1], gaps=[GAP])


def results_of(sweep: Sweep) -> dict:
    losses = {"solo": [5.0, 6.0], "central": [4.0, 4.0], "ours": [4.5, 4.5]}
    return {
        (name, seed): made_up(sweep, name, seed, [7.0, loss], round_tokens=200 if name == "central" else 100)
        for name, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
    }


def is_picture(content: bytes) -> bool:
    """Whether it is a PNG that shows more than one colour."""
    with Image.open(io.BytesIO(content)) as picture:
        picture.load()
        colours = picture.convert("RGBA").getcolors(2**24)
        return picture.format == "PNG" and min(picture.size) > 100 and len(colours or ()) > 10


def test_a_report_is_a_table_a_json_three_pictures_and_a_page(tmp_path):
    sweep = sweep_of(tmp_path)
    table = write_report(sweep, results_of(sweep), tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert left == sorted(["table.md", "results.json", "report.html", *PICTURES])
    assert (tmp_path / "out" / "table.md").read_text().startswith(table + "\n")
    assert all(is_picture((tmp_path / "out" / name).read_bytes()) for name in PICTURES)
    page = Page((tmp_path / "out" / "report.html").read_text())
    assert sorted(page.pictures()) == sorted((tmp_path / "out" / name).read_bytes() for name in PICTURES)


def test_the_table_says_what_was_found(tmp_path):
    sweep = sweep_of(tmp_path, title="our way")
    lines = write_report(sweep, results_of(sweep), tmp_path).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0][:4] == ["variant", "seeds", "held-out loss", "gap closed"]
    assert cells[2][:4] == ["solo", "2 of 2", "5.5000 ± 0.7071", "-"]
    assert cells[4] == [
        *("our way", "2 of 2", "4.5000 ± 0.0000", "62.5% ± 17.7%"),
        *("200", "4.00", "3.00", "4.00", "7.00"),
    ]
    assert len({len(line) for line in lines}) == 1, "columns align"


def with_tokens(result: RunResult, *tokens: int) -> RunResult:
    """The same result with peers that were trained on so many tokens."""
    peers = [result.peers[0].model_copy(update={"tokens": number}) for number in tokens]
    return result.model_copy(update={"peers": peers})


def test_unequal_tokens_are_shown_from_least_to_most_and_mark_the_gap(tmp_path):
    sweep = sweep_of(tmp_path)
    results = results_of(sweep)
    results["ours", 1] = with_tokens(results["ours", 1], 300, 100)
    table = write_report(sweep, results, tmp_path)
    ours = [cell.strip() for cell in table.splitlines()[4].split("|")]
    assert "62.5% ± 17.7% †" in ours and "200 (100–300)" in ours
    assert table.count("†") == 2 and "\n† Not at equal tokens" in table, "the mark and what it means"
    assert "† Not at equal tokens" in (tmp_path / "table.md").read_text()
    assert "† Not at equal tokens" in " ".join(Page((tmp_path / "report.html").read_text()).text)
    summary = json.loads((tmp_path / "results.json").read_text())["summary"]["ours"]
    assert summary["gap_closed"]["all"]["equal_tokens"] is False and summary["tokens_per_peer_range"] == [100, 300]


def test_a_run_that_ended_early_says_so_in_the_table(tmp_path):
    sweep = sweep_of(tmp_path)
    results = results_of(sweep)
    assert "remarks" not in write_report(sweep, results, tmp_path)
    results["ours", 1] = results["ours", 1].model_copy(update={"stopped_at": 1})
    titles, _, _, _, ours = ([cell.strip() for cell in line.split("|")][-2] for line in stripped_table(sweep, results))
    assert titles == "remarks" and ours == "stopped at round 1/2: no peer was left (seed 1)"
    results["ours", 0] = results["ours", 0].model_copy(update={"stopped_at": 1})
    write_report(sweep, results, tmp_path)
    assert "| stopped at round 1/2: no peer was left |" in (tmp_path / "table.md").read_text()
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["summary"]["ours"]["remarks"] == {"stopped at round 1/2: no peer was left": [0, 1]}
    assert [run["stopped_at"] for run in content["runs"]] == [None] * 4 + [1, 1]


def stripped_table(sweep: Sweep, results: Mapping[tuple[str, int], RunResult]) -> list[str]:
    return markdown(*table_cells(sweep, summarise(sweep, results))).splitlines()


def test_runs_that_are_not_in_the_table_stand_below_it_with_the_reason(tmp_path):
    sweep = sweep_of(tmp_path)
    results = {key: result for key, result in results_of(sweep).items() if key[0] == "solo"}
    missing = {
        ("central", 0): Missing("not made"),
        ("central", 1): Missing("failed", "out of\nluck"),
        ("ours", 0): Missing("outdated", "peers was 3, is 2"),
        ("ours", 1): Missing("outdated", "peers was 3, is 2"),
    }
    below = [
        "not made: central seed 0",
        "failed: central seed 1: out of luck",
        "outdated: ours seeds 0, 1: peers was 3, is 2",
    ]
    table = write_report(sweep, results, tmp_path, missing)
    assert table.splitlines()[-3:] == below
    assert all(line in (tmp_path / "table.md").read_text().splitlines() for line in below)
    assert "peers was 3, is 2" in Page((tmp_path / "report.html").read_text()).text
    first = json.loads((tmp_path / "results.json").read_text())["missing"][1]
    assert first == {"variant": "central", "seed": 1, "kind": "failed", "reason": "out of\nluck"}


def test_another_version_of_the_program_is_said_and_counts(tmp_path):
    sweep = sweep_of(tmp_path)
    results = results_of(sweep)
    for seed in (0, 1):
        results["ours", seed] = results["ours", seed].model_copy(update={"software": "0.0.1"})
    table = write_report(sweep, results, tmp_path)
    assert table.splitlines()[-1] == f"made by spes_p2p 0.0.1 (this is {__version__}): ours seeds 0, 1"
    assert "62.5%" in table


def test_two_gaps_are_two_columns(tmp_path):
    variants = {"solo": SOLO, "central": SOLO, "ours": PAIR}
    gaps = [GAP, GAP | {"name": "other", "solo": "ours", "of": ["solo"]}]
    sweep = made_up_sweep(tmp_path, variants, seeds=[0, 1], gaps=gaps)
    titles = write_report(sweep, results_of(sweep), tmp_path).splitlines()[0]
    assert [title.strip() for title in titles.split("|")][4:6] == ["gap closed: all", "gap closed: other"]


def test_an_unfinished_sweep_reports_what_it_has(tmp_path):
    sweep = sweep_of(tmp_path)
    results = {key: result for key, result in results_of(sweep).items() if key in {("solo", 0), ("ours", 1)}}
    table = write_report(sweep, results, tmp_path)
    assert "1 of 2" in table and "central" not in table and "%" not in table
    assert "2 of 6" in " ".join(Page((tmp_path / "report.html").read_text()).text)


def test_without_traffic_there_is_no_picture_of_it(tmp_path):
    sweep = sweep_of(tmp_path)
    write_report(sweep, {("solo", 0): results_of(sweep)["solo", 0]}, tmp_path)
    assert not (tmp_path / "loss_by_bytes.png").exists() and (tmp_path / "loss_by_steps.png").exists()


def test_runs_that_diverged_are_drawn_and_written_all_the_same(tmp_path):
    sweep = sweep_of(tmp_path)
    results = {
        ("solo", 0): made_up(sweep, "solo", 0, [math.inf, math.nan]),
        ("ours", 0): made_up(sweep, "ours", 0, [6.0, math.nan]),
    }
    assert "nan" in write_report(sweep, results, tmp_path)
    results.pop(("ours", 0))
    write_report(sweep, results, tmp_path)
    assert json.loads((tmp_path / "results.json").read_text())["runs"][0]["evaluations"][1]["loss"] == "NaN"


def test_the_json_holds_every_run_and_the_summary(tmp_path):
    sweep = sweep_of(tmp_path)
    write_report(sweep, results_of(sweep), tmp_path)
    content = json.loads((tmp_path / "results.json").read_text())
    assert [(run["variant"], run["seed"]) for run in content["runs"]] == list(results_of(sweep))
    assert content["summary"]["ours"]["gap_closed"]["all"]["by_seed"] == {"0": 0.5, "1": 0.75}
    assert content["study"]["variants"]["ours"] == PAIR
    assert "scenario" not in content["runs"][0]


def test_only_settings_that_differ_from_the_base_are_shown(tmp_path):
    sweep = sweep_of(tmp_path, run={"train": {"batch_size": 2, "lr": 0.5}, "round": {"steps": 9}})
    assert differences(sweep, sweep.variants["ours"]) == [
        ("peers", "-", "2"),
        ("max_slots", "4", "2"),
        ("run.train.lr", "-", "0.5"),
        ("run.round.steps", "1", "9"),
    ]
    write_report(sweep, results_of(sweep), tmp_path)
    assert "run.round.steps" in Page((tmp_path / "report.html").read_text()).text


def test_hostile_strings_become_text(tmp_path):
    variants = {"solo": SOLO, "central": SOLO, "ours": PAIR | {"title": HOSTILE, "run_id": "a"}}
    sweep = made_up_sweep(tmp_path, variants, seeds=[0], gaps=[GAP | {"name": HOSTILE}], title=HOSTILE)
    machine = made_up(sweep, "ours", 0, [5.0]).machine.model_copy(update={"cpu": HOSTILE})
    table = write_report(sweep, {("ours", 0): made_up(sweep, "ours", 0, [7.0, 5.0], machine=machine)}, tmp_path)
    content = (tmp_path / "report.html").read_text()
    page = Page(content)
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "iframe", "link"}) and "<script" not in content
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert html.escape(HOSTILE) in content
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", content)
    unescaped = re.split(r"(?<!\\)\|", table.splitlines()[2])
    assert len(unescaped) == len(re.split(r"(?<!\\)\|", table.splitlines()[1])), "a title adds no column"


def test_markdown_escapes_what_would_end_a_cell():
    assert markdown(["a", "b"], [["x|y", "1"]]).splitlines() == [
        "| a    |   b |",
        "| :--- | --: |",
        r"| x\|y |   1 |",
    ]


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    sweep = sweep_of(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="choose a writable --output"):
        write_report(sweep, results_of(sweep), tmp_path / "file")
