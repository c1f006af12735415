"""Serves blocks of versions to other peers: members of the round first, and no faster than the uplink."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Callable, Collection

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.swarm.exchange.protocol import (
    ABSENT,
    BUSY,
    DATA,
    GET,
    GET_BYTES,
    HAVE,
    MAX_VERSIONS,
    WANT,
    Inventory,
    Question,
    parse_get,
    parse_want,
)
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel, DisconnectedError
from spes_p2p.swarm.p2p.rate_limit import RateLimit

MAX_UPLOADS = 32
MAX_NON_MEMBER_UPLOADS = 4
"""Uploads, among those, to peers that were not in the last round: training goes before joining."""
QUEUE_SECONDS = 5.0
"""Time for which an upload waits for its turn before the answer is BUSY."""


class Server:
    """Answers requests for versions.

    Threads read the disk, so that a slow one does not block the event loop.

    Args:
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        bytes_out: Payload bytes sent.
    """

    def __init__(self, store: VersionStore, uplink_mbit: float | None, now: Callable[[], float]) -> None:
        self.bytes_out = 0
        self._store = store
        self._now = now
        self._rate_limit = RateLimit(uplink_mbit)
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._non_member_uploads = asyncio.Semaphore(MAX_NON_MEMBER_UPLOADS)
        self._members: Collection[str] = ()
        self._reserved_until = 0.0

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve only `peers` for `seconds`, or until `release`, so that newcomers do not delay a round.

        After that they still go before other peers.
        """
        self._members = frozenset(peers)
        self._reserved_until = self._now() + seconds

    def release(self) -> None:
        """Serve all peers again."""
        self._reserved_until = 0.0

    async def answer(self, channel: Channel, peer: str) -> None:
        """Send a document, or an inventory, to a peer that asks for it."""
        asked = Question.parse(await channel.receive_text())
        if asked.document is not None:
            read = functools.partial(self._store.read, asked.document, round=asked.number)
            return await channel.send_last(await asyncio.to_thread(read))
        await channel.send_last(Inventory(versions=tuple(self._store.newest().values())).model_dump_json())

    async def serve(self, channel: Channel, peer: str) -> None:
        """Serve one stream of an authenticated peer until it hangs up.

        Raises:
            ExchangeError: a request is impossible, or the peer hung up in the middle of an answer.
            TimeoutError: the peer is silent, or does not read.
        """
        wanted: list[str] = []
        while True:
            try:
                kind, data = await channel.receive({WANT: HASH_BYTES * MAX_VERSIONS, GET: GET_BYTES})
            except DisconnectedError:
                return  # the caller has what it wanted
            if kind == WANT:
                wanted = parse_want(data) if data else wanted
                await channel.send(HAVE, b"".join(map(self._store.have, wanted)))
            else:
                await self._send(channel, peer, *parse_get(data))

    async def _send(self, channel: Channel, peer: str, digest: str, number: int) -> None:
        """Send a part of a version; BUSY in its place if the peer must wait, ABSENT if it is not here."""
        is_member = not self._members or peer in self._members
        async with contextlib.AsyncExitStack() as turn:
            try:
                if not is_member and self._now() < self._reserved_until:
                    raise TimeoutError
                for limit in [self._uploads] if is_member else [self._non_member_uploads, self._uploads]:
                    async with asyncio.timeout(QUEUE_SECONDS):
                        await turn.enter_async_context(limit)
            except TimeoutError:
                return await channel.send(BUSY)
            data = await asyncio.to_thread(self._store.read_part, digest, number)
            if data is None:
                return await channel.send(ABSENT)
            frame_bytes = self._rate_limit.burst_bytes(FRAME_BYTES)
            for start in range(0, len(data), frame_bytes):
                frame = memoryview(data)[start : start + frame_bytes]
                await self._rate_limit.take(len(frame))
                await channel.send(DATA, frame)
                self.bytes_out += len(frame)
