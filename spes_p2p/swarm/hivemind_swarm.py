"""The swarm over Hivemind: DHT records, one matchmaking per round, versions over libp2p streams."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p.codecs import from_bytes, to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averager import SparseAverager
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.exchange import Exchange
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.outcome import alone, averaged_bytes, judge
from spes_p2p.swarm.records import Archived, Claim, Metrics, Record
from spes_p2p.swarm.roster import SHARED, kind_of
from spes_p2p.swarm.versions import DOCUMENTS, Version, VersionStore

log = logging.getLogger(__name__)

REPORT_SECONDS = 300.0
"""Lifetime of a metrics record: long enough for a monitor that was away for some rounds."""
ATTEMPTS = 2
DOCUMENT_BYTES = 64 * 2**20


class HivemindSwarm:
    """A peer's swarm over a Node; implements `Swarm`.

    Start it before CUDA and before threads that hold locks: the averager is a forked process.

    Args:
        node: The peer's host and DHT; closed with the swarm.
        directory: Where versions are kept.
        serve: Serve versions to others.
    """

    def __init__(self, node: Node, directory: Path, *, serve: bool = True) -> None:
        self.node, self.peer_id = node, node.peer_id
        self._store = VersionStore(directory, node.run_id)
        self.exchange = Exchange(node, self._store, serve=serve)
        self._averager: SparseAverager | None = None
        self._rounds = RoundConfig()
        self._bundle_numel: Mapping[str, int] = {}
        self._averaged_bytes = 0
        self._renewed: dict[type[Record], Record] = {}
        self._renewing = threading.Lock()
        self._last_read: dict[type[Record], Mapping[str, Record]] = {}
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def enter(
        self, rounds: RoundConfig, *, bundle_numel: Mapping[str, int], averaged_numel: Mapping[str, int], max_slots: int
    ) -> None:
        """Become able to average, once the run's manifest is known, and start renewing records.

        Args:
            rounds: The run's deadlines.
            bundle_numel: Elements of a published vector, by kind: `shared`, `slot`, and of their moments.
            averaged_numel: Elements of what a group averages, for `shared` and for `slot`.
            max_slots: Slots this peer may ever hold at once; 0 with `averaged_numel` empty for a monitor.
        """
        self._rounds, self._bundle_numel = rounds, bundle_numel
        if averaged_numel:
            self._averager = SparseAverager(
                self.node.dht,
                run_id=self.node.run_id,
                shared_numel=averaged_numel[SHARED],
                slot_numel=averaged_numel["slot"],
                max_slots=max_slots,
                deadlines=rounds,
            )
            self._averager.run_in_background(timeout=rounds.averaging_seconds)
        self._heart.start()

    # ------------------------------------------------------------------ records

    def now(self) -> float:
        return get_dht_time()

    def announce(self, *records: Record) -> None:
        for record in records:
            with self._renewing:
                self._renewed[type(record)] = record
                self._store_record(record, self._rounds.lease_seconds)

    def report(self, record: Metrics | Archived) -> None:
        self._store_record(record, REPORT_SECONDS)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        try:
            self._last_read[kind] = self.node.read(kind)
        except TimeoutError:
            log.warning("the DHT took too long to read %s records; going by what it said before", kind.kind)
        return self._last_read.get(kind, {})

    def wait(self, seconds: float) -> bool:
        """Wait, for records of others to change; return at once, and True, when the swarm is closed."""
        return self._stopped.wait(seconds)

    def _store_record(self, record: Record, lifetime_seconds: float) -> None:
        try:
            is_alone = not set(self._last_read.get(Claim, ())) - {self.peer_id}
            if not self.node.store(record, lifetime_seconds) and not is_alone:
                log.warning("nobody took our %s record; it is renewed in a while", record.kind)
        except TimeoutError:
            log.warning("the DHT took too long to store our %s record; it is renewed in a while", record.kind)

    def _beat(self) -> None:
        while not self._stopped.wait(self._rounds.heartbeat_seconds):
            for kind in list(self._renewed):
                # Under the lock, or what was true before would outlive an announcement made meanwhile.
                with self._renewing:
                    self._store_record(self._renewed[kind], self._rounds.lease_seconds)

    # ------------------------------------------------------------------ rounds

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        """Average, once more if `shared` failed: a dead member costs its own work, not everybody's."""
        assert self._averager is not None
        member = contribution.member
        if expected <= 1:
            return judge(alone(contribution), contribution, expected)
        for remaining in reversed(range(ATTEMPTS)):
            attempt = self._averager.attempt(member, contribution.deltas, expected=expected, starts_at=starts_at)
            result = judge(attempt, contribution, expected)
            if SHARED in result.committed or result.is_behind or not attempt.roster or not member.tokens:
                break
            if remaining:
                log.warning("round %d: %s; trying again", member.round, result.dropped[SHARED])
            starts_at = self.now()
        self._averaged_bytes += averaged_bytes(result, contribution)
        return result

    # ------------------------------------------------------------------ versions

    def publish(self, round: int, bundles: Mapping[str, Tensor]) -> Mapping[str, Version]:
        items = {name: (to_bytes(flat_N), "fp32") for name, flat_N in bundles.items()}
        return self._publish(round, items)

    def publish_document(self, name: str, data: bytes) -> Version:
        """Serve a document (`manifest`, `tokenizer`) as it is."""
        return self._publish(0, {name: (data, "raw")})[name]

    def _publish(self, round: int, items) -> Mapping[str, Version]:
        signed = {
            name: (Version.sign(self.node.identity, self.node.run_id, name, round, data, codec), data)
            for name, (data, codec) in items.items()
        }
        self._store.add(signed)
        return {name: version for name, (version, _) in signed.items()}

    def versions(self) -> Mapping[str, Version]:
        return self._store.newest()

    def load(self, name: str) -> Tensor:
        numel = self._bundle_numel[kind_of(name)]
        return from_bytes(self._store.read(name), numel)

    def load_document(self, name: str) -> bytes:
        """Return a document that was pulled or published."""
        return self._store.read(name)

    def pull(self, wanted: Mapping[str, Sequence[str]], *, min_round: int, timeout: float) -> Mapping[str, str]:
        limits = {
            name: DOCUMENT_BYTES if name in DOCUMENTS else 4 * self._bundle_numel[kind_of(name)] for name in wanted
        }
        return self.exchange.pull(wanted, min_round=min_round, timeout=timeout, max_bytes=limits)

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        return self.exchange.inventory(peers)

    def traffic(self) -> tuple[int, int]:
        return self.exchange.bytes_in + self._averaged_bytes, self.exchange.bytes_out + self._averaged_bytes

    def close(self) -> None:
        self._stopped.set()
        if self._averager is not None and self._averager.is_alive():
            self._averager.shutdown()
        self.node.close()
