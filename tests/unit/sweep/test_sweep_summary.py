"""Means, spreads and gaps, worked out by hand."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from spes_p2p.sim.sweep.report import gap_closed, summarise
from spes_p2p.sim.sweep.settings import Sweep
from tests.unit.sweep.sweeps import PAIR, SOLO, made_up, made_up_sweep

GAP: dict[str, Any] = {"name": "all", "solo": "solo", "centralised": "central", "of": ["ours"]}


def three_variants(folder: Path, **changes: Any) -> Sweep:
    return made_up_sweep(folder, {"solo": SOLO, "central": SOLO, "ours": PAIR}, seeds=[0, 1], **changes)


def finished(sweep: Sweep, losses: dict[str, list[float]]) -> dict:
    """Results with these final losses, by seed; NaN for a run that has not finished."""
    return {
        (name, seed): made_up(sweep, name, seed, [9.0, loss], round_tokens=200 if name == "central" else 100)
        for name, by_seed in losses.items()
        for seed, loss in enumerate(by_seed)
        if not math.isnan(loss)
    }


@pytest.mark.parametrize(
    ("solo", "centralised", "loss", "share"),
    [
        (5.0, 4.0, 4.25, 0.75),
        (5.0, 4.0, 5.5, -0.5),
        (5.0, 4.0, 3.5, 1.5),
        (5.0, 5.0, 4.0, None),
        (4.0, 5.0, 4.5, None),
        (math.inf, 4.0, 4.5, None),
        (5.0, 4.0, math.nan, None),
    ],
)
def test_the_gap_closed_is_the_share_of_the_way_to_centralised(solo, centralised, loss, share):
    assert gap_closed(solo, centralised, loss) == share


def test_gaps_are_closed_seed_by_seed(tmp_path):
    sweep = three_variants(tmp_path, gaps=[GAP])
    losses = {"solo": [5.0, 6.0], "central": [4.0, 4.0], "ours": [4.5, 4.5]}
    rows = {row.name: row for row in summarise(sweep, finished(sweep, losses))}
    shares = rows["ours"].gaps["all"]
    assert shares.values == {0: 0.5, 1: 0.75}
    assert shares.mean == 0.625
    assert shares.deviation == pytest.approx(0.125 * math.sqrt(2))
    assert not rows["solo"].gaps and not rows["central"].gaps


@pytest.mark.parametrize(
    ("solo", "centralised", "ours", "is_equal"),
    [
        (100, 200, (100, 100), True),
        (1000, 2000, (1005, 995), True),
        (100, 200, (150, 50), False),
        (100, 200, (100, 0), False),
        (150, 200, (100, 100), False),
        (100, 100, (100, 100), False),
    ],
)
def test_a_gap_is_fair_at_equal_tokens_of_each_peer_and_of_all_together(tmp_path, solo, centralised, ours, is_equal):
    sweep = three_variants(tmp_path, gaps=[GAP])
    results = finished(sweep, {"solo": [6.0], "central": [4.0], "ours": [5.0]})
    for name, tokens in (("solo", (solo,)), ("central", (centralised,)), ("ours", ours)):
        accounts = [results[name, 0].peers[0].model_copy(update={"tokens": number}) for number in tokens]
        results[name, 0] = results[name, 0].model_copy(update={"peers": accounts})
    rows = {row.name: row for row in summarise(sweep, results)}
    assert rows["ours"].gaps["all"].mean == 0.5
    assert rows["ours"].unequal == (set() if is_equal else {"all"})
    assert rows["ours"].tokens_range == (min(ours), max(ours)) and not rows["solo"].unequal


def test_a_gap_counts_only_seeds_that_all_three_have_finished(tmp_path):
    sweep = three_variants(tmp_path, gaps=[GAP])
    losses = {"solo": [5.0, 6.0], "central": [math.nan, 4.0], "ours": [4.5, 4.5]}
    [ours] = [row for row in summarise(sweep, finished(sweep, losses)) if row.name == "ours"]
    assert ours.gaps["all"].values == {1: 0.75} and ours.gaps["all"].deviation is None
    assert ours.loss.values == {0: 4.5, 1: 4.5}
    losses["central"] = [math.nan, math.nan]
    [ours] = [row for row in summarise(sweep, finished(sweep, losses)) if row.name == "ours"]
    assert not ours.gaps


def test_a_row_holds_means_over_peers_and_seeds(tmp_path):
    sweep = three_variants(tmp_path)
    results = finished(sweep, {"ours": [4.0, 5.0]})
    results["ours", 1] = results["ours", 1].model_copy(update={"wall_seconds": 9.0})
    [row] = summarise(sweep, results)
    assert row.loss.mean == 4.5 and row.loss.deviation == pytest.approx(math.sqrt(0.5))
    assert (row.tokens, row.megabytes, row.expert_megabytes, row.memory_megabytes) == (200, 4.0, 3.0, 4.0)
    assert row.wall_seconds == 8.0


def test_a_curve_joins_the_rounds_that_all_seeds_measured(tmp_path):
    sweep = three_variants(tmp_path)
    results = {
        ("ours", 0): made_up(sweep, "ours", 0, [6.0, 5.0, 4.0]),
        ("ours", 1): made_up(sweep, "ours", 1, [7.0, 5.5]),
    }
    [row] = summarise(sweep, results)
    curve = row.curve
    assert (curve.tokens, curve.megabytes) == ([100, 200], [2.0, 4.0])
    run = sweep.variants["ours"].scenarios[0].run
    step_tokens = run.train.batch_size * run.data.sequence_length
    assert curve.steps == [100 / step_tokens, 200 / step_tokens]
    assert (curve.low, curve.mean, curve.high) == ([6.0, 5.0], [6.5, 5.25], [7.0, 5.5])


def test_a_run_that_diverged_has_no_deviation_and_breaks_nothing(tmp_path):
    sweep = three_variants(tmp_path, gaps=[GAP])
    losses = {"solo": [5.0, 6.0], "central": [4.0, 4.0], "ours": [4.5, math.inf]}
    rows = {row.name: row for row in summarise(sweep, finished(sweep, losses))}
    assert math.isinf(rows["ours"].loss.mean) and rows["ours"].loss.deviation is None
    assert rows["ours"].gaps["all"].values == {0: 0.5}
