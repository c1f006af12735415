"""Which versions a peer fetches after a round, from which peers, and which it keeps for others."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from spes_p2p.swarm.roster import SHARED, Groups, Member, slot_name

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


def staleness_bound(num_slots: int, budget: int) -> int:
    """Return the most rounds that a slot may lie behind before it is fetched: `ceil(n / ceil(B / 2))`.

    `choose` keeps it whatever is routed where. A slot that is not chosen has seen `ceil(B / 2)` others chosen that had
    waited as long or longer; these come behind it from then on, and there are `n - 1` others.

    Args:
        num_slots: n, that others train.
        budget: B, to fetch in a round.
    """
    return -(-num_slots // -(-budget // 2))


def choose(rounds_behind: Mapping[int, int], routed: Mapping[int, int], budget: int) -> tuple[int, ...]:
    """Return the slots to fetch in this round, ascending.

    First those that have waited as long as they may; then, with half of what is left of the budget, those that most
    tokens were routed to; then those that have waited longest. None of them lies behind by more than
    `staleness_bound` when it is chosen, unless fetching failed, or others' slots became more.

    Args:
        rounds_behind: Rounds by which this peer's version lies behind the newest, by slot, for all that others train.
        routed: Tokens routed to each slot in the round; who is not in it got none.
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
    rounds_behind: Mapping[str, int], routed: Mapping[int, int], budget: int | None, held: Collection[str]
) -> set[str]:
    """Return the names of the versions to fetch: of the others' slots as many as a peer takes, and everything else.

    Args:
        rounds_behind: Rounds by which this peer's version lies behind the newest, by name, for all there is to fetch.
        routed: Tokens routed to each slot.
        budget: Slots of others to fetch; None fetches all.
        held: What this peer trains; it needs all of that.
    """
    if budget is None:
        return set(rounds_behind)
    others = {
        int(name.removeprefix("slot-")): behind
        for name, behind in rounds_behind.items()
        if name.startswith("slot-") and name not in held
    }
    return set(rounds_behind) - {slot_name(slot) for slot in set(others) - set(choose(others, routed, budget))}


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
