"""Messages of bounded length over one libp2p stream, each within a time.

Hivemind's protobuf streams take messages of any announced length into memory, and twice the CPU time.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Self

from hivemind.p2p import PeerID

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.node import Node

FRAME_BYTES = 2**18
"""Most bytes of one message of data."""
MAX_TEXT_BYTES = 8192
"""Most bytes of any other message."""
TEXT, RANGE, DATA, BUSY, END = b"t", b"r", b"d", b"b", b"e"
"""Kinds of messages: JSON, a request for bytes of a payload, some of them, "not now", and "that was all"."""
_HEADER = struct.Struct("!cI")
_SPAN = struct.Struct("!QQ")


class CutShortError(ExchangeError):
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
            CutShortError: the other side is gone.
            TimeoutError: it takes nothing.
        """
        async with self._in_time():
            if self._writer.transport.is_closing():  # uvloop takes writing to it for a bug
                raise CutShortError("hung up")
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
            CutShortError: there is no next one.
            TimeoutError: nothing came in time.
        """
        async with self._in_time():
            return _HEADER.unpack(await self._reader.readexactly(_HEADER.size))

    async def read(self, num_bytes: int) -> bytes:
        """Return some of the next bytes, at least one and at most `num_bytes`; raises as `receive_header` does."""
        async with self._in_time():
            data = await self._reader.read(num_bytes)
        if not data:
            raise CutShortError("hung up amid a message")
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
            raise CutShortError("hung up") from error
        if isinstance(error, OSError):
            raise CutShortError(f"connection broke: {error}") from error


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
