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


def relays(
    groups: Groups, roster: Sequence[Member], uplinks: Mapping[str, float], keepers: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, ...]]:
    """Return those who pass a slot on, for slots of which no holder could send it to all.

    Args:
        groups: The roster's.
        roster: Its members.
        uplinks: Of each of them.
        keepers: Its custodians.

    Returns:
        By the slot's name, all who fetch it for certain and can be called, ascending, the same on every member. They
        share it out among themselves, so that they are two at least; but where no holder can be called, others who
        cannot be called either get it from one as well.
    """
    slow = SLOW * statistics.median(uplinks.values())
    fetching = [
        member.peer_id
        for member in roster
        if not (member.refreshes or member.calls_only) and member.peer_id in groups.members[SHARED]
    ]
    chains = dict[str, tuple[str, ...]]()
    for name, holders in groups.members.items():
        fastest = max(uplinks[peer] for peer in holders)
        certain = set(fetching) | (set() if fastest else set(callable_of(keepers.get(name, ()), uplinks)))
        chain = tuple(sorted(certain - set(holders)))
        if name != SHARED and (fastest < slow or not fastest) and len(chain) > (1 if fastest else 0):
            chains[name] = chain
    return chains


def callable_of(peers: Iterable[str], uplinks: Mapping[str, float]) -> list[str]:
    """Return those who can be called; of nobody else is nothing asked (see `swarm.roster.uplinks`)."""
    return [peer for peer in peers if uplinks[peer]]


def having_moments(
    puller: str, makers: Sequence[str], keepers: Sequence[str], uplinks: Mapping[str, float]
) -> Sequence[str]:
    """Return whom to ask for a slot's moments: who trains it, but who else keeps them if `puller` can reach no maker.

    Args:
        puller: Who asks.
        makers: Who has made them.
        keepers: The slot's custodians.
        uplinks: Of the roster's members.
    """
    others = [peer for peer in callable_of(keepers, uplinks) if peer != puller]
    return makers if uplinks[puller] or callable_of(makers, uplinks) else others or makers


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
