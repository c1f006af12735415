"""The swarm keeps the promises that training relies on; its peers are virtual, all else is real."""

from functools import partial

import pytest
import torch
from pulls import offered, pull_offered
from virtual import World, peer_id, tiny_run

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import HASH_BYTES, digest
from spes_p2p.config import RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.encoding import Contribution, Vectors
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import Member

pytestmark = pytest.mark.timeout(60)

RUN = tiny_run(round=RoundConfig(min_peers=3, matchmaking_seconds=1.0, averaging_seconds=20.0))


@pytest.fixture
def world():
    return World(2)


def entered(world, numel=2, codec="fp32"):
    swarms = [world.swarm(index) for index in range(3)]
    segments = {"shared": (Segment(numel, codec),), "slot": (Segment(3, codec),)}
    for swarm in swarms:
        world.enter(swarm, RUN, Vectors({"shared": numel, "slot": 3}, segments, num_slots=2))
    return swarms


@pytest.fixture
def swarms(world):
    return entered(world)


def contribution(swarm, delta, tokens=1):
    member = Member(
        peer_id=swarm.peer_id,
        round=swarm.last().round,
        previous=swarm.last().digest,
        tokens=tokens,
        slots=(),
        tokens_per_second=1.0,
        ready_at=1.0,
        sync_seconds=0.0,
    )
    return Contribution(member, {VectorName("shared"): delta})


def at_once(world, *calls):
    """Let peers make these calls, beginning at the same time; return their results in order."""
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()

    world.run([partial(run, i) for i in range(len(calls))])
    return results


def average_at_once(world, swarms, deltas, tokens=5):
    """Make a round; return each peer's last result."""
    peers, results = [swarm.peer_id for swarm in swarms], [RoundResult()] * len(swarms)

    def average(place):
        def stage(result):
            results[place] = result
            return {name: digest(mean) for name, mean in result.means.items()}, world.now() + 1.0

        brought = contribution(swarms[place], deltas[place], tokens)
        swarms[place].agree(brought, stage, expected=peers, closes_from=0.0)

    at_once(world, *(partial(average, place) for place in range(len(swarms))))
    return results


def test_a_peer_that_stands_still_answers_nothing_and_goes_on_with_what_it_had(world, swarms):
    swarm, other = swarms[0], swarms[1]
    swarm.publish(1, {"slot-1": torch.ones(3)})
    swarm.announce(Progress(peer_id=swarm.peer_id, round=1, ends_at=0.0))
    lease, seen = RUN.round.lease_seconds, []

    def look():
        seen.append(other.inventory([swarm.peer_id]))
        world.wait(1.1 * lease)
        seen.append(set(other.read(Progress)))

    at_once(world, lambda: swarm.network.stand_still(1.5 * lease), look)
    assert seen == [{}, set()]
    world.wait(RUN.round.heartbeat_seconds + 1.0)
    assert other.inventory([swarm.peer_id])[swarm.peer_id]["slot-1"].round == 1
    assert other.read(Progress)[swarm.peer_id].round == 1
    swarm.close()
    assert not other.inventory([swarm.peer_id]) and swarm.wait(60.0)


def test_peers_share_the_bytes_of_what_all_of_them_have(world, swarms):
    swarms[0].publish(1, {"slot-1": torch.ones(3)})
    for swarm in swarms[1:]:
        assert pull_offered(swarm, ["slot-1"], [peer_id(0)]) == {}
    files = {swarm._store.path(swarm.versions()["slot-1"]) for swarm in swarms}
    assert len(files) == 3 and len({file.stat().st_ino for file in files}) == 1
    pool = swarms[0]._store._pool
    for swarm in swarms:
        assert len(list(pool.iterdir())) == 1
        swarm.delete(VectorName("slot-1"))
    assert not list(pool.iterdir())


def test_a_pull_waits_for_the_publication(world, swarms):
    holder, puller, _ = swarms
    holder.publish(1, {"slot-1": torch.zeros(3)})
    later = torch.randn(3)
    wanted = {VectorName("slot-1"): (2, digest(later))}
    failures, _ = at_once(
        world,
        lambda: puller.pull(wanted, [holder.peer_id], timeout=30),
        lambda: holder.publish(2, {"slot-1": later}),
    )
    assert failures == {}
    assert torch.equal(puller.load("slot-1"), later) and puller.versions()["slot-1"].round == 2


def test_a_pull_that_fails_says_what_and_changes_nothing(swarms):
    holder, puller, _ = swarms
    holder.publish(1, {"slot-1": torch.zeros(3)})
    pull_offered(puller, ["slot-1"], [holder.peer_id])
    wanted = {VectorName(name): (2, digest(b"")) for name in ("slot-1", "slot-2")}
    failures = puller.pull(wanted, [holder.peer_id], timeout=1.0)
    assert set(failures) == {"slot-1", "slot-2"}
    assert puller.versions()["slot-1"].round == 1
    with pytest.raises(ExchangeError, match="slot-2"):
        puller.load("slot-2")


def test_bundles_are_copies(swarms):
    mine = torch.zeros(3)
    swarms[0].publish(1, {"slot-1": mine})
    mine += 1
    swarms[0].load("slot-1").add_(1)
    pull_offered(swarms[1], ["slot-1"], [swarms[0].peer_id])
    assert torch.equal(swarms[1].load("slot-1"), torch.zeros(3))


def test_only_bytes_that_were_fetched_are_counted(swarms):
    bundle = torch.randn(3)
    swarms[0].publish(1, {"slot-1": bundle})
    for round in (1, 2):
        swarms[0].publish(round, {"slot-1": bundle})
        pull_offered(swarms[1], ["slot-1"], [swarms[0].peer_id])
        assert swarms[1].traffic()[0] == 12 + HASH_BYTES


def test_a_mean_that_is_not_finite_counts_for_no_member(world, swarms):
    """Every contribution is finite, their sum is not."""
    deltas = [torch.tensor([3e38, 1.0]), torch.tensor([3e38, 1.0]), torch.ones(2)]
    world.certify(1, voters=[swarm.peer_id for swarm in swarms])
    results = average_at_once(world, swarms, deltas)
    assert not any(result.means for result in results) and swarms[0].last().round == 1
    assert any("cannot be sent" in result.dropped["shared"] for result in results)


def test_a_peer_whose_own_delta_is_not_finite_takes_the_mean_of_the_others(world, swarms):
    deltas = [torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    for result in average_at_once(world, swarms, deltas):
        assert torch.equal(result.means["shared"], torch.tensor([2.0, 3.0]))
        assert [member.tokens for member in result.roster if member.peer_id == swarms[0].peer_id] == [0]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_what_rounding_leaves_over_goes_with_later_rounds(world, seed, codec):
    """The sum of the committed means follows the sum of the true ones, however few the bits."""
    numel, rounds = 300, 40
    swarms = entered(world, numel, codec)
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(3, numel, generator=generator) * torch.logspace(-3, 0, numel)
    total = true = torch.zeros(numel)
    first_error = 0.0
    for round in range(rounds):
        results = average_at_once(world, swarms, list(drift))
        means = [result.means["shared"] for result in results]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
        for swarm, result in zip(swarms, results, strict=True):
            swarm.keep_residuals(result, result.means)
        total, true = total + means[0], true + drift.mean(0)
        if round == 0:
            first_error = (total - true).norm().item()
            assert first_error > 0
    assert (total - true).norm().item() < 8 * first_error, "an error that is not fed back would grow to 40 times"


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_rounding_error_is_kept_only_of_what_was_committed(world, seed, is_committed):
    swarms = entered(world, 300, "int4")
    deltas = list(torch.randn(3, 300, generator=torch.Generator().manual_seed(seed)))
    first = average_at_once(world, swarms, deltas)
    for swarm, result in zip(swarms, first, strict=True):
        swarm.keep_residuals(result, result.means if is_committed else ())
    again = average_at_once(world, swarms, deltas)
    assert torch.equal(first[0].means["shared"], again[0].means["shared"]) != is_committed
    assert any(residual.whole().any() for residual in swarms[0].residuals().values()) == is_committed


def test_a_version_costs_its_bytes_unless_they_are_there(world, swarms):
    holder, puller, _ = swarms
    for round, value, received in ((1, 1.0, 1), (2, 2.0, 2), (3, 2.0, 2)):
        holder.publish(round, {"slot-1": torch.full((3,), value)})
        assert pull_offered(puller, ["slot-1"], [holder.peer_id]) == {}
        assert puller.traffic()[0] == received * (12 + HASH_BYTES)


def test_a_name_that_the_run_does_not_have_is_not_pulled(swarms):
    swarms[1].publish(3, {"slot-1": torch.ones(3), "slot-2": torch.ones(3)})
    failures = pull_offered(swarms[0], ["slot-1", "slot-2"], [swarms[1].peer_id])
    assert failures == {"slot-2": "this run has no such version"}
    assert set(swarms[0].versions()) == {"slot-1"}


def test_what_was_refused_is_neither_seen_nor_pulled_again(swarms):
    me, other = swarms[:2]
    wanted = {}
    for round in (1, 2):
        other.publish(round, {"slot-1": torch.full((3,), float(round))})
        wanted = offered(me, ["slot-1"], [other.peer_id])
        assert me.pull(wanted, [other.peer_id], timeout=1.0) == {}
    me.refuse("slot-1", {})
    assert me.versions()["slot-1"].round == 1 and me.inventory([other.peer_id]) == {other.peer_id: {}}
    assert set(me.pull(wanted, [other.peer_id], timeout=1.0)) == {"slot-1"}
    other.publish(3, {"slot-1": torch.full((3,), 2.0)})
    same = {VectorName("slot-1"): (3, other.versions()["slot-1"].digest)}
    assert set(me.pull(same, [other.peer_id], timeout=1.0)) == {"slot-1"}, "it is the same again"
    other.publish(4, {"slot-1": torch.full((3,), 4.0)})
    assert pull_offered(me, ["slot-1"], [other.peer_id]) == {}


def test_only_the_version_with_the_digest_that_is_asked_for_is_pulled(swarms):
    me, one, other = swarms
    one.publish(2, {"slot-1": torch.ones(3)})
    other.publish(1, {"slot-1": torch.zeros(3)})
    wanted = {VectorName("slot-1"): (1, other.versions()["slot-1"].digest)}
    assert me.pull(wanted, [one.peer_id, other.peer_id], timeout=1.0) == {}
    assert torch.equal(me.load("slot-1"), torch.zeros(3))
    me.delete(VectorName("slot-1"))
    assert set(me.pull(wanted, [one.peer_id], timeout=1.0)) == {"slot-1"}
