"""The exchange's messages: requests, offers and bytes over one libp2p stream, each bounded in length and time.

hivemind's protobuf streams buffer messages of any announced length, and take twice the CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Mapping
from typing import Self, TypeVar

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import ValidationError

from spes_p2p.codecs.vectors import HASH_BYTES
from spes_p2p.errors import ExchangeError, SpesError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.exchange.versions import Name
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import Strict

AnswerType = TypeVar("AnswerType", bound="Message")


class Message(Strict):
    """A JSON message to or from another peer, checked strictly."""

    @classmethod
    def parse(cls, data: bytes):
        """Return the message that a peer sent; raise ExchangeError if it is malformed."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {problem_of(error)}") from error


class Question(Message):
    """Asks for the versions that a peer has: of one name, or of all."""

    name: Name | None = None


FRAME_BYTES = 2**18
"""Most bytes of a DATA message."""
MAX_TEXT_BYTES = 8192
"""Most bytes of a TEXT message."""
TEXT, END = b"t", b"e"
"""Kinds of messages: JSON, and the end of a list of such."""
WANT, HAVE, GET, DATA, BUSY, ABSENT = b"w", b"h", b"g", b"d", b"b", b"a"
"""Kinds of messages of a fetch: digests of versions (none: the same as before), and what the peer has of each; a
request for a part of one, and bytes of it, or "ask again later", or "not here"."""
MAX_WANTED = 4200
"""Versions of a WANT message: the vectors of the largest model, and documents."""
_HEADER = struct.Struct("!cI")
_GET = struct.Struct("!32sI")
GET_BYTES = _GET.size


def pack_get(digest: str, number: int) -> bytes:
    """Return the content of a GET message, for a block of a version or its LIST."""
    return _GET.pack(bytes.fromhex(digest), number)


def parse_get(data: bytes) -> tuple[str, int]:
    """Return the digest and the number of a GET message; raise ExchangeError if it is cut short."""
    if len(data) != GET_BYTES:
        raise ExchangeError(f"sent a request of {len(data)} bytes")
    digest, number = _GET.unpack(data)
    return digest.hex(), number


def parse_want(data: bytes) -> list[str]:
    """Return the digests of a WANT message; raise ExchangeError if it is cut short."""
    if len(data) % HASH_BYTES:
        raise ExchangeError(f"sent {len(data)} bytes of digests")
    return [data[start : start + HASH_BYTES].hex() for start in range(0, len(data), HASH_BYTES)]


class DisconnectedError(ExchangeError):
    """The stream ended before the payload did; the peer may be asked again."""


class Channel:
    """One stream to a peer, as messages.

    Args:
        reader: Incoming bytes.
        writer: Outgoing bytes; closed with the channel.
        seconds: Longest time for the peer to send, or to accept what is sent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        self._reader = reader
        self._writer = writer
        self.seconds = seconds
        writer.transport.set_write_buffer_limits(high=2 * FRAME_BYTES)

    @classmethod
    async def open(cls, node: Node, peer: str, service: str, seconds: float) -> Self:
        """Connect to a peer's service; raise TimeoutError if that takes longer than `seconds`."""
        dialling = asyncio.ensure_future(node.p2p.call_binary_stream_handler(PeerID.from_base58(peer), service))
        try:
            _, reader, writer = await asyncio.wait_for(asyncio.shield(dialling), seconds)
        except BaseException:
            dialling.add_done_callback(_hang_up)  # a late stream must leave no socket behind
            raise
        return cls(reader, writer, seconds)

    # ------------------------------------------------------------------ sending

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        """Send a message; wait until the operating system accepts it.

        Raises:
            DisconnectedError: the peer has hung up.
            TimeoutError: the peer does not read.
        """
        async with _Deadline(self.seconds):
            if self._writer.transport.is_closing():  # uvloop would report a bug
                raise DisconnectedError("hung up")
            self._writer.write(_HEADER.pack(kind, len(data)))
            if data:
                self._writer.write(data)
            await self._writer.drain()

    async def send_text(self, text: str) -> None:
        """Send JSON."""
        await self.send(TEXT, text.encode())

    # ------------------------------------------------------------------ receiving

    async def receive_header(self) -> tuple[bytes, int]:
        """Return the next message's kind and length.

        Raises:
            DisconnectedError: the peer has hung up.
            TimeoutError: nothing came in time.
        """
        async with _Deadline(self.seconds):
            return _HEADER.unpack(await self._reader.readexactly(_HEADER.size))

    async def read(self, num_bytes: int) -> bytes:
        """Return the next bytes, at least one and at most `num_bytes`; raise as `receive_header` does."""
        async with _Deadline(self.seconds):
            data = await self._reader.read(num_bytes)
        if not data:
            raise DisconnectedError("hung up amid a message")
        return data

    async def receive(self, most: Mapping[bytes, int]) -> tuple[bytes, bytes]:
        """Return a message's kind and content.

        Args:
            most: Most bytes by kind, of the kinds of messages that may come now.

        Raises:
            ExchangeError: it is of another kind, or longer.
            DisconnectedError: the peer has hung up.
            TimeoutError: nothing came in time.
        """
        kind, num_bytes = await self.receive_header()
        if num_bytes > most.get(kind, -1):  # guard: exchange-message
            allowed = f"in place of at most {most[kind]}" if kind in most else "of a kind that was not expected"
            raise ExchangeError(f"sent a message of {num_bytes} bytes {allowed}")
        async with _Deadline(self.seconds):
            return kind, await self._reader.readexactly(num_bytes)

    async def receive_text(self, most: int = MAX_TEXT_BYTES) -> bytes:
        """Return a JSON message, empty at the end of a list; raise as `receive` does."""
        _, data = await self.receive({TEXT: most, END: 0})
        return data

    # ------------------------------------------------------------------ the end

    async def wait_for_hang_up(self) -> None:
        """Wait until the peer closes: the last bytes of a stream that its sender closes may be lost."""
        async with _Deadline(self.seconds):
            await self._reader.read(1)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._writer.close()


async def ask(
    node: Node, peer: str, service: str, question: Message, answer_type: type[AnswerType], seconds: float
) -> AnswerType:
    """Return a peer's answer to a question; raise as `Channel` does, with `seconds` for each step."""
    channel = await Channel.open(node, peer, service, seconds)
    with contextlib.closing(channel):
        await channel.send_text(question.model_dump_json())
        return answer_type.parse(await channel.receive_text())


async def listen(
    node: Node,
    service: str,
    seconds: float,
    answer: Callable[[Channel, str], Awaitable[None]],
    said: Callable[[str, Exception], None],
) -> None:
    """Answer each peer that opens a stream to a service, from now on.

    Args:
        node: This peer's host.
        service: The service's name.
        seconds: Longest time for a caller to send, or to accept what is sent.
        answer: Gets the channel and the caller's id.
        said: Gets the end of the caller's id, and the error at which an answer ended.
    """

    async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel, peer = Channel(reader, writer, seconds), info.peer_id.to_base58()
        with contextlib.closing(channel):
            try:
                await answer(channel, peer)
            except (SpesError, TimeoutError) as error:
                said(peer[-6:], error)

    await node.p2p.add_binary_stream_handler(service, handle)


class _Deadline:
    """Bounds a step in time and names its failure. A class, as every read makes one and a generator costs more."""

    __slots__ = ("_seconds", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, kind, error, traceback) -> None:
        try:
            await self._timeout.__aexit__(kind, error, traceback)
        except TimeoutError as late:
            raise TimeoutError(f"was silent for {self._seconds:.0f} s") from late
        if isinstance(error, asyncio.IncompleteReadError):
            raise DisconnectedError("hung up") from error
        if isinstance(error, OSError):
            raise DisconnectedError(f"connection broke: {error}") from error


def _hang_up(dialled: asyncio.Future) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result()[2].close()
