"""The seam: hivemind's swarm and the in-memory one commit the same bits, and both are the plain weighted mean."""

from functools import partial

import pytest
import torch
from real_peers import NUMELS, RUN_ID, average, close_all, contribution, plain_mean, start_swarm

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.sim.swarm import MemoryHub, MemorySwarm
from spes_p2p.swarm.averaging.encoding import Vectors

pytestmark = pytest.mark.timeout(480)


@pytest.fixture
def four(party, rogue):
    return [*party, rogue]  # which behaves unless told otherwise


def memory_swarms(peers, codec="fp32"):
    """The same peers, by identity, in one hub."""
    hub = MemoryHub(RUN_ID, matchmaking_seconds=1.0)
    swarms = [MemorySwarm(hub, peer.identity.peer_id) for peer in peers]
    for swarm in swarms:
        swarm.enter(Vectors(segments={kind: (Segment(numel, codec),) for kind, numel in NUMELS.items()}))
    return hub, swarms


def meet(hub, swarms, contributions, *, expected):
    results = [None] * len(swarms)

    def run(i):
        results[i] = swarms[i].average(contributions[i], expected=expected, starts_at=0.0)

    hub.clock.run([partial(run, i) for i in range(len(swarms))])
    return results


def average_in_memory(peers, contributions, *, expected):
    return meet(*memory_swarms(peers), contributions, expected=expected)


def seen(result):
    """What a caller can tell of a result, but for times and the wording of reasons."""
    committed = {name: digest(mean) for name, mean in result.committed.items()}
    return {member.peer_id for member in result.roster}, committed, set(result.dropped), result.is_behind


def test_both_swarms_commit_the_same_bits_and_they_are_the_weighted_mean(four, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = [(0, 1, 3), (1, 2), (1, 3), (1, 4)]  # slot 1 has four holders, slot 3 two, the others one
    tokens = [1, 977, 123_456, 0]
    items = [
        contribution(peer.peer_id, generator, slots=held, tokens=count)
        for peer, held, count in zip(four, slots, tokens, strict=True)
    ]
    real = average(four, items, expected=4)
    virtual = average_in_memory(four, items, expected=4)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    for item, result in zip(items, real, strict=True):
        assert {member.peer_id for member in result.roster} == {peer.peer_id for peer in four}
        expected = set(item.deltas) - {"slot-4"}  # whose only holder trained nothing
        assert set(result.committed) == expected
        for name in expected:
            torch.testing.assert_close(result.committed[name].double(), plain_mean(items, name), atol=1e-6, rtol=1e-6)
    for name in ("shared", "slot-1", "slot-3"):
        assert len({digest(result.committed[name]) for result in real if name in result.committed}) == 1


def test_contributions_are_left_as_they_were(four, seed):
    """Averaging twice from the same deltas gives the same bits: the first has not touched them."""
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four]
    first, again = average(four, items, expected=4), average(four, items, expected=4)
    assert [seen(result) for result in first] == [seen(result) for result in again]


@pytest.mark.parametrize("change", [{"anchors": {"shared": "6" * 16, "slot-0": "5" * 16}}, {"round": 2}], ids=str)
def test_a_member_with_another_anchor_is_told_so_and_does_not_count(four, seed, change):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four[:3]]
    late = contribution(four[3].peer_id, generator, slots=(0,), tokens=10**6, **change)
    real = average(four, [*items, late], expected=4)
    virtual = average_in_memory(four, [*items, late], expected=4)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    assert real[3].is_behind and not real[3].committed and set(real[3].dropped) == {"shared", "slot-0"}
    for result in real[:3]:
        assert not result.is_behind
        for name in ("shared", "slot-0"):
            torch.testing.assert_close(result.committed[name].double(), plain_mean(items, name), atol=1e-6, rtol=1e-6)


def test_with_another_anchor_of_a_slot_only_that_slot_does_not_count(four, seed):
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(0,)) for peer in four[:3]]
    astray = contribution(four[3].peer_id, generator, slots=(0,), anchors={"shared": "5" * 16, "slot-0": "7" * 16})
    real = average(four, [*items, astray], expected=4)
    virtual = average_in_memory(four, [*items, astray], expected=4)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    assert set(real[3].committed) == {"shared"} and set(real[3].dropped) == {"slot-0"}
    torch.testing.assert_close(real[0].committed["slot-0"].double(), plain_mean(items, "slot-0"), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("member_tokens", [0, 50], ids=["nobody-trained", "too-few-met"])
def test_what_must_not_be_committed_is_dropped_by_both(four, seed, member_tokens):
    """Three that did not train have no mean; three of an expected seven are fewer than half."""
    generator = torch.Generator().manual_seed(seed)
    expected = 7 if member_tokens else 3
    items = [contribution(peer.peer_id, generator, slots=(0,), tokens=member_tokens) for peer in four[:3]]
    real = average(four[:3], items, expected=expected, meeting_seconds=1.0)
    for result in real + average_in_memory(four[:3], items, expected=expected):
        assert not result.committed and set(result.dropped) == {"shared", "slot-0"}
        wording = "no member trained" if expected == 3 else "of 7 peers"
        assert all(wording in reason for reason in result.dropped.values())


@pytest.mark.parametrize(
    ("electorates", "votes", "is_committed"),
    [((6, 5, 5), 3, True), ((5, 6, 6), 3, False), ((5, 5, 5), 2, False)],
    ids=["most-know-of-five", "most-know-of-six", "one-is-a-newcomer"],
)
def test_all_who_met_commit_a_round_or_none_whatever_each_has_counted(four, seed, electorates, votes, is_committed):
    generator = torch.Generator().manual_seed(seed)
    voters = tuple(peer.peer_id for peer in four[:votes])
    items = [
        contribution(peer.peer_id, generator, slots=(0,), electorate=electorate, voters=voters)
        for peer, electorate in zip(four, electorates, strict=False)
    ]
    real = average(four[:3], items, expected=3, meeting_seconds=5.0)
    virtual = average_in_memory(four[:3], items, expected=3)
    assert [seen(result) for result in real] == [seen(result) for result in virtual]
    for result in real:
        assert set(result.committed) == ({"shared", "slot-0"} if is_committed else set())


def test_a_refused_version_gives_way_to_the_one_before_it(four):
    _, (virtual,) = memory_swarms(four[:1])
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
        hub, swarms = memory_swarms(peers, codec)
        for uplinks in [(None, None, None), (100.0, 10.0, None), (None, None, None)]:
            items = [
                contribution(peer.peer_id, generator, slots=(0, 2), tokens=10 + i, uplink_mbit=uplink)
                for i, (peer, uplink) in enumerate(zip(peers, uplinks, strict=True))
            ]
            real = average(peers, items, expected=3)
            virtual = meet(hub, swarms, items, expected=3)
            assert [seen(result) for result in real] == [seen(result) for result in virtual]
            assert set(real[0].committed) == {"shared", "slot-0", "slot-2"}
            assert real[0].encoded == virtual[1].encoded and set(real[0].encoded) == set(real[0].committed)
            mean = plain_mean(items, "shared")
            assert (real[0].committed["shared"].double() - mean).norm() < 0.5 * mean.norm()
    finally:
        close_all(peers)
