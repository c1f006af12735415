"""Certificates: what follows from a round's results, who signs it, and which branch is followed."""

import json
import random
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_p2p.swarm.certificate import (
    MAX_BATCHES,
    MAX_VOTERS,
    Body,
    Certificate,
    MemberEntry,
    Result,
    check_certificate,
    check_skip,
    genesis,
    max_leaving,
    preferred,
    strangers,
)
from spes_p2p.swarm.invites import Invite
from spes_p2p.swarm.next_body import decide_slots, make_body, next_voters, shares
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.proposal import check_proposal
from tests.support.agreement import MIN_PEERS, PEERS, Round, changed, digest, last_body, members

VOTERS = PEERS[:5]
NEW = PEERS[50:]
KEYS = Round().key(VOTERS[0])


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identities")
    return [Identity(folder / str(index)) for index in range(3)]


# ---------------------------------------------------------------------- documents and keys


@given(st.data())
def test_a_document_has_one_encoding_which_survives_json(data):
    round = Round(last_body(members=members(NEW[1], NEW[0]), absent={VOTERS[3]: 1}))
    slots = data.draw(st.dictionaries(st.integers(0, 1), st.integers().map(digest)))
    confirmation = round.result(VOTERS[0], slots=slots)
    body = round.body(ends_at=data.draw(st.floats(0, 1e10)))
    proposal = round.propose(body=body)
    for document in (
        confirmation,
        body,
        proposal,
        round.certify(body, VOTERS[:3]),
        round.entry(VOTERS[1], 3, proposal),
    ):
        fields = json.loads(document.encode())
        shuffled = dict(random.Random(0).sample(list(fields.items()), len(fields)))
        again = type(document).model_validate_json(json.dumps(shuffled, indent=1))
        assert again == document and again.encode() == document.encode()


def test_a_bodys_digest_does_not_depend_on_who_signed_its_certificate():
    round = Round()
    body = round.body()
    few, many = round.certify(body, VOTERS[:3]), round.certify(body, VOTERS)
    again = Certificate.model_validate_json(few.encode()).body
    assert again.digest == many.body.digest == body.digest
    assert changed(body, ends_at=body.ends_at + 1).digest != body.digest


@pytest.mark.parametrize("field", ["run", "round", "attempt", "previous", "peer_id", "roster", "digests"])
def test_no_field_of_a_signed_statement_can_be_changed(field):
    round = Round()
    signed = round.result(VOTERS[0])
    other = {"run": "x", "round": 9, "attempt": 3, "peer_id": VOTERS[1], "digests": {}}.get(field, digest("other"))
    assert signed.is_signed(KEYS)
    assert not changed(signed, **{field: other}).is_signed(KEYS)


def test_a_signature_under_one_kind_of_statement_is_none_under_another():
    round = Round()
    entry = round.entry(VOTERS[0])
    fields = {"body": digest("body"), **{k: v for k, v in entry.model_dump().items() if k in ("run", "round")}}
    vote = round.vote(VOTERS[0], round.body()).model_copy(update=fields | {"signature": entry.signature})
    assert not vote.is_signed(KEYS)


def test_peers_certify_a_round_with_the_keys_that_name_them(identities):
    keys = {identity.peer_id: IdentityKeys(identity) for identity in identities}
    round = Round(last_body(sorted(keys)), keys=dict(keys))
    one, *others = keys.values()
    proposal = round.propose()
    certificate = round.certify(proposal.body, sorted(keys))
    assert "has not signed" in check_proposal(proposal, round.last, one, MIN_PEERS)
    assert "1 of 3 voters have signed" in check_certificate(certificate, round.last, one)
    for other, identity in zip(others, identities[1:], strict=True):
        assert one.learn(identity.public_key) == other.peer_id
    assert check_proposal(proposal, round.last, one, MIN_PEERS) == ""
    assert check_certificate(certificate, round.last, one) == ""
    swapped = dict(zip(certificate.signatures, reversed(certificate.signatures.values()), strict=True))
    forged = changed(certificate, signatures=swapped)
    assert "1 of 3 voters have signed" in check_certificate(forged, round.last, one)


@pytest.mark.parametrize("key", [b"", b"ssh-rsa AAAA", b"\xff"])
def test_a_malformed_public_key_is_refused(identities, key):
    with pytest.raises(ValueError):
        IdentityKeys(identities[0]).learn(key)


def test_a_peer_keeps_so_many_keys_of_others_and_always_its_own(identities, monkeypatch):
    monkeypatch.setattr("spes_p2p.swarm.p2p.identity.MAX_KEYS", 2)
    keys = IdentityKeys(identities[0])
    one, other = (each.peer_id for each in identities[1:3])
    for each in identities[1:3]:
        keys.learn(each.public_key)
    assert [bool(keys.public_key(peer)) for peer in (keys.peer_id, one, other)] == [True, False, True]
    signature = keys.sign(b"data")
    assert keys.is_signed_by(keys.peer_id, b"data", signature)


def test_strangers_keys_displace_no_voters(identities, monkeypatch):
    """A few messages displaced all of them, and no signature in the run could be checked any more."""
    monkeypatch.setattr("spes_p2p.swarm.p2p.identity.MAX_KEYS", 2)
    keys = IdentityKeys(identities[0])
    keys.held = {identities[1].peer_id}
    for each in identities[1:]:
        keys.learn(each.public_key)
    assert keys.public_key(keys.peer_id) and keys.public_key(identities[1].peer_id)


@pytest.mark.parametrize("signature", ["", "=", "AAAA", "A" * 1024])
def test_a_malformed_signature_is_no_signature(identities, signature):
    keys = IdentityKeys(identities[0])
    assert keys.is_signed_by(keys.peer_id, b"data", keys.sign(b"data"))
    assert not keys.is_signed_by(keys.peer_id, b"data", signature)


@pytest.mark.parametrize(
    "wrong",
    [
        {"signature": "\ud800"},
        {"signature": "A" * 1025},
        {"attempt": -1},
        {"attempt": 2**20 + 1},
        {"round": 2**60},
        {"digests": {"slot-01": digest(0)}},
        {"digests": {"slot--1": digest(0)}},
        {"digests": {"shared": "A" * 64}},
        {"peer_id": "0" * 46},
        {"extra": 1},
    ],
)
def test_a_statement_out_of_bounds_is_refused(wrong):
    with pytest.raises(ValidationError):
        Result.model_validate(Round().result(VOTERS[0]).model_dump() | wrong)


# ---------------------------------------------------------------------- what follows from a round


@given(st.integers(1, 12), st.data())
def test_of_two_halves_of_the_voters_exactly_one_is_a_quorum(num, data):
    last = last_body(PEERS[:num])
    some = set(data.draw(st.lists(st.sampled_from(PEERS[:num]), unique=True)))
    assert last.is_quorum(some) != last.is_quorum(set(PEERS[:num]) - some)


def test_of_an_even_number_of_voters_the_first_counts_one_and_a_half():
    assert last_body(PEERS[:2]).is_quorum(PEERS[:1]) and not last_body(PEERS[:2]).is_quorum(PEERS[1:2])
    assert last_body(PEERS[:4]).is_quorum(PEERS[:2]) and not last_body(PEERS[:4]).is_quorum(PEERS[1:3])
    assert not last_body(PEERS[:4]).is_quorum(PEERS[:1]) and not last_body(PEERS[:5]).is_quorum(PEERS[:2])


@given(st.integers(2, MAX_VOTERS), st.integers(0, 2**20))
def test_each_voter_leads_in_its_turn_first_those_of_the_last_roster_that_can_be_called(num, first):
    last = last_body(PEERS[:num])
    called = PEERS[: num // 2]
    members = [MemberEntry(peer_id=peer, tokens=1) for peer in called]
    hidden = MemberEntry(peer_id=PEERS[num - 1], tokens=1, calls_only=True)
    for body, before in ((last, ()), (changed(last, members=(*members, hidden)), called)):
        turns = [body.leader(attempt) for attempt in range(2 * num)]
        assert sorted(turns[:num]) == sorted(PEERS[:num]) and turns[num:] == turns[:num]
        assert set(turns[: len(before)]) == set(before)
    firsts = {changed(last, members=tuple(members), round=first + round).leader(0) for round in range(50)}
    assert num < 6 or len(firsts) > 1


@given(st.data())
def test_a_slot_changes_only_by_more_than_half_of_its_voting_holders(data):
    round = Round(last_body(), PEERS[2:9])
    held = {m.peer_id: tuple(data.draw(st.sets(st.integers(0, 1)).map(sorted))) for m in round.members}
    members = tuple(changed(member, slots=held[member.peer_id]) for member in round.members)
    said = {
        peer: data.draw(st.dictionaries(st.sampled_from([0, 1]), st.sampled_from([digest("a"), digest("b")])))
        for peer in data.draw(st.sets(st.sampled_from(sorted(held))))
    }
    results = [round.result(peer, slots=slots) for peer, slots in said.items()]
    for slot, state in enumerate(decide_slots(round.last, members, results)):
        holders = [peer for peer in held if slot in held[peer]]
        holders = [peer for peer in holders if peer in VOTERS] or holders
        named = [said[peer][slot] for peer in holders if slot in said.get(peer, {})]
        wins = [value for value in set(named) if named.count(value) > len(holders) / 2]
        expected = (
            (round.last.round + 1, wins[0]) if wins else (round.last.slots[slot].round, round.last.slots[slot].digest)
        )
        assert (state.round, state.digest) == expected


def test_a_slots_voters_are_its_holders_and_replicas_and_without_any_its_holders_decide():
    round = Round(last_body(), PEERS[2:9])
    strange = [each.peer_id for each in round.members if each.peer_id not in VOTERS][:2]
    keeping = [each.peer_id for each in round.members if each.peer_id in VOTERS]

    def decided(holders, replicas, **said: str) -> str:
        members = [
            changed(
                each,
                slots=(0,) if each.peer_id in holders else (),
                replicates=(0,) if each.peer_id in replicas else (),
            )
            for each in round.members
        ]
        results = [round.result(peer, slots={0: digest(value)}) for peer, value in said.items()]
        return decide_slots(round.last, members, results)[0].digest

    old, (one, two, three) = round.last.slots[0].digest, keeping
    assert decided(strange, (), **{strange[0]: "a", strange[1]: "a"}) == digest("a")
    assert decided(strange, (), **{strange[0]: "a"}) == old
    assert decided(strange, [one], **{strange[0]: "a", strange[1]: "a", one: "b"}) == digest("b")
    assert decided(strange, [one], **{strange[0]: "a", strange[1]: "a"}) == old
    assert decided([one, *strange], [two, three], **{two: "b", three: "b"}) == digest("b")
    assert decided([one, *strange], [two, three], **{one: "a", strange[0]: "a", two: "b"}) == old
    assert decided((), [one, two], **{one: "a", two: "a"}) == old


def test_half_of_a_slots_holders_do_not_change_it():
    round = Round(last_body(PEERS[:4]))
    split = [round.result(peer, slots={0: digest(peer in PEERS[:2])}) for peer in PEERS[:4]]
    assert decide_slots(round.last, round.members, split) == round.last.slots


def test_a_slot_that_the_run_has_not_changes_nothing():
    round = Round()
    members = (changed(round.members[0], slots=(0, 4000)), *round.members[1:])
    results = [round.result(VOTERS[0], slots={4000: digest("x")})]
    assert decide_slots(round.last, members, results) == round.last.slots


def test_half_of_the_voters_do_not_confirm_shared():
    round = Round(last_body(PEERS[:4]))
    half = [round.result(peer) for peer in PEERS[1:3]]
    assert make_body(round.last, round.members, half, ends_at=2100.0, min_peers=MIN_PEERS) is None
    assert round.body([*half, round.result(PEERS[3])]).shared == digest("shared")


def test_results_of_members_without_a_vote_do_not_confirm_shared():
    round = Round(last_body(PEERS[:2]), PEERS[:9])
    idle = [round.result(peer, shared=digest("idle")) for peer in PEERS[2:9]]
    assert make_body(round.last, round.members, idle, ends_at=2100.0, min_peers=MIN_PEERS) is None
    voters = [round.result(peer) for peer in PEERS[:2]]
    assert round.body([*idle, *voters]).shared == digest("shared")


@given(st.data())
def test_a_body_follows_from_its_results_in_any_order(data):
    round = Round(last_body(PEERS[:9], seats=dict.fromkeys((*PEERS[:9], NEW[0]), "")), [*PEERS[:9], NEW[0], NEW[1]])
    said = [round.result(m.peer_id, shared=digest(data.draw(st.integers(0, 3)) > 2)) for m in round.members]
    made = [
        make_body(round.last, round.members, data.draw(st.permutations(said)), ends_at=1.0, min_peers=MIN_PEERS)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert made[0] is None or made[0].digest == made[1].digest


@given(st.data())
def test_voters_change_slowly_keep_their_order_and_never_exceed_their_bound(data):
    num = data.draw(st.integers(1, MAX_VOTERS))
    away = data.draw(st.sets(st.sampled_from(NEW)))
    last = last_body(PEERS[:num], round=data.draw(st.sampled_from([0, 7])))
    last = changed(last, seats=dict.fromkeys((*PEERS[:num], *away), ""))
    shown = {peer: Invite("key", 3, True) for peer in data.draw(st.sets(st.sampled_from(PEERS)))}
    confirmed = data.draw(st.sets(st.sampled_from(PEERS)))
    removed = data.draw(st.sets(st.sampled_from(last.voters), max_size=max_leaving(num)))
    min_peers = data.draw(st.integers(1, 200))
    voters, seats = next_voters(last, confirmed, removed, min_peers, shown)
    stayed = tuple(peer for peer in last.voters if peer not in removed)
    joined = voters[len(stayed) :]
    assert voters[: len(stayed)] == stayed and len(set(voters)) == len(voters) <= MAX_VOTERS
    assert len(joined) <= (min_peers - 1 if last.round == 0 else max_leaving(num))
    assert all(peer in confirmed and (peer in last.seats or peer in shown) for peer in joined)
    assert seats.items() >= last.seats.items() and seats.keys() - last.seats.keys() <= set(joined)
    assert list(seats.values()).count("key") <= 3


def test_who_has_left_takes_its_seat_again_before_those_that_are_invited_and_one_a_round():
    last = last_body(VOTERS, seats=dict.fromkeys((*VOTERS, NEW[2], NEW[3]), ""))
    shown = dict.fromkeys(NEW[:2], Invite("key", 1, True))
    assert next_voters(last, NEW[:3], (), MIN_PEERS, shown) == ((*VOTERS, NEW[2]), last.seats)
    assert next_voters(last, NEW[:2], (), MIN_PEERS, shown) == ((*VOTERS, NEW[0]), last.seats | {NEW[0]: "key"})


def test_an_invites_seats_are_taken_for_good():
    """Otherwise an identity could drive another of the same invite out, or come back under new names for ever."""
    last = last_body(VOTERS[1:], seats=dict.fromkeys(VOTERS, "") | {NEW[0]: "key"}, banned=NEW[:1])
    shown = dict.fromkeys(NEW[:2], Invite("key", 1, True))
    assert next_voters(last, NEW[1:2], (), MIN_PEERS, shown) == (VOTERS[1:], last.seats)
    more = dict.fromkeys(NEW[:2], Invite("key", 2, True))
    assert next_voters(last, NEW[1:2], (), MIN_PEERS, more)[0] == (*VOTERS[1:], NEW[1])


def test_who_shows_no_invite_never_votes():
    last = last_body(VOTERS[:1], members=members(*NEW[:5]))
    for _ in range(50):
        last = Round(last, (*VOTERS[:1], *NEW[:5])).body()
        assert last.voters == VOTERS[:1] and set(last.seats) == set(VOTERS[:1])


def test_certificate_1_makes_the_founder_and_the_first_members_voters():
    start = genesis("run", PEERS[9], digest("manifest"), 2, seats=PEERS[:9])
    round = Round(start, PEERS[:10])
    body = round.body()
    assert start.voters == (PEERS[9],) and start.is_quorum(PEERS[9:10])
    assert body.voters == (PEERS[9], *PEERS[: MIN_PEERS - 1])


def test_a_stranger_cannot_choose_its_place():
    round = Round(last_body(members=members(NEW[0])))
    other = Round(last_body(ends_at=5.0))
    first = strangers(round.last, [*VOTERS, *NEW[:20]])
    assert set(first) == set(NEW[1:20])
    assert strangers(other.last, NEW[1:20]) != first == strangers(round.last, sorted(NEW[:20], reverse=True))


def test_a_body_has_a_voter():
    with pytest.raises(ValidationError):
        changed(last_body(), voters=())
    round = Round(last_body(PEERS[:1]))
    assert make_body(round.last, round.members, round.results(), ends_at=1.0, min_peers=4, removed=PEERS[:1]) is None
    lied = changed(round.body(), voters=(NEW[0],))
    assert "does not follow" in round.check(round.propose(body=lied, goodbyes=(round.goodbye(PEERS[0]),)))


# ---------------------------------------------------------------------- shared data


def asking(*batches: int, voters: Sequence[str] = VOTERS, cursor: int = 100) -> Body:
    """Return a body whose members, the first peers, ask for so many batches."""
    members = [MemberEntry(peer_id=peer, tokens=1, batches=each) for peer, each in zip(PEERS, batches, strict=False)]
    return last_body(voters, members=tuple(members), cursor=cursor)


@given(st.lists(st.integers(0, 300), max_size=12), st.permutations(PEERS[:9]))
def test_voters_are_dealt_what_they_ask_for_from_the_cursor_on_and_nobody_else_is(batches, voters):
    body = asking(*batches, voters=voters)
    dealt = shares(body)
    asked = {peer: each for peer, each in zip(PEERS, batches, strict=False) if each and peer in voters}
    assert list(dealt) == [peer for peer in voters if peer in asked], "in the order of voters"
    most = 4 * statistics.median_high(asked.values()) if asked else 0
    assert {peer: len(share) for peer, share in dealt.items()} == {p: min(n, most) for p, n in asked.items()}
    numbers = [number for share in dealt.values() for number in share]
    round = Round(body)
    assert numbers == list(range(100, round.body().cursor)), "none twice, and the cursor moves past what was dealt"


def test_a_voter_that_asks_for_too_much_is_dealt_four_times_the_median():
    """Otherwise one liar skips an epoch of data."""
    assert [len(share) for share in shares(asking(40, 50, MAX_BATCHES, 30, 50)).values()] == [40, 50, 200, 30, 50]


def test_a_proposer_changes_neither_the_cursor_nor_what_members_ask_for():
    round = Round(asking(40, 40, 40))
    assert not round.check(round.propose()) and round.body().cursor == 220
    lied = changed(round.body(), cursor=10**6)
    assert "does not follow" in round.check(round.propose(body=lied))
    members = tuple(member.model_copy(update={"batches": 80}) for member in round.members)
    assert "not of its roster" in round.check(round.propose(body=changed(round.body(), members=members)))


# ---------------------------------------------------------------------- what must not be certified


def test_a_voter_that_was_removed_by_proof_does_not_become_one_again():
    round = Round()
    banned = round.propose(proofs=(round.proof(VOTERS[0]),)).body
    assert banned.banned == VOTERS[:1] and VOTERS[0] not in banned.voters
    last = changed(banned, members=())
    later = Round(last, VOTERS).body()
    assert later.voters == VOTERS[1:] and later.banned == VOTERS[:1] and VOTERS[0] in later.seats


# ---------------------------------------------------------------------- later attempts


# ---------------------------------------------------------------------- certificates


def test_a_certificate_has_the_votes_of_a_quorum_of_one_attempt():
    round = Round()
    body = round.body()
    assert check_certificate(round.certify(body, VOTERS[:3], 2), round.last, KEYS) == ""
    assert "2 of 5" in check_certificate(round.certify(body, VOTERS[:2]), round.last, KEYS)
    assert "2 of 5" in check_certificate(round.certify(body, [*VOTERS[:2], *NEW[:9]]), round.last, KEYS)
    assert "0 of 5" in check_certificate(changed(round.certify(body, VOTERS[:3], 2), attempt=1), round.last, KEYS)
    for wrong in ({"round": 9}, {"previous": digest("other")}):
        lied = round.certify(changed(body, **wrong), VOTERS)
        assert "does not extend" in check_certificate(lied, round.last, KEYS)


@pytest.mark.parametrize("shrunk", [VOTERS, (*VOTERS, *NEW[:9]), NEW[:5], (VOTERS[1],) * 4, VOTERS[:2]])
def test_no_certificate_names_voters_absent_while_the_others_are_a_quorum(shrunk):
    round = Round()
    body = changed(round.body(), shrunk=shrunk, voters=VOTERS[4:])
    for signers in ((), VOTERS[4:]):
        assert "without need" in check_certificate(round.certify(body, signers), round.last, KEYS)


def test_all_voters_that_are_not_named_absent_sign_a_shrunk_certificate():
    round = Round(last_body(PEERS[:8]), PEERS[4:8])
    proposal = round.propose(shrunk=PEERS[:4])
    assert not round.check(proposal)
    assert proposal.body.voters == PEERS[4:8]
    assert check_certificate(round.certify(proposal.body, PEERS[4:8]), round.last, KEYS) == ""
    assert "3 of 4" in check_certificate(round.certify(proposal.body, PEERS[:7]), round.last, KEYS)


def test_a_newcomer_skips_to_a_certificate_that_more_than_half_of_the_trusted_voters_signed():
    round = Round()
    later = changed(round.body(), round=40, previous=digest("round 39"), voters=NEW[:9])
    assert check_skip(round.certify(later, [*VOTERS[:3], *NEW[:4]]), round.last, KEYS) == ""
    assert "2 of 5" in check_skip(round.certify(later, [*VOTERS[:2], *NEW[:9]]), round.last, KEYS)
    for wrong in ({"round": 20}, {"run": "other"}):
        assert "not later" in check_skip(round.certify(changed(later, **wrong), VOTERS), round.last, KEYS)


def test_all_peers_prefer_the_same_branch_whatever_copies_they_hold():
    round = Round(last_body(PEERS[:8]), PEERS[:8])
    whole = [round.body(ends_at=ends_at) for ends_at in (1.0, 2.0)]
    halves = [
        changed(whole[0], shrunk=PEERS[:4], voters=PEERS[4:8]),
        changed(whole[0], shrunk=PEERS[:5], voters=PEERS[5:8]),
    ]
    order = [*sorted(whole, key=lambda body: body.digest), *halves]
    for index, body in enumerate(order):
        for signers in (PEERS[:1], PEERS[:8]):
            others = [round.certify(other, PEERS[: 9 - len(signers)]) for other in order[index + 1 :]]
            assert preferred([*others, round.certify(body, signers)]).body == body


# ---------------------------------------------------------------------- proofs


def test_a_body_that_is_copied_with_changes_has_its_own_digest():
    body = last_body()
    assert (
        body.digest != changed(body, round=8).digest == Body.model_validate_json(changed(body, round=8).encode()).digest
    )
