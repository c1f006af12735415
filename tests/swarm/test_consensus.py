"""Rounds are decided over real streams, without averaging, whatever a stranger sends meanwhile.

What needs no p2pd is in `tests/unit/swarm/test_swarm_consensus.py` and `test_swarm_wire.py`.
"""

import asyncio
import contextlib
import logging
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from deciders import Decider
from hivemind.p2p import PeerID
from peer_server import RUN_ID, start_of

from spes_p2p.swarm.certificate import Certificates, Point, Question, vote_for
from spes_p2p.swarm.following import MIN_SECONDS_APART
from spes_p2p.swarm.p2p.channel import TEXT, DisconnectedError
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.wire import MAX_READ_OF_ONE, MAX_STRANGE_BYTES, packed

pytestmark = pytest.mark.timeout(240)

NAMES = "abc"
SECONDS = 30.0


def start(folder, name, addresses=(), *, num_voters=3, **settings):
    """Start a peer over p2pd; three of them hold seats, and so many vote."""
    seats = tuple(Identity(folder / voter / "key").peer_id for voter in NAMES)
    identity = Identity(folder / name / "key")
    node = Node(identity, RUN_ID, initial_peers=addresses)
    body = start_of(seats, num_slots=1).model_copy(update={"voters": seats[:num_voters]})
    return Decider(node, identity, folder / name / "consensus", body, **settings)


def stop(peer):
    peer.consensus.close()
    peer.network.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("three")


@pytest.fixture(scope="module")
def three(folder):
    peers = [start(folder, NAMES[0])]
    peers += [start(folder, name, peers[0].network.addresses()) for name in NAMES[1:]]
    yield peers
    for peer in peers:
        stop(peer)


@pytest.fixture(scope="module")
def stranger(three, tmp_path_factory):
    identity = Identity(tmp_path_factory.mktemp("stranger") / "key")
    node = Node(identity, RUN_ID, initial_peers=three[0].network.addresses())
    yield node
    node.close()


def decide(peers):
    """Let peers decide a round; return its body, which is the same on all."""
    expected = [peer.peer_id for peer in peers]
    with ThreadPoolExecutor(len(peers)) as pool:
        bodies = list(pool.map(lambda peer: peer.decide(expected), peers))
    assert {body.digest for body in bodies} == {bodies[0].digest}
    return bodies[0]


def wait_until(condition):
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.02)


@contextlib.asynccontextmanager
async def calling(node, peer):
    channel = await node.open(peer.peer_id, peer.consensus._wire._service, SECONDS)
    with contextlib.closing(channel):
        yield channel


def test_rounds_are_certified_by_those_that_agree_and_kept_on_disk(three):
    bodies = [decide(three) for _ in range(2)]
    assert bodies[1].previous == bodies[0].digest
    for peer in three:
        assert peer.rounds() == list(range(1, bodies[1].round + 1)), "one line each, in order"


def test_a_peer_that_starts_again_has_its_chain_and_asks_for_what_it_has_missed(three, folder):
    known = decide(three)
    stop(three[2])
    missed = [decide(three[:2]) for _ in range(2)]
    three[2] = away = start(folder, NAMES[2], three[0].network.addresses(), is_new=False)
    assert away.consensus.body_at(known.round).digest == known.digest
    away.consensus.catch_up(SECONDS)
    assert away.last.digest == missed[-1].digest
    assert away.rounds() == list(range(1, missed[-1].round + 1))
    assert decide(three).previous == missed[-1].digest, "its vote counts again"


def test_a_newcomer_with_a_link_follows_the_links_chain(three, folder):
    last = decide(three)
    newcomer = start(folder, "d", three[0].network.addresses(), finds=True)
    try:
        newcomer.consensus.find(three[0].consensus.recent(), [three[0].peer_id])
        wait_until(lambda: newcomer.last == last and newcomer.rounds()[-1] == last.round)
    finally:
        stop(newcomer)


def test_the_founders_key_replaces_no_final_round(tmp_path, caplog):
    """It alone certified round 1, and signs another one at round 10."""
    founder = start(tmp_path, NAMES[0], num_voters=1)
    others = [start(tmp_path, name, founder.network.addresses(), num_voters=1) for name in NAMES[1:]]
    peers = [founder, *others]
    for peer in peers:
        peer.others = [each.peer_id for each in peers]
    try:
        for _ in range(10):
            last = decide(peers)
            threading.Event().wait(MIN_SECONDS_APART)  # what comes faster was made in advance
        assert len(last.voters) == 3 and others[0].consensus.recent().startswith("2:")
        first = founder.consensus._agreement.chain.certificate_at(1)
        bodies = (first.body.model_copy(update={"ends_at": float(end)}) for end in range(1000))
        body = next(each for each in bodies if each.digest < first.body.digest)
        vote = vote_for(body, 0, founder.peer_id).signed(founder.keys)
        forged = first.model_copy(update={"body": body, "signatures": {founder.peer_id: vote.signature}})

        async def send():
            for peer in others:
                founder.consensus._wire.post(peer.peer_id, Certificates(certificates=(forged,)))

        with caplog.at_level(logging.INFO, "spes_p2p"):
            founder.network.run(send(), SECONDS)
            wait_until(lambda: caplog.text.count("round 1 is final here") == 2)
        assert all(peer.last == last for peer in peers)
        assert decide(peers).previous == last.digest
    finally:
        for peer in peers:
            stop(peer)


def test_a_message_of_a_stranger_that_is_too_long_is_not_read(three, stranger, caplog):
    last = decide(three)  # from then on they tell strangers from others

    async def send():
        async with calling(stranger, three[0]) as channel:
            with contextlib.suppress(DisconnectedError):
                question = Question(points=(Point(round=last.round, digest=last.digest),))
                await channel.send_last(packed(question).ljust(MAX_STRANGE_BYTES + 1))

    with caplog.at_level(logging.INFO, "spes_p2p"):
        stranger.run(send(), SECONDS)
        wait_until(lambda: f"bytes in place of at most {MAX_STRANGE_BYTES}" in caplog.text)
    decide(three)


def test_strangers_fill_half_of_all_streams_and_the_voters_have_the_rest(three, stranger, monkeypatch):
    """Free identities shut a peer off from all others by idle streams."""
    decide(three)  # before the first certificate all count
    first, peer = three[0], PeerID.from_base58(stranger.peer_id)
    quota = first.network.p2p.stream_quota
    first.network.p2p.stream_quota.is_known = lambda peer: not first.last.is_stranger(peer.to_base58())
    monkeypatch.setattr(quota, "max_total", MAX_READ_OF_ONE)

    async def stall():
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(MAX_READ_OF_ONE):
                with contextlib.suppress(OSError):  # the peer has hung up
                    channel = await stack.enter_async_context(calling(stranger, first))
                    channel._writer.write(struct.pack("!cI", TEXT, 9))  # and nothing more
                    await channel._writer.drain()
            while quota._items[peer] < MAX_READ_OF_ONE // 2:
                await asyncio.sleep(0.02)
            await asyncio.to_thread(decide, three)
            return quota._items[peer]

    assert stranger.run(stall(), 3 * SECONDS) == MAX_READ_OF_ONE // 2
    wait_until(lambda: not quota._items[peer])
