"""Which of the others' slots a peer fetches, where its downlink does not carry all of them in a round."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spes_p2p.swarm.roster import slot_name


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
