"""One peer's p2pd and DHT node: started, dialled, watched, closed."""

from __future__ import annotations

import asyncio
import functools
import logging
import random
import re
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop
from hivemind.dht import DHT, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.limits import increase_file_limit
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.hivemind_fixes.dht import SwarmDHT
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P, make_locks_interrupt_safe, retry_memory_sharing
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.peerstore import DialBackoff, Peerstore
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.validation import RecordValidator, owner_of

log = logging.getLogger(__name__)


async def unknown_peers(peers: Sequence[str], dht: DHT, node: DHTNode) -> list[str]:
    """Return the peers that the DHT node does not know."""
    table = node.protocol.routing_table
    return [peer for peer in peers if table.get(peer_id=PeerID.from_base58(peer)) is None]


async def ping_peers(peers: Sequence[str], dht: DHT, node: DHTNode) -> int:
    """Ping peers, which makes them and this node known to each other; return how many it knows then."""
    answers = await asyncio.gather(*(node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))
    return max(len(node.protocol.routing_table.peer_id_to_uid), sum(answer is not None for answer in answers))


async def store_record(key: str, subkey: bytes, value: bytes, expires: float, dht: DHT, node: DHTNode) -> bool:
    """Store a record, with others and here; tell whether any of the others took it.

    Stock says yes where the only node that took it is its own.
    """
    taken = await node.store(key, value, expires, subkey=subkey, exclude_self=True)
    if not node.protocol.client_mode:
        key_id, protocol = DHTID.generate(source=key), node.protocol
        packed, subkey_bytes = protocol.serializer.dumps(value), protocol.serializer.dumps(subkey)
        signed = protocol.record_validator.sign_value(DHTRecord(key_id.to_bytes(), subkey_bytes, packed, expires))
        protocol.storage.store(key_id, signed, expires, subkey=subkey)
    return bool(taken)


STARTUP_SECONDS, DIAL_SECONDS = 20.0, 5.0
CLOCKS = r"local time must be within .*\(local: (?P<local>[\d.]+), peer: (?P<peer>[\d.]+)\)"
"""What hivemind says to a newcomer whose clock differs from an initial peer's."""


class UnreachableError(JoinError):
    """None of the peers asked has answered."""


@dataclass(frozen=True)
class ListenConfig:
    """How others reach a peer.

    Attributes:
        host: IPv4 address to listen on.
        port: TCP port; 0 lets the system choose.
        announce: Multiaddrs to announce instead of those listened on.
        client_mode: Only outgoing connections: serves nobody and stores nothing for others.
    """

    host: str = "127.0.0.1"
    port: int = 0
    announce: tuple[str, ...] = ()
    client_mode: bool = False


async def start_p2pd(identity: Identity, initial_peers: Sequence[str], door: ListenConfig) -> DaemonP2P:
    """Start a libp2p host.

    Raises:
        ConfigError: another peer has this identity.
        JoinError: it does not start.
    """
    reach = {"no_listen": True, "dht_mode": "client"} if door.client_mode else {}
    try:
        if initial_peers and not identity.is_new and await _is_taken(identity, initial_peers):  # guard: own-identity
            raise ConfigError(f"identity {identity.path} is in use by another peer; give each its own")
        p2p = await DaemonP2P.create(
            identity_path=str(identity.path),
            host_maddrs=None if door.client_mode else [f"/ip4/{door.host}/tcp/{door.port}"],
            announce_maddrs=list(door.announce) or None,
            use_relay=False,
            startup_timeout=STARTUP_SECONDS,
            **reach,
        )
    except P2PDaemonError as error:
        raise _failure(initial_peers, error) from error
    if initial_peers and not await _meets(p2p, initial_peers):
        await p2p.shutdown()
        raise unreachable(initial_peers)
    return p2p


async def _is_taken(identity: Identity, initial_peers: Sequence[str]) -> bool:
    """Tell whether those who answer lead to another peer of this identity.

    Raises:
        UnreachableError: nobody answers.
    """
    stranger = await DaemonP2P.create(dht_mode="client", use_relay=False, startup_timeout=STARTUP_SECONDS)
    try:
        if not await _meets(stranger, initial_peers):
            raise unreachable(initial_peers)
        return await stranger.finds(identity.peer_id, DIAL_SECONDS)
    finally:
        await stranger.shutdown()


async def _meets(p2p: DaemonP2P, addresses: Sequence[str]) -> bool:
    """Dial peers; tell whether anybody is there.

    Stock has p2pd do this before it starts, and p2pd waits for each: one that stalled once it had shaken hands kept
    newcomers from all others.
    """
    at = group_by_peer(addresses)
    await p2p.dial(at, DIAL_SECONDS)  # guard: dial-time
    return bool(await p2p.connected() & at.keys())


def start_dht(p2p: DaemonP2P, validator: RecordValidator, initial_peers: Sequence[str], door: ListenConfig) -> SwarmDHT:
    """Start a DHT node in a process of its own.

    Raises:
        JoinError: no initial peer answers, or this machine's clock is not theirs.
    """
    dht = SwarmDHT(
        p2p,
        validator,
        initial_peers=initial_peers or None,
        client_mode=door.client_mode,
        cache_locally=False,
        cache_on_store=False,
        cache_nearest=0,
        cache_refresh_before_expiry=0,  # nothing is cached, and a refresh would be
    )
    try:
        dht.run_in_background(timeout=STARTUP_SECONDS)
    except Exception as error:
        dht.terminate()
        raise _failure(initial_peers, error) from error
    return dht


def check_addresses(addresses: Sequence[str]) -> None:
    """Refuse what is no multiaddr of a peer.

    Raises:
        ConfigError: quotes it.
    """
    for address in addresses:
        try:
            valid = "p2p" in Multiaddr(address)
        except Exception as error:
            raise ConfigError(
                f"{address!r} is not a multiaddr; it looks like /ip4/1.2.3.4/tcp/4000/p2p/Qm..."
            ) from error
        if not valid:
            raise ConfigError(f"{address!r} names no peer; append /p2p/ and its peer id")


def group_by_peer(addresses: Sequence[str]) -> dict[str, list[str]]:
    """Return multiaddrs of peers by the id of each."""
    at: dict[str, list[str]] = {}
    for address in addresses:
        at.setdefault(address.rsplit("/p2p/", 1)[-1], []).append(address)
    return at


def check_port(host: str, port: int) -> None:
    """Find an occupied port before p2pd does, whose message says less."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


def _failure(initial_peers: Sequence[str], error: BaseException) -> JoinError:
    log.info("could not start with %d initial peers: %r", len(initial_peers), error)
    if not initial_peers:
        return JoinError(f"cannot start the peer-to-peer daemon: {error}; see the log")
    if skew := re.search(CLOCKS, str(error)):
        ahead = float(skew["local"]) - float(skew["peer"])
        return JoinError(
            f"this machine's clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's, and 3 s "
            f"are allowed; set it (`timedatectl set-ntp true`) and start again"
        )
    return unreachable(initial_peers)


def unreachable(addresses: Sequence[str]) -> UnreachableError:
    """Return the error that names all addresses that were tried in vain."""
    return UnreachableError(f"no answer from {', '.join(addresses)}; check --initial-peers and that those peers run")


T = TypeVar("T")
DHT_SECONDS = 15.0
CALL_SECONDS = 3.0
MAX_CONTACTS = 4
MAX_CALLS = 16
"""Peers called at once; the others have their turn a few seconds later."""


class Node:
    """A libp2p host and DHT node with one run's records.

    Args:
        identity: This peer's key.
        run_id: The run whose records are valid here.
        initial_peers: Multiaddrs of peers in the swarm; none starts a swarm, unless `known` are in reach.
        known: Peers met before, which are tried where no initial peer answers, and kept in reach from then on.
        host: IPv4 address to listen on.
        port: TCP port; 0 lets the system choose.
        announce: Multiaddrs to announce instead of those listened on.
        client_mode: Only outgoing connections: serves nobody and stores nothing for others.

    Raises:
        ConfigError: a malformed address, or the port is taken.
        JoinError: no initial peer answers, nor any known one, or this machine's clock is not the swarm's.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        *,
        initial_peers: Sequence[str] = (),
        known: Peerstore | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        announce: Sequence[str] = (),
        client_mode: bool = False,
    ) -> None:
        self.identity, self.run_id, self.peer_id = identity, run_id, identity.peer_id
        self.known, self.client_mode = known if known is not None else Peerstore(), client_mode
        check_addresses([*initial_peers, *announce])
        check_port(host, port)
        increase_file_limit()
        make_locks_interrupt_safe()
        retry_memory_sharing()
        self._validator = RecordValidator(run_id, identity)
        self._redial = DialBackoff()
        self._initial_peers = group_by_peer(initial_peers)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)
        self._thread.start()
        try:
            self.has_met_peers = self._connect(
                list(initial_peers), ListenConfig(host, port, tuple(announce), client_mode=client_mode)
            )
        except BaseException:
            self.close()
            raise

    def _connect(self, initial_peers: list[str], door: ListenConfig) -> bool:
        """Start p2pd and the DHT with whoever answers; tell whether anybody did.

        The initial peers first, then those known from before. Who names no initial peer can do without both.
        """
        known = [address for at in self.known.addresses().values() for address in at if address not in initial_peers]
        for addresses in filter(None, (initial_peers, known)):
            try:
                self._start(addresses, door)
                return True
            except UnreachableError:
                self._stop_daemons()
        if initial_peers:
            raise unreachable([*initial_peers, *known])
        if known:
            log.warning("no answer from %s; waiting for the others here", ", ".join(known))
        self._start([], door)
        return False

    def _start(self, addresses: list[str], door: ListenConfig) -> None:
        self.p2p = self.run(start_p2pd(self.identity, addresses, door), 2 * STARTUP_SECONDS)
        self.dht = start_dht(self.p2p, self._validator, addresses, door)

    def run(self, work: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run a coroutine in the swarm thread and return its result.

        Raises:
            TimeoutError: it took longer than `timeout` seconds; it is cancelled.
        """
        future = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, timeout), self._loop)
        return future.result(timeout + 5.0)

    def notify(self, listener: Callable[[], None]) -> None:
        """Call `listener` in the swarm thread, soon; not at all once the node is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(listener)

    def addresses(self) -> list[str]:
        """Return the multiaddrs under which this peer can be reached; those of this machine alone come last."""
        addresses = [str(address) for address in self.run(self.p2p.get_visible_maddrs(), DHT_SECONDS)]
        return sorted(addresses, key=lambda address: address.startswith(("/ip4/127.", "/ip6/::1/")))

    @property
    def port(self) -> int:
        """The TCP port it listens on; 0 where it does not."""
        if self.client_mode:
            return 0
        ports = [int(Multiaddr(address)["tcp"]) for address in self.addresses() if "/tcp/" in address]
        return ports[0] if ports else 0

    def contacts(self) -> tuple[str, ...]:
        """Return what others are told of its addresses; nothing where nobody can call it."""
        return () if self.client_mode else tuple(self.addresses()[:MAX_CONTACTS])

    def initial_peers(self) -> list[str]:
        """Return the ids of the peers that it was told of, or else of those it knew from before."""
        return list(self._initial_peers or self.known.addresses())

    def known_addresses(self) -> list[str]:
        """Return an address of each of the others that it knows, the initial ones first."""
        return [at[0] for at in {**self._initial_peers, **self.known.addresses()}.values()]

    def num_addresses(self) -> int:
        """Return how many addresses it has of others."""
        return sum(map(len, {**self.known.addresses(), **self._initial_peers}.values()))

    def p2pd_answers(self, seconds: float) -> bool:
        """Tell whether p2pd answers in time."""
        return self.run(self.p2p.answers(seconds), seconds + DHT_SECONDS)

    def ping(self, peers: Mapping[str, Sequence[str]]) -> int:
        """Call those of the initial peers and of these that the DHT does not know or that are not connected.

        Args:
            peers: Addresses by id.

        Returns:
            How many the DHT knows then.

        Raises:
            TimeoutError: the DHT took too long.
        """
        known = {peer: at for peer, at in {**peers, **self._initial_peers}.items() if peer != self.peer_id}
        strangers = self._ask_dht(functools.partial(unknown_peers, sorted(known)))
        connected = self.run(self.p2p.connected(), DHT_SECONDS)
        for peer in connected & set(known):
            self._redial.answered(known[peer])
        lost = sorted(set(known) - connected)
        chosen = {peer: known[peer] for peer in random.sample(lost, min(len(lost), MAX_CALLS))}
        asked = {peer: at for peer, at in chosen.items() if peer in self._initial_peers}
        due = asked | self._redial.due({p: at for p, at in chosen.items() if p not in asked}, time.monotonic())
        if due:
            # p2pd forgets the addresses of whoever has been away for some minutes. And who cannot be called, but has
            # called the others, can be talked to by them.
            self.run(self.p2p.dial(due, CALL_SECONDS), DHT_SECONDS)
        return self._ask_dht(functools.partial(ping_peers, [*due, *(set(strangers) & connected)]))

    def store(self, record: Record, lifetime_seconds: float) -> bool:
        """Sign and store a record; tell whether a node other than this peer's own took it."""
        work = functools.partial(
            store_record,
            record.key(self.run_id),
            self._validator.subkey,
            record.encode(),
            get_dht_time() + lifetime_seconds,
        )
        return self._ask_dht(work)

    def _ask_dht(self, work: Callable[[DHT, DHTNode], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine in the DHT's process and return its result."""
        return self.dht.run_coroutine(work, return_future=True).result(timeout=DHT_SECONDS)

    def read(self, kind: type[Record]) -> dict[str, Any]:
        """Return everybody's unexpired records of one kind, by peer id; they were validated on the way."""
        futures = [self.dht.get(key, latest=True, return_future=True) for key in kind.keys(self.run_id)]
        records: dict[str, Any] = {}
        for future in futures:
            found = future.result(timeout=DHT_SECONDS)
            if found is None or not isinstance(found.value, dict):
                continue
            for subkey, item in found.value.items():
                records[owner_of(subkey)] = kind.decode(item.value)
        return records

    def close(self) -> None:
        """Shut the DHT and p2pd down. Idempotent."""
        self._stop_daemons()
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DHT_SECONDS)

    def _stop_daemons(self) -> None:
        if hasattr(self, "dht") and self.dht.is_alive():
            # Without p2pd it cannot take its leave of it.
            (self.dht.shutdown if self.p2p.is_running() else self.dht.terminate)()
        if hasattr(self, "p2p") and self._loop.is_running():
            self.run(self.p2p.shutdown(), DHT_SECONDS)
