"""A peer that fetches some of the others' slots in a round falls behind with none of them for good."""

from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.training.holdings import choose, staleness_bound

SIZES = {"num_slots": st.integers(1, 40), "budget": st.integers(1, 45)}


@given(**SIZES, data=st.data())
def test_no_slot_lies_behind_by_more_than_the_bound_whatever_is_routed_where(num_slots, budget, data):
    bound = staleness_bound(num_slots, budget)
    assert bound <= -(-2 * num_slots // budget)
    behind = dict.fromkeys(range(num_slots), 1)
    for _ in range(3 * bound + 2):
        busy = data.draw(st.lists(st.integers(0, num_slots - 1), max_size=6))
        chosen = choose(behind, {slot: 100 - i for i, slot in enumerate(busy)}, budget)
        assert len(set(chosen)) == len(chosen) == min(budget, num_slots) and set(chosen) <= set(behind)
        assert max(behind.values()) <= bound
        behind = {slot: 1 if slot in chosen else rounds + 1 for slot, rounds in behind.items()}


@given(**SIZES, data=st.data())
def test_from_any_backlog_it_gets_back_below_the_bound(num_slots, budget, data):
    """After failed fetches, or a night asleep."""
    bound = staleness_bound(num_slots, budget)
    behind = {slot: data.draw(st.integers(1, 100)) for slot in range(num_slots)}
    for _ in range(bound):
        chosen = choose(behind, {num_slots - 1: 9}, budget)
        behind = {slot: 1 if slot in chosen else rounds + 1 for slot, rounds in behind.items()}
    assert max(behind.values()) <= bound


def test_half_goes_to_where_tokens_are_routed_and_the_rest_in_turn():
    behind = {0: 3, 1: 2, 2: 1, 3: 1, 4: 2, 5: 1, 6: 1, 7: 1}
    assert staleness_bound(8, 4) == 4 and choose(behind, {2: 5, 6: 50, 7: 10}, 4) == (0, 1, 6, 7)
    assert choose(behind | {5: 4, 3: 4}, {2: 5, 6: 50, 7: 10}, 4) == (0, 3, 5, 6), "those at the bound come first"


def test_a_budget_for_all_fetches_all():
    assert choose(dict.fromkeys((3, 1, 2), 1), {}, 3) == choose(dict.fromkeys((3, 1, 2), 1), {}, 9) == (1, 2, 3)
    assert choose({}, {}, 2) == ()
