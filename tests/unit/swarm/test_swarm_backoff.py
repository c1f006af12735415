"""A peer that answered BUSY is asked again after a pause, first by one download, then by all."""

from __future__ import annotations

import pytest

from spes_p2p.swarm.exchange.client import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, PROBE_SECONDS, Backoff

NOW = 1000.0


def test_a_peer_that_was_not_busy_may_be_asked() -> None:
    backoff = Backoff()
    backoff.record_request("free", NOW)
    assert backoff.retry_at("free") == 0.0


def test_pauses_double_up_to_the_longest() -> None:
    backoff, now, longest = Backoff(), NOW, MIN_PAUSE_SECONDS
    for _ in range(8):
        backoff.record_busy("busy", now)
        assert longest / 2 <= backoff.retry_at("busy") - now <= longest
        now, longest = backoff.retry_at("busy"), min(2 * longest, MAX_PAUSE_SECONDS)
        backoff.record_request("busy", now)


def test_busy_said_to_several_downloads_at_once_counts_once() -> None:
    backoff = Backoff()
    backoff.record_busy("busy", NOW)
    until = backoff.retry_at("busy")
    for _ in range(16):
        backoff.record_busy("busy", NOW + 0.01)
    assert backoff.retry_at("busy") == until


def test_after_a_pause_one_download_asks_and_the_others_wait_for_its_answer() -> None:
    backoff = Backoff()
    backoff.record_busy("busy", NOW)
    later = backoff.retry_at("busy")
    backoff.record_request("busy", later)
    assert backoff.retry_at("busy") == later + PROBE_SECONDS
    backoff.record_busy("busy", later + 0.1)
    assert backoff.retry_at("busy") <= later + 0.1 + 2 * MIN_PAUSE_SECONDS


@pytest.mark.parametrize("times_busy", [1, 5])
def test_once_one_download_receives_all_may_ask_and_pauses_begin_anew(times_busy: int) -> None:
    backoff, now = Backoff(), NOW
    for _ in range(times_busy):
        backoff.record_busy("busy", now)
        now = backoff.retry_at("busy")
        backoff.record_request("busy", now)
    backoff.reset("busy")
    assert backoff.retry_at("busy") == 0.0
    backoff.record_busy("busy", now)
    assert backoff.retry_at("busy") - now <= MIN_PAUSE_SECONDS
