"""Moves versions between peers: lists of what they have, bounded uploads, downloads in blocks, all verified."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence

import torch

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.blocks import Unfinished
from spes_p2p.swarm.exchange.fetch import Fetch
from spes_p2p.swarm.exchange.protocol import MAX_DOCUMENT_BYTES, MAX_INVENTORY_BYTES, Document, Inventory, Question
from spes_p2p.swarm.exchange.serve import Server
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version, is_document
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.network import Network, ask
from spes_p2p.swarm.p2p.channel import Channel, DisconnectedError

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
"""Longest silence of a peer that is asked for something."""
ASK_SECONDS = 10.0
"""Longest wait for an answer of one message."""


class Exchange:
    """Serves this peer's versions, and pulls others.

    Args:
        serve: Serve other peers, from now on.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        formats: Formats in which kept forms must be encoded to be kept, by kind.
    """

    def __init__(
        self, network: Network, store: VersionStore, *, serve: bool = True, uplink_mbit: float | None = None
    ) -> None:
        self.bytes_in = 0
        self.server = Server(store, uplink_mbit, network.now)
        self.formats: Mapping[str, KeptForm] = {}
        self._network = network
        self._store = store
        for service, answer in {"fetch": self.server.serve, "ask": self.server.answer}.items() if serve else ():
            network.run(network.serve(self.service(service), 3 * CHUNK_SECONDS, answer), ASK_SECONDS)

    def service(self, name: str) -> str:
        """Return under which name peers of this run offer a service."""
        return f"{self._network.run_id}::exchange.{name}"

    # ------------------------------------------------------------------ what others have

    def inventory(self, peers: Sequence[str]) -> dict[str, dict[str, Version]]:
        """Return each peer's newest versions by name, without those refused here; silent peers are left out."""
        found: dict[str, dict[str, Version]] = {}
        for peer, answer in self._ask(peers, Question(), MAX_INVENTORY_BYTES, ASK_SECONDS).items():
            try:
                versions = {each.name: each for each in Inventory.parse(answer).versions}
            except ExchangeError as error:
                log.debug("no inventory of %s: it %s", peer[-6:], error)
                continue
            bad = self._store.refused.refuses
            found[peer] = {name: each for name, each in versions.items() if not bad(each)}  # guard: always
        return found

    def documents(
        self, name: Document, peers: Sequence[str], seconds: float = ASK_SECONDS, *, number: int | None = None
    ) -> dict[str, bytes]:
        """Return each peer's newest document of a name, or the one of a number; those that send none are left out."""
        return self._ask(peers, Question(document=name, number=number), MAX_DOCUMENT_BYTES, seconds)

    def _ask(self, peers: Sequence[str], question: Question, most: int, seconds: float) -> dict[str, bytes]:
        service = self.service("ask")

        async def ask_all() -> list[bytes | BaseException]:
            questions = (ask(self._network, peer, service, question, seconds, most) for peer in peers)
            return await asyncio.gather(*questions, return_exceptions=True)

        try:
            answers = self._network.run(ask_all(), 2 * seconds)
        except TimeoutError:
            log.warning("no peer answered in time; this machine may have stood still (docs/trouble.md#standstill)")
            return {}
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, BaseException):
                log.debug("no answer from %s: %r", peer[-6:], answer)
        return {peer: each for peer, each in zip(peers, answers, strict=True) if not isinstance(each, BaseException)}

    # ------------------------------------------------------------------ pulling

    def pull(self, wanted: Collection[Version], peers: Sequence[str], *, timeout: float) -> dict[str, str]:
        """Fetch versions into the store, each from any of the peers that have it; resume what was begun before.

        Args:
            wanted: The versions, with a length that the caller knows to be right.
            peers: Those that may have some of them, or get some meanwhile.
            timeout: Seconds for all versions together.

        Returns:
            Reasons for the versions that did not come, by name.
        """
        failures: dict[str, str] = {}
        lacking = []
        for version in wanted:
            if self._store.refused.refuses(version):  # guard: never
                failures[version.name] = "it was refused here"
            elif not self._store.takes_known(version):
                lacking.append(version)
        if not lacking:
            return failures
        try:
            reasons = self._network.run(self._fetch(lacking, peers, timeout), timeout + CHUNK_SECONDS)
        except TimeoutError:
            # A fetch keeps its deadline; only a machine that stood still is late for it.
            reasons = [f"not here after {timeout:.0f} s, in which this machine may have stood still"] * len(lacking)
        for version, why in zip(lacking, reasons, strict=True):
            # It may have come in the last moment, or from another source after the disk had been full for a while.
            if why and self._store.find(version.name, version.digest) is None:
                failures[version.name] = why
        return failures

    async def _fetch(self, wanted: Sequence[Version], peers: Sequence[str], timeout: float) -> list[str]:
        files = [self._store.begin(version) for version in wanted]
        others = [peer for peer in peers if peer != self._network.peer_id]
        fetch = Fetch(files, others, connect=self._connect, store=self._store_verified, count=self._count)
        try:
            return await fetch.run(asyncio.get_running_loop().time() + timeout)
        finally:
            for file in files:
                self._store.end(file)

    async def _connect(self, peer: str) -> Channel:
        try:
            return await self._network.open(peer, self.service("fetch"), CHUNK_SECONDS)
        except TimeoutError as error:
            raise DisconnectedError(f"was not reached in {CHUNK_SECONDS:.0f} s") from error

    def _count(self, num_bytes: int) -> None:
        self.bytes_in += num_bytes

    async def _store_verified(self, file: Unfinished) -> None:
        await asyncio.to_thread(self._verify, file)

    def _verify(self, file: Unfinished) -> None:
        """Store a complete version, if its content is of use."""
        name = file.version.name
        try:
            if not is_document(name) and VectorName(name).is_kept:
                self.formats[VectorName(name).kind].decode(file.path.read_bytes())
            elif not is_document(name):
                for _, piece_N in PagedVector.of_file(file.path).pieces():
                    low, high = piece_N.aminmax()  # both are NaN if any element is
                    if not (torch.isfinite(low) and torch.isfinite(high)):  # guard: never
                        raise ExchangeError(f"{name} holds NaN or infinity")
        except ExchangeError:
            file.path.unlink(missing_ok=True)
            raise
        self._store.finish(file)
