"""When a round ends: one DHT time that every member derives from the same roster."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.roster import Member

FALLBACK_TOKENS_PER_SECOND = 1.0
REMEMBERED = 16
SPREADS = 8.0
"""Deviations from the median that are waited for: a normal variable exceeds five sigma once in two million times."""

MIN_SPREAD = 1 / 4
"""Of the median: what has been steady need not stay so, as when newcomers begin to download."""

MAX_TIMES_MEDIAN = 4.0
"""Of the stated speeds: what one may count for, as for tokens in `averaging/robust.py`."""


def round_end(config: RoundConfig, members: Iterable[Member]) -> float:
    """Return the DHT time at which the round that this roster opens should stop training.

    The swarm is expected to reach `config.tokens` then, if every member trains as fast as it last did, once most of
    them have synchronised; never sooner than `min_seconds` or later than `max_seconds` after that. The median, not
    the last, says when that is: one member's clock, or word, must not hold up everybody, nor may one's speed hurry it.

    Args:
        config: The run's round settings.
        members: The roster's snapshot, identical on all members.
    """
    members = list(members)
    start = statistics.median_high(member.ready_at + member.sync_seconds for member in members)
    rate = sum(fair_speeds([member.tokens_per_second for member in members])) or FALLBACK_TOKENS_PER_SECOND
    return start + min(max(config.tokens / rate, config.min_seconds), config.max_seconds)


def fair_speeds(speeds: Sequence[float]) -> list[float]:
    """Return how fast members are taken to be: no more than so many times the median of those that state a speed.

    Speeds are a member's own word, and one of 1e12 made every round the shortest. All that state one are counted, not
    those that have trained alone: in a run's first roster nobody has, and one that said so would be the median itself.

    From three members on one of them cannot move the median beyond the others'. Of two nobody can say which is false:
    twice their sum is more than either, so neither is cut, nor is who is alone.

    Args:
        speeds: Tokens per second; 0 of those that have measured none.
    """
    stated = [speed for speed in speeds if speed > 0]
    most = MAX_TIMES_MEDIAN * statistics.median(stated) if stated else 0.0
    return [min(speed, most) for speed in speeds]  # guard: speed-median


def clamp_tokens(tokens: int, tokens_per_second: float, train_seconds: float) -> int:
    """Return the tokens a peer may claim for a round of `train_seconds` at its stated speed, with a tenth to spare."""
    return max(
        0,
        min(tokens, int(1.1 * tokens_per_second * train_seconds) + 1),  # guard: tokens-by-speed
    )


class AdaptiveTimeout:
    """How long to wait for others, going by how long it took them before.

    The median of what was seen plus a multiple of the median deviation from it, within bounds. Medians, because one
    stall must not make everybody wait longer from then on; a multiple of the deviation, as TCP's retransmission timer
    takes (RFC 6298), because links differ in how steady they are.

    Args:
        least_seconds: Lower bound: machines stall, however steady the network.
        most_seconds: Upper bound, and what is waited before anything was seen.
    """

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        self._least, self._most = min(least_seconds, most_seconds), most_seconds
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._stretch = 1.0

    def observe(self, seconds: float) -> None:
        """Take note of how long it took this time."""
        self._seen.append(seconds)
        self._stretch = 1.0

    def was_exceeded(self) -> None:
        """Wait twice as long from now on, until it is done in time: somebody slow may have joined."""
        self._stretch *= 2

    @property
    def seconds(self) -> float:
        """What to wait at most."""
        if len(self._seen) < 3:
            return self._most
        median = statistics.median(self._seen)
        spread = statistics.median(abs(seconds - median) for seconds in self._seen)
        usual = max(median + SPREADS * max(spread, MIN_SPREAD * median), self._least)
        return min(self._stretch * usual, self._most)
