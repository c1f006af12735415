"""The messages of a round's decision: their bytes by the size of the swarm, and what a stranger's messages cost.

    .venv/bin/python -m benchmarks.decisions [bytes] [flood]

Bytes: swarms of a history without faults (`history_peers`) decide some rounds. Every message counts as the network
sends it, with signatures as long as those of RSA-2048 and without public keys, which a peer receives once.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import logging
import random
import sys
import time
import tracemalloc
import zlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from statistics import mean
from typing import Any

from benchmarks import history_peers
from benchmarks.history_cuts import virtually
from benchmarks.history_peers import NUM_SLOTS, HmacKeys, Node, World, hashed
from benchmarks.tables import Row, markdown_table
from spes_p2p.errors import ExchangeError
from spes_p2p.presentation import say, size_text
from spes_p2p.swarm.certificate import MAX_VOTERS, genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.wire import MAX_STRANGE_BYTES, Envelope, Wired, packed

SIZES, ROUNDS = (8, 64, 256), 4
SIGNATURE_BYTES = 256
NUM_FLOOD, FLOOD_BYTES = 24, 15_000


class LongKeys(HmacKeys):
    """A history's keys, whose signatures are as long as a peer's, and as hard to compress."""

    def sign(self, data: bytes) -> str:
        return _lengthened(super().sign(data))

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        return signature == LongKeys(peer_id).sign(data)


def _lengthened(signature: str) -> str:
    return base64.b64encode(hashlib.shake_256(signature.encode()).digest(SIGNATURE_BYTES)).decode()


class CountedNode(Node):
    """Counts the bytes that it sends."""

    def __init__(self, world: World, peer: str, sent: Counter[str], largest: list[int]) -> None:
        super().__init__(world, peer)
        self.keys = LongKeys(peer)
        self._sent = sent
        self._largest = largest

    def post(self, peer: str, message: Wired) -> None:
        num_bytes = len(packed(message, names_results=peer in self.last.voters))
        self._sent[self.peer_id] += num_bytes
        self._largest.append(num_bytes)
        super().post(peer, message)


def measure(num_peers: int) -> dict[str, Any]:
    """Return a swarm's voters, the kB that a peer sends in a round, mean and most, and of the largest message."""
    return virtually(_measure(num_peers))


async def _measure(num_peers: int) -> dict[str, Any]:
    history_peers.RULES = replace(history_peers.RULES, min_peers=min(num_peers, MAX_VOTERS))
    peers = [hashed_peer_id(f"{index}".encode()) for index in range(num_peers)]
    world = World(0, random.Random(0), genesis("bytes", peers[0], hashed("manifest"), NUM_SLOTS, peers))
    sent, largest = Counter[str](), list[int]()
    for peer in peers:
        world.nodes[peer] = CountedNode(world, peer, sent, largest)
    for node in world.nodes.values():
        node.start()
    await _decided(world.nodes, 2)
    sent.clear()
    first = world.nodes[peers[0]].last.round
    await _decided(world.nodes, first + ROUNDS)
    body = world.nodes[peers[0]].last
    kb = [sent[peer] / (body.round - first) / 1000 for peer in peers]
    return {"voters": len(body.voters), "mean_kb": mean(kb), "most_kb": max(kb), "largest_kb": max(largest) / 1000}


async def _decided(nodes: Mapping[str, Node], round: int) -> None:
    """Wait until all nodes follow a round's certificate."""
    while min(node.last.round for node in nodes.values()) < round:
        await asyncio.sleep(1.0)


def say_bytes() -> None:
    """Print the table of bytes."""
    found = {size: measure(size) for size in SIZES}
    lines = [
        (str(size), str(each["voters"]), f"{each['mean_kb']:.1f} KB", f"{each['most_kb']:.1f} KB")
        for size, each in found.items()
    ]
    say(markdown_table(("peers", "voters", "sent by a peer, mean", "most, the leader"), lines))


def say_flood() -> None:
    """Print the cost of messages that unpack to 4 MB, and of those that are as long as a stranger's may be."""
    item = b'{"peer_id":"","tokens":0},'
    for num_bytes in (2**22, MAX_STRANGE_BYTES - 1):
        text = b'{"certificates":{"certificates":[' + item * (num_bytes // len(item))
        data = zlib.compress(text[:num_bytes]).ljust(FLOOD_BYTES, b"0")
        tracemalloc.start()
        _refused(data)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        began = time.thread_time()
        for _ in range(NUM_FLOOD):
            _refused(data)
        milliseconds = 1000 * (time.thread_time() - began) / NUM_FLOOD
        what = f"messages of a stranger, 15 KB that unpack to {size_text(num_bytes)}: memory of one"
        say("  ".join(Row(what, f"{peak / 1024:.0f} KiB").cells))
        say("  ".join(Row("- processor time of one", f"{milliseconds:.1f} ms").cells))


def _refused(data: bytes) -> None:
    with contextlib.suppress(ExchangeError):
        Envelope.unpack(data, MAX_STRANGE_BYTES)
        raise AssertionError("an invalid message was accepted")


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    for part in sys.argv[1:] or ("bytes", "flood"):
        {"bytes": say_bytes, "flood": say_flood}[part]()
