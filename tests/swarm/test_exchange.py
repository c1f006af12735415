"""Versions over real streams: whatever a peer serves, only what a digest names is kept; what is served is bounded."""

import asyncio
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from exchange_cluster import (
    KEPT,
    NUM_SLOTS,
    PULL_SECONDS,
    data_of,
    flat,
    make_rogue,
    open_cluster,
    open_swarm,
    publish,
    pull,
)
from pulls import scripted, send_part

from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.exchange import exchange, fetch, serve
from spes_p2p.swarm.exchange.fetch import MAX_STREAMS_PER_SOURCE
from spes_p2p.swarm.exchange.protocol import DATA, WANT, Inventory
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.channel import TEXT
from spes_p2p.swarm.p2p.identity import Identity

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """A puller, an honest peer, a slow one, and a rogue."""
    settings = {"slow": {"uplink_mbit": 8.0}, "rogue": {"serve": False}}
    swarms = open_cluster(tmp_path_factory.mktemp, ["puller", "honest", "slow", "rogue"], **settings)
    make_rogue(swarms[3])
    yield swarms
    for swarm in swarms:
        swarm.close()


async def silent(channel):
    await asyncio.Event().wait()


async def hanging_up(channel):
    await channel.receive({WANT: 2**20})


@pytest.mark.parametrize("case", ["lies", "silence", "silence amid a block", "nothing at all"])
def test_a_bad_source_is_named_and_another_one_taken(peers, monkeypatch, seed, case):
    puller, honest, _, rogue = peers
    monkeypatch.setattr(exchange, "CHUNK_SECONDS", 1.0)
    monkeypatch.setattr(fetch, "LATE_SECONDS", 0.2)
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.01)
    good, wanted = flat(seed), {VectorName("slot-1"): (3, digest(flat(seed)))}

    async def stall(channel, number):
        await channel.send(DATA, data_of(good)[:10])
        await silent(channel)

    rogue.exchange.script = {
        "lies": scripted(lambda channel, number: send_part(channel, data_of(good)[::-1], number)),
        "silence": silent,
        "silence amid a block": scripted(stall),
        "nothing at all": hanging_up,
    }[case]
    failure = pull(puller, wanted, rogue, timeout=8.0)["slot-1"]
    assert rogue.peer_id[-6:] in failure and ("silent" in failure) == case.startswith("silence")
    assert "slot-1" not in puller.versions()
    honest.publish(3, {"slot-1": good})
    assert pull(puller, wanted, rogue, honest) == {} and torch.equal(puller.load("slot-1"), good)
    puller.delete(VectorName("slot-1"))


def test_what_a_digest_names_and_no_model_can_use_is_not_kept(peers):
    puller, honest, *_ = peers
    for name, data in (("slot-2", data_of(flat(1))[:-4] + b"\0\0\xc0\x7f"), ("kept-slot-2", b"\xff" * KEPT.num_bytes)):
        version = Version.of(name, 1, data)
        honest._store.add({name: (version, data)})
        assert set(pull(puller, {VectorName(name): (1, version.digest)}, honest)) == {name}
        assert name not in puller.versions()


def test_a_version_comes_from_several_peers_and_no_byte_twice_and_is_passed_on(peers, seed):
    puller, honest, _, other = peers
    bundle = flat(seed, "shared")
    wanted = publish(honest, 1, {"shared": bundle})
    assert pull(other, wanted, honest) == {}
    other.exchange.script = lambda channel: other.exchange.server.serve(channel, "x")
    sent, received = honest.exchange.server.bytes_out, puller.exchange.bytes_in
    assert pull(puller, wanted, honest, other) == {} and torch.equal(puller.load("shared"), bundle)
    num_bytes = bundle.nbytes + 32 * 12
    assert puller.exchange.bytes_in - received == num_bytes
    assert 0 < honest.exchange.server.bytes_out - sent < num_bytes


def test_a_fetch_goes_on_after_a_restart(peers, seed, tmp_path):
    _, honest, slow, _ = peers
    bundle = flat(seed, "shared")
    wanted, num_bytes = publish(slow, 2, {"shared": bundle}), bundle.nbytes + 32 * 12
    puller = open_swarm(tmp_path, slow.node.addresses())
    assert "out of time" in pull(puller, wanted, slow, timeout=4.0)["shared"]
    before = puller.exchange.bytes_in
    puller.close()
    assert before > 2**20
    publish(honest, 2, {"shared": bundle})
    puller = open_swarm(tmp_path, honest.node.addresses())
    try:
        assert pull(puller, wanted, honest) == {} and torch.equal(puller.load("shared"), bundle)
        assert before + puller.exchange.bytes_in <= num_bytes + MAX_STREAMS_PER_SOURCE * 2**20, (
            "but for the blocks under way"
        )
    finally:
        puller.close()


def test_a_version_that_was_refused_is_neither_seen_nor_pulled_again(peers, seed):
    puller, honest, *_ = peers
    for round in (1, 2):
        wanted = publish(honest, round, {"slot-50": flat(seed + round)})
        assert pull(puller, wanted, honest) == {}
    puller.refuse("slot-50", {})
    assert puller.versions()["slot-50"].round == 1
    assert "slot-50" not in puller.inventory([honest.peer_id])[honest.peer_id]
    assert "was refused here" in pull(puller, wanted, honest)["slot-50"]
    assert pull(puller, publish(honest, 3, {"slot-50": flat(seed)}), honest) == {}


def test_a_name_that_the_run_does_not_have_is_neither_pulled_nor_kept(peers, tmp_path):
    puller, honest, *_ = peers
    strange = f"slot-{NUM_SLOTS}"
    wanted = publish(honest, 3, {strange: flat(0)})
    version = honest.versions()[strange]
    assert pull(puller, wanted, honest) == {strange: "this run has no such version"}
    assert strange not in puller.versions()
    store = VersionStore(tmp_path / "versions")
    store.add({strange: (version, honest.exchange._store.read(strange))})
    assert strange in store.newest()
    again = open_swarm(tmp_path)
    again.close()
    assert strange not in again.versions(), "nor over a restart"


def test_a_peer_that_cannot_be_reached_is_named_and_does_no_harm(peers, monkeypatch, tmp_path):
    puller, honest, *_ = peers
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.01)
    nobody = Identity(tmp_path / "nobody").peer_id
    wanted = publish(honest, 1, {"slot-5": flat(0)})
    assert nobody[-6:] in puller.pull(wanted, [nobody], timeout=PULL_SECONDS)["slot-5"]
    assert puller.pull(wanted, [nobody, honest.peer_id], timeout=PULL_SECONDS) == {}


def test_a_version_one_has_is_not_sent_again(peers, seed):
    puller, honest, *_ = peers
    assert pull(puller, publish(honest, 1, {"slot-7": flat(seed)}), honest) == {}
    before = puller.exchange.bytes_in
    assert pull(puller, publish(honest, 2, {"slot-7": flat(seed)}), honest) == {}
    assert puller.exchange.bytes_in == before and puller.versions()["slot-7"].round == 2


def test_a_version_about_to_be_published_is_waited_for(peers, monkeypatch, seed):
    puller, honest, *_ = peers
    bundle, asked, have = flat(seed), threading.Event(), honest._store.have

    def noticed(digest):
        asked.set()
        return have(digest)

    monkeypatch.setattr(honest._store, "have", noticed)
    with pulling(puller, {VectorName("slot-8"): (2, digest(bundle))}, honest) as failures:
        assert asked.wait(30)
        honest.publish(2, {"slot-8": bundle})
    assert failures == [{}] and torch.equal(puller.load("slot-8"), bundle)


def test_an_inventory_leaves_out_peers_that_lie_or_are_silent(peers, monkeypatch):
    puller, honest, _, rogue = peers
    monkeypatch.setattr(exchange, "ASK_SECONDS", 2.0)
    version = Version.of("slot-1", 3, b"x")

    def listing(kind, text):
        async def script(channel):
            await channel.receive_text()
            await channel.send(kind, text)
            await asyncio.sleep(0.5)

        return script

    too_many = Inventory.model_construct(versions=[version] * 4201).model_dump_json().encode()
    for script in [
        silent,
        listing(TEXT, b"junk"),
        listing(DATA, b"{}"),
        listing(TEXT, too_many),
        listing(TEXT, b" " * 2**21),
    ]:
        rogue.exchange.script = script
        inventory = puller.inventory([honest.peer_id, rogue.peer_id])
        assert set(inventory) == {honest.peer_id}
        assert inventory[honest.peer_id].keys() == honest.versions().keys()


def test_a_machine_that_stands_still_lacks_what_it_was_to_get_and_goes_on(peers, monkeypatch):
    """Its swarm thread wakes up when all deadlines are over; so here it stands still before its first request."""
    puller, honest, *_ = peers
    run = puller.node.run
    monkeypatch.setattr(puller.node, "run", lambda work, timeout: run(work, 0.0))
    assert "stood still" in pull(puller, {VectorName("slot-9"): (1, "0" * 64)}, honest, timeout=1.0)["slot-9"]
    assert puller.exchange.inventory([honest.peer_id]) == {}


# ---------------------------------------------------------------------- serving


@contextmanager
def pulling(puller, wanted, *holders):
    """Pull in a thread; yields the list to which the failures are added at its end."""
    failures = []
    work = threading.Thread(target=lambda: failures.append(pull(puller, wanted, *holders)))
    work.start()
    yield failures
    work.join(PULL_SECONDS)


@pytest.fixture
def busy(peers, monkeypatch):
    """Set when the puller has heard BUSY."""
    heard = threading.Event()

    class Noticed(fetch.BusyError):
        def __init__(self, *args):
            super().__init__(*args)
            heard.set()

    monkeypatch.setattr(fetch, "BusyError", Noticed)
    return heard


def test_strangers_wait_while_a_round_is_synchronised(peers, busy, seed):
    puller, honest, *_ = peers
    bundle = flat(seed)
    wanted = publish(honest, 1, {"slot-2": bundle})
    honest.exchange.server.reserve_for([honest.peer_id], 60.0)
    try:
        with pulling(puller, wanted, honest) as failures:
            assert busy.wait(30) and not failures and "slot-2" not in puller.versions()
            honest.exchange.server.release()
    finally:
        honest.exchange.server.release()
    assert failures == [{}] and torch.equal(puller.load("slot-2"), bundle)


def test_a_reservation_that_is_never_released_lapses(peers, seed):
    puller, honest, *_ = peers
    wanted = publish(honest, 1, {"slot-4": flat(seed)})
    honest.exchange.server.reserve_for([honest.peer_id], 1.0)
    assert pull(puller, wanted, honest) == {}


def test_members_of_the_round_are_served_meanwhile(peers, busy, seed):
    puller, honest, *_ = peers
    wanted = publish(honest, 1, {"slot-3": flat(seed)})
    honest.exchange.server.reserve_for([honest.peer_id, puller.peer_id], 60.0)
    try:
        assert pull(puller, wanted, honest) == {} and not busy.is_set()
    finally:
        honest.exchange.server.release()


def test_a_stranger_waits_from_the_next_block_on_when_a_round_begins_and_goes_on_where_it_was(peers, busy, seed):
    puller, _, slow, _ = peers
    bundle = flat(seed, "shared")[: 3 * 2**18]
    version = Version.of("shared", 5, data_of(bundle))
    slow._store.add({"shared": (version, data_of(bundle))})
    before, results = puller.exchange.bytes_in, []
    work = threading.Thread(
        target=lambda: results.append(puller.exchange.pull([version], [slow.peer_id], timeout=PULL_SECONDS))
    )
    work.start()
    while puller.exchange.bytes_in - before < 2**17:
        threading.Event().wait(0.01)
    slow.exchange.server.reserve_for([slow.peer_id], 60.0)
    assert busy.wait(30) and not results
    slow.exchange.server.release()
    work.join(PULL_SECONDS)
    assert results == [{}] and puller.exchange._store.read("shared") == data_of(bundle)
    assert puller.exchange.bytes_in - before == bundle.nbytes + 32 * 3


def test_only_so_many_are_served_at_once_and_others_are_told_so(peers, monkeypatch, seed):
    puller, honest, *_ = peers
    monkeypatch.setattr(serve, "QUEUE_SECONDS", 0.05)
    wanted = publish(honest, 1, {"slot-11": flat(seed)})
    uploads = honest.exchange.server._uploads

    async def occupy():
        for _ in range(serve.MAX_UPLOADS):
            await uploads.acquire()

    async def leave():
        for _ in range(serve.MAX_UPLOADS):
            uploads.release()

    honest.node.run(occupy(), 10)
    try:
        assert "busy" in pull(puller, wanted, honest, timeout=2.0)["slot-11"]
    finally:
        honest.node.run(leave(), 10)
    assert pull(puller, wanted, honest) == {}


def test_an_uplink_is_not_exceeded_by_many_versions_together_nor_left_idle(peers, seed):
    puller, _, slow, _ = peers
    bundles = {f"slot-{slot}": flat(seed + slot) for slot in range(20, 24)}
    wanted = publish(slow, 1, bundles)
    sent, began = slow.exchange.server.bytes_out, time.monotonic()
    assert pull(puller, wanted, slow) == {}
    seconds, num_bytes = time.monotonic() - began, sum(bundle.nbytes + 32 for bundle in bundles.values())
    assert slow.exchange.server.bytes_out - sent == num_bytes
    assert 0.9 * num_bytes / 1e6 < seconds < 2 * num_bytes / 1e6


def test_a_version_whose_file_is_gone_is_not_sent_until_it_is_there_again(peers, monkeypatch, seed):
    puller, honest, *_ = peers
    monkeypatch.setattr(fetch, "PAUSE_SECONDS", 0.01)
    wanted = publish(honest, 1, {"slot-9": flat(seed)})
    honest._store.path(honest.versions()["slot-9"]).unlink()
    assert "has it no more" in pull(puller, wanted, honest)["slot-9"]
    publish(honest, 1, {"slot-9": flat(seed)})
    assert pull(puller, wanted, honest) == {}
