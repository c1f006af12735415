"""A closed run takes those whom its founder has invited, and nobody else, whoever asks whom."""

from __future__ import annotations

from pathlib import Path

import pytest

from spes_p2p.errors import RecordError
from spes_p2p.swarm.invites import GuestList, issue, show
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.roster import Member, Roster, invited
from tests.support.agreement import last_body

NOW = 1_800_000_000


@pytest.fixture(scope="module")
def founder(tmp_path_factory: pytest.TempPathFactory) -> Identity:
    return Identity(tmp_path_factory.mktemp("founder") / "key")


@pytest.fixture(scope="module")
def guests(founder: Identity) -> GuestList:
    return GuestList("run", founder.peer_id, founder.public_key.decode())


def shown_by(peer: str, invite: str) -> str:
    return show(invite, "run", peer)


def test_an_invite_holds_until_it_ends(founder: Identity, guests: GuestList) -> None:
    invite = issue(founder, "run", NOW)
    assert guests.check("a", shown_by("a", invite), NOW) == invite.split(".")[0]
    with pytest.raises(RecordError, match="ended 1 s ago"):
        guests.check("a", shown_by("a", invite), NOW + 1)


def test_what_others_see_of_an_invite_is_of_no_use_to_them(founder: Identity, guests: GuestList) -> None:
    invite = issue(founder, "run", NOW)
    shown = shown_by("a", invite)
    assert invite.split(".")[3] not in shown
    with pytest.raises(RecordError, match="another peer's"):
        guests.check("b", shown, NOW)
    assert guests.refusals({"0": shown, "00": shown, "a": shown}, NOW).keys() == {"0", "00"}, "nor can it push out"


def test_a_proof_for_another_run_is_none(founder: Identity, guests: GuestList) -> None:
    with pytest.raises(RecordError, match="another peer's"):
        guests.check("a", show(issue(founder, "run", NOW), "another", "a"), NOW)


def changed(shown: str, place: int) -> str:
    key, expires, *rest = shown.split(".")
    others = with_another_key(shown)
    return ".".join([others if place == 0 else key, str(int(expires) + 1) if place == 1 else expires, *rest])


def with_another_key(shown: str) -> str:
    return shown[5] + shown[:5] + shown[6:44]


@pytest.mark.parametrize("place", range(2), ids=["key", "end"])
def test_a_changed_invite_is_none(founder: Identity, guests: GuestList, place: int) -> None:
    with pytest.raises(RecordError, match="did not sign"):
        guests.check("a", changed(shown_by("a", issue(founder, "run", NOW)), place), NOW)


@pytest.mark.parametrize("text", ["", "x", ".1.", "0" * 768, "\n", "....", f"{'A' * 43}=.1.=.{'A' * 86}==\n"])
def test_whatever_else_is_shown_is_none(guests: GuestList, text: str) -> None:
    with pytest.raises(RecordError, match=r"has no invite|something else|did not sign"):
        guests.check("a", text, NOW)
    with pytest.raises(RecordError, match="something else"):
        show(text, "run", "a")


def test_an_invite_to_another_run_or_of_another_founder_is_none(
    founder: Identity, guests: GuestList, tmp_path: Path
) -> None:
    for invite in (issue(founder, "another", NOW), issue(Identity(tmp_path / "key"), "run", NOW)):
        with pytest.raises(RecordError, match="did not sign"):
            guests.check("a", shown_by("a", invite), NOW)


def test_two_identities_may_use_an_invite_and_the_founder_needs_none(founder: Identity, guests: GuestList) -> None:
    shared, other = issue(founder, "run", NOW), issue(founder, "run", NOW)
    shown = {
        peer: shown_by(peer, invite) for peer, invite in {"a": shared, "b": shared, "c": shared, "d": other}.items()
    }
    shown |= {founder.peer_id: "", "e": ""}
    refused = guests.refusals(shown, NOW)
    assert refused == {"c": "c is one too many on its invite", "e": "e has no invite"}
    del shown["a"]
    assert set(guests.refusals(shown, NOW)) == {"e"}


def test_the_clocks_of_strangers_end_no_invite(founder: Identity, guests: GuestList, tmp_path: Path) -> None:
    guest, *strangers = (Identity(tmp_path / str(index)).peer_id for index in range(4))
    invite = shown_by(guest, issue(founder, "run", NOW))
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
