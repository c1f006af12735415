"""A router that speaks UPnP, miniupnpd, forwards a peer's port while the peer runs."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import shutil
import socket
import subprocess
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from benchmarks.routers import INSIDE, routers_available
from benchmarks.testbed import DEVICE, TestBed, available
from spes_p2p.cli import load_settings
from spes_p2p.config import PeerConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer import joining
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.port_map import mapped_port

PORT = 4001
OUTSIDE = "5.1.1.1"
"""What the router says of itself: miniupnpd forwards nothing from an address that is private, as the bed's are."""
CHAINS = """
table inet filter {
  chain forward { type filter hook forward priority 0; policy accept; jump miniupnpd; }
  chain miniupnpd { }
  chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
  chain prerouting_miniupnpd { }
  chain postrouting { type nat hook postrouting priority 100; jump postrouting_miniupnpd; }
  chain postrouting_miniupnpd { }
}
"""
SETTINGS = f"""
ext_ifname={DEVICE}
ext_ip={OUTSIDE}
listening_ip={INSIDE}
enable_upnp=yes
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
allow 1024-65535 192.168.1.0/24 1024-65535
deny 0-65535 0.0.0.0/0 0-65535
"""
missing = available() or routers_available()
missing = missing or (None if shutil.which("miniupnpd") else "it lacks miniupnpd; install miniupnpd-nftables")
missing = missing or (None if importlib.util.find_spec("miniupnpc") else "it lacks miniupnpc")


@contextlib.contextmanager
def router(bed: TestBed, folder):
    """Have the router of the bed's second peer speak UPnP."""
    name = bed.namespace(1).replace("home", "")
    inside = ["ip", "netns", "exec", name]
    subprocess.run([*inside, "nft", "-f", "-"], input=CHAINS, text=True, check=True)
    (folder / "settings").write_text(SETTINGS)
    command = [*inside, "miniupnpd", "-d", "-f", str(folder / "settings"), "-P", str(folder / "pid")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout
            for line in process.stdout:
                if "listening on port" in line or "HTTP listening" in line:
                    break
            yield
        finally:
            process.kill()


def hold(pipe: Connection, folder: Path) -> None:
    """Map the port as a peer does, and take connections to it until told to stop; then say that it is unmapped."""
    flags = ["--run-id", "run", "--map-port", "--port", str(PORT), "--output", str(folder)]
    with socket.create_server(("0.0.0.0", PORT)):
        with joining._with_port(load_settings(PeerConfig, flags)) as config:
            pipe.send(config.announce)
            pipe.recv()
        pipe.send("unmapped")
        pipe.recv()


def connects(pipe: Connection, host: str) -> None:
    try:
        socket.create_connection((host, PORT), 2.0).close()
    except OSError:
        pipe.send(False)
    else:
        pipe.send(True)


@pytest.mark.timeout(120)
@pytest.mark.skipif(bool(missing), reason=f"no router that speaks UPnP: {missing}")
def test_a_router_forwards_the_port_until_the_peer_ends(tmp_path):
    with TestBed(peers=2, rtt_ms=10, routers={1: "port_restricted"}) as bed, router(bed, tmp_path):

        def is_reached() -> bool:
            ours, theirs = multiprocessing.Pipe()
            bed.run_in(0, connects, theirs, bed.address(1))
            assert ours.poll(20)
            return ours.recv()

        assert not is_reached()
        ours, theirs = multiprocessing.Pipe()
        bed.run_in(1, hold, theirs, tmp_path)
        assert ours.poll(20)
        assert ours.recv() == [f"/ip4/{OUTSIDE}/tcp/{PORT}"]
        assert is_reached()
        ours.send("end")
        assert ours.poll(20) and ours.recv() == "unmapped"
        deadline = time.monotonic() + 5
        while is_reached() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not is_reached()
        ours.send("end")


def found(pipe: Connection, folder: Path) -> None:
    swarm = HivemindSwarm(Node(Identity(folder / "key"), "run", listen=ListenConfig("0.0.0.0", PORT)), folder / "v")
    pipe.send(swarm.node.addresses())
    pipe.recv()
    swarm.close()


def join(pipe: Connection, folder: Path, addresses: list[str]) -> None:
    """Join as a peer does that listens on a port; say what it announces then."""
    flags = ["--run-id", "run", "--port", str(PORT), "--output", str(folder), "--initial-peers", *addresses]
    config = load_settings(PeerConfig, flags)
    with contextlib.closing(joining._swarm(config)) as swarm:
        pipe.send(swarm.node.contacts())


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.parametrize("routers", [{}, {1: "full_cone"}], ids=["none", "forwards all"])
@pytest.mark.skipif(bool(available() or routers_available()), reason="no test bed with routers")
def test_a_peer_announces_the_address_of_a_router_that_forwards_its_port(tmp_path, routers):
    """Without it, two such peers know each other's addresses at home alone, and never meet."""
    with TestBed(peers=2, rtt_ms=10, routers=routers) as bed:
        founder, theirs = multiprocessing.Pipe()
        bed.run_in(0, found, theirs, tmp_path / "founder")
        assert founder.poll(60)
        addresses = [address for address in founder.recv() if bed.address(0) in address]
        joiner, theirs = multiprocessing.Pipe()
        bed.run_in(1, join, theirs, tmp_path / "joiner", addresses)
        assert joiner.poll(90)
        told = joiner.recv()
        founder.send("end")
    announced = [at for at in told if at.startswith(f"/ip4/{bed.address(1)}/tcp/{PORT}/p2p/")]
    assert len(announced) == 1
    assert not routers or len(told) > 1


@pytest.mark.skipif(importlib.util.find_spec("miniupnpc") is None, reason="it lacks miniupnpc")
@pytest.mark.skipif(available() is not None, reason=f"no test bed: {available()}")
def test_where_no_router_forwards_a_port_the_error_says_what_to_do():
    with TestBed(peers=1) as bed:
        ours, theirs = multiprocessing.Pipe()
        bed.run_in(0, refused, theirs)
        assert ours.poll(30)
        assert "switch UPnP on" in ours.recv()


def refused(pipe: Connection) -> None:
    with pytest.raises(ConfigError) as error, mapped_port(PORT):
        pass
    pipe.send(str(error.value))


def test_without_miniupnpc_the_error_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"setup\.sh upnp"), mapped_port(PORT):
        pass
