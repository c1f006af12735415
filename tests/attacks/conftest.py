"""One peer that all attacks are made on, and two strangers who make them."""

import pytest
from attacker import Attacker
from real_peers import PeerProcess, close_all


@pytest.fixture(scope="session")
def victim(tmp_path_factory):
    """A peer in processes of its own, which no attack may end."""
    peer = PeerProcess(tmp_path_factory.mktemp("victim")).wait_until_ready()
    processes = peer.descendants()
    yield peer
    is_whole = all(process.is_running() for process in processes)
    close_all([peer])
    assert is_whole, "an attack has ended one of the peer's processes"


@pytest.fixture(scope="session")
def attacker(victim):
    stranger = Attacker(victim)
    yield stranger
    stranger.close()
