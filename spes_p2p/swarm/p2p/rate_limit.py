"""Spreads what a peer sends over time, so that its link carries it without a queue, and what others may ask of it."""

from __future__ import annotations

import asyncio

PAYLOAD_SHARE = 0.95
"""Payload's share of a link's bits; headers and acknowledgements take the rest."""
BURST_SECONDS = 0.005
"""Longest burst; longer ones from several peers overflow the queue in front of a receiver's link."""
MIN_BURST_BYTES = 2**14


class RateLimit:
    """Lets bytes go at the rate that a link carries, first come, first served.

    TCP finds that rate by overflowing queues. In an all-to-all exchange that costs a quarter of it: packets that one
    receiver's link drops slow a sender down while other links idle (docs/protocol.md).

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
        now = asyncio.get_running_loop().time()
        starts_at = max(self._free_at, now)
        self._free_at = starts_at + num_bytes / self._bytes_per_second
        if starts_at - now > BURST_SECONDS:
            await asyncio.sleep(starts_at - now)


class Allowance:
    """Lets each peer do something a number of times at once, and then again after pauses.

    Args:
        burst: Times at once.
        pause_seconds: Time after which a peer may do it once more.
        max_peers: Peers that are remembered; of more, those heard of longest ago are forgotten.
    """

    def __init__(self, burst: int, pause_seconds: float, max_peers: int = 1024) -> None:
        self._burst = burst
        self._pause_seconds = pause_seconds
        self._max_peers = max_peers
        self._left: dict[str, tuple[float, float]] = {}

    def take(self, peer: str, now: float) -> bool:
        """Check whether a peer may do it now, in monotonic seconds, and count that."""
        left, since = self._left.pop(peer, (float(self._burst), now))
        left = min(left + (now - since) / self._pause_seconds, float(self._burst))
        self._left[peer] = (left - 1.0, now) if left >= 1.0 else (left, now)
        if len(self._left) > self._max_peers:
            del self._left[next(iter(self._left))]
        return left >= 1.0
