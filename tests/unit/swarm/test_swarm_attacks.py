"""What a simulated attacker does to the others' means, and when they leave it out."""

from functools import partial

import pytest
import torch
from virtual import World, peer_id, tiny_run

from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RoundConfig
from spes_p2p.sim.attacks import Attack, AttackingSwarm, Spoiler
from spes_p2p.swarm.averaging.encoding import Contribution, Vectors
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.averaging.partition import weighted_mean
from spes_p2p.swarm.roster import Member

pytestmark = pytest.mark.timeout(120)

NUMEL, PEERS, ATTACKER = 120_000, 6, 3
RUN = tiny_run(round=RoundConfig(min_peers=PEERS, matchmaking_seconds=1.0))
SEGMENTS = {"shared": (Segment(NUMEL, "fp32"), Segment(NUMEL, "fp32"), Segment(NUMEL, "fp32", non_negative=True))}


class Laboratory:
    """Six peers that bring what training would, one of which attacks; each round is certified."""

    def __init__(self, kind, seed, factor=50.0):
        self.world, self.seed = World(1), seed
        spoiler = Spoiler([Attack(peer=ATTACKER, kind=kind, factor=factor, from_round=1)], {"shared": NUMEL})
        attacks = {ATTACKER: (AttackingSwarm, spoiler)}
        self.swarms = [self.world.swarm(i, *attacks.get(i, ())) for i in range(PEERS)]
        for swarm in self.swarms:
            self.world.enter(swarm, RUN, Vectors(segments=SEGMENTS, num_slots=1))

    def average(self, round):
        """Return each peer's result, and the mean of what the honest have brought."""
        results, items = self.meet(round)
        liar = peer_id(ATTACKER)
        honest = [item.deltas["shared"] for item in items if item.member.peer_id != liar]
        return results, weighted_mean(honest, [100.0] * len(honest))

    def meet(self, round):
        """Return each peer's result, and what each has brought, by id."""
        generator, count = torch.Generator().manual_seed(self.seed + round), len(self.swarms)
        signal, results = torch.randn(NUMEL, generator=generator), [None] * count
        items = []
        for swarm in self.swarms:
            delta = signal + 0.7 * torch.randn(NUMEL, generator=generator)
            member = Member(
                **{
                    "peer_id": swarm.peer_id,
                    "round": round,
                    "previous": self.world.bodies[-1].digest,
                    "tokens": 100,
                    "slots": (),
                },
                **{"tokens_per_second": 1.0, "ready_at": 1.0, "sync_seconds": 0.0},
            )
            items.append(Contribution(member, {"shared": torch.cat([delta, 0.1 * delta, delta.square()])}))

        def run(place):
            swarm = self.swarms[place]

            def stage(result):
                results[place] = result
                return {name: digest(mean) for name, mean in result.means.items()}, 0.0

            peers = [each.peer_id for each in self.swarms]
            results[place] = RoundResult()
            swarm.agree(items[place], stage, expected=peers, closes_from=0.0)
            while swarm.last().round == round:  # it has taken part in no meeting
                swarm.wait(1.0)
            swarm.keep_residuals(results[place], results[place].means)

        self.world.run([partial(run, place) for place in range(count)])
        return results, sorted(items, key=lambda item: item.member.peer_id)


def distance(results, true, part=slice(None)):
    mean = results[0].means["shared"]
    return ((mean - true)[part].norm() / true[part].norm()).item()


@pytest.mark.parametrize("kind", ["sign_flip", "scale", "nan", "noise", "moments", "lying_reducer"])
def test_an_attacker_is_in_no_group_two_rounds_later_and_has_spoiled_little_until_then(seed, kind):
    lab = Laboratory(kind, seed)
    assert distance(*lab.average(0)) < 0.2
    for round in (1, 2):
        results, true = lab.average(round)
        assert distance(results, true, slice(0, NUMEL)) < 0.8
    results, true = lab.average(3)
    assert results[0].roster.behind == (lab.swarms[ATTACKER].peer_id,)
    assert distance(results, true) == 0 and not results[ATTACKER].means
    assert not any(peer != lab.swarms[ATTACKER].peer_id for swarm in lab.swarms for _, peer in swarm.bans.accused)


def test_moments_that_are_too_large_are_pulled_in_and_the_delta_is_not(seed):
    lab = Laboratory("moments", seed, factor=1e6)
    lab.average(0)
    results, true = lab.average(1)
    assert distance(results, true, slice(0, NUMEL)) < 0.2
    assert distance(results, true, slice(NUMEL, 2 * NUMEL)) < 1.0
    assert distance(results, true, slice(2 * NUMEL, None)) < 6.0


def test_tokens_that_no_peer_trained_weigh_a_few_times_the_median(seed):
    lab = Laboratory("inflate", seed, factor=1e6)
    lab.average(0)
    results, true = lab.average(1)
    assert distance(results, true) < 0.5, "the mean of five and of four times the sixth"


@pytest.mark.parametrize("kind", ["copy", "stale"])
def test_old_deltas_pass_for_new_ones_and_do_as_little_harm(seed, kind):
    lab = Laboratory(kind, seed)
    lab.average(0)
    assert 0 < distance(*lab.average(1)) < 0.8


def test_the_silent_are_missed_for_as_long_as_a_meeting_waits(seed):
    lab = Laboratory("silent", seed)
    lab.average(0)
    results, true = lab.average(1)
    assert distance(results, true) == 0 and not results[ATTACKER].means
    assert results[0].matchmaking_seconds == pytest.approx(1.0, abs=0.2)
