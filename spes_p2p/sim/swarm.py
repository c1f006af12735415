"""The swarm without a network: peers of one process meet in a hub, with the real swarm's groups, means and digests."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spes_p2p.codecs.format import Format
from spes_p2p.codecs.vectors import digest
from spes_p2p.errors import ExchangeError, SimulationError
from spes_p2p.sim.clock import VirtualClock
from spes_p2p.swarm.averaging.audit import Auditor, Evidence
from spes_p2p.swarm.averaging.encoding import DeltaEncoding, Vectors
from spes_p2p.swarm.averaging.outcome import Attempt, alone, averaged_bytes, decide_outcome, prepare
from spes_p2p.swarm.averaging.partition import GroupPlan, Message, bytes_of, decode_message, reduce_message
from spes_p2p.swarm.bans import Bans
from spes_p2p.swarm.exchange.versions import RefusedVersions, Version
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Claim, Record
from spes_p2p.swarm.roster import Member, Roster

Lie = Callable[[Format, Message, Tensor], Tensor]
"""Changes the encoded mean of a message that a dishonest peer reduces."""
MAX_FRUITLESS_ROUNDS = 20
"""Rounds dropped in a row after which the swarm counts as unable to continue."""


@dataclass(frozen=True)
class Entry:
    """A peer's input to a round's averaging.

    Attributes:
        member: The peer's roster entry.
        encoded: The peer's vectors in their encoding.
        encoding: The encoding of all vectors.
        errors: Rounding errors of the means that the peer has reduced so far, by group.
        lie: Set for a dishonest peer, which accuses no other; None for an honest one.
    """

    member: Member
    encoded: Mapping[VectorName, Tensor]
    encoding: DeltaEncoding
    errors: dict[VectorName, Tensor]
    lie: Lie | None = None

    def error(self, name: VectorName, numel: int) -> Tensor:
        """Return the rounding error of a group's mean; zeros at first."""
        return self.errors.setdefault(name, torch.zeros(numel))


class MemoryHub:
    """The state that the peers of one process share; only one of them runs at a time.

    Args:
        run_id: The run's name, for versions.
        matchmaking_seconds: Time that peers wait for others beyond a round's start.
        lease_seconds: Time that records outlive a peer that has vanished.
        clock: Virtual time; a new clock by default.
    """

    def __init__(
        self,
        run_id: str,
        matchmaking_seconds: float = 3.0,
        lease_seconds: float = 30.0,
        clock: VirtualClock | None = None,
    ) -> None:
        self.run_id = run_id
        self.matchmaking_seconds = matchmaking_seconds
        self.lease_seconds = lease_seconds
        self.clock = clock or VirtualClock()
        self.records: dict[type[Record], dict[str, tuple[Record, float]]] = {}
        self.bundles: dict[str, dict[VectorName, tuple[Version, Tensor]]] = {}
        self.bytes_out: dict[str, int] = {}
        self.deltas: dict[str, tuple[str, int]] = {}
        self._flats: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Entry] = {}
        self._attempts: dict[str, Attempt] = {}

    def copy(self, flat_N: Tensor, digest: str) -> Tensor:
        """Return a copy of a vector, shared by all peers that publish the same digest."""
        kept = self._flats.get(digest)
        if kept is None:
            kept = self._flats[digest] = flat_N.clone()
        return kept

    def transfer_bytes(self, version: Version, have: str, keyframe_rounds: int) -> int:
        """Return the bytes that bring a version to a peer that has the version with the digest `have`."""
        digest, num_bytes = version.digest, 0
        for _ in range(keyframe_rounds):
            if digest == have or digest not in self.deltas:
                break
            digest, delta_bytes = self.deltas[digest]
            num_bytes += delta_bytes
        return min(num_bytes, version.num_bytes) if digest == have else version.num_bytes

    def meet(self, entry: Entry, expected: int, deadline: float) -> Attempt:
        """Wait for `expected` peers until `deadline` (virtual seconds); return this peer's outcome."""
        me, began = entry.member.peer_id, self.clock.now()
        self._waiting[me] = entry
        while me not in self._attempts:
            if len(self._waiting) >= expected or self.clock.now() >= deadline:
                self._assemble()
            else:
                self.clock.wait(deadline - self.clock.now())
        return replace(self._attempts.pop(me), matchmaking_seconds=self.clock.now() - began)

    def _assemble(self) -> None:
        met, self._waiting = self._waiting, {}
        if len(met) == 1:
            self._attempts |= {peer: Attempt(failure="no roster: no other peer came") for peer in met}
        else:
            self._attempts |= average_entries(met)
        self.clock.notify_all()


def average_entries(met: Mapping[str, Entry]) -> dict[str, Attempt]:
    """Return each peer's outcome of averaging these entries, which stay unchanged.

    As in a real swarm, a reducer that is caught lying is excluded and the rest average again.
    """
    attempts = _attempt(met)
    liars = {peer for attempt in attempts.values() for peer in attempt.lost}
    rest = {peer: entry for peer, entry in met.items() if peer not in liars}
    if not liars or len(rest) < 2:
        return attempts
    failure = f"lost {' and '.join(sorted(liars))}"
    second = {
        peer: replace(attempt, evidence={**attempts[peer].evidence, **attempt.evidence})
        for peer, attempt in average_entries(rest).items()
    }
    return second | {peer: Attempt(failure=failure) for peer in liars}


def _attempt(met: Mapping[str, Entry]) -> dict[str, Attempt]:
    roster = Roster(met[peer].member for peer in sorted(met))
    status: dict[str, dict[VectorName, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[VectorName, Tensor]] = {peer: {} for peer in met}
    residuals: dict[str, dict[VectorName, tuple[int, Tensor]]] = {peer: {} for peer in met}
    evidence: dict[str, dict[str, Evidence]] = {peer: {} for peer in met}
    lost: dict[str, set[str]] = {peer: set() for peer in met}
    for name, members in roster.groups.items():
        format = met[members[0]].encoding.format(name, roster.round + 1)
        plan = GroupPlan.in_roster(roster, members, format)
        work = GroupMean(plan, name, met)
        reason = work.reduce() if any(plan.weights) else "no member trained"
        for peer in members:
            status[peer][name] = reason
            evidence[peer] |= work.auditors[peer].evidence()
            if reason.startswith("lost") and name == SHARED:
                lost[peer] |= set(work.auditors[peer].liars())
            if not reason:
                averaged[peer][name] = work.mean
                if peer in work.residuals:
                    residuals[peer][name] = work.residuals[peer]
    return {
        peer: Attempt(
            roster,
            status=status[peer],
            averaged=averaged[peer],
            residuals=residuals[peer],
            lost=frozenset(lost[peer]),
            evidence=evidence[peer],
        )
        for peer in met
    }


class GroupMean:
    """One group's all-reduce, with all of its members in one process.

    Args:
        plan: The group's slices and their reducers.
        name: The group's vector.
        met: All peers' entries.

    Attributes:
        mean: The encoded mean, once it is reduced.
        residuals: Rounding error of the mean, by reducer: first element, and fp32 values.
        auditors: Each member's auditor.
    """

    def __init__(self, plan: GroupPlan, name: VectorName, met: Mapping[str, Entry]) -> None:
        self._plan = plan
        self._name = name
        self._met = met
        self.mean = torch.empty(plan.format.num_bytes, dtype=torch.uint8)
        self.residuals: dict[str, tuple[int, Tensor]] = {}
        self.auditors = {peer: Auditor(plan, peer) for peer in plan.peers}

    def reduce(self) -> str:
        """Reduce every slice; return the reason of a failure, or ""."""
        plan = self._plan
        if len(plan.peers) == 1:
            self.mean = self._met[plan.peers[0]].encoded[self._name]
            return ""
        try:
            for reducer, messages in zip(plan.peers, plan.slices, strict=True):
                self._reduce_slice(reducer, messages)
        except (ValueError, ExchangeError) as error:
            return f"the mean cannot be sent: {error}"
        liars = {peer: seen for auditor in self.auditors.values() for peer, seen in auditor.liars().items()}
        return "; ".join(f"lost {peer}: {seen.reason}" for peer, seen in liars.items())

    def _reduce_slice(self, reducer: str, messages: Sequence[Message]) -> None:
        plan, entry = self._plan, self._met[reducer]
        start, stop = plan.span(reducer)
        errors = entry.error(self._name, plan.delta_numel)
        new_errors = errors[start:stop].clone()
        auditor, peers = self.auditors[reducer], plan.peers
        for message in messages:
            span, place = plan.residual_span(message), bytes_of(message)
            sent = {sender: self._met[peers[sender]].encoded[self._name][place] for sender in plan.senders}
            decoded = [auditor.decode(sender, message, data) for sender, data in sent.items()]
            encoded, residual = reduce_message(plan, message, decoded, errors[span], auditor.weigh)
            self.mean[place] = encoded if entry.lie is None else entry.lie(plan.format, message, encoded)
            new_errors[span.start - start : span.stop - start] = residual
            self._show(reducer, message, place)
        if not plan.format.is_exact:
            self.residuals[reducer] = start, new_errors

    def _show(self, reducer: str, message: Message, place: slice) -> None:
        """Show a mean to the other members' auditors."""
        index, mean_N = self._plan.peers.index(reducer), decode_message(self._plan.format, message, self.mean[place])
        for peer, auditor in self.auditors.items():
            if peer != reducer and self._met[peer].lie is None:
                auditor.observe_mean(index, message, mean_N, self._met[peer].encoded[self._name])


class MemorySwarm:
    """One virtual peer's view of a hub; implements `Swarm`. Versions are not signed: all peers are members.

    Args:
        hub: Shared by all peers of the simulation.
        peer_id: This peer's id.

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
        self._pulled_bytes = self._averaged_bytes = 0
        self._encoding = DeltaEncoding({})
        self._errors: dict[VectorName, Tensor] = {}
        self._held: tuple[int, ...] = ()
        self._vectors = Vectors(keyframe_rounds=1)
        self._fruitless = 0
        self._closed = False
        self._refused = RefusedVersions()
        hub.bytes_out[peer_id] = 0

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

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        contribution = self.bans.add_votes(prepare(contribution, expected), self.read(Claim))
        member, encoded = self._encode(contribution)
        if member.slots != self._held:  # the averager's process, too, reuses the buffers of slots that it gives back
            self._errors = {name: error for name, error in self._errors.items() if name == SHARED}
            self._held = member.slots
        if expected <= 1:
            attempt = alone(member, encoded)
        else:
            patience = max(0.0, starts_at - self.now()) + self._hub.matchmaking_seconds
            entry = Entry(member, encoded, self._encoding, self._errors, self._lie(member.round))
            attempt = self._hub.meet(entry, expected, self.now() + patience)
            self.bans.record(member.round, [attempt.evidence])
            self.accused |= {(member.round, peer) for peer in attempt.evidence}
        result = decide_outcome(attempt, contribution, self._encoding)
        self.bans.count_round(result)
        if result.is_behind:
            self._encoding.forget()
            self._errors.clear()
        else:
            self._encoding.commit(result.committed)
            for name, (start, error) in attempt.residuals.items():
                if name in result.committed:
                    self._errors[name][start : start + error.numel()] = error
        self._averaged_bytes += averaged_bytes(result, self._encoding)
        self._check_progress(contribution, result)
        return result

    def _check_progress(self, contribution: Contribution, result: RoundResult) -> None:
        is_fruitless = SHARED not in result.committed and not result.is_behind
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless >= MAX_FRUITLESS_ROUNDS:
            raise SimulationError(
                f"round {contribution.member.round + 1} was dropped {self._fruitless} times in a row: "
                f"{result.dropped.get(SHARED, 'no peer trained a token')}; lower run.train.lr if the loss diverged, "
                f"or see the attacks and events"
            )

    def residuals(self) -> Mapping[str, Tensor]:
        return self._encoding.residuals()

    def restore_residuals(self, residuals: Mapping[str, Tensor]) -> None:
        self._encoding.restore_residuals(residuals)

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[VectorName, Tensor]]:
        return self._encoding.encode(contribution)

    def _lie(self, round: int) -> Lie | None:
        """Return how the peer falsifies means in a round; None for an honest peer."""
        return None

    # ------------------------------------------------------------------ versions

    def publish(
        self, round: int, bundles: Mapping[VectorName, Tensor], deltas: Mapping[VectorName, bytes] | None = None
    ) -> Mapping[VectorName, Version]:
        data = {name: self._vectors.encode(name, flat_N) for name, flat_N in bundles.items()}
        described = {name: self._describe(name, round, data[name]) for name in bundles}
        coded = [name for name in bundles if described[name].codec == "coded"]
        bundles = {**bundles, **{name: self._vectors.decode(name, bytes(data[name])) for name in coded}}
        for name, delta in (deltas or {}).items():
            if name in self._mine and self._mine[name][0].digest != described[name].digest:
                self._hub.deltas[described[name].digest] = self._mine[name][0].digest, len(delta)
        self._keep({n: (described[n], self._hub.copy(flat_N, described[n].digest)) for n, flat_N in bundles.items()})
        return described

    def _describe(self, name: str, round: int, data: memoryview) -> Version:
        return Version(
            run_id=self.run_id,
            name=name,
            round=round,
            digest=digest(data),
            num_bytes=data.nbytes,
            codec=self._vectors.codec(name),
            author=self.peer_id,
            public_key="",
        )

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, (version, _) in self._mine.items()}

    def rollback(self, files: Mapping[Path, Version]) -> None:
        raise SimulationError("versions in memory have no files; a virtual peer cannot be resumed")

    def load(self, name: VectorName, *, before: bool = False) -> Tensor:
        kept = self._before if before else self._mine
        if name not in kept:
            raise ExchangeError(f"this peer has no version of {name}{' before its newest' if before else ''}")
        return kept[name][1].clone()

    def refuse(self, name: VectorName, suspects: Mapping[str, str]) -> None:
        round = self._mine[name][0].round - 1
        self._refused.add(self._mine[name][0].digest)
        self._mine[name] = self._hub.bundles[self.peer_id][name] = self._before.pop(name)
        self.bans.suspect(round, suspects)
        self.accused |= {(round, peer) for peer in suspects}

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
        deadline, failures = self.now() + timeout, self._vectors.unknown(wanted)
        for name, peers in wanted.items():
            if name in failures:
                continue
            peer = self._wait_for(name, peers, min_round, deadline, (authors or {}).get(name, ()))
            if peer is None:
                failures[name] = "no peer has it"
                continue
            found = self._hub.bundles[peer][name]
            have = self._mine[name][0].digest if name in self._mine else ""
            num_bytes = self._hub.transfer_bytes(found[0], have, self._vectors.keyframe_rounds)
            self._pulled_bytes += num_bytes
            self._hub.bytes_out[peer] += num_bytes
            self._keep({name: found})
        return failures

    def _wait_for(
        self, name: VectorName, peers: Sequence[str], min_round: int, deadline: float, authors: Collection[str]
    ) -> str | None:
        """Return the peer with the newest version, of several the one that has sent least; None if it never came."""
        while True:
            offers = {peer: self._hub.bundles[peer][name][0] for peer in peers if self._has(peer, name)}
            # As in a real swarm, a peer that offers something else than is wanted is not asked again.
            peers = [p for p in peers if p not in offers or not self._is_bad(offers[p], min_round, authors)]
            rounds = {peer: version.round for peer, version in offers.items() if peer in peers}
            if offers and not peers:
                return None
            if rounds and max(rounds.values()) >= min_round:
                newest = [peer for peer, round in rounds.items() if round == max(rounds.values())]
                return min(newest, key=lambda peer: (self._hub.bytes_out[peer], peer))
            if self.now() >= deadline:
                return None
            self.clock.wait(deadline - self.now())

    def _is_bad(self, version: Version, min_round: int, authors: Collection[str]) -> bool:
        is_anothers = len(authors) > 0 and version.author not in authors
        return version.round >= min_round and (
            version.digest in self._refused  # guard: memory-refused
            or is_anothers
        )

    def _has(self, peer: str, name: VectorName) -> bool:
        return name in self._hub.bundles.get(peer, {})

    def _keep(self, items: Mapping[VectorName, tuple[Version, Tensor]]) -> None:
        for name, (version, _) in items.items():
            if name in self._mine and self._mine[name][0].round != version.round:
                self._before[name] = self._mine[name]
        self._mine |= items
        self._hub.bundles.setdefault(self.peer_id, {}).update(items)
        self.clock.notify_all()

    def seeds(self) -> Mapping[str, Sequence[str]]:
        """Return no peers: in memory, every peer with versions has claims."""
        return {}

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        found = {peer: self._hub.bundles[peer].items() for peer in peers if peer in self._hub.bundles}
        return {
            p: {n: v for n, (v, _) in items if v.digest not in self._refused}  # guard: memory-inventory
            for p, items in found.items()
        }

    # ------------------------------------------------------------------ the end

    def traffic(self) -> tuple[int, int]:
        sent = self._hub.bytes_out[self.peer_id]
        return self._pulled_bytes + self._averaged_bytes, sent + self._averaged_bytes

    def close(self) -> None:
        """Leave: stop renewing and serving. Records live on for a lease, as in a real swarm."""
        if not self._closed:
            self._closed = True
            self._stop_serving()
            self.clock.notify_all()

    def pause(self, seconds: float) -> None:
        """Suspend the peer for a time, like a stopped process: no heartbeat, and no answer to pulls."""
        bundles = self._hub.bundles.get(self.peer_id, {})
        renewed = {kind: of[self.peer_id] for kind, of in self._hub.records.items() if self.peer_id in of}
        self._stop_serving()
        self.clock.advance(seconds)
        self._hub.bundles[self.peer_id] = bundles
        for kind, stored in renewed.items():
            self._hub.records[kind][self.peer_id] = stored
        self.clock.notify_all()

    def _stop_serving(self) -> None:
        """Serve nothing, and let the records expire that the heartbeat would renew."""
        expires_at = self.now() + self._hub.lease_seconds
        for records in self._hub.records.values():
            if self.peer_id in records:
                record, until = records[self.peer_id]
                records[self.peer_id] = (record, min(until, expires_at))
        self._hub.bundles.pop(self.peer_id, None)
