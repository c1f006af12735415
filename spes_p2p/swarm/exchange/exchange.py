"""Moves versions between peers: lists of what they have, bounded uploads, downloads in blocks, all verified."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Mapping, Sequence

import torch
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.paged import PagedVector
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.exchange.blocks import Unfinished
from spes_p2p.swarm.exchange.fetch import Fetch
from spes_p2p.swarm.exchange.protocol import Channel, DisconnectedError, Question, listen
from spes_p2p.swarm.exchange.serve import Server
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.node import Node

log = logging.getLogger(__name__)

CHUNK_SECONDS = 20.0
"""Longest silence of a peer that is asked for something."""
INVENTORY_SECONDS = 10.0
MAX_NAMES = 4200
"""Versions that a peer may list."""
Inventory = dict[str, Version]
"""A peer's newest versions, by name."""


class Exchange:
    """Serves this peer's versions, and pulls others.

    Args:
        node: The peer's host.
        store: The versions.
        serve: Serve other peers, from now on.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.

    Attributes:
        server: Serves the versions.
        bytes_in: Payload bytes received.
    """

    def __init__(
        self, node: Node, store: VersionStore, *, serve: bool = True, uplink_mbit: float | None = None
    ) -> None:
        self.serves = serve
        self.peer_id = node.peer_id
        self.run_id = node.run_id
        self.bytes_in = 0
        self._node = node
        self._store = store
        self._formats: Mapping[str, KeptForm] = {}
        self.server = Server(store, uplink_mbit)
        if serve:
            node.run(self._listen(), INVENTORY_SECONDS)

    async def _listen(self) -> None:
        said = functools.partial(log.debug, "stopped serving %s: %s")
        for service, answer in {"fetch": self.serve_fetch, "inventory": self.serve_inventory}.items():
            await listen(self._node, self._service(service), 3 * CHUNK_SECONDS, answer, said)

    def _service(self, service: str) -> str:
        return f"{self.run_id}::exchange.{service}"

    def accept_formats(self, formats: Mapping[str, KeptForm]) -> None:
        """Keep vectors of these kinds only if they are encoded in these formats."""
        self._formats = formats

    async def serve_fetch(self, channel: Channel, peer: str) -> None:
        """Send blocks of versions; see `Server`."""
        await self.server.serve(channel, peer)

    async def serve_inventory(self, channel: Channel, peer: str) -> None:
        """List this peer's newest version of each name, or of one."""
        await self.server.list_versions(channel)

    # ------------------------------------------------------------------ what others have

    def inventory(self, peers: Sequence[str]) -> dict[str, Inventory]:
        """Return each peer's versions by name, without those refused here; silent peers are left out."""
        return self._ask_all(peers, Question())

    def offers(self, name: str, peers: Sequence[str]) -> dict[str, Version]:
        """Return the newest version of a name that each peer has; silent peers are left out."""
        return {peer: found[name] for peer, found in self._ask_all(peers, Question(name=name)).items() if name in found}

    def _ask_all(self, peers: Sequence[str], question: Question) -> dict[str, Inventory]:
        async def ask_all() -> list[Inventory | BaseException]:
            return await asyncio.gather(*(self._ask(peer, question) for peer in peers), return_exceptions=True)

        try:
            answers = self._node.run(ask_all(), 2 * INVENTORY_SECONDS)
        except TimeoutError:
            log.warning("no peer listed its versions in time; this machine may have stood still")
            return {}
        for peer, answer in zip(peers, answers, strict=True):
            if isinstance(answer, BaseException):
                log.debug("no inventory from %s: %r", peer[-6:], answer)
        return {peer: each for peer, each in zip(peers, answers, strict=True) if not isinstance(each, BaseException)}

    async def _ask(self, peer: str, question: Question) -> Inventory:
        versions: Inventory = {}
        async with asyncio.timeout(INVENTORY_SECONDS):
            channel = await Channel.open(self._node, peer, self._service("inventory"), INVENTORY_SECONDS)
            with contextlib.closing(channel):
                await channel.send_text(question.model_dump_json())
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
            if self._store.refused.refuses(version):  # guard: refused-version
                failures[version.name] = "it was refused here"
            elif not self._store.takes_known(version):
                lacking.append(version)
        if not lacking:
            return failures
        try:
            reasons = self._node.run(self._fetch(lacking, peers, timeout), timeout + CHUNK_SECONDS)
        except TimeoutError:
            # A fetch keeps its deadline; only a machine that stood still is late for it.
            reasons = [f"not here after {timeout:.0f} s, in which this machine may have stood still"] * len(lacking)
        return failures | {version.name: why for version, why in zip(lacking, reasons, strict=True) if why}

    def pull_document(
        self,
        name: str,
        peers: Sequence[str],
        *,
        author: str,
        min_round: int,
        digest: str,
        max_bytes: int,
        timeout: float,
    ) -> str:
        """Fetch the newest document of a name that the peers offer; return the reason for a failure.

        Args:
            name: The document's name.
            peers: Peers to ask.
            author: Peer that must have signed it; empty for any.
            min_round: Oldest round that helps.
            digest: Digest of the only document that helps; empty for any.
            max_bytes: Longest document.
            timeout: Seconds for its bytes.
        """
        offers, reason = self.offers(name, peers), "no peer offers it"
        for peer, version in list(offers.items()):
            if author not in ("", version.author):  # guard: founders-manifest
                reason = f"{peer[-6:]} offers one by {version.author}, not by {author}"
            elif version.round < min_round or digest not in ("", version.digest):
                reason = f"{peer[-6:]} offers another one, of round {version.round}"
            elif version.num_bytes > max_bytes:  # guard: document-length
                reason = f"{peer[-6:]} offers {version.num_bytes} bytes, more than {max_bytes}"
            else:
                continue
            del offers[peer]
        if not offers:
            return reason
        newest = max(offers.values(), key=lambda version: version.round)
        holders = [peer for peer, version in offers.items() if version.digest == newest.digest]
        return self.pull([newest], holders, timeout=timeout).get(name, "")

    async def _fetch(self, wanted: Sequence[Version], peers: Sequence[str], timeout: float) -> list[str]:
        files = [self._store.begin(version) for version in wanted]
        others = [peer for peer in peers if peer != self.peer_id]
        fetch = Fetch(files, others, connect=self._connect, store=self._accept, count=self._count)
        try:
            return await fetch.run(asyncio.get_running_loop().time() + timeout)
        finally:
            for file in files:
                self._store.end(file)

    async def _connect(self, peer: str) -> Channel:
        try:
            return await Channel.open(self._node, peer, self._service("fetch"), CHUNK_SECONDS)
        except TimeoutError as error:
            raise DisconnectedError(f"was not reached in {CHUNK_SECONDS:.0f} s") from error
        except (P2PDaemonError, OSError, EOFError) as error:
            raise DisconnectedError(f"cannot be reached: {error}") from error

    def _count(self, num_bytes: int) -> None:
        self.bytes_in += num_bytes

    async def _accept(self, file: Unfinished) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self._verify, file)

    def _verify(self, file: Unfinished) -> None:
        """Store a complete version, if its content is of use."""
        version = file.version
        try:
            if version.codec == "coded":
                self._formats[VectorName(version.name).kind].decode(file.path.read_bytes())
            elif version.codec == "fp32":
                for _, piece_N in PagedVector.of_file(file.path).pieces():
                    low, high = piece_N.aminmax()  # both are NaN if any element is
                    if not (torch.isfinite(low) and torch.isfinite(high)):  # guard: finite-vector
                        raise ExchangeError(f"{version.name} holds NaN or infinity")
        except ExchangeError:
            file.path.unlink(missing_ok=True)
            raise
        self._store.finish(file)
