"""The swarm without a network: peers of one process meet in a hub. Same groups, same means, same digests."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spes_p2p.codecs import digest, to_bytes
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.base import Contribution, RoundResult
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.outcome import Attempt, alone, judge
from spes_p2p.swarm.records import Record
from spes_p2p.swarm.reduce import weighted_mean
from spes_p2p.swarm.roster import derive_groups
from spes_p2p.swarm.versions import Version


class MemoryHub:
    """Where the peers of one process meet.

    Args:
        run_id: Names the run in versions.
        matchmaking_seconds: How long peers wait for others beyond a round's start.
    """

    def __init__(self, run_id: str, matchmaking_seconds: float = 3.0) -> None:
        self.run_id, self.matchmaking_seconds = run_id, matchmaking_seconds
        self.changed = threading.Condition()
        self.records: dict[type[Record], dict[str, Record]] = {}
        self.bundles: dict[str, dict[str, tuple[Version, Tensor]]] = {}
        self._waiting: dict[str, Contribution] = {}
        self._attempts: dict[str, Attempt] = {}

    def meet(self, contribution: Contribution, expected: int, deadline: float) -> Attempt:
        """Wait until `expected` peers are here, or `deadline` (monotonic seconds); return this peer's outcome."""
        me = contribution.member.peer_id
        with self.changed:
            self._waiting[me] = contribution
            while me not in self._attempts:
                late = time.monotonic() >= deadline
                if len(self._waiting) >= expected or late:
                    self._assemble()
                else:
                    self.changed.wait(deadline - time.monotonic())
            return self._attempts.pop(me)

    def _assemble(self) -> None:
        met, self._waiting = self._waiting, {}
        if len(met) == 1:
            self._attempts |= {peer: Attempt(failure="no roster: nobody came") for peer in met}
        else:
            self._attempts |= _average(met)
        self.changed.notify_all()


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
    """One virtual peer's view of a hub; implements `Swarm`. Each peer lives in a thread of its own."""

    def __init__(self, hub: MemoryHub, identity: Identity) -> None:
        self._hub, self._identity, self.peer_id = hub, identity, identity.peer_id
        self._mine: dict[str, tuple[Version, Tensor]] = {}
        self._bytes_in = 0
        self._closed = threading.Event()

    def now(self) -> float:
        return time.time()

    def announce(self, *records: Record) -> None:
        with self._hub.changed:
            for record in records:
                self._hub.records.setdefault(type(record), {})[self.peer_id] = record
            self._hub.changed.notify_all()

    def report(self, record: Record) -> None:
        self.announce(record)

    def read(self, kind: type[Record]) -> Mapping[str, Record]:
        with self._hub.changed:
            return dict(self._hub.records.get(kind, {}))

    def wait(self, seconds: float) -> bool:
        with self._hub.changed:
            if not self._closed.is_set():
                self._hub.changed.wait(seconds)
        return self._closed.is_set()

    def average(self, contribution: Contribution, *, expected: int, starts_at: float) -> RoundResult:
        if expected <= 1:
            return judge(alone(contribution), contribution, expected)
        patience = max(0.0, starts_at - self.now()) + self._hub.matchmaking_seconds
        return judge(self._hub.meet(contribution, expected, time.monotonic() + patience), contribution, expected)

    def publish(self, round: int, bundles: Mapping[str, Tensor]) -> Mapping[str, Version]:
        signed = {
            name: Version.sign(self._identity, self._hub.run_id, name, round, to_bytes(flat_N), "fp32")
            for name, flat_N in bundles.items()
        }
        self._keep({name: (signed[name], bundles[name].clone()) for name in bundles})
        return signed

    def versions(self) -> Mapping[str, Version]:
        return {name: version for name, (version, _) in self._mine.items()}

    def load(self, name: str) -> Tensor:
        if name not in self._mine:
            raise ExchangeError(f"this peer has no version of {name}")
        return self._mine[name][1].clone()

    def pull(self, wanted: Mapping[str, Sequence[str]], *, min_round: int, timeout: float) -> Mapping[str, str]:
        deadline, failures = time.monotonic() + timeout, {}
        for name, peers in wanted.items():
            found = self._wait_for(name, peers, min_round, deadline)
            if found is None:
                failures[name] = "nobody has it"
            elif name not in self._mine or self._mine[name][0].digest != found[0].digest:
                self._bytes_in += found[0].num_bytes
                assert digest(found[1]) == found[0].digest
            if found is not None:
                self._keep({name: found})
        return failures

    def _wait_for(self, name: str, peers: Sequence[str], min_round: int, deadline: float):
        with self._hub.changed:
            while True:
                offers = [self._hub.bundles[peer][name] for peer in peers if name in self._hub.bundles.get(peer, {})]
                offers = [offer for offer in offers if offer[0].round >= min_round]
                if offers:
                    return max(offers, key=lambda offer: offer[0].round)
                if time.monotonic() >= deadline:
                    return None
                self._hub.changed.wait(deadline - time.monotonic())

    def _keep(self, items: Mapping[str, tuple[Version, Tensor]]) -> None:
        with self._hub.changed:
            self._mine |= items
            self._hub.bundles.setdefault(self.peer_id, {}).update(items)
            self._hub.changed.notify_all()

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        with self._hub.changed:
            return {
                peer: {name: version for name, (version, _) in self._hub.bundles[peer].items()}
                for peer in peers
                if peer in self._hub.bundles
            }

    def traffic(self) -> tuple[int, int]:
        return self._bytes_in, 0

    def close(self) -> None:
        with self._hub.changed:
            for records in self._hub.records.values():
                records.pop(self.peer_id, None)
            self._hub.bundles.pop(self.peer_id, None)
            self._closed.set()
            self._hub.changed.notify_all()
