"""Peers of a history that lie: each class is one lie. `PROVEN` are lies that two signatures prove."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from benchmarks.history_peers import RULES, TRAIN_SECONDS, Node, hashed
from spes_p2p.swarm.certificate import (
    Body,
    Certificate,
    Certificates,
    Question,
    Result,
    Vote,
    is_certified,
    roster_digest,
    vote_for,
)
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.next_body import make_body
from spes_p2p.swarm.proposal import Entered, Entry, Meeting, Proposal, Turn, check_proposal, counted_results
from spes_p2p.swarm.roster import Roster


class Liar(Node):
    """Lies by what it does not send: messages of the kinds in `hides`."""

    is_honest = False
    hides: tuple[type, ...] = ()

    @property
    def last_body(self) -> Body:
        """The last body that it follows."""
        return self.agreement.chain.last

    def lie(self) -> None:
        """Count a lie."""
        self.world.lies[self.peer_id] += 1

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, self.hides):
            return self.lie()
        super().post(peer, message)

    def voted(self, body: Body, attempt: int) -> Vote:
        """Return its vote."""
        return vote_for(body, attempt, self.peer_id).signed(self.keys)


class Silent(Liar):
    """Says nothing but what it asks, and that it is there."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Question):
            super().post(peer, message)
        else:
            self.lie()


class Leading(Liar):
    """Leads, and proposes nothing; says nothing about its chain."""

    hides = (Proposal, Certificates)


class Absent(Liar):
    """Closes no meeting that it leads."""

    hides = (Meeting, Proposal)


class Refusing(Liar):
    """Votes for nothing."""

    hides = (Vote,)


class Idle(Liar):
    """Comes to each meeting, and reduces nothing."""

    def serves(self, peer: str) -> bool:
        self.lie()
        return False


class Serving(Liar):
    """Comes to each meeting, and sends its part of the mean to every second member."""

    def serves(self, peer: str) -> bool:
        self.lie()
        return bool(int(hashed(peer, self.last_body.round), 16) % 2) and super().serves(peer)


class Omitting(Liar):
    """Leaves each second voter out of its meetings."""

    def receive(self, sender: str, message: Any) -> None:
        last = self.last_body
        leads = isinstance(message, Entered) and last.leader(message.entry.attempt) == self.peer_id
        if leads and message.entry.peer_id in last.voters[::2] and message.entry.previous == last.digest:
            return self.lie()
        super().receive(sender, message)


class Leaving(Liar):
    """Leaves results of others out of what it proposes."""

    def receive(self, sender: str, message: Any) -> None:
        last = self.last_body
        leads = isinstance(message, Result) and last.leader(message.attempt) == self.peer_id
        if leads and message.previous == last.digest and message.peer_id in last.voters[::2]:
            return self.lie()
        super().receive(sender, message)


class Bypassing(Liar):
    """Sends its results to the voters alone, and not to the leader."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Result) and peer == self.last_body.leader(message.attempt):
            return self.lie()
        super().post(peer, message)


class Partial(Liar):
    """Proposes to some voters only."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Proposal) and self.world.rng.random() < 0.5:
            return self.lie()
        super().post(peer, message)


class Hiding(Liar):
    """Shows votes and certificates to one peer in three, and answers no questions."""

    def receive(self, sender: str, message: Any) -> None:
        if not isinstance(message, Question):
            super().receive(sender, message)

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Certificates | Vote) and self.world.rng.random() > 1 / 3:
            return self.lie()
        super().post(peer, message)


class WrongMean(Liar):
    """Confirms another mean than the others."""

    def mean(self, roster: str) -> str:
        self.lie()
        return hashed("lie", roster)


class TwoResults(Liar):
    """Sends another result to each second peer."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Result) and int(hashed(peer), 16) % 2 and message.digests:
            self.lie()
            message = message.model_copy(update={"digests": {SHARED: hashed("other")}}).signed(self.keys)
        super().post(peer, message)


class Blaming(Liar):
    """States in each result that it has lost a voter."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Result):
            self.lie()
            others = [each for each in self.last_body.voters if each != self.peer_id]
            blamed = others[self.last_body.round % len(others)] if others else ""
            message = message.model_copy(update={"digests": {}, "lost": blamed}).signed(self.keys)
        super().post(peer, message)


class Racing(Liar):
    """States that it is in attempt 1,000."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Entered):
            self.lie()
            entry = message.entry.model_copy(update={"attempt": 1000}).signed(self.keys)
            super().post(peer, message.model_copy(update={"entry": entry}))
        super().post(peer, message)


class Inventing(Liar):
    """States votes for what was never proposed: for a body of its own by which it is the only voter."""

    def _invented(self, attempt: int, entries: tuple[Entry, ...] = ()) -> Proposal:
        last, me = self.last_body, self.peer_id
        ends_at = self.now() + TRAIN_SECONDS
        changes = {"round": last.round + 1, "previous": last.digest, "voters": (me,), "ends_at": ends_at}
        body = Body.model_validate(last.model_dump() | changes)
        return Proposal(body=body, turns=(Turn(vote=self.voted(body, attempt), entries=entries),))

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Entered) and message.entry.attempt and message.member is not None:
            self.lie()
            invented = self._invented(message.entry.attempt - 1)
            stated = {"voted": invented.attempt, "body": invented.body.digest}
            entry = message.entry.model_copy(update=stated).signed(self.keys)
            message = Entered(entry=entry, member=message.member, proposal=invented)
        elif isinstance(message, Proposal) and message.attempt:
            message = self._invented(message.attempt, message.entries)
        super().post(peer, message)


class Concealing(Liar):
    """Leads, keeps its proposal to itself, and states later that it has voted for it.

    The proposal is well signed, but its round never ends (`ends_late`), or it leaves out what results it can.
    """

    hidden: Proposal | None = None

    def post(self, peer: str, message: Any) -> None:
        last, hidden = self.last_body, self.hidden
        if isinstance(message, Proposal) and not message.is_repeated and not message.body.shrunk:
            if hidden is None or hidden.body.previous != last.digest:
                self.hidden = self._changed(message, last)
            return
        if isinstance(message, Entered) and message.member is not None and hidden is not None:
            is_later = hidden.body.previous == last.digest and message.entry.attempt > hidden.attempt
            if is_later:
                self.lie()
                stated = {"voted": hidden.attempt, "body": hidden.body.digest}
                entry = message.entry.model_copy(update=stated).signed(self.keys)
                message = Entered(entry=entry, member=message.member, proposal=hidden)
        super().post(peer, message)

    def _changed(self, proposal: Proposal, last: Body) -> Proposal:
        body, results = proposal.body, list(proposal.results)
        ends_at = body.ends_at + 1e6 * (last.round % 2)

        def made_of(results: list[Result]) -> Body | None:
            made = make_body(last, body.members, counted_results(results), ends_at=ends_at, min_peers=RULES.min_peers)
            return made

        for result in tuple(results):
            rest = [each for each in results if each is not result]
            if made_of(rest) is not None:
                results = rest
        made = made_of(results)
        if made is None:
            return proposal
        turn = Turn(vote=self.voted(made, proposal.attempt), entries=proposal.entries)
        changed = Proposal(body=made, turns=(turn,), results=tuple(results))
        assert not check_proposal(changed, last, self.keys, RULES.min_peers)
        return changed


class Forging(Liar):
    """Adds false signatures of all voters to the certificates that it makes."""

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Certificates) and message.certificates:
            self.lie()
            made = message.certificates[0]
            signatures = dict.fromkeys(made.body.voters, "forged") | made.signatures
            message = Certificates(certificates=(made.model_copy(update={"signatures": signatures}),))
        super().post(peer, message)


class Alone(Liar):
    """Certifies alone what names all others absent."""

    def post(self, peer: str, message: Any) -> None:
        last, me = self.last_body, self.peer_id
        if isinstance(message, Result) and message.previous == last.digest and me in last.voters and last.voters[2:]:
            members = Roster([self.part(last).member], last).entries
            mine = message.model_copy(update={"roster": roster_digest(members)}).signed(self.keys)
            others = tuple(p for p in last.voters if p != me)
            ends_at = self.now() + TRAIN_SECONDS
            made = make_body(last, members, [mine], ends_at=ends_at, min_peers=RULES.min_peers, shrunk=others)
            if made is not None:
                self.lie()
                signatures = {me: self.voted(made, message.attempt).signature}
                certificate = Certificate(body=made, attempt=message.attempt, signatures=signatures)
                super().post(peer, Certificates(certificates=(certificate,)))
        super().post(peer, message)


class Dropping(Liar):
    """A stranger, or more and more of them, that drops in each all-reduce."""

    @property
    def drops_in(self) -> bool:  # type: ignore[override]
        self.lie()
        return True


# ---------------------------------------------------------------------- lies that two signatures prove


class Twice(Liar):
    """Proposes two bodies at once, votes for all, and hides its votes."""

    other: Proposal | None = None

    def start(self) -> None:
        self.votes: dict[str, dict[str, str]] = defaultdict(dict)
        super().start()

    def post(self, peer: str, message: Any) -> None:
        last = self.last_body
        if isinstance(message, Proposal) and not message.is_repeated and message.body.previous == last.digest:
            self.lie()
            body = Body.model_validate(message.body.model_dump() | {"ends_at": message.body.ends_at + 1})
            turn = Turn(vote=self.voted(body, message.attempt), entries=message.entries)
            self.other = message.model_copy(update={"body": body, "turns": (turn,)})
            if peer in last.voters and last.voters.index(peer) % 2:
                message = self.other
        elif isinstance(message, Entered) and message.entry.voted is not None:
            self.lie()
            hidden = message.entry.model_copy(update={"voted": None, "body": ""}).signed(self.keys)
            message = Entered(entry=hidden, member=message.member)
        super().post(peer, message)

    def receive(self, sender: str, message: Any) -> None:
        last = self.last_body
        if isinstance(message, Proposal) and message.body.previous == last.digest and self.peer_id in last.voters:
            for peer in last.voters:
                super().post(peer, self.voted(message.body, message.attempt))
        elif isinstance(message, Vote) and self.other is not None:
            self._collect(message, self.other)
        super().receive(sender, message)

    def _collect(self, vote: Vote, other: Proposal) -> None:
        """Certify the other body, too."""
        last = self.last_body
        if (vote.body, vote.attempt, vote.previous) != (other.body.digest, other.attempt, last.digest):
            return
        votes = self.votes[vote.body]
        votes |= {vote.peer_id: vote.signature, self.peer_id: other.vote.signature}
        if is_certified(last, votes, other.body.shrunk):
            certificate = Certificate(body=other.body, attempt=other.attempt, signatures=dict(votes))
            for peer in self.peers():
                super().post(peer, Certificates(certificates=(certificate,)))


class Past(Liar):
    """Signs the past again: votes for another body in each round that it has seen certified."""

    def _certified(self, certificate: Certificate) -> None:
        super()._certified(certificate)
        self.lie()
        body = Body.model_validate(certificate.body.model_dump() | {"ends_at": certificate.body.ends_at + 1})
        vote = self.voted(body, certificate.attempt)
        again = Certificate(body=body, attempt=certificate.attempt, signatures={self.peer_id: vote.signature})
        for peer in self.peers():
            super().post(peer, Certificates(certificates=(again,)))
            super().post(peer, vote)


LIARS: dict[str, type[Liar]] = {
    "silent": Silent,
    "leads": Leading,
    "absent": Absent,
    "refuses": Refusing,
    "idles": Idle,
    "serves": Serving,
    "omits": Omitting,
    "leaves": Leaving,
    "bypasses": Bypassing,
    "partial": Partial,
    "hides": Hiding,
    "mean": WrongMean,
    "results": TwoResults,
    "blames": Blaming,
    "races": Racing,
    "invents": Inventing,
    "conceals": Concealing,
    "alone": Alone,
    "forges": Forging,
    "drops": Dropping,
}
PROVEN: dict[str, type[Liar]] = {"twice": Twice, "past": Past}
