"""Virtual time: one peer at a time, in the order of their times, and an end whatever happens."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable
from functools import partial

import pytest

from spes_p2p.errors import SimulationError
from spes_p2p.sim.clock import STUCK_SECONDS, VirtualClock

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = threading.active_count()
    yield
    assert threading.active_count() == before


def test_peers_run_in_the_order_of_their_times_and_of_their_indices(seed: int) -> None:
    """Compared with a plain sort of all moments at which anybody does anything."""
    draw = random.Random(seed)
    pauses = [[float(draw.randrange(4)) for _ in range(6)] for _ in range(5)]
    clock, seen = VirtualClock(), []
    start = clock.now()

    def live(peer: int) -> None:
        for number, seconds in enumerate(pauses[peer]):
            clock.advance(seconds)
            seen.append((clock.now() - start, peer, number))

    clock.run([partial(live, peer) for peer in range(5)])
    expected = [(sum(own[: n + 1]), peer, n) for peer, own in enumerate(pauses) for n in range(6)]
    assert sorted(expected) == sorted(seen) and [moment for moment, _, _ in seen] == sorted(m for m, _, _ in seen)
    assert clock.now() - start == max(map(sum, pauses))


def test_exactly_one_peer_runs_at_a_time() -> None:
    clock, running, most = VirtualClock(), 0, 0

    def live() -> None:
        nonlocal running, most
        for _ in range(200):
            running += 1
            most = max(most, running)
            running -= 1
            clock.advance(1.0)

    clock.run([live] * 8)
    assert most == 1


def test_who_waits_goes_on_when_notified_or_when_its_time_is_up() -> None:
    clock, ends = VirtualClock(), {}
    start = clock.now()

    def wait(name: str, seconds: float) -> None:
        clock.wait(seconds)
        ends[name] = clock.now() - start

    def notify() -> None:
        clock.advance(5.0)
        clock.notify_all()
        clock.advance(1.0)

    clock.run([partial(wait, "short", 2.0), partial(wait, "long", 60.0), partial(wait, "for ever", math.inf), notify])
    assert ends == {"short": 2.0, "long": 5.0, "for ever": 5.0}


def test_a_notification_does_not_cut_work_short() -> None:
    clock, ends = VirtualClock(), []
    start = clock.now()

    def work() -> None:
        clock.advance(10.0)
        ends.append(clock.now() - start)

    clock.run([work, clock.notify_all])
    assert ends == [10.0]


def test_outside_of_a_run_time_passes_as_its_only_user_says() -> None:
    clock = VirtualClock()
    start = clock.now()
    clock.advance(2.0)
    clock.wait(3.0)
    assert clock.now() - start == 5.0
    with pytest.raises(SimulationError, match="an infinite wait"):
        clock.wait(math.inf)


def poll(clock: VirtualClock) -> None:
    while True:
        clock.wait(0.5)


@pytest.mark.parametrize("wait", [lambda clock: clock.wait(math.inf), poll], ids=["for-ever", "polling"])
def test_peers_that_wait_for_nobody_are_named(wait: Callable[[VirtualClock], None]) -> None:
    clock = VirtualClock()
    with pytest.raises(SimulationError, match="virtual peers 0, 2 wait"):
        clock.run([partial(wait, clock), lambda: clock.advance(1.0), partial(wait, clock)])


def test_long_work_is_not_taken_for_a_deadlock() -> None:
    clock, done = VirtualClock(), False

    def work() -> None:
        nonlocal done
        clock.advance(3 * STUCK_SECONDS)
        done = True

    def wait() -> None:
        while not done:
            clock.wait(10.0)

    clock.run([work, wait])
    assert done


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")], ids=["error", "interrupt"])
def test_an_exception_of_one_peer_ends_all_and_is_raised(error: BaseException) -> None:
    clock, unwound, went_on = VirtualClock(), [], []

    def live(peer: int) -> None:
        try:
            clock.wait(math.inf)
            went_on.append(peer)
        finally:
            unwound.append(peer)

    def fail() -> None:
        clock.advance(1.0)
        raise error

    with pytest.raises(type(error), match="mine"):
        clock.run([partial(live, 0), fail, partial(live, 2), partial(clock.advance, 9.0)])
    assert (unwound, went_on) == ([0, 2], [])


def test_a_clock_can_run_again_after_a_failure() -> None:
    clock = VirtualClock()
    with pytest.raises(SimulationError):
        clock.run([partial(clock.wait, math.inf)])
    before = clock.now()
    clock.run([partial(clock.advance, 2.0)])
    assert clock.now() == before + 2.0
