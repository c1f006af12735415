"""Versions move between peers: who has what, and the bytes in chunks, verified before use."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

from hivemind.p2p import P2PContext, PeerID, ServicerBase
from hivemind.proto import runtime_pb2
from hivemind.utils.asyncio import aiter_with_timeout

from spes_p2p.codecs import digest, from_bytes
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.versions import DOCUMENTS, MAX_MANIFEST_BYTES, Version, VersionStore

log = logging.getLogger(__name__)

CHUNK_BYTES = 2**18
CHUNK_SECONDS = 20.0
"""Longest silence of a serving peer before the next one is tried."""
INVENTORY_SECONDS = 10.0
MAX_NAMES = 4200
PARALLEL_PULLS = 4


class Exchange(ServicerBase):
    """Serves this peer's versions and pulls others'.

    Args:
        node: The peer's host; serving starts at once unless it is in client mode.
        store: Where versions lie.
        serve: Answer others.
    """

    def __init__(self, node: Node, store: VersionStore, *, serve: bool = True) -> None:
        self._node, self._store = node, store
        self.bytes_in = self.bytes_out = 0
        if serve:
            node.run(self.add_p2p_handlers(node.p2p, namespace=node.run_id), INVENTORY_SECONDS)

    # ------------------------------------------------------------------ serving

    async def rpc_inventory(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Name the newest version of everything this peer has."""
        for version in self._store.newest().values():
            yield runtime_pb2.ExpertResponse(metadata=version.model_dump_json().encode())
        yield runtime_pb2.ExpertResponse(metadata=b"")
        await _until_the_caller_hangs_up()

    async def rpc_fetch(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        """Send a version's manifest, then its bytes; wait for a version that is about to be published."""
        wanted = json.loads(request.metadata[:MAX_MANIFEST_BYTES])
        timeout = min(float(wanted["timeout"]), CHUNK_SECONDS / 2)
        loop = asyncio.get_running_loop()
        version = await loop.run_in_executor(
            None, self._store.wait_for, request.uid[:64], int(wanted["min_round"]), timeout
        )
        if version is None:
            return
        yield runtime_pb2.ExpertResponse(metadata=version.model_dump_json().encode())
        if version.digest != wanted.get("have"):
            with self._store.path(version).open("rb") as file:
                while chunk := await loop.run_in_executor(None, file.read, CHUNK_BYTES):
                    self.bytes_out += len(chunk)
                    yield runtime_pb2.ExpertResponse(metadata=chunk)
        await _until_the_caller_hangs_up()

    # ------------------------------------------------------------------ pulling

    def inventory(self, peers: Sequence[str]) -> dict[str, dict[str, Version]]:
        """Return what each peer has, by name; peers that do not answer in time are left out."""

        async def ask_all() -> list[tuple[str, dict[str, Version]]]:
            answers = await asyncio.gather(*(self._ask(peer) for peer in peers), return_exceptions=True)
            for peer, answer in zip(peers, answers, strict=True):
                if isinstance(answer, BaseException):
                    log.warning("no inventory from %s: %r", peer[-6:], answer)
            return [(p, a) for p, a in zip(peers, answers, strict=True) if not isinstance(a, BaseException)]

        return dict(self._node.run(ask_all(), 2 * INVENTORY_SECONDS))

    async def _ask(self, peer: str) -> dict[str, Version]:
        stub = self.get_stub(self._node.p2p, PeerID.from_base58(peer), namespace=self._node.run_id)
        stream = await stub.rpc_inventory(runtime_pb2.ExpertRequest())
        versions: dict[str, Version] = {}
        async with contextlib.aclosing(stream):
            async for message in aiter_with_timeout(stream, INVENTORY_SECONDS):
                if not message.metadata:
                    return versions
                version = Version.verify(message.metadata, self._node.run_id)
                versions[version.name] = version
                if len(versions) > MAX_NAMES:
                    raise RecordError(f"{peer} lists more than {MAX_NAMES} versions")
        raise RecordError(f"{peer} was cut short after {len(versions)} versions")

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        max_bytes: Mapping[str, int],
    ) -> dict[str, str]:
        """Fetch versions into the store; see `Swarm.pull`.

        Args:
            max_bytes: By name, most bytes of a document, exact bytes of a vector.
        """

        async def pull_all() -> dict[str, str]:
            slots = asyncio.Semaphore(PARALLEL_PULLS)
            deadline = asyncio.get_running_loop().time() + timeout
            work = [self._pull_one(n, peers, min_round, max_bytes[n], deadline, slots) for n, peers in wanted.items()]
            return {name: why for name, why in zip(wanted, await asyncio.gather(*work), strict=True) if why}

        return self._node.run(pull_all(), timeout + CHUNK_SECONDS)

    async def _pull_one(self, name, peers, min_round, max_bytes, deadline, slots) -> str:
        """Try each peer once, in random order so that not everybody asks the same one; return why all failed."""
        reasons = ["nobody has it"]
        for peer in random.sample(list(peers), len(peers)):
            async with slots:
                remaining = deadline - asyncio.get_running_loop().time()
                if remaining <= 0:
                    reasons.append("out of time")
                    break
                try:
                    await asyncio.wait_for(self._fetch(peer, name, min_round, max_bytes, remaining), remaining)
                    return ""
                except Exception as error:  # noqa: BLE001 - a bad peer is a reason to ask the next, whatever it did
                    reasons.append(f"{peer[-6:]}: {error!r}")
                    log.info("could not pull %s from %s: %r", name, peer[-6:], error)
        return "; ".join(reasons[-3:])

    async def _fetch(self, peer: str, name: str, min_round: int, max_bytes: int, remaining: float) -> None:
        have = self._store.newest().get(name)
        wanted = {"min_round": min_round, "timeout": remaining, "have": have.digest if have else ""}
        request = runtime_pb2.ExpertRequest(uid=name, metadata=json.dumps(wanted).encode())
        stub = self.get_stub(self._node.p2p, PeerID.from_base58(peer), namespace=self._node.run_id)
        stream = await stub.rpc_fetch(request)
        version: Version | None = None
        data, num_bytes = bytearray(), -1
        async with contextlib.aclosing(stream):
            async for message in aiter_with_timeout(stream, CHUNK_SECONDS):
                if version is None:
                    version = Version.verify(message.metadata, self._node.run_id)
                    self._check(version, name, min_round, max_bytes)
                    num_bytes = 0 if have is not None and version.digest == have.digest else version.num_bytes
                else:
                    data += message.metadata
                if len(data) >= num_bytes:
                    break
        if len(data) > max(num_bytes, 0):
            raise ExchangeError(f"sent more than the {num_bytes} bytes announced")
        if version is None:
            raise ExchangeError(f"has no version of round {min_round}")
        self.bytes_in += len(data)
        if have is not None and version.digest == have.digest and not data:
            data = bytearray(self._store.read(name))
        await asyncio.get_running_loop().run_in_executor(None, self._accept, version, bytes(data))

    @staticmethod
    def _check(version: Version, name: str, min_round: int, max_bytes: int) -> None:
        is_document = name in DOCUMENTS
        fits = version.num_bytes <= max_bytes if is_document else version.num_bytes == max_bytes
        codec = "raw" if is_document else "fp32"
        if version.name != name or version.round < min_round or not fits or version.codec != codec:
            raise ExchangeError(
                f"offered {version.name} of round {version.round}, {version.num_bytes} bytes, {version.codec}; "
                f"wanted {name} of round {min_round}, {max_bytes} bytes, {codec}"
            )

    def _accept(self, version: Version, data: bytes) -> None:
        if len(data) != version.num_bytes or digest(data) != version.digest:
            raise ExchangeError(f"bytes of {version.name} do not match their digest")
        if version.codec == "fp32":
            from_bytes(data, len(data) // 4)  # refuses what is not finite while another peer can still be asked
        self._store.add({version.name: (version, data)})


async def _until_the_caller_hangs_up() -> None:
    """Wait to be cancelled: a stream that its server closes first may lose its tail on the way."""
    await asyncio.sleep(CHUNK_SECONDS)
