"""All that the swarm's parts need of a network: streams between peers, records, a clock, an event loop.

`Node` implements it over p2pd and the DHT, `VirtualNode` in one process in virtual time. Code above it measures time by
the event loop's clock and by `now`, and runs in the loop what it awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any, Protocol, TypeVar

from spes_p2p.swarm.p2p.channel import MAX_TEXT_BYTES, Answer, Channel, Message
from spes_p2p.swarm.records import Record

T = TypeVar("T")


class Network(Protocol):
    """One peer's network, for one run.

    `open`, and what `serve` is given, run in the network's event loop; the other methods in any thread.
    """

    run_id: str
    peer_id: str

    @property
    def client_mode(self) -> bool:
        """Whether this peer opens streams, but accepts none from peers that it has not been introduced to."""

    def now(self) -> float:
        """Return the DHT time, in seconds since the epoch."""

    def processor_seconds(self) -> float:
        """Return the processor time of the calling thread, which costs a virtual peer nothing."""

    async def open(self, peer: str, service: str, seconds: float) -> Channel:
        """Open a stream to a peer's service, whose messages may take `seconds` each.

        Raises:
            DisconnectedError: the peer cannot be reached, or offers no such service.
            TimeoutError: opening it took longer than `seconds`.
        """

    async def serve(self, service: str, seconds: float, answer: Answer) -> None:
        """Answer each stream that a peer opens to a service, from now on.

        Args:
            service: The service's name.
            seconds: Longest time for a caller to send a message, or to accept one.
            answer: Called with each stream, which is closed after it.
        """

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine in the event loop and return its result; call it from another thread.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it is cancelled.
        """

    def notify(self, listener: Callable[[], None]) -> None:
        """Schedule a call in the event loop; a closed network ignores it."""

    def store(self, record: Record, lifetime_seconds: float) -> bool:
        """Store a record of this peer, in place of its last one of that kind; return whether another peer keeps it.

        Raises:
            OSError: storing it takes too long.
        """

    def read(self, kind: type[Record]) -> dict[str, Any]:
        """Return all peers' unexpired records of one kind by peer id; each was stored by the peer that it names.

        Raises:
            OSError: reading them takes too long.
        """


async def ask(
    network: Network, peer: str, service: str, question: Message, seconds: float, most: int = MAX_TEXT_BYTES
) -> bytes:
    """Return a peer's answer of at most so many bytes; raise as `Network.open` and `Channel` do.

    Raises:
        TimeoutError: the answer took longer than `seconds`.
    """
    async with asyncio.timeout(seconds):
        channel = await network.open(peer, service, seconds)
        with contextlib.closing(channel):
            await channel.send_text(question.model_dump_json())
            return await channel.receive_text(most)
