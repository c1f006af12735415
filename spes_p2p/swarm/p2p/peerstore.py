"""Addresses of peers that this one has met, for its next start and for the time after a lost connection."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Collection, Iterable, Mapping
from enum import IntEnum
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from hivemind.utils.multiaddr import Multiaddr
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from spes_p2p.fs import write_atomic
from spes_p2p.swarm.records import Address, PeerId, Seconds

log = logging.getLogger(__name__)

FILE = "known_peers.json"
"""File name in a peer's output folder."""
MAX_PEERS = 64
MAX_FILE_BYTES = 2**17
MIN_PAUSE_SECONDS = 3.0
MAX_PAUSE_SECONDS = 60.0
"""Pauses between two dials of an endpoint that does not answer."""
_HOST_FAMILIES = ("ip4", "ip6", "dns", "dns4", "dns6", "dnsaddr")
_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "0.0.0.0/8", "fc00::/7", "100.64.0.0/10")
"""Addresses of no single network; the last ones lie behind a carrier's NAT."""
_NAT64 = "64:ff9b::/96"
"""IPv4 addresses in the form that a NAT64 translates."""


class PeerstoreEntry(BaseModel):
    """One peer, as last seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: PeerId
    addresses: Annotated[tuple[Address, ...], Field(max_length=4)]
    seen: Seconds
    """Unix time."""


_ENTRIES = TypeAdapter(list[PeerstoreEntry])


class Peerstore:
    """Peers and their addresses, at most MAX_PEERS, in a file that is always whole.

    Addresses are checked before they are stored and after they are loaded. The file is a cache: a damaged one counts as
    empty.

    Args:
        path: The file; None keeps the peers in memory only.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._peers = {peer.peer_id: peer for peer in _load(path)} if path is not None else {}

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return addresses by peer id, peers seen last first."""
        return {peer.peer_id: peer.addresses for peer in sorted(self._peers.values(), key=lambda peer: -peer.seen)}

    def update(self, contacts: Mapping[str, Iterable[str]], first: Collection[str] = ()) -> None:
        """Store the addresses of peers that are in the swarm now, in place of the peers seen longest ago.

        Args:
            first: Peers that no others replace: anyone can state addresses of invented peers.
        """
        before, now = self._peers, time.time()
        peers = dict(before)
        for peer, addresses in contacts.items():
            usable = [address for address in addresses if is_address_of(address, peer)]  # guard: always
            if usable:
                peers[peer] = PeerstoreEntry(peer_id=peer, addresses=tuple(usable[:4]), seen=now)
        # guard: peer.peer_id not in first, ->
        order = sorted(peers.values(), key=lambda peer: (peer.peer_id not in first, -peer.seen))
        self._peers = {peer.peer_id: peer for peer in order[:MAX_PEERS]}
        if self._path is None or self._peers == before:
            return
        try:
            with write_atomic(self._path, durable=False) as file:
                file.write(_ENTRIES.dump_json(list(self._peers.values()), indent=1))
        except OSError as error:  # a full disk must not end a peer that can train without this file
            log.warning("cannot keep the known peers in %s: %s", self._path, error.strerror)


class Scope(IntEnum):
    """From where an address can be reached."""

    MACHINE = 0
    NETWORK = 1
    INTERNET = 2


def scope_of(address: str) -> Scope:
    """Return from where a multiaddr can be reached: its narrowest part counts.

    A name may resolve to an address of this network, so it counts as one.
    """
    words = address.split("/")
    scopes = [_scope_of_host(family, host) for family, host in pairwise(words) if family in _HOST_FAMILIES]
    return min(scopes, default=Scope.NETWORK)


def _scope_of_host(family: str, host: str) -> Scope:
    try:
        ip = ipaddress.ip_address(host.split("%")[0])
    except ValueError:
        return Scope.NETWORK
    if isinstance(ip, ipaddress.IPv6Address):
        carried = int(ip) & 0xFFFFFFFF if ip in ip_network(_NAT64) else None
        ip = ip.ipv4_mapped or ip.sixtofour or (ipaddress.ip_address(carried) if carried is not None else ip)
    if ip.is_loopback or ip.is_unspecified:  # Linux takes 0.0.0.0 for this machine
        return Scope.MACHINE
    is_inside = ip.is_link_local or ip.is_multicast or any(ip in ip_network(each) for each in _PRIVATE)
    return Scope.NETWORK if is_inside else Scope.INTERNET


def dialled(addresses: Iterable[str], met: Scope) -> tuple[str, ...]:
    """Return the addresses stated by a peer that may be dialled.

    A stranger on the internet could otherwise have this machine call its own services, or those of its network.

    Args:
        met: The narrowest scope of the addresses over which the peer is connected, or over which the swarm was joined.
    """
    return tuple(address for address in addresses if scope_of(address) >= met)  # guard: always


class DialBackoff:
    """Limits dials of endpoints that do not answer, whichever peers name them.

    A record may name a third machine's endpoint. Each endpoint is dialled by one address at a time and, until a peer
    answers there, with pauses that double.
    """

    def __init__(self) -> None:
        self._failed: dict[str, tuple[float, float]] = {}
        """By endpoint the pause after its last dial, and when that ends."""

    def due(self, peers: Mapping[str, Iterable[str]], now: float) -> dict[str, list[str]]:
        """Return the addresses, by peer, that may be dialled now, in monotonic seconds, and count them as dialled."""
        due: dict[str, list[str]] = {}
        for peer, addresses in peers.items():
            for address in addresses:
                endpoint = _endpoint_of(address)
                pause, ends_at = self._failed.get(endpoint, (MIN_PAUSE_SECONDS / 2, now))
                if ends_at > now:  # guard: never
                    continue
                pause = min(2 * pause, MAX_PAUSE_SECONDS)
                self._failed[endpoint] = pause, now + pause
                due.setdefault(peer, []).append(address)
        self._failed = {at: tried for at, tried in self._failed.items() if tried[1] >= now - MAX_PAUSE_SECONDS}
        return due

    def reset(self, addresses: Iterable[str]) -> None:
        """Forget the failed dials of a connected peer's addresses."""
        for endpoint in map(_endpoint_of, addresses):
            self._failed.pop(endpoint, None)


def _endpoint_of(address: str) -> str:
    return address.rsplit("/p2p/", 1)[0]


def is_address_of(address: str, peer: str) -> bool:
    """Check whether a text is a multiaddr of this peer."""
    try:
        parsed = Multiaddr(address)
    except Exception:  # noqa: BLE001 - the parser raises a dozen types; all mean "no"
        return False
    return str(parsed).rsplit("/p2p/", 1)[-1] == peer


def _load(path: Path) -> list[PeerstoreEntry]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("too large")
        peers = _ENTRIES.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s); going on without known peers", path, str(error).splitlines()[0])
        return []
    return [peer for peer in peers if all(is_address_of(at, peer.peer_id) for at in peer.addresses)][:MAX_PEERS]
