"""A DHT that loses records, gets them late, and falls apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from spes_p2p.swarm.records import NUM_BUCKETS, Claim

NUM_REPLICAS, NUM_ASKED = 5, 2
LOST, LATE, MOST_DELAY_SECONDS = 0.1, 0.3, 3.0
"""Share of the replicas that a store never reaches, and late; and how late."""

Replica = dict[str, tuple[float, Claim]]
"""When a record expires, and the record, by its owner."""


@dataclass(frozen=True)
class Event:
    """A record that reaches a replica late."""

    delay: float
    deliver: Callable[[], None]


class LossyDht:
    """Claims on five replicas for each bucket, of which a reader asks two.

    A side of a partition has replicas of its own from then on; when the sides meet again, their records do.

    Args:
        draw: Decides which stores are lost or late.
    """

    def __init__(self, draw: random.Random) -> None:
        self._random = draw
        self._sides: list[list[list[Replica]]] = [[[{} for _ in range(NUM_REPLICAS)] for _ in range(NUM_BUCKETS)]]

    def store(self, side: int, claim: Claim, expires_at: float) -> list[Event]:
        """Bring a record to what replicas it reaches at once; return when it reaches others."""
        events = []
        for replica in self._sides[side][ord(claim.peer_id[-1]) % NUM_BUCKETS]:
            chance = self._random.random()
            if chance < LOST + LATE:
                if chance >= LOST:
                    delay = self._random.uniform(0, MOST_DELAY_SECONDS)
                    events.append(Event(delay, partial(_keep, replica, claim, expires_at)))
            else:
                _keep(replica, claim, expires_at)
        return events

    def read(self, side: int, now: float) -> dict[str, Claim]:
        """Return the claims that the replicas which answer take to be unexpired at the reader's `now`."""
        found: dict[str, Claim] = {}
        for replicas in self._sides[side]:
            records = _merge(self._random.sample(replicas, NUM_ASKED))
            found.update((owner, claim) for owner, (expires_at, claim) in records.items() if expires_at > now)
        return found

    def split(self, num_sides: int) -> None:
        """Give each side of a partition its own copies of the replicas."""
        one = self._sides[0]
        self._sides = [[[dict(replica) for replica in bucket] for bucket in one] for _ in range(num_sides)]

    def heal(self) -> None:
        """Bring the replicas of all sides together."""
        self._sides = [
            [[_merge(same) for same in zip(*buckets, strict=True)] for buckets in zip(*self._sides, strict=True)]
        ]


def _keep(replica: Replica, claim: Claim, expires_at: float) -> None:
    """Take a record as hivemind does: only if it expires later than the one before."""
    if claim.peer_id not in replica or replica[claim.peer_id][0] < expires_at:
        replica[claim.peer_id] = (expires_at, claim)


def _merge(replicas: Iterable[Replica]) -> Replica:
    merged: Replica = {}
    for replica in replicas:
        if not merged:
            merged = dict(replica)
            continue
        for owner, entry in replica.items():
            if owner not in merged or merged[owner][0] < entry[0]:
                merged[owner] = entry
    return merged
