"""Streams and records of virtual peers: delays, losses, cuts, leases, and the same again from the same seed."""

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

import pytest

from spes_p2p.errors import ExchangeError, SimulationError
from spes_p2p.sim.network import WINDOW_BYTES, VirtualNetwork, VirtualNode
from spes_p2p.swarm.network import ask
from spes_p2p.swarm.p2p.channel import Channel, DisconnectedError, Message
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Claim, Progress

pytestmark = pytest.mark.timeout(60)

ONE, TWO, THREE = (hashed_peer_id(bytes([number])) for number in range(3))
SECONDS = 10.0


@pytest.fixture
def network(seed):
    network = VirtualNetwork(seed)
    for peer in (ONE, TWO, THREE):
        network.node(peer, "run")
    yield network
    network.close()


def run(network: VirtualNetwork, work: Coroutine[Any, Any, Any]) -> Any:
    return network.nodes[ONE].run(work, 1000.0)


async def opened(network: VirtualNetwork, answer, one: str = ONE, two: str = TWO) -> Channel:
    """Open a stream to a peer that answers so."""
    await network.nodes[two].serve("test", SECONDS, answer)
    return await network.nodes[one].open(two, "test", SECONDS)


async def echo(channel: Channel, peer: str) -> None:
    while True:
        await channel.send_text(peer.encode() + await channel.receive_text())


def test_messages_arrive_whole_in_order_and_late_by_the_delay(network):
    network.delay = lambda sender, receiver: {ONE: 1.0, TWO: 0.5}[sender]

    async def work() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        channel = await opened(network, echo)
        assert loop.time() - began == pytest.approx(1.5)
        began = loop.time()
        for number in range(5):
            await channel.send_text(str(number))
        assert loop.time() == began
        answers = [await channel.receive_text() for _ in range(5)]
        assert answers == [f"{ONE}{number}".encode() for number in range(5)]
        assert loop.time() - began == pytest.approx(1.5)
        await channel.send_text("long")
        with pytest.raises(ExchangeError, match="in place of at most 3"):
            await channel.receive_text(3)
        began = loop.time()
        channel.seconds = 2.0
        with pytest.raises(TimeoutError, match="silent for 2 s"):
            await channel.receive_text()
        assert loop.time() - began == pytest.approx(2.0)

    run(network, work())


def test_a_peer_that_hangs_up_has_sent_all_before(network):
    async def work() -> None:
        async def answer(channel: Channel, peer: str) -> None:
            await channel.send_text("last")

        channel = await opened(network, answer)
        assert await channel.receive_text() == b"last"
        with pytest.raises(DisconnectedError):
            await channel.receive_text()
        with pytest.raises(DisconnectedError):
            await channel.send_text("more")
        with pytest.raises(DisconnectedError, match="no such service"):
            await network.nodes[ONE].open(TWO, "other", SECONDS)
        with pytest.raises(DisconnectedError, match="nothing answers"):
            await network.nodes[ONE].open("nobody", "test", SECONDS)

    run(network, work())


def test_an_uplink_sends_one_byte_after_another_over_all_streams(network):
    sender = network.node(ONE, "run", uplink_mbit=8.0)  # a byte in a microsecond
    network.delay = lambda sender, receiver: 0.0

    async def work() -> None:
        loop, began = asyncio.get_running_loop(), network.loop.time()
        ends = []

        async def take(channel: Channel, peer: str) -> None:
            while True:
                await channel.receive({b"d": 10**6})
                ends.append(loop.time() - began)

        channels = [await opened(network, take, ONE, peer) for peer in (TWO, THREE)]
        await asyncio.gather(*(channel.send(b"d", bytes(10**6 - 5)) for channel in channels))
        await asyncio.sleep(0.0)
        assert ends == pytest.approx([1.0, 2.0])

    sender.run(work(), 1000.0)


def test_who_sends_to_a_peer_that_does_not_read_must_wait(network):
    async def work() -> None:
        async def sleep(channel: Channel, peer: str) -> None:
            for _ in range(2):
                await asyncio.sleep(5.0)
                await channel.receive({b"d": WINDOW_BYTES})
            await asyncio.sleep(3 * SECONDS)

        channel, loop = await opened(network, sleep), network.loop
        began = loop.time()
        for _ in range(2):
            await channel.send(b"d", bytes(WINDOW_BYTES))
            await asyncio.sleep(0.2)
        assert loop.time() - began == pytest.approx(0.4)
        await channel.send(b"d", bytes(WINDOW_BYTES))
        assert loop.time() - began == pytest.approx(10.0, abs=0.5)
        await channel.send(b"d", bytes(WINDOW_BYTES))
        await asyncio.sleep(0.2)
        with pytest.raises(TimeoutError):
            await channel.send(b"d")

    run(network, work())


def test_a_cut_takes_one_direction_and_a_stream_that_lost_something_stays_silent(network):
    heard = []

    async def hear(channel: Channel, peer: str) -> None:
        heard.append((peer, await channel.receive_text()))

    async def post(sender: str, receiver: str) -> None:
        channel = await network.nodes[sender].open(receiver, "post", SECONDS)
        with contextlib.closing(channel):
            await channel.send_last("news")

    async def work() -> None:
        for node in network.nodes.values():
            await node.serve("post", SECONDS, hear)
        network.cuts = {(TWO, ONE)}
        with pytest.raises(TimeoutError):
            await post(ONE, TWO)  # it arrives, and its receipt does not
        with pytest.raises(TimeoutError):
            await post(TWO, ONE)
        assert heard == [(ONE, b"news")]
        await post(TWO, THREE)
        channel = await opened(network, echo, TWO, THREE)
        network.cuts = {(THREE, TWO)}
        await channel.send_text("lost")
        with pytest.raises(TimeoutError):
            await channel.receive_text()
        network.cuts = set()
        await channel.send_text("again")
        with pytest.raises(TimeoutError):
            await channel.receive_text()
        await post(TWO, ONE)

    run(network, work())
    assert heard == [(ONE, b"news"), (TWO, b"news"), (TWO, b"news")]


class Ping(Message):
    """A question."""


def test_lossy_links_lose_streams_in_all_phases_and_the_same_ones_again(seed):
    def outcomes(loss: float) -> list[tuple[str, float]]:
        network, found = VirtualNetwork(seed), []
        network.loss = loss
        nodes = [network.node(peer, "run") for peer in (ONE, TWO)]
        answered = []

        async def answer(channel: Channel, peer: str) -> None:
            answered.append(await channel.receive_text())
            await channel.send_last("pong")

        async def work() -> None:
            await nodes[1].serve("ping", SECONDS, answer)
            for _ in range(200):
                try:
                    await ask(nodes[0], TWO, "ping", Ping(), SECONDS)
                    found.append(("answered", network.loop.time()))
                except TimeoutError:
                    found.append(("asked in vain" if answered else "not asked", network.loop.time()))
                answered.clear()

        nodes[0].run(work(), 1e6)
        network.close()
        return found

    seen = outcomes(0.5)
    kinds = [kind for kind, _ in seen]
    assert seen == outcomes(0.5) and {*kinds} == {"answered", "asked in vain", "not asked"}
    assert kinds.count("answered") == pytest.approx(200 * (1 - 0.5 / 2), abs=40)  # of four in the last two phases
    assert {kind for kind, _ in outcomes(0.0)} == {"answered"}


def test_two_peers_in_client_mode_do_not_reach_each_other_but_others_do(network):
    hidden = [network.node(peer, "run", client_mode=True) for peer in (TWO, THREE)]

    async def work() -> None:
        for node in network.nodes.values():
            await node.serve("test", SECONDS, echo)
        with pytest.raises(DisconnectedError):
            await hidden[0].open(THREE, "test", SECONDS)
        (await hidden[0].open(ONE, "test", SECONDS)).close()
        (await network.nodes[ONE].open(TWO, "test", SECONDS)).close()

    run(network, work())


def claim(peer: str) -> Claim:
    return Claim(peer_id=peer, state="active", max_slots=1, since=0.0)


def claimed(node: VirtualNode) -> set[str]:
    return set(node.read(Claim))


def test_records_live_for_their_lease_and_belong_to_their_owner(network):
    one, two, three = network.nodes.values()
    assert one.store(claim(ONE), 30.0) and two.store(claim(TWO), 60.0)
    assert not one.store(claim(TWO), 30.0) and not one.store(claim(ONE), 2 * MAX_LIFETIME_SECONDS)
    assert claimed(three) == {ONE, TWO} and three.read(Progress) == {}
    run(network, asyncio.sleep(29.0))
    assert claimed(three) == {ONE, TWO}
    run(network, asyncio.sleep(2.0))
    assert claimed(three) == {TWO} and three.read(Claim)[TWO] == claim(TWO)
    assert claimed(network.node(THREE, "run")) == {TWO}  # started again, it asks the others
    assert claimed(network.node("of another run", "other")) == set()


def test_halves_that_are_cut_apart_see_only_their_own_records_until_they_meet_again(network):
    one, two, three = network.nodes.values()
    network.cuts = {(ONE, TWO), (TWO, ONE), (ONE, THREE), (THREE, ONE)}
    assert not one.store(claim(ONE), 30.0) and two.store(claim(TWO), 30.0)
    assert [claimed(node) for node in (one, two, three)] == [{ONE}, {TWO}, {TWO}]
    network.cuts = set()
    assert one.store(claim(ONE), 30.0) and claimed(three) == {ONE, TWO}


def test_a_killed_peer_hangs_up_and_does_nothing_more(network):
    done = []

    async def beat() -> None:
        while True:
            await asyncio.sleep(1.0)
            done.append(network.loop.time())

    async def work() -> None:
        two = network.nodes[TWO]
        two.notify(lambda: [asyncio.create_task(beat())])
        channel = await opened(network, echo)
        await asyncio.sleep(3.5)
        two.close()
        with pytest.raises(DisconnectedError):
            await channel.receive_text()
        with pytest.raises(DisconnectedError):
            await network.nodes[ONE].open(TWO, "test", SECONDS)
        await asyncio.sleep(10.0)

    run(network, work())
    assert len(done) == 3 and not network.nodes[TWO].tasks and not network.nodes[TWO].channels


def test_a_fault_in_an_answer_ends_the_simulation(network):
    async def fail(channel: Channel, peer: str) -> None:
        raise ValueError("mine")

    async def work() -> None:
        await (await opened(network, fail)).receive_text()

    with pytest.raises(ValueError, match="mine"):
        run(network, work())


def test_peers_in_threads_train_while_streams_go_on(network):
    """Two peers train at different speeds and tell the third after each step; one that waits for nobody is named."""
    told: list[tuple[str, float]] = []
    loop, start = network.loop, network.loop.time()
    network.delay = lambda sender, receiver: 0.1

    async def hear(channel: Channel, peer: str) -> None:
        told.append((peer, round(loop.time() - start, 1)))
        await channel.receive_text()

    async def post(node: VirtualNode) -> None:
        channel = await node.open(THREE, "test", SECONDS)
        with contextlib.closing(channel):
            await channel.send_last("trained")

    def live(node: VirtualNode, seconds: float) -> None:
        for _ in range(3):
            node.advance(seconds)
            node.run(post(node), SECONDS)

    one, two, three = network.nodes.values()
    three.run(three.serve("test", SECONDS, hear), SECONDS)
    loop.live([lambda: live(one, 2.0), lambda: live(two, 3.0)])
    assert told == [(ONE, 2.1), (TWO, 3.1), (ONE, 4.5), (TWO, 6.5), (ONE, 6.9), (TWO, 9.9)]

    def wait() -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                two.run(asyncio.Event().wait(), 5.0)

    with pytest.raises(SimulationError, match="virtual peers 1 wait"):
        loop.live([lambda: live(one, 2.0), wait])
