"""Tests whether other peers can open a connection to this one, by asking some of them to try.

A peer that this one has called can always talk to it, over that connection; a newcomer knows only its address.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Sequence

from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.multiaddr import Multiaddr
from pydantic import Field

from spes_p2p.errors import SpesError
from spes_p2p.swarm.exchange.protocol import Channel, Message
from spes_p2p.swarm.p2p.node import Node

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
DIAL_SECONDS = 4.0
MAX_ASKED = 3
MAX_AT_ONCE = 4
"""Peers called back at a time."""
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"


class _Question(Message):
    """Asks a peer to open a connection to this port of the caller."""

    port: int = Field(ge=1, le=65535)


class _Answer(Message):
    """Tells whether the connection opened, and at which host; None if the caller's address is not known."""

    is_reached: bool | None
    host: str = Field(default="", pattern=rf"^({_OCTET}(\.{_OCTET}){{3}})?$")


class DialBack:
    """Dials peers back on request, and asks peers to dial this one back.

    Only the address from which the caller's own connection comes is dialled; otherwise a peer could have a third
    machine dialled.

    Args:
        node: The peer's host; outside of client mode it answers at once.

    Attributes:
        hosts: IPv4 addresses at which peers have reached this one, those that most name first.
    """

    def __init__(self, node: Node) -> None:
        self.hosts: Sequence[str] = ()
        self._node = node
        self._service = f"{node.run_id}::dialback"
        self._limit = asyncio.Semaphore(MAX_AT_ONCE)
        if not node.client_mode:
            node.run(node.p2p.add_binary_stream_handler(self._service, self._answer), ANSWER_SECONDS)

    def is_reachable(self, peers: Sequence[str]) -> bool:
        """Return False if some of these peers have tried to connect to this one and none could."""
        question = _Question(port=self._node.port)

        async def ask_all() -> list[_Answer]:
            return await asyncio.gather(*(self._ask(peer, question) for peer in peers[:MAX_ASKED]))

        answers = self._node.run(ask_all(), 2 * ANSWER_SECONDS)
        named = Counter(answer.host for answer in answers if answer.is_reached and answer.host)
        self.hosts = [host for host, _ in named.most_common()]
        reached = [answer.is_reached for answer in answers]
        return any(reached) or False not in reached

    async def _ask(self, peer: str, question: _Question) -> _Answer:
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                channel = await Channel.open(self._node, peer, self._service, ANSWER_SECONDS)
                with contextlib.closing(channel):
                    await channel.send_text(question.model_dump_json())
                    return _Answer.parse(await channel.receive_text())
        except Exception as error:  # noqa: BLE001 - the peer may run another version, or be gone: its answer is missing
            log.debug("%s does not say whether it can call us: %r", peer, error)
            return _Answer(is_reached=None)

    async def _answer(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        channel = Channel(reader, writer, ANSWER_SECONDS)
        with contextlib.closing(channel):
            try:
                question = _Question.parse(await channel.receive_text())
                async with self._limit:
                    hosts = await self._hosts_of(info.peer_id.to_base58())
                    reached = [await _can_connect(host, question.port) for host in hosts[:2]]
                host = hosts[reached.index(True)] if any(reached) else ""
                answer = _Answer(is_reached=any(reached) if reached else None, host=host)
                await channel.send_text(answer.model_dump_json())
                await channel.wait_for_hang_up()
            except (SpesError, TimeoutError) as error:
                log.info("did not call %s back: %s", info.peer_id.to_base58()[-6:], error)

    async def _hosts_of(self, peer: str) -> list[str]:
        """Return the IPv4 addresses from which a peer is connected."""
        peers = await self._node.p2p.list_peers()
        addresses = [Multiaddr(str(a)) for p in peers if p.peer_id.to_base58() == peer for a in p.addrs]
        return sorted({str(a["ip4"]) for a in addresses if str(a).startswith("/ip4/") and "p2p-circuit" not in str(a)})


async def _can_connect(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(DIAL_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
