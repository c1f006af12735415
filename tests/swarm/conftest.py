"""A swarm of real peers, started once because each costs seconds."""

import pytest
from real_peers import PeerProcess, close_all, start_swarm


@pytest.fixture(scope="session")
def party(tmp_path_factory):
    """Three honest peers on loopback; whoever wants to kill one starts its own."""
    peers = start_swarm(tmp_path_factory.mktemp("party"), 3)
    yield peers
    close_all(peers)


@pytest.fixture(scope="session")
def rogue(party, tmp_path_factory):
    """A fourth peer, which misbehaves when told to."""
    peer = PeerProcess(tmp_path_factory.mktemp("rogue"), party[0].addresses, is_rogue=True).wait_until_ready()
    yield peer
    peer.close()
