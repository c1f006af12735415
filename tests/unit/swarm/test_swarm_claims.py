"""Claims: every peer computes the same allocation, and it covers what can be covered."""

import time

from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.swarm.claims import MOVED_SHARE, allocate, coverage, level
from spes_p2p.swarm.records import Claim

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGHJKLM"]


def claim(peer, slots, max_slots, state="active"):
    return Claim(peer_id=peer, state=state, slots=tuple(sorted(slots)), max_slots=max_slots, since=1.0)


@st.composite
def swarms(draw):
    count = draw(st.integers(1, 40))
    peers = draw(st.lists(st.sampled_from(PEERS), unique=True, min_size=1, max_size=8))
    claims = {}
    for peer in peers:
        max_slots = draw(st.integers(0, count))
        held = draw(st.sets(st.integers(0, count - 1), max_size=max_slots))
        claims[peer] = claim(peer, held, max_slots)
    return count, claims


@given(swarms())
def test_nobody_holds_more_than_its_capacity_or_a_slot_twice(swarm):
    count, claims = swarm
    for peer, slots in allocate("run", count, claims).items():
        assert len(slots) == len(set(slots)) <= claims[peer].max_slots
        assert all(0 <= slot < count for slot in slots)


@given(swarms())
def test_every_slot_is_covered_when_capacity_suffices(swarm):
    count, claims = swarm
    allocation = allocate("run", count, claims)
    if sum(min(c.max_slots, count) for c in claims.values()) >= count:
        assert min(coverage(allocation, count)) >= 1


@given(swarms(), st.randoms())
def test_allocation_does_not_depend_on_the_order_in_which_records_are_read(swarm, random):
    count, claims = swarm
    shuffled = list(claims.items())
    random.shuffle(shuffled)
    assert allocate("run", count, dict(shuffled)) == allocate("run", count, claims)


@given(swarms())
def test_allocation_is_stable_once_everybody_holds_it(swarm):
    count, claims = swarm
    first = allocate("run", count, claims)
    settled = {peer: claim(peer, slots, claims[peer].max_slots) for peer, slots in first.items()}
    assert allocate("run", count, settled) == first


@given(swarms())
def test_held_slots_are_kept_unless_an_orphan_needs_the_room(swarm):
    count, claims = swarm
    allocation = allocate("run", count, claims)
    orphans = coverage({peer: c.slots for peer, c in claims.items()}, count).count(0)
    given_up = sum(len(set(c.slots) - set(allocation[peer])) for peer, c in claims.items())
    assert given_up <= orphans


@given(st.integers(1, 24), st.integers(1, 8), st.data())
def test_fresh_peers_of_equal_capacity_cover_evenly(count, num_peers, data):
    max_slots = data.draw(st.integers(1, count))
    claims = {peer: claim(peer, (), max_slots, "joining") for peer in PEERS[:num_peers]}
    counts = coverage(allocate("run", count, claims), count)
    assert max(counts) - min(counts) <= 1


def test_a_dead_peers_slots_go_to_the_others():
    claims = {peer: claim(peer, (), 8, "joining") for peer in PEERS[:4]}
    before = allocate("run", 16, claims)
    survivors = {peer: claim(peer, before[peer], 8) for peer in PEERS[1:4]}
    assert min(coverage(allocate("run", 16, survivors), 16)) >= 1


def test_ties_fall_differently_in_different_runs():
    claims = {PEERS[0]: claim(PEERS[0], (), 1, "joining")}
    assert len({allocate(f"run{n}", 16, claims)[PEERS[0]] for n in range(32)}) > 4


@given(swarms())
def test_evening_out_exchanges_a_share_of_a_peers_slots_at_most_and_narrows_the_spread(swarm):
    count, claims = swarm
    full = allocate("run", count, claims)
    settled = {peer: claim(peer, slots, len(slots)) for peer, slots in full.items()}
    before, levelled = coverage(full, count), level("run", count, settled)
    after = coverage(levelled, count)
    assert all(len(set(levelled[peer]) - set(full[peer])) <= max(1, len(full[peer]) // MOVED_SHARE) for peer in full)
    assert sum(after) == sum(before) and max(after) - min(after) <= max(before) - min(before)


@given(swarms())
def test_evening_out_again_and_again_ends_with_an_even_coverage(swarm):
    count, claims = swarm
    for _ in range(2 + 2 * count):
        slots = level("run", count, claims)
        claims = {peer: claim(peer, slots[peer], claims[peer].max_slots) for peer in claims}
    counts = coverage(slots, count)
    assert max(counts) - min(counts) <= 1


@given(swarms())
def test_fresh_peers_of_any_capacity_cover_evenly(swarm):
    count, claims = swarm
    fresh = {peer: claim(peer, (), record.max_slots) for peer, record in claims.items()}
    counts = coverage(allocate("run", count, fresh), count)
    assert max(counts) - min(counts) <= 1


def test_few_peers_with_many_slots_even_out_as_fast_as_more_of_them():
    """One exchange per peer and lease would take 16 leases."""
    claims = {PEERS[0]: claim(PEERS[0], range(64), 64), PEERS[1]: claim(PEERS[1], range(64), 64)}
    claims |= {peer: claim(peer, range(32 * half, 32 * half + 32), 32) for half, peer in enumerate(PEERS[2:4])}
    claims[PEERS[4]] = claim(PEERS[4], range(96, 128), 32)
    for _ in range(8):
        slots = level("run", 128, claims)
        claims = {peer: claim(peer, slots[peer], claims[peer].max_slots) for peer in claims}
    counts = coverage(slots, 128)
    assert max(counts) - min(counts) <= 1


def test_a_thousand_peers_are_allocated_in_less_than_a_second():
    peers = [f"Qm{number:044d}".replace("0", "z") for number in range(1000)]
    fresh = {peer: claim(peer, (), 1 + number % 16) for number, peer in enumerate(peers)}
    began = time.process_time()
    allocation = allocate("run", 128, fresh)
    assert time.process_time() - began < 1.0
    settled = {peer: claim(peer, slots, fresh[peer].max_slots) for peer, slots in allocation.items()}
    assert allocate("run", 128, settled) == allocation


def test_a_run_without_slots_allocates_nothing():
    """So it is for a dense model, however many slots peers say that they could train."""
    claims = {peer: claim(peer, (), 3) for peer in PEERS[:2]}
    nothing = {peer: () for peer in claims}
    assert allocate("run", 0, claims) == level("run", 0, claims) == nothing
