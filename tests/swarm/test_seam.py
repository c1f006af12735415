"""The seam: peers over p2pd and virtual ones commit the same bits, and both are the plain weighted mean."""

from functools import partial
from multiprocessing import connection

import peer_server
import pytest
import torch
from peer_server import ROUNDS
from real_peers import NUMELS, average, begin_average, close_all, contribution, plain_mean, start_swarm
from virtual import World, peer_id, tiny_run

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.averaging.encoding import Vectors

pytestmark = pytest.mark.timeout(480)

LATE_SECONDS = 12.0
"""An attempt at a round that too few make is over by then."""
OTHER = 0, "7" * 64
"""Round and digest of a version that no certificate names."""


@pytest.fixture
def four(party, rogue):
    return [*party, rogue]  # which behaves unless told otherwise


def virtual_swarms(peers, codec="fp32"):
    """The same peers, by their ids, in a world that goes on from the certificate that the real ones have come to."""
    world = World(start=peers[0].call("last"))
    swarms = [world.swarm(peer.identity.peer_id) for peer in peers]
    run = tiny_run(round=ROUNDS.model_copy(update={"matchmaking_seconds": 1.0}))
    for swarm in swarms:
        segments = {kind: (Segment(numel, codec),) for kind, numel in NUMELS.items()}
        world.enter(swarm, run, Vectors(NUMELS, segments))
    return world, swarms


def meet(world, swarms, contributions, *, expected, late=()):
    """Let the swarms make a round, those at the places `late` after the others have tried."""
    results = [None] * len(swarms)
    ids = [swarm.peer_id for swarm in swarms] + [peer_id(number) for number in range(expected - len(swarms))]

    def run(i):
        item = contributions[i]
        if i in late:
            swarms[i].wait(LATE_SECONDS)
        results[i] = peer_server.average(swarms[i], item.member, item.deltas, expected=ids, closes_from=0.0)

    world.run([partial(run, i) for i in range(len(swarms))])
    return results


def average_virtually(peers, contributions, *, expected):
    return meet(*virtual_swarms(peers), contributions, expected=expected)


def seen(result):
    """What a caller can tell of a result, but for times and the wording of reasons."""
    committed = {name: digest(mean) for name, mean in result.committed.items()}
    return {member.peer_id for member in result.roster}, committed, set(result.dropped), result.is_behind


def test_both_swarms_commit_the_same_bits_and_they_are_the_weighted_mean(four, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = [(0, 1, 3), (1, 2), (1, 3), (1, 4)]  # slot 1 has four holders, slot 3 two, the others one
    keeps = [(2,), (0,), (), (0, 3)]
    tokens = [1, 977, 123_456, 0]
    items = [
        contribution(peer.peer_id, generator, slots=held, tokens=count, replicates=kept)
        for peer, held, count, kept in zip(four, slots, tokens, keeps, strict=True)
    ]
    virtual = average_virtually(four, items, expected=4)
    real = average(four, items, expected=4)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    for item, result in zip(items, real, strict=True):
        assert {member.peer_id for member in result.roster} == {peer.peer_id for peer in four}
        expected = set(item.deltas) - {"slot-4"}  # whose only holder trained nothing
        expected |= {f"slot-{slot}" for slot in item.member.replicates}  # replicas get the same means, without weight
        assert set(result.committed) == expected
        for name in expected:
            torch.testing.assert_close(result.committed[name].double(), plain_mean(items, name), atol=1e-6, rtol=1e-6)
    for name in ("shared", "slot-1", "slot-3"):
        assert len({digest(result.committed[name]) for result in real if name in result.committed}) == 1


def test_a_member_of_another_branch_is_told_so_and_does_not_count(four, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four[:3]]
    branch = {"round": four[3].call("last").round, "previous": "6" * 64}
    astray = contribution(four[3].peer_id, generator, slots=(0,), tokens=10**6, **branch)
    virtual = average_virtually(four, [*items, astray], expected=4)
    real = average(four, [*items, astray], expected=4)
    # Where the member is the proposer, the others redo the round without it: the rosters differ, the results do not.
    assert [seen(result)[1:] for result in real] == [seen(result)[1:] for result in virtual]
    assert real[3].is_behind and not real[3].committed and set(real[3].dropped) == {"shared", "slot-0"}
    for result in real[:3]:
        assert not result.is_behind
        for name in ("shared", "slot-0"):
            torch.testing.assert_close(result.committed[name].double(), plain_mean(items, name), atol=1e-6, rtol=1e-6)


def test_a_slot_that_starts_from_another_version_does_not_count_where_others_have_the_certified_one(four, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four[:3]]
    astray = contribution(four[3].peer_id, generator, slots=(0, 1), starts={"slot-0": OTHER, "slot-1": OTHER})
    virtual = average_virtually(four, [*items, astray], expected=4)
    real = average(four, [*items, astray], expected=4)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    assert set(real[3].committed) == {"shared", "slot-1"}, "of slot 1 there is no other version"
    assert set(real[3].dropped) == {"slot-0"}
    torch.testing.assert_close(real[0].committed["slot-0"].double(), plain_mean(items, "slot-0"), atol=1e-6, rtol=1e-6)


def test_what_no_member_has_trained_is_dropped_by_both(four, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,), tokens=0) for peer in four]
    virtual = average_virtually(four, items, expected=4)
    for result in average(four, items, expected=4, meeting_seconds=1.0) + virtual:
        assert not result.committed and not result.is_behind and set(result.dropped) == {"shared", "slot-0"}
        assert all("no member trained" in reason for reason in result.dropped.values())


@pytest.mark.parametrize("expected", [3, 4])
def test_more_than_half_of_the_voters_commit_a_round(four, seed, expected):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four[:3]]
    world, swarms = virtual_swarms(four)
    virtual = meet(world, swarms[:3], items, expected=expected)
    real = average(four[:3], items, expected=expected, meeting_seconds=1.0)
    assert all(peer.call("notes")[0].roster for peer in four[:3]), "they met in the first attempt"
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    assert all(set(result.committed) == {"shared", "slot-0"} for result in real)


@pytest.mark.full  # it waits for twelve seconds; unit tests count confirmations with every commit
def test_half_of_the_voters_commit_nothing_until_the_others_come(four, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four]
    virtual = meet(*virtual_swarms(four), items, expected=4, late=(2, 3))
    begin_average(four[:2], items[:2], expected=4, meeting_seconds=1.0)
    assert not connection.wait([peer.pipe for peer in four[:2]], LATE_SECONDS), "two of four have ended the round"
    begin_average(four[2:], items[2:], expected=4, meeting_seconds=1.0)
    real = [peer.finish() for peer in four]
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    assert all(set(result.committed) == {"shared", "slot-0"} and len(result.roster) == 4 for result in real)


def test_a_refused_version_gives_way_to_the_one_before_it(four):
    _, (virtual,) = virtual_swarms(four[:1])
    bundles = [torch.full((NUMELS["slot"],), float(round)) for round in range(3)]
    for call in (four[0].call, lambda method, *args, **named: getattr(virtual, method)(*args, **named)):
        for round in (1, 2):
            call("publish", round, {"slot-7": bundles[round]})
        assert torch.equal(call("load", "slot-7", before=True), bundles[1])
        call("refuse", "slot-7", {})
        assert torch.equal(call("load", "slot-7"), bundles[1]) and call("versions")["slot-7"].round == 1
        call("publish", 2, {"slot-7": bundles[0]})
        assert torch.equal(call("load", "slot-7"), bundles[0])
        assert torch.equal(call("load", "slot-7", before=True), bundles[1])


@pytest.mark.parametrize("codec", ["int4"])
def test_with_few_bits_both_swarms_commit_the_same_bits_round_after_round(tmp_path, seed, codec):
    """What rounding leaves over, with senders and with reducers, is part of the next round on either side."""
    generator = torch.Generator().manual_seed(seed)
    peers = start_swarm(tmp_path, 3, codec)
    try:
        world, swarms = virtual_swarms(peers, codec)
        for uplinks in [(None, None, None), (100.0, 10.0, None), (None, None, None)]:
            items = [
                contribution(peer.peer_id, generator, slots=(0, 2), tokens=10 + i, uplink_mbit=uplink)
                for i, (peer, uplink) in enumerate(zip(peers, uplinks, strict=True))
            ]
            real = average(peers, items, expected=3)
            virtual = meet(world, swarms, items, expected=3)
            assert [seen(result) for result in real] == [seen(result) for result in virtual]
            assert set(real[0].committed) == {"shared", "slot-0", "slot-2"}
            mean = plain_mean(items, "shared")
            assert (real[0].committed["shared"].double() - mean).norm() < 0.5 * mean.norm()
    finally:
        close_all(peers)
