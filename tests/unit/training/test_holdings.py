"""Whoever joins or comes back takes over what the swarm has trained, however many do so at once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from virtual import tiny_run

from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.memory import MemoryHub, MemorySwarm
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.holdings import Holdings

NUMELS = {SHARED: 5, "slot": 3}


class Member:
    """A peer with a version of everything, but for training."""

    def __init__(self, hub: MemoryHub, key: Path, round: int, state: str, value: float | None = None) -> None:
        run = tiny_run()
        self.swarm = MemorySwarm(hub, Identity(key))
        self.anchors = Anchors(run.outer, NUMELS)
        self.holdings = Holdings(self.swarm, run, run_id="run", anchors=self.anchors, max_slots=2)
        value = float(round) if value is None else value
        self.swarm.publish(round, {SHARED: torch.full((5,), value), "slot-0": torch.full((3,), value)})
        self.holdings.announce(state)

    def catch_up(self, min_round: int = 0) -> tuple[int, float]:
        self.holdings.catch_up(self.holdings.others(), min_round)
        return self.swarm.versions()[SHARED].round, self.swarm.load(SHARED)[0].item()


@pytest.mark.parametrize("stale", [0, 5], ids=["newcomers", "returners"])
def test_many_who_join_at_once_do_not_outvote_the_one_that_has_trained_on(tmp_path, stale):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady = Member(hub, tmp_path / "steady", 13, "active")
    joiners = [Member(hub, tmp_path / f"joiner{i}", stale, "joining") for i in range(3)]
    for joiner in joiners:
        assert joiner.catch_up() == (13, 13.0)
        assert joiner.swarm.versions()["slot-0"].round == 13
    assert steady.catch_up() == (13, 13.0)


def test_newcomers_catch_up_with_a_round_that_ended_while_they_joined(tmp_path):
    """They are active by then, and more than those whose round it was."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    Member(hub, tmp_path / "steady", 14, "active")
    for newcomer in [Member(hub, tmp_path / f"newcomer{i}", 13, "active") for i in range(3)]:
        assert newcomer.catch_up(min_round=14) == (14, 14.0)


def test_newcomers_do_not_outvote_one_that_comes_back_to_an_empty_swarm(tmp_path):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    returner = Member(hub, tmp_path / "returner", 7, "joining")
    newcomers = [Member(hub, tmp_path / f"newcomer{i}", 0, "joining") for i in range(3)]
    assert returner.catch_up() == (7, 7.0)
    for newcomer in newcomers:
        assert newcomer.catch_up() == (7, 7.0)


def test_an_active_peer_astray_takes_over_what_most_active_peers_have(tmp_path):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    astray = Member(hub, tmp_path / "astray", 6, "active", value=-1.0)
    for i in range(2):
        Member(hub, tmp_path / f"other{i}", 6, "active")
    for i in range(3):
        Member(hub, tmp_path / f"joiner{i}", 6, "joining", value=-1.0)
    assert astray.catch_up() == (6, 6.0)


def test_peers_that_all_come_back_agree_on_what_most_of_them_have(tmp_path):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, tmp_path / f"peer{i}", round, "joining") for i, round in enumerate((6, 7, 7))]
    assert {peer.catch_up() for peer in peers} == {(7, 7.0)}
