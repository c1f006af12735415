"""The swarm without a network: peers of one process meet in a hub, with the real swarm's groups, means and digests."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import to_bytes
from spes_p2p.errors import ExchangeError, SimulationError
from spes_p2p.sim.hub import Entry, MemoryHub
from spes_p2p.swarm.averaging.encoding import DeltaEncoding, Vectors
from spes_p2p.swarm.averaging.outcome import Attempt, alone, averaged_bytes, means_of
from spes_p2p.swarm.bans import Bans
from spes_p2p.swarm.certificate import KNOWN_ROUNDS, Body, known_peers
from spes_p2p.swarm.exchange.fetch import ABSENT_SECONDS
from spes_p2p.swarm.exchange.versions import RefusedVersions, Version
from spes_p2p.swarm.interface import Contribution, RoundResult, Staged
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Record
from spes_p2p.swarm.roster import Member

MAX_FRUITLESS_ROUNDS = 20
"""Rounds dropped in a row after which the swarm counts as unable to continue."""

ATTEMPTS = 3
"""Attempts at a round after which its work is given up, and the round trained anew."""


class MemorySwarm:
    """One virtual peer's view of a hub; implements `Swarm`.

    Attributes:
        accused: Rounds and peers for which this peer has evidence.
    """

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self._hub = hub
        self.clock = hub.clock
        self.run_id = hub.run_id
        self.peer_id = peer_id
        self.bans = Bans()
        self.accused: set[tuple[int, str]] = set()
        self._mine: dict[VectorName, tuple[Version, Tensor]] = {}
        self._before: dict[VectorName, tuple[Version, Tensor]] = {}
        self._pulled_bytes = 0
        self._averaged_bytes = 0, 0
        self._encoding = DeltaEncoding({})
        self._errors: dict[VectorName, Tensor] = {}
        self._held: tuple[int, ...] = ()
        self._vectors = Vectors()
        self._fruitless = 0
        self._averaged = (RoundResult(), Attempt())
        self._closed = False
        self._answers = True
        self._refused = RefusedVersions()
        hub.bytes_out[peer_id] = 0
        hub.enter(peer_id)

    def now(self) -> float:
        return self.clock.now()

    # ------------------------------------------------------------------ records

    def announce(self, *records: Record) -> None:
        self._store(records, math.inf)

    def report(self, record: Record) -> None:
        self._store([record], self.now() + MAX_LIFETIME_SECONDS)

    def _store(self, records: Sequence[Record], expires_at: float) -> None:
        for record in records:
            self._hub.records.setdefault(type(record), {})[self.peer_id] = (record, expires_at)
        self.clock.notify_all()

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        now, stored = self.now(), self._hub.records.get(kind, {})
        return {peer: record for peer, (record, expires_at) in stored.items() if expires_at > now}

    def wait(self, seconds: float) -> bool:
        if not self._closed:
            self.clock.wait(seconds)
        return self._closed

    # ------------------------------------------------------------------ rounds

    def enter(self, vectors: Vectors) -> None:
        """Set the vectors that the run averages and publishes, before the first round."""
        self._encoding = DeltaEncoding(vectors.segments)
        self._vectors = vectors

    def last(self) -> Body:
        return self._hub.bodies[-1]

    def certified(self, round: int) -> Body | None:
        return self._hub.bodies[round] if round < len(self._hub.bodies) else None

    def known(self) -> Collection[str] | None:
        last = self.last()
        return known_peers(*self._hub.bodies[-KNOWN_ROUNDS:]) if last.round else None

    def catch_up(self) -> None:
        """Do nothing: all peers see the hub's certificates."""

    def agree(
        self,
        contribution: Contribution,
        stage: Callable[[RoundResult], Staged | None],
        *,
        expected: Collection[str],
        closes_from: float,
    ) -> Body | None:
        for _ in range(ATTEMPTS):
            self.wait(0.0)
            result = self.average(contribution, expected=len(expected), closes_from=closes_from)
            if (staged := stage(result)) is None:
                return None
            body = self.decide(result, *staged)
            if body is not None or self._closed or self.last().round > contribution.member.round:
                return body
            closes_from = self.now()
        return None

    def decide(self, result: RoundResult, digests: Mapping[VectorName, str], ends_at: float) -> Body | None:
        """Confirm what this peer would commit; return the round's body, None if another attempt has begun."""
        return self._hub.decide(self.peer_id, *self._open, result, digests, ends_at)

    def average(self, contribution: Contribution, *, expected: int, closes_from: float) -> RoundResult:
        last = self.last()
        self._open = last, self._hub.attempt
        votes = {"distrusts": self.bans.distrusted(last.round)}
        contribution = replace(contribution, member=contribution.member.model_copy(update=votes))
        member, encoded = self._encode(contribution)
        # `Averaging`, too, drops the residuals of all slots if others are held.
        if member.slots != self._held:
            self._errors = {name: error for name, error in self._errors.items() if name == SHARED}
            self._held = member.slots
        if expected <= 1:
            attempt = alone(member, last, encoded)
        else:
            patience = max(0.0, closes_from - self.now()) + self._hub.matchmaking_seconds
            entry = Entry(member, encoded, self._encoding, self._errors, self._lie(member.round))
            attempt = self._hub.meet(entry, expected, self.now() + patience)
            self.bans.record(last.round, attempt.evidence)
            self.accused |= {(last.round, peer) for peer in attempt.evidence}
        result = means_of(attempt, contribution, self._encoding)
        self._averaged = (result, attempt)
        received, sent = averaged_bytes(result, self.peer_id, self._encoding)
        self._averaged_bytes = self._averaged_bytes[0] + received, self._averaged_bytes[1] + sent
        self._fruitless = 0 if SHARED in result.means else self._fruitless + 1
        if self._fruitless >= MAX_FRUITLESS_ROUNDS:
            raise SimulationError(
                f"round {member.round + 1} was dropped {self._fruitless} times in a row: "
                f"{result.dropped.get(SHARED, 'no peer trained a token')}; lower run.train.lr if the loss diverged, "
                f"or see the attacks and events"
            )
        return result

    def settle(self, result: RoundResult, committed: Collection[VectorName]) -> None:
        averaged, attempt = self._averaged
        self._averaged = (RoundResult(), Attempt())  # whose means take memory
        if averaged is not result or SHARED not in committed:
            self._encoding.forget()
            self._errors.clear()
            return
        self._encoding.commit(committed)
        for name, (start, error) in attempt.residuals.items():
            if name in committed:
                self._errors[name][start : start + error.numel()] = error

    def leave(self) -> None:
        self._hub.leave(self.peer_id)

    def residuals(self) -> Mapping[str, PagedVector]:
        return self._encoding.feedback.residuals()

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self._encoding.feedback.restore(residuals)

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        return self._encoding.encode(contribution)

    def _lie(self, round: int) -> float | None:
        """Return by which factor the peer falsifies means in a round; None for an honest peer."""
        return None

    # ------------------------------------------------------------------ versions

    def publish(self, round: int, bundles: Mapping[VectorName, Tensor]) -> Mapping[VectorName, Version]:
        described = {name: Version.of(name, round, to_bytes(flat_N)) for name, flat_N in bundles.items()}
        self._keep({n: (described[n], self._hub.copy(flat_N, described[n].digest)) for n, flat_N in bundles.items()})
        return described

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, (version, _) in self._mine.items()}

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        kept = self._before if before else self._mine
        if name not in kept:
            raise ExchangeError(f"this peer has no version of {name}{' before its newest' if before else ''}")
        return kept[name][1].clone()

    def mapped(self, name: VectorName) -> PagedVector:
        return PagedVector.of(self._mine[name][1])

    def refuse(self, name: VectorName, suspects: Mapping[str, str], digest: str = "") -> None:
        round = self.last().round - 1
        if not digest:
            version, _ = self._mine[name]
            round, digest = version.round - 1, version.digest
            before = self._before.pop(name, None)
            self.delete(name)
            if before is not None:
                self._mine[name] = self._hub.bundles[self.peer_id][name] = before
        self._refused.add(digest)
        self.bans.suspect(round, suspects)
        self.accused |= {(round, peer) for peer in suspects}

    def delete(self, name: VectorName) -> None:
        for kept in (self._mine, self._before, self._hub.bundles.get(self.peer_id, {})):
            kept.pop(name, None)

    def pull(
        self, wanted: Mapping[VectorName, tuple[int, str]], peers: Sequence[str], *, timeout: float
    ) -> Mapping[VectorName, str]:
        deadline, failures = self.now() + min(timeout, ABSENT_SECONDS), self._vectors.unknown(wanted)
        for name, (_, wanted_digest) in wanted.items():
            if name in failures:
                continue
            is_refused = wanted_digest in self._refused
            peer = None if is_refused else self._wait_for(name, wanted_digest, peers, deadline)  # guard: memory-refused
            if peer is None:
                failures[name] = "no peer has it"
                continue
            found = self._hub.bundles[peer][name]
            have = self._mine[name][0].digest if name in self._mine else ""
            num_bytes = found[0].num_bytes if wanted_digest != have else 0
            self._pulled_bytes += num_bytes
            self._hub.bytes_out[peer] += num_bytes
            self._keep({name: found})
        return failures

    def _wait_for(self, name: VectorName, digest: str, peers: Sequence[str], deadline: float) -> str | None:
        """Return a peer with the version, of several the one that has sent least; None if none gets it in time."""
        while True:
            having = [p for p in peers if self._has(p, name) and self._hub.bundles[p][name][0].digest == digest]
            if having:
                return min(having, key=lambda peer: (self._hub.bytes_out[peer], peer))
            if self.now() >= deadline:
                return None
            self.clock.wait(deadline - self.now())

    def _has(self, peer: str, name: VectorName) -> bool:
        return name in self._hub.bundles.get(peer, {})

    def _keep(self, items: Mapping[VectorName, tuple[Version, Tensor]]) -> None:
        for name, (version, _) in items.items():
            if name in self._mine and self._mine[name][0].round != version.round:
                self._before[name] = self._mine[name]
        self._mine |= items
        if self._answers:
            self._hub.bundles.setdefault(self.peer_id, {}).update(items)
        self.clock.notify_all()

    def contacts(self) -> Collection[str]:
        return self._hub.bundles.keys() - {self.peer_id}

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        found = {peer: self._hub.bundles[peer].items() for peer in peers if peer in self._hub.bundles}
        return {
            p: {n: v for n, (v, _) in items if v.digest not in self._refused}  # guard: memory-inventory
            for p, items in found.items()
        }

    # ------------------------------------------------------------------ the end

    def traffic(self) -> tuple[int, int]:
        received, sent = self._averaged_bytes
        return self._pulled_bytes + received, self._hub.bytes_out[self.peer_id] + sent

    def close(self) -> None:
        """Leave: stop renewing and serving. Records live on for a lease, as in a real swarm."""
        if not self._closed:
            self._closed = True
            self._answers = False
            self._hub.end(self.peer_id)
            self._stop_serving()
            self.clock.notify_all()

    def pause(self, seconds: float) -> None:
        """Suspend the peer for a time, like a stopped process: no heartbeat, and no answer to pulls.

        A synchronisation beside the training goes on meanwhile.
        """
        bundles = self._hub.bundles.get(self.peer_id, {})
        renewed = {kind: of[self.peer_id] for kind, of in self._hub.records.items() if self.peer_id in of}
        self._stop_serving()
        self._answers = False
        self.clock.advance(seconds)
        self._answers = True
        self._hub.bundles[self.peer_id] = {**bundles, **self._mine}
        for kind, (record, until) in renewed.items():
            of_kind = self._hub.records[kind]
            if of_kind.get(self.peer_id, (record, until))[0] is record:
                of_kind[self.peer_id] = (record, until)
        self.clock.notify_all()

    def _stop_serving(self) -> None:
        """Serve nothing, and let the records expire that the heartbeat would renew."""
        expires_at = self.now() + self._hub.lease_seconds
        for records in self._hub.records.values():
            if self.peer_id in records:
                record, until = records[self.peer_id]
                records[self.peer_id] = (record, min(until, expires_at))
        self._hub.bundles.pop(self.peer_id, None)
