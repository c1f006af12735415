"""What a peer needs after a certificate, which slots it replicates, and what it fetches first.

Pure functions of what all peers know, without clock, network or disk.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from spes_p2p.swarm.certificate import MAX_REPLICATED, Body
from spes_p2p.swarm.names import SHARED, VectorName


def wanted(
    body: Body, masters: Collection[int], kept_name: Callable[[VectorName], VectorName], start: Mapping[VectorName, str]
) -> dict[VectorName, str]:
    """Return the digest of each version that a peer needs after a certificate; empty for one that the seed makes.

    One rule for newcomers, late peers, adopters, replicas, returning peers and the normal round.

    Args:
        masters: Slots whose fp32 weights the peer needs, because it trains or replicates them.
        kept_name: Returns the name of what all others store of a slot (`Anchors.kept_name`).
        start: Digests of the versions of round 0, if the run starts from files.
    """
    slots = map(VectorName.of_slot, range(len(body.slots)))
    names = (SHARED, *(name if name.slot in masters else kept_name(name) for name in slots))
    return {name: certified(body, name, start) for name in names}


def certified(body: Body, name: VectorName, start: Mapping[VectorName, str]) -> str:
    """Return the digest of the version of a vector that counts after a body; empty for one that the seed makes."""
    if name.slot is None:
        digest = body.shared
    else:
        state = body.slots[name.slot]
        digest = (state.kept or "") if name.is_kept else state.digest
    return digest or start.get(name, "")


def makers_of(body: Body, me: str) -> dict[VectorName, list[str]]:
    """Return the other peers that made each slot's version, of the slots that a round has changed."""
    made = {slot for slot, state in enumerate(body.slots) if state.round == body.round}
    makers: dict[VectorName, list[str]] = {}
    for member in body.members:
        for slot in made.intersection(member.slots) if member.peer_id != me else ():
            makers.setdefault(VectorName.of_slot(slot), []).append(member.peer_id)
    return makers


def replicas(body: Body, copies: int) -> dict[int, tuple[str, ...]]:
    """Return the replicas of each slot in the round after a body: members that have its fp32 weights beside holders.

    A replica stays as long as it is needed, because a new one must fetch the weights. New ones are peers that can be
    called, then those that replicate least, then voters; ties are drawn by hash.

    Args:
        body: Its members are considered, and the slots that it has a version of.
        copies: Holders and replicas that each slot should have at least.
    """
    members = {member.peer_id: member for member in body.members}
    holders: dict[int, set[str]] = {slot: set() for slot, state in enumerate(body.slots) if state.digest}
    chosen: dict[int, list[str]] = {slot: [] for slot in holders}
    for member in body.members:
        for slot in holders.keys() & member.slots:
            holders[slot].add(member.peer_id)
        for slot in chosen.keys() & member.replicates:
            chosen[slot].append(member.peer_id)
    chosen = {slot: peers[: max(0, copies - len(holders[slot]))] for slot, peers in chosen.items()}
    load = Counter(peer for peers in chosen.values() for peer in peers)
    for slot, peers in chosen.items():
        willing = [peer for peer in members.keys() - holders[slot] - set(peers) if load[peer] < MAX_REPLICATED]
        willing.sort(key=lambda p: (members[p].calls_only, load[p], p not in body.voters, _lot(f"{slot}/{p}")))
        new = willing[: max(0, copies - len(holders[slot]) - len(peers))]
        load.update(new)
        peers += new
    return {slot: tuple(peers) for slot, peers in chosen.items() if peers}


def _lot(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


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
    """
    if not budget:
        return ()
    bound = staleness_bound(len(rounds_behind), budget)
    oldest = sorted(rounds_behind, key=lambda slot: (-rounds_behind[slot], slot))
    chosen = [slot for slot in oldest if rounds_behind[slot] >= bound][:budget]
    busiest = sorted(set(oldest) - set(chosen), key=lambda slot: (-routed.get(slot, 0), -rounds_behind[slot], slot))
    chosen += busiest[: (budget - len(chosen)) // 2]
    rest = [slot for slot in oldest if slot not in chosen]
    return tuple(sorted(chosen + rest[: budget - len(chosen)]))
