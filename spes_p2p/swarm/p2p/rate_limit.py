"""Spreads what a peer sends over time, so that its link carries it without a queue."""

from __future__ import annotations

import asyncio
import time

PAYLOAD_SHARE = 0.95
"""Payload's share of a link's bits; headers and acknowledgements take the rest."""
BURST_SECONDS = 0.005
"""Longest burst; longer ones from several peers overflow the queue in front of a receiver's link."""
MIN_BURST_BYTES = 2**14


class RateLimit:
    """Lets bytes go at the rate that a link carries, first come, first served.

    TCP finds that rate by overflowing queues. In an all-to-all exchange that costs a quarter of it: packets that one
    receiver's link drops slow a sender down while other links idle (docs/one_round.md).

    Args:
        uplink_mbit: The link's rate in 10^6 bits per second; None for no limit.
    """

    def __init__(self, uplink_mbit: float | None) -> None:
        self._bytes_per_second = PAYLOAD_SHARE * uplink_mbit * 1e6 / 8 if uplink_mbit else None
        self._free_at = 0.0

    def burst_bytes(self, max_bytes: int) -> int:
        """Return how many bytes to send at once: few on a slow link, so that its streams share it evenly."""
        if self._bytes_per_second is None:
            return max_bytes
        return min(max(int(self._bytes_per_second * BURST_SECONDS), MIN_BURST_BYTES), max_bytes)

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may be sent."""
        if self._bytes_per_second is None:
            return
        now = time.monotonic()
        starts_at = max(self._free_at, now)
        self._free_at = starts_at + num_bytes / self._bytes_per_second
        if starts_at - now > BURST_SECONDS:
            await asyncio.sleep(starts_at - now)
