"""What a peer sends is spread over time, so that its link carries it without a queue."""

from __future__ import annotations

import asyncio
import time

PAYLOAD_SHARE = 0.95
"""Of a link's bits: headers and acknowledgements were measured to take another 3 to 4 % of them."""
BURST_SECONDS = 0.005
"""Of sending at once; more of it from several peers overflows the queue in front of a receiver's link."""
MIN_BURST_BYTES = 2**14


class RateLimit:
    """Lets bytes go at the rate that a link carries, first come, first served.

    TCP finds that rate by overflowing queues. Where everybody sends to everybody that costs a quarter of it: what one
    receiver's link drops slows a sender down while other links idle (docs/one_round.md).

    Args:
        uplink_mbit: What the link carries, in 10^6 bits per second; None holds nothing back.
    """

    def __init__(self, uplink_mbit: float | None) -> None:
        self._bytes_per_second = PAYLOAD_SHARE * uplink_mbit * 1e6 / 8 if uplink_mbit else None
        self._free_at = 0.0

    def burst_bytes(self, most: int) -> int:
        """Return how many bytes to send at once: few where the link is slow, so that all streams share it evenly."""
        if self._bytes_per_second is None:
            return most
        return min(max(int(self._bytes_per_second * BURST_SECONDS), MIN_BURST_BYTES), most)

    async def take(self, num_bytes: int) -> None:
        """Wait until `num_bytes` may go."""
        if self._bytes_per_second is None:
            return
        now = time.monotonic()
        starts_at = max(self._free_at, now)
        self._free_at = starts_at + num_bytes / self._bytes_per_second
        if starts_at - now > BURST_SECONDS:
            await asyncio.sleep(starts_at - now)
