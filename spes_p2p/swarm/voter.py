"""What one peer may sign: its promises, which voters it may go on without, and why it refuses a proposal."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence

from spes_p2p.swarm.certificate import (
    ABSENT_ROUNDS,
    Body,
    Certificate,
    Keys,
    Result,
    Vote,
    is_certified,
    max_leaving,
    removed_voters,
    roster_digest,
    vote_for,
)
from spes_p2p.swarm.following import Following
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.next_body import make_body
from spes_p2p.swarm.part import Rules, Wire
from spes_p2p.swarm.promises import Promises
from spes_p2p.swarm.proposal import (
    Entered,
    Entry,
    Proof,
    Proposal,
    Turn,
    check_proposal,
    counted_results,
    leaving_voters,
    left_out,
    revoked_peers,
)
from spes_p2p.swarm.roster import Roster
from spes_p2p.swarm.statements import Statements

log = logging.getLogger(__name__)


class Voter:
    """What one peer may sign.

    Args:
        keys: This peer's key.
        wire: Leases and DHT time.
        rules: The run's numbers.
        following: The certificates that it follows.
        promises: What lies on disk of an earlier process; None if it is missing, copied or restored.
        save: Writes promises to disk; returns when they are durable.
        is_new: Whether this identity can have made no promise in this run yet.
        guests: Checks invites; None where no seat is given by one.
    """

    def __init__(
        self,
        keys: Keys,
        wire: Wire,
        rules: Rules,
        following: Following,
        promises: Promises | None,
        save: Callable[[Promises], None],
        *,
        is_new: bool,
        guests: GuestList | None = None,
    ) -> None:
        self._keys = keys
        self._guests = guests
        self._me = keys.peer_id
        self._wire = wire
        self._rules = rules
        self._following = following
        self._save = save
        self.has_left = False
        last = following.chain.last
        # guard: None if is_new else wire.now() -> None
        self.promises = promises or Promises(lost_at=None if is_new else wire.now())
        self._lost_at = self.promises.lost_at
        """Set if promises are lost whose branch is unknown."""
        if promises is not None and promises.previous not in (last.digest, last.previous):  # guard: never
            self.promises = self._blank(lost_at=wire.now())
        elif self.promises.previous != last.digest:  # the process ended between the certificate and the promises
            self.promises = self._blank()
        self.statements = Statements(keys, self.promises.proofs)
        self.forgetful = {self._me} if self.is_lost else set()
        """Voters whose promises are lost, as they say."""
        self.mute: Callable[[float], set[str]] = lambda seconds: set()
        """Returns the voters that have not voted in the open round for so long, whether they are here or not."""

    # ------------------------------------------------------------------ promises

    @property
    def is_lost(self) -> bool:
        """Whether this peer's earlier promises are lost, so that it does not vote."""
        return self.promises.lost_at is not None

    def enter(self, attempt: int) -> None:
        """Promise to vote in no earlier attempt; the promise is on disk."""
        if self._me in self._following.chain.last.voters and attempt > (self.promises.attempt or 0):
            self._set(attempt=attempt)  # guard: skip

    def vote(self, proposal: Proposal) -> Vote:
        """Return this peer's vote, which is on disk before another peer hears of it."""
        vote = vote_for(proposal.body, proposal.attempt, self._me).signed(self._keys)
        self._set(**({"shrunk": vote} if vote.shrunk else {"voted": proposal}))  # guard: skip
        return vote

    def keep(self, proof: Proof) -> None:
        """Keep a proof on disk."""
        self._set(proofs=(*self.promises.proofs, proof)[-64:])  # guard: skip

    def _set(self, **changes: object) -> None:
        promises = self.promises.model_copy(update=changes)
        self._save(promises)
        self.promises = promises

    def _blank(self, **changes: object) -> Promises:
        last = self._following.chain.last
        blank = {"previous": last.digest, "round": last.round + 1, "attempt": None, "voted": None, "shrunk": None}
        return self.promises.model_copy(update=blank | changes)

    def open_round(self, certificate: Certificate, began_at: float) -> None:
        """Begin the round after a certificate with no promise, on disk too.

        Args:
            certificate: The newest one.
            began_at: DHT time at which the meeting of its round began; 0 if this peer has not followed that round.
        """
        lost_at = self.promises.lost_at
        if self._has_forgotten(certificate):
            log.warning("a certificate has a vote of this peer that it does not know; it votes again a round later")
            lost_at = self._wire.now()
        elif lost_at is not None and began_at > lost_at:
            lost_at = None  # the next round begins after this peer noticed, so it has promised nothing there
        self._renew(lost_at=lost_at)

    def _has_forgotten(self, certificate: Certificate) -> bool:
        """Return whether a certificate has a vote of this peer that its promises do not know."""
        newest = max((voted for voted, _ in self.promises.votes()), default=-1)
        if self.promises.previous == certificate.body.previous and newest >= certificate.attempt:
            return False
        mine = [vote for vote in certificate.votes() if vote.peer_id == self._me]
        return any(vote.is_signed(self._keys) for vote in mine)  # guard: return False

    def go_back(self, *, is_chosen: bool) -> None:
        """Begin the round after the last certificate of another chain.

        In a generation that the user has begun nothing is promised yet. If the disk has lost its promises, they may be
        of another generation to which all agree to go, and count as lost all the same.
        """
        self._renew(**({"lost_at": self._lost_at} if is_chosen else {}))  # guard: self._lost_at -> None

    def _renew(self, **changes: object) -> None:
        self.promises = self._blank(**changes)  # first: the disk may be full
        self.forgetful = {self._me} if self.is_lost else set()
        self.statements.open_round(self._following.chain.last)
        self._save(self.promises)

    # ------------------------------------------------------------------ who is needed

    @property
    def stands(self) -> bool:
        """Whether the open round is so late that a majority of the voters may be gone."""
        opened = max(self._following.chain.last.ends_at, self._following.opened_at)
        return self._wire.now() - opened > self._rules.shrink_seconds

    def absent(self) -> list[str]:
        """Return the voters to go on without, if the others are no quorum.

        Those that have said goodbye; once the round stands also those that are gone or mute, and those whose promises
        are lost. If there are no others, the first of these goes on alone.
        """
        voters = self._following.chain.last.voters
        rest = [peer for peer in voters if peer not in self.statements.goodbyes(self._following.chain.last)]
        if self.stands:
            mute = self.mute(self._rules.mute_seconds)
            rest = [peer for peer in rest if not self._wire.is_gone(peer) and peer not in mute]  # guard: operand
            rest = [peer for peer in rest if peer not in self.forgetful] or rest[:1]
        absent = [peer for peer in voters if peer not in rest]
        return [] if not rest or self._following.chain.last.is_quorum(rest) else absent

    def waits_for(self) -> tuple[str, ...]:
        """Return the voters that the open round waits for: the gone and, once it is late, the mute, if the others are
        no quorum."""
        last, seconds = self._following.chain.last, self._rules.round_seconds
        mute = self.mute(seconds) if self._wire.now() > last.ends_at + seconds else ()
        missing = [peer for peer in last.voters if self._wire.is_gone(peer) or peer in mute]
        return () if last.is_quorum(set(last.voters) - set(missing)) else tuple(missing)

    def stand_in(self) -> Body | None:
        """Return the last body with this peer among its voters, if it holds a seat and none of its own voters answers;
        otherwise None."""
        last, mute = self._following.chain.last, self.mute(self._rules.mute_seconds)
        other = last.stand_in() if self.stands else None
        answers = [peer for peer in last.voters if not self._wire.is_gone(peer) and peer not in mute]
        return other if other is not None and self._me in other.voters and not answers else None

    def is_quorum(self, peers: Collection[str]) -> bool:
        """Return whether some peers can certify the open round, as far as this peer knows."""
        return is_certified(self._following.chain.last, peers, self.absent())

    def can_lead(self, peer: str) -> bool:
        """Return whether a leader's meeting may come."""
        has_left = peer in self.statements.goodbyes(self._following.chain.last)
        is_lost = peer in self.forgetful and not self.stands
        return not (self._wire.is_gone(peer) or has_left or is_lost)

    # ------------------------------------------------------------------ what to propose

    def proposal(
        self,
        attempt: int,
        roster: Roster,
        entries: Sequence[Entry],
        results: Sequence[Result],
        absent: Sequence[str],
        ends_at: float,
    ) -> Proposal | None:
        """Return the proposal that the results of an attempt justify, which this peer leads; None if they justify none.

        Args:
            attempt: The attempt.
            roster: Its roster.
            entries: Of a quorum; none in attempt 0.
            results: All that have come, with digests; two of a member that has stated two.
            absent: Voters to go on without.
            ends_at: DHT time at which the next round's training should end.
        """
        last, proofs = self._following.chain.last, self.statements.proofs
        goodbyes = self.statements.goodbyes(last)
        removed = [] if absent else self._due_to_leave({member.peer_id for member in roster})
        guilty = [peer for peer in removed if peer in proofs]
        shown = {member.peer_id: member.invite for member in roster}
        body = make_body(
            last,
            roster.entries,
            counted_results(results),
            ends_at=ends_at,
            min_peers=self._rules.min_peers,
            invites=roster.invites,
            removed=removed,
            guilty=guilty,
            shrunk=absent,
            revoked=revoked_peers(last, self._guests),
        )
        return (
            None
            if body is None
            else Proposal(
                body=body,
                turns=(self.turn(body, attempt, entries),),
                results=tuple(results),
                invites={peer: shown[peer] for peer in body.seats if peer not in last.seats},
                goodbyes=tuple(goodbyes[peer] for peer in absent or removed if peer in goodbyes),
                proofs=tuple(proofs[peer] for peer in guilty),
            )
        )

    def turn(self, body: Body, attempt: int, entries: Sequence[Entry]) -> Turn:
        """Return what lets this peer propose a body in an attempt that it leads."""
        return Turn(vote=vote_for(body, attempt, self._me).signed(self._keys), entries=tuple(entries))

    def _due_to_leave(self, present: Collection[str]) -> list[str]:
        """Return the voters to remove: revoked or guilty ones, those that said goodbye, those that missed rosters and
        are gone."""
        last = self._following.chain.last
        missed = [
            peer
            for peer in last.voters
            if last.absent.get(peer, 0) + 1 >= ABSENT_ROUNDS and peer not in present and self._wire.is_gone(peer)
        ]
        revoked = [peer for peer in last.voters if peer in revoked_peers(last, self._guests)]
        due = dict.fromkeys((*revoked, *self.statements.proofs, *self.statements.goodbyes(last), *missed))
        return [peer for peer in due if peer in last.voters][: max_leaving(len(last.voters))]

    # ------------------------------------------------------------------ why a proposal is refused

    def fault(self, proposal: Proposal) -> str:
        """Return why a proposal must neither be voted for nor stated: every voter would refuse to vote for it again."""
        last, body = self._following.chain.last, proposal.body
        seconds = body.ends_at - self._wire.now()
        if seconds > 2 * self._rules.round_seconds:  # the bound moves on with the time  # guard: never
            return f"the next round would take {seconds:.0f} s"
        if not all(self.statements.counts(proof, last) for proof in proposal.proofs):  # guard: never
            return "a proof is of a round long ago"
        return check_proposal(proposal, last, self._keys, self._rules.min_peers, self._guests)

    def entry_fault(self, entered: Entered, known: Proposal | None) -> str:
        """Return why an entry must not count: otherwise an invented vote could displace a certified body.

        Args:
            entered: The entry, with the proposal of the vote that it states.
            known: A proposal of the same body in the same attempt that this peer has found no fault with.
        """
        entry, proposal = entered.entry, entered.proposal
        if not entered.is_whole:
            return "its roster entry is not the one that it signed"
        if entry.voted is None:
            return ""
        if entry.peer_id not in self._following.chain.last.voters:
            return "it has no vote"
        if proposal is None or (proposal.attempt, proposal.body.digest) != (entry.voted, entry.body):
            return "the proposal that it voted for is missing"
        if proposal.body.shrunk or entry.voted >= entry.attempt:
            return "its vote is none that it may state"
        return "" if proposal == known else self.fault(proposal)  # guard: return ""

    def refusal(self, proposal: Proposal, results: Collection[Result], held: Collection[Result]) -> str:
        """Return why this peer does not vote for a proposal that others may vote for.

        Args:
            proposal: It has no fault.
            results: Those of its attempt that this peer has.
            held: Those of them that it has had for so long that the leader must have them.
        """
        attempt, body, promises, last = proposal.attempt, proposal.body, self.promises, self._following.chain.last
        is_sole = set(last.voters) - set(body.shrunk) == {self._me}
        if self.has_left or self._me not in last.voters:
            return "this peer has no vote"
        if self.is_lost and not is_sole:  # guard: never
            return "this peer's promises are lost"
        if body.previous != promises.previous:
            return f"round {promises.round} of another branch is open here"
        if promises.attempt is not None and attempt < promises.attempt:  # guard: never
            return f"this peer has entered attempt {promises.attempt}"
        for voted, digest in promises.votes():
            if attempt < voted or (attempt == voted and body.digest != digest):  # guard: never
                return f"this peer has voted for another body in attempt {voted}"
        if reason := self._untimely(proposal):
            return reason
        if proposal.is_repeated:
            return ""  # it may have been certified, whatever is true now
        if reason := left_out(proposal, last, held):
            return reason
        roster = roster_digest(body.members)
        mine = [each.digests for each in results if each.peer_id == self._me and each.roster == roster]
        if any(digests.get(SHARED, body.shared) != body.shared for digests in mine):  # guard: never
            return "this peer's own result differs"
        return ""

    def _untimely(self, proposal: Proposal) -> str:
        """Return why a body is not of this time, or goes on without voters that are here."""
        body, last = proposal.body, self._following.chain.last
        returned = {each.peer_id for each in proposal.goodbyes if self.statements.is_over(each)}  # guard: never
        leaving = leaving_voters(proposal, last, self._guests) - returned
        here = {peer for peer in set(body.shrunk) - leaving if not self._wire.is_gone(peer)}
        here -= self.forgetful | self.mute(self._rules.mute_seconds)
        if here or (set(body.shrunk) - leaving and not self.stands):  # guard: never
            return "the absent voters may come back"
        if proposal.is_repeated:
            return ""
        seconds = self._wire.now() - body.ends_at
        if seconds > self._rules.round_seconds:  # guard: never
            return f"the next round would have ended {seconds:.0f} s ago"
        removed = removed_voters(last, body) - leaving
        if here := {peer for peer in removed if not self._wire.is_gone(peer)}:  # guard: never
            return f"{min(here)} is here, and was removed"
        return ""
