"""Bytes that the decision of a round costs a peer, by the size of the swarm.

    python -m benchmarks.certificate_bytes

Swarms of a history without faults (`history_nodes`) decide some rounds; every message is counted as the network sends
it, with signatures of the length of RSA-2048 and without public keys, which a peer is told once. Writes
`benchmarks/results/certificate_bytes.md` and `.json`.
"""

from __future__ import annotations

import base64
import hashlib
import logging
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import history_nodes
from benchmarks.history_nodes import NUM_SLOTS, HmacKeys, Node, World, hashed
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import write_json, write_page
from benchmarks.tables import markdown_table
from spes_p2p.swarm.certificate import MAX_VOTERS, Message, genesis
from spes_p2p.swarm.consensus import encoded
from spes_p2p.swarm.p2p.identity import hashed_peer_id

RESULTS = Path("benchmarks/results")
SIZES = (8, 64, 256)
ROUNDS = 4
SIGNATURE_BYTES = 256
"""Of RSA-2048."""


class LongKeys(HmacKeys):
    """A history's keys, whose signatures are as long as a peer's, and as hard to compress."""

    def sign(self, data: bytes) -> str:
        return _lengthened(super().sign(data))

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        return signature == _lengthened(HmacKeys(peer_id).sign(data))


def _lengthened(signature: str) -> str:
    return base64.b64encode(hashlib.shake_256(signature.encode()).digest(SIGNATURE_BYTES)).decode()


class CountedNode(Node):
    """Counts what it sends to others and receives from them."""

    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    largest: int = 0

    def start(self) -> None:
        self.keys = LongKeys(self.peer_id)
        super().start()

    def send(self, peer: str, message: Message) -> None:
        if peer != self.peer_id:
            num_bytes = len(encoded(message))
            CountedNode.sent[self.peer_id] += num_bytes
            CountedNode.received[peer] += num_bytes
            CountedNode.largest = max(CountedNode.largest, num_bytes)
        super().send(peer, message)


def measure(num_peers: int) -> dict[str, Any]:
    """Return kilobytes per round that a swarm's peers send and receive: the mean, and the most of any peer.

    `largest_kb` are those of the largest message.
    """
    CountedNode.largest = 0
    history_nodes.RULES = replace(history_nodes.RULES, min_peers=min(num_peers, MAX_VOTERS))
    world = World(0, random.Random(0))
    peers = [hashed_peer_id(f"{index}".encode()) for index in range(num_peers)]
    start = genesis("bytes", peers[0], hashed("manifest"), NUM_SLOTS)
    for peer in peers:
        world.nodes[peer] = CountedNode(world, peer, start)
    for node in world.nodes.values():
        node.start()
    heads = [node for node in world.nodes.values()]
    world.run(600, lambda: min(node.last.round for node in heads) >= 2)
    CountedNode.sent.clear()
    CountedNode.received.clear()
    first = heads[0].last.round
    world.run(world.now + 600, lambda: min(node.last.round for node in heads) >= first + ROUNDS)
    rounds = max(1, heads[0].last.round - first)
    row: dict[str, Any] = {"peers": num_peers, "voters": len(heads[0].last.voters), "rounds": rounds}
    for way, counts in (("sent", CountedNode.sent), ("received", CountedNode.received)):
        per_peer = [counts[peer] / rounds / 1000 for peer in peers]
        row |= {f"mean_kb_{way}": sum(per_peer) / num_peers, f"most_kb_{way}": max(per_peer)}
    return row | {"largest_kb": CountedNode.largest / 1000}


def main() -> None:
    """Measure and write the table."""
    logging.disable(logging.WARNING)
    where = Circumstances.now(load_average(), None)
    rows = [measure(size) for size in SIZES]
    lines = []
    for row in rows:
        figures = [row[f"{how}_kb_{way}"] for way in ("sent", "received") for how in ("mean", "most")]
        lines.append((f"{row['peers']}", f"{row['voters']}", *(f"{kb:.1f} KB" for kb in figures)))
    head = ("peers", "voters", "sent by a peer, mean", "most, the proposer", "received, mean", "most")
    table = markdown_table(head, lines)
    write_page(
        RESULTS / "certificate_bytes.md", where, "Bytes of a round's decision", f"Counted, not timed.\n\n{table}"
    )
    write_json(RESULTS / "certificate_bytes.json", where, rows=rows)
    print(table)


if __name__ == "__main__":
    main()
