"""Groups and round ends derive from a roster alone, identically on all members."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.config import RoundConfig
from spes_p2p.errors import RecordError
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.quorum import newest
from spes_p2p.swarm.roster import MAX_LAG, Member, Roster, lag_of

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]


def member(
    index,
    *,
    round=3,
    slots=(0, 1),
    slot_rounds=(),
    tokens=100,
    shared="a" * 16,
    slot_digest="b" * 16,
    rate=10.0,
    ready_at=50.0,
    **votes,
):
    anchors = {"shared": shared, **{f"slot-{slot}": slot_digest for slot in slots}}
    return Member(
        peer_id=PEERS[index],
        round=round,
        tokens=tokens,
        slots=slots,
        slot_rounds=slot_rounds,
        anchors=anchors,
        tokens_per_second=rate,
        ready_at=ready_at,
        sync_seconds=2.0,
        **votes,
    )


def test_shared_is_averaged_with_everyone_and_slots_with_their_holders():
    roster = Roster([member(2, slots=(1, 5)), member(0, slots=(0, 1)), member(1, slots=())])
    assert roster.groups == {
        "shared": tuple(PEERS[:3]),
        "slot-0": (PEERS[0],),
        "slot-1": (PEERS[0], PEERS[2]),
        "slot-5": (PEERS[2],),
    }
    assert roster.round == 3 and roster.behind == ()


@given(st.permutations(range(5)))
def test_groups_do_not_depend_on_the_order_of_the_roster(order):
    roster = Roster(member(i, round=3 + (i == 4), slots=(i % 3, 3)) for i in range(5))
    shuffled = Roster(roster[i] for i in order)
    assert (shuffled.round, shuffled.behind, shuffled.groups) == (roster.round, roster.behind, roster.groups)


def test_a_member_with_another_anchor_is_behind_and_its_slots_do_not_count():
    roster = Roster([member(0), member(1), member(2, round=2, shared="c" * 16)])
    assert roster.behind == (PEERS[2],)
    assert all(PEERS[2] not in peers for peers in roster.groups.values())


def test_a_tie_goes_to_the_later_round():
    roster = Roster([member(0, round=3), member(1, round=4, shared="c" * 16)])
    assert roster.round == 4 and roster.behind == (PEERS[0],)


def test_newcomers_do_not_outvote_those_who_have_committed():
    voters = tuple(PEERS[:3])
    ahead = [member(i, round=4, shared="c" * 16, voters=voters) for i in range(2)]
    left, newcomers = [member(2, voters=voters)], [member(i, voters=voters) for i in (3, 4)]
    assert Roster([*ahead, *left, *newcomers]).behind == tuple(PEERS[2:5])
    assert Roster([*left, *newcomers]).behind == ()
    assert Roster(newcomers).behind == ()


@pytest.mark.parametrize(
    ("electorates", "says"), [((6, 5, 5), ""), ((5, 6, 6), "only 3 of 6 peers with a vote met"), ((1, 5, 2**16), "")]
)
def test_peers_that_have_counted_differently_decide_alike_and_one_liar_decides_nothing(electorates, says):
    assert Roster([member(i, electorate=count) for i, count in enumerate(electorates)]).missing_quorum == says


def test_newcomers_do_not_make_up_for_missing_votes():
    """Of five, three have committed a round and two are left: with two newcomers they are four, and still only two."""
    known = {"electorate": 5, "voters": tuple(PEERS[:5])}
    left, newcomers = [member(i, **known) for i in range(2)], [member(i, **known) for i in (5, 6)]
    assert Roster([*left, *newcomers]).missing_quorum == "only 2 of 5 peers with a vote met"
    assert not Roster([*left, *newcomers, member(2, **known)]).missing_quorum


def test_nobody_has_a_vote_by_its_own_word():
    """Of five voters two are left out of the others' round: whoever claims to be a third makes no other of it."""
    left = [member(i, electorate=5, voters=tuple(PEERS[:5])) for i in range(2)]
    liar = member(6, electorate=5, voters=tuple(PEERS))
    assert Roster([*left, liar]).missing_quorum == "only 2 of 5 peers with a vote met"
    assert Roster([*left, liar]).behind == ()


def test_whoever_cannot_confirm_does_not_make_up_for_missing_votes():
    """A leader may have invented them: that their anchors are others' keeps them out of the group."""
    present = [member(i, electorate=5) for i in range(2)]
    invented = member(3, shared="c" * 16, electorate=0)
    assert Roster([*present, invented]).missing_quorum == "only 2 of 5 peers with a vote met"
    assert Roster([present[0]]).missing_quorum == "only 1 of 5 peers with a vote met"


def test_of_two_who_have_counted_differently_the_one_that_knows_of_more_is_believed():
    assert (
        Roster([member(0, electorate=4), member(1, electorate=3)]).missing_quorum == "only 2 of 4 peers with a vote met"
    )


def test_whoever_holds_the_newest_version_of_a_slot_is_not_outvoted_by_stale_adopters():
    stale = [member(i, slots=(0,), slot_rounds=(1,), slot_digest="a" * 16) for i in (1, 2)]
    roster = Roster([member(0, slots=(0,), slot_rounds=(3,)), *stale])
    assert roster.groups["slot-0"] == (PEERS[0],) and roster.behind == ()
    assert Roster(stale).groups["slot-0"] == (PEERS[1], PEERS[2]), "an orphan goes on from what is left"


def test_a_slot_that_is_ahead_of_its_members_model_does_not_count():
    """Its side of a partition has lost; nobody wins by naming a high number, and what is made here supersedes all."""
    ahead = member(0, slots=(0,), slot_rounds=(9,), slot_digest="a" * 16)
    roster = Roster([ahead, member(1, slots=(0,), slot_rounds=(2,))])
    assert roster.groups["slot-0"] == (PEERS[1],)
    alone = Roster([ahead])
    assert "slot-0" not in alone.groups, "its successor of round 4 would lose to other copies of it"
    assert alone.groups["shared"] == (PEERS[0],)


@pytest.mark.parametrize(
    ("lags", "goes_on"),
    [
        ([(0,), (0,)], False),
        ([(0,)], False),
        ([(2,), (2,)], True),  # an orphan that nobody has newer
        ([(0,), (2,)], True),  # one's word is not enough
        ([(0,), (0,), (2,)], False),
        ([(), ()], True),
        ([(MAX_LAG,), (MAX_LAG,)], True),
        ([], True),
    ],
)
def test_a_slot_goes_on_from_no_older_version_than_most_others_have(lags, goes_on):
    """Its holder has died, and whoever took its place has not reached those who have what it made last."""
    heir = member(0, slots=(0,), slot_rounds=(1,), lags=(2,))
    others = [member(1 + index, slots=(), lags=known) for index, known in enumerate(lags)]
    assert ("slot-0" in Roster([heir, *others]).groups) == goes_on


def test_a_version_ahead_of_the_model_or_none_at_all_is_nothing_to_go_on_from():
    assert lag_of(None, 3) == lag_of(4, 3) == lag_of(0, 500) == MAX_LAG
    assert lag_of(1, 3) == 2


@given(st.lists(st.tuples(st.integers(0, 6), st.sampled_from("ab")), max_size=6), st.integers(0, 6))
def test_no_version_of_a_slot_wins_over_its_own_successor(states, round):
    """Whatever goes on is older than what the round makes of it, so that the latter wins wherever the two meet."""
    base = newest(states, round)
    assert (base is None) == all(number > round for number, _ in states)
    if base is not None:
        assert newest([*states, (round + 1, "c")], round + 1)[0] == round + 1 > base[0]


def test_a_holder_with_another_anchor_of_a_slot_is_left_out_of_that_slot_alone():
    roster = Roster([member(0), member(1), member(2, slots=(1,), slot_digest="d" * 16)])
    assert roster.groups["slot-1"] == (PEERS[0], PEERS[1])
    assert PEERS[2] in roster.groups["shared"]


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"tokens_per_second": float("nan")},
        {"tokens_per_second": -1.0},
        {"slots": [-1]},
        {"slots": list(range(200))},
        {"slot_rounds": [3]},
        {"anchors": {"../../etc": "a" * 16}},
        {"anchors": {"shared": "A" * 16}},
        {"peer_id": PEERS[1]},
        {"ready_at": float("inf")},
        {"extra": 1},
    ],
)
def test_a_malformed_roster_entry_is_refused(change):
    entry = json.loads(member(0).model_dump_json()) | change
    with pytest.raises(RecordError):
        Member.decode(PEERS[0], json.dumps(entry))


def test_a_well_formed_roster_entry_survives_the_wire():
    assert Member.decode(PEERS[0], member(0).model_dump_json()) == member(0)


def test_the_round_ends_when_the_swarm_is_expected_to_reach_its_tokens():
    config = RoundConfig(tokens=1000, min_seconds=1, max_seconds=100)
    assert round_end(config, [member(0, rate=10.0), member(1, rate=40.0, ready_at=55.0)]) == 55.0 + 2.0 + 20.0


def test_the_round_is_never_shorter_or_longer_than_its_bounds():
    config = RoundConfig(tokens=1000, min_seconds=30, max_seconds=100)
    assert round_end(config, [member(0, rate=1e9)]) == 52.0 + 30
    assert round_end(config, [member(0, rate=0.0)]) == 52.0 + 100


@pytest.mark.parametrize("count", range(3, 9))
def test_a_speed_that_nobody_has_makes_no_round_the_shortest(count):
    config = RoundConfig(tokens=10_000, min_seconds=1, max_seconds=10_000)
    honest = [member(i, rate=10.0) for i in range(1, count)]
    seconds = round_end(config, [member(0, rate=1e12), *honest]) - 52.0
    assert seconds == pytest.approx(10_000 / (10.0 * (count - 1) + 40.0)), "as with a machine of four times the speed"
    first = [entry.model_copy(update={"tokens": 0}) for entry in honest]
    assert round_end(config, [member(0, rate=1e12, tokens=1), *first]) - 52.0 == seconds, "nobody else has trained yet"


@pytest.mark.parametrize(
    "rates", [[10.0], [10.0, 1000.0], [40.0, 10.0], [10.0] * 3 + [2.5], [10.0] * 4 + [30.0, 2.5, 0.0]]
)
def test_unequal_machines_count_for_what_they_are_and_of_two_nobody_is_cut(rates):
    config = RoundConfig(tokens=10_000, min_seconds=1, max_seconds=10_000)
    members = [member(i, rate=rate) for i, rate in enumerate(rates)]
    assert round_end(config, members) == 52.0 + 10_000 / sum(rates)
    assert round_end(config, members[::-1]) == round_end(config, members)


def test_claimed_tokens_are_bounded_by_speed_and_time():
    assert clamp_tokens(500, 100.0, 10.0) == 500
    assert clamp_tokens(10**12, 100.0, 10.0) == 1101
    assert clamp_tokens(-5, 100.0, 10.0) == 0


def hidden(index, **changes):
    return member(index, **changes).model_copy(update={"calls_only": True})


def test_of_holders_none_of_whom_can_be_called_only_the_first_counts():
    roster = Roster([hidden(1, slots=(4,)), hidden(0, slots=(4, 5)), member(2, slots=(5,))])
    assert roster.groups["slot-4"] == (PEERS[0],)
    assert roster.groups["slot-5"] == (PEERS[0], PEERS[2])
    assert roster.groups["shared"] == tuple(PEERS[:3])


def test_nothing_is_to_be_sent_by_those_who_cannot_be_called():
    assert Roster([member(0), hidden(1)]).uplinks == {PEERS[0]: 1.0, PEERS[1]: 0.0}
