"""The swarm without a network: peers of one process meet in a hub. Same groups, same means, same digests."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from spes_p2p.codecs import digest
from spes_p2p.errors import ExchangeError, SimulationError
from spes_p2p.swarm.averaging.outcome import alone, averaged_bytes, entering, judge
from spes_p2p.swarm.averaging.wire import Vectors, Wire
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.exchange.versions import Refused, Version
from spes_p2p.swarm.memory_hub import Entry, Lie, MemoryHub
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Claim, Record
from spes_p2p.swarm.roster import SHARED, Member
from spes_p2p.swarm.trust import Trust

MAX_FRUITLESS_ROUNDS = 20
"""Rounds dropped in a row after which a swarm is taken to be unable to go on."""


class MemorySwarm:
    """One virtual peer's view of a hub; implements `Swarm`. Versions are not signed: there are no strangers here.

    Args:
        hub: Where the others are.
        peer_id: This peer's.
    """

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self._hub, self.clock, self.peer_id = hub, hub.clock, peer_id
        self._mine: dict[str, tuple[Version, Tensor]] = {}
        self._before: dict[str, tuple[Version, Tensor]] = {}
        self._pulled_bytes = self._averaged_bytes = 0
        self._wire, self._errors = Wire({}), dict[str, Tensor]()
        self._held: tuple[int, ...] = ()
        self._vectors = Vectors(keyframe_rounds=1)
        self._fruitless, self.trust = 0, Trust()
        self.accused: set[tuple[int, str]] = set()
        """Rounds, and peers of which this one held something against what they did in them."""
        self._closed, self._refused = False, Refused()
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
        """Become able to average.

        Args:
            vectors: What the run averages and publishes.
        """
        self._wire, self._vectors = Wire(vectors.segments), vectors

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        contribution = self.trust.enter(entering(contribution, expected), self.read(Claim))
        member, encoded = self._encode(contribution)
        if member.slots != self._held:  # as the averager's process does, whose places for slots get other tenants
            self._errors = {name: error for name, error in self._errors.items() if name == SHARED}
            self._held = member.slots
        if expected <= 1:
            attempt = alone(member, encoded)
        else:
            patience = max(0.0, starts_at - self.now()) + self._hub.matchmaking_seconds
            entry = Entry(member, encoded, self._wire, self._errors, self._lie(member.round))
            attempt = self._hub.meet(entry, expected, self.now() + patience)
            self.trust.note(member.round, [attempt.evidence])
            self.accused |= {(member.round, peer) for peer in attempt.evidence}
        result = judge(attempt, contribution, self._wire)
        self.trust.meet(result)
        if result.is_behind:
            self._wire.forget()
            self._errors.clear()
        else:
            self._wire.settle(result.committed)
            for name, (start, error) in attempt.left.items():
                if name in result.committed:
                    self._errors[name][start : start + error.numel()] = error
        self._averaged_bytes += averaged_bytes(result, self._wire)
        self._check_progress(contribution, result)
        return result

    def _check_progress(self, contribution: Contribution, result: RoundResult) -> None:
        is_fruitless = SHARED not in result.committed and not result.is_behind
        self._fruitless = self._fruitless + 1 if is_fruitless else 0
        if self._fruitless >= MAX_FRUITLESS_ROUNDS:
            raise SimulationError(
                f"round {contribution.member.round + 1} was dropped {self._fruitless} times in a row: "
                f"{result.dropped.get(SHARED, 'nobody trained a token')}; lower run.train.lr if the loss diverged, "
                f"or see the attacks and events"
            )

    def remainders(self) -> Mapping[str, Tensor]:
        return self._wire.remainders()

    def take_up(self, remainders: Mapping[str, Tensor]) -> None:
        self._wire.take_up(remainders)

    def _encode(self, contribution: Contribution) -> tuple[Member, dict[str, Tensor]]:
        return self._wire.encode(contribution)

    def _lie(self, round: int) -> Lie | None:
        """Return what a peer makes of the means that it reduces in a round; an honest one nothing."""
        return None

    # ------------------------------------------------------------------ versions

    def publish(
        self, round: int, bundles: Mapping[str, Tensor], deltas: Mapping[str, bytes] | None = None
    ) -> Mapping[str, Version]:
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
            run_id=self._hub.run_id,
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

    def go_back(self, files: Mapping[Path, Version]) -> None:
        raise SimulationError("versions in memory have no files; a virtual peer cannot be resumed")

    def load(self, name: str, *, before: bool = False) -> Tensor:
        kept = self._before if before else self._mine
        if name not in kept:
            raise ExchangeError(f"this peer has no version of {name}{' before its newest' if before else ''}")
        return kept[name][1].clone()

    def refuse(self, name: str, suspects: Mapping[str, str]) -> None:
        round = self._mine[name][0].round - 1
        self._refused.add(self._mine[name][0].digest)
        self._mine[name] = self._hub.bundles[self.peer_id][name] = self._before.pop(name)
        self.trust.suspect(round, suspects)
        self.accused |= {(round, peer) for peer in suspects}

    def pull(
        self,
        wanted: Mapping[str, Sequence[str]],
        *,
        min_round: int,
        timeout: float,
        relays: Mapping[str, Sequence[str]] | None = None,
        uplinks: Mapping[str, float] | None = None,
        authors: Mapping[str, Collection[str]] | None = None,
    ) -> Mapping[str, str]:
        deadline, failures = self.now() + timeout, self._vectors.strange(wanted)
        for name, peers in wanted.items():
            if name in failures:
                continue
            peer = self._wait_for(name, peers, min_round, deadline, (authors or {}).get(name, ()))
            if peer is None:
                failures[name] = "nobody has it"
                continue
            found = self._hub.bundles[peer][name]
            have = self._mine[name][0].digest if name in self._mine else ""
            num_bytes = self._hub.transfer_bytes(found[0], have, self._vectors.keyframe_rounds)
            self._pulled_bytes += num_bytes
            self._hub.bytes_out[peer] += num_bytes
            self._keep({name: found})
        return failures

    def _wait_for(
        self, name: str, peers: Sequence[str], min_round: int, deadline: float, authors: Collection[str]
    ) -> str | None:
        """Return who has the newest version, and of several the one that has sent least; None if it never came."""
        while True:
            offers = {peer: self._hub.bundles[peer][name][0] for peer in peers if self._has(peer, name)}
            # As in a real swarm, whoever offers something else than is wanted is asked no more.
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

    def _has(self, peer: str, name: str) -> bool:
        return name in self._hub.bundles.get(peer, {})

    def _keep(self, items: Mapping[str, tuple[Version, Tensor]]) -> None:
        for name, (version, _) in items.items():
            if name in self._mine and self._mine[name][0].round != version.round:
                self._before[name] = self._mine[name]
        self._mine |= items
        self._hub.bundles.setdefault(self.peer_id, {}).update(items)
        self.clock.notify_all()

    def seeds(self) -> Mapping[str, Sequence[str]]:
        """Return nobody: in memory, whoever has versions has claims."""
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
        """Leave. The heart stops: records live on for a lease, as in any swarm."""
        if not self._closed:
            self._closed = True
            self._stand_still()
            self.clock.notify_all()

    def pause(self, seconds: float) -> None:
        """Do nothing for so long, as a process that was stopped: no heartbeat, and no answer to anybody who pulls."""
        bundles = self._hub.bundles.get(self.peer_id, {})
        renewed = {kind: of[self.peer_id] for kind, of in self._hub.records.items() if self.peer_id in of}
        self._stand_still()
        self.clock.advance(seconds)
        self._hub.bundles[self.peer_id] = bundles
        for kind, stored in renewed.items():
            self._hub.records[kind][self.peer_id] = stored
        self.clock.notify_all()

    def _stand_still(self) -> None:
        """Let what the heart would renew run out, and serve nothing."""
        expires_at = self.now() + self._hub.lease_seconds
        for records in self._hub.records.values():
            if self.peer_id in records:
                record, until = records[self.peer_id]
                records[self.peer_id] = (record, min(until, expires_at))
        self._hub.bundles.pop(self.peer_id, None)
