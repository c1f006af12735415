"""The certificate of a round: what the round changed, signed by more than half of the voters that the last one names.

The protocol is Paxos with signatures. An *attempt* is a ballot, a *vote* accepts a body, a *give-up* promises to vote
in no attempt up to its own. It tolerates crashes, restarts, partitions, and proposers that leave peers out or stop
half-way. A voter that signs two statements that contradict each other can fork the chain; its two signatures convict
it (`contradiction`).

Pure functions and documents, without clock, network or disk; `votes` keeps one voter's promises.

Source: Lamport, Paxos Made Simple (2001), section 2.2.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from typing import Annotated, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from spes_p2p.swarm.records import Count, Digest, PeerId, Seconds, Slot

PROTOCOL = "c1"
MAX_VOTERS = 64
MAX_MEMBERS = 1024
MAX_ATTEMPT = 2**20
MAX_BANNED = 64
CONFIRMED_ROUNDS = 3
"""Certificates in a row that a member must have confirmed before it becomes a voter."""
ABSENT_ROUNDS = 3
"""Rosters in a row that a voter must have missed before the others may remove it."""
Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
Signature = Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9+/=]*$")]
RunId = Annotated[str, Field(max_length=64)]


class Keys(Protocol):
    """One peer's key, and the public keys of the others."""

    @property
    def peer_id(self) -> str:
        """This peer's id."""

    def sign(self, data: bytes) -> str:
        """Return this peer's signature of `data`."""

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        """Tell whether the signature is that peer's, of this data; False if its public key is unknown."""


class Document(BaseModel):
    """Base of everything that is signed or hashed: strict, frozen, and encoded in one way only."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    def encode(self) -> bytes:
        """Return canonical JSON."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


class MemberEntry(Document):
    """A member of a round's roster, as the certificate keeps it."""

    peer_id: PeerId
    tokens: Count
    """Tokens whose training the round's mean contains."""
    slots: tuple[Slot, ...] = Field(default=(), max_length=128)
    """Slots whose groups the member was in, ascending."""


class SlotState(Document):
    """The version of a slot that counts."""

    round: Count
    """Round that made it; 0 for the run's start."""
    digest: Digest | Literal[""] = ""


class Body(Document):
    """What a round changed. Its digest names it; signatures are no part of it, so that two collections of votes for
    one body do not fork the chain."""

    protocol: Literal["c1"] = "c1"
    run: RunId
    founder: PeerId
    round: Count
    previous: Digest
    """Digest of the last round's body; of the manifest for round 0."""
    ends_at: Seconds
    """DHT time at which the next round stops training."""
    members: tuple[MemberEntry, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """The roster, by ascending peer id."""
    voters: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_VOTERS)  # guard: some-voter
    """Voters of the next round, those that have voted longest first."""
    candidates: dict[PeerId, Count] = Field(default={}, max_length=MAX_MEMBERS)
    """Certificates in a row that each other member has confirmed."""
    absent: dict[PeerId, Count] = Field(default={}, max_length=MAX_VOTERS)
    """Rosters in a row that each voter has missed."""
    banned: tuple[PeerId, ...] = Field(default=(), max_length=MAX_BANNED)
    """The last voters that were removed by proof, newest last; they do not become voters again."""
    shared: Digest | Literal[""] = ""
    slots: tuple[SlotState, ...] = Field(default=(), max_length=4096)
    """By slot."""
    shrunk: tuple[PeerId, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Voters that were absent for so long that the rest, no majority, went on without them."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoded body, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def quorum(self) -> int:
        """Votes that certify a successor: more than half of this body's voters."""
        return len(self.voters) // 2 + 1

    def proposer(self, attempt: int) -> str:
        """Return the voter that proposes the next round's body in an attempt."""
        first = hashlib.sha256(f"{self.run}:{self.round + 1}".encode()).digest()
        return self.voters[(int.from_bytes(first[:8], "big") + attempt) % len(self.voters)]


class Statement(Document):
    """Base of what one peer signs about one round."""

    kind: ClassVar[str]

    run: RunId
    round: Count
    attempt: Attempt
    peer_id: PeerId
    signature: Signature = ""

    def signed_part(self) -> bytes:
        """Return the bytes that are signed: the kind and all fields but the signature."""
        return self.kind.encode() + b"\n" + self.model_copy(update={"signature": ""}).encode()

    def signed(self, keys: Keys):
        """Return this statement with its author's signature."""
        return self.model_copy(update={"signature": keys.sign(self.signed_part())})

    def is_signed(self, keys: Keys) -> bool:
        """Tell whether the author has signed this statement."""
        return keys.is_signed_by(self.peer_id, self.signed_part(), self.signature)  # guard: statement-signature


class RoundStatement(Statement):
    """A statement about the round that follows one body; on another branch of a fork it says nothing."""

    previous: Digest
    """Digest of that body."""


class Confirmation(RoundStatement):
    """A member's results of one attempt at a round."""

    kind: ClassVar[str] = "confirmation"

    roster: Digest
    """`roster_digest` of the attempt's members."""
    shared: Digest
    """Digest of the version of `shared` that the member would commit."""
    slots: dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,3})$")], Digest] = Field(default={}, max_length=128)
    """The same for each of its slots."""


class Vote(RoundStatement):
    """A voter accepts a body in an attempt."""

    kind: ClassVar[str] = "vote"

    body: Digest
    shrunk: bool = False
    """Whether the body names absent voters. Such a vote binds no later attempt: those that return could not propose
    the body again, because they are not absent any more."""


class GiveUp(RoundStatement):
    """A voter will vote in no attempt up to this one; it states its newest vote for a body that names none absent."""

    kind: ClassVar[str] = "give-up"

    voted: Attempt | None = None
    """Attempt of that vote; None if there is none in this round."""
    body: Digest | Literal[""] = ""
    """Body of that vote."""
    proposed: Signature = ""
    """The signature under the vote of that attempt's proposer, so that no voter can invent a proposal."""


class Goodbye(Statement):
    """A voter leaves: it will vote in no later round unless it is admitted again. `attempt` is 0."""

    kind: ClassVar[str] = "goodbye"

    def counts(self, run: str, round: int) -> bool:
        """Tell whether this counts in a round of a run: it is too new to be of before a return."""
        is_new = 0 <= round - self.round < CONFIRMED_ROUNDS  # guard: old-goodbye
        return is_new and self.run == run  # guard: goodbye-of-run


class Proof(Document):
    """Two statements of one voter that contradict each other."""

    vote: Vote
    other: Vote | GiveUp

    def convicts(self, keys: Keys) -> str:
        """Return the peer that is proven guilty; empty if this is no proof."""
        is_signed = self.vote.is_signed(keys) and self.other.is_signed(keys)
        return contradiction(self.vote, self.other) if is_signed else ""


class Proposal(Document):
    """A body with what justifies it."""

    attempt: Attempt
    body: Body
    confirmations: tuple[Confirmation, ...] = Field(max_length=MAX_MEMBERS)
    """Of the attempt in which the body was made."""
    vote: Vote
    """The proposer's own."""
    give_ups: tuple[GiveUp, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of the attempt before, from a quorum; none for attempt 0."""
    goodbyes: tuple[Goodbye, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of voters that the body removes."""
    proofs: tuple[Proof, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Against voters that the body removes."""


class Certificate(Document):
    """A body and the votes that certify it, all of one attempt."""

    body: Body
    attempt: Attempt
    signatures: dict[PeerId, Signature] = Field(max_length=MAX_VOTERS)

    def votes(self) -> list[Vote]:
        """Return the votes."""
        vote = vote_for(self.body, self.attempt, self.body.founder)
        return [
            vote.model_copy(update={"peer_id": peer, "signature": signature})
            for peer, signature in self.signatures.items()
        ]


# ---------------------------------------------------------------------- what follows from a round


def vote_for(body: Body, attempt: int, peer_id: str) -> Vote:
    """Return a voter's vote, not signed yet."""
    return Vote(
        run=body.run,
        round=body.round,
        previous=body.previous,
        attempt=attempt,
        peer_id=peer_id,
        body=body.digest,
        shrunk=bool(body.shrunk),
    )


def genesis(run: str, founder: str, manifest_digest: str, num_slots: int) -> Body:
    """Return the body from which every chain of a run begins: the founder is the only voter."""
    return Body(
        run=run,
        founder=founder,
        round=0,
        previous=manifest_digest,
        ends_at=0.0,
        voters=(founder,),
        slots=(SlotState(round=0),) * num_slots,
    )


def roster_digest(members: Iterable[MemberEntry]) -> str:
    """Return the SHA-256 of a roster, in hex."""
    return hashlib.sha256(b"\n".join(member.encode() for member in members)).hexdigest()


def decide_slots(
    last: Body, members: Sequence[MemberEntry], confirmations: Iterable[Confirmation]
) -> tuple[SlotState, ...]:
    """Return the slots after a round: a slot changes if more than half of its voting holders confirm one digest.

    Where no holder votes, all holders count. A slot that does not change keeps its version, and its holders return
    to it.
    """
    confirmed = {each.peer_id: each.slots for each in confirmations}
    slots = list(last.slots)
    holders_of: dict[int, list[str]] = defaultdict(list)
    for member in members:
        for slot in member.slots:
            holders_of[slot].append(member.peer_id)
    for slot in range(len(slots)):
        holders = holders_of[slot]
        counted = [peer for peer in holders if peer in last.voters] or holders
        votes = Counter(confirmed[peer][str(slot)] for peer in counted if str(slot) in confirmed.get(peer, {}))
        digest, count = max(votes.items(), key=lambda item: item[1], default=("", 0))
        if 2 * count > len(counted):  # guard: slot-confirmed
            slots[slot] = SlotState(round=last.round + 1, digest=digest)
    return tuple(slots)


def max_leaving(num_voters: int) -> int:
    """Return how many voters may join, and how many may be removed, in one round."""
    return max(1, num_voters // 4)


def max_strangers(num_voters: int) -> int:
    """Return how many members without any confirmed certificate a roster may have."""
    return max(2, num_voters // 4)


def strangers(last: Body, members: Iterable[str]) -> list[str]:
    """Return the members that no certificate knows, in an order that follows from the last body, not from a choice."""
    unknown = [peer for peer in members if peer not in last.voters and peer not in last.candidates]
    return sorted(unknown, key=lambda peer: hashlib.sha256(f"{last.digest}:{peer}".encode()).digest())


def next_voters(
    last: Body, members: Collection[str], confirmed: Collection[str], removed: Collection[str], min_peers: int
) -> tuple[tuple[str, ...], dict[str, int], dict[str, int]]:
    """Return the next round's voters, the candidates, and the rosters that each voter has missed in a row.

    Args:
        last: The last body.
        members: The roster.
        confirmed: Members whose confirmation of `shared` is the certified one.
        removed: Voters that leave.
        min_peers: Members with which the run begins: certificate 1 makes up to this many voters.
    """
    waiting = {peer: last.candidates.get(peer, 0) + 1 for peer in confirmed if peer not in last.voters}
    needed, room = CONFIRMED_ROUNDS, max_leaving(len(last.voters))
    if last.round == 0:
        needed, room = 1, min_peers - 1
    room = min(room, MAX_VOTERS - len(last.voters) + len(removed))
    due = sorted((peer for peer, rounds in waiting.items() if rounds >= needed), key=lambda p: (-waiting[p], p))
    admitted = due[: max(room, 0)]  # guard: few-new-voters
    voters = (*(peer for peer in last.voters if peer not in removed), *admitted)
    candidates = {peer: waiting[peer] for peer in sorted(waiting) if peer not in admitted}
    absent = {p: last.absent.get(p, 0) + 1 for p in last.voters if p not in members and p not in removed}
    return voters, candidates, absent


def make_body(
    last: Body,
    members: Sequence[MemberEntry],
    confirmations: Sequence[Confirmation],
    *,
    ends_at: float,
    min_peers: int,
    removed: Collection[str] = (),
    guilty: Collection[str] = (),
    shrunk: Sequence[str] = (),
) -> Body | None:
    """Return the body that these confirmations justify, without the voters that are removed or proven guilty; None if
    too few voters confirm one digest of `shared`, or no voter would be left."""
    digest = confirmed_shared(last, confirmations, shrunk)
    if not digest:
        return None
    confirmed = {each.peer_id for each in confirmations if each.shared == digest}
    confirmed -= set(last.banned)  # guard: banned-for-good
    ids = [member.peer_id for member in members]
    voters, candidates, absent = next_voters(last, ids, confirmed, {*removed, *guilty, *shrunk}, min_peers)
    if not voters:
        return None
    return Body(
        run=last.run,
        founder=last.founder,
        round=last.round + 1,
        previous=last.digest,
        ends_at=ends_at,
        members=tuple(members),
        voters=voters,
        candidates=candidates,
        absent=absent,
        banned=(*last.banned, *sorted(guilty))[-MAX_BANNED:],
        shared=digest,
        slots=decide_slots(last, members, confirmations),
        shrunk=tuple(shrunk),
    )


def confirmed_shared(last: Body, confirmations: Iterable[Confirmation], shrunk: Collection[str] = ()) -> str:
    """Return the digest of `shared` that more than half of the voters confirm; empty if none is.

    If voters are named absent, more than half of the others are needed.
    """
    voters = [peer for peer in last.voters if peer not in shrunk]
    votes = Counter(each.shared for each in confirmations if each.peer_id in voters)
    digest, count = max(votes.items(), key=lambda item: item[1], default=("", 0))
    return digest if 2 * count > len(voters) else ""  # guard: shared-confirmed


def required_votes(last: Body, body: Body) -> int:
    """Return the votes that certify a body: a quorum, or those of all voters that it does not name absent."""
    return len(last.voters) - len(body.shrunk) if body.shrunk else last.quorum


# ---------------------------------------------------------------------- checks; each returns a reason, or ""


def check_body(proposal: Proposal, last: Body, min_peers: int) -> str:
    """Return why a proposal's body does not follow from the last body and the proposal's confirmations."""
    body, confirmations = proposal.body, proposal.confirmations
    ids = [member.peer_id for member in body.members]
    if body.previous != last.digest or body.run != last.run:  # guard: body-extends
        return "it does not extend the last certificate"
    if ids != sorted(set(ids)) or any(list(each.slots) != sorted(set(each.slots)) for each in body.members):
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
    for statement in (vote, *proposal.confirmations, *proposal.give_ups, *proposal.goodbyes):
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
    signed = sum(vote.is_signed(keys) for vote in votes)
    return "" if signed >= needed else f"{signed} of {len(last.voters)} voters have signed, {needed} are needed"


# ---------------------------------------------------------------------- forks and proofs


def preferred(certificates: Iterable[Certificate]) -> Certificate:
    """Select the branch to follow at a fork: the one with fewer absent voters, then the smaller digest.

    All of a shrunk branch's other voters have signed, so fewer absent ones are more signers. Signatures are not counted
    here: copies of a certificate hold different ones, and peers would follow different branches.
    """
    return min(certificates, key=lambda each: (len(each.body.shrunk), each.body.digest))


def contradiction(one: RoundStatement, other: RoundStatement) -> str:
    """Return the peer that two signed statements convict; empty if an honest voter can have made both.

    Honest voters vote for one body per attempt, vote in no attempt that they have given up, and state their newest
    unshrunk vote when they give up.
    """
    if (one.peer_id, one.previous) != (other.peer_id, other.previous):
        return ""
    if isinstance(one, GiveUp) and isinstance(other, Vote):
        one, other = other, one
    guilty = False
    if isinstance(one, Vote) and isinstance(other, Vote):
        guilty = one.attempt == other.attempt and one.body != other.body
    elif isinstance(one, Vote) and isinstance(other, GiveUp):
        stated = -1 if other.voted is None else other.voted
        is_hidden = one.attempt > stated or (one.attempt == stated and one.body != other.body)
        guilty = is_hidden and not one.shrunk and one.attempt <= other.attempt
    return one.peer_id if guilty else ""
