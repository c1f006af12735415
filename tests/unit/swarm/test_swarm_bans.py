"""Which peers are banned, for how long, and which are left out: by own evidence, and by a majority's."""

import pytest
import torch

from spes_p2p.codecs.format import Format, Segment
from spes_p2p.config import MAX_PEER_TOKENS
from spes_p2p.swarm.averaging.audit import MAX_TIMES_OWN, OWN_CLIP, Auditor, Evidence
from spes_p2p.swarm.averaging.partition import GroupPlan, encode_message, weighted_mean
from spes_p2p.swarm.bans import BAN_ROUNDS, MAX_BAN_ROUNDS, MEMORY_ROUNDS, Bans
from spes_p2p.swarm.invites import Invite
from spes_p2p.swarm.roster import MAX_DISTRUSTED, MAX_TIMES_MEDIAN, Member, Roster
from tests.support.agreement import last_body, members

PEERS = [f"Qm{'P' * 42}{letter}{letter}" for letter in "ABCDEFGH"]
ODD = PEERS[2]
SUSPECT, PROOF = Evidence("was odd", False), Evidence("sent NaN", True)
NUMEL = 150_000
LAST = last_body(PEERS)


def member(peer, distrusts=(), **changes):
    fields = {"round": LAST.round, "previous": LAST.digest, "tokens": 100, "slots": (1,)}
    times = {"tokens_per_second": 1.0, "ready_at": 1.0, "sync_seconds": 0.0}
    return Member(peer_id=peer, distrusts=distrusts, **fields | times | changes)


def met(members, last=LAST):
    """Return the roster of these members, all of which start from the same certificate."""
    return Roster((each.model_copy(update={"previous": last.digest}) for each in members), last)


# ---------------------------------------------------------------------- bans


def test_two_rounds_with_evidence_ban_a_peer_and_one_does_not():
    bans = Bans()
    bans.record(5, {ODD: SUSPECT})
    bans.record(5, {ODD: SUSPECT})  # another attempt at the same round
    assert bans.banned(6) == ()
    bans.record(6, {ODD: SUSPECT})
    assert bans.banned(7) == (ODD,)


def test_proof_is_enough_once_and_an_old_strike_is_forgotten():
    bans = Bans()
    bans.record(5, {ODD: SUSPECT})
    bans.record(5, {ODD: PROOF})
    assert bans.banned(6) == (ODD,)
    bans = Bans()
    bans.record(0, {ODD: SUSPECT})
    bans.record(MEMORY_ROUNDS, {ODD: SUSPECT})
    assert bans.banned(MEMORY_ROUNDS + 1) == ()


def test_bans_expire_and_the_next_one_is_twice_as_long_up_to_a_bound():
    bans, round, lengths = Bans(), 0, []
    for _ in range(9):
        bans.record(round, {ODD: PROOF})
        length = next(n for n in range(1, 10**4) if not bans.banned(round + 1 + n))
        lengths.append(length)
        assert bans.banned(round + length)
        round += 1 + length
    assert lengths == [min(BAN_ROUNDS * 2**n, MAX_BAN_ROUNDS) for n in range(9)]


def test_what_a_banned_peer_does_meanwhile_does_not_prolong_its_ban():
    bans = Bans()
    bans.record(0, {ODD: PROOF})
    bans.record(3, {ODD: PROOF})
    assert bans.banned(BAN_ROUNDS) and not bans.banned(BAN_ROUNDS + 1)


def test_a_roster_entry_names_the_banned_peers_up_to_a_bound():
    bans = Bans()
    bans.record(2, {ODD: PROOF})
    assert bans.distrusted(3) == (ODD,)
    bans.record(2, {f"Qm{number:044d}": PROOF for number in range(1, 40)})
    assert len(bans.banned(3)) == 40 and len(bans.distrusted(3)) == MAX_DISTRUSTED


# ---------------------------------------------------------------------- votes


@pytest.mark.parametrize(("votes", "is_out"), [(3, False), (4, True), (7, True)])
def test_a_member_that_most_of_the_others_distrust_is_in_no_group(votes, is_out):
    others = [peer for peer in PEERS if peer != ODD]
    roster = [member(ODD), *(member(peer, (ODD,) if n < votes else ()) for n, peer in enumerate(others))]
    roster = met(roster)
    for name in ("shared", "slot-1"):
        assert roster.groups[name] == tuple(sorted(others if is_out else PEERS))
    assert roster.behind == ((ODD,) if is_out else ())


def test_a_vote_for_oneself_one_of_strangers_and_one_said_twice_count_for_nothing():
    roster = [*(member(peer, (ODD, ODD)) for peer in PEERS[:2]), *(member(peer, (peer,)) for peer in PEERS[2:])]
    assert met(roster).distrusted == frozenset()
    three = [member(ODD, (ODD,)), *(member(peer, (ODD,) if peer < ODD else ()) for peer in PEERS[:2] + PEERS[3:])]
    assert met([*three[:-1], member(PEERS[7], (ODD,))]).distrusted == frozenset()
    stranger = f"Qm{'S' * 44}"
    assert met([member(peer, (stranger,)) for peer in PEERS]).distrusted == frozenset()


def test_among_four_no_member_is_left_out():
    roster = [member(PEERS[3]), *(member(peer, (PEERS[3],)) for peer in PEERS[:3])]
    assert met(roster).distrusted == frozenset()


def test_half_of_a_roster_is_never_left_out():
    roster = [member(peer, tuple(other for other in PEERS if other != peer)) for peer in PEERS]
    assert met(roster).distrusted == frozenset() and met(roster).groups["shared"] == tuple(PEERS)


def test_members_that_see_nothing_of_what_others_send_have_no_vote():
    voters = [*(member(peer, (ODD,)) for peer in PEERS[3:6]), member(PEERS[6])]
    others = [PEERS[0], PEERS[1], PEERS[7]]
    assert met([member(ODD), *voters, *(member(peer, calls_only=True) for peer in others)]).distrusted == {ODD}
    assert met([member(ODD), *voters, *(member(peer) for peer in others)]).distrusted == frozenset()


@pytest.mark.parametrize("newcomers", [0, 3])
def test_only_the_votes_of_voters_leave_a_member_out(newcomers):
    """Otherwise a few new identities could exclude any member."""
    last = last_body(PEERS[:5], members=members(*PEERS[5:]))
    accusing = [*PEERS[5:][:newcomers], *(peer for peer in PEERS[:5] if peer != ODD)][: max(2, newcomers)]
    assert met([member(peer, (ODD,) if peer in accusing else ()) for peer in PEERS], last).distrusted == frozenset()
    voters = [member(peer, (ODD,) if peer in PEERS[:5] else ()) for peer in PEERS]
    assert met(voters, last).distrusted == {ODD}


# ---------------------------------------------------------------------- peers that may not vote


def weights_of(tokens, voters):
    """Return the weights in a roster of the first peers, that have trained so many tokens."""
    named = [member(peer, tokens=count) for peer, count in zip(PEERS, tokens, strict=False)]
    weights = met(named, last_body(PEERS[:voters])).weights
    return [weights[peer] for peer in PEERS[: len(tokens)]]


def test_in_a_small_roster_strangers_weigh_no_more_than_the_voters_whatever_they_claim():
    assert weights_of([100, 10**9], voters=1) == [100, 100]
    assert weights_of([100, 10**9, 10**9, 50], voters=1) == [100, 40, 40, 20], "all together as much as the voter"
    assert weights_of([100, 300, 10**9], voters=2) == [100, 300, 100], "the lower median"
    assert weights_of([0, 10**9, 100], voters=1) == [0, 100, 100], "no voter has trained"


def test_who_shows_an_invite_to_vote_weighs_as_voters_do_before_it_has_a_seat():
    last, shown = last_body(PEERS[:1]), dict.fromkeys(PEERS[1:3], Invite("key", 1, True))
    named = [member(peer, tokens=300 if peer in shown else 100) for peer in PEERS[:3]]
    entries = [each.model_copy(update={"previous": last.digest}) for each in named]
    assert list(Roster(entries, last, shown).weights.values()) == [100, 300, 100], "it has one place"


def test_in_a_larger_roster_a_stranger_weighs_at_most_four_times_the_voters_median():
    assert weights_of([100, 120, 300, 10**9, 50], voters=3) == [100, 120, 300, 480, 50]


# ---------------------------------------------------------------------- evidence


def deltas(seed):
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(NUMEL, generator=generator)
    return {peer: signal + 0.7 * torch.randn(NUMEL, generator=generator) for peer in PEERS}


def plan_of(peers=PEERS, codec="fp32"):
    format = Format([Segment(NUMEL, codec)])
    return GroupPlan.in_roster(met([member(peer) for peer in peers]), peers, format)


def judged(values, peers=PEERS, me=PEERS[0]):
    """What a reducer holds against the senders of its slice."""
    plan = plan_of(peers)
    auditor = Auditor(plan, me)
    for message in plan.slices[peers.index(me)]:
        for part in message:
            auditor.weigh(part, [values[peer][part.start : part.stop] for peer in peers])
    return auditor.evidence()


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("times", [1.0, 2 * OWN_CLIP, 1e6])
def test_every_clipped_part_is_counted_and_no_other(count, times, seed):
    """An honest delta was shortened in a small group, and nobody said so."""
    values = {peer: value * (times if peer == ODD else 1.0) for peer, value in deltas(seed).items()}
    peers = [ODD, *[peer for peer in PEERS if peer != ODD][: count - 1]]
    plan, me = plan_of(sorted(peers)), peers[1]
    auditor, num_parts = Auditor(plan, me), 0
    for message in plan.slices[plan.peers.index(me)]:
        for part in message:
            num_parts += 1
            pieces = [values[peer][part.start : part.stop] for peer in plan.peers]
            kept = weighted_mean(pieces, auditor.weigh(part, pieces), sum(plan.weights))
            assert torch.equal(kept, weighted_mean(pieces, list(plan.weights))) == (times == 1.0)
    assert num_parts and auditor.clipped == ({ODD: num_parts} if times > 1 else {})


def lied_to(values, lie, peers=PEERS, me=PEERS[0]):
    """What a receiver holds against the reducers, of whom one tells something else than the mean."""
    plan = plan_of(peers)
    auditor, source = Auditor(plan, me), plan.format.encode(values[me])
    mean = torch.stack([values[peer] for peer in peers]).mean(0)
    for index, messages in enumerate(plan.slices):
        for message in messages if peers[index] != me else ():
            here = mean[message[0].start : message[-1].stop]
            auditor.observe_mean(index, message, lie(here) if peers[index] == ODD else here, source)
    return auditor.liars()


def test_honest_members_are_not_suspected(seed):
    assert judged(deltas(seed)) == {}
    assert lied_to(deltas(seed), lambda mean: mean) == {}


@pytest.mark.parametrize("me", [PEERS[0], PEERS[7]])
@pytest.mark.parametrize(
    "spoil",
    [lambda d: -d, lambda d: 100 * d, lambda d: -100 * d, lambda d: 0 * d, lambda d: d[torch.randperm(NUMEL)]],
    ids=["flipped", "x100", "x-100", "nothing", "noise"],
)
def test_a_delta_that_is_unlike_all_others_is_evidence_and_no_proof(seed, spoil, me):
    values = deltas(seed)
    values[ODD] = spoil(values[ODD])
    found = judged(values, me=me)
    assert set(found) == {ODD} and not found[ODD].is_proof


def test_four_can_hold_nothing_against_a_delta(seed):
    values = deltas(seed)
    values[ODD] = -100 * values[ODD]
    assert judged(values, peers=PEERS[:4]) == {}


def test_members_that_agree_on_nothing_blame_no_other(seed):
    """At the very end of training, what is left is noise."""
    generator = torch.Generator().manual_seed(seed)
    assert judged({peer: torch.randn(NUMEL, generator=generator) for peer in PEERS}) == {}


@pytest.mark.parametrize("lie", [lambda m: -m, lambda m: -100 * m, lambda m: 100 * m])
def test_a_reducer_whose_mean_cannot_be_one_is_named(seed, lie):
    assert set(lied_to(deltas(seed), lie)) == {ODD}


def test_in_a_small_group_only_a_mean_of_a_wrong_size_is_a_lie(seed):
    few = PEERS[:3]
    assert set(lied_to(deltas(seed), lambda mean: 2 * MAX_TIMES_OWN * mean, peers=few)) == {ODD}
    assert lied_to(deltas(seed), lambda mean: -mean, peers=few) == {}


def test_a_peer_that_is_odd_itself_blames_no_other_for_it(seed):
    values = deltas(seed)
    values[PEERS[0]] = -values[PEERS[0]]
    assert lied_to(values, lambda mean: mean) == {}
    assert judged(values) == {}


def test_what_cannot_be_read_is_proof_and_weighs_nothing(seed):
    plan, values = plan_of(), deltas(seed)
    auditor, message = Auditor(plan, PEERS[0]), plan.slices[0][0]
    pieces = [values[peer][message[0].start : message[0].stop] for peer in PEERS]
    pieces[2] = None
    auditor.record_proof(2, "sent NaN")
    kept = auditor.weigh(message[0], pieces)
    assert kept == [0.0 if index == 2 else 100.0 for index in range(8)]
    assert auditor.evidence() == {ODD: PROOF}
    assert encode_message(plan.format, message, torch.zeros(message[-1].stop - message[0].start)).numel()


# ---------------------------------------------------------------------- a member's own word for its tokens


def of_two(roster):
    """The plan of a slot that two of a roster hold."""
    return GroupPlan.in_roster(roster, PEERS[:2], Format([Segment(NUMEL, "fp32")]))


def met_in_a_slot(roster, mine, theirs):
    """The mean of the first member's slice, and what it holds against the second when that tells its own delta."""
    plan = of_two(roster if isinstance(roster, Roster) else met(roster))
    auditor, source, means = Auditor(plan, PEERS[0]), plan.format.encode(mine), []
    for message in plan.slices[0]:
        for part in message:
            pieces = [delta[part.start : part.stop] for delta in (mine, theirs)]
            means.append(weighted_mean(pieces, auditor.weigh(part, pieces), sum(plan.weights)))
    for message in plan.slices[1]:
        auditor.observe_mean(1, message, theirs[message[0].start : message[-1].stop], source)
    return torch.cat(means), auditor.liars()


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_tokens_that_no_peer_trained_make_no_room_for_a_longer_delta(seed, count):
    honest = deltas(seed)
    roster = [member(peer, tokens=MAX_PEER_TOKENS if peer == PEERS[1] else 100) for peer in PEERS[:count]]
    mean, liars = met_in_a_slot(roster, honest[PEERS[0]], 1e5 * honest[PEERS[1]])
    most = OWN_CLIP * MAX_TIMES_MEDIAN * honest[PEERS[0]][: len(mean)].norm()
    assert mean.norm() < 1.01 * most
    assert set(liars) == {PEERS[1]} and not liars[PEERS[1]].is_proof


def test_in_a_slot_of_two_no_member_weighs_more_than_a_few_times_the_rosters_median():
    roster = [member(peer, tokens=MAX_PEER_TOKENS if peer == PEERS[1] else 100 + n) for n, peer in enumerate(PEERS)]
    assert of_two(met(roster)).weights == (100.0, MAX_TIMES_MEDIAN * 104.5)
    assert of_two(met(roster[::-1])).weights == of_two(met(roster)).weights


def test_among_five_slow_holders_of_a_slot_none_weighs_more_than_a_few_of_them():
    tokens = [10, 10, 10, 10, MAX_PEER_TOKENS, 1000, 1000, 1000]
    roster = [member(peer, tokens=count) for peer, count in zip(PEERS, tokens, strict=True)]
    plan = GroupPlan.in_roster(met(roster), PEERS[:5], Format([Segment(NUMEL, "fp32")]))
    assert plan.weights == (10.0, 10.0, 10.0, 10.0, 10.0 * MAX_TIMES_MEDIAN)


@pytest.mark.parametrize("count", [2, 4, 8])
@pytest.mark.parametrize("times", [1 / 4, 1.0, 3.0])
def test_a_slower_or_faster_machines_part_of_a_slot_is_the_plain_mean_to_the_bit(seed, times, count):
    honest = deltas(seed)
    mine, theirs, tokens = honest[PEERS[0]], times * honest[PEERS[1]], [100.0, 100.0 * times]
    roster = [member(peer, tokens=int(tokens[1]) if peer == PEERS[1] else 100) for peer in PEERS[:count]]
    mean, liars = met_in_a_slot(roster, mine, theirs)
    assert torch.equal(mean, weighted_mean([mine[: len(mean)], theirs[: len(mean)]], tokens)) and not liars


@pytest.mark.parametrize("count", [2, 8])
def test_a_peer_that_has_just_joined_and_made_a_step_lets_the_others_deltas_pass(seed, count):
    honest = deltas(seed)
    last = last_body(PEERS[1:count], seats=dict.fromkeys(PEERS, ""))
    roster = met([member(peer, tokens=100 if peer in last.voters else 1) for peer in PEERS[:count]], last)
    mine, theirs = 0.01 * honest[PEERS[0]], honest[PEERS[1]]
    mean, liars = met_in_a_slot(roster, mine, theirs)
    assert torch.equal(mean, weighted_mean([mine[: len(mean)], theirs[: len(mean)]], [1.0, 100.0])) and not liars


def test_one_of_four_cannot_say_what_is_usual():
    for count in (2, 3, 4):
        for false in (1, MAX_PEER_TOKENS):
            roster = [member(PEERS[0], tokens=false), *(member(peer) for peer in PEERS[1:count])]
            assert met(roster).usual_tokens <= 100
    tokens = {PEERS[0]: 1, PEERS[1]: 100, ODD: 0}
    known = [member(peer, tokens=count) for peer, count in tokens.items()]
    assert met(known, last_body((PEERS[1], ODD))).usual_tokens == 100, "a newcomer has trained next to nothing"
    assert met(known, last_body((PEERS[7],))).usual_tokens == 1, "no voter is here"
    assert met([member(PEERS[0], tokens=0)]).usual_tokens == 0
