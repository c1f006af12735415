"""Records over a real DHT of three nodes: claims live as long as their peers, and nobody writes another's."""

import asyncio
import threading
import time

import msgpack
import pytest
from hivemind.utils.timed_storage import get_dht_time
from peer_server import start_of

from spes_p2p.config import ModelConfig, RoundConfig, RunConfig
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.claims import allocate
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.validation import RecordValidator
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.slots import HeldSlots, active_of

pytestmark = pytest.mark.timeout(120)

ROUNDS = RoundConfig(lease_seconds=3.0, heartbeat_seconds=0.5)


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """Alice, Bob, and Mallory, whose own DHT believes whatever she writes."""
    swarms, addresses = [], []
    for name in ("alice", "bob", "mallory"):
        folder = tmp_path_factory.mktemp(name)
        with pytest.MonkeyPatch.context() as patch:
            if name == "mallory":
                patch.setattr(RecordValidator, "_check", lambda self, record: None)
            node = Node(Identity(folder / "key"), "run", initial_peers=addresses)
        addresses = addresses or node.addresses()
        swarms.append(HivemindSwarm(node, folder / "versions"))
        swarms[-1].enter(ROUNDS, Vectors(), start_of((node.peer_id,)), max_slots=0)
    yield swarms
    for swarm in swarms:
        swarm.close()


def claim(swarm, slots=(1, 2)):
    return Claim(peer_id=swarm.peer_id, state="active", slots=slots, max_slots=4, since=1.0)


def read_until(swarm, kind, wanted, seconds=30.0):
    """Read until `wanted` holds of the records, or time is up; return them."""
    deadline = time.monotonic() + seconds
    while not wanted(records := swarm.read(kind)) and time.monotonic() < deadline:
        swarm.wait(0.05)
    return records


def test_a_heartbeat_keeps_a_claim_alive_and_without_one_it_ends_with_its_lease(trio):
    alice, bob, _ = trio
    alice.announce(claim(alice))
    announced = get_dht_time()
    while get_dht_time() < announced + 1.7 * ROUNDS.lease_seconds:
        assert bob.read(Claim)[alice.peer_id] == claim(alice)
        bob.wait(0.1)
    with alice._membership._renewing:  # its heart stops, as a killed peer's does
        stopped = get_dht_time()
        while get_dht_time() <= stopped + ROUNDS.lease_seconds:
            bob.wait(0.1)
        assert alice.peer_id not in bob.read(Claim)
    assert alice.peer_id in read_until(bob, Claim, lambda records: alice.peer_id in records)


def test_a_newer_record_replaces_the_older_for_everybody_at_once(trio):
    alice = trio[0]
    for slots in [(1,), (1, 2), (3,), ()]:
        alice.announce(claim(alice, slots))
        for reader in trio:
            assert reader.read(Claim)[alice.peer_id].slots == slots


def test_a_record_of_another_peer_cannot_be_written(trio):
    """Mallory signs with her own key, with none, or under Alice's subkey; honest nodes keep what Alice said."""
    alice, bob, mallory = trio
    alice.announce(claim(alice))
    forged = claim(alice, slots=(0,))
    dht, key = mallory.node.dht, forged.key("run")
    for subkey in (alice.node._validator.subkey, mallory.node._validator.subkey, b"junk"):
        for value in (forged.encode(), b"junk", msgpack.packb({"slots": [0]})):
            future = dht.store(
                key=key, subkey=subkey, value=value, expiration_time=get_dht_time() + 60, return_future=True
            )
            future.result(timeout=30)
    for reader in (alice, bob):
        records = reader.read(Claim)
        assert records[alice.peer_id] == claim(alice)
        assert all(records[peer].peer_id == peer for peer in records)


def test_leaving_frees_the_slots_at_once(trio):
    alice, bob, _ = trio
    run = RunConfig(model=ModelConfig(num_experts=2))
    holdings = [
        HeldSlots(swarm, run, run_id="run", anchors=Anchors(run, {"shared": 1, "slot": 1}), max_slots=1)
        for swarm in (alice, bob)
    ]
    for held, slot in zip(holdings, (0, 1), strict=True):
        held.slots = (slot,)
        held.announce("active")
    leaving, staying = holdings
    assert alice.peer_id in active_of(staying.claims())
    leaving.leave()
    claims = staying.claims()
    assert claims[alice.peer_id].slots == () and claims[alice.peer_id].max_slots == 0
    assert allocate("run", 2, claims)[alice.peer_id] == ()
    assert alice.peer_id not in active_of(staying.claims())


class SlowNode:
    """A node whose DHT takes its time: `store` waits for `let_go`, the first time it is called from the heartbeat."""

    peer_id, run_id = "Qm" + "P" * 44, "run"

    def __init__(self):
        self.stored, self.is_storing, self.let_go, self.has_stored = [], *(threading.Event() for _ in range(3))
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

    def run(self, work, timeout):
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout)

    def notify(self, listener):
        self.loop.call_soon_threadsafe(listener)

    def store(self, record, lifetime_seconds):
        is_slow = threading.current_thread().name.startswith("asyncio") and not self.is_storing.is_set()
        if is_slow:
            self.is_storing.set()
            assert self.let_go.wait(30)
        self.stored.append(record)
        if is_slow:
            self.has_stored.set()
        return True

    def read(self, kind):
        return {}


def test_a_heartbeat_under_way_never_outlives_an_announcement_with_what_was_true_before():
    """A DHT keeps what expires later: an old claim renewed after `leave` would hold its slots for another lease."""
    node = SlowNode()
    membership = Membership(node)
    membership.start(RoundConfig(lease_seconds=600, heartbeat_seconds=0.05))
    membership.announce(claim(node, slots=(1,)))
    assert node.is_storing.wait(30)
    leaving = threading.Thread(target=membership.announce, args=(claim(node, slots=()),))
    leaving.start()
    leaving.join(0.2)  # it may have to wait for the heartbeat; it must not be overtaken by it
    node.let_go.set()
    leaving.join(30)
    assert node.has_stored.wait(30)
    number = next(i for i, record in enumerate(node.stored) if record.slots == ())
    assert all(record.slots == () for record in node.stored[number:])
    membership.announce(Progress(peer_id=node.peer_id, round=1, ends_at=0.0))
    membership.stop()
    node.notify(node.loop.stop)
