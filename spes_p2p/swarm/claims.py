"""When one peer changes what it holds: at once for an orphan, otherwise rarely, so that claims come to rest.

Neither clock, network nor randomness in here; peers, and the simulator in `benchmarks/claims/`, ask it the same way.
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

MOVED_SHARE = 8
"""A rotation moves one in so many of the model's slots, and evening out one in so many of a peer's; at least one."""


def coverage(allocation: Mapping[str, tuple[int, ...]], num_slots: int) -> list[int]:
    """Return the number of holders of each slot."""
    counts = [0] * num_slots
    for slots in allocation.values():
        for slot in slots:
            counts[slot] += 1
    return counts


def orphans(claims: Mapping[str, Claim], num_slots: int) -> set[int]:
    """Return the slots that nobody claims."""
    return set(range(num_slots)).difference(*[claim.slots for claim in claims.values()])


def allocate(run_id: str, num_slots: int, claims: Mapping[str, Claim], fixed: Collection[str] = ()) -> Allocation:
    """Return the slots that each peer should hold.

    Holders keep what they hold. Free capacity takes the least-covered slots; ties go by lot. Where capacity is short,
    a full peer gives up a slot that others hold too, for an orphan: an orphan learns nothing, a second holder merely
    learns faster.

    Args:
        run_id: Seeds the lots, so that different runs burden different peers.
        num_slots: Experts per layer.
        claims: Unexpired claims by peer id.
        fixed: Peers that are not expected to change anything; others act in their place.
    """
    table = _Table(run_id, num_slots, claims, fixed)
    given = _fill(table)
    # Slots given only now cost nothing to exchange, so they level the coverage; slots in training move for orphans.
    _exchange(table, lambda peer, slot: (peer, slot) in given)
    _relieve_orphans(table)
    return table.allocation()


def level(run_id: str, num_slots: int, claims: Mapping[str, Claim]) -> Allocation:
    """Return what each peer should hold for an even coverage: nobody exchanges more than a share of its slots.

    Args:
        run_id: Seeds the lots.
        num_slots: Experts per layer.
        claims: Unexpired claims by peer id.
    """
    held = {peer: _known(claim.slots, num_slots) for peer, claim in claims.items()}
    counts = coverage(held, num_slots)
    if max(counts) - min(counts) < 2:
        return held
    table = _Table(run_id, num_slots, claims)
    _exchange(table, lambda peer, slot: table.has_more_to_move(peer))
    return table.allocation()


def rotate(run_id: str, num_slots: int, claims: Mapping[str, Claim], turn: int) -> Allocation:
    """Return what each peer should hold after a few slots have changed hands.

    The lot names each of these slots a taker, which gives up another slot for it; what that does to the coverage is
    evened out as in `level`. It makes no difference who of them has acted already: what they arrive at is as even.

    Args:
        run_id: Seeds the lots.
        num_slots: Experts per layer.
        claims: Unexpired claims by peer id.
        turn: Number of the rotation. Slots take turns, so that each is drawn once in `MOVED_SHARE` rotations.
    """
    table = _Table(run_id, num_slots, claims)
    size = max(1, num_slots // MOVED_SHARE)
    order = sorted(range(num_slots), key=lambda slot: table.lot("turn", slot))
    drawn = [order[(turn * size + index) % num_slots] for index in range(size)]
    taken = set()
    for slot in drawn:
        peers = [peer for peer in table.held if table.held[peer] or table.room[peer]]
        taker = min(peers, key=lambda peer: table.lot("taker", turn, slot, peer), default=None)
        if taker is None:
            continue
        givable = table.held[taker] - set(drawn)
        if slot not in table.held[taker] and (table.room[taker] or givable):
            if not table.room[taker]:
                table.take(taker, min(givable, key=lambda other: table.lot("given", turn, other, taker)))
            table.give(taker, slot)
        taken.add((taker, slot))
    table.settle()
    # Somebody who holds all that were drawn may have to give up all of them.
    _exchange(table, lambda peer, slot: (peer, slot) not in taken and table.has_more_to_move(peer, size))
    _relieve_orphans(table, lambda peer, slot: (peer, slot) not in taken)
    return table.allocation()


def _known(slots: tuple[int, ...], num_slots: int) -> tuple[int, ...]:
    """Return those of the slots that the model has."""
    return slots if max(slots, default=-1) < num_slots else tuple(slot for slot in slots if slot < num_slots)


class _Table:
    """Who holds what while it is worked out, and the lots that settle ties."""

    def __init__(self, run_id: str, num_slots: int, claims: Mapping[str, Claim], fixed: Collection[str] = ()) -> None:
        self._run_id, self.fixed = run_id, fixed
        self.held: dict[str, set[int]] = {}
        self.room: dict[str, int] = {}
        self.holders: list[set[str]] = [set() for _ in range(num_slots)]
        self._moved: Counter[str] = Counter()
        for peer, claim in sorted(claims.items()):
            self.held[peer] = set(_known(claim.slots, num_slots))
            most = len(self.held[peer]) if peer in fixed else min(claim.max_slots, num_slots)
            self.room[peer] = most - len(self.held[peer])
            for slot in self.held[peer]:
                self.holders[slot].add(peer)
        self.settle()

    def lot(self, *parts: str | int) -> bytes:
        return _lot(self._run_id, *parts)

    def give(self, peer: str, slot: int) -> None:
        self.held[peer].add(slot)
        self.holders[slot].add(peer)
        self.room[peer] -= 1
        self._moved[peer] += slot not in self._first[peer]

    def take(self, peer: str, slot: int) -> None:
        self.held[peer].remove(slot)
        self.holders[slot].remove(peer)
        self.room[peer] += 1
        self._moved[peer] -= slot not in self._first[peer]

    def settle(self) -> None:
        """Take it from here who has moved how many slots."""
        self._first = {peer: frozenset(slots) for peer, slots in self.held.items()}
        self._moved.clear()

    def has_more_to_move(self, peer: str, least: int = 1) -> bool:
        """Tell whether a peer may still exchange a slot, of those that it should exchange at once, or `least`."""
        return self._moved[peer] < max(least, len(self.held[peer]) // MOVED_SHARE)

    def allocation(self) -> Allocation:
        return {peer: tuple(sorted(slots)) for peer, slots in self.held.items()}


@functools.lru_cache(maxsize=2**16)
def _lot(*parts: str | int) -> bytes:
    return hashlib.sha256("|".join(map(str, parts)).encode()).digest()


def _fill(table: _Table) -> set[tuple[str, int]]:
    """Give least-covered slots to whoever has room, the peer with most room first; return who has got what.

    Whoever is nearly full keeps its choice of slots for the end. Lots are drawn anew at each level of coverage and of
    room, so that no two peers end with the same slots and no two slots with the same holders.
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
        if peers:  # else nobody with room lacks this slot, nor ever will
            _, _, peer = heapq.heappop(peers)
            table.give(peer, slot)
            given.add((peer, slot))
            heapq.heappush(slots, (count + 1, table.lot("slot", slot, count + 1), slot))
            if table.room[peer]:
                back.append((-table.room[peer], table.lot("peer", peer, table.room[peer]), peer))
        for entry in back:
            heapq.heappush(peers, entry)
    return given


def _relieve_orphans(table: _Table, may_give: Callable[[str, int], bool] = lambda peer, slot: True) -> None:
    """Have full peers give up slots that others hold too for those that nobody holds."""
    _exchange(table, may_give, most=0)


def _exchange(table: _Table, may_give: Callable[[str, int], bool], most: int | None = None) -> None:
    """Exchange slots for ones with at least two holders fewer while any may be given up.

    Every exchange narrows the spread. As the holders of the one slot outnumber those of the other, some of them lack
    the latter: only `may_give` can stand in the way of coverages that differ by one at most.

    Args:
        table: To change.
        may_give: Whether a peer may give up a slot.
        most: Holders of a slot that is worth an exchange; None: any number.
    """
    counts = [len(holders) for holders in table.holders]
    has_exchanged = max(counts) - min(counts) >= 2
    lots = [table.lot("level", slot) for slot in range(len(counts))] if has_exchanged else []
    while has_exchanged:
        order = sorted(range(len(lots)), key=lambda slot: (len(table.holders[slot]), lots[slot]))
        least = order if most is None else [slot for slot in order if len(table.holders[slot]) <= most]
        has_exchanged = any(_give_one_up(table, may_give, order, slot) for slot in least)


def _give_one_up(table: _Table, may_give: Callable[[str, int], bool], order: list[int], wanted: int) -> bool:
    """Exchange the most covered slot that may be given up for `wanted`; return whether there was any."""
    for slot in reversed(order):
        if len(table.holders[slot]) - len(table.holders[wanted]) < 2:
            return False
        peers = [
            peer
            for peer in table.holders[slot] - table.holders[wanted]
            if peer not in table.fixed and may_give(peer, slot)
        ]
        if peers:
            giver = min(peers, key=lambda peer: table.lot("giver", wanted, slot, peer))
            table.take(giver, slot)
            table.give(giver, wanted)
            return True
    return False


PATIENCE_HEARTBEATS = 2
"""Heartbeats for which an orphan is left to the peer that it falls to, before it is given to another."""


class Claimant:
    """One peer's decisions about its slots.

    All peers see nearly the same records and allocate by the same function, so most of the time they agree. Where
    their records differ, two of them may act at once, and each would then undo what it has done. Hence the cool-down:
    a peer that has adopted or given up a slot changes nothing more for a while, unless for an orphan; and whoever has
    just appeared has no weight in evening out the coverage until it has stayed for as long.

    Args:
        run_id: Seeds the lots.
        peer_id: This peer's.
        num_slots: Experts per layer.
        settings: The run's; lease, heartbeat and rotation are used.
        cooldown_seconds: None: one lease.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        num_slots: int,
        settings: RoundConfig,
        *,
        cooldown_seconds: float | None = None,
    ) -> None:
        self._run_id, self._peer_id, self._num_slots, self._settings = run_id, peer_id, num_slots, settings
        self._cooldown = settings.lease_seconds if cooldown_seconds is None else cooldown_seconds
        self._changed_at = float("-inf")
        self._rotated = 0
        self._seen_since: dict[str, float] = {}
        self._orphaned_since: dict[int, float] = {}
        self._passed_over: set[str] = set()

    def at_heartbeat(self, now: float, claims: Mapping[str, Claim]) -> tuple[int, ...]:
        """Return the slots to hold in the middle of a round: nothing changes but for orphans.

        Args:
            now: Seconds, by any clock that does not go back.
            claims: Everybody's unexpired claims, this peer's as it is now.
        """
        self._look(now, claims)
        held = claims[self._peer_id].slots
        target = self._allocated(now, claims) if self._orphaned_since else held
        return self._change(now, held, target) if set(target) & set(self._orphaned_since) else held

    def after_round(self, now: float, claims: Mapping[str, Claim], round: int) -> tuple[int, ...]:
        """Return the slots to hold from here on, when nothing is being trained.

        Args:
            now: Seconds, by the same clock.
            claims: Everybody's unexpired claims, this peer's as it is now.
            round: The one that begins.
        """
        self._look(now, claims)
        held = claims[self._peer_id].slots
        interval = self._settings.rotate_rounds
        if interval and held and round > self._rotated and round % interval == 0:
            self._rotated = round
            turn = rotate(self._run_id, self._num_slots, claims, round // interval)
            return self._change(now, held, turn[self._peer_id])
        has_room = len(held) < min(claims[self._peer_id].max_slots, self._num_slots)
        # A full peer changes only for an orphan; most are full, and to allocate for 1 000 peers takes a while.
        target = self._allocated(now, claims) if has_room or self._orphaned_since else held
        if set(target) & set(self._orphaned_since):
            return self._change(now, held, target)
        if now - self._changed_at < self._cooldown:
            return held
        if target == held:
            settled = {peer: claims[peer] for peer, since in self._seen_since.items() if now - since >= self._cooldown}
            target = level(self._run_id, self._num_slots, settled).get(self._peer_id, held)
        return self._change(now, held, target)

    def _look(self, now: float, claims: Mapping[str, Claim]) -> None:
        self._seen_since = {peer: self._seen_since.get(peer, now) for peer in claims}
        orphaned = orphans(claims, self._num_slots)
        self._orphaned_since = {slot: self._orphaned_since.get(slot, now) for slot in orphaned}
        if not orphaned:
            self._passed_over.clear()

    def _allocated(self, now: float, claims: Mapping[str, Claim]) -> tuple[int, ...]:
        """Return what is allocated to this peer, once those are passed over to whom an orphan has fallen in vain.

        They have died, or wait for something else; the others find that out at different times and may act twice,
        which costs less than a slot that nobody trains.
        """
        allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        patience = PATIENCE_HEARTBEATS * self._settings.heartbeat_seconds
        overdue = {slot for slot, since in self._orphaned_since.items() if now - since >= patience}
        late = {peer for peer, slots in allocation.items() if peer != self._peer_id and overdue & set(slots)}
        if late:
            self._passed_over |= late
            allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        return allocation[self._peer_id]

    def _change(self, now: float, held: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
        if target != held:
            self._changed_at = now
        return target
