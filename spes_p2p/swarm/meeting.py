"""How members of a run find each other in the DHT when a round is due."""

from __future__ import annotations

import math
import time

from hivemind.averaging.key_manager import GroupKeyManager
from hivemind.p2p import PeerID

from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS


class Declarations(GroupKeyManager):
    """Declares until when this peer waits for others, and reads the same of them.

    Stock lets the declaration itself expire at that time, and a DHT keeps whichever of two records expires later:
    who once planned to wait until noon could be found by nobody before noon, not even to redo a failed round. Here
    the time is the declaration's value, and each declaration outlives the last.
    """

    _expires_at = 0.0

    async def declare_averager(
        self, group_key: str, peer_id: PeerID, expiration_time: float, looking_for_group: bool = True
    ) -> bool:
        lives_until = min(expiration_time, time.time() + MAX_LIFETIME_SECONDS)
        self._expires_at = max(lives_until, math.nextafter(self._expires_at, math.inf))
        return await self.dht.store(
            key=group_key,
            subkey=peer_id.to_bytes(),
            value=expiration_time if looking_for_group else 0.0,
            expiration_time=self._expires_at,
            return_future=True,
        )

    async def get_averagers(self, group_key: str, only_active: bool) -> list[tuple[PeerID, float]]:
        found = await self.dht.get(group_key, latest=True, return_future=True)
        if found is None or not isinstance(found.value, dict):
            return []
        waiting = {peer: item.value for peer, item in found.value.items() if isinstance(peer, bytes)}
        return [
            (PeerID(peer), until) for peer, until in waiting.items() if isinstance(until, float) and until > time.time()
        ]
