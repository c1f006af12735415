"""Versions move between peers: who has what, and the bytes, verified before use."""

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

from spes_p2p.codecs import Format, digest, to_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.exchange.client import Backoff, Pull
from spes_p2p.swarm.exchange.downloads import Download, DownloadBudget
from spes_p2p.swarm.exchange.protocol import END, MAX_DELTAS, Channel, Wanted
from spes_p2p.swarm.exchange.server import Server
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.roster import kind_of

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
"""Longest silence of another peer before the next one is tried."""
INVENTORY_SECONDS = 10.0
MAX_NAMES = 4200
PARALLEL_OFFERS = 16
"""Versions asked for at a time; as long as nobody has them yet, they cost nothing."""

ApplyDelta = Callable[[str, Tensor, bytes], Tensor]
"""From a name, its bundle, and an encoded mean delta, the bundle that follows."""


class Exchange:
    """Serves this peer's versions and pulls others'.

    Args:
        node: The peer's host; serving starts at once.
        store: Where versions lie.
        serve: Answer others.
        uplink_mbit: Most to send, in 10^6 bits per second; None holds nothing back.
    """

    def __init__(
        self, node: Node, store: VersionStore, *, serve: bool = True, uplink_mbit: float | None = None
    ) -> None:
        self.serves, self.peer_id, self.run_id = serve, node.peer_id, node.run_id
        self.bytes_in = 0
        self.turns, self.rests, self._offers = DownloadBudget(), Backoff(), asyncio.Semaphore(PARALLEL_OFFERS)
        self._node, self._store = node, store
        self._advance: ApplyDelta | None = None
        self._delta_bytes: Mapping[str, int] = {}
        self._formats: Mapping[str, Format] = {}
        self._downloads: dict[str, Download] = {}
        self._server = Server(store, self._downloads, uplink_mbit)
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

    def accept_deltas(self, advance: ApplyDelta, delta_bytes: Mapping[str, int], keyframe_rounds: int) -> None:
        """Fetch deltas in place of whole versions where that is less, and keep them for others.

        Args:
            advance: Applies one.
            delta_bytes: Exact bytes of one, by kind of vector; kinds left out come whole.
            keyframe_rounds: Most of them in a row.
        """
        self._advance, self._delta_bytes, self._store.deltas.keep = advance, delta_bytes, keyframe_rounds

    def accept_formats(self, formats: Mapping[str, Format]) -> None:
        """Fetch vectors of these kinds as these formats write them, and no others."""
        self._formats = formats

    # ------------------------------------------------------------------ serving

    def reserve_for(self, peers: Collection[str], seconds: float) -> None:
        """Serve nobody but `peers` for so long, or until `release`: a round goes before newcomers."""
        self._server.reserve_for(peers, seconds)

    def release(self) -> None:
        """Serve everybody again."""
        self._server.release()

    async def _handle(
        self, answer: Callable[[Channel, str], Awaitable[None]], info: StreamInfo, reader, writer
    ) -> None:
        channel, peer = Channel(reader, writer, 3 * CHUNK_SECONDS), info.peer_id.to_base58()
        with contextlib.closing(channel):
            try:
                await answer(channel, peer)
            except (ExchangeError, TimeoutError) as error:
                log.info("stopped serving %s: %s", peer[-6:], error)

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        """Offer and send versions; see `Server`."""
        await self._server.serve(channel, peer)

    async def serve_inventory(self, channel: Channel, peer: str) -> None:
        """Name the newest version of everything this peer has."""
        for version in self._store.newest().values():
            await channel.send_text(version.model_dump_json())
        await channel.send(END)
        await channel.wait_for_hang_up()

    # ------------------------------------------------------------------ pulling

    def inventory(self, peers: Sequence[str]) -> dict[str, dict[str, Version]]:
        """Return what each peer has, by name, but for what was refused here; the silent are left out."""

        async def ask_all() -> list[tuple[str, dict[str, Version]]]:
            answers = await asyncio.gather(*(self._ask(peer) for peer in peers), return_exceptions=True)
            for peer, answer in zip(peers, answers, strict=True):
                if isinstance(answer, BaseException):
                    log.warning("no inventory from %s: %r", peer[-6:], answer)
            return [(p, a) for p, a in zip(peers, answers, strict=True) if not isinstance(a, BaseException)]

        try:
            return dict(self._node.run(ask_all(), 2 * INVENTORY_SECONDS))
        except TimeoutError:
            log.warning("nobody said in time what there is to fetch; this machine may have stood still")
            return {}

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
            if version.digest not in self._store.refused  # guard: refused-inventory
        }

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        max_bytes: Mapping[str, int],
        relays: Mapping[str, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
        authors: Mapping[str, Collection[str]] | None = None,
    ) -> dict[str, str]:
        """Fetch versions into the store; see `Swarm.pull`.

        Args:
            max_bytes: By name, most bytes of a document, exact bytes of a vector.
        """

        async def pull_one(name: str, deadline: float) -> str:
            item = Wanted(
                name,
                min_round,
                max_bytes[name],
                delta_bytes=self._delta_bytes.get(kind_of(name), 0),
                max_deltas=min(self._store.deltas.keep, MAX_DELTAS) if kind_of(name) in self._delta_bytes else 0,
                relays=(relays or {}).get(name, ()),
                uplinks=uplinks or {},
                codec="coded" if kind_of(name) in self._formats else "fp32",
                authors=(authors or {}).get(name, ()),
                refused=self._store.refused,
            )
            have = self._store.find(name)
            return await Pull(item, wanted[name], have.digest if have else "", self).run(deadline)

        async def pull_all() -> dict[str, str]:
            deadline = asyncio.get_running_loop().time() + timeout
            reasons = await asyncio.gather(*(pull_in_turn(name, deadline) for name in wanted))
            return {name: why for name, why in zip(wanted, reasons, strict=True) if why}

        async def pull_in_turn(name: str, deadline: float) -> str:
            async with self._offers:
                return await pull_one(name, deadline)

        try:
            return self._node.run(pull_all(), timeout + CHUNK_SECONDS)
        except TimeoutError:
            # Each pull keeps its deadline; only a machine that stood still meanwhile is late for all of them.
            newest = self._store.newest()
            lacking = [name for name in wanted if name not in newest or newest[name].round < min_round]
            return dict.fromkeys(lacking, f"not here after {timeout:.0f} s, in which this machine may have stood still")

    async def connect(self, peer: str) -> Channel:
        return await Channel.open(self._node, peer, self._service("fetch"), CHUNK_SECONDS)

    def count(self, num_bytes: int) -> None:
        self.bytes_in += num_bytes

    def share(self, name: str, download: Download | None) -> None:
        if download is None:
            self._downloads.pop(name, None)
        else:
            self._downloads[name] = download
        self._server.changed.fire()

    # ------------------------------------------------------------------ verifying

    async def accept(self, version: Version, download: Download | None) -> None:
        if download is None:
            work = functools.partial(self._store.store_known_bytes, version)
        else:
            work = functools.partial(self._add, version, download)
        await asyncio.get_running_loop().run_in_executor(None, work)

    def _add(self, version: Version, download: Download) -> None:
        data, steps = memoryview(download.data), list[_Step]()
        if download.answer.state == "deltas":
            data, steps = self._follow(version.name, download)
        if (steps[-1].reached if steps else digest(data)) != version.digest:  # guard: download-digest
            raise ExchangeError(f"bytes of {version.name} do not match their digest")
        if version.codec == "fp32":
            least, most = torch.frombuffer(data, dtype=torch.float32).aminmax()  # either is NaN if anything is
            if not (torch.isfinite(least) and torch.isfinite(most)):  # guard: finite-vector
                raise ExchangeError(f"{version.name} holds NaN or infinity")
        if version.codec == "coded":
            self._formats[kind_of(version.name)].decode(data)
        for step in steps:
            self._store.deltas.add(version.name, step.base, step.reached, step.delta)
        self._store.add({version.name: (version, data)})

    def _follow(self, name: str, download: Download) -> tuple[memoryview, list[_Step]]:
        """Return the bytes to which a chain of deltas leads, and its steps."""
        assert self._advance is not None
        bundle = self._store.load(name, download.have)
        size, base, steps = download.num_bytes // download.answer.num_deltas, download.have, []
        for start in range(0, download.num_bytes, size):
            delta = bytes(download.data[start : start + size])
            try:
                bundle = self._advance(name, bundle, delta)
            except ValueError as error:
                raise ExchangeError(f"a delta of {name} cannot be applied: {error}") from error
            steps.append(_Step(base, digest(bundle), delta))
            base = steps[-1].reached
        return to_bytes(bundle), steps


class _Step(NamedTuple):
    """A delta, and the digests between which it leads."""

    base: str
    reached: str
    delta: bytes
