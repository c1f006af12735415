"""The peers of a history in virtual time: what stands for network, disk, training and averaging, and those that lie.

What they decide is the library's own `Decider`.
"""

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
    Certificates,
    Confirmation,
    GivenUp,
    GiveUp,
    MemberEntry,
    Message,
    Proof,
    Proposal,
    Question,
    Vote,
    make_body,
    max_strangers,
    required_votes,
    roster_digest,
    strangers,
    vote_for,
)
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.decision import Decider
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.votes import Ballot, Rules

NUM_SLOTS = 4
MEETING_SECONDS = 2.0
TRAIN_SECONDS = 5.0
LEASE_SECONDS = 60.0
RULES = Rules(
    min_peers=4, round_seconds=TRAIN_SECONDS, attempt_seconds=12.0, confirmation_seconds=4.0, shrink_seconds=600.0
)


def hashed(*parts: object) -> str:
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True)
class HmacKeys:
    """A key that every node of a history can check; no node signs with another's."""

    peer_id: str

    def sign(self, data: bytes) -> str:
        return hmac.digest(self.peer_id.encode(), data, "sha256").hex()

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        return hmac.digest(peer_id.encode(), data, "sha256").hex() == signature


class Crash(Exception):
    """A node's process ends between writing and sending."""


@dataclass
class World:
    """Virtual time, the network, and everything that was certified or proven."""

    seed: int
    rng: random.Random
    now: float = 0.0
    loss: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Directed links that lose everything."""
    certified: dict[str, Body] = field(default_factory=dict)
    """Bodies that were certified, by digest; of those that name voters absent, the ones that an honest node follows."""
    adopted: dict[str, set[str]] = field(default_factory=dict)
    """Digests of bodies that honest nodes have adopted, each with those whose disk has not lost it to a backup."""
    proven_at: dict[str, int] = field(default_factory=dict)
    """Round in which the first proof against each peer arrived."""
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    counter: Any = field(default_factory=itertools.count)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.counter), action))

    def send(self, sender: str, receiver: str, deliver: Callable[[Node], None]) -> None:
        """Call `deliver` with the receiver's node, if the message arrives."""
        if sender != receiver and ((sender, receiver) in self.cut or self.rng.random() < self.loss):
            return

        def arrive() -> None:
            node = self.nodes[receiver]
            if node.is_up:
                node.heard[sender] = self.now
                node.guarded(lambda: deliver(node))

        self.after(0.0 if sender == receiver else self.rng.expovariate(1 / 0.1), arrive)

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> None:
        while self.events and self.events[0][0] <= until and not done():
            self.now, _, action = heapq.heappop(self.events)
            action()
        self.now = max(self.now, until if not done() else self.now)


class Node:
    """One peer: its process, its disk, its training and averaging; the network of its `Decider`."""

    is_honest = True

    def __init__(self, world: World, peer: str, start: Body) -> None:
        self.world, self.peer_id = world, peer
        self.keys = HmacKeys(peer)
        self.genesis = start
        self.crash_share = 0.0
        self.disk: Ballot | None = None
        self.chain: list[Certificate] = []
        """Certificates on disk."""
        self.final = 0
        """The last final round, on disk with them."""
        self.backup: tuple[Ballot | None, list[Certificate]] | None = None
        self.heard: dict[str, float] = {}
        self.is_up = False
        self.is_dead = False

    # ------------------------------------------------------------------ process and disk

    @property
    def last(self) -> Body:
        return self.chain[-1].body if self.chain else self.genesis

    def start(self) -> None:
        self.is_up = True
        self.generation = object()
        self.heard = dict.fromkeys(self.world.nodes, self.world.now)
        self.averaged = "", 0
        self.joined: dict[int, dict[str, tuple[int, ...]]] = defaultdict(dict)
        self.decider = Decider(
            self.keys,
            self,
            Chain(self.genesis, self.chain, self.final),
            RULES,
            self.disk,
            self._save,
            on_attempt=self._join,
            on_certificate=self._certified,
        )
        self.decider.start()
        self._train()
        self._beat()

    def crash(self, seconds: float) -> None:
        self.is_up = False
        self.decider.close()
        self.world.after(seconds, lambda: None if self.is_up or self.is_dead else self.start())

    def guarded(self, action: Callable[[], None]) -> None:
        """Run an action of this process, which may end it."""
        try:
            action()
        except Crash:
            self.crash(self.world.rng.uniform(1, 100))

    def _save(self, ballot: Ballot) -> None:
        self.disk = ballot
        if self.world.rng.random() < self.crash_share:
            raise Crash

    def _certified(self, certificate: Certificate) -> None:
        self.chain = list(self.decider.chain.certificates)
        self.final = self.decider.chain.final
        if self.is_honest:
            self.world.certified[certificate.body.digest] = certificate.body
            if not certificate.body.shrunk:
                self.world.adopted.setdefault(certificate.body.digest, set()).add(self.peer_id)
        self.joined.clear()
        self.later(0.0, self._train)

    # ------------------------------------------------------------------ the decider's network

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Certificates):
            new = {each.body.digest: each.body for each in message.certificates if not each.body.shrunk}
            self.world.certified |= new
        self.world.send(self.peer_id, peer, lambda node: node.receive(self.peer_id, message))

    def receive(self, sender: str, message: Message) -> None:
        if isinstance(message, Proof) and (guilty := message.convicts(self.keys)):
            self.world.proven_at.setdefault(guilty, self.last.round)
        self.decider.receive(sender, message)

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Call `action` after some time, unless this process has ended by then."""
        generation = self.generation

        def act() -> None:
            if self.is_up and generation is self.generation:
                self.guarded(action)

        self.world.after(seconds, act)

    def now(self) -> float:
        return self.world.now

    def peers(self) -> list[str]:
        return list(self.world.nodes)

    def is_gone(self, peer: str) -> bool:
        return self.world.now - self.heard.get(peer, -1e9) > LEASE_SECONDS

    def _beat(self) -> None:
        """Renew the lease, which tells where this peer's chain ends."""
        round, digest = self.last.round, self.last.digest
        for peer in self.world.nodes:
            self.world.send(self.peer_id, peer, lambda node: node.hear_of(self.peer_id, round, digest))
        self.later(LEASE_SECONDS / 4, self._beat)

    def hear_of(self, peer: str, round: int, digest: str) -> None:
        if not self.decider.chain.has(round, digest):
            self.decider.ask(peer)

    # ------------------------------------------------------------------ training and averaging

    def _train(self) -> None:
        last = self.last
        seconds = min(max(0.0, last.ends_at - self.world.now), TRAIN_SECONDS)
        self.later(seconds, lambda: self._join(0) if self._is_open(last, 0) else None)

    def _is_open(self, last: Body, attempt: int) -> bool:
        return (self.last.digest, self.decider.attempt) == (last.digest, attempt)

    def _join(self, attempt: int) -> None:
        """Meet the others; the proposer leads."""
        last = self.last
        slots = tuple(s for s in range(NUM_SLOTS) if (s + int(self.peer_id[-4:].encode().hex(), 16)) % 2)

        def arrive(node: Node) -> None:
            if node.last.digest == last.digest:
                node.joined[attempt][self.peer_id] = slots

        leader = last.proposer(attempt)
        self.world.send(self.peer_id, leader, arrive)
        self.later(3 * MEETING_SECONDS, lambda: self._missed(last, attempt))
        if self.peer_id == leader:
            self.later(MEETING_SECONDS, lambda: self._gather(attempt) if self._is_open(last, attempt) else None)

    def _missed(self, last: Body, attempt: int) -> None:
        """Report a meeting in vain."""
        if self._is_open(last, attempt) and self.averaged != (last.digest, attempt):
            self.averaged = last.digest, attempt
            self.decider.averaged(attempt, (), 0.0, {})

    def _gather(self, attempt: int) -> None:
        """Form the roster of an attempt."""
        last, joined = self.last, self.joined[attempt]
        taken = strangers(last, joined)[: max_strangers(len(last.voters))]
        known = {*last.voters, *last.candidates, *taken}
        ids = sorted(peer for peer in joined if peer in known or last.round == 0)
        members = tuple(MemberEntry(peer_id=p, tokens=100, slots=joined[p]) for p in ids)

        def arrive(node: Node) -> None:
            node.later(node.world.rng.uniform(0.5, 2.0), lambda: node.average(last, attempt, members))

        for peer in ids:
            self.world.send(self.peer_id, peer, arrive)

    def average(self, last: Body, attempt: int, members: tuple[MemberEntry, ...]) -> None:
        """Average if all reducers answer; strangers reduce nothing."""
        if not self._is_open(last, attempt) or self.averaged == (last.digest, attempt):
            return
        self.averaged = last.digest, attempt
        ids = {member.peer_id for member in members}
        reducers = ids - set(strangers(last, ids) if last.round else ())
        links = {(self.peer_id, peer) for peer in reducers} | {(peer, self.peer_id) for peer in reducers}
        is_whole = not links & self.world.cut and all(self.world.nodes[peer].is_up for peer in reducers)
        mine = next(member for member in members if member.peer_id == self.peer_id)
        mean = self.mean(roster_digest(members))
        digests = {SHARED: mean} | {VectorName.of_slot(slot): hashed(mean, slot) for slot in mine.slots}
        ends_at = self.world.now + TRAIN_SECONDS
        self.decider.averaged(attempt, members, ends_at, digests if is_whole else {})

    def mean(self, roster: str) -> str:
        return hashed("mean", roster)


# ---------------------------------------------------------------------- those that lie


class Liar(Node):
    is_honest = False


class Idle(Liar):
    """Comes to each meeting and does nothing there."""

    def average(self, last: Body, attempt: int, members: tuple[MemberEntry, ...]) -> None:
        pass

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Question):
            super().send(peer, message)


class Silent(Liar):
    """Neither leads nor proposes, and tells nothing of its chain."""

    def _gather(self, attempt: int) -> None:
        pass

    def send(self, peer: str, message: Message) -> None:
        if not isinstance(message, Proposal | Certificates):
            super().send(peer, message)


class Omitting(Liar):
    """Leaves each second voter out."""

    def _gather(self, attempt: int) -> None:
        for peer in [p for p in self.joined[attempt] if p in self.last.voters and p != self.peer_id][::2]:
            del self.joined[attempt][peer]
        super()._gather(attempt)


class Partial(Liar):
    """Proposes to some voters only."""

    def send(self, peer: str, message: Message) -> None:
        if not isinstance(message, Proposal) or self.world.rng.random() < 0.5:
            super().send(peer, message)


class Hiding(Liar):
    """Shows a certificate to one peer in three, and tells nothing of its chain."""

    def receive(self, sender: str, message: Message) -> None:
        if not isinstance(message, Question):
            super().receive(sender, message)

    def send(self, peer: str, message: Message) -> None:
        if not isinstance(message, Certificates) or self.world.rng.random() < 1 / 3:
            super().send(peer, message)


class Refusing(Liar):
    """Votes for nothing."""

    def send(self, peer: str, message: Message) -> None:
        if not isinstance(message, Vote):
            super().send(peer, message)


class WrongMean(Liar):
    """Confirms another mean than the others."""

    def mean(self, roster: str) -> str:
        return hashed("lie", roster)


class Forging(Liar):
    """Adds false signatures of all voters to the certificates that it makes."""

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Certificates) and message.certificates:
            made = message.certificates[0]
            if made.body.previous == self.last.digest:
                false = dict.fromkeys(self.last.voters, "forged") | made.signatures
                message = Certificates(certificates=(made.model_copy(update={"signatures": false}),))
        super().send(peer, message)


class Alone(Liar):
    """Certifies alone what names all others absent, and states in give-ups what no voter can propose again."""

    invented: Proposal | None = None

    def _gather(self, attempt: int) -> None:
        last, me = self.last, self.peer_id
        members = (MemberEntry(peer_id=me, tokens=100),)
        mine = Confirmation(
            run=last.run,
            round=last.round + 1,
            previous=last.digest,
            attempt=attempt,
            peer_id=me,
            roster=roster_digest(members),
            digests={"shared": hashed("alone")},
        ).signed(self.keys)
        others = tuple(peer for peer in last.voters if peer != me)
        ends_at = self.world.now + TRAIN_SECONDS
        body = make_body(last, members, [mine], ends_at=ends_at, min_peers=RULES.min_peers, shrunk=others)
        assert body is not None
        vote = vote_for(body, attempt, me).signed(self.keys)
        certificate = Certificate(body=body, attempt=attempt, signatures={me: vote.signature})
        for peer in self.peers():
            self.send(peer, Certificates(certificates=(certificate,)))
        if self.world.rng.random() < 0.5:
            body = Body.model_validate(body.model_dump() | {"shrunk": ()})
            vote = vote_for(body, attempt, me).signed(self.keys)
        self.invented = Proposal(attempt=attempt, body=body, confirmations=(mine,), vote=vote)

    def send(self, peer: str, message: Message) -> None:
        voted = self.invented
        if isinstance(message, GivenUp) and voted is not None and voted.body.previous == self.last.digest:
            stated = {"voted": voted.attempt, "body": voted.body.digest, "proposed": voted.vote.signature}
            message = GivenUp(give_up=_signed_anew(message.give_up, self.keys, stated), voted=voted)
        super().send(peer, message)


class Twice(Liar):
    """Proposes two bodies at once, votes for all, and hides its votes."""

    other: Proposal | None = None

    def start(self) -> None:
        self.votes: dict[str, dict[str, str]] = defaultdict(dict)
        super().start()

    def send(self, peer: str, message: Message) -> None:
        if isinstance(message, Proposal):
            body = Body.model_validate(message.body.model_dump() | {"ends_at": message.body.ends_at + 1})
            self.other = message.model_copy(update={"body": body, "vote": self._vote(body, message.attempt)})
            if peer != self.peer_id and self.last.voters.index(peer) % 2:
                message = self.other
        elif isinstance(message, GivenUp):
            hidden = {"voted": None, "body": "", "proposed": ""}
            message = GivenUp(give_up=_signed_anew(message.give_up, self.keys, hidden))
        super().send(peer, message)

    def receive(self, sender: str, message: Message) -> None:
        if isinstance(message, Proposal) and message.body.previous == self.last.digest:
            self.send(sender, self._vote(message.body, message.attempt))
        elif isinstance(message, Vote) and self.other is not None:
            self._collect(message, self.other)
        super().receive(sender, message)

    def _vote(self, body: Body, attempt: int) -> Vote:
        return vote_for(body, attempt, self.peer_id).signed(self.keys)

    def _collect(self, vote: Vote, other: Proposal) -> None:
        """Certify the other body, too."""
        if (vote.body, vote.attempt, vote.previous) != (other.body.digest, other.attempt, self.last.digest):
            return
        votes = self.votes[vote.body]
        votes |= {vote.peer_id: vote.signature, self.peer_id: other.vote.signature}
        if len(votes) >= required_votes(self.last, other.body):
            certificate = Certificate(body=other.body, attempt=other.attempt, signatures=dict(votes))
            for peer in self.peers():
                self.send(peer, Certificates(certificates=(certificate,)))


def _signed_anew(give_up: GiveUp, keys: HmacKeys, changes: dict[str, Any]) -> GiveUp:
    return give_up.model_copy(update=changes).signed(keys)


LIARS: dict[str, type[Node]] = {
    "silent": Silent,
    "omits": Omitting,
    "partial": Partial,
    "hides": Hiding,
    "refuses": Refusing,
    "mean": WrongMean,
    "alone": Alone,
    "forges": Forging,
    "twice": Twice,
}
