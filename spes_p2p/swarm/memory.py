"""The swarm without a network: peers of one process meet in a hub. Same groups, same means, same digests."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spes_p2p.codecs import digest
from spes_p2p.errors import ExchangeError, SimulationError
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.outcome import Attempt, alone, averaged_bytes, judge
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, Record
from spes_p2p.swarm.reduce import weighted_mean
from spes_p2p.swarm.roster import SHARED, derive_groups
from spes_p2p.swarm.versions import Version
from spes_p2p.swarm.virtual_clock import VirtualClock

MAX_FRUITLESS_ROUNDS = 20
"""Rounds dropped in a row after which a swarm is taken to be unable to go on."""


class MemoryHub:
    """Where the peers of one process meet, one of them running at a time.

    Args:
        run_id: Names the run in versions.
        matchmaking_seconds: How long peers wait for others beyond a round's start.
        lease_seconds: How long records outlive a peer that has vanished.
        clock: Virtual time; a new one by default.
    """

    def __init__(
        self,
        run_id: str,
        matchmaking_seconds: float = 3.0,
        lease_seconds: float = 30.0,
        clock: VirtualClock | None = None,
    ) -> None:
        self.run_id, self.matchmaking_seconds, self.lease_seconds = run_id, matchmaking_seconds, lease_seconds
        self.clock = clock or VirtualClock()
        self.records: dict[type[Record], dict[str, tuple[Record, float]]] = {}
        self.bundles: dict[str, dict[str, tuple[Version, Tensor]]] = {}
        self.bytes_out: dict[str, int] = {}
        self._flats: weakref.WeakValueDictionary[str, Tensor] = weakref.WeakValueDictionary()
        self._waiting: dict[str, Contribution] = {}
        self._attempts: dict[str, Attempt] = {}

    def copy(self, flat_N: Tensor, digest: str) -> Tensor:
        """Return a copy to keep, one for all who publish the same."""
        kept = self._flats.get(digest)
        if kept is None:
            kept = self._flats[digest] = flat_N.clone()
        return kept

    def meet(self, contribution: Contribution, expected: int, deadline: float) -> Attempt:
        """Wait until `expected` peers are here, or `deadline` (virtual seconds); return this peer's outcome."""
        me, began = contribution.member.peer_id, self.clock.now()
        self._waiting[me] = contribution
        while me not in self._attempts:
            if len(self._waiting) >= expected or self.clock.now() >= deadline:
                self._assemble()
            else:
                self.clock.wait(deadline - self.clock.now())
        return replace(self._attempts.pop(me), matchmaking_seconds=self.clock.now() - began)

    def _assemble(self) -> None:
        met, self._waiting = self._waiting, {}
        if len(met) == 1:
            self._attempts |= {peer: Attempt(failure="no roster: nobody came") for peer in met}
        else:
            self._attempts |= _average(met)
        self.clock.notify_all()


def _average(met: Mapping[str, Contribution]) -> dict[str, Attempt]:
    roster = tuple(met[peer].member for peer in sorted(met))
    tokens = {member.peer_id: float(member.tokens) for member in roster}
    status: dict[str, dict[str, str]] = {peer: {} for peer in met}
    averaged: dict[str, dict[str, Tensor]] = {peer: {} for peer in met}
    for name, members in derive_groups(roster).members.items():
        weights = [tokens[peer] for peer in members]
        parts = [met[peer].deltas[name] for peer in members]
        reason = "" if all(torch.isfinite(part).all() for part in parts) else "a delta holds NaN or infinity"
        reason = reason if sum(weights) else "nobody trained"
        mean = None
        if not reason:
            mean = weighted_mean(parts, weights) if len(parts) > 1 else parts[0]
        for peer in members:
            status[peer][name] = reason
            if mean is not None:
                averaged[peer][name] = mean.clone()
    return {peer: Attempt(roster, status[peer], averaged[peer]) for peer in met}


class MemorySwarm:
    """One virtual peer's view of a hub; implements `Swarm`. Versions are not signed: there are no strangers here.

    Args:
        hub: Where the others are.
        peer_id: This peer's.
    """

    def __init__(self, hub: MemoryHub, peer_id: str) -> None:
        self._hub, self.clock, self.peer_id = hub, hub.clock, peer_id
        self._mine: dict[str, tuple[Version, Tensor]] = {}
        self._pulled_bytes = self._averaged_bytes = 0
        self._fruitless = 0
        self._closed = False
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

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        if expected <= 1:
            attempt = alone(contribution)
        else:
            patience = max(0.0, starts_at - self.now()) + self._hub.matchmaking_seconds
            attempt = self._hub.meet(contribution, expected, self.now() + patience)
        result = judge(attempt, contribution, expected)
        self._averaged_bytes += averaged_bytes(result, contribution)
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

    # ------------------------------------------------------------------ versions

    def publish(self, round: int, bundles: Mapping[str, Tensor]) -> Mapping[str, Version]:
        described = {name: self._describe(name, round, flat_N) for name, flat_N in bundles.items()}
        self._keep({n: (described[n], self._hub.copy(flat_N, described[n].digest)) for n, flat_N in bundles.items()})
        return described

    def _describe(self, name: str, round: int, flat_N: Tensor) -> Version:
        return Version(
            run_id=self._hub.run_id,
            name=name,
            round=round,
            digest=digest(flat_N),
            num_bytes=flat_N.nbytes,
            codec="fp32",
            author=self.peer_id,
            public_key="",
        )

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, (version, _) in self._mine.items()}

    def load(self, name: str) -> Tensor:
        if name not in self._mine:
            raise ExchangeError(f"this peer has no version of {name}")
        return self._mine[name][1].clone()

    def pull(self, wanted: Mapping[str, Sequence[str]], *, min_round: int, timeout: float) -> Mapping[str, str]:
        deadline, failures = self.now() + timeout, {}
        for name, peers in wanted.items():
            peer = self._wait_for(name, peers, min_round, deadline)
            if peer is None:
                failures[name] = "nobody has it"
                continue
            found = self._hub.bundles[peer][name]
            if name not in self._mine or self._mine[name][0].digest != found[0].digest:
                self._pulled_bytes += found[0].num_bytes
                self._hub.bytes_out[peer] += found[0].num_bytes
            self._keep({name: found})
        return failures

    def _wait_for(self, name: str, peers: Sequence[str], min_round: int, deadline: float) -> str | None:
        """Return who has the newest version, and of several the one that has sent least; None if it never came."""
        while True:
            rounds = {peer: self._hub.bundles[peer][name][0].round for peer in peers if self._has(peer, name)}
            if rounds and max(rounds.values()) >= min_round:
                newest = [peer for peer, round in rounds.items() if round == max(rounds.values())]
                return min(newest, key=lambda peer: (self._hub.bytes_out[peer], peer))
            if self.now() >= deadline:
                return None
            self.clock.wait(deadline - self.now())

    def _has(self, peer: str, name: str) -> bool:
        return name in self._hub.bundles.get(peer, {})

    def _keep(self, items: Mapping[str, tuple[Version, Tensor]]) -> None:
        self._mine |= items
        self._hub.bundles.setdefault(self.peer_id, {}).update(items)
        self.clock.notify_all()

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        bundles = self._hub.bundles
        return {p: {name: version for name, (version, _) in bundles[p].items()} for p in peers if p in bundles}

    # ------------------------------------------------------------------ the end

    def traffic(self) -> tuple[int, int]:
        sent = self._hub.bytes_out[self.peer_id]
        return self._pulled_bytes + self._averaged_bytes, sent + self._averaged_bytes

    def close(self) -> None:
        """Leave. The heart stops: records live on for a lease, as in any swarm."""
        if not self._closed:
            self._closed = True
            expires_at = self.now() + self._hub.lease_seconds
            for records in self._hub.records.values():
                if self.peer_id in records:
                    record, until = records[self.peer_id]
                    records[self.peer_id] = (record, min(until, expires_at))
            self._hub.bundles.pop(self.peer_id, None)
            self.clock.notify_all()
