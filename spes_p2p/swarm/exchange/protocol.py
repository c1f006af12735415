"""The exchange's messages: questions with one answer, and requests for blocks."""

from __future__ import annotations

import struct
from typing import Annotated, Literal

from pydantic import Field

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.p2p.channel import Message
from spes_p2p.swarm.records import Count

MAX_VERSIONS = 4200
"""Versions of an inventory and of a WANT message: the vectors of the largest model, and documents."""


Document = Literal["manifest", "revision"]


class Question(Message):
    """Asks for a document as it is, or for an `Inventory`."""

    document: Document | None = None
    number: Count | None = None
    """Of a revision; without it, the newest is sent."""


class Inventory(Message):
    """The newest version that a peer has of each name."""

    versions: Annotated[tuple[Version, ...], Field(max_length=MAX_VERSIONS)]


MAX_DOCUMENT_BYTES, MAX_INVENTORY_BYTES = 2**16, 2**20
"""Longest documents and inventories. A manifest has some kilobytes; to refuse one of 64 MB of unknown keys would take
gigabytes."""
WANT, HAVE, GET, DATA, BUSY, ABSENT = b"w", b"h", b"g", b"d", b"b", b"a"
"""Kinds of messages of a fetch: digests of versions (none: the same as before), and what the peer has of each; a
request for a part of one, and bytes of it, or "ask again later", or "not here"."""
_GET = struct.Struct("!32sI")
GET_BYTES = _GET.size


def pack_get(digest: str, number: int) -> bytes:
    """Return the content of a GET message, for a block of a version or its LIST."""
    return _GET.pack(bytes.fromhex(digest), number)


def parse_get(data: bytes) -> tuple[str, int]:
    """Return the digest and the number of a GET message; raise ExchangeError if it is cut short."""
    if len(data) != GET_BYTES:
        raise ExchangeError(f"sent a request of {len(data)} bytes")
    digest, number = _GET.unpack(data)
    return digest.hex(), number


def parse_want(data: bytes) -> list[str]:
    """Return the digests of a WANT message; raise ExchangeError if it is cut short."""
    if len(data) % HASH_BYTES:
        raise ExchangeError(f"sent {len(data)} bytes of digests")
    return [data[start : start + HASH_BYTES].hex() for start in range(0, len(data), HASH_BYTES)]
