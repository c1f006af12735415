"""One round with voters: the documents that honest peers sign in it, and one peer that takes part by messages alone."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from benchmarks.history_peers import HmacKeys
from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.agreement import Agreement
from spes_p2p.swarm.certificate import (
    Body,
    Certificate,
    Goodbye,
    Keys,
    MemberEntry,
    Result,
    SlotState,
    Vote,
    roster_digest,
    vote_for,
)
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.next_body import make_body
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.part import Outcome, Part, Rules
from spes_p2p.swarm.promises import Promises
from spes_p2p.swarm.proposal import (
    Entered,
    Entry,
    Meeting,
    Proof,
    Proposal,
    Turn,
    check_proposal,
    digest_of,
    guilty_voters,
)
from spes_p2p.swarm.roster import Member, Roster

MIN_PEERS = 4
RULES = Rules(
    min_peers=MIN_PEERS,
    round_seconds=1000.0,
    meeting_seconds=2.0,
    averaging_seconds=3.0,
    results_seconds=4.0,
    shrink_seconds=600.0,
)
ENDED = 1000.0
"""Virtual time at which the open round's training ends."""
PEERS = tuple(sorted(hashed_peer_id(f"peer {index}".encode()) for index in range(100)))
T = TypeVar("T")


def digest(text: object) -> str:
    return hashlib.sha256(str(text).encode()).hexdigest()


def changed(document: Any, **changes: Any) -> Any:
    """Return a copy with other fields, validated; a body's copy has its own digest."""
    return type(document).model_validate(document.model_dump() | changes)


def last_body(voters: Sequence[str] = PEERS[:5], **changes: Any) -> Body:
    """Return the body of round 20, whose successor is voted for."""
    fields = {
        "run": "run",
        "founder": PEERS[0],
        "round": 20,
        "previous": digest("round 19"),
        "ends_at": ENDED,
        "voters": tuple(voters),
        "seats": dict.fromkeys(voters, ""),
        "slots": (SlotState(round=3, digest=digest("slot 0")), SlotState(round=0)),
    }
    return Body(**fields | changes)


def reopened(body: Body, letters: str = "0") -> Body:
    """Return a body that a user has gone back to."""
    return body.model_copy(update={"generation": f"{body.round}:{letters * 32}"})


def members(*peers: str) -> tuple[MemberEntry, ...]:
    """Return the members of a last body: peers that it knows."""
    return tuple(MemberEntry(peer_id=peer, tokens=1) for peer in peers)


@dataclass
class Round:
    """The round after `last`, and what its honest peers sign."""

    last: Body = field(default_factory=last_body)
    present: Sequence[str] = ()
    """Members; the voters by default."""
    keys: dict[str, Keys] = field(default_factory=dict)
    """HMAC keys by default."""

    def __post_init__(self) -> None:
        self.roster = Roster([self.member(peer) for peer in self.present or self.last.voters], self.last)
        self.members = tuple(
            MemberEntry(peer_id=peer, tokens=100, slots=(0, 1)) for peer in sorted(self.present or self.last.voters)
        )

    def member(self, peer: str, **changes: Any) -> Member:
        fields = {
            "peer_id": peer,
            "round": self.last.round,
            "previous": self.last.digest,
            "tokens": 100,
            "slots": (0, 1),
            "tokens_per_second": 20.0,
            "ready_at": ENDED,
            "sync_seconds": 1.0,
        }
        return Member(**fields | changes)

    def key(self, peer: str) -> Keys:
        return self.keys.get(peer) or HmacKeys(peer)

    def _of(self, peer: str, attempt: int) -> dict[str, Any]:
        last = self.last
        return {
            "run": last.run,
            "round": last.round + 1,
            "previous": last.digest,
            "attempt": attempt,
            "peer_id": peer,
        }

    def result(self, peer: str, attempt: int = 0, **changes: Any) -> Result:
        slots = changes.pop("slots", {0: digest("new 0"), 1: digest("new 1")})
        digests = {"shared": changes.pop("shared", digest("shared"))} | {f"slot-{n}": slots[n] for n in slots}
        fields = self._of(peer, attempt) | {"roster": roster_digest(self.members), "digests": digests}
        return Result(**fields | changes).signed(self.key(peer))

    def results(self, attempt: int = 0, **changes: Any) -> tuple[Result, ...]:
        return tuple(self.result(member.peer_id, attempt, **changes) for member in self.members)

    def entry(self, peer: str, attempt: int = 1, voted: Proposal | None = None, **changes: Any) -> Entry:
        stated = {} if voted is None else {"voted": voted.attempt, "body": voted.body.digest}
        fields = self._of(peer, attempt) | {"member": digest_of(self.member(peer))} | stated
        return Entry(**fields | changes).signed(self.key(peer))

    def entered(self, peer: str, attempt: int = 1, voted: Proposal | None = None, **changes: Any) -> Entered:
        entry = self.entry(peer, attempt, voted, **changes)
        return Entered(entry=entry, member=self.member(peer), proposal=voted)

    def meeting(self, attempt: int = 0) -> Meeting:
        entered = tuple(self.entered(member.peer_id, attempt) for member in self.roster)
        return Meeting(previous=self.last.digest, attempt=attempt, entered=entered)

    def body(self, results: Sequence[Result] | None = None, **changes: Any) -> Body:
        fields = {"ends_at": ENDED + 100, "min_peers": MIN_PEERS}
        made = make_body(self.last, self.members, self.results() if results is None else results, **fields | changes)
        assert made is not None
        return made

    def turn(self, body: Body, attempt: int, entries: Sequence[Entry] | None = None, author: str = "") -> Turn:
        """Return an attempt at a body, by default with the entries of all voters that are not named absent."""
        if entries is None and attempt:
            entries = [self.entry(peer, attempt) for peer in self.last.voters if peer not in body.shrunk]
        vote = self.vote(author or self.last.leader(attempt), body, attempt)
        return Turn(vote=vote, entries=tuple(entries or ()))

    def propose(
        self,
        attempt: int = 0,
        results: Sequence[Result] | None = None,
        *,
        entries: Sequence[Entry] | None = None,
        body: Body | None = None,
        removed: Collection[str] = (),
        shrunk: Sequence[str] = (),
        ends_at: float = ENDED + 100,
        author: str = "",
        **justified: Any,
    ) -> Proposal:
        results = self.results(attempt) if results is None else tuple(results)
        guilty = guilty_voters(justified.get("proofs", ()), self.last)
        body = body or self.body(results, removed=removed, guilty=guilty, shrunk=shrunk, ends_at=ends_at)
        return Proposal(body=body, turns=(self.turn(body, attempt, entries, author),), results=results, **justified)

    def again(self, proposal: Proposal, attempt: int, entries: Sequence[Entry] | None = None) -> Proposal:
        """Return a proposal of the same body in a later attempt."""
        if entries is None:
            entries = [self.entry(peer, attempt, proposal) for peer in self.last.voters]
        turn = self.turn(proposal.body, attempt, entries)
        return proposal.model_copy(update={"turns": (*proposal.turns, turn)})

    def check(self, proposal: Proposal) -> str:
        return check_proposal(proposal, self.last, self.key(""), MIN_PEERS)

    def vote(self, peer: str, body: Body, attempt: int = 0) -> Vote:
        return vote_for(body, attempt, peer).signed(self.key(peer))

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


class Peer:
    """One peer's agreement about a round, and all that it posts and saves.

    Args:
        round: The round.
        me: The peer.
        promises: What lies on its disk; none of a new identity by default.
        gone: Peers whose leases have run out.
    """

    def __init__(
        self,
        round: Round,
        me: str,
        promises: Promises | None = None,
        gone: Collection[str] = (),
        *,
        is_new: bool = True,
    ) -> None:
        self.round, self.me, self.gone = round, me, set(gone)
        self.posted: list[tuple[str, Any]] = []
        self.saved: list[Promises] = []
        self.followed: list[Certificate] = []
        self.disk_error: OSError | None = None
        self.means: dict[VectorName, str] = {SHARED: digest("shared")}
        self.agreement = Agreement(
            round.key(me),
            self,
            Chain(round.last),
            RULES,
            promises,
            self._save,
            is_new=is_new,
            on_certificate=self.followed.append,
        )

    def _save(self, promises: Promises) -> None:
        if self.disk_error is not None:
            raise self.disk_error
        self.saved.append(promises)

    def post(self, peer: str, message: Any) -> None:
        self.posted.append((peer, message))

    def peers(self) -> Collection[str]:
        return [peer for peer in self.round.last.voters if peer != self.me]

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def is_gone(self, peer: str) -> bool:
        return peer in self.gone

    def part(self) -> Part:
        async def average(roster: Roster, attempt: int) -> Outcome:
            await asyncio.sleep(1)
            return Outcome(self.means, ends_at=ENDED + 100)

        return Part(self.round.member(self.me), average, lambda: self.round.last.voters, ENDED)

    def receive(self, *messages: Any, sender: str = "") -> None:
        """Take messages, by default from the leader of the first attempt."""
        for message in messages:
            self.agreement.receive(sender or self.round.last.leader(0), message)

    def sent(self, kind: type) -> list[Any]:
        """Return the messages of a kind that it has posted, each once."""
        found: list[Any] = []
        for _, message in self.posted:
            if isinstance(message, kind) and message not in found:
                found.append(message)
        return found

    def votes(self) -> list[str]:
        """Return the bodies that it has voted for."""
        return [vote.body for vote in self.sent(Vote) if vote.peer_id == self.me]


def virtually(work: Coroutine[Any, Any, T], at: float = ENDED) -> T:
    """Run a coroutine from some virtual time on; return what it returns."""
    loop = VirtualLoop()
    loop._now = at
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
