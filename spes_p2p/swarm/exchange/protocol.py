"""Messages of bounded length over one libp2p stream, each within a time.

Hivemind's protobuf streams take messages of any announced length into memory, and twice the CPU time.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self

from hivemind.p2p import PeerID
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.versions import DOCUMENTS, CodecKind, Name, Version
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import Count, Digest

MAX_WAIT_SECONDS = 3600.0
MAX_DELTAS = 256


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def parse(cls, data: bytes):
        """Return the message that a peer sent.

        Raises:
            ExchangeError: malformed.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {error.errors()[0]['msg']}") from error


class Request(_Message):
    """Asks for a version; ranges of its bytes are asked for once it is offered."""

    name: Name
    min_round: Count
    """Older versions do not help."""
    timeout: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)]
    """Seconds that the caller would wait for such a version to be published."""
    have: Digest | Literal[""] = ""
    """The version that the caller has."""
    max_deltas: Annotated[int, Field(ge=0, le=MAX_DELTAS)] = 0
    """Most deltas that it would apply to that one."""
    digest: Digest | Literal[""] = ""
    """The version that the caller has begun to fetch elsewhere, and would rather have than any other."""
    at_once: bool = False
    """Send the whole payload right behind the offer, which saves a round trip; asked of one peer at a time."""


class Answer(_Message):
    """What the peer offers."""

    state: Literal["busy", "absent", "refused", "same", "deltas", "whole"]
    """`busy`: ask again later; `absent`: it has no such version; `refused`: no such request is answered; `same`: the
    caller's version is the newest; otherwise what the payload is made of."""
    version: Annotated[str, Field(max_length=4096)] = ""
    """The signed description of the version offered."""
    num_deltas: Annotated[int, Field(ge=0, le=MAX_DELTAS)] = 0


@dataclass
class Wanted:
    """What is to be fetched.

    Attributes:
        name: Of the version.
        min_round: Least round that helps.
        num_bytes: Most bytes of a document, exact bytes of a vector.
        delta_bytes: Exact bytes of one delta; 0 where none can be applied.
        max_deltas: Most of them.
        relays: All who fetch it now, this peer included, and share it out among themselves; usually nobody.
        uplinks: What they may send.
        codec: What its bytes are.
        authors: Of whom one must have signed it; anybody may if empty.
        refused: Digests of versions that are not wanted, whoever has signed them.
    """

    name: str
    min_round: int
    num_bytes: int
    delta_bytes: int = 0
    max_deltas: int = 0
    relays: Sequence[str] = ()
    uplinks: Mapping[str, float] = field(default_factory=dict)
    codec: CodecKind = "fp32"
    authors: Collection[str] = ()
    refused: Container[str] = ()

    def check(self, version: Version) -> None:
        """Compare what is offered with what is wanted.

        Raises:
            ExchangeError: it is something else.
        """
        if self.authors and version.author not in self.authors:  # guard: founders-manifest
            raise ExchangeError(f"offered {version.name} by {version.author}, not by {' or '.join(self.authors)}")
        if version.digest in self.refused:  # guard: refused-version
            raise ExchangeError(f"offered {version.name} of round {version.round}, which was refused here")
        is_document = self.name in DOCUMENTS
        fits = version.num_bytes <= self.num_bytes if is_document else version.num_bytes == self.num_bytes
        codec = "raw" if is_document else self.codec
        if (  # guard: version-wanted
            version.name != self.name or version.round < self.min_round or not fits or version.codec != codec
        ):
            raise ExchangeError(
                f"offered {version.name} of round {version.round}, {version.num_bytes} bytes, {version.codec}; "
                f"wanted {self.name} of round {self.min_round}, {self.num_bytes} bytes, {codec}"
            )

    def payload_bytes(self, version: Version, answer: Answer, asked: int) -> int:
        """Return the exact bytes of an offered payload.

        Args:
            version: Offered.
            answer: Offers it.
            asked: Most deltas asked for.

        Raises:
            ExchangeError: it cannot be one.
        """
        if answer.state == "whole":
            return version.num_bytes
        num_bytes = answer.num_deltas * self.delta_bytes
        if (  # guard: delta-count
            answer.state != "deltas" or not 0 < answer.num_deltas <= asked or not 0 < num_bytes < version.num_bytes
        ):
            raise ExchangeError(f"offered {answer.num_deltas} deltas ({answer.state}), of at most {asked}")
        return num_bytes


FRAME_BYTES = 2**18
"""Most bytes of one message of data."""
MAX_TEXT_BYTES = 8192
"""Most bytes of any other message."""
TEXT, RANGE, DATA, BUSY, END = b"t", b"r", b"d", b"b", b"e"
"""Kinds of messages: JSON, a request for bytes of a payload, some of them, "not now", and "that was all"."""
_HEADER = struct.Struct("!cI")
_SPAN = struct.Struct("!QQ")


class DisconnectedError(ExchangeError):
    """The other side hung up, or the way to it broke."""


class Channel:
    """One stream to a peer.

    Args:
        reader: Its incoming bytes.
        writer: Its outgoing bytes; closed with the channel.
        seconds: Longest silence of the other side, or refusal to take what is sent.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        self._reader, self._writer, self.seconds = reader, writer, seconds
        writer.transport.set_write_buffer_limits(high=2 * FRAME_BYTES)

    @classmethod
    async def open(cls, node: Node, peer: str, service: str, seconds: float) -> Self:
        """Connect to a peer's service.

        Raises:
            TimeoutError: the peer cannot be reached in time.
        """
        dialling = asyncio.ensure_future(node.p2p.call_binary_stream_handler(PeerID.from_base58(peer), service))
        try:
            _, reader, writer = await asyncio.wait_for(asyncio.shield(dialling), seconds)
        except BaseException:
            dialling.add_done_callback(_hang_up)  # who comes too late finds nobody, but leaves no socket behind
            raise
        return cls(reader, writer, seconds)

    # ------------------------------------------------------------------ sending

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        """Send a message once the one before it is on its way.

        Raises:
            DisconnectedError: the other side is gone.
            TimeoutError: it takes nothing.
        """
        async with self._in_time():
            if self._writer.transport.is_closing():  # uvloop takes writing to it for a bug
                raise DisconnectedError("hung up")
            self._writer.write(_HEADER.pack(kind, len(data)))
            if data:
                self._writer.write(data)
            await self._writer.drain()

    async def send_text(self, text: str) -> None:
        """Send JSON."""
        await self.send(TEXT, text.encode())

    async def send_range(self, start: int, stop: int) -> None:
        """Ask for bytes `start` to `stop` of the payload that the other side has offered."""
        await self.send(RANGE, _SPAN.pack(start, stop))

    # ------------------------------------------------------------------ receiving

    async def receive_header(self) -> tuple[bytes, int]:
        """Return the next message's kind and length.

        Raises:
            DisconnectedError: there is no next one.
            TimeoutError: nothing came in time.
        """
        async with self._in_time():
            return _HEADER.unpack(await self._reader.readexactly(_HEADER.size))

    async def read(self, num_bytes: int) -> bytes:
        """Return some of the next bytes, at least one and at most `num_bytes`; raises as `receive_header` does."""
        async with self._in_time():
            data = await self._reader.read(num_bytes)
        if not data:
            raise DisconnectedError("hung up amid a message")
        return data

    async def receive_text(self) -> bytes:
        """Return a message of JSON, empty at the end.

        Raises:
            ExchangeError: another kind of message, or one that is too long.
        """
        kind, num_bytes = await self.receive_header()
        if kind == END:
            return b""
        if kind != TEXT or not 0 < num_bytes <= MAX_TEXT_BYTES:  # guard: text-size
            raise ExchangeError(f"sent a {kind!r} message of {num_bytes} bytes in place of at most {MAX_TEXT_BYTES}")
        async with self._in_time():
            return await self._reader.readexactly(num_bytes)

    async def receive_range(self) -> tuple[int, int]:
        """Return the start and stop of the next bytes wanted.

        Raises:
            ExchangeError: this is no such request.
        """
        kind, num_bytes = await self.receive_header()
        if (kind, num_bytes) != (RANGE, _SPAN.size):
            raise ExchangeError(f"sent a {kind!r} message of {num_bytes} bytes in place of a range")
        async with self._in_time():
            return _SPAN.unpack(await self._reader.readexactly(num_bytes))

    # ------------------------------------------------------------------ the end

    async def wait_for_hang_up(self) -> None:
        """Let the other side close first: a stream that its sender closes may lose its tail on the way."""
        async with self._in_time():
            await self._reader.read(1)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._writer.close()

    def _in_time(self) -> _InTime:
        return _InTime(self.seconds)


class _InTime:
    """Bounds a step by time, and says what went wrong with it; a class, for each read passes through one."""

    __slots__ = ("_seconds", "_timeout")

    def __init__(self, seconds: float) -> None:
        self._seconds, self._timeout = seconds, asyncio.timeout(seconds)

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
    """Wakes, in one event loop, everybody who waits for something to change."""

    def __init__(self) -> None:
        self._waiting: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        """Wake them; those who begin to wait later wait for the next change."""
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
