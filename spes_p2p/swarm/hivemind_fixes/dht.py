"""A DHT node among untrusted peers: what it decodes, which neighbours it accepts, and how much it stores for others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence
from typing import Any, TypeAlias

from hivemind.dht import DHT
from hivemind.dht import dht as stock_dht
from hivemind.dht import node as stock_node
from hivemind.dht import protocol as stock_protocol
from hivemind.dht.node import DHTNode
from hivemind.dht.protocol import DHTProtocol, ValidationError
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.timed_storage import TimedStorage, ValueWithExpiration

from spes_p2p.errors import RecordError
from spes_p2p.swarm.hivemind_fixes.processes import ChildDHT
from spes_p2p.swarm.hivemind_fixes.serializer import ShallowSerializer
from spes_p2p.swarm.validation import RecordValidator

log = logging.getLogger(__name__)

Found: TypeAlias = ValueWithExpiration[Any] | None
MAX_OWNERS = 1024
"""Owners of records under one key: even with the longest records, 2.5 KB with key and signature, an answer stays below
libp2p's limit of 4 MiB."""
MAX_KEYS = 64
"""Keys of one request."""


def node_id_of(peer_id: PeerID) -> DHTID:
    """Return a peer's DHT id. It follows from the peer's key; otherwise peers could choose which records they store."""
    return DHTID.generate(source=peer_id.to_bytes())


class BoundedStorage(DHTLocalStorage):
    """Records that a node stores for others, with a bound on the owners per key.

    Stock keeps all records that it is sent, and a heap entry for each attempt to store until that record's end.
    """

    def store(self, key: DHTID, value: Any, expiration_time: float, subkey: Any = None) -> bool:
        if subkey is not None:
            return self.store_subkey(key, subkey, value, expiration_time)
        known = self.get(key)
        is_longer = known is None or known.expiration_time < expiration_time
        stored = is_longer and super().store(key, value, expiration_time)
        _drop_replaced(self)
        return stored

    def store_subkey(self, key: DHTID, subkey: Any, value: bytes, expiration_time: float) -> bool:
        known = self.get(key)
        records = known.value if known is not None else None
        if isinstance(records, DictionaryDHTValue):
            before = records.get(subkey)
            if before is None and len(records) >= MAX_OWNERS:  # guard: never
                return False
            if before is not None and before.expiration_time >= expiration_time:
                return False
        stored = super().store_subkey(key, subkey, value, expiration_time)
        for storage in (self, records):
            if isinstance(storage, TimedStorage):
                _drop_replaced(storage)
        return stored


def _drop_replaced(storage: TimedStorage) -> None:
    """Drop the heap entries of replaced values once they outnumber the others."""
    if len(storage.expiration_heap) > 2 * len(storage.data) + 64:  # guard: never
        storage.expiration_heap = sorted(storage.key_to_heap.values())


class SwarmDHTProtocol(DHTProtocol):
    """hivemind's DHT protocol with bounded decoding and verified DHT ids.

    Attributes:
        answers: For each peer that was asked to accept this node: None, or its objection.
        named: Peers whose addresses this peer's user has given, which may be plain nodes of hivemind's.
    """

    serializer = ShallowSerializer  # guard: skip
    named: Collection[PeerID] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.answers: list[ValidationError | None] = []

    async def call_ping(self, peer: PeerID, validate: bool = False, strict: bool = True) -> DHTID | None:
        """Return a peer's DHT id; with `validate`, add its opinion of this node to `answers`."""
        try:
            node_id = await super().call_ping(peer, validate, strict)
        except ValidationError as error:
            self.answers.append(error)
            return node_id_of(peer)
        except Exception as error:  # noqa: BLE001 - of any type: the peer has caused it  # guard: Exception -> OSError
            log.debug("%s gives no answer to a ping: %r", peer, error)
            return None
        if validate and node_id is not None:
            self.answers.append(None)
        return node_id

    @classmethod
    def _get_handle_name(cls, namespace: str | None, method_name: str) -> str:
        return DHTProtocol._get_handle_name(namespace, method_name)

    async def update_routing_table(self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True) -> None:
        """Add a peer as a neighbour, unless it claims another DHT id than its own.

        With chosen ids next to a key, an attacker would hold all copies of its records and could withhold them. Plain
        nodes draw theirs; those that the user has named may.
        """
        if node_id is not None and node_id != node_id_of(peer_id) and peer_id not in self.named:  # guard: never
            log.debug("%s claims a DHT id that is not its own", peer_id)
            return
        await super().update_routing_table(node_id, peer_id, responded)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> dict[DHTID, tuple[Any, dict]] | None:
        """Ask a peer for values and neighbours; drop neighbours whose DHT ids are not their own, and this node itself.

        A search that found this node would fail on an assertion of hivemind's.
        Of values only the records are kept: the size and lifetime of the whole are the sender's claims.
        """
        found = await super().call_find(peer, keys)
        if not found:
            return found
        return {
            key: (
                _records_of(value),  # guard: first
                {
                    node: peer
                    for node, peer in nearest.items()
                    if node == node_id_of(peer)  # guard: always
                    and node != self.node_id  # guard: operand
                },
            )
            for key, (value, nearest) in found.items()
        }

    def _validate_dictionary(self, key_bytes: bytes, dictionary: DictionaryDHTValue) -> bool:  # guard: skip
        """Remove the invalid records; stock rejects the whole dictionary for one of them."""
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
        if any(request.in_cache):  # guard: never
            raise RecordError("peers must not write to this node's cache")
        return await super().rpc_store(request, context)


def _records_of(found: Found) -> Found:
    """Copy the records of a dictionary, which then lives as long as its last record; None if it has none."""
    if found is None or not isinstance(found.value, DictionaryDHTValue):
        return None
    records = DictionaryDHTValue()
    with found.value.freeze():
        for subkey, item in found.value.items():
            records.store(subkey, item.value, item.expiration_time)
    return ValueWithExpiration(records, records.latest_expiration_time) if records.data else None


def _check_keys(keys: Collection[bytes], context: P2PContext) -> None:
    if len(keys) > MAX_KEYS:  # guard: never
        log.debug("refused a request of %s for %d keys", context.remote_id, len(keys))
        raise RecordError(f"{len(keys)} keys in one request, at most {MAX_KEYS}")


class SwarmDHTNode(DHTNode):
    """hivemind's DHT node, which joins unless a majority of the peers asked object."""

    protocol: SwarmDHTProtocol

    @classmethod
    async def create(cls, *args: Any, **kwargs: Any) -> DHTNode:
        """Join the swarm, unless more than half of the peers asked say that this node's clock or address is wrong.

        Stock obeys a single objection: a peer with a wrong clock, or too busy to call back, turned every newcomer away.

        Raises:
            ValidationError: the first objection.
            RuntimeError: no peer answers.
        """
        node = await super().create(*args, **kwargs)
        answers = node.protocol.answers
        objections = [answer for answer in answers if answer is not None]
        if 2 * len(objections) > len(answers):  # guard: len(answers) -> 0
            raise objections[0]
        for objection in objections:
            log.info("one of %d peers asked does not accept this one: %s", len(answers), objection)
        return node


class SwarmDHT(ChildDHT):
    """The DHT process of a peer.

    Attributes:
        subkey: The subkey of this peer's records.
    """

    def __init__(self, p2p: P2P, validator: RecordValidator, named: Collection[str] = (), **settings: Any) -> None:
        self.subkey = validator.subkey
        self._named = frozenset(map(PeerID.from_base58, named))
        # In client mode the id is random: the node is no neighbour, and searches must not skip the entry that other
        # nodes may still hold of it from an earlier start.
        node_id = None if settings.get("client_mode") else node_id_of(p2p.peer_id)
        super().__init__(start=False, p2p=p2p, record_validators=[validator], node_id=node_id, **settings)

    def run(self) -> None:
        # Stock builds its parts by these names; the patch affects only this process.
        stock_dht.DHTNode = SwarmDHTNode
        stock_node.DHTProtocol = SwarmDHTProtocol
        SwarmDHTProtocol.named = self._named
        stock_protocol.DHTLocalStorage = BoundedStorage
        super().run()


# ---------------------------------------------------------------------- coroutines for `DHT.run_coroutine`


async def unknown_peers(peers: Sequence[str], dht: DHT, node: DHTNode) -> list[str]:
    """Return the peers that are not in the node's routing table."""
    table = node.protocol.routing_table
    return [peer for peer in peers if table.get(peer_id=PeerID.from_base58(peer)) is None]


async def ping_peers(peers: Sequence[str], dht: DHT, node: DHTNode) -> int:
    """Ping peers, so that they and this node know each other; return the number of peers that it knows then."""
    answers = await asyncio.gather(*(node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))
    return max(len(node.protocol.routing_table.peer_id_to_uid), sum(answer is not None for answer in answers))


async def store_record(key: str, subkey: bytes, value: bytes, expires: float, dht: DHT, node: DHTNode) -> bool:
    """Store a record on other nodes and on this one; tell whether any other node accepted it.

    Stock reports success even if only its own node stored the record.
    """
    accepted = await node.store(key, value, expires, subkey=subkey, exclude_self=True)
    if not node.protocol.client_mode:
        key_id, protocol = DHTID.generate(source=key), node.protocol
        packed, subkey_bytes = protocol.serializer.dumps(value), protocol.serializer.dumps(subkey)
        signed = protocol.record_validator.sign_value(DHTRecord(key_id.to_bytes(), subkey_bytes, packed, expires))
        protocol.storage.store(key_id, signed, expires, subkey=subkey)
    return bool(accepted)
