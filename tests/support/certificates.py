"""One round with voters, to test certificates and votes on: the documents that honest peers would sign."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.history_nodes import HmacKeys
from spes_p2p.swarm.certificate import (
    Body,
    Certificate,
    Confirmation,
    GiveUp,
    Goodbye,
    Keys,
    MemberEntry,
    Proof,
    Proposal,
    SlotState,
    Vote,
    make_body,
    roster_digest,
    vote_for,
)
from spes_p2p.swarm.certificate_checks import guilty_voters
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.votes import Ballot, Own, Rules, Voter

MIN_PEERS = 4
SHRINK_SECONDS = 600.0
ROUND_SECONDS = 1000.0
RULES = Rules(
    min_peers=MIN_PEERS,
    round_seconds=ROUND_SECONDS,
    attempt_seconds=12.0,
    confirmation_seconds=4.0,
    shrink_seconds=SHRINK_SECONDS,
)
ENDED = 1000.0
"""DHT time at which the open round's training ends."""
PEERS = tuple(sorted(hashed_peer_id(f"peer {index}".encode()) for index in range(100)))


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def changed(document: Any, **changes: Any) -> Any:
    """Return a copy with other fields, validated; a body's copy has its own digest."""
    return type(document).model_validate(document.model_dump() | changes)


def last_body(voters: Sequence[str] = PEERS[:5], **changes: Any) -> Body:
    """Return the body of round 7, whose successor is voted for."""
    fields = {
        "run": "run",
        "founder": PEERS[0],
        "round": 7,
        "previous": digest("round 6"),
        "ends_at": ENDED,
        "voters": tuple(voters),
        "slots": (SlotState(round=3, digest=digest("slot 0")), SlotState(round=0)),
    }
    return Body(**fields | changes)


@dataclass
class Round:
    """The round after `last`, and what its honest peers sign."""

    last: Body = field(default_factory=last_body)
    roster: Sequence[str] = ()
    """Members; the voters by default."""
    keys: dict[str, Keys] = field(default_factory=dict)
    """HMAC keys by default."""

    def __post_init__(self) -> None:
        self.members = tuple(
            MemberEntry(peer_id=peer, tokens=100, slots=(0, 1)) for peer in sorted(self.roster or self.last.voters)
        )

    def key(self, peer: str) -> Keys:
        return self.keys.setdefault(peer, HmacKeys(peer))

    def voter(self, peer: str, ballot: Ballot | None = None, save: Any = lambda ballot: None, now: float = 2000.0):
        return Voter(self.key(peer), self.last, ballot, save, RULES, lambda: now)

    def confirm(self, peer: str, attempt: int = 0, **changes: Any) -> Confirmation:
        fields = {
            "run": self.last.run,
            "round": self.last.round + 1,
            "previous": self.last.digest,
            "attempt": attempt,
            "peer_id": peer,
            "roster": roster_digest(self.members),
        }
        slots = changes.pop("slots", {"0": digest("new 0"), "1": digest("new 1")})
        digests = {"shared": changes.pop("shared", digest("shared"))} | {f"slot-{n}": slots[n] for n in slots}
        return Confirmation(**fields | {"digests": digests} | changes).signed(self.key(peer))

    def confirmations(self, attempt: int = 0, **changes: Any) -> tuple[Confirmation, ...]:
        return tuple(self.confirm(member.peer_id, attempt, **changes) for member in self.members)

    def body(self, confirmations: Sequence[Confirmation] | None = None, **changes: Any) -> Body:
        confirmations = self.confirmations() if confirmations is None else confirmations
        made = make_body(
            *(self.last, self.members, confirmations),
            **{"ends_at": 2100.0, "min_peers": MIN_PEERS} | changes,
        )
        assert made is not None
        return made

    def propose(
        self,
        attempt: int = 0,
        confirmations: Sequence[Confirmation] | None = None,
        *,
        body: Body | None = None,
        give_ups: Sequence[GiveUp] = (),
        removed: Collection[str] = (),
        shrunk: Sequence[str] = (),
        author: str = "",
        **justified: Any,
    ) -> Proposal:
        confirmations = self.confirmations(attempt) if confirmations is None else tuple(confirmations)
        guilty = guilty_voters(justified.get("proofs", ()), self.last)
        body = body or self.body(confirmations, removed=removed, guilty=guilty, shrunk=shrunk)
        return Proposal(
            attempt=attempt,
            body=body,
            confirmations=confirmations,
            vote=self.vote(author or self.last.proposer(attempt), body, attempt),
            give_ups=tuple(give_ups),
            **justified,
        )

    def vote(self, peer: str, body: Body, attempt: int = 0) -> Vote:
        return vote_for(body, attempt, peer).signed(self.key(peer))

    def give_up(self, peer: str, attempt: int = 0, voted: Proposal | None = None) -> GiveUp:
        stated: dict[str, Any] = {}
        if voted is not None:
            stated = {"voted": voted.attempt, "body": voted.body.digest, "proposed": voted.vote.signature}
        return GiveUp(
            run=self.last.run,
            round=self.last.round + 1,
            previous=self.last.digest,
            attempt=attempt,
            peer_id=peer,
            **stated,
        ).signed(self.key(peer))

    def proof(self, peer: str) -> Proof:
        """Return the proof that a peer has signed two bodies of one attempt."""
        one, other = (self.vote(peer, self.body(ends_at=ends_at)) for ends_at in (2000.0, 2001.0))
        return Proof(vote=one, other=other)

    def goodbye(self, peer: str, **changes: Any) -> Goodbye:
        fields = {"run": self.last.run, "round": self.last.round + 1, "attempt": 0, "peer_id": peer}
        return Goodbye(**fields | changes).signed(self.key(peer))

    def certify(self, body: Body, signers: Collection[str], attempt: int = 0) -> Certificate:
        signatures = {peer: self.vote(peer, body, attempt).signature for peer in signers}
        return Certificate(body=body, attempt=attempt, signatures=signatures)

    def own(self, peer: str, attempt: int = 0, gone: Collection[str] = (), *, may_shrink: bool = False) -> Own:
        """Return what an honest peer knows of the attempt."""
        return Own(self.confirm(peer, attempt), lambda other: other in gone, may_shrink)
