"""What this peer sends to others: offers first, then ranges of bytes, to so many at once and at such a rate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.downloads import Download
from spes_p2p.swarm.exchange.protocol import (
    BUSY,
    DATA,
    FRAME_BYTES,
    Answer,
    Channel,
    DisconnectedError,
    Request,
    Signal,
)
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.p2p.rate_limit import RateLimit

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


MAX_UPLOADS = 32
MAX_STRANGER_UPLOADS = 4
"""Of those, most to peers that were not in the last round: who trains goes before who joins."""
MAX_RELAYED = 64
"""Uploads of what is still arriving; they mostly wait."""
MAX_STREAMS_PER_PEER = 64
QUEUE_SECONDS = 5.0
"""How long an upload waits for its turn before the answer is BUSY."""
LONGEST_WAIT_SECONDS = 10.0
"""How long a caller is kept waiting for a version to be published."""
NUM_READERS = 2
BLOCK_BYTES = 4 * FRAME_BYTES


class Server:
    """Answers those who pull.

    Args:
        store: What this peer has.
        downloads: What is arriving, by name, for those who share it out.
        uplink_mbit: Most to send, in 10^6 bits per second.

    Attributes:
        bytes_out: Payload bytes sent.
        changed: Fires when the store or the downloads have something new.
    """

    def __init__(self, store: VersionStore, downloads: Mapping[str, Download], uplink_mbit: float | None) -> None:
        self.bytes_out, self.changed = 0, Signal()
        self._store, self._downloads, self._pace = store, downloads, RateLimit(uplink_mbit)
        self._readers = ThreadPoolExecutor(NUM_READERS, "serving")
        self._streams: Counter[str] = Counter()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._stranger_uploads = asyncio.Semaphore(MAX_STRANGER_UPLOADS)
        self._relayed = asyncio.Semaphore(MAX_RELAYED)
        self._members: Collection[str] = ()
        self._reserved_until = 0.0

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve nobody but `peers` for so long, or until `release`; they go before others ever after."""
        self._members, self._reserved_until = frozenset(peers), time.monotonic() + seconds

    def release(self) -> None:
        """Serve everybody again."""
        self._reserved_until = 0.0

    def _is_stranger(self, peer: str) -> bool:
        return bool(self._members) and peer not in self._members

    def _turns_away(self, peer: str) -> bool:
        return self._is_stranger(peer) and time.monotonic() < self._reserved_until

    # ------------------------------------------------------------------ offers

    async def serve(self, channel: Channel, peer: str) -> None:
        """Serve one stream of an authenticated peer until it hangs up.

        Raises:
            ExchangeError: it asked for something impossible, or went.
            TimeoutError: it fell silent, or took nothing.
        """
        self._streams[peer] += 1
        try:
            await self._serve(channel, peer)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, channel: Channel, peer: str) -> None:
        try:
            request = Request.parse(await channel.receive_text())
        except ExchangeError:
            await self._decline(channel, "refused")
            raise
        if self._streams[peer] > MAX_STREAMS_PER_PEER or self._turns_away(peer):
            return await self._decline(channel, "busy")
        payload = await self._find(request)
        if payload is None:
            return await self._decline(channel, "absent")
        with contextlib.closing(payload):
            await channel.send_text(payload.answer.model_dump_json())
            if request.at_once and payload.num_bytes:
                await self._send(channel, peer, payload, 0, payload.num_bytes)
            while True:
                try:
                    start, stop = await channel.receive_range()
                except DisconnectedError:
                    return None  # the caller has what it wanted
                if not start < stop <= payload.num_bytes:  # guard: range-served
                    raise ExchangeError(f"asked for bytes {start} to {stop} of {payload.num_bytes}")
                await self._send(channel, peer, payload, start, stop)

    async def _decline(self, channel: Channel, state) -> None:
        await channel.send_text(Answer(state=state).model_dump_json())
        await channel.wait_for_hang_up()

    async def _find(self, request: Request) -> Payload | None:
        """Return what the caller needs, once it is there; None if it did not come in time."""
        deadline = time.monotonic() + min(request.timeout, LONGEST_WAIT_SECONDS)
        while True:
            payload = self._payload(request)
            if payload is not None or (remaining := deadline - time.monotonic()) <= 0:
                return payload
            if self._comes_otherwise(request):
                return None
            await self.changed.wait(remaining)

    def _payload(self, request: Request) -> Payload | None:
        version, download = self._store.find(request.name, request.digest), self._downloads.get(request.name)
        if version is None and download is not None and download.answers(request):
            return RelayedPayload(download)
        version = version or self._store.find(request.name)
        if version is None or version.round < request.min_round:
            return None
        described = version.model_dump_json()
        if version.digest == request.have:
            return FilePayload(Answer(state="same", version=described), [], self._readers)
        chain = self._store.deltas.chain(request.name, request.have, version.digest, request.max_deltas)
        try:
            if chain:
                answer = Answer(state="deltas", version=described, num_deltas=len(chain))
                payload = FilePayload(answer, [delta.path for delta in chain], self._readers)
                if payload.num_bytes < version.num_bytes:
                    return payload
                payload.close()
            return FilePayload(Answer(state="whole", version=described), [self._store.path(version)], self._readers)
        except FileNotFoundError:  # displaced by a newer version meanwhile
            return None

    def _comes_otherwise(self, request: Request) -> bool:
        """Tell whether the version asked for is arriving here in a form that does not help the caller."""
        download = self._downloads.get(request.name)
        return download is not None and request.digest == download.version.digest and not download.answers(request)

    # ------------------------------------------------------------------ bytes

    async def _send(self, channel: Channel, peer: str, payload: Payload, start: int, stop: int) -> None:
        """Send a range, or BUSY in place of it or of the rest of it."""
        async with contextlib.AsyncExitStack() as turn:
            queues = [self._relayed] if payload.is_arriving else [self._uploads]
            if self._is_stranger(peer):
                queues.insert(0, self._stranger_uploads)
            for queue in queues:
                if not await _in_time(queue.acquire, QUEUE_SECONDS):
                    return await channel.send(BUSY)
                turn.callback(queue.release)
            while start < stop:
                async with asyncio.timeout(channel.seconds):
                    block = memoryview(await payload.read(start, min(stop, start + BLOCK_BYTES)))
                start += len(block)
                frame_bytes = self._pace.burst_bytes(FRAME_BYTES)
                for offset in range(0, len(block), frame_bytes):
                    frame = block[offset : offset + frame_bytes]
                    await self._pace.take(len(frame))
                    if self._turns_away(peer):
                        return await channel.send(BUSY)
                    await channel.send(DATA, frame)
                    self.bytes_out += len(frame)


async def _in_time(work: Callable[[], Awaitable[object]], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            await work()
    except TimeoutError:
        return False
    return True
