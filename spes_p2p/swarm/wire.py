"""The messages of a run's decisions over the network: bounded before they are read, with the keys that check them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

from pydantic import Field, ValidationError

from spes_p2p.errors import ExchangeError, SpesError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.certificate import (
    DIGEST_LETTERS,
    MAX_MEMBERS,
    MAX_SKIPPED,
    MAX_VOTERS,
    Body,
    Certificate,
    Certificates,
    Document,
    Goodbye,
    MemberEntry,
    PeerId,
    PeerKeys,
    Question,
    Vote,
    signers_of,
)
from spes_p2p.swarm.chain import PublicKey
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.p2p.channel import Channel
from spes_p2p.swarm.p2p.identity import peer_id_of
from spes_p2p.swarm.proposal import Entered, Entry, Lacking, Meeting, Proof, Proposal, Result
from spes_p2p.swarm.records import PROTOCOL, Digest

log = logging.getLogger(__name__)

MAX_PACKED_BYTES = 2**22
MAX_STRANGE_BYTES = 2**16
"""Largest messages, packed or not: of any peer; and of one that no certificate names and that this one has not
asked."""
SEND_SECONDS = 10.0
MAX_UNSENT = 32
"""Messages to one peer that are on their way; more are lost, and sent again by a later attempt."""
PART_BYTES = 2**12
"""A message is unpacked in parts of so many bytes until it is known to be short enough."""
MAX_READ, MAX_READ_OF_OTHERS, MAX_READ_OF_ONE = 64, 16, 4
"""Messages that are read at the same time: of voters, of all others, and of one peer."""
BURST_SECONDS, SHARE = 1.0, 0.02
"""Processor time that the messages of a peer, or of all strangers together, may take at once, and in each second."""
LATE_SECONDS = 0.5
"""Time that a proposal's results have to come from their authors before its leader is asked for them."""
MAX_LINES = 60
"""Lines of log a minute about messages that do not count."""


class Whole(Document):
    """Asks for a proposal with its results, because its receiver lacks one of them."""

    body: Digest


Wired = Entered | Meeting | Result | Lacking | Proposal | Vote | Goodbye | Proof | Certificates | Question
PASSED_ON = Entered | Result | Vote
"""What a peer passes on to another one that cannot be called: their authors have signed them."""
FIELDS: Mapping[type, str] = {
    Entered: "entered",
    Meeting: "meeting",
    Result: "result",
    Lacking: "lacking",
    Proposal: "proposal",
    Vote: "vote",
    Goodbye: "goodbye",
    Proof: "proof",
    Certificates: "certificates",
    Question: "question",
    Whole: "whole",
}


class Envelope(Document):
    """One message, and the public keys that its receiver may need to check the signatures in it."""

    keys: tuple[PublicKey, ...] = Field(default=(), max_length=MAX_MEMBERS)
    to: PeerId | None = None
    """The peer to pass the message on to, which its sender cannot reach."""
    entered: Entered | None = None
    meeting: Meeting | None = None
    result: Result | None = None
    lacking: Lacking | None = None
    proposal: Proposal | None = None
    vote: Vote | None = None
    goodbye: Goodbye | None = None
    proof: Proof | None = None
    certificates: Certificates | None = None
    question: Question | None = None
    whole: Whole | None = None
    named: tuple[Digest, ...] = Field(default=(), max_length=2 * MAX_MEMBERS)
    """Digests of a proposal's results, in place of them: its receiver votes, and has them from their authors."""

    @property
    def message(self) -> Wired | Whole:
        """The message.

        Raises:
            ExchangeError: there is none, or more than one.
        """
        found = [each for each in (getattr(self, name) for name in FIELDS.values()) if each is not None]
        if len(found) != 1:  # guard: never
            raise ExchangeError(f"sent {len(found)} messages in one")
        return found[0]

    def pack(self) -> bytes:
        """Return the bytes that travel: statements of one round repeat each other's fields."""
        packing = zlib.compressobj(9, zdict=_common())
        return packing.compress(self.encode()) + packing.flush()

    @classmethod
    def unpack(cls, data: bytes, most: int) -> Envelope:
        """Return the envelope in bytes that have travelled, of at most so many when unpacked.

        Raises:
            ExchangeError: it is damaged, malformed or too long.
        """
        try:
            num_objects = 0
            for part in _unpacked(data, most):  # before any of it is kept
                num_objects += part.count(b"{") + part.count(b",") // 2
            if num_objects > 16 + most // 32:  # guard: never
                raise ExchangeError("sent a message of more objects than this run can have")
            return cls.model_validate_json(b"".join(_unpacked(data, most)))
        except zlib.error as error:
            raise ExchangeError(f"sent a damaged message: {error}") from error
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {problem_of(error)}") from error


def _unpacked(data: bytes, most: int) -> Iterator[bytes]:
    """Yield what a message unpacks to, a small part at a time."""
    unpacking, num_bytes = zlib.decompressobj(zdict=_common()), 0
    left, read, is_full = b"", 0, False
    while not unpacking.eof and (left or read < len(data) or is_full):
        if not left and not is_full:
            left, read = data[read : read + PART_BYTES], read + PART_BYTES
        part = unpacking.decompress(left, PART_BYTES)
        left, is_full, num_bytes = unpacking.unconsumed_tail, len(part) == PART_BYTES, num_bytes + len(part)
        if num_bytes > most:  # guard: never
            raise ExchangeError(f"sent a message that is longer than {most} bytes")
        yield part
    if not unpacking.eof or unpacking.unused_data or read < len(data):
        raise ExchangeError("sent a message that is cut short, or goes on after its end")


def packed(
    message: Wired | Whole, keys: tuple[str, ...] = (), to: str | None = None, *, names_results: bool = False
) -> bytes:
    """Return a message as it travels, with the public keys that its receiver may need."""
    named: tuple[str, ...] = ()
    if isinstance(message, Proposal) and names_results:
        named, message = tuple(map(_digest, message.results)), message.model_copy(update={"results": ()})
    return Envelope(keys=keys, to=to).model_copy(update={FIELDS[type(message)]: message, "named": named}).pack()


def _digest(result: Result) -> str:
    """Return the SHA-256 of a result and its signature, in hex: who signs twice does not confuse the two."""
    return hashlib.sha256(result.encode()).hexdigest()


def message_bytes(last: Body) -> int:
    """Return the most bytes of a message about the next round, by the run's own numbers; the first round has none."""
    peers = min(MAX_MEMBERS, 2 * len(last.known) + len(last.members) + 8) if last.round else MAX_MEMBERS
    return min(MAX_PACKED_BYTES, MAX_STRANGE_BYTES + 2**12 * peers + 2**10 * len(last.slots))


def certificates_bytes(num_slots: int) -> int:
    """Return the most bytes of two certificates with all slots, voters, members and rounds that they skip: a newcomer
    knows only the slots."""
    return 2 * (2**8 * (num_slots + MAX_MEMBERS) + 2**10 * MAX_VOTERS + DIGEST_LETTERS * MAX_SKIPPED)


def shortened(message: Certificates) -> Certificates:
    """Return the first certificates that a message to a stranger can carry, two at least."""
    kept, num_bytes = list[Certificate](), 0
    for certificate in message.certificates:
        num_bytes += 2 * len(certificate.encode())  # the keys of its voters are as long as it is
        if len(kept) > 1 and num_bytes > MAX_STRANGE_BYTES:  # guard: never
            break
        kept.append(certificate)
    return Certificates(certificates=tuple(kept))


def signers(message: Wired | Entry) -> set[str]:
    """Return the peers whose signatures a message carries."""
    match message:
        case Entered():
            return signers(message.entry) | (signers(message.proposal) if message.proposal is not None else set())
        case Meeting():
            return {each.entry.peer_id for each in message.entered}
        case Proposal():
            turns = (each for turn in message.turns for each in (turn.vote, *turn.entries))
            statements = (*turns, *message.results, *message.goodbyes, *(proof.vote for proof in message.proofs))
            return {each.peer_id for each in statements}
        case Certificates():
            return signers_of(message.certificates)
        case Proof():
            return {message.vote.peer_id}
        case Lacking() | Question():
            return set()
        case _:
            return {message.peer_id}


@cache
def _common() -> bytes:
    """Return what most messages contain, so that it need not travel."""
    documents: tuple[type[Document], ...] = (Body, MemberEntry, Entry, *FIELDS)
    names = [",".join(f'"{name}":' for name in sorted(each.model_fields)) for each in documents]
    return "".join(names).encode() + Envelope().encode()


class Quota:
    """Processor time that each sender's messages may take: what is not used is saved up, to a bound."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[float, float]] = {}
        """Seconds left, and the loop time at which they were."""

    def left(self, sender: str, now: float) -> float:
        """Return the processor seconds that a sender has left."""
        left, at = self._left.get(sender, (BURST_SECONDS, now))
        return min(BURST_SECONDS, left + SHARE * (now - at))

    def take(self, sender: str, seconds: float, now: float) -> None:
        """Take processor seconds off a sender's time."""
        left = self.left(sender, now) - seconds
        self._left.pop(sender, None)
        self._left[sender] = left, now
        if len(self._left) > MAX_MEMBERS:
            del self._left[next(iter(self._left))]


class FewLines(logging.Filter):
    """Lets so many lines through in each minute: strangers cause lines for free."""

    def __init__(self) -> None:
        super().__init__()
        self._minute, self._num_lines = 0, 0

    def filter(self, record: logging.LogRecord) -> bool:
        minute = int(record.created // 60)
        self._num_lines = self._num_lines + 1 if minute == self._minute else 1
        self._minute = minute
        return record.levelno >= logging.WARNING or self._num_lines <= MAX_LINES  # guard: MAX_LINES -> 10**9


def say_few(log: logging.Logger) -> None:
    """Let a log say little of what strangers cause."""
    if not log.filters:
        log.addFilter(FewLines())


class PeerWire:
    """Messages to and from the other peers of a run; implements `agreement.Wire`.

    Args:
        network: This peer's network.
        keys: This peer's key, and those of others.
        last: Returns the last certificate's body.
        peers: Returns the peers that follow the run.
        is_gone: Checks whether a peer's lease has run out, as far as this peer knows.
        receive: Takes each message of an authenticated peer, in the event loop.
        through: Peers to pass messages on if no member can be called.
    """

    def __init__(
        self,
        network: Network,
        keys: PeerKeys,
        last: Callable[[], Body],
        peers: Callable[[], Collection[str]],
        is_gone: Callable[[str], bool],
        receive: Callable[[str, Wired], None],
        through: Collection[str] = (),
    ) -> None:
        self.is_gone = is_gone
        self.now = network.now
        self.asked: set[str] = set()
        """Peers that were asked for certificates, which may be large, and have not answered yet."""
        self._network = network
        self._keys = keys
        self._last = last
        self._peers = peers
        self._take = receive
        self._through = through
        self._service = f"{network.run_id}::{PROTOCOL}.agreement"
        self._told: dict[str, set[str]] = {}
        """Owners of the public keys that each peer was told."""
        self._sending: Counter[str] = Counter()
        self._lanes: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(MAX_READ_OF_ONE))
        self._last_packed: tuple[Wired | None, tuple[tuple[str, ...], bool], bytes] = None, ((), False), b""
        self._results: dict[str, Result] = {}
        """The newest results that were posted or have come, by digest."""
        self._proposed: Proposal | None = None
        """The last proposal that was posted."""
        self._reading: Counter[str] = Counter()
        self._turns = {True: asyncio.Semaphore(MAX_READ), False: asyncio.Semaphore(MAX_READ_OF_OTHERS)}
        """Turns to be read, of voters and of others."""
        self._quota = Quota()
        self._tasks: set[asyncio.Task[None]] = set()
        say_few(log)

    async def serve(self) -> None:
        """Take other peers' messages from now on."""
        await self._network.serve(self._service, SEND_SECONDS, self._receive)

    def peers(self) -> Collection[str]:
        """Return the other peers that follow the run."""
        return {*self._peers(), *self._last().voters} - {self._network.peer_id}

    # ------------------------------------------------------------------ sending

    def post(self, peer: str, message: Wired) -> None:
        """Send a message; it is lost if the peer cannot be reached soon."""
        if isinstance(message, Question):
            self.asked.add(peer)
        elif isinstance(message, Certificates):
            message = shortened(message)
        owners = signers(message) - self._told.get(peer, frozenset())
        keys = tuple(key for owner in sorted(owners) if (key := self._keys.public_key(owner)))
        if isinstance(message, Result):
            self._keep(message)
        elif isinstance(message, Proposal):
            self._proposed = message
        self._begin(peer, self._post(peer, message, keys, owners))

    def _begin(self, peer: str, sending: Coroutine[Any, Any, None]) -> None:
        if self._sending[peer] >= MAX_UNSENT:  # guard: never
            log.debug("a message to %s was lost: too many are on their way to it", peer[-6:])
            return sending.close()
        self._sending[peer] += 1
        task = asyncio.get_running_loop().create_task(sending)
        self._tasks.add(task)
        task.add_done_callback(partial(self._sent, peer))

    def _sent(self, peer: str, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._sending[peer] -= 1
        if not self._sending[peer]:
            del self._sending[peer]
            self._lanes.pop(peer, None)

    async def _post(self, peer: str, message: Wired, keys: tuple[str, ...], owners: set[str]) -> None:
        """Deliver a message; if its receiver cannot be reached, to a peer that can be called, to be passed on."""
        if await self._deliver(peer, self._packed(message, keys, peer in self._last().voters)):
            if not self._last().is_stranger(peer):  # strangers cost nothing, and are many
                self._told[peer] = self._told.get(peer, set()) | owners
            return
        called = [m.peer_id for m in self._last().members if not m.calls_only and m.peer_id != self._network.peer_id]
        if isinstance(message, PASSED_ON) and peer not in called:
            for between in (*called, *self._through)[:2]:
                if await self._deliver(between, packed(message, keys, to=peer)):
                    return

    def _packed(self, message: Wired, keys: tuple[str, ...], votes: bool) -> bytes:
        """Pack a message once for all its receivers that know the same."""
        known = keys, votes
        if self._last_packed[0] is not message or self._last_packed[1] != known:
            self._last_packed = message, known, packed(message, keys, names_results=votes)
        return self._last_packed[2]

    async def _deliver(self, peer: str, data: bytes) -> bool:
        """Send bytes; return whether the peer has read them."""
        try:
            async with asyncio.timeout(SEND_SECONDS), self._lanes[peer]:  # more at once would not be read
                channel = await self._network.open(peer, self._service, SEND_SECONDS)
                with contextlib.closing(channel):
                    await channel.send_last(data)
            return True
        except Exception as error:  # noqa: BLE001 - the peer is gone, or runs another version: the message is lost
            log.debug("a message to %s was lost: %r", peer[-6:], error)
            return False

    async def sent(self, seconds: float) -> None:
        """Wait until all messages are sent or lost, at most so long."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=seconds)

    # ------------------------------------------------------------------ receiving

    async def _receive(self, channel: Channel, peer: str) -> None:
        if self._reading[peer] >= MAX_READ_OF_ONE:  # guard: never
            return
        self._reading[peer] += 1
        try:
            # guard: peer in self._last().voters -> False
            async with asyncio.timeout(SEND_SECONDS), self._turns[peer in self._last().voters]:
                await self._read(channel, peer)
        except (SpesError, TimeoutError) as error:
            log.info("dropped a message of %s: %s", peer[-6:], error)
        finally:
            self._reading[peer] -= 1
            if not self._reading[peer]:
                del self._reading[peer]

    async def _read(self, channel: Channel, peer: str) -> None:
        last, loop = self._last(), asyncio.get_running_loop()
        is_held, is_asked = peer in self._keys.held, peer in self.asked  # whatever it claims
        payer = peer if is_held or is_asked else ""
        if self._quota.left(payer, loop.time()) <= 0:  # guard: never
            raise ExchangeError("its messages have taken too much time")
        most = message_bytes(last) if is_held else MAX_STRANGE_BYTES  # guard: always
        most = max(most, certificates_bytes(len(last.slots))) if is_asked else most
        data = await channel.receive_text(most)
        envelope, seconds = await asyncio.to_thread(self._timed_unpack, data, most)
        is_answer = is_asked and isinstance(envelope, Envelope) and envelope.certificates is not None
        if not is_answer:  # which may be many, as this peer asks on
            self._quota.take(payer, seconds, loop.time())
        if isinstance(envelope, ExchangeError):
            raise envelope
        message = envelope.message
        if envelope.to is None or envelope.to == self._network.peer_id:
            if isinstance(message, Whole):
                return self._answer_whole(peer, message)
            self._learn(peer, envelope.keys, message)
            await self._hand_over(peer, message, envelope.named, is_held=is_held)
        elif is_held and envelope.to in last.voters and isinstance(message, PASSED_ON):  # guard: always
            self._begin(envelope.to, self._pass_on(envelope.to, envelope))

    def _timed_unpack(self, data: bytes, most: int) -> tuple[Envelope | ExchangeError, float]:
        """Return an envelope, or what is wrong with it, and the processor seconds that this took."""
        began = self._network.processor_seconds()
        try:
            found: Envelope | ExchangeError = Envelope.unpack(data, most)
        except ExchangeError as error:
            found = error
        return found, self._network.processor_seconds() - began

    async def _hand_over(self, peer: str, message: Wired, named: Sequence[str], *, is_held: bool) -> None:
        """Give the run's decisions a message; a proposal with the results that it names."""
        match message:
            case Question():
                self._told.pop(peer, None)  # it may have forgotten all keys
            case Result() if is_held:
                self._keep(message)
            case Proposal() if named:
                if not await self._has_all(named):
                    return self._begin(peer, self._ask_whole(peer, message))
                message = message.model_copy(update={"results": tuple(self._results[each] for each in named)})
        self._take(peer, message)

    def _keep(self, result: Result) -> None:
        self._results[_digest(result)] = result
        if len(self._results) > 2 * MAX_MEMBERS:
            del self._results[next(iter(self._results))]

    async def _has_all(self, named: Sequence[str]) -> bool:
        """Return whether results are here, or come soon: they may be on their way from their authors."""
        for _ in range(10):
            if self._results.keys() >= set(named):
                return True
            await asyncio.sleep(LATE_SECONDS / 10)
        return False

    async def _ask_whole(self, peer: str, proposal: Proposal) -> None:
        await self._deliver(peer, packed(Whole(body=proposal.body.digest)))

    def _answer_whole(self, peer: str, asked: Whole) -> None:
        proposed = self._proposed
        if proposed is not None and proposed.body.digest == asked.body and peer in self._last().voters:
            self._begin(peer, self._send_whole(peer, proposed))

    async def _send_whole(self, peer: str, proposal: Proposal) -> None:
        keys = (self._keys.public_key(owner) for owner in sorted(signers(proposal)))
        await self._deliver(peer, packed(proposal, tuple(filter(None, keys))))

    async def _pass_on(self, peer: str, envelope: Envelope) -> None:
        await self._deliver(peer, envelope.model_copy(update={"to": None}).pack())

    def _learn(self, peer: str, keys: Sequence[str], message: Wired) -> None:
        needed = signers(message)
        for key in keys:
            try:
                if peer_id_of(key.encode()) in needed:  # guard: always
                    self._keys.learn(key.encode())
            except ValueError as error:
                log.info("%s has sent what is no public key: %s", peer[-6:], error)
