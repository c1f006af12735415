"""A peer's records in the DHT: it renews its own, reads everybody's, and knows from them in whose company it is."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.records import Archived, Claim, Contact, Metrics, Record

log = logging.getLogger(__name__)

REPORT_SECONDS = 300.0
"""Lifetime of a metrics record: long enough for a monitor that was away for some rounds."""
POLL_SECONDS = 1.0
SAY_SECONDS = 20.0
STOP_SECONDS = 1.0


class Membership:
    """The records of one peer and of all others, as this peer last read them.

    Args:
        node: The peer's DHT.
    """

    def __init__(self, node: Node) -> None:
        self.live_peers: frozenset[str] = frozenset()
        """The others who took part when any were last heard of, without those who have said goodbye."""
        self.guests: GuestList | None = None
        """Who may take part; None for everybody."""
        self._refused: frozenset[str] = frozenset()
        self._node = node
        self._rounds = RoundConfig()
        self._renewed: dict[type[Record], Record] = {}
        self._renewing = threading.Lock()
        self._last_read: dict[type[Record], Mapping[str, Record]] = {}
        self._untaken: frozenset[type[Record]] = frozenset()
        self.stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def start(self, rounds: RoundConfig) -> None:
        """Begin to renew records, as often as the run says."""
        self._rounds = rounds
        self._heart.start()

    def stop(self) -> None:
        """Renew no more, and let nobody wait any longer. Idempotent."""
        self.stopped.set()
        if self._heart.is_alive():
            self._heart.join(STOP_SECONDS)

    def expect(self, peers: Collection[str]) -> None:
        """Count peers as company that this one was with before a restart."""
        self.live_peers = frozenset(peers) - {self._node.peer_id}

    def announce(self, *records: Record) -> None:
        """Store records and keep renewing the latest of each kind; a claim shows this peer's invite."""
        for record in records:
            if isinstance(record, Claim) and self.guests is not None:
                record = record.model_copy(update={"invite": self.guests.shown})
            with self._renewing:
                self._renewed[type(record)] = record
                self._store(record, self._rounds.lease_seconds)

    def declare(self, record: Record) -> None:
        """Store a record with the next heartbeat, and keep renewing it."""
        self._renewed[type(record)] = record

    def report(self, record: Metrics | Archived) -> None:
        """Store a record once."""
        self._store(record, REPORT_SECONDS)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return everybody's unexpired records of a kind, by peer id; what they last were where the DHT is slow."""
        try:
            found = self._admitted(kind, self._node.read(kind))
            self._last_read[kind] = found
        except OSError:  # a timeout, or its process has gone
            log.warning("the DHT took too long to read %s records; going by what it said before", kind.kind)
            return self._last_read.get(kind, {})
        if kind is Claim:
            self.live_peers = live_peers_of(self.live_peers, found, self._node.peer_id)
        return found

    def _admitted(self, kind: type[Record], records: Mapping[str, Any]) -> Mapping[str, Any]:
        if self.guests is None or kind is not Claim:
            return records
        refused = self.guests.refusals({peer: claim.invite for peer, claim in records.items()}, get_dht_time())
        for peer in sorted(refused.keys() - self._refused):
            log.warning("this run is closed: %s, and is not counted", refused[peer])
            if peer == self._node.peer_id:
                log.error("what this peer trains no longer counts; start it again with another --invite and --resume")
        self._refused = frozenset(refused)
        return {peer: claim for peer, claim in records.items() if peer not in refused}

    def last_read(self, kind: type[Record]) -> Mapping[str, Record]:
        """Return what `read` last returned."""
        return self._last_read.get(kind, {})

    def wait_for_live_peers(self, round: int, watchdog: Watchdog) -> None:
        """Return when somebody takes part again, or the swarm is closed; say meanwhile what this peer is doing.

        Whether the others are gone or only the way to them, nobody can tell from here; who trained on alone would have
        split the run in two.

        Args:
            round: What this peer has committed.
            watchdog: Calls those who are known.
        """
        began, told = time.monotonic(), -math.inf
        while not self.stopped.wait(POLL_SECONDS):
            claims = self.read(Claim)
            if any(c.state == "active" and peer != self._node.peer_id for peer, c in claims.items()):  # type: ignore[attr-defined]
                return
            if time.monotonic() - told < SAY_SECONDS:
                continue
            told = time.monotonic()
            log.warning(
                "the swarm is out of reach since %.0f s; keeping round %d, trying %d known addresses (start again with "
                "--resume --alone to train without the others)",
                *(max(told - began, watchdog.seconds_alone), round, self._node.num_addresses()),
            )

    def _store(self, record: Record, lifetime_seconds: float) -> None:
        try:
            is_taken = self._node.store(record, lifetime_seconds)
            if not is_taken and self.live_peers and not self._untaken:
                log.warning("nobody took our %s record; records are renewed until somebody does", record.kind)
            self._untaken = self._untaken - {type(record)} if is_taken else self._untaken | {type(record)}
        except OSError:
            log.warning("the DHT took too long to store our %s record; it is renewed in a while", record.kind)

    def _beat(self) -> None:
        while not self.stopped.wait(self._rounds.heartbeat_seconds):
            for kind in list(self._renewed):
                # Under the lock, or what was true before would outlive an announcement made meanwhile.
                with self._renewing:
                    self._store(self._renewed[kind], self._rounds.lease_seconds)
            contacts = {peer: record for peer, record in self.read(Contact).items() if peer != self._node.peer_id}
            self._node.peerstore.update({peer: record.addresses for peer, record in contacts.items()})  # type: ignore[attr-defined]


def live_peers_of(company: Collection[str], claims: Mapping[str, Claim], me: str) -> frozenset[str]:
    """Return in whose company a peer is.

    Who is killed or cut off is missed: its claim ends without a word. Who leaves says so: from then on it can train no
    slot.

    Args:
        company: In whose it was.
        claims: All that have not expired.
        me: The peer.
    """
    active = {peer for peer, claim in claims.items() if claim.state == "active" and peer != me}
    gone = {peer for peer, claim in claims.items() if claim.max_slots == 0}
    return frozenset((active or set(company)) - gone)
