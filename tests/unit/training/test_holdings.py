"""A peer that joins or comes back takes over what the last certificate names, whatever the others offer."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pulls import pull_offered
from virtual import World, peer_id, tiny_run

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.errors import AbsentError
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import Member as Entry
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.round import TrainingLoop
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.synchroniser import Synchroniser, Trained

NUMELS = {SHARED: 5, "slot": 3}


class Member:
    """A peer with a version of everything, but for training."""

    def __init__(
        self,
        world: World,
        index: int,
        round: int,
        state: str,
        value: float | None = None,
        *,
        max_slots: int = 2,
        **changes: Any,
    ) -> None:
        run = tiny_run(**changes)
        self.swarm = world.swarm(index)
        self.anchors = Anchors(run, NUMELS)
        world.enter(self.swarm, run, self.anchors.vectors())
        self.held = HeldSlots(
            self.swarm, run, run_id="run", anchors=self.anchors, max_slots=max_slots, clock=self.swarm.now
        )
        value = float(round) if value is None else value
        self.swarm.publish(round, {SHARED: torch.full((5,), value), "slot-0": torch.full((3,), value)})
        self.held.announce(state)

    def round(self) -> TrainingLoop:
        """Return the rounds of this peer, which has no model."""
        self.anchors.set(SHARED, self.swarm.mapped(SHARED))
        sync = Synchroniser(self.swarm, tiny_run(), held=self.held, anchors=self.anchors, layout=None)
        sync.round = 13
        nothing = lambda *_: None  # noqa: E731
        trainer = SimpleNamespace(clock=self.held.clock, names=(SHARED,), slots=(), steps=0, give_back=nothing)
        trainer.set_slots, trainer.load, trainer.data = nothing, nothing, SimpleNamespace(state_dict=dict)
        return TrainingLoop(tiny_run(), trainer, sync)

    def fetched(self, *how: Any, **more: Any) -> set[VectorName]:
        self.held.fetch(*how, **more)
        return set(self.held.to_load())

    def catch_up(self) -> tuple[int, float]:
        self.held.fetch()
        return self.swarm.versions()[SHARED].round, self.swarm.load(SHARED)[0].item()


def entry(index: int, slots: tuple[int, ...], last: Body) -> Entry:
    fields = {"tokens": 1, "tokens_per_second": 1, "ready_at": 0, "sync_seconds": 0}
    return Entry(peer_id=peer_id(index), round=last.round, previous=last.digest, slots=slots, **fields)


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("others", [0, 5, 13, 14, 20], ids=["newcomers", "behind", "astray", "ahead", "far ahead"])
def test_a_peer_takes_the_certified_version_whatever_most_others_offer(world, others):
    steady = Member(world, 0, 13, "active")
    joiners = [Member(world, 10 + i, others, "joining", value=-1.0) for i in range(3)]
    world.certify(13, steady.swarm.versions().values(), voters=[peer_id(i) for i in (0, 10, 11, 12)])
    for joiner in joiners:
        assert joiner.catch_up() == (13, 13.0)
        assert joiner.swarm.versions()["slot-0"].round == 13 and joiner.swarm.load("slot-0")[0] == 13.0
        assert joiner.held.model_round() == 13 and not joiner.held.starts()
    assert steady.catch_up() == (13, 13.0)


@pytest.mark.parametrize("target", [[0], [0, 1]], ids=["as before", "one more"])
def test_a_peer_that_resumes_trains_the_certified_versions_of_the_slots_that_it_had(world, target):
    """With one more slot it trained on from its old version, and that slot's work was lost without a word."""
    changes = {"frozen_storage": "bf16"}
    steady, back = Member(world, 0, 13, "active", **changes), Member(world, 1, 10, "active", **changes)
    for member, round in ((steady, 13), (back, 10)):
        member.swarm.publish(round, {"slot-1": torch.full((3,), float(round))})
    world.certify(13, steady.swarm.versions().values(), voters=[peer_id(0), peer_id(1)])
    back.held.resume([0])
    back.held.hold(target)
    back.held.fetch()
    for slot in target:
        assert back.anchors.weights(VectorName.of_slot(slot))[0] == 13.0


@pytest.mark.parametrize("answering", [2, 1, 0])
def test_a_certified_version_is_lost_once_half_of_the_known_peers_answer_and_none_has_it(world, answering):
    """Its holders then start from what they have, and say so; before that, they only wait."""
    peers = [Member(world, i, 13, "active") for i in range(3)]
    gone = Member(world, 9, 13, "active", value=-1.0)
    named = [peers[0].swarm.versions()[SHARED], gone.swarm.versions()["slot-0"]]
    world.certify(13, named, voters=[peer_id(i) for i in range(3)])
    mine = peers[0]
    mine.held.resume([0])
    mine.held.fetch(only=[])
    for silent in peers[1 + answering :]:
        silent.swarm.network.close()
    assert not mine.fetched(only=["slot-0"])
    version = mine.swarm.versions()["slot-0"]
    assert mine.held.starts() == ({"slot-0": (13, version.digest)} if answering else {})
    assert mine.held.usable() == [SHARED, *(["slot-0"] if answering else [])]
    if answering:
        pull_offered(peers[1].swarm, ["slot-0"], [peer_id(9)])
        assert mine.fetched() == {"slot-0"} and not mine.held.unoffered
        assert mine.held.starts() == {} and mine.held.usable() == [SHARED, "slot-0"]


def test_claims_of_peers_that_no_certificate_knows_do_not_count(world):
    """Otherwise idle identities would be given the slots."""
    peers = [Member(world, index, 13, "active") for index in range(2)]
    ghosts = [Member(world, 10 + index, 13, "active") for index in range(5)]
    held = peers[0].held
    assert len(held.others()) == 1 + len(ghosts), "before the first certificate all claims count"
    world.certify(13, peers[0].swarm.versions().values(), voters=[peer_id(0), peer_id(1)])
    assert held.others() == [peer_id(1)]


def test_few_newcomers_are_waited_for_and_in_fewer_rounds_the_more_they_miss(world):
    """Otherwise each roster would wait for idle identities."""
    peers = [Member(world, index, 13, "active") for index in range(2)]
    known, held = {peer_id(0), peer_id(1)}, peers[0].held
    last = world.certify(13, peers[0].swarm.versions().values(), voters=sorted(known))
    newcomers = [Member(world, 10 + index, 13, "active") for index in range(5)]
    assert held.expected(held.claims()) == known, "the newcomers follow another certificate, or none"
    for newcomer in newcomers:
        me = newcomer.swarm.peer_id
        newcomer.swarm.announce(Progress(peer_id=me, round=13, ends_at=0.0, certificate=last.digest))
    expected = held.expected(held.claims())
    assert known < expected and len(expected) == 2 + 2
    for newcomer in newcomers[1:]:
        newcomer.held.leave()
    one = newcomers[0].swarm.peer_id
    roster = Roster([entry(0, (), last), entry(1, (), last)], last)
    waited = []
    for _ in range(16):
        expected = held.expected(held.claims())
        waited.append(one in expected)
        held.has_met(roster, expected)
    assert [missed for missed, is_expected in enumerate(waited) if is_expected] == [0, 1, 2, 4, 8]
    held.has_met(Roster([*roster, entry(10, (), last)], last), held.expected(held.claims()))
    assert one in held.expected(held.claims()), "it has come"
    num_waited = 0
    for index in range(16):
        ghost = Member(world, 20 + index, 13, "active")
        ghost.swarm.announce(Progress(peer_id=ghost.swarm.peer_id, round=2**53, ends_at=0.0))
        newcomers[0].held.leave()
        expected = held.expected(held.claims())
        num_waited += expected > known
        held.has_met(roster, expected)
        ghost.held.leave()
    assert num_waited == 5, "however many names an idle one has"


def test_a_peer_that_missed_a_certificate_takes_over_what_it_names(world):
    """It averages nothing that starts from the old one."""
    ahead = [Member(world, index, 14, "active") for index in range(3)]
    late = Member(world, 3, 13, "active", max_slots=0)
    world.certify(14, ahead[0].swarm.versions().values(), voters=[peer_id(index) for index in range(4)])
    for peer in (*ahead, late):
        round = peer.swarm.versions()[SHARED].round
        peer.swarm.announce(Progress(peer_id=peer.swarm.peer_id, round=round, ends_at=0.0))
    loop = late.round()
    loop._one_round(Trained({}, 0, 1.0, 0.0))
    assert loop._sync.round == 14 and late.swarm.load(SHARED)[0].item() == 14.0


@pytest.mark.parametrize(("is_taken", "lacking"), [(True, []), (False, ["slot-0"])])
def test_a_leaver_stays_until_others_have_its_newest_versions(is_taken, lacking):
    world = World()
    leaver, heir = Member(world, 0, 13, "active"), Member(world, 1, 12, "active")
    leaver.held.resume([0])
    if is_taken:
        pull_offered(heir.swarm, ["slot-0"], [peer_id(0)])
    began = leaver.swarm.now()
    assert leaver.held.hand_over(5.0) == lacking
    assert leaver.swarm.now() < began + 1.0 if is_taken else leaver.swarm.now() >= began + 5.0
    assert leaver.held.slots == () and heir.held.claims()[peer_id(0)].max_slots == 0


def test_a_leaver_that_was_paused_stays_for_the_certified_version_that_only_it_has(world):
    """No peer had room for its slots."""
    leaver, other = Member(world, 0, 13, "active"), Member(world, 1, 12, "active")
    world.certify(13, leaver.swarm.versions().values(), voters=[peer_id(0), peer_id(1)])
    assert leaver.held.hand_over(5.0) == ["slot-0"]
    pull_offered(other.swarm, ["slot-0"], [peer_id(0)])
    assert leaver.held.hand_over(5.0) == []


def test_a_leaver_stays_for_a_version_that_it_publishes_while_it_leaves():
    """A round that it was in may be committed meanwhile."""
    world = World()
    leaver, heir = Member(world, 0, 13, "active"), Member(world, 1, 12, "active")
    leaver.held.resume([0])
    wait, held = leaver.swarm.wait, list[int]()

    def wait_and_see(seconds: float) -> bool:
        if not held:
            heir.swarm.publish(13, {"slot-0": torch.full((3,), 13.0)})
            leaver.swarm.publish(14, {"slot-0": torch.full((3,), 14.0)})
        else:
            pull_offered(heir.swarm, ["slot-0"], [peer_id(0)])
        held.append(heir.swarm.versions()["slot-0"].round)
        return wait(seconds)

    leaver.swarm.wait = wait_and_see
    assert leaver.held.hand_over(5.0) == [] and held == [13, 14]


def test_a_peer_that_has_left_is_not_active_again_by_what_it_was_still_doing():
    world = World()
    leaver, other = Member(world, 0, 13, "active"), Member(world, 1, 13, "active")
    leaver.held.leave()
    leaver.held.announce("active")
    claim = other.held.claims()[peer_id(0)]
    assert (claim.state, claim.max_slots) == ("joining", 0)


def test_a_slot_that_others_had_trained_on_is_as_many_rounds_off(world):
    """A peer that stood still for some rounds has what its holders made by then, before it has caught up itself."""
    stood_still = Member(world, 1, 12, "active")
    world.certify(12, stood_still.swarm.versions().values())
    Member(world, 0, 14, "active")
    pull_offered(stood_still.swarm, ["slot-0"], [peer_id(0)])
    stood_still.held.fetch()
    assert stood_still.held.stale_rounds == 2


def test_slots_that_came_without_shared_are_loaded_when_that_comes(world, monkeypatch):
    steady, late = Member(world, 0, 13, "active"), Member(world, 1, 12, "active")
    world.certify(13, steady.swarm.versions().values())
    pull = late.swarm.pull

    def without_shared(wanted, peers, **settings):
        failed = {SHARED: "timed out"} if SHARED in wanted else {}
        return failed | dict(pull({name: wanted[name] for name in wanted if name not in failed}, peers, **settings))

    with monkeypatch.context() as slow:
        slow.setattr(late.swarm, "pull", without_shared)
        with pytest.raises(AbsentError):
            late.held.fetch()
    assert late.swarm.load("slot-0")[0] == 13.0, "it is here"
    assert late.fetched() == {SHARED, "slot-0"} and late.held.load(VectorName("slot-0"))[0] == 13.0
    assert not late.fetched()


def test_a_slot_that_did_not_come_once_comes_a_round_later_though_it_has_not_changed(world):
    holder, late = Member(world, 0, 13, "active"), Member(world, 1, 13, "active")
    holder.swarm.publish(12, {f"slot-{slot}": torch.full((3,), 5.0) for slot in (1, 2)})
    late.swarm.publish(9, {f"slot-{slot}": torch.full((3,), 4.0) for slot in (1, 2)})
    world.certify(13, holder.swarm.versions().values())
    last = world.bodies[13]
    roster = Roster([entry(0, (0, 1, 2), last), entry(1, (), last)], last)
    late.held.refresh_slots = 1
    assert late.fetched(roster, {}) == {"slot-1"} and late.held.stale_rounds == 3
    late.held.refresh_slots = None
    assert late.fetched(roster, {}) == {"slot-2"} and late.held.stale_rounds == 0


def test_a_peer_that_fell_behind_takes_no_more_slots_than_in_any_round(world):
    """Unless it has just come: a newcomer takes all."""
    steady, late = Member(world, 0, 13, "active"), Member(world, 1, 12, "active")
    steady.swarm.publish(13, {f"slot-{slot}": torch.full((3,), 5.0) for slot in range(1, 4)})
    late.swarm.publish(9, {f"slot-{slot}": torch.full((3,), 4.0) for slot in range(1, 4)})
    world.certify(13, steady.swarm.versions().values())
    late.held.refresh_slots = 2
    assert late.fetched(routed={2: 7}) == {SHARED, "slot-1", "slot-2"}, "the busiest, and of the oldest the first"
    assert late.fetched() == {"slot-0", "slot-3"}


def test_a_peer_that_loses_a_partition_goes_back_to_the_winners_slots(world):
    """The losing side has had more rounds; what it made of the slot does not fit the model that goes on."""
    loser = Member(world, 0, 12, "active")
    winners = [Member(world, index, 10, "active") for index in (1, 2, 3)]
    for winner in winners:
        winner.swarm.publish(8, {"slot-0": torch.full((3,), 8.0)})
    world.certify(10, winners[0].swarm.versions().values(), voters=[peer_id(index) for index in (1, 2, 3)])
    loser.held.resume([0])
    assert loser.catch_up() == (10, 10.0) and loser.swarm.versions()["slot-0"].round == 8
    assert torch.equal(loser.anchors.weights("slot-0"), torch.full((3,), 8.0))


def test_a_peer_that_adopts_a_slot_takes_its_certified_version_not_a_later_one(world):
    members = [Member(world, index, 10, "active") for index in range(2)]
    for member, round in zip(members, (9, 12), strict=True):
        member.swarm.delete(VectorName("slot-0"))
        member.swarm.publish(round, {"slot-0": torch.full((3,), float(round))})
    certified = members[0].swarm.versions().values()
    world.certify(10, certified, voters=[peer_id(0), peer_id(1), peer_id(5)])
    heir = Member(world, 5, 10, "active")
    heir.swarm.publish(11, {"slot-0": torch.full((3,), 11.0)})
    heir.held.slots = (1,)
    heir.anchors.set(VectorName("slot-1"), PagedVector.of(torch.zeros(3)))
    heir.held.hold([0])
    assert "slot-0" in heir.fetched() and torch.equal(heir.held.load(VectorName("slot-0")), torch.full((3,), 9.0))


def test_a_peer_that_takes_few_slots_takes_those_first_that_are_far_from_the_model_either_way(world):
    holder = Member(world, 0, 10, "active")
    holder.swarm.publish(10, {f"slot-{slot}": torch.zeros(3) for slot in range(3)})
    world.certify(10, holder.swarm.versions().values())
    loser = Member(world, 1, 10, "active")
    loser.swarm.publish(30, {"slot-2": torch.ones(3)})
    loser.swarm.publish(9, {"slot-1": torch.ones(3)})
    loser.held.refresh_slots = 1
    assert loser.fetched(routed={}) & {"slot-1", "slot-2"} == {"slot-2"}


@pytest.fixture
def refusing(world):
    """A peer that has refused the certified version of slot-0."""
    heir, liar = Member(world, 1, 13, "active"), Member(world, 0, 13, "active")
    for swarm in (heir.swarm, liar.swarm):
        swarm.publish(14, {SHARED: torch.full((5,), 14.0)})
    liar.swarm.publish(14, {"slot-0": torch.full((3,), 666.0)})
    world.certify(14, liar.swarm.versions().values(), voters=[peer_id(0), peer_id(1)])
    assert pull_offered(heir.swarm, ["slot-0"], [peer_id(0)]) == {}
    heir.swarm.refuse("slot-0", {})
    return heir


def test_a_peer_that_adopts_a_slot_does_not_take_the_version_that_it_has_refused(refusing):
    refusing.held.slots = (1,)
    refusing.anchors.set(VectorName("slot-1"), PagedVector.of(torch.zeros(3)))
    refusing.held.hold([0])
    assert "slot-0" in refusing.fetched()
    assert torch.equal(refusing.held.load(VectorName("slot-0")), torch.full((3,), 13.0))
    assert refusing.swarm.versions()["slot-0"].round == 13
    assert refusing.held.starts() == {"slot-0": (13, refusing.swarm.versions()["slot-0"].digest)}, "and says so"


def test_a_peer_that_catches_up_does_not_take_the_version_that_it_has_refused(refusing):
    assert "slot-0" not in refusing.fetched() and refusing.swarm.versions()["slot-0"].round == 13


def test_a_peer_that_catches_up_asks_none_that_the_last_roster_left_out(world):
    """A banned peer goes on serving."""
    behind, honest, liar = (Member(world, index, 13, "active") for index in range(3))
    honest.swarm.publish(14, {SHARED: torch.full((5,), 14.0)})
    liar.swarm.publish(14, {SHARED: torch.full((5,), 14.0), "slot-0": torch.full((3,), 666.0)})
    world.certify(14, liar.swarm.versions().values(), voters=[peer_id(index) for index in range(3)])
    behind.held.distrusted = frozenset({peer_id(2)})
    assert behind.catch_up() == (14, 14.0) and behind.swarm.versions()["slot-0"].round == 13


def test_only_slots_that_the_certificate_has_changed_are_fetched(world):
    """Their makers have returned to the version before."""
    mine, maker = Member(world, 0, 12, "active"), Member(world, 1, 13, "active")
    last = world.certify(12, mine.swarm.versions().values())
    world.certify(13)
    assert not mine.fetched(Roster([entry(1, (0,), last)], last), {})
    assert mine.held.makers == {} and maker.swarm.versions()["slot-0"].round == 13


def test_slots_of_a_peer_that_is_left_out_are_orphans_and_no_peer_asks_it(world):
    peers = [Member(world, index, 3, "active") for index in range(3)]
    for peer, slots in zip(peers, ((), (0, 2), (1, 3)), strict=True):
        peer.swarm.publish(3, {f"slot-{slot}": torch.full((3,), 3.0) for slot in range(4)})
        peer.held.resume(slots)
        peer.held.announce("active")
    mine, left_out = peers[0], peers[2]
    mine.held.distrusted = frozenset({left_out.swarm.peer_id, mine.swarm.peer_id})
    assert mine.held.others() == [peers[1].swarm.peer_id]
    mine.held.rebalance()
    assert mine.held.slots == (1, 3)


def test_no_peer_goes_on_from_another_version_of_a_slot_than_the_certified_one():
    """Its holder has died; the peer that took its place had not got what it made last."""
    world = World()
    members = [Member(world, index, 13, "active", max_slots=int(index == 0)) for index in range(3)]
    world.certify(13, members[1].swarm.versions().values(), voters=[peer_id(index) for index in range(3)])
    heir = members[0]
    heir.swarm.publish(9, {"slot-0": torch.full((3,), 9.0)})
    heir.held.resume([0])
    heir.anchors.set(VectorName("slot-0"), heir.swarm.mapped("slot-0"))
    loops = [member.round() for member in members]

    for round, version in ((14, (13, 13.0)), (15, (15, 14.0))):
        world.run([lambda loop=loop: loop._one_round(trained_by(loop._sync)) for loop in loops])
        assert {loop._sync.round for loop in loops} == {round}
        assert {(m.swarm.versions()["slot-0"].round, m.swarm.load("slot-0")[0].item()) for m in members} == {version}


def trained_by(sync: Synchroniser) -> Trained:
    """Return what adds one to each weight."""
    local = {name: sync.anchors.weights(name) + 1 for name in sync.anchors.names}
    deltas = {name: sync.anchors.contribution(name, local[name], None, sync.round + 1) for name in local}
    return Trained(deltas, tokens=100, tokens_per_second=100.0, seconds=1.0)
