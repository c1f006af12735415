"""hivemind's calls and streams among strangers: how many, how long, how much of them waits in memory.

Stock reads messages of any announced length, six ahead of whoever takes them, from as many streams as anybody cares to
open, and keeps them open for ever. The exchange bounds its own messages (`exchange/channel.py`), and passes the same
door here.
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

from spes_p2p.codecs import PART_NUMEL
from spes_p2p.errors import ExchangeError

log = logging.getLogger(__name__)

MAX_MESSAGE_BYTES = 4 * PART_NUMEL + 2**14
"""Of a caller's message: the largest part, in fp32, with what is around it."""
MAX_ANSWER_BYTES = 2**20
"""Of an answer: a leader's holds the entries of all who have met."""
MAX_STREAMS = 1024
"""That others may have open to one of a peer's processes."""
MAX_STREAMS_PER_PEER = 96
WAITING_MESSAGES = 32
"""Of one peer's streams together, read and not taken yet: 8.5 MiB at most."""
FIRST_SECONDS = 30.0
"""Until a stream has brought its first message; a handler bounds the rest."""
MESSAGE_SECONDS = 60.0
"""From a message's first byte to its last."""
MAX_CALLS_PER_PEER = 64
MAX_CALL_BYTES_PER_PEER = 2**24
"""Of one peer's calls that wait for their answers."""
_HEAD_BYTES = 1 + P2P.HEADER_LEN

Handler = Callable[[AsyncIterator[Any], P2PContext], AsyncIterator[Any]]


class PeerQuota:
    """What each peer may have open or waiting at once.

    Args:
        most: Pieces of one peer.
        most_bytes: In them.
        most_in_all: Pieces of all peers.
    """

    def __init__(self, most: int, most_bytes: float = float("inf"), most_in_all: float = float("inf")) -> None:
        self.most, self._most_bytes, self._most_in_all = most, most_bytes, most_in_all
        self._pieces: Counter[object] = Counter()
        self._bytes: Counter[object] = Counter()
        self._complaints: Counter[object] = Counter()

    def num_of(self, peer: object) -> int:
        """Return how many pieces a peer has."""
        return self._pieces[peer]

    @contextmanager
    def take(self, peer: object, what: str, num_bytes: int = 0) -> Iterator[None]:
        """Take a peer's share of one piece while it lasts.

        Raises:
            ExchangeError: the peer has too much.
        """
        pieces, held = self._pieces[peer] + 1, self._bytes[peer] + num_bytes
        if (
            pieces > self.most
            or held > self._most_bytes  # guard: held-bytes
            or self._pieces.total() >= self._most_in_all  # guard: held-by-all
        ):
            self.complain(peer, f"refused {what}, of which it has {pieces - 1}")
            raise ExchangeError(f"too many {what}")
        self._pieces[peer], self._bytes[peer] = pieces, held
        try:
            yield
        finally:
            self._pieces[peer] -= 1
            self._bytes[peer] -= num_bytes
            if not self._pieces[peer]:
                del self._pieces[peer], self._bytes[peer]

    def complain(self, peer: object, what: str) -> None:
        """Say in the log what is the matter with a peer, for the 1st, 2nd, 4th, 8th... time: no stranger fills it."""
        if len(self._complaints) >= MAX_STREAMS:
            self._complaints.clear()
        self._complaints[peer] += 1
        if not self._complaints[peer] & (self._complaints[peer] - 1):  # guard: log-flood
            log.warning("%s, complaint %d: %s", peer, self._complaints[peer], what)


class LimitedP2P(P2P):
    """hivemind's P2P, for streams that strangers open.

    Attributes:
        streams: What each peer may have open.
    """

    def __init__(self) -> None:
        super().__init__()
        self.streams = PeerQuota(MAX_STREAMS_PER_PEER, most_in_all=MAX_STREAMS)
        self._room: dict[PeerID, asyncio.Semaphore] = {}

    async def add_binary_stream_handler(self, name: str, handler: Any, balanced: bool = False) -> None:
        await super().add_binary_stream_handler(name, functools.partial(self._admit, handler), balanced)

    async def _admit(
        self, handler: Any, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with closing(writer):
            try:
                with self.streams.take(info.peer_id, "streams"):  # guard: streams-per-peer
                    await handler(info, reader, writer)
            except ExchangeError as error:
                log.debug("hung up on %s: %s", info.peer_id, error)
            finally:
                if not self.streams.num_of(info.peer_id):
                    self._room.pop(info.peer_id, None)

    # ------------------------------------------------------------------ protobuf streams that others open

    async def _add_protobuf_stream_handler(
        self, name: str, handler: Handler, input_protobuf_type: type, max_prefetch: int = 1, balanced: bool = False
    ) -> None:
        async def serve(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            context = P2PContext(handle_name=name, local_id=self.peer_id, remote_id=info.peer_id)
            room = self._room.setdefault(info.peer_id, asyncio.Semaphore(WAITING_MESSAGES))
            inbox = Inbox(room, max_prefetch)
            reading = asyncio.create_task(inbox.fill(input_protobuf_type, reader))
            answering = asyncio.create_task(self._answer(handler(inbox.messages(), context), writer, info.peer_id))
            try:
                await asyncio.wait({reading, answering}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                answering.cancel()
                reading.cancel()
                ends = await asyncio.gather(reading, answering, return_exceptions=True)
                inbox.close()
            if isinstance(ends[0], ExchangeError | TimeoutError):
                self.streams.complain(info.peer_id, f"hung up on its {name}: {str(ends[0]) or 'it was silent'}")

        await self.add_binary_stream_handler(name, serve, balanced=balanced)

    async def _answer(self, answers: AsyncIterator[Any], writer: asyncio.StreamWriter, peer: PeerID) -> None:
        try:
            async for answer in answers:
                await P2P.send_protobuf(answer, writer)
        except OSError as error:
            log.debug("a caller is gone: %r", error)  # it knows better than we
        except Exception as error:  # noqa: BLE001 - whatever a handler raises is its caller's answer
            self.streams.complain(peer, f"what it asked for failed: {error!r}")
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
    """Messages of one stream that have come.

    Args:
        room: For messages that wait, of all streams of the same peer.
        ahead: Messages read before they are asked for, beside one that is being read.
    """

    def __init__(self, room: asyncio.Semaphore, ahead: int) -> None:
        self._room, self._held = room, 0
        self._queue: asyncio.Queue[Any] = asyncio.Queue(ahead)

    async def fill(self, kind: type, reader: asyncio.StreamReader) -> None:
        """Read messages as room allows, until the caller hangs up.

        Raises:
            ExchangeError: one is too long, or comes behind the last.
            TimeoutError: the first one does not come, or one stops amid its bytes.
            IncompleteReadError: the caller has hung up.
        """
        async with asyncio.timeout(FIRST_SECONDS):  # guard: first-message-time
            message = await receive(kind, reader, MAX_MESSAGE_BYTES, self._take_room)
        while not isinstance(message, RPCError):
            await self._queue.put(message)
            message = await receive(kind, reader, MAX_MESSAGE_BYTES, self._take_room)
        await self._queue.put(None)
        await reader.readexactly(1)
        raise ExchangeError("sent more behind its last message")

    async def messages(self) -> AsyncIterator[Any]:
        """Yield them; whoever asks for the next one has done with the last."""
        while (message := await self._queue.get()) is not None:
            yield message
            self._give_room(1)

    def close(self) -> None:
        """Give all room back."""
        self._give_room(self._held)

    async def _take_room(self) -> None:
        await self._room.acquire()  # guard: read-ahead
        self._held += 1

    def _give_room(self, count: int) -> None:
        for _ in range(count):
            self._held -= 1
            self._room.release()


async def receive(
    kind: type, reader: asyncio.StreamReader, most_bytes: int, take_room: Callable[[], Any] | None = None
) -> Any:
    """Return the next message of a stream, or the error, empty at the end of all messages, that stands in its place.

    Raises:
        ExchangeError: it is too long, or none of the two.
        TimeoutError: it began, and did not end in time.
        IncompleteReadError: the other side has hung up.
    """
    head = await reader.readexactly(_HEAD_BYTES)
    num_bytes = int.from_bytes(head[1:], P2P.BYTEORDER)
    if (
        num_bytes > most_bytes  # guard: message-size
        or head[:1] not in (P2P.MESSAGE_MARKER, P2P.ERROR_MARKER)
    ):
        raise ExchangeError(f"announced a message of {num_bytes} bytes, kind {head[:1]!r}; at most {most_bytes}")
    if take_room is not None:
        await take_room()
    async with asyncio.timeout(MESSAGE_SECONDS):  # guard: message-time
        data = await reader.readexactly(num_bytes)
    expected: Any = RPCError if head[:1] == P2P.ERROR_MARKER else kind
    try:
        return expected.FromString(data)
    except DecodeError as error:
        raise ExchangeError(f"sent {num_bytes} bytes that are no message: {error}") from error
