"""Versions in blocks over real streams of one process: from many sources, whatever some of them do."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import time
from collections import Counter

import pytest
from pulls import scripted, send_part

from spes_p2p.codecs.vectors import BLOCK_BYTES, HASH_BYTES, block_hashes, digest
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange import fetch as module
from spes_p2p.swarm.exchange.blocks import ALL, LIST, encode_have
from spes_p2p.swarm.exchange.fetch import Fetch
from spes_p2p.swarm.exchange.protocol import ABSENT, BUSY, DATA, GET, GET_BYTES, HAVE, MAX_VERSIONS, WANT
from spes_p2p.swarm.exchange.serve import Server
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel

NUM_BLOCKS = 4
SECONDS = 30.0
WHOLE = encode_have(ALL)


def version_of(data: bytes, name: str = "slot-1", round: int = 3) -> Version:
    return Version.of(name, round, data)


def draw(num_bytes: int = NUM_BLOCKS * BLOCK_BYTES - 1000) -> bytes:
    return random.randbytes(num_bytes)


class Peer:
    """A peer with a store and a server; `script` replaces the server."""

    def __init__(self, folder, *held: bytes, script=None, uplink_mbit=None) -> None:
        self.store = VersionStore(folder)
        self.server = Server(self.store, uplink_mbit, time.monotonic)
        self.script = script
        self.num_streams = 0
        for index, data in enumerate(held):
            version = version_of(data, f"slot-{index + 1}")
            self.store.add({version.name: (version, data)})

    async def serve(self, channel: Channel) -> None:
        self.num_streams += 1
        with contextlib.closing(channel), contextlib.suppress(ExchangeError, TimeoutError):
            await (self.script(channel) if self.script else self.server.serve(channel, "puller"))


class Net:
    """Streams between a puller and other peers, and what has come over them."""

    def __init__(self, **peers: Peer) -> None:
        self.peers = peers
        self.num_bytes = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def connect(self, peer: str) -> Channel:
        near, far = socket.socketpair()
        self._tasks.append(asyncio.create_task(self.peers[peer].serve(await self._channel(far))))
        return await self._channel(near)

    @staticmethod
    async def _channel(end: socket.socket) -> Channel:
        return Channel(*await asyncio.open_connection(sock=end), 5.0)

    def count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    async def fetch(self, store: VersionStore, *versions: Version, seconds: float = SECONDS) -> list[str]:
        files = [store.begin(version) for version in versions]

        async def keep(file) -> None:
            store.finish(file)

        try:
            deadline = asyncio.get_running_loop().time() + seconds
            return await Fetch(files, self.peers, connect=self.connect, store=keep, count=self.count).run(deadline)
        finally:
            for file in files:
                store.end(file)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)


def pull(folder, peers: dict[str, Peer], *versions: Version, **settings) -> tuple[list[str], VersionStore, int]:
    """Fetch versions into a new store; return the failures, the store, and the bytes that came."""
    store, net = VersionStore(folder), Net(**peers)
    return asyncio.run(net.fetch(store, *versions, **settings)), store, net.num_bytes


def bytes_of(data: bytes) -> int:
    return len(data) + len(block_hashes(data))


def test_versions_come_from_all_that_have_them_and_no_byte_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LATE_SECONDS", SECONDS)
    large, small, other = draw(), draw(1000), draw(BLOCK_BYTES)
    peers = {
        "one": Peer(tmp_path / "1", large, small),
        "two": Peer(tmp_path / "2", large, small, other),
        "none": Peer(tmp_path / "3"),
    }
    versions = [version_of(data, f"slot-{index + 1}") for index, data in enumerate((large, small, other))]
    failures, store, num_bytes = pull(tmp_path / "mine", peers, *versions)
    assert failures == ["", "", ""]
    assert [store.read(version.name) for version in versions] == [large, small, other]
    sent = [peer.server.bytes_out for peer in peers.values()]
    assert min(sent[:2]) > 0 and sent[2] == 0
    assert num_bytes == sum(sent) == bytes_of(large) + bytes_of(small) + bytes_of(other)


@pytest.mark.parametrize(("sources", "streams"), [(1, 4), (3, 4), (12, 1)])
def test_few_sources_are_asked_over_several_streams_each(tmp_path, sources, streams):
    """Over one stream, requests wait behind what this peer sends, and the link idles meanwhile."""
    data = draw(6 * sources * BLOCK_BYTES)
    peers = {f"{number}": Peer(tmp_path / f"{number}", data, uplink_mbit=50.0) for number in range(sources)}
    failures, store, num_bytes = pull(tmp_path / "mine", peers, version_of(data))
    assert failures == [""] and store.read("slot-1") == data and num_bytes == bytes_of(data)
    assert max(peer.num_streams for peer in peers.values()) == streams


def test_a_liar_costs_one_block_and_is_asked_no_more(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "LATE_SECONDS", SECONDS)
    data = draw(NUM_BLOCKS * BLOCK_BYTES)

    async def lie(channel, number):
        if number == LIST:
            return await send_part(channel, data, number)
        await channel.send(DATA, bytes(FRAME_BYTES))
        for _ in range(3):
            await channel.send(DATA, random.randbytes(FRAME_BYTES))

    liar = Peer(tmp_path / "1", script=scripted(lie))
    peers = {"liar": liar, "honest": Peer(tmp_path / "2", data)}
    failures, store, num_bytes = pull(tmp_path / "mine", peers, version_of(data))
    assert failures == [""] and store.read("slot-1") == data
    assert num_bytes <= bytes_of(data) + 2 * BLOCK_BYTES and liar.num_streams == 1
    alone = {"liar": Peer(tmp_path / "3", script=scripted(lie))}
    [failure], store, num_bytes = pull(tmp_path / "alone", alone, version_of(data))
    assert "liar sent other bytes than belong to slot-1" in failure and store.newest() == {}
    assert "asking liar no more" in caplog.text and num_bytes <= len(block_hashes(data)) + 2 * BLOCK_BYTES


LIES = {
    "another list": (LIST, [(DATA, bytes(32 * NUM_BLOCKS))]),
    "a list that is too long": (LIST, [(DATA, bytes(32 * NUM_BLOCKS + 1))]),
    "a block that is too long": (0, [(DATA, bytes(FRAME_BYTES))] * 5),
    "an endless frame": (0, [(DATA, bytes(FRAME_BYTES + 1))]),
    "an empty frame": (0, [(DATA, b"")]),
    "another kind of message": (0, [(HAVE, WHOLE)]),
    "BUSY with something in it": (0, [(BUSY, b"x")]),
    "BUSY amid a block": (0, [(DATA, b"x"), (BUSY, b"")]),
}


@pytest.mark.parametrize("case", LIES)
def test_what_is_no_part_of_the_version_is_not_taken(tmp_path, case):
    data, (spoiled, messages) = draw(), LIES[case]

    async def spoil(channel, number):
        if number != spoiled:
            return await send_part(channel, data, number)
        for message in messages:
            await channel.send(*message)

    peers = {"liar": Peer(tmp_path / "1", script=scripted(spoil))}
    [failure], store, _ = pull(tmp_path / "mine", peers, version_of(data))
    assert "no peer has it; liar sent" in failure and store.newest() == {}
    peers["honest"] = Peer(tmp_path / "2", data)
    failures, store, _ = pull(tmp_path / "mine", peers, version_of(data))
    assert failures == [""] and store.read("slot-1") == data


@pytest.mark.parametrize("said", [b"", WHOLE * 2, b"\2", b"\2" + bytes(2), b"\7", bytes(10**5)], ids=range(6))
def test_a_list_of_blocks_that_does_not_fit_the_version_is_refused(tmp_path, said):
    async def boast(channel):
        await channel.receive({WANT: 32})
        await channel.send(HAVE, said)
        await channel.receive({GET: 36})

    data = draw()
    [failure], _, _ = pull(tmp_path / "mine", {"rogue": Peer(tmp_path / "1", script=boast)}, version_of(data))
    assert "rogue sent a" in failure


def test_what_is_late_is_asked_of_another_source_too(tmp_path, monkeypatch):
    """One source is silent amid its first block, and one trickles: each costs what it had been asked for."""
    monkeypatch.setattr(module, "LATE_SECONDS", 0.1)
    data = draw()

    async def stall(channel, number):
        await channel.send(DATA, data[number * BLOCK_BYTES :][:1000])
        await asyncio.Event().wait()

    async def trickle(channel, number):
        for offset in range(1000):
            await channel.send(DATA, data[number * BLOCK_BYTES + offset :][:1])
            await asyncio.sleep(0.05)

    peers = {
        "silent": Peer(tmp_path / "1", script=scripted(stall)),
        "slow": Peer(tmp_path / "2", script=scripted(trickle)),
        "quick": Peer(tmp_path / "3", data),
    }
    failures, store, num_bytes = pull(tmp_path / "mine", peers, version_of(data))
    assert failures == [""] and store.read("slot-1") == data
    assert num_bytes < bytes_of(data) + 10**4


def test_a_source_that_dies_and_comes_back_goes_on_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "MAX_STREAMS_PER_SOURCE", 1)
    data, sent = draw(), Counter()

    async def die_amid(channel, number):
        if sent.total() == 3:
            sent["death"] += 1
            await channel.send(DATA, data[number * BLOCK_BYTES :][:1000])
            await asyncio.sleep(0.05)
            raise ExchangeError("dies")
        sent[number] += 1
        await send_part(channel, data, number)

    mortal = Peer(tmp_path / "1", script=scripted(die_amid))
    failures, store, num_bytes = pull(tmp_path / "mine", {"mortal": mortal}, version_of(data))
    assert failures == [""] and store.read("slot-1") == data
    assert mortal.num_streams == 2 and num_bytes <= bytes_of(data) + 1000


def test_a_busy_source_is_asked_again_and_one_that_is_gone_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    data, answers = draw(), iter([BUSY] * 5)

    async def refuse(channel, number):
        if kind := next(answers, None):
            return await channel.send(kind)
        await send_part(channel, data, number)

    async def never(channel, number):
        await channel.send(ABSENT)

    busy = {"busy": Peer(tmp_path / "1", script=scripted(refuse))}
    failures, store, num_bytes = pull(tmp_path / "mine", busy, version_of(data))
    assert failures == [""] and store.read("slot-1") == data and num_bytes == bytes_of(data)
    gone = Peer(tmp_path / "2", script=scripted(never))
    [failure], _, _ = pull(tmp_path / "other", {"gone": gone}, version_of(data))
    assert "no peer has it; gone has it no more" in failure and gone.num_streams == module.MAX_FAILURES
    always = Peer(tmp_path / "3", script=scripted(lambda channel, number: channel.send(BUSY)))
    [failure], _, _ = pull(tmp_path / "third", {"always": always}, version_of(data), seconds=0.3)
    assert failure == "out of time; always is busy"


def test_a_version_that_no_peer_has_is_given_up_and_one_that_comes_meanwhile_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "ABSENT_SECONDS", 0.2)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.05)
    data = draw()
    later = Peer(tmp_path / "1")
    assert pull(tmp_path / "mine", {"later": later}, version_of(data))[0] == ["no peer has it"]
    monkeypatch.setattr(module, "ABSENT_SECONDS", SECONDS)
    asked = later.store.have

    def publish_when_asked(wanted):
        answer = asked(wanted)
        later.store.add({"slot-1": (version_of(data), data)})
        return answer

    monkeypatch.setattr(later.store, "have", publish_when_asked)
    failures, store, _ = pull(tmp_path / "mine", {"later": later}, version_of(data))
    assert failures == [""] and store.read("slot-1") == data


def test_a_fetch_goes_on_with_the_blocks_of_a_process_that_was_killed(tmp_path):
    """What is wrong in the file is fetched again; what is left over of another version of the name is deleted."""
    data, old = draw(NUM_BLOCKS * BLOCK_BYTES), draw(NUM_BLOCKS * BLOCK_BYTES)
    store = VersionStore(tmp_path / "mine")
    for content, start in ((old, 0), (data, 1)):
        left = store.begin(version_of(content))
        assert left.write(LIST, block_hashes(content)) and not left.write(LIST, block_hashes(content))
        for number in range(start, NUM_BLOCKS):
            block = content[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            assert left.write(number, block) and not left.write(number, block)
    with left.path.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 5)
        file.write(b"damaged")
    peers = {"one": Peer(tmp_path / "1", data)}
    failures, store, num_bytes = pull(tmp_path / "mine", peers, version_of(data))
    assert failures == [""] and store.read("slot-1") == data
    assert num_bytes == bytes_of(data) - 2 * BLOCK_BYTES, "blocks 1 and 3 were there"
    assert not list((tmp_path / "mine").glob("*.part"))


def test_blocks_of_a_version_on_its_way_are_passed_on(tmp_path):
    """A slow holder sends less than two copies and a bit to three peers, which have the rest from each other."""
    data = draw(24 * BLOCK_BYTES)
    holder = Peer(tmp_path / "holder", data, uplink_mbit=100.0)
    pullers = {name: Peer(tmp_path / name) for name in ("one", "two", "three")}

    async def fetch_all():
        nets = [Net(holder=holder, **{k: p for k, p in pullers.items() if k != name}) for name in pullers]
        return await asyncio.gather(
            *(net.fetch(peer.store, version_of(data)) for net, peer in zip(nets, pullers.values(), strict=True))
        )

    assert asyncio.run(fetch_all()) == [[""], [""], [""]]
    assert all(peer.store.read("slot-1") == data for peer in pullers.values())
    assert holder.server.bytes_out < 2.2 * len(data)


@pytest.mark.parametrize(
    ("kind", "num_bytes"), [(WANT, 33), (WANT, HASH_BYTES * (MAX_VERSIONS + 1)), (GET, GET_BYTES - 1), (DATA, 1)]
)
def test_a_request_that_is_none_ends_the_stream(tmp_path, kind, num_bytes):
    async def ask():
        channel = await Net(one=Peer(tmp_path, draw(1000))).connect("one")
        with contextlib.closing(channel):
            await channel.send(kind, bytes(num_bytes))
            with pytest.raises(ExchangeError, match="hung up"):
                await channel.receive({HAVE: 10**6, DATA: 10**6})

    asyncio.run(ask())


def test_what_a_peer_does_not_have_is_absent_whatever_is_asked_for(tmp_path):
    data = draw(1000)

    async def ask(version, number):
        channel = await Net(one=Peer(tmp_path, data)).connect("one")
        with contextlib.closing(channel):
            await channel.send(GET, bytes.fromhex(version) + number.to_bytes(4))
            return await channel.receive({DATA: 10**6, ABSENT: 0})

    assert asyncio.run(ask(digest(data), 0)) == (DATA, data)
    assert asyncio.run(ask(digest(data), LIST)) == (DATA, block_hashes(data))
    for version, number in ((digest(data), 1), (digest(data), LIST - 1), (digest(b"another"), 0)):
        assert asyncio.run(ask(version, number)) == (ABSENT, b"")
