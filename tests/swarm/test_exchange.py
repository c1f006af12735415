"""Versions over real streams: whatever a peer serves, only what was asked for, signed and whole, is kept."""

import asyncio
import threading
from typing import AsyncIterator  # noqa: UP035 - hivemind recognises only typing's

import pytest
import torch
from hivemind.p2p import P2PContext
from hivemind.proto import runtime_pb2

from spes_p2p.codecs import to_bytes
from spes_p2p.config import RoundConfig
from spes_p2p.swarm import exchange
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.node import Node
from spes_p2p.swarm.versions import Version

pytestmark = pytest.mark.timeout(120)

NUMEL = 200_000  # several chunks
PULL_SECONDS = 60.0
NAN = b"\x00\x00\xc0\x7f"


class RogueExchange(exchange.Exchange):
    """Serves whatever `messages` says; None among them is silence from there on."""

    messages: tuple = ()

    async def rpc_fetch(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        for message in self.messages:
            if message is None:
                await asyncio.Event().wait()
            yield runtime_pb2.ExpertResponse(metadata=bytes(message))

    async def rpc_inventory(
        self, request: runtime_pb2.ExpertRequest, context: P2PContext
    ) -> AsyncIterator[runtime_pb2.ExpertResponse]:
        async for message in self.rpc_fetch(request, context):
            yield message


RogueExchange.__name__ = "Exchange"  # remote names of methods contain it


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """A puller, an honest peer and a rogue."""
    swarms, addresses = [], []
    for name in ("puller", "honest", "rogue"):
        folder = tmp_path_factory.mktemp(name)
        node = Node(Identity(folder / "key"), "run", initial_peers=addresses)
        addresses = addresses or node.addresses()
        swarm = HivemindSwarm(node, folder / "versions", serve=name != "rogue")
        swarm.enter(RoundConfig(), bundle_numel={"shared": NUMEL, "slot": NUMEL}, averaged_numel={}, max_slots=0)
        swarms.append(swarm)
    swarms[2].exchange = RogueExchange(swarms[2].node, swarms[2]._store)
    yield swarms
    for swarm in swarms:
        swarm.close()


@pytest.fixture
def in_order(monkeypatch):
    """Ask peers in the order given, so that the rogue comes first."""
    monkeypatch.setattr(exchange.random, "sample", lambda peers, count: list(peers)[:count])


def flat(seed):
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def signed(identity, name="slot-1", round=3, data=b"", run_id="run", codec="fp32"):
    return Version.sign(identity, run_id, name, round, data, codec)


def changed(version, **changes):
    """Return a version with something changed after it was signed."""
    return version.model_copy(update=changes)


def served(version, data, chunk=2**18):
    chunks = [data[start : start + chunk] for start in range(0, len(data), chunk)]
    return (version.model_dump_json().encode(), *chunks)


def fine(rogue, good):
    return signed(rogue, data=good)


BAD_ANSWERS = {
    "a flipped bit": lambda rogue, good: served(fine(rogue, good), good[:-1] + bytes([good[-1] ^ 1])),
    "too few bytes": lambda rogue, good: served(fine(rogue, good), good[:-4]),
    "too many bytes": lambda rogue, good: served(fine(rogue, good), good + b"more"),
    "no bytes": lambda rogue, good: served(fine(rogue, good), b""),
    "nothing at all": lambda rogue, good: (),
    "another name": lambda rogue, good: served(signed(rogue, name="slot-2", data=good), good),
    "an older round": lambda rogue, good: served(signed(rogue, round=2, data=good), good),
    "another run": lambda rogue, good: served(signed(rogue, run_id="elsewhere", data=good), good),
    "no signature": lambda rogue, good: served(changed(fine(rogue, good), signature=""), good),
    "somebody else's name": lambda rogue, good: served(changed(fine(rogue, good), author="Qm" + "P" * 44), good),
    "a later round than was signed": lambda rogue, good: served(changed(fine(rogue, good), round=4), good),
    "garbage": lambda rogue, good: (b"\xff" * 100,),
    "an endless manifest": lambda rogue, good: (b" " * 10**6,),
    "a larger vector": lambda rogue, good: served(signed(rogue, data=good * 2), good * 2),
    "a shorter vector": lambda rogue, good: served(signed(rogue, data=good[:-4]), good[:-4]),
    "a document for a vector": lambda rogue, good: served(signed(rogue, data=b"{}", codec="raw"), b"{}"),
    "NaN": lambda rogue, good: served(signed(rogue, data=good[:-4] + NAN), good[:-4] + NAN),
    "silence": lambda rogue, good: (None,),
    "silence after the manifest": lambda rogue, good: (*served(fine(rogue, good), b""), None),
}
"""What a rogue may serve for slot-1 of round 3, given its identity and the right bytes."""


@pytest.mark.parametrize("case", BAD_ANSWERS)
def test_a_bad_answer_is_refused_by_name_and_the_next_peer_asked(trio, in_order, monkeypatch, seed, case):
    puller, honest, rogue = trio
    monkeypatch.setattr(exchange, "CHUNK_SECONDS", 1.0 if case.startswith("silence") else 20.0)
    old, good = flat(seed), flat(seed + 1)
    puller.publish(1, {"slot-1": old})
    rogue.exchange.messages = BAD_ANSWERS[case](rogue.node.identity, bytes(to_bytes(good)))

    failures = puller.pull({"slot-1": [rogue.peer_id]}, min_round=3, timeout=PULL_SECONDS)
    assert rogue.peer_id[-6:] in failures["slot-1"]
    assert puller.versions()["slot-1"].round == 1 and torch.equal(puller.load("slot-1"), old)

    honest.publish(3, {"slot-1": good})
    peers = [rogue.peer_id, honest.peer_id]
    assert puller.pull({"slot-1": peers}, min_round=3, timeout=PULL_SECONDS) == {}
    assert puller.versions()["slot-1"].author == honest.peer_id and torch.equal(puller.load("slot-1"), good)


def test_a_peer_that_cannot_be_reached_is_named(trio, tmp_path):
    puller, honest, _ = trio
    nobody = Identity(tmp_path / "nobody").peer_id
    honest.publish(1, {"slot-5": flat(0)})
    failures = puller.pull({"slot-5": [nobody]}, min_round=0, timeout=PULL_SECONDS)
    assert nobody[-6:] in failures["slot-5"]
    assert puller.pull({"slot-5": [nobody, honest.peer_id]}, min_round=0, timeout=PULL_SECONDS) == {}


def test_whoever_pulled_a_version_serves_it_to_others(trio, seed):
    """The author's signature travels along, so trust does not depend on who serves."""
    puller, honest, rogue = trio
    bundle = flat(seed)
    honest.publish(2, {"slot-6": bundle})
    assert puller.pull({"slot-6": [honest.peer_id]}, min_round=2, timeout=PULL_SECONDS) == {}
    assert rogue.pull({"slot-6": [puller.peer_id]}, min_round=2, timeout=PULL_SECONDS) == {}
    assert rogue.versions()["slot-6"].author == honest.peer_id
    assert torch.equal(rogue.load("slot-6"), bundle)


def test_many_versions_come_from_many_peers_at_once(trio, seed):
    puller, honest, _ = trio
    bundles = {f"slot-{slot}": flat(seed + slot) for slot in range(10, 18)}
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
    wait_for = honest._store.wait_for

    def noticed(*args):
        waiting.set()
        return wait_for(*args)

    monkeypatch.setattr(honest._store, "wait_for", noticed)
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


def test_an_inventory_leaves_out_who_lies_or_is_silent(trio, monkeypatch):
    puller, honest, rogue = trio
    monkeypatch.setattr(exchange, "INVENTORY_SECONDS", 2.0)
    version = signed(honest.node.identity, data=b"")
    for messages in [(None,), (version.model_copy(update={"round": 9}).model_dump_json().encode(),), (b"junk",)]:
        rogue.exchange.messages = messages
        inventory = puller.inventory([honest.peer_id, rogue.peer_id])
        assert set(inventory) == {honest.peer_id}
        assert inventory[honest.peer_id].keys() == honest.versions().keys()
