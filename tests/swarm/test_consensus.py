"""Rounds are decided over real streams, without averaging, whatever a stranger sends meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import struct
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from hivemind.p2p import PeerID
from peer_server import RUN_ID, start_of

from spes_p2p.codecs.vectors import digest
from spes_p2p.errors import AbsentError
from spes_p2p.swarm.certificate import Certificate, Certificates, MemberEntry, Point, Question, SlotState, vote_for
from spes_p2p.swarm.chain import Chain
from spes_p2p.swarm.consensus import (
    CERTIFICATES,
    MAX_MESSAGE_BYTES,
    MAX_QUIET_BYTES,
    MAX_RECEIVING_EACH,
    Consensus,
    Envelope,
)
from spes_p2p.swarm.p2p.channel import TEXT, DisconnectedError
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.votes import Rules

pytestmark = pytest.mark.timeout(240)

NAMES = "abc"
RULES = Rules(min_peers=3, round_seconds=60.0, attempt_seconds=3.0, confirmation_seconds=1.0, shrink_seconds=600.0)
SECONDS = 30.0


class Peer:
    """A voter of the run."""

    def __init__(self, folder, name, addresses=(), *, finds=False):
        self._folder = folder
        self.path = folder / name / "consensus" / CERTIFICATES
        self._name = name
        self.start(addresses, is_new=True, finds=finds)

    def start(self, addresses, *, is_new=False, finds=False):
        voters = tuple(Identity(self._folder / name / "key").peer_id for name in NAMES)
        self.node = Node(Identity(self._folder / self._name / "key"), RUN_ID, initial_peers=addresses)
        self.peer_id = self.node.peer_id
        self.consensus = Consensus(
            self.node,
            self.path.parent,
            start_of(voters),
            RULES,
            peers=lambda: voters,
            is_gone=lambda peer: False,
            is_new=is_new,
            finds=finds,
        )

    def close(self):
        self.consensus.close()
        self.node.close()

    def rounds(self):
        """Return the rounds of the certificates on disk."""
        return [json.loads(line)["certificate"]["body"]["round"] for line in self.path.read_text().splitlines()]


@pytest.fixture(scope="module")
def three(tmp_path_factory):
    folder = tmp_path_factory.mktemp("three")
    peers = [Peer(folder, NAMES[0])]
    peers += [Peer(folder, name, peers[0].node.addresses()) for name in NAMES[1:]]
    yield peers
    for peer in peers:
        peer.close()


@pytest.fixture(scope="module")
def stranger(three, tmp_path_factory):
    node = Node(Identity(tmp_path_factory.mktemp("stranger") / "key"), RUN_ID, initial_peers=three[0].node.addresses())
    yield node
    node.close()


def decide(peers, on_wait=lambda: None):
    """Let peers that have averaged the same decide a round; return its body, which is the same on all of them."""
    last = peers[0].consensus.last()
    members = [MemberEntry(peer_id=peer, tokens=1, slots=(0,)) for peer in sorted(each.peer_id for each in peers)]
    shared, slot = digest(f"shared {last.round + 1}".encode()), digest(f"slot {last.round + 1}".encode())
    digests = {"shared": shared, "slot-0": slot}

    def confirm(peer):
        consensus, deadline = peer.consensus, time.monotonic() + 2 * SECONDS
        while time.monotonic() < deadline:
            ends_at = time.time() + 1.0
            body = consensus.decide(last, consensus.attempt, members, ends_at, digests, on_wait=on_wait)
            if body is not None:
                return body
        raise AssertionError(f"round {last.round + 1} was not decided")

    with ThreadPoolExecutor(len(peers)) as pool:
        bodies = list(pool.map(confirm, peers))
    assert {body.digest for body in bodies} == {bodies[0].digest}
    assert (bodies[0].shared, bodies[0].slots[0].digest) == (shared, slot)
    return bodies[0]


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


@contextlib.asynccontextmanager
async def calling(node, peer):
    channel = await node.open(peer.peer_id, peer.consensus._service, SECONDS)
    with contextlib.closing(channel):
        yield channel


def send(node, peer, data):
    """Send bytes as one message; return once the peer has hung up."""

    async def deliver():
        async with calling(node, peer) as channel:
            with contextlib.suppress(DisconnectedError):
                await channel.send_last(data)

    node.run(deliver(), 2 * SECONDS)


@pytest.fixture
def taken(three, monkeypatch):
    """Senders of the messages that the first peer's decider gets to see."""
    senders, take = [], three[0].consensus._take

    def noted(peer, keys, message):
        senders.append(peer)
        take(peer, keys, message)

    monkeypatch.setattr(three[0].consensus, "_take", noted)
    return senders


def question(peer):
    last = peer.consensus.last()
    return Question(points=(Point(round=last.round, digest=last.digest),))


def test_a_round_is_certified_once_most_voters_confirm_the_same(three):
    bodies = [decide(three) for _ in range(2)]
    assert bodies[1].round == bodies[0].round + 1 and bodies[1].previous == bodies[0].digest
    for peer in three:
        assert peer.rounds() == list(range(1, bodies[1].round + 1)), "one line each, in order"
        assert peer.consensus.last().digest == bodies[1].digest


def test_a_peer_that_waits_for_the_others_can_say_so(three, monkeypatch):
    """They may have died before their votes came: it waits for minutes then."""
    monkeypatch.setattr("spes_p2p.swarm.consensus.WAIT_SECONDS", 0.05)
    waited = threading.Event()
    consensus, last = three[0].consensus, three[0].consensus.last()
    with ThreadPoolExecutor(1) as pool:
        alone = pool.submit(consensus.decide, last, 0, (), time.time(), {}, on_wait=waited.set)
        assert waited.wait(SECONDS) and not alone.done()
        decide(three[1:])
        alone.result(SECONDS)  # of the certificate, or of another attempt, where this peer had to propose
    wait_until(lambda: consensus.last().round == last.round + 1)


def test_a_peer_that_starts_again_has_its_chain_and_asks_for_what_it_has_missed(three):
    known = decide(three)
    away = three[2]
    away.close()
    missed = [decide(three[:2]) for _ in range(2)]
    assert away.rounds()[-1] == known.round
    away.start(three[0].node.addresses())
    assert away.consensus.body_at(known.round).digest == known.digest
    away.consensus.catch_up(SECONDS)
    assert away.consensus.last().digest == missed[-1].digest
    assert away.rounds() == list(range(1, missed[-1].round + 1))
    assert decide(three).previous == missed[-1].digest, "its vote counts again"


def ends_up_with_all(three, monkeypatch, told, seconds):
    """Have a peer catch up where one of two others tells a part at once, and the other one all, late."""
    decide(three)  # it knows the others' keys from its own chain
    away = three[2]
    away.close()
    missed = [decide(three[:2]) for _ in range(2)]
    away.start(three[0].node.addresses())
    consensus, ask = away.consensus, away.consensus._decider.ask
    first = three[0].consensus._decider.chain.certificate_at(missed[0].round)

    def answer(peer):
        with consensus._changed:
            ask(peer)

    def ask_late(peer):
        if peer == three[1].peer_id:
            consensus._take(peer, (), Certificates(certificates=(first,)[:told]))
        else:
            threading.Timer(seconds, answer, [peer]).start()

    monkeypatch.setattr(consensus._decider, "ask", ask_late)
    consensus.catch_up(SECONDS)
    assert consensus.last().digest == missed[-1].digest
    monkeypatch.undo()
    decide(three)


def test_a_peer_that_is_behind_itself_does_not_end_the_catching_up(three, monkeypatch):
    ends_up_with_all(three, monkeypatch, told=0, seconds=0.3)


def test_a_part_of_the_chain_that_is_told_twice_does_not_end_the_catching_up(three, monkeypatch):
    monkeypatch.setattr("spes_p2p.swarm.consensus.OTHERS_SECONDS", 0.1)
    ends_up_with_all(three, monkeypatch, told=1, seconds=0.5)


def no_message(peer):
    return Envelope().pack()


def two_messages(peer):
    message = question(peer)
    return Envelope(question=message, certificates=Certificates(certificates=())).pack()


def half_a_message(peer):
    return Envelope(question=question(peer)).pack()[:-1]


def not_packed(peer):
    return Envelope(question=question(peer)).encode()


def no_json(peer):
    return zlib.compress(b"\xff" * 100)


def too_long(peer):
    return Envelope(question=question(peer)).pack().ljust(MAX_QUIET_BYTES + 1)


def too_long_unpacked(peer):
    return zlib.compress(Envelope(question=question(peer)).encode().ljust(MAX_QUIET_BYTES + 1))


@pytest.mark.parametrize(
    "make", [no_message, two_messages, half_a_message, not_packed, no_json, too_long, too_long_unpacked]
)
def test_a_message_that_is_not_one_is_dropped(three, stranger, taken, caplog, make):
    decide(three)  # from then on they tell strangers from others
    with caplog.at_level(logging.INFO, "spes_p2p"):
        send(stranger, three[0], make(three[0]))
        wait_until(lambda: "dropped a message of " + stranger.peer_id[-6:] in caplog.text)
    if make is too_long:
        assert f"message of {MAX_QUIET_BYTES + 1} bytes in place of at most {MAX_QUIET_BYTES}" in caplog.text
    assert stranger.peer_id not in taken
    decide(three)


def test_nor_is_one_of_a_voter_that_is_too_long(three, taken, caplog):
    decide(three)
    message = Envelope(question=question(three[0])).pack()
    with caplog.at_level(logging.INFO, "spes_p2p"):
        send(three[1].node, three[0], message.ljust(MAX_MESSAGE_BYTES + 1))
        wait_until(lambda: "dropped a message of " + three[1].peer_id[-6:] in caplog.text)
    assert f"message of {MAX_MESSAGE_BYTES + 1} bytes in place of at most {MAX_MESSAGE_BYTES}" in caplog.text
    decide(three)


def test_a_peer_that_only_claims_to_follow_sends_no_more_than_a_stranger(three, stranger, taken, caplog, monkeypatch):
    decide(three)
    monkeypatch.setattr(three[0].consensus, "_peers", lambda: {*three[0].consensus.last().voters, stranger.peer_id})
    three[0].consensus._asked.discard(stranger.peer_id)
    with caplog.at_level(logging.INFO, "spes_p2p"):
        send(stranger, three[0], too_long(three[0]))
        wait_until(lambda: f"in place of at most {MAX_QUIET_BYTES}" in caplog.text)
    assert stranger.peer_id not in taken
    decide(three)


def test_a_voters_certificates_have_no_more_than_the_runs_slots_and_voters(three, taken, caplog):
    last = decide(three)
    wide = last.model_copy(update={"slots": (SlotState(round=0),) * 4096})
    many = Certificates(certificates=(Certificate(body=wide, attempt=0, signatures={}),) * 20)
    with caplog.at_level(logging.INFO, "spes_p2p"):
        send(three[1].node, three[0], Envelope(certificates=many).pack())
        wait_until(lambda: "bytes of certificates, more than two of this run" in caplog.text)
    decide(three)


def test_a_newcomer_with_a_link_follows_no_chain_but_the_links(three, tmp_path_factory, monkeypatch):
    """Former voters' keys sign another chain, which the newcomer meets first."""
    last = decide(three)
    recent, folder = three[0].consensus.recent(), three[0]._folder
    newcomer = Peer(folder, "d", three[0].node.addresses(), finds=True)
    consensus, liar = newcomer.consensus, "liar"
    try:
        keys = [IdentityKeys(Identity(folder / name / "key")) for name in NAMES]
        forged = Chain(consensus.last())
        for _ in range(last.round + 2):
            body = last.model_copy(
                update={"round": forged.last.round + 1, "previous": forged.last.digest, "ends_at": 1.0}
            )
            votes = [vote_for(body, 0, each.peer_id).signed(each) for each in keys]
            signatures = {vote.peer_id: vote.signature for vote in votes}
            forged.add(Certificate(body=body, attempt=0, signatures=signatures), lambda *_: False)
        public = [each.identity.public_key for each in (peer.node for peer in three)]

        def answer():
            consensus._take(liar, public, Certificates(certificates=forged.after(0)))
            consensus._take(liar, (), Certificates(certificates=()))

        ask = consensus._decider.ask
        monkeypatch.setattr(
            consensus._decider, "ask", lambda peer: consensus.later(0.0, answer) if peer == liar else ask(peer)
        )
        monkeypatch.setattr(consensus, "_peers", list)
        with pytest.raises(AbsentError, match="try again, or a newer link"):
            consensus.find(recent, [liar])
        assert not newcomer.path.exists()
        monkeypatch.setattr(consensus, "_peers", lambda: [peer.peer_id for peer in three])
        consensus.find(recent, [liar])
        round, _, digest = recent.partition(":")
        assert consensus._decider.chain.has(int(round), digest)
        wait_until(lambda: consensus.last() == last and newcomer.rounds()[-1] == last.round)
        consensus._decider.receive(liar, Certificates(certificates=forged.after(0)[:1]))
        assert consensus.last() == last
    finally:
        newcomer.close()


def test_a_certificate_with_forged_signatures_is_not_followed(three, stranger, taken):
    last = decide(three)
    forged = last.model_copy(update={"round": last.round + 1, "previous": last.digest, "voters": (stranger.peer_id,)})
    signatures = {voter: stranger.identity.sign(forged.encode()).decode() for voter in last.voters}
    certificate = Certificate(body=forged, attempt=0, signatures=signatures)
    message = Certificates(certificates=(certificate,))
    send(stranger, three[0], Envelope(keys=(stranger.identity.public_key.decode(),), certificates=message).pack())
    wait_until(lambda: stranger.peer_id in taken)
    assert decide(three).previous == last.digest


def test_of_one_peer_only_a_few_messages_are_read_at_the_same_time(three, stranger, taken):
    """They would fill the memory, or keep the others' messages out."""
    consensus, message = three[0].consensus, Envelope(question=question(three[0])).pack()

    async def stall():
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_RECEIVING_EACH):
                channel = await stack.enter_async_context(calling(stranger, three[0]))
                channel._writer.write(struct.pack("!cI", TEXT, len(message)))  # and nothing more
                await channel._writer.drain()
            while consensus._receiving[stranger.peer_id] < MAX_RECEIVING_EACH:
                await asyncio.sleep(0.02)
            async with calling(stranger, three[0]) as channel:
                with contextlib.suppress(DisconnectedError):
                    await channel.send_last(message)
            decided = await asyncio.to_thread(decide, three)
            return decided, list(taken)

    decided, heard = stranger.run(stall(), 3 * SECONDS)
    assert stranger.peer_id not in heard and {three[1].peer_id, three[2].peer_id} & set(heard), (
        "only the others were heard"
    )
    assert decided.digest == consensus.last().digest
    wait_until(lambda: not consensus._receiving[stranger.peer_id])
    send(stranger, three[0], message)
    wait_until(lambda: stranger.peer_id in taken)


def test_no_more_messages_wait_for_the_decider_than_have_a_turn(three, stranger, taken, monkeypatch):
    """A disk that is slow, or a long check, let a peer's memory fill; and the thread of all streams waited, too."""
    consensus, message = three[0].consensus, Envelope(question=question(three[0])).pack()
    queued, later = [], consensus.later

    def noted(seconds, action):
        if getattr(action, "func", None) == consensus._take_turn:
            queued.append(action)
        later(seconds, action)

    monkeypatch.setattr(consensus, "later", noted)
    monkeypatch.setitem(consensus._turns, False, asyncio.Semaphore(2))

    async def flood():
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_RECEIVING_EACH):
                channel = await stack.enter_async_context(calling(stranger, three[0]))
                await channel.send(TEXT, message)
            while len(queued) < 2 or consensus._receiving[stranger.peer_id] != MAX_RECEIVING_EACH - 2:
                await asyncio.sleep(0.02)

    with consensus._changed:  # the decider is busy
        stranger.run(flood(), SECONDS)
        three[0].node.run(asyncio.sleep(0), SECONDS)  # other streams are served meanwhile
        assert len(queued) == 2
    wait_until(lambda: taken.count(stranger.peer_id) >= 2)
    wait_until(lambda: consensus._turns[False]._value == 2)
    decide(three)


def test_strangers_that_send_nothing_keep_no_voter_waiting(three, stranger, monkeypatch):
    """Four of them held all places, and each message of a voter was dropped."""
    consensus = three[0].consensus
    monkeypatch.setattr("spes_p2p.swarm.consensus.SEND_SECONDS", 4 * SECONDS)
    monkeypatch.setitem(consensus._turns, False, asyncio.Semaphore(MAX_RECEIVING_EACH))

    async def stall():
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_RECEIVING_EACH):
                channel = await stack.enter_async_context(calling(stranger, three[0]))
                channel._writer.write(struct.pack("!cI", TEXT, 9))  # and nothing more
                await channel._writer.drain()
            while consensus._receiving[stranger.peer_id] < MAX_RECEIVING_EACH:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(decide, three)
            return consensus._receiving[stranger.peer_id]

    assert stranger.run(stall(), 3 * SECONDS) == MAX_RECEIVING_EACH, "the round was decided beside them"
    wait_until(lambda: not consensus._receiving[stranger.peer_id])


def test_strangers_fill_half_of_all_streams_and_the_voters_have_the_rest(three, stranger, monkeypatch):
    """Free identities shut a peer off from all others by idle streams."""
    decide(three)  # before the first certificate all count
    quota, peer = three[0].node.p2p.stream_quota, PeerID.from_base58(stranger.peer_id)
    monkeypatch.setattr(quota, "max_total", MAX_RECEIVING_EACH)

    async def stall():
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_RECEIVING_EACH):
                with contextlib.suppress(OSError):  # the peer has hung up
                    channel = await stack.enter_async_context(calling(stranger, three[0]))
                    channel._writer.write(struct.pack("!cI", TEXT, 9))  # and nothing more
                    await channel._writer.drain()
            while quota.num_held(peer) < MAX_RECEIVING_EACH // 2:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(decide, three)
            return quota.num_held(peer)

    assert stranger.run(stall(), 3 * SECONDS) == MAX_RECEIVING_EACH // 2
    wait_until(lambda: not quota.num_held(peer))


def test_only_keys_that_a_message_needs_are_learnt(three, stranger, taken, tmp_path):
    other = Identity(tmp_path / "key")
    envelope = Envelope(keys=(other.public_key.decode(),), question=question(three[0]))
    send(stranger, three[0], envelope.pack())
    wait_until(lambda: stranger.peer_id in taken)
    with three[0].consensus._changed:
        assert not three[0].consensus._keys.public_key(other.peer_id)
