"""One peer's part in the decision of each round: when it confirms, proposes, votes, gives up, and changes the branch.

`Decider` has no threads, sockets or clock. It reacts to messages and timers of a `Network`, real or simulated. Messages
may be lost, repeated or late: what a decision needs is sent again by the next attempt.

    averaged ─► confirmation ─► proposer ─► proposal ─► voters ─► votes ─► certificate ─► all
       ▲                                                             (nothing within the attempt's time)
       └──────────── next attempt ◄── a quorum of give-ups ◄── give-up to all ◄──┘
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from spes_p2p.swarm.certificate import (
    ABSENT_ROUNDS,
    MAX_ATTEMPT,
    MAX_MEMBERS,
    MAX_SENT,
    Body,
    Certificate,
    Certificates,
    Confirmation,
    GivenUp,
    GiveUp,
    Goodbye,
    Keys,
    MemberEntry,
    Message,
    Point,
    Proof,
    Proposal,
    Question,
    Revision,
    Vote,
    known_peers,
    make_body,
    max_leaving,
    preferred,
    required_votes,
    roster_digest,
)
from spes_p2p.swarm.certificate_checks import newest_voted
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.votes import WATCHED_ROUNDS, Ballot, Network, Own, Refusal, Rules, Statements, Voter

log = logging.getLogger(__name__)

MAX_SLOWER = 20
"""Largest multiple of an attempt's time that a later attempt is given."""
MIN_SECONDS_APART = 0.5
"""Certificates that come closer together were made in advance, and all but the first are not in time."""


class Decider:
    """One peer's part in the decision of each round.

    Args:
        keys: This peer's key.
        network: Messages, timers and leases.
        chain: The certificates so far; extended here.
        rules: The run's numbers.
        ballot: This peer's promises made by an earlier process; None for a new identity.
        save: Writes a ballot to disk; returns when it is durable.
        on_attempt: Told that attempt 1 or a later one begins: average anew, and report by `averaged`.
        on_certificate: Told of each certificate that this peer follows. It must be durable on return, and replaces
            those of its round and later; otherwise a restarted voter may vote in a round that it has seen certified.
    """

    def __init__(
        self,
        keys: Keys,
        network: Network,
        chain: Chain,
        rules: Rules,
        ballot: Ballot | None,
        save: Callable[[Ballot], None],
        *,
        on_attempt: Callable[[int], None] = lambda attempt: None,
        on_certificate: Callable[[Certificate], None],
    ) -> None:
        self._keys = keys
        self._network = network
        self._rules = rules
        self._on_attempt = on_attempt
        self._on_certificate = on_certificate
        self._statements = Statements()
        self._goodbyes: dict[str, Goodbye] = {}
        self._num_asked = 0
        self.guide = ""
        self._started_at = self._opened_at = network.now()
        self._is_closed = False
        self._has_left = False
        self.chain = chain
        self.voter = Voter(keys, chain.last, ballot, save, rules, network.now)
        self.attempt = 0
        self.proofs = {proof.vote.peer_id: proof for proof in self.voter.ballot.proofs}
        """Proofs against voters, by peer; kept with the ballot."""
        self.revision = Revision()
        """The newest revision of the manifest that this peer has read."""

    def start(self) -> None:
        """Open the round after the last certificate, and ask another peer for what this one has missed."""
        self._open_round()
        self._ask_next()

    def go_back(self, *, is_chosen: bool = True) -> None:
        """Open the round after the last certificate of the chain, which was cut, by the user's choice or another's."""
        self.voter.switch(self.chain.last, is_chosen=is_chosen)
        self._open_round()

    def close(self) -> None:
        """Take no further part."""
        self._is_closed = True

    def leave(self) -> None:
        """Say goodbye, so that the next certificate goes on without this voter, which does not vote from now on."""
        self._has_left = True
        self._send_voters(self._goodbye())

    # ------------------------------------------------------------------ attempts

    def _open_round(self) -> None:
        self._opened_at = self._network.now()
        self.proofs = {peer: proof for peer, proof in self.proofs.items() if self.voter.counts(proof)}
        self._give_ups: dict[str, GiveUp] = {}
        self._proposals: dict[str, Proposal] = {}
        """Proposals that may have to be made again, by body."""
        self._open(0)

    def _open(self, attempt: int) -> None:
        last = self.chain.last
        self.attempt = attempt
        self._members: tuple[MemberEntry, ...] = ()
        self._ends_at = 0.0
        self._own: Confirmation | None = None
        self._confirmations: dict[str, Confirmation] = {}
        self._offered: Proposal | None = None
        self._votes: dict[str, str] = {}
        self._is_given_up = False
        if self.voter.is_barred:
            self._network.send(last.proposer(attempt), self._goodbye())
        for guilty in last.voters:
            if guilty in self.proofs:  # an earlier message may have been lost
                self._send_voters(self.proofs[guilty])
        if attempt and self._is_proposer and self._propose_again():
            self._later(self._attempt_seconds, self._give_up)  # its votes may be lost, and nothing else ends it
        elif attempt:
            self._on_attempt(attempt)

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some time, if this attempt is still open."""
        digest, attempt = self.chain.last.digest, self.attempt

        def act() -> None:
            if not self._is_closed and (self.chain.last.digest, self.attempt) == (digest, attempt):
                action()

        self._network.later(seconds, act)

    @property
    def _attempt_seconds(self) -> float:
        return self._rules.attempt_seconds * min(1 + self.attempt / 2, MAX_SLOWER)

    @property
    def _is_proposer(self) -> bool:
        return self.chain.last.proposer(self.attempt) == self._keys.peer_id

    def _own_view(self) -> Own:
        is_late = self._network.now() - self._opened_at > self._rules.shrink_seconds
        return Own(self._own, self._network.is_gone, is_late)

    def _absent(self) -> list[str]:
        """Return the voters to go on without: half or more that have said goodbye, or have been gone for long."""
        last, is_late = self.chain.last, self._own_view().may_shrink
        left = self._counted_goodbyes()
        gone = [peer for peer in last.voters if peer in left or (is_late and self._network.is_gone(peer))]
        return gone if len(last.voters) > len(gone) >= len(last.voters) / 2 else []

    @property
    def quorum(self) -> int:
        """Voters that must be there to certify the open round, as far as this peer knows."""
        absent = self._absent()
        return len(self.chain.last.voters) - len(absent) if absent else self.chain.last.quorum

    # ------------------------------------------------------------------ results and proposals

    def averaged(
        self,
        attempt: int,
        members: Sequence[MemberEntry],
        ends_at: float,
        digests: Mapping[VectorName, str],
    ) -> None:
        """Take this peer's results of an attempt.

        Args:
            attempt: The attempt; a result of another one than the open one is ignored.
            members: The attempt's roster, by ascending peer id.
            ends_at: DHT time at which the next round's training should end.
            digests: Digests of the versions that this peer would commit; none of `shared` if its averaging failed, so
                that it gives the attempt up at once.
        """
        last = self.chain.last
        if attempt != self.attempt:
            return
        self._members = tuple(members)
        self._ends_at = ends_at
        if SHARED not in digests:
            self._give_up()
            return
        self._own = Confirmation(
            run=last.run,
            round=last.round + 1,
            previous=last.digest,
            attempt=attempt,
            peer_id=self._keys.peer_id,
            roster=roster_digest(members),
            digests={str(name): digest for name, digest in digests.items()},
            revision=self.revision,
        ).signed(self._keys)
        if self._has_given_up(last.proposer(attempt)):
            self._give_up()
            return
        self._network.send(last.proposer(attempt), self._own)
        if self._is_proposer:  # from its own result on: strangers send confirmations at any time
            self._later(self._rules.confirmation_seconds, self._propose)
        self._later(self._attempt_seconds, self._give_up)
        self._later(self._rules.confirmation_seconds / 2, self._give_up_dead)

    def _take_confirmation(self, sender: str, confirmation: Confirmation) -> None:
        last = self.chain.last
        if confirmation.previous != last.digest:
            self._meet(sender, confirmation.round - 1, confirmation.previous)
            return
        if not self._is_proposer or confirmation.attempt != self.attempt or confirmation.peer_id != sender:
            return
        # One that is not signed would make all voters refuse the proposal that contains it.
        if not self._has_room_for(sender) or not confirmation.is_signed(self._keys):  # guard: no-false-part
            return
        self._confirmations[sender] = confirmation
        if self._members and len(self._of_roster()) == len(self._members):
            self._propose()

    def _has_room_for(self, peer: str) -> bool:
        """Tell whether a peer's confirmation is kept: before the roster is known, only so many of strangers are."""
        if self._members:
            return any(member.peer_id == peer for member in self._members)
        known = self.chain.last.known
        return peer in known or len(self._confirmations.keys() - known) < MAX_MEMBERS  # guard: room-for-known

    def _of_roster(self) -> list[Confirmation]:
        """Return the members' confirmations of the roster."""
        roster = roster_digest(self._members)
        made = (self._confirmations.get(member.peer_id) for member in self._members)
        return [each for each in made if each is not None and each.roster == roster]

    def _propose(self) -> None:
        """Propose what the confirmations say, unless something has been proposed in this attempt."""
        if self._offered or not self._members or self._propose_again():
            return
        if self.attempt and len(self._of_attempt()) < self.quorum:
            return
        confirmations, absent = self._of_roster(), self._absent()
        removed = [] if absent else self._due_to_leave()
        guilty = [peer for peer in removed if peer in self.proofs]
        body = make_body(
            self.chain.last,
            self._members,
            confirmations,
            ends_at=self._ends_at,
            min_peers=self._rules.min_peers,
            removed=removed,
            guilty=guilty,
            shrunk=absent,
        )
        if body is not None:
            goodbyes = [self._goodbyes[peer] for peer in absent or removed if peer in self._goodbyes]
            self._offer(body, confirmations, goodbyes, [self.proofs[peer] for peer in guilty])

    def _due_to_leave(self) -> list[str]:
        """Return the voters to remove: the guilty, those that said goodbye, those that missed rosters and are gone."""
        last, present = self.chain.last, {member.peer_id for member in self._members}
        missed = [
            peer
            for peer in last.voters
            if last.absent.get(peer, 0) + 1 >= ABSENT_ROUNDS and peer not in present and self._network.is_gone(peer)
        ]
        due = dict.fromkeys((*self.proofs, *self._counted_goodbyes(), *missed))
        return [peer for peer in due if peer in last.voters][: max_leaving(len(last.voters))]

    def _counted_goodbyes(self) -> Mapping[str, Goodbye]:
        """Return the goodbyes that count in the open round, by voter."""
        last = self.chain.last
        self._goodbyes = {peer: each for peer, each in self._goodbyes.items() if each.counts(last.run, last.round + 1)}
        return self._goodbyes

    def _of_attempt(self) -> list[GiveUp]:
        """Return the give-ups that justify a proposal in this attempt."""
        return [each for each in self._give_ups.values() if each.attempt >= self.attempt - 1] if self.attempt else []

    def _propose_again(self) -> bool:
        """Propose the body of the newest vote again; return False if this attempt may make a new one."""
        if bound := "" if self._absent() else newest_voted(self._of_attempt()):
            again = self._proposals[bound]
            self._offer(again.body, again.confirmations, again.goodbyes, again.proofs)
        return bool(bound)

    def _offer(
        self,
        body: Body,
        confirmations: Sequence[Confirmation],
        goodbyes: Sequence[Goodbye],
        proofs: Sequence[Proof],
    ) -> None:
        try:
            self._offered = self.voter.propose(
                self.attempt, body, confirmations, self._own_view(), self._of_attempt(), goodbyes, proofs
            )
        except Refusal as refusal:
            log.info("round %d: not proposing: %s", body.round, refusal)
            return
        self._send_voters(self._offered)

    # ------------------------------------------------------------------ votes

    def _take_proposal(self, sender: str, proposal: Proposal) -> None:
        body = proposal.body
        self._watch(proposal.vote, *proposal.give_ups)
        if body.previous != self.chain.last.digest:
            self._meet(sender, body.round - 1, body.previous)
            return
        if self._has_left:
            return
        try:
            vote = self.voter.vote(proposal, self._own_view())
        except Refusal as refusal:
            log.info("round %d: not voting for the proposal of %s: %s", body.round, sender[-6:], refusal)
            return
        if proposal.attempt > self.attempt:
            self._open(proposal.attempt)
        self._proposals[body.digest] = proposal
        self._network.send(sender, vote)

    def _take_vote(self, sender: str, vote: Vote) -> None:
        proposal, last = self._offered, self.chain.last
        if proposal is None or (vote.attempt, vote.body) != (proposal.attempt, proposal.body.digest):
            return
        if vote.peer_id in self._votes or vote.peer_id not in last.voters:
            return
        if not vote.is_signed(self._keys):  # guard: counted-vote
            return
        self._watch(vote)
        if vote.peer_id in proposal.body.shrunk:  # guard: shrunk-vote
            return
        self._votes[vote.peer_id] = vote.signature
        if len(self._votes) == required_votes(last, proposal.body):
            certificate = Certificate(
                body=proposal.body,
                attempt=proposal.attempt,
                signatures=dict(self._votes),
                goodbyes=proposal.goodbyes if proposal.body.shrunk else (),
            )
            self._send_all(Certificates(certificates=(certificate,)))

    # ------------------------------------------------------------------ giving up

    def _give_up(self) -> None:
        """Give the attempt up. The next one opens once a quorum has done so; until then, say so again."""
        if not self._is_given_up:
            self._is_given_up = True
            self._say_given_up()

    def _say_given_up(self) -> None:
        self._later(self._rules.attempt_seconds, self._say_given_up)  # first: the disk may be full
        self._send_give_up(self.attempt)
        self._ask_next()

    def _has_given_up(self, peer: str) -> bool:
        """Tell whether a voter has given the open attempt up."""
        known = self._give_ups.get(peer)
        return known is not None and known.attempt >= self.attempt

    def _give_up_dead(self) -> None:
        """Give the attempt up as soon as its proposer is gone, or has said goodbye."""
        proposer = self.chain.last.proposer(self.attempt)
        if proposer in self._counted_goodbyes() or self._network.is_gone(proposer):
            self._give_up()
        else:
            self._later(self._rules.confirmation_seconds / 2, self._give_up_dead)

    def _send_give_up(self, attempt: int) -> None:
        if self.voter.may_vote and not self._has_left:
            give_up = self.voter.give_up(attempt)
            self._send_all(GivenUp(give_up=give_up, voted=self.voter.ballot.voted))

    def _take_give_up(self, sender: str, given_up: GivenUp) -> None:
        give_up, voted, last = given_up.give_up, given_up.voted, self.chain.last
        if give_up.previous != last.digest:
            self._meet(sender, give_up.round - 1, give_up.previous)
            return
        self._watch(give_up)
        if self.voter.discounts(give_up, voted):
            return
        if self._has_left:  # the goodbye may have been lost
            self._network.send(sender, self._goodbye())
        if give_up.voted is not None and voted is not None:  # guard: stated-proposal
            self._proposals[voted.body.digest] = voted
        known = self._give_ups.setdefault(give_up.peer_id, give_up)
        if known.attempt < give_up.attempt:
            self._give_ups[give_up.peer_id] = give_up
        self._follow_quorum()
        if self._own is not None and self._has_given_up(last.proposer(self.attempt)):  # it proposes nothing any more
            self._give_up()

    def _follow_quorum(self) -> None:
        """Open the attempt after the last one that a quorum has given up, otherwise each peer is alone in its own."""
        attempts = sorted((each.attempt for each in self._give_ups.values()), reverse=True)
        quorum = self.quorum
        if len(attempts) < quorum or attempts[quorum - 1] < self.attempt:
            return
        given_up = attempts[quorum - 1]
        mine = self.voter.ballot.gave_up
        if mine is None or mine < given_up:
            self._send_give_up(given_up)
        self._open(min(given_up + 1, MAX_ATTEMPT))

    # ------------------------------------------------------------------ certificates

    def _take_certificates(self, sender: str, message: Certificates) -> None:
        known = self.chain.last.digest
        if self.guide not in ("", sender):
            return
        for certificate in message.certificates:
            body, last = certificate.body, self.chain.last
            if sender in known_peers(last) and body.round > last.round - WATCHED_ROUNDS:  # guard: known-watch
                self._watch(*certificate.votes())
            if body.previous == last.digest:
                if not self.voter.learn(certificate, self._is_away):
                    self._follow(certificate)
            elif body.round > last.round + 1:
                # A single one is the newest, and this peer asks for what it has missed.
                if len(message.certificates) > 1 and not self.voter.skip(certificate):
                    self._follow(certificate)
            elif self._is_preferred(certificate):
                log.warning("round %d: following the preferred branch of a fork", body.round)
                self._follow(certificate, is_other=True)
        if len(message.certificates) > 1 and self.chain.last.digest != known:
            self.ask(sender)  # there may be more than one message holds
        elif len(message.certificates) == MAX_SENT:
            self._ask_on(sender, message.certificates[-1].body)

    def _ask_on(self, peer: str, body: Body) -> None:
        """Ask for what follows a body of this chain; another branch may leave it after what one message holds."""
        if self.chain.has(body.round, body.digest):
            self._network.send(peer, Question(points=(Point(round=body.round, digest=body.digest),)))

    def _is_preferred(self, certificate: Certificate) -> bool:
        """Tell whether a certificate opens a branch to be followed in place of this one."""
        round = certificate.body.round
        before, ours = self.chain.body_at(round - 1), self.chain.certificate_at(round)
        if before is None or ours is None or round <= self.chain.final:  # guard: final-rounds
            return False
        is_other = ours.body.digest != certificate.body.digest and preferred([ours, certificate]) is certificate
        return is_other and not self.voter.refuses(certificate, before, self._is_away)

    def _is_away(self, peer: str) -> bool:
        """Tell whether a peer was not here when the open round ended, as far as this peer knows.

        A peer that has just restarted was away itself, and cannot blame those that went on without it.
        """
        was_down = self._started_at > self.chain.last.ends_at
        return was_down if peer == self._keys.peer_id else was_down and self._network.is_gone(peer)

    def _is_in_time(self, certificate: Certificate) -> bool:
        """Tell whether a round's certificate has come soon after the round's end, and not in a burst, by this clock."""
        last, now = self.chain.last, self._network.now()
        is_apart = now - self._opened_at >= MIN_SECONDS_APART  # guard: forged-burst
        is_soon = now - last.ends_at <= 2 * self._rules.round_seconds  # guard: final-in-time
        return certificate.body.previous == last.digest and is_apart and is_soon

    def _follow(self, certificate: Certificate, *, is_other: bool = False) -> None:
        self.chain.add(certificate, self.voter.skips, is_in_time=self._is_in_time(certificate))
        try:
            self._on_certificate(certificate)
        finally:  # a full disk leaves no half of a round
            if is_other:
                self.voter.switch(certificate.body)
            self._open_round()

    def ask(self, peer: str) -> None:
        """Ask a peer for the certificates that this one has missed."""
        self._network.send(peer, Question(points=self.chain.points()))

    def _ask_next(self) -> None:
        """Ask one peer for what this one has missed, each in its turn."""
        me = self._keys.peer_id
        others = sorted(self._network.peers(), key=lambda peer: (peer <= me, peer))
        self.ask(others[self._num_asked % len(others)])
        self._num_asked += 1

    def _take_question(self, sender: str, question: Question) -> None:
        """Send what comes after the newest shared point. Ask nothing back, otherwise two branches would never stop."""
        shared = [point.round for point in question.points if self.chain.has(point.round, point.digest)]
        self._network.send(sender, Certificates(certificates=self.chain.after(shared[0]) if shared else ()))

    def _meet(self, peer: str, round: int, digest: str) -> None:
        """React to a statement about the round after a body that is not this chain's last."""
        if self.chain.has(round, digest):
            self._take_question(peer, Question(points=(Point(round=round, digest=digest),)))
        else:
            self.ask(peer)

    # ------------------------------------------------------------------ proofs and goodbyes

    def _watch(self, *statements: Vote | GiveUp) -> None:
        last = self.chain.last
        for statement in statements:
            if statement.peer_id in self.proofs or statement.peer_id not in last.voters:
                continue
            proof = self._statements.add(statement, last) if statement.is_signed(self._keys) else None
            if proof is not None and self._take_proof(proof):
                self._send_voters(proof)

    def _take_proof(self, proof: Proof) -> bool:
        """Keep a proof against a voter; return False if it is known, or does not count."""
        guilty = proof.convicts(self._keys) if self.voter.counts(proof) else ""
        # Strangers can contradict themselves as often as they like.
        is_new = guilty not in self.proofs and guilty in self.chain.last.voters  # guard: voters-proven
        if is_new:
            log.warning("%s has signed two statements that contradict each other", guilty)
            self.proofs[guilty] = proof  # first: the disk may be full
            self.voter.keep(proof)  # guard: proof-on-disk
        return is_new

    def _goodbye(self) -> Goodbye:
        last = self.chain.last
        return Goodbye(run=last.run, round=last.round + 1, attempt=0, peer_id=self._keys.peer_id).signed(self._keys)

    def _take_goodbye(self, goodbye: Goodbye) -> None:
        last = self.chain.last
        is_new = goodbye.peer_id in last.voters and goodbye.counts(last.run, last.round + 1)
        if is_new and goodbye.is_signed(self._keys):  # guard: own-goodbye
            self._goodbyes[goodbye.peer_id] = goodbye

    # ------------------------------------------------------------------ messages

    def _send_voters(self, message: Message) -> None:
        for peer in self.chain.last.voters:
            self._network.send(peer, message)

    def _send_all(self, message: Message) -> None:
        for peer in self._network.peers():
            self._network.send(peer, message)

    def receive(self, sender: str, message: Message) -> None:
        """React to a message of an authenticated peer."""
        match message:
            case Confirmation():
                self._take_confirmation(sender, message)
            case Proposal():
                self._take_proposal(sender, message)
            case Vote():
                self._take_vote(sender, message)
            case GivenUp():
                self._take_give_up(sender, message)
            case Certificates():
                self._take_certificates(sender, message)
            case Question():
                self._take_question(sender, message)
            case Proof():
                self._take_proof(message)
            case Goodbye():
                self._take_goodbye(message)
