"""What an introducer tells, and whom a peer behind a router calls: over streams in memory, without p2pd."""

from __future__ import annotations

import asyncio
import socket
from types import SimpleNamespace

import pytest

from spes_p2p.errors import SpesError
from spes_p2p.swarm.p2p import introductions
from spes_p2p.swarm.p2p.channel import Channel, answer_stream
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.p2p.introductions import BURST, CALLS, MAX_AT_ONCE, Introducer, Links, seen_at
from spes_p2p.swarm.p2p.node import ListenConfig, _announced, quic_of
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE
from spes_p2p.swarm.p2p.rate_limit import Allowance

INTRODUCER, OTHER, ASKER, TARGET, STRANGER = (hashed_peer_id(bytes([number])) for number in range(5))
ASKER, TARGET = sorted((ASKER, TARGET))
PUBLIC = "/ip4/198.51.100.{}/udp/{}/quic-v1"


@pytest.fixture(autouse=True)
def stopped(monkeypatch):
    """No allowance grows while a busy machine takes its time."""
    monkeypatch.setattr(introductions, "time", SimpleNamespace(monotonic=lambda: 100.0))


class Network:
    """Peers by id, and the address at which each sees each other."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}

    def node(self, peer: str, place: int, **changes) -> Node:
        self.nodes[peer] = Node(self, peer, PUBLIC.format(place, 1000 + place), **changes)
        return self.nodes[peer]


class Node:
    """Stands for a node: streams to the handlers of others, and calls that are written down."""

    def __init__(self, network: Network, peer: str, address: str, *, meets_others: bool = False) -> None:
        self.peer_id, self.run_id, self.meets_others, self.address = peer, "run", meets_others, address
        self.network, self.handlers, self.calls = network, {}, []
        self.held = asyncio.Event()
        self.held.set()
        self.unseen: set[str] = set()
        self.p2p = self

    def run(self, work, timeout):
        with pytest.raises(StopIteration):  # it only registers a handler
            work.send(None)

    def notify(self, listener) -> None:
        asyncio.get_running_loop().call_soon(listener)

    def initial_peers(self) -> list[str]:
        return []

    async def serve(self, service, seconds, answer) -> None:
        self.handlers[service] = answer

    async def open(self, peer: str, service: str, seconds: float) -> Channel:
        ours, theirs = socket.socketpair()
        answer = self.network.nodes[peer].handlers[service]
        channel = Channel(*await asyncio.open_connection(sock=theirs), seconds)
        self.task = asyncio.create_task(answer_stream(channel, self.peer_id, service, answer))
        return Channel(*await asyncio.open_connection(sock=ours), seconds)

    async def connected_from(self) -> dict[str, list[str]]:
        others = self.network.nodes.items()
        return {peer: [node.address] for peer, node in others if node is not self and peer not in self.unseen}

    async def dial(self, addresses, seconds) -> None:
        self.calls.append(addresses)
        await self.held.wait()


async def ask(node: Node, question: str, service: str = "introduce") -> bytes:
    """Ask the introducer, or tell a peer, something; return its answer, or nothing if it hangs up."""
    peer = INTRODUCER if service == "introduce" else TARGET
    channel = await node.open(peer, f"run::{service}", 30.0)
    try:
        await channel.send_text(question)
        return await channel.receive_text()
    except SpesError:
        return b""
    finally:
        channel.close()


async def settled() -> None:
    """Let everything that can go on go on."""
    for _ in range(200):
        await asyncio.sleep(0)


def world():
    """A public introducer, and two peers behind routers that know each other, not connected yet."""
    network = Network()
    node = network.node(INTRODUCER, 1)
    introducer = Introducer(node)
    peers = []
    for peer, place in ((ASKER, 2), (TARGET, 3)):
        routed = network.node(peer, place, meets_others=True)
        routed.unseen = {ASKER, TARGET}
        peers.append(Links(routed))
    return network, introducer, *peers


def told_of(peer: str, address: str) -> str:
    return f'{{"peer": "{peer}", "address": "{address}"}}'


def test_both_are_told_where_the_introducer_sees_the_other_and_call():
    async def run() -> None:
        network, _, asking, told = world()
        told.seek([ASKER, TARGET], [INTRODUCER])
        await settled()
        asking.seek([ASKER, TARGET], [INTRODUCER])
        await settled()
        assert network.nodes[ASKER].calls == [{TARGET: [PUBLIC.format(3, 1003)]}]
        assert network.nodes[TARGET].calls == [{ASKER: [PUBLIC.format(2, 1002)]}]

    asyncio.run(run())


def test_an_asker_can_claim_no_address_and_learns_none_of_a_peer_that_does_not_want_it():
    async def run() -> None:
        network, _, _, _ = world()
        claims = f'{{"peer": "{TARGET}", "address": "{PUBLIC.format(66, 6)}"}}'
        assert await ask(network.nodes[ASKER], claims) == b""
        answer = (await ask(network.nodes[ASKER], f'{{"peer": "{TARGET}"}}')).decode()
        assert PUBLIC.format(2, 1002) in answer and PUBLIC.format(3, 1003) not in answer
        assert not network.nodes[TARGET].calls

    asyncio.run(run())


def test_a_peer_that_asks_without_end_is_not_answered():
    async def run() -> int:
        network, *_ = world()
        return sum([bool(await ask(network.nodes[ASKER], "{}")) for _ in range(BURST + 10)])

    assert asyncio.run(run()) == BURST


def test_many_askers_together_do_not_have_one_peer_told_without_end():
    async def run() -> int:
        network, *_ = world()
        heard = []
        hear = network.nodes[TARGET].handlers["run::told"]

        async def note(*args) -> None:
            heard.append(args)
            await hear(*args)

        network.nodes[TARGET].handlers["run::told"] = note
        for number in range(3):
            asker = network.node(hashed_peer_id(bytes([100 + number])), 100 + number)
            for _ in range(BURST // 2):
                await ask(asker, f'{{"peer": "{TARGET}"}}')
        return len(heard)

    assert asyncio.run(run()) == BURST


def calls_after(told: list[tuple[str, str, str]], *, introducers=(INTRODUCER,), hold: bool = False, wanted=(ASKER,)):
    """Return the calls of a peer that is told these things, each by an introducer, of a peer, with an address."""

    async def run() -> list:
        network, _, _, links = world()
        network.node(STRANGER, 9)
        node = network.nodes[TARGET]
        if hold:
            node.held.clear()
        links.seek(wanted, introducers)
        await settled()
        for introducer, peer, address in told:
            await ask(network.nodes[introducer], told_of(peer, address), "told")
            await settled()
        calls = list(node.calls)
        node.held.set()
        await settled()
        return calls

    return asyncio.run(run())


def test_a_peer_that_is_not_in_the_run_is_not_called():
    assert calls_after([(INTRODUCER, ASKER, PUBLIC.format(2, 2))])
    assert not calls_after([(INTRODUCER, OTHER, PUBLIC.format(2, 2))])


def test_nobody_is_called_at_the_word_of_a_peer_that_takes_no_calls_itself():
    assert not calls_after([(STRANGER, ASKER, PUBLIC.format(2, 2))])


def test_an_introducer_on_the_internet_has_no_machine_of_this_network_called():
    told = [(INTRODUCER, ASKER, f"/ip4/{host}/udp/53/quic-v1") for host in ("192.168.1.1", "127.0.0.1", "10.0.0.1")]
    assert not calls_after(told)


def test_a_false_address_is_called_once_however_often_it_is_told():
    assert len(calls_after([(INTRODUCER, ASKER, PUBLIC.format(66, 53))] * 5)) == 1


def test_an_introducer_has_few_addresses_called():
    told = [(INTRODUCER, ASKER, PUBLIC.format(number % 200, 2000 + number)) for number in range(CALLS + 20)]
    assert len(calls_after(told)) == CALLS


def test_few_calls_are_made_at_once():
    told = [(INTRODUCER, ASKER, PUBLIC.format(number, 2000 + number)) for number in range(MAX_AT_ONCE + 5)]
    assert len(calls_after(told, hold=True)) == MAX_AT_ONCE


def test_an_address_at_which_another_introducer_does_not_see_the_peer_is_not_called():
    async def run() -> None:
        network, _, _, told = world()
        Introducer(network.node(OTHER, 4))
        told.seek([ASKER, TARGET], [INTRODUCER, OTHER])
        await settled()
        await ask(network.nodes[INTRODUCER], told_of(ASKER, PUBLIC.format(66, 1002)), "told")
        await settled()
        assert not network.nodes[TARGET].calls
        await ask(network.nodes[INTRODUCER], told_of(ASKER, PUBLIC.format(2, 1002)), "told")
        await settled()
        assert network.nodes[TARGET].calls == [{ASKER: [PUBLIC.format(2, 1002)]}]

    asyncio.run(run())


def test_a_relayed_connection_or_one_by_tcp_shows_no_udp_port():
    quic = PUBLIC.format(1, 1)
    assert seen_at(["/ip4/198.51.100.1/tcp/9", f"{quic}/p2p/{ASKER}/p2p-circuit", quic]) == quic
    assert seen_at([f"{quic}/p2p/{ASKER}/p2p-circuit"]) == ""


def test_udp_addresses_follow_from_those_of_tcp():
    tcp = [f"/ip4/198.51.100.1/tcp/4001/p2p/{ASKER}", "/dns/a.example/tcp/1", "/ip6/2001:db8::1/tcp/2", "/ip4/x/udp/3"]
    udp = [f"/ip4/198.51.100.1/udp/4001/quic-v1/p2p/{ASKER}", "/dns/a.example/udp/1/quic-v1"]
    assert quic_of(tcp) == [*udp, "/ip6/2001:db8::1/udp/2/quic-v1"]


def test_a_peer_that_can_be_called_listens_on_both_with_one_port_and_another_one_on_udp_alone():
    both = ListenConfig(EVERY_INTERFACE).multiaddrs()
    port = both[0].split("/")[4]
    assert {f"/ip4/0.0.0.0/tcp/{port}", f"/ip4/0.0.0.0/udp/{port}/quic-v1"} <= set(both)
    hidden = ListenConfig(EVERY_INTERFACE, client_mode=True).multiaddrs()
    assert hidden and all("/udp/" in address for address in hidden)
    assert ListenConfig("127.0.0.1", client_mode=True).multiaddrs() == []


def test_what_is_announced_is_tcp_alone():
    """Otherwise p2pd would call QUIC first, also among peers that can be called."""
    here = ["/ip4/198.51.100.1/tcp/7", "/ip4/198.51.100.1/udp/7/quic-v1"]
    assert _announced(here) == here[:1]
    every = _announced(ListenConfig(EVERY_INTERFACE, 0).multiaddrs())
    assert any(address.startswith("/ip4/127.0.0.1/tcp/") for address in every)
    assert all("/tcp/" in address and "0.0.0.0" not in address for address in every)
    assert _announced(ListenConfig("127.0.0.1").multiaddrs()) == [], "the system chooses the port"


def test_an_allowance_comes_back_with_time_and_remembers_few():
    allowance = Allowance(2, 10.0, max_peers=3)
    assert [allowance.take("a", 0.0) for _ in range(3)] == [True, True, False]
    assert [allowance.take("a", 10.0) for _ in range(2)] == [True, False]
    assert [allowance.take("a", 1000.0) for _ in range(3)] == [True, True, False]
    for number in range(10):
        allowance.take(str(number), 1000.0)
    assert len(allowance._left) == 3
