"""Membership and the exchange on a virtual network: versions in blocks between peers, some of them slow or hostile."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path

import pytest
import torch
from pulls import scripted, send_part

from spes_p2p.codecs.vectors import BLOCK_BYTES, block_hashes, to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.sim.loop import EPOCH_SECONDS
from spes_p2p.sim.network import VirtualNetwork, VirtualNode
from spes_p2p.swarm.exchange.blocks import LIST
from spes_p2p.swarm.exchange.exchange import CHUNK_SECONDS, Exchange
from spes_p2p.swarm.exchange.fetch import ABSENT_SECONDS
from spes_p2p.swarm.exchange.protocol import DATA
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.records import Claim

pytestmark = pytest.mark.timeout(120)

NAME = "slot-1"
NUM_BLOCKS = 8
ROUNDS = RoundConfig(heartbeat_seconds=5.0, lease_seconds=30.0)


class Peer:
    """A virtual peer with a membership and an exchange; it trains slot 1 of two."""

    def __init__(self, network: VirtualNetwork, folder: Path, number: int, *, serve: bool = True, uplink_mbit=0.0):
        self.node: VirtualNode = network.node(hashed_peer_id(bytes([number])), "run", uplink_mbit=uplink_mbit)
        self.peer_id = self.node.peer_id
        self.store = VersionStore(folder / str(number))
        self.exchange = Exchange(self.node, self.store, serve=serve, uplink_mbit=uplink_mbit or None)
        self.membership = Membership(self.node)

    def train(self) -> None:
        self.membership.start(ROUNDS)
        self.membership.announce(Claim(peer_id=self.peer_id, state="active", slots=(1,), max_slots=2, since=0.0))

    def serves(self, script) -> None:
        """Answer fetches as a script says."""

        async def answer(channel: Channel, peer: str) -> None:
            await script(channel)

        self.node.run(self.node.serve(self.exchange.service("fetch"), 60.0, answer), 10.0)


class World:
    """Peers on one network, and a version that they exchange."""

    def __init__(self, folder: Path, seed: int) -> None:
        random.seed(seed)
        self.network = VirtualNetwork(seed)
        self.folder = folder
        self.peers: list[Peer] = []
        values = torch.rand(NUM_BLOCKS * BLOCK_BYTES // 4, generator=torch.Generator().manual_seed(seed))
        self.data = bytes(to_bytes(values))
        self.version = Version.of(NAME, 1, self.data)

    def peer(self, *, has: bool = False, **settings) -> Peer:
        peer = Peer(self.network, self.folder, len(self.peers), **settings)
        if has:
            peer.store.add({NAME: (self.version, self.data)})
        self.peers.append(peer)
        return peer

    def pull(self, peer: Peer, timeout: float = 600.0) -> dict[str, str]:
        return peer.exchange.pull([self.version], [each.peer_id for each in self.peers], timeout=timeout)


@pytest.fixture
def world(tmp_path: Path, seed: int):
    world = World(tmp_path, seed)
    yield world
    world.network.close()


def test_claims_of_live_peers_are_renewed_and_those_of_a_killed_one_end_with_its_lease(world: World) -> None:
    peers = [world.peer() for _ in range(3)]
    for peer in peers:
        peer.train()
    everybody = {peer.peer_id for peer in peers}
    for _ in range(10):
        assert not peers[0].membership.wait(ROUNDS.lease_seconds / 2)
        assert set(peers[0].membership.read(Claim)) == everybody
        assert peers[0].membership.live_peers == everybody - {peers[0].peer_id}
    peers[2].node.close()
    peers[0].membership.wait(ROUNDS.lease_seconds + 1.0)
    assert set(peers[0].membership.read(Claim)) == everybody - {peers[2].peer_id}
    peers[1].membership.stop()
    peers[0].membership.wait(ROUNDS.lease_seconds + 1.0)
    assert set(peers[0].membership.read(Claim)) == {peers[0].peer_id}


def test_swarms_pass_versions_and_records_over_any_network(world: World) -> None:
    """A `HivemindSwarm` needs no p2pd; of its parts only the decisions and the averager do still."""
    nodes = [world.network.node(hashed_peer_id(bytes([number])), "run") for number in (8, 9)]
    one, two = (HivemindSwarm(node, world.folder / node.peer_id) for node in nodes)
    one.keep_document("manifest", b"who may join")
    assert two.exchange.documents("manifest", [one.peer_id]) == {one.peer_id: b"who may join"}
    one.announce(Claim(peer_id=one.peer_id, state="active", max_slots=1, since=0.0))
    assert set(two.read(Claim)) == set(two.contacts()) == {one.peer_id}
    assert not two.wait(5.0) and two.now() == one.now() > EPOCH_SECONDS
    for swarm in (one, two):
        swarm.close()
        assert swarm.wait(1e9)


def test_six_peers_fetch_a_version_from_the_one_that_has_it_and_from_each_other(world: World) -> None:
    """From the one alone it would take the time of five copies over its uplink."""
    world.peer(has=True, uplink_mbit=80.0)
    others = [world.peer(uplink_mbit=80.0) for _ in range(5)]
    began, failures = world.network.loop.time(), []
    world.network.loop.live([lambda peer=peer: failures.append(world.pull(peer)) for peer in others])
    seconds = world.network.loop.time() - began
    assert failures == [{}] * 5 and all(peer.store.read(NAME) == world.data for peer in others)
    floor = 8 * len(world.data) / 80e6
    assert floor <= seconds < 5 * floor
    assert sum(peer.exchange.server.bytes_out for peer in others) > len(world.data)


async def lie(channel: Channel, number: int) -> None:
    size = NUM_BLOCKS * 32 if number == LIST else BLOCK_BYTES
    for start in range(0, size, FRAME_BYTES):
        await channel.send(DATA, random.randbytes(min(FRAME_BYTES, size - start)))


@pytest.mark.parametrize("kind", ["slow", "silent", "lying", "killed", "cut"])
def test_one_bad_source_does_not_keep_a_version_from_coming(world: World, kind: str) -> None:
    good = world.peer(has=True)
    bad = world.peer(has=kind in ("killed", "cut"), serve=kind in ("killed", "cut"), uplink_mbit=1.0)
    puller = world.peer()

    async def trickle(channel: Channel, number: int) -> None:
        size = NUM_BLOCKS * 32 if number == LIST else BLOCK_BYTES
        await channel.send(DATA, world.data[:1] if number != LIST else block_hashes(world.data)[: size - 1])
        await asyncio.sleep(CHUNK_SECONDS - 1.0)
        with contextlib.suppress(Exception):
            await send_part(channel, world.data, number)

    async def keep_silent(channel: Channel) -> None:
        await asyncio.sleep(1e6)

    scripts = {"slow": scripted(trickle), "silent": keep_silent, "lying": scripted(lie)}
    if kind in scripts:
        bad.serves(scripts[kind])
    elif kind == "killed":
        world.network.loop.call_later(0.5, bad.node.close)
    else:
        world.network.loop.call_later(0.5, world.network.cuts.add, (bad.peer_id, puller.peer_id))
    began = world.network.loop.time()
    assert world.pull(puller) == {}
    assert puller.store.read(NAME) == world.data and good.exchange.server.bytes_out >= len(world.data) // 2
    assert world.network.loop.time() - began < 2 * CHUNK_SECONDS


def test_a_version_that_no_peer_has_is_given_up_and_a_lie_alone_is_not_stored(world: World) -> None:
    world.peer()
    puller = world.peer()
    began = world.network.loop.time()
    assert "no peer has it" in world.pull(puller)[NAME]
    assert ABSENT_SECONDS <= world.network.loop.time() - began < 2 * ABSENT_SECONDS
    world.peer(serve=False).serves(scripted(lie))
    assert "sent other bytes than belong to slot-1" in world.pull(puller)[NAME]
    assert puller.store.newest() == {}


def test_a_pull_is_the_same_again_from_the_same_seed(tmp_path: Path, seed: int) -> None:
    def once(folder: Path) -> tuple[float, list[int]]:
        world = World(folder, seed)
        world.network.loss = 0.2
        peers = [world.peer(has=number < 2, uplink_mbit=20.0) for number in range(5)]
        world.network.loop.live([lambda peer=peer: world.pull(peer) for peer in peers[2:]])
        found = world.network.loop.time(), [peer.exchange.server.bytes_out for peer in peers]
        world.network.close()
        return found

    assert once(tmp_path / "one") == once(tmp_path / "other")
