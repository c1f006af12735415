"""The experts' benchmark measures what its rows say, on a small scale."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import experts
from spes_p2p.config import ModelConfig, RunConfig

SMALL = ModelConfig(hidden_size=16, num_heads=2, num_kv_heads=2, num_layers=1, intermediate_size=8, num_experts=8)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    default = RunConfig()
    run = default.model_copy(
        update={
            "model": SMALL,
            "data": default.data.model_copy(update={"vocab_size": 32, "sequence_length": 8}),
        }
    )
    monkeypatch.setattr(experts, "RunConfig", lambda: run)
    monkeypatch.setattr(experts, "shapes", lambda device: [experts.Shape(SMALL, tokens=12, claimed=2)])


def test_every_row_is_a_ratio_and_the_first_of_each_kind_has_a_goal(small, tmp_path: Path):
    assert experts.main(experts.ExpertsConfig(pairs=1, output=tmp_path)) == 0
    (written,) = tmp_path.glob("experts-*.json")
    document = json.loads(written.read_text())
    figures = document["figures"]
    assert all(float(figure["measured"]) > 0 for figure in figures)
    goals = [figure["figure"] for figure in figures if figure["to reach"]]
    assert len(goals) == 2 and "2 of 8, frozen fp32, loop" in goals[0] and "8 of 8 slots" in goals[1]
    assert any("2 of 8, frozen fp32, grouped_mm" in figure["figure"] for figure in figures)
    assert document["circumstances"]["cpu"] == document["device"]


def test_ratio_is_the_median_of_the_turns_ratios():
    seconds = {experts.STOCK: [1.0, 2.0, 10.0], "ours": [0.5, 1.2, 1.0]}
    assert experts._ratio(seconds, "ours") == 0.5
