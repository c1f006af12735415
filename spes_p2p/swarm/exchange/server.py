"""Serves versions to other peers: an offer, then ranges of bytes, bounded in number and rate."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import TypeAlias

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
MAX_UPLOADS = 32
MAX_NON_MEMBER_UPLOADS = 4
"""Uploads, among those, to peers that were not in the last round: training goes before joining."""
MAX_RELAYED = 64
"""Uploads of unfinished downloads; most of them wait."""
MAX_STREAMS_PER_PEER = 64
QUEUE_SECONDS = 5.0
"""Time for which an upload waits for its turn before the answer is BUSY."""
LONGEST_WAIT_SECONDS = 10.0
"""Time for which a caller is kept waiting for a version to be published."""
NUM_READERS = 2
BLOCK_BYTES = 4 * FRAME_BYTES


class FilePayload:
    """An offer and its bytes: files in a row, held open, so that they can be read after their deletion.

    Threads read them, so that a slow disk does not block the event loop.

    Raises:
        FileNotFoundError: a file is gone.
    """

    def __init__(self, answer: Answer, paths: Sequence[Path], readers: Executor) -> None:
        self.answer = answer
        self._readers = readers
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
        """Return bytes from `start` on, at least one, up to `stop` at most."""
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
    """An offer and its bytes: a download under way, passed on unverified; its receivers verify the whole."""

    def __init__(self, download: Download) -> None:
        self.answer = download.answer
        self.num_bytes = download.num_bytes
        self._download = download

    async def read(self, start: int, stop: int) -> memoryview:
        enough = min(stop, start + RELAYED_BYTES)
        reached = await self._download.wait_for(start, enough, RELAY_SECONDS)
        return memoryview(self._download.data)[start : min(reached, stop)]

    def close(self) -> None:
        """Do nothing: the pull closes its download."""


Payload: TypeAlias = FilePayload | RelayedPayload


class Server:
    """Answers requests for versions.

    Args:
        store: This peer's versions.
        relayed: Downloads under way that are shared out among relays, by name.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        bytes_out: Payload bytes sent.
        changed: Fires when the store or `relayed` has changed.
    """

    def __init__(self, store: VersionStore, relayed: Mapping[str, Download], uplink_mbit: float | None) -> None:
        self.bytes_out = 0
        self.changed = Signal()
        self._store = store
        self._relayed = relayed
        self._rate_limit = RateLimit(uplink_mbit)
        self._readers = ThreadPoolExecutor(NUM_READERS, "serving")
        self._streams: Counter[str] = Counter()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._non_member_uploads = asyncio.Semaphore(MAX_NON_MEMBER_UPLOADS)
        self._partial_uploads = asyncio.Semaphore(MAX_RELAYED)
        self._members: Collection[str] = ()
        self._reserved_until = 0.0

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve only `peers` for `seconds`, or until `release`; after that they still go before other peers."""
        self._members = frozenset(peers)
        self._reserved_until = time.monotonic() + seconds

    def release(self) -> None:
        """Serve all peers again."""
        self._reserved_until = 0.0

    def _is_non_member(self, peer: str) -> bool:
        return bool(self._members) and peer not in self._members

    def _is_turned_away(self, peer: str) -> bool:
        return self._is_non_member(peer) and time.monotonic() < self._reserved_until

    # ------------------------------------------------------------------ offers

    async def serve(self, channel: Channel, peer: str) -> None:
        """Serve one stream of an authenticated peer until it hangs up.

        Raises:
            ExchangeError: a request is impossible, or the peer hung up in the middle of an answer.
            TimeoutError: the peer is silent, or does not read.
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
        if self._streams[peer] > MAX_STREAMS_PER_PEER or self._is_turned_away(peer):
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
        """Return the payload for a request, once there is one; None if there is none in time."""
        deadline = time.monotonic() + min(request.timeout, LONGEST_WAIT_SECONDS)
        while True:
            payload = self._payload(request)
            if payload is not None or (remaining := deadline - time.monotonic()) <= 0:
                return payload
            download = self._relayed.get(request.name)
            if download and request.digest == download.version.digest and not download.satisfies(request):
                return None  # the version arrives here in a form that does not help the caller
            await self.changed.wait(remaining)

    def _payload(self, request: Request) -> Payload | None:
        version, download = self._store.find(request.name, request.digest), self._relayed.get(request.name)
        if version is None and download is not None and download.satisfies(request):
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
        except FileNotFoundError:  # a newer version has replaced it
            return None

    # ------------------------------------------------------------------ bytes

    async def _send(self, channel: Channel, peer: str, payload: Payload, start: int, stop: int) -> None:
        """Send a range; BUSY in place of all or the rest of it if the peer must wait."""
        async with contextlib.AsyncExitStack() as held:
            limits = [self._partial_uploads if isinstance(payload, RelayedPayload) else self._uploads]
            if self._is_non_member(peer):
                limits.insert(0, self._non_member_uploads)
            for limit in limits:
                try:
                    async with asyncio.timeout(QUEUE_SECONDS):
                        await limit.acquire()
                except TimeoutError:
                    return await channel.send(BUSY)
                held.callback(limit.release)
            while start < stop:
                async with asyncio.timeout(channel.seconds):
                    block = memoryview(await payload.read(start, min(stop, start + BLOCK_BYTES)))
                start += len(block)
                frame_bytes = self._rate_limit.burst_bytes(FRAME_BYTES)
                for offset in range(0, len(block), frame_bytes):
                    frame = block[offset : offset + frame_bytes]
                    await self._rate_limit.take(len(frame))
                    if self._is_turned_away(peer):
                        return await channel.send(BUSY)
                    await channel.send(DATA, frame)
                    self.bytes_out += len(frame)
