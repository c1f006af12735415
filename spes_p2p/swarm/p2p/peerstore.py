"""Addresses of peers that this one has met: it tries them on its next start, and when it has lost the swarm."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from hivemind.utils.multiaddr import Multiaddr
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from spes_p2p.fs import write_atomic
from spes_p2p.swarm.records import Address, PeerId, Seconds

log = logging.getLogger(__name__)

FILE = "known_peers.json"
"""In a peer's output."""
MAX_PEERS = 64
MAX_FILE_BYTES = 2**17
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 3.0, 60.0
"""Between two calls of a place where nobody answers."""


class PeerstoreEntry(BaseModel):
    """One peer, as last seen."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    peer_id: PeerId
    addresses: Annotated[tuple[Address, ...], Field(max_length=4)]
    seen: Seconds
    """Unix time."""


class Peerstore:
    """The peers seen last, at most 64, in a file that is whole at any time.

    What others say of themselves is checked before it is kept, and what the file says before it is used: it is a cache,
    so a damaged one counts as empty.

    Args:
        path: The file; None keeps nothing for the next start.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._peers = {peer.peer_id: peer for peer in _load(path)} if path is not None else {}

    def __len__(self) -> int:
        return len(self._peers)

    def addresses(self) -> dict[str, tuple[str, ...]]:
        """Return addresses by peer id, of those seen last first."""
        newest = sorted(self._peers.values(), key=lambda peer: -peer.seen)
        return {peer.peer_id: peer.addresses for peer in newest}

    def note(self, contacts: Mapping[str, Iterable[str]]) -> None:
        """Take note of what peers that are here say of their addresses; those seen longest ago make room."""
        before = self._peers
        for peer, addresses in contacts.items():
            if (
                usable := tuple(
                    address
                    for address in addresses
                    if leads_to(address, peer)  # guard: address-names-peer
                )[:4]
            ):
                self._peers = {**self._peers, peer: PeerstoreEntry(peer_id=peer, addresses=usable, seen=time.time())}
        newest = sorted(self._peers.values(), key=lambda peer: -peer.seen)[:MAX_PEERS]
        self._peers = {peer.peer_id: peer for peer in newest}
        if self._path is not None and self._peers != before:
            self._save(newest)

    def _save(self, peers: Sequence[PeerstoreEntry]) -> None:
        assert self._path is not None
        try:
            with write_atomic(self._path, durable=False) as file:
                file.write(json.dumps([peer.model_dump(mode="json") for peer in peers], indent=1).encode())
        except OSError as error:  # a full disk must not end a peer that can train without this file
            log.warning("cannot keep the known peers in %s: %s", self._path, error.strerror)


class DialBackoff:
    """How often places where nobody answers are called: ever less, whoever names them.

    A stranger's record may name a third machine. However many do, each place is called once at a time, and, as long as
    nobody answers there, after pauses that double.
    """

    def __init__(self) -> None:
        self._pauses: dict[str, float] = {}
        self._not_before: dict[str, float] = {}

    def due(self, peers: Mapping[str, Iterable[str]], now: float) -> dict[str, list[str]]:
        """Return the addresses, by peer, that may be called now, and count them as called.

        Args:
            peers: Addresses by peer.
            now: Monotonic seconds.
        """
        due: dict[str, list[str]] = {}
        for peer, addresses in peers.items():
            for address in addresses:
                place = _place_of(address)
                if self._not_before.get(place, now) > now:  # guard: third-machine
                    continue
                pause = min(2 * self._pauses.get(place, MIN_PAUSE_SECONDS / 2), MAX_PAUSE_SECONDS)
                self._pauses[place] = pause
                self._not_before[place] = now + pause
                due.setdefault(peer, []).append(address)
        for place in [place for place, then in self._not_before.items() if then < now - MAX_PAUSE_SECONDS]:
            del self._pauses[place], self._not_before[place]
        return due

    def answered(self, addresses: Iterable[str]) -> None:
        """Forget what was tried in vain, since whoever names these addresses is connected."""
        for place in map(_place_of, addresses):
            self._pauses.pop(place, None)
            self._not_before.pop(place, None)


def _place_of(address: str) -> str:
    return address.rsplit("/p2p/", 1)[0]


def leads_to(address: str, peer: str) -> bool:
    """Tell whether this is a multiaddr of that peer."""
    try:
        parsed = Multiaddr(address)
    except Exception:  # noqa: BLE001 - the parser raises a dozen types; all mean "no"
        return False
    return str(parsed).rsplit("/p2p/", 1)[-1] == peer


def _load(path: Path) -> list[PeerstoreEntry]:
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError("too large")
        peers = TypeAdapter(list[PeerstoreEntry]).validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s cannot be used (%s); going on without known peers", path, str(error).splitlines()[0])
        return []
    return [peer for peer in peers if all(leads_to(address, peer.peer_id) for address in peer.addresses)][:MAX_PEERS]
