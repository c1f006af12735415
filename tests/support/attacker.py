"""A stranger with a libp2p host of its own, who sends a peer whatever a test makes up."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import psutil
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2P, P2PContext, PeerID, ServicerBase
from hivemind.proto import dht_pb2
from peer_server import RUN_ID
from real_peers import PeerProcess

from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P
from spes_p2p.swarm.records import PROTOCOL

SECONDS, SILENCE_SECONDS = 30.0, 4.0
AVERAGE = f"{RUN_ID}::{PROTOCOL}.average"
FETCH, ASK = f"{RUN_ID}::exchange.fetch", f"{RUN_ID}::exchange.ask"

T = TypeVar("T")


class _YesNode(ServicerBase):
    """A DHT node that says yes to everything, so that nobody takes it for dead; in silence if it is told to."""

    is_silent = False

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return f"DHTProtocol.{method_name}"

    async def rpc_ping(self, request: dht_pb2.PingRequest, context: P2PContext) -> dht_pb2.PingResponse:
        if self.is_silent:
            await asyncio.sleep(SILENCE_SECONDS)
        return dht_pb2.PingResponse(available=True, dht_time=time.time())

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        return dht_pb2.FindResponse(results=[dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)] * len(request.keys))


class Attacker:
    """Talks to one peer.

    Args:
        victim: The peer.
    """

    def __init__(self, victim: PeerProcess) -> None:
        self.victim, self._target = victim, PeerID.from_base58(victim.peer_id)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self.p2p: P2P = self.run(
            DaemonP2P.create(initial_peers=victim.addresses, use_relay=False, dht_mode="client"), 2 * SECONDS
        )
        self.node = _YesNode()
        self.run(self.node.add_p2p_handlers(self.p2p))

    def run(self, work: Coroutine[Any, Any, T], seconds: float = SECONDS) -> T:
        """Do something in this attacker's event loop."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop).result(seconds + 5)

    def close(self) -> None:
        self.run(self.p2p.shutdown())
        self._loop.call_soon_threadsafe(self._loop.stop)

    # ------------------------------------------------------------------ calls

    def call(self, name: str, request: Any, answer: type) -> Any:
        """Call a method of the victim; return its answer, or the exception."""

        async def work() -> Any:
            try:
                return await self.p2p.call_protobuf_handler(self._target, name, request, answer)
            except Exception as error:  # noqa: BLE001 - the test decides what to make of it
                return error

        return self.run(work())

    def ping(self, node_id: bytes = b"", validate: bool = False) -> Any:
        request = dht_pb2.PingRequest(peer=dht_pb2.NodeInfo(node_id=node_id), validate=validate)
        return self.call("DHTProtocol.rpc_ping", request, dht_pb2.PingResponse)

    def store(self, *items: tuple[bytes, bytes, bytes, float], in_cache: bool = False) -> Any:
        """Store (key, subkey, value, expiration); return for each whether it was taken, or the exception."""
        keys, subkeys, values, expirations = (list(column) for column in zip(*items, strict=True))
        request = dht_pb2.StoreRequest(
            keys=keys,
            subkeys=subkeys,
            values=values,
            expiration_time=expirations,
            in_cache=[in_cache] * len(keys),
        )
        answer = self.call("DHTProtocol.rpc_store", request, dht_pb2.StoreResponse)
        return answer if isinstance(answer, Exception) else list(answer.store_ok)

    def find(self, *keys: bytes) -> Any:
        return self.call("DHTProtocol.rpc_find", dht_pb2.FindRequest(keys=keys), dht_pb2.FindResponse)

    # ------------------------------------------------------------------ streams

    async def open(self, service: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        _, reader, writer = await self.p2p.call_binary_stream_handler(self._target, service)
        return reader, writer

    def say(self, service: str, data: bytes, seconds: float = SECONDS) -> bytes:
        """Open a stream, send bytes, and return all that comes until the victim hangs up.

        Raises:
            TimeoutError: it does not.
        """

        async def work() -> bytes:
            reader, writer = await self.open(service)
            try:
                writer.write(data)
                return await reader.read()
            except ConnectionError:
                return b""
            finally:
                writer.close()

        return self.run(work(), seconds)

    def pour(self, service: str, head: bytes, chunk: bytes, most_bytes: int, seconds: float) -> int:
        """Send `head` and then chunks without end; return how many bytes the victim's host took."""

        async def work() -> int:
            _, writer = await self.open(service)
            sent, ends = 0, time.monotonic() + seconds
            try:
                writer.write(head)
                while sent < most_bytes and time.monotonic() < ends:
                    writer.write(chunk)
                    await asyncio.wait_for(writer.drain(), max(0.01, ends - time.monotonic()))
                    sent += len(chunk)
            except (OSError, TimeoutError):
                return sent
            finally:
                writer.close()
            return sent

        return self.run(work(), seconds + SECONDS)

    def hear(self, service: str, data: bytes) -> tuple[bytes, int, bytes]:
        """Open a stream of the exchange, send bytes, and return the first message that comes."""

        async def work() -> tuple[bytes, int, bytes]:
            reader, writer = await self.open(service)
            try:
                writer.write(data)
                kind, size = await reader.readexactly(1), int.from_bytes(await reader.readexactly(4))
                return kind, size, await reader.readexactly(size)
            finally:
                writer.close()

        return self.run(work())

    # ------------------------------------------------------------------ the victim

    def is_served(self) -> bool:
        """Whether both of the victim's processes answer: its DHT, and its exchange."""
        ping = self.ping()
        inventory, *_ = self.hear(ASK, b"t\x00\x00\x00\x02{}")
        answers = (
            isinstance(ping, dht_pb2.PingResponse),
            inventory == b"t",
        )
        assert all(answers), (ping, inventory)
        return True


def resident_bytes(peer: PeerProcess) -> dict[str, int]:
    """Return the memory of each of a peer's processes, by name and place."""
    processes = [psutil.Process(peer.process.pid), *peer.descendants()]
    return {f"{process.name()} {process.pid}": process.memory_info().rss for process in processes}


class Watched:
    """Watches a peer's memory while something happens to it."""

    def __init__(self, peer: PeerProcess, seconds: float = 0.05) -> None:
        self._peer, self._seconds = peer, seconds
        self._before = resident_bytes(peer)
        self._most = dict(self._before)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Watched:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopped.wait(self._seconds):
            for name, size in resident_bytes(self._peer).items():
                self._most[name] = max(size, self._most.get(name, 0))

    def growth(self) -> dict[str, float]:
        """Return by how many MiB each process had grown at most."""
        return {name: (size - self._before.get(name, 0)) / 2**20 for name, size in self._most.items()}


def key_of(name: str) -> bytes:
    """Return a DHT key by its name."""
    return DHTID.generate(source=name).to_bytes()


def gather(makers: Sequence[Callable[[], T]]) -> list[T]:
    """Run several things at once."""
    results: list[T] = []
    threads = [threading.Thread(target=lambda make=make: results.append(make())) for make in makers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
