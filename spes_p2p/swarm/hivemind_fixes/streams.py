"""Limits on the calls and streams that other peers open: how many, how long, and how much of them waits in memory.

Stock reads messages of any announced length, six ahead of the handler, from any number of streams, and keeps streams
open for ever. The exchange bounds its own messages (`p2p/channel.py`); its streams count towards the same quota.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from google.protobuf.message import DecodeError
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError
from hivemind.proto.p2pd_pb2 import RPCError

from spes_p2p.codecs.format import PART_NUMEL
from spes_p2p.errors import ExchangeError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * PART_NUMEL + 2**14
"""Longest message from a caller: the largest part, in fp32, and its header."""
MAX_ANSWER_BYTES = 2**20
"""Longest answer: a leader's holds the entries of the whole group."""
MAX_STREAMS = 1024
"""Streams that all peers together may have open to one process."""
MAX_STREAMS_PER_PEER = 96
WAITING_MESSAGES = 32
"""Messages of one peer, over all its streams, that are read and not yet handled: 8.5 MiB at most."""
FIRST_SECONDS = 30.0
"""Time in which a new stream must bring its first message; handlers bound the rest."""
MESSAGE_SECONDS = 60.0
"""Time from a message's first byte to its last."""
HANG_UP_SECONDS = 5.0
"""Time for a caller to hang up after the last answer: what is still on its way when this side does may be lost."""
MAX_CALLS_PER_PEER = 64
MAX_CALL_BYTES_PER_PEER = 2**24
"""Bytes of one peer's unary calls that are being answered."""
MAX_CALLS = 1024
"""Unary calls of all peers together that are being answered."""
_HEAD_BYTES = 1 + P2P.HEADER_LEN

Handler = Callable[[AsyncIterator[Any], P2PContext], AsyncIterator[Any]]


class PeerQuota:
    """Limits what each peer may have open at once.

    Args:
        max_items: Items per peer.
        max_bytes: Bytes per peer, over its items.
        max_total: Items of all peers together.

    Attributes:
        max_total: See above.
        is_known: Tells whether a peer is none of those that together have half of the total: identities are free, so
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

    def num_held(self, peer: object) -> int:
        """Return how many items a peer has open."""
        return self._items[peer]

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
            or held_bytes > self._max_bytes  # guard: held-bytes
            or self._items.total() >= self.max_total  # guard: held-by-all
            or (not self.is_known(peer) and 2 * self._num_strange() >= self.max_total)  # guard: held-by-strangers
        ):
            self.warn(peer, f"refused {what}, of which it has {items - 1}")
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

    def warn(self, peer: object, what: str) -> None:
        """Log a peer's fault the 1st, 2nd, 4th, 8th... time, so that a hostile peer cannot fill the log."""
        if len(self._warnings) >= MAX_STREAMS:
            self._warnings.clear()
        self._warnings[peer] += 1
        if not self._warnings[peer] & (self._warnings[peer] - 1):  # guard: log-flood
            log.warning("%s, complaint %d: %s", peer, self._warnings[peer], what)


class LimitedP2P(P2P):
    """hivemind's P2P with bounded incoming streams.

    Attributes:
        stream_quota: Streams that other peers may have open to this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stream_quota = PeerQuota(MAX_STREAMS_PER_PEER, max_total=MAX_STREAMS)
        self._read_ahead: dict[PeerID, asyncio.Semaphore] = {}

    def reserve_half_for(self, is_known: Callable[[PeerID], bool]) -> None:
        """Keep half of the streams and calls of all peers together for known ones.

        Calls have a total only in a process with such a reserve: strangers would fill it.
        """
        calls = self._client.control.call_quota
        calls.max_total = MAX_CALLS
        self.stream_quota.is_known = calls.is_known = is_known

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        await super().add_binary_stream_handler(name, functools.partial(self._admit, handler), balanced)

    async def _admit(
        self, handler: Any, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with closing(writer):
            try:
                with self.stream_quota.hold(info.peer_id, "streams"):  # guard: streams-per-peer
                    await handler(info, reader, writer)
            except ExchangeError as error:
                log.debug("hung up on %s: %s", info.peer_id, error)
            finally:
                if not self.stream_quota.num_held(info.peer_id):
                    self._read_ahead.pop(info.peer_id, None)

    # ------------------------------------------------------------------ protobuf streams that other peers open

    async def _add_protobuf_stream_handler(
        self, name: str, handler: Handler, input_protobuf_type: type, max_prefetch: int = 1, balanced: bool = False
    ) -> None:
        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=info.peer_id)
            inbox = Inbox(self._read_ahead.setdefault(info.peer_id, asyncio.Semaphore(WAITING_MESSAGES)), max_prefetch)
            reading = asyncio.create_task(inbox.fill(input_protobuf_type, reader))
            answering = asyncio.create_task(self._answer(handler(inbox.messages(), context), writer, info.peer_id))
            try:
                await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
                await asyncio.wait({reading}, timeout=HANG_UP_SECONDS if answering.done() else 0.0)
            finally:
                answering.cancel()
                reading.cancel()
                ends = await asyncio.gather(reading, answering, return_exceptions=True)
                inbox.close()
            if isinstance(ends[0], ExchangeError | TimeoutError):
                self.stream_quota.warn(info.peer_id, f"hung up on its {name}: {str(ends[0]) or 'it was silent'}")

        await self.add_binary_stream_handler(name, serve, balanced=balanced)

    async def _answer(self, answers: AsyncIterator[Any], writer: asyncio.StreamWriter, peer: PeerID) -> None:
        try:
            async for answer in answers:
                await P2P.send_protobuf(answer, writer)
        except OSError as error:
            log.debug("a caller has hung up: %r", error)
        except Exception as error:  # noqa: BLE001 - any error of a handler goes to its caller as the answer
            self.stream_quota.warn(peer, f"what it asked for failed: {error!r}")
            await P2P.send_protobuf(RPCError(message=str(error)), writer)

    # ------------------------------------------------------------------ protobuf streams that this peer opens

    async def _iterate_protobuf_stream_handler(
        self, peer_id: PeerID, name: str, requests: AsyncIterator[Any], output_protobuf_type: type
    ) -> AsyncIterator[Any]:
        _, reader, writer = await self.call_binary_stream_handler(peer_id, name)

        async def send_all() -> None:
            async for request in requests:
                await P2P.send_protobuf(request, writer)
            await P2P.send_protobuf(P2P.END_OF_STREAM, writer)

        async def receive_all() -> AsyncIterator[Any]:
            with closing(writer):
                try:
                    while True:
                        try:
                            answer = await receive(output_protobuf_type, reader, MAX_ANSWER_BYTES)
                        except asyncio.IncompleteReadError:
                            break
                        if isinstance(answer, RPCError):
                            raise P2PHandlerError(f"Failed to call handler `{name}` at {peer_id}: {answer.message}")
                        yield answer
                    await sending
                finally:
                    sending.cancel()

        sending = asyncio.create_task(send_all())
        return receive_all()


class Inbox:
    """Messages of one stream that are read and not yet handled: `max_waiting`, and one that is being read.

    `read_ahead` bounds them over all streams of the same peer.
    """

    def __init__(self, read_ahead: asyncio.Semaphore, max_waiting: int) -> None:
        self._read_ahead = read_ahead
        self._num_held = 0
        self._queue: asyncio.Queue[Any] = asyncio.Queue(max_waiting)

    async def fill(self, kind: type, reader: asyncio.StreamReader) -> None:
        """Read messages, as the bounds allow, until the caller hangs up.

        Raises:
            ExchangeError: a message is too long, or follows the end of the stream.
            TimeoutError: the first message does not come, or one stops half-way.
            IncompleteReadError: the caller has hung up.
        """
        async with asyncio.timeout(FIRST_SECONDS):  # guard: first-message-time
            message = await receive(kind, reader, MAX_MESSAGE_BYTES, self._acquire)
        while not isinstance(message, RPCError):
            await self._queue.put(message)
            message = await receive(kind, reader, MAX_MESSAGE_BYTES, self._acquire)
        self._release(1)  # of the end: where streams wait for each other's parts, it would keep out the next one's
        await self._queue.put(None)
        await reader.readexactly(1)
        raise ExchangeError("sent more behind its last message")

    async def messages(self) -> AsyncIterator[Any]:
        """Yield the messages; asking for the next one, or closing this iterator, frees the last."""
        while (message := await self._queue.get()) is not None:
            try:
                yield message
            finally:
                self._release(1)

    def close(self) -> None:
        """Free all messages."""
        self._release(self._num_held)

    async def _acquire(self) -> None:
        await self._read_ahead.acquire()  # guard: read-ahead
        self._num_held += 1

    def _release(self, count: int) -> None:
        for _ in range(min(count, self._num_held)):
            self._num_held -= 1
            self._read_ahead.release()


async def receive(
    kind: type, reader: asyncio.StreamReader, max_bytes: int, acquire: Callable[[], Any] | None = None
) -> Any:
    """Return the next message of a stream, or an `RPCError`: the caller's error, empty at the end of all messages.

    `acquire` is awaited between a message's header and its body.

    Raises:
        ExchangeError: the message is too long, or not of this type.
        TimeoutError: it began, and did not end in time.
        IncompleteReadError: the other side has hung up.
    """
    head = await reader.readexactly(_HEAD_BYTES)
    num_bytes = int.from_bytes(head[1:], P2P.BYTEORDER)
    if (
        num_bytes > max_bytes  # guard: message-size
        or head[:1] not in (P2P.MESSAGE_MARKER, P2P.ERROR_MARKER)
    ):
        raise ExchangeError(f"announced a message of {num_bytes} bytes, kind {head[:1]!r}; at most {max_bytes}")
    if acquire is not None:
        await acquire()
    async with asyncio.timeout(MESSAGE_SECONDS):  # guard: message-time
        data = await reader.readexactly(num_bytes)
    expected: Any = RPCError if head[:1] == P2P.ERROR_MARKER else kind
    try:
        return expected.FromString(data)
    except DecodeError as error:
        raise ExchangeError(f"sent {num_bytes} bytes that are no message: {error}") from error
