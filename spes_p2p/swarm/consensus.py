"""The decisions of a run's rounds over the network: a `Decider` in a thread of its own, its messages and its files."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.utils.timed_storage import get_dht_time
from pydantic import Field, ValidationError

from spes_p2p.errors import ConfigError, ExchangeError, SpesError
from spes_p2p.fs import sync, write_atomic
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import (
    KNOWN_ROUNDS,
    MAX_MEMBERS,
    Body,
    Certificate,
    Confirmation,
    Document,
    Goodbye,
    MemberEntry,
    Proof,
    Proposal,
    Statement,
    Vote,
    known_peers,
)
from spes_p2p.swarm.decision import Certificates, Chain, Decider, GivenUp, Message, Question
from spes_p2p.swarm.exchange.protocol import TEXT, Channel
from spes_p2p.swarm.p2p.identity import IdentityKeys
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import PROTOCOL
from spes_p2p.swarm.votes import BallotFile, Rules

log = logging.getLogger(__name__)

FOLDER, CERTIFICATES, BALLOT = "consensus", "certificates.jsonl", "ballot.json"
MAX_MESSAGE_BYTES = 2**22
MAX_QUIET_BYTES = 2**16
"""Largest message of a peer that no certificate knows."""
SEND_SECONDS = 10.0
MAX_UNSENT = 32
"""Messages to one peer that are on their way; more are lost, and sent again by a later attempt."""
MAX_RECEIVING = 16
MAX_RECEIVING_EACH = 4
"""Messages that are read at the same time: in all, and of one peer."""
MAX_ASKED_AT_ONCE = 2
"""Peers that are asked when records tell of certificates that are missing here."""
MAX_ASKED = 8
"""Peers that a newcomer asks for certificates."""
PublicKey = Annotated[str, Field(max_length=1024)]


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


def signers(message: Message | Statement) -> set[str]:
    """Return the peers whose signatures a message carries."""
    match message:
        case Proposal():
            statements: Sequence[Statement] = (
                *(message.vote, *message.confirmations, *message.give_ups, *message.goodbyes),
                *(each for proof in message.proofs for each in (proof.vote, proof.other)),
            )
            return {each.peer_id for each in statements}
        case GivenUp():
            return {message.give_up.peer_id} | (signers(message.voted) if message.voted is not None else set())
        case Certificates():
            return {
                peer
                for each in message.certificates
                for peer in (*each.signatures, *(goodbye.peer_id for goodbye in each.goodbyes))
            }
        case Proof():
            return {message.vote.peer_id}
        case Question():
            return set()
        case _:
            return {message.peer_id}


class Link(Document):
    """A certificate on disk, with those public keys of its signers that no earlier line has."""

    certificate: Certificate
    keys: tuple[PublicKey, ...] = ()


class ChainFile:
    """The certificates that a peer follows, on disk: one line each, in order.

    Args:
        path: The file; its folder exists.
        keys: Learns the public keys in it.
    """

    def __init__(self, path: Path, keys: IdentityKeys) -> None:
        self._path = path
        self._keys = keys
        self._saved: set[str] = set()

    def load(self) -> list[Certificate]:
        """Return the certificates; a last line that was not finished is left out.

        Raises:
            ConfigError: the file is damaged.
        """
        found: list[Certificate] = []
        try:
            lines = self._path.read_bytes().splitlines(keepends=True) if self._path.exists() else []
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                link = Link.model_validate_json(line)
                self._saved |= {self._keys.learn(key.encode()) for key in link.keys}
                found.append(link.certificate)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {self._path}: {' '.join(str(error).split())[:200]}; delete it to follow the run anew"
            ) from error
        if len(found) < len(lines):
            self.rewrite(found)
        return found

    def append(self, certificate: Certificate) -> None:
        """Add a certificate; durable when this returns."""
        with self._path.open("ab") as stream:
            stream.write(self._line(certificate))
            stream.flush()
            sync(self._path)

    def rewrite(self, certificates: Iterable[Certificate]) -> None:
        """Replace all certificates; durable when this returns."""
        self._saved.clear()
        with write_atomic(self._path) as stream:
            for certificate in certificates:
                stream.write(self._line(certificate))
        sync(self._path.parent)

    def _line(self, certificate: Certificate) -> bytes:
        new = signers(Certificates(certificates=(certificate,))) - self._saved
        self._saved |= new
        keys = tuple(key for peer in sorted(new) if (key := self._keys.public_key(peer)))
        return Link(certificate=certificate, keys=keys).encode() + b"\n"


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
    ) -> None:
        self.peer_id = node.peer_id
        self.is_gone = is_gone
        self._node = node
        self._peers = peers
        self._keys = IdentityKeys(node.identity)
        directory.mkdir(parents=True, exist_ok=True)
        self._file = ChainFile(directory / CERTIFICATES, self._keys)
        self._told: dict[str, set[str]] = defaultdict(set)
        """Owners of the public keys that each peer was told."""
        self._sending: Counter[str] = Counter()
        self._receiving: Counter[str] = Counter()
        self._answered: set[str] = set()
        self._changed = threading.Condition(threading.RLock())
        """Held while the decider runs; notified after that."""
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._is_closed = False
        certificates = self._file.load()
        self._num_saved = len(certificates)
        if certificates and certificates[0].body.previous != start.digest:
            raise ConfigError(f"{directory / CERTIFICATES} is of another run; name another --output")
        ballots = BallotFile(directory / BALLOT)
        self._decider = Decider(
            self._keys,
            self,
            Chain(start, certificates),
            rules,
            ballots.load(self.now(), is_new=is_new),
            ballots.save,
            on_attempt=lambda attempt: None,
            on_certificate=self._follow,
        )
        self._service = f"{node.run_id}::{PROTOCOL}.consensus"
        node.run(node.p2p.add_binary_stream_handler(self._service, self._receive), SEND_SECONDS)
        self._thread = threading.Thread(target=self._run, name="consensus", daemon=True)
        self._thread.start()
        self.later(0.0, self._decider.start)

    def close(self) -> None:
        """Take no further part. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._decider.close()
            self._changed.notify_all()

    # ------------------------------------------------------------------ what is decided

    def last(self) -> Body:
        """Return the body of the last certificate."""
        return self._decider.chain.last

    def body_at(self, round: int) -> Body | None:
        """Return the body of a round's certificate."""
        with self._changed:
            return self._decider.chain.body_at(round)

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
        shared: str,
        slots: Mapping[int, str],
    ) -> Body | None:
        """Give the decider this peer's results of an attempt; wait for a certificate, or for another attempt.

        Args:
            last: Body that the results start from.
            attempt: The attempt.
            members: The roster's entries.
            ends_at: DHT time at which the next round's training should end.
            shared: Digest of `shared`; empty if this peer has no result.
            slots: Digests of its slots.

        Returns:
            The body of the round after `last`; None if another attempt has begun, or the chain has left `last`.
        """
        with self._changed:
            if self._decider.chain.last.digest == last.digest:
                self._decider.averaged(attempt, members, ends_at, shared, slots)
            self._changed.wait_for(
                lambda: (
                    self._is_closed
                    or self._decider.chain.last.digest != last.digest
                    or self._decider.attempt != attempt
                )
            )
            found = self._decider.chain.body_at(last.round + 1)
            return found if found is not None and found.previous == last.digest else None

    def leave(self) -> None:
        """Say goodbye to the other voters."""
        with self._changed:
            self._decider.leave()

    def known(self) -> set[str] | None:
        """Return the peers that one of the last certificates knows; None before the first one."""
        with self._changed:
            chain = self._decider.chain
            return known_peers(*chain.newest(KNOWN_ROUNDS)) if chain.last.round else None

    def come_back(self) -> None:
        """Vote again, once a certificate admits this peer anew."""
        with self._changed:
            self._decider.come_back()

    def hear_of(self, ends: Mapping[str, tuple[int, str]]) -> None:
        """Learn where other peers' chains end, by round and digest; ask a few of them for what is missing here."""
        with self._changed:
            chain = self._decider.chain
            apart = {peer for peer, (round, digest) in ends.items() if digest and not chain.has(round, digest)}
            known = known_peers(chain.last)
            for peer in sorted(apart & known or apart, key=lambda peer: -ends[peer][0])[:MAX_ASKED_AT_ONCE]:
                self._decider.ask(peer)

    def catch_up(self, seconds: float) -> None:
        """Ask some peers for what this one has missed, until one has nothing more to tell, at most so long."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not self._is_closed:
                self._answered.clear()
                asked = sorted(set(self._peers()) - {self.peer_id})[:MAX_ASKED]
                for peer in asked:
                    self._decider.ask(peer)
                known = self.last().digest
                left = deadline - time.monotonic()
                if not asked or left <= 0:
                    return
                self._changed.wait_for(lambda: bool(self._answered) or self._is_closed, left)
                if self.last().digest == known:
                    return

    def cut(self, round: int) -> None:
        """Forget all certificates after a round, because the user has chosen to go back to it."""
        with self._changed:
            chain = self._decider.chain
            body = chain.body_at(round)
            if body is None:
                raise ConfigError(f"there is no certificate of round {round} here; set --resume-round to a later one")
            kept = [each for each in chain.certificates if each.body.round <= round]
            self._file.rewrite(kept)
            self._num_saved = len(kept)
            self._decider.go_back(kept)

    def _follow(self, certificate: Certificate) -> None:
        """Write a certificate to disk; rewrite the file where it replaces others."""
        chain = self._decider.chain
        if self._num_saved == len(chain.certificates) - 1:
            self._file.append(certificate)
        else:
            self._file.rewrite(chain.certificates)
        self._num_saved = len(chain.certificates)

    # ------------------------------------------------------------------ the decider's network

    def now(self) -> float:
        return get_dht_time()

    def peers(self) -> Collection[str]:
        return {self.peer_id, *self._peers(), *self.last().voters}

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        with self._changed:
            heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), action))
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._is_closed:
                    return
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is None or wait > 0:
                    self._changed.wait(wait)
                    continue
                _, _, action = heapq.heappop(self._due)
                try:
                    action()
                except Exception:  # one bad message, or a full disk, must not end the thread: the vote is lost
                    log.exception("the consensus has failed to act; it goes on with the next message")
                self._changed.notify_all()

    def send(self, peer: str, message: Message) -> None:
        if peer == self.peer_id:
            self.later(0.0, lambda: self._decider.receive(peer, message))
            return
        message = _shortened(message)
        new = signers(message) - self._told[peer]
        self._told[peer] |= new
        keys = tuple(key for owner in sorted(new) if (key := self._keys.public_key(owner)))
        self._node.notify(partial(self._send, peer, encoded(message, keys)))

    def _send(self, peer: str, data: bytes) -> None:
        """Send bytes in the swarm's thread; nothing waits for them."""
        if self._sending[peer] < MAX_UNSENT:
            self._sending[peer] += 1
            task = asyncio.get_running_loop().create_task(self._deliver(peer, data))
            task.add_done_callback(lambda _: self._sent(peer))

    def _sent(self, peer: str) -> None:
        self._sending[peer] -= 1
        if not self._sending[peer]:
            del self._sending[peer]

    async def _deliver(self, peer: str, data: bytes) -> None:
        try:
            async with asyncio.timeout(SEND_SECONDS):
                channel = await Channel.open(self._node, peer, self._service, SEND_SECONDS)
                with contextlib.closing(channel):
                    await channel.send(TEXT, data)
                    await channel.wait_for_hang_up()
        except Exception as error:  # noqa: BLE001 - the peer is gone, or runs another version: the message is lost
            self._told.pop(peer, None)
            log.debug("a message to %s was lost: %r", peer[-6:], error)

    async def _receive(self, info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer, channel = info.peer_id.to_base58(), Channel(reader, writer, SEND_SECONDS)
        with contextlib.closing(channel):
            is_too_much = self._receiving.total() >= MAX_RECEIVING or self._receiving[peer] >= MAX_RECEIVING_EACH
            if is_too_much:  # guard: few-at-once
                return
            self._receiving[peer] += 1
            try:
                async with asyncio.timeout(SEND_SECONDS):
                    most = MAX_MESSAGE_BYTES if self._is_known(peer) else MAX_QUIET_BYTES
                    envelope = _parse(await channel.receive_text(most))
                message = envelope.message
                keys = [key.encode() for key in envelope.keys]
                self.later(0.0, lambda: self._take(peer, keys, message))
            except (SpesError, TimeoutError) as error:
                log.info("dropped a message of %s: %s", peer[-6:], error)
            finally:
                self._receiving[peer] -= 1
                if not self._receiving[peer]:
                    del self._receiving[peer]

    def _is_known(self, peer: str) -> bool:
        last = self.last()
        return peer in last.voters or peer in last.candidates or last.round == 0 or peer in self._peers()

    def _take(self, peer: str, keys: Sequence[bytes], message: Message) -> None:
        for key in keys:
            try:
                self._keys.learn(key)
            except ValueError as error:
                log.info("%s has sent what is no public key: %s", peer[-6:], error)
        if isinstance(message, Question):
            self._told.pop(peer, None)  # it may have forgotten all keys
        if isinstance(message, Certificates):
            self._answered.add(peer)
        self._decider.receive(peer, message)


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
    return Envelope(keys=keys).model_copy(update={FIELDS[type(message)]: message}).encode()


def _parse(data: bytes) -> Envelope:
    try:
        return Envelope.model_validate_json(data)
    except ValidationError as error:
        raise ExchangeError(f"sent a malformed message: {problem_of(error)}") from error
