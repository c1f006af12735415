"""Who keeps copies of what too few peers hold, so that a slot's weights and moments outlive its last holder."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping

from spes_p2p.swarm.roster import SHARED, Groups
from spes_p2p.training.routes import callable_of


def custodians(groups: Groups, copies: int, uplinks: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Return who keeps a copy of each slot until the next round, beside its holders; the same on every member.

    Args:
        groups: Of the round that was committed.
        copies: Peers on which a slot should live at least.
        uplinks: Of the roster's members.

    Returns:
        Peers by the slot's name, for slots with fewer holders than that. Whoever keeps least is next; ties go by lot.
        Where no holder can be called, those who can come first: nobody else could fetch it, or adopters get it.
    """
    kept: dict[str, tuple[str, ...]] = {}
    burden: Counter[str] = Counter()
    for name in sorted(set(groups.members) - {SHARED}):
        holders = groups.members[name]
        others = set(groups.members[SHARED]) - set(holders)
        first = others if callable_of(holders, uplinks) else set(callable_of(others, uplinks))
        willing = sorted(others, key=lambda peer: (peer not in first, burden[peer], _lot(name, peer)))
        chosen = tuple(willing[: max(0, copies - len(holders))])
        burden.update(chosen)
        if chosen:
            kept[name] = chosen
    return kept


def _lot(name: str, peer: str) -> bytes:
    return hashlib.sha256(f"{name}/{peer}".encode()).digest()
