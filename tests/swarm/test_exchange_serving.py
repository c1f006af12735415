"""What a peer serves, to which peers, at what rate, and what it refuses."""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from exchange_cluster import KEPT, NUMELS, PULL_SECONDS, flat, open_cluster

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange import exchange
from spes_p2p.swarm.exchange.protocol import RANGE, TEXT, Channel

pytestmark = pytest.mark.timeout(120)

ONE = NUMELS["slot"]


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """A server, a slow server, and a puller."""
    swarms = open_cluster(tmp_path_factory.mktemp, ["honest", "slow", "puller"], slow={"uplink_mbit": 8.0})
    yield swarms
    for swarm in swarms:
        swarm.close()


BAD_REQUESTS = {
    "a path": {"name": "../../etc/passwd"},
    "a negative round": {"min_round": -1},
    "a huge timeout": {"timeout": 1e9},
    "no timeout": {"timeout": float("nan")},
    "a digest that is none": {"have": "../x"},
    "more than there is to ask": {"offset": -1},
}


@pytest.mark.parametrize("name", ["slot-77", "kept-slot-77"])
def test_a_peer_that_passes_a_version_on_is_asked_again_until_it_has_it(trio, monkeypatch, name):
    """It has to fetch it first, longer than a caller is kept waiting; its author has it by now or never."""
    maker, relay, puller = trio
    monkeypatch.setattr(exchange, "LONGEST_WAIT_SECONDS", 0.1)
    monkeypatch.setattr("spes_p2p.swarm.exchange.client.OFFER_SECONDS", 0.2)
    declined, decline = threading.Event(), exchange.Server._decline

    async def watched(server, channel, state):
        declined.set()
        await decline(server, channel, state)

    monkeypatch.setattr(exchange.Server, "_decline", watched)
    value = KEPT.encode(flat(77)) if name.startswith("kept") else flat(77)
    wanted, authors = {name: [relay.peer_id]}, {name: [maker.peer_id]}
    with ThreadPoolExecutor() as pool:
        pull = pool.submit(puller.pull, wanted, min_round=5, timeout=PULL_SECONDS, authors=authors)
        assert declined.wait(PULL_SECONDS)
        if name.startswith("kept"):  # the relay is a replica, which makes it of the master
            relay.publish(5, {name: value})
        else:
            maker.publish(5, {name: value})
            assert relay.pull({name: [maker.peer_id]}, min_round=5, timeout=PULL_SECONDS) == {}
        assert pull.result() == {}
    assert torch.equal(puller.load(name), value)
    failed = puller.pull(wanted, min_round=6, timeout=PULL_SECONDS, authors={name: [relay.peer_id]})
    assert "absent" in failed[name]


def ask(puller, honest, request, *after):
    """Send a request, then messages; return the answer, and with messages what becomes of the stream."""

    async def talk():
        channel = await Channel.open(puller.node, honest.peer_id, "run::exchange.fetch", 10)
        try:
            await channel.send(TEXT, request)
            answer = json.loads(await channel.receive_text())
            for message in after:
                await channel.send(*message)
            try:
                return answer, await channel.receive_header() if after else None
            except ExchangeError as error:
                return answer, error
        finally:
            channel.close()

    return puller.node.run(talk(), 30)


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_bad_request_is_refused(trio, case):
    honest, _, puller = trio
    request = {"name": "slot-1", "min_round": 0, "timeout": 1.0} | BAD_REQUESTS[case]
    answer, _ = ask(puller, honest, json.dumps(request).encode())
    assert answer["state"] == "refused"


@pytest.mark.parametrize("span", [(5, 5), (9, 5), (0, 4 * ONE + 1), (2**64 - 8, 2**64 - 4), (0, 2**64 - 1)], ids=str)
def test_a_range_that_the_version_does_not_have_ends_the_stream(trio, seed, span):
    honest, _, puller = trio
    honest.publish(1, {"slot-3": flat(seed)})
    request = json.dumps({"name": "slot-3", "min_round": 0, "timeout": 1.0}).encode()
    answer, end = ask(puller, honest, request, (RANGE, b"".join(edge.to_bytes(8) for edge in span)))
    assert answer["state"] == "whole" and isinstance(end, ExchangeError)


@contextmanager
def pulling(puller, wanted, **settings):
    """Pull in a thread; yields the list to which the failures are added at its end."""
    failures = []
    work = threading.Thread(
        target=lambda: failures.append(
            puller.pull(wanted, **({"min_round": 0, "timeout": PULL_SECONDS} | settings)),
        )
    )
    work.start()
    yield failures
    work.join(PULL_SECONDS)


@pytest.fixture
def declined(trio, monkeypatch):
    """Set when the honest peer has said BUSY."""
    server, declined = trio[0].exchange.server, threading.Event()
    decline = server._decline

    async def noticed(channel, state):
        declined.set()
        await decline(channel, state)

    monkeypatch.setattr(server, "_decline", noticed)
    return declined


def test_strangers_wait_while_a_round_is_synchronised(trio, declined, seed):
    honest, _, puller = trio
    bundle = flat(seed)
    honest.publish(1, {"slot-2": bundle})
    honest.exchange.server.reserve_for([honest.peer_id], 60.0)
    try:
        with pulling(puller, {"slot-2": [honest.peer_id]}) as failures:
            assert declined.wait(30)
            assert not failures and "slot-2" not in puller.versions()
            honest.exchange.server.release()
    finally:
        honest.exchange.server.release()
    assert failures == [{}] and torch.equal(puller.load("slot-2"), bundle)


def test_a_reservation_that_is_never_released_lapses(trio, seed):
    honest, _, puller = trio
    honest.publish(1, {"slot-4": flat(seed)})
    honest.exchange.server.reserve_for([honest.peer_id], 1.0)
    assert puller.pull({"slot-4": [honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}


def test_members_of_the_round_are_served_meanwhile(trio, declined, seed):
    honest, _, puller = trio
    honest.publish(1, {"slot-5": flat(seed)})
    honest.exchange.server.reserve_for([honest.peer_id, puller.peer_id], 60.0)
    try:
        assert puller.pull({"slot-5": [honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}
    finally:
        honest.exchange.server.release()
    assert not declined.is_set()


def test_a_stranger_is_cut_off_when_a_round_begins_and_goes_on_where_it_was(trio, seed):
    """What had come is not sent again."""
    _, slow, puller = trio
    bundle = flat(seed)
    slow.publish(1, {"slot-6": bundle})
    before = puller.exchange.bytes_in
    with pulling(puller, {"slot-6": [slow.peer_id]}) as failures:
        while puller.exchange.bytes_in - before < 2**17:
            assert not failures
            threading.Event().wait(0.01)
        slow.exchange.server.reserve_for([slow.peer_id], 60.0)
        threading.Event().wait(1.5)  # more than the rest would take
        assert not failures
        slow.exchange.server.release()
    assert failures == [{}] and torch.equal(puller.load("slot-6"), bundle)
    assert puller.exchange.bytes_in - before == bundle.nbytes


def test_a_machine_that_stood_still_has_heard_of_no_versions(trio, monkeypatch):
    """All deadlines have passed when it goes on; it asks again later."""
    honest, _, puller = trio
    honest.publish(1, {"slot-5": flat(5)})
    peers = [honest.peer_id]
    assert "slot-5" in puller.exchange.inventory(peers)[honest.peer_id] and puller.exchange.offers("slot-5", peers)

    def late(work, seconds):
        work.close()
        raise TimeoutError

    monkeypatch.setattr(puller.exchange._node, "run", late)
    assert puller.exchange.inventory(peers) == puller.exchange.offers("slot-5", peers) == {}


def test_only_so_many_are_served_at_once_and_others_are_told_so(trio, monkeypatch, seed):
    honest, _, puller = trio
    monkeypatch.setattr(exchange, "QUEUE_SECONDS", 0.05)
    honest.publish(1, {"slot-7": flat(seed)})
    uploads = honest.exchange.server._uploads

    async def occupy():
        for _ in range(exchange.MAX_UPLOADS):
            await uploads.acquire()

    async def leave():
        for _ in range(exchange.MAX_UPLOADS):
            uploads.release()

    honest.node.run(occupy(), 10)
    try:
        failures = puller.pull({"slot-7": [honest.peer_id]}, min_round=0, timeout=2.0)
        assert "busy" in failures["slot-7"]
    finally:
        honest.node.run(leave(), 10)
    assert puller.pull({"slot-7": [honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}


def test_an_uplink_is_not_exceeded_by_many_pulls_together_nor_left_idle(trio, seed):
    _, slow, puller = trio
    bundles = {f"slot-{slot}": flat(seed + slot) for slot in range(10, 14)}
    slow.publish(1, bundles)
    sent, began = slow.exchange.server.bytes_out, time.monotonic()
    assert puller.pull({name: [slow.peer_id] for name in bundles}, min_round=1, timeout=PULL_SECONDS) == {}
    seconds, num_bytes = time.monotonic() - began, sum(bundle.nbytes for bundle in bundles.values())
    assert slow.exchange.server.bytes_out - sent == num_bytes
    assert 0.9 * num_bytes / 1e6 < seconds < 2 * num_bytes / 1e6


def test_a_version_whose_file_is_gone_is_not_offered_until_it_is_there_again(trio, monkeypatch, seed):
    honest, _, puller = trio
    monkeypatch.setattr(exchange, "LONGEST_WAIT_SECONDS", 0.2)
    version = honest.publish(1, {"slot-9": flat(seed)})["slot-9"]
    honest._store.path(version).unlink()
    assert "absent" in puller.pull({"slot-9": [honest.peer_id]}, min_round=0, timeout=PULL_SECONDS)["slot-9"]
    honest.publish(1, {"slot-9": flat(seed)})
    assert puller.pull({"slot-9": [honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}
