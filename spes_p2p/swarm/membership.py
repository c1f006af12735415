"""Membership: this peer renews its records in the DHT, reads those of the others, and derives which peers are live."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.records import Claim, Contact, Metrics, Record

log = logging.getLogger(__name__)

REPORT_SECONDS = 300.0
"""Lifetime of a metrics record: long enough for a monitor that was away for some rounds."""
STOP_SECONDS = 1.0


class Membership:
    """The records of this peer, and those of all others as last read.

    Attributes:
        live_peers: The other active peers when any were last seen, without those that left on purpose. At first those
            that were known before a restart.
        guests: Checks invites; None where none is asked for.
        is_stopped: `stop` was called.
    """

    def __init__(self, network: Network) -> None:
        self.live_peers: frozenset[str] = frozenset()
        self.guests: GuestList | None = None
        self.is_stopped = False
        self._network = network
        self._stop = asyncio.Event()
        """Ends, in the network's loop, what waits there."""
        self._rounds = RoundConfig()
        self._beat: Callable[[], None] = lambda: None
        self._refused: frozenset[str] = frozenset()
        self._renewed: dict[type[Record], Record] = {}
        self._renewing = threading.Lock()
        self._last_read: dict[type[Record], Mapping[str, Record]] = {}
        self._failures: dict[type[Record], int] = {}
        """Attempts in a row after which no peer had stored a record."""
        self._heartbeat: asyncio.Task[None] | None = None

    def start(self, rounds: RoundConfig, beat: Callable[[], None] = lambda: None) -> None:
        """Begin to renew records at the run's heartbeat, and call `beat` after each renewal."""
        self._rounds = rounds
        self._beat = beat
        self._network.notify(self._begin)

    def _begin(self) -> None:
        self._heartbeat = asyncio.get_running_loop().create_task(self._renew())

    def stop(self) -> None:
        """Stop renewing records, and end all waits. Idempotent."""
        self.is_stopped = True
        self._network.notify(self._stop.set)
        if self._heartbeat is not None and not self._heartbeat.done():
            with contextlib.suppress(TimeoutError):
                self._network.run(asyncio.wait([self._heartbeat]), STOP_SECONDS)

    def wait(self, seconds: float) -> bool:
        """Wait so long, or until `stop` is called; return whether it was."""
        if not self.is_stopped:
            with contextlib.suppress(TimeoutError):  # this machine stood still
                self._network.run(self._pause(seconds), seconds + STOP_SECONDS)
        return self.is_stopped

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._stop.wait()

    def announce(self, *records: Record) -> None:
        """Store records and keep renewing the latest of each kind; a claim carries this peer's invite."""
        for record in records:
            if isinstance(record, Claim) and self.guests is not None:
                record = record.model_copy(update={"invite": self.guests.shown})
            with self._renewing:
                self._renewed[type(record)] = record
                self._store(record, self._rounds.lease_seconds)

    def report(self, record: Metrics) -> None:
        """Store a record once."""
        self._store(record, REPORT_SECONDS)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the unexpired records of a kind, by peer id; the last known ones if the DHT is too slow."""
        try:
            return self.read_now(kind)
        except OSError:
            log.warning("the DHT took too long to read %s records; using those of the last read", kind.kind)
            return self._last_read.get(kind, {})

    def read_now(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the unexpired records of a kind, by peer id.

        Raises:
            OSError: the DHT is too slow, or its process has ended.
        """
        found = self._last_read[kind] = self._admitted(kind, self._network.read(kind))
        if kind is Claim:
            self.live_peers = live_peers_of(self.live_peers, found, self._network.peer_id)
        return found

    def _admitted(self, kind: type[Record], records: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.guests is None or kind is not Claim:
            return records
        refused = self.guests.refusals({peer: claim.invite for peer, claim in records.items()}, self._network.now())
        for peer in sorted(refused.keys() - self._refused):
            log.warning("this run is closed: %s, and is not counted", refused[peer])
            if peer == self._network.peer_id:
                log.error("what this peer trains no longer counts; start it again with another --invite and --resume")
        self._refused = frozenset(refused)
        return {peer: claim for peer, claim in records.items() if peer not in refused}

    def last_read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return the result of the last `read`."""
        return self._last_read.get(kind, {})

    def _store(self, record: Record, lifetime_seconds: float) -> None:
        try:
            is_stored = self._network.store(record, lifetime_seconds)
            failures = self._failures[type(record)] = 0 if is_stored else self._failures.get(type(record), 0) + 1
            if failures == 2 and self.live_peers:  # while peers find each other, the first attempt may fail
                words = "no peer stored our %s record, twice in a row; it is renewed until one does"
                log.warning(words, record.kind, extra={"heals": True})
        except OSError:
            log.warning("the DHT took too long to store our %s record; it is renewed with the heartbeat", record.kind)

    async def _renew(self) -> None:
        while True:
            await self._pause(self._rounds.heartbeat_seconds)
            if self.is_stopped:
                return
            try:
                await asyncio.to_thread(self._renew_now)
            except Exception:  # of any type: the peer would be forgotten  # guard: Exception -> OSError
                log.exception("a heartbeat failed; the next one is in %.0f s", self._rounds.heartbeat_seconds)

    def _renew_now(self) -> None:
        for kind in list(self._renewed):
            if self.is_stopped:  # the DHT may have died, and each record would take its time
                return
            with self._renewing:  # otherwise an old record could replace one announced meanwhile
                self._store(self._renewed[kind], self._rounds.lease_seconds)
        self.read(Contact)
        self._beat()


def live_peers_of(known: Collection[str], claims: Mapping[str, Claim], me: str) -> frozenset[str]:
    """Return the other peers that are live; `known` were before.

    A peer that is killed or cut off stays live although its claim expires. A peer that leaves on purpose does not: its
    last claim says so.
    """
    active = {peer for peer, claim in claims.items() if claim.state == "active" and peer != me}
    left = {peer for peer, claim in claims.items() if claim.leaves}
    return frozenset((active or set(known)) - left)
