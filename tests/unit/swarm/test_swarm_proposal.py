"""What a proposal must justify: Paxos's rule for later attempts, results, removals; and what proves a voter guilty."""

import pytest

from spes_p2p.swarm.certificate import ABSENT_ROUNDS, max_strangers
from spes_p2p.swarm.proposal import (
    Proof,
    contradiction,
    counted_results,
    digest_of,
    left_out,
    newest_vote,
    promises_in,
)
from spes_p2p.swarm.wire import signers
from tests.support.agreement import PEERS, Round, changed, digest, last_body, members

VOTERS = PEERS[:5]
NEW = PEERS[50:]


def test_an_honest_proposal_has_no_fault_in_any_attempt():
    round = Round()
    first = round.propose()
    third = round.again(round.again(first, 1), 4)
    fresh = round.propose(3)
    assert [round.check(each) for each in (first, third, fresh)] == ["", "", ""]
    assert (third.attempt, third.is_repeated, fresh.is_repeated) == (4, True, False)
    assert signers(third) == set(VOTERS)


def test_a_body_extends_the_last_certificate_of_its_run():
    round = Round()
    for wrong in ({"previous": digest("another")}, {"run": "another"}):
        body = changed(round.body(), **wrong)
        assert "does not extend" in round.check(round.propose(body=body))


def test_a_proposal_is_of_the_leader_whose_turn_it_is_and_carries_its_vote():
    round = Round()
    assert "does not lead" in round.check(round.propose(author=round.last.leader(1)))
    proposal = round.propose()
    forged = changed(proposal.vote, signature=round.vote(PEERS[9], proposal.body).signature)
    other = round.vote(round.last.leader(0), round.body(ends_at=5.0))
    for vote, reason in ((forged, "has not signed"), (other, "something else")):
        assert reason in round.check(proposal.model_copy(update={"turns": (changed(proposal.turns[0], vote=vote),)}))


# ---------------------------------------------------------------------- later attempts


def test_a_later_attempt_needs_the_entries_of_a_quorum():
    round = Round()
    entries = [round.entry(peer, 2) for peer in VOTERS]
    assert not round.check(round.propose(2, entries=entries[:3]))
    early, other = round.entry(VOTERS[2], 1), round.entry(VOTERS[2], 2, previous=digest("another"))
    unsigned = changed(entries[2], signature=round.entry(PEERS[9], 2).signature)
    for wrong, reason in (
        (entries[:2], "2 voters entered"),
        ([*entries[:2], entries[1]], "2 voters entered"),
        ([*entries[:2], early], "2 voters entered"),
        ([*entries[:2], round.entry(NEW[0], 2)], "2 voters entered"),
        ([*entries[:2], other], "another round"),
        ([*entries[:2], unsigned], "not signed"),
    ):
        assert reason in round.check(round.propose(2, entries=wrong))
    first = round.propose()
    with_entries = first.model_copy(update={"turns": (changed(first.turns[0], entries=tuple(entries[:3])),)})
    assert "attempt 0 needs no entries" in round.check(with_entries)


def test_the_body_of_the_newest_vote_is_proposed_again_and_no_other():
    round = Round()
    first = round.propose()
    entries = [round.entry(VOTERS[0], 1, first), *(round.entry(peer, 1) for peer in VOTERS[1:3])]
    assert not round.check(round.again(first, 1, entries))
    assert "newest vote" in round.check(round.propose(1, entries=entries))
    older = round.propose(1)
    stated = [round.entry(VOTERS[0], 2, older), round.entry(VOTERS[1], 2, first), round.entry(VOTERS[2], 2)]
    assert "newest vote" in round.check(round.again(first, 2, stated))
    assert not round.check(round.again(older, 2, stated))


def test_each_attempt_of_a_repeated_body_is_justified():
    """Otherwise a liar leads attempt 1 past a certified body, and its own vote is the newest in attempt 2."""
    round = Round()
    first, other = round.propose(), round.propose(1, ends_at=2000.0)
    blank = [round.entry(peer, 1) for peer in VOTERS[3:]]
    hiding = other.model_copy(update={"turns": (changed(other.turns[0], entries=tuple(blank)),)})
    assert "2 voters entered" in round.check(round.again(hiding, 2))
    stated = [*blank, round.entry(VOTERS[0], 1, first)]
    hiding = other.model_copy(update={"turns": (changed(other.turns[0], entries=tuple(stated)),)})
    assert "newest vote" in round.check(round.again(hiding, 2))


def test_a_vote_of_a_later_attempt_is_none_that_an_entry_may_state():
    round = Round()
    first = round.propose()
    later = round.again(first, 2)
    entries = [round.entry(peer, 1, later) for peer in VOTERS]
    turns = (*later.turns, round.turn(first.body, 1, entries))
    assert "newest vote" in round.check(later.model_copy(update={"turns": turns}))


def test_of_two_bodies_of_one_attempt_the_one_with_more_votes_is_the_newest():
    round = Round()
    one, two = round.propose(), round.propose(ends_at=2000.0)
    entries = [round.entry(VOTERS[0], 1, one), *(round.entry(peer, 1, two) for peer in VOTERS[1:3])]
    assert newest_vote(entries) == (0, two.body.digest)


def test_lost_promises_count_of_the_only_voter_that_is_left():
    round = Round()
    lost = [round.entry(peer, 1, is_lost=True) for peer in VOTERS[:3]]
    whole = [round.entry(peer, 1) for peer in VOTERS[3:]]
    assert promises_in([*lost, *whole], round.last, ()) == whole
    assert promises_in([*lost, *whole], round.last, VOTERS[4:]) == whole[:1]
    assert promises_in(lost, round.last, VOTERS[1:]) == lost[:1] == promises_in(lost, last_body(VOTERS[:1]), ())
    assert "entered attempt 1" in round.check(round.propose(1, entries=[*lost[:1], *whole]))
    assert "entered attempt 1" in round.check(round.propose(1, entries=lost))
    alone = Round(round.last, VOTERS[:1])
    assert not alone.check(alone.propose(1, entries=lost[:1], shrunk=VOTERS[1:]))


def test_a_body_that_names_voters_absent_binds_nothing_and_is_proposed_once():
    round = Round()
    first, absent = round.propose(), VOTERS[2:]
    entries = [round.entry(peer, 1, first) for peer in VOTERS[:2]]
    shrunk = round.propose(1, entries=entries, shrunk=absent)
    assert not round.check(shrunk)
    again = round.again(shrunk, 2, [round.entry(peer, 2) for peer in VOTERS[:2]])
    assert "proposed once" in round.check(again)
    assert "1 voters entered" in round.check(round.propose(1, entries=entries[:1], shrunk=absent))
    needless = round.propose(shrunk=absent[:2], body=changed(round.body(), shrunk=absent[:2]))
    assert "without need" in round.check(needless)


# ---------------------------------------------------------------------- bodies


@pytest.mark.parametrize("wrong", [{"tokens": 1}, {"voters": VOTERS[:4]}, {"shared": digest("other")}, {"cursor": 9}])
def test_a_body_that_does_not_follow_from_its_results_is_refused(wrong):
    round = Round()
    body = round.body()
    members = tuple(changed(member, tokens=1) for member in body.members)
    body = changed(body, **({"members": members} if "tokens" in wrong else wrong))
    assert round.check(round.propose(body=body))


def test_a_roster_has_one_order_and_few_strangers():
    round = Round()
    body = changed(round.body(), members=round.members[::-1])
    assert "not in order" in round.check(round.propose(body=body))
    most = max_strangers(len(VOTERS))
    for num, reason in ((most, ""), (most + 1, f"has {most + 1} strangers")):
        strange = Round(round.last, (*VOTERS, *NEW[:num]))
        assert reason in strange.check(strange.propose())
        assert bool(reason) == bool(strange.check(strange.propose()))


def test_from_the_third_attempt_on_voters_are_alone():
    """Otherwise a stranger that drops in each all-reduce stops the run."""
    round = Round(last_body(members=members(NEW[0])), (*VOTERS, NEW[0]))
    assert [bool(round.check(round.propose(attempt))) for attempt in range(4)] == [False, False, True, True]
    begun = Round(last_body(VOTERS[:1], round=0), VOTERS)
    assert not begun.check(begun.propose(1)) and begun.check(begun.propose(2)), "in the first round too"


def test_results_are_of_the_roster_and_of_the_attempt_that_made_the_body():
    round = Round()
    others = round.results()[1:]
    for wrong in (
        round.result(PEERS[0], previous=digest("another")),
        round.result(PEERS[0], roster=digest("another")),
        round.result(PEERS[0], attempt=1),
        round.result(NEW[0]),
    ):
        assert "not of its roster" in round.check(round.propose(results=(wrong, *others), body=round.body()))


def test_of_two_different_results_of_one_peer_none_counts():
    round = Round()
    two = (round.result(PEERS[0]), round.result(PEERS[0], shared=digest("other")))
    others = round.results()[1:]
    assert counted_results((*two, two[0], *others)) == list(others)
    body = round.body(others)
    assert not round.check(round.propose(results=(*two, *others), body=body))
    assert round.check(round.propose(results=(*two[:1], *others), body=body)) or body == round.body()


@pytest.mark.parametrize("part", ["results", "goodbyes"])
def test_each_statement_of_a_proposal_is_signed(part):
    round = Round()
    proposal = round.propose(removed=VOTERS[:1], goodbyes=(round.goodbye(VOTERS[0]),))
    assert not round.check(proposal)
    first, *rest = getattr(proposal, part)
    forged = changed(first, signature=round.goodbye(PEERS[9]).signature)
    assert "has not signed" in round.check(proposal.model_copy(update={part: (forged, *rest)}))


def test_few_voters_are_removed_at_once_and_only_after_missing_three_rosters():
    eight = PEERS[:8]
    left = tuple(Round(last_body(eight)).goodbye(peer) for peer in eight)
    round = Round(last_body(eight))
    assert not round.check(round.propose(removed=eight[:2], goodbyes=left[:2]))
    assert "removes 3 voters" in round.check(round.propose(removed=eight[:3], goodbyes=left[:3]))
    for missed, is_fine in ((ABSENT_ROUNDS - 1, True), (ABSENT_ROUNDS - 2, False)):
        away = Round(last_body(absent={VOTERS[0]: missed}), VOTERS[1:])
        assert bool(away.check(away.propose(removed=VOTERS[:1]))) != is_fine
    here = Round(last_body(absent={VOTERS[0]: ABSENT_ROUNDS}))
    assert "was removed after missing 0" in here.check(here.propose(removed=VOTERS[:1]))


@pytest.mark.parametrize(
    ("changes", "counts"), [({}, True), ({"round": 19}, True), ({"round": 18}, False), ({"run": "another"}, False)]
)
def test_a_goodbye_removes_a_voter_soon_and_in_its_run_only(changes, counts):
    round = Round()
    proposal = round.propose(removed=VOTERS[:1], goodbyes=(round.goodbye(VOTERS[0], **changes),))
    assert bool(round.check(proposal)) != counts


def test_a_proof_removes_the_voter_that_it_convicts_and_no_other():
    round = Round()
    proof = round.proof(VOTERS[0])
    proposal = round.propose(removed=VOTERS[:1], proofs=(proof,))
    assert not round.check(proposal) and proposal.body.banned == (VOTERS[0],)
    eight = Round(last_body(PEERS[:8]))
    assert "was removed after" in eight.check(eight.propose(removed=VOTERS[1:2], proofs=(eight.proof(VOTERS[0]),)))
    stranger = round.propose(proofs=(round.proof(NEW[0]),))
    assert stranger.body.banned == ()
    forged = Proof(vote=proof.vote, other=changed(proof.other, signature=proof.vote.signature))
    assert "proves nothing" in round.check(round.propose(removed=VOTERS[:1], proofs=(forged,)))


def test_two_votes_of_one_attempt_and_an_entry_that_states_less_convict():
    round = Round()
    first, other = round.propose(), round.propose(ends_at=2000.0)
    me = VOTERS[0]
    vote = round.vote(me, first.body)
    shrunk = round.vote(me, round.body(shrunk=VOTERS[2:]))
    for statement in (round.vote(me, other.body), round.entry(me, 1), round.entry(me, 1, other)):
        assert contradiction(vote, statement) == me
    for statement in (
        round.vote(me, other.body, 1),
        round.vote(VOTERS[1], other.body),
        round.entry(me, 1, first),
        round.entry(me, 0),
        round.entry(me, 2, round.again(first, 1)),
        round.entry(me, 1, is_lost=True),
        round.entry(me, 1, previous=digest("another")),
    ):
        assert contradiction(vote, statement) == ""
    assert contradiction(shrunk, round.entry(me, 1)) == ""


# ---------------------------------------------------------------------- what is left out


def test_a_voters_result_may_not_be_left_out_nor_one_without_which_a_slot_stays_old():
    round = Round(last_body(members=members(NEW[0])), (*VOTERS[:4], NEW[0]))
    results = round.results()
    by_peer = {result.peer_id: result for result in results}
    without_voter = round.propose(results=[each for each in results if each.peer_id != VOTERS[0]])
    without_new = round.propose(results=[each for each in results if each.peer_id != NEW[0]])
    assert "leaves out the result" in left_out(without_voter, round.last, [by_peer[VOTERS[0]]])
    assert not left_out(without_voter, round.last, [])
    assert not left_out(without_new, round.last, results)
    failed = round.result(VOTERS[0], digests={})
    two = [by_peer[VOTERS[0]], round.result(VOTERS[0], shared=digest("other"))]
    assert not left_out(without_voter, round.last, [failed]) and not left_out(without_voter, round.last, two)
    assert not left_out(without_voter, round.last, [round.result(VOTERS[0], roster=digest("another"))])


def test_a_slot_of_strangers_may_not_stay_old_for_want_of_a_result_that_is_there():
    round = Round(last_body(members=members(NEW[0])), (*VOTERS[:3], NEW[0]))
    round.members = tuple(changed(each, slots=(1,) if each.peer_id == NEW[0] else (0,)) for each in round.members)
    results = round.results()
    without_new = round.propose(results=[each for each in results if each.peer_id != NEW[0]])
    assert "slot 1 at its old version" in left_out(without_new, round.last, results)


def test_an_entry_names_its_members_digest():
    round = Round()
    entered = round.entered(VOTERS[0])
    assert entered.is_whole
    assert not entered.model_copy(update={"member": round.member(VOTERS[0], tokens=5)}).is_whole
    assert not entered.model_copy(update={"member": None}).is_whole
    assert digest_of(round.member(VOTERS[0])) == entered.entry.member
