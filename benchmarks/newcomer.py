"""What a newcomer downloads, over the bytes that it needs: from honest sources, and with a liar and a slow one.

    .venv/bin/python benchmarks/newcomer.py [--num-parameters 270_000_000] [--num-slots 8]

Four real peers on loopback, p2pd and all: three have a model of random numbers, and the fourth fetches it. The liar
flips a bit in each block that it sends; the slow one sends 8 Mbit/s.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.cluster import support
from benchmarks.records import say_rows
from benchmarks.tables import Row
from spes_p2p.codecs.vectors import BLOCK_BYTES, HASH_BYTES
from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.exchange.blocks import LIST
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node

SLOW_MBIT = 8.0
MAX_HONEST, MAX_HOSTILE = 1.02, 1.1
PULL_SECONDS = 1800.0


def main() -> int:
    """Measure and print; return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-parameters", type=int, default=270_000_000, help="the model's, in fp32")
    parser.add_argument("--num-slots", type=int, default=8, help="slots of as many parameters as what all peers train")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="newcomer-") as folder:
        rows = say_rows(measured(Path(folder), given.num_parameters, given.num_slots))
    return 0 if all(row.is_reached for row in rows) else 1


def measured(folder: Path, num_parameters: int, num_slots: int) -> Iterator[Row]:
    """Yield the downloads of two newcomers."""
    numel = num_parameters // (num_slots + 1)
    peers: list[HivemindSwarm] = []

    def start(name: str, uplink_mbit: float | None = None) -> HivemindSwarm:
        addresses = peers[0].node.addresses() if peers else []
        node = Node(Identity(folder / name / "key"), "newcomer", initial_peers=addresses)
        peers.append(HivemindSwarm(node, folder / name / "versions", uplink_mbit=uplink_mbit))
        vectors = Vectors({SHARED: numel, "slot": numel}, num_slots=num_slots)
        peers[-1].enter(RoundConfig(), vectors, support("peer_server").start_of((node.peer_id,)), max_slots=0)
        return peers[-1]

    try:
        sources = [start("honest"), start("liar"), start("slow", SLOW_MBIT)]
        for name in (SHARED, *map(VectorName.of_slot, range(num_slots))):
            version = sources[0].publish(1, {name: torch.randn(numel)})[name]
            for other in sources[1:]:
                other.exchange._store.restore({sources[0].exchange._store.path(version): version})
        sizes = [each.num_bytes for each in sources[0].versions().values()]
        needed = sum(size + HASH_BYTES * -(-size // BLOCK_BYTES) for size in sizes)
        what = f"newcomer of {num_parameters / 1e9:.3g} B parameters, downloaded / needed: "
        for told, most in (
            ("of three sources one slow", MAX_HONEST),
            ("of three sources one slow, one lying", MAX_HOSTILE),
        ):
            if most == MAX_HOSTILE:
                make_liar(sources[1])
            newcomer = start(told.replace(" ", "-"))
            seconds, ratio = download(newcomer, sources, needed)
            yield Row(f"{what}{told}", f"{ratio:.4f} in {seconds:.0f} s", f"{most}", ratio <= most)
    finally:
        for peer in reversed(peers):
            peer.close()


def make_liar(peer: HivemindSwarm) -> None:
    """Have a peer flip a bit of each block that it sends."""
    store: Any = peer.exchange._store
    read = store.read_part

    def lie(digest: str, number: int) -> bytes | None:
        data = read(digest, number)
        return data if data is None or number == LIST else bytes([data[0] ^ 1]) + data[1:]

    store.read_part = lie


def download(newcomer: HivemindSwarm, sources: list[HivemindSwarm], needed: int) -> tuple[float, float]:
    """Have a newcomer fetch all that the sources have; return the seconds, and its bytes over those that it needs.

    Raises:
        ExchangeError: something did not come.
    """
    wanted = {VectorName(each.name): (each.round, each.digest) for each in sources[0].versions().values()}
    began = time.monotonic()
    failures = newcomer.pull(wanted, [source.peer_id for source in sources], timeout=PULL_SECONDS)
    if failures:
        raise ExchangeError(f"could not pull {dict(failures)}")
    return time.monotonic() - began, newcomer.exchange.bytes_in / needed


if __name__ == "__main__":
    sys.exit(main())
