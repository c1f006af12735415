"""Who keeps copies of what too few peers hold, so that a slot's weights and moments outlive its last holder."""

from __future__ import annotations

import hashlib
from collections import Counter

from spes_p2p.swarm.roster import SHARED, Groups


def custodians(groups: Groups, copies: int) -> dict[str, tuple[str, ...]]:
    """Return who keeps a copy of each slot until the next round, beside its holders; the same on every member.

    Args:
        groups: Of the round that was committed.
        copies: Peers on which a slot should live at least.

    Returns:
        Peers by the slot's name, for slots with fewer holders than that. Whoever keeps least is next; ties go by lot.
    """
    kept: dict[str, tuple[str, ...]] = {}
    burden: Counter[str] = Counter()
    for name in sorted(set(groups.members) - {SHARED}):
        holders = groups.members[name]
        willing = sorted(set(groups.members[SHARED]) - set(holders), key=lambda peer: (burden[peer], _lot(name, peer)))
        chosen = tuple(willing[: max(0, copies - len(holders))])
        burden.update(chosen)
        if chosen:
            kept[name] = chosen
    return kept


def _lot(name: str, peer: str) -> bytes:
    return hashlib.sha256(f"{name}/{peer}".encode()).digest()
