"""When a round ends: the DHT time that a leader computes from a roster; and timeouts that adapt."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Sequence

from spes_p2p.config import MAX_PEER_TOKENS, RoundConfig
from spes_p2p.swarm.roster import Member

FALLBACK_TOKENS_PER_SECOND = 1.0
MAX_TIMES_MEDIAN = 4.0
"""Largest speed that counts, in medians of the stated speeds; as for tokens in `averaging/partition.py`."""
REMEMBERED = 16
"""Durations that a timeout adapts to."""
SPREADS = 8.0
"""Median deviations from the median to wait for: more than five standard deviations of a normal variable."""
MIN_SPREAD = 1 / 4
"""Smallest deviation, as a share of the median: a steady link slows down when newcomers begin to download."""


def round_end(
    config: RoundConfig, round: int, tokens: int, members: Iterable[Member], clocks: Iterable[Member] | None = None
) -> float:
    """Return the DHT time at which the round that this roster opens should stop training.

    The swarm should reach the round's tokens by then, if every member trains at its last speed once most members have
    synchronised; no sooner than `least_seconds` and no later than `max_seconds` after that. The median decides when
    that is, so that one member's clock or word cannot delay all others, and one member's speed cannot hurry them.

    Args:
        config: The run's round settings.
        round: Number of the round that ends, from 1.
        tokens: Tokens of a full round, of the kind whose speed members state.
        members: The roster, identical on all members.
        clocks: Those of them whose clocks count; by default all.
    """
    members = list(members)
    times = members if clocks is None else clocks
    start = statistics.median_high(member.ready_at + member.sync_seconds for member in times)
    rate = sum(fair_speeds([member.tokens_per_second for member in members])) or FALLBACK_TOKENS_PER_SECOND
    seconds = config.share(round) * tokens / rate
    return start + min(max(seconds, config.least_seconds(round)), config.max_seconds)


def fair_speeds(speeds: Sequence[float]) -> list[float]:
    """Return the speeds that count: each at most a multiple of the median of the stated ones.

    A speed is its member's own word; a false one of 1e12 would make every round the shortest. The median includes
    members that state a speed but have trained nothing: in a run's first roster no member has trained, and otherwise a
    member that claims to have would be the median itself.

    Among three members or more, one cannot move the median beyond the others' speeds. Of two speeds neither is cut,
    because it is unknown which is false: a multiple of their median is more than either.

    Args:
        speeds: Tokens per second; 0 for members that have measured none.
    """
    stated = [speed for speed in speeds if speed > 0]
    most = MAX_TIMES_MEDIAN * statistics.median(stated) if stated else 0.0
    return [min(speed, most) for speed in speeds]  # guard: first


def clamp_tokens(tokens: int, tokens_per_second: float, train_seconds: float) -> int:
    """Return the tokens that a peer may claim for a round: a tenth more than its stated speed explains, at most."""
    return max(
        0,
        min(tokens, MAX_PEER_TOKENS, int(1.1 * tokens_per_second * train_seconds) + 1),  # guard: first
    )


class AdaptiveTimeout:
    """A timeout that follows the durations of the past.

    It is the median plus a multiple of the median deviation, within bounds. Medians, so that one stall does not
    lengthen every later wait; a multiple of the deviation, as in TCP's retransmission timer (RFC 6298), because links
    vary in steadiness.

    Args:
        least_seconds: Lower bound, because machines stall however steady the network is.
        most_seconds: Upper bound, and the timeout before three durations are known.
    """

    def __init__(self, least_seconds: float, most_seconds: float) -> None:
        self._least = min(least_seconds, most_seconds)
        self._most = most_seconds
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._stretch = 1.0

    def observe(self, seconds: float) -> None:
        """Record the duration of a wait that ended in time."""
        if seconds <= self._usual:
            self._stretch = 1.0
        self._seen.append(seconds)

    def was_exceeded(self) -> None:
        """Double the timeout until a wait ends within the usual one: a slow peer may have joined."""
        self._stretch *= 2

    @property
    def seconds(self) -> float:
        """The current timeout."""
        return min(self._stretch * self._usual, self._most)

    @property
    def _usual(self) -> float:
        if len(self._seen) < 3:
            return self._most
        median = statistics.median(self._seen)
        spread = statistics.median(abs(seconds - median) for seconds in self._seen)
        return max(median + SPREADS * max(spread, MIN_SPREAD * median), self._least)
