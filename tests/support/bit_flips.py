"""A server that flips one bit of what it sends for each download, and a puller that may load none of it.

Two peers on loopback, p2pd and all. The bit is flipped in a block, or in the list of a version's hashes.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from exchange_cluster import flat, open_cluster

from spes_p2p.swarm.exchange import fetch
from spes_p2p.swarm.exchange.blocks import LIST
from spes_p2p.swarm.names import SHARED, VectorName

PULLED = VectorName("slot-1"), VectorName(SHARED)
"""Versions of one block, and of twelve."""
PULL_SECONDS = 60.0


@dataclass
class Flips:
    """What came of them.

    Attributes:
        seed: Seed of the flipped bits.
        refused: By what the bit was flipped in; each refusal named the sender.
        loaded: The same, of what was loaded.
        unnamed: Refusals that do not name the sender.
    """

    seed: int
    refused: Counter[str] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    unnamed: Counter[str] = field(default_factory=Counter)

    @property
    def total(self) -> int:
        """Bits flipped."""
        return sum(counts.total() for counts in (self.refused, self.loaded, self.unnamed))


def flip_downloads(folder: Path, count: int, seed: int) -> Flips:
    """Return how a peer handled downloads, each with a flipped bit.

    Args:
        folder: For the peers' files.
        count: Number of bits.
        seed: Seed of the flipped bits.
    """
    puller, server = open_cluster(lambda name: folder / name, ["puller", "server"])
    flips, draw, log = Flips(seed), random.Random(seed), logging.getLogger(fetch.__name__)
    level, read, flipped_in = log.level, server._store.read_part, ""
    log.setLevel(logging.ERROR)  # which is what it says of each of them

    def flipping(digest: str, number: int) -> bytes | None:
        data = read(digest, number)
        if data is None or (number == LIST) != (flipped_in == "lists"):
            return data
        changed, place = bytearray(data), draw.randrange(8 * len(data))
        changed[place // 8] ^= 1 << place % 8
        return bytes(changed)

    server._store.read_part = flipping
    try:
        while flips.total < count:
            name, flipped_in = draw.choice(PULLED), draw.choice(("blocks", "lists"))
            true = server.publish(flips.total + 1, {name: flat(draw.randrange(2**30), name.kind)})[name]
            failure = puller.pull({name: (true.round, true.digest)}, [server.peer_id], timeout=PULL_SECONDS).get(name)
            is_named = failure is not None and server.peer_id[-6:] in failure
            (flips.loaded if failure is None else flips.refused if is_named else flips.unnamed)[flipped_in] += 1
    finally:
        log.setLevel(level)
        puller.close()
        server.close()
    return flips
