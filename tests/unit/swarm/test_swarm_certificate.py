"""Certificates: what follows from a round, what must not be certified, and who is convicted."""

import json
import random
import statistics
import tracemalloc
import zlib
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.certificate import (
    CONFIRMED_ROUNDS,
    MAX_BANNED,
    MAX_BATCHES,
    MAX_VOTERS,
    Body,
    Certificate,
    Certificates,
    Confirmation,
    GiveUp,
    MemberEntry,
    Proof,
    SlotState,
    contradiction,
    decide_slots,
    genesis,
    make_body,
    max_leaving,
    next_voters,
    preferred,
    required_votes,
    shares,
    strangers,
)
from spes_p2p.swarm.certificate_checks import (
    check_body,
    check_certificate,
    check_give_up,
    check_proposal,
    check_skip,
    newest_voted,
)
from spes_p2p.swarm.consensus import MAX_MESSAGE_BYTES, Envelope, _common, encoded
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys, hashed_peer_id
from tests.support.certificates import MIN_PEERS, PEERS, Round, changed, digest, last_body

VOTERS = PEERS[:5]
NEW = PEERS[50:]
KEYS = Round().key(VOTERS[0])


def fault(round: Round, proposal) -> str:
    return check_proposal(proposal, round.last, KEYS, MIN_PEERS)


@pytest.fixture(scope="module")
def identities(tmp_path_factory):
    folder = tmp_path_factory.mktemp("identities")
    return [Identity(folder / str(index)) for index in range(3)]


# ---------------------------------------------------------------------- documents and keys


@given(st.data())
def test_a_document_has_one_encoding_which_survives_json(data):
    round = Round(last_body(candidates={NEW[1]: 2, NEW[0]: 1}, absent={VOTERS[3]: 1}))
    slots = data.draw(st.dictionaries(st.integers(0, 1).map(str), st.integers().map(digest)))
    confirmation = round.confirm(VOTERS[0], slots=slots)
    body = round.body(ends_at=data.draw(st.floats(0, 1e10)))
    proposal = round.propose(body=body)
    for document in (
        confirmation,
        body,
        proposal,
        round.certify(body, VOTERS[:3]),
        round.give_up(VOTERS[1], 3, proposal),
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
    signed = round.confirm(VOTERS[0])
    other = {"run": "x", "round": 9, "attempt": 3, "peer_id": VOTERS[1], "digests": {}}.get(field, digest("other"))
    assert signed.is_signed(KEYS)
    assert not changed(signed, **{field: other}).is_signed(KEYS)


def test_a_signature_under_one_kind_of_statement_is_none_under_another():
    round = Round()
    given_up = round.give_up(VOTERS[0])
    fields = {"body": digest("body"), **{k: v for k, v in given_up.model_dump().items() if k in ("run", "round")}}
    vote = round.vote(VOTERS[0], round.body()).model_copy(update=fields | {"signature": given_up.signature})
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


def test_an_envelope_holds_one_message():
    round = Round()
    vote, confirmation = round.vote(VOTERS[0], round.body()), round.confirm(VOTERS[0])
    assert Envelope(vote=vote).message == vote
    for many in (Envelope(), Envelope(vote=vote, confirmation=confirmation)):
        with pytest.raises(ExchangeError, match="messages in one"):
            _ = many.message


@pytest.mark.parametrize("how", ["many slots", "long texts", "an escaped key"])
def test_certificates_are_bounded_by_the_runs_slots_and_voters_before_any_is_built(how):
    """A candidate's message of four megabytes became hundreds of megabytes of objects."""
    body = last_body(slots=(SlotState(round=0),) * 4096) if how != "long texts" else last_body()
    made = Certificate(body=body, attempt=0, signatures={})
    if how == "long texts":
        made = made.model_copy(update={"signatures": dict.fromkeys(PEERS[:64], "A" * 1024)})
    data = encoded(Certificates(certificates=(made,) * 20))
    if how == "an escaped key":
        text = (
            zlib.decompressobj(zdict=_common()).decompress(data).replace(b'"certificates":{', b'"\\u0063ertificates":{')
        )
        packing = zlib.compressobj(9, zdict=_common())
        data = packing.compress(text) + packing.flush()
    tracemalloc.start()
    try:
        with pytest.raises(ExchangeError, match="bytes of certificates, more than two of this run can have"):
            Envelope.unpack(data, MAX_MESSAGE_BYTES, 2)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


def test_two_of_the_largest_certificates_of_a_run_fit_into_one_message():
    slots = tuple(SlotState(round=2**20, digest=digest(slot), kept=digest(slot)) for slot in range(256))
    members = tuple(
        MemberEntry(peer_id=hashed_peer_id(f"{at}".encode()), tokens=2**30, slots=(1, 2, 3, 4)) for at in range(1024)
    )
    body = last_body(PEERS[:64], slots=slots, members=members)
    made = Certificate(body=body, attempt=0, signatures=dict.fromkeys(PEERS[:64], "A" * 400))
    message = Certificates(certificates=(made, made))
    assert Envelope.unpack(encoded(message), MAX_MESSAGE_BYTES, 256).message == message


def test_an_envelope_is_unpacked_up_to_its_limit():
    round = Round()
    envelope = Envelope(confirmation=round.confirm(VOTERS[0]))
    size = len(envelope.encode())
    assert len(envelope.pack()) < size
    assert Envelope.unpack(envelope.pack(), size) == envelope
    for wrong in (envelope.pack()[:-1], envelope.pack() + b"x", envelope.encode(), zlib.compress(b"{}x")):
        with pytest.raises(ExchangeError, match=r"cut short|damaged|malformed"):
            Envelope.unpack(wrong, size)
    with pytest.raises(ExchangeError, match=f"longer than {size - 1} bytes"):
        Envelope.unpack(envelope.pack(), size - 1)


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
        Confirmation.model_validate(Round().confirm(VOTERS[0]).model_dump() | wrong)


# ---------------------------------------------------------------------- what follows from a round


@given(st.integers(1, MAX_VOTERS))
def test_two_quorums_share_a_voter(num):
    quorum = last_body(PEERS[:num]).quorum
    assert 2 * quorum > num >= quorum


@given(st.integers(1, MAX_VOTERS), st.integers(0, 2**20 - MAX_VOTERS))
def test_each_voter_proposes_in_its_turn(num, first):
    last = last_body(PEERS[:num])
    assert sorted(last.proposer(first + attempt) for attempt in range(num)) == sorted(last.voters)


@given(st.data())
def test_a_slot_changes_only_by_more_than_half_of_its_voting_holders(data):
    round = Round(last_body(), PEERS[2:9])
    held = {m.peer_id: tuple(data.draw(st.sets(st.integers(0, 1)).map(sorted))) for m in round.members}
    members = tuple(changed(member, slots=held[member.peer_id]) for member in round.members)
    said = {
        peer: data.draw(st.dictionaries(st.sampled_from(["0", "1"]), st.sampled_from([digest("a"), digest("b")])))
        for peer in data.draw(st.sets(st.sampled_from(sorted(held))))
    }
    confirmations = [round.confirm(peer, slots=slots) for peer, slots in said.items()]
    for slot, state in enumerate(decide_slots(round.last, members, confirmations)):
        holders = [peer for peer in held if slot in held[peer]]
        holders = [peer for peer in holders if peer in VOTERS] or holders
        named = [said[peer][str(slot)] for peer in holders if str(slot) in said.get(peer, {})]
        wins = [value for value in set(named) if named.count(value) > len(holders) / 2]
        expected = (
            (round.last.round + 1, wins[0]) if wins else (round.last.slots[slot].round, round.last.slots[slot].digest)
        )
        assert (state.round, state.digest) == expected


def test_half_of_a_slots_holders_do_not_change_it():
    round = Round(last_body(PEERS[:4]))
    split = [round.confirm(peer, slots={"0": digest(peer in PEERS[:2])}) for peer in PEERS[:4]]
    assert decide_slots(round.last, round.members, split) == round.last.slots


def test_voting_replicas_confirm_the_slot_of_a_holder_without_a_vote_if_they_have_a_result():
    round = Round(last_body(), PEERS[2:9])
    holder = next(each.peer_id for each in round.members if each.peer_id not in VOTERS)
    keeping = [each.peer_id for each in round.members if each.peer_id in VOTERS][:2]
    members = tuple(
        changed(each, slots=(0,) if each.peer_id == holder else (), replicates=(0,) if each.peer_id in keeping else ())
        for each in round.members
    )

    def decided(**said: str) -> str:
        confirmations = [round.confirm(peer, slots={"0": digest(value)}) for peer, value in said.items()]
        return decide_slots(round.last, members, confirmations)[0].digest

    assert decided(**{holder: "a"}) == digest("a"), "no replica has the mean"
    assert decided(**{holder: "a", keeping[0]: "b", keeping[1]: "b"}) == digest("b")
    assert decided(**{holder: "a", keeping[0]: "a", keeping[1]: "b"}) == round.last.slots[0].digest
    assert decided(**{keeping[0]: "b"}) == digest("b"), "the holder may have died since"


def test_a_slot_that_the_run_has_not_changes_nothing():
    round = Round()
    members = (changed(round.members[0], slots=(0, 4000)), *round.members[1:])
    confirmations = [round.confirm(VOTERS[0], slots={"4000": digest("x")})]
    assert decide_slots(round.last, members, confirmations) == round.last.slots


def test_half_of_the_voters_do_not_confirm_shared():
    round = Round(last_body(PEERS[:4]))
    half = [round.confirm(peer) for peer in PEERS[:2]]
    assert make_body(round.last, round.members, half, ends_at=2100.0, min_peers=MIN_PEERS) is None
    assert round.body([*half, round.confirm(PEERS[2])]).shared == digest("shared")


def test_confirmations_of_members_without_a_vote_do_not_confirm_shared():
    round = Round(last_body(PEERS[:2]), PEERS[:9])
    idle = [round.confirm(peer, shared=digest("idle")) for peer in PEERS[2:9]]
    assert make_body(round.last, round.members, idle, ends_at=2100.0, min_peers=MIN_PEERS) is None
    voters = [round.confirm(peer) for peer in PEERS[:2]]
    assert round.body([*idle, *voters]).shared == digest("shared")


@given(st.data())
def test_a_body_follows_from_its_confirmations_in_any_order(data):
    round = Round(last_body(PEERS[:9], candidates={NEW[0]: 2}), [*PEERS[:9], NEW[0], NEW[1]])
    said = [round.confirm(m.peer_id, shared=digest(data.draw(st.integers(0, 3)) > 2)) for m in round.members]
    made = [
        make_body(round.last, round.members, data.draw(st.permutations(said)), ends_at=1.0, min_peers=MIN_PEERS)
        for _ in range(2)
    ]
    assert made[0] == made[1]
    assert made[0] is None or made[0].digest == made[1].digest


@given(st.data())
def test_voters_change_slowly_keep_their_order_and_never_exceed_their_bound(data):
    num = data.draw(st.integers(1, MAX_VOTERS))
    candidates = dict.fromkeys(data.draw(st.sets(st.sampled_from(NEW))), 0)
    last = last_body(PEERS[:num], round=data.draw(st.sampled_from([0, 7])))
    candidates = {p: data.draw(st.integers(0, 5)) for p in candidates if p not in last.voters}
    last = changed(last, candidates=candidates)
    confirmed = data.draw(st.sets(st.sampled_from(PEERS)))
    removed = data.draw(st.sets(st.sampled_from(last.voters), max_size=max_leaving(num)))
    min_peers = data.draw(st.integers(1, 200))
    voters, waiting, absent = next_voters(last, confirmed, confirmed, removed, min_peers)
    stayed = tuple(peer for peer in last.voters if peer not in removed)
    joined = voters[len(stayed) :]
    assert voters[: len(stayed)] == stayed and len(set(voters)) == len(voters) <= MAX_VOTERS
    assert len(joined) <= (min_peers - 1 if last.round == 0 else max_leaving(num))
    needed = 1 if last.round == 0 else CONFIRMED_ROUNDS
    assert all(peer in confirmed and candidates.get(peer, 0) + 1 >= needed for peer in joined)
    assert set(waiting) == set(confirmed) - set(voters) - removed
    assert set(absent) == set(stayed) - confirmed


def test_a_member_votes_after_confirming_three_rounds_in_a_row_and_the_longest_there_come_first():
    last = last_body(VOTERS, candidates={NEW[0]: 2, NEW[1]: 3, NEW[2]: 1, NEW[3]: 5})
    voters, waiting, _ = next_voters(last, NEW[:3], [*NEW[:3]], (), MIN_PEERS)
    assert voters == (*VOTERS, NEW[1])  # one a round; NEW[3] has not confirmed this one
    assert waiting == {NEW[0]: 3, NEW[2]: 2}


def test_certificate_1_makes_the_founder_and_the_first_members_voters():
    start = genesis("run", PEERS[9], digest("manifest"), 2)
    round = Round(start, PEERS[:10])
    body = round.body()
    assert start.voters == (PEERS[9],) and start.quorum == 1
    assert body.voters == (PEERS[9], *PEERS[: MIN_PEERS - 1])


def test_a_stranger_cannot_choose_its_place():
    round = Round(last_body(candidates={NEW[0]: 1}))
    other = Round(last_body(ends_at=5.0))
    first = strangers(round.last, [*VOTERS, *NEW[:20]])
    assert set(first) == set(NEW[1:20])
    assert strangers(other.last, NEW[1:20]) != first == strangers(round.last, sorted(NEW[:20], reverse=True))


def test_a_body_has_a_voter():
    with pytest.raises(ValidationError):
        changed(last_body(), voters=())
    round = Round(last_body(PEERS[:1]))
    assert (
        make_body(round.last, round.members, round.confirmations(), ends_at=1.0, min_peers=4, removed=PEERS[:1]) is None
    )
    lied = changed(round.body(), voters=(NEW[0],))
    assert "does not follow" in fault(round, round.propose(body=lied, goodbyes=(round.goodbye(PEERS[0]),)))


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
    assert not fault(round, round.propose()) and round.body().cursor == 220
    lied = changed(round.body(), cursor=10**6)
    assert "does not follow" in fault(round, round.propose(body=lied))
    members = tuple(member.model_copy(update={"batches": 80}) for member in round.members)
    assert "not of its roster" in fault(round, round.propose(body=changed(round.body(), members=members)))


# ---------------------------------------------------------------------- what must not be certified


def test_an_honest_proposal_has_no_fault():
    round = Round(last_body(candidates={NEW[0]: 2}), [*VOTERS, *NEW[:3]])
    assert fault(round, round.propose()) == ""


def test_a_body_extends_the_last_certificate_of_its_run():
    round = Round()
    for wrong in ({"previous": digest("other")}, {"run": "other"}):
        proposal = round.propose(body=changed(round.body(), **wrong))
        assert check_body(proposal, round.last, MIN_PEERS) == "it does not extend the last certificate"


@pytest.mark.parametrize(
    "wrong",
    [
        {"round": 9},
        {"founder": VOTERS[1]},
        {"voters": (*VOTERS, NEW[0])},
        {"voters": VOTERS[::-1]},
        {"shared": digest("other")},
        {"candidates": {NEW[0]: 2}},
        {"absent": {VOTERS[0]: 2}},
        {"slots": ()},
    ],
)
def test_a_body_that_does_not_follow_from_its_confirmations_is_refused(wrong):
    round = Round()
    assert "does not follow" in fault(round, round.propose(body=changed(round.body(), **wrong)))


def test_a_roster_has_one_order():
    round = Round()
    round.members = round.members[::-1]
    assert "not in order" in fault(round, round.propose())
    round = Round()
    round.members = (changed(round.members[0], slots=(1, 0)), *round.members[1:])
    assert "not in order" in fault(round, round.propose())


def test_a_proposal_is_of_the_voter_whose_turn_it_is():
    round = Round()
    other = next(peer for peer in VOTERS if peer != round.last.proposer(0))
    assert "does not propose" in fault(round, round.propose(author=other))


def test_a_proposers_vote_is_for_its_proposal():
    round = Round()
    proposal = round.propose()
    other = round.propose(body=round.body(ends_at=2101.0))
    assert "for something else" in fault(round, changed(proposal, vote=other.vote.model_dump()))


def test_a_roster_has_few_strangers():
    round = Round(last_body(), [*VOTERS, *NEW[:3]])
    assert "3 strangers" in fault(round, round.propose())
    assert fault(Round(round.last, [*VOTERS, *NEW[:2]]), Round(round.last, [*VOTERS, *NEW[:2]]).propose()) == ""


def test_confirmations_are_of_the_roster_and_of_one_each():
    round = Round()
    honest = round.confirmations()
    stranger = Round(round.last, [*VOTERS, NEW[0]]).confirm(NEW[0], roster=honest[0].roster)
    other = round.confirm(VOTERS[0], roster=digest("other"))
    late = round.confirm(VOTERS[0], previous=digest("other"))
    for wrong in ([*honest, honest[0]], [*honest, stranger], [other, *honest[1:]], [late, *honest[1:]]):
        assert "not of its roster" in fault(round, round.propose(0, wrong, body=round.body()))


@pytest.mark.parametrize("part", ["vote", "confirmations", "give_ups", "goodbyes"])
def test_each_statement_of_a_proposal_is_signed(part):
    round = Round(last_body(PEERS[:4]))
    leaver = next(peer for peer in round.last.voters if peer != round.last.proposer(1))
    give_ups = [round.give_up(peer) for peer in PEERS[:3]]
    proposal = round.propose(1, give_ups=give_ups, removed=[leaver], goodbyes=(round.goodbye(leaver),))
    assert fault(round, proposal) == ""
    value = getattr(proposal, part)
    unsigned = {"signature": "forged"}
    wrong = value.model_copy(update=unsigned) if part == "vote" else (value[0].model_copy(update=unsigned), *value[1:])
    assert "has not signed" in fault(round, proposal.model_copy(update={part: wrong}))


def test_few_voters_are_removed_at_once():
    round = Round(last_body(PEERS[:9], absent=dict.fromkeys(PEERS[:3], 2)), PEERS[3:9])
    assert max_leaving(9) == 2
    assert fault(round, round.propose(removed=PEERS[:2])) == ""
    assert "removes 3 voters" in fault(round, round.propose(removed=PEERS[:3]))


def test_a_voter_is_removed_after_missing_three_rosters_and_not_while_it_is_on_one():
    for missed, reason in ((1, "after missing 2 rosters"), (2, "")):
        round = Round(last_body(absent={VOTERS[0]: missed}), VOTERS[1:])
        assert reason in fault(round, round.propose(removed=VOTERS[:1]))
        assert bool(reason) == bool(fault(round, round.propose(removed=VOTERS[:1])))
    round = Round(last_body(absent={VOTERS[0]: 2}))
    assert "after missing 0 rosters" in fault(round, round.propose(removed=VOTERS[:1]))


@pytest.mark.parametrize(
    "changes, counts",
    [({}, True), ({"round": 6}, True), ({"round": 5}, False), ({"round": 9}, False), ({"run": "other"}, False)],
)
def test_a_goodbye_removes_a_voter_soon_and_in_its_run_only(changes, counts):
    round = Round()
    proposal = round.propose(removed=VOTERS[:1], goodbyes=(round.goodbye(VOTERS[0], **changes),))
    assert (fault(round, proposal) == "") == counts


def test_a_proof_removes_the_voter_that_it_convicts_and_no_other():
    round = Round(last_body(PEERS[:8]))
    proof = round.proof(VOTERS[0])
    assert proof.convicts(KEYS) == VOTERS[0]
    assert fault(round, round.propose(proofs=(proof,))) == ""
    assert "was removed" in fault(round, round.propose(removed=VOTERS[1:2], proofs=(proof,)))
    assert "does not follow" in fault(round, round.propose(body=round.body(), proofs=(proof,)))


def test_a_voter_that_was_removed_by_proof_does_not_become_one_again():
    round = Round()
    banned = round.propose(proofs=(round.proof(VOTERS[0]),)).body
    assert banned.banned == VOTERS[:1] and VOTERS[0] not in banned.voters
    later = Round(last_body(VOTERS[1:], banned=banned.banned, candidates={NEW[0]: 2}), [*VOTERS, NEW[0]]).body()
    assert VOTERS[0] not in later.candidates and later.voters == (*VOTERS[1:], NEW[0])
    assert later.banned == banned.banned


def test_a_body_names_the_last_that_were_removed_by_proof():
    round = Round(last_body(banned=NEW[:MAX_BANNED] + PEERS[5 : 5 + MAX_BANNED - len(NEW)]))
    body = round.propose(proofs=(round.proof(VOTERS[0]),)).body
    assert body.banned == (*round.last.banned[1:], VOTERS[0])


def test_a_stranger_that_contradicts_itself_pushes_no_other_out_of_the_banned():
    round = Round()
    body = round.propose(proofs=(round.proof(NEW[0]),)).body
    assert body.banned == () and body.voters == VOTERS


def test_a_false_proof_is_refused():
    round = Round()
    real = round.proof(VOTERS[0])
    forged = Proof(vote=real.vote, other=real.other.model_copy(update={"signature": "forged"}))
    for proof in (forged, Proof(vote=real.vote, other=real.vote)):
        assert proof.convicts(KEYS) == ""
        assert "proves nothing" in fault(round, round.propose(proofs=(proof,)))


# ---------------------------------------------------------------------- later attempts


def test_a_later_attempt_needs_the_give_ups_of_a_quorum():
    round = Round()
    give_ups = [round.give_up(peer) for peer in VOTERS[:3]]
    assert fault(round, round.propose(1, give_ups=give_ups)) == ""
    stranger, early = round.give_up(NEW[0]), round.give_up(VOTERS[2], 0)
    assert "only 2 voters" in fault(round, round.propose(1, give_ups=give_ups[:2]))
    assert "only 2 voters" in fault(round, round.propose(1, give_ups=[*give_ups[:2], stranger]))
    assert "only 2 voters" in fault(round, round.propose(1, give_ups=[*give_ups[:2], give_ups[0]]))
    later = [round.give_up(peer, 1) for peer in VOTERS[:2]]
    assert "only 2 voters" in fault(round, round.propose(2, give_ups=[*later, early]))
    assert "needs no give-ups" in fault(round, round.propose(0, give_ups=give_ups))


def test_a_give_up_of_another_branch_does_not_count():
    round, other = Round(), Round(last_body(ends_at=5.0))
    give_ups = [*(round.give_up(peer) for peer in VOTERS[:2]), other.give_up(VOTERS[2])]
    assert "another round" in fault(round, round.propose(1, give_ups=give_ups))


def test_the_body_of_the_newest_vote_is_proposed_again():
    round = Round()
    first = round.propose(body=round.body(ends_at=2001.0))
    second = round.propose(1, give_ups=[round.give_up(peer) for peer in VOTERS[:3]])
    give_ups = [round.give_up(VOTERS[0], 1, first), round.give_up(VOTERS[1], 1, second), round.give_up(VOTERS[2], 1)]
    again = round.propose(2, second.confirmations, body=second.body, give_ups=give_ups)
    assert fault(round, again) == ""
    for body, said in ((first.body, first.confirmations), (round.body(ends_at=9.0), round.confirmations(2))):
        assert "voted for before" in fault(round, round.propose(2, said, body=body, give_ups=give_ups))


def test_a_body_without_a_vote_is_averaged_anew():
    round = Round()
    give_ups = [round.give_up(peer) for peer in VOTERS[:3]]
    assert "older body" in fault(round, round.propose(1, round.confirmations(0), give_ups=give_ups))


def test_no_voter_can_state_a_vote_for_what_was_not_proposed():
    round = Round()
    invented = round.propose(author=next(peer for peer in VOTERS if peer != round.last.proposer(0)))
    give_ups = [round.give_up(VOTERS[0], 0, invented), *(round.give_up(peer) for peer in VOTERS[1:3])]
    again = round.propose(1, invented.confirmations, body=invented.body, give_ups=give_ups)
    assert "not proposed" in fault(round, again)
    assert "not proposed" in check_give_up(give_ups[0], invented, round.last, KEYS, MIN_PEERS)


def test_a_give_up_that_states_what_cannot_be_certified_is_not_counted():
    round = Round()
    honest, bad = round.propose(), round.propose(body=changed(round.body(), voters=VOTERS[:1]))
    for voted, reason in ((honest, ""), (bad, "removes 4 voters")):
        given_up = round.give_up(VOTERS[0], 0, voted)
        assert reason in check_give_up(given_up, voted, round.last, KEYS, MIN_PEERS)
        assert bool(check_give_up(given_up, voted, round.last, KEYS, MIN_PEERS)) == bool(reason)
        assert "missing" in check_give_up(given_up, None, round.last, KEYS, MIN_PEERS)
    assert check_give_up(round.give_up(VOTERS[0]), None, round.last, KEYS, MIN_PEERS) == ""
    for wrong in (round.give_up(NEW[0]), round.give_up(VOTERS[0]).model_copy(update={"signature": "forged"})):
        assert "not of a voter" in check_give_up(wrong, None, round.last, KEYS, MIN_PEERS)


def test_of_two_bodies_of_one_attempt_the_one_with_more_votes_is_the_newest():
    round = Round()
    one, two = round.propose(), round.propose(body=round.body(ends_at=9.0))
    give_ups = [round.give_up(VOTERS[index], 0, voted) for index, voted in enumerate((one, two, two))]
    assert newest_voted(give_ups) == two.body.digest
    assert newest_voted([round.give_up(VOTERS[0])]) == ""


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
def test_no_certificate_names_absent_what_is_no_real_half_of_the_voters(shrunk):
    round = Round()
    body = changed(round.body(), shrunk=shrunk, voters=VOTERS[4:])
    for signers in ((), VOTERS[4:]):
        assert "no half of the voters" in check_certificate(round.certify(body, signers), round.last, KEYS)


def test_all_voters_that_are_not_named_absent_sign_a_shrunk_certificate():
    round = Round(last_body(PEERS[:8]), PEERS[4:8])
    proposal = round.propose(shrunk=PEERS[:4])
    assert check_body(proposal, round.last, MIN_PEERS) == ""
    assert required_votes(round.last, proposal.body) == 4 and proposal.body.voters == PEERS[4:8]
    assert check_certificate(round.certify(proposal.body, PEERS[4:8]), round.last, KEYS) == ""
    assert "3 of 8" in check_certificate(round.certify(proposal.body, PEERS[:7]), round.last, KEYS)


def test_a_newcomer_skips_to_a_certificate_that_more_than_half_of_the_trusted_voters_signed():
    round = Round()
    later = changed(round.body(), round=20, previous=digest("round 19"), voters=NEW[:9])
    assert check_skip(round.certify(later, [*VOTERS[:3], *NEW[:4]]), round.last, KEYS) == ""
    assert "2 of 5" in check_skip(round.certify(later, [*VOTERS[:2], *NEW[:9]]), round.last, KEYS)
    for wrong in ({"round": 7}, {"run": "other"}):
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


def test_two_votes_of_one_attempt_and_a_vote_after_a_give_up_convict():
    round, other = Round(), Round(last_body(ends_at=5.0))
    one, two = round.propose(), round.propose(1, body=round.body(ends_at=9.0))
    vote = round.vote(VOTERS[0], one.body)
    later = round.vote(VOTERS[0], two.body, 1)
    guilty = [
        (vote, round.vote(VOTERS[0], two.body)),
        (vote, round.give_up(VOTERS[0], 0)),
        (later, round.give_up(VOTERS[0], 1, one)),
        (vote, round.give_up(VOTERS[0], 1, changed(two, attempt=0))),
    ]
    innocent = [
        (vote, vote),
        (vote, later),
        (vote, round.vote(VOTERS[1], two.body)),
        (vote, round.give_up(VOTERS[0], 5, one)),
        (vote, round.give_up(VOTERS[0], 5, two)),
        (later, round.give_up(VOTERS[0], 0)),
        (round.give_up(VOTERS[0], 0), round.give_up(VOTERS[0], 5, two)),
        (vote, other.vote(VOTERS[0], other.body())),
    ]
    for pair, peer in [*((pair, VOTERS[0]) for pair in guilty), *((pair, "") for pair in innocent)]:
        assert contradiction(*pair) == contradiction(*pair[::-1]) == peer


def test_a_body_that_is_copied_with_changes_has_its_own_digest():
    body = last_body()
    assert (
        body.digest != changed(body, round=8).digest == Body.model_validate_json(changed(body, round=8).encode()).digest
    )


def test_a_give_up_without_a_vote_is_the_same_whatever_the_json_says():
    given_up = Round().give_up(VOTERS[0])
    assert GiveUp.model_validate_json(given_up.encode()) == given_up
