"""Certificates say where a newcomer, or a peer that has fallen behind, finds its place; no other peer's word does."""

from collections.abc import Mapping

import pytest
import torch
from virtual import World, peer_id, tiny_run

from spes_p2p.codecs.vectors import Layout
from spes_p2p.config import RoundConfig
from spes_p2p.sim.loop import EPOCH_SECONDS
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training import opening
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.synchroniser import Synchroniser

FAR = 10**5


class Peer:
    """A peer without a model, in round 6 unless it says otherwise.

    Args:
        world: Where it meets the others.
        index: Its number.
        round: Of its versions.
        ends_at: What it says of its round's end; None says nothing.
        swarm: How it deals with the others.
    """

    def __init__(
        self,
        world: World,
        index: int,
        round: int = 6,
        ends_at: float | None = None,
        swarm: type[VirtualSwarm] = VirtualSwarm,
    ) -> None:
        rounds = RoundConfig(mode="tokens", tokens=2000, min_seconds=1, max_seconds=20, total=2 * FAR, min_peers=2)
        run = tiny_run(round=rounds)
        numels = {SHARED: 5, "slot": 3}
        self.swarm, anchors = world.swarm(index, swarm), Anchors(run, numels)
        self.world = world
        world.enter(self.swarm, run, anchors.vectors())
        self.held = HeldSlots(self.swarm, run, run_id="run", anchors=anchors, max_slots=2, clock=self.swarm.now)
        self.sync = Synchroniser(
            self.swarm, run, held=self.held, anchors=anchors, layout=Layout({"w": torch.Size([3])})
        )
        self.sync.round = round
        self.swarm.publish(round, {SHARED: torch.full((5,), float(round))})
        self.held.announce("active")
        if ends_at is not None:
            self.swarm.announce(Progress(peer_id=self.swarm.peer_id, round=round, ends_at=ends_at))


def newcomer_beside_liars(
    round: int = 6, swarm: type[VirtualSwarm] = VirtualSwarm, **certified: float
) -> tuple[Peer, float]:
    """Return a newcomer among three whose round ends in ten seconds, and some that say to be far ahead, or far on."""
    world = World()
    ends_at = world.now() + 10.0
    honest = [Peer(world, index, ends_at=ends_at) for index in range(3)]
    for index in (3, 4, 5, 6):
        Peer(world, index, round=6 if index == 4 else FAR, ends_at=1e10)
    voters = [peer_id(index) for index in range(5)]
    world.certify(6, honest[0].swarm.versions().values(), voters=voters, **certified)
    return Peer(world, 9, round=round, swarm=swarm), ends_at


@pytest.mark.parametrize("is_late", [False, True])
def test_peers_that_say_to_be_far_ahead_lead_no_other_there(is_late):
    """Nor does a voter that says of this round that it lasts for ever."""
    newcomer, ends_at = newcomer_beside_liars(5 if is_late else 6)
    found = opening.rejoin(newcomer.sync)
    assert (newcomer.sync.round, found) == (6, ends_at) and bool(newcomer.held.to_load()) == is_late


def test_a_round_ends_when_its_certificate_says_not_when_the_others_do():
    newcomer, ends_at = newcomer_beside_liars(ends_at=EPOCH_SECONDS + 8.0)
    assert opening.rejoin(newcomer.sync) == EPOCH_SECONDS + 8.0 < ends_at and not newcomer.held.to_load()


@pytest.mark.parametrize("are_training", [True, False])
def test_a_peer_measures_its_speed_unless_others_have_said_when_their_round_ends(are_training):
    """After a restart of all peers none has, and a round without any known speed would last `max_seconds`."""
    world = World()
    others = [Peer(world, index, ends_at=world.now() + 10.0) for index in range(3)]
    world.certify(6, others[0].swarm.versions().values(), voters=[peer_id(index) for index in range(3)])
    newcomer = Peer(world, 9)
    world.wait(5.0 if are_training else 15.0)
    assert newcomer.sync.follows_others == are_training


def test_peers_without_a_vote_do_not_say_when_a_round_ends():
    """However many of them there are."""
    newcomer, ends_at = newcomer_beside_liars()
    for index in range(20, 30):
        Peer(newcomer.world, index, ends_at=ends_at + 7.0)
    assert newcomer.sync.announced_end(6) == ends_at


@pytest.mark.parametrize("is_expected", [True, False])
def test_a_peer_that_is_expected_makes_a_step_for_a_round_that_has_just_ended(is_expected):
    """The others wait for it; they do not for one whose claim came after the end."""
    world = World()
    ends_at = world.now() + 10.0
    for index in range(3):
        Peer(world, index, ends_at=ends_at)
    newcomer = Peer(world, 9)
    newcomer.sync.expected_since = ends_at + (-1.0 if is_expected else 0.05)
    patience = newcomer.sync.run.round.matchmaking_seconds
    world.wait(10.0 + 0.1 * patience)
    found = opening.rejoin(newcomer.sync)
    assert not newcomer.held.to_load() and found == (ends_at if is_expected else None)
    if is_expected:
        world.wait(0.5 * patience)
        assert opening.rejoin(newcomer.sync) is None, "they have gone on without it by now"


def test_versions_of_a_later_round_than_the_certified_one_are_not_taken():
    late, _ = newcomer_beside_liars(5)
    late.held.fetch()
    assert late.swarm.versions()[SHARED].round == 6


class Unreachable(VirtualSwarm):
    """A swarm whose other peers have vanished after they have told what they have."""

    def pull(self, wanted: Mapping[str, object], *_: object, **__: object) -> dict[str, str]:  # type: ignore[override]
        return dict.fromkeys(wanted, "no peer answers")


def test_a_peer_that_cannot_fetch_the_others_state_goes_on_with_its_own():
    """They may be gone for good, and it may be the last that has the model."""
    late, _ = newcomer_beside_liars(5, Unreachable)
    opening.try_to_fetch(late.sync)
    assert not late.held.to_load() and late.sync.round == 5
