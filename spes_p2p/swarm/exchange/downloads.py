"""A payload on its way here: which bytes have come from whom, and which are still to be had."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.protocol import Answer, Request, Signal
from spes_p2p.swarm.exchange.versions import Version

RANGE_BYTES = 2**21
"""What one of several peers is asked for at a time."""
LEAST_SHARED_BYTES = 2**16
LEAST_PARALLEL, PARALLEL_BYTES = 4, 2**26
"""Downloads at a time, whatever their size, and bytes of them together: they lie in memory."""
LEAST_FROM_ONE, BYTES_FROM_ONE = 2, 2**24
"""The same of one peer, so that a slow one does not take up all turns."""
TURN_SECONDS = 5.0


class DownloadBudget:
    """Bounds the downloads under way: a few at a time in any case, and more of them as long as they are small."""

    def __init__(self) -> None:
        self._underway: list[tuple[str, int]] = []
        self._changed = Signal()

    async def acquire(self, peer: str, num_bytes: int) -> None:
        """Wait until a download of so many bytes from a peer may begin."""
        while not self._has_room(peer, num_bytes):
            await self._changed.wait(TURN_SECONDS)
        self._underway.append((peer, num_bytes))

    def _has_room(self, peer: str, num_bytes: int) -> bool:
        sizes = [size for _, size in self._underway]
        of_peer = [size for other, size in self._underway if other == peer]
        return all(
            len(underway) < least or sum(underway) + num_bytes <= most
            for underway, least, most in (
                (sizes, LEAST_PARALLEL, PARALLEL_BYTES),
                (of_peer, LEAST_FROM_ONE, BYTES_FROM_ONE),
            )
        )

    def release(self, peer: str, num_bytes: int) -> None:
        """Let another begin."""
        self._underway.remove((peer, num_bytes))
        self._changed.fire()


@dataclass(eq=False)
class Range:
    """Bytes that one peer was asked for.

    Attributes:
        peer: Who.
        first: Where they begin.
        start: Up to where they have come.
        stop: Up to where they are wanted; a faster peer may take over their end.
        requested: Up to where they were asked for.
        began: When its turn came, in the loop's seconds; those asked for ahead wait behind others.
    """

    peer: str
    first: int
    stop: int
    began: float = math.inf
    start: int = field(init=False)
    requested: int = field(init=False)

    def __post_init__(self) -> None:
        self.start, self.requested = self.first, self.stop

    def remaining_seconds(self, now: float) -> float:
        """Return how long the rest takes at the pace so far."""
        return (self.stop - self.start) * (now - self.began) / max(self.start - self.first, 1)


@dataclass
class _Share:
    start: int
    stop: int
    owner: str = ""


class Download:
    """One payload: its bytes so far, shared out among those who have it.

    Args:
        answer: The offer taken.
        version: Its version, verified.
        have: Digest of the version that its deltas start from.
        num_bytes: Its exact length.
        shares: By peer, the part that is to come from it first, as weights in the order given; none lets each peer
            take the next part.

    Attributes:
        data: The bytes, those that have come in place.
        ranges: Everything asked for so far.
        is_over: Nothing more comes.
    """

    def __init__(
        self, answer: Answer, version: Version, have: str, num_bytes: int, shares: Mapping[str, float] | None = None
    ) -> None:
        self.answer, self.version, self.have, self.num_bytes = answer, version, have, num_bytes
        self.data = bytearray(num_bytes)
        self.ranges: list[Range] = []
        self._missing = _shares(num_bytes, shares or {"": 1.0})
        self._underway: set[Range] = set()
        self._num_received = 0
        self._changed = Signal()
        self.is_over = False

    @property
    def is_complete(self) -> bool:
        """Whether all bytes are here."""
        return self._num_received == self.num_bytes

    @property
    def senders(self) -> set[str]:
        """Everybody who has sent some of it."""
        return {range.peer for range in self.ranges if range.start > range.first}

    def answers(self, request: Request) -> bool:
        """Tell whether a peer that asks so, for a payload it knows from another, wants these very bytes."""
        if self.is_over or request.digest != self.version.digest:
            return False
        if not request.max_deltas:
            return self.answer.state == "whole"
        return self.have == request.have and self.answer.num_deltas == request.max_deltas

    # ------------------------------------------------------------------ sharing out

    def claim(self, peer: str, most: int, *, only_its_share: bool = False) -> Range | None:
        """Return what to ask a peer for next: of its own share, or of what is anybody's."""
        for owner in (peer,) if only_its_share else (peer, ""):
            for share in self._missing:
                if share.owner == owner:
                    stop = min(share.stop, share.start + most)
                    range = Range(peer, share.start, stop)
                    share.start = stop
                    self._missing = [share for share in self._missing if share.start < share.stop]
                    self.ranges.append(range)
                    self._underway.add(range)
                    return range
        return None

    def is_hopeless(self, deadline: float) -> bool:
        """Tell whether nobody sends anything, or so slowly that it will not be here by then, in the loop's seconds."""
        now = asyncio.get_running_loop().time()
        return not self._underway or any(now + range.remaining_seconds(now) > deadline for range in self._underway)

    def slowest(self, seconds: float) -> Range | None:
        """Return the range that would take its peer longest, if that is over `seconds`, and has been."""
        now = asyncio.get_running_loop().time()
        slow = [range for range in self._underway if now - range.began > seconds < range.remaining_seconds(now)]
        return max(slow, key=lambda range: range.remaining_seconds(now), default=None)

    def take_over(self, peer: str, seconds: float) -> Range | None:
        """Return the end of a range that is so slow for another peer, for one that has nothing else to do."""
        slowest = self.slowest(seconds)
        if slowest is None or slowest.peer == peer:
            return None
        length = slowest.stop - slowest.start
        middle = slowest.start + (length // 2 if length > LEAST_SHARED_BYTES else 0)
        self._missing.append(_Share(middle, slowest.stop))
        slowest.stop = middle
        return self.claim(peer, length)

    def release(self, peer: str) -> None:
        """Let anybody have the share of a peer that does not send it."""
        for share in self._missing:
            if share.owner == peer:
                share.owner = ""
        self._changed.fire()

    # ------------------------------------------------------------------ receiving

    def take(self, range: Range, data: bytes) -> None:
        """Put bytes where they belong, but for those that another peer was asked for meanwhile."""
        wanted = data[: range.stop - range.start]
        self.data[range.start : range.start + len(wanted)] = wanted
        range.start += len(wanted)
        self._num_received += len(wanted)
        self._changed.fire()

    def give_back(self, range: Range) -> None:
        """Note that no more of a range will come: only what has not come is asked for again."""
        self._underway.discard(range)
        if range.start < range.stop:
            self._missing.append(_Share(range.start, range.stop))
            range.stop = range.start
        self._changed.fire()

    # ------------------------------------------------------------------ waiting

    async def wait(self, seconds: float) -> None:
        """Return when anything has changed, at the latest after `seconds`."""
        await self._changed.wait(seconds)

    async def wait_for(self, start: int, stop: int, seconds: float) -> int:
        """Return up to where the bytes from `start` on are here, once that is `stop` or beyond.

        Raises:
            ExchangeError: they did not come.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while (reached := self._reached(start)) < stop:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0 or self.is_over:
                raise ExchangeError(f"{self.version.name} did not arrive here")
            await self._changed.wait(remaining)
        return reached

    def _reached(self, start: int) -> int:
        while True:
            there = next((range for range in self.ranges if range.first <= start < range.start), None)
            if there is None:
                return start
            start = there.start

    def close(self) -> None:
        """Give up on what has not come."""
        self.is_over = True
        self._changed.fire()

    def unlike(self, other: Download) -> set[str]:
        """Return who has sent other bytes than stand in `other`."""
        return {
            range.peer
            for range in self.ranges
            if self.data[range.first : range.start] != other.data[range.first : range.start]
        }


def _shares(num_bytes: int, weights: Mapping[str, float]) -> list[_Share]:
    total, edges = sum(weights.values()), [0]
    reached = 0.0
    for weight in weights.values():
        reached += weight
        edges.append(round(num_bytes * reached / total))
    spans = zip(weights, edges[:-1], edges[1:], strict=True)
    return [_Share(start, stop, owner) for owner, start, stop in spans if start < stop]


def shares_of(relays: Sequence[str], me: str, holder: str, uplinks: Mapping[str, float]) -> dict[str, float]:
    """Return from whom a relay takes which part: its own from the holder, the others' from them, the same on all.

    Args:
        relays: All who fetch the payload, in an order that they share.
        me: This one.
        holder: Who has it.
        uplinks: What they may send; those left out count as the fastest.
    """
    fastest = max(uplinks.values(), default=1.0)
    return {holder if peer == me else peer: uplinks.get(peer, fastest) for peer in relays}
