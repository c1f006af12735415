"""How long to wait for others: by what was seen, within bounds."""

from hypothesis import given
from hypothesis import strategies as st

from spes_p2p.codecs.format import Segment
from spes_p2p.config import RoundConfig
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.swarm.averaging.averaging import Averaging
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.clock import AdaptiveTimeout
from spes_p2p.swarm.names import SHARED


def observed(patience, *seconds):
    for each in seconds:
        patience.observe(each)
    return patience.seconds


def test_patience_is_the_most_allowed_until_something_was_seen():
    assert observed(AdaptiveTimeout(1.0, 30.0)) == 30.0
    assert observed(AdaptiveTimeout(1.0, 30.0), 2.0, 2.0) == 30.0, "twice may be chance"


def test_patience_follows_what_was_seen_and_how_steady_it_was():
    steady, unsteady = [observed(AdaptiveTimeout(1.0, 60.0), *seen) for seen in ([6.0] * 9, [3.0, 6.0, 9.0] * 3)]
    assert 6.0 < steady < unsteady < 60.0


def test_one_stall_does_not_make_everybody_wait_longer():
    assert observed(AdaptiveTimeout(1.0, 60.0), *[2.0] * 9, 59.0) == observed(AdaptiveTimeout(1.0, 60.0), *[2.0] * 9)


@given(st.floats(0.1, 10), st.floats(0.1, 100), st.lists(st.floats(0, 1e6), max_size=40))
def test_patience_stays_within_its_bounds(least, most, seen):
    assert min(least, most) <= observed(AdaptiveTimeout(least, most), *seen) <= most


def test_an_attempt_that_took_too_long_is_given_twice_the_time_until_one_succeeds():
    """Else a newcomer with a slow link would be late for ever: failed attempts are not observed."""
    patience = AdaptiveTimeout(10.0, 60.0)
    for _ in range(5):
        patience.observe(1.0)
    assert patience.seconds == 10.0
    for expected in (20.0, 40.0, 60.0):
        patience.was_exceeded()
        assert patience.seconds == expected
    patience.observe(2.0)
    assert patience.seconds == 10.0


def test_who_needs_more_than_the_usual_time_has_it_until_that_is_the_usual_one():
    patience = AdaptiveTimeout(10.0, 600.0)
    for _ in range(9):
        patience.observe(5.0)
    usual = patience.seconds
    patience.was_exceeded()
    for _ in range(20):
        assert patience.seconds >= 1.5 * usual, "the next round is not given up again"
        patience.observe(1.5 * usual)
    assert patience.seconds < 600.0


def test_rounds_that_carry_moments_have_a_timeout_of_their_own():
    """They move five times as much as the others, whose usual time would end each of their first attempts."""
    segments = (Segment(4096, "int4"), Segment(4096, "int8", interval=3), Segment(4096, "int8", interval=3))
    averaging = Averaging(
        VirtualNetwork().node("peer", "run"), DeltaEncoding({SHARED: segments}), RoundConfig(averaging_seconds=600.0)
    )
    for round, seconds in zip(range(1, 13), [20.0, 20.0, 96.0] * 4, strict=True):
        patience = averaging._patience(round)
        assert patience.seconds > seconds, round
        patience.observe(seconds)
    assert averaging._patience(13).seconds == 60.0
    assert averaging._patience(15).seconds == 288.0
