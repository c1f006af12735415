"""Groups and round ends derive from a roster alone, identically on all members."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_p2p.codecs.format import Format, Segment
from spes_p2p.config import RoundConfig
from spes_p2p.swarm.averaging.partition import GroupPlan
from spes_p2p.swarm.certificate import MemberEntry
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.roster import MAX_DISTRUSTED, MAX_LINKS_BYTES, Member, Roster, stated_links
from tests.support.agreement import last_body, members

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]
LAST = last_body(PEERS)


def member(index, *, slots=(0, 1), tokens=100, rate=10.0, ready_at=50.0, **changes):
    fields = {"round": LAST.round, "previous": LAST.digest, "tokens": tokens, "slots": slots, "ready_at": ready_at}
    return Member(peer_id=PEERS[index], tokens_per_second=rate, sync_seconds=2.0, **fields | changes)


def roster_of(*members, last=LAST):
    return Roster(members, last)


def test_shared_is_averaged_with_all_members_and_slots_with_their_holders():
    roster = roster_of(member(2, slots=(1, 5)), member(0, slots=(0, 1)), member(1, slots=()))
    assert roster.groups == {
        "shared": tuple(PEERS[:3]),
        "slot-0": (PEERS[0],),
        "slot-1": (PEERS[0], PEERS[2]),
        "slot-5": (PEERS[2],),
    }
    assert roster.round == 20 and roster.behind == ()


def test_an_entry_names_each_slot_once():
    """One that named a slot twice made a roster that no voter may sign, in each attempt."""
    with pytest.raises(ValidationError, match="a slot is named twice"):
        Member.model_validate_json(member(0).model_copy(update={"slots": (1, 1)}).model_dump_json())


@given(st.permutations(range(5)))
def test_groups_do_not_depend_on_the_order_of_the_roster(order):
    starts = [{}, {"slot-3": (2, "1" * 64)}, {"slot-1": (2, "1" * 64)}, {"slot-3": (2, "2" * 64)}, {}]
    previous = [LAST.digest] * 4 + ["0" * 64]
    members = [member(i, slots=(i % 3, 3), starts=starts[i], previous=previous[i]) for i in range(5)]
    roster, shuffled = roster_of(*members), roster_of(*(members[i] for i in order))
    assert (shuffled.round, shuffled.behind, shuffled.groups) == (roster.round, roster.behind, roster.groups)
    assert shuffled.entries == roster.entries


def test_members_that_start_from_another_certificate_are_behind_however_many_they_are():
    others = [member(i, round=9, previous="c" * 64) for i in (1, 2, 3)]
    roster = roster_of(member(0), *others)
    assert roster.behind == tuple(PEERS[1:4])
    assert roster.groups == {"shared": (PEERS[0],), "slot-0": (PEERS[0],), "slot-1": (PEERS[0],)}


def left_out(count, **changes):
    """Return the members that are left out of a roster of so many after a certificate that knows the first two."""
    last = last_body(PEERS[:2], **changes)
    return set(roster_of(*(member(i, previous=last.digest) for i in range(count)), last=last).behind)


def test_a_roster_has_only_a_few_members_that_no_certificate_knows():
    """They are drawn by the last certificate, so that no leader chooses them."""
    assert left_out(4) == set()
    out = left_out(8)
    assert len(out) == 4 and not out & set(PEERS[:2])
    assert left_out(8, members=members(PEERS[4])).isdisjoint({PEERS[4]})
    assert any(left_out(8, round=round) != out for round in range(10, 20))


def test_before_the_first_certificate_no_member_is_left_out_as_unknown():
    assert left_out(8, round=0) == set()


def test_members_that_no_certificate_knows_reduce_nothing_unless_only_they_could():
    last = last_body(PEERS[:2], members=members(*PEERS[3:6]))
    roster = roster_of(*(member(i, uplink_mbit=10.0) for i in range(6)), last=last)
    assert roster.reducing(PEERS[:4]) == [10.0, 10.0, 0.0, 10.0]
    assert roster.reducing([PEERS[2]]) == [10.0]


def test_in_a_small_roster_those_that_may_not_vote_reduce_only_what_nobody_else_can():
    last = last_body(PEERS[:2], members=members(PEERS[2]))
    roster = roster_of(*(member(i, uplink_mbit=10.0) for i in range(4)), last=last)
    assert roster.reducing(PEERS[:4]) == [10.0, 10.0, 0.0, 0.0]
    assert roster.reducing(PEERS[2:4]) == [10.0, 10.0]
    hidden = [member(i, uplink_mbit=10.0, calls_only=i < 2) for i in (0, 1, 3)]
    assert roster_of(*hidden, last=last).reducing([PEERS[0], PEERS[1], PEERS[3]]) == [0.0, 0.0, 10.0]


def behind_router(index, *linked, **changes):
    """Return a member that takes no calls, and states to be connected to some others."""
    return member(index, uplink_mbit=10.0, calls_only=True, links=tuple(PEERS[each] for each in linked), **changes)


def test_a_member_without_calls_reduces_where_all_others_are_connected_to_it():
    called = member(0, uplink_mbit=20.0)
    met = roster_of(called, behind_router(1, 0, 2), behind_router(2, 0, 1))
    assert met.reducing(PEERS[:3]) == [20.0, 10.0, 10.0]
    partly = roster_of(called, behind_router(1, 0, 2), behind_router(2, 0, 1), behind_router(3, 0))
    assert partly.reducing(PEERS[:4]) == [20.0, 0.0, 0.0, 0.0]
    assert partly.reducing(PEERS[:3]) == [20.0, 10.0, 10.0], "in the smaller group of a slot they do"
    unmet = roster_of(called, behind_router(1, 2), behind_router(2, 1))
    assert unmet.reducing(PEERS[:3]) == [20.0, 0.0, 0.0], "the one that can be called cannot call them"


def test_a_link_that_only_one_of_two_states_does_not_count():
    roster = roster_of(member(0, uplink_mbit=20.0), behind_router(1, 0, 2), behind_router(2, 0))
    assert roster.reducing(PEERS[:3]) == [20.0, 0.0, 0.0]
    assert roster.uplinks_to(PEERS[1]) == {PEERS[0]: 20.0, PEERS[1]: 0.0, PEERS[2]: 0.0}


def test_two_holders_without_calls_average_their_slot_if_they_are_connected():
    called = member(0, slots=())
    assert roster_of(called, behind_router(1, slots=(3,)), behind_router(2, slots=(3,))).groups["slot-3"] == (PEERS[1],)
    met = roster_of(called, behind_router(1, 2, slots=(3,)), behind_router(2, 1, slots=(3,)))
    assert met.groups["slot-3"] == (PEERS[1], PEERS[2])


def start(round, digit):
    return {"slot-0": (round, digit * 64)}


@pytest.mark.parametrize(
    ("starts", "averaging"),
    [
        ([{}, start(9, "a"), start(9, "a")], (0,)),
        ([start(2, "a"), start(3, "b"), start(2, "a")], (1,)),
        ([start(3, "b"), start(3, "a"), start(3, "b")], (0, 2)),
        ([start(3, "b"), start(3, "a"), start(2, "c")], (1,)),
        ([start(3, "b")], (0,)),
    ],
    ids=["certified", "newest", "most frequent", "smaller digest", "alone"],
)
def test_holders_of_a_slot_average_from_one_version_the_certified_one_if_any_has_it(starts, averaging):
    members = [member(i, slots=(0,), starts=each) for i, each in enumerate(starts)]
    roster = roster_of(*members)
    assert roster.groups["slot-0"] == tuple(PEERS[i] for i in averaging)
    assert roster.behind == () and len(roster.groups["shared"]) == len(starts)


def test_members_without_the_certified_shared_parameters_are_behind_unless_none_has_them():
    lost = {"shared": (6, "a" * 64)}
    assert roster_of(member(0), member(1, starts=lost), member(2, starts=lost)).behind == tuple(PEERS[1:3])
    assert roster_of(member(1, starts=lost), member(2, starts=lost)).behind == ()


def test_a_certificate_names_the_members_with_the_slots_that_they_averaged():
    starts = {"slot-1": (2, "a" * 64)}
    roster = roster_of(member(1, tokens=5, calls_only=True), member(0, starts=starts), member(2, previous="c" * 64))
    assert [(e.peer_id, e.tokens, e.slots, e.calls_only) for e in roster.entries] == [
        (PEERS[0], 100, (0,), False),
        (PEERS[1], 5, (0, 1), True),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": -1.0},
        {"slots": [-1]},
        {"slots": list(range(200))},
        {"starts": {"../../etc": [3, "a" * 64]}},
        {"starts": {"shared": [3, "A" * 64]}},
        {"starts": {"shared": [-1, "a" * 64]}},
        {"previous": ""},
        {"distrusts": [PEERS[1]] * (MAX_DISTRUSTED + 1)},
        {"ready_at": float("inf")},
        {"extra": 1},
    ],
)
def test_a_malformed_roster_entry_is_refused(change):
    entry = json.loads(member(0).model_dump_json()) | change
    with pytest.raises(ValidationError):
        Member.model_validate_json(json.dumps(entry))


def test_a_well_formed_roster_entry_survives_the_wire():
    assert Member.model_validate_json(member(0).model_dump_json()) == member(0)


def test_the_round_ends_when_the_swarm_is_expected_to_reach_its_tokens():
    config = RoundConfig(tokens=1000, min_seconds=1, max_seconds=100)
    assert (
        round_end(config, 1, config.tokens, [member(0, rate=10.0), member(1, rate=40.0, ready_at=55.0)])
        == 55.0 + 2.0 + 20.0
    )


def test_the_round_is_never_shorter_or_longer_than_its_bounds():
    config = RoundConfig(tokens=1000, min_seconds=30, max_seconds=100)
    assert round_end(config, 1, config.tokens, [member(0, rate=1e9)]) == 52.0 + 30
    assert round_end(config, 1, config.tokens, [member(0, rate=0.0)]) == 52.0 + 100
    growing = config.model_copy(update={"growing": 2})  # a hundredth, a tenth, and then whole
    ends = [round_end(growing, round, 1000, [member(0, rate=1e9)]) - 52.0 for round in (1, 2, 3)]
    assert ends == [5.0, 5.0, 30.0], "no growing round is shorter than 5 s"
    slow = [round_end(growing, round, 1000, [member(0, rate=10.0)]) - 52.0 for round in (1, 2, 3)]
    assert slow == pytest.approx([5.0, 10.0, 100.0])


@pytest.mark.parametrize("count", range(3, 9))
def test_a_speed_that_nobody_has_makes_no_round_the_shortest(count):
    config = RoundConfig(tokens=10_000, min_seconds=1, max_seconds=10_000)
    honest = [member(i, rate=10.0) for i in range(1, count)]
    seconds = round_end(config, 1, config.tokens, [member(0, rate=1e12), *honest]) - 52.0
    assert seconds == pytest.approx(10_000 / (10.0 * (count - 1) + 40.0)), "as with a machine of four times the speed"
    first = [entry.model_copy(update={"tokens": 0}) for entry in honest]
    assert round_end(config, 1, config.tokens, [member(0, rate=1e12, tokens=1), *first]) - 52.0 == seconds, (
        "nobody else has trained yet"
    )


@pytest.mark.parametrize(
    "rates", [[10.0], [10.0, 1000.0], [40.0, 10.0], [10.0] * 3 + [2.5], [10.0] * 4 + [30.0, 2.5, 0.0]]
)
def test_unequal_machines_count_for_what_they_are_and_of_two_nobody_is_cut(rates):
    config = RoundConfig(tokens=10_000, min_seconds=1, max_seconds=10_000)
    members = [member(i, rate=rate) for i, rate in enumerate(rates)]
    assert round_end(config, 1, config.tokens, members) == 52.0 + 10_000 / sum(rates)
    assert round_end(config, 1, config.tokens, members[::-1]) == round_end(config, 1, config.tokens, members)


def test_claimed_tokens_are_bounded_by_speed_and_time():
    assert clamp_tokens(500, 100.0, 10.0) == 500
    assert clamp_tokens(10**12, 100.0, 10.0) == 1101
    assert clamp_tokens(-5, 100.0, 10.0) == 0


def hidden(index, **changes):
    return member(index, **changes).model_copy(update={"calls_only": True})


def test_of_holders_that_cannot_be_called_only_the_first_counts():
    roster = roster_of(hidden(1, slots=(4,)), hidden(0, slots=(4, 5)), member(2, slots=(5,)))
    assert roster.groups["slot-4"] == (PEERS[0],)
    assert roster.groups["slot-5"] == (PEERS[0], PEERS[2])
    assert roster.groups["shared"] == tuple(PEERS[:3])


def test_peers_that_cannot_be_called_send_nothing():
    assert roster_of(member(0), hidden(1)).uplinks == {PEERS[0]: 1.0, PEERS[1]: 0.0}


@pytest.mark.parametrize("num_peers", [4, 52, 256])
def test_what_members_state_of_their_links_fits_into_the_leaders_message(num_peers):
    peers = [hashed_peer_id(str(index).encode()) for index in range(num_peers)]
    slots = {peer: (index % 64,) for index, peer in enumerate(peers)}
    last = last_body(PEERS[:1], members=tuple(MemberEntry(peer_id=p, tokens=1, slots=slots[p]) for p in sorted(peers)))
    stated = {peer: stated_links(peer, [other for other in peers if other != peer], last) for peer in peers}
    assert sum(len(json.dumps(links, separators=(",", ":"))) - 1 for links in stated.values()) <= MAX_LINKS_BYTES
    if num_peers <= 52:
        assert all(len(links) == num_peers - 1 for links in stated.values())
    both = sum(peer in stated[other] for peer, links in stated.items() for other in links)
    assert both >= sum(map(len, stated.values())) * 3 / 4, "both ends choose mostly the same links"
    for peer in peers:
        together = {other for other in peers if other != peer and slots[other] == slots[peer]}
        assert together <= set(stated[peer]), "those that average a slot together come first"


def test_replicas_receive_a_slots_mean_and_neither_weigh_nor_reduce_nor_count_in_its_group():
    holding, replica = member(0, slots=(4,)), member(1, slots=(), replicates=(4,), tokens=10**6)
    roster = roster_of(holding, replica, member(2, slots=()))
    assert roster.groups["slot-4"] == (PEERS[0],) and roster.replicas == {"slot-4": (PEERS[1],)}
    format = Format([Segment(10**5, "int4")])
    plan = GroupPlan.in_roster(roster, roster.groups["slot-4"], format, roster.replicas["slot-4"])
    assert plan.senders == (0,) and plan.weights[1] == 0.0 and plan.slices[1] == [] and plan.is_sole
    assert [each.replicates for each in roster.entries] == [(), (4,), ()]
    astray = member(0, slots=(4,), starts={"slot-4": (3, "a" * 64)})
    assert roster_of(astray, replica).replicas == {}, "a replica starts from the certified version"


def test_a_replica_reduces_where_no_holder_is_connected_to_all_others():
    first, second = behind_router(1, slots=(3,)), behind_router(2, slots=(3,))
    roster = roster_of(member(0, slots=(), replicates=(3,)), first, second)
    assert roster.groups["slot-3"] == tuple(PEERS[1:3]) and roster.replicas["slot-3"] == (PEERS[0],)
    assert roster.reducing(PEERS[:3], roster.replicas["slot-3"]) == [10.0, 0.0, 0.0]
    linked = behind_router(1, 0, 2, slots=(3,)), behind_router(2, 1, slots=(3,))
    met = roster_of(member(0, slots=(), replicates=(3,)), *linked)
    assert met.reducing(PEERS[:3], met.replicas["slot-3"])[0] == 0.0
    unlinked = roster_of(first, behind_router(2, slots=(), replicates=(3,)))
    assert unlinked.groups["slot-3"] == (PEERS[1],) and unlinked.replicas == {}
