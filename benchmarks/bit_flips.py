"""A server that flips one bit of each stream that it sends, and a puller that may load none of it.

Two peers on loopback, p2pd and all. What is sent is what an honest server sends, but for that bit: in a version's
bytes, in a delta that leads to one, in a document's, or in the signed description of any of them.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.cluster import support
from spes_p2p.swarm.exchange import client
from spes_p2p.swarm.exchange.exchange import Exchange
from spes_p2p.swarm.exchange.protocol import DATA, TEXT, Channel
from spes_p2p.swarm.exchange.versions import Version

BYTES, DELTA, DOCUMENT = "slot-1", "slot-2", "manifest"
"""What is pulled: whole, by a delta from what the puller has, and a document."""
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
    """A stream of which one bit is flipped on its way out.

    Args:
        channel: The stream.
        exchange: Says in which kind of message, and is told when it has happened.
    """

    def __init__(self, channel: Channel, exchange: FlippingExchange) -> None:
        super().__init__(channel._reader, channel._writer, channel.seconds)
        self._exchange = exchange
        self._place = -1

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        if kind == TEXT and self._exchange.flips_in == DATA:
            self._place = self._exchange.draw.randrange(8 * _payload_bytes(bytes(data)))
        elif kind == TEXT:
            data = self._flipped(bytes(data), self._exchange.draw.randrange(8 * len(data)))
        elif kind == DATA and 0 <= self._place < 8 * len(data):
            data, self._place = self._flipped(bytes(data), self._place), -1
        elif kind == DATA:
            self._place -= 8 * len(data)
        await super().send(kind, data)

    def _flipped(self, data: bytes, place: int) -> bytes:
        self._exchange.num_flipped += 1
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        return bytes(changed)


def _payload_bytes(answer: bytes) -> int:
    said = json.loads(answer)
    whole = json.loads(said["version"])
    return said["num_deltas"] * support("exchange_cluster").NUMELS["slot"] or whole["num_bytes"]


class FlippingExchange(Exchange):
    """Serves as any peer does, over channels that flip bits.

    Attributes:
        draw: Draws the bits.
        flips_in: Kind of the messages in which they are.
        num_flipped: So far.
    """

    draw: random.Random
    flips_in = DATA
    num_flipped = 0

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        await super().serve_fetch(FlippingChannel(channel, self), peer)


def flip_downloads(folder: Path, count: int, seed: int) -> Flips:
    """Return how a peer handled downloads, each with a flipped bit.

    Args:
        folder: For the peers' files.
        count: Bits, at least.
        seed: Seed of the flipped bits.
    """
    cluster = support("exchange_cluster")
    puller, server = cluster.open_cluster(lambda name: folder / name, ["puller", "server"], server={"serve": False})
    flips, draw, log = Flips(seed), random.Random(seed), logging.getLogger(client.__name__)
    level = log.level
    log.setLevel(logging.ERROR)  # which is what it says of each of them
    try:
        server.exchange = exchange = FlippingExchange(server.node, server._store)
        exchange.draw = draw
        truth = _publish(server, puller, draw)
        while flips.total < count:
            name, exchange.flips_in = draw.choice(list(truth)), draw.choice((DATA, DATA, TEXT))
            _pull_one(puller, server, name, truth[name], flips)
            if flips.harmless:
                truth = _publish(server, puller, draw)
    finally:
        log.setLevel(level)
        puller.close()
        server.close()
    return flips


def _publish(server: Any, puller: Any, draw: random.Random) -> dict[str, Version]:
    """Have the server publish something new of each kind, and the puller what comes before; return the server's."""
    cluster, number = support("exchange_cluster"), draw.randrange(2**30)
    round = max((version.round for version in server.versions().values()), default=0) + 2
    bundle, delta = cluster.flat(number), cluster.draw_delta(number)
    for peer in (server, puller):
        peer.publish(round - 1, {DELTA: bundle})
    server.publish(round, {DELTA: cluster.advance(DELTA, bundle, delta)}, {DELTA: delta})
    server.publish(round, {BYTES: cluster.flat(number + 1)})
    server.publish_document(DOCUMENT, draw.randbytes(DOCUMENT_BYTES))
    return {name: server.versions()[name] for name in (BYTES, DELTA, DOCUMENT)}


def _pull_one(puller: Any, server: Any, name: str, true: Version, flips: Flips) -> None:
    """Pull a version of which each try is spoiled, and note what came of each."""
    exchange, before = server.exchange, puller.versions().get(name)
    spoiled = exchange.num_flipped
    wanted, sizes = {name: [server.peer_id]}, {name: true.num_bytes}
    failures = puller.exchange.pull(wanted, min_round=true.round, timeout=PULL_SECONDS, max_bytes=sizes)
    spoiled = exchange.num_flipped - spoiled
    what = "descriptions" if exchange.flips_in == TEXT else {BYTES: "bytes", DELTA: "deltas"}.get(name, "documents")
    now = puller.versions().get(name)
    if now != before:
        is_right = now.digest == true.digest and puller.exchange._store.read(name) == server.exchange._store.read(name)
        (flips.harmless if is_right else flips.loaded)[what] += 1
        spoiled -= 1
    named = min(failures.get(name, "").count(server.peer_id[-6:]), spoiled)
    flips.refused[what] += named
    flips.unnamed[what] += spoiled - named
