"""A DHT node among strangers: what it decodes, whom it takes for a neighbour, and how much it keeps for others."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, TypeAlias

from hivemind.dht import dht as stock_dht
from hivemind.dht import node as stock_node
from hivemind.dht import protocol as stock_protocol
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from spes_p2p.errors import RecordError
from spes_p2p.swarm.hivemind_fixes.processes import ChildDHT
from spes_p2p.swarm.hivemind_fixes.serializer import ShallowSerializer
from spes_p2p.swarm.hivemind_fixes.streams import MAX_STREAMS_PER_PEER, LimitedP2P
from spes_p2p.swarm.validation import RecordValidator

log = logging.getLogger(__name__)

Found: TypeAlias = ValueWithExpiration[Any] | None
MAX_OWNERS = 1024
"""Owners of records under one key: of the longest records, 2.5 KB with key and signature, they still stay below the
4 MiB beyond which libp2p answers nobody."""
MAX_KEYS = 64
"""Keys of one request; more are stored or read by nobody."""
SPARE_STREAMS = 8
"""Of another peer to a process, beside those that carry its vectors."""


def node_id_of(peer_id: PeerID) -> DHTID:
    """Return the place in the DHT that belongs to a peer: nobody chooses which records lie with it."""
    return DHTID.generate(source=peer_id.to_bytes())


class BoundedStorage(DHTLocalStorage):
    """What a node keeps for others, of at most so many owners by key.

    Stock keeps all that it is sent, and a note of each attempt to store until its lifetime ends.
    """

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        known = self.get(key)
        is_longer = known is None or known.expiration_time < expiration_time
        stored = is_longer and super().store(key, value, expiration_time)
        _forget_replaced(self)
        return stored

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        records = known.value if known is not None else None
        if isinstance(records, DictionaryDHTValue):
            before = records.get(subkey)
            if before is None and len(records) >= MAX_OWNERS:  # guard: record-owners
                return False
            if before is not None and before.expiration_time >= expiration_time:
                return False
        stored = super().store_subkey(key, subkey, value, expiration_time)
        for storage in (self, records):
            if isinstance(storage, TimedStorage):
                _forget_replaced(storage)
        return stored


def _forget_replaced(storage: TimedStorage) -> None:
    """Drop what a storage remembers of values that newer ones have replaced, once it is more than the rest."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:  # guard: store-traces
        storage.expiration_heap = sorted(storage.key_to_heap.values())


class SwarmDHTProtocol(DHTProtocol):
    """hivemind's DHT protocol, which decodes no bombs, and takes peers for neighbours only where they belong."""

    serializer = ShallowSerializer  # guard: dht-serializer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[ValidationError | None] = []
        """Of those whom this node has asked whether they take it: None, or why not."""

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Ask a peer for its place in the DHT; whether it takes this node goes to `answers`, if that is asked."""
        try:
            place = await super().call_ping(peer, validate, strict)
        except ValidationError as error:
            self.answers.append(error)
            return node_id_of(peer)
        if validate and place is not None:
            self.answers.append(None)
        return place

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return DHTProtocol._get_handle_name(namespace, method_name)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Take note of a peer, unless it claims another place in the DHT than its own.

        Whoever could choose its place would choose those next to a key, hold all its copies, and show them to nobody.
        """
        if node_id is not None and node_id != node_id_of(peer_id):  # guard: own-dht-place
            log.debug("%s claims a place in the DHT that is not its own", peer_id)
            return
        await super().update_routing_table(node_id, peer_id, responded)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, dict]] | None:
        """Ask a peer for values and neighbours; leave out those whom it puts where they do not belong.

        Of values only the records are kept: how long all live, and how many there may be, their sender has said.
        """
        found = await super().call_find(peer, keys)
        if not found:
            return found
        return {
            key: (
                _records_of(value),  # guard: records-only
                {place: who for place, who in nearest.items() if place == node_id_of(who)},  # guard: others-dht-place
            )
            for key, (value, nearest) in found.items()
        }

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:  # guard: one-bad-record
        """Leave out the records that are not valid; stock throws the others away with them."""
        with dictionary.freeze():
            for subkey, item in list(dictionary.items()):
                packed = self.serializer.dumps(subkey)
                if not self._validate_record(key_bytes, packed, item.value, item.expiration_time):
                    del dictionary[subkey]
        return True

    async def rpc_find(self, request: dht_pb2.FindRequest, context: P2PContext) -> dht_pb2.FindResponse:
        _check_keys(request.keys, context)
        return await super().rpc_find(request, context)

    async def rpc_store(self, request: dht_pb2.StoreRequest, context: P2PContext) -> dht_pb2.StoreResponse:
        _check_keys(request.keys, context)
        if any(request.in_cache):  # guard: cache-filled
            raise RecordError("nobody's cache is filled by others")
        return await super().rpc_store(request, context)


def _records_of(found: Found) -> Found:
    """Return a dictionary of the same records, which lives for as long as they do; None where there are none."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    records = DictionaryDHTValue()
    with found.value.freeze():
        for subkey, item in found.value.items():
            records.store(subkey, item.value, item.expiration_time)
    return ValueWithExpiration(records, records.latest_expiration_time) if records.data else None


class SwarmDHTNode(DHTNode):
    """hivemind's DHT node, which no single one of those it starts with can send away."""

    protocol: SwarmDHTProtocol

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTNode:
        """Join the others, unless more than half of those asked say that its clock, or its address, is wrong.

        Stock believes each: one that is too busy to call back, or whose own clock is wrong, sent every newcomer away.

        Raises:
            ValidationError: what the first of them has said.
            RuntimeError: nobody answers.
        """
        node = await super().create(*args, **kwargs)
        answers = node.protocol.answers
        objections = [answer for answer in answers if answer is not None]
        if 2 * len(objections) > len(answers):  # guard: one-objection
            raise objections[0]
        for objection in objections:
            log.info("one of %d peers asked does not take this one: %s", len(answers), objection)
        return node


def _check_keys(keys: Collection[bytes], context: P2PContext) -> None:
    if len(keys) > MAX_KEYS:  # guard: request-keys
        log.debug("refused a request of %s for %d keys", context.remote_id, len(keys))
        raise RecordError(f"{len(keys)} keys in one request, at most {MAX_KEYS}")


class SwarmDHT(ChildDHT):
    """The DHT process of a peer among strangers.

    Args:
        p2p: The peer's host.
        validator: Looks at each record.
        settings: The rest, as of hivemind's DHT.

    Attributes:
        subkey: The subkey under which the peer's records lie.
        streams_per_peer: That another peer may have open to each process that gets the host from here.
    """

    streams_per_peer = MAX_STREAMS_PER_PEER

    def __init__(self, p2p: P2P, validator: RecordValidator, **settings: Any) -> None:
        self.subkey = validator.subkey
        # In client mode it has no place: nobody's neighbour, and not left out where others still know it from before.
        place = None if settings.get("client_mode") else node_id_of(p2p.peer_id)
        super().__init__(start=False, p2p=p2p, record_validators=[validator], node_id=place, **settings)

    def run(self) -> None:
        # Stock builds them by these names, in this process and nowhere else.
        stock_dht.DHTNode, stock_node.DHTProtocol = SwarmDHTNode, SwarmDHTProtocol
        stock_protocol.DHTLocalStorage = BoundedStorage
        super().run()

    async def replicate_p2p(self) -> LimitedP2P:
        """Return a connection of this process to the peer's host; asked for once in each process."""
        p2p = await LimitedP2P.replicate(self._daemon_listen_maddr)
        p2p.streams.most = self.streams_per_peer
        return p2p
