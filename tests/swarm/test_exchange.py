"""Versions over real streams: whatever a peer serves, only what was asked for, signed and whole, is kept."""

import asyncio
import json
import threading

import pytest
import torch
from exchange_cluster import (
    NUM_SLOTS,
    NUMELS,
    PULL_SECONDS,
    changed,
    data_of,
    flat,
    make_rogue,
    offer,
    open_cluster,
    open_swarm,
    serving,
    signed,
)
from lanes import sample

from spes_p2p.swarm.exchange import exchange
from spes_p2p.swarm.exchange.protocol import BUSY, DATA, END, TEXT
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.p2p.identity import Identity

pytestmark = pytest.mark.timeout(120)

NAN = b"\x00\x00\xc0\x7f"


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """A puller, an honest peer and a rogue."""
    swarms = open_cluster(tmp_path_factory.mktemp, ["puller", "honest", "rogue"], rogue={"serve": False})
    make_rogue(swarms[2])
    yield swarms
    for swarm in swarms:
        swarm.close()


def fine(rogue, good):
    return signed(rogue, data=good)


def saying(*messages):
    """Return a script that hears a request, sends messages (None is silence from there on), and hangs up."""

    async def script(channel):
        await channel.receive_text()
        await send_all(channel, messages)

    return script


async def send_all(channel, messages):
    for message in messages:
        if message is None:
            await asyncio.Event().wait()
        await channel.send(*message)
    await asyncio.sleep(0.2)


def answering(**answer):
    return saying((TEXT, json.dumps(answer).encode()))


def without_end(version):
    async def script(channel):
        await offer(channel, version)
        while True:
            await channel.send(DATA, bytes(2**18))

    return script


def trickling(version):
    async def script(channel):
        await offer(channel, version)
        while True:
            await channel.send(DATA, b"\0")
            await asyncio.sleep(0.2)

    return script


def after_offer(version, *messages):
    async def script(channel):
        await offer(channel, version)
        await send_all(channel, messages)

    return script


ONE = NUMELS["slot"]
BAD_ANSWERS = {
    "a flipped bit": lambda rogue, good: serving(fine(rogue, good), good[:-1] + bytes([good[-1] ^ 1])),
    "too few bytes": lambda rogue, good: serving(fine(rogue, good), good[:-4]),
    "a message beyond the end": lambda rogue, good: after_offer(fine(rogue, good), (DATA, good + b"more")),
    "no bytes": lambda rogue, good: serving(fine(rogue, good), b""),
    "messages of no bytes": lambda rogue, good: after_offer(fine(rogue, good), (DATA,), (DATA,)),
    "zeros without end": lambda rogue, good: without_end(fine(rogue, good)),
    "zeros, slower and slower": lambda rogue, good: trickling(fine(rogue, bytes(4 * ONE))),
    "the wrong range": lambda rogue, good: serving(fine(rogue, good), good[4:] + good[:4]),
    "nothing at all": lambda rogue, good: saying(),
    "another name": lambda rogue, good: serving(signed(rogue, name="slot-2", data=good), good),
    "an older round": lambda rogue, good: serving(signed(rogue, round=2, data=good), good),
    "another run": lambda rogue, good: serving(signed(rogue, run_id="elsewhere", data=good), good),
    "no signature": lambda rogue, good: serving(changed(fine(rogue, good), signature=""), good),
    "another author's name": lambda rogue, good: serving(changed(fine(rogue, good), author="Qm" + "P" * 44), good),
    "a later round than was signed": lambda rogue, good: serving(changed(fine(rogue, good), round=4), good),
    "garbage": lambda rogue, good: saying((TEXT, b"\xff" * 100)),
    "another kind of message": lambda rogue, good: saying((DATA, good)),
    "an endless message": lambda rogue, good: saying((TEXT, b" " * 10**6)),
    "an answer with more in it": lambda rogue, good: answering(state="whole", extra=1),
    "no such state": lambda rogue, good: answering(state="gone"),
    "an offer of nothing": lambda rogue, good: answering(state="whole"),
    "a larger vector": lambda rogue, good: serving(signed(rogue, data=good * 2), good * 2),
    "a shorter vector": lambda rogue, good: serving(signed(rogue, data=good[:-4]), good[:-4]),
    "a document for a vector": lambda rogue, good: serving(signed(rogue, data=b"{}", codec="raw"), b"{}"),
    "NaN": lambda rogue, good: serving(signed(rogue, data=good[:-4] + NAN), good[:-4] + NAN),
    "nothing new, which is not so": lambda rogue, good: serving(fine(rogue, good), b"", "same"),
    "silence": lambda rogue, good: saying(None),
    "silence after the offer": lambda rogue, good: after_offer(fine(rogue, good), None),
    "silence amid the bytes": lambda rogue, good: after_offer(fine(rogue, good), (DATA, good[:1000]), None),
    "a version of its own, in part": lambda rogue, good: serving(fine(rogue, good[::-1]), good[:1000]),
    "BUSY with a version of its own": lambda rogue, good: after_offer(fine(rogue, good[::-1]), (BUSY,)),
    "BUSY for ever": lambda rogue, good: answering(state="busy"),
    "BUSY for ever after the offer": lambda rogue, good: after_offer(fine(rogue, good), (BUSY,)),
}
"""How a rogue may answer a request for slot-1 of round 3, given its identity and the right bytes."""
COMMIT_ANSWERS = {
    *("a flipped bit", "too few bytes", "a message beyond the end", "zeros without end", "zeros, slower and slower"),
    *("another name", "an older round", "no signature", "garbage", "an endless message", "a larger vector", "NaN"),
    *("nothing new, which is not so", "silence amid the bytes", "BUSY for ever"),
}
"""One of each check. Full: more that the same checks refuse."""


@pytest.mark.parametrize("case", sample(BAD_ANSWERS, COMMIT_ANSWERS))
def test_a_bad_answer_is_refused_by_name_and_the_next_peer_asked(trio, monkeypatch, seed, case):
    puller, honest, rogue = trio
    monkeypatch.setattr(exchange, "CHUNK_SECONDS", 1.0 if case.startswith("silence") else 20.0)
    old, good = flat(seed), flat(seed + 1)
    puller.publish(1, {"slot-1": old})
    rogue.exchange.script = BAD_ANSWERS[case](rogue.node.identity, data_of(good))

    seconds = 3.0 if case.startswith(("BUSY", "zeros, slow")) else PULL_SECONDS
    failures = puller.pull({"slot-1": [rogue.peer_id]}, min_round=3, timeout=seconds)
    assert rogue.peer_id[-6:] in failures["slot-1"]
    assert ("silent" in failures["slot-1"]) == case.startswith("silence")
    assert ("nothing has changed" in failures["slot-1"]) == case.startswith("nothing new")
    assert puller.versions()["slot-1"].round == 1 and torch.equal(puller.load("slot-1"), old)

    honest.publish(3, {"slot-1": good})
    peers = [rogue.peer_id, honest.peer_id]
    assert puller.pull({"slot-1": peers}, min_round=3, timeout=PULL_SECONDS) == {}
    assert puller.versions()["slot-1"].round == 3 and torch.equal(puller.load("slot-1"), good)


def test_a_busy_peer_is_named_when_the_time_is_up(trio):
    puller, _, rogue = trio
    puller.exchange.backoff.record_busy(rogue.peer_id, now=0.0)
    try:
        failures = puller.pull({"slot-1": [rogue.peer_id]}, min_round=99, timeout=0.0)
    finally:
        puller.exchange.backoff.reset(rogue.peer_id)
    assert f"out of time, waiting for {rogue.peer_id[-6:]}" in failures["slot-1"]


def test_a_version_that_was_refused_is_neither_seen_nor_pulled_again(trio, seed):
    puller, honest, _ = trio
    wanted = {"slot-50": [honest.peer_id]}
    for round in (1, 2):
        honest.publish(round, {"slot-50": flat(seed + round)})
        assert puller.pull(wanted, min_round=round, timeout=PULL_SECONDS) == {}
    puller.refuse("slot-50", {})
    assert puller.versions()["slot-50"].round == 1
    assert "slot-50" not in puller.inventory([honest.peer_id])[honest.peer_id]
    assert "was refused here" in puller.pull(wanted, min_round=2, timeout=PULL_SECONDS)["slot-50"]
    honest.publish(3, {"slot-50": flat(seed)})
    assert puller.pull(wanted, min_round=3, timeout=PULL_SECONDS) == {}


def test_a_version_comes_only_of_the_authors_asked_for(trio, seed):
    """The peer that serves it may be another."""
    puller, honest, rogue = trio
    version = honest.publish(1, {"slot-51": flat(seed)})["slot-51"]
    rogue.exchange.script = serving(version, data_of(flat(seed)))
    wanted = {"slot-51": [rogue.peer_id]}
    failures = puller.pull(wanted, min_round=1, timeout=PULL_SECONDS, authors={"slot-51": [rogue.peer_id]})
    assert f"by {honest.peer_id}, not by {rogue.peer_id}" in failures["slot-51"]
    authors = {"slot-51": [puller.peer_id, honest.peer_id]}
    assert puller.pull(wanted, min_round=1, timeout=PULL_SECONDS, authors=authors) == {}


def test_a_name_that_the_run_does_not_have_is_neither_pulled_nor_kept(trio, tmp_path):
    puller, honest, _ = trio
    strange = f"slot-{NUM_SLOTS}"
    version = honest.publish(3, {strange: flat(0)})[strange]
    failures = puller.pull({strange: [honest.peer_id]}, min_round=3, timeout=PULL_SECONDS)
    assert failures == {strange: "this run has no such version"} and strange not in puller.versions()
    (tmp_path / "saved").write_bytes(honest.exchange._store.read(strange))
    store = VersionStore(tmp_path / "versions", "run")
    store.add({strange: (version, (tmp_path / "saved").read_bytes())})
    assert strange in store.newest()
    again = open_swarm(tmp_path)
    again.close()
    assert strange not in again.versions(), "nor over a restart"


def test_a_peer_that_cannot_be_reached_is_named(trio, tmp_path):
    puller, honest, _ = trio
    nobody = Identity(tmp_path / "nobody").peer_id
    honest.publish(1, {"slot-5": flat(0)})
    failures = puller.pull({"slot-5": [nobody]}, min_round=0, timeout=PULL_SECONDS)
    assert nobody[-6:] in failures["slot-5"]
    assert puller.pull({"slot-5": [nobody, honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}


def test_a_peer_that_pulled_a_version_serves_it_to_others(trio, seed):
    """The author's signature travels along, so trust does not depend on the server."""
    puller, honest, rogue = trio
    bundle = flat(seed)
    honest.publish(2, {"slot-6": bundle})
    assert puller.pull({"slot-6": [honest.peer_id]}, min_round=2, timeout=PULL_SECONDS) == {}
    assert rogue.pull({"slot-6": [puller.peer_id]}, min_round=2, timeout=PULL_SECONDS) == {}
    assert rogue.versions()["slot-6"].author == honest.peer_id
    assert torch.equal(rogue.load("slot-6"), bundle)


def test_many_versions_come_from_many_peers_at_once(trio, seed):
    puller, honest, _ = trio
    bundles = {f"slot-{slot}": flat(seed + slot) for slot in range(10, 40)}
    honest.publish(4, bundles)
    assert puller.pull({name: [honest.peer_id] for name in bundles}, min_round=4, timeout=PULL_SECONDS) == {}
    for name, bundle in bundles.items():
        assert torch.equal(puller.load(name), bundle)


def test_a_version_one_has_is_not_sent_again(trio, seed):
    puller, honest, _ = trio
    honest.publish(1, {"slot-7": flat(seed)})
    puller.pull({"slot-7": [honest.peer_id]}, min_round=1, timeout=PULL_SECONDS)
    before = puller.exchange.bytes_in
    honest.publish(2, {"slot-7": flat(seed)})
    assert puller.pull({"slot-7": [honest.peer_id]}, min_round=2, timeout=PULL_SECONDS) == {}
    assert puller.exchange.bytes_in == before
    assert puller.versions()["slot-7"].round == 2


def test_a_version_about_to_be_published_is_waited_for(trio, monkeypatch, seed):
    puller, honest, _ = trio
    bundle, waiting, failures = flat(seed), threading.Event(), []
    changed = honest.exchange.server.changed
    wait = changed.wait

    def noticed(seconds):
        waiting.set()
        return wait(seconds)

    monkeypatch.setattr(changed, "wait", noticed)
    honest.publish(1, {"slot-8": flat(seed + 1)})
    pull = threading.Thread(
        target=lambda: failures.append(puller.pull({"slot-8": [honest.peer_id]}, min_round=2, timeout=PULL_SECONDS))
    )
    pull.start()
    assert waiting.wait(30)
    honest.publish(2, {"slot-8": bundle})
    pull.join(60)
    assert failures == [{}]
    assert torch.equal(puller.load("slot-8"), bundle)


def test_an_inventory_leaves_out_peers_that_lie_or_are_silent(trio, monkeypatch):
    puller, honest, rogue = trio
    monkeypatch.setattr(exchange, "INVENTORY_SECONDS", 2.0)
    version = signed(honest.node.identity, data=b"")
    lie = version.model_copy(update={"round": 9}).model_dump_json().encode()

    async def silence(channel):
        await asyncio.Event().wait()

    def listing(*messages):
        async def script(channel):
            for message in messages:
                await channel.send(*message)
            await asyncio.sleep(0.5)

        return script

    fair = (TEXT, version.model_dump_json().encode())
    for script in [
        silence,
        listing((TEXT, lie), (END,)),
        listing((TEXT, b"junk")),
        listing(fair),
        without_end(version),
    ]:
        rogue.exchange.script = script
        inventory = puller.inventory([honest.peer_id, rogue.peer_id])
        assert set(inventory) == {honest.peer_id}
        assert inventory[honest.peer_id].keys() == honest.versions().keys()


def test_a_machine_that_stands_still_lacks_what_it_was_to_get_and_goes_on(trio, monkeypatch):
    """Its swarm thread wakes up when all deadlines are over; so here it stands still before its first request."""
    puller, honest, _ = trio
    run = puller.node.run
    monkeypatch.setattr(puller.node, "run", lambda work, timeout: run(work, 0.0))
    lacking = puller.exchange.pull({"slot-9": [honest.peer_id]}, min_round=1, timeout=1.0, max_bytes={"slot-9": 28})
    assert "stood still" in lacking["slot-9"]
    assert puller.inventory([honest.peer_id]) == {}
