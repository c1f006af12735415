"""What runs in the DHT's process on behalf of its peer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from hivemind.dht import DHT, DHTNode
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.p2p import PeerID


async def strangers(peers: Sequence[str], dht: DHT, node: DHTNode) -> list[str]:
    """Return the peers that the DHT node does not know."""
    table = node.protocol.routing_table
    return [peer for peer in peers if table.get(peer_id=PeerID.from_base58(peer)) is None]


async def greet(peers: Sequence[str], dht: DHT, node: DHTNode) -> int:
    """Ping peers, which makes them and this node known to each other; return how many it knows then."""
    answers = await asyncio.gather(*(node.protocol.call_ping(PeerID.from_base58(peer)) for peer in peers))
    return max(len(node.protocol.routing_table.peer_id_to_uid), sum(answer is not None for answer in answers))


async def store(key: str, subkey: bytes, value: bytes, expires: float, dht: DHT, node: DHTNode) -> bool:
    """Store a record, with others and here; tell whether any of the others took it.

    Stock says yes where the only node that took it is its own.
    """
    taken = await node.store(key, value, expires, subkey=subkey, exclude_self=True)
    if not node.protocol.client_mode:
        key_id, protocol = DHTID.generate(source=key), node.protocol
        packed, subkey_bytes = protocol.serializer.dumps(value), protocol.serializer.dumps(subkey)
        signed = protocol.record_validator.sign_value(DHTRecord(key_id.to_bytes(), subkey_bytes, packed, expires))
        protocol.storage.store(key_id, signed, expires, subkey=subkey)
    return bool(taken)
