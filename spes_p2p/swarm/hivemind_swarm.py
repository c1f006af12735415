"""The swarm over Hivemind: DHT records, one matchmaking per round, versions over libp2p streams."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p.codecs import from_bytes, to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averager import SparseAverager
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.exchange import Exchange
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.outcome import Attempt, alone, averaged_bytes, judge
from spes_p2p.swarm.records import Archived, Claim, Metrics, Record, Seed
from spes_p2p.swarm.roster import SHARED, Member, kind_of
from spes_p2p.swarm.version_store import VersionStore
from spes_p2p.swarm.versions import DOCUMENTS, Version
from spes_p2p.swarm.wire import Vectors, Wire

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
        uplink_mbit: Most to send of them, in 10^6 bits per second; None holds nothing back.
    """

    def __init__(self, node: Node, directory: Path, *, serve: bool = True, uplink_mbit: float | None = None) -> None:
        self.node, self.peer_id = node, node.peer_id
        self._store = VersionStore(directory, node.run_id)
        self.exchange = Exchange(node, self._store, serve=serve, uplink_mbit=uplink_mbit)
        self._averager: SparseAverager | None = None
        self._rounds = RoundConfig()
        self._bundle_numel: Mapping[str, int] = {}
        self._wire = Wire({})
        self._averaged_bytes = 0
        self._renewed: dict[type[Record], Record] = {}
        self._renewing = threading.Lock()
        self._met: set[str] = set()
        self._last_read: dict[type[Record], Mapping[str, Record]] = {}
        self._reserved_at = time.monotonic()
        self._stopped = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    def enter(
        self,
        rounds: RoundConfig,
        vectors: Vectors,
        *,
        max_slots: int,
    ) -> None:
        """Become able to average, once the run's manifest is known, and start renewing records.

        Args:
            rounds: The run's deadlines.
            vectors: What the run averages and publishes.
            max_slots: Slots this peer may ever hold at once; 0 for a monitor, which averages nothing.
        """
        self._rounds, self._bundle_numel, self._wire = rounds, vectors.bundle_numel, Wire(vectors.segments)
        if (step := vectors.advance) is not None:
            wire = self._wire
            sizes = {kind: wire.delta_bytes(kind) for kind in vectors.segments if wire.delta_bytes(kind)}

            def advance(name: str, bundle: Tensor, delta: bytes) -> Tensor:
                return step(name, bundle, wire.decode_delta(name, delta))

            self.exchange.follow_deltas(advance, sizes, vectors.keyframe_rounds)
        if max_slots:
            self._averager = SparseAverager(
                self.node.dht,
                run_id=self.node.run_id,
                wire=self._wire,
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
            self.node.greet(self._met)
            for kind in list(self._renewed):
                # Under the lock, or what was true before would outlive an announcement made meanwhile.
                with self._renewing:
                    self._store_record(self._renewed[kind], self._rounds.lease_seconds)

    # ------------------------------------------------------------------ rounds

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        """Average, once more if `shared` failed: a dead member costs its own work, not everybody's."""
        self._put_off_strangers()
        member, encoded = self._wire.encode(contribution)
        attempt, result = self._average_once(contribution, member, encoded, expected, starts_at)
        for _ in range(ATTEMPTS - 1):
            if SHARED in result.committed or result.is_behind or not attempt.roster or not member.tokens:
                break
            log.warning("round %d: %s; trying again", member.round + 1, result.dropped[SHARED])
            expected = max(1, expected - len(attempt.lost))
            attempt, result = self._average_once(contribution, member, encoded, expected, self.now(), is_redone=True)
        if result.is_behind:
            self._wire.forget()
        else:
            self._wire.settle(result.committed)
        if self._averager is not None:
            if result.is_behind:
                self._averager.forget_errors()
            self._averager.keep_errors({name: left for name, left in attempt.left.items() if name in result.committed})
        self._averaged_bytes += averaged_bytes(result, self._wire)
        if SHARED not in result.committed:
            self.exchange.release()
        return result

    def _put_off_strangers(self) -> None:
        """Serve newcomers only after the round that is about to be synchronised, or in half of the time at least."""
        members = [peer for peer, claim in self._last_read.get(Claim, {}).items() if claim.state == "active"]  # type: ignore[attr-defined]
        began, self._reserved_at = self._reserved_at, time.monotonic()
        longest = self._rounds.averaging_seconds + self._rounds.exchange_seconds
        self.exchange.reserve_for(members, min(longest, (self._reserved_at - began) / 2))

    def _average_once(
        self,
        contribution: Contribution,
        member: Member,
        encoded: Mapping[str, Tensor],
        expected: int,
        starts_at: float,
        is_redone: bool = False,
    ) -> tuple[Attempt, RoundResult]:
        if expected <= 1:
            attempt = alone(member, encoded)
        else:
            assert self._averager is not None
            attempt = self._averager.attempt(
                member, encoded, expected=expected, starts_at=starts_at, is_redone=is_redone
            )
        if attempt.roster:
            self._met = {member.peer_id for member in attempt.roster}
        for peer, reason in attempt.refused.items():
            log.warning("round %d: refused %s: %s", member.round + 1, peer[-6:], reason)
        return attempt, judge(attempt, contribution, expected, self._wire)

    # ------------------------------------------------------------------ versions

    def publish(
        self, round: int, bundles: Mapping[str, Tensor], deltas: Mapping[str, bytes] | None = None
    ) -> Mapping[str, Version]:
        items = {name: (to_bytes(flat_N), "fp32") for name, flat_N in bundles.items()}
        return self._publish(round, items, deltas or {})

    def publish_document(self, name: str, data: bytes) -> Version:
        """Serve a document (`manifest`, `tokenizer`) as it is."""
        return self._publish(0, {name: (data, "raw")}, {})[name]

    def _publish(self, round: int, items, deltas: Mapping[str, bytes]) -> Mapping[str, Version]:
        old = {name: version.digest for name, version in self._store.newest().items() if name in deltas}
        sign = partial(Version.sign, self.node.identity, self.node.run_id)
        signed = {
            name: (sign(name, round, data, codec, old.get(name, "")), data) for name, (data, codec) in items.items()
        }
        for name, (version, _) in signed.items():
            if version.base:
                self._store.deltas.add(name, version.base, version.digest, deltas[name])
        self._store.add(signed)
        self._declare()
        return {name: version for name, (version, _) in signed.items()}

    def _declare(self) -> None:
        """Tell newcomers, with the next heartbeat, what this peer serves."""
        if self.exchange.serves:
            self._renewed[Seed] = Seed.of(self.peer_id, {n: v.round for n, v in self.versions().items()})

    def seeds(self) -> Mapping[str, Sequence[str]]:
        """Return the other peers that serve a version, by its name, those with the newest first."""
        found: dict[str, list[tuple[int, str]]] = {}
        for peer, record in self.read(Seed).items():
            for name, round in record.rounds().items() if peer != self.peer_id else ():  # type: ignore[attr-defined]
                found.setdefault(name, []).append((-round, peer))
        return {name: [peer for _, peer in sorted(peers)] for name, peers in found.items()}

    def versions(self) -> Mapping[str, Version]:
        return self._store.newest()

    def load(self, name: str) -> Tensor:
        numel = self._bundle_numel[kind_of(name)]
        return from_bytes(self._store.read(name), numel)

    def load_document(self, name: str) -> bytes:
        """Return a document that was pulled or published."""
        return self._store.read(name)

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        relays: Mapping[str, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
    ) -> Mapping[str, str]:
        limits = {
            name: DOCUMENT_BYTES if name in DOCUMENTS else 4 * self._bundle_numel[kind_of(name)] for name in wanted
        }
        try:
            return self.exchange.pull(
                wanted, min_round=min_round, timeout=timeout, max_bytes=limits, relays=relays, uplinks=uplinks
            )
        finally:
            self.exchange.release()
            self._declare()

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        return self.exchange.inventory(peers)

    def traffic(self) -> tuple[int, int]:
        return self.exchange.bytes_in + self._averaged_bytes, self.exchange.bytes_out + self._averaged_bytes

    def close(self) -> None:
        self._stopped.set()
        if self._averager is not None and self._averager.is_alive():
            self._averager.shutdown()
        self.node.close()
