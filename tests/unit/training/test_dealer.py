"""Which range of shared data a peer takes, and when its draws count."""

from __future__ import annotations

import pytest
from virtual import VirtualPeer, certify, peer_id, tiny_run

from spes_p2p.config import DataConfig
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.training.dealer import Dealer, deal_rules

SHARED_DATA = DataConfig(source="files", fingerprint="0" * 64, sequence_length=16, vocab_size=64)


def dealers(num_peers: int, **changes) -> tuple[MemoryHub, list[Dealer], list[VirtualPeer]]:
    run = tiny_run(**changes)
    hub = MemoryHub("run", num_slots=4)
    peers: list[VirtualPeer] = []
    shared = run.model_copy(update={"data": SHARED_DATA})
    for index in range(num_peers):
        hub.clock.advance(1.0)
        peers.append(VirtualPeer(run, MemorySwarm(hub, peer_id(index)), index=index, max_slots=2))
        peers[-1].sync.held.announce("active")
    return hub, [Dealer(peer.swarm, shared, peer.sync.held) for peer in peers], peers


def test_peers_without_a_range_take_spare_ones_in_the_order_in_which_they_came():
    _, found, _ = dealers(4)
    dealt = [dealer.deal(1) for dealer in found]
    assert [each.spare for each in dealt] == [0, 1, 2, 3]
    draws = [draw for each in dealt for range in each.ranges for draw in range]
    assert len(draws) == len(set(draws)) == 4 * tiny_run().round.steps


def test_draws_of_a_branch_that_this_peer_has_left_do_not_count():
    hub, (dealer, *_), _ = dealers(2)
    certify(hub, 1)
    dealt = dealer.deal(2)
    assert dealer.said(2, 100, dealt, 3) == {"tokens": 100, "drawn": 3, "spare": dealt.spare}
    assert dealer.said(3, 100, dealt, 3) == {"tokens": 0}, "of another round"
    assert dealer.said(2, 100, None, 0) == {"tokens": 0}, "of no range"
    hub.bodies.pop()
    certify(hub, 1, ends_at=77.0)
    assert dealer.said(2, 100, dealt, 3) == {"tokens": 0}


def test_a_round_by_steps_deals_exactly_its_steps_and_one_by_time_a_whole_round():
    run = tiny_run().model_copy(update={"data": SHARED_DATA})
    assert deal_rules(run, 1).usual == run.round.steps and deal_rules(run, 1).is_exact
    by_time = run.model_copy(update={"round": run.round.model_copy(update={"mode": "tokens", "tokens": 64_001})})
    assert deal_rules(by_time, 1).usual == 1001
    assert deal_rules(by_time, 2).growth == 1.0
    growing = by_time.model_copy(update={"round": by_time.round.model_copy(update={"growing": 2})})
    assert [deal_rules(growing, round).growth for round in (1, 2, 3, 4)] == pytest.approx([1, 10, 10, 1])
