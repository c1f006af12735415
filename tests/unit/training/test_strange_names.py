"""Names of versions that the run does not have cost the other peers nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual import VirtualPeer, certify, peer_id, tiny_run

from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.certificate import Body, MemberEntry
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.slots import HeldSlots

STRANGE = 4000
"""A slot that a roster entry may name, and no model of ours has."""


class Holder:
    """A peer with a version of everything, but for training.

    Its swarm was never told the run's names, so that what it pulls is what its holdings ask for.
    """

    def __init__(self, hub: MemoryHub, index: int, round: int, swarm: type[MemorySwarm] = MemorySwarm) -> None:
        self.run, self.swarm = tiny_run(), swarm(hub, peer_id(index))
        anchors = Anchors(self.run, {SHARED: 5, "slot": 3})
        self.held = HeldSlots(self.swarm, self.run, run_id="run", anchors=anchors, max_slots=2)
        self.swarm.publish(round, {SHARED: torch.full((5,), float(round)), "slot-0": torch.full((3,), float(round))})
        self.held.announce("active")


@pytest.fixture
def hub() -> MemoryHub:
    return MemoryHub("run", matchmaking_seconds=1.0, num_slots=4)


def entry(peer: str, slots: tuple[int, ...], last: Body) -> Member:
    fields = {"tokens": 1, "tokens_per_second": 1, "ready_at": 0, "sync_seconds": 0}
    return Member(peer_id=peer, round=last.round, previous=last.digest, slots=slots, **fields)


def publish_strange(swarm: MemorySwarm, round: int) -> set[str]:
    names = {VectorName.of_slot(STRANGE), VectorName.of_slot(4)}
    swarm.publish(round, {name: torch.ones(3) for name in names})
    return names


def test_a_runs_names_are_those_of_its_slots():
    vectors = Anchors(tiny_run(), {SHARED: 5, "slot": 3}).vectors()
    assert vectors.names == {SHARED, "slot-0", "slot-1", "slot-2", "slot-3"}


def test_a_slot_that_the_model_lacks_is_not_fetched_when_a_member_brings_it(hub):
    mine, liar = Holder(hub, 0, 12), Holder(hub, 1, 13)
    publish_strange(liar.swarm, 13)
    last = certify(hub, 12, mine.swarm.versions().values())
    made = [version for version in liar.swarm.versions().values() if version.name == "slot-0"]
    members = [MemberEntry(peer_id=liar.swarm.peer_id, tokens=1, slots=(0, 4, STRANGE))]
    certify(hub, 13, made, members=members)
    mine.held.fetch(Roster([entry(liar.swarm.peer_id, (0, 4, STRANGE), last)], last), {})
    assert set(mine.held.to_load()) == {"slot-0"} == set(mine.held.makers)
    assert mine.swarm.versions().keys() == {SHARED, "slot-0"} and mine.held.stale_rounds == 0


def test_a_peer_that_catches_up_leaves_out_what_the_model_lacks(hub):
    liar, mine = Holder(hub, 1, 13), Holder(hub, 0, 12)
    certify(hub, 13, liar.swarm.versions().values())
    publish_strange(liar.swarm, 13)
    mine.held.fetch()
    assert set(mine.held.to_load()) == {SHARED, "slot-0"}
    assert mine.swarm.versions().keys() == {SHARED, "slot-0"}


class Liar(MemorySwarm):
    """Brings a slot to every roster that the model does not have, and serves it."""

    def average(self, contribution: Contribution, **when: Any) -> RoundResult:
        member, name = contribution.member, VectorName.of_slot(STRANGE)
        told = {
            "slots": (*member.slots, STRANGE),
        }
        slot = contribution.deltas[VectorName.of_slot(member.slots[0])]
        lie = Contribution(member.model_copy(update=told), {**contribution.deltas, name: slot})
        result = super().average(lie, **when)
        return replace(result, means={n: mean for n, mean in result.means.items() if n != name})

    def publish(self, round: int, bundles: Mapping[str, Tensor]):
        strange = {VectorName.of_slot(STRANGE): flat for name, flat in bundles.items() if name.startswith("slot-")}
        return super().publish(round, {**bundles, **strange})

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, version in super().versions().items() if name != VectorName.of_slot(STRANGE)}


def test_a_swarm_with_a_slot_that_the_model_lacks_trains_on():
    run, hub = tiny_run(), MemoryHub("run", matchmaking_seconds=10.0)
    swarms = [Liar(hub, peer_id(0)), *(MemorySwarm(hub, peer_id(index)) for index in (1, 2))]
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": 3})})
    peers = [VirtualPeer(run, swarm, index=index, max_slots=2) for index, swarm in enumerate(swarms)]
    initial = peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    assert swarms[0].load(VectorName.of_slot(STRANGE)).numel(), "it was served"
    for peer in peers[1:]:
        assert len(peer.reports) == run.round.total and all(report.num_members == 3 for report in peer.reports)
        assert VectorName.of_slot(STRANGE) not in peer.swarm.versions()
