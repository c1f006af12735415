"""What a stranger states of itself: addresses that are dialled, and claims without a peer behind them."""

import logging

import pytest
from exchange_cluster import open_cluster

from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.records import Claim

pytestmark = pytest.mark.timeout(120)
GHOSTS = [hashed_peer_id(bytes([number])) for number in range(12)]


@pytest.fixture
def pair(tmp_path):
    swarms = open_cluster(tmp_path.__truediv__, ["founder", "joiner"])
    yield swarms
    for swarm in swarms:
        swarm.close()


def stated(peer, *hosts):
    return {peer: [f"/ip4/{host}/tcp/4001/p2p/{peer}" for host in hosts]}


def kept_hosts(swarm, peer):
    return [address.split("/")[2] for address in swarm.node.peerstore.addresses().get(peer, ())]


def test_a_stranger_cannot_have_this_machine_call_its_own_network(pair, monkeypatch):
    """Of a peer that is met within a machine or network all addresses are kept, and of others only public ones."""
    founder, joiner = pair
    everywhere = ("127.0.0.1", "192.168.0.1", "100.64.0.1", "8.8.8.8")
    founder.node.remember(stated(joiner.peer_id, *everywhere))
    assert kept_hosts(founder, joiner.peer_id) == list(everywhere), "connected over loopback"
    founder.node.remember(stated(GHOSTS[0], *everywhere) | stated(GHOSTS[1], "10.0.0.1"))
    assert kept_hosts(founder, GHOSTS[0]) == ["8.8.8.8"] and not kept_hosts(founder, GHOSTS[1])
    joiner.node.remember(stated(GHOSTS[0], *everywhere))
    assert kept_hosts(joiner, GHOSTS[0]) == list(everywhere), "it has joined a swarm on its own machine"

    async def far_away():
        return {GHOSTS[2]: ["/ip4/203.0.113.7/tcp/50000"]}

    monkeypatch.setattr(joiner.node.p2p, "connected_from", far_away)
    joiner.node.remember(stated(GHOSTS[2], *everywhere))
    assert kept_hosts(joiner, GHOSTS[2]) == ["8.8.8.8"], "met over the internet"


def test_claims_without_a_peer_behind_them_are_one_line(pair, monkeypatch, caplog):
    founder, joiner = pair
    claims = {
        peer: Claim(peer_id=peer, state="active", slots=(n % 4,), max_slots=1, since=1.0)
        for n, peer in enumerate(GHOSTS)
    }
    monkeypatch.setattr(joiner._membership, "last_read", lambda kind: claims if kind is Claim else {})
    with caplog.at_level(logging.INFO, "spes_p2p"):
        assert set(joiner.inventory([founder.peer_id, *GHOSTS])) == {founder.peer_id}
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert line.startswith("12 of 13 peers claim slots 0-3 but do not list their versions: ") and line.endswith("...")
    assert line.count(",") == 7, "eight of them are named"
