"""The decisions of a run's rounds over the network: a `Decider` in a thread of its own, its messages and its files."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from pydantic import Field, ValidationError

from spes_p2p.errors import AbsentError, ConfigError, ExchangeError, SpesError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import (
    KNOWN_ROUNDS,
    MAX_MEMBERS,
    MAX_VOTERS,
    Body,
    Certificate,
    Certificates,
    Confirmation,
    Document,
    GivenUp,
    Goodbye,
    MemberEntry,
    Message,
    Proof,
    Proposal,
    Question,
    Revision,
    Vote,
    known_peers,
    signers,
)
from spes_p2p.swarm.chain import FINAL_AFTER, MAX_RECENT, Chain, ChainFile, PublicKey
from spes_p2p.swarm.decision import Decider
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.channel import Channel
from spes_p2p.swarm.p2p.identity import IdentityKeys, peer_id_of
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import PROTOCOL
from spes_p2p.swarm.votes import BallotFile, Rules

log = logging.getLogger(__name__)

FOLDER, CERTIFICATES, BALLOT = "consensus", "certificates.jsonl", "ballot.json"
MAX_MESSAGE_BYTES = 2**22
MAX_QUIET_BYTES = 2**16
"""Largest message of a peer that no certificate names and that this one has not asked; all limits count unpacked
bytes."""
MAX_SMALL = 2560
"""Objects in certificates that `_shortened` joins to one message; of two large ones the run's numbers say more."""
SEND_SECONDS = 10.0
WAIT_SECONDS = 5.0
"""Interval at which a peer that waits for a round's end looks whether others are there."""
MAX_UNSENT = 32
"""Messages to one peer that are on their way; more are lost, and sent again by a later attempt."""
MAX_RECEIVING = 64
MAX_RECEIVING_OTHERS = 16
MAX_RECEIVING_EACH = 4
"""Messages that are read, or wait for the decider, at the same time: of all voters and of all others; and of one peer,
while they are read. More wait for their turn."""
MAX_ASKED_AT_ONCE = 2
"""Peers that are asked when records tell of certificates that are missing here."""
MAX_TRIED = 32
GUIDE_SECONDS = 20.0
"""Peers whose chains a newcomer with a link looks through, one after another, and the time for each."""
MAX_ASKED = 8
"""Peers that a newcomer asks for certificates."""
OTHERS_SECONDS = 2.0
"""Time that the others have once the first of them has answered."""


class Envelope(Document):
    """One message, and the public keys that its receiver may need to check the signatures in it."""

    keys: tuple[PublicKey, ...] = Field(default=(), max_length=MAX_MEMBERS)
    confirmation: Confirmation | None = None
    proposal: Proposal | None = None
    vote: Vote | None = None
    given_up: GivenUp | None = None
    goodbye: Goodbye | None = None
    certificates: Certificates | None = None
    question: Question | None = None
    proof: Proof | None = None

    @property
    def message(self) -> Message:
        """The message.

        Raises:
            ExchangeError: there is none, or more than one.
        """
        found = [each for each in (getattr(self, name) for name in FIELDS.values()) if each is not None]
        if len(found) != 1:  # guard: one-message
            raise ExchangeError(f"sent {len(found)} messages in one")
        return found[0]

    def pack(self) -> bytes:
        """Return the bytes that travel: statements of one round repeat each other's fields."""
        packing = zlib.compressobj(9, zdict=_common())
        return packing.compress(self.encode()) + packing.flush()

    @classmethod
    def unpack(cls, data: bytes, most: int, num_slots: int = 4096) -> Envelope:
        """Return the envelope in bytes that have travelled, of at most so many when unpacked.

        Args:
            data: The bytes.
            most: Most of them, when unpacked.
            num_slots: The run's slots, which bound its certificates before any is built.

        Raises:
            ExchangeError: it is damaged, malformed or too long.
        """
        unpacking = zlib.decompressobj(zdict=_common())
        try:
            text = unpacking.decompress(data, most)  # guard: unpacked-bytes
            if not unpacking.eof or unpacking.unused_data:
                raise ExchangeError(f"sent a message that is cut short, or longer than {most} bytes")
            # A key with escapes would hide; honest messages have none.
            if b'"certificates"' in text or b"\\" in text:
                objects = MAX_SMALL + 2 * (num_slots + MAX_VOTERS + MAX_MEMBERS)
                if len(text) > certificates_bytes(num_slots) or text.count(b"{") > objects:  # guard: certificates-bound
                    raise ExchangeError(f"sent {len(text)} bytes of certificates, more than two of this run can have")
            return cls.model_validate_json(text)
        except zlib.error as error:
            raise ExchangeError(f"sent a damaged message: {error}") from error
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {problem_of(error)}") from error


def certificates_bytes(num_slots: int) -> int:
    """Return the most bytes of one message of certificates: two with all slots, voters and members, and their keys."""
    return 2 * (2**8 * (num_slots + MAX_MEMBERS) + 2**10 * MAX_VOTERS)


FIELDS: Mapping[type, str] = {
    Confirmation: "confirmation",
    Proposal: "proposal",
    Vote: "vote",
    GivenUp: "given_up",
    Goodbye: "goodbye",
    Certificates: "certificates",
    Question: "question",
    Proof: "proof",
}


@cache
def _common() -> bytes:
    """Return what most messages contain, so that it need not travel."""
    documents: tuple[type[Document], ...] = (Body, MemberEntry, *FIELDS)
    names = [",".join(f'"{name}":' for name in sorted(each.model_fields)) for each in documents]
    return "".join(names).encode() + Envelope().encode()


class Consensus:
    """This peer's part in the decision of each round, over the network.

    Args:
        node: This peer's host.
        directory: Folder of the certificates and of the ballot.
        start: Body before the first certificate.
        rules: The run's numbers.
        peers: Returns the peers that follow the run.
        is_gone: Tells whether a peer's lease has run out, as far as this peer knows.
        is_new: Whether this identity can have made no promise in this run yet.
        finds: Whether `find` is to come, and a peer without a chain follows none before.

    Raises:
        ConfigError: its files are damaged, or cannot be written.
    """

    def __init__(
        self,
        node: Node,
        directory: Path,
        start: Body,
        rules: Rules,
        *,
        peers: Callable[[], Collection[str]],
        is_gone: Callable[[str], bool],
        is_new: bool,
        finds: bool = False,
    ) -> None:
        self.peer_id = node.peer_id
        self.is_gone = is_gone
        self._node = node
        self._peers = peers
        self._keys = IdentityKeys(node.identity)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = ChainFile(directory / CERTIFICATES, start, self._keys)
        self._told: dict[str, set[str]] = defaultdict(set)
        """Owners of the public keys that each peer was told."""
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._turns = {True: asyncio.Semaphore(MAX_RECEIVING), False: asyncio.Semaphore(MAX_RECEIVING_OTHERS)}
        """Turns to be read, of voters and of others."""
        self._asked: set[str] = set()
        """Peers that were asked for certificates, which may be large, and have not answered yet."""
        self._unanswered: set[str] = set()
        """Peers that were asked, and have not said yet that they know no more."""
        self._changed = threading.Condition(threading.RLock())
        """Held while the decider runs, which may write to the disk; notified after that."""
        self._queued = threading.Condition()
        """Held to change `_due`, for a moment only: the node's thread must not wait for the decider."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        chain = self._file.load()
        ballots = BallotFile(directory / BALLOT)
        self._decider = Decider(
            self._keys,
            self,
            chain,
            rules,
            ballots.load(self.now(), is_new=is_new),
            ballots.save,
            on_certificate=lambda certificate: self._save(),
        )
        if finds and not len(chain):
            self._decider.guide = self.peer_id
        self._hold_keys()
        self._service = f"{node.run_id}::{PROTOCOL}.consensus"
        node.p2p.reserve_half_for(lambda peer: not self.last().is_stranger(peer.to_base58()))
        node.run(node.serve(self._service, SEND_SECONDS, self._receive), SEND_SECONDS)
        self._thread = threading.Thread(target=self._run, name="consensus", daemon=True)
        self._thread.start()
        self.later(0.0, self._decider.start)

    def close(self) -> None:
        """Take no further part. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._decider.close()
            self._changed.notify_all()
        with self._queued:
            self._queued.notify_all()

    def _save(self) -> None:
        self._hold_keys()
        if not self._decider.guide:
            self._file.save(self._decider.chain)

    def _hold_keys(self) -> None:
        """Keep the public keys that check this chain and the next statements about it."""
        chain = self._decider.chain
        signed = signers(Certificates.model_construct(certificates=chain.certificates))
        self._keys.held = signed.union(chain.start.voters, *map(known_peers, chain.newest(KNOWN_ROUNDS)))

    # ------------------------------------------------------------------ what is decided

    def last(self) -> Body:
        """Return the body of the last certificate."""
        return self._decider.chain.last

    def body_at(self, round: int) -> Body | None:
        """Return the body of a round's certificate."""
        with self._changed:
            return self._decider.chain.body_at(round)

    def recent(self) -> str:
        """Return round and digest of a recent certificate for a link, one that is hardly replaced any more."""
        last = self.last()
        body = self.body_at(last.round - FINAL_AFTER) if last.round > FINAL_AFTER else None
        body = body or last
        return f"{body.round}:{body.digest}" if body.round else ""

    @property
    def attempt(self) -> int:
        """The present attempt at the open round."""
        return self._decider.attempt

    @property
    def quorum(self) -> int:
        """Voters that must be there to certify the open round."""
        with self._changed:
            return self._decider.quorum

    def decide(
        self,
        last: Body,
        attempt: int,
        members: Sequence[MemberEntry],
        ends_at: float,
        digests: Mapping[VectorName, str],
        *,
        on_wait: Callable[[], object] = lambda: None,
    ) -> Body | None:
        """Give the decider this peer's results of an attempt; wait for a certificate, or for another attempt.

        Args:
            last: Body that the results start from.
            attempt: The attempt.
            members: The roster's entries.
            ends_at: DHT time at which the next round's training should end.
            digests: Digests of the versions that this peer would commit; empty if it has no result.
            on_wait: Called every few seconds meanwhile.

        Returns:
            The body of the round after `last`; None if another attempt has begun, or the chain has left `last`.
        """
        with self._changed:
            if self._decider.chain.last.digest == last.digest:
                self._decider.averaged(attempt, members, ends_at, digests)
        while not self._is_over(last, attempt, WAIT_SECONDS):
            on_wait()
        with self._changed:
            found = self._decider.chain.body_at(last.round + 1)
            return found if found is not None and found.previous == last.digest else None

    def _is_over(self, last: Body, attempt: int, seconds: float) -> bool:
        """Wait until an attempt has ended, at most so long; tell whether it has."""

        def is_over() -> bool:
            decider = self._decider
            return self._is_closed or decider.chain.last.digest != last.digest or decider.attempt != attempt

        with self._changed:
            return self._changed.wait_for(is_over, seconds)

    def state(self, revision: Revision) -> None:
        """State in the next rounds that this peer has read a revision of the manifest."""
        with self._changed:
            self._decider.revision = revision

    def leave(self) -> None:
        """Say goodbye to the other voters."""
        with self._changed:
            self._decider.leave()

    def known(self) -> set[str] | None:
        """Return the peers that one of the last certificates knows; None before the first one."""
        with self._changed:
            chain = self._decider.chain
            return known_peers(*chain.newest(KNOWN_ROUNDS)) if chain.last.round else None

    def hear_of(self, ends: Mapping[str, tuple[int, str]]) -> None:
        """Learn where other peers' chains end, by round and digest; ask a few of them for what is missing here."""
        with self._changed:
            chain = self._decider.chain
            apart = {peer for peer, (round, digest) in ends.items() if digest and not chain.has(round, digest)}
            known = known_peers(chain.last)
            for peer in sorted(apart & known or apart, key=lambda peer: -ends[peer][0])[:MAX_ASKED_AT_ONCE]:
                self._decider.ask(peer)

    def catch_up(self, seconds: float) -> None:
        """Ask some peers for what this one has missed, until they have nothing more to tell, for a bounded time."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._is_closed:
                asked = sorted(set(self._peers()) - {self.peer_id})[:MAX_ASKED]
                self._unanswered = set(asked)
                for peer in asked:
                    self._decider.ask(peer)
                known = self.last().digest
                left = deadline - time.monotonic()
                if not asked or left <= 0:
                    return
                self._changed.wait_for(partial(self._is_told, asked, 1, known), left)
                left = min(max(0.0, deadline - time.monotonic()), OTHERS_SECONDS)
                # The first one that has no more to tell may be behind itself.
                self._changed.wait_for(partial(self._is_told, asked, len(asked), known), left)
                if self.last().digest == known:
                    return

    def _try_guide(self, peer: str) -> None:
        """Begin the chain anew, and take certificates of one peer alone; of all again if it is empty."""
        decider = self._decider
        decider.guide, decider.chain = peer, Chain(decider.chain.start)
        decider.go_back(is_chosen=False)
        if peer:
            decider.ask(peer)

    def find(self, recent: str, first: Collection[str]) -> None:
        """Follow the chain that has a certificate, as one peer after another sends its own; keep no other.

        Args:
            recent: The certificate's round and digest.
            first: Peers to ask before the others.

        Raises:
            AbsentError: no peer sent it, though the round is recent.
        """
        round, _, digest = recent.partition(":")
        number, is_old = int(round), False
        if not self._decider.guide:  # it has a chain already
            return

        def is_tried(peer: str) -> bool:
            chain = self._decider.chain
            is_there = chain.body_at(number) is not None or chain.has(number, digest)
            return self._is_closed or is_there or peer not in self._unanswered

        with self._changed:
            others = sorted({*first, *self._peers()} - {self.peer_id}, key=lambda peer: peer not in first)
            for peer in others[:MAX_TRIED]:
                self._unanswered = {peer}
                self._try_guide(peer)
                self._changed.wait_for(partial(is_tried, peer), GUIDE_SECONDS)
                chain = self._decider.chain
                if chain.has(number, digest):
                    chain.final, self._decider.guide = number, ""
                    self._file.save(chain)
                    return
                is_old |= chain.body_at(number) is None and chain.last.round - number > MAX_RECENT // 2
            if not is_old:  # guard: linked-chain
                raise AbsentError(
                    f"no peer sent the chain with the link's certificate of round {number}; try again, or a newer link"
                )
            log.warning("peers do not keep round %d any more, which the link names; following what they have", number)
            self._try_guide("")

    def _is_told(self, asked: Collection[str], enough: int, known: str) -> bool:
        """Tell whether there is news, or enough of those asked have no more to tell."""
        is_new = self.last().digest != known
        return is_new or len(set(asked) - self._unanswered) >= enough or self._is_closed

    def cut(self, round: int) -> None:
        """Forget all certificates after a round, because the user has chosen to go back to it."""
        with self._changed:
            chain = self._decider.chain
            if chain.body_at(round) is None:
                raise ConfigError(f"there is no certificate of round {round} here; set --resume-round to a later one")
            chain.cut(round)
            self._file.save(chain)
            self._decider.go_back()

    # ------------------------------------------------------------------ the decider's network

    def now(self) -> float:
        return self._node.now()

    def peers(self) -> Collection[str]:
        return {self.peer_id, *self._peers(), *self.last().voters}

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        with self._queued:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))
            self._queued.notify_all()

    def _run(self) -> None:
        while (action := self._next()) is not None:
            with self._changed:
                if self._is_closed:
                    return
                try:
                    action()
                except Exception:  # one bad message, or a full disk, must not end the thread: the vote is lost
                    log.exception("a consensus action failed; going on with the next message")
                self._changed.notify_all()

    def _next(self) -> Callable[[], None] | None:
        """Wait for the next action that is due; None once this peer takes no further part."""
        with self._queued:
            while not self._is_closed:
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
                self._queued.wait(wait)
        return None

    def send(self, peer: str, message: Message) -> None:
        if peer == self.peer_id:
            self.later(0.0, lambda: self._decider.receive(peer, message))
            return
        if isinstance(message, Question):
            self._asked.add(peer)
        message = _shortened(message)
        told = set() if self.last().is_stranger(peer) else self._told[peer]  # strangers cost nothing, and are many
        new = signers(message) - told
        told |= new
        keys = tuple(key for owner in sorted(new) if (key := self._keys.public_key(owner)))
        self._node.notify(partial(self._send, peer, encoded(message, keys)))

    def _send(self, peer: str, data: bytes) -> None:
        """Send bytes in the swarm's thread; nothing waits for them."""
        if self._sending[peer] < MAX_UNSENT:
            self._sending[peer] += 1
            task = asyncio.get_running_loop().create_task(self._deliver(peer, data))
            task.add_done_callback(lambda _: self._sent(peer))
        else:
            self._lost(peer, "too many are on their way to it")

    def _sent(self, peer: str) -> None:
        self._sending[peer] -= 1
        if not self._sending[peer]:
            del self._sending[peer]

    async def _deliver(self, peer: str, data: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                channel = await self._node.open(peer, self._service, SEND_SECONDS)
                with contextlib.closing(channel):
                    await channel.send_last(data)
        except Exception as error:  # noqa: BLE001 - the peer is gone, or runs another version: the message is lost
            self._lost(peer, repr(error))

    def _lost(self, peer: str, why: str) -> None:
        self._told.pop(peer, None)  # it may lack the keys that this message had
        log.debug("a message to %s was lost: %s", peer[-6:], why)

    async def _receive(self, channel: Channel, peer: str) -> None:
        if self._receiving[peer] >= MAX_RECEIVING_EACH:  # guard: few-at-once
            return
        self._receiving[peer] += 1
        try:
            turns = self._turns[peer in self.last().voters]  # guard: voters-turns
            async with asyncio.timeout(SEND_SECONDS), contextlib.AsyncExitStack() as turn:
                await turn.enter_async_context(turns)
                slots, most = len(self._decider.chain.start.slots), MAX_MESSAGE_BYTES
                if peer not in self._keys.held:  # whatever it claims  # guard: named-only
                    most = certificates_bytes(slots) if peer in self._asked else MAX_QUIET_BYTES
                envelope = Envelope.unpack(await channel.receive_text(most), most, slots)
                message = envelope.message
                turn.pop_all()  # guard: bounded-queue
                self.later(0.0, partial(self._take_turn, turns, peer, envelope.keys, message))
        except (SpesError, TimeoutError) as error:
            log.info("dropped a message of %s: %s", peer[-6:], error)
        finally:
            self._receiving[peer] -= 1
            if not self._receiving[peer]:
                del self._receiving[peer]

    def _take_turn(self, turns: asyncio.Semaphore, peer: str, keys: Sequence[str], message: Message) -> None:
        """Take a message, and let the next one be read: so no more wait for the decider than there are turns."""
        try:
            self._take(peer, [key.encode() for key in keys], message)
        finally:
            self._node.notify(turns.release)

    def _take(self, peer: str, keys: Sequence[bytes], message: Message) -> None:
        needed = signers(message)
        for key in keys:
            try:
                if peer_id_of(key) in needed:  # guard: needed-keys
                    self._keys.learn(key)
            except ValueError as error:
                log.info("%s has sent what is no public key: %s", peer[-6:], error)
        if isinstance(message, Question):
            self._told.pop(peer, None)  # it may have forgotten all keys
        if isinstance(message, Certificates):
            self._asked.discard(peer)
        self._decider.receive(peer, message)  # which may ask on
        if isinstance(message, Certificates) and not self._has(message.certificates):
            self._unanswered.discard(peer)

    def _has(self, certificates: Sequence[Certificate]) -> bool:
        """Tell whether this peer follows certificates that it was sent: their sender may know more."""
        last = certificates[-1].body if certificates else None
        return last is not None and self._decider.chain.has(last.round, last.digest)


def _shortened(message: Message) -> Message:
    """Keep the first certificates that one message can carry, two at least."""
    if not isinstance(message, Certificates) or len(message.certificates) < 2:
        return message
    size, part = 0, list[Certificate]()
    for certificate in message.certificates:
        size += 2 * len(certificate.encode())
        if len(part) > 1 and size > MAX_QUIET_BYTES:
            break
        part.append(certificate)
    return Certificates(certificates=tuple(part))


def encoded(message: Message, keys: tuple[str, ...] = ()) -> bytes:
    """Return a message as it travels, with the public keys that its receiver may need."""
    return Envelope(keys=keys).model_copy(update={FIELDS[type(message)]: message}).pack()
