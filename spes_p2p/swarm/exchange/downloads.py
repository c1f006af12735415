"""Payloads on their way here: which bytes have come from which peer, and which peer sends the rest."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field

from spes_p2p.swarm.exchange.protocol import Signal
from spes_p2p.swarm.exchange.versions import Version

RANGE_BYTES = 2**21
"""Bytes requested at a time from each of several peers."""
MIN_SPLIT_BYTES = 2**16
"""Shorter rests of a range are taken over whole."""
MIN_PARALLEL = 4
MAX_PARALLEL_BYTES = 2**26
"""Downloads at a time, whatever their size, and bytes of more of them together: they lie in memory."""
MIN_PARALLEL_PER_PEER = 2
MAX_PARALLEL_BYTES_PER_PEER = 2**24
"""The same for one peer, so that a slow peer does not use up the budget."""
RECHECK_SECONDS = 5.0


class DownloadBudget:
    """Bounds the downloads under way: a few of any size, and more of them while their bytes are few."""

    def __init__(self) -> None:
        self._active: list[tuple[str, int]] = []
        self._changed = Signal()

    async def acquire(self, peer: str, num_bytes: int) -> None:
        """Wait until a download of `num_bytes` from a peer may begin."""
        while not self._has_room(peer, num_bytes):
            await self._changed.wait(RECHECK_SECONDS)
        self._active.append((peer, num_bytes))

    def _has_room(self, peer: str, num_bytes: int) -> bool:
        sizes = [size for _, size in self._active]
        of_peer = [size for other, size in self._active if other == peer]
        return (len(sizes) < MIN_PARALLEL or sum(sizes) + num_bytes <= MAX_PARALLEL_BYTES) and (
            len(of_peer) < MIN_PARALLEL_PER_PEER or sum(of_peer) + num_bytes <= MAX_PARALLEL_BYTES_PER_PEER
        )

    def release(self, peer: str, num_bytes: int) -> None:
        """End a download."""
        self._active.remove((peer, num_bytes))
        self._changed.fire()


@dataclass(eq=False)
class Range:
    """Bytes requested from one peer.

    Attributes:
        peer: The peer's id.
        first: Offset of the first byte.
        stop: Offset behind the last byte still wanted from this peer; a faster peer may take over the end.
        started_at: Time at which the peer began to send it, in the loop's seconds; requests wait behind each other.
        position: Offset behind the last byte received.
        requested: Offset behind the last byte requested.
    """

    peer: str
    first: int
    stop: int
    started_at: float = math.inf
    position: int = field(init=False)
    requested: int = field(init=False)

    def __post_init__(self) -> None:
        self.position = self.first
        self.requested = self.stop

    def remaining_seconds(self, now: float) -> float:
        """Return the time that the rest takes at the rate so far."""
        return (self.stop - self.position) * (now - self.started_at) / max(self.position - self.first, 1)


@dataclass
class _Gap:
    """Bytes not requested yet."""

    start: int
    stop: int


class Download:
    """One payload: its bytes so far, and the division of the rest among its senders.

    Args:
        version: The offered version, verified.

    Attributes:
        data: The payload; received bytes are in place.
        ranges: All ranges requested so far.
        is_closed: No more bytes come.
        changed: Fires when bytes or gaps have changed.
    """

    def __init__(self, version: Version) -> None:
        self.version = version
        self.num_bytes = version.num_bytes
        self.data = bytearray(self.num_bytes)
        self.ranges: list[Range] = []
        self.is_closed = False
        self._gaps = [_Gap(0, self.num_bytes)]
        self._active: set[Range] = set()
        self._num_received = 0
        self.changed = Signal()

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are here."""
        return self._num_received == self.num_bytes

    @property
    def senders(self) -> set[str]:
        """Peers that have sent some of it."""
        return {range.peer for range in self.ranges if range.position > range.first}

    # ------------------------------------------------------------------ dividing

    def claim(self, peer: str, max_bytes: int) -> Range | None:
        """Return the next range to request from a peer."""
        self._gaps = [gap for gap in self._gaps if gap.start < gap.stop]
        if not self._gaps:
            return None
        gap = self._gaps[0]
        range = Range(peer, gap.start, min(gap.stop, gap.start + max_bytes))
        gap.start = range.stop
        self.ranges.append(range)
        self._active.add(range)
        return range

    def will_miss(self, deadline: float) -> bool:
        """Tell whether no peer sends, or one so slowly that its range is not here by then, in the loop's seconds."""
        now = asyncio.get_running_loop().time()
        return not self._active or any(now + range.remaining_seconds(now) > deadline for range in self._active)

    def slowest(self, seconds: float) -> Range | None:
        """Return the range that will take its peer longest, if it has taken more than `seconds` and will again."""
        now = asyncio.get_running_loop().time()
        slow = [range for range in self._active if now - range.started_at > seconds < range.remaining_seconds(now)]
        return max(slow, key=lambda range: range.remaining_seconds(now), default=None)

    def take_over(self, peer: str, seconds: float) -> Range | None:
        """Reassign the end of another peer's slow range to an idle peer."""
        slowest = self.slowest(seconds)
        if slowest is None or slowest.peer == peer:
            return None
        length = slowest.stop - slowest.position
        middle = slowest.position + (length // 2 if length > MIN_SPLIT_BYTES else 0)
        self._gaps.append(_Gap(middle, slowest.stop))
        slowest.stop = middle
        return self.claim(peer, length)

    # ------------------------------------------------------------------ receiving

    def write(self, range: Range, data: bytes) -> None:
        """Put received bytes in place, except those reassigned to another peer in the meantime."""
        wanted = data[: range.stop - range.position]
        self.data[range.position : range.position + len(wanted)] = wanted
        range.position += len(wanted)
        self._num_received += len(wanted)
        self.changed.fire()

    def finish(self, range: Range) -> None:
        """End a range; request what has not come of it again."""
        self._active.discard(range)
        if range.position < range.stop:
            self._gaps.append(_Gap(range.position, range.stop))
            range.stop = range.position
        self.changed.fire()

    def close(self) -> None:
        """Give up on the bytes that have not come."""
        self.is_closed = True
        self.changed.fire()

    # ------------------------------------------------------------------ reading

    def senders_unlike(self, other: Download) -> set[str]:
        """Return the peers whose bytes differ from those in `other`."""
        return {
            range.peer
            for range in self.ranges
            if self.data[range.first : range.position] != other.data[range.first : range.position]
        }
