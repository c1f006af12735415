"""One peer on the network: its p2pd, its DHT node, and the thread in which its streams run."""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import uvloop
from hivemind.dht import DHT, DHTNode
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.limits import increase_file_limit
from hivemind.utils.multiaddr import Multiaddr
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.processes import BoundDHT, BoundP2P
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.validation import RecordValidator, owner_of

log = logging.getLogger(__name__)

T = TypeVar("T")
STARTUP_SECONDS = 20.0
DHT_SECONDS = 15.0


class Node:
    """A libp2p host and DHT node with one run's records.

    Args:
        identity: This peer's key.
        run_id: The run whose records are valid here.
        initial_peers: Multiaddrs of peers in the swarm; none starts a swarm.
        host: IPv4 address to listen on.
        port: TCP port; 0 lets the system choose.
        announce: Multiaddrs to announce instead of those listened on.
        client_mode: Only outgoing connections: serves nobody and stores nothing for others.

    Raises:
        ConfigError: a malformed address, or the port is taken.
        JoinError: no initial peer answers.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: str,
        *,
        initial_peers: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        announce: Sequence[str] = (),
        client_mode: bool = False,
    ) -> None:
        self.identity, self.run_id, self.peer_id = identity, run_id, identity.peer_id
        _check_addresses([*initial_peers, *announce])
        _check_port(host, port)
        increase_file_limit()
        self._validator = RecordValidator(run_id, identity)
        self._initial_peers = [address.rsplit("/p2p/", 1)[-1] for address in initial_peers]
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="swarm", daemon=True)
        self._thread.start()
        try:
            self.p2p = self._start_p2p(initial_peers, host, port, announce, client_mode)
            self.dht = self._start_dht(initial_peers, client_mode)
        except BaseException:
            self.close()
            raise

    def _start_p2p(self, initial_peers, host, port, announce, client_mode) -> BoundP2P:
        reach = {"no_listen": True, "dht_mode": "client"} if client_mode else {}
        work = BoundP2P.create(
            initial_peers=initial_peers or None,
            identity_path=str(self.identity.path),
            host_maddrs=None if client_mode else [f"/ip4/{host}/tcp/{port}"],
            announce_maddrs=list(announce) or None,
            nat_port_map=False,
            auto_nat=False,
            use_relay=False,
            startup_timeout=STARTUP_SECONDS,
            check_if_identity_free=not self.identity.is_new,
            **reach,
        )
        try:
            return self.run(work, 2 * STARTUP_SECONDS)
        except P2PDaemonError as error:
            if "taken by another peer" in str(error):
                raise ConfigError(
                    f"identity {self.identity.path} is in use by another peer; give each its own"
                ) from error
            raise _unreachable(initial_peers, error) from error

    def _start_dht(self, initial_peers, client_mode) -> BoundDHT:
        dht = BoundDHT(
            initial_peers=initial_peers or None,
            start=False,
            p2p=self.p2p,
            client_mode=client_mode,
            record_validators=[self._validator],
            cache_locally=False,
            cache_on_store=False,
            cache_nearest=0,
        )
        try:
            dht.run_in_background(timeout=STARTUP_SECONDS)
        except Exception as error:
            dht.terminate()
            raise _unreachable(initial_peers, error) from error
        return dht

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
        """Return the multiaddrs under which this peer can be reached."""
        return [str(address) for address in self.run(self.p2p.get_visible_maddrs(), DHT_SECONDS)]

    def greet(self, peers: Iterable[str]) -> None:
        """Make these peers and the initial ones known to the DHT again; nobody waits for their answers.

        A DHT node forgets whoever fails to answer once. Where its own link was down it has forgotten everybody, and
        been forgotten by all: without this, it would be alone for ever after.

        Args:
            peers: Ids of peers that this one has met.
        """
        known = sorted({*self._initial_peers, *peers} - {self.peer_id})
        self.dht.run_coroutine(functools.partial(_greet, known), return_future=True)

    def store(self, record: Record, lifetime_seconds: float) -> bool:
        """Sign and store a record; tell whether any node took it."""
        return bool(
            self.dht.store(
                key=record.key(self.run_id),
                subkey=self._validator.subkey,
                value=record.encode(),
                expiration_time=get_dht_time() + lifetime_seconds,
                return_future=True,
            ).result(timeout=DHT_SECONDS)
        )

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
        if hasattr(self, "dht") and self.dht.is_alive():
            self.dht.shutdown()
        if hasattr(self, "p2p") and self._loop.is_running():
            self.run(self.p2p.shutdown(), DHT_SECONDS)
        if self._loop.is_running():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DHT_SECONDS)


async def _greet(peers: Sequence[str], dht: DHT, node: DHTNode) -> None:
    """Ping the peers that the DHT node does not know; runs in its process."""
    strangers = [
        peer for peer in map(PeerID.from_base58, peers) if node.protocol.routing_table.get(peer_id=peer) is None
    ]
    await asyncio.gather(*map(node.protocol.call_ping, strangers))


def _check_addresses(addresses: Sequence[str]) -> None:
    for address in addresses:
        try:
            valid = "p2p" in Multiaddr(address)
        except Exception as error:
            raise ConfigError(
                f"{address!r} is not a multiaddr; it looks like /ip4/1.2.3.4/tcp/4000/p2p/Qm..."
            ) from error
        if not valid:
            raise ConfigError(f"{address!r} names no peer; append /p2p/ and its peer id")


def _check_port(host: str, port: int) -> None:
    """Find an occupied port before p2pd does, whose message says less."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}; choose another --port") from error


def _unreachable(initial_peers: Sequence[str], error: BaseException) -> JoinError:
    if not initial_peers:
        return JoinError(f"cannot start the peer-to-peer daemon: {error}; see the log")
    return JoinError(f"no answer from {', '.join(initial_peers)}; check --initial-peers and that those peers run")
