"""Names of versions that the run does not have cost the other peers nothing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual import VirtualPeer, World, run_peers, tiny_run

from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import Body, MemberEntry
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.slots import HeldSlots

STRANGE = 4000
"""A slot that a roster entry may name, and no model of ours has."""


class Holder:
    """A peer with a version of everything, but for training; it notes what its holdings ask for."""

    def __init__(self, world: World, index: int, round: int) -> None:
        run, self.swarm, self.asked = tiny_run(), world.swarm(index), set[str]()
        anchors, pull = Anchors(run, {SHARED: 5, "slot": 3}), self.swarm.pull
        world.enter(self.swarm, run, anchors.vectors())
        self.swarm.pull = lambda wanted, *peers, **more: self.asked.update(wanted) or pull(wanted, *peers, **more)
        self.held = HeldSlots(self.swarm, run, run_id="run", anchors=anchors, max_slots=2, clock=self.swarm.now)
        self.swarm.publish(round, {SHARED: torch.full((5,), float(round)), "slot-0": torch.full((3,), float(round))})
        self.held.announce("active")


@pytest.fixture
def world():
    return World()


def entry(peer: str, slots: tuple[int, ...], last: Body) -> Member:
    fields = {"tokens": 1, "tokens_per_second": 1, "ready_at": 0, "sync_seconds": 0}
    return Member(peer_id=peer, round=last.round, previous=last.digest, slots=slots, **fields)


def publish_strange(swarm: VirtualSwarm, round: int) -> set[str]:
    names = {VectorName.of_slot(STRANGE), VectorName.of_slot(4)}
    swarm.publish(round, {name: torch.ones(3) for name in names})
    return names


def test_a_runs_names_are_those_of_its_slots():
    vectors = Anchors(tiny_run(), {SHARED: 5, "slot": 3}).vectors()
    assert vectors.names == {SHARED, "slot-0", "slot-1", "slot-2", "slot-3"}


def test_a_slot_that_the_model_lacks_is_not_fetched_when_a_member_brings_it(world):
    mine, liar = Holder(world, 0, 12), Holder(world, 1, 13)
    publish_strange(liar.swarm, 13)
    last = world.certify(12, mine.swarm.versions().values())
    made = [version for version in liar.swarm.versions().values() if version.name == "slot-0"]
    members = [MemberEntry(peer_id=liar.swarm.peer_id, tokens=1, slots=(0, 4, STRANGE))]
    world.certify(13, made, members=tuple(members))
    mine.held.fetch(Roster([entry(liar.swarm.peer_id, (0, 4, STRANGE), last)], last), {})
    assert set(mine.held.to_load()) == {"slot-0"} == set(mine.held.makers)
    assert mine.swarm.versions().keys() == {SHARED, "slot-0"} and mine.held.stale_rounds == 0
    assert mine.asked == {"slot-0"}


def test_a_peer_that_catches_up_leaves_out_what_the_model_lacks(world):
    liar, mine = Holder(world, 1, 13), Holder(world, 0, 12)
    world.certify(13, liar.swarm.versions().values())
    publish_strange(liar.swarm, 13)
    mine.held.fetch()
    assert set(mine.held.to_load()) == {SHARED, "slot-0"} == mine.asked
    assert mine.swarm.versions().keys() == {SHARED, "slot-0"}


class Liar(VirtualSwarm):
    """Brings a slot to every roster that the model does not have, and serves it."""

    def agree(self, contribution: Contribution, stage: Callable, **when: Any) -> Body | None:
        member, name = contribution.member, VectorName.of_slot(STRANGE)
        told = {"slots": (*member.slots, STRANGE)}
        slot = contribution.deltas[VectorName.of_slot(member.slots[0])]
        lie = Contribution(member.model_copy(update=told), {**contribution.deltas, name: slot})

        def staged(result: RoundResult) -> Staged | None:
            return stage(replace(result, means={n: mean for n, mean in result.means.items() if n != name}))

        return super().agree(lie, staged, **when)

    def publish(self, round: int, bundles: Mapping[str, Tensor]):
        strange = {VectorName.of_slot(STRANGE): flat for name, flat in bundles.items() if name.startswith("slot-")}
        return super().publish(round, {**bundles, **strange})

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, version in super().versions().items() if name != VectorName.of_slot(STRANGE)}


def test_a_swarm_with_a_slot_that_the_model_lacks_trains_on():
    run, world = tiny_run(), World()
    swarms = [world.swarm(0, Liar), world.swarm(1), world.swarm(2)]
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": 3})})
    peers = [VirtualPeer(run, world, swarm, index=index, max_slots=2) for index, swarm in enumerate(swarms)]
    run_peers(peers)
    assert swarms[0].load(VectorName.of_slot(STRANGE)).numel(), "it was served"
    for peer in peers[1:]:
        assert len(peer.reports) == run.round.total and all(report.num_members == 3 for report in peer.reports)
        assert VectorName.of_slot(STRANGE) not in peer.swarm.versions()
