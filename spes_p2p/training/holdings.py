"""What a peer stores of the model after a certificate, for whom it keeps slots, and what it fetches first.

Pure functions of what all peers know, without clock, network or disk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping

from spes_p2p.swarm.certificate import MAX_REPLICATED, Body
from spes_p2p.swarm.names import SHARED, VectorName


def wanted(
    body: Body, masters: Collection[int], *, has_forms: bool, start: Mapping[VectorName, str]
) -> dict[VectorName, str]:
    """Return the digest of each version that a peer needs after a certificate; empty for one that the seed makes.

    One rule for newcomers, late peers, adopters, replicas, returning peers and the normal round.

    Args:
        body: Of the certificate.
        masters: Slots whose fp32 weights the peer needs, because it trains or replicates them.
        has_forms: Whether all others have kept forms of a slot; otherwise its fp32 weights serve as such.
        start: Digests of the versions of round 0, if the run starts from files.
    """
    slots = map(VectorName.of_slot, range(len(body.slots)))
    names = (SHARED, *(name.kept if has_forms and name.slot not in masters else name for name in slots))
    return {name: certified(body, name, start) for name in names}


def certified(body: Body, name: VectorName, start: Mapping[VectorName, str]) -> str:
    """Return the digest of the version of some weights that counts after a body; empty for one that the seed makes."""
    if name.slot is None:
        digest = body.shared
    else:
        state = body.slots[name.slot]
        digest = (state.kept or "") if name.is_kept else state.digest
    return digest or start.get(name, "")


def keepers(body: Body, copies: int) -> dict[int, tuple[str, ...]]:
    """Return the replicas of each slot in the round after a body: members that keep its fp32 weights beside holders.

    A replica stays as long as it is needed, because a new one must fetch the weights. New ones are peers that can be
    called, then those that keep least, then voters; ties are drawn by hash.

    Args:
        body: Its members are considered, and the slots that it has a version of.
        copies: Peers that each slot should live on at least; slots with so many holders need no replica.
    """
    members = {member.peer_id: member for member in body.members}
    holders: dict[int, set[str]] = {slot: set() for slot, state in enumerate(body.slots) if state.digest}
    kept: dict[int, list[str]] = {slot: [] for slot in holders}
    for member in body.members:
        for slot in holders.keys() & member.slots:
            holders[slot].add(member.peer_id)
        for slot in kept.keys() & member.keeps:
            kept[slot].append(member.peer_id)
    kept = {slot: peers[: max(0, copies - len(holders[slot]))] for slot, peers in kept.items()}
    load = Counter(peer for peers in kept.values() for peer in peers)
    for slot, peers in kept.items():
        willing = [peer for peer in members.keys() - holders[slot] - set(peers) if load[peer] < MAX_REPLICATED]
        willing.sort(key=lambda p: (members[p].calls_only, load[p], p not in body.voters, _lot(f"{slot}/{p}")))
        new = willing[: max(0, copies - len(holders[slot]) - len(peers))]
        load.update(new)
        peers += new
    return {slot: tuple(peers) for slot, peers in kept.items() if peers}


def _lot(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


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
    masters: Collection[int],
) -> set[VectorName]:
    """Return the versions to fetch: the budget's slots of others, and everything else.

    Args:
        rounds_behind: Rounds that this peer's version or kept form lies behind, by name, for all that can be fetched.
        routed: Tokens routed to each slot.
        budget: Slots of others to fetch; None fetches all.
        masters: Slots that this peer trains or replicates; it needs all of them.
    """
    if budget is None:
        return set(rounds_behind)
    others = {name.slot: name for name in rounds_behind if name.slot is not None and name.slot not in masters}
    fetched = choose({slot: rounds_behind[name] for slot, name in others.items()}, routed, budget) if budget else ()
    return set(rounds_behind) - {name for slot, name in others.items() if slot not in fetched}
