"""What peers say in one attempt at a round: entries, results, proposals; and why one of them must not count.

The protocol is Paxos with signatures, whose promise is the entry in the next meeting. An attempt's number is Paxos's
ballot number. An *entry* in the meeting of attempt a promises to vote in no earlier attempt, and states the voter's
newest vote. The leader of the attempt proposes the body of the newest vote stated, or a new one if none is.

Source: Lamport, Paxos Made Simple (2001), section 2.2.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from spes_p2p.swarm.certificate import (
    ABSENT_ROUNDS,
    MAX_MEMBERS,
    MAX_VOTERS,
    Attempt,
    Body,
    Document,
    Goodbye,
    Keys,
    PeerId,
    Result,
    RoundStatement,
    Vote,
    check_shrunk,
    is_certified,
    max_leaving,
    max_strangers,
    removed_voters,
    roster_digest,
    strangers,
    vote_for,
)
from spes_p2p.swarm.invites import GuestList, ShownInvite
from spes_p2p.swarm.next_body import decide_slots, make_body
from spes_p2p.swarm.records import Digest
from spes_p2p.swarm.roster import Member

VOTERS_ALONE_FROM = 2
"""First attempt at a round whose roster has voters only, so that strangers who drop in each all-reduce stop no run."""
MAX_TURNS = 64
"""Attempts in which one body is proposed."""
NO_VOTE = (-1, "")
"""Attempt and body of the newest vote if there is none."""


class Entry(RoundStatement):
    """A peer enters the meeting of an attempt; a voter promises to vote in no earlier one."""

    kind: ClassVar[str] = "entry"

    member: Digest
    """Digest of its `Member`, which need not travel wherever its promise does."""
    voted: Attempt | None = None
    """Attempt of its newest vote in this round for a body that names none absent; None if there is none."""
    body: Digest | Literal[""] = ""
    """Body of that vote."""
    is_lost: bool = False
    """Its earlier promises are lost: it does not vote, and this entry proves nothing."""


class Proof(Document):
    """Two statements of one voter that contradict each other: a vote, and another vote or an entry."""

    vote: Vote
    other: Vote | Entry

    def convicts(self, keys: Keys) -> str:
        """Return the peer that is proven guilty; empty if this is no proof."""
        is_signed = self.vote.is_signed(keys) and self.other.is_signed(keys)
        return contradiction(self.vote, self.other) if is_signed else ""


class Turn(Document):
    """A leader's vote for a body, and the entries by which it may propose that body in its attempt."""

    vote: Vote
    entries: tuple[Entry, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of a quorum of voters, in this attempt; none in attempt 0."""


class Proposal(Document):
    """A body, and what justifies it."""

    body: Body
    turns: tuple[Turn, ...] = Field(min_length=1, max_length=MAX_TURNS)
    """Of the attempt that made the body; then of each one that proposed it again, because it may be certified."""
    results: tuple[Result, ...] = Field(default=(), max_length=2 * MAX_MEMBERS)
    """From which the body follows; two of a member that has stated two."""
    invites: dict[PeerId, ShownInvite] = Field(default={}, max_length=MAX_VOTERS)
    """Shown by those that get a seat."""
    goodbyes: tuple[Goodbye, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of voters that the body removes, or names absent."""
    proofs: tuple[Proof, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Against voters that the body removes."""

    @property
    def vote(self) -> Vote:
        """The leader's own vote."""
        return self.turns[-1].vote

    @property
    def attempt(self) -> int:
        """The attempt in which this is proposed."""
        return self.vote.attempt

    @property
    def entries(self) -> tuple[Entry, ...]:
        """The entries of this attempt."""
        return self.turns[-1].entries

    @property
    def is_repeated(self) -> bool:
        """Whether the body is that of an earlier attempt."""
        return len(self.turns) > 1


class Entered(Document):
    """An entry, with what its receiver needs of it."""

    entry: Entry
    member: Member | None = None
    """None for receivers that do not lead the meeting."""
    proposal: Proposal | None = None
    """The proposal of the vote that the entry states."""

    @property
    def is_whole(self) -> bool:
        """Whether the roster's entry is there, is the signed one, and is of who signed it."""
        return (
            self.member is not None
            and self.member.peer_id == self.entry.peer_id  # guard: operand
            and self.entry.member == digest_of(self.member)  # guard: operand
        )


class Meeting(Document):
    """The entries of an attempt's roster, as its leader closed the meeting."""

    previous: Digest
    attempt: Attempt
    entered: tuple[Entered, ...] = Field(max_length=MAX_MEMBERS)


class Lacking(Document):
    """An attempt's leader asks the voters for these members' results."""

    previous: Digest
    attempt: Attempt
    peers: tuple[PeerId, ...] = Field(max_length=MAX_MEMBERS)


def digest_of(member: Member) -> str:
    """Return the SHA-256 of a roster's entry, in hex."""
    return hashlib.sha256(member.model_dump_json().encode()).hexdigest()


def contradiction(vote: Vote, other: Vote | Entry) -> str:
    """Return the peer that two signed statements convict; empty if an honest voter can have made both.

    Honest voters vote for one body per attempt, and state their newest vote when they enter a later attempt. A vote for
    a shrunk body binds nothing, and a voter that has lost its promises cannot state them.
    """
    if (vote.peer_id, vote.previous) != (other.peer_id, other.previous):
        return ""
    if isinstance(other, Vote):
        guilty = vote.attempt == other.attempt and vote.body != other.body
    else:
        stated = -1 if other.voted is None else other.voted
        is_hidden = vote.attempt > stated or (vote.attempt == stated and vote.body != other.body)
        guilty = is_hidden and vote.attempt < other.attempt and not (vote.shrunk or other.is_lost)
    return vote.peer_id if guilty else ""


def guilty_voters(proofs: Iterable[Proof], last: Body) -> set[str]:
    """Return the voters that proofs convict; a stranger can contradict itself as often as it likes."""
    # guard: & set(last.voters) ->
    return {contradiction(proof.vote, proof.other) for proof in proofs} & set(last.voters)


def leaving_voters(proposal: Proposal, last: Body, guests: GuestList | None) -> set[str]:
    """Return the voters with a proof against them, with a goodbye, or whose seats are revoked."""
    body = proposal.body
    left = {each.peer_id for each in proposal.goodbyes if each.counts(body.run, body.round)}
    return left | guilty_voters(proposal.proofs, last) | revoked_peers(last, guests)


def revoked_peers(last: Body, guests: GuestList | None) -> set[str]:
    """Return the peers whose seats the founder has revoked."""
    return {peer for peer, invite in last.seats.items() if guests is not None and guests.is_revoked(invite)}


def promises_in(entries: Iterable[Entry], last: Body, absent: Collection[str]) -> list[Entry]:
    """Return the entries that are promises of voters that are not named absent.

    A voter whose earlier promises are lost makes none, unless it is the only one left: it can contradict no other.
    """
    left = set(last.voters) - set(absent)
    of_voters = [each for each in entries if each.peer_id in left]
    # guard: if not each.is_lost ->
    return of_voters if len(left) == 1 else [each for each in of_voters if not each.is_lost]


def newest_vote(entries: Iterable[Entry]) -> tuple[int, str]:
    """Return attempt and body of the newest vote that entries state; `NO_VOTE` if they state none.

    Two bodies of one attempt mean that its leader signed twice; the one with more votes may have been certified.
    """
    votes = Counter((each.voted, each.body) for each in entries if each.voted is not None)
    return max(votes, key=lambda vote: (vote[0], votes[vote], vote[1]), default=NO_VOTE)


def counted_results(results: Iterable[Result]) -> list[Result]:
    """Return the results that count: of two different ones of a peer none does."""
    by_peer: dict[str, dict[bytes, Result]] = {}
    for result in results:
        by_peer.setdefault(result.peer_id, {})[result.signed_part] = result
    return [next(iter(each.values())) for each in by_peer.values() if len(each) == 1]  # guard: if len(each) == 1 ->


# ---------------------------------------------------------------------- why something must not count


def check_proposal(proposal: Proposal, last: Body, keys: Keys, min_peers: int, guests: GuestList | None = None) -> str:
    """Return why a proposal must not be voted for, nor stated as voted for, whatever a voter knows by itself.

    Args:
        proposal: The proposal.
        last: Body of the last certificate.
        keys: The public keys of all who have signed something in it.
        min_peers: Members with which the run begins.
        guests: Checks invites; None where no seat is given by one.
    """
    body = proposal.body
    if body.previous != last.digest or body.run != last.run:  # guard: never
        return "it does not extend the last certificate"
    for vote in (turn.vote for turn in proposal.turns):
        if vote.peer_id != last.leader(vote.attempt):  # guard: never
            return f"{vote.peer_id} does not lead attempt {vote.attempt}"
        if not vote.is_signed(keys):  # before what takes long: anybody may name the leader  # guard: never
            return f"{vote.peer_id} has not signed its {vote.kind}"
        if vote.model_copy(update={"signature": ""}) != vote_for(body, vote.attempt, vote.peer_id):
            return "its leader's vote is for something else"
    before = NO_VOTE
    for turn in proposal.turns:
        if reason := check_turn(turn, body, before, last, keys):
            return reason
        before = turn.vote.attempt, body.digest
    return check_body(proposal, last, keys, min_peers, guests)


def check_turn(turn: Turn, body: Body, before: tuple[int, str], last: Body, keys: Keys) -> str:
    """Return why a body may not be proposed in an attempt: Paxos's rule for the value of a later ballot.

    Args:
        turn: The attempt.
        body: The body.
        before: The last attempt in which this body was proposed, with its digest; `NO_VOTE` if there is none.
        last: Body of the last certificate.
        keys: The public keys of those that entered.
    """
    attempt, entries = turn.vote.attempt, turn.entries
    if not attempt:
        return "" if not entries and before == NO_VOTE else "attempt 0 needs no entries"
    authors = {each.peer_id for each in promises_in(entries, last, body.shrunk) if each.attempt == attempt}
    if not is_certified(last, authors, body.shrunk) or len(authors) < len(entries):  # guard: never
        return f"{len(authors)} voters entered attempt {attempt}, which is too few"
    if any(each.previous != last.digest for each in entries):
        return "an entry is of another round"
    if not all(each.is_signed(keys) for each in entries):
        return "an entry is not signed"
    if body.shrunk:  # those that it names absent may have certified the newest vote; then that branch wins
        return "" if before == NO_VOTE else "a body that names voters absent is proposed once"
    if newest_vote(entries) != before or before[0] >= attempt:  # guard: never
        return "it leaves out the newest vote"
    return ""


def check_body(proposal: Proposal, last: Body, keys: Keys, min_peers: int, guests: GuestList | None = None) -> str:
    """Return why a body does not follow from the last one and the proposal's results."""
    body, results, attempt = proposal.body, proposal.results, proposal.turns[0].vote.attempt
    listed = {member.peer_id for member in body.members}
    removed, guilty = removed_voters(last, body), guilty_voters(proposal.proofs, last)
    if reason := check_shrunk(body, last) or check_roster(body, last, attempt):
        return reason
    of = last.digest, roster_digest(body.members), attempt
    if any((each.previous, each.roster, each.attempt) != of or each.peer_id not in listed for each in results):
        return "a result is not of its roster"
    if len(removed) > max_leaving(len(last.voters)):  # guard: never
        return f"it removes {len(removed)} voters at once"
    made = make_body(
        last,
        body.members,
        counted_results(results),
        ends_at=body.ends_at,
        min_peers=min_peers,
        invites=guests.voting(proposal.invites, last.ends_at) if guests is not None else {},
        removed=removed,
        guilty=guilty,
        shrunk=body.shrunk,
        revoked=revoked_peers(last, guests),
    )
    if made != body:
        return "it does not follow from its results"
    for peer in removed - leaving_voters(proposal, last, guests):
        missed = 0 if peer in listed else last.absent.get(peer, 0) + 1
        if missed < ABSENT_ROUNDS:  # guard: never
            return f"{peer} was removed after missing {missed} rosters"
    for statement in (*results, *proposal.goodbyes):
        if not statement.is_signed(keys):
            return f"{statement.peer_id} has not signed its {statement.kind}"
    if not all(proof.convicts(keys) for proof in proposal.proofs):  # guard: never
        return "a proof proves nothing"
    return ""


def check_roster(body: Body, last: Body, attempt: int) -> str:
    """Return why a roster may not be that of an attempt."""
    ids = [member.peer_id for member in body.members]
    held = [list(slots) for each in body.members for slots in (each.slots, each.replicates)]
    if ids != sorted(set(ids)) or any(slots != sorted(set(slots)) for slots in held):
        return "its roster is not in order"
    if attempt >= VOTERS_ALONE_FROM and not set(ids) <= set(last.voters):  # guard: never
        return f"its roster has others than voters in attempt {attempt}"
    if last.round and len(strangers(last, ids)) > max_strangers(len(last.voters)):  # guard: never
        return f"its roster has {len(strangers(last, ids))} strangers"
    return ""


def left_out(proposal: Proposal, last: Body, held: Collection[Result]) -> str:
    """Return what a body leaves out of results that a voter has had, and passed on, for long enough.

    A voter's result may not be missing, nor one without which a slot keeps its old version. Of two different results
    of one peer neither counts, and a body is not refused for that.
    """
    body, there = proposal.body, {result.peer_id for result in proposal.results}
    roster, listed = roster_digest(body.members), {member.peer_id for member in body.members}
    mine = [each for each in counted_results(held) if each.roster == roster and each.peer_id in listed and each.digests]
    missing: Sequence[Result] = [result for result in mine if result.peer_id not in there]
    for result in missing:
        if result.peer_id in last.voters:  # guard: never
            return f"it leaves out the result of {result.peer_id}"
    slots = decide_slots(last, body.members, counted_results([*proposal.results, *missing]))
    old = [slot for slot, (new, kept) in enumerate(zip(slots, body.slots, strict=True)) if new != kept]
    return f"it leaves slot {old[0]} at its old version" if old else ""  # guard: never


Message = Entered | Meeting | Result | Lacking | Proposal | Vote | Goodbye | Proof
