"""Which batches of a run's shared data are trained, and which ranges of them each peer trains next.

A *draw* is one batch of windows; draws are numbered through all epochs (`data.shared` turns a number into windows). A
certificate's body holds the *ledger*: the draws that no committed round has trained yet. From it, and from the members
of its round, every peer deals the same ranges for a later round, without a message. Draws that were dealt and not
trained, or not committed, stay free, and are dealt first in the next round.

Peers must agree to the bit: all arithmetic is of integers, or of products that every machine rounds alike.
"""

from __future__ import annotations

import base64
import logging
import math
import statistics
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

from pydantic import Field, model_validator

from spes_p2p.swarm.records import Count, Strict

log = logging.getLogger(__name__)

MAX_GAPS = 4096
"""Gaps of a stream; beyond that the shortest are given up: a round adds at most one for two members, and takes more."""
MAX_SPARES = 1024
"""Ranges of a deal for peers that were not on the last roster."""
MAX_DRAW = 2**53
MAX_TIMES_MEDIAN = 4
"""Largest pace that counts, in medians: as for speeds in `clock.py`."""
FEW_PEERS = 64
"""Peers up to which a range has room for three times a peer's pace; then one and a half, which leaves shorter gaps."""
KEPT_PACE = 3, 4
"""Share of a peer's last pace below which a short round does not lower it."""
Interval = tuple[int, int]
Packed = Annotated[str, Field(max_length=2**15, pattern=r"^[0-9A-Za-z!#$%&()*+;<=>?@^_`{|}~-]*$")]
"""Bytes in base 85."""


class Stream(Strict):
    """The free draws of one stream."""

    next: Count = 0
    """All draws from here on are free."""
    gaps: Packed = ""
    """Intervals below that are free, ascending, none of which touch: varints of the distance from the last one's end,
    and of its length."""

    @model_validator(mode="after")
    def _check_gaps(self) -> Stream:
        gaps = self.intervals()
        if Stream.packed(gaps) != self.gaps or any(stop >= self.next for _, stop in gaps):  # guard: ledger-form
            raise ValueError("gaps are not in their shortest form")
        return self

    @classmethod
    def of(cls, next: int, gaps: Sequence[Interval]) -> Stream:
        """Return the stream of these free draws; the last gap ends below `next`."""
        return cls(next=next, gaps=cls.packed(gaps))

    @staticmethod
    def packed(gaps: Sequence[Interval]) -> str:
        """Return intervals in the form of `gaps`."""
        numbers: list[int] = []
        last = 0
        for start, stop in gaps:
            numbers += [start - last, stop - start]
            last = stop
        return base64.b85encode(b"".join(map(_varint, numbers))).decode()

    def intervals(self) -> list[Interval]:
        """Return the gaps.

        Raises:
            ValueError: they are malformed.
        """
        numbers = list(_varints(base64.b85decode(self.gaps)))
        if len(numbers) % 2 or len(numbers) > 2 * MAX_GAPS:
            raise ValueError("gaps are no pairs, or too many")
        ends = list(accumulate(numbers))
        gaps = list(zip(ends[::2], ends[1::2], strict=True))
        is_apart = all(numbers[2::2]) and all(numbers[1::2])
        if not is_apart or (ends and ends[-1] > MAX_DRAW):
            raise ValueError("gaps touch, are empty, or are beyond all draws")
        return gaps


class Ledger(Strict):
    """What a body says of the run's shared data."""

    stream: Stream
    """The free draws."""
    pace: Packed = ""
    """Draws that each member of the body's roster trains in a round, a byte each (`_pace_byte`)."""

    @model_validator(mode="after")
    def _check_pace(self) -> Ledger:
        if base64.b85encode(base64.b85decode(self.pace)).decode() != self.pace:  # guard: pace-form
            raise ValueError("the pace is not in its shortest form")
        return self

    @classmethod
    def empty(cls) -> Ledger:
        """Return the ledger of a run's start."""
        return cls(stream=Stream())

    def paces(self, num_members: int) -> list[int]:
        """Return each member's pace; 0 where it is unknown."""
        data = base64.b85decode(self.pace)
        return [_pace(byte) for byte in data] if len(data) == num_members else [0] * num_members


@dataclass(frozen=True)
class DealRules:
    """The numbers of a run that its deals depend on.

    Attributes:
        usual: Draws of a round: of all peers together, in mode `steps` of each. A peer's range while no pace is known.
        is_exact: Whether every peer makes `usual` draws in a round, as in mode `steps`.
        growth: How many times as long the round is as the one that the paces are of.
    """

    usual: int
    is_exact: bool
    growth: float = 1.0


@dataclass(frozen=True)
class Drawn:
    """What a member says of its training data.

    Attributes:
        count: Draws of its range that it has trained, from the range's beginning.
        spare: The spare range that they are of; None if they are of the range that was dealt to it.
    """

    count: int
    spare: int | None = None


class Deal:
    """The ranges of one round.

    The free draws are dealt in ascending order, so that gaps come first; the member with which the order begins
    changes from round to round. The second of two members draws its range from the end backwards, so that both leave
    one gap. Spare ranges come last.

    Args:
        ledger: Of the body that the round is dealt from.
        members: That body's members.
        round: The round.
        rules: The run's.
    """

    def __init__(self, ledger: Ledger, members: Sequence[str], round: int, rules: DealRules) -> None:
        self._paces = dict(zip(members, ledger.paces(len(members)), strict=True))
        first = round % len(members) if members else 0
        order = [*members[first:], *members[:first]]
        lengths = _lengths([self._paces[peer] for peer in order], rules)
        ends = list(accumulate(lengths, initial=0))
        self._places = {peer: (ends[at], ends[at + 1], at % 2 == 1) for at, peer in enumerate(order)}
        self._dealt = ends[-1]
        self._spare = _lengths([0], rules, list(self._paces.values()))[0]
        self._free = [*ledger.stream.intervals(), (ledger.stream.next, MAX_DRAW)]
        self._before = list(accumulate((stop - start for start, stop in self._free), initial=0))

    def has(self, peer: str) -> bool:
        """Tell whether a peer has a range of its own."""
        return peer in self._places

    def range_of(self, peer: str, spare: int | None = None) -> tuple[range, ...]:
        """Return the draws of a peer, in the order in which it trains them.

        Args:
            peer: Its id; a peer with a range of its own has no spare one.
            spare: The spare range that a peer without one takes.
        """
        if self.has(peer):
            start, stop, is_backwards = self._places[peer]
        elif spare is not None and spare < MAX_SPARES:
            start, is_backwards = self._dealt + spare * self._spare, False
            stop = start + self._spare
        else:
            return ()
        ranges = [range(low, high) for low, high in self._draws(start, stop)]
        return tuple(each[::-1] for each in reversed(ranges)) if is_backwards else tuple(ranges)

    def _draws(self, start: int, stop: int) -> Iterator[Interval]:
        """Yield the draws behind the places from `start` to `stop` of all free ones."""
        at = bisect_right(self._before, start) - 1
        while start < stop:
            low, _ = self._free[at]
            count = min(stop, self._before[at + 1]) - start
            low += start - self._before[at]
            yield low, low + count
            start += count
            at += 1

    def settled(self, last: Ledger, drawn: Mapping[str, Drawn]) -> Ledger:
        """Return the ledger after the round.

        Args:
            last: The ledger of the round before.
            drawn: What each member of the round's roster says, by ascending peer id. Draws beyond a member's range do
                not count; of members that have drawn of one spare range, the smallest id counts.
        """
        taken: set[int] = set()
        trained: list[Interval] = []
        bytes_of_pace = bytearray()
        for peer in sorted(drawn):
            said = drawn[peer]
            is_double = not self.has(peer) and said.spare in taken  # guard: one-spare
            ranges = () if is_double else self.range_of(peer, said.spare)
            if not self.has(peer) and said.spare is not None and said.count:
                taken.add(said.spare)
            left = count = min(said.count, sum(map(len, ranges)))  # guard: own-range
            for each in ranges:
                some = each[:left]
                left -= len(some)
                if some:
                    trained.append((min(some[0], some[-1]), max(some[0], some[-1]) + 1))
            bytes_of_pace.append(_pace_byte(max(count, self._paces.get(peer, 0) * KEPT_PACE[0] // KEPT_PACE[1])))
        return Ledger(stream=without(last.stream, trained), pace=base64.b85encode(bytes(bytes_of_pace)).decode())


def without(stream: Stream, trained: Iterable[Interval]) -> Stream:
    """Return a stream without draws that were trained."""
    done = sorted(trained)
    next = max([stream.next, *(stop for _, stop in done)])
    gaps: list[Interval] = []
    place = 0
    for start, stop in [*stream.intervals(), (stream.next, next)]:
        while place < len(done) and done[place][1] <= start:
            place += 1
        at = place
        while at < len(done) and done[at][0] < stop:
            if start < done[at][0]:
                gaps.append((start, done[at][0]))
            start = max(start, done[at][1])
            at += 1
        if start < stop:
            gaps.append((start, stop))
    if len(gaps) > MAX_GAPS:  # guard: few-gaps
        longest = sorted(sorted(gaps, key=lambda gap: (gap[0] - gap[1], gap))[:MAX_GAPS])
        lost = sum(stop - start for start, stop in gaps) - sum(stop - start for start, stop in longest)
        log.warning(
            "%d gaps in the order of the data, of which a certificate holds %d: the shortest are given up, and %d "
            "batches below batch %d of their stream are not trained in this epoch",
            *(len(gaps), MAX_GAPS, lost, next),
        )
        gaps = longest
    return _joined(next, gaps)


def _joined(next: int, gaps: Sequence[Interval]) -> Stream:
    """Return the stream of these free draws, with gaps joined that touch each other or the open end."""
    joined: list[Interval] = []
    for start, stop in gaps:
        if joined and joined[-1][1] == start:
            joined[-1] = joined[-1][0], stop
        else:
            joined.append((start, stop))
    if joined and joined[-1][1] == next:
        next = joined.pop()[0]
    return Stream.of(next, joined)


def _lengths(paces: Sequence[int], rules: DealRules, known: Sequence[int] | None = None) -> list[int]:
    """Return the lengths of the ranges of peers with these paces, of which `known` (by default all) give the median."""
    if rules.is_exact:
        return [rules.usual] * len(paces)
    stated = sorted(pace for pace in (paces if known is None else known) if pace)
    if not stated:
        return [rules.usual] * len(paces)
    median = statistics.median_low(stated)
    num_peers = len(paces if known is None else known)
    least = max(-(-median // 2), -(-rules.usual // num_peers))  # a round may have been short
    most = max(MAX_TIMES_MEDIAN * median, least)
    counted = [min(max(pace or median, least), most) for pace in paces]  # guard: pace-cap
    reserve = 3.0 if num_peers <= FEW_PEERS else 1.5  # a peer whose range is used up waits for the round's end
    return [math.ceil(rules.growth * reserve * pace) for pace in counted]


def _pace(byte: int) -> int:
    """Return the number of draws that a byte stands for: 3 bits of mantissa, 5 of exponent."""
    exponent, mantissa = divmod(byte, 8)
    return byte if byte < 8 else (8 + mantissa) << (exponent - 1)


def _pace_byte(draws: int) -> int:
    """Return the smallest byte that stands for so many draws, or for the most there are."""
    return next((byte for byte in range(256) if _pace(byte) >= draws), 255)


def _varint(number: int) -> bytes:
    data = bytearray()
    while number >= 128:
        data.append(number % 128 + 128)
        number //= 128
    data.append(number)
    return bytes(data)


def _varints(data: bytes) -> Iterator[int]:
    number = shift = 0
    for byte in data:
        number += (byte % 128) << shift
        shift += 7
        if byte < 128:
            yield number
            number = shift = 0
        elif shift > 63:
            raise ValueError("a number of more than nine bytes")
    if shift:
        raise ValueError("the last number is cut off")
