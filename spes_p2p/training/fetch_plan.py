"""Which versions a peer fetches after a round, from which peers, and which it keeps for others. Pure functions."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Roster

MIN_UPLINK = 1e-9
"""Stands for an uplink of zero in a division."""
Peers = Sequence[str]
"""Peer ids."""


@dataclass(frozen=True)
class FetchPlan:
    """What to fetch, and what `Swarm.pull` is told of it.

    Attributes:
        wanted: Peers to ask, by version, in order of preference.
        authors: Peers that made the version.
        digests: The version to fetch, where only one will do.
    """

    wanted: Mapping[VectorName, Peers]
    authors: Mapping[VectorName, Peers] = field(default_factory=dict)
    digests: Mapping[VectorName, str] = field(default_factory=dict)


def plan_fetch(
    me: str,
    roster: Roster,
    makers: Mapping[VectorName, Peers],
    chosen: Collection[VectorName],
    keepers: Mapping[VectorName, Peers],
    *,
    masters: Collection[VectorName] | None = None,
) -> FetchPlan:
    """Decide which peers to ask for which version: its makers, replicas, then all other members.

    Of these, peers that this one cannot call come last.

    Args:
        me: This peer.
        roster: Of the round that was committed.
        makers: The other peers that made the round's version of a slot.
        chosen: Versions to fetch: as many as this peer takes, and those that it keeps for others.
        keepers: Replicas of each slot, as `replicas` returns them.
        masters: Slots to fetch in fp32, and of the others their kept forms; None where slots have none.
    """
    links = roster.uplinks_to(me)
    wanted: dict[VectorName, list[str]] = {}
    authors: dict[VectorName, Peers] = {}
    for name in sorted(chosen):
        form = name if masters is None or name in masters else name.kept
        others = preferred(me, name, callable_of(roster.groups[SHARED], links), links)
        found = dict.fromkeys((*preferred(me, name, makers[name], links), *keepers.get(name, ()), *others))
        wanted[form] = sorted((peer for peer in found if peer != me), key=lambda peer: not links[peer])
        # Otherwise a liar could have its version signed by another key of its own, and would go without a strike.
        authors[form] = makers[name]
    return FetchPlan(wanted, authors)


def callable_of(peers: Iterable[str], uplinks: Mapping[str, float]) -> list[str]:
    """Return the peers that can be called; members in client mode have an uplink of zero (`Roster.uplinks`)."""
    return [peer for peer in peers if uplinks[peer]]


def preferred(puller: str, name: str, peers: Iterable[str], uplinks: Mapping[str, float] | None = None) -> list[str]:
    """Return peers in the order in which `puller` should ask them for `name`.

    A peer comes first with a probability of its share of the uplinks, drawn by hash: so pullers spread over the
    peers, and two pullers seldom ask in the same order.

    Source: weighted rendezvous hashing (Schindelhauer and Schomaker, 2005).

    Args:
        puller: The peer that asks.
        name: The version.
        peers: Peers that have it, or will soon.
        uplinks: In 10^6 bits per second; a peer without an entry counts as the fastest.
    """
    weights = uplinks or {}
    fastest = max(weights.values(), default=1.0)

    def lot(peer: str) -> tuple[float, str]:
        drawn = int.from_bytes(hashlib.sha256(f"{puller}/{name}/{peer}".encode()).digest()[:6], "big")
        return -math.log((drawn + 1) / (2**48 + 1)) / max(weights.get(peer, fastest), MIN_UPLINK), peer

    return sorted(peers, key=lot)


def replicas(
    groups: Mapping[VectorName, Peers], copies: int, uplinks: Mapping[str, float]
) -> dict[VectorName, tuple[str, ...]]:
    """Return the peers that keep a copy of each slot until the next round, beside its holders.

    Every member computes the same. The peer that keeps least comes next, ties by lot; if no holder can be called, peers
    that can come first, because adopters could fetch the slot from no one else.

    Args:
        groups: Members of each group of the committed round.
        copies: Peers that each slot should live on at least; slots with so many holders need no replica.
        uplinks: Of the roster's members.
    """
    kept: dict[VectorName, tuple[str, ...]] = {}
    load: Counter[str] = Counter()
    for name in sorted(set(groups) - {SHARED}):
        holders = groups[name]
        others = set(groups[SHARED]) - set(holders)
        first = others if callable_of(holders, uplinks) else set(callable_of(others, uplinks))
        willing = sorted(others, key=lambda peer: (peer not in first, load[peer], _lot(name, peer)))
        chosen = tuple(willing[: max(0, copies - len(holders))])
        load.update(chosen)
        if chosen:
            kept[name] = chosen
    return kept


def _lot(name: str, peer: str) -> bytes:
    return hashlib.sha256(f"{name}/{peer}".encode()).digest()


# ---------------------------------------------------------------------- a budget of refreshed slots


def staleness_bound(num_slots: int, budget: int) -> int:
    """Return the most rounds that a slot may lie behind before it is fetched: `ceil(n / ceil(B / 2))`.

    `choose` keeps it, however tokens are routed. When a slot is not chosen, `ceil(B / 2)` slots that have waited as
    long or longer are; they come behind it from then on, and there are `n - 1` other slots.

    Args:
        num_slots: n, slots that others train.
        budget: B, slots fetched in a round.
    """
    return -(-num_slots // -(-budget // 2))


def choose(rounds_behind: Mapping[int, int], routed: Mapping[int, int], budget: int) -> tuple[int, ...]:
    """Return the slots to fetch in this round, ascending.

    First come slots at `staleness_bound`; then, with half of what is left of the budget, those that most tokens were
    routed to; then those that have waited longest. A slot exceeds the bound only if fetching failed or the others'
    slots became more.

    Args:
        rounds_behind: Rounds that this peer's version of each slot lies behind, for all slots that others train.
        routed: Tokens routed to each slot in the round.
        budget: Slots to fetch.
    """
    bound = staleness_bound(len(rounds_behind), budget)
    oldest = sorted(rounds_behind, key=lambda slot: (-rounds_behind[slot], slot))
    chosen = [slot for slot in oldest if rounds_behind[slot] >= bound][:budget]
    busiest = sorted(set(oldest) - set(chosen), key=lambda slot: (-routed.get(slot, 0), -rounds_behind[slot], slot))
    chosen += busiest[: (budget - len(chosen)) // 2]
    rest = [slot for slot in oldest if slot not in chosen]
    return tuple(sorted(chosen + rest[: budget - len(chosen)]))


def affordable(
    rounds_behind: Mapping[VectorName, int],
    routed: Mapping[int, int],
    budget: int | None,
    held: Collection[VectorName],
) -> set[VectorName]:
    """Return the versions to fetch: the budget's slots of others, and everything else.

    Args:
        rounds_behind: Rounds that this peer's version or kept form lies behind, by name, for all that can be fetched.
        routed: Tokens routed to each slot.
        budget: Slots of others to fetch; None fetches all.
        held: Vectors that this peer trains; it needs all of them.
    """
    if budget is None:
        return set(rounds_behind)
    others = {name.slot: name for name in rounds_behind if name.slot is not None and name.weights not in held}
    fetched = choose({slot: rounds_behind[name] for slot, name in others.items()}, routed, budget) if budget else ()
    return set(rounds_behind) - {name for slot, name in others.items() if slot not in fetched}
