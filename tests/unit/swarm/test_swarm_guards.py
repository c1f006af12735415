"""The guards against hostile messages, each without a network: what they accept, and what they refuse."""

import asyncio
import contextlib
import itertools
import json
import time

import msgpack
import pytest
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm.hivemind_fixes import dht
from spes_p2p.swarm.hivemind_fixes.dht import BoundedStorage, SwarmDHTProtocol, node_id_of
from spes_p2p.swarm.hivemind_fixes.serializer import MAX_DEPTH, MAX_VALUES, ShallowSerializer, check_message
from spes_p2p.swarm.hivemind_fixes.streams import PeerQuota
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.p2p import introductions

KEY, OTHER = DHTID.generate(source="key"), DHTID.generate(source="other")


# ---------------------------------------------------------------------- decoding


def dictionary(count):
    records = DictionaryDHTValue()
    for number in range(count):
        records.store(b"%d" % number, b"value", time.time() + 60)
    return records


@pytest.mark.parametrize("value", [None, b"subkey", "text", 7, -7, 2**63, 1.5, True, [1, [2, {"a": b"b" * 300}]]])
def test_what_the_dht_sends_itself_is_decoded_as_ever(value):
    packed = MSGPackSerializer.dumps(value)
    assert ShallowSerializer.loads(packed) == value


def test_a_dictionary_of_records_is_decoded_as_ever():
    records = dictionary(500)
    assert dict(ShallowSerializer.loads(MSGPackSerializer.dumps(records)).items()) == dict(records.items())


def test_nothing_is_decoded_below_the_cap_and_nothing_refused_above_it():
    deep = [7]
    for _ in range(MAX_DEPTH - 2):
        deep = [deep]
    check_message(msgpack.packb(deep))
    with pytest.raises(RecordError, match="deeper"):
        check_message(msgpack.packb([deep]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\x00\x02\x01",
        b"\xc4\x09abc",
        b"\x01\x02",
        b"\xc7",
        msgpack.packb(msgpack.ExtType(0x40, b"\x90")),
        msgpack.packb([msgpack.ExtType(0x50, b"\x90")]),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([msgpack.ExtType(0x50, b"\x90")]))),
        msgpack.packb([0] * MAX_VALUES),
        MSGPackSerializer.dumps([dictionary(2)]),
    ],
    ids=lambda data: data[:12].hex(),
)
def test_what_is_cut_short_or_of_another_type_or_too_much_is_refused(data):
    with pytest.raises(RecordError):
        ShallowSerializer.loads(data)


def test_an_extension_that_hivemind_fails_to_decode_is_refused_with_an_error_of_ours():
    """Stock raises a TypeError for it."""
    with pytest.raises(RecordError):
        ShallowSerializer.loads(b"\xd4P\xc0")


# ---------------------------------------------------------------------- what a node keeps


def test_a_key_keeps_records_of_so_many_owners_and_their_newer_ones(monkeypatch):
    monkeypatch.setattr(dht, "MAX_OWNERS", 3)
    storage, now = BoundedStorage(), time.time()
    for owner in range(3):
        assert storage.store(KEY, b"value", now + 60, subkey=b"%d" % owner)
    assert not storage.store(KEY, b"value", now + 70, subkey=b"stranger")
    assert storage.store(KEY, b"newer", now + 70, subkey=b"0")
    assert not storage.store(KEY, b"older", now + 65, subkey=b"0")
    assert storage.get(KEY).value.get(b"0").value == b"newer" and len(storage.get(KEY).value) == 3


def test_storing_again_and_again_leaves_no_trace():
    storage, now = BoundedStorage(), time.time()
    for step in range(5000):
        storage.store(KEY, b"value", now + 60 + step / 100, subkey=b"owner")
        storage.store(KEY, b"value", now + 60, subkey=b"owner")
    records = storage.get(KEY).value
    assert len(records.expiration_heap) < 100 and len(storage.expiration_heap) < 100
    assert records.get(b"owner").expiration_time == now + 60 + 49.99


def test_a_record_still_ends_when_its_last_lifetime_does():
    storage, now = BoundedStorage(), time.time()
    for step in range(200):
        storage.store(KEY, b"value", now + 0.1 + step / 1000, subkey=b"owner")
    time.sleep(0.35)
    assert storage.get(KEY) is None


def test_a_place_in_the_dht_is_that_of_one_peer():
    peers = [PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(50)]
    assert len({node_id_of(peer) for peer in peers}) == 50


PEERS = [PeerID(b"\x12\x20" + bytes([number] * 32)) for number in range(3)]


def test_neighbours_that_others_name_are_taken_only_under_their_own_dht_ids(monkeypatch):
    """A peer that is asked for a key might name itself three times, under ids next to the key."""

    async def call_find(self, peer, keys):
        return {KEY: (None, {node_id_of(PEERS[0]): PEERS[0], DHTID(int(KEY) ^ 1): PEERS[1]})}

    monkeypatch.setattr(DHTProtocol, "call_find", call_find)
    assert asyncio.run(dht_protocol().call_find(PEERS[2], [KEY])) == {KEY: (None, {node_id_of(PEERS[0]): PEERS[0]})}


def test_nobody_names_a_node_to_itself(monkeypatch):
    """A search that found the searching node ended the heartbeat, and the training, on an assertion of hivemind's."""
    me = PEERS[1]

    async def call_find(self, peer, keys):
        return {KEY: (None, {node_id_of(PEERS[0]): PEERS[0], node_id_of(me): me})}

    monkeypatch.setattr(DHTProtocol, "call_find", call_find)
    asked = dht_protocol(node_id_of(me)).call_find(PEERS[2], [KEY])
    assert asyncio.run(asked) == {KEY: (None, {node_id_of(PEERS[0]): PEERS[0]})}


def test_an_answer_to_a_ping_that_is_none_is_no_answer(monkeypatch):
    """An id of 21 bytes ended the watch over lost peers, and kept newcomers out."""

    async def call_ping(self, peer, validate=False, strict=True):
        return DHTID.from_bytes(b"x" * 21)

    monkeypatch.setattr(DHTProtocol, "call_ping", call_ping)
    assert asyncio.run(dht_protocol().call_ping(PEERS[2])) is None


def test_a_heartbeat_that_fails_is_followed_by_the_next(monkeypatch, caplog):
    network, beaten = VirtualNetwork(), []
    membership = Membership(node := network.node("me", "run"))
    reads = iter([AssertionError("an answer of a stranger"), None])

    def read(kind):
        if (error := next(reads, None)) is not None:
            raise error

    monkeypatch.setattr(membership, "read", read)
    membership.start(RoundConfig(heartbeat_seconds=5.0, lease_seconds=30.0), lambda: beaten.append(node.now()))
    began = node.now()
    assert not membership.wait(17.0)
    membership.stop()
    assert membership.wait(60.0) and node.now() < began + 20.0
    assert beaten == [began + 10.0, began + 15.0] and "a heartbeat failed" in caplog.text
    network.close()


def dht_protocol(node_id=None):
    protocol = object.__new__(SwarmDHTProtocol)
    protocol.node_id, protocol.answers = node_id or DHTID(1), []
    return protocol


@pytest.mark.parametrize("lives_until", [float("inf"), float("nan"), 0.0])
@pytest.mark.parametrize("size", [float("inf"), "x", -1], ids=str)
def test_of_a_value_that_a_peer_sends_only_the_records_are_kept(monkeypatch, size, lives_until):
    """A size that is no number let each search hang; an end at infinity made it the last."""
    said, now = DictionaryDHTValue(), time.time()
    said.store(b"owner", b"value", now + 60)
    said.maxsize, said.latest_expiration_time = size, lives_until
    empty = DictionaryDHTValue(size)

    async def call_find(self, peer, keys):
        return {KEY: (ValueWithExpiration(said, lives_until), {}), OTHER: (ValueWithExpiration(empty, lives_until), {})}

    monkeypatch.setattr(DHTProtocol, "call_find", call_find)
    found = asyncio.run(dht_protocol().call_find(PEERS[2], [KEY, OTHER]))
    value, expires = found[KEY][0]
    assert expires == value.latest_expiration_time == now + 60 and value.maxsize == float("inf")
    assert value.get(b"owner").value == b"value"
    assert found[OTHER] == (None, {})


# ---------------------------------------------------------------------- streams


def test_a_peer_has_so_much_at_once_and_gets_it_back(caplog):
    quota = PeerQuota(max_items=2, max_bytes=100, max_total=3)
    with quota.hold("alice", "streams", 50), quota.hold("alice", "streams", 50):
        for _ in itertools.repeat(None, 5):
            with pytest.raises(ExchangeError), quota.hold("alice", "streams"):
                pass
        with quota.hold("bob", "streams"), pytest.raises(ExchangeError), quota.hold("carol", "streams"):
            pass
        with pytest.raises(ExchangeError), quota.hold("bob", "streams", 101):
            pass
    for _ in range(2):
        with quota.hold("alice", "streams", 100):
            pass
    assert sum("alice" in line for line in caplog.messages) == 3, "said for the 1st, 2nd and 4th time"


def test_strangers_leave_half_of_all_streams_to_known_peers():
    """Eleven free identities with 96 idle streams each shut a peer off from all others."""
    quota = PeerQuota(max_items=96, max_total=1024)
    quota.is_known = {"voter"}.__contains__
    with contextlib.ExitStack() as held:
        for _ in range(96):
            held.enter_context(quota.hold("voter", "streams"))
        for number in range(512):
            held.enter_context(quota.hold(number % 11, "streams"))
        with pytest.raises(ExchangeError):
            held.enter_context(quota.hold("stranger", "streams"))
        quota.is_known = lambda peer: isinstance(peer, str)
        for number in range(512 - 96):
            held.enter_context(quota.hold(f"voter {number % 7}", "streams"))


@pytest.mark.parametrize("host", ["999.1.1.1", "1.2.3", "::1", "x.test", "1.2.3.4/tcp/1"])
def test_a_host_that_is_no_address_is_no_answer(host):
    """p2pd would not start with what a peer that calls back has made up."""
    with pytest.raises(ExchangeError):
        introductions._Called.parse(json.dumps({"is_reached": True, "host": host}))
