"""A voter keeps its promises: over restarts, branches, lost disks, and against proposers that lie."""

import logging
import os
import random
import shutil

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.swarm.certificate import contradiction
from spes_p2p.swarm.votes import MAX_KEPT, MAX_WRITE_SECONDS, Ballot, BallotFile, Own, Refusal, Statements, barred
from tests.support.certificates import ENDED, PEERS, SHRINK_SECONDS, Round, changed, last_body

VOTERS = PEERS[:5]
EIGHT = PEERS[:8]
NEW = PEERS[50:]
BAR = Ballot(barred_at=ENDED - 100)


class Disk(list):
    """Ballots in the order of their writes."""

    @property
    def ballot(self):
        return self[-1] if self else None


def test_a_vote_is_on_disk_before_it_is_sent():
    round, disk = Round(), Disk()
    proposal = round.propose()
    vote = round.voter(VOTERS[0], save=disk.append).vote(proposal, round.own(VOTERS[0]))
    assert vote == round.vote(VOTERS[0], proposal.body)
    assert disk.ballot.voted == proposal

    def fail(ballot):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        round.voter(VOTERS[0], save=fail).vote(proposal, round.own(VOTERS[0]))
    with pytest.raises(OSError, match="disk full"):
        round.voter(VOTERS[0], save=fail).give_up(0)


def test_a_proposal_carries_its_proposers_vote():
    round, disk = Round(), Disk()
    proposer = round.last.proposer(0)
    voter = round.voter(proposer, save=disk.append)
    proposal = voter.propose(0, round.body(), round.confirmations(), round.own(proposer))
    assert proposal == round.propose() and disk.ballot.voted == proposal
    with pytest.raises(Refusal, match="another body"):
        voter.propose(0, round.body(ends_at=9.0), round.confirmations(), round.own(proposer))


def test_a_voter_votes_for_one_body_per_attempt_and_goes_back_to_none():
    round, disk = Round(), Disk()
    one, two = round.propose(), round.propose(body=round.body(ends_at=9.0))
    voter = round.voter(VOTERS[0], save=disk.append)
    assert voter.vote(one, Own()) == voter.vote(one, Own())
    for again in (voter, round.voter(VOTERS[0], disk.ballot)):
        with pytest.raises(Refusal, match="another body in attempt 0"):
            again.vote(two, Own())
    give_ups = [round.give_up(peer) for peer in VOTERS[1:4]]
    voter.vote(round.propose(1, give_ups=give_ups), Own())
    with pytest.raises(Refusal, match="another body in attempt 1"):
        voter.vote(one, Own())


def test_a_voter_votes_in_no_attempt_that_it_gave_up_even_after_a_restart():
    round, disk = Round(), Disk()
    voter = round.voter(VOTERS[0], save=disk.append)
    assert voter.give_up(1) == round.give_up(VOTERS[0], 1)
    later = [round.give_up(peer, 1) for peer in VOTERS[1:4]]
    for again in (voter, round.voter(VOTERS[0], disk.ballot)):
        for proposal in (round.propose(), round.propose(1, give_ups=[round.give_up(peer) for peer in VOTERS[1:4]])):
            with pytest.raises(Refusal, match="was given up"):
                again.vote(proposal, Own())
    assert round.voter(VOTERS[0], disk.ballot).vote(round.propose(2, give_ups=later), Own())


def test_a_give_up_states_the_newest_vote_and_takes_nothing_back():
    round, disk = Round(), Disk()
    proposal = round.propose()
    voter = round.voter(VOTERS[0], save=disk.append)
    voter.vote(proposal, Own())
    assert voter.give_up(3) == round.give_up(VOTERS[0], 3, proposal)
    assert round.voter(VOTERS[0], disk.ballot).give_up(1) == round.give_up(VOTERS[0], 3, proposal)


def test_a_body_that_may_have_been_certified_is_certified_again():
    round = Round()
    hidden = round.propose()
    voters = {peer: round.voter(peer) for peer in VOTERS}
    for peer in VOTERS[:3]:
        voters[peer].vote(hidden, round.own(peer))
    give_ups = [voters[peer].give_up(0) for peer in VOTERS[2:]]
    again = round.propose(1, hidden.confirmations, body=hidden.body, give_ups=give_ups)
    other = round.propose(1, body=round.body(ends_at=9.0), give_ups=give_ups)
    for peer in VOTERS[2:]:
        with pytest.raises(Refusal, match="voted for before"):
            voters[peer].vote(other, round.own(peer, 1))
        assert voters[peer].vote(again, round.own(peer, 1)).body == hidden.body.digest


def test_an_honest_voters_statements_never_convict_it(seed):
    rng = random.Random(seed)
    for _ in range(5):
        round, disk, said = Round(last_body(EIGHT)), Disk(), []
        me, others = EIGHT[4], EIGHT[1:4] + EIGHT[5:8]
        for _ in range(12):
            attempt = rng.randint(0, 4)
            voter = round.voter(me, disk.ballot, disk.append)
            voted = disk.ballot and disk.ballot.voted
            give_ups = [round.give_up(peer, attempt - 1) for peer in others[:5]] if attempt else []
            try:
                if rng.random() < 0.3:
                    said.append(voter.give_up(attempt))
                    continue
                body = round.body(
                    round.confirmations(attempt),
                    ends_at=rng.choice([1.0, 2.0]),
                    shrunk=rng.choice([(), PEERS[:4]]) if attempt > 1 else (),
                )
                if voted and attempt and rng.random() < 0.5:
                    give_ups[0] = round.give_up(others[0], attempt - 1, voted)
                    body = voted.body
                proposal = round.propose(attempt, give_ups=give_ups, body=body)
                said.append(voter.vote(proposal, Own(None, lambda peer: True, may_shrink=True)))
            except Refusal:
                pass
        assert not [pair for pair in ((a, b) for a in said for b in said) if contradiction(*pair)]


# ---------------------------------------------------------------------- what a voter knows by itself


def test_a_peer_that_is_no_voter_signs_nothing():
    round = Round()
    for sign in (lambda v: v.vote(round.propose(), Own()), lambda v: v.give_up(0)):
        with pytest.raises(Refusal, match="no vote"):
            sign(round.voter(NEW[0]))


def test_a_voter_refuses_what_leaves_its_confirmation_out():
    round = Round()
    fewer = [each for each in round.confirmations() if each.peer_id != VOTERS[0]]
    with pytest.raises(Refusal, match="leaves out"):
        round.voter(VOTERS[0]).vote(round.propose(0, fewer), round.own(VOTERS[0]))
    assert round.voter(VOTERS[0]).vote(round.propose(0, fewer), Own())  # its averaging failed


def test_a_voter_refuses_another_result_than_its_own():
    round = Round()
    mine = round.confirm(VOTERS[0], shared="ab" * 32)
    others = [each for each in round.confirmations() if each.peer_id != VOTERS[0]]
    with pytest.raises(Refusal, match="own result differs"):
        round.voter(VOTERS[0]).vote(round.propose(0, [*others, mine]), Own(mine))


def test_a_voter_refuses_the_removal_of_a_peer_that_it_hears():
    round = Round(last_body(absent={VOTERS[1]: 2}), [VOTERS[0], *VOTERS[2:]])
    proposal = round.propose(removed=VOTERS[1:2])
    with pytest.raises(Refusal, match="is here, and was removed"):
        round.voter(VOTERS[0]).vote(proposal, round.own(VOTERS[0]))
    assert round.voter(VOTERS[0]).vote(proposal, round.own(VOTERS[0], gone=VOTERS[1:2]))


def test_a_voter_refuses_a_proposal_that_must_not_be_certified():
    round = Round()
    with pytest.raises(Refusal, match="does not follow"):
        round.voter(VOTERS[0]).vote(round.propose(body=changed(round.body(), voters=VOTERS[:4][::-1] + NEW[:1])), Own())
    other = Round(last_body(ends_at=5.0))
    with pytest.raises(Refusal, match="another branch"):
        round.voter(VOTERS[0]).vote(other.propose(), Own())


@pytest.mark.parametrize("seconds, is_fine", [(-1001, False), (-999, True), (1999, True), (2001, False)])
def test_a_voter_refuses_an_end_of_the_next_round_that_no_honest_proposer_says(seconds, is_fine):
    round, now = Round(), 2000.0
    proposal = round.propose(body=round.body(ends_at=now + seconds))
    voter = round.voter(VOTERS[0], now=now)
    if is_fine:
        assert voter.vote(proposal, round.own(VOTERS[0]))
    else:
        with pytest.raises(Refusal, match="the next round would"):
            voter.vote(proposal, round.own(VOTERS[0]))


def test_a_late_end_stops_no_later_attempt_and_an_old_one_is_proposed_again():
    round, me = Round(), VOTERS[1]
    late = round.propose(body=round.body(ends_at=1e9))
    stated = round.give_up(VOTERS[0], 0, late)
    voter = round.voter(me)
    assert "would take" in voter.discounts(stated, late)
    others = [round.give_up(peer) for peer in VOTERS[2:]]
    again = round.propose(1, late.confirmations, body=late.body, give_ups=[stated, *others[:2]])
    with pytest.raises(Refusal, match="would take"):
        voter.vote(again, round.own(me, 1))
    assert voter.vote(round.propose(1, give_ups=others), round.own(me, 1))
    old = round.propose(body=round.body(ends_at=2000.0))
    stated = round.give_up(VOTERS[0], 0, old)
    again = round.propose(1, old.confirmations, body=old.body, give_ups=[stated, *others[:2]])
    assert round.voter(me, now=9000.0).discounts(stated, old) == ""
    assert round.voter(me, now=9000.0).vote(again, round.own(me, 1))


# ---------------------------------------------------------------------- absent halves


def test_a_voter_goes_on_without_the_absent_half_only_when_late_and_when_all_of_them_are_gone():
    round = Round(last_body(EIGHT), EIGHT[4:])
    proposal = round.propose(shrunk=EIGHT[:4])
    late, me = ENDED + SHRINK_SECONDS, EIGHT[4]
    assert round.voter(me, now=late + 1).vote(proposal, round.own(me, gone=EIGHT[:4], may_shrink=True))
    for now, own in (
        (late - 1, round.own(me, gone=EIGHT[:4], may_shrink=True)),
        (late + 1, round.own(me, gone=EIGHT[:4])),
        (late + 1, round.own(me, gone=EIGHT[:3], may_shrink=True)),
    ):
        with pytest.raises(Refusal, match="may come back"):
            round.voter(me, now=now).vote(proposal, own)


def test_one_voter_cannot_take_a_living_run_over():
    round = Round()
    alone = changed(round.body(), shrunk=VOTERS[1:], voters=VOTERS[:1])
    certificate = round.certify(alone, VOTERS[:1])
    voter = round.voter(VOTERS[1], now=ENDED + SHRINK_SECONDS - 1)
    assert "a short time ago" in voter.learn(certificate) and voter.last == round.last
    late = round.voter(VOTERS[1], now=ENDED + SHRINK_SECONDS + 1)
    assert late.learn(certificate) == "" and not late.may_vote


def test_a_shrunk_certificate_is_followed_at_once_only_with_goodbyes_of_those_that_left():
    """Signed ones: otherwise one voter could say goodbye for the others, and take a living run over."""
    round = Round()
    alone = changed(round.body(), shrunk=VOTERS[1:], voters=VOTERS[:1])
    certificate = round.certify(alone, VOTERS[:1])
    goodbyes = [round.goodbye(peer) for peer in VOTERS[1:]]
    forged = [each.model_copy(update={"signature": goodbyes[0].signature}) for each in goodbyes]

    def learn(*said):
        return round.voter(VOTERS[0], now=ENDED + 1).learn(changed(certificate, goodbyes=said))

    assert learn(*goodbyes) == ""
    for said in (goodbyes[1:], forged):
        assert "a short time ago" in learn(*said)


def test_votes_for_a_shrunk_body_do_not_stop_a_run_whose_absent_voters_return():
    round = Round(last_body(EIGHT), EIGHT[4:])
    late = ENDED + SHRINK_SECONDS + 1
    voters = {peer: round.voter(peer, now=late) for peer in EIGHT}
    shrunk = round.propose(shrunk=EIGHT[:4])
    for peer in EIGHT[4:]:
        voters[peer].vote(shrunk, round.own(peer, gone=EIGHT[:4], may_shrink=True))
    round = Round(round.last)
    give_ups = [voters[peer].give_up(0) for peer in EIGHT[2:]]
    proposal = round.propose(1, give_ups=give_ups)
    assert all(voters[peer].vote(proposal, round.own(peer, 1)) for peer in EIGHT)


def test_a_vote_for_a_shrunk_body_does_not_hide_an_earlier_vote_and_counts_as_one():
    round, disk = Round(last_body(EIGHT), EIGHT[4:]), Disk()
    first, me = round.propose(body=Round(round.last).body(), confirmations=Round(round.last).confirmations()), EIGHT[4]
    round.voter(me, None, disk.append).vote(first, Own())
    give_ups = [round.give_up(peer) for peer in EIGHT[4:]]
    shrunk = round.propose(1, shrunk=EIGHT[:4], give_ups=give_ups)
    own = Own(None, lambda peer: True, may_shrink=True)
    round.voter(me, disk.ballot, disk.append).vote(shrunk, own)
    with pytest.raises(Refusal, match="another body in attempt 1"):
        again = round.propose(1, shrunk=EIGHT[:4], give_ups=give_ups, body=changed(shrunk.body, ends_at=9.0))
        round.voter(me, disk.ballot).vote(again, own)
    assert round.voter(me, disk.ballot).give_up(1) == round.give_up(me, 1, first)


# ---------------------------------------------------------------------- from round to round


def test_a_certificate_opens_the_next_round_in_which_nothing_is_promised():
    round = Round()
    voter = round.voter(VOTERS[0])
    voter.give_up(5)
    body = round.body()
    assert "have signed" in voter.learn(round.certify(body, VOTERS[1:3])) and voter.last == round.last
    assert voter.learn(round.certify(body, VOTERS[1:4])) == ""
    assert voter.last == body and voter.ballot == Ballot(previous=body.digest, round=9) and voter.may_vote


def test_a_voter_that_finds_a_vote_of_its_own_which_it_does_not_know_votes_no_more():
    round, disk = Round(), Disk()
    voter = round.voter(VOTERS[0], save=disk.append, now=2200.0)
    assert voter.learn(round.certify(round.body(), VOTERS[:3])) == ""
    assert not voter.may_vote and disk.ballot.barred_at == 2200.0
    known = round.voter(VOTERS[0])
    known.vote(round.propose(), Own())
    assert known.learn(round.certify(round.body(), VOTERS[:3])) == "" and known.may_vote


def test_a_false_signature_takes_no_vote_away():
    round = Round()
    certificate = round.certify(round.body(), VOTERS[1:4])
    forged = changed(certificate, signatures=certificate.signatures | {VOTERS[0]: "forged"})
    voter = round.voter(VOTERS[0])
    assert voter.learn(forged) == "" and voter.may_vote


def test_a_voter_without_its_ballot_votes_once_it_has_been_admitted_anew():
    round = Round()
    voter = round.voter(VOTERS[0], Ballot(previous=round.last.digest, round=8, barred_at=ENDED + 1))
    assert not voter.may_vote
    with pytest.raises(Refusal, match="no vote"):
        voter.give_up(0)
    out = round.body(removed=VOTERS[:1])
    assert voter.learn(round.certify(out, VOTERS[1:4])) == ""
    after = Round(changed(out, candidates={VOTERS[0]: 2}), VOTERS)
    voter = after.voter(VOTERS[0], Ballot(previous=after.last.digest, round=9, barred_at=ENDED + 1))
    back = after.body()
    assert VOTERS[0] in back.voters
    assert voter.learn(after.certify(back, VOTERS[1:4])) == "" and voter.may_vote


def test_an_admission_of_before_the_loss_does_not_count():
    out = Round(last_body(VOTERS[1:], candidates={VOTERS[0]: 2}), VOTERS)
    back = out.body()
    assert VOTERS[0] in back.voters
    for barred_at, may_vote in ((ENDED - 1, True), (ENDED + 1, False)):
        voter = out.voter(VOTERS[0], Ballot(previous=out.last.digest, round=8, barred_at=barred_at))
        assert voter.learn(out.certify(back, VOTERS[1:5])) == "" and voter.may_vote == may_vote


def test_a_voter_that_has_lost_certificates_does_not_vote_in_their_rounds_again():
    round = Round()
    later = Ballot(previous="ab" * 32, round=12, gave_up=3)
    assert not round.voter(VOTERS[0], later).may_vote
    for earlier in (7, 8):
        assert round.voter(VOTERS[0], changed(later, round=earlier)).may_vote


def test_a_voter_that_changes_the_branch_votes_on_and_in_no_past_round():
    round, disk = Round(), Disk()
    left, kept = round.body(ends_at=3000.0), round.body(ends_at=3001.0)
    voter = round.voter(VOTERS[0], save=disk.append)
    voter.vote(round.propose(body=kept), Own())
    assert voter.learn(round.certify(left, VOTERS[1:4])) == ""
    voter.switch(kept)
    assert voter.may_vote and voter.last == kept
    assert disk.ballot == Ballot(previous=kept.digest, round=9)
    with pytest.raises(Refusal):
        voter.vote(round.propose(body=left), Own())


# ---------------------------------------------------------------------- on disk


@pytest.fixture
def written(tmp_path):
    round = Round()
    ballot = Ballot(
        previous=round.last.digest,
        round=8,
        gave_up=2,
        voted=round.propose(),
        shrunk=round.vote(VOTERS[0], round.body()),
    )
    path = tmp_path / "ballot"
    BallotFile(path).save(ballot)
    return path, ballot


def age(path, seconds):
    """Pretend that the ballot says it was written `seconds` earlier; the kernel's time of the inode stays."""
    fields = path.read_text().split('"written_ns":')
    path.write_text(f'{fields[0]}"written_ns":{int(fields[1].rstrip("}")) - int(seconds * 1e9)}}}')


def test_a_ballot_is_saved_and_loaded_equal(written):
    path, ballot = written
    assert BallotFile(path).load(5.0, is_new=False) == ballot
    BallotFile(path).save(BAR)
    assert BallotFile(path).load(5.0, is_new=False) == BAR


@pytest.mark.parametrize("restore", ["copied", "in place", "touched back"])
def test_a_restored_ballot_comes_back_barred(written, restore, caplog):
    path, ballot = written
    age(path, MAX_WRITE_SECONDS + 1)
    backup = path.with_name("backup")
    if restore == "copied":
        path.rename(backup)
        shutil.copy2(backup, path)
    elif restore == "in place":
        path.write_bytes(path.read_bytes())
    else:
        os.utime(path, (1.0, 1.0))
    with caplog.at_level(logging.WARNING):
        assert BallotFile(path).load(5.0, is_new=False) == barred(ballot, 5.0)
    assert "was copied or restored" in caplog.text


def test_a_deleted_ballot_comes_back_barred_and_a_new_peer_has_none(tmp_path):
    file = BallotFile(tmp_path / "ballot")
    assert file.load(5.0, is_new=True) is None
    assert file.load(5.0, is_new=False) == Ballot(barred_at=5.0)
    assert not Round().voter(VOTERS[0], file.load(5.0, is_new=False)).may_vote


@pytest.mark.parametrize(
    "content", [b"", b"\xff\n{}", b"{}", b"[" * 10_000, b'{"written_ns": 1e999, "ballot": {}}', None]
)
def test_a_damaged_ballot_is_one_error_with_its_remedy(written, content):
    path, _ = written
    path.write_bytes(path.read_bytes()[:-40] if content is None else content)
    with pytest.raises(ConfigError, match="cannot read") as error:
        BallotFile(path).load(5.0, is_new=False)
    assert str(error.value).endswith("; delete it to vote again later")
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- what others have said


def test_statements_that_contradict_each_other_become_a_proof():
    round, seen = Round(), Statements()
    one, two = round.body(), round.body(ends_at=9.0)
    assert seen.add(round.vote(VOTERS[0], one), round.last) is None
    assert seen.add(round.vote(VOTERS[1], two), round.last) is None
    assert seen.add(round.give_up(VOTERS[0], 3, round.propose(body=one)), round.last) is None
    proof = seen.add(round.vote(VOTERS[0], two), round.last)
    assert proof and proof.convicts(round.key(VOTERS[0])) == VOTERS[0]


def test_a_give_up_that_hides_a_vote_becomes_a_proof():
    round, seen = Round(), Statements()
    assert seen.add(round.give_up(VOTERS[0], 3), round.last) is None
    proof = seen.add(round.vote(VOTERS[0], round.body()), round.last)
    assert proof and proof.convicts(round.key(VOTERS[0])) == VOTERS[0]


def test_statements_of_strangers_and_of_other_times_are_not_kept_and_erase_nothing():
    round, seen = Round(), Statements()
    one, two = round.vote(VOTERS[0], round.body()), round.vote(VOTERS[0], round.body(ends_at=9.0))
    assert seen.add(one, round.last) is None
    for peer, at in ((NEW[0], 8), (VOTERS[1], 2**40), (VOTERS[1], 0)):
        for statement in (round.give_up(peer), round.vote(peer, round.body())):  # they convict, but are not kept
            assert seen.add(changed(statement, round=at), round.last) is None
    assert seen.add(two, round.last) is not None


def test_what_was_said_again_or_long_ago_takes_no_room():
    round, seen = Round(), Statements(rounds=2)
    vote = round.vote(VOTERS[0], round.body())
    for index in range(2 * MAX_KEPT):  # signed again, because RSA-PSS signatures differ
        assert seen.add(vote.model_copy(update={"signature": str(index)}), round.last) is None
    assert seen.add(round.vote(VOTERS[0], round.body(ends_at=9.0)), round.last) is not None
    assert seen.add(round.vote(VOTERS[0], round.body(ends_at=9.0)), changed(round.last, round=9)) is None


def test_a_user_who_goes_back_to_a_round_lifts_the_bar_of_a_lost_ballot():
    """Where the ballots of all voters had been copied, each waited for another to admit it, and no option helped."""
    round = Round()
    voter = round.voter(VOTERS[0], Ballot(previous=round.last.digest, round=8, barred_at=ENDED + 1))
    voter.switch(round.last)
    assert not voter.may_vote
    voter.switch(round.last, is_chosen=True)
    assert voter.may_vote
