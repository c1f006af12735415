"""Peers that share data train each window once an epoch, whatever becomes of them; see `benchmarks/exactly_once.py`."""

from __future__ import annotations

import pytest

from benchmarks import exactly_once
from benchmarks.exactly_once import Outcome, history, mixture, settings

KINDS = {
    "tokens": {},
    "steps": {"mode": "steps", "steps": 6},
    "mixture": {},
    "growing": {"growing": 6},
}


def run_of(kind: str, **changes):
    return settings(mixture() if kind == "mixture" else None, **{**KINDS[kind], **changes})


def assert_exact(found: Outcome) -> None:
    print(found)
    assert (found.twice, found.never, found.misstated) == (0, 0, 0)
    assert found.max_ledger_bytes < 1000


COMMIT_LANE = [*list(KINDS)[:2], "mixture"]
FULL_LANE = [pytest.param(kind, marks=pytest.mark.full) for kind in KINDS if kind not in COMMIT_LANE]


@pytest.mark.parametrize("kind", [*COMMIT_LANE, *FULL_LANE])
def test_no_window_counts_twice_or_never_while_peers_come_and_go(kind, seed, monkeypatch):
    """Four peers, of which two are replaced, are all killed and go on."""
    monkeypatch.setattr(exactly_once, "NUM_WINDOWS", 80)
    monkeypatch.setattr(exactly_once, "MIXED_WINDOWS", (80, 40))
    monkeypatch.setattr(exactly_once, "ANNEALED_TOKENS", 100 * exactly_once.T)
    run = run_of(kind, tokens=3000, min_seconds=10.0, max_seconds=60.0)
    found = history(seed, run, num_peers=4, segments=2, seconds=200.0, share=0.5)
    assert_exact(found)
    assert found.rounds and found.deaths >= 4 and found.joins == 4


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_no_window_counts_twice_or_never_in_forty_minutes_with_three_restarts(kind, seed):
    """Eight peers, 30 % of which are replaced in ten minutes."""
    changes = {"steps": 20} if "steps" in kind else {}
    found = history(seed, run_of(kind, **changes))
    assert_exact(found)
    assert found.rounds >= 10 and found.epochs >= 1
