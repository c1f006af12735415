"""Moves versions between peers: inventories, pulls, and their verification before use."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from torch import Tensor

from spes_p2p.codecs.format import Format
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import digest, to_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.exchange.client import Backoff, Pull
from spes_p2p.swarm.exchange.downloads import Download, DownloadBudget
from spes_p2p.swarm.exchange.protocol import END, MAX_DELTAS, Answer, Channel, Request, Wanted
from spes_p2p.swarm.exchange.server import Server
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version, is_document
from spes_p2p.swarm.names import AnyName, VectorName
from spes_p2p.swarm.p2p.node import Node

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
"""Longest silence of a peer before another one is asked."""
INVENTORY_SECONDS = 10.0
MAX_NAMES = 4200
PARALLEL_OFFERS = 16
"""Versions requested at a time; until a peer has them, they cost nothing."""

ApplyDelta = Callable[[str, Tensor, bytes], Tensor]
"""From a name, its vector, and an encoded mean delta to the next vector."""


class Exchange:
    """Serves this peer's versions, and pulls others.

    Args:
        node: The peer's host.
        store: The versions.
        serve: Serve other peers, from now on.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
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
        self._apply_delta: ApplyDelta | None = None
        self._delta_bytes: Mapping[str, int] = {}
        self._formats: Mapping[str, Format | KeptForm] = {}
        self._relayed: dict[str, Download] = {}
        self._server = Server(store, self._relayed, uplink_mbit)
        store.subscribe(lambda: node.notify(self._server.changed.fire))
        if serve:
            node.run(self._listen(), INVENTORY_SECONDS)

    async def _listen(self) -> None:
        for service, answer in {"fetch": self.serve_fetch, "inventory": self.serve_inventory}.items():
            handler = functools.partial(self._handle, answer)
            await self._node.p2p.add_binary_stream_handler(self._service(service), handler)

    def _service(self, service: str) -> str:
        return f"{self.run_id}::exchange.{service}"

    @property
    def bytes_out(self) -> int:
        """Payload bytes sent."""
        return self._server.bytes_out

    def accept_deltas(self, apply: ApplyDelta, delta_bytes: Mapping[str, int], keyframe_rounds: int) -> None:
        """Fetch deltas in place of whole versions where they are smaller, and keep them for other peers.

        Args:
            apply: Applies one delta.
            delta_bytes: Exact bytes of a delta by kind of vector; kinds left out come whole.
            keyframe_rounds: Most deltas in a row.
        """
        self._apply_delta = apply
        self._delta_bytes = delta_bytes
        self._store.deltas.keep = keyframe_rounds

    def accept_formats(self, formats: Mapping[str, Format | KeptForm]) -> None:
        """Fetch vectors of these kinds only if they are encoded in these formats."""
        self._formats = formats

    # ------------------------------------------------------------------ serving

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve only `peers` for `seconds`, or until `release`, so that newcomers do not delay a round."""
        self._server.reserve_for(peers, seconds)

    def release(self) -> None:
        """Serve all peers again."""
        self._server.release()

    async def _handle(
        self, answer: Callable[[Channel, str], Awaitable[None]], info: StreamInfo, reader, writer
    ) -> None:
        channel, peer = Channel(reader, writer, 3 * CHUNK_SECONDS), info.peer_id.to_base58()
        with contextlib.closing(channel):
            try:
                await answer(channel, peer)
            except (ExchangeError, TimeoutError) as error:
                log.debug("stopped serving %s: %s", peer[-6:], error)

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        """Offer and send versions; see `Server`."""
        await self._server.serve(channel, peer)

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

        try:
            answers = self._node.run(ask_all(), 2 * INVENTORY_SECONDS)
        except TimeoutError:
            log.warning("no peer listed its versions in time; this machine may have stood still")
            return {}
        found: dict[str, dict[str, Version]] = {}
        for peer, answer in zip(peers, answers, strict=True):
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

        async def ask(peer: str) -> Version:
            async with asyncio.timeout(INVENTORY_SECONDS):
                channel = await self.connect(peer)
                with contextlib.closing(channel):
                    await channel.send_text(Request(name=name, min_round=0, timeout=0.0).model_dump_json())
                    return Version.verify(Answer.parse(await channel.receive_text()).version, self.run_id)

        async def ask_all() -> list[Version | BaseException]:
            return await asyncio.gather(*map(ask, peers), return_exceptions=True)

        found = zip(peers, self._node.run(ask_all(), 2 * INVENTORY_SECONDS), strict=True)
        return {peer: version for peer, version in found if isinstance(version, Version) and version.name == name}

    def pull(
        self,
        wanted: Mapping[AnyName, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        max_bytes: Mapping[AnyName, int],
        relays: Mapping[AnyName, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
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
                delta_bytes=self._delta_bytes.get(kind, 0),
                max_deltas=min(self._store.deltas.keep, MAX_DELTAS) if kind in self._delta_bytes else 0,
                relays=(relays or {}).get(name, ()),
                uplinks=uplinks or {},
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

    def count(self, num_bytes: int) -> None:
        """Count received payload bytes."""
        self.bytes_in += num_bytes

    def relay(self, name: str, download: Download | None) -> None:
        """Serve the bytes that have arrived of a version to other relays; None ends that."""
        if download is None:
            self._relayed.pop(name, None)
        else:
            self._relayed[name] = download
        self._server.changed.fire()

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
        data, steps = memoryview(download.data), list[_Step]()
        if download.answer.state == "deltas":
            data, steps = self._apply_deltas(version.name, download)
        if (steps[-1].digest if steps else digest(data)) != version.digest:  # guard: download-digest
            raise ExchangeError(f"bytes of {version.name} do not match their digest")
        if version.codec == "fp32":
            low, high = torch.frombuffer(data, dtype=torch.float32).aminmax()  # both are NaN if any element is
            if not (torch.isfinite(low) and torch.isfinite(high)):  # guard: finite-vector
                raise ExchangeError(f"{version.name} holds NaN or infinity")
        if version.codec == "coded":
            self._formats[VectorName(version.name).kind].decode(data)
        for step in steps:
            self._store.deltas.add(version.name, step.base, step.digest, step.delta)
        self._store.add({version.name: (version, data)})

    def _apply_deltas(self, name: str, download: Download) -> tuple[memoryview, list[_Step]]:
        """Return the bytes to which a chain of deltas leads, and its steps."""
        assert self._apply_delta is not None
        vector_N = self._store.load(name, download.base)
        size, base, steps = download.num_bytes // download.answer.num_deltas, download.base, []
        for start in range(0, download.num_bytes, size):
            delta = bytes(download.data[start : start + size])
            try:
                vector_N = self._apply_delta(name, vector_N, delta)
            except ValueError as error:
                raise ExchangeError(f"a delta of {name} cannot be applied: {error}") from error
            steps.append(_Step(base, digest(vector_N), delta))
            base = steps[-1].digest
        return to_bytes(vector_N), steps


class _Step(NamedTuple):
    """An encoded delta, and the digests of the versions before and after it."""

    base: str
    digest: str
    delta: bytes
