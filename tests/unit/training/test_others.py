"""Where a newcomer, or one that has fallen behind, finds its place is not for one other peer to say."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from virtual import peer_id, tiny_run

from spes_p2p.codecs.vectors import Layout
from spes_p2p.config import RoundConfig
from spes_p2p.sim.swarm import MemoryHub, MemorySwarm
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import SHARED
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.slots import HeldSlots
from spes_p2p.training.synchroniser import Synchroniser

FAR = 10**5


class Peer:
    """A peer without a model, in round 6 unless it says otherwise.

    Args:
        hub: Where it meets the others.
        index: Its number.
        round: Of its versions.
        ends_at: What it says of its round's end; None says nothing.
        swarm: How it deals with the others.
    """

    def __init__(
        self,
        hub: MemoryHub,
        index: int,
        round: int = 6,
        ends_at: float | None = None,
        swarm: type[MemorySwarm] = MemorySwarm,
    ) -> None:
        rounds = RoundConfig(mode="tokens", tokens=2000, min_seconds=1, max_seconds=20, total=2 * FAR, min_peers=2)
        run = tiny_run(round=rounds)
        numels = {SHARED: 5, "slot": 3}
        self.swarm, anchors = swarm(hub, peer_id(index)), Anchors(run, numels)
        self.held = HeldSlots(self.swarm, run, run_id="run", anchors=anchors, max_slots=2, clock=self.swarm.now)
        self.sync = Synchroniser(
            self.swarm, run, held=self.held, anchors=anchors, layout=Layout({"w": torch.Size([3])})
        )
        self.sync.round = round
        self.swarm.publish(round, {SHARED: torch.full((5,), float(round))})
        self.held.has_committed = ends_at is not None
        self.held.announce("active")
        if ends_at is not None:
            self.swarm.announce(Progress(peer_id=self.swarm.peer_id, round=round, ends_at=ends_at))


def newcomer_beside_a_liar(round: int = 6, swarm: type[MemorySwarm] = MemorySwarm) -> tuple[Peer, float]:
    """Return a newcomer among three whose round ends in ten seconds, and one that says to be far ahead."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    ends_at = hub.clock.now() + 10.0
    for index in range(3):
        Peer(hub, index, ends_at=ends_at)
    Peer(hub, 3, round=FAR, ends_at=1e10)
    liar = Peer(hub, 4, ends_at=1e10)
    assert liar.held.voters() == sorted(peer_id(index) for index in range(5))
    return Peer(hub, 9, round=round, swarm=swarm), ends_at


@pytest.mark.parametrize("is_late", [False, True])
def test_one_that_says_to_be_far_ahead_leads_nobody_there(is_late):
    """Nor does one that says of this round that it lasts for ever."""
    newcomer, ends_at = newcomer_beside_a_liar(5 if is_late else 6)
    vectors, found = newcomer.sync._rejoin()
    assert (newcomer.sync.round, found) == (6, ends_at)
    assert bool(vectors) == is_late
    assert newcomer.sync._others.are_ahead(5) and not newcomer.sync._others.are_ahead(6)


@pytest.mark.parametrize("is_expected", [True, False])
def test_who_is_expected_makes_a_step_for_a_round_that_has_just_ended(is_expected):
    """The others wait for it; they do not for one whose claim came after the end."""
    hub = MemoryHub("run", matchmaking_seconds=1.0)
    ends_at = hub.clock.now() + 10.0
    for index in range(3):
        Peer(hub, index, ends_at=ends_at)
    newcomer = Peer(hub, 9)
    newcomer.sync._expected_since = ends_at + (-1.0 if is_expected else 0.05)
    patience = newcomer.sync._run.round.matchmaking_seconds
    hub.clock.advance(10.0 + 0.1 * patience)
    vectors, found = newcomer.sync._rejoin()
    assert not vectors and found == (ends_at if is_expected else None)
    if is_expected:
        hub.clock.advance(0.5 * patience)
        assert newcomer.sync._rejoin()[1] is None, "they have gone on without it by now"


def test_one_that_has_gone_further_than_all_others_is_not_followed_alone():
    late, _ = newcomer_beside_a_liar(5)
    late.held.catch_up(late.held.others(), min_round=7)
    assert late.swarm.versions()[SHARED].round == 6


class Unreachable(MemorySwarm):
    """A swarm whose other peers have vanished after they have told what they have."""

    def pull(self, wanted: Mapping[str, object], **_: object) -> dict[str, str]:  # type: ignore[override]
        return dict.fromkeys(wanted, "nobody answers")


def test_who_cannot_fetch_the_others_state_goes_on_with_its_own():
    """They may be gone for good, and it may be the last that has the model."""
    late, _ = newcomer_beside_a_liar(5, Unreachable)
    assert late.sync._catch_up() == {} and late.sync.round == 5
