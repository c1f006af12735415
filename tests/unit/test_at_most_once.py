"""Peers are dealt each window of shared data once an epoch, whatever becomes of them."""

import at_most_once
import pytest
from at_most_once import history, settings, steady

KINDS = [{"mode": "tokens"}, {"mode": "steps", "steps": 6}]


@pytest.mark.parametrize("kind", KINDS, ids=["tokens", "steps"])
def test_no_window_is_dealt_twice_while_peers_come_and_go(kind, seed, monkeypatch):
    """Four peers, of which two are replaced, are all killed and go on."""
    monkeypatch.setattr(at_most_once, "NUM_WINDOWS", 80)
    run = settings(tokens=3000, min_seconds=10.0, max_seconds=60.0, **kind)
    found = history(seed, run, num_peers=4, segments=2, seconds=200.0, share=0.5)
    print(found)
    assert found.rounds and found.twice == 0


@pytest.mark.full
@pytest.mark.parametrize("kind", [{}, {"mode": "steps", "steps": 20}, {"growing": 6}], ids=str)
def test_no_window_is_dealt_twice_in_forty_minutes_with_three_restarts(kind, seed):
    """Eight peers, 30 % of which are replaced in ten minutes."""
    found = history(seed, settings(**kind))
    print(found)
    assert found.twice == 0 and found.rounds >= 10 and found.epochs >= 1


def test_a_steady_run_trains_four_fifths_of_an_epoch_and_nothing_twice(seed, monkeypatch):
    monkeypatch.setattr(at_most_once, "NUM_WINDOWS", 80)
    found = steady(seed, num_rounds=4, round_seconds=30.0)
    print(found)
    assert found.trained >= 0.75 and found.twice == 0 and found.own < 0.1 and found.epochs
