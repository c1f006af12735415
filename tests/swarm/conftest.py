"""A swarm of real peers, started once because each costs seconds."""

import pytest
from real_peers import PeerProcess, close_all, identities, start_swarm


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("party")


@pytest.fixture(scope="session")
def party(folder):
    """Three honest peers on loopback, which decide the first round with `rogue`."""
    peers = start_swarm(folder, 3, voters=identities(folder, ("peer0", "peer1", "peer2", "rogue")))
    yield peers
    close_all(peers)


@pytest.fixture(scope="session")
def rogue(party, folder):
    """A fourth peer, which misbehaves when told to."""
    peer = PeerProcess(folder / "rogue", party[0].addresses, is_rogue=True).wait_until_ready()
    yield peer
    peer.close()
