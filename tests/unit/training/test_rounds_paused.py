"""Whole rounds of real trainers in virtual time, while the owner of one peer pauses it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from virtual import VirtualPeer, World, make_peer, run_peers, tiny_run

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.config.controls import Intent
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import SHARED, VectorName

TOTAL = 9
TIMES = {"total": TOTAL, "min_peers": 3, "lease_seconds": 30.0, "heartbeat_seconds": 5.0, "exchange_seconds": 20}
BY_STEPS = {"mode": "steps", "steps": 3, "max_seconds": 60}
BY_TOKENS = {"mode": "tokens", "tokens": 1000, "min_seconds": 0.5, "max_seconds": 3.0}
STEP_SECONDS = 0.256


class Owner:
    """Controls that pause a peer while a condition holds.

    Attributes:
        paused_steps: Steps made while it was paused.
    """

    def __init__(self, peer: VirtualPeer, is_paused: Callable[[], bool], ends: Callable[[], bool]) -> None:
        self._peer, self._is_paused, self._ends = peer, is_paused, ends
        self._steps = -1
        self.paused_steps = 0

    def intent(self, step_seconds: float, rest_seconds: float) -> Intent:
        is_paused = self._is_paused()
        if is_paused and self._steps >= 0:
            self.paused_steps += self._peer.trainer.steps - self._steps
        self._steps = self._peer.trainer.steps if is_paused else -1
        return Intent(trains=not is_paused, ends=self._ends())


def live(
    run: RunConfig,
    is_paused: Callable[[list[VirtualPeer]], bool],
    ends: Callable[[list[VirtualPeer]], bool] | None = None,
) -> tuple[list[VirtualPeer], Owner]:
    """Run three peers, the last one by its owner's word."""
    world = World()
    peers = [make_peer(run, 2, world) for _ in range(3)]
    owner = Owner(peers[2], lambda: is_paused(peers), lambda: ends is not None and ends(peers))
    peers[2].loop._wanted = owner.intent
    run_peers(peers)
    return peers, owner


def check_others(peers: list[VirtualPeer]) -> None:
    """Check that the others have committed each round, whole and alike."""
    for reports in zip(peers[0].reports, peers[1].reports, strict=True):
        assert len({report.shared_digest for report in reports}) == 1
        assert all(report.tokens for report in reports)
    assert [report.round for report in peers[0].reports] == list(range(1, TOTAL + 1))


# Full: rounds of fixed steps, where the pause is not in the round's length; the next test pauses in those.
@pytest.mark.parametrize("times", [pytest.param(BY_STEPS, marks=pytest.mark.full), BY_TOKENS], ids=["steps", "tokens"])
def test_a_paused_peer_hands_its_slots_over_votes_and_trains_again_after_a_round(times):
    run = tiny_run(round=RoundConfig(**{**TIMES, **times}))
    peers, owner = live(run, lambda peers: 3 <= peers[2].sync.round < 6)
    check_others(peers)
    mine = {report.round: report for report in peers[2].reports}
    assert set(mine) == set(range(1, TOTAL + 1)) and not owner.paused_steps, "it meets the others in every round"
    assert [number for number, report in mine.items() if not report.tokens] == [4, 5, 6, 7]
    assert [number for number, report in mine.items() if not report.slots] == [4, 5, 6]
    last = mine[TOTAL]
    assert last.tokens and last.slots, "it has slots again"
    for number in (5, 6):
        held = {
            slot for peer in peers[:2] for report in peer.reports if report.round == number for slot in report.slots
        }
        assert held == set(range(4)), "others train what it has given up"
    assert {report.num_members for report in peers[0].reports} == {3}
    assert not any(report.dropped for report in peers[0].reports + peers[1].reports)
    waits = [report.matchmaking_seconds for report in peers[0].reports if report.round in (4, 5, 6)]
    others = [report.matchmaking_seconds for report in peers[0].reports if report.round in (2, 3, 8, 9)]
    assert max(waits) <= max(others) + 2 * STEP_SECONDS, (waits, others)
    check_versions(peers)


def check_versions(peers: list[VirtualPeer]) -> None:
    """Check that no version was lost or forked, and that all models are alike."""
    for slot in range(4):
        name = VectorName.of_slot(slot)
        digests = {digest(peer.anchors.weights(name)) for peer in peers if slot in peer.slots}
        assert len(digests) == 1
        models = [peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(slot)) for peer in peers]
        assert all(torch.equal(models[0], model) for model in models)
    vectors = [peer.trainer.vector(SHARED) for peer in peers]
    assert all(torch.equal(vectors[0], vector) for vector in vectors)


def test_a_peer_that_pauses_in_the_middle_of_a_round_brings_what_it_has():
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_STEPS, "steps": 6}))
    peers, owner = live(run, lambda peers: peers[2].sync.round == 3 and peers[2].trainer.steps % 6 == 2)
    check_others(peers)
    tokens = {report.round: report.tokens for report in peers[2].reports}
    assert tokens[4] == tokens[3] // 3 and not owner.paused_steps


def test_a_peer_that_starts_paused_votes_and_trains_once_it_is_resumed():
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_STEPS}))
    peers, owner = live(run, lambda peers: peers[2].sync.round < 3)
    check_others(peers)
    assert [report.round for report in peers[2].reports if report.tokens] == list(range(5, TOTAL + 1))
    assert {report.num_members for report in peers[0].reports} == {3} and not owner.paused_steps
    check_versions(peers)


def test_a_peer_that_finishes_ends_after_its_round_and_the_others_go_on():
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_STEPS}))
    peers, _ = live(run, lambda peers: False, ends=lambda peers: peers[2].sync.round >= 4)
    check_others(peers)
    assert [report.round for report in peers[2].reports] == [1, 2, 3, 4] and peers[2].loop.is_ended


def test_peers_that_are_all_paused_end_no_round():
    """Rounds that no peer trains are not committed, so a pause of all costs the run none."""
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_TOKENS, "total": 3, "min_peers": 1, "lease_seconds": 600.0}))
    world = World()
    peers = [make_peer(run, 4, world) for _ in range(2)]
    for peer in peers:
        is_paused = lambda: peers[0].sync.round >= 1 and 3.0 < world.now() - began < 20.0  # noqa: E731
        peer.loop._wanted = Owner(peer, is_paused, lambda: False).intent
    began = world.now()
    run_peers(peers)
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert any(report.tokens for report in reports)
    assert [report.round for report in peers[0].reports] == [1, 2, 3]


class LateOnce(VirtualSwarm):
    """A peer that does not find the others once, in a round in which it has trained nothing."""

    has_missed = False

    def agree(self, contribution: Contribution, *how: Any, **more: Any) -> Body | None:
        if self.has_missed or contribution.member.tokens or contribution.member.round != 3:
            return super().agree(contribution, *how, **more)
        self.has_missed = True
        self.wait(1.5 * self._rounds.matchmaking_seconds)
        return None


def test_a_paused_voter_that_misses_a_meeting_lets_the_others_redo_the_round():
    """It went on without a word, and the other waited for its vote until the run shrank."""
    times = {**TIMES, **BY_TOKENS, "min_peers": 2, "lease_seconds": 600.0, "shrink_seconds": 3000.0}
    run, world = tiny_run(round=RoundConfig(**times)), World()
    swarms = [world.swarm(0), world.swarm(1, LateOnce)]
    peers = [VirtualPeer(run, world, swarm, index=i, max_slots=4) for i, swarm in enumerate(swarms)]
    peers[1].loop._wanted = Owner(peers[1], lambda: 2 <= peers[1].sync.round < 6, lambda: False).intent
    began = world.now()
    run_peers(peers)
    assert swarms[1].has_missed and world.now() - began < run.round.shrink_seconds
    assert [report.round for report in peers[0].reports] == list(range(1, TOTAL + 1))
