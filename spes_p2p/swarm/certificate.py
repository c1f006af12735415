"""The certificate of a round: what the round changed, signed by more than half of the voters that the last one names.

Pure functions and documents, without clock, network or disk; `proposal` says how the voters come to sign one body.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Protocol

from pydantic import Field

from spes_p2p.swarm.invites import Invite, InviteId
from spes_p2p.swarm.names import SHARED, SLOT
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
MAX_SEATS = 256
GOODBYE_ROUNDS = 3
"""Rounds for which a goodbye counts."""
KNOWN_ROUNDS = 3
"""Last certificates of which one must know a peer, otherwise its records do not count."""
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

    protocol: Literal["c3"] = "c3"
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
    def digest(self) -> str:
        """SHA-256 of the encoded body, in hex."""
        return hashlib.sha256(self.encode()).hexdigest()

    def is_quorum(self, peers: Collection[str]) -> bool:
        """Tell whether peers can certify a successor: they are more than half of this body's voters.

        Of an even number the first voter counts one and a half, so of two friends one, always the same, can go on.
        """
        has_first = len(self.voters) % 2 == 0 and self.voters[0] in peers
        return 2 * sum(peer in peers for peer in self.voters) + has_first > len(self.voters)  # guard: first-voter-more

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
        return keys.is_signed_by(self.peer_id, self.signed_part, self.signature)  # guard: statement-signature


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
        is_new = 0 <= round - self.round < GOODBYE_ROUNDS  # guard: old-goodbye
        return is_new and self.run == run  # guard: goodbye-of-run


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


def decide_slots(last: Body, members: Sequence[MemberEntry], results: Iterable[Result]) -> tuple[SlotState, ...]:
    """Return the slots after a round.

    A slot changes if more than half of the voters among its holders and replicas confirm the same digests; without any
    such voter, more than half of its holders. Otherwise it keeps its version, and its holders return to it.
    """
    confirmed = {each.peer_id: each.digests for each in results}
    holders: dict[int, list[str]] = defaultdict(list)
    voters: dict[int, list[str]] = defaultdict(list)
    for member in members:
        for slot in member.slots:
            holders[slot].append(member.peer_id)
        if member.peer_id in last.voters:
            for slot in (*member.slots, *member.replicates):
                voters[slot].append(member.peer_id)
    slots = list(last.slots)
    for slot in range(len(slots)):
        counted = (voters[slot] or holders[slot]) if holders[slot] else []
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


def next_voters(
    last: Body,
    confirmed: Collection[str],
    removed: Collection[str],
    min_peers: int,
    invites: Mapping[str, Invite],
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the next round's voters, and the seats.

    Those that have a seat and confirm the certificate vote again, then those that show an invite to vote: a quarter of
    the voters at most, but in certificate 1 as many members as the run begins with.

    Args:
        last: The last body.
        confirmed: Members whose result for `shared` is the certified one.
        removed: Voters that leave.
        min_peers: Members with which the run begins.
        invites: Invites to vote, by the members that show them.
    """
    room = max_leaving(len(last.voters)) if last.round else min_peers - 1
    room = min(room, MAX_VOTERS - len(last.voters) + len(removed))
    voters, seats = [peer for peer in last.voters if peer not in removed], dict(last.seats)
    for peer in (*sorted(last.seats), *sorted(invites.keys() - last.seats.keys())):
        if room <= 0:  # guard: few-new-voters
            break
        if peer not in confirmed or peer in last.voters:
            continue
        if peer not in seats:
            if not invites[peer].has_place(seats) or len(seats) >= MAX_SEATS:  # guard: seat-places
                continue
            seats[peer] = invites[peer].id
        voters.append(peer)
        room -= 1
    return tuple(voters), seats


def make_body(
    last: Body,
    members: Sequence[MemberEntry],
    results: Sequence[Result],
    *,
    ends_at: float,
    min_peers: int,
    invites: Mapping[str, Invite] | None = None,
    removed: Collection[str] = (),
    guilty: Collection[str] = (),
    shrunk: Sequence[str] = (),
) -> Body | None:
    """Return the body that these results justify, with seats for those that members show invites to, and without the
    voters that are removed or proven guilty; None if too few voters confirm one digest of `shared`, or no voter would
    be left."""
    digest = confirmed_shared(last, results, shrunk)
    if not digest:
        return None
    confirmed = {each.peer_id for each in results if each.digests.get(SHARED) == digest}
    confirmed -= set(last.banned)  # guard: banned-for-good
    ids = [member.peer_id for member in members]
    removed = {*removed, *guilty, *shrunk}
    voters, seats = next_voters(last, confirmed, removed, min_peers, invites or {})
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
        seats=seats,
        absent={p: last.absent.get(p, 0) + 1 for p in last.voters if p not in ids and p not in removed},
        banned=(*last.banned, *sorted(guilty)),
        shared=digest,
        slots=decide_slots(last, members, results),
        shrunk=tuple(shrunk),
        cursor=last.cursor + sum(map(len, shares(last).values())),
        revision=newest_read(last, results),
    )


def confirmed_shared(last: Body, results: Iterable[Result], shrunk: Collection[str] = ()) -> str:
    """Return the digest of `shared` that enough voters confirm; empty if none is."""
    confirmed: dict[str, set[str]] = defaultdict(set)
    for each in results:
        confirmed[each.digests.get(SHARED, "")].add(each.peer_id)
    enough = (each for each, peers in confirmed.items() if is_enough(last, peers, shrunk))  # guard: shared-confirmed
    return next(enough, "")


def is_enough(last: Body, peers: Collection[str], shrunk: Collection[str] = ()) -> bool:
    """Tell whether the results of some peers are enough for `shared`: of a quorum, or, if voters are named absent, of
    more than half of the others."""
    if not shrunk:
        return last.is_quorum(peers)
    rest = set(last.voters) - set(shrunk)
    return 2 * len(rest & set(peers)) > len(rest)


def newest_read(last: Body, results: Iterable[Result]) -> Revision:
    """Return the newest revision of the manifest that a quorum has read; the last body's if that is the newest.

    A revision that fewer voters have read may be withheld from the others.
    """
    stated: dict[Revision, set[str]] = defaultdict(set)
    for each in results:
        stated[each.revision].add(each.peer_id)
    read = [revision for revision, peers in stated.items() if last.is_quorum(peers)]  # guard: revision-read
    return max([last.revision, *read], key=lambda each: each.number)  # guard: newer-revision


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
    if body.shrunk and (not is_named_once or last.is_quorum(rest)):  # guard: real-half
        return "it names voters absent without need"
    return ""


def removed_voters(last: Body, body: Body) -> set[str]:
    """Return the voters that a body removes, those that it names absent aside."""
    return set(last.voters) - set(body.voters) - set(body.shrunk)


def check_certificate(certificate: Certificate, last: Body, keys: Keys) -> str:
    """Return why a certificate does not certify the successor of a body whose voters are trusted."""
    body = certificate.body
    if body.previous != last.digest or body.round != last.round + 1:
        return "it does not extend the last certificate"
    if reason := check_shrunk(body, last):
        return reason
    is_enough_for = partial(is_certified, last, shrunk=body.shrunk)
    return _check_votes(certificate, is_enough_for, set(last.voters) - set(body.shrunk), keys)


def check_skip(certificate: Certificate, trusted: Body, keys: Keys) -> str:
    """Return why a later certificate may not be taken over at once: more than half of the trusted voters must sign."""
    if certificate.body.round <= trusted.round or certificate.body.run != trusted.run:
        return "it is not later"
    return _check_votes(certificate, trusted.is_quorum, set(trusted.voters), keys)


def _check_votes(
    certificate: Certificate, is_certified: Callable[[Collection[str]], bool], voters: Collection[str], keys: Keys
) -> str:
    votes = {vote.peer_id: vote for vote in certificate.votes() if vote.peer_id in voters}
    signed = {peer for peer in votes if votes[peer].is_signed(keys)} if is_certified(votes.keys()) else votes.keys()
    return "" if is_certified(signed) else f"{len(signed)} of {len(voters)} voters have signed, which is too few"
