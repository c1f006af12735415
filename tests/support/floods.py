"""Streams without end, of each kind that a peer listens to, and how much memory they take of it."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from attacker import ASK, AVERAGE, FETCH, Attacker, Watched, gather
from peer_server import with_arrays
from real_peers import PeerProcess, contribution

from spes_p2p.swarm.averaging.averaging import Greeting
from spes_p2p.swarm.exchange.protocol import MAX_VERSIONS
from spes_p2p.swarm.p2p.identity import hashed_peer_id

POURED_BYTES, POUR_SECONDS = 2**28, 5.0
"""More than any peer may take, and how long it is offered."""
CROWD, CROWD_SECONDS = 28, 3.0
"""Streams that a peer must keep open at once, because it is about to meet others."""

MAX_TAKEN_MIB, MAX_GROWN_MIB = 16, 64
"""What is promised: of one stream, and of all of a peer's processes together."""


@dataclass(frozen=True)
class Flood:
    """What endless streams have done to a peer.

    Attributes:
        taken: Bytes that its machine took of each.
        growth: By how many MiB each of its processes had grown at most.
    """

    taken: tuple[int, ...]
    growth: Mapping[str, float]

    @property
    def grown_mib(self) -> float:
        """By how much all of them together had grown."""
        return sum(max(0.0, size) for size in self.growth.values())

    @property
    def taken_mib(self) -> float:
        """What was taken of the stream of which most was."""
        return max(self.taken) / 2**20

    def __str__(self) -> str:
        return f"{self.taken_mib:.1f} MiB taken of a stream, {self.grown_mib:.0f} MiB grown: {dict(self.growth)}"


def message(kind: bytes, data: bytes) -> bytes:
    """Return a message as a channel frames it."""
    return kind + len(data).to_bytes(4, "big") + data


GREETING = message(b"t", Greeting(meeting="0" * 64, group="shared", lane=0).model_dump_json().encode())
"""Of a meeting that the peer does not know."""
STREAMS = {
    "4 GiB": (AVERAGE, b"t" + b"\xff" * 4, b"x" * 2**18),
    "parts": (AVERAGE, GREETING, message(b"p", bytes(2**18 - 100))),
    "a request": (FETCH, b"w" + (32 * MAX_VERSIONS).to_bytes(4), b"x" * 2**18),
    "an inventory": (ASK, b"t\x00\x00\x20\x00", b"x" * 2**18),
}
"""By what they consist of: the service, the first bytes, and what comes then without end."""


def flood(victim: PeerProcess, attacker: Attacker, kind: str) -> Flood:
    """Send a peer a stream without end."""
    service, first, chunk = STREAMS[kind]
    with Watched(victim) as watched:
        taken = attacker.pour(service, first, chunk, POURED_BYTES, POUR_SECONDS)
    return Flood((taken,), watched.growth())


def crowd(victim: PeerProcess, attacker: Attacker) -> Flood:
    """Send a peer many, while it waits for a group of which whoever calls may have heard before."""
    item = contribution(victim.peer_id, torch.Generator().manual_seed(1))
    expected = [victim.peer_id, hashed_peer_id(b"absent")]
    victim.begin("average", item.member, with_arrays(item.deltas), expected=expected, closes_from=time.time() + 2)
    pour = functools.partial(attacker.pour, *STREAMS["parts"], POURED_BYTES, CROWD_SECONDS)
    try:
        with Watched(victim) as watched:
            taken = gather([pour] * CROWD)
    finally:
        met = victim.finish()
    assert len(met.roster) == 1, "no other was there to meet"
    return Flood(tuple(taken), watched.growth())
