"""Peers at different sites, each a network namespace; two of them behind routers that let no connection in."""

from __future__ import annotations

import pytest
import torch
from real_peers import PeerProcess, average, close_all, contribution, identities, plain_mean, with_arrays

from benchmarks.testbed import TestBed, available
from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.roster import SHARED

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(480),
    pytest.mark.skipif(available() is not None, reason=f"no test bed: {available()}"),
]
NUM_CALLED = 2


@pytest.fixture(scope="module")
def sites(tmp_path_factory):
    """A founder, a peer that joins from another site, and two unreachable peers."""
    folder = tmp_path_factory.mktemp("sites")
    peers: list[PeerProcess] = []
    voters = identities(folder, map(str, range(4)))
    with TestBed(peers=4, rtt_ms=10) as bed:
        for place in range(4):
            network = {"namespace": bed.namespace(place), "host": bed.address(place)}
            if place >= NUM_CALLED:
                bed.hide(place)
            initial_peers = peers[0].addresses if peers else ()
            peers.append(PeerProcess(folder / str(place), initial_peers, falls_back=True, voters=voters, **network))
            if place == 0:
                peers[0].wait_until_ready()
        for peer in peers[1:]:
            peer.wait_until_ready()
        yield peers
        close_all(peers)


def test_a_reachable_peer_finds_out_and_an_unreachable_one_falls_back_to_client_mode(sites):
    assert [peer.call("client_mode") for peer in sites] == [False, False, True, True]


def test_all_of_them_average_to_the_weighted_mean(sites, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(2):
        items = [contribution(peer.peer_id, generator, slots=(1,), tokens=100 + i) for i, peer in enumerate(sites)]
        results = average(sites, items, expected=4)
        for result in results:
            assert len(result.roster) == 4
            for name in (SHARED, "slot-1"):
                assert torch.equal(result.committed[name], results[0].committed[name])
                mean = plain_mean(items, name)
                torch.testing.assert_close(result.committed[name].double(), mean, rtol=1e-5, atol=1e-6)


def test_of_a_slot_held_only_by_two_unreachable_peers_the_first_ones_counts(sites):
    generator = torch.Generator().manual_seed(7)
    holds = [(), (), (2,), (2,)]
    items = [contribution(p.peer_id, generator, slots=slots) for p, slots in zip(sites, holds, strict=True)]
    results = average(sites, items, expected=4)
    assert all(SHARED in result.committed for result in results)
    first, second = sorted((2, 3), key=lambda place: sites[place].peer_id)
    assert torch.equal(results[first].committed["slot-2"], items[first].deltas["slot-2"])
    assert "slot-2" in results[second].dropped


def test_what_an_unreachable_peer_publishes_reaches_all_others(sites):
    founder, joiner, hidden, other_hidden = sites
    flat = torch.randn(700)
    hidden.call("publish", 4, with_arrays({"slot-3": flat}))
    for peer, having in ((founder, hidden), (joiner, hidden), (other_hidden, founder)):
        assert peer.call("pull", {"slot-3": (4, digest(flat))}, [having.peer_id], timeout=20.0) == {}
        assert torch.equal(peer.call("load", "slot-3"), flat)


def test_two_unreachable_peers_cannot_talk_to_each_other(sites):
    """What is not possible, so that the day it is we notice."""
    _, _, hidden, other_hidden = sites
    flat = torch.randn(700)
    hidden.call("publish", 5, with_arrays({"slot-3": flat}))
    assert "slot-3" in other_hidden.call("pull", {"slot-3": (5, digest(flat))}, [hidden.peer_id], timeout=5.0)


def test_a_peer_in_client_mode_knows_no_address_of_its_own(tmp_path):
    node = Node(Identity(tmp_path / "key"), "run")
    client = Node(
        Identity(tmp_path / "client"), "run", initial_peers=node.addresses(), listen=ListenConfig(client_mode=True)
    )
    assert client.contacts() == () and client.port == 0
    client.close()
    node.close()
