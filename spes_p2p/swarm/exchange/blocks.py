"""Blocks of a version on their way here: which ones are here, and what other peers have."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from spes_p2p.codecs.vectors import BLOCK_BYTES, HASH_BYTES, digest_of
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.versions import Version

LIST = 2**32 - 1
"""Stands, in place of a block's number, for the list of the hashes of a version's blocks."""
ALL = -1
"""All bits: what a peer has of a version that is whole."""
_NOTHING, _ALL, _SOME = b"\0", b"\1", b"\2"


def has_part(have: int, number: int) -> bool:
    """Check whether a block, or the LIST, is among what a peer has: a bit for each block, the first block's lowest."""
    return bool(have >> number & 1) if number != LIST else have != 0


def encode_have(have: int, num_blocks: int = 0) -> bytes:
    """Return what a HAVE message says of a version."""
    if have in (0, ALL):
        return _ALL if have else _NOTHING
    return _SOME + have.to_bytes(most_have_bytes(num_blocks) - 1, "little")


def most_have_bytes(num_blocks: int) -> int:
    """Return the most bytes that a HAVE message has for a version of so many blocks."""
    return 1 + -(-num_blocks // 8)


def parse_have(data: bytes, sizes: Sequence[int]) -> list[int]:
    """Return what a peer has of versions of so many blocks; raise ExchangeError if the message does not fit them."""
    found, start = [], 0
    for size in sizes:
        kind, start = data[start : start + 1], start + 1
        stop = start + (most_have_bytes(size) - 1 if kind == _SOME else 0)
        if kind not in (_NOTHING, _ALL, _SOME) or stop > len(data):  # guard: never
            raise ExchangeError("sent a malformed list of blocks")
        found.append(ALL if kind == _ALL else int.from_bytes(data[start:stop], "little"))
        start = stop
    if start != len(data):
        raise ExchangeError("sent a list of blocks that is too long")
    return found


class Unfinished:
    """A version of which some blocks are here, in a file of its own; safe to use from several threads.

    Only blocks that match their hash are written. After a restart the file is compared with the hashes again.

    Args:
        version: The version; its digest is the hash of the list of its blocks' hashes.
        path: The file; one from before a restart is used again.

    Attributes:
        hashes: The list, once it is here.
        have: The blocks that are here, as `has_part` reads them; none before the list is.
    """

    def __init__(self, version: Version, path: Path) -> None:
        self.version = version
        self.path = path
        self.num_blocks = -(-version.num_bytes // BLOCK_BYTES)
        self.hashes = b""
        self.have = 0
        self._lock = threading.Lock()

    def part_bytes(self, number: int) -> int:
        """Return the length of a block, or of the LIST."""
        if number == LIST:
            return HASH_BYTES * self.num_blocks
        return min(BLOCK_BYTES, self.version.num_bytes - BLOCK_BYTES * number)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are here."""
        return self.have == (1 << self.num_blocks) - 1

    def missing(self) -> list[int]:
        """Return the blocks that are missing; only the LIST as long as that is missing."""
        if not self.hashes:
            return [LIST]
        return [number for number in range(self.num_blocks) if not has_part(self.have, number)]

    def read(self, number: int) -> bytes | None:
        """Return a block, or the LIST; None if it is not here."""
        if number == LIST:
            return self.hashes or None
        return read_block(self.path, number) if has_part(self.have, number) else None

    def write(self, number: int, data: bytes | bytearray) -> bool:
        """Keep a block, or the LIST; return whether it was missing.

        Raises:
            ExchangeError: it does not belong to the version.
            OSError: the disk is full, or fails.
        """
        if not self._is_right(number, data):
            raise ExchangeError(f"sent other bytes than belong to {self.version.name}")
        with self._lock:
            if self.hashes if number == LIST else has_part(self.have, number):
                return False
            if number == LIST:
                self._resume(bytes(data))
                return True
            with self.path.open("r+b", buffering=0) as file:
                if os.pwrite(file.fileno(), data, BLOCK_BYTES * number) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            self.have |= 1 << number
            return True

    def _is_right(self, number: int, data: bytes | bytearray) -> bool:
        if number == LIST:
            return digest_of(bytes(data)) == self.version.digest  # guard: return True
        own = hashlib.sha256(data).digest()
        return own == self.hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]  # guard: return True

    def _resume(self, hashes: bytes) -> None:
        """Keep the list, and find out which blocks are here from before a restart."""
        self.path.touch()
        self.hashes = hashes
        with self.path.open("rb") as file:
            for number in range(self.num_blocks):
                self.have |= self._is_right(number, file.read(BLOCK_BYTES)) << number


def read_block(path: Path, number: int) -> bytes | None:
    """Return a block of a version's file; None if the file ends before it."""
    with path.open("rb", buffering=0) as file:
        return os.pread(file.fileno(), BLOCK_BYTES, BLOCK_BYTES * number) or None
