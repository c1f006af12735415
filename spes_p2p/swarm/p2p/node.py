"""One peer's p2pd and DHT node: start them, connect to the swarm, read and store records, close."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import ipaddress
import itertools
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import psutil
import uvloop
from hivemind.dht import DHT, DHTNode
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.limits import increase_file_limit
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from spes_p2p.errors import AbsentError, ConfigError, JoinError, one_line
from spes_p2p.swarm.hivemind_fixes.dht import SwarmDHT, ping_peers, store_record, unknown_peers
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P, make_locks_interrupt_safe, share_memory_without_files
from spes_p2p.swarm.hivemind_fixes.streams import MAX_STREAMS_PER_PEER
from spes_p2p.swarm.p2p.channel import Answer, Channel, open_stream, serve_streams
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.peerstore import DialBackoff, Peerstore, Scope, dialled, scope_of
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE, LOOPBACK, check_port
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.validation import RecordValidator

log = logging.getLogger(__name__)

STARTUP_SECONDS = 20.0
DIAL_SECONDS = 5.0
"""Time for initial peers to answer."""
REDIAL_SECONDS = 3.0
RETURN_SECONDS = 120.0
"""Time for an initial peer to answer one that has met peers before: they may all have been started again just now."""
DHT_SECONDS = 15.0
MAX_CONTACTS = 4
MAX_DIALS = 16
"""Peers dialled at once; the watchdog's next check dials others."""
MAX_DECODED = 8192
"""Decoded records that are remembered."""
TRANSPORTS = {"tcp": socket.SOCK_STREAM, "udp": socket.SOCK_DGRAM}
NOWHERE = "/ip4/192.0.2.1/udp/9"
"""What a peer in client mode announces: no transport dials it, so that a call of a lost one fails at once."""
_TCP = re.compile(r"(/(?:ip[46]|dns[46]?)/[^/]+)/tcp/(\d+)((?:/p2p/[^/]+)?)")
_CLOCK_ERROR = r"local time must be within .*\(local: (?P<local>[\d.]+), peer: (?P<peer>[\d.]+)\)"
"""hivemind's error where a newcomer's clock differs from an initial peer's."""
COPIED = "docs/trouble.md#copied-folder"
T = TypeVar("T")


class UnreachableError(AbsentError):
    """No peer asked has answered."""


@dataclass(frozen=True)
class ListenConfig:
    """How other peers reach this one."""

    host: str = LOOPBACK
    """IPv4 or IPv6 address to listen on; EVERY_INTERFACE for all of both kinds."""
    port: int = 0
    """TCP port, and UDP port of the same number; 0 lets the system choose."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to announce in place of those listened on."""
    client_mode: bool = False
    """Take no calls but those of peers that this one calls at the same moment (`introductions.py`); serve no versions,
    and store no records for other peers."""

    @property
    def uses_udp(self) -> bool:
        """Whether to listen on UDP: not where only this machine is called."""
        return not (self.host.startswith("127.") or self.host == "::1")

    def multiaddrs(self) -> list[str]:
        """Return the addresses to listen on, TCP before QUIC, all with the same port; in client mode QUIC's alone.

        Raises:
            ConfigError: the TCP port is occupied, or `host` is no address of this machine.
        """
        hosts = ["0.0.0.0", "::"] if self.host == EVERY_INTERFACE else [self.host]
        if not self.uses_udp:
            if self.client_mode:
                return []
            check_port(self.host, self.port)
            return [_listened(self.host, "tcp", self.port)]
        kinds = {"udp": socket.SOCK_DGRAM} if self.client_mode else TRANSPORTS
        addresses: list[str] = []
        port = self.port
        for transport, host in itertools.product(kinds, hosts):
            try:
                port = check_port(host, port, kinds[transport])
            except ConfigError:  # a machine without IPv6, or another program has the port there
                if transport == "tcp" and not addresses:
                    raise
            else:
                addresses.append(_listened(host, transport, port))
        return addresses


def _listened(host: str, transport: str, port: int) -> str:
    quic = "/quic-v1" if transport == "udp" else ""
    return f"/ip{6 if ':' in host else 4}/{host}/{transport}/{port}{quic}"


def _announced(listened: Sequence[str]) -> list[str]:
    """Return the addresses to announce where a peer listens on UDP: those of TCP, on each interface.

    p2pd would call QUIC first, which costs twice the processor time; `quic_of` derives its address.
    """
    if not any("/udp/" in address for address in listened):
        return []  # p2pd's own: the system chooses the port
    families = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
    found = [(each.family, each.address) for card in psutil.net_if_addrs().values() for each in card]
    announced: list[str] = []
    for host, port in ((words[2], words[4]) for words in (at.split("/") for at in listened) if words[3] == "tcp"):
        on_cards = [ip for family, ip in found if families.get(family) == host and "%" not in ip]
        announced += [_listened(ip, "tcp", int(port)) for ip in (on_cards if host in families.values() else [host])]
    return announced


# ---------------------------------------------------------------------- starting


async def start_p2pd(
    identity: Identity, initial_peers: Sequence[str], listen: ListenConfig, *, is_again: bool = False
) -> DaemonP2P:
    """Start a libp2p host and connect it to the initial peers; `is_again` after one of the same identity has ended.

    Raises:
        ConfigError: another peer has this identity.
        UnreachableError: no initial peer answers.
        JoinError: p2pd does not start.
    """
    at = listen.multiaddrs()
    named = [address.rsplit("/p2p/", 1)[0] for address in listen.announce]  # p2pd's answer is extended by the peer's id
    announced = named or ([NOWHERE] if listen.client_mode and at else _announced(at))
    reach = ({"dht_mode": "client"} if listen.client_mode else {}) | ({} if at else {"no_listen": True})
    try:
        may_be_in_use = initial_peers and not (identity.is_new or is_again)
        if may_be_in_use and await _is_in_use(identity, initial_peers):  # guard: never
            raise ConfigError(f"identity {identity.path} is in use by another peer; give each its own ({COPIED})")
        p2p = await DaemonP2P.create(
            identity_path=str(identity.path),
            host_maddrs=at or None,
            announce_maddrs=announced or None,
            use_relay=False,
            startup_timeout=STARTUP_SECONDS,
            **reach,
        )
    except P2PDaemonError as error:
        raise _join_error(initial_peers, error) from error
    if initial_peers and not await _connect_any(p2p, initial_peers, udp_first=listen.client_mode and bool(at)):
        await p2p.shutdown()
        raise unreachable(initial_peers)
    return p2p


async def _is_in_use(identity: Identity, initial_peers: Sequence[str]) -> bool:
    """Check whether another peer of the swarm has this identity, by a search from a host with a key of its own."""
    probe = await DaemonP2P.create(dht_mode="client", use_relay=False, startup_timeout=STARTUP_SECONDS)
    try:
        if not await _connect_any(probe, initial_peers):
            raise unreachable(initial_peers)
        return await probe.finds(identity.peer_id, DIAL_SECONDS)
    finally:
        await probe.shutdown()


async def _connect_any(p2p: DaemonP2P, addresses: Sequence[str], *, udp_first: bool = False) -> bool:
    """Dial peers; tell whether any is connected. Stock's start waits for each: one that stalled kept newcomers out."""
    peers = group_by_peer(addresses)
    await _dial(p2p, peers, DIAL_SECONDS, udp_first=udp_first)  # guard: DIAL_SECONDS -> 600.0
    return bool(await p2p.connected() & peers.keys())


async def _dial(p2p: DaemonP2P, peers: Mapping[str, Sequence[str]], seconds: float, *, udp_first: bool) -> None:
    """Dial peers for so long, with `udp_first` by QUIC for the first half, and then those without an answer by TCP.

    Only a connection over QUIC shows an introducer the UDP port that a router has given this peer, and p2pd dials no
    peer a second time that is connected by TCP.
    """
    if udp_first and (by_quic := {peer: quic for peer, at in peers.items() if (quic := quic_of(at))}):
        await p2p.dial(by_quic, seconds / 2)
        connected = await p2p.connected()
        peers = {peer: at for peer, at in peers.items() if peer not in connected}
    if peers:
        await p2p.dial(peers, seconds)


def quic_of(addresses: Sequence[str]) -> list[str]:
    """Return the QUIC addresses that belong to TCP multiaddrs: peers listen on UDP ports of the same number."""
    found = [match for match in map(_TCP.fullmatch, addresses) if match]
    return [f"{match[1]}/udp/{match[2]}/quic-v1{match[3]}" for match in found]


def start_dht(
    p2p: DaemonP2P,
    validator: RecordValidator,
    initial_peers: Sequence[str],
    *,
    named: Collection[str] = (),
    client_mode: bool,
) -> SwarmDHT:
    """Start a DHT node in a process of its own, to which peers named by the user need not be this program's.

    Raises:
        JoinError: it cannot join.
    """
    dht = SwarmDHT(
        p2p,
        validator,
        named,
        initial_peers=initial_peers or None,
        client_mode=client_mode,
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        cache_refresh_before_expiry=0,  # a refresh would fill the cache
    )
    try:
        dht.run_in_background(timeout=STARTUP_SECONDS)
    except Exception as error:
        dht.terminate()
        raise _join_error(initial_peers, error) from error
    return dht


def _join_error(initial_peers: Sequence[str], error: BaseException) -> JoinError:
    log.info("could not start with %d initial peers: %r", len(initial_peers), error)
    if not initial_peers or "[Errno" in str(error):  # p2pd's file is missing, or not for this machine
        return JoinError(f"cannot start the peer-to-peer daemon: {one_line(error)} (docs/trouble.md#p2pd)")
    if skew := re.search(_CLOCK_ERROR, str(error)):
        ahead = float(skew["local"]) - float(skew["peer"])
        return JoinError(
            f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's, and 3 s "
            f"are allowed; set it (`timedatectl set-ntp true`) and start again (docs/trouble.md#clock)"
        )
    return unreachable(initial_peers)


def unreachable(addresses: Sequence[str]) -> UnreachableError:
    """Return the error that names all addresses dialled in vain."""
    return UnreachableError(
        f"no answer from {', '.join(addresses)}; check that those peers run, and the link or --initial-peers "
        f"(docs/trouble.md#no-answer)"
    )


def check_addresses(addresses: Sequence[str], *, of_peers: bool = True) -> None:
    """Refuse addresses that are no multiaddrs, or with `of_peers` do not end with a peer's id."""
    for address in addresses:
        try:
            names_peer = "p2p" in Multiaddr(address)
        except Exception as error:
            raise ConfigError(
                f"{address!r} is not a multiaddr; it looks like /ip4/1.2.3.4/tcp/4000/p2p/Qm..."
            ) from error
        if of_peers and not names_peer:
            raise ConfigError(f"{address!r} names no peer; append /p2p/ and its peer id")


@functools.lru_cache(MAX_DECODED)
def _decoded(kind: type[Record], value: bytes) -> Record:
    """Decode a record; they are read every few seconds, and most are as they were."""
    return kind.decode(value)


def is_loopback(address: str) -> bool:
    """Check whether a multiaddr leads to this machine alone."""
    return address.startswith(("/ip4/127.", "/ip6/::1/"))


def _reach(address: str, outgoing: str) -> tuple[int, bool]:
    """Return a sort key of a multiaddr: the farther away it can be reached, and the surer, the lower.

    `outgoing` is the address of the interface that leads to the internet, if there is one; others may be virtual.
    """
    _, family, host, *_ = address.split("/")
    if is_loopback(address):
        return 4, False
    if family not in ("ip4", "ip6"):  # a DNS name
        return 0, False
    ip = ipaddress.ip_address(host)
    rank = 3 if ip.is_link_local else 0 if ip.is_global else 1 if host == outgoing else 2
    return rank, family == "ip6"


def _outgoing_host() -> str:
    """Return the IPv4 address from which this machine would call the internet; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.0.8", 9))
        except OSError:
            return ""
        return probe.getsockname()[0]


def group_by_peer(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Group peers' multiaddrs by peer id."""
    peers: dict[str, list[str]] = {}
    for address in addresses:
        peers.setdefault(address.rsplit("/p2p/", 1)[-1], []).append(address)
    return peers


# ---------------------------------------------------------------------- the node


class Node:
    """A libp2p host and DHT node for the records of one run: the `Network` of a real peer, whose methods it has.

    Args:
        run_id: The run whose records are valid here.
        initial_peers: Multiaddrs of peers in the swarm. Without any, the node starts a swarm, unless a peer of the
            peerstore answers.
        peerstore: Peers met before; dialled if no initial peer answers, and kept connected from then on.
        listen: How other peers reach this one; by default on a free port of this machine alone.
        seen: Asks the peers that answer how they see this one, before the DHT starts; returns how it listens then.

    Attributes:
        has_met_peers: Another peer answered at the start.

    Raises:
        ConfigError: a malformed address, or an occupied port.
        JoinError: no initial peer and no peer of the peerstore answers, or this machine's clock differs from theirs.
    """

    p2p: DaemonP2P
    dht: SwarmDHT

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        *,
        initial_peers: Sequence[str] = (),
        peerstore: Peerstore | None = None,
        listen: ListenConfig | None = None,
        seen: Callable[[Node], ListenConfig] | None = None,
    ) -> None:
        self.identity = identity
        self.run_id = run_id
        self.peer_id = identity.peer_id
        self.peerstore = peerstore if peerstore is not None else Peerstore()
        self._listen = listen or ListenConfig()
        self._seen = seen
        check_addresses(initial_peers)
        check_addresses(self._listen.announce, of_peers=False)
        if not self.client_mode:
            self._listen.multiaddrs()
        increase_file_limit()
        make_locks_interrupt_safe()
        share_memory_without_files()
        self._validator = RecordValidator(run_id, identity)
        self._dial_backoff = DialBackoff()
        self._initial_peers = group_by_peer(initial_peers)
        self._joined_over = min(map(scope_of, initial_peers), default=Scope.INTERNET)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)
        self._thread.start()
        try:
            self.has_met_peers = self._connect(list(initial_peers))
        except BaseException:
            self.close()
            raise

    def _connect(self, initial_peers: list[str]) -> bool:
        """Start p2pd and the DHT; tell whether another peer answered: an initial one, or else one of the peerstore.

        Without initial peers the node also starts if none answers.
        """
        met = [address for at in self.peerstore.addresses().values() for address in at]
        known = [address for address in met if address not in initial_peers]
        deadline = time.monotonic() + (RETURN_SECONDS if initial_peers and met else 0.0)
        while True:
            for addresses in filter(None, (initial_peers, known)):
                try:
                    self._start(addresses)
                    return True
                except UnreachableError:
                    self._stop_daemons()
            if (left := deadline - time.monotonic()) <= 0:
                break
            log.info("no answer from %s; trying again for %.0f s", ", ".join([*initial_peers, *known]), left)
            threading.Event().wait(min(REDIAL_SECONDS, left))
        if initial_peers:
            raise unreachable([*initial_peers, *known])
        if known:
            log.warning("no answer from %s; waiting for other peers here", ", ".join(known))
        self._start([])
        return False

    def _start(self, addresses: list[str]) -> None:
        self.p2p = self.run(start_p2pd(self.identity, addresses, self._listen), 2 * STARTUP_SECONDS)
        if self._seen is not None and addresses and (listen := self._seen(self)) != self._listen:
            self._stop_daemons()
            self._listen = listen
            self.p2p = self.run(start_p2pd(self.identity, addresses, listen, is_again=True), 2 * STARTUP_SECONDS)
        named = self._initial_peers.keys()
        self.dht = start_dht(self.p2p, self._validator, addresses, named=named, client_mode=self.client_mode)

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self._loop)
        return future.result(timeout + 5.0)

    def notify(self, listener: Callable[[], None]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(listener)

    def now(self) -> float:
        return get_dht_time()

    def processor_seconds(self) -> float:
        return time.thread_time()

    async def open(self, peer: str, service: str, seconds: float) -> Channel:
        return await open_stream(self.p2p, peer, service, seconds)

    async def serve(self, service: str, seconds: float, answer: Answer) -> None:
        await serve_streams(self.p2p, service, seconds, answer)

    def admit(self, streams_per_peer: int, is_known: Callable[[str], bool]) -> None:
        """Admit more streams of each peer, and keep half of all streams for known ones.

        Args:
            streams_per_peer: Streams that carry vectors, beside those of other services.
            is_known: Checks whether a peer, by its id, is known to the run.
        """
        self.p2p.stream_quota.max_items = MAX_STREAMS_PER_PEER + streams_per_peer
        self.p2p.stream_quota.is_known = lambda peer: is_known(peer.to_base58())

    # ------------------------------------------------------------------ addresses

    @property
    def client_mode(self) -> bool:
        return self._listen.client_mode

    @property
    def meets_others(self) -> bool:
        """Whether it takes no calls, but listens for those of peers that it is introduced to."""
        return self._listen.client_mode and self._listen.uses_udp

    def addresses(self) -> list[str]:
        """Return the TCP multiaddrs under which this peer can be reached, public ones first, loopback ones last."""
        addresses = [str(address) for address in self.run(self.p2p.get_visible_maddrs(), DHT_SECONDS)]
        if not self._listen.announce:
            addresses = [address for address in addresses if "/udp/" not in address]  # `quic_of` derives those
        outgoing = _outgoing_host()
        return sorted(addresses, key=lambda address: _reach(address, outgoing))

    @property
    def port(self) -> int:
        """The TCP port listened on; an announced one, if that is all that is known; 0 in client mode."""
        if self.client_mode:
            return 0
        if self._listen.port:  # a router may forward another port to it, which is the announced one
            return self._listen.port
        ports = [int(Multiaddr(address)["tcp"]) for address in self.addresses() if "/tcp/" in address]
        return ports[0] if ports else 0

    def contacts(self) -> tuple[str, ...]:
        """Return the addresses to publish; none in client mode."""
        return () if self.client_mode else tuple(self.addresses()[:MAX_CONTACTS])

    def initial_peers(self) -> list[str]:
        """Return the ids of the initial peers; of the peerstore's if there are none."""
        return list(self._initial_peers or self.peerstore.addresses())

    def known_peers(self) -> list[str]:
        """Return the ids of the initial peers, and of those met before."""
        return [*{**self._initial_peers, **self.peerstore.addresses()}]

    def known_addresses(self) -> list[str]:
        """Return one address of each known peer, initial peers first."""
        return [at[0] for at in {**self._initial_peers, **self.peerstore.addresses()}.values()]

    # ------------------------------------------------------------------ peers

    def remember(self, contacts: Mapping[str, Sequence[str]], first: Collection[str] = ()) -> None:
        """Keep the addresses that other peers state, by peer id, so far as they may be dialled; first those of some."""
        met = {peer: min(map(scope_of, at)) for peer, at in self.connected_from(DHT_SECONDS).items() if at}
        usable = {peer: dialled(at, met.get(peer, self._joined_over)) for peer, at in contacts.items()}
        self.peerstore.update(usable, first)

    def connected_from(self, seconds: float) -> dict[str, list[str]]:
        """Return the multiaddrs of the connected peers by id; none if p2pd does not answer in so many seconds."""
        with contextlib.suppress(TimeoutError):  # this machine stood still
            return self.run(self.p2p.connected_from(), seconds)
        return {}

    def p2pd_answers(self, seconds: float) -> bool:
        """Check whether p2pd answers in time."""
        return self.run(self.p2p.answers(seconds), seconds + DHT_SECONDS)

    def ping(self, peers: Mapping[str, Sequence[str]]) -> int:
        """Dial those of some peers and the initial ones that are not connected; ping those that the DHT does not know.

        Return the number of peers that the DHT knows then; raise TimeoutError if it takes too long.
        """
        known = {peer: at for peer, at in {**peers, **self._initial_peers}.items() if peer != self.peer_id}
        unknown = self._run_in_dht(functools.partial(unknown_peers, sorted(known)))
        connected = self.run(self.p2p.connected(), DHT_SECONDS)
        for peer in connected & set(known):
            self._dial_backoff.reset(known[peer])
        lost = sorted(set(known) - connected)
        chosen = random.sample(lost, min(len(lost), MAX_DIALS))
        others = {peer: known[peer] for peer in chosen if peer not in self._initial_peers}
        due = {peer: known[peer] for peer in chosen if peer in self._initial_peers}
        if due := due | self._dial_backoff.due(others, time.monotonic()):
            # Dial with addresses: p2pd forgets those of a peer that was away for some minutes. A peer that accepts no
            # connections is pinged over the one that it has opened itself.
            self.run(_dial(self.p2p, due, REDIAL_SECONDS, udp_first=self.meets_others), DHT_SECONDS)
        return self._run_in_dht(functools.partial(ping_peers, [*due, *(set(unknown) & connected)]))

    # ------------------------------------------------------------------ records

    def store(self, record: Record, lifetime_seconds: float) -> bool:
        """Sign and store a record; tell whether another node accepted it."""
        key, ends_at = record.key(self.run_id), get_dht_time() + lifetime_seconds
        return self._run_in_dht(functools.partial(store_record, key, self._validator.subkey, record.encode(), ends_at))

    def read(self, kind: type[Record]) -> dict[str, Any]:
        records = (_decoded(kind, item.value) for _, item in self._items(kind))
        return {record.peer_id: record for record in records}

    def own_record_ends_at(self, kind: type[Record]) -> float:
        """Return the DHT time at which the record of one kind under this peer's id expires; 0 if there is none."""
        own = self._validator.subkey
        return max((item.expiration_time for subkey, item in self._items(kind) if subkey == own), default=0.0)

    def _items(self, kind: type[Record]) -> Iterator[tuple[bytes, ValueWithExpiration[Any]]]:
        """Yield all peers' unexpired records of one kind, encoded, with their owners' subkeys."""
        futures = [self.dht.get(key, latest=True, return_future=True) for key in kind.keys(self.run_id)]
        for future in futures:
            if (found := future.result(timeout=DHT_SECONDS)) is not None and isinstance(found.value, dict):
                yield from found.value.items()

    def _run_in_dht(self, work: Callable[[DHT, DHTNode], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the DHT's process and return its result."""
        return self.dht.run_coroutine(work, return_future=True).result(timeout=DHT_SECONDS)

    def close(self) -> None:
        """Shut the DHT and p2pd down. Idempotent."""
        self._stop_daemons()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DHT_SECONDS)

    def _stop_daemons(self) -> None:
        if hasattr(self, "dht") and self.dht.is_alive():  # whose process cannot shut down in order without p2pd
            (self.dht.shutdown if self.p2p.is_running() else self.dht.terminate)()
        if hasattr(self, "p2p") and self._loop.is_running():
            self.run(self.p2p.shutdown(), DHT_SECONDS)
