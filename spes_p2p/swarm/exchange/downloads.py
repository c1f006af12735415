"""Payloads on their way here: which bytes have come from which peer, and which peer sends the rest."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.protocol import Answer, Request, Signal
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
    """Bytes not requested yet; `owner` is the peer to send them, "" any peer."""

    start: int
    stop: int
    owner: str = ""


class Download:
    """One payload: its bytes so far, and the division of the rest among its senders.

    Args:
        answer: The accepted offer.
        version: The offered version, verified.
        base: Digest of the version to which its deltas are applied.
        num_bytes: Exact length.
        shares: Weight by peer, in order, of the part to request from that peer first; None lets each peer send the
            next part.

    Attributes:
        data: The payload; received bytes are in place.
        ranges: All ranges requested so far.
        is_closed: No more bytes come.
        changed: Fires when bytes or gaps have changed.
    """

    def __init__(
        self, answer: Answer, version: Version, base: str, num_bytes: int, shares: Mapping[str, float] | None = None
    ) -> None:
        self.answer = answer
        self.version = version
        self.base = base
        self.num_bytes = num_bytes
        self.data = bytearray(num_bytes)
        self.ranges: list[Range] = []
        self.is_closed = False
        self._gaps = _divide(num_bytes, shares or {"": 1.0})
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

    def satisfies(self, request: Request) -> bool:
        """Tell whether these are the bytes that a relay requests of a version it knows from another peer."""
        if self.is_closed or request.digest != self.version.digest:
            return False
        if not request.max_deltas:
            return self.answer.state == "whole"
        return self.base == request.have and self.answer.num_deltas == request.max_deltas

    # ------------------------------------------------------------------ dividing

    def claim(self, peer: str, max_bytes: int, *, only_its_share: bool = False) -> Range | None:
        """Return the next range to request from a peer: of its own share, or of the part that any peer may send."""
        for owner in (peer,) if only_its_share else (peer, ""):
            for gap in self._gaps:
                if gap.owner == owner:
                    stop = min(gap.stop, gap.start + max_bytes)
                    range = Range(peer, gap.start, stop)
                    gap.start = stop
                    self._gaps = [gap for gap in self._gaps if gap.start < gap.stop]
                    self.ranges.append(range)
                    self._active.add(range)
                    return range
        return None

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

    def release(self, peer: str) -> None:
        """Let any peer send the share of one that does not."""
        for gap in self._gaps:
            if gap.owner == peer:
                gap.owner = ""
        self.changed.fire()

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

    async def wait_for(self, start: int, stop: int, seconds: float) -> int:
        """Wait until the bytes from `start` to `stop` are here; return the offset up to which more are.

        Raises:
            ExchangeError: they did not come in time.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while (reached := self._reached(start)) < stop:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or self.is_closed:
                raise ExchangeError(f"{self.version.name} did not arrive here")
            await self.changed.wait(remaining)
        return reached

    def _reached(self, start: int) -> int:
        while found := next((range for range in self.ranges if range.first <= start < range.position), None):
            start = found.position
        return start

    def senders_unlike(self, other: Download) -> set[str]:
        """Return the peers whose bytes differ from those in `other`."""
        return {
            range.peer
            for range in self.ranges
            if self.data[range.first : range.position] != other.data[range.first : range.position]
        }


def _divide(num_bytes: int, weights: Mapping[str, float]) -> list[_Gap]:
    total, edges = sum(weights.values()), [0]
    reached = 0.0
    for weight in weights.values():
        reached += weight
        edges.append(round(num_bytes * reached / total))
    spans = zip(weights, edges[:-1], edges[1:], strict=True)
    return [_Gap(start, stop, owner) for owner, start, stop in spans if start < stop]


def relay_shares(relays: Sequence[str], me: str, holder: str, uplinks: Mapping[str, float]) -> dict[str, float]:
    """Divide a payload among the relays that fetch it, alike on all of them: weights by the peer that sends the part.

    Args:
        relays: All relays, in an order that they share.
        me: This relay's id; its own part comes from the holder, the others' parts from them.
        holder: A peer that has the payload.
        uplinks: The relays' uplinks; those left out count as the fastest.
    """
    fastest = max(uplinks.values(), default=1.0)
    return {holder if peer == me else peer: uplinks.get(peer, fastest) for peer in relays}
