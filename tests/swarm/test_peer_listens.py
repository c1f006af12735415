"""A peer of a swarm of several machines can be called by others without a flag, and says how."""

from __future__ import annotations

import re
import shlex
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from peer_processes import Commands, commands_in, free_port, write_corpus, write_settings

from spes_p2p.cli import load_settings
from spes_p2p.commands.join import as_peer
from spes_p2p.config import PeerConfig
from spes_p2p.config.commands import JoinConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer.joining import listen_host, why_unreachable
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE

SECONDS = 120.0
PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
HERE, HERE_6 = f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}", f"/ip6/::1/tcp/4001/p2p/{PEER_ID}"
AWAY, AWAY_6 = f"/ip4/203.0.113.7/tcp/4001/p2p/{PEER_ID}", f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER_ID}"


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    with commands_in(tmp_path) as commands:
        yield commands


def machine(folder: Path, name: str) -> list[str | Path]:
    """Return a peer's flags, but for the run and its addresses."""
    text = ["--text", folder / "corpus.jsonl"]
    return ["--output", folder / name, "--cache", folder / "cache", "--device", "cpu", "--threads", "1", *text]


def addresses_of_this_machine(family: socket.AddressFamily) -> list[str]:
    found = [address.address for each in psutil.net_if_addrs().values() for address in each if address.family == family]
    return [address for address in found if not address.startswith(("127.", "::1", "fe80:"))]


@pytest.mark.full  # a whole run of two peers
def test_a_founder_can_be_called_at_the_address_that_it_prints(commands: Commands, tmp_path: Path) -> None:
    routable = addresses_of_this_machine(socket.AF_INET)
    write_corpus(tmp_path / "corpus.jsonl")
    settings = write_settings(tmp_path / "settings.yaml", round={"min_peers": 2})
    words = ["--run-id", "r", "--config", settings, *machine(tmp_path, "founder")]
    founder = commands.start("-m", "spes_p2p", "peer", *words)
    printed = founder.wait_for(r"others join with: (.*)", SECONDS)[1]
    words = shlex.split(printed.removesuffix(" --text PATH"))
    assert words[:2] == ["spes", "join"]
    config = as_peer(load_settings(JoinConfig, words[2:]))
    address = config.initial_peers[0]
    _, family, host, _, port, *_ = address.split("/")
    assert family == "ip4" and host != "0.0.0.0" and (host in routable or not routable)
    hosts = [host, "127.0.0.1", *addresses_of_this_machine(socket.AF_INET6)[:1], *(["::1"] if socket.has_ipv6 else [])]
    for each in hosts:
        socket.create_connection((each, int(port)), timeout=10).close()
    # The printed command itself, as another machine would run it: it joins, and both train to the end.
    joiner = commands.start("-m", "spes_p2p", *words[1:], *machine(tmp_path, "joiner"))
    for peer in (founder, joiner):
        assert peer.end(SECONDS) == 0, peer.tail()
        assert not peer.matches("cannot open a connection")
    assert joiner.matches(r"sends about .* MB and receives as much, .* MB in all")
    megabytes = float(joiner.wait_for(r"needs .* of memory and up to (.*) MB of disk", 1)[1])
    documents = 2**19  # manifest and tokenizer, which are small beside any model but a test's
    assert bytes_on_disk(tmp_path / "joiner") <= 1e6 * megabytes + documents

    # Its run is finished: started again, it says so and ends, or serves the versions if it is asked to, alone.
    words = ["-m", "spes_p2p", "peer", "--run-id", "r", "--resume", "--host", "127.0.0.1"]
    again = commands.start(*words, *machine(tmp_path, "founder"))
    assert again.end(SECONDS) == 0, again.tail()
    assert len(again.lines) == 2 and "the run is finished" in again.lines[0], again.tail()
    again = commands.start(*words, "--seed-seconds", "0", *machine(tmp_path, "founder"))
    assert again.end(SECONDS) == 0, again.tail()
    assert again.matches("serving its versions for 0 s") and again.matches("the run is finished")


def bytes_on_disk(output: Path) -> int:
    """Return what a peer's vectors and checkpoints take; a file under two names counts once."""
    files = [file.stat() for file in output.rglob("*") if file.is_file() and file.suffix in (".bin", ".safetensors")]
    return sum({file.st_ino: file.st_size for file in files}.values())


@pytest.mark.parametrize(
    ("flags", "met", "host"),
    [
        ([], [], EVERY_INTERFACE),
        (["--initial-peers", HERE], [], "127.0.0.1"),
        (["--initial-peers", HERE, HERE_6], [AWAY], "127.0.0.1"),
        (["--initial-peers", AWAY], [], EVERY_INTERFACE),
        (["--initial-peers", HERE, AWAY_6], [], EVERY_INTERFACE),
        (["--resume"], [HERE], "127.0.0.1"),
        (["--resume"], [HERE, AWAY], EVERY_INTERFACE),
        (["--host", "192.0.2.1", "--initial-peers", HERE], [], "192.0.2.1"),
        (["--host", "127.0.0.1"], [], "127.0.0.1"),
    ],
)
def test_a_peer_listens_on_every_interface_unless_its_swarm_is_on_this_machine(
    flags: list[str], met: list[str], host: str
) -> None:
    known = Peerstore()
    known.addresses = lambda: {PEER_ID: met} if met else {}  # type: ignore[method-assign]
    assert listen_host(load_settings(PeerConfig, ["--run-id", "r", *flags]), known) == host


def test_every_interface_is_one_port_of_both_kinds_of_addresses() -> None:
    addresses = ListenConfig(EVERY_INTERFACE).multiaddrs()
    found = [re.fullmatch(r"/(ip4/0\.0\.0\.0|ip6/::)/tcp/(\d+)", address) for address in addresses]
    assert found[0] and found[0][1] == "ip4/0.0.0.0" and len({each[2] for each in found if each}) == 1
    assert ListenConfig("::1", 0).multiaddrs() == ["/ip6/::1/tcp/0"]
    assert ListenConfig("127.0.0.1").multiaddrs() == ["/ip4/127.0.0.1/tcp/0"]


@pytest.mark.parametrize("names_peer", [True, False])
def test_an_announced_address_names_its_peer_once(tmp_path: Path, names_peer: bool) -> None:
    """A founder does not know its id before its first start."""
    identity = Identity(tmp_path / "key")
    announced, peer = "/ip4/203.0.113.7/tcp/4001", f"/p2p/{identity.peer_id}"
    node = Node(identity, "run", listen=ListenConfig(announce=(announced + (peer if names_peer else ""),)))
    try:
        assert node.contacts() == (announced + peer,) and node.port == 4001
    finally:
        node.close()


def test_a_peer_starts_again_at_the_port_that_its_router_forwards_to(tmp_path: Path) -> None:
    port = free_port()
    announced = ("/ip4/203.0.113.7/tcp/4001",)
    node = Node(Identity(tmp_path / "key"), "run", listen=ListenConfig(port=port, announce=announced))
    try:
        assert node.port == port
    finally:
        node.close()


def test_a_port_that_is_occupied_on_one_kind_of_address_is_found_out() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"0.0.0.0:{port}.*--port"):
            ListenConfig(EVERY_INTERFACE, port).multiaddrs()


@pytest.mark.parametrize(
    ("host", "cause", "remedy"),
    [
        ("127.0.0.1", "only this machine reaches", "drop --host"),
        ("::1", "only this machine reaches", "drop --host"),
        ("10.0.0.5", "10.0.0.5 alone", "--announce"),
        (EVERY_INTERFACE, "router or firewall blocks TCP port 4001", "forward a port"),
        ("0.0.0.0", "router or firewall blocks TCP port 4001", "forward a port"),
    ],
)
def test_a_peer_that_cannot_be_called_is_told_why(host: str, cause: str, remedy: str) -> None:
    told = why_unreachable(host, 4001)
    assert cause in told and remedy in told
