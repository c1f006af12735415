"""Who counts: ghosts and a minority of the voters change nothing, whatever they sign.

The cases are data, in `cases/who_counts.yaml`. `test_ghosts.py` tries ghosts on real peers.
"""

from __future__ import annotations

from typing import Any

import pytest
from agreement import PEERS, Round, changed, digest
from forgeries import cases

from benchmarks.history_peers import HmacKeys
from spes_p2p.swarm.certificate import Body, Certificate, SlotState, check_certificate, check_skip
from spes_p2p.swarm.proposal import Proposal

VOTERS, GHOSTS = PEERS[:5], PEERS[50:60]
KEYS = HmacKeys(PEERS[99])


def some(counts: list[int]) -> tuple[str, ...]:
    """Return so many voters, and so many ghosts."""
    num_voters, num_ghosts = counts
    return (*VOTERS[:num_voters], *GHOSTS[:num_ghosts])


def spelled_out(change: dict[str, Any], body: Body) -> dict[str, Any]:
    """Return a case's change of a body with its capital words put into full."""
    slots = (SlotState(round=body.round, digest=digest("other")), *body.slots[1:])
    words: dict[str, Any] = {
        "GHOSTS": GHOSTS[:3],
        "VOTERS+GHOST": (*VOTERS, GHOSTS[0]),
        "VOTERS-2": VOTERS[2:],
        "VOTER": VOTERS[:1],
        "OTHER": digest("other"),
    }
    made = {field: words.get(value, value) if isinstance(value, str) else value for field, value in change.items()}
    if "slots" in made:
        made["slots"] = tuple(slot.model_dump() for slot in slots)
    if "seats" in made:
        made["seats"] = {**body.seats, GHOSTS[0]: ""}
    return made


def certificate(case: dict[str, Any], meeting: Round) -> Certificate:
    body = meeting.body()
    signatures = dict(meeting.certify(body, some(case["signers"])).signatures)
    ghost = HmacKeys(GHOSTS[0])
    for voter in VOTERS[2 : 2 + case.get("in_names_of", 0)]:
        signatures[voter] = ghost.sign(meeting.vote(voter, body).signed_part)
    body = changed(body, **spelled_out(case.get("change", {}), body))
    return Certificate(body=body, attempt=0, signatures=signatures)


def proposal(case: dict[str, Any], meeting: Round) -> Proposal:
    attempt = case.get("attempt", 0)
    results = []
    for member in meeting.members:
        changes: dict[str, Any] = {}
        if member.peer_id in some(case.get("confirm_other", [0, 0])):
            changes["shared"] = digest("other")
        if member.peer_id in some(case.get("slot_other", [0, 0])):
            changes["slots"] = {0: digest("other"), 1: digest("new 1")}
        results.append(meeting.result(member.peer_id, attempt, **changes))
    body = meeting.body(results, removed=VOTERS[: case.get("removed", 0)])
    members = [member.model_dump() for member in body.members]
    for member in members:
        if member["peer_id"] in GHOSTS:
            member["tokens"] = case.get("tokens", member["tokens"])
    body = changed(body, members=tuple(members), **spelled_out(case.get("change", {}), body))
    turn = meeting.last.leader(attempt)
    other = next(voter for voter in VOTERS if voter != turn)
    author = {"GHOST": GHOSTS[0], "VOTER": other}.get(case.get("author", ""), turn)
    entries = [meeting.entry(peer, attempt) for peer in some(case.get("entries", [0, 0]))]
    return meeting.propose(attempt, results, body=body, entries=entries, author=author)


@pytest.fixture
def meeting() -> Round:
    return Round()


def test_what_the_voters_sign_counts(meeting: Round) -> None:
    """Or the cases below would prove nothing."""
    honest: dict[str, Any] = {"signers": [3, 10]}
    assert not check_certificate(certificate(honest, meeting), meeting.last, KEYS)
    assert not check_skip(certificate(honest, meeting), meeting.last, KEYS)
    with_ghosts = Round(present=some([5, 2]))
    assert not with_ghosts.check(proposal({}, with_ghosts))
    later = {"attempt": 1, "entries": [3, 0]}
    assert not meeting.check(proposal(later, meeting))


@cases("who_counts")
def test_what_ghosts_or_a_minority_sign_does_not_count(case: dict[str, Any]) -> None:
    meeting = Round(present=some(case.get("roster", [5, 0])))
    if case.get("document") == "proposal":
        assert case["says"] in meeting.check(proposal(case, meeting))
    else:
        forged = certificate(case, meeting)
        assert case["says"] in check_certificate(forged, meeting.last, KEYS)
        if "of 5" in case["says"]:
            assert check_skip(forged, meeting.last, KEYS), "nor can a newcomer be made to skip to it"
