"""Among five a liar moves the mean little, and is in no group two rounds later; the simulator has the same bits."""

from functools import partial

import peer_server
import pytest
import torch
from fault_cluster import proposes_soon
from peer_server import ROUNDS
from real_peers import NUMELS, PeerProcess, average, close_all, contribution, identities, start_swarm
from virtual import World, tiny_run

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.averaging.partition import weighted_mean

# Full: a verdict on a liar needs quick peers; on a loaded machine an honest one looks silent.
pytestmark = [pytest.mark.timeout(900), pytest.mark.full]

FACTOR = -100.0
MEETING_SECONDS, LIED_SECONDS = 30.0, 10.0
PATIENT = ROUNDS.model_copy(update={"averaging_seconds": 60.0})
"""No member is missing, or taken for silent, however busy the machine."""


@pytest.fixture
def five(tmp_path):
    """The last is a rogue; all of them vote."""
    voters = identities(tmp_path, ("peer0", "peer1", "peer2", "peer3", "rogue"))
    peers = start_swarm(tmp_path, 4, rounds=PATIENT, voters=voters)
    rogue = PeerProcess(tmp_path / "rogue", peers[0].addresses, is_rogue=True, rounds=PATIENT).wait_until_ready()
    yield [*peers, rogue]
    close_all([*peers, rogue])


def contributions(peers, seed):
    """Deltas that have as much in common as those of training do; others each time."""
    generator = torch.Generator().manual_seed(seed + peers[0].call("last").round)
    signal = torch.randn(NUMELS["shared"], generator=generator)
    items = [contribution(p.peer_id, generator, tokens=100 + n) for n, p in enumerate(peers)]
    for item in items:
        item.deltas["shared"].mul_(0.7).add_(signal)
    return items


def until_others_propose(five, seed):
    """Average honestly until the rogue does not propose in the next round's first two attempts."""
    while proposes_soon(five[-1]):
        average(five, contributions(five, seed), expected=5, meeting_seconds=MEETING_SECONDS)


def honest_mean(items):
    ordered = sorted(items[:-1], key=lambda item: item.member.peer_id)
    return weighted_mean([item.deltas["shared"] for item in ordered], [float(item.member.tokens) for item in ordered])


def test_whoever_sends_a_hundred_times_too_much_is_out_within_two_rounds(five, seed):
    world = World(start=five[0].call("last"))
    virtual = [world.swarm(peer.peer_id) for peer in five]
    run = tiny_run(round=PATIENT)
    for swarm in virtual:
        segments = {kind: (Segment(numel, "fp32"),) for kind, numel in NUMELS.items()}
        world.enter(swarm, run, Vectors(NUMELS, segments))
    for round in (1, 2, 3):
        items = contributions(five, seed)
        items[-1].deltas["shared"].mul_(FACTOR)
        real = average(five, items, expected=5, meeting_seconds=MEETING_SECONDS)
        simulated = [None] * 5

        def run(place, items=items, simulated=simulated):
            item = items[place]
            ids = [peer.peer_id for peer in five]
            simulated[place] = peer_server.average(
                virtual[place], item.member, item.deltas, expected=ids, closes_from=0.0
            )

        world.run([partial(run, place) for place in range(5)])
        mean, true = real[0].committed["shared"], honest_mean(items)
        for result, twin in zip(real, simulated, strict=True):
            assert {n: digest(m) for n, m in result.committed.items()} == {
                n: digest(m) for n, m in twin.committed.items()
            }
        assert len({digest(result.committed["shared"]) for result in real[:4]}) == 1
        if round < 3:
            assert 0 < (mean - true).norm() < 1.5 * true.norm(), "the plain mean is 20 times as long as the honest one"
        else:
            assert torch.equal(mean, true)
            assert real[-1].is_behind and not real[-1].committed


@pytest.mark.guard
def test_what_cannot_be_read_costs_nobody_else_the_round_and_its_sender_the_next(five, seed):
    rogue = five[-1]
    until_others_propose(five, seed)
    rogue.call("misbehave", "sends NaN")
    items = contributions(five, seed)
    results = average(five, items, expected=5, meeting_seconds=MEETING_SECONDS)
    rogue.call("misbehave", "")
    assert {digest(result.committed["shared"]) for result in results} == {digest(results[0].committed["shared"])}
    assert max(len(peer.call("notes")) for peer in five) == 1, "no second attempt was needed"
    items = contributions(five, seed)
    results = average(five, items, expected=5, meeting_seconds=MEETING_SECONDS)
    assert torch.equal(results[0].committed["shared"], honest_mean(items)) and results[-1].is_behind


def test_a_reducer_whose_means_are_wrong_is_redone_without_and_then_left_out(five, seed):
    rogue, *others = five[-1], *five[:4]
    for _ in range(2):
        until_others_propose(five, seed)
        rogue.call("misbehave", "means the opposite")
        items = contributions(five, seed)
        results = average(five, items, expected=5, meeting_seconds=MEETING_SECONDS)
        for peer, result in zip(others, results, strict=False):
            assert torch.equal(result.committed["shared"], honest_mean(items))
            assert len(peer.call("notes")) == 2
        rogue.call("misbehave", "")
    until_others_propose(five, seed)
    items = contributions(five, seed)
    results = average(five, items, expected=5, meeting_seconds=MEETING_SECONDS)
    assert torch.equal(results[0].committed["shared"], honest_mean(items)) and results[-1].is_behind
    assert len(others[0].call("notes")) == 1
