"""Whoever joins or comes back takes over what the swarm has trained, however many do so at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual import peer_id, tiny_run

from spes_p2p.config import OuterConfig
from spes_p2p.swarm.memory import MemoryHub, MemorySwarm
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.holdings import Holdings

NUMELS = {SHARED: 5, "slot": 3}


class Member:
    """A peer with a version of everything, but for training."""

    def __init__(
        self, hub: MemoryHub, index: int, round: int, state: str, value: float | None = None, **changes: Any
    ) -> None:
        run = tiny_run(**changes)
        self.swarm = MemorySwarm(hub, peer_id(index))
        self.anchors = Anchors(run, NUMELS)
        self.holdings = Holdings(self.swarm, run, run_id="run", anchors=self.anchors, max_slots=2)
        value = float(round) if value is None else value
        self.swarm.publish(round, {SHARED: torch.full((5,), value), "slot-0": torch.full((3,), value)})
        self.holdings.announce(state)

    def catch_up(self, min_round: int = 0) -> tuple[int, float]:
        self.holdings.catch_up(self.holdings.others(), min_round)
        return self.swarm.versions()[SHARED].round, self.swarm.load(SHARED)[0].item()


@pytest.mark.parametrize("stale", [0, 5], ids=["newcomers", "returners"])
def test_many_who_join_at_once_do_not_outvote_the_one_that_has_trained_on(stale):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady = Member(hub, 0, 13, "active")
    joiners = [Member(hub, 10 + i, stale, "joining") for i in range(3)]
    for joiner in joiners:
        assert joiner.catch_up() == (13, 13.0)
        assert joiner.swarm.versions()["slot-0"].round == 13
    assert steady.catch_up() == (13, 13.0)


def test_newcomers_catch_up_with_a_round_that_ended_while_they_joined():
    """They are active by then, and more than those whose round it was."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    Member(hub, 0, 14, "active")
    for newcomer in [Member(hub, 10 + i, 13, "active") for i in range(3)]:
        assert newcomer.catch_up(min_round=14) == (14, 14.0)


def test_newcomers_do_not_outvote_one_that_comes_back_to_an_empty_swarm():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    returner = Member(hub, 0, 7, "joining")
    newcomers = [Member(hub, 10 + i, 0, "joining") for i in range(3)]
    assert returner.catch_up() == (7, 7.0)
    for newcomer in newcomers:
        assert newcomer.catch_up() == (7, 7.0)


def test_an_active_peer_astray_takes_over_what_most_active_peers_have():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    astray = Member(hub, 0, 6, "active", value=-1.0)
    for i in range(2):
        Member(hub, 1 + i, 6, "active")
    for i in range(3):
        Member(hub, 10 + i, 6, "joining", value=-1.0)
    assert astray.catch_up() == (6, 6.0)


def test_peers_that_all_come_back_agree_on_what_most_of_them_have():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, 1 + i, round, "joining") for i, round in enumerate((6, 7, 7))]
    assert {peer.catch_up() for peer in peers} == {(7, 7.0)}


def test_a_newcomer_takes_over_the_moments_of_the_shared_parameters():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady = Member(hub, 0, 13, "active")
    steady.swarm.publish(13, {"moments-shared": torch.arange(10.0), "moments-slot-0": torch.arange(6.0)})
    newcomer = Member(hub, 1, 0, "joining")
    flats = newcomer.holdings.catch_up([peer_id(0)])
    assert torch.equal(flats["moments-shared"], torch.arange(10.0))
    assert "moments-slot-0" not in flats, "it does not hold the slot"


def test_whoever_adopts_a_slot_takes_over_its_moments():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, heir = Member(hub, 0, 13, "active"), Member(hub, 1, 13, "active")
    leaver.swarm.publish(13, {"moments-slot-0": torch.arange(6.0)})
    masters = heir.holdings._hold([0])
    assert torch.equal(masters["slot-0"], torch.full((3,), 13.0))
    assert torch.equal(masters["moments-slot-0"], torch.arange(6.0))
    assert heir.holdings.held_moments() == {"moments-shared", "moments-slot-0"}


def test_a_run_whose_moments_stay_at_home_asks_for_none():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    member = Member(hub, 0, 13, "active", outer=OuterConfig(moments="local"))
    assert member.holdings.held_moments() == set()


def test_who_fell_behind_takes_no_more_slots_than_in_any_round():
    """Unless it has just come: a newcomer takes all."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady, late = Member(hub, 0, 13, "active"), Member(hub, 1, 12, "active")
    slots = {f"slot-{slot}": torch.full((3,), 5.0) for slot in range(1, 4)}
    steady.swarm.publish(13, slots)
    late.swarm.publish(9, slots)
    late.holdings.refresh_slots = 2
    fetched = late.holdings.catch_up([peer_id(0)], routed={2: 7})
    assert set(fetched) == {SHARED, "slot-1", "slot-2"}, "the busiest, and of the oldest the first"
    assert set(late.holdings.catch_up([peer_id(0)])) == {"slot-0", "slot-3"}
