"""Limits on the calls and streams that other peers open; stock has none. A channel bounds its own messages."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo

from spes_p2p.errors import ExchangeError

log = logging.getLogger(__name__)

MAX_STREAMS = 1024
"""Streams that all peers together may have open to one process."""
MAX_STREAMS_PER_PEER = 96
MAX_CALLS_PER_PEER = 64
MAX_CALL_BYTES_PER_PEER = 2**24
"""Bytes of one peer's unary calls that are being answered."""


class PeerQuota:
    """Limits what each peer may have open at once.

    Args:
        max_items: Items per peer.
        max_bytes: Bytes per peer, over its items.
        max_total: Items of all peers together.

    Attributes:
        is_known: Checks whether a peer is none of those that together have half of the total: identities are free, so
            that strangers could fill any number.
    """

    def __init__(self, max_items: int, max_bytes: float = float("inf"), max_total: float = float("inf")) -> None:
        self.max_items = max_items
        self._max_bytes = max_bytes
        self.max_total = max_total
        self.is_known: Callable[[Any], bool] = lambda peer: True
        self._items: Counter[object] = Counter()
        self._bytes: Counter[object] = Counter()
        self._warnings: Counter[object] = Counter()

    @contextmanager
    def hold(self, peer: object, what: str, num_bytes: int = 0) -> Iterator[None]:
        """Count one item against a peer's quota for the duration of the block.

        Raises:
            ExchangeError: the quota is used up.
        """
        items = self._items[peer] + 1
        held_bytes = self._bytes[peer] + num_bytes
        if (
            items > self.max_items
            or held_bytes > self._max_bytes  # guard: operand
            or self._items.total() >= self.max_total  # guard: operand
            or (not self.is_known(peer) and 2 * self._num_strange() >= self.max_total)  # guard: operand
        ):
            self._warn(peer, f"refused {what}, of which it has {items - 1}")
            raise ExchangeError(f"too many {what}")
        self._items[peer] = items
        self._bytes[peer] = held_bytes
        try:
            yield
        finally:
            self._items[peer] -= 1
            self._bytes[peer] -= num_bytes
            if not self._items[peer]:
                del self._items[peer], self._bytes[peer]

    def _num_strange(self) -> int:
        return sum(count for peer, count in self._items.items() if not self.is_known(peer))

    def _warn(self, peer: object, what: str) -> None:
        """Log a peer's fault the 1st, 2nd, 4th, 8th... time, so that a hostile peer cannot fill the log."""
        if len(self._warnings) >= MAX_STREAMS:
            self._warnings.clear()
        self._warnings[peer] += 1
        if not self._warnings[peer] & (self._warnings[peer] - 1):  # guard: always
            log.warning("%s, complaint %d: %s", peer, self._warnings[peer], what)


class LimitedP2P(P2P):
    """hivemind's P2P with bounded incoming streams.

    Attributes:
        stream_quota: Streams that other peers may have open to this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream_quota = PeerQuota(MAX_STREAMS_PER_PEER, max_total=MAX_STREAMS)

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        await super().add_binary_stream_handler(name, functools.partial(self._admit, handler), balanced)

    async def _admit(
        self, handler: Any, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with closing(writer):
            try:
                with self.stream_quota.hold(info.peer_id, "streams"):  # guard: skip
                    await handler(info, reader, writer)
            except ExchangeError as error:
                log.debug("hung up on %s: %s", info.peer_id, error)
