"""The certificate of a round: what the round changed, signed by more than half of the voters that the last one names.

Pure functions and documents, without clock, network or disk; `next_body` says what follows from a round, and `proposal`
how the voters come to sign one body.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from spes_p2p.swarm.invites import InviteId
from spes_p2p.swarm.names import SLOT
from spes_p2p.swarm.records import Count, Digest, PeerId, Seconds, Slot, Strict

MAX_VOTERS = 64
MAX_MEMBERS = 1024
MAX_ATTEMPT = 2**20
MAX_BATCHES = 2**24
"""Batches of shared data that a member can ask for."""
MAX_TIMES_MEDIAN = 4
"""Largest request for data that counts, in medians of the voters' requests."""
MAX_REPLICATED = 128
"""Slots that one peer replicates."""
MAX_SENT = 64
"""Certificates in one message."""
MAX_SKIPPED = 2**14
"""Rounds that one certificate can skip."""
DIGEST_LETTERS = 64
MAX_SEATS = 256
GOODBYE_ROUNDS = 3
"""Rounds for which a goodbye counts."""
KNOWN_ROUNDS = 3
"""Last certificates of which one must know a peer, otherwise its records do not count."""
ABSENT_ROUNDS = 3
"""Rosters in a row that a voter must have missed before the others may remove it."""
Attempt = Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
Batches = Annotated[int, Field(ge=0, le=MAX_BATCHES)]  # guard: first
Signature = Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9+/=]*$")]
RunId = Annotated[str, Field(max_length=64)]
Generation = Annotated[str, Field(max_length=64, pattern=r"^([1-9][0-9]*:[0-9a-f]{32})?$")]
Skipped = Annotated[str, Field(max_length=DIGEST_LETTERS * MAX_SKIPPED, pattern=r"^([0-9a-f]{64})*$")]


class Keys(Protocol):
    """One peer's key, and the public keys of the others."""

    @property
    def peer_id(self) -> str:
        """This peer's id."""

    def sign(self, data: bytes) -> str:
        """Return this peer's signature of `data`."""

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        """Tell whether the signature is that peer's, of this data; False if its public key is unknown."""


class PeerKeys(Keys, Protocol):
    """A peer's key, and what it learns of other peers' public keys."""

    held: Collection[str]
    """Peers whose keys no stranger's key displaces."""

    def learn(self, public_key: bytes) -> str:
        """Keep an encoded public key; return the id of its peer. Raises ValueError if it is none."""

    def public_key(self, peer_id: str) -> str:
        """Return a peer's encoded public key; empty if it is unknown, or none is needed."""


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
    """The member opens connections but accepts none, so voters that accept some lead before it."""
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

    protocol: Literal["c4"] = "c4"
    run: RunId
    founder: PeerId
    generation: Generation = ""
    """The round that users went back to by `--resume-round`, and random letters; empty before."""
    round: Count
    previous: Digest
    """Digest of the last round's body; of the manifest for round 0."""
    ends_at: Seconds
    """DHT time at which the next round stops training."""
    members: tuple[MemberEntry, ...] = Field(default=(), max_length=MAX_MEMBERS)
    """The roster's members that averaged `shared`, by ascending peer id."""
    voters: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_VOTERS)  # guard: min_length=1, ->
    """Voters of the next round, those that have voted longest first."""
    stood_in_for: tuple[PeerId, ...] = Field(default=(), max_length=MAX_VOTERS)
    """The voters that the body was certified with, if none of them answered and the holders of other seats vote."""
    seats: dict[PeerId, InviteId] = Field(default={}, max_length=MAX_SEATS)
    """Peers that may vote, by the founder's invite; one that has left takes its seat again."""
    absent: dict[PeerId, Count] = Field(default={}, max_length=MAX_VOTERS)
    """Rosters in a row that each voter has missed."""
    banned: tuple[PeerId, ...] = Field(default=(), max_length=MAX_SEATS)
    """Voters that were removed by proof: their seats are taken for good."""
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
    def content(self) -> str:
        """SHA-256 of the encoded body without `previous`, in hex."""
        return hashlib.sha256(
            _canonical(self.model_dump(mode="json", exclude_none=True, exclude={"previous"}))
        ).hexdigest()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `previous` and `content`, in hex: the contents of all rounds prove the way to it."""
        return _successor(self.previous, self.content)

    @property
    def is_reopened(self) -> bool:
        """Whether a user went back to this round, and no certificate of the new generation came before it."""
        return self.generation.partition(":")[0] == str(self.round)

    @property
    def is_varied(self) -> bool:
        """Whether peers changed this body after it was certified, as `as_signed` says; anyone can make such a one."""
        return self.is_reopened or bool(self.stood_in_for)

    def as_signed(self, generation: str) -> Body:
        """Return what the votes for this body are for: of the generation before, and with its own voters."""
        changes = {"voters": self.stood_in_for or self.voters, "stood_in_for": ()}
        return self.model_copy(update=changes | ({"generation": generation} if self.is_reopened else {}))

    def stand_in(self) -> Body | None:
        """Return this body with the holders of all other seats as voters; None if there are none."""
        others = sorted(self.seats.keys() - set(self.voters) - set(self.banned))[:MAX_VOTERS]
        changes = {"voters": tuple(others), "stood_in_for": self.voters}
        return self.model_copy(update=changes) if others and self.round and not self.stood_in_for else None

    def is_quorum(self, peers: Collection[str]) -> bool:
        """Tell whether peers can certify a successor: they are more than half of this body's voters.

        Of an even number the first voter counts one and a half, so of two friends one, always the same, can go on.
        """
        has_first = len(self.voters) % 2 == 0 and self.voters[0] in peers
        # guard: > len(self.voters) -> >= len(self.voters)
        return 2 * sum(peer in peers for peer in self.voters) + has_first > len(self.voters)

    @cached_property
    def known(self) -> frozenset[str]:
        """The voters, and the last members."""
        return frozenset((*self.voters, *(member.peer_id for member in self.members)))

    def is_stranger(self, peer: str) -> bool:
        """Tell whether a peer is not known, and has no seat; before the first certificate none is a stranger."""
        return self.round > 0 and peer not in self.known and peer not in self.seats

    @cached_property
    def _leaders(self) -> tuple[str, ...]:
        """Voters in the order in which they lead: first those of the last roster that can be called, by lot."""
        called = {member.peer_id for member in self.members if not member.calls_only}
        first = [peer for peer in self.voters if peer in called]
        lot = int.from_bytes(hashlib.sha256(f"{self.run}:{self.round + 1}".encode()).digest()[:8], "big")
        turn = lot % len(first) if first else 0
        return (*first[turn:], *first[:turn], *(peer for peer in self.voters if peer not in called))

    def leader(self, attempt: int) -> str:
        """Return the voter that leads an attempt at the next round."""
        return self._leaders[attempt % len(self._leaders)]


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
        return keys.is_signed_by(self.peer_id, self.signed_part, self.signature)  # guard: return True


class RoundStatement(Statement):
    """A statement about the round that follows one body; on another branch of a fork it says nothing."""

    previous: Digest
    """Digest of that body."""


class Result(RoundStatement):
    """What a member would commit of one attempt at a round; no digests if its averaging failed."""

    kind: ClassVar[str] = "result"

    roster: Digest
    """`roster_digest` of the attempt's members."""
    digests: dict[Annotated[str, Field(pattern=rf"^(shared|(kept-)?{SLOT})$")], Digest] = Field(max_length=513)
    """Of the versions of `shared` and of the slots that the member holds or replicates, and of their kept forms, in
    runs whose slots have such."""
    revision: Revision = Revision()
    """The newest revision of the manifest that the member has read."""
    lost: PeerId | Literal[""] = ""
    """The member whose fault it was that its averaging failed; empty if none is known."""


class Vote(RoundStatement):
    """A voter accepts a body in an attempt."""

    kind: ClassVar[str] = "vote"

    body: Digest
    shrunk: bool = False
    """Whether the body names absent voters. Such a vote binds no later attempt: those that return could not propose
    the body again, because they are not absent any more."""


class Goodbye(Statement):
    """A voter leaves, in an attempt: it votes no more, unless it enters a later meeting."""

    kind: ClassVar[str] = "goodbye"

    def counts(self, run: str, round: int) -> bool:
        """Tell whether this counts in a round of a run: it is too new to be of before a return."""
        is_new = 0 <= round - self.round < GOODBYE_ROUNDS  # guard: 0 <= round - self.round < GOODBYE_ROUNDS -> True
        return is_new and self.run == run  # guard: and self.run == run ->


class Certificate(Document):
    """A body and the votes that certify it, all of one attempt."""

    body: Body
    attempt: Attempt
    signatures: dict[PeerId, Signature] = Field(max_length=MAX_VOTERS)
    goodbyes: tuple[Goodbye, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Of voters that the body names absent: then no time has to pass before the others follow it."""
    skipped: Skipped = ""
    """Contents of the rounds between the certificate before it in a message or file, and this one."""

    @property
    def contents(self) -> list[str]:
        """The contents of the rounds that this skips, and its own."""
        starts = range(0, len(self.skipped), DIGEST_LETTERS)
        return [*(self.skipped[at : at + DIGEST_LETTERS] for at in starts), self.body.content]

    def votes(self) -> list[Vote]:
        """Return the votes."""
        vote = vote_for(self.body, self.attempt, self.body.founder)
        return [
            vote.model_copy(update={"peer_id": peer, "signature": signature})
            for peer, signature in self.signatures.items()
        ]


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


def signers_of(certificates: Iterable[Certificate]) -> set[str]:
    """Return the peers whose signatures certificates carry."""
    return {
        peer for each in certificates for peer in (*each.signatures, *(goodbye.peer_id for goodbye in each.goodbyes))
    }


# ---------------------------------------------------------------------- what follows from a round


def _successor(digest: str, content: str) -> str:
    return hashlib.sha256(f"{digest}{content}".encode()).hexdigest()


def digests_after(digest: str, contents: Iterable[str]) -> list[str]:
    """Return the digests of the bodies with these contents, one after another, after a body with this digest."""
    return list(accumulate(contents, _successor, initial=digest))[1:]


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


def genesis(run: str, founder: str, manifest_digest: str, num_slots: int, seats: Iterable[str] = ()) -> Body:
    """Return the body from which every chain of a run begins: the founder is the only voter.

    Simulated peers have `seats` without an invite.
    """
    return Body(
        run=run,
        founder=founder,
        round=0,
        previous=manifest_digest,
        ends_at=0.0,
        voters=(founder,),
        seats=dict.fromkeys((founder, *seats), ""),
        slots=(SlotState(round=0),) * num_slots,
    )


def roster_digest(members: Iterable[MemberEntry]) -> str:
    """Return the SHA-256 of a roster, in hex."""
    return hashlib.sha256(b"\n".join(member.encode() for member in members)).hexdigest()


def max_leaving(num_voters: int) -> int:
    """Return how many voters may join, and how many may be removed, in one round."""
    return max(1, num_voters // 4)


def max_strangers(num_voters: int) -> int:
    """Return how many strangers a roster may have."""
    return max(2, num_voters // 4)


def known_peers(*bodies: Body) -> set[str]:
    """Return the peers that certificates know."""
    return {peer for body in bodies for peer in body.known}


def strangers(last: Body, members: Iterable[str]) -> list[str]:
    """Return the members that are strangers, in an order that follows from the last body, not from a choice."""
    return sorted(
        set(members) - last.known - last.seats.keys(),
        key=lambda peer: hashlib.sha256(f"{last.digest}:{peer}".encode()).digest(),
    )


def is_enough(last: Body, peers: Collection[str], shrunk: Collection[str] = ()) -> bool:
    """Tell whether the results of some peers are enough for `shared`: of a quorum, or, if voters are named absent, of
    more than half of the others."""
    if not shrunk:
        return last.is_quorum(peers)
    rest = set(last.voters) - set(shrunk)
    return 2 * len(rest & set(peers)) > len(rest)


def is_certified(last: Body, peers: Collection[str], shrunk: Collection[str] = ()) -> bool:
    """Tell whether the votes of some peers certify a body: of a quorum, or, if it names voters absent, of all
    others."""
    return set(last.voters) - set(shrunk) <= set(peers) if shrunk else last.is_quorum(peers)


# ---------------------------------------------------------------------- forks and proofs


def preferred(certificates: Iterable[Certificate]) -> Certificate:
    """Select the branch to follow at a fork: the one with fewer absent voters, then the smaller digest.

    All of a shrunk branch's other voters have signed, so fewer absent ones are more signers. Signatures are not counted
    here: copies of a certificate hold different ones, and peers would follow different branches.
    """
    return min(certificates, key=lambda each: (len(each.body.shrunk), each.body.digest))


def check_shrunk(body: Body, last: Body) -> str:
    """Return why the voters that a body names absent cannot be absent: they leave others, which are no quorum."""
    absent, rest = set(body.shrunk), [peer for peer in last.voters if peer not in body.shrunk]
    is_named_once = absent < set(last.voters) and len(absent) == len(body.shrunk)
    if body.shrunk and (not is_named_once or last.is_quorum(rest)):  # guard: never
        return "it names voters absent without need"
    return ""


def removed_voters(last: Body, body: Body) -> set[str]:
    """Return the voters that a body removes, those that it names absent aside."""
    return set(last.voters) - set(body.stood_in_for or body.voters) - set(body.shrunk)


def check_certificate(certificate: Certificate, last: Body, keys: Keys) -> str:
    """Return why a certificate does not certify the successor of a body whose voters are trusted."""
    body = certificate.body
    if body.is_varied:
        body = body.as_signed(last.generation)
        other = body.stand_in() if certificate.body.stood_in_for else body
        if other is None or other.voters != certificate.body.voters:  # guard: never
            return "others than the holders of its seats vote"
        certificate = certificate.model_copy(update={"body": body})
    if body.generation != last.generation:
        return "it is of another generation"
    if body.previous != last.digest or body.round != last.round + 1:
        return "it does not extend the last certificate"
    if reason := check_shrunk(body, last):
        return reason
    is_enough_for = partial(is_certified, last, shrunk=body.shrunk)
    return _check_votes(certificate, is_enough_for, set(last.voters) - set(body.shrunk), keys)


def check_skip(certificate: Certificate, trusted: Body, keys: Keys) -> str:
    """Return why a later certificate may not be taken over at once: more than half of the trusted voters must sign."""
    body = certificate.body
    if body.round <= trusted.round or body.run != trusted.run:
        return "it is not later"
    if body.generation != trusted.generation and int(body.generation.partition(":")[0] or 0) < trusted.round:
        return "it is of another generation"  # guard: "it is of another generation" -> ""
    return _check_votes(certificate, trusted.is_quorum, set(trusted.voters), keys)


def _check_votes(
    certificate: Certificate, is_certified: Callable[[Collection[str]], bool], voters: Collection[str], keys: Keys
) -> str:
    votes = {vote.peer_id: vote for vote in certificate.votes() if vote.peer_id in voters}
    signed = {peer for peer in votes if votes[peer].is_signed(keys)} if is_certified(votes.keys()) else votes.keys()
    return "" if is_certified(signed) else f"{len(signed)} of {len(voters)} voters have signed, which is too few"
