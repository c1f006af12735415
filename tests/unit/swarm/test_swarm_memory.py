"""The in-memory swarm keeps the promises that training relies on."""

from functools import partial

import pytest
import torch
from pulls import offered, pull_offered
from virtual import certify, peer_id

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.errors import ExchangeError
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.interface import Contribution
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import Member

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def hub():
    return MemoryHub("run", matchmaking_seconds=0.2, lease_seconds=7.0, num_slots=2)


@pytest.fixture
def swarms(hub):
    swarms = [MemorySwarm(hub, peer_id(i)) for i in range(3)]
    for swarm in swarms:
        swarm.enter(Vectors(segments={"shared": (Segment(2, "fp32"),), "slot": (Segment(3, "fp32"),)}))
    return swarms


def claim(swarm):
    return Claim(peer_id=swarm.peer_id, state="active", slots=(1,), max_slots=1, since=1.0)


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
    return Contribution(member, {"shared": delta})


def at_once(hub, *calls):
    """Let peers make these calls, beginning at the same time; return their results in order."""
    results = [None] * len(calls)

    def run(i):
        results[i] = calls[i]()

    hub.clock.run([partial(run, i) for i in range(len(calls))])
    return results


def test_a_paused_peer_answers_nothing_and_has_what_it_made_beside_its_training_afterwards(hub, swarms):
    """A synchronisation beside the training goes on while the training is paused."""
    swarm, other = swarms[0], swarms[1]
    swarm.publish(1, {"slot-1": torch.ones(3)})
    swarm.announce(Progress(peer_id=swarm.peer_id, round=1, ends_at=0.0))
    seen = []

    def synchronise():
        hub.clock.advance(2.0)
        swarm.publish(2, {"slot-1": torch.zeros(3)})
        swarm.announce(Progress(peer_id=swarm.peer_id, round=2, ends_at=0.0))
        seen.append(other.inventory([swarm.peer_id]))

    at_once(hub, lambda: swarm.pause(5.0), synchronise)
    assert seen == [{}]
    assert other.inventory([swarm.peer_id])[swarm.peer_id]["slot-1"].round == 2
    assert other.read(Progress)[swarm.peer_id].round == 2
    swarm.close()
    swarm.publish(3, {"slot-1": torch.zeros(3)})
    assert not other.inventory([swarm.peer_id]), "nor does a peer that has died"


def test_records_are_seen_by_all_and_outlive_their_peer_by_a_lease(hub, swarms):
    for swarm in swarms:
        swarm.announce(claim(swarm), Progress(peer_id=swarm.peer_id, round=1, ends_at=0.0))
    assert set(swarms[0].read(Claim)) == {swarm.peer_id for swarm in swarms}
    swarms[1].publish(1, {"slot-1": torch.ones(2)})
    swarms[1].close()
    hub.clock.advance(6.5)
    swarms[1].close()  # again, which prolongs nothing
    assert swarms[1].peer_id in swarms[0].read(Claim)
    hub.clock.advance(1.0)
    for kind in (Claim, Progress):
        assert set(swarms[0].read(kind)) == {swarms[0].peer_id, swarms[2].peer_id}
    assert swarms[0].inventory([swarms[1].peer_id]) == {}
    assert swarms[1].wait(60.0), "a closed swarm's wait returns at once"


def test_a_pull_waits_for_the_publication(hub, swarms):
    holder, puller, _ = swarms
    holder.publish(1, {"slot-1": torch.zeros(3)})
    later = torch.randn(3)
    wanted = {VectorName("slot-1"): (2, digest(later))}
    failures, _ = at_once(
        hub,
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
    failures = puller.pull(wanted, [holder.peer_id], timeout=0.05)
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
    bundle = torch.randn(5)
    swarms[0].publish(1, {"slot-1": bundle})
    for round in (1, 2):
        swarms[0].publish(round, {"slot-1": bundle})
        pull_offered(swarms[1], ["slot-1"], [swarms[0].peer_id])
        assert swarms[1].traffic()[0] == 20


def test_a_peer_that_meets_no_other_gets_no_roster_in_time(swarms):
    result = swarms[0].average(contribution(swarms[0], torch.ones(2)), expected=3, closes_from=0.0)
    assert not result.means and not result.roster and "no roster" in result.dropped["shared"]


def test_a_late_starter_is_waited_for_until_all_are_there(hub, swarms):
    results = at_once(
        hub,
        *(
            lambda swarm=swarm, i=i: swarm.average(
                contribution(swarm, torch.full((2,), float(i)), tokens=i), expected=3, closes_from=0.0
            )
            for i, swarm in enumerate(swarms)
        ),
    )
    for result in results:
        assert len(result.roster) == 3
        torch.testing.assert_close(result.means["shared"], torch.full((2,), 5 / 3))


def average_at_once(hub, swarms, deltas, tokens=5):
    return at_once(
        hub,
        *(
            lambda swarm=swarm, delta=delta: swarm.average(
                contribution(swarm, delta, tokens=tokens), expected=len(swarms), closes_from=0.0
            )
            for swarm, delta in zip(swarms, deltas, strict=True)
        ),
    )


def test_a_mean_that_is_not_finite_counts_for_no_member(hub, swarms):
    """Every contribution is finite, their sum is not."""
    deltas = [torch.tensor([3e38, 1.0]), torch.tensor([3e38, 1.0]), torch.ones(2)]
    for result in average_at_once(hub, swarms, deltas):
        assert not result.means and "cannot be sent" in result.dropped["shared"]


def test_a_peer_whose_own_delta_is_not_finite_takes_the_mean_of_the_others(hub, swarms):
    deltas = [torch.tensor([float("nan"), 1.0]), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    for result in average_at_once(hub, swarms, deltas):
        assert torch.equal(result.means["shared"], torch.tensor([2.0, 3.0]))
        assert [member.tokens for member in result.roster if member.peer_id == swarms[0].peer_id] == [0]


@pytest.mark.parametrize("codec", ["bf16", "int8", "int4"])
def test_what_rounding_leaves_over_goes_with_later_rounds(hub, seed, codec):
    """The sum of the committed means follows the sum of the true ones, however few the bits."""
    numel, rounds = 300, 40
    swarms = [MemorySwarm(hub, peer_id(i)) for i in range(3)]
    for swarm in swarms:
        swarm.enter(Vectors(segments={"shared": (Segment(numel, codec),), "slot": (Segment(3, codec),)}))
    generator = torch.Generator().manual_seed(seed)
    drift = torch.randn(3, numel, generator=generator) * torch.logspace(-3, 0, numel)
    total = true = torch.zeros(numel)
    first_error = 0.0
    for round in range(rounds):
        results = average_at_once(hub, swarms, list(drift))
        means = [result.means["shared"] for result in results]
        assert torch.equal(means[0], means[1]) and torch.equal(means[0], means[2])
        for swarm, result in zip(swarms, results, strict=True):
            swarm.settle(result, result.means)
        total, true = total + means[0], true + drift.mean(0)
        if round == 0:
            first_error = (total - true).norm().item()
            assert first_error > 0
    assert (total - true).norm().item() < 8 * first_error, "an error that is not fed back would grow to 40 times"


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_rounding_error_is_kept_only_of_what_was_committed(hub, seed, is_committed):
    swarms = [MemorySwarm(hub, peer_id(i)) for i in range(3)]
    for swarm in swarms:
        swarm.enter(Vectors(segments={"shared": (Segment(300, "int4"),), "slot": (Segment(3, "int4"),)}))
    deltas = list(torch.randn(3, 300, generator=torch.Generator().manual_seed(seed)))
    first = average_at_once(hub, swarms, deltas)
    for swarm, result in zip(swarms, first, strict=True):
        swarm.settle(result, result.means if is_committed else ())
    again = average_at_once(hub, swarms, deltas)
    assert torch.equal(first[0].means["shared"], again[0].means["shared"]) != is_committed
    assert any(residual.whole().any() for residual in swarms[0].residuals().values()) == is_committed


# ---------------------------------------------------------------------- what is decided


@pytest.fixture
def voters(hub):
    """Three peers, all of which vote."""
    swarms = [MemorySwarm(hub, peer_id(i)) for i in range(3)]
    for swarm in swarms:
        swarm.enter(Vectors(segments={"shared": (Segment(2, "fp32"),)}))
    certify(hub, 1, voters=[swarm.peer_id for swarm in swarms])
    return swarms


def agree_at_once(hub, swarms, *digests):
    """Agree on a round; in each attempt state these digests of `shared`, and of an empty one nothing."""
    peers = [swarm.peer_id for swarm in swarms]

    def agree(place):
        stated = iter([each[place] for each in digests])

        def stage(result):
            digest = next(stated)
            return ({VectorName("shared"): digest} if digest else {}), 77.0

        brought = contribution(swarms[place], torch.ones(2))
        body = swarms[place].agree(brought, stage, expected=peers, closes_from=0.0)
        assert not list(stated), "another attempt was not needed"
        return body

    return at_once(hub, *(lambda place=place: agree(place) for place in range(len(swarms))))


@pytest.mark.parametrize("digests", [["a" * 64] * 3, ["a" * 64, "b" * 64, "a" * 64], ["a" * 64, "a" * 64, ""]])
def test_what_most_voters_confirm_is_the_next_certificate_of_all(hub, voters, digests):
    bodies = agree_at_once(hub, voters, digests)
    assert [body.digest for body in bodies] == [hub.bodies[2].digest] * 3
    assert (bodies[0].round, bodies[0].shared, bodies[0].ends_at) == (2, "a" * 64, 77.0)
    assert [entry.peer_id for entry in bodies[0].members] == sorted(swarm.peer_id for swarm in voters)
    assert {swarm.last().digest for swarm in voters} == {voters[0].certified(2).digest}


@pytest.mark.parametrize("digests", [["a" * 64, "b" * 64, "c" * 64], ["a" * 64, "", ""], ["", "", ""]])
def test_another_attempt_begins_if_most_voters_do_not_confirm_one_result(hub, voters, digests):
    assert agree_at_once(hub, voters, digests, ["a" * 64] * 3)[0].round == 2


def test_voters_that_vanish_are_left_behind_after_a_time_and_not_before(hub, voters):
    """Two of three are gone: the one that is left is no majority."""
    left, began = voters[0], hub.clock.now()
    left.announce(claim(left))
    (body,) = agree_at_once(hub, [left], *[["a" * 64]] * 2)
    assert hub.clock.now() >= began + 600.0
    assert set(body.shrunk) == {voters[1].peer_id, voters[2].peer_id} and body.voters == (left.peer_id,)


def test_a_voter_that_says_goodbye_is_not_waited_for(hub, voters):
    began = hub.clock.now()
    voters[2].leave()
    assert agree_at_once(hub, voters[:2], ["a" * 64] * 2)[0].voters == (voters[0].peer_id, voters[1].peer_id)
    assert hub.clock.now() < began + 60.0


def test_a_version_costs_its_bytes_unless_they_are_there(hub, swarms):
    holder, puller, _ = swarms
    for round, value, received in ((1, 1.0, 12), (2, 2.0, 24), (3, 2.0, 24)):
        holder.publish(round, {"slot-1": torch.full((3,), value)})
        assert pull_offered(puller, ["slot-1"], [holder.peer_id]) == {}
        assert puller.traffic()[0] == received


def test_a_name_that_the_run_does_not_have_is_not_pulled(swarms):
    swarms[0].enter(Vectors(num_slots=4))
    swarms[1].publish(3, {"slot-3": torch.ones(3), "slot-4": torch.ones(3)})
    failures = pull_offered(swarms[0], ["slot-3", "slot-4"], [swarms[1].peer_id])
    assert failures == {"slot-4": "this run has no such version"}
    assert set(swarms[0].versions()) == {"slot-3"}


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
    assert set(me.pull(wanted, [one.peer_id], timeout=1.0)) == {"slot-1"}
