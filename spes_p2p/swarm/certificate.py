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
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from spes_p2p.swarm.names import SHARED, SLOT
from spes_p2p.swarm.records import Count, Digest, PeerId, Seconds, Slot, Strict

MAX_VOTERS = 64
MAX_MEMBERS = 1024
MAX_ATTEMPT = 2**20
MAX_BATCHES = 2**24
"""Batches of shared data that a member can ask for."""
MAX_TIMES_MEDIAN = 4
"""Largest request for data that counts, in medians of the voters' requests."""
MAX_BANNED = 64
MAX_REPLICATED = 128
"""Slots that one peer replicates."""
MAX_SENT = 64
"""Certificates in one message."""
CONFIRMED_ROUNDS = 3
"""Certificates in a row that a member must have confirmed before it becomes a voter."""
KNOWN_ROUNDS = 3
"""Last certificates of which one must know a peer, otherwise its records do not count."""
FEW_VOTERS = 2
"""Voters up to which one confirmed certificate is enough: a run with one voter ends when that one dies."""
ABSENT_ROUNDS = 3
"""Rosters in a row that a voter must have missed before the others may remove it."""
Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
Batches = Annotated[int, Field(ge=0, le=MAX_BATCHES)]  # guard: batches-bounds
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


@cache
def _encoder() -> json.JSONEncoder:
    return json.JSONEncoder(sort_keys=True, separators=(",", ":"))


def _canonical(content: Mapping[str, Any]) -> bytes:
    return _encoder().encode(content).encode()


class Document(Strict):
    """Base of everything that is signed or hashed: strict, frozen, and encoded in one way only."""

    def encode(self) -> bytes:
        """Return canonical JSON; fields that are None are left out."""
        return _canonical(self.model_dump(mode="json", exclude_none=True))

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False):
        """Return a copy with some fields changed, and without what was derived from the old ones."""
        copied = super().model_copy(update=update, deep=deep)
        for derived in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[derived]
        return copied


class MemberEntry(Document):
    """A member of a round's roster, as the certificate keeps it."""

    peer_id: PeerId
    tokens: Count
    """Tokens whose training the round's mean contains."""
    slots: tuple[Slot, ...] = Field(default=(), max_length=128)
    """Slots whose groups the member was in, ascending."""
    replicates: tuple[Slot, ...] = Field(default=(), max_length=MAX_REPLICATED)
    """Slots that the member replicates, ascending."""
    calls_only: bool = False
    """The member opens connections but accepts none, so it proposes only if no voter accepts any."""
    batches: Batches = 0
    """Batches of shared data that the member asks for in the next round."""


class SlotState(Document):
    """The version of a slot that counts."""

    round: Count
    """Round that made it; 0 for the run's start."""
    digest: Digest | Literal[""] = ""
    kept: Digest | None = None
    """Digest of its kept form; None where slots have none, and for the run's start."""


class Revision(Document):
    """Names a revision of the run's manifest; the default is the manifest itself."""

    number: Count = 0
    digest: Digest | Literal[""] = ""


class Body(Document):
    """What a round changed. Its digest names it; signatures are no part of it, so that two collections of votes for
    one body do not fork the chain."""

    protocol: Literal["c2"] = "c2"
    run: RunId
    founder: PeerId
    round: Count
    previous: Digest
    """Digest of the last round's body; of the manifest for round 0."""
    ends_at: Seconds
    """DHT time at which the next round stops training."""
    members: tuple[MemberEntry, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """The roster's members that averaged `shared`, by ascending peer id."""
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
    cursor: Count = 0
    """First batch of shared data that the next round's voters are dealt (`shares`)."""
    revision: Revision = Revision()
    """The revision of the manifest that holds from the next round on."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the encoded body, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    @property
    def quorum(self) -> int:
        """Votes that certify a successor: more than half of this body's voters."""
        return len(self.voters) // 2 + 1

    @cached_property
    def known(self) -> frozenset[str]:
        """Voters and candidates; each other peer is a stranger."""
        return frozenset((*self.voters, *self.candidates))

    def is_stranger(self, peer: str) -> bool:
        """Tell whether a peer is neither voter nor candidate; before the first certificate none is a stranger."""
        return self.round > 0 and peer not in self.known

    def proposer(self, attempt: int) -> str:
        """Return the voter that proposes the next round's body in an attempt."""
        first = hashlib.sha256(f"{self.run}:{self.round + 1}".encode()).digest()
        hidden = {member.peer_id for member in self.members if member.calls_only}
        able = [peer for peer in self.voters if peer not in hidden] or self.voters
        return able[(int.from_bytes(first[:8], "big") + attempt) % len(able)]


class Statement(Document):
    """Base of what one peer signs about one round."""

    kind: ClassVar[str]

    run: RunId
    round: Count
    attempt: Attempt
    peer_id: PeerId
    signature: Signature = ""

    @cached_property
    def signed_part(self) -> bytes:
        """The bytes that are signed: the kind, and all fields but the signature."""
        return self.kind.encode() + b"\n" + _canonical(self.model_dump(mode="json") | {"signature": ""})

    def signed(self, keys: Keys):
        """Return this statement with its author's signature."""
        return self.model_copy(update={"signature": keys.sign(self.signed_part)})

    def is_signed(self, keys: Keys) -> bool:
        """Tell whether the author has signed this statement."""
        return keys.is_signed_by(self.peer_id, self.signed_part, self.signature)  # guard: statement-signature


class RoundStatement(Statement):
    """A statement about the round that follows one body; on another branch of a fork it says nothing."""

    previous: Digest
    """Digest of that body."""


class Confirmation(RoundStatement):
    """A member's results of one attempt at a round."""

    kind: ClassVar[str] = "confirmation"

    roster: Digest
    """`roster_digest` of the attempt's members."""
    digests: dict[Annotated[str, Field(pattern=rf"^(shared|(kept-)?{SLOT})$")], Digest] = Field(max_length=513)
    """Of the versions that the member would commit of `shared` and of the slots that it holds or replicates, and of
    their kept forms, in runs whose slots have such."""
    revision: Revision = Revision()
    """The newest revision of the manifest that the member has read."""


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
    """Of voters that the body removes, or names absent."""
    proofs: tuple[Proof, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Against voters that the body removes."""


class Certificate(Document):
    """A body and the votes that certify it, all of one attempt."""

    body: Body
    attempt: Attempt
    signatures: dict[PeerId, Signature] = Field(max_length=MAX_VOTERS)
    goodbyes: tuple[Goodbye, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of voters that the body names absent: then no time has to pass before the others follow it."""

    def votes(self) -> list[Vote]:
        """Return the votes."""
        vote = vote_for(self.body, self.attempt, self.body.founder)
        return [
            vote.model_copy(update={"peer_id": peer, "signature": signature})
            for peer, signature in self.signatures.items()
        ]


class GivenUp(Document):
    """A give-up, and the proposal of the vote that it states; without it no proposer can propose that body again."""

    give_up: GiveUp
    voted: Proposal | None = None


class Certificates(Document):
    """Certificates of successive rounds; none answers a question of a peer that knows them all."""

    certificates: tuple[Certificate, ...] = Field(max_length=MAX_SENT)


class Point(Document):
    """A round of a chain, and its body's digest."""

    round: Count
    digest: Digest


class Question(Document):
    """Points of the sender's chain, newest first; asks for the certificates after the newest point that is shared."""

    points: tuple[Point, ...] = Field(min_length=1, max_length=64)


Message = Confirmation | Proposal | Vote | GivenUp | Goodbye | Certificates | Question | Proof


def signers(message: Message | Statement) -> set[str]:
    """Return the peers whose signatures a message carries."""
    match message:
        case Proposal():
            statements: Sequence[Statement] = (
                *(message.vote, *message.confirmations, *message.give_ups, *message.goodbyes),
                *(each for proof in message.proofs for each in (proof.vote, proof.other)),
            )
            return {each.peer_id for each in statements}
        case GivenUp():
            return {message.give_up.peer_id} | (signers(message.voted) if message.voted is not None else set())
        case Certificates():
            return {
                peer
                for each in message.certificates
                for peer in (*each.signatures, *(goodbye.peer_id for goodbye in each.goodbyes))
            }
        case Proof():
            return {message.vote.peer_id}
        case Question():
            return set()
        case _:
            return {message.peer_id}


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


def shares(body: Body) -> dict[str, range]:
    """Return the batches of shared data that each voter trains in the round after a body.

    From the body's cursor on, in the order of voters, each voter is dealt what it asked for as a member of the body's
    round, and no batch is dealt again until the next epoch. Other peers are dealt nothing.
    """
    asked = {member.peer_id: member.batches for member in body.members if member.batches}
    voters = [peer for peer in body.voters if peer in asked]
    most = MAX_TIMES_MEDIAN * statistics.median_high(asked[peer] for peer in voters) if voters else 0
    ends = list(accumulate((min(asked[peer], most) for peer in voters), initial=body.cursor))  # guard: share-cap
    return {peer: range(*ends[at : at + 2]) for at, peer in enumerate(voters)}


def decide_slots(
    last: Body, members: Sequence[MemberEntry], confirmations: Iterable[Confirmation]
) -> tuple[SlotState, ...]:
    """Return the slots after a round: a slot changes if more than half of its voting holders confirm the same digests.

    If no holder votes, the voting replicas that have a result count; if there are none, all holders. A slot that does
    not change keeps its version, and its holders return to it.
    """
    confirmed = {each.peer_id: each.digests for each in confirmations}
    slots = list(last.slots)
    holders_of: dict[int, list[str]] = defaultdict(list)
    replicas_of: dict[int, list[str]] = defaultdict(list)
    for member in members:
        for slot in member.slots:
            holders_of[slot].append(member.peer_id)
        for slot in member.replicates:
            if member.peer_id in last.voters and f"slot-{slot}" in confirmed.get(member.peer_id, {}):
                replicas_of[slot].append(member.peer_id)
    for slot in range(len(slots)):
        holders = holders_of[slot]
        counted = [peer for peer in holders if peer in last.voters] or (holders and replicas_of[slot]) or holders
        found = [confirmed[peer] for peer in counted if f"slot-{slot}" in confirmed.get(peer, {})]
        votes = Counter((each[f"slot-{slot}"], each.get(f"kept-slot-{slot}")) for each in found)
        (digest, kept), count = max(votes.items(), key=lambda item: item[1], default=(("", None), 0))
        if 2 * count > len(counted):  # guard: slot-confirmed
            slots[slot] = SlotState(round=last.round + 1, digest=digest, kept=kept)
    return tuple(slots)


def max_leaving(num_voters: int) -> int:
    """Return how many voters may join, and how many may be removed, in one round."""
    return max(1, num_voters // 4)


def max_strangers(num_voters: int) -> int:
    """Return how many members without any confirmed certificate a roster may have."""
    return max(2, num_voters // 4)


def known_peers(*bodies: Body) -> set[str]:
    """Return the peers that certificates know: their voters, candidates and members."""
    return {
        peer
        for body in bodies
        for peer in (*body.voters, *body.candidates, *(member.peer_id for member in body.members))
    }


def strangers(last: Body, members: Iterable[str]) -> list[str]:
    """Return the members that no certificate knows, in an order that follows from the last body, not from a choice."""
    return sorted(set(members) - last.known, key=lambda peer: hashlib.sha256(f"{last.digest}:{peer}".encode()).digest())


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
    needed, room = CONFIRMED_ROUNDS if len(last.voters) > FEW_VOTERS else 1, max_leaving(len(last.voters))
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
    confirmed = {each.peer_id for each in confirmations if each.digests.get(SHARED) == digest}
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
        cursor=last.cursor + sum(map(len, shares(last).values())),
        revision=newest_read(last, confirmations),
    )


def confirmed_shared(last: Body, confirmations: Iterable[Confirmation], shrunk: Collection[str] = ()) -> str:
    """Return the digest of `shared` that more than half of the voters confirm; empty if none is.

    If voters are named absent, more than half of the others are needed.
    """
    voters = [peer for peer in last.voters if peer not in shrunk]
    votes = Counter(each.digests.get(SHARED, "") for each in confirmations if each.peer_id in voters)
    digest, count = max(votes.items(), key=lambda item: item[1], default=("", 0))
    return digest if 2 * count > len(voters) else ""  # guard: shared-confirmed


def newest_read(last: Body, confirmations: Iterable[Confirmation]) -> Revision:
    """Return the newest revision of the manifest that a quorum has read; the last body's if that is the newest.

    A revision that fewer voters have read may be withheld from the others.
    """
    stated = Counter(each.revision for each in confirmations if each.peer_id in last.voters)  # guard: revision-voters
    read = [revision for revision, count in stated.items() if count >= last.quorum]  # guard: revision-read
    return max([last.revision, *read], key=lambda each: each.number)  # guard: newer-revision


def required_votes(last: Body, body: Body) -> int:
    """Return the votes that certify a body: a quorum, or those of all voters that it does not name absent."""
    return len(last.voters) - len(body.shrunk) if body.shrunk else last.quorum


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
