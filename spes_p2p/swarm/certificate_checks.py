"""Why a proposal, a give-up or a certificate must not count. Each check returns a reason, or ""."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from spes_p2p.swarm.certificate import (
    ABSENT_ROUNDS,
    Body,
    Certificate,
    GiveUp,
    Keys,
    Proof,
    Proposal,
    Vote,
    contradiction,
    make_body,
    max_leaving,
    max_strangers,
    required_votes,
    roster_digest,
    strangers,
    vote_for,
)


def check_body(proposal: Proposal, last: Body, min_peers: int) -> str:
    """Return why a proposal's body does not follow from the last body and the proposal's confirmations."""
    body, confirmations = proposal.body, proposal.confirmations
    ids = [member.peer_id for member in body.members]
    if body.previous != last.digest or body.run != last.run:  # guard: body-extends
        return "it does not extend the last certificate"
    held = [list(slots) for each in body.members for slots in (each.slots, each.replicates)]
    if ids != sorted(set(ids)) or any(slots != sorted(set(slots)) for slots in held):
        return "its roster is not in order"
    if reason := check_shrunk(body, last):
        return reason
    if len(strangers(last, ids)) > max_strangers(len(last.voters)) and last.round:  # guard: few-strangers
        return f"its roster has {len(strangers(last, ids))} strangers"
    roster, listed = roster_digest(body.members), set(ids)
    if len({each.peer_id for each in confirmations}) < len(confirmations) or any(
        each.previous != last.digest or each.roster != roster or each.peer_id not in listed for each in confirmations
    ):
        return "a confirmation is not of its roster"
    removed = removed_voters(last, body)
    if len(removed) > max_leaving(len(last.voters)):  # guard: few-removed
        return f"it removes {len(removed)} voters at once"
    made = make_body(
        last,
        body.members,
        confirmations,
        ends_at=body.ends_at,
        min_peers=min_peers,
        removed=removed,
        guilty=guilty_voters(proposal.proofs, last),
        shrunk=body.shrunk,
    )
    return "" if made == body else "it does not follow from its confirmations"


def check_proposal(proposal: Proposal, last: Body, keys: Keys, min_peers: int) -> str:
    """Return why a proposal must not be voted for, whatever the voter knows by itself (`votes.Own`)."""
    body, vote = proposal.body, proposal.vote
    if vote.peer_id != last.proposer(proposal.attempt):  # guard: proposer-turn
        return f"{vote.peer_id} does not propose in attempt {proposal.attempt}"
    if not vote.is_signed(keys):  # before what takes long: anybody may name the proposer  # guard: signed-first
        return f"{vote.peer_id} has not signed its {vote.kind}"
    if vote.model_copy(update={"signature": ""}) != vote_for(body, proposal.attempt, vote.peer_id):
        return "the proposer's vote is for something else"
    if reason := check_body(proposal, last, min_peers):
        return reason
    if reason := check_give_ups(proposal, last):
        return reason
    for peer in removed_voters(last, body) - leaving_voters(proposal, last):
        missed = 0 if peer in {member.peer_id for member in body.members} else last.absent.get(peer, 0) + 1
        if missed < ABSENT_ROUNDS:  # guard: absent-first
            return f"{peer} was removed after missing {missed} rosters"
    for statement in (*proposal.confirmations, *proposal.give_ups, *proposal.goodbyes):
        if not statement.is_signed(keys):
            return f"{statement.peer_id} has not signed its {statement.kind}"
    if not all(proof.convicts(keys) for proof in proposal.proofs):  # guard: false-proof
        return "a proof proves nothing"
    for given_up in proposal.give_ups:
        if given_up.voted is not None and not _vote_of_proposer(given_up, last).is_signed(keys):  # guard: real-proposal
            return f"{given_up.peer_id} states a vote for what was not proposed"
    return ""


def check_shrunk(body: Body, last: Body) -> str:
    """Return why the voters that a body names absent cannot be absent: they are half or more, and leave others."""
    absent = set(body.shrunk)
    is_half = absent < set(last.voters) and len(absent) == len(body.shrunk) and 2 * len(absent) >= len(last.voters)
    if body.shrunk and not is_half:  # guard: real-half
        return "it names as absent what is no half of the voters"
    return ""


def removed_voters(last: Body, body: Body) -> set[str]:
    """Return the voters that a body removes, those that it names absent aside."""
    return set(last.voters) - set(body.voters) - set(body.shrunk)


def leaving_voters(proposal: Proposal, last: Body) -> set[str]:
    """Return the voters with a proof against them, or with a goodbye."""
    body = proposal.body
    leaving = {each.peer_id for each in proposal.goodbyes if each.counts(body.run, body.round)}
    return leaving | guilty_voters(proposal.proofs, last)


def guilty_voters(proofs: Iterable[Proof], last: Body) -> set[str]:
    """Return the voters that proofs convict; a stranger can contradict itself as often as it likes."""
    return {contradiction(proof.vote, proof.other) for proof in proofs} & set(last.voters)  # guard: voters-banned


def check_give_ups(proposal: Proposal, last: Body) -> str:
    """Return why a proposal may not be made in its attempt: Paxos' rule for the value of a later ballot."""
    attempt, give_ups = proposal.attempt, proposal.give_ups
    if not attempt:
        return "" if not give_ups else "attempt 0 needs no give-ups"
    authors = {each.peer_id for each in give_ups if each.attempt >= attempt - 1 and each.peer_id in last.voters}
    if len(authors) < required_votes(last, proposal.body) or len(authors) < len(give_ups):  # guard: give-up-quorum
        return f"only {len(authors)} voters gave up attempt {attempt - 1}"
    if any(each.previous != last.digest for each in give_ups):
        return "a give-up is of another round"
    bound = newest_voted(give_ups)
    if proposal.body.shrunk:
        return ""  # the absent may have certified the bound body; if so, that branch wins (`preferred`)
    if bound and proposal.body.digest != bound:  # guard: newest-vote-first
        return "it is not the body that was voted for before"
    return "" if bound or all(each.attempt == attempt for each in proposal.confirmations) else "it is an older body"


def check_give_up(given_up: GiveUp, voted: Proposal | None, last: Body, keys: Keys, min_peers: int) -> str:
    """Return why a proposer must not count a give-up; `voted` is the proposal that it states.

    Otherwise a proposer that signs a body which cannot be certified would stop all later attempts.
    """
    if given_up.previous != last.digest or given_up.peer_id not in last.voters or not given_up.is_signed(keys):
        return "it is not of a voter in this round"
    if given_up.voted is None:
        return ""
    if voted is None or (voted.attempt, voted.body.digest) != (given_up.voted, given_up.body) or voted.body.shrunk:
        return "its proposal is missing"
    if not _vote_of_proposer(given_up, last).is_signed(keys):
        return "it states a vote for what was not proposed"
    return check_proposal(voted, last, keys, min_peers)  # guard: give-up-proposal


def newest_voted(give_ups: Iterable[GiveUp]) -> str:
    """Return the body that must be proposed again: that of the newest vote; empty if no voter has voted.

    Two bodies of one attempt mean that its proposer signed twice; the one with more votes may have been certified.
    """
    votes = Counter((each.voted, each.body) for each in give_ups if each.voted is not None)
    return max(votes, key=lambda vote: (vote[0], votes[vote], vote[1]), default=(0, ""))[1]


def _vote_of_proposer(given_up: GiveUp, last: Body) -> Vote:
    assert given_up.voted is not None
    return Vote(
        run=given_up.run,
        round=given_up.round,
        previous=given_up.previous,
        attempt=given_up.voted,
        peer_id=last.proposer(given_up.voted),
        body=given_up.body,
        signature=given_up.proposed,
    )


def check_certificate(certificate: Certificate, last: Body, keys: Keys) -> str:
    """Return why a certificate does not certify the successor of a body whose voters are trusted."""
    body = certificate.body
    if body.previous != last.digest or body.round != last.round + 1:
        return "it does not extend the last certificate"
    if reason := check_shrunk(body, last):
        return reason
    return _check_votes(certificate, last, required_votes(last, body), set(last.voters) - set(body.shrunk), keys)


def check_skip(certificate: Certificate, trusted: Body, keys: Keys) -> str:
    """Return why a later certificate may not be taken over at once: more than half of the trusted voters must sign."""
    if certificate.body.round <= trusted.round or certificate.body.run != trusted.run:
        return "it is not later"
    return _check_votes(certificate, trusted, trusted.quorum, set(trusted.voters), keys)


def _check_votes(certificate: Certificate, last: Body, needed: int, voters: Collection[str], keys: Keys) -> str:
    votes = [vote for vote in certificate.votes() if vote.peer_id in voters]
    signed = sum(vote.is_signed(keys) for vote in votes) if len(votes) >= needed else len(votes)
    return "" if signed >= needed else f"{signed} of {len(last.voters)} voters have signed, {needed} are needed"
