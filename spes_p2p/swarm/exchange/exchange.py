"""Moves versions between peers: offers, bounded uploads, inventories, pulls, and their verification before use."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections import Counter
from collections.abc import Collection, Coroutine, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import digest
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.exchange.client import Backoff, Pull
from spes_p2p.swarm.exchange.downloads import Download, DownloadBudget
from spes_p2p.swarm.exchange.protocol import (
    BUSY,
    DATA,
    END,
    FRAME_BYTES,
    Answer,
    Channel,
    DisconnectedError,
    Request,
    Signal,
    Wanted,
    ask,
    listen,
)
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version, is_document
from spes_p2p.swarm.names import AnyName, VectorName
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.rate_limit import RateLimit

T = TypeVar("T")
log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
"""Longest silence of a peer before another one is asked."""
INVENTORY_SECONDS = 10.0
MAX_NAMES = 4200
PARALLEL_OFFERS = 16
"""Versions requested at a time; until a peer has them, they cost nothing."""
MAX_UPLOADS = 32
MAX_NON_MEMBER_UPLOADS = 4
"""Uploads, among those, to peers that were not in the last round: training goes before joining."""
MAX_STREAMS_PER_PEER = 64
QUEUE_SECONDS = 5.0
"""Time for which an upload waits for its turn before the answer is BUSY."""
LONGEST_WAIT_SECONDS = 10.0
"""Time for which a caller is kept waiting for a version to be published."""
NUM_READERS = 2
BLOCK_BYTES = 4 * FRAME_BYTES


class Payload:
    """An offer and its bytes: a file, held open so that it can be read after its deletion.

    Threads read it, so that a slow disk does not block the event loop.

    Raises:
        FileNotFoundError: the file is gone.
    """

    def __init__(self, answer: Answer, path: Path | None, readers: Executor) -> None:
        self.answer = answer
        self._readers = readers
        self._file = None if path is None else os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.num_bytes = 0 if self._file is None else os.fstat(self._file).st_size

    async def read(self, start: int, stop: int) -> bytes:
        """Return bytes from `start` on, at least one, up to `stop` at most."""
        assert self._file is not None
        loop = asyncio.get_running_loop()
        if not (data := await loop.run_in_executor(self._readers, os.pread, self._file, stop - start, start)):
            raise EOFError("a range beyond the end")
        return data

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Server:
    """Answers requests for versions.

    Args:
        store: This peer's versions.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        bytes_out: Payload bytes sent.
        changed: Fires when the store has changed.
    """

    def __init__(self, store: VersionStore, uplink_mbit: float | None) -> None:
        self.bytes_out = 0
        self.changed = Signal()
        self._store = store
        self._rate_limit = RateLimit(uplink_mbit)
        self._readers = ThreadPoolExecutor(NUM_READERS, "serving")
        self._streams: Counter[str] = Counter()
        self._uploads = asyncio.Semaphore(MAX_UPLOADS)
        self._non_member_uploads = asyncio.Semaphore(MAX_NON_MEMBER_UPLOADS)
        self._members: Collection[str] = ()
        self._reserved_until = 0.0

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve only `peers` for `seconds`, or until `release`, so that newcomers do not delay a round.

        After that they still go before other peers.
        """
        self._members = frozenset(peers)
        self._reserved_until = time.monotonic() + seconds

    def release(self) -> None:
        """Serve all peers again."""
        self._reserved_until = 0.0

    def _is_non_member(self, peer: str) -> bool:
        return bool(self._members) and peer not in self._members

    def _is_turned_away(self, peer: str) -> bool:
        return self._is_non_member(peer) and time.monotonic() < self._reserved_until

    # ------------------------------------------------------------------ offers

    async def serve(self, channel: Channel, peer: str) -> None:
        """Serve one stream of an authenticated peer until it hangs up.

        Raises:
            ExchangeError: a request is impossible, or the peer hung up in the middle of an answer.
            TimeoutError: the peer is silent, or does not read.
        """
        self._streams[peer] += 1
        try:
            await self._serve(channel, peer)
        finally:
            self._streams[peer] -= 1
            if not self._streams[peer]:
                del self._streams[peer]

    async def _serve(self, channel: Channel, peer: str) -> None:
        try:
            request = Request.parse(await channel.receive_text())
        except ExchangeError:
            await self._decline(channel, "refused")
            raise
        if self._streams[peer] > MAX_STREAMS_PER_PEER or self._is_turned_away(peer):
            return await self._decline(channel, "busy")
        payload = await self._find(request)
        if payload is None:
            return await self._decline(channel, "absent")
        with contextlib.closing(payload):
            await channel.send_text(payload.answer.model_dump_json())
            if request.at_once and payload.num_bytes:
                await self._send(channel, peer, payload, 0, payload.num_bytes)
            while True:
                try:
                    start, stop = await channel.receive_range()
                except DisconnectedError:
                    return None  # the caller has what it wanted
                if not start < stop <= payload.num_bytes:  # guard: range-served
                    raise ExchangeError(f"asked for bytes {start} to {stop} of {payload.num_bytes}")
                await self._send(channel, peer, payload, start, stop)

    async def _decline(self, channel: Channel, state) -> None:
        await channel.send_text(Answer(state=state).model_dump_json())
        await channel.wait_for_hang_up()

    async def _find(self, request: Request) -> Payload | None:
        """Return the payload for a request, once there is one; None if there is none in time."""
        deadline = time.monotonic() + min(request.timeout, LONGEST_WAIT_SECONDS)
        while True:
            payload = self._payload(request)
            if payload is not None or (remaining := deadline - time.monotonic()) <= 0:
                return payload
            await self.changed.wait(remaining)

    def _payload(self, request: Request) -> Payload | None:
        version = self._store.find(request.name, request.digest) or self._store.find(request.name)
        if version is None or version.round < request.min_round:
            return None
        described = version.model_dump_json()
        if version.digest == request.have:
            return Payload(Answer(state="same", version=described), None, self._readers)
        try:
            return Payload(Answer(state="whole", version=described), self._store.path(version), self._readers)
        except FileNotFoundError:  # a newer version has replaced it
            return None

    # ------------------------------------------------------------------ bytes

    async def _send(self, channel: Channel, peer: str, payload: Payload, start: int, stop: int) -> None:
        """Send a range; BUSY in place of all or the rest of it if the peer must wait."""
        async with contextlib.AsyncExitStack() as held:
            limits = [self._uploads]
            if self._is_non_member(peer):
                limits.insert(0, self._non_member_uploads)
            for limit in limits:
                try:
                    async with asyncio.timeout(QUEUE_SECONDS):
                        await limit.acquire()
                except TimeoutError:
                    return await channel.send(BUSY)
                held.callback(limit.release)
            while start < stop:
                async with asyncio.timeout(channel.seconds):
                    block = memoryview(await payload.read(start, min(stop, start + BLOCK_BYTES)))
                start += len(block)
                frame_bytes = self._rate_limit.burst_bytes(FRAME_BYTES)
                for offset in range(0, len(block), frame_bytes):
                    frame = block[offset : offset + frame_bytes]
                    await self._rate_limit.take(len(frame))
                    if self._is_turned_away(peer):
                        return await channel.send(BUSY)
                    await channel.send(DATA, frame)
                    self.bytes_out += len(frame)


class Exchange:
    """Serves this peer's versions, and pulls others.

    Args:
        node: The peer's host.
        store: The versions.
        serve: Serve other peers, from now on.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        server: Serves the versions.
        budget: Bounds the downloads under way.
        backoff: Busy peers, over all downloads.
        bytes_in: Payload bytes received.
    """

    def __init__(
        self, node: Node, store: VersionStore, *, serve: bool = True, uplink_mbit: float | None = None
    ) -> None:
        self.serves = serve
        self.peer_id = node.peer_id
        self.run_id = node.run_id
        self.bytes_in = 0
        self.budget = DownloadBudget()
        self.backoff = Backoff()
        self._offers = asyncio.Semaphore(PARALLEL_OFFERS)
        self._node = node
        self._store = store
        self._formats: Mapping[str, KeptForm] = {}
        self.server = Server(store, uplink_mbit)
        store.on_change = lambda: node.notify(self.server.changed.fire)
        if serve:
            node.run(self._listen(), INVENTORY_SECONDS)

    async def _listen(self) -> None:
        said = functools.partial(log.debug, "stopped serving %s: %s")
        for service, answer in {"fetch": self.serve_fetch, "inventory": self.serve_inventory}.items():
            await listen(self._node, self._service(service), 3 * CHUNK_SECONDS, answer, said)

    def _service(self, service: str) -> str:
        return f"{self.run_id}::exchange.{service}"

    def accept_formats(self, formats: Mapping[str, KeptForm]) -> None:
        """Fetch vectors of these kinds only if they are encoded in these formats."""
        self._formats = formats

    # ------------------------------------------------------------------ serving

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        """Offer and send versions; see `Server`."""
        await self.server.serve(channel, peer)

    async def serve_inventory(self, channel: Channel, peer: str) -> None:
        """List this peer's newest version of each name."""
        for version in self._store.newest().values():
            await channel.send_text(version.model_dump_json())
        await channel.send(END)
        await channel.wait_for_hang_up()

    # ------------------------------------------------------------------ pulling

    def inventory(self, peers: Sequence[str]) -> dict[str, dict[str, Version]]:
        """Return each peer's versions by name, without those refused here; silent peers are left out."""

        async def ask_all() -> list[dict[str, Version] | BaseException]:
            return await asyncio.gather(*(self._ask(peer) for peer in peers), return_exceptions=True)

        found: dict[str, dict[str, Version]] = {}
        for peer, answer in zip(peers, self._answers(ask_all(), len(peers)), strict=True):
            if isinstance(answer, BaseException):
                log.debug("no inventory from %s: %r", peer[-6:], answer)
            else:
                found[peer] = answer
        return found

    async def _ask(self, peer: str) -> dict[str, Version]:
        versions: dict[str, Version] = {}
        async with asyncio.timeout(INVENTORY_SECONDS):
            channel = await Channel.open(self._node, peer, self._service("inventory"), INVENTORY_SECONDS)
            with contextlib.closing(channel):
                while text := await channel.receive_text():
                    version = Version.verify(text, self.run_id)
                    versions[version.name] = version
                    if len(versions) > MAX_NAMES:
                        raise RecordError(f"{peer} lists more than {MAX_NAMES} versions")
        return {
            name: version
            for name, version in versions.items()
            if not self._store.refused.refuses(version)  # guard: refused-inventory
        }

    def offers(self, name: AnyName, peers: Sequence[str]) -> dict[str, Version]:
        """Return the newest version of a name that each peer offers, without its bytes; silent peers are left out."""

        async def ask_one(peer: str) -> Version:
            request = Request(name=name, min_round=0, timeout=0.0)
            async with asyncio.timeout(INVENTORY_SECONDS):
                answer = await ask(self._node, peer, self._service("fetch"), request, Answer, CHUNK_SECONDS)
            return Version.verify(answer.version, self.run_id)

        async def ask_all() -> list[Version | BaseException]:
            return await asyncio.gather(*map(ask_one, peers), return_exceptions=True)

        found = zip(peers, self._answers(ask_all(), len(peers)), strict=True)
        return {peer: version for peer, version in found if isinstance(version, Version) and version.name == name}

    def _answers(self, asking: Coroutine[Any, Any, list[T]], count: int) -> list[T] | list[TimeoutError]:
        """Return what so many peers answer, within a time."""
        try:
            return self._node.run(asking, 2 * INVENTORY_SECONDS)
        except TimeoutError as error:
            log.warning("no peer listed its versions in time; this machine may have stood still")
            return [error] * count

    def pull(
        self,
        wanted: Mapping[AnyName, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        max_bytes: Mapping[AnyName, int],
        authors: Mapping[AnyName, Collection[str]] | None = None,
        digests: Mapping[AnyName, str] | None = None,
    ) -> dict[AnyName, str]:
        """Fetch versions into the store; see `Swarm.pull`.

        Args:
            max_bytes: By name: most bytes of a document, exact bytes of a vector.
        """

        async def pull_one(name: AnyName, deadline: float) -> str:
            kind = "" if is_document(name) else VectorName(name).kind
            item = Wanted(
                name,
                min_round,
                max_bytes[name],
                codec="coded" if kind in self._formats else "fp32",
                authors=(authors or {}).get(name, ()),
                refused=self._store.refused,
                digest=(digests or {}).get(name, ""),
            )
            async with self._offers:
                own = self._store.find(name)
                return await Pull(item, wanted[name], own.digest if own else "", self).run(deadline)

        async def pull_all() -> dict[AnyName, str]:
            deadline = asyncio.get_running_loop().time() + timeout
            reasons = await asyncio.gather(*(pull_one(name, deadline) for name in wanted))
            return {name: why for name, why in zip(wanted, reasons, strict=True) if why}

        try:
            return self._node.run(pull_all(), timeout + CHUNK_SECONDS)
        except TimeoutError:
            # Every pull keeps its deadline; only a machine that stood still is late for all of them.
            newest = self._store.newest()
            lacking = [name for name in wanted if name not in newest or newest[name].round < min_round]
            return dict.fromkeys(lacking, f"not here after {timeout:.0f} s, in which this machine may have stood still")

    # ------------------------------------------------------------------ what a pull needs

    async def connect(self, peer: str) -> Channel:
        """Open a channel to a peer that serves versions."""
        return await Channel.open(self._node, peer, self._service("fetch"), CHUNK_SECONDS)

    async def accept(self, version: Version, download: Download | None) -> None:
        """Verify and store a complete download; without one, store a version whose bytes this peer has.

        Raises:
            ExchangeError: the bytes are not the version's.
        """
        if download is None:
            work = functools.partial(self._store.store_known_bytes, version)
        else:
            work = functools.partial(self._add, version, download)
        await asyncio.get_running_loop().run_in_executor(None, work)

    def _add(self, version: Version, download: Download) -> None:
        data = memoryview(download.data)
        if digest(data) != version.digest:  # guard: download-digest
            raise ExchangeError(f"bytes of {version.name} do not match their digest")
        if version.codec == "fp32":
            low, high = torch.frombuffer(data, dtype=torch.float32).aminmax()  # both are NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):  # guard: finite-vector
                raise ExchangeError(f"{version.name} holds NaN or infinity")
        if version.codec == "coded":
            self._formats[VectorName(version.name).kind].decode(data)
        self._store.add({version.name: (version, data)})
