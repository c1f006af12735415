"""Starts the two processes through which a peer talks to others, p2pd and the DHT, or says why they cannot start."""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from hivemind.p2p.p2p_daemon_bindings.utils import P2PDaemonError
from hivemind.utils.multiaddr import Multiaddr

from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.guarded_dht import GuardedDHT
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.processes import BoundP2P
from spes_p2p.swarm.validation import RecordValidator

log = logging.getLogger(__name__)

STARTUP_SECONDS, DIAL_SECONDS = 20.0, 5.0
CLOCKS = r"local time must be within .*\(local: (?P<local>[\d.]+), peer: (?P<peer>[\d.]+)\)"
"""What hivemind says to a newcomer whose clock differs from an initial peer's."""


class UnreachableError(JoinError):
    """None of the peers asked has answered."""


@dataclass(frozen=True)
class Door:
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


async def start_p2pd(identity: Identity, initial_peers: Sequence[str], door: Door) -> BoundP2P:
    """Start a libp2p host.

    Raises:
        ConfigError: another peer has this identity.
        JoinError: it does not start.
    """
    reach = {"no_listen": True, "dht_mode": "client"} if door.client_mode else {}
    try:
        if initial_peers and not identity.is_new and await _is_taken(identity, initial_peers):  # guard: own-identity
            raise ConfigError(f"identity {identity.path} is in use by another peer; give each its own")
        p2p = await BoundP2P.create(
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
    stranger = await BoundP2P.create(dht_mode="client", use_relay=False, startup_timeout=STARTUP_SECONDS)
    try:
        if not await _meets(stranger, initial_peers):
            raise unreachable(initial_peers)
        return await stranger.finds(identity.peer_id, DIAL_SECONDS)
    finally:
        await stranger.shutdown()


async def _meets(p2p: BoundP2P, addresses: Sequence[str]) -> bool:
    """Dial peers; tell whether anybody is there.

    Stock has p2pd do this before it starts, and p2pd waits for each: one that stalled once it had shaken hands kept
    newcomers from all others.
    """
    at = by_peer(addresses)
    await p2p.dial(at, DIAL_SECONDS)  # guard: dial-time
    return bool(await p2p.connected() & at.keys())


def start_dht(p2p: BoundP2P, validator: RecordValidator, initial_peers: Sequence[str], door: Door) -> GuardedDHT:
    """Start a DHT node in a process of its own.

    Raises:
        JoinError: no initial peer answers, or this machine's clock is not theirs.
    """
    dht = GuardedDHT(
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


def by_peer(addresses: Sequence[str]) -> dict[str, list[str]]:
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
