"""Serves blocks of versions to other peers: members of the round first, and no faster than the uplink."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.swarm.exchange.protocol import (
    ABSENT,
    BUSY,
    DATA,
    END,
    FRAME_BYTES,
    GET,
    GET_BYTES,
    HAVE,
    MAX_WANTED,
    WANT,
    Channel,
    DisconnectedError,
    Question,
    parse_get,
    parse_want,
)
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.p2p.rate_limit import RateLimit

MAX_UPLOADS = 32
MAX_NON_MEMBER_UPLOADS = 4
"""Uploads, among those, to peers that were not in the last round: training goes before joining."""
MAX_STREAMS_PER_PEER = 64
QUEUE_SECONDS = 5.0
"""Time for which an upload waits for its turn before the answer is BUSY."""
NUM_READERS = 2


class Server:
    """Answers requests for versions.

    Threads read the disk, so that a slow one does not block the event loop.

    Args:
        store: This peer's versions.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        bytes_out: Payload bytes sent.
    """

    def __init__(self, store: VersionStore, uplink_mbit: float | None) -> None:
        self.bytes_out = 0
        self._store = store
        self._rate_limit = RateLimit(uplink_mbit)
        self._readers = ThreadPoolExecutor(NUM_READERS, "serving")
        self._streams: Counter[str] = Counter()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._non_member_uploads = asyncio.Semaphore(MAX_NON_MEMBER_UPLOADS)
        self._members: Collection[str] = ()
        self._reserved_until = 0.0

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve only `peers` for `seconds`, or until `release`, so that newcomers do not delay a round.

        After that they still go before other peers.
        """
        self._members = frozenset(peers)
        self._reserved_until = time.monotonic() + seconds

    def release(self) -> None:
        """Serve all peers again."""
        self._reserved_until = 0.0

    def _is_non_member(self, peer: str) -> bool:
        return bool(self._members) and peer not in self._members

    def _is_turned_away(self, peer: str) -> bool:
        return self._is_non_member(peer) and time.monotonic() < self._reserved_until

    async def list_versions(self, channel: Channel) -> None:
        """List this peer's newest version of a name, or of each name."""
        name = Question.parse(await channel.receive_text()).name
        for version in self._store.newest().values():
            if name in (None, version.name):
                await channel.send_text(version.model_dump_json())
        await channel.send(END)
        await channel.wait_for_hang_up()

    async def serve(self, channel: Channel, peer: str) -> None:
        """Serve one stream of an authenticated peer until it hangs up.

        Raises:
            ExchangeError: a request is impossible, or the peer hung up in the middle of an answer.
            TimeoutError: the peer is silent, or does not read.
        """
        self._streams[peer] += 1
        try:
            if self._streams[peer] > MAX_STREAMS_PER_PEER:
                await channel.send(BUSY)
                return await channel.wait_for_hang_up()
            wanted: list[str] = []
            while True:
                try:
                    kind, data = await channel.receive({WANT: HASH_BYTES * MAX_WANTED, GET: GET_BYTES})
                except DisconnectedError:
                    return  # the caller has what it wanted
                if kind == WANT:
                    wanted = parse_want(data) if data else wanted
                    await channel.send(HAVE, b"".join(self._store.have(digest).encode() for digest in wanted))
                else:
                    await self._send(channel, peer, *parse_get(data))
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _send(self, channel: Channel, peer: str, digest: str, number: int) -> None:
        """Send a part of a version; BUSY in its place if the peer must wait, ABSENT if it is not here."""
        async with contextlib.AsyncExitStack() as held:
            if self._is_turned_away(peer) or not await self._has_turn(peer, held):
                return await channel.send(BUSY)
            reading = asyncio.get_running_loop().run_in_executor(self._readers, self._store.read_part, digest, number)
            data = await reading
            if data is None:
                return await channel.send(ABSENT)
            frame_bytes = self._rate_limit.burst_bytes(FRAME_BYTES)
            for start in range(0, len(data), frame_bytes):
                frame = memoryview(data)[start : start + frame_bytes]
                await self._rate_limit.take(len(frame))
                await channel.send(DATA, frame)
                self.bytes_out += len(frame)

    async def _has_turn(self, peer: str, held: contextlib.AsyncExitStack) -> bool:
        """Wait for the turn of an upload, which ends with `held`; return False if it does not come in time."""
        for limit in [*([self._non_member_uploads] if self._is_non_member(peer) else []), self._uploads]:
            try:
                async with asyncio.timeout(QUEUE_SECONDS):
                    await limit.acquire()
            except TimeoutError:
                return False
            held.callback(limit.release)
        return True
