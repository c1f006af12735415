"""Whether others can call this peer; and direct connections between two peers that nobody can call.

A peer that this one has called can always talk to it, over that connection; a newcomer knows only its address. So this
peer asks some others to call it.

Of two peers that nobody can call, one that both are connected to tells each the UDP address at which it sees the other,
and both call at the same moment: the packets that a router has let out open it for those that come (Ford, Srisuresh and
Kegel 2005, "Peer-to-peer communication across network address translators"). An introducer tells only what it sees
itself, never what a peer claims. A failure changes nothing: the two go on through others.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Literal, TypeVar

from pydantic import Field

from spes_p2p.swarm.network import ask
from spes_p2p.swarm.p2p.channel import Channel, Message
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.peerstore import DialBackoff, dialled, scope_of
from spes_p2p.swarm.p2p.rate_limit import Allowance
from spes_p2p.swarm.records import PeerId

log = logging.getLogger(__name__)

M = TypeVar("M", bound=Message)
ANSWER_SECONDS = 5.0
DIAL_SECONDS = 5.0
LOOK_SECONDS = 0.1
"""Pause between two looks for a connection that is being made."""
MAX_AT_ONCE = 32
"""Questions that an introducer answers at a time, or peers that one calls at a time."""
BURST, PAUSE_SECONDS = 64, 2.0
"""Questions of one peer, and introductions to one peer, at once and then one after each pause."""
CALLS, CALL_PAUSE_SECONDS = 64, 10.0
"""Calls that a peer makes at the word of one introducer."""
MAX_LINKS = 64
MAX_SHOWN = 8
"""Peers that the page and the log name."""
MAX_INTRODUCERS = 3
"""Introducers asked for one peer."""
PAUSES_UNMET = 1.0, 60.0
"""First and longest pause after a peer that does not call, because it does not know this one yet; pauses double."""
PAUSES_CALLED = 6.0, 600.0
"""The same after calls that did not meet; libp2p itself dials no address twice in 5 s."""
CALLED_BACK_SECONDS = 10.0
"""Time for a peer to tell whether it can call this one."""
CONNECT_SECONDS = 4.0
MAX_CALLERS = 3
"""Peers asked to call this one."""
MAX_CALLED_BACK = 4
"""Peers called back at a time."""
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_QUIC = re.compile(r"/ip[46]/[0-9A-Fa-f.:]{2,45}/udp/[0-9]{1,5}/quic-v1")
Seen = Annotated[str, Field(max_length=80, pattern=rf"^({_QUIC.pattern})?$")]
"""The address of a QUIC connection's other end."""
Kind = Literal["unknown", "one port", "many ports", "no UDP"]
"""What a router does with this peer's UDP port: shows all others the same one, or (a symmetric router) each another;
`no UDP`: no call over UDP gets out."""


Way = Literal["direct", "met", "through others"]
"""How a peer reaches another one: by a call, by an introduction through both routers, or by way of third peers."""


class _Question(Message):
    """Asks an introducer at which address it sees the caller, and to introduce the caller to a peer if it names one."""

    peer: PeerId | Literal[""] = ""
    host: Annotated[str, Field(max_length=45, pattern=r"^[0-9A-Fa-f.:]*$")] = ""
    """Introduce nobody; only tell whether the peer's connection comes from this host."""


class _Answer(Message):
    you: Seen = ""
    """Where the caller is seen; empty unless it is connected over QUIC."""
    peer: Seen = ""
    """Where the peer is seen, if it calls the caller now."""
    is_there: bool | None = None
    """Whether the peer's connection comes from the host asked about; None if it has none."""


class _Told(Message):
    """Tells a peer that another one wants to be called now."""

    peer: PeerId
    address: Seen


class _Consent(Message):
    """Says whether the peer calls."""

    calls: bool


class _CallMe(Message):
    """Asks a peer to open a connection to this port of the caller."""

    port: int = Field(ge=1, le=65535)


class _Called(Message):
    """Tells whether the connection opened, and at which host; None if the caller's address is not known."""

    is_reached: bool | None
    host: str = Field(default="", pattern=rf"^({_OCTET}(\.{_OCTET}){{3}})?$")


def seen_at(addresses: Sequence[str]) -> str:
    """Return the address of a peer's direct QUIC connection, of those from which it is connected; "" if it has none."""
    return next((address for address in addresses if _QUIC.fullmatch(address)), "")


def _host_of(address: str) -> str:
    return address.split("/")[2] if address.startswith(("/ip4/", "/ip6/")) else ""


class Introducer:
    """Introduces peers that are connected to this one, on request.

    It keeps only how often each peer has asked. A peer is told of another one only if it agrees to call it.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asked = Allowance(BURST, PAUSE_SECONDS)
        self._told = Allowance(BURST, PAUSE_SECONDS)
        self._at_once = asyncio.Semaphore(MAX_AT_ONCE)
        node.run(node.serve(_service(node, "introduce"), ANSWER_SECONDS, self._answer), ANSWER_SECONDS)

    async def _answer(self, channel: Channel, asker: str) -> None:
        question = _Question.parse(await channel.receive_text())
        if not self._asked.take(asker, time.monotonic()):  # guard: never
            return
        async with asyncio.timeout(2 * ANSWER_SECONDS), self._at_once:
            answer = await self._answer_to(asker, question)
        await channel.send_last(answer.model_dump_json())

    async def _answer_to(self, asker: str, question: _Question) -> _Answer:
        connected = await self._node.p2p.connected_from()
        you, peer = seen_at(connected.get(asker, ())), question.peer
        if question.host:
            hosts = {_host_of(address) for address in connected.get(peer, ()) if "p2p-circuit" not in address}
            return _Answer(you=you, is_there=question.host in hosts if hosts else None)
        seen = seen_at(connected.get(peer, ()))
        if not (you and seen) or peer == asker:
            return _Answer(you=you)
        may_tell = self._told.take(peer, time.monotonic())  # guard: self._told.take(peer, time.monotonic()) -> True
        told = _Told(peer=asker, address=you)
        consent = await _asked(self._node, peer, "told", told, _Consent, ANSWER_SECONDS) if may_tell else None
        return _Answer(you=you, peer=seen if consent is not None and consent.calls else "")


class Links:
    """Makes and keeps direct connections between this peer, which takes no calls, and others that take none.

    There are none unless the node listens on UDP. `kind` is what this peer's router does with its UDP port.
    """

    def __init__(self, node: Node) -> None:
        self.kind: Kind = "unknown"
        self._node = node
        self._wanted: frozenset[str] = frozenset()
        self._introducers: frozenset[str] = frozenset()
        self._linked: frozenset[str] = frozenset()
        self._seeking: asyncio.Task[None] | None = None
        self._calling: set[asyncio.Task[None]] = set()
        self._retry: dict[str, tuple[int, float]] = {}
        """Tries so far for a peer, and the time of the next."""
        self._told_by = Allowance(CALLS, CALL_PAUSE_SECONDS)
        self._backoff = DialBackoff()
        if node.meets_others:
            node.run(node.serve(_service(node, "told"), ANSWER_SECONDS, self._hear), ANSWER_SECONDS)

    def seek(self, wanted: Collection[str], introducers: Collection[str]) -> None:
        """Keep links to the run's peers that take no calls, by the help of those that do; call it repeatedly."""
        if self._node.meets_others:
            self._wanted = frozenset(sorted(set(wanted) - {self._node.peer_id})[:MAX_LINKS])
            self._introducers = frozenset(introducers) | set(self._node.initial_peers())
            self._node.notify(self._start)

    def connected_to(self, peers: Collection[str]) -> tuple[str, ...]:
        """Return those of some peers that this one, which takes no calls, is connected to now, ascending."""
        if not (self._node.meets_others and peers):
            return ()
        return tuple(sorted(set(peers).intersection(self._direct())))

    def ways(self) -> Mapping[str, Way]:
        """Return how this peer reaches the others now, by id: those that it is connected to, or seeks in vain."""
        ways: dict[str, Way] = dict.fromkeys(self._wanted, "through others")
        return ways | {peer: "met" if peer in self._wanted else "direct" for peer in self._direct()}

    def _direct(self) -> list[str]:
        connected = self._node.connected_from(ANSWER_SECONDS)
        return [peer for peer, addresses in connected.items() if any("p2p-circuit" not in at for at in addresses)]

    def learn_kind(self) -> Kind:
        """Ask the initial peers where they see this one, and return what its router does; takes seconds at most."""
        if self._node.meets_others:
            self._introducers |= set(self._node.initial_peers())
            with contextlib.suppress(TimeoutError):
                self._node.run(self._learn_kind(), 2 * ANSWER_SECONDS)
        return self.kind

    def told(self) -> str:
        """Return for a person what the router does, and which peers without calls are met directly."""
        direct = sorted(peer[-6:] for peer in self._linked)
        shown = ", ".join(direct[:MAX_SHOWN]) + (", ..." if len(direct) > MAX_SHOWN else "")
        others = f"others through third ones: {len(self._wanted - self._linked)}"
        return f"its router {TOLD[self.kind]}; met directly: {shown or 'none'}, {others}"

    # ------------------------------------------------------------------ making links

    def _start(self) -> None:
        if self._seeking is None or self._seeking.done():
            self._seeking = asyncio.get_running_loop().create_task(self._seek())

    async def _seek(self) -> None:
        self._note(await self._node.p2p.connected_from())
        if self.kind in ("unknown", "no UDP"):
            await self._learn_kind()
        now = time.monotonic()
        # Of two peers one asks; the other one is told.
        missing = [peer for peer in self._wanted - self._linked if self._node.peer_id < peer]
        due = [peer for peer in missing if self._retry.get(peer, (0, now))[1] <= now]
        at_once = asyncio.Semaphore(MAX_AT_ONCE)

        async def meet(peer: str) -> None:
            async with at_once:
                await self._meet(peer)

        await asyncio.gather(*map(meet, due))

    def _note(self, connected: Mapping[str, Sequence[str]]) -> None:
        linked = frozenset(peer for peer in self._wanted if seen_at(connected.get(peer, ())))
        for peer in sorted(linked - self._linked):
            log.info("connected to %s directly, through both routers", peer[-6:])
            self._retry.pop(peer, None)
        for peer in sorted((self._linked - linked) & self._wanted):
            log.info("the direct connection to %s has ended; going through others", peer[-6:])
        self._linked = linked
        self._retry = {peer: tried for peer, tried in self._retry.items() if peer in self._wanted}

    async def _meet(self, peer: str) -> None:
        """Have this peer introduced to another one, and call it."""
        self._retry_later(peer, *PAUSES_UNMET)
        for introducer, _ in await self._ask_for(peer):
            answer = await self._ask(introducer, _Question(peer=peer))
            if answer is not None and answer.peer and await self._may_call(answer.peer, introducer):
                self._retry_later(peer, *PAUSES_CALLED)
                return await self._call(peer, answer.peer, introducer)
        log.debug("no introduction to %s", peer[-6:])

    def _retry_later(self, peer: str, first: float, last: float) -> None:
        tries, _ = self._retry.get(peer, (0, 0.0))
        self._retry[peer] = (min(tries + 1, 16), time.monotonic() + min(first * 2**tries, last))

    async def _ask_for(self, peer: str) -> list[tuple[str, str]]:
        """Return some introducers that see this peer's UDP port, and where they are seen, in random order."""
        connected = await self._node.p2p.connected_from()
        able = [(other, at) for other in self._introducers - {peer} if (at := seen_at(connected.get(other, ())))]
        return random.sample(able, min(len(able), MAX_INTRODUCERS))

    async def _call(self, peer: str, address: str, introducer: str) -> None:
        """Call a peer at the address that an introducer names, unless another introducer contradicts it."""
        if not await self._is_there(peer, address, introducer):
            return
        began = time.monotonic()
        dialling = asyncio.create_task(self._node.p2p.dial({peer: [address]}, DIAL_SECONDS))
        try:
            while not (dialling.done() or await self._is_linked(peer)):  # its call may arrive before ours
                await asyncio.wait({dialling}, timeout=LOOK_SECONDS)
        finally:
            dialling.cancel()
        self._note(await self._node.p2p.connected_from())
        if peer in self._linked:
            self._backoff.reset([address])
            log.info("%s introduced %s, connected after %.1f s", introducer[-6:], peer[-6:], time.monotonic() - began)
        else:
            log.info("no direct connection to %s (this router: %s); going through others", peer[-6:], self.kind)

    async def _is_linked(self, peer: str) -> bool:
        return bool(seen_at((await self._node.p2p.connected_from()).get(peer, ())))

    async def _may_call(self, address: str, introducer: str) -> bool:
        """Check whether this peer may call an address that an introducer names, so that it is harmless if false."""
        connected = (await self._node.p2p.connected_from()).get(introducer, ())
        if introducer not in self._introducers or not connected:  # guard: never
            return False
        met, now = min(map(scope_of, connected)), time.monotonic()
        return bool(
            dialled([address], met)  # guard: operand
            and self._told_by.take(introducer, now)  # guard: operand
            and self._backoff.due({"": [address]}, now)  # guard: operand
        )

    async def _is_there(self, peer: str, address: str, introducer: str) -> bool:
        """Check whether a peer is where an introducer says; where there are others, one of them must see its host."""
        for other, _ in await self._ask_for(introducer):
            answer = await self._ask(other, _Question(peer=peer, host=_host_of(address)))
            if answer is not None and answer.is_there is not None:
                return answer.is_there  # guard: return answer.is_there -> return True
        return True

    # ------------------------------------------------------------------ asking and hearing

    async def _ask(self, introducer: str, question: _Question) -> _Answer | None:
        return await _asked(self._node, introducer, "introduce", question, _Answer, 2 * ANSWER_SECONDS)

    async def _learn_kind(self) -> None:
        able = await self._ask_for("")
        answers = await asyncio.gather(*(self._ask(introducer, _Question()) for introducer, _ in able))
        ports = {answer.you.split("/")[4] for answer in answers if answer is not None and answer.you}
        before = self.kind
        if not able:
            connected = await self._node.p2p.connected()
            self.kind = "no UDP" if connected & self._introducers else "unknown"
        elif len(ports) > 1:
            self.kind = "many ports"
        elif sum(answer is not None and bool(answer.you) for answer in answers) > 1:
            self.kind = "one port"
        if self.kind != before:
            log.info("this peer's router %s", TOLD[self.kind])

    async def _hear(self, channel: Channel, introducer: str) -> None:
        told = _Told.parse(await channel.receive_text())
        agrees = (
            told.peer in self._wanted  # guard: operand
            and bool(told.address)
            and len(self._calling) < MAX_AT_ONCE  # guard: operand
            and not await self._is_linked(told.peer)
            and await self._may_call(told.address, introducer)
        )
        if agrees:
            task = asyncio.create_task(self._call(told.peer, told.address, introducer))
            self._calling.add(task)
            task.add_done_callback(self._calling.discard)
        await channel.send_last(_Consent(calls=agrees).model_dump_json())


TOLD: Mapping[Kind, str] = {
    "unknown": "is of a kind that two peers or more must see, and fewer do",
    "one port": "shows others one UDP port: most others behind routers can be met directly",
    "many ports": "shows each peer another UDP port (symmetric): few others behind routers can be met directly",
    "no UDP": "lets no UDP out: others behind routers are reached through third ones",
}
"""What the log, the page and `spes join` say of a router."""


def _service(node: Node, name: str) -> str:
    return f"{node.run_id}::{name}"


async def _asked(node: Node, peer: str, name: str, question: Message, kind: type[M], seconds: float) -> M | None:
    """Return a peer's answer to a question; None if the peer is gone, or runs another version."""
    try:
        return kind.parse(await ask(node, peer, _service(node, name), question, seconds))
    except Exception as error:  # noqa: BLE001 - of any type: the peer has caused it
        log.debug("no answer of %s to %r: %r", peer[-6:], question, error)
        return None


def called_back(node: Node) -> tuple[bool, list[str]]:
    """Ask some initial peers to connect to this one; return whether one could, or none has tried.

    With that come the IPv4 hosts at which they have reached it, most often named first.
    """
    question, peers = _CallMe(port=node.port), node.initial_peers()[:MAX_CALLERS]

    async def ask_all() -> list[_Called]:
        asked = (_asked(node, peer, "dialback", question, _Called, CALLED_BACK_SECONDS) for peer in peers)
        return [answer for answer in await asyncio.gather(*asked) if answer is not None]

    try:
        answers = node.run(ask_all(), 2 * CALLED_BACK_SECONDS)
    except TimeoutError:
        log.warning("no peer said in time whether it can call this one (docs/trouble.md#standstill)")
        answers = []
    hosts = Counter(answer.host for answer in answers if answer.is_reached and answer.host)
    reached = [answer.is_reached for answer in answers]
    return any(reached) or False not in reached, [host for host, _ in hosts.most_common()]


def dial_back(node: Node) -> None:
    """Dial peers back on request, from now on.

    Only the address from which the caller's own connection comes is dialled; otherwise a peer could have a third
    machine dialled.
    """

    limit = asyncio.Semaphore(MAX_CALLED_BACK)

    async def answer(channel: Channel, asker: str) -> None:
        question = _CallMe.parse(await channel.receive_text())
        async with limit:
            addresses = (await node.p2p.connected_from()).get(asker, ())
            direct = {at for at in addresses if at.startswith("/ip4/") and "p2p-circuit" not in at}
            hosts = sorted({at.split("/")[2] for at in direct})[:2]
            reached = [await _can_connect(host, question.port) for host in hosts]
        host = hosts[reached.index(True)] if any(reached) else ""
        called = _Called(is_reached=any(reached) if reached else None, host=host)
        await channel.send_last(called.model_dump_json())

    node.run(node.serve(_service(node, "dialback"), CALLED_BACK_SECONDS, answer), CALLED_BACK_SECONDS)


async def _can_connect(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
