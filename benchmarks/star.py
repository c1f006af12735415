"""A server as in SPES, for comparison: peers upload what they train, the server averages, all download all.

Traffic as in SPES (https://arxiv.org/abs/2602.11543, `spes_server.py`): of the shared parameters the plain mean of all
uploads, of each slot its one owner's; a peer asks again and again whether the server is done. Over gRPC in streamed
chunks, from memory to memory; SPES asks every 20 s, this every 0.1 s. Written for the benchmark alone.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np

from benchmarks.testbed import Place
from benchmarks.wan.actor import Actor, Actors, call_all
from benchmarks.wan.floors import Payload
from spes_p2p.errors import ExchangeError

SERVICE = "star"
CHUNK_BYTES = 2**18
POLL_SECONDS = 0.1
ROUND_SECONDS = 600.0
START_SECONDS = 30.0


@dataclass
class Uploads:
    """What has come in for a round.

    Attributes:
        shared_sum: Of the vectors of `shared`.
        slots: Vectors of each peer's slots, by peer.
    """

    shared_sum: np.ndarray
    slots: dict[int, np.ndarray]


class StarServer:
    """The server; it holds one round's model.

    Args:
        address: To listen on.
        payload: The model's size.
        peers: Number of peers to wait for without a deadline: as in SPES, a missing peer stops all.
    """

    def __init__(self, address: str, payload: Payload, peers: int) -> None:
        self._payload = payload
        self._peers = peers
        self._uploads: dict[int, Uploads] = {}
        self._lock = threading.Lock()
        self._round = 0
        self._model = b""
        self._server = grpc.server(ThreadPoolExecutor(2 * peers + 2))
        handlers = {
            "upload": grpc.stream_unary_rpc_method_handler(self._upload),
            "poll": grpc.unary_unary_rpc_method_handler(self._poll),
            "download": grpc.unary_stream_rpc_method_handler(self._download),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self._port = self._server.add_insecure_port(f"{address}:0")
        self._server.start()

    def port(self) -> int:
        """Return the port that it listens on."""
        return self._port

    def _upload(self, chunks: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        about = dict(context.invocation_metadata())
        flat = np.frombuffer(b"".join(chunks), dtype="<f4")
        shared, slots = flat[: self._payload.shared_numel], flat[self._payload.shared_numel :]
        with self._lock:
            fresh = Uploads(np.zeros(self._payload.shared_numel, dtype="<f4"), {})
            uploads = self._uploads.setdefault(int(about["round"]), fresh)
            uploads.shared_sum += shared
            uploads.slots[int(about["peer"])] = slots
            if len(uploads.slots) == self._peers:
                parts = [uploads.shared_sum / np.float32(self._peers)]
                parts += [uploads.slots[peer] for peer in range(self._peers)]
                self._model = np.concatenate(parts).tobytes()
                self._round = int(about["round"])
                del self._uploads[self._round]
        return b""

    def _poll(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        return str(self._round).encode()

    def _download(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        model = self._model
        for begin in range(0, len(model), CHUNK_BYTES):
            yield model[begin : begin + CHUNK_BYTES]

    def close(self) -> None:
        """End it."""
        self._server.stop(None).wait()


class StarPeer:
    """A peer of the server.

    Args:
        server: The server's address and port.
        peer: Its number, from 0.
        payload: The model's size.
        peers: How many there are.
    """

    def __init__(self, server: str, peer: int, payload: Payload, peers: int) -> None:
        self._peer = peer
        self._payload = payload
        numel = payload.shared_numel + payload.slots // peers * payload.slot_numel
        self._own = np.random.default_rng().standard_normal(numel, dtype=np.float32)
        self._model = b""
        self._channel = grpc.insecure_channel(server)
        grpc.channel_ready_future(self._channel).result(START_SECONDS)
        self._upload = self._channel.stream_unary(f"/{SERVICE}/upload")
        self._poll = self._channel.unary_unary(f"/{SERVICE}/poll")
        self._download = self._channel.unary_stream(f"/{SERVICE}/download")

    def round(self, number: int) -> tuple[float, float]:
        """Upload, wait, download; return when it began and ended.

        Raises:
            ExchangeError: it came to something else than a whole model.
        """
        began = time.monotonic()
        data = self._own.tobytes()
        chunks = (data[begin : begin + CHUNK_BYTES] for begin in range(0, len(data), CHUNK_BYTES))
        about = (("round", str(number)), ("peer", str(self._peer)))
        self._upload(chunks, metadata=about, timeout=ROUND_SECONDS)
        deadline, pause = began + ROUND_SECONDS, threading.Event()
        while int(self._poll(b"", timeout=ROUND_SECONDS)) < number and time.monotonic() < deadline:
            pause.wait(POLL_SECONDS)
        self._model = b"".join(self._download(b"", timeout=ROUND_SECONDS))
        expected = 4 * (self._payload.shared_numel + self._payload.slots * self._payload.slot_numel)
        if len(self._model) != expected:
            raise ExchangeError(f"the server sent {len(self._model)} bytes instead of {expected}")
        return began, time.monotonic()

    def own(self) -> np.ndarray:
        """Return what it uploads."""
        return self._own

    def model(self) -> np.ndarray:
        """Return what it has downloaded."""
        return np.frombuffer(self._model, dtype="<f4")

    def close(self) -> None:
        """End its connection."""
        self._channel.close()


class StarCluster(Actors):
    """A server and its peers.

    Args:
        place: Where they live: peer i in namespace i, the server in the one behind.
        peers: How many.
        payload: The model's size.
    """

    def __init__(self, place: Place, peers: int, payload: Payload) -> None:
        super().__init__()
        self._place = place
        self._payload = payload
        self._peers = peers
        self._number = 0

    def _start_all(self) -> None:
        address = self._place.address(self._peers)
        server = self._start("the server", self._peers, StarServer, address, self._payload, self._peers)
        target = f"{address}:{server.ready().call('port', seconds=START_SECONDS)}"
        for peer in range(self._peers):
            self._start(f"star peer {peer}", peer, StarPeer, target, peer, self._payload, self._peers)
        for actor in self.peers:
            actor.ready()

    @property
    def peers(self) -> list[Actor]:
        """All but the server."""
        return self.members[1:]

    def round(self) -> float:
        """Make a round; return its seconds, from the first upload's first byte to the last download's last."""
        self._number += 1
        times = call_all(self.peers, "round", self._number, seconds=2 * ROUND_SECONDS)
        return max(ended for _, ended in times) - min(began for began, _ in times)

    def _start(self, name: str, peer: int, build: Any, *args: Any) -> Actor:
        actor = Actor(name, build, *args, start=functools.partial(self._place.run_in, peer))
        self.members.append(actor)
        return actor
