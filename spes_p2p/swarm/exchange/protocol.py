"""The exchange's messages: requests, offers and bytes over one libp2p stream, each bounded in length and time.

hivemind's protobuf streams buffer messages of any announced length, and take twice the CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Literal, Self, TypeVar

from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from pydantic import Field, ValidationError

from spes_p2p.errors import ExchangeError, SpesError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.exchange.versions import CodecKind, Name, RefusedVersions, Version, is_document
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import Count, Digest, Strict

MAX_WAIT_SECONDS = 3600.0

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


class Request(Message):
    """Asks for a version; ranges of its bytes are requested once it is offered."""

    name: Name
    min_round: Count
    """Oldest round that helps."""
    timeout: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)]
    """Seconds that the caller waits for such a version to be published."""
    have: Digest | Literal[""] = ""
    """The caller's own version."""
    digest: Digest | Literal[""] = ""
    """The version that the caller has begun to fetch from another peer, and prefers."""
    at_once: bool = False
    """Send the whole payload right behind the offer, which saves a round trip; set for one peer at a time."""


class Answer(Message):
    """Offers a version, or says why not."""

    state: Literal["busy", "absent", "refused", "same", "whole"]
    """`busy`: ask again later; `absent`: no such version; `refused`: malformed request; `same`: the caller's version is
    the newest; `whole`: the payload is the version's bytes."""
    version: Annotated[str, Field(max_length=4096)] = ""
    """The signed description of the offered version."""


@dataclass
class Wanted:
    """A version to fetch, and how.

    Attributes:
        name: The version's name.
        min_round: Oldest round that helps.
        num_bytes: Exact bytes of a vector; most bytes of a document.
        codec: Encoding of the bytes.
        authors: Peers that made the version; see `Swarm.pull`.
        refused: Versions not to fetch; None refuses none.
        digest: The only version to fetch; empty for any.
    """

    name: str
    min_round: int
    num_bytes: int
    codec: CodecKind = "fp32"
    authors: Collection[str] = ()
    refused: RefusedVersions | None = None
    digest: str = ""

    def check(self, version: Version) -> None:
        """Raise ExchangeError if an offered version is not the wanted one."""
        is_raw = is_document(self.name)
        is_anyones = not self.authors or (not is_raw and VectorName(self.name).is_kept)
        if not is_anyones and version.author not in self.authors:  # guard: founders-manifest
            raise ExchangeError(f"offered {version.name} by {version.author}, not by {' or '.join(self.authors)}")
        if self.digest and version.digest != self.digest:  # guard: certified-version
            raise ExchangeError(f"offered another {version.name} of round {version.round} than the certified one")
        if self.refused is not None and self.refused.refuses(version):  # guard: refused-version
            raise ExchangeError(f"offered {version.name} of round {version.round}, which was refused here")
        fits = version.num_bytes <= self.num_bytes if is_raw else version.num_bytes == self.num_bytes
        codec = "raw" if is_raw else self.codec
        if (  # guard: version-wanted
            version.name != self.name or version.round < self.min_round or not fits or version.codec != codec
        ):
            raise ExchangeError(
                f"offered {version.name} of round {version.round}, {version.num_bytes} bytes, {version.codec}; "
                f"wanted {self.name} of round {self.min_round}, {self.num_bytes} bytes, {codec}"
            )


FRAME_BYTES = 2**18
"""Most bytes of a DATA message."""
MAX_TEXT_BYTES = 8192
"""Most bytes of any other message."""
TEXT, RANGE, DATA, BUSY, END = b"t", b"r", b"d", b"b", b"e"
"""Kinds of messages: JSON, a request for a range of the payload, bytes of it, "ask again later", end of a list."""
_HEADER = struct.Struct("!cI")
_SPAN = struct.Struct("!QQ")


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

    async def send_range(self, start: int, stop: int) -> None:
        """Request bytes `start` to `stop` of the payload that the peer has offered."""
        await self.send(RANGE, _SPAN.pack(start, stop))

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

    async def receive_text(self, most: int = MAX_TEXT_BYTES) -> bytes:
        """Return a JSON message, empty at the end of a list; raise ExchangeError for another kind, or a longer one."""
        kind, num_bytes = await self.receive_header()
        if kind == END:
            return b""
        if kind != TEXT or not 0 < num_bytes <= most:  # guard: text-size
            raise ExchangeError(f"sent a {kind!r} message of {num_bytes} bytes in place of at most {most}")
        async with _Deadline(self.seconds):
            return await self._reader.readexactly(num_bytes)

    async def receive_range(self) -> tuple[int, int]:
        """Return the start and stop of the requested range; raise ExchangeError for another kind of message."""
        kind, num_bytes = await self.receive_header()
        if (kind, num_bytes) != (RANGE, _SPAN.size):
            raise ExchangeError(f"sent a {kind!r} message of {num_bytes} bytes in place of a range")
        async with _Deadline(self.seconds):
            return _SPAN.unpack(await self._reader.readexactly(num_bytes))

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


class Signal:
    """Wakes all tasks of an event loop that wait for a change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wake the tasks that wait now; later ones wait for the next change."""
        for future in self._waiting:
            if not future.done():
                future.set_result(None)

    async def wait(self, seconds: float) -> None:
        """Return at the next change, at the latest after `seconds`."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await asyncio.wait((future,), timeout=max(0.0, seconds))
        finally:
            self._waiting.discard(future)
