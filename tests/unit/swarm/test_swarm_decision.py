"""Deciders in virtual time: rounds are certified whatever is lost, and no message of a liar stops them."""

import errno
import random
import resource
import signal

import pytest

from benchmarks import history_nodes
from benchmarks.history_nodes import NUM_SLOTS, Idle, Liar, Node, Twice, World
from spes_p2p.errors import ConfigError
from spes_p2p.swarm.certificate import (
    Certificates,
    Confirmation,
    GivenUp,
    Goodbye,
    Proof,
    Proposal,
    Question,
    Revision,
    Vote,
    genesis,
    vote_for,
)
from spes_p2p.swarm.certificate_checks import check_skip
from spes_p2p.swarm.chain import Chain, ChainFile
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from tests.support.certificates import PEERS, Round, digest

START = genesis("run", PEERS[0], digest("manifest"), NUM_SLOTS)


def swarm(seed, num=4, kinds=None):
    """Return a world whose peers have started; all of them vote after the first round."""
    world = World(0, random.Random(seed))
    for peer in PEERS[:num]:
        world.nodes[peer] = (kinds or {}).get(peer, Node)(world, peer, START)
    for node in world.nodes.values():
        node.start()
    world.run(30)
    assert all(node.last.round >= 1 for node in world.nodes.values())
    return world


def heads(world):
    return {node.last.round for node in world.nodes.values() if node.is_up}


def attempts(world):
    return {certificate.attempt for certificate in world.nodes[PEERS[0]].chain}


def test_peers_certify_round_after_round_in_the_first_attempt(seed):
    world = swarm(seed)
    world.run(120)
    assert min(heads(world)) >= 5 and attempts(world) == {0}
    shortest = min(heads(world))
    assert len({node.decider.chain.body_at(shortest).digest for node in world.nodes.values()}) == 1


def test_a_dead_proposer_costs_its_attempts_only(seed):
    world = swarm(seed)
    dead = world.nodes[PEERS[2]]
    dead.is_dead = True
    dead.crash(0.0)
    world.run(300)
    assert min(heads(world)) >= 8 and max(attempts(world)) > 0


def test_a_peer_that_was_away_for_long_takes_over_all_that_it_has_missed(monkeypatch, seed):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_SENT", 4)
    world = swarm(seed)
    away = world.nodes[PEERS[2]]
    away.crash(400.0)
    world.run(429)
    missed = max(heads(world)) - away.last.round
    assert missed > 12
    world.run(460)
    assert away.last.round >= missed


def test_a_voter_that_leaves_is_out_after_the_next_certificate(seed):
    world = swarm(seed, 5)
    world.run(100)
    leaving = world.nodes[PEERS[3]]
    assert PEERS[3] in leaving.last.voters
    leaving.decider.leave()
    round = leaving.last.round
    world.run(160)
    after = [each.body for each in world.nodes[PEERS[0]].chain if each.body.round > round]
    assert PEERS[3] not in after[1].voters


def until_the_others_wait_for(world, peer):
    """Run until the others have averaged, and this peer is to propose the result and has not proposed it yet."""
    waited, others = world.nodes[peer], [world.nodes[each] for each in PEERS[:5] if each != peer]

    def is_theirs() -> bool:
        is_due = peer in waited.last.voters and waited.last.proposer(0) == peer
        have_averaged = len(heads(world)) == 1 and all(node.decider._own for node in others)
        return is_due and have_averaged and waited.decider._offered is None

    world.run(1000, is_theirs)
    return waited, others


def go_on_at_once(world, others):
    """Have others, which wait for a proposer, open the next attempt soon, and certify the round in it."""
    before, began = others[0].last, world.now
    world.run(began + 1000, lambda: all(node.decider.attempt for node in others))
    assert world.now < began + history_nodes.RULES.attempt_seconds / 2
    world.run(began + 1000, lambda: all(node.last.round > before.round for node in others))
    assert {node.last.previous for node in others} == {before.digest}


def test_the_others_do_not_wait_for_a_proposer_that_has_said_goodbye(seed):
    world = swarm(seed, 5)
    leaving, others = until_the_others_wait_for(world, PEERS[3])
    leaving.decider.leave()
    leaving.is_dead = True
    leaving.crash(0.0)
    go_on_at_once(world, others)


def test_the_others_do_not_wait_for_a_proposer_that_has_given_up(seed):
    world = swarm(seed, 5)
    proposer, others = until_the_others_wait_for(world, PEERS[3])
    proposer.decider._give_up()  # as one that found no group
    go_on_at_once(world, others)


def test_a_peer_that_averages_after_its_proposer_has_given_up_gives_up_at_once(seed):
    world = swarm(seed, 5)
    proposer, (late, *others) = until_the_others_wait_for(world, PEERS[3])
    decider, own = late.decider, late.decider._own
    decider._own = None  # as if it still averaged
    for other in others:  # too few are left to open another attempt
        other.crash(1000.0)
    proposer.decider._give_up()
    world.run(world.now + 1000, lambda: PEERS[3] in decider._give_ups)
    assert decider.voter.ballot.gave_up is None
    decider.averaged(0, decider._members, decider._ends_at, own.digests)
    assert decider.voter.ballot.gave_up == 0


def test_a_voter_that_signs_twice_is_out_within_two_rounds_and_stays_out(seed):
    world = swarm(seed, 6, {PEERS[2]: Twice})
    world.run(400)
    bodies = [each.body for each in world.nodes[PEERS[0]].chain]
    later = [body for body in bodies if body.round > world.proven_at[PEERS[2]] + 2]
    assert later and all(PEERS[2] not in body.voters and PEERS[2] in body.banned for body in later)


# ---------------------------------------------------------------------- identities that cost nothing


@pytest.mark.parametrize("num", [3, 5, 8])
def test_as_many_idle_identities_as_honest_peers_in_each_meeting_stop_no_round(seed, num):
    """From the first meeting on: there is no certificate before it that would tell them apart."""
    world = swarm(seed, 2 * num, dict.fromkeys(PEERS[num : 2 * num], Idle))
    world.run(400)
    honest = [world.nodes[peer] for peer in PEERS[:num]]
    rounds = min(node.last.round for node in honest)
    assert rounds > 20 and len({node.decider.chain.body_at(rounds).digest for node in honest}) == 1
    bodies = [each.body for each in honest[0].chain]
    idle = {*PEERS[num : 2 * num]}
    assert not any(idle & {*body.voters, *body.candidates} for body in bodies)
    assert set(bodies[-1].voters) == {*PEERS[:num]}
    assert attempts(world) == {0}, "each round is decided at once"


# ---------------------------------------------------------------------- what liars send


class Unsigned(Liar):
    """Signs none of its confirmations."""

    def send(self, peer, message):
        is_unsigned = isinstance(message, Confirmation)
        super().send(peer, message.model_copy(update={"signature": ""}) if is_unsigned else message)


class FalseVotes(Liar):
    """Signs none of its votes."""

    def send(self, peer, message):
        is_unsigned = isinstance(message, Vote)
        super().send(peer, message.model_copy(update={"signature": ""}) if is_unsigned else message)


def test_a_confirmation_without_a_signature_stops_no_proposal(seed):
    world = swarm(seed, 5, {PEERS[2]: Unsigned})
    world.run(200)
    assert min(heads(world)) >= 5
    honest = [each for each in world.nodes[PEERS[0]].chain if each.body.round > 1]
    before = {each.body.round: each.body for each in world.nodes[PEERS[0]].chain}
    first = [each for each in honest if before[each.body.round - 1].proposer(0) != PEERS[2]]
    assert {each.attempt for each in first} == {0}


def test_votes_without_a_signature_certify_nothing(seed):
    world = swarm(seed, 4, {PEERS[2]: FalseVotes, PEERS[3]: FalseVotes})
    world.run(200)
    assert {body.round for body in world.certified.values()} == {1}


def test_votes_of_those_that_the_others_go_on_without_do_not_stop_the_certificate(seed):
    """Counted, they made one that no peer follows, and the last true vote came too late for another."""
    world = swarm(seed)
    world.run(60)
    for peer in PEERS[2:4]:
        world.nodes[peer].is_dead = True
        world.nodes[peer].crash(0.0)

    def offered():
        proposals = {peer: world.nodes[peer].decider._offered for peer in PEERS[:2]}
        return {peer: each for peer, each in proposals.items() if each is not None and each.body.shrunk}

    world.run(3000, offered)
    [(proposer, proposal)] = offered().items()
    assert set(proposal.body.shrunk) == set(PEERS[2:4])
    for peer in PEERS[2:4]:
        vote = vote_for(proposal.body, proposal.attempt, peer).signed(world.nodes[peer].keys)
        world.nodes[proposer].decider.receive(peer, vote)
    world.run(world.now + history_nodes.RULES.attempt_seconds / 2)
    [certificate] = [each for each in world.nodes[proposer].chain if each.body.digest == proposal.body.digest]
    assert set(certificate.signatures) == set(PEERS[:2])


def test_a_goodbye_in_another_peers_name_removes_no_voter_and_stops_no_proposal(seed):
    world = swarm(seed)
    for node in world.nodes.values():
        forged = Goodbye(run="run", round=node.last.round + 1, attempt=0, peer_id=PEERS[3])
        node.decider.receive(PEERS[3], forged)
    world.run(100)
    last = world.nodes[PEERS[0]].last
    assert last.round > forged.round and PEERS[3] in last.voters and attempts(world) == {0}


def test_a_proposal_that_a_give_up_does_not_state_replaces_none(seed):
    world = swarm(seed)
    node = world.nodes[world.nodes[PEERS[0]].last.proposer(1)]
    round = Round(node.last)
    real = round.propose(body=round.body(ends_at=world.now + 5))
    false = real.model_copy(update={"confirmations": ()})
    one, two, three = [peer for peer in round.last.voters if peer != node.peer_id]
    sent = []
    node.send = lambda peer, message: sent.append(message)
    node.decider.receive(one, GivenUp(give_up=round.give_up(one, 0, real), voted=real))
    node.decider.receive(two, GivenUp(give_up=round.give_up(two), voted=false))
    voteless = round.give_up(three).model_copy(update={"body": real.body.digest}).signed(round.key(three))
    node.decider.receive(three, GivenUp(give_up=voteless, voted=false))
    assert {each.body.digest for each in sent if isinstance(each, Proposal)} == {real.body.digest}


def test_strangers_confirmations_neither_hasten_nor_prevent_a_proposal(monkeypatch, seed):
    """The first confirmation started the only timer, which rang while the proposer still trained."""
    monkeypatch.setattr("spes_p2p.swarm.decision.MAX_MEMBERS", 1)
    world = swarm(seed, 5, {PEERS[2]: Idle})
    first = max(heads(world))
    while max(heads(world)) < first + 6:
        for node in world.nodes.values():
            round = Round(node.last)
            for stranger in PEERS[50:53]:
                node.decider.receive(stranger, round.confirm(stranger, node.decider.attempt))
            assert len(node.decider._confirmations.keys() & set(PEERS[50:53])) <= 1
            if node.last.proposer(node.decider.attempt) == node.peer_id:
                voter = next(peer for peer in node.last.voters if peer != node.peer_id)
                node.decider.receive(voter, round.confirm(voter, node.decider.attempt))
                assert node.decider._members or voter in node.decider._confirmations
        head = max(heads(world))
        world.run(world.now + 100, lambda head=head: min(heads(world) | {head + 1}) > head)
        assert max(heads(world)) > head
    chain = [START, *(each.body for each in world.nodes[PEERS[0]].chain)]
    made = [each for each in world.nodes[PEERS[0]].chain if each.body.round > first + 1]
    assert {each.attempt for each in made if chain[each.body.round - 1].proposer(0) != PEERS[2]} == {0}


def test_votes_in_a_strangers_certificate_are_not_checked(monkeypatch, seed):
    """Hundreds of invented signatures fit into one message."""
    decider, checked = swarm(seed).nodes[PEERS[0]].decider, []
    round = Round(decider.chain.last)
    monkeypatch.setattr(decider, "_watch", lambda *votes: checked.append(votes))
    message = Certificates(certificates=(round.certify(round.body(), [PEERS[1]]),))
    decider.receive(PEERS[50], message)
    assert not checked
    decider.receive(PEERS[1], message)
    assert checked


class FullDisk(Node):
    """Cannot write for some time."""

    is_full = False

    def _save(self, ballot):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        super()._save(ballot)


def test_a_voter_whose_disk_was_full_gives_the_attempt_up_once_there_is_room(seed):
    """It had noted that it had given up, and said so never again; with two voters no other attempt began."""
    world = swarm(seed, 2, {PEERS[0]: FullDisk, PEERS[1]: FullDisk})
    for node in world.nodes.values():
        node.is_full = True
    head, until = max(heads(world)), world.now + 100
    while world.now < until:
        try:
            world.run(until)
        except OSError:
            continue
    assert max(heads(world)) == head
    for node in world.nodes.values():
        node.is_full = False
    world.run(world.now + 200)
    assert min(heads(world)) > head + 2


def test_a_body_that_is_proposed_again_in_vain_is_given_up(seed):
    """No result of this peer ends the attempt: it did not average."""
    world = swarm(seed)
    node = world.nodes[world.nodes[PEERS[0]].last.proposer(1)]
    round = Round(node.last)
    real = round.propose(body=round.body(ends_at=world.now + 5))
    others = [peer for peer in round.last.voters if peer != node.peer_id]
    for peer in others:
        world.nodes[peer].crash(1000.0)
    sent = []
    node.send = lambda peer, message: sent.append(message)
    for peer in others:
        node.decider.receive(peer, GivenUp(give_up=round.give_up(peer, 0, real), voted=real))
    assert any(isinstance(message, Proposal) for message in sent)
    world.run(world.now + 2 * history_nodes.RULES.attempt_seconds)
    assert any(isinstance(message, GivenUp) and message.give_up.attempt == 1 for message in sent)


def test_a_voter_whose_goodbye_was_lost_says_it_again(seed):
    world = swarm(seed, 2)
    away, other = (world.nodes[peer] for peer in PEERS[:2])
    world.cut.add((away.peer_id, other.peer_id))
    away.decider.leave()
    away.average = lambda *_: None
    world.run(world.now + 2)
    world.cut.clear()
    head = other.last.round
    world.run(world.now + 200)
    assert other.last.round > head + 2 and away.peer_id not in other.last.voters


def test_a_proof_against_a_stranger_is_not_kept(seed):
    decider = swarm(seed).nodes[PEERS[0]].decider
    round = Round(decider.chain.last)
    decider.receive(PEERS[1], round.proof(PEERS[50]))
    assert decider.proofs == {}
    decider.receive(PEERS[1], round.proof(PEERS[3]))
    assert set(decider.proofs) == {PEERS[3]}


def test_a_proof_of_more_than_eight_rounds_ago_removes_no_voter(seed):
    world = swarm(seed, 5)
    world.run(60)
    signed_in = [Round(world.nodes[PEERS[0]].chain[at].body) for at in range(3)]
    world.run(110)
    node = world.nodes[PEERS[0]]
    for round in signed_in:
        node.decider.receive(PEERS[1], round.proof(PEERS[3]))
    assert node.decider.proofs == {}
    node.decider.receive(PEERS[1], Round(node.decider.chain.body_at(node.last.round - 7)).proof(PEERS[3]))
    assert set(node.decider.proofs) == {PEERS[3]}


def test_a_body_that_removes_a_voter_by_a_proof_of_long_ago_is_not_voted_for(seed):
    world = swarm(seed, 5)
    world.run(110)
    chain = world.nodes[PEERS[0]].decider.chain
    round, attempt = Round(chain.last), 0
    author = chain.last.proposer(attempt)
    [voter, *_] = [peer for peer in chain.last.voters if peer not in (author, PEERS[3])]
    node, votes = world.nodes[voter], []
    node.send = lambda peer, message: votes.append(message) if isinstance(message, Vote) else None
    for back, is_old in ((8, True), (0, False)):
        proof = Round(chain.body_at(chain.last.round - back)).proof(PEERS[3])
        body = round.body(removed=[PEERS[3]], guilty=[PEERS[3]], ends_at=world.now + 5)
        removal = round.propose(body=body, proofs=(proof,))
        assert bool(node.decider.voter.discounts(round.give_up(author, 0, removal), removal)) == is_old
        node.decider.receive(author, removal)
        assert bool(votes) != is_old


def test_what_voters_signed_before_the_run_went_back_proves_nothing(seed):
    """All peers give their promises up, and vote for other bodies of rounds that they have voted in."""
    world = swarm(seed, 4)
    world.run(110)
    old = [list(node.chain) for node in world.nodes.values()]
    kept = max(heads(world)) - 3
    for node in world.nodes.values():
        node.decider.chain.cut(kept)
        node.chain = node.decider.chain.certificates
        node.decider.go_back()
        node._train()
    world.run(world.now + 10, lambda: min(heads(world)) > kept)
    for node in world.nodes.values():
        for certificate in old[0][kept:]:
            node.decider._watch(*certificate.votes())
        node.crash(0.0)
    world.run(world.now + 0.1)
    given_up, again = old[0][kept], world.nodes[PEERS[0]].chain[kept]
    assert given_up.body.previous == again.body.previous and given_up.body.digest != again.body.digest
    both = set(given_up.signatures) & set(again.signatures)
    assert both
    for node in world.nodes.values():
        for peer in both:
            votes = [each for made in (given_up, again) for each in made.votes() if each.peer_id == peer]
            node.decider.receive(PEERS[50], Proof(vote=votes[0], other=votes[1]))
    world.run(world.now + 60)
    assert min(heads(world)) > kept + 3 and not world.nodes[PEERS[0]].last.banned
    assert set(world.nodes[PEERS[0]].last.voters) == set(PEERS[:4])


def test_a_proof_outlives_a_crash_of_the_only_peer_that_has_it(seed):
    world = swarm(seed)
    node = world.nodes[PEERS[0]]
    node.decider.receive(PEERS[1], Round(node.decider.chain.last).proof(PEERS[3]))
    node.crash(5.0)
    world.run(world.now + 100)
    assert PEERS[3] not in node.last.voters


def test_questions_of_two_branches_end(seed):
    world = swarm(seed)
    world.run(100)
    node = world.nodes[PEERS[0]]
    sent = []
    node.send = lambda peer, message: sent.append(message)
    other = Chain(START, [Round(START).certify(Round(START).body(ends_at=9.0), PEERS[:1])])
    node.decider.receive(PEERS[1], Question(points=other.points()))
    assert [type(message) for message in sent] == [Certificates]
    assert sent[0].certificates[0].body.round == 1


# ---------------------------------------------------------------------- revisions of the settings


@pytest.mark.parametrize("is_proposed", [False, True])
def test_no_round_names_a_revision_that_no_quorum_has_read_and_none_waits_for_it(is_proposed, seed):
    """One voter states it, or proposes it, and withholds it; later a quorum has read it, and one voter has not."""
    read = Revision(number=1, digest=digest("revision"))

    class Withholding(Liar):
        def send(self, peer, message):
            if is_proposed and isinstance(message, Proposal):
                body = message.body.model_copy(update={"revision": read})
                vote = vote_for(body, message.attempt, self.peer_id).signed(self.keys)
                message = message.model_copy(update={"body": body, "vote": vote})
            if isinstance(message, Confirmation):
                message = message.model_copy(update={"revision": read}).signed(self.keys)
            super().send(peer, message)

    world = World(0, random.Random(seed))
    for peer in PEERS[:4]:
        world.nodes[peer] = (Withholding if peer == PEERS[2] else Node)(world, peer, START)
    for node in world.nodes.values():
        node.start()
    world.run(200)
    nodes = [node for peer, node in world.nodes.items() if peer != PEERS[2]]
    assert min(node.last.round for node in nodes) > 8 and not any(node.last.revision.number for node in nodes)
    for node in nodes[1:]:
        node.decider.revision = read
    world.run(260)
    assert {node.last.revision for node in nodes} == {read}


# ---------------------------------------------------------------------- the chain


def test_halves_that_were_apart_for_long_come_together(monkeypatch, seed):
    """Where they have parted lies further from the newest point that both know than one message reaches."""
    for module in ("chain", "decision"):
        monkeypatch.setattr(f"spes_p2p.swarm.{module}.MAX_SENT", 4)
    world = swarm(seed)
    world.run(300)
    halves = set(PEERS[:2]), set(PEERS[2:4])
    world.cut = {(a, b) for a in PEERS[:4] for b in PEERS[:4] if (a in halves[0]) != (b in halves[0])}
    parted = max(heads(world))
    while min(heads(world)) - parted < 17:
        world.run(world.now + 5)
    assert max(heads(world)) - parted < 22, "soon the points 31 rounds back will do"
    assert len({node.last.digest for node in world.nodes.values()}) >= 2
    world.cut = set()
    world.run(world.now + 40)
    rounds = min(heads(world))
    assert len({node.decider.chain.body_at(rounds).digest for node in world.nodes.values()}) == 1


def never(certificate, body):
    return False


# ---------------------------------------------------------------------- what is final


def forged(chain, round):
    """Return another certificate of a round, signed by all that could sign it, which the rule of forks prefers."""
    before, ours = chain.body_at(round - 1), chain.body_at(round)
    at = Round(before)
    bodies = (at.body(ends_at=ours.ends_at + seconds / 8) for seconds in range(1, 1000))
    return at.certify(next(body for body in bodies if body.digest < ours.digest), before.voters)


def is_replaced(node, round):
    """Tell whether a forged certificate of a round is followed in place of the node's own."""
    certificate = forged(node.decider.chain, round)
    node.decider.receive(PEERS[1], Certificates(certificates=(certificate,)))
    return node.decider.chain.has(round, certificate.body.digest)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_no_branch_replaces_a_certificate_that_eight_have_followed_in_time(is_restarted, seed):
    """The founder's key alone certifies another round 1, and former voters all that followed."""
    world = swarm(seed)
    world.run(200)
    node = world.nodes[PEERS[0]]
    if is_restarted:
        node.crash(0.0)
        world.run(world.now + 0.1)
    last = node.last.round
    assert last > 16
    assert not [round for round in range(1, last - 8) if is_replaced(node, round)]
    assert is_replaced(node, last - 6), "the last ones may still have to heal"


@pytest.mark.parametrize("is_at_once", [False, True])
def test_certificates_that_come_long_after_their_rounds_make_nothing_final(is_at_once, seed):
    world = swarm(seed)
    world.run(100)
    away, known = world.nodes[PEERS[2]], world.nodes[PEERS[2]].last.round
    if not is_at_once:
        world.cut = {(peer, PEERS[2]) for peer in PEERS[:4]}
    away.crash(200.0)
    world.run(301)
    missed = world.nodes[PEERS[0]].chain[known:]
    assert len(missed) > 20
    for certificate in missed[:20]:
        world.run(world.now + 1)
        away.decider.receive(PEERS[1], Certificates(certificates=(certificate,)))
    assert away.last.round >= known + 20
    assert not is_replaced(away, known - 8)
    assert is_replaced(away, known + 1)


def test_eight_certificates_made_in_advance_make_nothing_final(seed):
    """Nor do they if each is sent by itself, and claims to end just now."""
    world = swarm(seed)
    world.run(100)
    node = world.nodes[PEERS[0]]
    first, made = node.last.round + 1, Chain(node.last)
    for _ in range(9):
        at = Round(made.last)
        made.add(at.certify(at.body(ends_at=world.now), made.last.voters), never)
    for certificate in made.certificates:
        node.decider.receive(PEERS[1], Certificates(certificates=(certificate,)))
    assert node.last.round == first + 8
    assert is_replaced(node, first)


def test_from_a_shrunk_certificate_on_nothing_is_final_and_before_it_all_stays_so(seed):
    world = swarm(seed)
    world.run(200)
    node, final = world.nodes[PEERS[0]], world.nodes[PEERS[0]].last.round - 8
    for peer in PEERS[2:4]:
        world.nodes[peer].crash(1e6)
    world.run(1100, lambda: node.last.shrunk)
    shrunk = node.last.round
    world.run(1200)
    assert node.last.round > shrunk + 8
    assert not is_replaced(node, final)
    assert is_replaced(node, shrunk + 1)


# Full: `test_halves_that_were_apart_for_long_come_together` heals one cut with every commit.
@pytest.mark.full
@pytest.mark.parametrize("number", range(12))
def test_halves_heal_after_a_cut_of_12_to_30_minutes(number, seed):
    num = 4 + 2 * (number % 3)
    world = swarm(seed + number, num)
    world.run(300)
    half = set(PEERS[: num // 2 + number % 2])
    world.cut = {(a, b) for a in PEERS[:num] for b in PEERS[:num] if (a in half) != (b in half)}
    world.run(world.now + 60 * (12 + 18 * number / 11))
    assert len({node.last.digest for node in world.nodes.values()}) > 1
    world.cut = set()
    world.run(world.now + 120)
    rounds = min(heads(world))
    assert len({node.decider.chain.body_at(rounds).digest for node in world.nodes.values()}) == 1
    assert max(heads(world)) - rounds <= 2


@pytest.mark.parametrize("start", [0, 7])
@pytest.mark.parametrize("length", [0, 1, 2, 9])
def test_a_chain_names_its_newest_point_some_before_it_and_its_start(start, length):
    first = START.model_copy(update={"round": start})
    chain = Chain(first)
    for _ in range(length):
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), never)
    points = chain.points()
    assert [point.round for point in points] == [
        *(start + length - back for back in (0, 1, 3, 7) if back < length),
        start,
    ]
    assert all(chain.has(point.round, point.digest) for point in points)
    assert len(chain.after(start)) == length and chain.after(start + length) == ()
    assert not chain.has(start - 1, first.digest) and not chain.has(start + length + 1, first.digest)


def test_a_certificate_of_a_past_round_replaces_what_came_after_it():
    chain = Chain(START)
    for _ in range(3):
        round = Round(chain.last, PEERS[:1])
        chain.add(round.certify(round.body(), PEERS[:1]), never)
    round = Round(chain.body_at(1), PEERS[:1])
    other = round.certify(round.body(ends_at=9.0), PEERS[:1])
    chain.add(other, never)
    assert chain.last == other.body and len(chain.certificates) == 2


def proven(chain, keys):
    """Tell whether each certificate of a chain extends the last one, or is signed by more than half of its voters."""
    bodies = [chain.start, *(each.body for each in chain.certificates)]
    return all(
        certificate.body.previous == body.digest or not check_skip(certificate, body, keys)
        for body, certificate in zip(bodies[:-1], chain.certificates, strict=True)
    )


def test_a_long_run_keeps_few_certificates_and_a_newcomer_follows_it_from_its_genesis(monkeypatch, seed):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_SENT", 4)
    world = swarm(seed, 6)
    world.run(250)
    founder = world.nodes[PEERS[0]]
    founder.decider.leave()
    founder.is_dead = True
    founder.crash(0.0)
    late = PEERS[10]
    world.nodes[late] = Node(world, late, START)
    world.nodes[late].start()
    world.run(500)
    heads_now = [node.last.round for node in world.nodes.values() if node.is_up]
    assert min(heads_now) > 40 and max(heads_now) - min(heads_now) <= 1
    for node in world.nodes.values():
        chain = node.decider.chain
        assert proven(chain, node.keys)
        assert node.is_dead or len(chain) < 20 < chain.last.round


def test_a_peer_that_was_away_skips_what_the_others_do_not_keep_and_votes_again(monkeypatch, seed):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    world = swarm(seed, 5)
    world.run(100)
    away = world.nodes[PEERS[2]]
    away.crash(200.0)
    known = away.last.round
    world.run(500)
    chain = away.decider.chain
    assert chain.last.round > known + 20 and proven(chain, away.keys)
    assert away.peer_id in chain.last.voters and away.decider.voter.may_vote


@pytest.mark.parametrize("signers", [1, 2])
def test_what_too_few_known_voters_have_signed_is_not_skipped_to(seed, signers):
    node = swarm(seed).nodes[PEERS[0]]
    last = node.last
    later = Round(last.model_copy(update={"round": last.round + 20, "voters": PEERS[20:25]}))
    first = later.certify(later.body(), (*last.voters[:signers], *PEERS[20:25]))
    later = Round(first.body, PEERS[20:25])
    second = later.certify(later.body(), PEERS[20:25])
    node.decider.receive(PEERS[1], Certificates(certificates=(first, second)))
    assert node.decider.chain.last == last


def test_nothing_is_skipped_for_a_single_certificate(seed):
    node = swarm(seed).nodes[PEERS[0]]
    last = node.last
    later = Round(last.model_copy(update={"round": last.round + 20}))
    newest = later.certify(later.body(), last.voters)
    node.decider.receive(PEERS[1], Certificates(certificates=(newest,)))
    assert node.decider.chain.last == last
    node.decider.receive(PEERS[1], Certificates(certificates=(newest, newest)))
    assert node.decider.chain.last == newest.body


@pytest.mark.parametrize("times", [1, 2])
def test_a_chain_that_a_full_disk_refused_is_written_again(tmp_path, seed, times):
    """The next certificate was added behind a torn line, and the peer could not start again."""
    world, path = swarm(seed), tmp_path / "chain"
    chain, keys = world.nodes[PEERS[0]].decider.chain, IdentityKeys(Identity(tmp_path / "key"))
    file = ChainFile(path, START, keys)

    def grow():
        length = len(chain)
        while len(chain) == length:
            world.run(world.now + 0.5)

    file.save(chain)
    unlimited, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, unlimited[1]))
    try:
        for _ in range(times):
            grow()
            with pytest.raises(OSError, match="File too large"):
                file.save(chain)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
        signal.signal(signal.SIGXFSZ, handler)
    file.save(chain)
    assert ChainFile(path, START, keys).load().certificates == chain.certificates


def test_a_thinned_chain_comes_back_from_disk(tmp_path, monkeypatch, seed):
    monkeypatch.setattr("spes_p2p.swarm.chain.MAX_RECENT", 8)
    world = swarm(seed)
    chain = world.nodes[PEERS[0]].decider.chain
    file = ChainFile(tmp_path / "chain", START, IdentityKeys(Identity(tmp_path / "key")))
    for _ in range(40):
        file.save(chain)
        world.run(world.now + 6)
    file.save(chain)
    again = ChainFile(tmp_path / "chain", START, IdentityKeys(Identity(tmp_path / "key"))).load()
    assert again.certificates == chain.certificates and again.last == chain.last and again.last.round > 20
    assert [again.body_at(round) for round in range(50)] == [chain.body_at(round) for round in range(50)]
    other = START.model_copy(update={"previous": digest("another")})
    with pytest.raises(ConfigError, match="of another run"):
        ChainFile(tmp_path / "chain", other, IdentityKeys(Identity(tmp_path / "key"))).load()
