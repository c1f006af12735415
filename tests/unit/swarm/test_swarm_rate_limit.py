"""What a peer sends never exceeds what its link carries, and goes in the order in which it was asked for."""

from __future__ import annotations

import asyncio
import time

import pytest

from spes_p2p.sim.loop import VirtualLoop
from spes_p2p.swarm.p2p.rate_limit import BURST_SECONDS, MIN_BURST_BYTES, PAYLOAD_SHARE, RateLimit

MBIT = 80.0
BYTES_PER_SECOND = PAYLOAD_SHARE * MBIT * 1e6 / 8
PIECE = 50_000


async def send(rate_limit: RateLimit, name: str, pieces: int, sent: list[tuple[float, str]]) -> None:
    for _ in range(pieces):
        await rate_limit.take(PIECE)
        sent.append((time.monotonic(), name))


@pytest.mark.parametrize("senders", [1, 4])
def test_no_more_goes_than_the_link_carries(senders: int) -> None:
    async def run() -> list[tuple[float, str]]:
        rate_limit, sent = RateLimit(MBIT), list[tuple[float, str]]()
        await asyncio.gather(*(send(rate_limit, f"{n}", 8 // senders, sent) for n in range(senders)))
        return sent

    began = time.monotonic()
    sent = asyncio.run(run())
    assert len(sent) == 8
    for number, (when, _) in enumerate(sent):
        assert when - began >= number * PIECE / BYTES_PER_SECOND - BURST_SECONDS


def test_each_sender_waits_until_those_before_it_have_sent() -> None:
    async def run() -> list[float]:
        rate_limit, clock = RateLimit(MBIT), asyncio.get_running_loop().time
        began, ends = clock(), list[float]()

        async def one() -> None:
            await rate_limit.take(PIECE)
            ends.append(clock() - began)

        await asyncio.gather(*(one() for _ in range(4)))
        return ends

    loop = VirtualLoop()
    assert loop.run_until_complete(run()) == pytest.approx([number * PIECE / BYTES_PER_SECOND for number in range(4)])
    loop.close()


def test_what_was_not_sent_while_idle_is_not_made_up_for() -> None:
    async def run() -> float:
        rate_limit = RateLimit(MBIT)
        await rate_limit.take(PIECE)
        await asyncio.sleep(10 * PIECE / BYTES_PER_SECOND)
        began = time.monotonic()
        for _ in range(4):
            await rate_limit.take(PIECE)
        return time.monotonic() - began

    assert asyncio.run(run()) >= 3 * PIECE / BYTES_PER_SECOND - BURST_SECONDS


def test_without_a_stated_uplink_nothing_is_held_back() -> None:
    rate_limit = RateLimit(None)
    with pytest.raises(StopIteration):
        rate_limit.take(2**40).send(None)  # a coroutine that never waits
    assert rate_limit.burst_bytes(2**18) == 2**18


def test_slow_links_send_little_at_once() -> None:
    assert RateLimit(1e5).burst_bytes(2**18) == 2**18
    assert RateLimit(100.0).burst_bytes(2**18) == int(PAYLOAD_SHARE * 100e6 / 8 * BURST_SECONDS)
    assert RateLimit(1.0).burst_bytes(2**18) == MIN_BURST_BYTES
