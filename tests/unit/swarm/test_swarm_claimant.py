"""One peer's decisions over time: orphans at once, everything else rarely, and everybody comes to rest."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.claims import Claimant, allocate, coverage, level, orphans
from spes_p2p.swarm.records import Claim

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGHJKLM"]
A, B, C = PEERS[:3]
LEASE, HEARTBEAT = 30.0, 10.0
ROUNDS = RoundConfig(lease_seconds=LEASE, heartbeat_seconds=HEARTBEAT)


def claim(peer, slots, max_slots):
    return Claim(peer_id=peer, state="active", slots=tuple(sorted(slots)), max_slots=max_slots, since=1.0)


def claims(**slots):
    """Claims of peers A, B, C, all full."""
    return {peer: claim(peer, held, len(held)) for peer, held in zip((A, B, C), slots.values(), strict=False)}


def claimant(peer=A, num_slots=4, settings=ROUNDS):
    return Claimant("run", peer, num_slots, settings)


def uneven():
    """Slot 3 has one holder, slot 0 three; only A may be the one to change that."""
    return {A: claim(A, {0, 1}, 2), B: claim(B, {0, 3}, 2), C: claim(C, {0, 2}, 2)} | {
        PEERS[3]: claim(PEERS[3], {1, 2}, 2)
    }


# ---------------------------------------------------------------------- coverage and cool-down


def test_in_the_middle_of_a_round_nothing_changes_but_for_orphans():
    one = claimant()
    records = {A: claim(A, {0}, 3), B: claim(B, {1, 2, 3}, 3)}
    assert one.target(0.0, records, in_round=True) == (0,), "there is room, but no orphan"
    assert one.target(10.0, {A: records[A], B: claim(B, {1}, 1)}, in_round=True) == (0, 2, 3)


def test_coverage_is_evened_out_once_per_cooldown():
    records = {peer: claim(peer, {0, 1, 2, 3}, 4) for peer in PEERS[:3]}
    peers = {peer: claimant(peer, 8) for peer in records}
    for now in (0.0, 40.0):
        for peer, one in peers.items():
            target = one.target(now, records)
            assert len(set(target) - set(records[peer].slots)) <= 4
            records[peer] = claim(peer, target, 4)
    assert max(coverage({p: c.slots for p, c in records.items()}, 8)) <= 2


def test_who_has_just_changed_something_waits_for_a_lease():
    one, records = claimant(), uneven()
    exchanging = next(p for p, slots in level("run", 4, records).items() if slots != records[p].slots)
    one = claimant(exchanging)
    held = records[exchanging].slots
    assert one.target(0.0, records) == held, "the others have only just been seen"
    target = one.target(31.0, records)
    assert target != held and len(set(target) - set(held)) == 1
    assert one.target(40.0, records) == held, "its own record is old, say; it changes nothing more"
    assert one.target(62.0, records) == target


def test_an_orphan_does_not_wait_for_the_cooldown():
    there, back = claims(a={0}, b={0}), claims(a={1}, b={1})
    runs = (f"run{n}" for n in range(99))
    run = next(run for run in runs if allocate(run, 2, there)[A] == (1,) and allocate(run, 2, back)[A] == (0,))
    one = Claimant(run, A, 2, ROUNDS)
    assert one.target(0.0, there, in_round=True) == (1,)
    assert one.target(10.0, back, in_round=True) == (0,), "both have gone for the orphan, and left another"


def test_a_newcomer_has_no_weight_in_evening_out_until_it_has_stayed():
    records = uneven()
    exchanging = next(p for p, slots in level("run", 4, records).items() if slots != records[p].slots)
    newcomer = C if exchanging == A else A
    one, held = claimant(exchanging), records[exchanging].slots
    one.target(0.0, {p: c for p, c in records.items() if p != newcomer})
    assert one.target(31.0, records) == held
    assert one.target(62.0, records) != held


def test_an_orphan_that_its_taker_leaves_lying_falls_to_another():
    """B has room for it; but it has died, or does something else."""
    records = {A: claim(A, {0}, 1), B: claim(B, set(), 1), C: claim(C, {0}, 1)}
    peers = {peer: claimant(peer, 2) for peer in (A, C)}
    for now in (0.0, 10.0):
        assert all(one.target(now, records, in_round=True) == (0,) for one in peers.values())
    assert sorted(one.target(20.0, records, in_round=True) for one in peers.values()) == [(0,), (1,)]


# ---------------------------------------------------------------------- everything at once


class Claiming(RuleBasedStateMachine):
    """Peers come, go and act in any order, on records of any age; then they are left alone."""

    @initialize(count=st.integers(1, 12))
    def found(self, count):
        self.count, self.now = count, 0.0
        self.claimants: dict[str, Claimant] = {}
        self.records: dict[str, Claim] = {}
        self.old: dict[str, Claim] = {}
        self.moved: dict[tuple[str, int, bool], float] = {}

    @rule(peer=st.sampled_from(PEERS), data=st.data())
    def join(self, peer, data):
        if peer not in self.claimants:
            self.claimants[peer] = claimant(peer, self.count)
            self.records[peer] = claim(peer, (), data.draw(st.integers(0, self.count)))
            self.moved = {key: at for key, at in self.moved.items() if key[0] != peer}

    @rule(peer=st.sampled_from(PEERS))
    def vanish(self, peer):
        self.claimants.pop(peer, None)
        self.records.pop(peer, None)

    @rule(seconds=st.floats(0.1, 40))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def go_on(self):
        self.old = dict(self.records)

    @rule(peer=st.sampled_from(PEERS), is_round_end=st.booleans(), is_stale=st.booleans())
    def act(self, peer, is_round_end, is_stale):
        if peer not in self.claimants:
            return
        seen = {**(self.old if is_stale else self.records), peer: self.records[peer]}
        held = self.records[peer].slots
        if is_round_end:
            target = self.claimants[peer].target(self.now, seen)
        else:
            target = self.claimants[peer].target(self.now, seen, in_round=True)
        for slot in set(target) ^ set(held):
            is_adopted = slot in target
            since = self.now - self.moved.get((peer, slot, not is_adopted), float("-inf"))
            assert since >= LEASE or orphans(seen, self.count), f"{peer} undoes a change after {since} s"
            self.moved[peer, slot, is_adopted] = self.now
        self.records[peer] = claim(peer, target, self.records[peer].max_slots)  # refuses more slots than it can train

    @invariant()
    def slots_exist(self):
        assert all(0 <= slot < self.count for record in self.records.values() for slot in record.slots)

    def teardown(self):
        """Left alone, all hold what they can, evenly."""
        if not getattr(self, "records", None):
            return
        self.settings = ROUNDS
        self.claimants = {peer: claimant(peer, self.count) for peer in self.records}
        for _ in range(3 + 2 * self.count):
            self.now += LEASE + 1
            for peer in sorted(self.records):
                self.act(peer, True, False)
        counts = coverage({peer: record.slots for peer, record in self.records.items()}, self.count)
        assert sum(counts) == sum(record.max_slots for record in self.records.values())
        assert max(counts) - min(counts) <= 1


TestClaiming = Claiming.TestCase
TestClaiming.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
