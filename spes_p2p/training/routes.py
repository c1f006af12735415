"""Whom to ask for which slot, by what everybody may send."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

from spes_p2p.swarm.roster import SHARED, Groups, Member

SLOW = 0.5
"""Share of the roster's median uplink below which a holder leaves it to others to pass its slots on."""
LEAST = 1e-9
"""Stands for no uplink at all where one divides by it."""


def relays(groups: Groups, roster: Sequence[Member], uplinks: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Return those who pass a slot on among themselves, for slots of which no holder could send it to all.

    Args:
        groups: The roster's.
        roster: Its members.
        uplinks: Of each of them.

    Returns:
        By the slot's name, all who fetch it for certain, ascending, the same on every member; at least two each.
    """
    slow = SLOW * statistics.median(uplinks.values())
    fetching = [
        member.peer_id
        for member in roster
        if not (member.refreshes or member.calls_only) and member.peer_id in groups.members[SHARED]
    ]
    chains = {
        name: tuple(sorted(set(fetching) - set(holders)))
        for name, holders in groups.members.items()
        if name != SHARED and ((fastest := max(uplinks[peer] for peer in holders)) < slow or not fastest)
    }
    return {name: peers for name, peers in chains.items() if len(peers) > 1}


def preferred(puller: str, name: str, peers: Iterable[str], uplinks: Mapping[str, float] | None = None) -> list[str]:
    """Return the peers in the order in which `puller` should ask them for `name`.

    A peer comes first as often as its share of their uplinks: lots are drawn by hash, so that not everybody asks the
    fastest, and two pullers seldom ask in the same order. Source: weighted rendezvous hashing (Schindelhauer and
    Schomaker, 2005).

    Args:
        puller: Who asks.
        name: For this version.
        peers: Who have it, or are about to.
        uplinks: What they may send; those that it lacks count as the fastest of it.
    """
    weights = uplinks or {}
    fastest = max(weights.values(), default=1.0)

    def lot(peer: str) -> tuple[float, str]:
        drawn = int.from_bytes(hashlib.sha256(f"{puller}/{name}/{peer}".encode()).digest()[:6], "big")
        return -math.log((drawn + 1) / (2**48 + 1)) / max(weights.get(peer, fastest), LEAST), peer

    return sorted(peers, key=lot)
