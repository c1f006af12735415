"""A server that flips one bit of what it sends for each download, and a puller that may load none of it.

Two peers on loopback, p2pd and all. What an honest server sends has one bit flipped: in a block, in a list
of hashes, in a document's bytes, or in its signed description.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import support
from spes_p2p.swarm.exchange import fetch
from spes_p2p.swarm.exchange.exchange import Exchange
from spes_p2p.swarm.exchange.protocol import DATA, TEXT, Channel
from spes_p2p.swarm.names import SHARED, VectorName

SMALL, LARGE, DOCUMENT = "slot-1", SHARED, "manifest"
"""What is pulled: a version of one block, one of twelve, of which a list comes first, and a document."""
DOCUMENT_BYTES, PULL_SECONDS = 3000, 60.0


@dataclass
class Flips:
    """What came of them.

    Attributes:
        seed: Seed of the flipped bits.
        refused: By what the bit was flipped in; each refusal named the sender.
        loaded: The same, of what was loaded and is not what its author signed.
        unnamed: Refusals that do not name the sender.
        harmless: Of bits that mean nothing, such as the last ones of a signature in base64: what was loaded is right.
    """

    seed: int
    refused: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    unnamed: Counter[str] = field(default_factory=Counter)
    harmless: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bits flipped."""
        return sum(counts.total() for counts in (self.refused, self.loaded, self.unnamed, self.harmless))


class FlippingChannel(Channel):
    """A stream that flips a bit of the first message of a kind that it sends.

    Args:
        channel: The stream.
        exchange: Says in which kind of message, and counts.
    """

    def __init__(self, channel: Channel, exchange: FlippingExchange) -> None:
        super().__init__(channel._reader, channel._writer, channel.seconds)
        self._exchange = exchange

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        if kind == self._exchange.flips_in:
            self._exchange.flips_in = b""
            self._exchange.num_flipped += 1
            changed, place = bytearray(data), self._exchange.draw.randrange(8 * len(data))
            changed[place // 8] ^= 1 << place % 8
            data = changed
        await super().send(kind, data)


class FlippingExchange(Exchange):
    """Serves as any peer does, over channels that flip bits.

    Attributes:
        draw: Draws the bits.
        flips_in: Kind of the message in which the next one is; empty for none.
        num_flipped: So far.
    """

    draw: random.Random
    flips_in = b""
    num_flipped = 0

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        await super().serve_fetch(FlippingChannel(channel, self), peer)

    async def serve_inventory(self, channel: Channel, peer: str) -> None:
        await super().serve_inventory(FlippingChannel(channel, self), peer)


def flip_downloads(folder: Path, count: int, seed: int) -> Flips:
    """Return how a peer handled downloads, each with a flipped bit.

    Args:
        folder: For the peers' files.
        count: Bits, at least.
        seed: Seed of the flipped bits.
    """
    cluster = support("exchange_cluster")
    puller, server = cluster.open_cluster(lambda name: folder / name, ["puller", "server"], server={"serve": False})
    flips, draw, log = Flips(seed), random.Random(seed), logging.getLogger(fetch.__name__)
    level = log.level
    log.setLevel(logging.ERROR)  # which is what it says of each of them
    try:
        server.exchange = exchange = FlippingExchange(server.node, server._store)
        exchange.draw = draw
        number = 0
        while flips.total < count:
            name = draw.choice((SMALL, LARGE, DOCUMENT))
            number += 1
            if name == DOCUMENT:
                server.publish_document(name, draw.randbytes(DOCUMENT_BYTES), number)
            else:
                kind = VectorName(name).kind
                server.publish(number, {VectorName(name): cluster.flat(draw.randrange(2**30), kind)})
            exchange.flips_in = draw.choice((DATA, TEXT)) if name == DOCUMENT else DATA
            _pull_one(puller, server, name, flips)
    finally:
        log.setLevel(level)
        puller.close()
        server.close()
    return flips


def _pull_one(puller: Any, server: Any, name: str, flips: Flips) -> None:
    """Pull a version of which a bit is flipped, and note what came of it."""
    true, kind = server.versions()[name], server.exchange.flips_in
    peers, what = [server.peer_id], {SMALL: "blocks", LARGE: "lists", DOCUMENT: "documents"}[name]
    if name == DOCUMENT:
        what = "descriptions" if kind == TEXT else what
        failure = puller.exchange.pull_document(
            name, peers, author="", min_round=true.round, digest="", max_bytes=2**20, timeout=PULL_SECONDS
        )
    else:
        failure = puller.pull({name: (true.round, true.digest)}, peers, timeout=PULL_SECONDS).get(name, "")
    if failure:
        is_named = server.peer_id[-6:] in failure or what == "descriptions"
        (flips.refused if is_named else flips.unnamed)[what] += 1
    else:
        is_right = puller.exchange._store.read(name) == server.exchange._store.read(name)
        (flips.harmless if is_right else flips.loaded)[what] += 1
