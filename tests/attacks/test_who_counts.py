"""Who counts: ghosts and a minority of the voters change nothing, whatever they sign.

The cases are data, in `cases/who_counts.yaml`. `test_ghosts.py` tries ghosts on real peers.
"""

from __future__ import annotations

from typing import Any

import pytest
from certificates import MIN_PEERS, PEERS, Round, changed, digest
from forgeries import cases

from benchmarks.history_nodes import HmacKeys
from spes_p2p.swarm.certificate import Body, Certificate, Proposal, SlotState
from spes_p2p.swarm.certificate_checks import check_certificate, check_proposal, check_skip

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
    if "candidates" in made:
        made["candidates"] = dict.fromkeys(GHOSTS[:1], *made["candidates"].values())
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
    confirmations = []
    for member in meeting.members:
        changes: dict[str, Any] = {}
        if member.peer_id in some(case.get("confirm_other", [0, 0])):
            changes["shared"] = digest("other")
        if member.peer_id in some(case.get("slot_other", [0, 0])):
            changes["slots"] = {"0": digest("other"), "1": digest("new 1")}
        confirmations.append(meeting.confirm(member.peer_id, attempt, **changes))
    body = meeting.body(confirmations, removed=VOTERS[: case.get("removed", 0)])
    members = [member.model_dump() for member in body.members]
    for member in members:
        if member["peer_id"] in GHOSTS:
            member["tokens"] = case.get("tokens", member["tokens"])
    body = changed(body, members=tuple(members), **spelled_out(case.get("change", {}), body))
    turn = meeting.last.proposer(attempt)
    other = next(voter for voter in VOTERS if voter != turn)
    author = {"GHOST": GHOSTS[0], "VOTER": other}.get(case.get("author", ""), turn)
    give_ups = [meeting.give_up(peer, attempt - 1) for peer in some(case.get("give_ups", [0, 0]))]
    return meeting.propose(attempt, confirmations, body=body, give_ups=give_ups, author=author)


@pytest.fixture
def meeting() -> Round:
    return Round()


def test_what_the_voters_sign_counts(meeting: Round) -> None:
    """Or the cases below would prove nothing."""
    honest: dict[str, Any] = {"signers": [3, 10]}
    assert not check_certificate(certificate(honest, meeting), meeting.last, KEYS)
    assert not check_skip(certificate(honest, meeting), meeting.last, KEYS)
    with_ghosts = Round(roster=some([5, 2]))
    assert not check_proposal(proposal({}, with_ghosts), with_ghosts.last, KEYS, MIN_PEERS)
    later = {"attempt": 1, "give_ups": [3, 0]}
    assert not check_proposal(proposal(later, meeting), meeting.last, KEYS, MIN_PEERS)


@cases("who_counts")
def test_what_ghosts_or_a_minority_sign_does_not_count(case: dict[str, Any]) -> None:
    meeting = Round(roster=some(case.get("roster", [5, 0])))
    if case.get("document") == "proposal":
        assert case["says"] in check_proposal(proposal(case, meeting), meeting.last, KEYS, MIN_PEERS)
    else:
        forged = certificate(case, meeting)
        assert case["says"] in check_certificate(forged, meeting.last, KEYS)
        if "of 5" in case["says"]:
            assert check_skip(forged, meeting.last, KEYS), "nor can a newcomer be made to skip to it"
