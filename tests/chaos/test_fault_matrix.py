"""A member that is killed, frozen or cut off in any phase of a round costs the others time, and no mean anything."""

import random

import pytest
from fault_cases import PHASES
from fault_cluster import FaultCluster
from misbehaving import DECIDING

from benchmarks.testbed import TestBed, available

# Full: on a saturated machine the survivors of one case in 300 drop their round.
pytestmark = [pytest.mark.timeout(480), pytest.mark.full]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = FaultCluster(tmp_path_factory.mktemp("cluster"), random.randrange(2**31))
    yield cluster.start()
    cluster.close()


@pytest.fixture(scope="module")
def cluster_in_bed(tmp_path_factory):
    if reason := available():
        pytest.skip(f"no link to cut: {reason}")
    with TestBed(peers=4, rtt_ms=10) as bed:
        cluster = FaultCluster(tmp_path_factory.mktemp("bed"), random.randrange(2**31), "int8", bed)
        yield cluster.start()
        cluster.close()


def strike(cluster, fault, phase, seed, **how):
    moment = random.Random(seed).choice(PHASES[phase])
    case = cluster.run(fault, phase, moment, **how)
    assert case.is_reached, f"the victim never came to the moment when it {moment}"
    assert not case.wrong, case
    assert case.committed == 3, f"the survivors should have committed without the victim: {case}"
    return case


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_of_a_fault_commit_the_mean_of_the_survivors(cluster, phase, fault, seed):
    strike(cluster, fault, phase, seed)


@pytest.mark.parametrize("phase", ["in the middle of sending", "before it confirms"])
def test_survivors_of_a_cut_link_commit_the_mean_of_the_survivors(cluster_in_bed, phase, seed):
    case = strike(cluster_in_bed, "cut", phase, seed)
    told, same = case.victim.endswith("told that it is behind"), case.victim == "committed what the others did"
    assert told or (case.moment == DECIDING and same), "healed, the victim has the round, or knows that it missed one"


def test_a_peer_whose_link_was_down_for_long_finds_the_others_again(cluster_in_bed, seed):
    """By then its DHT node has forgotten everybody, and everybody has forgotten its."""
    strike(cluster_in_bed, "cut", "before its first byte", seed, stays_seconds=12.0)
