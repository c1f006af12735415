"""Invites: a closed run takes those that its founder has invited, and no others; who may vote says the founder."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import RecordError
from spes_p2p.swarm.consensus import why_no_vote
from spes_p2p.swarm.invites import GuestList, Invite, issue, show
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.proposal import Proposal, check_proposal
from spes_p2p.swarm.roster import Member, Roster, invited
from tests.support.agreement import PEERS, RULES, Round, last_body

NOW = 1_800_000_000
FOUNDING, ANOTHER = "a" * 64, "b" * 64


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> IdentityKeys:
    return IdentityKeys(Identity(tmp_path_factory.mktemp("founder") / "key"))


@pytest.fixture(scope="module")
def guests(founder: IdentityKeys) -> GuestList:
    return GuestList(FOUNDING, founder.peer_id, founder, is_closed=True)


def shown_by(peer: str, invite: str) -> str:
    return show(invite, FOUNDING, peer)


def test_an_invite_holds_until_it_ends(founder: IdentityKeys, guests: GuestList) -> None:
    invite = issue(founder, FOUNDING, NOW)
    assert guests.check("a", shown_by("a", invite), NOW) == Invite(invite[:16], 1, votes=False)
    with pytest.raises(RecordError, match="ended 1 s ago"):
        guests.check("a", shown_by("a", invite), NOW + 1)


def test_what_others_see_of_an_invite_is_of_no_use_to_them(founder: IdentityKeys, guests: GuestList) -> None:
    invite = issue(founder, FOUNDING, NOW)
    shown = shown_by("a", invite)
    assert invite.split(".")[-1] not in shown
    with pytest.raises(RecordError, match="another peer's"):
        guests.check("b", shown, NOW)
    assert guests.refusals({"0": shown, "00": shown, "a": shown}, NOW).keys() == {"0", "00"}, "nor can it push out"


def test_a_proof_for_another_founding_is_none(founder: IdentityKeys, guests: GuestList) -> None:
    with pytest.raises(RecordError, match="another peer's"):
        guests.check("a", show(issue(founder, FOUNDING, NOW), ANOTHER, "a"), NOW)


def changed(shown: str, place: int) -> str:
    fields = shown.split(".")
    fields[place] = [fields[0][5] + fields[0][:5] + fields[0][6:], str(NOW + 1), "2", "1"][place]
    return ".".join(fields)


@pytest.mark.parametrize("place", range(4), ids=["key", "end", "places", "votes"])
def test_a_changed_invite_is_none(founder: IdentityKeys, guests: GuestList, place: int) -> None:
    with pytest.raises(RecordError, match="did not sign"):
        guests.check("a", changed(shown_by("a", issue(founder, FOUNDING, NOW)), place), NOW)


@pytest.mark.parametrize("text", ["", "x", ".1.", "0" * 768, "\n", "....", f"{'A' * 43}=.1.1.1.=.{'A' * 86}==\n"])
def test_whatever_else_is_shown_is_none(guests: GuestList, text: str) -> None:
    with pytest.raises(RecordError, match=r"has no invite|something else|did not sign"):
        guests.check("a", text, NOW)
    with pytest.raises(RecordError, match="something else"):
        show(text, FOUNDING, "a")


def test_an_invite_to_another_founding_or_of_another_founder_is_none(
    founder: IdentityKeys, guests: GuestList, tmp_path: Path
) -> None:
    other = IdentityKeys(Identity(tmp_path / "key"))
    for invite in (issue(founder, ANOTHER, NOW), issue(other, FOUNDING, NOW)):
        with pytest.raises(RecordError, match="did not sign"):
            guests.check("a", shown_by("a", invite), NOW)


def test_as_many_may_use_an_invite_as_it_has_places_and_the_founder_needs_none(
    founder: IdentityKeys, guests: GuestList
) -> None:
    shared, other = issue(founder, FOUNDING, NOW, places=2), issue(founder, FOUNDING, NOW)
    shown = {
        peer: shown_by(peer, invite) for peer, invite in {"a": shared, "b": shared, "c": shared, "d": other}.items()
    }
    shown |= {founder.peer_id: "", "e": ""}
    refused = guests.refusals(shown, NOW)
    assert refused == {"c": "c is one too many on its invite", "e": "e has no invite"}
    assert GuestList(FOUNDING, founder.peer_id, founder).refusals(shown, NOW) == {}, "the run is open"
    del shown["a"]
    assert set(guests.refusals(shown, NOW)) == {"e"}


def test_only_an_invite_to_vote_is_one(founder: IdentityKeys, guests: GuestList) -> None:
    votes, trains, ended = (
        issue(founder, FOUNDING, ends, votes=votes) for ends, votes in ((NOW, True), (NOW, False), (NOW - 1, True))
    )
    shown = {
        "a": shown_by("a", votes),
        "b": shown_by("b", trains),
        "c": shown_by("c", ended),
        "d": shown_by("a", votes),
    }
    assert guests.voting(shown, NOW) == {"a": Invite(votes[:16], 1, votes=True)}


def test_a_peer_says_why_its_invite_gives_no_vote(founder: IdentityKeys) -> None:
    votes, trains, ended = (
        show(issue(founder, FOUNDING, ends, votes=votes), FOUNDING, "a")
        for ends, votes in ((NOW, True), (NOW, False), (NOW - 1, True))
    )
    taken, seated = {"b": votes[:16]}, {"a": votes[:16]}
    assert why_no_vote(GuestList(FOUNDING, founder.peer_id, founder, votes), "a", taken, NOW) == (
        ": all places of its invite are taken (1); ask the founder for another link (spes invite --votes)"
    )
    assert "ended 1 s ago; ask" in why_no_vote(GuestList(FOUNDING, founder.peer_id, founder, ended), "a", {}, NOW)
    for shown, seats in ((votes, {}), (votes, seated), (trains, {}), ("", {})):
        assert why_no_vote(GuestList(FOUNDING, founder.peer_id, founder, shown), "a", seats, NOW) == ""


def body_with(round: Round, founder: IdentityKeys, guests: GuestList, invites: dict[str, str]) -> Proposal:
    proofs = guests.voting(invites, round.last.ends_at)
    body = round.body(invites=proofs)
    shown = {peer: invites[peer] for peer in body.seats if peer not in round.last.seats}
    return round.propose(body=body, invites=shown)


def test_a_proposal_seats_those_that_it_shows_invites_of(founder: IdentityKeys) -> None:
    new = PEERS[50:]
    round = Round(last_body(founder=founder.peer_id, ends_at=float(NOW)), (*PEERS[:5], *new[:2]))
    guests = GuestList(FOUNDING, founder.peer_id, founder)
    invites = {peer: show(issue(founder, FOUNDING, NOW, votes=True), FOUNDING, peer) for peer in new[:2]}
    proposal = body_with(round, founder, guests, invites)
    assert proposal.body.voters == (*PEERS[:5], new[0])

    def check(proposal: Proposal) -> str:
        return check_proposal(proposal, round.last, round.key(""), RULES.min_peers, guests)

    assert check(proposal) == ""
    trains = show(issue(founder, FOUNDING, NOW), FOUNDING, new[0])
    for shown in ({}, {new[0]: trains}, {new[0]: invites[new[1]]}):
        lied = proposal.model_copy(update={"invites": shown})
        assert "does not follow" in check(lied)


def test_a_revoked_invite_holds_no_more(founder: IdentityKeys, guests: GuestList) -> None:
    invite, other = issue(founder, FOUNDING, NOW), issue(founder, FOUNDING, NOW)
    guests.revoked = (invite[:6],)
    guests.check("a", shown_by("a", other), NOW)
    with pytest.raises(RecordError, match="has revoked"):
        guests.check("a", shown_by("a", invite), NOW)


def test_voters_by_a_revoked_invite_leave_and_do_not_come_back(founder: IdentityKeys, guests: GuestList) -> None:
    """A quarter of the voters a round, and a leader that keeps one is refused."""
    seats = {PEERS[0]: "", **dict.fromkeys(PEERS[1:3], "posted"), **dict.fromkeys(PEERS[3:9], "friend")}
    round = Round(last_body(PEERS[:9], seats=seats))
    guests.revoked = ("posted",)
    honest, kept = (round.propose(body=round.body(revoked=revoked)) for revoked in (PEERS[1:3], ()))
    assert honest.body.voters == (PEERS[0], *PEERS[3:9]) and honest.body.seats.keys() == {PEERS[0], *PEERS[3:9]}

    def check(proposal: Proposal) -> str:
        return check_proposal(proposal, round.last, round.key(""), RULES.min_peers, guests)

    assert check(honest) == "" and "does not follow" in check(kept)
    later = Round(honest.body, PEERS[:9])
    assert later.body(revoked=PEERS[1:3]).voters == honest.body.voters
    few = Round(last_body(PEERS[:3], seats={peer: seats[peer] for peer in PEERS[:3]}))
    assert few.body(revoked=PEERS[1:3]).voters == (PEERS[0], PEERS[2]), "one at least, and one after the other"


def test_the_clocks_of_strangers_end_no_invite(founder: IdentityKeys, guests: GuestList, tmp_path: Path) -> None:
    guest, *strangers = (Identity(tmp_path / str(index)).peer_id for index in range(4))
    invite = shown_by(guest, issue(founder, FOUNDING, NOW))
    members = [
        entry(founder.peer_id, NOW - 5),
        entry(guest, NOW - 5, invite),
        *(entry(s, 5.0 * NOW) for s in strangers),
    ]
    roster = invited(Roster(members, last_body()), guests)
    assert {member.peer_id for member in roster} == {founder.peer_id, guest}


def entry(peer: str, ready_at: float, invite: str = "") -> Member:
    rest = {"round": 0, "tokens": 1, "slots": (), "previous": "0" * 64, "tokens_per_second": 1.0, "sync_seconds": 0.0}
    return Member(peer_id=peer, ready_at=ready_at, invite=invite, **rest)
