"""A peer is several processes; they start with clear errors, and end together, even by SIGKILL."""

import socket

import psutil
import pytest
from real_peers import PeerProcess

from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.processes import BoundP2P

pytestmark = pytest.mark.timeout(120)


def is_gone(process):
    """A process that its new parent has yet to bury is gone, too."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_no_process_outlives_a_killed_peer(tmp_path):
    peer = PeerProcess(tmp_path / "peer").wait_until_ready()
    descendants = peer.descendants()
    names = [process.name() for process in descendants]
    assert len(descendants) >= 3 and any("p2pd" in name for name in names), names
    peer.kill()
    assert_gone(descendants)


def test_no_process_outlives_a_peer_that_leaves(tmp_path):
    peer = PeerProcess(tmp_path / "peer").wait_until_ready()
    descendants = peer.descendants()
    peer.close()
    assert_gone(descendants)
    assert peer.process.exitcode == 0


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    node = Node(Identity(tmp_path_factory.mktemp("node") / "key"), "run")
    yield node
    node.close()


def children():
    return set(psutil.Process().children(recursive=True))


def assert_gone(processes):
    """All of them end, soon if not already."""
    psutil.wait_procs([process for process in processes if not is_gone(process)], timeout=30)
    assert [process for process in processes if not is_gone(process)] == []


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.timeout(30)
def test_an_initial_peer_that_does_not_answer_is_named_within_30_seconds(tmp_path):
    before = children()
    address = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(tmp_path / 'nobody').peer_id}"
    with pytest.raises(JoinError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[address])
    assert address in str(raised.value) and "--initial-peers" in str(raised.value)
    assert_gone(children() - before)


def test_one_initial_peer_that_answers_is_enough(node, tmp_path):
    nobody = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(tmp_path / 'nobody').peer_id}"
    joined = Node(Identity(tmp_path / "key"), "run", initial_peers=[nobody, *node.addresses()])
    joined.close()


def test_an_initial_peer_that_runs_something_else_is_named_and_nothing_stays_behind(node, tmp_path):
    """It is reached, but has no DHT: the failure comes late, when p2pd runs already."""
    other = node.run(BoundP2P.create(host_maddrs=["/ip4/127.0.0.1/tcp/0"], use_relay=False, auto_nat=False), 30)
    try:
        address = str(node.run(other.get_visible_maddrs(), 30)[0])
        before = children()
        with pytest.raises(JoinError) as raised:
            Node(Identity(tmp_path / "key"), "run", initial_peers=[address])
        assert address in str(raised.value)
        assert_gone(children() - before)
    finally:
        node.run(other.shutdown(), 30)


def test_an_address_whose_peer_id_is_another_peers_is_an_error(node, tmp_path):
    """Who answers there cannot prove to be the one asked for."""
    wrong = node.addresses()[0].replace(node.peer_id, Identity(tmp_path / "nobody").peer_id)
    with pytest.raises(JoinError):
        Node(Identity(tmp_path / "key"), "run", initial_peers=[wrong])


def test_an_occupied_port_is_named(tmp_path):
    before = children()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            Node(Identity(tmp_path / "key"), "run", port=port)
    assert_gone(children() - before)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:4000", "/ip4/999.1.1.1/tcp/1/p2p/x", "/ip4/1.2.3.4/tcp/4000", "/ip4/1.2.3.4/tcp/4000/p2p/x"],
)
def test_a_malformed_address_is_an_error_that_quotes_it(tmp_path, address):
    with pytest.raises(ConfigError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[address])
    assert repr(address) in str(raised.value)


def test_an_identity_in_use_is_refused(node):
    before = children()
    with pytest.raises(ConfigError, match="in use"):
        Node(Identity(node.identity.path), "run", initial_peers=node.addresses())
    assert_gone(children() - before)


def test_a_node_can_be_closed_twice_and_its_port_used_again(tmp_path):
    port = free_port()
    for _ in range(2):
        node = Node(Identity(tmp_path / "key"), "run", port=port)
        assert f"/tcp/{port}/" in node.addresses()[0]
        node.close()
        node.close()
