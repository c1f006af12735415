"""Virtual time: a loop that waits for nothing, one peer's thread at a time, and an end whatever happens."""

import asyncio
import math
import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from spes_p2p.errors import SimulationError
from spes_p2p.sim.loop import STUCK_SECONDS, VirtualLoop

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def loop():
    before = threading.active_count()
    loop = VirtualLoop()
    yield loop
    loop.close()
    assert threading.active_count() == before


def test_an_hour_passes_at_once_and_timers_end_in_their_order(loop, seed):
    """Compared with a plain sort."""
    draw, seen, start = random.Random(seed), [], loop.time()
    pauses = [draw.uniform(0.0, 3600.0) for _ in range(100)]

    async def wait(seconds: float) -> None:
        await asyncio.sleep(seconds)
        seen.append((seconds, loop.time() - start))

    async def wait_all() -> None:
        await asyncio.gather(*map(wait, pauses))

    began = time.monotonic()
    loop.run_until_complete(wait_all())
    assert time.monotonic() - began < 10.0 and [seconds for seconds, _ in seen] == sorted(pauses)
    assert [at for _, at in seen] == pytest.approx(sorted(pauses))


def test_what_would_run_in_a_thread_runs_in_its_turn(loop):
    async def work() -> tuple[int, float]:
        return await asyncio.to_thread(threading.get_ident), loop.time()

    start = loop.time()
    assert loop.run_until_complete(work()) == (threading.get_ident(), start)

    async def fail() -> None:
        with pytest.raises(OSError, match="full"):
            await asyncio.to_thread(partial(raise_, OSError("full")))

    loop.run_until_complete(fail())


def raise_(error: BaseException) -> None:
    raise error


def test_peers_run_in_the_order_of_their_times_one_at_a_time(loop, seed):
    """Compared with a plain sort of all moments at which a peer does anything."""
    draw = random.Random(seed)
    pauses = [[draw.uniform(0.0, 4.0) for _ in range(6)] for _ in range(5)]
    seen, running, start = [], [], loop.time()

    def live(peer: int) -> None:
        for number, seconds in enumerate(pauses[peer]):
            loop.advance(seconds)
            running.append(peer)
            seen.append((pytest.approx(loop.time() - start), peer, number))
            assert running.pop() == peer and not running

    loop.live([partial(live, peer) for peer in range(5)])
    expected = [(sum(own[: n + 1]), peer, n) for peer, own in enumerate(pauses) for n in range(6)]
    assert seen == sorted(expected)


def test_a_peer_calls_into_the_loop_and_others_run_meanwhile(loop):
    ready, seen = asyncio.Event(), []

    async def wait() -> str:
        await ready.wait()
        return "ready"

    async def set_ready() -> None:
        ready.set()

    def first() -> None:
        seen.append(loop.call(wait(), 60.0))

    def second() -> None:
        loop.advance(5.0)
        seen.append("set")
        loop.call(set_ready(), 1.0)

    def late() -> None:
        with pytest.raises(TimeoutError):
            loop.call(asyncio.sleep(9.0), 2.0)
        seen.append("late")

    loop.live([first, second, late])
    assert seen == ["late", "set", "ready"]


def poll(loop: VirtualLoop) -> None:
    while True:
        loop.call(asyncio.sleep(0.5), 1.0)


@pytest.mark.parametrize("wait", [lambda loop: loop.call(asyncio.Event().wait(), math.inf), poll])
def test_peers_that_wait_for_nobody_are_named(loop, wait):
    with pytest.raises(SimulationError, match="virtual peers 0, 2 wait"):
        loop.live([partial(wait, loop), lambda: loop.advance(1.0), partial(wait, loop)])
    with pytest.raises(SimulationError, match="all that the loop runs waits"):
        loop.call(asyncio.Event().wait(), math.inf)


def test_long_work_is_not_taken_for_a_standstill(loop):
    done = []

    def work() -> None:
        loop.advance(3 * STUCK_SECONDS)
        done.append(loop.time())

    def wait() -> None:
        while not done:
            loop.call(asyncio.sleep(10.0), 20.0)

    loop.live([work, wait])
    assert done


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt("mine")], ids=["error", "interrupt"])
def test_an_exception_of_one_peer_ends_all_and_is_raised(loop, error):
    unwound, went_on = [], []

    def live(peer: int) -> None:
        try:
            loop.call(asyncio.Event().wait(), math.inf)
            went_on.append(peer)
        finally:
            unwound.append(peer)
            loop.advance(1.0)  # which a peer that ends may try

    def fail() -> None:
        loop.advance(1.0)
        raise error

    with pytest.raises(type(error), match="mine"):
        loop.live([partial(live, 0), fail, partial(live, 2), partial(loop.advance, 9.0)])
    assert (unwound, went_on) == ([0, 2], [])
    before = loop.time()
    loop.live([partial(loop.advance, 2.0)])  # it can be used again
    assert loop.time() == before + 2.0


def test_ctrl_c_ends_a_simulation_when_the_peer_that_runs_gives_its_turn_back(loop):
    ended = []

    def live() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            while True:
                loop.advance(1.0)
        finally:
            ended.append(True)

    with pytest.raises(KeyboardInterrupt):
        loop.live([live, partial(poll, loop)])
    assert ended == [True]
