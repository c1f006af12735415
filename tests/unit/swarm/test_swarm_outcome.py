"""What may be committed of an attempt: all rules at once, over random rosters."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs.format import Segment
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.averaging.outcome import Attempt, alone, decide_outcome
from spes_p2p.swarm.interface import Contribution
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]
DIGESTS = ["0" * 16, "1" * 16]
WIRE = DeltaEncoding({"shared": (Segment(3, "fp32"),), "slot": (Segment(3, "fp32"),)})


def encoded(*values):
    return torch.tensor(values).view(torch.uint8)


@st.composite
def members(draw, peer):
    slots = tuple(sorted(draw(st.sets(st.integers(0, 4), max_size=3))))
    anchors = {name: draw(st.sampled_from(DIGESTS)) for name in ("shared", *map(VectorName.of_slot, slots))}
    return Member(
        peer_id=peer,
        round=draw(st.integers(2, 3)),
        tokens=draw(st.integers(0, 3)),
        slots=slots,
        anchors=anchors,
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=0.0,
        voters=draw(st.sampled_from([(), tuple(PEERS[:5]), tuple(PEERS)])),
        electorate=draw(st.integers(1, 5)),
    )


rosters = st.integers(1, 8).flatmap(lambda count: st.tuples(*(members(peer) for peer in PEERS[:count])).map(Roster))


@st.composite
def attempts(draw):
    """A roster, one of its members, and an outcome for each group that it is in."""
    roster = draw(rosters)
    me = draw(st.sampled_from(roster))
    mine = [name for name, peers in roster.groups.items() if me.peer_id in peers]
    outcomes = {name: draw(st.sampled_from(["whole", "lost", "nan"])) for name in mine}
    means = {"whole": encoded(1.0, 1.0, 1.0), "nan": encoded(1.0, float("nan"), 1.0)}
    attempt = Attempt(
        roster,
        status={name: "lost somebody" if outcome == "lost" else "" for name, outcome in outcomes.items()},
        averaged={name: means[outcome] for name, outcome in outcomes.items() if outcome != "lost"},
    )
    names = ["shared", *map(VectorName.of_slot, me.slots)]
    return attempt, Contribution(me, {name: torch.zeros(3) for name in names}), outcomes


def with_a_vote(roster):
    """The members that most name as voters; all if none names any."""
    named = [peer for member in roster for peer in member.voters]
    return [member for member in roster if not named or 2 * named.count(member.peer_id) > len(roster)]


@given(attempts())
def test_every_group_is_committed_or_dropped_for_a_reason_and_never_both(drawn):
    attempt, contribution, _ = drawn
    result = decide_outcome(attempt, contribution, WIRE)
    assert set(result.committed) | set(result.dropped) == set(contribution.deltas)
    assert not set(result.committed) & set(result.dropped)
    assert all(result.dropped.values())


@given(attempts())
def test_only_whole_finite_means_are_committed_and_only_with_shared_and_more_than_half_of_the_votes(drawn):
    attempt, contribution, outcomes = drawn
    result = decide_outcome(attempt, contribution, WIRE)
    whole = {name for name, outcome in outcomes.items() if outcome == "whole"}
    confirming = attempt.roster.groups["shared"]
    present = [member for member in attempt.roster if member.peer_id in confirming]
    electorate = sorted(member.electorate for member in present)[len(present) // 2]
    may = "shared" in whole and 2 * len(with_a_vote(present)) > electorate
    assert set(result.committed) == (whole if may else set())


@given(attempts())
def test_who_differs_from_the_majority_is_behind_and_commits_nothing(drawn):
    attempt, contribution, _ = drawn
    result = decide_outcome(attempt, contribution, WIRE)
    heard = with_a_vote(attempt.roster) or attempt.roster
    states = [(member.round, member.anchors["shared"]) for member in heard]
    mine = (contribution.member.round, contribution.member.anchors["shared"])
    if 2 * states.count(mine) > len(states):
        assert not result.is_behind
    if any(states.count(other) > states.count(mine) for other in states):
        assert result.is_behind
    if result.is_behind:
        assert not result.committed


@given(rosters)
def test_all_members_of_a_group_share_its_anchor_and_nobody_is_forgotten(roster):
    by_id = {member.peer_id: member for member in roster}
    for name, peers in roster.groups.items():
        assert list(peers) == sorted(set(peers)) and peers
        assert len({by_id[peer].anchors[name] for peer in peers}) == 1
        assert {by_id[peer].round for peer in peers} == {roster.round}
    assert set(roster.behind) | set(roster.groups["shared"]) == set(by_id)
    current = [by_id[peer] for peer in roster.groups["shared"]]
    assert {VectorName.of_slot(slot) for member in current for slot in member.slots} == set(roster.groups) - {"shared"}


def test_without_a_roster_everything_is_dropped_with_the_failure_as_reason():
    member = Member(
        peer_id=PEERS[0],
        round=1,
        tokens=5,
        slots=(2,),
        anchors={},
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=0.0,
    )
    contribution = Contribution(member, {"shared": torch.ones(2), "slot-2": torch.ones(2)})
    result = decide_outcome(Attempt(failure="nobody came"), contribution, WIRE)
    assert result.roster == (member,) and not result.committed and not result.is_behind
    assert result.dropped == {"shared": "nobody came", "slot-2": "nobody came"}


@pytest.mark.parametrize("electorate", [1, 2, 5])
def test_whom_a_leader_has_gathered_alone_commits_only_if_nobody_else_has_a_vote(electorate):
    """The leader's own entry cannot be read, so that there is no other member to average with."""
    fields = {"round": 1, "tokens": 5, "slots": (), "anchors": {}, "ready_at": 1.0, "sync_seconds": 0.0}
    member = Member(peer_id=PEERS[0], tokens_per_second=1.0, electorate=electorate, **fields)
    attempt = Attempt(Roster([member]), {PEERS[1]: "malformed"}, {"shared": ""}, {"shared": encoded(1.0, 1.0, 1.0)})
    result = decide_outcome(attempt, Contribution(member, {"shared": torch.zeros(3)}), WIRE)
    assert bool(result.committed) == (electorate == 1)


@given(st.integers(0, 3), st.booleans())
def test_a_peer_alone_commits_its_own_deltas_if_it_trained_and_they_are_finite(tokens, is_finite):
    member = Member(
        peer_id=PEERS[0],
        round=1,
        tokens=tokens,
        slots=(),
        anchors={},
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=0.0,
    )
    contribution = Contribution(member, {"shared": torch.tensor([1.0, 2.0, 3.0 if is_finite else float("nan")])})
    result = decide_outcome(alone(*WIRE.encode(contribution)), contribution, WIRE)
    if tokens and is_finite:
        assert torch.equal(result.committed["shared"], contribution.deltas["shared"])
    else:
        assert not result.committed and set(result.dropped) == {"shared"}
