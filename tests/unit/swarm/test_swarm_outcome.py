"""Which means of an attempt may be committed: all rules at once, over random rosters."""

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs.format import Segment
from spes_p2p.swarm.averaging.averaging import Averaged
from spes_p2p.swarm.averaging.encoding import Contribution, DeltaEncoding
from spes_p2p.swarm.averaging.outcome import result_of
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster
from tests.support.agreement import last_body

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]
DIGESTS = ["0" * 64, "1" * 64]
LAST = last_body(PEERS)
WIRE = DeltaEncoding({"shared": (Segment(3, "fp32"),), "slot": (Segment(3, "fp32"),)})


def encoded(*values):
    return torch.tensor(values).view(torch.uint8)


def test_a_peer_without_tokens_keeps_the_residual_that_it_has_not_sent():
    encoding = DeltaEncoding({"shared": (Segment(128, "int4"),)})
    deltas = {VectorName("shared"): torch.linspace(-1, 1, 128)}
    fields = {"peer_id": PEERS[0], "round": 1, "previous": LAST.digest, "slots": (), "tokens_per_second": 1.0}
    member = Member(**fields, tokens=1, ready_at=1.0, sync_seconds=0.0)
    encoding.encode(Contribution(member, deltas))
    encoding.commit(["shared"])
    before = encoding.feedback.residuals()["shared"].whole()
    assert before.any()
    encoding.encode(Contribution(member.model_copy(update={"tokens": 0, "round": 2}), deltas))
    encoding.commit(["shared"])
    assert torch.equal(encoding.feedback.residuals()["shared"].whole(), before)


@st.composite
def members(draw, peer):
    slots = tuple(sorted(draw(st.sets(st.integers(0, 4), max_size=3))))
    names = draw(st.sets(st.sampled_from(["shared", *map(VectorName.of_slot, slots)]), max_size=2))
    return Member(
        peer_id=peer,
        round=LAST.round,
        previous=draw(st.sampled_from([LAST.digest, "9" * 64])),
        tokens=draw(st.integers(0, 3)),
        slots=slots,
        starts={name: (draw(st.integers(2, 3)), draw(st.sampled_from(DIGESTS))) for name in names},
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=0.0,
    )


rosters = st.integers(1, 8).flatmap(
    lambda count: st.tuples(*(members(peer) for peer in PEERS[:count])).map(lambda found: Roster(found, LAST))
)


@st.composite
def attempts(draw):
    """A roster, one of its members, and an outcome for each group that it is in."""
    roster = draw(rosters)
    me = draw(st.sampled_from(roster))
    mine = [name for name, peers in roster.groups.items() if me.peer_id in peers]
    outcomes = {name: draw(st.sampled_from(["whole", "lost", "nan"])) for name in mine}
    means = {"whole": encoded(1.0, 1.0, 1.0), "nan": encoded(1.0, float("nan"), 1.0)}
    averaged = Averaged(
        means={name: means[outcome] for name, outcome in outcomes.items() if outcome != "lost"},
        failures={name: "lost a member" for name, outcome in outcomes.items() if outcome == "lost"},
    )
    names = ["shared", *map(VectorName.of_slot, me.slots)]
    return (roster, averaged), Contribution(me, {name: torch.zeros(3) for name in names}), outcomes


@given(attempts())
def test_every_group_has_a_mean_or_is_dropped_for_a_reason_and_never_both(drawn):
    attempt, contribution, _ = drawn
    result = result_of(*attempt, contribution, WIRE, 1.0)
    assert set(result.means) | set(result.dropped) == set(contribution.deltas)
    assert not set(result.means) & set(result.dropped)
    assert all(result.dropped.values())


@given(attempts())
def test_only_whole_finite_means_count_and_only_with_shared(drawn):
    attempt, contribution, outcomes = drawn
    roster, averaged = attempt
    result = result_of(roster, replace(averaged, clipped={"a": 2, "b": 3}), contribution, WIRE, 1.0)
    whole = {name for name, outcome in outcomes.items() if outcome == "whole"}
    assert set(result.means) == (whole if "shared" in whole else set())
    assert result.roster is roster and result.num_clipped == 5


@given(rosters)
def test_all_members_of_a_group_start_from_one_version_and_none_is_forgotten(roster):
    by_id = {member.peer_id: member for member in roster}
    current = [member for member in roster if member.previous == LAST.digest]
    for name, peers in roster.groups.items():
        assert list(peers) == sorted(set(peers)) and (peers or (name == "shared" and not current))
        assert len({by_id[peer].starts.get(name) for peer in peers}) <= 1
        assert {by_id[peer].previous for peer in peers} <= {LAST.digest}
        if any(name not in by_id[peer].starts for peer in roster.groups["shared"] if holds(by_id[peer], name)):
            assert not any(name in by_id[peer].starts for peer in peers), "a certified version goes before all others"
    assert set(roster.behind) | set(roster.groups["shared"]) == set(by_id)
    assert not set(roster.behind) & set(roster.groups["shared"])
    current = [by_id[peer] for peer in roster.groups["shared"]]
    assert {VectorName.of_slot(slot) for member in current for slot in member.slots} == set(roster.groups) - {"shared"}
    assert [entry.peer_id for entry in roster.entries] == list(roster.groups["shared"])


def holds(member, name):
    return name == "shared" or VectorName(name).slot in member.slots
