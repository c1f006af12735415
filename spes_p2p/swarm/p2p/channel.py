"""Messages to and from other peers over one libp2p stream, each bounded in length and time.

hivemind's protobuf streams buffer messages of any announced length, and take twice the CPU time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from hivemind.p2p import P2P, PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from pydantic import ValidationError

from spes_p2p.errors import ExchangeError, SpesError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.records import Strict

log = logging.getLogger(__name__)

FRAME_BYTES = 2**18
"""Most bytes of a message of bulk data."""
MAX_TEXT_BYTES = 2**13
"""Most bytes of a message of JSON, unless its receiver expects more."""
TEXT = b"t"
"""Kind of a message of JSON."""
HEADER = struct.Struct("!cI")


class Message(Strict):
    """A JSON message to or from another peer, checked strictly."""

    @classmethod
    def parse(cls, data: bytes):
        """Return the message that a peer sent; raise ExchangeError if it is malformed."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {problem_of(error)}") from error


class DisconnectedError(ExchangeError):
    """The stream ended before the payload did; the peer may be asked again."""


class Channel:
    """One stream to a peer, as messages.

    Its methods raise DisconnectedError if the peer has hung up, and TimeoutError if it neither sends nor reads in time.

    Args:
        writer: Outgoing bytes; closed with the channel.
        seconds: Longest time for the peer to send a message, or to accept one.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seconds: float) -> None:
        self._reader = reader
        self._writer = writer
        self.seconds = seconds
        writer.transport.set_write_buffer_limits(high=2 * FRAME_BYTES)

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        """Send a message; wait until the operating system accepts it."""
        async with deadline(self.seconds):
            if self._writer.transport.is_closing():  # uvloop would report a bug
                raise DisconnectedError("hung up")
            self._writer.write(HEADER.pack(kind, len(data)))
            if data:
                self._writer.write(data)
            await self._writer.drain()

    async def send_text(self, text: str | bytes) -> None:
        """Send JSON."""
        await self.send(TEXT, text.encode() if isinstance(text, str) else text)

    async def send_last(self, text: str | bytes) -> None:
        """Send JSON, and wait until the peer hangs up: a stream that its sender closes may lose its last bytes."""
        await self.send_text(text)
        async with deadline(self.seconds):
            await self._reader.read(1)

    async def receive(self, most: Mapping[bytes, int]) -> tuple[bytes, bytes]:
        """Return a message's kind and content.

        Args:
            most: Most bytes by kind, of the kinds of messages that may come now.

        Raises:
            ExchangeError: it is of another kind, or longer.
        """
        async with deadline(self.seconds):
            kind, num_bytes = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            check_message(kind, num_bytes, most)
            return kind, await self._reader.readexactly(num_bytes)

    async def receive_text(self, most: int = MAX_TEXT_BYTES) -> bytes:
        """Return a JSON message; raise as `receive` does."""
        return (await self.receive({TEXT: most}))[1]

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._writer.close()


def check_message(kind: bytes, num_bytes: int, most: Mapping[bytes, int]) -> None:
    """Refuse a message that is too long, or of a kind that may not come now; see `Channel.receive`."""
    if num_bytes > most.get(kind, -1):  # guard: never
        allowed = f"in place of at most {most[kind]}" if kind in most else "of a kind that was not expected"
        raise ExchangeError(f"sent a message of {num_bytes} bytes {allowed}")


Answer = Callable[[Channel, str], Awaitable[None]]
"""Serves one stream: gets its channel, and the id of the peer that has opened it."""


async def open_stream(p2p: P2P, peer: str, service: str, seconds: float) -> Channel:
    """Open a stream to a peer's service; raise as `Network.open` does."""
    dialling = asyncio.ensure_future(p2p.call_binary_stream_handler(PeerID.from_base58(peer), service))
    try:
        _, reader, writer = await asyncio.wait_for(asyncio.shield(dialling), seconds)
    except BaseException as error:
        dialling.add_done_callback(_hang_up)  # a late stream must leave no socket behind
        if isinstance(error, P2PDaemonError | OSError | EOFError) and not isinstance(error, TimeoutError):
            raise DisconnectedError(f"cannot be reached: {error}") from error
        raise
    return Channel(reader, writer, seconds)


async def serve_streams(p2p: P2P, service: str, seconds: float, answer: Answer) -> None:
    """Answer each stream that a peer opens to a service, as `Network.serve` does."""

    async def handle(info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await answer_stream(Channel(reader, writer, seconds), info.peer_id.to_base58(), service, answer)

    await p2p.add_binary_stream_handler(service, handle)


async def answer_stream(channel: Channel, peer: str, service: str, answer: Answer) -> None:
    """Answer one stream of a peer, and close it; a failure that the peer may cause ends only this stream."""
    with contextlib.closing(channel):
        try:
            await answer(channel, peer)
        except (SpesError, TimeoutError) as error:
            log.debug("%s stopped answering %s: %s", service, peer[-6:], error)


@contextlib.asynccontextmanager
async def deadline(seconds: float) -> AsyncIterator[None]:
    """Bound a step in time, and name its failure."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except asyncio.IncompleteReadError as error:
        raise DisconnectedError("hung up") from error
    except TimeoutError as error:
        raise TimeoutError(f"was silent for {seconds:.0f} s") from error
    except OSError as error:
        raise DisconnectedError(f"connection broke: {error}") from error


def _hang_up(dialled: asyncio.Future) -> None:
    if not dialled.cancelled() and dialled.exception() is None:
        dialled.result()[2].close()
