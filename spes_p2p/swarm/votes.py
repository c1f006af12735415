"""One voter's promises, on disk before another peer hears of them; and the others' statements that it has seen."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Protocol

from pydantic import Field

from spes_p2p.errors import ConfigError
from spes_p2p.fs import sync, write_atomic
from spes_p2p.swarm.certificate import (
    MAX_VOTERS,
    Attempt,
    Body,
    Certificate,
    Confirmation,
    Document,
    GiveUp,
    Goodbye,
    Keys,
    Message,
    Proof,
    Proposal,
    Vote,
    contradiction,
    vote_for,
)
from spes_p2p.swarm.certificate_checks import (
    check_certificate,
    check_give_up,
    check_proposal,
    check_skip,
    leaving_voters,
    removed_voters,
)
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.records import Count, Digest, Seconds

log = logging.getLogger(__name__)

WATCHED_ROUNDS = 8
"""Rounds back of which contradictory statements are looked for."""
MAX_KEPT = 64
"""Statements of one peer about one round that are kept."""
MAX_WRITE_SECONDS = 60.0
"""Longest that a ballot takes to reach the disk."""


class Ballot(Document):
    """A voter's promises in one round, on one branch of the chain."""

    previous: Digest | Literal[""] = ""
    """Body that the round extends; empty if no promise was made yet."""
    round: Count = 0
    gave_up: Attempt | None = None
    """The voter votes in no attempt up to this one."""
    voted: Proposal | None = None
    """The proposal of its newest vote for a body that names none absent; kept whole, because a later proposer may have
    to propose the body again."""
    shrunk: Vote | None = None
    """Its newest vote for a body that names absent voters."""
    barred_at: Seconds | None = None
    """DHT time at which the voter noticed that earlier promises are lost; it votes again once it has been admitted
    by a later certificate."""
    proofs: tuple[Proof, ...] = Field(default=(), max_length=MAX_VOTERS)
    """The newest proofs against voters, in every round's ballot: no other peer may have them."""
    reopened: Count = 0
    """The last round that the user has gone back to before: voters may have voted in it twice."""


@dataclass(frozen=True)
class Rules:
    """The numbers of a run that its decisions depend on.

    Attributes:
        min_peers: Members with which the run begins.
        round_seconds: Longest time from the certificate of a round until the end of the next one's training.
        attempt_seconds: Time from a peer's own result until it gives an attempt up; later attempts are given more.
        confirmation_seconds: Time for which a proposer that has one confirmation waits for the others.
        shrink_seconds: Time after the end of a round's training after which voters may be named absent.
    """

    min_peers: int
    round_seconds: float
    attempt_seconds: float
    confirmation_seconds: float
    shrink_seconds: float


@dataclass(frozen=True)
class Own:
    """What this peer knows of a round by itself.

    Attributes:
        confirmation: Its own results of the attempt; None if it was not on the roster, or its averaging failed.
        is_gone: Tells whether a peer's lease has run out, as far as this peer knows.
        may_shrink: Whether the run has stood for long enough to go on without the absent voters.
    """

    confirmation: Confirmation | None = None
    is_gone: Callable[[str], bool] = lambda peer: False
    may_shrink: bool = False


class Network(Protocol):
    """What a decider needs of the swarm. No call waits for an answer."""

    def send(self, peer: str, message: Message) -> None:
        """Send a message, which may be lost; one to this peer itself arrives after the call."""

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some time, never while another call into the decider runs."""

    def now(self) -> float:
        """Return the DHT time."""

    def peers(self) -> Collection[str]:
        """Return the peers that follow the run, this one included."""

    def is_gone(self, peer: str) -> bool:
        """Tell whether a peer's lease has run out, as far as this peer knows."""


class Refusal(Exception):
    """A voter does not vote, for this reason."""


class Voter:
    """One voter in the round after `last`.

    Args:
        keys: Signs, and checks signatures.
        last: Body of the newest certificate that this peer knows.
        ballot: The promises of an earlier process; None for a new identity.
        save: Writes a ballot to disk; returns when it is durable.
        rules: The run's numbers.
        now: DHT time.
    """

    def __init__(
        self,
        keys: Keys,
        last: Body,
        ballot: Ballot | None,
        save: Callable[[Ballot], None],
        rules: Rules,
        now: Callable[[], float],
    ) -> None:
        self._keys = keys
        self._now = now
        self._save = save
        self._rules = rules
        self.last = last
        self.ballot = ballot or Ballot()
        if self.ballot.previous != last.digest:
            # The certificates were on disk before any promise about the next round: this ballot is of a round that is
            # certified. If it is of a later round, certificates are lost, and the promises about their rounds.
            is_lost = self.ballot.round > last.round + 1  # guard: lost-chain
            self.ballot = self._blank(now() if is_lost else self.ballot.barred_at)

    @property
    def is_barred(self) -> bool:
        """Whether this peer is a voter whose promises are lost."""
        return self._keys.peer_id in self.last.voters and not self.may_vote

    @property
    def may_vote(self) -> bool:
        """Whether this peer is a voter whose promises are whole, or the only one: then no other could admit it anew."""
        voters, me = self.last.voters, self._keys.peer_id
        return me in voters and (self.ballot.barred_at is None or voters == (me,))  # guard: lost-ballot

    def propose(
        self,
        attempt: int,
        body: Body,
        confirmations: Sequence[Confirmation],
        own: Own,
        give_ups: Sequence[GiveUp] = (),
        goodbyes: Sequence[Goodbye] = (),
        proofs: Sequence[Proof] = (),
    ) -> Proposal:
        """Return a proposal of this voter, which carries its own vote.

        Raises:
            Refusal: this voter must not propose that.
        """
        proposal = Proposal(
            attempt=attempt,
            body=body,
            confirmations=tuple(confirmations),
            vote=self._sign(attempt, body),
            give_ups=tuple(give_ups),
            goodbyes=tuple(goodbyes),
            proofs=tuple(proofs),
        )
        self.vote(proposal, own)
        return proposal

    def vote(self, proposal: Proposal, own: Own) -> Vote:
        """Vote for a proposal.

        Raises:
            Refusal: it must not be certified, or this voter has promised otherwise.
        """
        self._check(proposal, own)
        vote = self._sign(proposal.attempt, proposal.body)
        promise = {"shrunk": vote} if vote.shrunk else {"voted": proposal}
        self._set(self.ballot.model_copy(update=promise))  # guard: vote-on-disk
        return vote

    def _sign(self, attempt: int, body: Body) -> Vote:
        return vote_for(body, attempt, self._keys.peer_id).signed(self._keys)

    def _check(self, proposal: Proposal, own: Own) -> None:
        attempt, body, ballot = proposal.attempt, proposal.body, self.ballot
        if not self.may_vote:
            raise Refusal("this peer has no vote")
        if body.previous != ballot.previous:
            raise Refusal(f"round {ballot.round} of another branch is open here")
        if ballot.gave_up is not None and attempt <= ballot.gave_up:  # guard: promise-kept
            raise Refusal(f"attempt {attempt} was given up")
        for voted, digest in self._voted():
            if attempt < voted or (attempt == voted and body.digest != digest):  # guard: one-vote
                raise Refusal(f"this peer has voted for another body in attempt {voted}")
        if reason := (
            self._ends_late(body)
            or self._is_outdated(proposal)
            or check_proposal(proposal, self.last, self._keys, self._rules.min_peers)
            or self._differs(proposal, own)
        ):
            raise Refusal(reason)

    def _ends_late(self, body: Body) -> str:
        """Return why a body's round would end later than an honest proposer says, by `round_seconds` or more.

        Other peers' clocks may be ahead. The bound moves on with the time, so it refuses no body for ever.
        """
        seconds = body.ends_at - self._now()
        is_late = seconds > 2 * self._rules.round_seconds  # guard: end-in-time
        return f"the next round would take {seconds:.0f} s" if is_late else ""

    def counts(self, proof: Proof) -> bool:
        """Tell whether a proof is of the last rounds, and of none that the user has gone back to before."""
        newest, reopened = self.last.round + 1, self.ballot.reopened
        return max(newest - WATCHED_ROUNDS, reopened) < proof.vote.round <= newest  # guard: recent-proof

    def _is_outdated(self, proposal: Proposal) -> str:
        is_current = all(map(self.counts, proposal.proofs))  # guard: proposed-proof
        return "" if is_current else "a proof is of a round long ago"

    def _voted(self) -> list[tuple[int, str]]:
        """Return attempt and body of the newest votes."""
        voted, shrunk = self.ballot.voted, self.ballot.shrunk
        found = [] if voted is None else [(voted.attempt, voted.body.digest)]
        return found if shrunk is None else [*found, (shrunk.attempt, shrunk.body)]

    def _stands(self, last: Body) -> bool:
        """Whether the round after `last` is so late that a majority of the voters may be gone."""
        return self._now() - last.ends_at > self._rules.shrink_seconds

    def _differs(self, proposal: Proposal, own: Own) -> str:
        """Return how a proposal differs from what this peer knows by itself."""
        body, mine = proposal.body, own.confirmation
        may_shrink = own.may_shrink and self._stands(self.last)
        absent = set(body.shrunk) - leaving_voters(proposal, self.last)
        if absent and not (may_shrink and all(map(own.is_gone, absent))):  # guard: shrink-late
            return "the absent voters may come back"
        if any(each.attempt < proposal.attempt for each in proposal.confirmations):
            return ""  # proposed again, because it may have been certified whatever is true now
        seconds = self._now() - body.ends_at
        if seconds > self._rules.round_seconds:  # guard: end-ahead
            return f"the next round would have ended {seconds:.0f} s ago"
        removed = removed_voters(self.last, body) - leaving_voters(proposal, self.last)
        if here := sorted(peer for peer in removed if not own.is_gone(peer)):  # guard: gone-in-own-eyes
            return f"{here[0]} is here, and was removed"
        if mine is None or mine.attempt != proposal.attempt:
            return ""  # more than half of the voters have confirmed it
        if mine not in proposal.confirmations:  # guard: own-confirmation
            return "it leaves out this peer's confirmation"
        return "" if mine.digests[SHARED] == body.shared else "this peer's own result differs"  # guard: own-result

    def give_up(self, attempt: int) -> GiveUp:
        """Promise to vote in no attempt up to this one, and state the newest vote that names none absent.

        Raises:
            Refusal: this peer has no vote.
        """
        if not self.may_vote:
            raise Refusal("this peer has no vote")
        ballot = self.ballot
        if ballot.gave_up is None or ballot.gave_up < attempt:
            self._set(ballot.model_copy(update={"gave_up": attempt}))
        voted = ballot.voted
        return GiveUp(
            run=self.last.run,
            round=ballot.round,
            previous=self.last.digest,
            attempt=self.ballot.gave_up or 0,
            peer_id=self._keys.peer_id,
            voted=None if voted is None else voted.attempt,
            body="" if voted is None else voted.body.digest,
            proposed="" if voted is None else voted.vote.signature,
        ).signed(self._keys)

    def discounts(self, given_up: GiveUp, voted: Proposal | None) -> str:
        """Return why this peer, as a proposer, does not count a give-up; `voted` is the proposal that it states."""
        reason = check_give_up(given_up, voted, self.last, self._keys, self._rules.min_peers)
        if reason or voted is None:
            return reason
        return self._is_outdated(voted) or self._ends_late(voted.body)  # guard: end-given-up

    def refuses(self, certificate: Certificate, last: Body, is_away: Callable[[str], bool] = lambda peer: False) -> str:
        """Return why this peer does not follow a certificate after `last`, which may be of a past round.

        Args:
            certificate: The certificate.
            last: Body before it.
            is_away: Tells whether a peer's lease has run out, as far as this peer knows.
        """
        if reason := check_certificate(certificate, last, self._keys):
            return reason
        left = {
            each.peer_id
            for each in certificate.goodbyes
            if each.counts(last.run, last.round + 1) and each.is_signed(self._keys)  # guard: shrunk-by-goodbye
        }
        here = {peer for peer in set(certificate.body.shrunk) - left if not is_away(peer)}
        if here and not self._stands(last):  # guard: shrunk-in-time
            return "a majority of the voters was here a short time ago"
        return ""

    def learn(self, certificate: Certificate, is_away: Callable[[str], bool] = lambda peer: False) -> str:
        """Go on to the round after a certificate; return why it is refused, or ""."""
        if reason := self.refuses(certificate, self.last, is_away):
            return reason
        body = certificate.body
        is_known = body.digest in [digest for _, digest in self._voted()]
        if (
            self.may_vote and not is_known and not body.shrunk and self._has_signed(certificate)
        ):  # guard: forgotten-vote
            self._bar("the round has this peer's vote, which its ballot does not know")
        self._follow(body)
        return ""

    def skips(self, certificate: Certificate, trusted: Body) -> bool:
        """Tell whether more than half of a body's voters have signed a later certificate."""
        return not check_skip(certificate, trusted, self._keys)  # guard: signed-skip

    def skip(self, certificate: Certificate) -> str:
        """Go on to the round after a much later certificate; return why it is refused, or ""."""
        if not self.skips(certificate, self.last):
            return "too few of the voters that this peer knows have signed it"
        if self.may_vote and self._has_signed(certificate):
            self._bar("a later round has this peer's vote, which its ballot does not know")
        self.switch(certificate.body)
        return ""

    def switch(self, body: Body, *, is_chosen: bool = False) -> None:
        """Go over to another branch, whose certificates are on disk and end with this body.

        At once, not round by round: the ballot has no promises of past rounds, so this peer must not vote in them.

        Args:
            body: The last one.
            is_chosen: The user has gone back to it, and so has given up all promises, also lost ones: where those of
                all voters are lost, no other could admit one anew.
        """
        self.last = body
        ballot = self._blank(None if is_chosen else self.ballot.barred_at)
        if is_chosen:
            ballot = ballot.model_copy(update={"reopened": max(ballot.reopened, ballot.round)})  # guard: reopened-round
        self._set(ballot)

    def _has_signed(self, certificate: Certificate) -> bool:
        mine = [vote for vote in certificate.votes() if vote.peer_id == self._keys.peer_id]
        return any(vote.is_signed(self._keys) for vote in mine)  # guard: own-signature

    def _follow(self, body: Body) -> None:
        me, barred_at = self._keys.peer_id, self.ballot.barred_at
        # The round that the certificate closes must have ended since, otherwise this is the admission of long ago.
        is_late = barred_at is not None and self.last.ends_at > barred_at  # guard: admitted-since
        is_admitted = is_late and me in body.voters and me not in self.last.voters
        self.last = body
        self.ballot = self._blank(None if is_admitted else barred_at)
        if is_admitted:
            self._set(self.ballot)

    def _blank(self, barred_at: float | None) -> Ballot:
        """Return a ballot for the open round; it holds no promise, so it need not be on disk."""
        update = {"previous": self.last.digest, "round": self.last.round + 1, "barred_at": barred_at}
        return self.ballot.model_copy(update=update | {"gave_up": None, "voted": None, "shrunk": None})

    def keep(self, proof: Proof) -> None:
        """Keep a proof against a voter, also after a crash."""
        self._set(self.ballot.model_copy(update={"proofs": (*self.ballot.proofs, proof)[-MAX_VOTERS:]}))

    def _bar(self, reason: str) -> None:
        log.warning("this peer votes again when it has been admitted anew: %s", reason)
        self._set(barred(self.ballot, self._now()))

    def _set(self, ballot: Ballot) -> None:
        self._save(ballot)
        self.ballot = ballot


class _Saved(Document):
    written_ns: Annotated[int, Field(ge=0)]
    ballot: Ballot


class BallotFile:
    """A voter's ballot on disk.

    A ballot that was restored from a backup or copied has forgotten votes. The time of the last change to a file's
    inode tells: only the kernel sets it, and a restored file's is later than the time that the ballot states.
    (A machine that is set back as a whole is not noticed; its two signatures convict it.)

    Args:
        path: The file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, ballot: Ballot) -> None:
        """Write a ballot; durable when this returns."""
        with write_atomic(self._path) as stream:
            stream.write(_Saved(written_ns=time.time_ns(), ballot=ballot).encode())
        sync(self._path.parent)

    def is_restored(self, *, is_new: bool) -> bool:
        """Tell whether this identity may have voted after what lies here: the file is missing, copied or restored.

        Args:
            is_new: Whether the identity has been made just now (`Identity.is_new`).

        Raises:
            ConfigError: the file is damaged.
        """
        return self._look(is_new=is_new)[1]

    def load(self, now: float, *, is_new: bool) -> Ballot | None:
        """Return the ballot, barred if its promises may not be the last; None if there never was one.

        Args:
            now: DHT time.
            is_new: Whether the identity has been made just now (`Identity.is_new`).

        Raises:
            ConfigError: the file is damaged.
        """
        ballot, is_restored = self._look(is_new=is_new)
        if ballot is None:
            return Ballot(barred_at=now) if is_restored else None
        if is_restored:
            log.warning("%s was copied or restored; this peer votes again when it has been admitted anew", self._path)
        return barred(ballot, now) if is_restored else ballot

    def _look(self, *, is_new: bool) -> tuple[Ballot | None, bool]:
        """Return the ballot, if there is one, and whether later promises may be missing."""
        if not self._path.exists():
            return None, not is_new  # guard: deleted-ballot
        try:
            saved = _Saved.model_validate_json(self._path.read_bytes())
            age_ns = self._path.stat().st_ctime_ns - saved.written_ns
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {self._path}: {' '.join(str(error).split())[:200]}; delete it to vote again later"
            ) from error
        return saved.ballot, age_ns > MAX_WRITE_SECONDS * 1e9  # guard: restored-ballot


def barred(ballot: Ballot, now: float) -> Ballot:
    """Return the ballot of a voter whose later promises are lost."""
    return ballot.model_copy(update={"barred_at": now})


class Statements:
    """The voters' votes and give-ups that a peer has seen of the last rounds, and the proofs that follow from them."""

    def __init__(self, rounds: int = WATCHED_ROUNDS) -> None:
        self._rounds = rounds
        self._seen: dict[int, dict[str, dict[bytes, Vote | GiveUp]]] = {}

    def add(self, statement: Vote | GiveUp, last: Body) -> Proof | None:
        """Record a signed statement of one of the last rounds by a voter of `last`; return the proof it completes."""
        newest = last.round + 1
        for old in [round for round in self._seen if round <= newest - self._rounds]:
            del self._seen[old]
        is_recent = newest - self._rounds < statement.round <= newest
        if not is_recent or statement.peer_id not in last.voters:  # guard: statement-bounds
            return None
        made = self._seen.setdefault(statement.round, {}).setdefault(statement.peer_id, {})
        for earlier in made.values():
            if contradiction(earlier, statement):
                vote, other = (earlier, statement) if isinstance(earlier, Vote) else (statement, earlier)
                assert isinstance(vote, Vote)
                return Proof(vote=vote, other=other)
        if len(made) < MAX_KEPT:
            made[statement.signed_part] = statement  # signing again gives another signature
        return None
