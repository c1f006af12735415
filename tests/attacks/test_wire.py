"""What a stranger sends over libp2p: nesting, streams without end, crowds of them, and places in the DHT."""

import asyncio
import time
from types import SimpleNamespace

import msgpack
import pytest
from attacker import AVERAGE, FETCH, Watched, key_of
from floods import MAX_GROWN_MIB, MAX_TAKEN_MIB, STREAMS, crowd, flood, message
from forgeries import cases, mallorys_record
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2
from hivemind.proto.auth_pb2 import RequestAuthInfo
from hivemind.utils.serializer import MSGPackSerializer
from lanes import sample
from misbehaving import nested_tuples
from peer_server import MAX_SLOTS

from spes_p2p.swarm.averaging.averaging import streams_per_peer
from spes_p2p.swarm.certificate import MAX_REPLICATED
from spes_p2p.swarm.hivemind_fixes.dht import node_id_of
from spes_p2p.swarm.hivemind_fixes.streams import MAX_STREAMS_PER_PEER
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.records import PROTOCOL
from spes_p2p.swarm.validation import owner_of

pytestmark = pytest.mark.timeout(180)

LIVES = 60.0
CROWD = 500


@pytest.mark.parametrize("depth", sample([9, 220, 700], [700]))  # full: shallower ones than that which killed
@pytest.mark.parametrize("field", ["value", "subkey"])
def test_a_nested_store_leaves_the_peer_alive(victim, attacker, depth, field):
    """700 of them, 3 KB, ended the DHT's process by a segmentation fault."""
    item = {"subkey": b"", "value": msgpack.packb(msgpack.ExtType(0x50, nested_tuples(depth)))}
    item |= {"subkey": nested_tuples(depth)} if field == "subkey" else {}
    answer = attacker.store((key_of(f"run.{PROTOCOL}.claims.0"), item["subkey"], item["value"], time.time() + LIVES))
    assert isinstance(answer, Exception) or answer == [False]
    assert attacker.is_served()


@pytest.fixture(scope="module")
def people(tmp_path_factory):
    folder = tmp_path_factory.mktemp("people")
    return SimpleNamespace(**{name: Identity(folder / name) for name in ("alice", "mallory")})


@cases("records")
@pytest.mark.full
def test_a_bad_record_is_refused_whichever_peer_brings_it(victim, attacker, people, case):
    """The whole corpus, through libp2p: into the store, and into the cache, where stock looks first."""
    record = mallorys_record(case, people)
    for in_cache in (False, True):
        item = record.key, record.subkey, record.value, record.expiration_time
        answer = attacker.store(item, in_cache=in_cache)
        assert isinstance(answer, Exception) or answer == [False], answer


def test_one_bad_record_of_a_dictionary_is_left_out_and_the_others_are_read(victim, attacker, people):
    """Stock throws the whole dictionary away: one attacker could hide all peers' claims."""
    good, bad = ({"kind": "claims", "lies": lies} for lies in ({}, {"signature": "none"}))
    records = DictionaryDHTValue()
    for case, author in ((bad, people.alice), (good, people.mallory)):
        record = mallorys_record(case, SimpleNamespace(mallory=author, alice=people.alice))
        key = record.key
        records.store(msgpack.unpackb(record.subkey), record.value, record.expiration_time)
    assert attacker.store((key, b"", MSGPackSerializer.dumps(records), time.time() + LIVES)) == [True]
    [result] = attacker.find(key).results
    kept = MSGPackSerializer.loads(result.value)
    assert {owner_of(subkey) for subkey, _ in kept.items()} >= {people.mallory.peer_id}
    assert people.alice.peer_id not in {owner_of(subkey) for subkey, _ in kept.items()}


def test_a_peer_cannot_fill_anothers_cache(victim, attacker, people):
    """What it holds a search takes first, and believes."""
    record = mallorys_record({"kind": "claims"}, people)
    item = record.key, record.subkey, record.value, record.expiration_time
    assert attacker.store(item) == [True]
    assert "cache" in str(attacker.store(item, in_cache=True))


@pytest.mark.parametrize("count", [65, 10_000])
def test_a_request_for_too_many_keys_is_refused(victim, attacker, count):
    """Each key is answered with all that lies there: 190,000 times the same one fit into a message."""
    keys = [key_of(f"run.{PROTOCOL}.claims.0")] * count
    assert isinstance(attacker.find(*keys), Exception)
    item = keys[0], msgpack.packb(None), b"\x01", time.time() + LIVES
    assert isinstance(attacker.store(*[item] * count), Exception)


@pytest.mark.parametrize(
    "data",
    [message(b"p", b"x"), b"t\xff\xff\xff\xff", message(b"t", b"{}"), message(b"t", b"[" * 200)],
    ids=["a part first", "too long", "of nothing", "nested"],
)
def test_what_is_no_greeting_ends_the_stream(victim, attacker, data):
    assert attacker.say(AVERAGE, data, seconds=10) == b""


@pytest.mark.parametrize(
    "data",
    [b"t\x00\x00\x00\x02{}", b"w\xff\xff\xff\xff", b"w\x00\x00\x00\x01x", b"g\x00\x00\x00\x00", b"d\x00\x04\x00\x00"],
    ids=["a text", "too many digests", "a digest cut short", "a request of nothing", "data first"],
)
def test_what_is_no_request_ends_the_stream(victim, attacker, data):
    assert attacker.say(FETCH, data, seconds=10) == b""


def test_all_that_leaves_the_peer_serving(victim, attacker):
    assert attacker.is_served()


@pytest.mark.full
@pytest.mark.parametrize("kind", STREAMS)
def test_a_stream_without_end_takes_little_memory(victim, attacker, kind):
    seen = flood(victim, attacker, kind)
    print(f"{kind}: {seen}")
    assert seen.taken_mib < MAX_TAKEN_MIB and seen.grown_mib < MAX_GROWN_MIB
    assert attacker.is_served()


@pytest.mark.full
@pytest.mark.guard
def test_a_crowd_of_streams_is_kept_outside(victim, attacker):
    """What a peer has open of one other is bounded, and given back when that hangs up."""

    async def open_all():
        opened = await asyncio.gather(*(attacker.open(AVERAGE) for _ in range(CROWD)), return_exceptions=True)
        streams = [each for each in opened if not isinstance(each, BaseException)]
        hung_up = await asyncio.gather(*(gone(reader) for reader, _ in streams))
        for _, writer in streams:
            writer.close()
        return len(streams), sum(hung_up)

    async def gone(reader):
        try:
            return not await asyncio.wait_for(reader.read(1), 5.0)
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    with Watched(victim) as watched:
        opened, hung_up = attacker.run(open_all(), 60)
    print(f"{CROWD} streams: {opened} opened, {hung_up} hung up, growth {watched.growth()}")
    assert 0 < opened - hung_up <= MAX_STREAMS_PER_PEER + streams_per_peer(MAX_SLOTS, MAX_REPLICATED)
    assert sum(max(0.0, size) for size in watched.growth().values()) < MAX_GROWN_MIB
    assert attacker.is_served()


def test_a_peer_that_claims_another_dht_id_is_no_neighbour(victim, attacker):
    """Three nodes next to a key would be all of its replicas."""
    key = DHTID.generate(source=f"run.{PROTOCOL}.claims.0")
    me = attacker.p2p.peer_id
    attacker.ping(node_id=DHTID(int(key) ^ 1).to_bytes())
    assert neighbours(attacker) == []
    attacker.ping(node_id=node_id_of(me).to_bytes())
    while (found := neighbours(attacker)) != [me]:  # pytest's timeout ends this
        assert not found


def neighbours(attacker):
    """Return the neighbours that the victim names when asked for a key."""
    time.sleep(0.5)
    [result] = attacker.find(key_of(f"run.{PROTOCOL}.claims.0")).results
    return [PeerID(peer) for peer in result.nearest_peer_ids]


@pytest.mark.full
@pytest.mark.guard
def test_calls_that_wait_for_an_answer_take_little_memory(victim, attacker):
    """A peer that asks whether it can be called is called back, and its call waits for that."""
    name, peer = "DHTProtocol.rpc_ping", PeerID.from_base58(victim.peer_id)
    node = dht_pb2.NodeInfo(node_id=node_id_of(attacker.p2p.peer_id).to_bytes())
    request = dht_pb2.PingRequest(peer=node, validate=True, auth=RequestAuthInfo(nonce=b"x" * 2_000_000))

    async def flood():
        calls = [attacker.p2p.call_protobuf_handler(peer, name, request, dht_pb2.PingResponse) for _ in range(60)]
        return await asyncio.gather(*calls, return_exceptions=True)

    attacker.node.is_silent = True
    try:
        with Watched(victim) as watched:
            answers = attacker.run(flood(), 60)
    finally:
        attacker.node.is_silent = False
    refused = [answer for answer in answers if "too many calls" in str(answer)]
    print(f"60 calls of 2 MB: {len(refused)} refused, growth {watched.growth()}")
    assert len(refused) > 10  # of those that come while the first wait
    assert all(size < MAX_GROWN_MIB for process, size in watched.growth().items() if not process.startswith("p2pd"))
    assert attacker.is_served()


@pytest.mark.full
def test_streams_without_end_that_wait_for_a_group_take_little_memory(victim, attacker):
    """A peer keeps streams of an unknown meeting open: their senders may know of it before this peer does."""
    seen = crowd(victim, attacker)
    print(f"{len(seen.taken)} streams that wait: {seen}")
    assert seen.taken_mib < MAX_TAKEN_MIB and seen.grown_mib < MAX_GROWN_MIB
    assert attacker.is_served()
