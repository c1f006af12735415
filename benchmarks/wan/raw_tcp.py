"""Plain TCP on a test bed: all peers send to all others at once, from memory to memory."""

from __future__ import annotations

import functools
import socket
import threading
import time
from collections.abc import Mapping

from benchmarks.testbed import TestBed
from benchmarks.wan.actor import Actor, call_all, close_all

BUFFER_BYTES = 2**18
SOCKET_SECONDS = 300.0


class RawPeer:
    """One side of an all-to-all: as many sending and receiving connections as there are others.

    Args:
        address: Where to listen.
        others: How many others there are.
    """

    def __init__(self, address: str, others: int) -> None:
        self._server = socket.create_server((address, 0), backlog=others)
        self._server.settimeout(SOCKET_SECONDS)
        self._num_others = others
        self._outgoing = list[socket.socket]()
        self._incoming = list[socket.socket]()

    def port(self) -> int:
        """Return the port that it listens on."""
        return self._server.getsockname()[1]

    def connect(self, ports: Mapping[str, int]) -> None:
        """Connect to all others; they connect meanwhile."""
        targets = {address: port for address, port in ports.items() if address != self._server.getsockname()[0]}
        self._outgoing = [socket.create_connection(target, SOCKET_SECONDS) for target in targets.items()]
        self._incoming = [self._server.accept()[0] for _ in range(self._num_others)]
        for connection in self._incoming:
            connection.settimeout(SOCKET_SECONDS)

    def exchange(self, num_bytes: int) -> tuple[float, float]:
        """Send `num_bytes` to each other peer and receive as much; return when it began and when it had all."""
        began = time.monotonic()
        work = [threading.Thread(target=_send, args=(connection, num_bytes)) for connection in self._outgoing]
        ended: list[float] = []
        work += [
            threading.Thread(target=_receive, args=(connection, num_bytes, ended)) for connection in self._incoming
        ]
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        if len(ended) < self._num_others:
            raise ConnectionError(f"received all from {len(ended)} of {self._num_others} peers")
        return began, max(ended)


def _send(connection: socket.socket, num_bytes: int) -> None:
    buffer = memoryview(bytes(BUFFER_BYTES))
    for begin in range(0, num_bytes, BUFFER_BYTES):
        connection.sendall(buffer[: num_bytes - begin])


def _receive(connection: socket.socket, num_bytes: int, ended: list[float]) -> None:
    buffer = bytearray(BUFFER_BYTES)
    while num_bytes and (received := connection.recv_into(buffer, min(num_bytes, BUFFER_BYTES))):
        num_bytes -= received
    if not num_bytes:
        ended.append(time.monotonic())


def all_to_all_seconds(bed: TestBed, peers: int, bytes_per_peer: float) -> float:
    """Return the seconds that plain TCP takes until each of the first `peers` has sent and received its bytes."""
    actors: list[Actor] = []
    try:
        for peer in range(peers):
            start = functools.partial(bed.run_in, peer)
            actors.append(Actor(f"raw peer {peer}", RawPeer, bed.address(peer), peers - 1, start=start))
        for actor in actors:
            actor.ready()
        ports = {bed.address(peer): port for peer, port in enumerate(call_all(actors, "port", seconds=10))}
        call_all(actors, "connect", ports, seconds=30)
        num_bytes = round(bytes_per_peer / (peers - 1))
        times = call_all(actors, "exchange", num_bytes, seconds=SOCKET_SECONDS)
        return max(ended for _, ended in times) - min(began for began, _ in times)
    finally:
        close_all(actors)
