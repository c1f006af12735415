"""One peer's part in each round's decision: it enters a meeting, averages, states its result, votes, and follows.

    entry ─► leader ─► meeting ─► average ─► result ─► leader, voters ─► proposal ─► voters ─► votes ─► certificate
      ▲                            (averaging failed, nothing came in time, or a quorum is in a later attempt)
      └────────────────────────────────── next attempt ◄──┘

The last certificate names the leader of each attempt. Messages may be lost, repeated or late: what a decision needs is
sent again by the next attempt. No sockets, disk or threads here; a `Wire` posts messages, and the event loop has the
time, real or virtual.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from spes_p2p.swarm.attempts import Attempt, Attempts
from spes_p2p.swarm.certificate import (
    MAX_ATTEMPT,
    MAX_MEMBERS,
    Body,
    Certificate,
    Certificates,
    Goodbye,
    Keys,
    Question,
    Result,
    Revision,
    Vote,
    is_certified,
    is_enough,
    known_peers,
    max_strangers,
    roster_digest,
    strangers,
)
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.following import Following
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.part import LACKING_SECONDS, Outcome, Part, Rules, Wire
from spes_p2p.swarm.promises import Promises
from spes_p2p.swarm.proposal import (
    NO_VOTE,
    VOTERS_ALONE_FROM,
    Entered,
    Entry,
    Lacking,
    Meeting,
    Message,
    Proof,
    Proposal,
    digest_of,
    newest_vote,
    promises_in,
)
from spes_p2p.swarm.roster import Member, Roster, invited
from spes_p2p.swarm.voter import Voter

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.0
"""Time after which a peer that has heard nothing of a meeting enters it again: its entry may have come too early."""
PASSED_SECONDS = 2.0
"""A voter refuses a body that leaves out what it has had for so long."""
MAX_SLOWER = 20
"""Largest multiple of the usual times to wait for."""
MAX_FAILED = 5
"""Attempts at a round in which this peer's own averaging fails before it gives its work up."""
OUT_ROUNDS = 8
"""Rounds for which a peer without a vote that was lost in an attempt enters no meeting."""


class Agreement:
    """One peer's part in the decision of each round.

    Args:
        keys: This peer's key.
        wire: Messages, leases and DHT time.
        chain: The certificates so far; extended here.
        rules: The run's numbers.
        promises: What lies on disk of an earlier process; None if it is missing, copied or restored.
        save: Writes promises to disk; returns when they are durable.
        is_new: Whether this identity can have made no promise in this run yet.
        on_certificate: Told of each certificate that this peer follows. It must be durable on return, and replaces
            those of its round and later.
        guests: Checks invites; None where none is asked for.
    """

    def __init__(
        self,
        keys: Keys,
        wire: Wire,
        chain: Chain,
        rules: Rules,
        promises: Promises | None,
        save: Callable[[Promises], None],
        *,
        is_new: bool = False,
        on_certificate: Callable[[Certificate], None],
        guests: GuestList | None = None,
    ) -> None:
        self._keys = keys
        self._wire = wire
        self._rules = rules
        self._on_certificate = on_certificate
        self._guests = guests
        self._me = keys.peer_id
        self.following = Following(keys, wire, rules, chain, self._followed)
        self.voter = Voter(keys, wire, rules, self.following, promises, save, is_new=is_new, guests=guests)
        self.revision = Revision()
        """The newest revision of the manifest that this peer has read."""
        self.voter.mute = lambda seconds: self.attempts.mute(self._loop_time() - seconds)
        self._statements = self.voter.statements
        self._out_until: dict[str, int] = {}
        """Round from which a peer without a vote that was lost in an attempt may enter meetings again."""
        self._changed = asyncio.Event()
        self._open_round()

    @property
    def chain(self) -> Chain:
        """The certificates that this peer follows."""
        return self.following.chain

    # ------------------------------------------------------------------ a round, attempt by attempt

    async def settle(self, part: Part) -> Body | None:
        """Meet, average and agree, attempt by attempt, until the round after the last certificate is decided.

        Returns:
            The body of the next round; None if there was nothing to decide, averaging failed too often, or the chain
            has left the certificate that this round was to follow.
        """
        last, failed = self.chain.last, 0
        self.following.ask_next()
        while self.chain.last.digest == last.digest and not self.voter.has_left:
            attempt = self.attempts.number
            outcome = await self._attempt(last, attempt, part)
            failed += outcome is not None and SHARED not in (outcome.digests or {})
            is_over = outcome is not None and (outcome.digests is None or failed == MAX_FAILED)
            if is_over and self.chain.last.digest == last.digest:
                self._go_to(max(attempt + 1, self.attempts.number))
                return None
            if not self._is_over(last, attempt):
                self.following.ask_next()
                if (body := self.voter.stand_in()) is not None:
                    log.warning("round %d: no voter answers; those who voted before go on", body.round + 1)
                    self.following.follow(self.chain.certificates[-1].model_copy(update={"body": body}))
                    return None
                # Ahead of a quorum it would be alone in its attempts: it enters this one again, and leads it again.
                if self.attempts.of_quorum(self.voter.is_quorum) >= attempt:
                    self._go_to(min(attempt + 1, MAX_ATTEMPT))
        found = self.chain.body_at(last.round + 1)
        return found if found is not None and found.previous == last.digest else None

    async def _attempt(self, last: Body, attempt: int, part: Part) -> Outcome | None:
        """Take part in one attempt, until it is decided, or over for this peer; return what it has averaged."""
        leading, of = None, self.attempts.of(attempt)
        assert of is not None, f"attempt {attempt} is not open"
        if last.leader(attempt) == self._me:
            leading = asyncio.ensure_future(self._lead(last, attempt, of, part))
        try:
            return await self._take_part(last, attempt, of, part)
        finally:
            if leading is not None:
                leading.cancel()
                await asyncio.wait([leading])
                if not leading.cancelled():
                    leading.result()  # raises what has ended it: the disk may be full

    async def _take_part(self, last: Body, attempt: int, of: Attempt, part: Part) -> Outcome | None:
        rules, slower = self._rules, self._slower
        entered = self._enter(last, attempt, part.member)
        ends = self._loop_time() + max(0.0, part.closes_from - self._wire.now()) + 2 * slower * rules.meeting_seconds
        while not of.has_met and not self._is_over(last, attempt) and self._loop_time() < ends:
            if last.leader(attempt) == self._me:
                self._take_entered(self._me, entered)
            else:
                self._wire.post(last.leader(attempt), entered)
            await self.until(lambda: of.has_met or self._is_over(last, attempt), AGAIN_SECONDS)
            if not self.voter.can_lead(last.leader(attempt)):
                break
        if self._is_over(last, attempt):
            return None
        if not of.has_met:
            self.attempts.num_slow += self._loop_time() >= ends
            return None
        patience, outcome = slower * rules.decision_seconds, None
        if of.roster is not None and of.has_member(self._me) and self._me not in of.results:
            outcome = await part.average(of.roster, attempt)
            if outcome.digests is None:
                return outcome
            of.ends_at = outcome.ends_at
            if not self._is_over(last, attempt):
                self._state_result(last, attempt, of.roster, outcome)
            if SHARED not in outcome.digests:
                return outcome
        else:
            patience += rules.averaging_seconds
        self.attempts.num_slow += not await self.until(partial(self._is_over, last, attempt), patience)
        return outcome

    @property
    def _slower(self) -> float:
        """Multiple of the usual times to wait for: it grows in a round, until the slowest link is fast enough."""
        return min(1 + self.attempts.num_slow / 2, MAX_SLOWER)

    def _enter(self, last: Body, attempt: int, member: Member) -> Entered:
        """Return this peer's entry; its promise is on disk."""
        self.voter.enter(attempt)
        for guilty in last.voters:
            if guilty in self._statements.proofs:  # an earlier message may have been lost
                self._post_voters(self._statements.proofs[guilty])
        voted = self.voter.promises.voted
        entry = Entry(
            run=last.run,
            round=last.round + 1,
            previous=last.digest,
            attempt=attempt,
            peer_id=self._me,
            member=digest_of(member),
            voted=None if voted is None else voted.attempt,
            body="" if voted is None else voted.body.digest,
            is_lost=self.voter.is_lost,
        ).signed(self._keys)
        if attempt:
            for peer in sorted({*self._wire.peers(), *last.voters}):
                self._post(peer, Entered(entry=entry))
        return Entered(entry=entry, member=member, proposal=voted)

    def _state_result(self, last: Body, attempt: int, roster: Roster, outcome: Outcome) -> None:
        digests = outcome.digests or {}
        result = Result(
            run=last.run,
            round=last.round + 1,
            previous=last.digest,
            attempt=attempt,
            peer_id=self._me,
            roster=roster_digest(roster.entries),
            digests={str(name): digest for name, digest in digests.items()} if SHARED in digests else {},
            revision=self.revision,
            lost=outcome.lost,
        ).signed(self._keys)
        self._take_result(self._me, result)
        self._post_voters(result)

    def _loop_time(self) -> float:
        return asyncio.get_running_loop().time()

    def look(self) -> None:
        """Have what waits in `until` look again."""
        self._changed.set()

    async def until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Wait until something that happened makes `done` true, at most so long; return whether it is."""
        ends = self._loop_time() + seconds
        while not done() and (left := ends - self._loop_time()) > 0:
            self._changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._changed.wait()
            except TimeoutError:
                break
        return done()

    # ------------------------------------------------------------------ leading

    async def _lead(self, last: Body, attempt: int, of: Attempt, part: Part) -> None:
        entered = await self._gather(last, attempt, of.entered, part)
        if self._is_over(last, attempt):
            return
        absent = self.voter.absent()
        promised = promises_in([each.entry for each in entered], last, absent)
        if not self.voter.is_quorum({each.peer_id for each in promised}):
            return
        entries = tuple(promised) if attempt else ()
        voted = NO_VOTE if absent else newest_vote(promised)
        for each in entered:
            if each.proposal is not None and (each.proposal.attempt, each.proposal.body.digest) == voted:
                turn = self.voter.turn(each.proposal.body, attempt, entries)
                return self._offer(of, each.proposal.model_copy(update={"turns": (*each.proposal.turns, turn)}))
        entered = self.attempts.without_lost(entered, absent)
        of.roster = roster = self._roster_of(entered, last)
        shown = [each.model_copy(update={"proposal": None}) for each in entered]
        of.meeting = Meeting(previous=last.digest, attempt=attempt, entered=tuple(shown))
        for each in entered:
            self._post(each.entry.peer_id, of.meeting)
        self._changed.set()
        results = await self._collect(last, attempt, of.results, roster)
        if self._is_over(last, attempt):
            return
        ends_at = of.ends_at or self._wire.now() + self._rules.round_seconds
        made = self.voter.proposal(attempt, roster, entries, results, absent, ends_at)
        if made is not None:
            self._offer(of, made)

    async def _gather(self, last: Body, attempt: int, there: Mapping[str, Entered], part: Part) -> list[Entered]:
        """Wait for a quorum, and for those expected as long as a meeting lasts; return the entries."""

        def has_quorum() -> bool:
            promised = promises_in([each.entry for each in there.values()], last, self.voter.absent())
            return self.voter.is_quorum({each.peer_id for each in promised})

        def is_complete() -> bool:
            expected = {peer for peer in part.expected() if self._may_enter(peer, attempt)}
            return has_quorum() and expected <= there.keys()

        seconds = max(0.0, part.closes_from - self._wire.now()) + self._rules.meeting_seconds
        if not await self.until(is_complete, seconds):
            await self.until(has_quorum, 2 * self._slower * self._rules.meeting_seconds)
        return [there[peer] for peer in sorted(there)]

    def _roster_of(self, entered: Sequence[Entered], last: Body) -> Roster:
        return invited(Roster([each.member for each in entered if each.member is not None], last), self._guests)

    async def _collect(
        self, last: Body, attempt: int, held: Mapping[str, Sequence[Result]], roster: Roster
    ) -> list[Result]:
        """Return the members' results of an attempt, once all are there or their time is up."""
        members, digest = roster.groups[SHARED], roster_digest(roster.entries)

        def results() -> list[Result]:
            return [result for peer in members for result in held.get(peer, ()) if result.roster == digest]

        def has_enough() -> bool:
            done = {result.peer_id for result in results() if result.digests}
            return self._me in done or is_enough(last, done)

        def has_all() -> bool:
            return {result.peer_id for result in results()} == set(members)

        await self.until(has_enough, self._rules.averaging_seconds)
        if not await self.until(has_all, self._rules.results_seconds):
            missing = sorted(set(members) - {result.peer_id for result in results()})
            self._post_voters(Lacking(previous=last.digest, attempt=attempt, peers=tuple(missing)))
            await self.until(has_all, LACKING_SECONDS * self._slower)
        return [result for result in results() if result.digests]

    def _offer(self, of: Attempt, proposal: Proposal) -> None:
        """Send a proposal to the voters, and vote for it."""
        if reason := self.voter.fault(proposal) or self._refusal(of, proposal):
            log.info("round %d: not proposing: %s", proposal.body.round, reason)
            return
        vote = self.voter.vote(proposal)
        of.proposals[proposal.body.digest] = proposal
        self._post_voters(proposal)
        self._take_vote(self._me, vote)

    def _refusal(self, of: Attempt, proposal: Proposal) -> str:
        """Return why this peer does not vote for a proposal without a fault."""
        now = self._loop_time()
        return self.voter.refusal(proposal, of.results_before(now), of.results_before(now - PASSED_SECONDS))

    # ------------------------------------------------------------------ attempts

    def _open_round(self) -> None:
        self.attempts = Attempts(self.chain.last, self._me, self.voter.promises.next_attempt, self._loop_time())
        self._changed.set()

    def _followed(self, certificate: Certificate, last: Body) -> None:
        try:
            self._on_certificate(certificate)
        finally:  # a full disk leaves no half of a round
            try:
                self.voter.open_round(certificate, last.ends_at if certificate.body.previous == last.digest else 0.0)
            finally:
                self._open_round()

    def go_back(self, *, is_chosen: bool = True) -> None:
        """Open the round after the last certificate of the chain, which was cut, by the user's choice or another's."""
        try:
            self.voter.go_back(is_chosen=is_chosen)
        finally:
            self._open_round()

    def _may_enter(self, peer: str, attempt: int) -> bool:
        last = self.chain.last
        if peer in last.voters:
            return True
        is_out = self._out_until.get(peer, 0) > last.round  # guard: self._out_until.get(peer, 0) > last.round -> False
        return attempt < VOTERS_ALONE_FROM and not is_out

    def _is_over(self, last: Body, attempt: int) -> bool:
        return self.chain.last.digest != last.digest or self.attempts.number != attempt or self.voter.has_left

    def _go_to(self, attempt: int) -> None:
        self.attempts.go_to(attempt)
        self._changed.set()

    def _note_attempt(self, peer: str, attempt: int) -> None:
        """Follow the voters to a later attempt once a quorum is there."""
        self.attempts.state(peer, attempt, self._loop_time())
        newest = self.attempts.of_quorum(self.voter.is_quorum)
        if newest > self.attempts.number:  # guard: never
            self._go_to(newest)

    # ------------------------------------------------------------------ entries, meetings, results

    def _take_entered(self, sender: str, entered: Entered) -> None:
        entry, last = entered.entry, self.chain.last
        if entry.previous != last.digest:
            return self.following.meet(sender, entry.round - 1, entry.previous, enters=entered.member is not None)
        peer, attempt = entry.peer_id, entry.attempt
        if self.voter.has_left and peer in last.voters:  # the goodbye may have been lost
            self._post(peer, self._goodbye())
        if not entry.is_signed(self._keys):  # guard: never
            return
        if peer in last.voters:
            self._watch(entry)
            self._note_attempt(peer, attempt)
            (self.voter.forgetful.add if entry.is_lost else self.voter.forgetful.discard)(peer)
        of = self.attempts.of(attempt)
        if of is None or last.leader(attempt) != self._me or not self._may_enter(peer, attempt):
            return
        if of.meeting is not None:  # it is late, and waits for the next attempt, or for the certificate
            return self._post(peer, of.meeting)
        if entered.member is None or of.entered.get(peer) == entered:  # a bare one tells the attempt
            return
        stated = self.attempts.of(entry.voted) if entry.voted is not None else None
        known = stated.proposals.get(entry.body) if stated is not None else None
        if reason := self.voter.entry_fault(entered, known):
            log.info("round %d: %s does not enter attempt %d: %s", entry.round, peer[-6:], attempt, reason)
        elif len(of.entered) < MAX_MEMBERS and self._roster_of([entered], last):  # guard: operand
            of.entered[peer] = entered
            for other in strangers(last, of.entered)[max_strangers(len(last.voters)) :] if last.round else ():
                del of.entered[other]  # the first to come would keep all others out  # guard: skip
            self._changed.set()

    def _take_meeting(self, sender: str, meeting: Meeting) -> None:
        last, attempt = self.chain.last, meeting.attempt
        of = self.attempts.of(attempt)
        if of is None or of.roster is not None or meeting.previous != last.digest or sender != last.leader(attempt):
            return
        for each in meeting.entered:
            is_here = (each.entry.previous, each.entry.attempt) == (last.digest, attempt)
            if not is_here or not each.is_whole or not each.entry.is_signed(self._keys):  # guard: never
                log.info("round %d: the meeting of %s has a false entry", last.round + 1, sender[-6:])
                return
        of.roster = self._roster_of(meeting.entered, last)
        for each in meeting.entered:
            self._watch(each.entry)
            self._note_attempt(each.entry.peer_id, attempt)
        self._changed.set()

    def _take_result(self, sender: str, result: Result) -> None:
        last, peer = self.chain.last, result.peer_id
        if result.previous != last.digest:
            return self.following.meet(sender, result.round - 1, result.previous)
        of = self.attempts.of(result.attempt)
        if of is None or not (peer in last.known or of.has_member(peer)) or not of.lacks(result):
            return
        if not result.is_signed(self._keys):  # guard: never
            return
        of.add(result, self._loop_time())
        lost = result.lost
        is_lost = lost not in ("", peer) and peer in last.voters and self.attempts.lose(lost, peer)
        if is_lost and lost not in last.voters:
            self._out_until[lost] = last.round + OUT_ROUNDS
        if peer in of.lacking:
            self._post(last.leader(result.attempt), result)
        self._changed.set()

    def _take_lacking(self, sender: str, lacking: Lacking) -> None:
        """Pass the results on that a leader lacks, now and when they come."""
        last, of = self.chain.last, self.attempts.of(lacking.attempt)
        if of is None or lacking.previous != last.digest or sender != last.leader(lacking.attempt):
            return
        of.lacking = frozenset(lacking.peers)
        for peer in sorted(of.lacking & of.results.keys()):
            for result in of.results[peer]:
                self._post(sender, result)

    # ------------------------------------------------------------------ proposals and votes

    def _take_proposal(self, sender: str, proposal: Proposal) -> None:
        body, attempt, last = proposal.body, proposal.attempt, self.chain.last
        if body.previous != last.digest:
            return self.following.meet(sender, body.round - 1, body.previous)
        of = self.attempts.of(attempt)
        if of is not None and body.digest in of.proposals:
            return
        if reason := self.voter.fault(proposal):
            log.info("round %d: %s proposes what does not count: %s", body.round, sender[-6:], reason)
            return
        for entry in proposal.entries:
            self._watch(entry)
            self._note_attempt(entry.peer_id, entry.attempt)
        of = self.attempts.of(attempt)  # the entries may have opened it
        if of is None:
            return
        of.proposals[body.digest] = proposal
        self._changed.set()
        if reason := self._refusal(of, proposal):
            if self._me in last.voters:
                log.info("round %d: not voting for the proposal of %s: %s", body.round, sender[-6:], reason)
        else:
            vote = self.voter.vote(proposal)
            self._post_voters(vote)
            self._take_vote(self._me, vote)
        if self.chain.last.digest == last.digest:
            self._take_vote(sender, proposal.vote)

    def _take_vote(self, sender: str, vote: Vote) -> None:
        last, attempt, peer = self.chain.last, vote.attempt, vote.peer_id
        if vote.previous != last.digest:
            return self.following.meet(sender, vote.round - 1, vote.previous)
        if peer not in last.voters or not vote.is_signed(self._keys):  # guard: never
            return
        self._watch(vote)
        self._note_attempt(peer, attempt)
        of = self.attempts.of(attempt)
        if of is None:
            return
        if len(of.votes[peer]) < 2:
            of.votes[peer].setdefault(vote.body, vote)
        self._certify(of, attempt, vote.body)

    def _certify(self, of: Attempt, attempt: int, digest: str) -> None:
        """Follow a body once the votes certify it; its leader tells those that do not vote."""
        last, proposal = self.chain.last, of.proposals.get(digest)
        if proposal is None:
            return
        body = proposal.body
        voters = [p for p in last.voters if digest in of.votes[p]]
        if not is_certified(last, voters, body.shrunk):
            return
        certificate = Certificate(
            body=body,
            attempt=attempt,
            signatures={peer: of.votes[peer][digest].signature for peer in voters},
            goodbyes=proposal.goodbyes if body.shrunk else (),
        )
        if self.following.refusal(certificate, last):  # such as a vote of a voter that the body names absent
            return
        self.following.follow(certificate)
        if last.leader(attempt) == self._me:
            for peer in sorted(set(self._wire.peers()) - set(voters)):
                self._post(peer, Certificates(certificates=(certificate,)))

    # ------------------------------------------------------------------ proofs, goodbyes, messages

    def _watch(self, statement: Vote | Entry) -> None:
        """Keep a signed statement; tell the voters if it contradicts another one of its author."""
        if proof := self._statements.add(statement, self.chain.last):
            self.voter.keep(proof)
            self._post_voters(proof)

    def leave(self) -> None:
        """Say goodbye, so that the next certificate goes on without this voter, which does not vote from now on."""
        self.voter.has_left = True
        self._changed.set()
        self._post_voters(self._goodbye())

    def _goodbye(self) -> Goodbye:
        last = self.chain.last
        goodbye = Goodbye(run=last.run, round=last.round + 1, attempt=self.attempts.number, peer_id=self._me)
        return goodbye.signed(self._keys)

    def _post(self, peer: str, message: Message | Certificates | Question) -> None:
        if peer != self._me:
            self._wire.post(peer, message)

    def _post_voters(self, message: Message) -> None:
        for peer in self.chain.last.voters:
            self._post(peer, message)

    def receive(self, sender: str, message: Message | Certificates | Question) -> None:
        """React to a message of an authenticated peer."""
        match message:
            case Entered():
                self._take_entered(sender, message)
            case Meeting():
                self._take_meeting(sender, message)
            case Result():
                self._take_result(sender, message)
            case Lacking():
                self._take_lacking(sender, message)
            case Proposal():
                self._take_proposal(sender, message)
            case Vote():
                self._take_vote(sender, message)
            case Certificates():
                self.following.take(sender, message)
                self._watch_certificates(sender, message)
            case Question():
                self.following.answer(sender, message)
            case Proof():
                if proof := self._statements.convict(message, self.chain.last):
                    self.voter.keep(proof)
            case Goodbye():
                self._statements.take_goodbye(message, self.chain.last)

    def _watch_certificates(self, sender: str, message: Certificates) -> None:
        """Look for contradictions in the votes that certificates carry; of strangers that would be much work."""
        if sender in known_peers(self.chain.last):  # guard: always
            for certificate in message.certificates:
                for vote in certificate.votes():
                    self._watch(vote)
