"""What a peer sends never exceeds what its link carries, and goes in the order in which it was asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from spes_p2p.sim.loop import EPOCH_SECONDS, VirtualLoop
from spes_p2p.swarm.p2p.rate_limit import BURST_SECONDS, MIN_BURST_BYTES, PAYLOAD_SHARE, RateLimit

MBIT = 80.0
BYTES_PER_SECOND = PAYLOAD_SHARE * MBIT * 1e6 / 8
PIECE = 50_000
PIECE_SECONDS = PIECE / BYTES_PER_SECOND


def run(work: Coroutine[Any, Any, Any]) -> Any:
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


@pytest.mark.parametrize("senders", [1, 4])
def test_no_more_goes_than_the_link_carries_first_come_first_served(senders: int) -> None:
    sent: list[tuple[float, int]] = []

    async def send(rate_limit: RateLimit, sender: int) -> None:
        for _ in range(8 // senders):
            await rate_limit.take(PIECE)
            sent.append((asyncio.get_running_loop().time() - EPOCH_SECONDS, sender))

    async def send_all() -> None:
        rate_limit = RateLimit(MBIT)
        await asyncio.gather(*(send(rate_limit, sender) for sender in range(senders)))

    run(send_all())
    assert [when for when, _ in sent] == pytest.approx([number * PIECE_SECONDS for number in range(8)])
    assert [sender for _, sender in sent] == ([0, *range(4), *range(1, 4)] if senders == 4 else [0] * 8)


def test_what_was_not_sent_while_idle_is_not_made_up_for() -> None:
    async def send() -> float:
        loop, rate_limit = asyncio.get_running_loop(), RateLimit(MBIT)
        await rate_limit.take(PIECE)
        await asyncio.sleep(10 * PIECE_SECONDS)
        began = loop.time()
        for _ in range(4):
            await rate_limit.take(PIECE)
        return loop.time() - began

    assert run(send()) == pytest.approx(3 * PIECE_SECONDS)


def test_without_a_stated_uplink_nothing_is_held_back() -> None:
    rate_limit = RateLimit(None)
    with pytest.raises(StopIteration):
        rate_limit.take(2**40).send(None)  # a coroutine that never waits
    assert rate_limit.burst_bytes(2**18) == 2**18


def test_slow_links_send_little_at_once() -> None:
    assert RateLimit(1e5).burst_bytes(2**18) == 2**18
    assert RateLimit(100.0).burst_bytes(2**18) == int(PAYLOAD_SHARE * 100e6 / 8 * BURST_SECONDS)
    assert RateLimit(1.0).burst_bytes(2**18) == MIN_BURST_BYTES
