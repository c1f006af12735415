"""When a round ends: one DHT time that every member derives from the same roster."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.roster import Member

FALLBACK_TOKENS_PER_SECOND = 1.0


def round_end(config: RoundConfig, members: Iterable[Member]) -> float:
    """Return the DHT time at which the round that this roster opens should stop training.

    The swarm is expected to reach `config.tokens` then, if every member trains as fast as it last did, once most of
    them have synchronised; never sooner than `min_seconds` or later than `max_seconds` after that. The median, not
    the last, says when that is: one member's clock, or word, must not hold up everybody.

    Args:
        config: The run's round settings.
        members: The roster's snapshot, identical on all members.
    """
    members = list(members)
    start = statistics.median_high(member.ready_at + member.sync_seconds for member in members)
    rate = sum(member.tokens_per_second for member in members) or FALLBACK_TOKENS_PER_SECOND
    return start + min(max(config.tokens / rate, config.min_seconds), config.max_seconds)


def clamp_tokens(tokens: int, tokens_per_second: float, train_seconds: float) -> int:
    """Return the tokens a peer may claim for a round of `train_seconds` at its stated speed, with a tenth to spare."""
    return max(0, min(tokens, int(1.1 * tokens_per_second * train_seconds) + 1))
