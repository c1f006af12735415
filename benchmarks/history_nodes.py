"""The peers of a history in virtual time, honest ones and liars: they average, confirm, propose, vote and give up."""

from __future__ import annotations

import hashlib
import heapq
import hmac
import itertools
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spes_p2p.swarm.certificate import (
    Body,
    Certificate,
    Confirmation,
    GiveUp,
    Goodbye,
    MemberEntry,
    Proof,
    Proposal,
    Vote,
    check_give_up,
    make_body,
    max_leaving,
    max_strangers,
    newest_voted,
    preferred,
    required_votes,
    roster_digest,
    strangers,
    vote_for,
)
from spes_p2p.swarm.votes import Ballot, Own, Refusal, Statements, Voter

NUM_SLOTS = 4
MEETING_SECONDS = 2.0
ATTEMPT_SECONDS = 12.0
TRAIN_SECONDS = 5.0
LEASE_SECONDS = 60.0
SHRINK_SECONDS = 600.0
MIN_PEERS = 4


def hashed(*parts: object) -> str:
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True)
class HmacKeys:
    """A key that every node of a history can check; no node signs with another's."""

    peer_id: str

    def sign(self, data: bytes) -> str:
        return hmac.new(self.peer_id.encode(), data, hashlib.sha256).hexdigest()

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        return hmac.new(peer_id.encode(), data, hashlib.sha256).hexdigest() == signature


class Crash(Exception):
    """A node's process ends between writing and sending."""


@dataclass
class World:
    """Virtual time, the network, and everything that was ever signed or certified."""

    seed: int
    rng: random.Random
    now: float = 0.0
    loss: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Directed links that lose everything."""
    certificates: list[Certificate] = field(default_factory=list)
    adopted: set[str] = field(default_factory=set)
    """Digests of bodies that an honest node has adopted."""
    proofs: dict[str, Proof] = field(default_factory=dict)
    """Every proof that an honest node has found."""
    proven_at: dict[str, int] = field(default_factory=dict)
    """Round in which it was found."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    counter: Any = field(default_factory=itertools.count)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.counter), action))

    def send(self, sender: str, receiver: str, handler: str, *content: Any) -> None:
        if sender != receiver and ((sender, receiver) in self.cut or self.rng.random() < self.loss):
            return
        delay = 0.0 if sender == receiver else self.rng.expovariate(1 / 0.1)
        self.after(delay, lambda: self._deliver(sender, receiver, handler, content))

    def _deliver(self, sender: str, receiver: str, handler: str, content: tuple[Any, ...]) -> None:
        node = self.nodes.get(receiver)
        if node is None or not node.is_up:
            return
        node.heard[sender] = self.now
        try:
            getattr(node, handler)(sender, *content)
        except Crash:
            node.crash(self.rng.uniform(1, 100))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self.events and self.events[0][0] <= until and not done():
            self.now, _, action = heapq.heappop(self.events)
            action()
        self.now = max(self.now, until if not done() else self.now)


class Node:
    """One peer: it trains, averages, confirms, proposes and votes.

    Attributes:
        lie: "" or how it cheats as a proposer or voter.
    """

    def __init__(self, world: World, peer: str, start: Body, *, lie: str = "", crash_share: float = 0.0) -> None:
        self.world, self.peer_id, self.lie = world, peer, lie
        self.keys = HmacKeys(peer)
        self.crash_share = crash_share
        self.chain: list[Certificate] = []
        self.genesis = start
        self.disk: Ballot | None = None
        self.backup: tuple[Ballot | None, list[Certificate]] | None = None
        self.heard: dict[str, float] = {}
        self.is_up = False
        self.is_dead = False
        self.generation = 0
        self.votes_twice = lie == "twice"
        self.statements = Statements()
        self.proofs: dict[str, Proof] = {}
        self.invented: Proposal | None = None

    # ------------------------------------------------------------------ life

    @property
    def last(self) -> Body:
        return self.chain[-1].body if self.chain else self.genesis

    def start(self) -> None:
        self.is_up = True
        self.generation += 1
        self.heard = dict.fromkeys(self.world.nodes, self.world.now)
        self.certified_at = self.world.now
        self.voter = self._voter(self.last, self.disk, self._save)
        self._open(0)
        # A restarted node may have missed rounds.
        self._ask()
        self._tick(self.generation)

    def crash(self, seconds: float) -> None:
        self.is_up = False
        self.generation += 1
        self.world.after(seconds, lambda: None if self.is_up or self.is_dead else self.start())

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            try:
                action()
            except Crash:
                self.crash(self.world.rng.uniform(1, 100))

        self.world.after(seconds, act)

    def _voter(self, last: Body, ballot: Ballot | None, save: Callable[[Ballot], None]) -> Voter:
        return Voter(
            self.keys,
            last,
            ballot,
            save,
            min_peers=MIN_PEERS,
            shrink_seconds=SHRINK_SECONDS,
            now=lambda: self.world.now,
        )

    def _tick(self, generation: int) -> None:
        """Heartbeat, as a lease would be renewed."""
        if generation != self.generation or not self.is_up:
            return
        for peer in self.world.nodes:
            self.world.send(self.peer_id, peer, "on_heartbeat", self.last.round, self.last.digest)
            for guilty in sorted(self.proofs.keys() & set(self.last.voters)):
                self.world.send(self.peer_id, peer, "on_proof", self.proofs[guilty])
        self._later(LEASE_SECONDS / 4, lambda: self._tick(generation))

    def on_heartbeat(self, sender: str, round: int, digest: str) -> None:
        if round > self.last.round or digest != self._digest_at(round):
            self.world.send(self.peer_id, sender, "on_ask", self.last.round, self.last.digest)

    def _save(self, ballot: Ballot) -> None:
        self.disk = ballot
        if self.world.rng.random() < self.crash_share:
            raise Crash

    def is_gone(self, peer: str) -> bool:
        return self.world.now - self.heard.get(peer, -1e9) > LEASE_SECONDS

    # ------------------------------------------------------------------ attempts

    def _open(self, attempt: int) -> None:
        """Begin an attempt at the round after `last`."""
        self.attempt = attempt
        self.mine: Confirmation | None = None
        self.joined: dict[str, tuple[int, ...]] = {}
        self.confirmed: dict[str, Confirmation] = {}
        self.goodbyes: dict[str, Goodbye] = {}
        if attempt == 0:
            self.proposed_attempt = -1
            self.own: dict[int, Confirmation] = {}
            self.given_up: dict[str, GiveUp] = {}
            self.kept: dict[str, Proposal] = {}
        self.members: tuple[MemberEntry, ...] = ()
        self.collected: dict[str, dict[str, str]] = defaultdict(dict)
        self.offered: dict[str, Proposal] = {}
        self.open_proposal: Proposal | None = None
        round, generation = self.last.round, self.generation
        delay = TRAIN_SECONDS if attempt == 0 else 0.0
        self._later(delay, lambda: self._join(round, attempt, generation))
        seconds = delay + ATTEMPT_SECONDS * min(1 + attempt / 2, 20)
        self._later(seconds, lambda: self._time_out(round, attempt, generation))

    def _is_now(self, round: int, attempt: int, generation: int) -> bool:
        return self.is_up and (self.last.round, self.attempt, self.generation) == (round, attempt, generation)

    def _join(self, round: int, attempt: int, generation: int) -> None:
        if not self._is_now(round, attempt, generation):
            return
        proposer = self.last.proposer(attempt)
        goodbye = None
        if self.peer_id in self.last.voters and self.voter.ballot.barred_at is not None:
            goodbye = Goodbye(run=self.last.run, round=round + 1, attempt=0, peer_id=self.peer_id).signed(self.keys)
        self.world.send(self.peer_id, proposer, "on_join", round, attempt, goodbye)
        if self.peer_id == proposer and self.lie != "silent":
            self._later(MEETING_SECONDS, lambda: self._gather(round, attempt, generation))

    def on_join(self, sender: str, round: int, attempt: int, goodbye: Goodbye | None) -> None:
        if round < self.last.round:
            self._tell(sender, round)
        elif round == self.last.round and attempt == self.attempt:
            slots = tuple(s for s in range(NUM_SLOTS) if (s + int(sender[-4:].encode().hex(), 16)) % 2)
            self.joined[sender] = slots
            if goodbye is not None:
                self.goodbyes[sender] = goodbye

    def _gather(self, round: int, attempt: int, generation: int) -> None:
        """Form the roster of an attempt, unless a body must be proposed again."""
        if not self._is_now(round, attempt, generation) or self.open_proposal is not None:
            return
        if attempt and self._propose_again():
            return
        if self.lie == "alone" and self.peer_id in self.last.voters:
            self._go_alone()
            return
        joined = dict(self.joined)
        if self.lie == "omits":
            for peer in [p for p in joined if p in self.last.voters and p != self.peer_id][::2]:
                del joined[peer]
        taken = strangers(self.last, joined)[: max_strangers(len(self.last.voters))]
        known = set(self.last.voters) | set(self.last.candidates)
        ids = sorted(peer for peer in joined if peer in known or peer in taken or round == 0)
        members = tuple(MemberEntry(peer_id=p, tokens=100, slots=joined[p]) for p in ids)
        for peer in ids:
            self.world.send(self.peer_id, peer, "on_roster", round, attempt, members)

    def _go_alone(self) -> None:
        """Certify alone what names all others absent, and state in give-ups what no voter can propose again."""
        members = (MemberEntry(peer_id=self.peer_id, tokens=100),)
        mine = self._confirmation(members[0], self.attempt, members)
        others = tuple(peer for peer in self.last.voters if peer != self.peer_id)
        ends_at = self.world.now + TRAIN_SECONDS
        body = make_body(self.last, members, [mine], ends_at=ends_at, min_peers=MIN_PEERS, shrunk=others)
        assert body is not None
        vote = vote_for(body, self.attempt, self.peer_id).signed(self.keys)
        certificate = Certificate(body=body, attempt=self.attempt, signatures={self.peer_id: vote.signature})
        for peer in self.world.nodes:
            self.world.send(self.peer_id, peer, "on_certificate", (certificate,))
        if self.world.rng.random() < 0.5:
            body = Body.model_validate(body.model_dump() | {"shrunk": ()})
            vote = vote_for(body, self.attempt, self.peer_id).signed(self.keys)
        self.invented = Proposal(attempt=self.attempt, body=body, confirmations=(mine,), vote=vote)

    def on_roster(self, sender: str, round: int, attempt: int, members: tuple[MemberEntry, ...]) -> None:
        if round != self.last.round or attempt < self.attempt or sender != self.last.proposer(attempt):
            return
        if attempt > self.attempt:
            self._open(attempt)
        self.members = members
        generation = self.generation
        seconds = self.world.rng.uniform(0.5, 2.0)
        self._later(seconds, lambda: self._averaged(round, attempt, generation, members))

    def _averaged(self, round: int, attempt: int, generation: int, members: tuple[MemberEntry, ...]) -> None:
        """Confirm the mean if all reducers answered; strangers reduce nothing."""
        if not self._is_now(round, attempt, generation):
            return
        unknown = strangers(self.last, [member.peer_id for member in members]) if round else []
        for member in members:
            node = self.world.nodes[member.peer_id]
            link = {(self.peer_id, member.peer_id), (member.peer_id, self.peer_id)}
            if member.peer_id not in unknown and (not node.is_up or link & self.world.cut):
                return
        mine = next(member for member in members if member.peer_id == self.peer_id)
        self.mine = self._confirmation(mine, attempt, members)
        self.own[attempt] = self.mine
        self.world.send(self.peer_id, self.last.proposer(attempt), "on_confirmation", self.mine)

    def _confirmation(self, mine: MemberEntry, attempt: int, members: tuple[MemberEntry, ...]) -> Confirmation:
        roster = roster_digest(members)
        mean = "lie" if self.lie == "mean" else "mean"
        return Confirmation(
            run=self.last.run,
            round=self.last.round + 1,
            previous=self.last.digest,
            attempt=attempt,
            peer_id=self.peer_id,
            roster=roster,
            shared=hashed(mean, roster),
            slots={str(slot): hashed(mean, roster, slot) for slot in mine.slots},
        ).signed(self.keys)

    def on_confirmation(self, sender: str, confirmation: Confirmation) -> None:
        round, attempt = confirmation.round - 1, confirmation.attempt
        if round < self.last.round:
            self._tell(sender, round)
        if (round, attempt) != (self.last.round, self.attempt) or self.peer_id != self.last.proposer(attempt):
            return
        self.confirmed[sender] = confirmation
        generation = self.generation
        if len(self.confirmed) == len(self.members):
            self._propose(round, attempt, generation)
        elif len(self.confirmed) == 1:
            self._later(4.0, lambda: self._propose(round, attempt, generation))

    # ------------------------------------------------------------------ proposing

    def _propose(self, round: int, attempt: int, generation: int) -> None:
        if not self._is_now(round, attempt, generation) or self.open_proposal is not None or not self.members:
            return
        roster = roster_digest(self.members)
        confirmations = tuple(c for _, c in sorted(self.confirmed.items()) if c.roster == roster)
        absent = tuple(p for p in self.last.voters if self.is_gone(p)) if self._may_shrink() else ()
        if 2 * len(absent) < len(self.last.voters):
            absent = ()
        missed = [p for p in self.last.voters if self.last.absent.get(p, 0) >= 2 and self.is_gone(p)]
        joined = {member.peer_id for member in self.members}
        guilty = [peer for peer in self.proofs if peer in self.last.voters]
        due = [*guilty, *self.goodbyes, *(p for p in missed if p not in joined)]
        due = list(dict.fromkeys(due))
        removed = [] if absent else due[: max_leaving(len(self.last.voters))]
        body = make_body(
            self.last,
            self.members,
            confirmations,
            ends_at=self.world.now + TRAIN_SECONDS,
            min_peers=MIN_PEERS,
            removed=removed,
            shrunk=absent,
        )
        if body is not None:
            goodbyes = tuple(self.goodbyes[peer] for peer in removed if peer in self.goodbyes)
            proofs = tuple(self.proofs[peer] for peer in guilty if peer in removed)
            self._offer(body, confirmations, goodbyes, proofs)
            if self.votes_twice:
                other = body.model_copy(update={"ends_at": body.ends_at + 1})
                self._offer(Body.model_validate(other.model_dump()), confirmations, goodbyes, proofs, second=True)

    def _propose_again(self) -> bool:
        """Propose the body of the newest vote again; return False if this attempt is free to make a new one."""
        give_ups = self._give_ups(self.attempt)
        if len(give_ups) < self._needed():
            return True
        bound = newest_voted(give_ups)
        if not bound or self._needed() < self.last.quorum:
            return False
        if bound in self.kept:
            again = self.kept[bound]
            self._offer(again.body, again.confirmations, again.goodbyes, again.proofs)
        return True

    def _needed(self) -> int:
        gone = [peer for peer in self.last.voters if self.is_gone(peer)]
        if self._may_shrink() and 2 * len(gone) >= len(self.last.voters):
            return len(self.last.voters) - len(gone)
        return self.last.quorum

    def _give_ups(self, attempt: int) -> tuple[GiveUp, ...]:
        return tuple(each for each in self.given_up.values() if each.attempt >= attempt - 1)

    def _offer(
        self,
        body: Body,
        confirmations: tuple[Confirmation, ...],
        goodbyes: tuple[Goodbye, ...] = (),
        proofs: tuple[Proof, ...] = (),
        *,
        second: bool = False,
    ) -> None:
        give_ups = self._give_ups(self.attempt) if self.attempt else ()
        if self.votes_twice:
            vote = vote_for(body, self.attempt, self.peer_id)
            proposal = Proposal(
                attempt=self.attempt,
                body=body,
                confirmations=confirmations,
                vote=vote.signed(self.keys),
                give_ups=give_ups,
                goodbyes=goodbyes,
                proofs=proofs,
            )
        else:
            own = Own(self.own.get(self.attempt), self.is_gone, self._may_shrink())
            try:
                proposal = self.voter.propose(self.attempt, body, confirmations, own, give_ups, goodbyes, proofs)
            except Refusal:
                return
        self.offered[body.digest] = proposal
        if not second:
            self.open_proposal = proposal
        voters = list(self.last.voters)
        if self.votes_twice:
            half = set(voters[::2] if not second else voters[1::2])
            voters = [p for p in voters if p in half or p == self.peer_id]
        elif self.lie == "partial":
            voters = self.world.rng.sample(voters, self.world.rng.randint(1, len(voters)))
        for peer in voters:
            self.world.send(self.peer_id, peer, "on_proposal", proposal)

    def on_proposal(self, sender: str, proposal: Proposal) -> None:
        round = proposal.body.round - 1
        self._watch(proposal.vote, *proposal.give_ups)
        if round < self.last.round:
            self._tell(sender, round)
            return
        if round > self.last.round:
            self.world.send(self.peer_id, sender, "on_ask", self.last.round, self.last.digest)
            return
        if self.lie == "refuses":
            return
        own = Own(self.own.get(proposal.attempt), self.is_gone, self._may_shrink())
        try:
            if self.votes_twice:
                vote = vote_for(proposal.body, proposal.attempt, self.peer_id).signed(self.keys)
            else:
                vote = self.voter.vote(proposal, own)
        except Refusal:
            return
        if proposal.attempt > self.attempt:
            self._open(proposal.attempt)
        self.kept[proposal.body.digest] = proposal
        self.world.send(self.peer_id, sender, "on_vote", vote)

    def on_vote(self, sender: str, vote: Vote) -> None:
        proposal = self.offered.get(vote.body)
        if proposal is None or vote.attempt != proposal.attempt or self.last.round + 1 != proposal.body.round:
            return
        if not vote.is_signed(self.keys) or vote.peer_id not in self.last.voters:
            return
        self._watch(vote)
        votes = self.collected[vote.body]
        votes[vote.peer_id] = vote.signature
        if len(votes) >= required_votes(self.last, proposal.body):
            del self.offered[vote.body]
            self._certify(Certificate(body=proposal.body, attempt=proposal.attempt, signatures=dict(votes)))

    def _watch(self, *statements: Vote | GiveUp) -> None:
        for statement in statements:
            proof = self.statements.add(statement, self.last) if statement.is_signed(self.keys) else None
            if proof is not None and statement.peer_id not in self.proofs and not self.lie:
                for peer in self.world.nodes:
                    self.world.send(self.peer_id, peer, "on_proof", proof)

    def on_proof(self, sender: str, proof: Proof) -> None:
        guilty = proof.convicts(self.keys)
        if guilty and guilty not in self.proofs:
            self.proofs[guilty] = proof
            self.world.proofs.setdefault(guilty, proof)
            self.world.proven_at.setdefault(guilty, self.last.round)

    def _certify(self, certificate: Certificate) -> None:
        if self.lie == "forges":
            false = dict.fromkeys(self.last.voters, "forged") | certificate.signatures
            certificate = certificate.model_copy(update={"signatures": false})
        self.world.certificates.append(certificate)
        receivers = list(self.world.nodes)
        if self.lie == "hides":
            receivers = [self.world.rng.choice(receivers)]
        for peer in receivers:
            self.world.send(self.peer_id, peer, "on_certificate", (certificate,))

    # ------------------------------------------------------------------ giving up

    def _time_out(self, round: int, attempt: int, generation: int) -> None:
        if not self._is_now(round, attempt, generation):
            return
        self._give_up(attempt)
        self._ask()
        # The next attempt opens once a quorum has given this one up; until then, say so again.
        self._later(ATTEMPT_SECONDS, lambda: self._time_out(round, attempt, generation))

    def _give_up(self, attempt: int) -> None:
        try:
            given_up = self.voter.give_up(attempt)
            if self.votes_twice:  # it hides its votes
                hidden = {"voted": None, "body": "", "proposed": "", "signature": ""}
                given_up = given_up.model_copy(update=hidden).signed(self.keys)
        except Refusal:
            return
        voted = self.voter.ballot.voted
        if self.invented is not None and self.invented.body.previous == self.last.digest:
            voted = self.invented
            stated = {"voted": voted.attempt, "body": voted.body.digest, "proposed": voted.vote.signature}
            given_up = given_up.model_copy(update=stated).signed(self.keys)
        for peer in self.world.nodes:
            self.world.send(self.peer_id, peer, "on_give_up", given_up, voted)

    def on_give_up(self, sender: str, given_up: GiveUp, voted: Proposal | None) -> None:
        if given_up.round - 1 < self.last.round:
            self._tell(sender, given_up.round - 1)
            return
        self._watch(given_up)
        if given_up.round - 1 != self.last.round or check_give_up(given_up, voted, self.last, self.keys, MIN_PEERS):
            return
        newest = self.given_up.get(sender)
        if sender in self.last.voters and (newest is None or newest.attempt < given_up.attempt):
            self.given_up[sender] = given_up
        if voted is not None:
            self.kept[voted.body.digest] = voted
        # Follow a quorum to its attempt, otherwise each would be alone in its own.
        attempts = sorted((each.attempt for each in self.given_up.values()), reverse=True)
        if len(attempts) >= self._needed() and attempts[self._needed() - 1] >= self.attempt:
            agreed = attempts[self._needed() - 1]
            mine = self.voter.ballot.gave_up
            if mine is None or mine < agreed:
                self._give_up(agreed)
            self._open(agreed + 1)

    def _may_shrink(self) -> bool:
        return self.world.now - self.certified_at > SHRINK_SECONDS

    # ------------------------------------------------------------------ catching up

    def _ask(self) -> None:
        peer = self.world.rng.choice(list(self.world.nodes))
        self.world.send(self.peer_id, peer, "on_ask", self.last.round, self.last.digest)

    def _digest_at(self, round: int) -> str:
        return self.chain[round - 1].body.digest if round else self.genesis.digest

    def on_ask(self, sender: str, round: int, digest: str) -> None:
        self._tell(sender, round, digest)

    def _tell(self, peer: str, round: int, digest: str = "") -> None:
        """Send the certificates after a round; all of them if the peer is on another branch."""
        is_other = digest != "" and (round > self.last.round or digest != self._digest_at(round))
        if self.chain and (is_other or self.last.round >= round) and self.lie not in ("silent", "hides"):
            start = 0 if is_other else round
            self.world.send(self.peer_id, peer, "on_certificate", tuple(self.chain[start:]))

    def on_certificate(self, sender: str, certificates: tuple[Certificate, ...]) -> None:
        for certificate in certificates:
            round = certificate.body.round
            if round > self.last.round - 8:
                self._watch(*certificate.votes())
            if round <= self.last.round:
                self._compare(certificate)
            if certificate.body.previous == self.last.digest and not self.voter.learn(certificate):
                self._adopt(certificate)

    def _compare(self, certificate: Certificate) -> None:
        """Change the branch if another one is preferred."""
        at = certificate.body.round - 1
        ours, before = self.chain[at], (self.chain[at - 1].body if at else self.genesis)
        if ours.body.digest == certificate.body.digest or certificate.body.previous != before.digest:
            return
        probe = self._voter(before, None, lambda ballot: None)
        if not probe.learn(certificate) and preferred([ours, certificate]) is certificate:
            self.chain = self.chain[:at]
            self._adopt(certificate)
            self.voter.switch(certificate.body)

    def _adopt(self, certificate: Certificate) -> None:
        self.chain.append(certificate)
        self.certified_at = self.world.now
        if certificate.body.shrunk and not self.lie:
            self.world.certificates.append(certificate)
        if not self.lie and not certificate.body.shrunk:
            self.world.adopted.add(certificate.body.digest)
        self._open(0)
