"""Peers behind home routers meet directly: real p2pd hosts in namespaces with address translation."""

from __future__ import annotations

import time

import pytest
import torch
from real_peers import (
    PeerProcess,
    average,
    begin_average,
    close_all,
    contribution,
    identities,
    plain_mean,
    with_arrays,
)
from routed_peer import CALL_SECONDS, RoutedPeers, bed_of

from benchmarks.routers import routers_available
from benchmarks.testbed import TestBed, available
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.roster import SHARED

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        bool(available() or routers_available()), reason=f"no routers: {available() or routers_available()}"
    ),
]
MIB = 2**20
SEEK_SECONDS = 8.0
HEARTBEATS_SECONDS = 30.0
"""Time for the heartbeats that make peers known to each other, and for pauses after introductions that came before."""
ROUND_SECONDS = 120.0
"""Three attempts, of which two fail by a timeout."""


def test_two_peers_behind_usual_routers_meet_directly_by_the_help_of_a_third(tmp_path):
    with bed_of(1, ["port_restricted"] * 2, rtt_ms=40) as bed, RoutedPeers(bed, tmp_path, 1, 2) as peers:
        first, second = peers.seek(SEEK_SECONDS)
        assert list(first) == [peers.routed_ids[1]] and list(second) == [peers.routed_ids[0]]
        before = bed.bytes()[0]
        peers.routed[0].call("send", peers.routed_ids[1], MIB, seconds=CALL_SECONDS)
        assert (bed.bytes()[0] - before).received < MIB / 8, "it went through the introducer"


@pytest.mark.full  # the one above fails with every commit; these are the other kinds of routers
@pytest.mark.parametrize(
    ("kinds", "meets"),
    [
        (("full_cone", "full_cone"), True),
        (("restricted", "restricted"), True),
        (("restricted", "symmetric"), True),
        (("full_cone", "symmetric"), True),
        (("port_restricted", "symmetric"), False),
        (("symmetric", "symmetric"), False),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "meets" if value else "does not",
)
def test_which_kinds_of_routers_let_two_peers_meet(kinds, meets, tmp_path):
    with bed_of(2, kinds, rtt_ms=40) as bed, RoutedPeers(bed, tmp_path, 2, 2) as peers:
        expected = ["many ports" if kind == "symmetric" else "one port" for kind in kinds]
        assert [peer.call("kind", seconds=CALL_SECONDS) for peer in peers.routed] == expected
        assert [bool(found) for found in peers.seek(SEEK_SECONDS)] == [meets, meets]


NUM_CALLED, NUM_ROUTED = 2, 3


@pytest.fixture(scope="module")
def swarm(tmp_path_factory):
    """Two peers that can be called and three behind usual routers, as a real swarm."""
    folder = tmp_path_factory.mktemp("swarm")
    places = range(NUM_CALLED + NUM_ROUTED)
    voters = identities(folder, map(str, places))
    routers = dict.fromkeys(places[NUM_CALLED:], "port_restricted")
    peers: list[PeerProcess] = []
    with TestBed(peers=len(places), rtt_ms=20, routers=routers) as bed:
        for place in places:
            host = bed.address(place) if place < NUM_CALLED else "0.0.0.0"
            network = {"namespace": bed.namespace(place), "host": host}
            initial_peers = peers[0].addresses if peers else ()
            peers.append(PeerProcess(folder / str(place), initial_peers, falls_back=True, voters=voters, **network))
            if place == 0:
                peers[0].wait_until_ready()
        for peer in peers[1:]:
            peer.wait_until_ready()
        for peer in peers[NUM_CALLED:]:
            assert peer.call("wait_for_links", len(places) - 1, HEARTBEATS_SECONDS), "the heartbeat has made no links"
        yield bed, peers
        close_all(peers)


@pytest.mark.full  # starts a swarm
def test_what_a_routed_peer_publishes_goes_to_another_one_directly(swarm):
    _, (_, _, maker, taker, _) = swarm
    flat = torch.randn(700)
    maker.call("publish", 4, with_arrays({"slot-3": flat}))
    assert taker.call("pull", {"slot-3": (4, digest(flat))}, [maker.peer_id], timeout=20.0) == {}
    assert torch.equal(taker.call("load", "slot-3"), flat)


def check_round(peers, generator: torch.Generator) -> None:
    """Let peers average, and compare what they commit with the plain mean."""
    items = [contribution(peer.peer_id, generator, slots=(1,), tokens=100 + i) for i, peer in enumerate(peers)]
    results = average(peers, items, expected=len(peers))
    for result in results:
        assert len(result.roster) == len(peers)
        for name in (SHARED, "slot-1"):
            assert torch.equal(result.committed[name], results[0].committed[name])
            torch.testing.assert_close(result.committed[name].double(), plain_mean(items, name), rtol=1e-5, atol=1e-6)


@pytest.mark.full  # starts a swarm
def test_routed_peers_that_have_met_reduce_their_shares(swarm, seed):
    bed, peers = swarm
    before = bed.bytes()
    check_round(peers, torch.Generator().manual_seed(seed))
    sent = [(now - then).sent for now, then in zip(bed.bytes(), before, strict=True)]
    shares = [each / (sum(sent) / len(sent)) for each in sent]
    assert max(shares) < 1.3, f"one peer has carried the others' bytes: {shares}"


@pytest.mark.full  # starts a swarm
def test_a_peers_page_says_how_it_reaches_each_other_peer(swarm):
    _, peers = swarm
    routed = peers[NUM_CALLED:]
    ways = routed[0].call("links.ways")
    assert {peer.peer_id: ways[peer.peer_id] for peer in peers if peer is not routed[0]} == {
        **{peer.peer_id: "direct" for peer in peers[:NUM_CALLED]},
        **{peer.peer_id: "met" for peer in routed[1:]},
    }
    assert peers[0].call("links.ways")[routed[0].peer_id] == "direct"


@pytest.mark.full  # starts a swarm
def test_the_round_goes_on_when_the_peer_that_introduced_the_others_is_killed(swarm, seed):
    _, peers = swarm
    peers[0].kill()
    check_round(peers[1:], torch.Generator().manual_seed(seed))


@pytest.mark.full  # starts a swarm
def test_a_link_that_dies_within_a_round_costs_one_member_that_round_at_most(swarm, seed):
    """The first of them was killed above; of the others one can be called."""
    bed, (_, *peers) = swarm
    generator = torch.Generator().manual_seed(seed)
    items = [contribution(peer.peer_id, generator, slots=(1,), tokens=100 + i) for i, peer in enumerate(peers)]
    one, other = NUM_CALLED, NUM_CALLED + 1
    before = bed.bytes()[one].sent
    begin_average(peers, items, expected=len(peers))
    while bed.bytes()[one].sent - before < 2 * MIB:
        time.sleep(0.01)
    bed.part(one, other)
    results = [peer.finish(ROUND_SECONDS) for peer in peers]
    whole = [result for result in results if not result.dropped]
    assert len(whole) >= len(peers) - 1, [result.dropped for result in results]
    there = [item for item in items if item.member.peer_id in {member.peer_id for member in whole[0].roster}]
    for result in whole:
        assert {member.peer_id for member in result.roster} == {item.member.peer_id for item in there}
        torch.testing.assert_close(result.committed[SHARED].double(), plain_mean(there, SHARED), rtol=1e-5, atol=1e-6)
