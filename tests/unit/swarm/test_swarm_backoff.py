"""Whoever was told BUSY comes back after a while, first one download, then all."""

from __future__ import annotations

import pytest

from spes_p2p.swarm.exchange.client import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, PROBE_SECONDS, Backoff

NOW = 1000.0


def test_a_peer_that_was_not_busy_may_be_asked() -> None:
    rests = Backoff()
    rests.asks("free", NOW)
    assert rests.until("free") == 0.0


def test_pauses_double_up_to_the_longest() -> None:
    rests, now, longest = Backoff(), NOW, MIN_PAUSE_SECONDS
    for _ in range(8):
        rests.was_busy("busy", now)
        assert longest / 2 <= rests.until("busy") - now <= longest
        now, longest = rests.until("busy"), min(2 * longest, MAX_PAUSE_SECONDS)
        rests.asks("busy", now)


def test_busy_said_to_several_downloads_at_once_counts_once() -> None:
    rests = Backoff()
    rests.was_busy("busy", NOW)
    until = rests.until("busy")
    for _ in range(16):
        rests.was_busy("busy", NOW + 0.01)
    assert rests.until("busy") == until


def test_after_a_pause_one_asks_and_the_others_wait_for_what_it_hears() -> None:
    rests = Backoff()
    rests.was_busy("busy", NOW)
    later = rests.until("busy")
    rests.asks("busy", later)
    assert rests.until("busy") == later + PROBE_SECONDS
    rests.was_busy("busy", later + 0.1)
    assert rests.until("busy") <= later + 0.1 + 2 * MIN_PAUSE_SECONDS


@pytest.mark.parametrize("times_busy", [1, 5])
def test_once_one_gets_something_all_may_ask_and_pauses_begin_anew(times_busy: int) -> None:
    rests, now = Backoff(), NOW
    for _ in range(times_busy):
        rests.was_busy("busy", now)
        now = rests.until("busy")
        rests.asks("busy", now)
    rests.was_free("busy")
    assert rests.until("busy") == 0.0
    rests.was_busy("busy", now)
    assert rests.until("busy") - now <= MIN_PAUSE_SECONDS
