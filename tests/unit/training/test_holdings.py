"""Whoever joins or comes back takes over what the swarm has trained, however many do so at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from virtual import peer_id, tiny_run

from spes_p2p.config import OuterConfig
from spes_p2p.sim.swarm import MemoryHub, MemorySwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import Member as Entry
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.round_work import RoundWork
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.synchroniser import Synchroniser

NUMELS = {SHARED: 5, "slot": 3}


class Member:
    """A peer with a version of everything, but for training."""

    def __init__(
        self,
        hub: MemoryHub,
        index: int,
        round: int,
        state: str,
        value: float | None = None,
        *,
        max_slots: int = 2,
        **changes: Any,
    ) -> None:
        run = tiny_run(**changes)
        self.swarm = MemorySwarm(hub, peer_id(index))
        self.anchors = Anchors(run, NUMELS)
        self.held = HeldSlots(self.swarm, run, run_id="run", anchors=self.anchors, max_slots=max_slots)
        value = float(round) if value is None else value
        self.swarm.publish(round, {SHARED: torch.full((5,), value), "slot-0": torch.full((3,), value)})
        self.held.announce(state)

    def catch_up(self, min_round: int = 0) -> tuple[int, float]:
        self.held.catch_up(self.held.others(), min_round)
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
    steady = Member(hub, 0, 14, "active")
    steady.held.has_committed = True
    steady.held.announce("active")
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


def test_peers_that_all_come_back_take_a_round_that_most_did_not_live_to_publish():
    """It was committed by a quorum, so it is nobody's own."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, 1 + i, round, "joining") for i, round in enumerate((6, 6, 6, 7))]
    peers[3].swarm.publish(7, {"moments-shared": torch.full((10,), 7.0)})
    for peer in peers[:3]:
        peer.swarm.publish(6, {"moments-shared": torch.full((10,), 6.0)})
    assert {peer.catch_up() for peer in peers} == {(7, 7.0)}
    assert {peer.swarm.load("moments-shared")[0].item() for peer in peers} == {7.0}


def test_peers_that_all_come_back_do_not_follow_one_that_trained_on_alone():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, 1 + i, round, "joining") for i, round in enumerate((6, 6, 20))]
    assert {peer.catch_up() for peer in peers} == {(6, 6.0)}


def test_one_round_ahead_counts_for_nothing_where_others_have_not_stopped():
    """Whoever offers it has joined just now, and the others would have committed it themselves."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, 1 + i, 6, "active") for i in range(3)]
    Member(hub, 9, 7, "joining")
    assert {peer.catch_up() for peer in peers} == {(6, 6.0)}


def test_a_newcomer_takes_over_the_moments_of_the_shared_parameters():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady = Member(hub, 0, 13, "active")
    steady.swarm.publish(13, {"moments-shared": torch.arange(10.0), "moments-slot-0": torch.arange(6.0)})
    newcomer = Member(hub, 1, 0, "joining")
    vectors = newcomer.held.catch_up([peer_id(0)])
    assert torch.equal(vectors["moments-shared"], torch.arange(10.0))
    assert "moments-slot-0" not in vectors, "it does not hold the slot"


def test_whoever_adopts_a_slot_takes_over_its_moments():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, heir = Member(hub, 0, 13, "active"), Member(hub, 1, 13, "active")
    leaver.swarm.publish(13, {"moments-slot-0": torch.arange(6.0)})
    masters = heir.held._hold([0])
    assert torch.equal(masters["slot-0"], torch.full((3,), 13.0))
    assert torch.equal(masters["moments-slot-0"], torch.arange(6.0))
    assert heir.held.held_moments() == {"moments-shared", "moments-slot-0"}


@pytest.mark.parametrize(("is_taken", "lacking"), [(True, []), (False, ["slot-0"])])
def test_a_leaver_stays_until_others_have_its_newest_versions(is_taken, lacking):
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, heir = Member(hub, 0, 13, "active"), Member(hub, 1, 12, "active")
    leaver.held.resume([0])
    if is_taken:
        heir.swarm.pull({"slot-0": [peer_id(0)]}, min_round=13, timeout=1.0)
    began = leaver.swarm.now()
    assert leaver.held.hand_over(5.0) == lacking
    assert leaver.swarm.now() == began if is_taken else leaver.swarm.now() >= began + 5.0
    assert leaver.held.slots == () and heir.held.claims()[peer_id(0)].max_slots == 0


def test_a_leaver_stays_until_others_have_its_moments_too():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, heir = Member(hub, 0, 13, "active"), Member(hub, 1, 12, "active")
    leaver.swarm.publish(13, {"moments-slot-0": torch.arange(6.0)})
    leaver.held.resume([0])
    heir.swarm.pull({"slot-0": [peer_id(0)]}, min_round=13, timeout=1.0)
    assert leaver.held.hand_over(5.0) == ["moments-slot-0"]


def test_a_leaver_stays_for_a_version_that_it_publishes_while_it_leaves():
    """A round that it was in may be committed meanwhile."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, heir = Member(hub, 0, 13, "active"), Member(hub, 1, 12, "active")
    leaver.held.resume([0])
    wait, held = leaver.swarm.wait, list[int]()

    def wait_and_see(seconds: float) -> bool:
        if not held:
            heir.swarm.publish(13, {"slot-0": torch.full((3,), 13.0)})
            leaver.swarm.publish(14, {"slot-0": torch.full((3,), 14.0)})
        else:
            heir.swarm.pull({"slot-0": [peer_id(0)]}, min_round=14, timeout=1.0)
        held.append(heir.swarm.versions()["slot-0"].round)
        return wait(seconds)

    leaver.swarm.wait = wait_and_see
    assert leaver.held.hand_over(5.0) == [] and held == [13, 14]


def test_whoever_has_left_is_not_active_again_by_what_it_was_still_doing():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    leaver, other = Member(hub, 0, 13, "active"), Member(hub, 1, 13, "active")
    leaver.held.leave()
    leaver.held.announce("active")
    claim = other.held.claims()[peer_id(0)]
    assert (claim.state, claim.max_slots) == ("joining", 0)


def test_a_run_whose_moments_stay_at_home_asks_for_none():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    member = Member(hub, 0, 13, "active", outer=OuterConfig(moments="local"))
    assert member.held.held_moments() == set()


def test_a_slot_that_others_had_trained_on_is_as_many_rounds_off():
    """Whoever stood still for some rounds pulls what its holders have by then, before it has caught up itself."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    Member(hub, 0, 14, "active")
    stood_still = Member(hub, 1, 12, "active")
    stood_still.swarm.pull({"slot-0": [peer_id(0)]}, min_round=14, timeout=1.0)
    digests = {SHARED: "5" * 16, "slot-0": "5" * 16}
    entry = Entry(
        peer_id=peer_id(0),
        round=11,
        tokens=1,
        slots=(0,),
        anchors=digests,
        tokens_per_second=1,
        ready_at=0,
        sync_seconds=0,
    )
    stood_still.held.fetch(Roster([entry]), 12, [SHARED], {})
    assert stood_still.held.stale_rounds == 2


def test_who_fell_behind_takes_no_more_slots_than_in_any_round():
    """Unless it has just come: a newcomer takes all."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    steady, late = Member(hub, 0, 13, "active"), Member(hub, 1, 12, "active")
    slots = {f"slot-{slot}": torch.full((3,), 5.0) for slot in range(1, 4)}
    steady.swarm.publish(13, slots)
    late.swarm.publish(9, slots)
    late.held.refresh_slots = 2
    fetched = late.held.catch_up([peer_id(0)], routed={2: 7})
    assert set(fetched) == {SHARED, "slot-1", "slot-2"}, "the busiest, and of the oldest the first"
    assert set(late.held.catch_up([peer_id(0)])) == {"slot-0", "slot-3"}


def test_old_copies_of_a_slots_moments_do_not_outvote_the_newest():
    """Whoever kept them once has them still."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    members = [Member(hub, index, 13, "active") for index in range(4)]
    for index, round in enumerate([5, 5, 12, 7]):
        members[index].swarm.publish(round, {"moments-slot-0": torch.full((6,), float(round))})
    members[3].anchors.set(VectorName("slot-0"), torch.zeros(3))
    members[3].catch_up()
    assert members[3].swarm.versions()["moments-slot-0"].round == 12


def test_who_loses_a_partition_goes_back_to_the_winners_slots():
    """The losing side has had more rounds; what it made of the slot does not fit the model that goes on."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    loser = Member(hub, 0, 12, "active")
    for index in (1, 2, 3):
        winner = Member(hub, index, 10, "active")
        winner.swarm.publish(8, {"slot-0": torch.full((3,), 8.0)})
    loser.anchors.set(VectorName("slot-0"), loser.swarm.load("slot-0"))
    assert loser.catch_up() == (10, 10.0)
    assert loser.swarm.versions()["slot-0"].round == 8
    assert torch.equal(loser.anchors.weights("slot-0"), torch.full((3,), 8.0))


def test_whoever_adopts_a_slot_takes_none_that_is_ahead_of_its_model():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    for index, round in enumerate((9, 12)):
        Member(hub, index, 10, "active").swarm.publish(round, {"slot-0": torch.full((3,), float(round))})
    heir = Member(hub, 5, 10, "active")
    heir.swarm.publish(11, {"slot-0": torch.full((3,), 11.0)})
    heir.held.slots = (1,)
    heir.anchors.set(VectorName("slot-1"), torch.zeros(3))
    masters = heir.held._hold([0])
    assert torch.equal(masters["slot-0"], torch.full((3,), 9.0))


def test_a_slot_that_is_ahead_is_better_than_none():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    Member(hub, 0, 10, "active").swarm.publish(12, {"slot-1": torch.full((3,), 12.0)})
    newcomer = Member(hub, 1, 0, "joining")
    assert newcomer.catch_up() == (10, 10.0)
    assert newcomer.swarm.versions()["slot-1"].round == 12


def test_whoever_takes_few_slots_takes_those_first_that_are_far_from_the_model_either_way():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    for index in (0, 2):
        Member(hub, index, 10, "active").swarm.publish(10, {f"slot-{slot}": torch.zeros(3) for slot in range(3)})
    loser = Member(hub, 1, 10, "active")
    loser.swarm.publish(30, {"slot-2": torch.ones(3)})
    loser.swarm.publish(9, {"slot-1": torch.ones(3)})
    loser.held.refresh_slots = 1
    assert set(loser.held.catch_up(loser.held.others(), routed={})) & {"slot-1", "slot-2"} == {"slot-2"}


@pytest.fixture
def refusing():
    """A peer that has refused slot-0 of round 14, whose holder has given it up and goes on serving it."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    heir, liar = Member(hub, 1, 13, "active"), Member(hub, 0, 13, "active")
    heir.held.has_committed = liar.held.has_committed = True
    for swarm in (heir.swarm, liar.swarm):
        swarm.publish(14, {SHARED: torch.full((5,), 14.0)})
    liar.swarm.publish(14, {"slot-0": torch.full((3,), 666.0)})
    assert heir.swarm.pull({"slot-0": [peer_id(0)]}, min_round=14, timeout=1.0) == {}
    heir.swarm.refuse("slot-0", {})
    return heir


def test_whoever_adopts_a_slot_does_not_take_the_version_that_it_has_refused(refusing):
    refusing.held.slots = (1,)
    refusing.anchors.set(VectorName("slot-1"), torch.zeros(3))
    assert torch.equal(refusing.held._hold([0])["slot-0"], torch.full((3,), 13.0))
    assert refusing.swarm.versions()["slot-0"].round == 13


def test_whoever_catches_up_does_not_take_the_version_that_it_has_refused(refusing):
    assert "slot-0" not in refusing.held.catch_up([peer_id(0)])
    assert refusing.swarm.versions()["slot-0"].round == 13


def test_whoever_catches_up_asks_nobody_whom_the_last_roster_left_out(monkeypatch):
    """It goes on serving, and says so: what it has made of its slots since is newer than what anybody else has."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    behind, honest, liar = (Member(hub, index, 13, "active") for index in range(3))
    honest.swarm.publish(14, {SHARED: torch.full((5,), 14.0)})
    liar.swarm.publish(14, {SHARED: torch.full((5,), 14.0), "slot-0": torch.full((3,), 666.0)})
    monkeypatch.setattr(behind.swarm, "seeds", lambda: {"slot-0": [peer_id(2)]})
    behind.held.distrusted = frozenset({peer_id(2)})
    assert behind.catch_up(min_round=14) == (14, 14.0)
    assert behind.swarm.versions()["slot-0"].round == 13


def test_a_slots_version_is_signed_by_who_made_it():
    """A liar that had a second key sign what it has made would be held to account for none of it."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    mine, liar, second = (Member(hub, index, 12, "active") for index in range(3))
    slots = {"slot-0": torch.full((3,), 666.0), "moments-slot-0": torch.full((6,), 666.0)}
    second.swarm.publish(13, slots)
    liar.swarm.pull({name: [peer_id(2)] for name in slots}, min_round=13, timeout=1.0)
    anchors = {SHARED: "5" * 16, "slot-0": "5" * 16}
    fields = {"round": 12, "tokens": 1, "anchors": anchors, "tokens_per_second": 1, "ready_at": 0, "sync_seconds": 0}
    roster = Roster([Entry(peer_id=peer_id(1), slots=(0,), **fields), Entry(peer_id=peer_id(0), slots=(), **fields)])
    assert mine.held.fetch(roster, 13, [SHARED], {}) == {}
    assert mine.swarm.versions()["slot-0"].round == 12 and "moments-slot-0" not in mine.swarm.versions()
    liar.swarm.publish(13, {name: flat - 1 for name, flat in slots.items()})
    assert set(mine.held.fetch(roster, 13, [SHARED], {})) == {"slot-0"}
    assert "moments-slot-0" in mine.swarm.versions(), "which it keeps for the only holder"


def test_slots_of_whoever_is_left_out_are_orphans_and_nobody_asks_it():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, index, 3, "active") for index in range(3)]
    for peer, slots in zip(peers, ((), (0, 2), (1, 3)), strict=True):
        peer.swarm.publish(3, {f"slot-{slot}": torch.full((3,), 3.0) for slot in range(4)})
        peer.held.resume(slots)
        peer.held.announce("active")
    mine, left_out = peers[0], peers[2]
    mine.held.distrusted = frozenset({left_out.swarm.peer_id, mine.swarm.peer_id})
    assert mine.held.others() == [peers[1].swarm.peer_id]
    mine.held.rebalance(4)
    assert mine.held.slots == (1, 3)


def test_whoever_has_committed_has_a_vote_and_newcomers_have_one_only_among_themselves():
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    peers = [Member(hub, index, 3, "active") for index in range(4)]
    assert set(peers[0].held.voters()) == {peer_id(index) for index in range(4)}
    for peer in peers[:2]:
        peer.held.has_committed = True
        peer.held.announce("active")
    for peer in peers:
        assert set(peer.held.voters()) == {peer_id(0), peer_id(1)}
    peers[0].held.leave()
    assert peers[2].held.voters() == [peer_id(1)]


def test_newcomers_do_not_keep_a_peer_from_seeing_that_the_others_have_gone_on():
    """Three of five have committed round 14; one of the other two sees three newcomers as well."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    ahead = [Member(hub, index, 14, "active") for index in range(3)]
    left = [Member(hub, index, 13, "active", max_slots=0) for index in (3, 4)]
    newcomers = [Member(hub, index, 13, "active") for index in (5, 6, 7)]
    for peer in (*ahead, *left):
        peer.held.has_committed = True
        peer.held.announce("active")
    for peer in (*ahead, *left, *newcomers):
        round = peer.swarm.versions()[SHARED].round
        peer.swarm.announce(Progress(peer_id=peer.swarm.peer_id, round=round, ends_at=0.0))
    one = left[0]
    sync = Synchroniser(one.swarm, tiny_run(), held=one.held, anchors=one.anchors, layout=None)
    sync.round = 13
    one.anchors.set(SHARED, one.swarm.load(SHARED))
    sync.synchronise(RoundWork({}, 0, 1.0, 0.0), starts_at=0.0)
    assert sync.round == 14 and one.swarm.load(SHARED)[0].item() == 14.0


def test_nobody_goes_on_from_an_older_version_of_a_slot_than_the_others_have():
    """Its holder has died; the one that took its place had not reached those who have what it made last."""
    hub = MemoryHub("run", matchmaking_seconds=10.0)
    members = [Member(hub, index, 13, "active", max_slots=int(index == 0)) for index in range(3)]
    heir = members[0]
    heir.swarm.publish(9, {"slot-0": torch.full((3,), 9.0)})
    heir.held.resume([0])
    heir.anchors.set(VectorName("slot-0"), heir.swarm.load("slot-0"))
    syncs = [Synchroniser(m.swarm, tiny_run(), held=m.held, anchors=m.anchors, layout=None) for m in members]
    for member, sync in zip(members, syncs, strict=True):
        sync.round = 13
        member.anchors.set(SHARED, member.swarm.load(SHARED))
        member.swarm.enter(member.anchors.vectors())

    for round, version in ((14, (13, 13.0)), (15, (15, 14.0))):
        hub.clock.run([lambda sync=sync: sync.synchronise(trained_by(sync), starts_at=0.0) for sync in syncs])
        assert {sync.round for sync in syncs} == {round}
        assert {(m.swarm.versions()["slot-0"].round, m.swarm.load("slot-0")[0].item()) for m in members} == {version}


def trained_by(sync: Synchroniser) -> RoundWork:
    """Return work that adds one to each weight."""
    local = {name: sync.anchors.weights(name) + 1 for name in sync.anchors.names}
    return RoundWork(local, tokens=100, tokens_per_second=100.0, seconds=1.0)
