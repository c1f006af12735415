"""Claims: when a peer changes the slots that it holds. At once for an orphan, otherwise seldom, so that claims settle.

Pure functions, without clock, network or randomness: real peers and the simulator in `benchmarks/claims/` share them.
"""

from __future__ import annotations

import functools
import hashlib
import heapq
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.records import Claim

Allocation = dict[str, tuple[int, ...]]
"""Slots of each peer, ascending."""

MOVED_SHARE = 8
"""Levelling moves one of this many slots of a peer, at least one."""
PATIENCE_HEARTBEATS = 2
"""Heartbeats for which an orphan waits for the peer that it is allocated to, before it is allocated to another."""


def coverage(allocation: Mapping[str, tuple[int, ...]], num_slots: int) -> list[int]:
    """Return the number of holders of each slot."""
    counts = Counter(slot for slots in allocation.values() for slot in slots)
    return [counts[slot] for slot in range(num_slots)]


def orphans(claims: Mapping[str, Claim], num_slots: int) -> set[int]:
    """Return the slots without a holder."""
    return set(range(num_slots)).difference(*[claim.slots for claim in claims.values()])


def allocate(run_id: str, num_slots: int, claims: Mapping[str, Claim], fixed: Collection[str] = ()) -> Allocation:
    """Return the slots that each peer should hold.

    Holders keep their slots. Free capacity takes the least-covered slots; ties are broken by hash. If capacity is
    short, a full peer gives up a slot with other holders for an orphan: an orphan does not train at all, whereas a
    second holder only speeds a slot up.

    Args:
        run_id: Seeds the hashes, so that different runs burden different peers.
        num_slots: Number of the run's slots; 0 of a dense model.
        claims: Unexpired claims by peer id.
        fixed: Peers that are expected to change nothing; others act in their place.
    """
    table = _Table(run_id, num_slots, claims, fixed)
    given = _fill(table)
    # New slots cost nothing to exchange, so they level the coverage; slots in training move only for orphans.
    _exchange(table, lambda peer, slot: (peer, slot) in given)
    _exchange(table, lambda peer, slot: True, most=0)  # full peers give slots up for orphans
    return table.allocation()


def level(run_id: str, num_slots: int, claims: Mapping[str, Claim]) -> Allocation:
    """Return the slots that each peer should hold for an even coverage; a peer exchanges only a share of its slots."""
    table = _Table(run_id, num_slots, claims)
    first = {peer: frozenset(slots) for peer, slots in table.held.items()}

    def may_give(peer: str, slot: int) -> bool:
        return len(table.held[peer] - first[peer]) < max(1, len(first[peer]) // MOVED_SHARE)

    _exchange(table, may_give)
    return table.allocation()


@functools.lru_cache(maxsize=2**16)
def _lot(*parts: str | int) -> bytes:
    return hashlib.sha256("|".join(map(str, parts)).encode()).digest()


class _Table:
    """The allocation under construction, and the hashes that break ties; `fixed` peers change nothing."""

    def __init__(self, run_id: str, num_slots: int, claims: Mapping[str, Claim], fixed: Collection[str] = ()) -> None:
        self.lot = functools.partial(_lot, run_id)
        self.fixed = fixed
        self.held: dict[str, set[int]] = {}
        self.room: dict[str, int] = {}
        self.holders: list[set[str]] = [set() for _ in range(num_slots)]
        for peer, claim in sorted(claims.items()):
            self.held[peer] = {slot for slot in claim.slots if slot < num_slots}
            most = len(self.held[peer]) if peer in fixed else min(claim.max_slots, num_slots)
            self.room[peer] = most - len(self.held[peer])
            for slot in self.held[peer]:
                self.holders[slot].add(peer)

    def give(self, peer: str, slot: int) -> None:
        self.held[peer].add(slot)
        self.holders[slot].add(peer)
        self.room[peer] -= 1

    def take(self, peer: str, slot: int) -> None:
        self.held[peer].remove(slot)
        self.holders[slot].remove(peer)
        self.room[peer] += 1

    def allocation(self) -> Allocation:
        return {peer: tuple(sorted(slots)) for peer, slots in self.held.items()}


def _fill(table: _Table) -> set[tuple[str, int]]:
    """Give the least-covered slots to peers with room, those with most room first; return the new (peer, slot) pairs.

    Ties are drawn again at each level of coverage and of room, so that no two peers end with the same slots, and no two
    slots with the same holders.
    """
    given: set[tuple[str, int]] = set()
    peers = [(-room, table.lot("peer", peer, room), peer) for peer, room in table.room.items() if room > 0]
    if not peers:
        return given
    slots = [(len(holders), table.lot("slot", slot, len(holders)), slot) for slot, holders in enumerate(table.holders)]
    heapq.heapify(slots)
    heapq.heapify(peers)
    while slots and peers:
        count, _, slot = heapq.heappop(slots)
        back = []
        while peers and slot in table.held[peers[0][2]]:
            back.append(heapq.heappop(peers))
        if peers:  # otherwise every peer with room holds this slot, now and later
            _, _, peer = heapq.heappop(peers)
            table.give(peer, slot)
            given.add((peer, slot))
            heapq.heappush(slots, (count + 1, table.lot("slot", slot, count + 1), slot))
            if table.room[peer]:
                back.append((-table.room[peer], table.lot("peer", peer, table.room[peer]), peer))
        for entry in back:
            heapq.heappush(peers, entry)
    return given


def _exchange(table: _Table, may_give: Callable[[str, int], bool], most: int | None = None) -> None:
    """Exchange slots for others with at least two holders fewer, while any may be given up.

    Every exchange narrows the spread. Since the one slot has more holders than the other, some of them lack the other:
    only `may_give` can prevent coverages that differ by one at most.

    Args:
        table: Changed in place.
        may_give: Whether a peer may give up a slot.
        most: Largest number of holders of a slot that is worth an exchange; None for any number.
    """
    counts = [len(holders) for holders in table.holders]
    has_exchanged = max(counts, default=0) - min(counts, default=0) >= 2
    lots = [table.lot("level", slot) for slot in range(len(counts))] if has_exchanged else []
    while has_exchanged:
        order = sorted(range(len(lots)), key=lambda slot: (len(table.holders[slot]), lots[slot]))
        least = order if most is None else [slot for slot in order if len(table.holders[slot]) <= most]
        has_exchanged = any(_give_one_up(table, may_give, order, slot) for slot in least)


def _give_one_up(table: _Table, may_give: Callable[[str, int], bool], order: list[int], wanted: int) -> bool:
    """Exchange the most covered slot that may be given up for `wanted`; return whether there was one."""
    for slot in reversed(order):
        if len(table.holders[slot]) - len(table.holders[wanted]) < 2:
            return False
        holders = table.holders[slot] - table.holders[wanted]
        peers = [peer for peer in holders if peer not in table.fixed and may_give(peer, slot)]
        if peers:
            giver = min(peers, key=lambda peer: table.lot("giver", wanted, slot, peer))
            table.take(giver, slot)
            table.give(giver, wanted)
            return True
    return False


class Claimant:
    """One peer's decisions about its slots.

    All peers see nearly the same records and allocate by the same function, so they agree most of the time. If their
    records differ, two peers may act at once, and each would then undo its change. A cool-down prevents this: after a
    change, a peer changes nothing but for an orphan, and a new peer does not count in levelling until as much time has
    passed.

    Attributes:
        cooldown_seconds: One lease.
    """

    def __init__(self, run_id: str, peer_id: str, num_slots: int, settings: RoundConfig) -> None:
        self._run_id = run_id
        self._peer_id = peer_id
        self._num_slots = num_slots
        self._settings = settings
        self.cooldown_seconds = settings.lease_seconds
        self._changed_at = float("-inf")
        self._seen_since: dict[str, float] = {}
        self._orphaned_since: dict[int, float] = {}
        self._passed_over: set[str] = set()

    def target(self, now: float, claims: Mapping[str, Claim], *, in_round: bool = False) -> tuple[int, ...]:
        """Return the slots to hold from now on, in monotonic time; within a round they change only for orphans."""
        self._seen_since = {peer: self._seen_since.get(peer, now) for peer in claims}
        orphaned = orphans(claims, self._num_slots)
        self._orphaned_since = {slot: self._orphaned_since.get(slot, now) for slot in orphaned}
        if not orphaned:
            self._passed_over.clear()
        held = target = claims[self._peer_id].slots
        has_room = not in_round and len(held) < min(claims[self._peer_id].max_slots, self._num_slots)
        if has_room or orphaned:  # most peers are full, and the allocation of 1000 peers is slow
            target = self._allocated(now, claims)
        if not orphaned.intersection(target):
            # A peer that was paused claims like a new one.
            if in_round or (held and now - self._changed_at < self.cooldown_seconds):
                return held
            if target == held:
                old = now - self.cooldown_seconds
                settled = {peer: claims[peer] for peer, since in self._seen_since.items() if since <= old}
                target = level(self._run_id, self._num_slots, settled).get(self._peer_id, held)
        if target != held:
            self._changed_at = now
        return target

    def _allocated(self, now: float, claims: Mapping[str, Claim]) -> tuple[int, ...]:
        """Return this peer's allocation; peers that failed to adopt an orphan in time are passed over.

        Those peers have died or wait for something. The others notice at different times and may act twice, which costs
        less than a slot without a holder.
        """
        allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        patience = PATIENCE_HEARTBEATS * self._settings.heartbeat_seconds
        overdue = {slot for slot, since in self._orphaned_since.items() if now - since >= patience}
        late = {peer for peer, slots in allocation.items() if peer != self._peer_id and overdue & set(slots)}
        if late:
            self._passed_over |= late
            allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        return allocation[self._peer_id]
