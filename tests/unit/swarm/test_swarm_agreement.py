"""One peer's part in a round: what it signs, refuses, keeps on disk and passes on, whatever the others send it."""

import asyncio
import os
import shutil

import pytest

from spes_p2p.errors import ConfigError
from spes_p2p.swarm.attempts import Attempts
from spes_p2p.swarm.certificate import Certificates, Goodbye, Result, Vote, strangers
from spes_p2p.swarm.part import Outcome, Part
from spes_p2p.swarm.promises import MAX_WRITE_SECONDS, PromiseFile, Promises
from spes_p2p.swarm.proposal import Entered, Lacking, Meeting, Proof, Proposal, digest_of
from spes_p2p.swarm.roster import Roster
from spes_p2p.swarm.statements import MAX_KEPT, WATCHED_ROUNDS
from tests.support.agreement import (
    ENDED,
    PEERS,
    RULES,
    Peer,
    Round,
    changed,
    digest,
    last_body,
    members,
    reopened,
    virtually,
)

VOTERS = PEERS[:5]
NEW = PEERS[50:]
OLD = Round(last_body(round=20 - WATCHED_ROUNDS))
"""A round whose proofs do not count any more in the one after round 20."""


def leader(round, attempt=0):
    return round.last.leader(attempt)


def follower(round):
    """Return a voter that leads none of the first two attempts."""
    return next(peer for peer in round.last.voters if peer not in (leader(round), leader(round, 1)))


def voted(proposal, me="", at=ENDED, **kept):
    """Return whether a voter votes for a proposal, by messages alone."""
    round = kept.pop("round", None) or Round()
    before, gone = kept.pop("before", ()), kept.pop("gone", ())

    async def run():
        peer = Peer(round, me or follower(round), gone=gone, **kept)
        peer.receive(*before)
        peer.receive(proposal)
        return proposal.body.digest in peer.votes()

    return virtually(run(), at)


# ---------------------------------------------------------------------- promises on disk


def test_a_vote_and_an_entry_are_on_disk_before_they_are_sent():
    round = Round()
    proposal = round.propose()

    async def run():
        peer = Peer(round, follower(round))
        peer.receive(proposal)
        assert peer.saved[-1].voted == proposal and peer.votes() == [proposal.body.digest]
        peer.agreement._enter(round.last, 1, round.member(peer.me))
        assert peer.saved[-1].attempt == 1
        entry = peer.sent(Entered)[0].entry
        assert (entry.attempt, entry.voted, entry.body) == (1, 0, proposal.body.digest)
        full = Peer(round, follower(round))
        full.disk_error = OSError("disk full")
        with pytest.raises(OSError, match="disk full"):
            full.receive(proposal)
        with pytest.raises(OSError, match="disk full"):
            full.agreement._enter(round.last, 1, round.member(full.me))
        assert not full.posted

    virtually(run())


def test_a_voter_votes_in_no_attempt_before_its_entry_even_after_a_restart():
    round = Round()
    me = follower(round)
    promises = Promises(previous=round.last.digest, round=21, attempt=1)
    kept = {"me": me, "promises": promises}
    assert not voted(round.propose(), **kept)
    assert voted(round.propose(1), **kept)


def test_a_voter_votes_for_one_body_per_attempt_and_goes_back_to_none():
    round = Round()
    me, first, other = follower(round), round.propose(), round.propose(ends_at=ENDED + 50)
    promises = Promises(previous=round.last.digest, round=21, voted=first)
    assert not voted(other, me, promises=promises) and voted(first, me, promises=promises)
    later = Promises(previous=round.last.digest, round=21, voted=round.again(first, 2))
    assert not voted(round.propose(1, ends_at=ENDED + 50), me, promises=later)
    shrunk = Promises(previous=round.last.digest, round=21, shrunk=round.vote(me, round.body(shrunk=VOTERS[2:])))
    assert not voted(first, me, promises=shrunk) and voted(round.propose(1), me, promises=shrunk)


def test_a_voter_without_its_promises_abstains_until_the_round_after_the_next_certificate():
    round = Round()
    me, proposal = follower(round), round.propose()
    assert not voted(proposal, me, is_new=False)
    assert not voted(proposal, me, promises=Promises(previous=digest("round 18"), round=19))
    assert voted(proposal, me, promises=Promises(previous=round.last.previous, round=20))
    assert voted(proposal, me, is_new=True)

    async def run():
        peer = Peer(round, me, is_new=False)
        assert peer.agreement._enter(round.last, 1, round.member(me)).entry.is_lost
        certificate = round.certify(proposal.body, [each for each in VOTERS if each != me])
        peer.receive(Certificates(certificates=(certificate,)))
        await asyncio.sleep(0)
        return peer.agreement.voter.is_lost

    assert virtually(run(), ENDED + 1) and not virtually(run(), ENDED - 1)


def test_the_only_voter_that_is_left_votes_without_its_promises():
    """The run has no other; or the round stands, and all that are here have lost theirs: then the first one."""
    alone, round = Round(last_body(VOTERS[:1])), Round()

    async def run_alone():
        peer = Peer(alone, VOTERS[0], is_new=False)
        peer.receive(alone.propose())
        return len(peer.followed)

    async def run(me, seconds, *entered):
        peer = Peer(round, me, gone=set(VOTERS[2:]), is_new=False)
        await asyncio.sleep(seconds - 1)
        peer.receive(*entered)
        await asyncio.sleep(1)
        return peer.agreement.voter.absent()

    assert virtually(run_alone()) == 1
    other = round.entered(VOTERS[1], 1, is_lost=True)
    assert virtually(run(VOTERS[0], RULES.shrink_seconds - 1, other)) == []
    assert virtually(run(VOTERS[0], RULES.shrink_seconds + 1, other)) == list(VOTERS[1:])
    honest = round.entered(VOTERS[1], 1)
    assert virtually(run(VOTERS[0], RULES.shrink_seconds + 1, honest)) == [VOTERS[0], *VOTERS[2:]]
    late = RULES.shrink_seconds + 1
    rest = Round(round.last, VOTERS[:1])
    entries = [round.entry(VOTERS[0], 1, is_lost=True)]
    shrunk = rest.propose(1, entries=entries, shrunk=VOTERS[1:], ends_at=ENDED + late)

    async def votes(me):
        peer = Peer(round, me, gone=set(VOTERS[2:]), is_new=False)
        peer.receive(other)
        await asyncio.sleep(late)
        peer.receive(shrunk)
        return bool(peer.votes())

    assert virtually(votes(VOTERS[0])) and not virtually(votes(VOTERS[1]))


def test_a_voter_that_finds_a_vote_of_its_own_which_it_does_not_know_abstains():
    round = Round()
    me, body = follower(round), round.body()

    async def run(signers):
        peer = Peer(round, me)
        peer.receive(Certificates(certificates=(round.certify(body, signers),)))
        return peer.agreement.voter.is_lost

    assert virtually(run(VOTERS)) and not virtually(run([peer for peer in VOTERS if peer != me]))


def test_a_peer_that_has_no_vote_signs_nothing():
    assert not voted(Round().propose(), NEW[0])


def test_promises_are_saved_and_loaded_equal_and_a_restored_file_has_none(tmp_path):
    round = Round()
    file, promises = (
        PromiseFile(tmp_path / "promises.json"),
        Promises(previous=round.last.digest, voted=round.propose()),
    )
    assert file.load() is None
    file.save(promises)
    assert file.load() == promises
    text = (tmp_path / "promises.json").read_text()
    old = int(text.split('"written_ns":')[1].split("}")[0].split(",")[0])
    restored = text.replace(str(old), str(old - int((MAX_WRITE_SECONDS + 60) * 1e9)))
    (tmp_path / "promises.json").write_text(restored)
    assert file.load() is None
    (tmp_path / "promises.json").write_text("{")
    with pytest.raises(ConfigError, match="delete it to vote again later"):
        file.load()


def test_a_copied_promise_file_has_none(tmp_path, monkeypatch):
    file = PromiseFile(tmp_path / "promises.json")
    written = 10**18
    monkeypatch.setattr("time.time_ns", lambda: written)
    file.save(Promises())
    shutil.copy2(tmp_path / "promises.json", tmp_path / "copy.json")
    assert os.stat(tmp_path / "copy.json").st_ctime_ns > written
    assert PromiseFile(tmp_path / "copy.json").load() is None


# ---------------------------------------------------------------------- what a voter refuses


def test_a_voter_refuses_an_end_that_no_honest_leader_says():
    round = Round()
    seconds = RULES.round_seconds
    for ends_at, is_fine in (
        (ENDED + 2 * seconds - 1, True),
        (ENDED + 2 * seconds + 1, False),
        (0.0, True),
    ):
        assert voted(round.propose(ends_at=ends_at)) == is_fine
    old = round.propose(ends_at=ENDED)
    assert voted(old, at=ENDED + seconds) and not voted(old, at=ENDED + seconds + 1)
    assert voted(round.again(old, 1), at=ENDED + seconds + 1)


def test_a_voter_refuses_another_result_than_its_own():
    round = Round()
    me = follower(round)
    assert voted(round.propose(), me, before=[round.result(me)])
    assert not voted(round.propose(), me, before=[round.result(me, shared=digest("other"))])
    assert voted(round.propose(), me, before=[round.result(me, digests={})])


def test_a_voter_refuses_what_leaves_a_voters_result_out_two_seconds_after_it_has_it():
    round = Round()
    me = follower(round)
    other = next(peer for peer in VOTERS if peer not in (me, leader(round)))
    without = round.propose(results=[each for each in round.results() if each.peer_id != other])

    async def run(seconds, *results):
        peer = Peer(round, me)
        peer.receive(*results)
        await asyncio.sleep(seconds)
        peer.receive(without)
        return bool(peer.votes())

    result = round.result(other)
    assert virtually(run(1.9, result)) and not virtually(run(2.1, result))
    assert virtually(run(2.1, result, round.result(other, shared=digest("two"))))


def test_a_voter_refuses_the_removal_of_a_peer_that_it_hears_and_of_one_that_came_back():
    away = Round(last_body(absent={VOTERS[0]: 2}), VOTERS[1:])
    removal = away.propose(removed=VOTERS[:1])
    me = next(peer for peer in VOTERS[1:] if peer != leader(away))
    assert voted(removal, me, round=away, gone=VOTERS[:1]) and not voted(removal, me, round=away)
    round = Round()
    me = follower(round)
    gone = next(peer for peer in VOTERS if peer not in (me, leader(round)))
    left = round.propose(removed=[gone], goodbyes=(round.goodbye(gone),))
    assert voted(left, me) and not voted(left, me, before=[round.entered(gone, 1)])
    assert voted(left, me, before=[round.entered(gone, 0)])


def test_a_voter_goes_on_without_the_absent_half_only_when_late_and_when_all_of_them_are_gone():
    round = Round()
    me = leader(round)
    absent = [peer for peer in VOTERS if peer != me][:3]
    rest = Round(round.last, [peer for peer in VOTERS if peer not in absent])
    voter = next(peer for peer in rest.present if peer != me)
    shrunk = rest.propose(shrunk=absent, ends_at=ENDED + 900)

    async def run(seconds, gone, *before):
        peer = Peer(round, voter, gone=gone)
        await asyncio.sleep(seconds - 1)
        peer.receive(*before)
        await asyncio.sleep(1)
        peer.receive(shrunk)
        return bool(peer.votes())

    late = RULES.shrink_seconds + 1
    assert virtually(run(late, absent))
    assert not virtually(run(late - 2, absent))
    assert not virtually(run(late, absent[:2], round.entered(absent[2], 1)))
    assert not virtually(run(late, absent[:2])), "it may still train"
    assert virtually(run(RULES.mute_seconds + 1, absent[:2])), "it is here, and silent"
    forgetful = round.entered(absent[2], 1, is_lost=True)
    assert virtually(run(late, absent[:2], forgetful))
    assert not virtually(run(late, absent[:2], forgetful, round.entered(absent[2], 2)))
    left = rest.propose(shrunk=absent, goodbyes=tuple(map(round.goodbye, absent)))
    assert voted(left, voter)


def test_votes_of_those_that_a_body_names_absent_do_not_certify_it():
    round = Round(last_body(VOTERS[:4]))
    absent = VOTERS[:2]
    rest = Round(round.last, [peer for peer in VOTERS[:4] if peer not in absent])
    shrunk = rest.propose(shrunk=absent, goodbyes=tuple(map(round.goodbye, absent)))

    async def run(*voters):
        peer = Peer(round, NEW[0])
        peer.receive(shrunk, *(round.vote(each, shrunk.body) for each in voters))
        return len(peer.followed)

    me, other = rest.present
    assert virtually(run(absent[0])) == 0 and virtually(run(me, other)) == 1


def test_a_body_that_removes_a_voter_by_a_proof_of_long_ago_is_not_voted_for():
    round = Round()
    me = follower(round)
    guilty = next(peer for peer in VOTERS if peer not in (me, leader(round)))
    recent, old = round.proof(guilty), OLD.proof(guilty)
    assert voted(round.propose(removed=[guilty], proofs=(recent,)), me)
    assert not voted(round.propose(removed=[guilty], proofs=(old,)), me)


# ---------------------------------------------------------------------- entries and attempts


@pytest.mark.parametrize("how", ["invented", "late", "old proof", "unsigned", "none", "stranger"])
def test_an_entry_that_states_what_voters_refuse_does_not_count(how):
    """Otherwise one liar stops all later attempts, or makes itself the only voter."""
    round = Round(last_body(members=members(NEW[0])))
    liar, me = leader(round), leader(round, 1)
    guilty = next(peer for peer in VOTERS if peer not in (liar, me))
    old = OLD.proof(guilty)
    stated = {
        "invented": round.propose(body=changed(round.body(), voters=(liar,))),
        "late": round.propose(ends_at=ENDED + 1e6),
        "old proof": round.propose(removed=[guilty], proofs=(old,)),
    }.get(how, round.propose())
    entered = round.entered(NEW[0] if how == "stranger" else liar, 1, stated)
    if how == "unsigned":
        entered = entered.model_copy(update={"entry": changed(entered.entry, signature=old.vote.signature)})
    if how == "none":
        entered = entered.model_copy(update={"proposal": None})

    async def run(entered):
        peer = Peer(round, me)
        peer.receive(entered, sender=entered.entry.peer_id)
        return list(peer.agreement.attempts.of(1).entered)

    assert virtually(run(entered)) == []
    assert virtually(run(round.entered(liar, 1, round.propose()))) == [liar]


def test_a_voter_enters_a_later_attempt_when_a_quorum_states_it_and_for_no_single_liar():
    round = Round()
    me = follower(round)
    others = [peer for peer in VOTERS if peer != me]

    async def run(*entries):
        peer = Peer(round, me)
        peer.receive(*entries)
        return peer.agreement.attempts.number

    assert virtually(run(round.entered(others[0], 1000), round.entered(others[1], 1000))) == 0
    assert virtually(run(*(round.entered(peer, 3) for peer in others[:2]), round.entered(others[2], 1000))) == 3
    assert virtually(run(*(round.entered(peer, 3) for peer in NEW[:9]))) == 0
    forged = changed(round.entry(others[1], 3), signature=round.entry(NEW[0], 3).signature)
    false = Entered(entry=forged)
    assert virtually(run(round.entered(others[0], 3), false, round.entered(others[2], 3))) == 0


def test_what_is_said_of_far_attempts_takes_no_room():
    attempts = Attempts(last_body(), VOTERS[0], 20, 0.0)
    assert [number for number in range(40) if attempts.of(number) is not None] == list(range(12, 22))


def test_few_strangers_enter_a_meeting_whoever_comes_first_and_none_from_the_third_attempt_on():
    round = Round()

    async def run(attempt, *peers):
        peer = Peer(round, round.last.leader(attempt))
        peer.agreement._go_to(attempt)
        peer.receive(*(round.entered(each, attempt) for each in peers))
        return set(peer.agreement.attempts.of(attempt).entered)

    chosen = strangers(round.last, NEW[:5])[:2]
    for order in (NEW[:5], NEW[4::-1]):
        assert virtually(run(0, *order, *VOTERS)) == {*chosen, *VOTERS}
    assert virtually(run(2, *NEW[:2], *VOTERS)) == set(VOTERS)


def test_who_is_not_invited_takes_no_newcomers_place():
    round = Round()

    async def run():
        peer = Peer(round, round.last.leader(0))
        invited = lambda entered: [each.member for each in entered if each.entry.peer_id in VOTERS]  # noqa: E731
        peer.agreement._roster_of = lambda entered, last: Roster(invited(entered), last)
        peer.receive(*(round.entered(each, 0) for each in (*NEW[:2], *VOTERS)))
        return set(peer.agreement.attempts.of(0).entered)

    assert virtually(run()) == set(VOTERS)


def test_an_entry_with_the_roster_entry_of_another_does_not_count():
    """It would name a voter twice in the roster, or stand for one that is away."""
    round = Round()
    other = round.member(VOTERS[0])
    forged = Entered(entry=round.entry(NEW[0], 0, member=digest_of(other)), member=other)

    async def run():
        peer = Peer(round, round.last.leader(0))
        peer.receive(forged)
        return set(peer.agreement.attempts.of(0).entered)

    assert not forged.is_whole and virtually(run()) == set()


def test_a_round_that_is_decided_while_a_peer_averages_is_not_given_up():
    """The next round used to open here in a later attempt, which no other peer had entered."""
    round = Round()
    me, certificate = follower(round), round.certify(round.body(), VOTERS)

    async def run():
        peer = Peer(round, me)

        async def average(roster, attempt):
            peer.receive(Certificates(certificates=(certificate,)))
            return Outcome(None)

        loop = asyncio.get_running_loop()
        loop.call_soon(peer.receive, round.meeting())
        body = await peer.agreement.settle(Part(round.member(me), average, lambda: VOTERS, ENDED))
        return body == certificate.body, peer.agreement.attempts.number

    assert virtually(run()) == (True, 0)


def test_a_peer_without_a_vote_that_voters_have_lost_is_out_for_eight_rounds():
    round = Round(last_body(members=members(NEW[0])), (*VOTERS, NEW[0]))

    async def run(*namers, lost=NEW[0]):
        peer = Peer(round, leader(round, 1))
        peer.receive(*(round.result(each, digests={}, lost=lost) for each in namers))
        peer.receive(round.entered(NEW[0], 1))
        return NEW[0] in peer.agreement.attempts.of(1).entered, peer.agreement._out_until

    assert virtually(run(VOTERS[0])) == (True, {})
    assert virtually(run(*VOTERS[:2])) == (False, {NEW[0]: 28})
    assert virtually(run(NEW[0], VOTERS[0])) == (True, {})
    assert virtually(run(*VOTERS[:2], lost=VOTERS[4])) == (True, {})


def test_one_end_of_each_lost_link_sits_the_rounds_later_attempts_out_while_the_rest_is_a_majority():
    def rest(num, *named):
        round = Round(last_body(PEERS[:num]))
        attempts = Attempts(round.last, PEERS[0], 1, 0.0)
        for lost, voter in named:
            attempts.lose(PEERS[lost], PEERS[voter])
        left = attempts.without_lost([round.entered(peer) for peer in PEERS[:num]], ())
        return [PEERS.index(each.entry.peer_id) for each in left]

    assert rest(5) == [0, 1, 2, 3, 4]
    assert rest(5, (4, 0), (4, 1), (3, 4)) == [0, 1, 2, 3]
    assert rest(5, (0, 3), (1, 3), (2, 3)) == [0, 1, 2, 4]
    assert rest(4, (1, 0), (0, 1)) == [1, 2, 3]
    assert rest(2, (1, 0), (0, 1)) == [0], "the first of two goes on"
    assert rest(3, (1, 0), (2, 0), (1, 2)) == [1, 2]


def test_a_meeting_with_a_false_entry_or_of_another_peer_is_no_meeting():
    round = Round()
    me, meeting = follower(round), round.meeting()
    first, *others = meeting.entered
    forged = changed(first.entry, signature=round.entry(NEW[0]).signature)
    other = round.member(first.entry.peer_id, tokens=5)

    async def run(meeting, sender):
        peer = Peer(round, me)
        peer.receive(meeting, sender=sender)
        return peer.agreement.attempts.of(0).roster is not None

    assert virtually(run(meeting, leader(round))) and not virtually(run(meeting, leader(round, 1)))
    for wrong in ({"entry": forged}, {"member": other}, {"entry": round.entry(first.entry.peer_id, 1)}):
        false = meeting.model_copy(update={"entered": (first.model_copy(update=wrong), *others)})
        assert not virtually(run(false, leader(round)))


# ---------------------------------------------------------------------- results, votes, certificates


def test_a_voter_passes_on_the_results_that_a_leader_lacks_now_and_when_they_come():
    round = Round()
    me = follower(round)
    others = [peer for peer in VOTERS if peer not in (me, leader(round))]
    one, two = map(round.result, others[:2])
    lacking = Lacking(previous=round.last.digest, attempt=0, peers=tuple(others[:2]))

    async def run(sender):
        peer = Peer(round, me)
        peer.receive(one)
        peer.receive(lacking, sender=sender)
        peer.receive(two, round.result(others[2]))
        return [message for to, message in peer.posted if isinstance(message, Result) and to == leader(round)]

    assert virtually(run(leader(round))) == [one, two]
    assert virtually(run(others[0])) == []


def test_results_and_votes_that_are_not_signed_or_of_strangers_do_not_count():
    round = Round()
    me, proposal = follower(round), round.propose()

    async def run(*messages):
        peer = Peer(round, me)
        peer.receive(*messages)
        return peer

    forged = changed(round.result(VOTERS[0]), signature=round.result(NEW[0]).signature)
    of = virtually(run(forged, round.result(NEW[0]), round.result(VOTERS[1]))).agreement.attempts.of(0)
    assert list(of.results) == [VOTERS[1]]
    false = [changed(round.vote(peer, proposal.body), signature="") for peer in VOTERS]
    strange = [round.vote(peer, proposal.body) for peer in NEW[:5]]
    assert not virtually(run(*false, *strange, proposal)).followed
    honest = [round.vote(peer, proposal.body) for peer in VOTERS]
    assert len(virtually(run(*false, *honest, proposal)).followed) == 1


def test_a_leader_proposes_what_came_and_what_it_is_sent_when_it_asks():
    """It leads, and one voter's result comes by another voter alone."""
    round = Round()
    me = leader(round)
    others = [peer for peer in VOTERS if peer != me]

    async def run():
        peer = Peer(round, me)
        peer.receive(*(round.entered(each, 0) for each in others))
        settling = asyncio.ensure_future(peer.agreement.settle(peer.part()))
        await asyncio.sleep(0.5)
        assert len(peer.sent(Meeting)) == 1
        peer.receive(*(round.result(each, slots={0: digest("new 0"), 1: digest("new 1")}) for each in others[:3]))
        await asyncio.sleep(4.5)
        (lacking,) = peer.sent(Lacking)
        assert lacking.peers == (others[3],)
        peer.receive(round.result(others[3]), sender=others[0])
        await asyncio.sleep(0)
        (proposal,) = peer.sent(Proposal)
        assert {result.peer_id for result in proposal.results} == set(VOTERS) and not round.check(proposal)
        peer.receive(*(round.vote(each, proposal.body) for each in others[:2]))
        assert (await settling) == proposal.body
        told = {to for to, message in peer.posted if isinstance(message, Certificates)}
        assert told == set(others[2:])

    virtually(run(), ENDED + 1)


def test_a_leader_whose_round_is_decided_meanwhile_leads_it_no_more():
    """The next round has other attempts, and the meeting of this one was taken for its own."""
    round, attempt = Round(), 12
    me = leader(round, attempt)
    promises = Promises(previous=round.last.digest, round=21, attempt=attempt)

    async def run():
        peer = Peer(round, me, promises=promises)
        settling = asyncio.ensure_future(peer.agreement.settle(peer.part()))
        await asyncio.sleep(0)
        body = round.body()
        others = [each for each in VOTERS if each != me]
        peer.receive(*(round.entered(each, attempt) for each in others))
        peer.receive(Certificates(certificates=(round.certify(body, others),)))
        assert (await settling) == body and not peer.sent(Meeting)

    virtually(run(), ENDED + 1)


def test_a_peer_whose_round_is_decided_answers_those_that_enter_it_and_not_each_late_vote():
    round = Round()
    proposal = round.propose()

    async def run():
        peer = Peer(round, follower(round))
        peer.receive(*(round.vote(each, proposal.body) for each in VOTERS), proposal)
        peer.posted.clear()
        peer.receive(round.vote(VOTERS[0], proposal.body), round.result(VOTERS[0]), sender=VOTERS[0])
        assert not peer.posted
        peer.receive(round.entered(VOTERS[0], 0), sender=VOTERS[0])
        (answer,) = peer.posted
        assert answer[0] == VOTERS[0] and answer[1].certificates[0].body == proposal.body

    virtually(run())


# ---------------------------------------------------------------------- proofs and goodbyes


def test_a_proof_is_kept_on_disk_and_told_to_the_voters_and_removes_the_voter_from_the_next_body():
    round = Round()
    me, guilty = leader(round), leader(round, 1)
    one, two = round.proof(guilty).vote, round.proof(guilty).other

    async def run():
        peer = Peer(round, me)
        peer.receive(one, two)
        (proof,) = peer.sent(Proof)
        assert peer.saved[-1].proofs == (proof,) and proof.convicts(round.key("")) == guilty
        again = Peer(round, me, promises=peer.saved[-1])
        for each in (peer, again):
            made = each.agreement.voter.proposal(0, round.roster, (), round.results(), (), ENDED + 100)
            assert made.body.banned == (guilty,) and made.proofs == (proof,)

    virtually(run())


def test_proofs_against_strangers_and_of_long_ago_are_not_kept():
    round = Round()
    old = OLD.proof(VOTERS[0])
    forged = round.proof(VOTERS[1]).model_copy(update={"vote": changed(round.proof(VOTERS[1]).vote, signature="")})

    async def run():
        peer = Peer(round, follower(round))
        peer.receive(round.proof(NEW[0]), old, forged)
        assert not peer.agreement.voter.statements.proofs
        recent = Round(last_body(round=OLD.last.round + 1)).proof(VOTERS[0])
        peer.receive(recent)
        assert list(peer.agreement.voter.statements.proofs) == [VOTERS[0]]

    virtually(run())


def test_statements_of_strangers_and_of_other_times_are_not_kept_and_old_ones_make_room():
    round = Round()
    far = Round(last_body(round=100))

    async def run():
        peer = Peer(round, follower(round))
        statements = peer.agreement.voter.statements
        for statement in (round.vote(NEW[0], round.body()), far.vote(VOTERS[0], far.body())):
            statements.add(statement, round.last)
        assert not any(statements._kept.values())
        for attempt in range(MAX_KEPT + 10):
            statements.add(round.entry(VOTERS[0], attempt), round.last)
        (kept,) = statements._kept[21].values()
        assert len(kept) == MAX_KEPT and kept[-1].attempt == MAX_KEPT + 9

    virtually(run())


def test_votes_in_a_certificate_are_looked_at_unless_a_stranger_sends_it():
    round = Round()
    one, two = round.body(), round.body(ends_at=ENDED + 50)
    guilty = next(peer for peer in VOTERS if peer != follower(round))

    async def run(sender):
        peer = Peer(round, follower(round))
        peer.receive(round.vote(guilty, one))
        peer.receive(Certificates(certificates=(round.certify(two, [guilty]),)), sender=sender)
        return list(peer.agreement.voter.statements.proofs)

    assert virtually(run(VOTERS[0])) == [guilty] and virtually(run(NEW[0])) == []


@pytest.mark.parametrize("is_reopened", [False, True])
def test_votes_of_two_generations_prove_nothing(is_reopened):
    round = Round()
    again = Round(reopened(round.last)) if is_reopened else round

    async def run():
        peer = Peer(again, follower(round))
        one, two = round.vote(VOTERS[0], round.body()), again.vote(VOTERS[0], again.body(ends_at=ENDED + 50))
        peer.receive(one, two, Proof(vote=one, other=two))
        return bool(peer.agreement.voter.statements.proofs)

    assert virtually(run()) != is_reopened


@pytest.mark.parametrize("promises", [None, Promises(previous=digest("round 18"), round=19)])
def test_a_user_who_goes_back_to_a_round_lets_a_voter_vote_unless_its_promises_are_lost(promises):
    round = Round()

    async def run():
        peer = Peer(round, follower(round), promises=promises, is_new=False)
        peer.agreement.go_back()
        peer.receive(round.propose())
        return bool(peer.votes())

    assert virtually(run()) == (promises is not None)


def test_a_goodbye_removes_its_author_alone_and_ends_with_a_later_entry():
    round = Round()
    me = leader(round)
    gone = next(peer for peer in VOTERS if peer != me)

    async def run(*messages):
        peer = Peer(round, me)
        peer.receive(*messages)
        made = peer.agreement.voter.proposal(0, round.roster, (), round.results(), (), ENDED + 100)
        return gone in made.body.voters

    goodbye = round.goodbye(gone)
    assert virtually(run()) and not virtually(run(goodbye))
    assert virtually(run(changed(goodbye, signature=round.goodbye(me).signature)))
    assert virtually(run(goodbye, round.entered(gone, 1))) and not virtually(run(goodbye, round.entered(gone, 0)))


def test_a_voter_that_leaves_says_goodbye_votes_no_more_and_says_it_again_to_who_enters():
    round = Round()

    async def run():
        peer = Peer(round, follower(round))
        settling = asyncio.ensure_future(peer.agreement.settle(peer.part()))
        await asyncio.sleep(0)
        peer.agreement.leave()
        assert (await settling) is None
        assert {to for to, message in peer.posted if isinstance(message, Goodbye)} == set(VOTERS) - {peer.me}
        peer.posted.clear()
        peer.receive(round.entered(leader(round, 1), 1), round.propose())
        return [type(message) for _, message in peer.posted], peer.votes()

    kinds, votes = virtually(run())
    assert kinds == [Goodbye] and not votes


def test_a_full_disk_ends_a_leaders_attempt_with_its_error():
    round = Round(last_body(VOTERS[:1]))

    async def run():
        peer = Peer(round, VOTERS[0])
        peer.disk_error = OSError("disk full")
        await peer.agreement.settle(peer.part())

    with pytest.raises(OSError, match="disk full"):
        virtually(run())


def test_a_lone_voter_certifies_its_round_at_once():
    round = Round(last_body(VOTERS[:1]))

    async def run():
        peer = Peer(round, VOTERS[0])
        began = peer.now()
        body = await peer.agreement.settle(peer.part())
        assert body.round == 21 and body.shared == digest("shared") and peer.sent(Vote) == []
        return peer.now() - began

    assert virtually(run()) < 2


def test_a_lone_voter_that_ended_between_its_vote_and_the_certificate_goes_on_in_the_next_attempt():
    """It entered the attempt of its vote again, where the vote is none that it may state."""
    round = Round(last_body(VOTERS[:1]))
    voted = Promises(previous=round.last.digest, round=21, voted=round.propose())

    async def run():
        peer = Peer(round, VOTERS[0], voted)
        began = peer.now()
        body = await peer.agreement.settle(peer.part())
        assert body.digest == voted.voted.body.digest
        return peer.now() - began

    assert virtually(run()) < 2
