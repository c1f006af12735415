"""Deltas in place of versions: the same bits for all however they came, and whole copies where deltas do not help."""

import pytest
import torch
from exchange_cluster import NUMELS, PULL_SECONDS, advance, draw_delta, flat, open_cluster, open_swarm

from spes_p2p.codecs.vectors import digest

pytestmark = pytest.mark.timeout(120)

ONE = NUMELS["slot"]
WHOLE = 4 * ONE


@pytest.fixture(scope="module")
def trio(tmp_path_factory):
    """A holder, and two that follow it."""
    swarms = open_cluster(tmp_path_factory.mktemp, ["holder", "two", "three"])
    yield swarms
    for swarm in swarms:
        swarm.close()


class Holder:
    """Publishes a slot, round after round, each by a delta from the one before."""

    def __init__(self, swarm, name, seed):
        self.swarm, self.name, self.seed, self.round = swarm, name, seed, 0
        self.bundle = flat(seed)
        swarm.publish(0, {name: self.bundle})

    def step(self, count=1, *, as_delta=True):
        for _ in range(count):
            self.round += 1
            delta = draw_delta(self.seed + self.round)
            self.bundle = advance(self.name, self.bundle, delta)
            self.swarm.publish(self.round, {self.name: self.bundle}, {self.name: delta} if as_delta else {})


def pulled_bytes(puller, source, holder):
    """Pull the newest, and check it; returns the payload bytes that it took."""
    before, sent = puller.exchange.bytes_in, source.exchange.server.bytes_out
    assert puller.pull({holder.name: [source.peer_id]}, min_round=holder.round, timeout=PULL_SECONDS) == {}
    assert puller.versions()[holder.name].digest == digest(holder.bundle)
    assert torch.equal(puller.load(holder.name), holder.bundle)
    assert source.exchange.server.bytes_out - sent == puller.exchange.bytes_in - before
    return puller.exchange.bytes_in - before


def test_a_peer_with_the_last_version_takes_the_delta_and_others_the_whole(trio, seed):
    swarm, two, three = trio
    holder = Holder(swarm, "slot-1", seed)
    assert pulled_bytes(two, swarm, holder) == WHOLE
    holder.step()
    assert pulled_bytes(two, swarm, holder) == ONE
    assert pulled_bytes(three, swarm, holder) == WHOLE
    assert two.versions()["slot-1"].base and two.versions()["slot-1"] == three.versions()["slot-1"]


def test_a_peer_that_missed_rounds_takes_a_chain_while_that_is_less_than_the_whole(trio, seed):
    swarm, two, _ = trio
    holder = Holder(swarm, "slot-2", seed)
    pulled_bytes(two, swarm, holder)
    holder.step(3)
    assert pulled_bytes(two, swarm, holder) == 3 * ONE
    holder.step(4)  # as many bytes as the whole
    assert pulled_bytes(two, swarm, holder) == WHOLE


def test_a_peer_passes_on_what_it_took_deltas_or_the_whole(trio, seed):
    swarm, two, three = trio
    holder = Holder(swarm, "slot-3", seed)
    pulled_bytes(two, swarm, holder)
    pulled_bytes(three, swarm, holder)
    holder.step(2)
    assert pulled_bytes(two, swarm, holder) == 2 * ONE
    assert pulled_bytes(three, two, holder) == 2 * ONE
    holder.step()
    pulled_bytes(two, swarm, holder)
    holder.step(as_delta=False)
    assert pulled_bytes(two, swarm, holder) == WHOLE
    assert pulled_bytes(three, two, holder) == WHOLE


def test_a_round_without_a_delta_breaks_the_chain(trio, seed):
    swarm, two, _ = trio
    holder = Holder(swarm, "slot-4", seed)
    pulled_bytes(two, swarm, holder)
    holder.step()
    holder.step(as_delta=False)
    holder.step()
    assert pulled_bytes(two, swarm, holder) == WHOLE


def test_a_delta_that_does_not_lead_where_it_says_is_replaced_by_the_whole(trio, seed, caplog):
    """The publisher's own mistake: all peers still get what its digest says, and know which peer sent the delta."""
    swarm, two, _ = trio
    holder = Holder(swarm, "slot-5", seed)
    pulled_bytes(two, swarm, holder)
    holder.round, holder.bundle = 1, flat(seed + 1)
    swarm.publish(1, {"slot-5": holder.bundle}, {"slot-5": draw_delta(seed)})
    assert pulled_bytes(two, swarm, holder) == ONE + WHOLE
    assert swarm.peer_id[-6:] in caplog.text


def test_a_delta_that_cannot_be_applied_is_replaced_by_the_whole(trio, seed, monkeypatch, caplog):
    swarm, two, _ = trio

    def refuse(name, bundle, delta):
        raise ValueError("not a delta")

    holder = Holder(swarm, "slot-8", seed)
    pulled_bytes(two, swarm, holder)
    holder.step()
    monkeypatch.setattr(two.exchange, "_apply_delta", refuse)
    assert pulled_bytes(two, swarm, holder) == ONE + WHOLE
    assert "not a delta" in caplog.text


def test_a_peer_that_accepts_no_deltas_takes_keyframes_alone(trio, seed, tmp_path):
    swarm = trio[0]
    holder = Holder(swarm, "slot-6", seed)
    monitor = open_swarm(tmp_path, swarm.node.addresses(), serve=False, keyframe_rounds=0)
    try:
        pulled_bytes(monitor, swarm, holder)
        holder.step()
        assert pulled_bytes(monitor, swarm, holder) == WHOLE
    finally:
        monitor.close()


def test_deltas_are_there_after_a_restart(trio, seed, tmp_path):
    swarm, two, _ = trio
    addresses = swarm.node.addresses()
    once = open_swarm(tmp_path, addresses)
    try:
        holder = Holder(once, "slot-7", seed)
        pulled_bytes(two, once, holder)
        holder.step(2)
    finally:
        once.close()
    holder.swarm = open_swarm(tmp_path, addresses)
    try:
        assert pulled_bytes(two, holder.swarm, holder) == 2 * ONE
    finally:
        holder.swarm.close()
