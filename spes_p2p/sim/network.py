"""A network in one process and in virtual time: streams with delays, losses and cuts, and records with leases."""

from __future__ import annotations

import asyncio
import contextvars
import math
import random
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, TypeVar

from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.p2p.channel import (
    HEADER,
    Answer,
    Channel,
    DisconnectedError,
    answer_stream,
    check_message,
    deadline,
)
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Record

WINDOW_BYTES = 2**20
"""Bytes of a stream that its receiver has not read after which its sender waits."""

T = TypeVar("T")

_owner: contextvars.ContextVar[VirtualNode | None] = contextvars.ContextVar("owner", default=None)
"""The peer whose code runs: of its tasks, and of those that these begin."""


class VirtualNetwork:
    """Links between the virtual peers of one process.

    Of the parts that run on it, some draw from `random`, which must be seeded too for two runs to be alike.

    Args:
        seed: Seed of delays and losses.

    Attributes:
        loop: Runs all peers, in virtual time.
        random: Draws delays and losses.
        delay: Returns the seconds from a sender to a receiver, for each direction of a new stream.
        loss: Share of streams that fall silent, some of them at once.
        cuts: Pairs of a sender and a receiver between which nothing passes in this direction. A stream that has lost a
            message stays silent.
        still: Peers that stand still: nothing passes to them or from them.
    """

    def __init__(self, seed: int = 0) -> None:
        self.loop = VirtualLoop()
        self.loop.set_task_factory(_make_task)
        self.nodes: dict[str, VirtualNode] = {}
        self.random = random.Random(seed)
        self.delay: Callable[[str, str], float] = lambda sender, receiver: self.random.uniform(0.01, 0.1)
        self.loss = 0.0
        self.cuts: set[tuple[str, str]] = set()
        self.still: set[str] = set()

    def passes(self, sender: str, receiver: str) -> bool:
        """Return whether what one peer sends to another arrives."""
        return (sender, receiver) not in self.cuts and not self.still & {sender, receiver}

    def node(self, peer_id: str, run_id: str, *, client_mode: bool = False, uplink_mbit: float = 0.0) -> VirtualNode:
        """Start a peer, which finds the records of those that it can reach; a killed one may start again."""
        node = VirtualNode(self, peer_id, run_id, client_mode=client_mode, uplink_mbit=uplink_mbit)
        for other in self.nodes.values():
            if other.run_id == run_id and not other.is_closed and self.passes(other.peer_id, peer_id):
                for record, expires_at in [item for kept in other.records.values() for item in kept.values()]:
                    node.keep(record, expires_at)
        self.nodes[peer_id] = node
        return node

    def close(self) -> None:
        """Close all peers, and end all that still runs."""
        for node in self.nodes.values():
            node.close()
        self.loop.close()


def _make_task(loop: asyncio.AbstractEventLoop, work: Any, *, context: contextvars.Context | None = None) -> Any:
    task = asyncio.Task(work, loop=loop, context=context)
    if (owner := _owner.get() if context is None else context.get(_owner)) is not None:
        owner.tasks[task] = None
        task.add_done_callback(owner.tasks.pop)
    return task


class VirtualNode:
    """One virtual peer's `Network`.

    Args:
        run_id: The run whose records it reads.
        client_mode: It accepts no streams from other peers in client mode; those that it can call reach it.
        uplink_mbit: Rate at which it sends, over all streams, in 10^6 bits per second; 0 for no limit.

    Attributes:
        records: What this peer has of all peers' records, with the times at which they expire.
        tasks: What runs for this peer.
        channels: Its ends of open streams.
    """

    def __init__(
        self, network: VirtualNetwork, peer_id: str, run_id: str, *, client_mode: bool, uplink_mbit: float
    ) -> None:
        self.peer_id = peer_id
        self.run_id = run_id
        self.client_mode = client_mode
        self.is_closed = False
        self.records: dict[type[Record], dict[str, tuple[Record, float]]] = {}
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.channels: dict[VirtualChannel, None] = {}
        self._network = network
        self._loop = network.loop
        self._bytes_per_second = uplink_mbit * 1e6 / 8
        self._free_at = 0.0
        self._services: dict[str, tuple[float, Answer]] = {}
        self._context = contextvars.copy_context()
        self._context.run(_owner.set, self)

    def now(self) -> float:
        return self._loop.time()

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        return self._loop.call(work, timeout, self._context.copy())

    def notify(self, listener: Callable[[], None]) -> None:
        self._loop.call_soon(lambda: None if self.is_closed else listener(), context=self._context.copy())

    def processor_seconds(self) -> float:
        return 0.0

    def advance(self, seconds: float) -> None:
        """Let this peer's thread work for `seconds`, as `VirtualLoop.advance` does."""
        self._loop.advance(seconds)

    def stand_still(self, seconds: float) -> None:
        """Be paused like a stopped process: it reaches no other, and no other reaches it."""
        self._network.still.add(self.peer_id)
        self._loop.advance(seconds)
        self._network.still.discard(self.peer_id)

    def close(self) -> None:
        """End like a killed process: with all tasks, and streams that hang up. Idempotent."""
        if not self.is_closed:
            self.is_closed = True
            for channel in list(self.channels):
                channel.close()
            for task in list(self.tasks):
                task.cancel()

    # ------------------------------------------------------------------ records

    def store(self, record: Record, lifetime_seconds: float) -> bool:
        if record.peer_id != self.peer_id or lifetime_seconds > MAX_LIFETIME_SECONDS:  # as `RecordValidator` refuses
            return False
        record.encode()  # which raises RecordError if it is too large
        expires_at, network = self.now() + lifetime_seconds, self._network
        others = [node for node in network.nodes.values() if node is not self and node.run_id == self.run_id]
        is_still = self.peer_id in network.still  # to one that stands still, others keep its records
        cut = [node for node in others if is_still or (self.peer_id, node.peer_id) in network.cuts]
        reached = [node for node in others if not node.is_closed and node not in cut]
        for node in [self, *reached]:
            node.keep(record, expires_at)
        return bool(reached)

    def keep(self, record: Record, expires_at: float) -> None:
        """Keep a peer's record, unless one that expires later is here."""
        kept = self.records.setdefault(type(record), {})
        if record.peer_id not in kept or kept[record.peer_id][1] <= expires_at:
            kept[record.peer_id] = record, expires_at

    def read(self, kind: type[Record]) -> dict[str, Any]:
        now = self.now()
        return {peer: record for peer, (record, end) in self.records.get(kind, {}).items() if end > now}

    # ------------------------------------------------------------------ streams

    async def open(self, peer: str, service: str, seconds: float) -> Channel:
        network, loop, other = self._network, self._loop, self._network.nodes.get(peer)
        there, back = network.delay(self.peer_id, peer), network.delay(peer, self.peer_id)
        is_lost = network.random.random() < network.loss
        # A stream that is lost falls silent before the fourth message.
        lost_after = [network.random.randrange(4) if is_lost else math.inf]
        if not network.passes(self.peer_id, peer) or lost_after == [0] or there + back > seconds:
            await asyncio.sleep(seconds)
            raise TimeoutError(f"{peer[-6:]} was not reached in {seconds:.0f} s")
        if self.is_closed or other is None or (self.client_mode and other.client_mode):
            await asyncio.sleep(there + back)
            raise DisconnectedError("cannot be reached: nothing answers at its address")
        near = VirtualChannel(self, peer, seconds, there, lost_after)
        near.other = VirtualChannel(other, self.peer_id, 0.0, back, lost_after)
        near.other.other = near
        loop.call_at(loop.time() + there, other.accept, near.other, service)
        try:
            await asyncio.sleep(there + back)  # as if the answer had come, also if the way back is cut
        except BaseException:
            near.close()
            raise
        if near.other.is_refused:
            raise DisconnectedError("cannot be reached: it offers no such service")
        return near

    async def serve(self, service: str, seconds: float, answer: Answer) -> None:
        self._services[service] = seconds, answer

    def accept(self, channel: VirtualChannel, service: str) -> None:
        """Serve a stream that has reached this peer."""
        channel.is_refused = self.is_closed or service not in self._services
        if channel.is_refused:
            return channel.close()
        channel.seconds, answer = self._services[service]
        work = answer_stream(channel, channel.peer, service, answer)
        self._loop.create_task(work, context=self._context.copy()).add_done_callback(self._answered)

    def _answered(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.fail(error)  # a fault of the program, which a real peer would log

    def sent_at(self, num_bytes: int) -> float:
        """Put bytes in the uplink's queue; return the time at which they have left it."""
        self._free_at = max(self._free_at, self.now())
        if self._bytes_per_second:
            self._free_at += num_bytes / self._bytes_per_second
        return self._free_at

    def reaches(self, peer: str) -> bool:
        """Return whether what this peer sends to another arrives."""
        return self._network.passes(self.peer_id, peer)


class VirtualChannel(Channel):
    """One end of a stream in memory; messages pass whole.

    Args:
        node: The peer whose end it is.
        seconds: Longest time for the other peer to send a message, or to accept one.
        delay_seconds: Time from here to the other end.
        left: Messages that pass before the stream falls silent, a list that both ends share.

    Attributes:
        is_refused: The peer whose end it is offers no such service.
    """

    other: VirtualChannel

    def __init__(self, node: VirtualNode, peer: str, seconds: float, delay_seconds: float, left: list[float]) -> None:
        self.peer = peer
        self.seconds = seconds
        self.is_refused = False
        self._node = node
        self._loop = asyncio.get_running_loop()
        self._delay_seconds = delay_seconds
        self._left = left
        self._on_way: deque[tuple[bytes, bytes] | None] = deque()
        """Messages on their way to the other end; None is its hang-up."""
        self._inbox: deque[tuple[bytes, bytes]] = deque()
        self._unread_bytes = 0
        self._has_ended = False
        """No more will come, and nothing can be sent."""
        self._waiting: list[asyncio.Future[None]] = []
        node.channels[self] = None

    async def send(self, kind: bytes, data: bytes | bytearray | memoryview = b"") -> None:
        if self._has_ended:
            raise DisconnectedError("hung up")
        leaves_at = self._post((kind, bytes(data)))
        if leaves_at > self._loop.time() or self.other._unread_bytes > WINDOW_BYTES:
            async with deadline(self.seconds):
                await asyncio.sleep(leaves_at - self._loop.time())
                while self.other._unread_bytes > WINDOW_BYTES and not self._has_ended:
                    await self._change()

    async def send_last(self, text: str | bytes) -> None:
        await self.send_text(text)
        await self._hear()

    async def receive(self, most: Mapping[bytes, int]) -> tuple[bytes, bytes]:
        await self._hear()
        if not self._inbox:
            raise DisconnectedError("hung up")
        kind, data = self._inbox.popleft()
        self._unread_bytes -= len(data)
        self.other._wake()
        check_message(kind, len(data), most)
        return kind, data

    def close(self) -> None:
        if self in self._node.channels:
            del self._node.channels[self]
            self._has_ended = True
            self._inbox.clear()
            self._post(None)
            self._wake()

    def _post(self, message: tuple[bytes, bytes] | None) -> float:
        """Send a message on its way; return the time at which it has left the uplink."""
        if not (self._left[0] and self._node.reaches(self.peer)):
            self._left[0] = 0
            return self._loop.time()
        leaves_at = self._loop.time()
        if message is not None:
            self._left[0] -= 1
            leaves_at = self._node.sent_at(HEADER.size + len(message[1]))
        self._on_way.append(message)
        self._loop.call_at(leaves_at + self._delay_seconds, self.other._arrive)
        return leaves_at

    def _arrive(self) -> None:
        message = self.other._on_way.popleft()  # whichever it is: messages due at one moment keep their order
        if message is None:
            self._has_ended = True
        elif not self._has_ended:
            self._inbox.append(message)
            self._unread_bytes += len(message[1])
        self._wake()

    async def _hear(self) -> None:
        """Wait for a message, or for the end."""
        if not (self._inbox or self._has_ended):
            async with deadline(self.seconds):
                while not (self._inbox or self._has_ended):
                    await self._change()

    async def _change(self) -> None:
        self._waiting.append(self._loop.create_future())
        await self._waiting[-1]

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
