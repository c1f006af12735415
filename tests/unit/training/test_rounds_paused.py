"""Whole rounds of real trainers in virtual time, while the owner of one peer pauses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from virtual import VirtualPeer, peer_id, tiny_run

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import VectorName
from spes_p2p.training.controls import Intent

TOTAL = 9
TIMES = {"total": TOTAL, "min_peers": 3, "lease_seconds": 30.0, "heartbeat_seconds": 5.0, "exchange_seconds": 20}
BY_STEPS = {"mode": "steps", "steps": 3, "max_seconds": 60}
BY_TOKENS = {"mode": "tokens", "tokens": 1000, "min_seconds": 0.5, "max_seconds": 3.0}
STEP_SECONDS = 0.256


class Owner:
    """Controls that hold a peer while a condition holds, in virtual time.

    Attributes:
        places: What the peer has told of its slots.
        held_steps: Steps made while it was held.
    """

    def __init__(self, peer: VirtualPeer, is_held: Callable[[], bool], ends: Callable[[], bool]) -> None:
        self._peer, self._is_held, self._ends = peer, is_held, ends
        self._held_since: float | None = None
        self._steps = 0
        self.places: list[str] = []
        self.held_steps = 0

    def intent(self, step_seconds: float, wait_seconds: float) -> Intent:
        clock = self._peer.swarm.clock
        if not self._is_held():
            self._held_since = None
            return Intent(ends=self._ends())
        if self._held_since is None:
            self._held_since, self._steps = clock.now(), self._peer.trainer.steps
        self.held_steps += self._peer.trainer.steps - self._steps
        clock.advance(min(0.5, wait_seconds))
        return Intent(trains=False, ends=self._ends(), held_seconds=clock.now() - self._held_since)

    def tell(self, place: str) -> None:
        self.places.append(place)


def live(
    run: RunConfig,
    is_held: Callable[[list[VirtualPeer]], bool],
    ends: Callable[[list[VirtualPeer]], bool] | None = None,
) -> tuple[list[VirtualPeer], Owner]:
    """Run three peers, the last one by its owner's word."""
    hub = MemoryHub("run", matchmaking_seconds=10.0)
    peers = [VirtualPeer(run, MemorySwarm(hub, peer_id(i)), index=i, max_slots=2) for i in range(3)]
    owner = Owner(peers[2], lambda: is_held(peers), lambda: ends is not None and ends(peers))
    peers[2].loop._controls = owner
    initial = peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    return peers, owner


def check_others(peers: list[VirtualPeer]) -> None:
    """Check that the others have committed each round, whole and alike."""
    for reports in zip(peers[0].reports, peers[1].reports, strict=True):
        assert len({report.shared_digest for report in reports}) == 1
        assert all(report.tokens for report in reports)
    assert [report.round for report in peers[0].reports] == list(range(1, TOTAL + 1))


# Full: rounds of fixed steps, where the pause is not in the round's length; the next test pauses in those.
@pytest.mark.parametrize("times", [pytest.param(BY_STEPS, marks=pytest.mark.full), BY_TOKENS], ids=["steps", "tokens"])
def test_a_pause_within_the_lease_costs_the_others_no_round_and_no_time(times: dict) -> None:
    run = tiny_run(round=RoundConfig(**{**TIMES, **times, "lease_seconds": 600.0}))
    peers, owner = live(run, lambda peers: 3 <= peers[2].sync.round < 6)
    check_others(peers)
    mine = {report.round: report for report in peers[2].reports}
    assert [number for number, report in mine.items() if not report.tokens] == [4, 5, 6]
    assert set(mine) == set(range(1, TOTAL + 1)) and not owner.places and not owner.held_steps
    assert {report.num_members for report in peers[0].reports} == {3}
    assert not any(report.dropped for report in peers[0].reports + peers[1].reports)
    waits = [report.matchmaking_seconds for report in peers[0].reports if report.round in (4, 5, 6)]
    others = [report.matchmaking_seconds for report in peers[0].reports if report.round in (2, 3, 8, 9)]
    assert max(waits) <= max(others) + 2 * STEP_SECONDS, (waits, others)


def test_a_peer_that_pauses_in_the_middle_of_a_round_brings_what_it_has() -> None:
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_STEPS, "steps": 6}))
    peers, owner = live(run, lambda peers: peers[2].sync.round == 3 and peers[2].trainer.steps % 6 == 2)
    check_others(peers)
    tokens = {report.round: report.tokens for report in peers[2].reports}
    assert tokens[4] == tokens[3] // 3 and not owner.held_steps


@pytest.mark.parametrize("times", [BY_STEPS, pytest.param(BY_TOKENS, marks=pytest.mark.full)], ids=["steps", "tokens"])
def test_after_a_lease_its_slots_go_to_the_others_and_it_counts_again_at_once(times: dict) -> None:
    leases = {"lease_seconds": 1.0, "heartbeat_seconds": 0.3}
    run = tiny_run(round=RoundConfig(**{**TIMES, **times, **leases, "steps": 8}))
    peers, owner = live(run, lambda peers: peers[2].sync.round >= 2 and peers[0].sync.round < 6)
    check_others(peers)
    assert owner.places == ["its slots are handed over; it serves what it has"] and not owner.held_steps
    alone = [report.round for report in peers[0].reports if report.num_members == 2]
    assert alone and alone == list(range(alone[0], alone[-1] + 1)), "once, and for some rounds"
    trained = {report.round for report in peers[2].reports if report.tokens}
    assert min(number for number in trained if number > 6) <= 8, "two rounds after it was resumed"
    met = [report.round for report in peers[0].reports if report.num_members == 3]
    assert [report.round for report in peers[2].reports] == met, "a round that it has not taken part in is not its own"
    assert peers[2].slots, "it has slots again"
    for slot in range(4):
        holders = [peer for peer in peers if slot in peer.sync.held.slots or slot in peer.slots]
        digests = {digest(peer.anchors.weights(VectorName.of_slot(slot))) for peer in holders}
        assert len(digests) == 1, "no version was lost or forked"
    vectors = [peer.trainer.all_vectors() for peer in peers]
    assert all(torch.equal(vectors[0][name], other[name]) for other in vectors for name in other if name in vectors[0])


def test_a_peer_that_finishes_ends_after_its_round_and_the_others_go_on() -> None:
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_STEPS}))
    peers, _ = live(run, lambda peers: False, ends=lambda peers: peers[2].sync.round >= 4)
    check_others(peers)
    assert [report.round for report in peers[2].reports] == [1, 2, 3, 4] and peers[2].loop.is_ended


def test_peers_that_are_all_held_end_no_round() -> None:
    """Rounds that no peer trains are not committed, so a pause of all costs the run none."""
    run = tiny_run(round=RoundConfig(**{**TIMES, **BY_TOKENS, "total": 3, "min_peers": 1, "lease_seconds": 600.0}))
    hub = MemoryHub("run", matchmaking_seconds=10.0)
    peers = [VirtualPeer(run, MemorySwarm(hub, peer_id(i)), index=i, max_slots=4) for i in range(2)]
    for peer in peers:
        is_held = lambda: peers[0].sync.round >= 1 and 3.0 < hub.clock.now() - began < 20.0  # noqa: E731
        peer.loop._controls = Owner(peer, is_held, lambda: False)
    began, initial = hub.clock.now(), peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert any(report.tokens for report in reports)
    assert [report.round for report in peers[0].reports] == [1, 2, 3]


class LateOnce(MemorySwarm):
    """A peer that does not find the others once, in a round in which it has trained nothing."""

    has_missed = False

    def average(self, contribution: Contribution, **rest: Any) -> RoundResult:
        if self.has_missed or contribution.member.tokens or contribution.member.round != 3:
            return super().average(contribution, **rest)
        self.has_missed = True
        self._open = self.last(), self._hub.attempt
        self.clock.wait(1.5 * self._hub.matchmaking_seconds)
        return RoundResult()


def test_a_paused_voter_that_misses_a_meeting_lets_the_others_redo_the_round() -> None:
    """It went on without a word, and the other waited for its vote until the run shrank."""
    times = {**TIMES, **BY_TOKENS, "min_peers": 2, "lease_seconds": 600.0, "shrink_seconds": 3000.0}
    run, hub = tiny_run(round=RoundConfig(**times)), MemoryHub("run", matchmaking_seconds=10.0)
    swarms = [MemorySwarm(hub, peer_id(0)), LateOnce(hub, peer_id(1))]
    peers = [VirtualPeer(run, swarm, index=i, max_slots=4) for i, swarm in enumerate(swarms)]
    peers[1].loop._controls = Owner(peers[1], lambda: 2 <= peers[1].sync.round < 6, lambda: False)
    began, initial = hub.clock.now(), peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    assert swarms[1].has_missed and hub.clock.now() - began < run.round.shrink_seconds
    assert [report.round for report in peers[0].reports] == list(range(1, TOTAL + 1))
