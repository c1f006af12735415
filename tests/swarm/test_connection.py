"""Peers that lose each other find each other again, and none believes that it is in a swarm when it is not."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import threading

import hivemind.dht.protocol
import pytest
import torch
from lanes import sample
from peer_processes import free_port
from peer_server import ROUNDS, average, start_of
from real_peers import NUMELS, PeerProcess, close_all, contribution, start_swarm
from split_brain import frozen, seconds_until_death_is_seen, split_and_heal

from spes_p2p.codecs.format import Segment
from spes_p2p.errors import ConfigError, JoinError
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.consensus import WAIT_SECONDS
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.p2p import node as node_module
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.peerstore import Peerstore
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import SHARED

VECTORS = Vectors(NUMELS, {kind: (Segment(numel, "fp32"),) for kind, numel in NUMELS.items()})

pytestmark = pytest.mark.timeout(480)


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    peers = start_swarm(tmp_path_factory.mktemp("four"), 4)
    yield peers
    close_all(peers)


@pytest.mark.full
def test_two_halves_that_forgot_each_other_while_frozen_find_each_other_within_30_seconds(four):
    random.shuffle(four)
    seconds = split_and_heal(four[:2], four[2:])
    print(f"two halves of four peers found each other again after {seconds:.1f} s")
    assert seconds < 2 * 30


@pytest.mark.full
def test_a_dead_p2pd_is_noticed_within_15_seconds(four):
    seconds = seconds_until_death_is_seen(four.pop())
    print(f"a dead p2pd was noticed after {seconds:.1f} s")
    assert seconds < 2 * 15


def test_a_record_counts_as_stored_only_if_another_peer_took_it(tmp_path):
    alone = Node(Identity(tmp_path / "alone"), "run")
    try:
        assert not alone.store(progress(alone), 60.0)
        assert alone.read(Progress)[alone.peer_id].round == 1  # a later peer finds it
    finally:
        alone.close()
    others = start_swarm(tmp_path, 1)
    among = Node(Identity(tmp_path / "among"), "run", initial_peers=others[0].addresses)
    try:
        assert among.store(progress(among), 60.0)
        with frozen(others):
            assert not among.store(progress(among), 70.0)
    finally:
        among.close()
        close_all(others)


def progress(node):
    return Progress(peer_id=node.peer_id, round=1, ends_at=0.0)


# ---------------------------------------------------------------------- getting in


def dead_address(folder):
    return f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{Identity(folder / f'dead{random.random()}').peer_id}"


def average_alone(swarm, *others):
    """Make a round alone, in a run in which others vote, too, and come first: the first of two could go on."""
    start = start_of((swarm.peer_id, *others)).model_copy(update={"voters": (*others, swarm.peer_id)})
    swarm.enter(ROUNDS, VECTORS, start, max_slots=0)
    swarm.announce(Claim(peer_id=swarm.peer_id, state="active", max_slots=0, since=1.0))
    item = contribution(swarm.peer_id, torch.Generator().manual_seed(1))
    return item, average(swarm, item.member, item.deltas, expected=[swarm.peer_id], closes_from=0.0)


def known(folder, *addresses):
    peers = Peerstore(folder / "known_peers.json")
    peers.update({address.rsplit("/", 1)[-1]: [address] for address in addresses})
    return Peerstore(folder / "known_peers.json")


def test_where_no_initial_peer_answers_a_known_one_is_enough(four, tmp_path):
    addresses = [dead_address(tmp_path), four[0].addresses[0]]
    node = Node(
        Identity(tmp_path / "key"), "run", initial_peers=[dead_address(tmp_path)], peerstore=known(tmp_path, *addresses)
    )
    assert node.has_met_peers
    node.close()


@contextlib.contextmanager
def stalling(port, num_bytes):
    """Lead calls to a port, of whose answers only so many bytes come through."""

    async def lead(reader, writer):
        answers, calls = await asyncio.open_connection("127.0.0.1", port)

        async def pass_on():
            while data := await reader.read(2**16):
                calls.write(data)

        passing, left = asyncio.create_task(pass_on()), num_bytes
        while left > 0 and (data := await answers.read(left)):
            left -= len(data)
            writer.write(data)
        await passing

    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    server = asyncio.run_coroutine_threadsafe(asyncio.start_server(lead, "127.0.0.1", 0), loop).result(10)
    yield server.sockets[0].getsockname()[1]
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.full
@pytest.mark.guard
def test_an_initial_peer_that_stalls_keeps_no_newcomer_from_the_others(four, tmp_path):
    """Once it has shown its key; one that says nothing at all is given up sooner by p2pd itself."""
    port = int(four[0].addresses[0].split("/")[4])
    with stalling(port, num_bytes=1000) as stalls:
        initial = [f"/ip4/127.0.0.1/tcp/{stalls}/p2p/{four[0].peer_id}", four[1].addresses[0]]
        for _ in range(2):  # a returning peer asks first whether its identity is free
            Node(Identity(tmp_path / "key"), "run", initial_peers=initial).close()


@pytest.mark.full
@pytest.mark.guard
def test_an_identity_is_one_peers(four, tmp_path):
    """Whether p2pd can search at once is chance: it takes a moment to learn which peers it can ask."""
    node = Node(Identity(tmp_path / "key"), "run", initial_peers=four[0].addresses)
    try:
        for _ in range(8):
            with pytest.raises(ConfigError, match="in use by another peer"):
                Node(Identity(tmp_path / "key"), "run", initial_peers=four[1].addresses)
    finally:
        node.close()


def test_a_search_waits_until_there_is_somebody_to_ask(four):
    async def search() -> bool:
        probe = await DaemonP2P.create(dht_mode="client", use_relay=False)
        try:
            connect, has_asked = probe._client.connect, asyncio.Event()

            async def watched(*args):
                try:
                    return await connect(*args)
                finally:
                    has_asked.set()

            probe._client.connect = watched
            found = asyncio.create_task(probe.finds(four[0].peer_id, 30.0))
            await has_asked.wait()
            await probe.dial({four[1].peer_id: four[1].addresses}, 30.0)
            return await found
        finally:
            await probe.shutdown()

    assert asyncio.run(search())


def test_an_error_names_every_address_that_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(node_module, "RETURN_SECONDS", 0.0)
    initial, cached = dead_address(tmp_path), dead_address(tmp_path)
    with pytest.raises(JoinError) as raised:
        Node(Identity(tmp_path / "key"), "run", initial_peers=[initial], peerstore=known(tmp_path, cached))
    assert initial in str(raised.value) and cached in str(raised.value)


@pytest.mark.parametrize(("ahead", "says"), [(4.8, "ahead of"), pytest.param(-60.2, "behind", marks=pytest.mark.full)])
def test_a_clock_that_is_not_the_swarms_is_refused_with_the_difference(four, tmp_path, monkeypatch, ahead, says):
    now = hivemind.dht.protocol.get_dht_time
    monkeypatch.setattr(hivemind.dht.protocol, "get_dht_time", lambda: now() + ahead)
    with pytest.raises(JoinError, match=rf"{int(abs(ahead))}\.\d s {says} .*timedatectl"):
        Node(Identity(tmp_path / "key"), "run", initial_peers=four[0].addresses)


def test_one_peer_with_a_wrong_clock_turns_no_newcomer_away(four, tmp_path, monkeypatch):
    now = hivemind.dht.protocol.get_dht_time
    with monkeypatch.context() as other_time:
        other_time.setattr(hivemind.dht.protocol, "get_dht_time", lambda: now() + 60.0)
        wrong = Node(Identity(tmp_path / "wrong"), "run")
    try:
        with pytest.raises(JoinError, match="behind the swarm's"):
            Node(Identity(tmp_path / "alone"), "run", initial_peers=wrong.addresses())
        addresses = [four[0].addresses[0], four[1].addresses[0], wrong.addresses()[0]]
        node = Node(Identity(tmp_path / "key"), "run", initial_peers=addresses)
        try:
            assert node.has_met_peers and node.store(progress(node), 60.0)
        finally:
            node.close()
    finally:
        wrong.close()


# ---------------------------------------------------------------------- when all others have vanished


@pytest.mark.parametrize("trains_alone", sample([False, True], [False]))
def test_a_peer_that_was_in_company_commits_alone_only_if_told_to(tmp_path, caplog, trains_alone):
    dead = dead_address(tmp_path)
    node = Node(Identity(tmp_path / "key"), "run", peerstore=known(tmp_path, dead))
    swarm = HivemindSwarm(node, tmp_path / "versions", trains_alone=trains_alone)
    closing = threading.Timer(60.0 if trains_alone else WAIT_SECONDS + 2.0, swarm.close)
    closing.start()
    item, result = average_alone(swarm, dead.rsplit("/", 1)[-1])
    if trains_alone:
        closing.cancel()
        swarm.close()
        assert torch.equal(result.committed[SHARED], item.deltas[SHARED])
        return
    assert not result.committed and SHARED in result.dropped
    said = next(record.message for record in caplog.records if "waits for" in record.message)
    assert re.search(r"since \d s; keeping round 0", said) and "--alone" in said


def test_a_peer_that_never_met_another_trains_alone(tmp_path):
    node = Node(Identity(tmp_path / "key"), "run")
    swarm = HivemindSwarm(node, tmp_path / "versions")
    assert SHARED in average_alone(swarm)[1].committed
    swarm.close()


def test_a_peer_keeps_the_addresses_that_others_announce(four, tmp_path):
    with_cache = PeerProcess(tmp_path, four[0].addresses, known_peers=True).wait_until_ready()
    deadline = threading.Event()
    for _ in range(200):
        if set(Peerstore(tmp_path / "known_peers.json").addresses()) >= {peer.peer_id for peer in four}:
            break
        deadline.wait(0.1)
    else:
        pytest.fail(f"knows only {Peerstore(tmp_path / 'known_peers.json').addresses()}")
    with_cache.close()
