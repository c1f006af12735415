"""Bytes that the decision of a round costs a peer, by the size of the swarm.

    python -m benchmarks.certificate_bytes

Swarms of a history without faults (`history_peers`) decide some rounds; every message is counted as the network sends
it, with signatures of the length of RSA-2048 and without public keys, which a peer is told once. Writes
`benchmarks/results/certificate_bytes.md` and `.json`.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import history_peers
from benchmarks.history_peers import NUM_SLOTS, HmacKeys, Node, World, hashed
from benchmarks.machine import Circumstances, load_average
from benchmarks.records import write_json, write_page
from benchmarks.tables import markdown_table
from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.certificate import MAX_VOTERS, genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.wire import Wired, packed

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
    by_kind: Counter[str] = Counter()
    largest: int = 0

    def __init__(self, world: World, peer: str) -> None:
        super().__init__(world, peer)
        self.keys = LongKeys(peer)

    def post(self, peer: str, message: Wired) -> None:
        num_bytes = len(packed(message, names_results=peer in self.last.voters))
        CountedNode.sent[self.peer_id] += num_bytes
        CountedNode.received[peer] += num_bytes
        CountedNode.by_kind[type(message).__name__] += num_bytes
        CountedNode.largest = max(CountedNode.largest, num_bytes)
        super().post(peer, message)


def measure(num_peers: int) -> dict[str, Any]:
    """Return kilobytes per round that a swarm's peers send and receive: the mean, and the most of any peer.

    `largest_kb` are those of the largest message.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(_measure(num_peers))
    finally:
        loop.close()


async def _measure(num_peers: int) -> dict[str, Any]:
    CountedNode.largest = 0
    history_peers.RULES = replace(history_peers.RULES, min_peers=min(num_peers, MAX_VOTERS))
    peers = [hashed_peer_id(f"{index}".encode()) for index in range(num_peers)]
    world = World(0, random.Random(0), genesis("bytes", peers[0], hashed("manifest"), NUM_SLOTS, peers))
    nodes = world.nodes
    for peer in peers:
        nodes[peer] = CountedNode(world, peer)
    for node in nodes.values():
        node.start()
    await _decided(nodes, 2)
    counts = {"sent": CountedNode.sent, "received": CountedNode.received, "kind": CountedNode.by_kind}
    for count in counts.values():
        count.clear()
    first = nodes[peers[0]].last.round
    await _decided(nodes, first + ROUNDS)
    body = nodes[peers[0]].last
    rounds = body.round - first
    kinds = {kind: num / rounds / 1000 for kind, num in CountedNode.by_kind.most_common()}
    row: dict[str, Any] = {"peers": num_peers, "voters": len(body.voters), "rounds": rounds, "kinds": kinds}
    for way in ("sent", "received"):
        per_peer = [counts[way][peer] / rounds / 1000 for peer in peers]
        row |= {f"mean_kb_{way}": sum(per_peer) / num_peers, f"most_kb_{way}": max(per_peer)}
    return row | {"largest_kb": CountedNode.largest / 1000}


async def _decided(nodes: dict[str, Node], round: int) -> None:
    """Wait until all nodes follow a round's certificate."""
    while min(node.last.round for node in nodes.values()) < round:
        await asyncio.sleep(1.0)


def main() -> None:
    """Measure and write the table."""
    logging.disable(logging.WARNING)
    where = Circumstances.now(load_average(), None)
    rows = [measure(size) for size in SIZES]
    lines = []
    for row in rows:
        figures = [row[f"{how}_kb_{way}"] for way in ("sent", "received") for how in ("mean", "most")]
        lines.append((f"{row['peers']}", f"{row['voters']}", *(f"{kb:.1f} KB" for kb in figures)))
    head = ("peers", "voters", "sent by a peer, mean", "most, the leader", "received, mean", "most")
    table = markdown_table(head, lines)
    write_page(
        RESULTS / "certificate_bytes.md", where, "Bytes of a round's decision", f"Counted, not timed.\n\n{table}"
    )
    write_json(RESULTS / "certificate_bytes.json", where, rows=rows)
    print(table)


if __name__ == "__main__":
    main()
