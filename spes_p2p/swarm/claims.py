"""Who trains what: a pure function of the claim records, so all peers agree without talking.

Neither clock, network nor randomness in here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from spes_p2p.swarm.records import Claim

Allocation = dict[str, tuple[int, ...]]


def _lot(run_id: str, *parts: object) -> bytes:
    return hashlib.sha256("|".join(map(str, (run_id, *parts))).encode()).digest()


def coverage(allocation: Mapping[str, tuple[int, ...]], num_slots: int) -> list[int]:
    """Return the number of holders of each slot."""
    counts = [0] * num_slots
    for slots in allocation.values():
        for slot in slots:
            counts[slot] += 1
    return counts


def allocate(run_id: str, num_slots: int, claims: Mapping[str, Claim]) -> Allocation:
    """Return the slots that each peer should hold.

    Holders keep what they hold. Free capacity takes the least-covered slots; ties go by lot of (run, slot, peer).
    Where capacity is short, a full peer gives up a slot that others hold too, for an orphan: an orphan learns
    nothing, a second holder merely learns faster.

    Args:
        run_id: Seeds the lots, so that different runs burden different peers.
        num_slots: Experts per layer.
        claims: Unexpired claims by peer id.
    """
    held: dict[str, set[int]] = {}
    capacity: dict[str, int] = {}
    for peer, claim in sorted(claims.items()):
        capacity[peer] = min(claim.max_slots, num_slots)
        held[peer] = {slot for slot in claim.slots if slot < num_slots}
    counts = coverage({peer: tuple(slots) for peer, slots in held.items()}, num_slots)
    _fill(run_id, held, capacity, counts)
    # Slots given only now cost nothing to exchange, so they level the coverage; slots in training move for orphans.
    given = {(peer, slot) for peer in held for slot in held[peer] if slot not in claims[peer].slots}
    _level(run_id, held, counts, lambda peer, slot, gap: (peer, slot) in given and gap >= 2)
    _level(run_id, held, counts, lambda peer, slot, gap: counts[slot] >= 2 and gap == counts[slot])
    return {peer: tuple(sorted(slots)) for peer, slots in held.items()}


def _fill(run_id: str, held: dict[str, set[int]], capacity: dict[str, int], counts: list[int]) -> None:
    while True:
        spare = {peer for peer in held if len(held[peer]) < capacity[peer]}
        for slot in sorted(range(len(counts)), key=lambda slot: (counts[slot], _lot(run_id, slot))):
            takers = [peer for peer in spare if slot not in held[peer]]
            if takers:
                break
        else:
            return
        # The peer with most room goes first: whoever is nearly full keeps its choice of slots for the end.
        taker = min(takers, key=lambda peer: (len(held[peer]) - capacity[peer], _lot(run_id, slot, peer)))
        held[taker].add(slot)
        counts[slot] += 1


def _level(
    run_id: str, held: dict[str, set[int]], counts: list[int], may_give: Callable[[str, int, int], bool]
) -> None:
    """Exchange slots for less covered ones until no peer may give one up; every exchange narrows the spread."""
    while True:
        least = min(range(len(counts)), key=lambda slot: (counts[slot], _lot(run_id, slot)))
        swaps = [
            (peer, slot)
            for peer, slots in held.items()
            if least not in slots
            for slot in slots
            if may_give(peer, slot, counts[slot] - counts[least])
        ]
        if not swaps:
            return
        peer, given_up = min(swaps, key=lambda swap: (-counts[swap[1]], _lot(run_id, least, *swap)))
        held[peer] = (held[peer] - {given_up}) | {least}
        counts[given_up] -= 1
        counts[least] += 1
