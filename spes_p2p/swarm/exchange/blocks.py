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


class Have:
    """What a peer has of a version: nothing, all of it, or its list and some blocks.

    Args:
        blocks: A bit for each block, the first block's lowest; empty for nothing, None for all.
    """

    NOTHING, ALL, SOME = b"\0", b"\1", b"\2"

    def __init__(self, blocks: bytes | None = b"") -> None:
        self._blocks = blocks

    def __contains__(self, number: int) -> bool:
        """Check whether a block, or the LIST, is there."""
        if self._blocks is None or number == LIST:
            return self._blocks != b""
        return number < 8 * len(self._blocks) and bool(self._blocks[number // 8] >> number % 8 & 1)

    @property
    def is_whole(self) -> bool:
        """Whether all of it is there."""
        return self._blocks is None

    def encode(self) -> bytes:
        """Return its part of a HAVE message."""
        if self._blocks is None:
            return self.ALL
        return self.SOME + self._blocks if self._blocks else self.NOTHING

    @staticmethod
    def most_bytes(num_blocks: int) -> int:
        """Return the most bytes of that part, for a version of so many blocks."""
        return 1 + -(-num_blocks // 8)

    @classmethod
    def parse_all(cls, data: bytes, sizes: Sequence[int]) -> list[Have]:
        """Return what a HAVE message says of versions of these sizes; raise ExchangeError if it does not fit."""
        found, start = [], 0
        for size in sizes:
            kind, start = data[start : start + 1], start + 1
            stop = start + (cls.most_bytes(size) - 1 if kind == cls.SOME else 0)
            if kind not in (cls.NOTHING, cls.ALL, cls.SOME) or stop > len(data):  # guard: blocks-listed
                raise ExchangeError("sent a malformed list of blocks")
            found.append(cls(None if kind == cls.ALL else data[start:stop]))
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
        num_blocks: Blocks of the version.
        hashes: The list, once it is here; a version of one block needs none.
    """

    def __init__(self, version: Version, path: Path) -> None:
        self.version = version
        self.path = path
        self.num_blocks = max(1, -(-version.num_bytes // BLOCK_BYTES))
        self.hashes = b""
        self._missing = set(range(self.num_blocks))
        self._bits = bytearray(-(-self.num_blocks // 8))
        self._lock = threading.Lock()

    def resume(self) -> None:
        """Take over a version of one block from before a restart, or of none; others need their LIST for that."""
        if not self.version.num_bytes:
            self.write(0, b"")
        elif self.num_blocks == 1:
            self._compare()

    def part_bytes(self, number: int) -> int:
        """Return the length of a block, or of the LIST."""
        if number == LIST:
            return HASH_BYTES * self.num_blocks
        return min(BLOCK_BYTES, self.version.num_bytes - BLOCK_BYTES * number)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks are here."""
        return not self._missing

    def missing(self) -> list[int]:
        """Return the blocks that are missing; only the LIST as long as it is."""
        with self._lock:
            return list(self._missing) if self.hashes or self.num_blocks == 1 else [LIST]

    def have(self) -> Have:
        """Return what can be served of it."""
        return Have(bytes(self._bits) if self.hashes else b"")

    def read(self, number: int) -> bytes | None:
        """Return a block, or the LIST; None if it is not here."""
        if number == LIST:
            return self.hashes or None
        if number not in self.have():
            return None
        with self.path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), BLOCK_BYTES, BLOCK_BYTES * number)

    def write(self, number: int, data: bytes | bytearray) -> bool:
        """Keep a block, or the LIST; return whether it was missing.

        Raises:
            ExchangeError: it does not belong to the version.
            OSError: the disk is full, or fails.
        """
        if not self._is_right(number, data):
            raise ExchangeError(f"sent other bytes than belong to {self.version.name}")
        with self._lock:
            if number == LIST:
                if self.hashes:
                    return False
                self.hashes = bytes(data)
                self._compare()
                return True
            if number not in self._missing:
                return False
            file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                if os.pwrite(file, data, BLOCK_BYTES * number) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(file)
            self._add(number)
            return True

    def _is_right(self, number: int, data: bytes | bytearray) -> bool:
        if number == LIST:
            return digest_of(bytes(data)) == self.version.digest  # guard: list-digest
        own = hashlib.sha256(data).digest()
        if self.num_blocks == 1:
            return digest_of(own) == self.version.digest
        return own == self.hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]  # guard: block-hash

    def _compare(self) -> None:
        """Find out which blocks are here from before a restart."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number in range(self.num_blocks):
                if self._is_right(number, file.read(BLOCK_BYTES)):
                    self._add(number)

    def _add(self, number: int) -> None:
        self._missing.discard(number)
        self._bits[number // 8] |= 1 << number % 8
