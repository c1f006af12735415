"""The peers of a history in virtual time: what stands for network, disk, training and averaging.

What they decide is the library's own `Agreement`. Keys are HMACs, because histories need millions of signatures.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from spes_p2p.swarm.agreement import Agreement
from spes_p2p.swarm.certificate import (
    Body,
    Certificate,
    Certificates,
    Revision,
    check_certificate,
    roster_digest,
)
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.invites import GuestList
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.part import Outcome, Part, Rules
from spes_p2p.swarm.promises import Promises
from spes_p2p.swarm.proposal import Proof
from spes_p2p.swarm.roster import Member, Roster

NUM_SLOTS = 4
TRAIN_SECONDS = 5.0
LEASE_SECONDS = 60.0
RULES = Rules(
    min_peers=4,
    round_seconds=TRAIN_SECONDS,
    meeting_seconds=2.0,
    averaging_seconds=3.0,
    results_seconds=4.0,
    shrink_seconds=600.0,
)


def hashed(*parts: object) -> str:
    """Return a digest of some values."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


@dataclass(frozen=True)
class HmacKeys:
    """A key that every node of a history can check; no node signs with another's."""

    peer_id: str

    def sign(self, data: bytes) -> str:
        """Return this peer's signature of `data`."""
        return hmac.digest(self.peer_id.encode(), data, "sha256").hex()

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        """Return whether the signature is that peer's, of this data."""
        return hmac.digest(peer_id.encode(), data, "sha256").hex() == signature


class Crash(Exception):
    """A node's process ends between writing and sending."""


@dataclass
class World:
    """The network, and everything that was certified or proven."""

    seed: int
    rng: random.Random
    start: Body
    loss: float = 0.0
    nodes: dict[str, Node] = field(default_factory=dict)
    cut: set[tuple[str, str]] = field(default_factory=set)
    """Directed links that lose everything."""
    certified: dict[str, Body] = field(default_factory=dict)
    """Bodies with enough votes, by digest; of those that name voters absent, the ones that an honest node follows."""
    certified_at: dict[str, float] = field(default_factory=dict)
    adopted: dict[str, set[str]] = field(default_factory=dict)
    """Digests of bodies that honest nodes have adopted, each with those whose disk has not lost it to a backup."""
    proven_at: dict[str, int] = field(default_factory=dict)
    """Round in which the first proof against each peer arrived."""
    set_back: set[str] = field(default_factory=set)
    """Peers whose disk was set back without their notice."""
    lies: Counter[str] = field(default_factory=Counter)
    """How often each peer has lied."""
    reopened: int = 0
    """The round that all users went back to; 0 if they did not."""
    num_moved: int = 0
    """Rounds that were final for a peer, and were replaced."""

    revoked: tuple[str, ...] = ()
    """Invites that the founder's revision revokes, once it is written."""

    def reopen(self, round: int) -> None:
        """Have all users go back to a round: those of peers that are down when they start them again."""
        self.reopened = round
        later = {digest for digest, body in self.certified.items() if body.round >= round}
        self.adopted = {digest: disks for digest, disks in self.adopted.items() if digest not in later}
        for node in self.nodes.values():
            if node.is_up:
                node.guarded(node.reopen)

    @property
    def now(self) -> float:
        """Virtual time in seconds."""
        return asyncio.get_running_loop().time()

    def send(self, sender: str, receiver: str, deliver: Callable[[Node], None]) -> None:
        """Call `deliver` with the receiver's node, if the message arrives."""
        if sender == receiver or (sender, receiver) in self.cut or self.rng.random() < self.loss:
            return

        def arrive() -> None:
            node = self.nodes.get(receiver)  # a seat's holder may never have come
            if node is not None and node.is_up:
                node.heard[sender] = self.now
                node.guarded(lambda: deliver(node))

        asyncio.get_running_loop().call_later(self.rng.expovariate(1 / 0.1), arrive)

    def split(self, half: set[str]) -> None:
        """Cut all links between a half of the peers and the others."""
        self.cut |= {(a, b) for a in self.nodes for b in self.nodes if (a in half) != (b in half)}

    def turn(self, peer: str, kind: type[Node]) -> None:
        """Have a peer go on as a node of another kind."""
        old = self.nodes[peer]
        old.stop()
        new = self.nodes[peer] = kind(self, peer)
        new.disk, new.chain, new.final, new.is_new = old.disk, old.chain, old.final, old.is_new
        new.start()

    def is_shrunk(self, body: Body | None) -> bool:
        """Return whether a body, or one before it, names voters absent."""
        while body is not None and not (body.shrunk or body.stood_in_for):
            body = self.certified.get(body.previous)
        return body is not None

    def note(self, certificate: Certificate, *, is_followed: bool) -> None:
        """Note a certificate, if it has enough votes."""
        body = certificate.body
        last = self.start if body.previous == self.start.digest else self.certified.get(body.previous)
        is_news = body.digest not in self.certified and (is_followed or not (body.shrunk or body.is_varied))
        if is_news and last is not None and not check_certificate(certificate, last, HmacKeys("")):
            self.certified[body.digest] = body
            self.certified_at[body.digest] = self.now


class Node:
    """One peer: its process, its disk, its training and averaging; the wire of its `Agreement`."""

    is_honest = True

    def __init__(self, world: World, peer: str) -> None:
        self.world, self.peer_id = world, peer
        self.keys = HmacKeys(peer)
        self.most_attempts = self.most_turns = 0
        self.crash_share = 0.0
        self.disk: Promises | None = None
        self.is_new = True
        self.chain: list[Certificate] = []
        """Certificates on disk."""
        self.final = 0
        """The last final round, on disk with them."""
        self.guests = GuestList(world.start.previous, world.start.founder, self.keys)
        self.finals: dict[int, str] = {}
        """Digests of the rounds that were final in this process."""
        self.backup: tuple[Promises | None, list[Certificate], int] | None = None
        self.heard: dict[str, float] = {}
        self.is_up = False
        self.tasks: list[asyncio.Task[None]] = []
        self.again: asyncio.TimerHandle | None = None
        odd = int(peer[-4:].encode().hex(), 16) % 2
        self.slots = tuple(slot for slot in range(NUM_SLOTS) if slot % 2 == odd)
        self.replicates = tuple(slot for slot in range(NUM_SLOTS) if slot % 4 == 1 - odd)

    # ------------------------------------------------------------------ process and disk

    @property
    def last(self) -> Body:
        return self.chain[-1].body if self.chain else self.world.start

    def start(self) -> None:
        """Begin a process with what is on disk."""
        self.is_up = True
        if self.again is not None:
            self.again.cancel()
        self.heard = dict.fromkeys(self.world.nodes, self.world.now)
        self.agreement = Agreement(
            self.keys,
            self,
            Chain(self.world.start, self.chain, self.final),
            RULES,
            self.disk,
            self._save,
            is_new=self.is_new,
            on_certificate=self._certified,
            guests=self.guests,
        )
        self.is_new = False
        self.read()
        self.finals = {}
        self.guarded(self.reopen)
        self.tasks = [asyncio.ensure_future(self._live()), asyncio.ensure_future(self._beat())]

    def read(self) -> None:
        """State that the founder's revision is read; what it revokes holds from the certificate on that names it."""
        if self.world.revoked:
            self.agreement.revision = Revision(number=1, digest=hashed("revision"))
        self.guests.revoked = self.world.revoked if self.agreement.chain.last.revision.number else ()

    def reopen(self) -> None:
        """Go back to the round that the user has chosen, once."""
        round, chain = self.world.reopened, self.agreement.chain
        found = chain.certificate_at(round) if round else None
        if found is not None and not chain.last.generation:
            self.finals = {each: digest for each, digest in self.finals.items() if each < round}
            body = found.body.model_copy(update={"generation": f"{round}:{hashed(self.peer_id)[:32]}"})
            self.agreement.following.follow(found.model_copy(update={"body": body}))
            self.agreement.go_back()

    def stop(self) -> None:
        """End this process."""
        self.is_up = False
        for task in self.tasks:
            task.cancel()

    def crash(self, seconds: float) -> None:
        """End this process, which starts again after some time."""
        self.stop()
        again = lambda: None if self.is_up else self.start()  # noqa: E731
        self.again = asyncio.get_running_loop().call_later(seconds, again)

    def back_up(self) -> None:
        """Copy the disk."""
        self.backup = self.disk, list(self.chain), self.final

    def restore(self, *, is_noticed: bool) -> None:
        """Put the copy of the disk in its place; the time of an inode tells unless the whole machine was set back."""
        assert self.backup is not None
        promises, self.chain, self.final = self.backup[0], list(self.backup[1]), self.backup[2]
        self.disk = None if is_noticed else promises
        if not is_noticed:
            self.world.set_back.add(self.peer_id)
        has = {certificate.body.digest for certificate in self.chain}
        for digest in self.world.adopted.keys() - has:
            self.world.adopted[digest].discard(self.peer_id)
        if self.is_up:
            self.crash(1.0)

    def guarded(self, action: Callable[[], None]) -> None:
        """Run an action of this process, which may end it."""
        try:
            action()
        except Crash:
            self.crash(self.world.rng.uniform(1, 100))

    def _save(self, promises: Promises) -> None:
        if not self.is_up:  # the process has ended
            raise Crash
        self.disk = promises
        self.most_attempts = max(self.most_attempts, promises.attempt or 0)
        self.most_turns = max(self.most_turns, len(promises.voted.turns) if promises.voted is not None else 0)
        if self.world.rng.random() < self.crash_share:
            raise Crash

    def _certified(self, certificate: Certificate) -> None:
        chain = self.agreement.chain
        self.chain, self.final = list(chain.with_skipped(chain.certificates, chain.start.round)), chain.final
        self.read()
        self.world.num_moved += sum(chain.digest_at(round) != digest for round, digest in self.finals.items())
        self.finals |= {round: chain.digest_at(round) for round in range(len(self.finals) + 1, chain.final + 1)}
        if self.world.rng.random() < self.crash_share:
            self.is_up = False
            raise Crash
        if self.is_honest:
            self.world.note(certificate, is_followed=True)
            body, reopened = certificate.body, self.world.reopened
            is_given_up = reopened and body.round >= reopened and not body.generation
            if not body.shrunk and not body.is_varied and not is_given_up:
                self.world.adopted.setdefault(body.digest, set()).add(self.peer_id)

    # ------------------------------------------------------------------ the agreement's wire

    def post(self, peer: str, message: Any) -> None:
        if isinstance(message, Certificates):
            for certificate in message.certificates:
                self.world.note(certificate, is_followed=False)
        self.world.send(self.peer_id, peer, lambda node: node.receive(self.peer_id, message))

    def receive(self, sender: str, message: Any) -> None:
        if isinstance(message, Proof) and (guilty := message.convicts(self.keys)):
            self.world.proven_at.setdefault(guilty, self.last.round)
        self.agreement.receive(sender, message)

    def now(self) -> float:
        return self.world.now

    def peers(self) -> list[str]:
        return [peer for peer in self.world.nodes if peer != self.peer_id]

    def is_gone(self, peer: str) -> bool:
        return peer != self.peer_id and self.world.now - self.heard.get(peer, -1e9) > LEASE_SECONDS

    async def _beat(self) -> None:
        """Renew the lease, which tells where this peer's chain ends."""
        while True:
            tell = partial(Node.hear_of, peer=self.peer_id, round=self.last.round, digest=self.last.digest)
            for peer in self.world.nodes:
                self.world.send(self.peer_id, peer, tell)
            await asyncio.sleep(LEASE_SECONDS / 4)

    def hear_of(self, peer: str, round: int, digest: str) -> None:
        if not self.agreement.chain.has(round, digest):
            self.agreement.following.ask(peer)

    # ------------------------------------------------------------------ training and averaging

    async def _live(self) -> None:
        try:
            while True:
                last = self.agreement.chain.last
                await asyncio.sleep(min(max(0.1, last.ends_at - self.world.now), TRAIN_SECONDS))
                if self.agreement.chain.last.digest == last.digest:
                    await self.agreement.settle(self.part(last))
        except Crash:
            self.crash(self.world.rng.uniform(1, 100))

    def part(self, last: Body) -> Part:
        member = Member(
            peer_id=self.peer_id,
            round=last.round,
            previous=last.digest,
            tokens=100,
            slots=self.slots,
            replicates=self.replicates,
            tokens_per_second=20.0,
            ready_at=self.world.now,
            sync_seconds=1.0,
        )
        return Part(member, self.average, self.expected, last.ends_at)

    def expected(self) -> Collection[str]:
        known, least = self.last.known if self.last.round else self.world.nodes, self.world.now - LEASE_SECONDS / 3
        here = [peer for peer in self.world.nodes if not self.is_gone(peer)]
        return [peer for peer in here if peer in known or self.heard.get(peer, 0.0) > least]

    async def average(self, roster: Roster, attempt: int) -> Outcome:
        """Average if all reducers serve this peer, and no member drops in and out; strangers reduce nothing."""
        await asyncio.sleep(self.world.rng.uniform(0.5, 2.0))
        nodes, ids = self.world.nodes, {entry.peer_id for entry in roster.entries}
        reducers = ids & roster.last.known if roster.last is not None and roster.last.round else ids
        ends_at = self.world.now + TRAIN_SECONDS
        for peer in sorted(ids):
            is_lost = peer in reducers and not nodes[peer].serves(self.peer_id)
            if nodes[peer].drops_in or (is_lost and peer != self.peer_id):
                return Outcome(ends_at=ends_at, lost=peer)
        mine = next(entry for entry in roster.entries if entry.peer_id == self.peer_id)
        mean = self.mean(roster_digest(roster.entries))
        slots = {VectorName.of_slot(slot): hashed(mean, slot) for slot in (*mine.slots, *mine.replicates)}
        return Outcome({SHARED: mean} | slots, ends_at)

    drops_in = False
    """Whether it ends each all-reduce that it is in."""

    def serves(self, peer: str) -> bool:
        """Return whether another member gets this peer's part of the mean."""
        return self.is_up and not {(self.peer_id, peer), (peer, self.peer_id)} & self.world.cut

    def mean(self, roster: str) -> str:
        """Return the digest of the mean as this peer has it."""
        return hashed("mean", roster)
