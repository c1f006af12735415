"""Versions from several seeds, and passed on among the peers that pull them."""

import asyncio
import logging

import pytest
import torch
from exchange_cluster import (
    NUMELS,
    PULL_SECONDS,
    data_of,
    flat,
    make_rogue,
    offer,
    open_cluster,
    send,
)

from spes_p2p.swarm.exchange import client
from spes_p2p.swarm.exchange.downloads import RANGE_BYTES
from spes_p2p.swarm.exchange.protocol import DATA, FRAME_BYTES

pytestmark = [pytest.mark.timeout(180), pytest.mark.full]

SHARED_BYTES = 4 * NUMELS["shared"]
HOLDER_MBIT = 60.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Three peers that pull and seed, a holder with a slow uplink, and a rogue."""
    settings = {"holder": {"uplink_mbit": HOLDER_MBIT}, "rogue": {"serve": False}}
    swarms = open_cluster(tmp_path_factory.mktemp, ["one", "two", "three", "holder", "rogue"], **settings)
    make_rogue(swarms[4])
    yield swarms
    for swarm in swarms:
        swarm.close()


def sent_by(swarms):
    return [swarm.exchange.server.bytes_out for swarm in swarms]


def rogue_that(version, treat):
    """Return a script that serves ranges of `version`'s bytes as `treat(channel, start, stop)` does."""

    async def script(channel):
        asked = await offer(channel, version)
        while True:
            await treat(channel, *asked)
            asked = await channel.receive_range()

    return script


def publish_on_two(cluster, round, seed):
    """Have peers two and three, and no other, serve a version of `shared`; returns it and its bytes."""
    bundle = flat(seed, "shared")
    version = cluster[1].publish(round, {"shared": bundle})["shared"]
    assert cluster[2].pull({"shared": [cluster[1].peer_id]}, min_round=round, timeout=PULL_SECONDS) == {}
    return bundle, version


def test_a_large_version_comes_from_several_seeds_and_no_byte_twice(cluster, seed):
    one, two, three, *_ = cluster
    bundle, _ = publish_on_two(cluster, 1, seed)
    before, received = sent_by([two, three]), one.exchange.bytes_in
    assert one.pull({"shared": [two.peer_id, three.peer_id]}, min_round=1, timeout=PULL_SECONDS) == {}
    assert torch.equal(one.load("shared"), bundle)
    shares = [after - then for after, then in zip(sent_by([two, three]), before, strict=True)]
    assert min(shares) > 0 and sum(shares) == one.exchange.bytes_in - received == SHARED_BYTES


@pytest.mark.parametrize("num_others", [0, 1])
def test_a_seed_that_dies_costs_at_most_one_message(cluster, seed, num_others):
    """It breaks off amid a range, and never answers again; or comes back, if there is no other peer."""
    one, two, _, _, rogue = cluster
    bundle, version = publish_on_two(cluster, 2 + num_others, seed)
    data, received, deaths = data_of(bundle), one.exchange.bytes_in, []

    async def die_amid(channel, start, stop):
        if deaths and not num_others:
            return await send(channel, data[start:stop])
        sent = RANGE_BYTES // 2 + 1000
        await send(channel, data[start : start + sent])
        await asyncio.sleep(0.3)  # or the tail is lost
        deaths.append(start)
        raise TimeoutError

    rogue.exchange.script = rogue_that(version, die_amid)
    seeds = [rogue.peer_id, *[two.peer_id][:num_others]]
    assert one.pull({"shared": seeds}, min_round=2 + num_others, timeout=PULL_SECONDS) == {}
    assert deaths and torch.equal(one.load("shared"), bundle)
    assert one.exchange.bytes_in - received <= SHARED_BYTES + len(deaths) * FRAME_BYTES


def test_one_liar_among_seeds_is_found_and_named(cluster, seed, caplog):
    one, two, three, _, rogue = cluster
    bundle, version = publish_on_two(cluster, 4, seed)

    async def lie(channel, start, stop):
        await send(channel, bytes(stop - start))

    rogue.exchange.script = rogue_that(version, lie)
    seeds = [two.peer_id, rogue.peer_id, three.peer_id]
    with caplog.at_level(logging.WARNING, logger=client.__name__):
        assert one.pull({"shared": seeds}, min_round=4, timeout=PULL_SECONDS) == {}
    assert torch.equal(one.load("shared"), bundle)
    assert f"{rogue.peer_id} sent other bytes" in caplog.text
    assert f"{two.peer_id} sent" not in caplog.text


def test_what_comes_too_slowly_comes_from_another_seed(cluster, seed):
    one, two, _, _, rogue = cluster
    bundle, version = publish_on_two(cluster, 5, seed)
    data = data_of(bundle)

    async def trickle(channel, start, stop):
        while start < stop:
            await channel.send(DATA, data[start : start + 10])
            start += 10
            await asyncio.sleep(0.2)

    rogue.exchange.script = rogue_that(version, trickle)
    assert one.pull({"shared": [rogue.peer_id, two.peer_id]}, min_round=5, timeout=PULL_SECONDS) == {}
    assert torch.equal(one.load("shared"), bundle)
