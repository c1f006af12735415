"""Peers are dealt each window of shared data once an epoch, whatever becomes of them: `benchmarks/at_most_once.py`."""

from __future__ import annotations

import pytest

from benchmarks import at_most_once
from benchmarks.at_most_once import history, mixture, settings, steady

KINDS = {
    "tokens": {},
    "steps": {"mode": "steps", "steps": 6},
    "mixture": {},
    "growing": {"growing": 6},
}


def run_of(kind: str, **changes):
    return settings(mixture() if kind == "mixture" else None, **{**KINDS[kind], **changes})


COMMIT_LANE = [*list(KINDS)[:2], "mixture"]
FULL_LANE = [pytest.param(kind, marks=pytest.mark.full) for kind in KINDS if kind not in COMMIT_LANE]


@pytest.mark.parametrize("kind", [*COMMIT_LANE, *FULL_LANE])
def test_no_window_is_dealt_twice_while_peers_come_and_go(kind, seed, monkeypatch):
    """Four peers, of which two are replaced, are all killed and go on."""
    monkeypatch.setattr(at_most_once, "NUM_WINDOWS", 80)
    monkeypatch.setattr(at_most_once, "MIXED_WINDOWS", (80, 40))
    monkeypatch.setattr(at_most_once, "ANNEALED_TOKENS", 100 * at_most_once.T)
    run = run_of(kind, tokens=3000, min_seconds=10.0, max_seconds=60.0)
    found = history(seed, run, num_peers=4, segments=2, seconds=200.0, share=0.5)
    print(found)
    assert found.rounds and found.twice == 0 and found.own < 0.9
    assert found.deaths >= 4 and found.joins == 4


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_window_is_dealt_twice_in_forty_minutes_with_three_restarts(kind, seed):
    """Eight peers, 30 % of which are replaced in ten minutes."""
    changes = {"steps": 20} if "steps" in kind else {}
    found = history(seed, run_of(kind, **changes))
    print(found)
    assert found.twice == 0
    assert found.rounds >= 10 and found.epochs >= 1


@pytest.mark.full  # that shares are read: the test above; what they are: test_swarm_certificate.py
def test_a_steady_run_trains_four_fifths_of_an_epoch_and_nothing_twice(seed, monkeypatch):
    monkeypatch.setattr(at_most_once, "NUM_WINDOWS", 80)
    found = steady(seed, num_rounds=4, round_seconds=30.0)
    print(found)
    assert found.trained >= 0.75 and (found.twice, found.own) == (0, 0) and found.epochs
