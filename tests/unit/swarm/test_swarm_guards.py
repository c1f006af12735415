"""The guards against hostile messages, each without a network: what they accept, and what they refuse."""

import asyncio
import contextlib
import itertools
import json
import time
from types import SimpleNamespace

import msgpack
import pytest
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.proto.p2pd_pb2 import RPCError
from hivemind.proto.runtime_pb2 import ExpertRequest
from hivemind.utils.serializer import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration

from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm.averaging.averager import MAX_QUESTION_BYTES, SparseAverager
from spes_p2p.swarm.averaging.matchmaking import MAX_ENTRY_BYTES, Survivors, SwarmMatchmaking
from spes_p2p.swarm.hivemind_fixes import dht, streams
from spes_p2p.swarm.hivemind_fixes.dht import BoundedStorage, SwarmDHTProtocol, node_id_of
from spes_p2p.swarm.hivemind_fixes.serializer import MAX_DEPTH, MAX_VALUES, ShallowSerializer, check_message
from spes_p2p.swarm.hivemind_fixes.streams import MAX_ANSWER_BYTES, Inbox, PeerQuota, receive
from spes_p2p.swarm.membership import Membership
from spes_p2p.swarm.p2p import introductions
from tests.support.certificates import PEERS as MANY_PEERS
from tests.support.certificates import last_body

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


# ---------------------------------------------------------------------- meetings


def test_a_leader_refuses_an_entry_that_the_others_could_not_take(monkeypatch):
    """And, while the survivors of a failed round redo it, any other peer; otherwise hivemind decides."""
    monkeypatch.setattr(Matchmaking, "_check_reasons_to_reject", lambda self, request, context: None)
    meeting, caller = object.__new__(SwarmMatchmaking), SimpleNamespace(remote_id=PEERS[0])
    meeting.group_key_manager = SimpleNamespace(survivors=None)

    def answer(num_bytes):
        refusal = meeting._check_reasons_to_reject(averaging_pb2.JoinRequest(gather=bytes(num_bytes)), caller)
        return refusal.code if refusal is not None else None

    assert answer(MAX_ENTRY_BYTES) is None
    assert answer(MAX_ENTRY_BYTES + 1) == averaging_pb2.PROTOCOL_VIOLATION
    meeting.group_key_manager.survivors = Survivors(frozenset(PEERS[:2]), ())
    assert answer(1) is None
    meeting.group_key_manager.survivors = Survivors(frozenset(PEERS[1:]), ())
    assert answer(1) == averaging_pb2.NOT_LOOKING_FOR_GROUP


def test_a_leader_takes_few_strangers_and_all_others(monkeypatch):
    """Free identities filled each leader's group before the members came."""
    monkeypatch.setattr(Matchmaking, "_check_reasons_to_reject", lambda self, request, context: stock)
    meeting, stock = object.__new__(SwarmMatchmaking), None
    meeting.group_key_manager = SimpleNamespace(survivors=None)
    meeting._last, meeting.current_followers = last_body([peer.to_base58() for peer in PEERS[:2]]), {}
    strangers = [PeerID(b"stranger %d" % number) for number in range(4)]

    def joins(peer):
        refusal = meeting._check_reasons_to_reject(averaging_pb2.JoinRequest(), SimpleNamespace(remote_id=peer))
        if refusal is None:
            meeting.current_followers[peer] = averaging_pb2.JoinRequest()
        return refusal is None

    assert [joins(peer) for peer in strangers] == [True, True, False, False]
    assert joins(PEERS[0])
    stock = averaging_pb2.MessageFromLeader(code=averaging_pb2.GROUP_IS_FULL)  # of strangers, in a small run
    assert joins(PEERS[1]) and not joins(strangers[2])
    stock = averaging_pb2.MessageFromLeader(code=averaging_pb2.BAD_SCHEMA_HASH)
    assert not joins(PEERS[1])


def test_strangers_do_not_make_a_leaders_message_longer_than_followers_read(monkeypatch):
    """Sixteen long entries did, and the honest leader was not asked again for ten minutes."""
    monkeypatch.setattr(Matchmaking, "_check_reasons_to_reject", lambda self, request, context: None)
    meeting, peers = object.__new__(SwarmMatchmaking), [PeerID.from_base58(peer) for peer in MANY_PEERS[:80]]
    meeting.group_key_manager = SimpleNamespace(survivors=None)
    meeting._last, meeting.current_followers = last_body(MANY_PEERS[:64]), {}
    request = averaging_pb2.JoinRequest(gather=bytes(MAX_ENTRY_BYTES))
    for peer in peers[64:]:
        if meeting._check_reasons_to_reject(request, SimpleNamespace(remote_id=peer)) is None:
            meeting.current_followers[peer] = request
    assert 2 < len(meeting.current_followers) < MAX_ANSWER_BYTES // 2 // 2**16
    voter = SimpleNamespace(remote_id=peers[0])
    assert meeting._check_reasons_to_reject(averaging_pb2.JoinRequest(), voter) is None


def test_a_long_question_for_a_result_is_answered_at_once():
    """It waited with its caller for the length of an attempt, megabytes of it."""
    averager = SimpleNamespace(_max_seconds=60.0)  # which knows no group to wait for
    question = ExpertRequest(uid="0" * MAX_QUESTION_BYTES)
    assert not asyncio.run(SparseAverager.rpc_confirm(averager, question, None)).metadata


# ---------------------------------------------------------------------- streams


def message(size=3):
    data = averaging_pb2.AveragingData(group_id=b"g" * size).SerializeToString()
    return b"\x00" + len(data).to_bytes(8, "big") + data


END = b"\x01" + bytes(8)


def stream(*pieces, closed=True):
    reader = asyncio.StreamReader()
    for piece in pieces:
        reader.feed_data(piece)
    if closed:
        reader.feed_eof()
    return reader


def test_messages_arrive_whole_and_in_order():
    async def scenario():
        reader = stream(message(1), message(2), message(3), END, closed=False)
        inbox = Inbox(asyncio.Semaphore(32), 1)
        reading = asyncio.create_task(inbox.fill(averaging_pb2.AveragingData, reader))
        sizes = [len(item.group_id) async for item in inbox.messages()]
        reading.cancel()
        return sizes

    assert asyncio.run(scenario()) == [1, 2, 3]


def test_no_more_is_read_than_two_messages_ahead_and_room_is_shared_by_a_peers_streams():
    async def scenario():
        room = asyncio.Semaphore(5)
        inboxes = [Inbox(room, 1) for _ in range(4)]
        readers = [stream(*[message()] * 10, closed=False) for _ in inboxes]
        tasks = [
            asyncio.create_task(inbox.fill(averaging_pb2.AveragingData, reader))
            for inbox, reader in zip(inboxes, readers, strict=True)
        ]
        for _ in range(1000):  # all that these streams bring is there already
            await asyncio.sleep(0)
        held = [inbox._num_held for inbox in inboxes]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for inbox in inboxes:
            inbox.close()
        return held, room._value

    held, left = asyncio.run(scenario())
    assert sum(held) == 5 and max(held) == 2 and left == 5


def test_a_stream_that_has_brought_all_keeps_out_no_other():
    """Streams wait for each other's parts: where each kept room for its end, those of 32 slots waited for ever."""

    async def scenario():
        room = asyncio.Semaphore(2)
        readers = [stream(message(), END, closed=False) for _ in range(3)]
        inboxes = [Inbox(room, 1) for _ in readers]
        tasks = [
            asyncio.create_task(i.fill(averaging_pb2.AveragingData, r)) for i, r in zip(inboxes, readers, strict=True)
        ]
        sizes = [[len(item.group_id) async for item in inbox.messages()] for inbox in inboxes]
        for task in tasks:
            task.cancel()
        return sizes

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == [[3]] * 3


@pytest.mark.parametrize("pieces", [(), (b"\x00",), (message()[:-1],)], ids=["nothing", "a byte", "all but one"])
def test_a_stream_that_brings_no_message_is_given_up(monkeypatch, pieces):
    monkeypatch.setattr(streams, "FIRST_SECONDS", 0.1)

    async def scenario():
        reader = stream(*pieces, closed=False)
        await asyncio.wait_for(Inbox(asyncio.Semaphore(1), 1).fill(averaging_pb2.AveragingData, reader), 20)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    assert time.monotonic() - began < 10


def test_a_message_that_stops_amid_its_bytes_is_given_up(monkeypatch):
    monkeypatch.setattr(streams, "MESSAGE_SECONDS", 0.1)

    async def scenario():
        await asyncio.wait_for(receive(averaging_pb2.AveragingData, stream(message()[:-1], closed=False), 1000), 20)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(scenario())
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" + (1001).to_bytes(8, "big"),
        b"\x00" + (2**40).to_bytes(8, "big"),
        b"\x01" + (2**63).to_bytes(8, "big"),
        b"\x02" + bytes(8),
        b"\x00" + (4).to_bytes(8, "big") + b"\xff" * 4,
    ],
    ids=lambda data: data.hex(),
)
def test_what_is_too_long_or_no_message_is_refused_before_more_is_read(data):
    async def scenario():
        await asyncio.wait_for(receive(averaging_pb2.AveragingData, stream(data, closed=False), 1000), 20)

    with pytest.raises(ExchangeError):
        asyncio.run(scenario())


def test_an_error_in_place_of_a_message_is_returned_as_one():
    async def scenario():
        data = RPCError(message="no").SerializeToString()
        reader = stream(b"\x01" + len(data).to_bytes(8, "big") + data)
        return await receive(averaging_pb2.AveragingData, reader, 1000)

    assert asyncio.run(scenario()).message == "no"


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
    with quota.hold("alice", "streams", 100):
        assert quota.num_held("alice") == 1
    assert quota.num_held("alice") == 0
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
