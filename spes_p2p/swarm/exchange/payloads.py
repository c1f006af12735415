"""What a peer offers, as a row of bytes: files of its store, or what is still arriving."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from concurrent.futures import Executor
from pathlib import Path
from typing import Protocol

from spes_p2p.swarm.exchange.channel import FRAME_BYTES
from spes_p2p.swarm.exchange.downloads import Download
from spes_p2p.swarm.exchange.messages import Answer

RELAYED_BYTES = FRAME_BYTES // 4
"""Bytes of an unfinished download that are passed on together."""
RELAY_SECONDS = 20.0


class Payload(Protocol):
    """An offer and its bytes."""

    answer: Answer
    num_bytes: int
    is_arriving: bool

    async def read(self, start: int, stop: int) -> bytes | memoryview:
        """Return bytes from `start` on, at least one and at most up to `stop`."""

    def close(self) -> None:
        """Let go of files."""


class FilePayload:
    """Files, one after the other; open, so that they can be read when they are deleted meanwhile.

    Args:
        answer: Offers them.
        paths: Where they lie.
        readers: Threads that read them, so that a slow disk holds nobody else up.

    Raises:
        FileNotFoundError: one is deleted already.
    """

    is_arriving = False

    def __init__(self, answer: Answer, paths: Sequence[Path], readers: Executor) -> None:
        self.answer, self._readers = answer, readers
        self._files: list[int] = []
        try:
            for path in paths:
                self._files.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except OSError:
            self.close()
            raise
        self._sizes = [os.fstat(file).st_size for file in self._files]
        self.num_bytes = sum(self._sizes)

    async def read(self, start: int, stop: int) -> bytes:
        for file, size in zip(self._files, self._sizes, strict=True):
            if start < size:
                count = min(stop, size) - start
                return await asyncio.get_running_loop().run_in_executor(self._readers, os.pread, file, count, start)
            start, stop = start - size, stop - size
        raise EOFError("a range beyond the end")

    def close(self) -> None:
        while self._files:
            os.close(self._files.pop())


class RelayedPayload:
    """What this peer is still fetching itself, passed on unverified: whoever gets it checks the whole."""

    is_arriving = True

    def __init__(self, download: Download) -> None:
        self.answer, self.num_bytes, self._download = download.answer, download.num_bytes, download

    async def read(self, start: int, stop: int) -> memoryview:
        enough = min(stop, start + RELAYED_BYTES)
        reached = await self._download.wait_for(start, enough, RELAY_SECONDS)
        return memoryview(self._download.data)[start : min(reached, stop)]

    def close(self) -> None:
        pass
