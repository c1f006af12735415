"""The swarm over Hivemind: DHT records, one matchmaking per round, versions over libp2p streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

from hivemind.utils.timed_storage import get_dht_time
from torch import Tensor

from spes_p2p import __version__
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.averager import SparseAverager
from spes_p2p.swarm.averaging.encoding import DeltaEncoding, Vectors
from spes_p2p.swarm.averaging.outcome import ATTEMPTS, Attempt, alone, averaged_bytes, decide_outcome, prepare
from spes_p2p.swarm.bans import Bans
from spes_p2p.swarm.exchange.exchange import Exchange
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import CodecKind, Version
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.names import SHARED, AnyName, VectorName, slot_ranges
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.reachability import DialBack
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.quorum import quorum
from spes_p2p.swarm.records import Archived, Claim, Contact, Metrics, Record, Seed, serving
from spes_p2p.swarm.roster import Member, Roster

log = logging.getLogger(__name__)

MAX_NAMED = 8
"""Silent peers that a warning names; the others are counted."""


class HivemindSwarm:
    """A peer's swarm over a Node; implements `Swarm`.

    Start it before CUDA and before threads that hold locks: the averager is a forked process.

    Args:
        node: This peer's host and DHT node; closed with the swarm.
        directory: Directory of this peer's versions.
        serve: Whether to serve versions to other peers.
        uplink_mbit: Upload limit in 10^6 bits per second; None for no limit.
        trains_alone: Whether to commit rounds alone after all live peers have vanished without leaving.
    """

    def __init__(
        self,
        node: Node,
        directory: Path,
        *,
        serve: bool = True,
        uplink_mbit: float | None = None,
        trains_alone: bool = False,
    ) -> None:
        self.node = node
        self.peer_id = node.peer_id
        self.watchdog = Watchdog(node)
        self.bans = Bans()
        self._store = VersionStore(directory, node.run_id)
        self.exchange = Exchange(node, self._store, serve=serve, uplink_mbit=uplink_mbit)
        self._averager: SparseAverager | None = None
        self._uplink_mbit = uplink_mbit
        self._trains_alone = trains_alone
        self._rounds = RoundConfig()
        self._vectors = Vectors()
        self._encoding = DeltaEncoding({})
        self._averaged_bytes = 0
        self._reserved_at = time.monotonic()
        self._dial_back = DialBack(node)
        self._membership = Membership(node)
        if not node.has_met_peers:
            self._membership.expect(node.peerstore.addresses())

    def enter(self, rounds: RoundConfig, vectors: Vectors, *, max_slots: int, guests: GuestList | None = None) -> None:
        """Prepare for the run's rounds once its manifest is known, and start renewing records.

        Args:
            rounds: The run's round settings.
            vectors: The vectors that the run averages and publishes.
            max_slots: Largest number of slots that this peer may hold; 0 for a monitor, which does not average.
            guests: The invite list of a closed run.
        """
        self._rounds = rounds
        self._vectors = vectors
        self._encoding = DeltaEncoding(vectors.segments)
        self._membership.guests = guests
        self._store.keep_only(vectors.names)  # guard: strange-on-disk
        self._store.refused.initial = vectors.initial
        self.exchange.accept_formats(vectors.formats)
        if (step := vectors.advance) is not None:
            encoding = self._encoding
            sizes = {kind: encoding.delta_bytes(kind) for kind in vectors.segments if encoding.delta_bytes(kind)}

            def advance(name: str, bundle: Tensor, delta: bytes) -> Tensor:
                return step(VectorName(name), bundle, encoding.decode_delta(name, delta))

            self.exchange.accept_deltas(advance, sizes, vectors.keyframe_rounds)
        if max_slots:
            self._averager = SparseAverager(
                self.node.dht,
                run_id=self.node.run_id,
                encoding=self._encoding,
                max_slots=max_slots,
                deadlines=rounds,
                uplink_mbit=self._uplink_mbit,
                guests=guests,
            )
            self._averager.run_in_background(timeout=rounds.averaging_seconds)
        self.watchdog.start()
        self._membership.start(rounds)
        self._membership.announce(Contact(peer_id=self.peer_id, addresses=self.node.contacts(), software=__version__))

    def can_be_called(self) -> bool:
        """Tell whether other peers can dial this one; True if no peer could be asked."""
        return self._dial_back.is_reachable(self.node.initial_peers())

    # ------------------------------------------------------------------ records

    def now(self) -> float:
        return get_dht_time()

    def announce(self, *records: Record) -> None:
        self._membership.announce(*records)

    def report(self, record: Metrics | Archived) -> None:
        self._membership.report(record)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        return self._membership.read(kind)

    def wait(self, seconds: float) -> bool:
        return self._membership.stopped.wait(seconds)

    # ------------------------------------------------------------------ rounds

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        """Average, and once more without the lost members if `shared` failed, so that only they lose their work."""
        if expected <= 1 and self._membership.live_peers and not self._trains_alone:
            self._membership.wait_for_live_peers(contribution.member.round, self.watchdog)
            reason = "the swarm was out of reach"
            return RoundResult(Roster([contribution.member]), dropped=dict.fromkeys(contribution.deltas, reason))
        invite = self._membership.guests.shown if self._membership.guests is not None else ""
        contribution = prepare(contribution, expected, calls_only=self.node.client_mode, invite=invite)
        contribution = self.bans.add_votes(contribution, self._membership.last_read(Claim))
        self._reserve_uplink()
        member, encode = self._encoding.entry(contribution), self._encoding.encoder(contribution)
        attempt, result = self._average_once(contribution, member, encode, expected, starts_at)
        evidence = [attempt.evidence]
        for _ in range(ATTEMPTS - 1):
            if SHARED in result.committed or result.is_behind or not attempt.roster or not member.tokens:
                break
            log.warning("round %d: %s; trying again", member.round + 1, result.dropped[SHARED])
            expected = max(1, expected - len(attempt.lost - {self.peer_id}))
            if expected == 1 and self._membership.live_peers and not self._trains_alone:
                break  # this peer cannot tell whether it is lost or the others are, so it commits nothing alone
            if expected > 1 and attempt.roster.without(attempt.lost).missing_quorum:
                break
            attempt, result = self._average_once(contribution, member, encode, expected, self.now(), True)
            evidence.append(attempt.evidence)
        self.bans.record(member.round, evidence)
        self.bans.count_round(result)
        self._keep_residuals(attempt, result)
        self._averaged_bytes += averaged_bytes(result, self._encoding)
        if SHARED not in result.committed:
            self.exchange.release()
        return result

    def _keep_residuals(self, attempt: Attempt, result: RoundResult) -> None:
        """Keep the rounding errors of what was committed; discard all if the anchors are about to be replaced."""
        if result.is_behind:
            self._encoding.forget()
        else:
            self._encoding.commit(result.committed)
        if self._averager is not None:
            if result.is_behind:
                self._averager.buffers.reset_residuals()
            committed = {name: residual for name, residual in attempt.residuals.items() if name in result.committed}
            self._averager.buffers.keep_residuals(committed)

    def _reserve_uplink(self) -> None:
        """Serve only members until the round is synchronised, but half of the time at most, so that others get some."""
        members = [peer for peer, claim in self._membership.last_read(Claim).items() if claim.state == "active"]  # type: ignore[attr-defined]
        began, self._reserved_at = self._reserved_at, time.monotonic()
        longest = self._rounds.averaging_seconds + self._rounds.exchange_seconds
        self.exchange.reserve_for(members, min(longest, (self._reserved_at - began) / 2))

    def _average_once(
        self,
        contribution: Contribution,
        member: Member,
        encode: Callable[[], tuple[Member, Mapping[VectorName, Tensor]]],
        expected: int,
        starts_at: float,
        is_redone: bool = False,
    ) -> tuple[Attempt, RoundResult]:
        if expected <= 1:
            attempt = alone(*encode())
        else:
            assert self._averager is not None
            least = max(2, quorum(member.electorate))
            attempt = self._averager.attempt(
                member, encode, expected=expected, least=least, starts_at=starts_at, is_redone=is_redone
            )
        for peer, reason in attempt.refused.items():
            log.warning("round %d: refused %s: %s", member.round + 1, peer[-6:], reason)
        return attempt, decide_outcome(attempt, contribution, self._encoding)

    def residuals(self) -> Mapping[str, Tensor]:
        return self._encoding.residuals()

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self._encoding.restore_residuals(residuals)

    # ------------------------------------------------------------------ versions

    def publish(
        self, round: int, bundles: Mapping[VectorName, Tensor], deltas: Mapping[VectorName, bytes] | None = None
    ) -> Mapping[VectorName, Version]:
        vectors = self._vectors
        items = {name: (vectors.encode(name, flat_N), vectors.codec(name)) for name, flat_N in bundles.items()}
        return self._publish(round, items, deltas or {})

    def publish_document(self, name: str, data: bytes, round: int = 0) -> Version:
        """Serve a document (`manifest`, `tokenizer`) as it is; of its author's, that of the latest round counts."""
        return self._publish(round, {name: (data, "raw")}, {})[name]

    def _publish(
        self,
        round: int,
        items: Mapping[AnyName, tuple[bytes | memoryview, CodecKind]],
        deltas: Mapping[AnyName, bytes],
    ) -> dict[AnyName, Version]:
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
        """Announce the versions that this peer serves with the next heartbeat."""
        if self.exchange.serves:
            self._membership.declare(Seed.of(self.peer_id, {n: v.round for n, v in self.versions().items()}))

    def seeds(self) -> Mapping[str, Sequence[str]]:
        return serving({peer: seed for peer, seed in self.read(Seed).items() if peer != self.peer_id})  # type: ignore[misc]

    def versions(self) -> Mapping[str, Version]:
        return self._store.newest()

    def rollback(self, files: Mapping[Path, Version]) -> None:
        self._store.restore(files)
        self._store.keep_only(self._vectors.names)  # guard: strange-checkpoint
        self._declare()

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        return self._vectors.decode(name, self._store.read(name, before=before))

    def refuse(self, name: VectorName, suspects: Mapping[str, str]) -> None:
        version = self._store.newest()[name]
        self._store.refuse(version)
        self._declare()
        self.bans.suspect(version.round - 1, suspects)

    def load_document(self, name: str) -> bytes:
        """Return a document that this peer pulled or published."""
        return self._store.read(name)

    def pull(
        self,
        wanted: Mapping[VectorName, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        relays: Mapping[VectorName, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
        authors: Mapping[VectorName, Collection[str]] | None = None,
    ) -> Mapping[VectorName, str]:
        unknown = self._vectors.unknown(wanted)  # guard: strange-pull
        wanted = {name: peers for name, peers in wanted.items() if name not in unknown}
        limits = {name: self._vectors.num_bytes(name) for name in wanted}
        pull = partial(self.exchange.pull, min_round=min_round, timeout=timeout, max_bytes=limits)
        try:
            return unknown | pull(wanted, relays=relays, uplinks=uplinks, authors=authors)
        finally:
            self.exchange.release()
            self._declare()

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        found = self.exchange.inventory(peers)
        if silent := sorted(set(peers) - found.keys()):
            claims: Mapping[str, Claim] = self._membership.last_read(Claim)  # type: ignore[assignment]
            slots = sorted({slot for peer in silent if peer in claims for slot in claims[peer].slots})
            shown = ", ".join(peer[-6:] for peer in silent[:MAX_NAMED]) + ("..." if len(silent) > MAX_NAMED else "")
            log.warning(
                "%d of %d peers claim slots %s but do not list their versions: %s",
                *(len(silent), len(peers), slot_ranges(slots), shown),
            )
        return found

    def traffic(self) -> tuple[int, int]:
        return self.exchange.bytes_in + self._averaged_bytes, self.exchange.bytes_out + self._averaged_bytes

    def close(self) -> None:
        self._membership.stop()
        self.watchdog.stop()
        if self._averager is not None and self._averager.is_alive():
            (self._averager.shutdown if self.node.p2p.is_running() else self._averager.terminate)()
        self.node.close()
