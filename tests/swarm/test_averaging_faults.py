"""A round is whole or not at all, whatever one member does: die, lie, or stall, in any phase."""

import pytest
import torch
from real_peers import PeerProcess, average, begin_average, contribution, plain_mean

from spes_p2p.codecs import digest
from spes_p2p.swarm.reduce import weighted_mean

pytestmark = pytest.mark.timeout(240)

SLOTS = [(0, 1), (1,), (2,), (0, 1, 2)]  # the last is the rogue's: it shares every slot with somebody


def contributions(peers, seed):
    generator = torch.Generator().manual_seed(seed)
    return [
        contribution(peer.peer_id, generator, slots=slots, tokens=100 + 31 * i)
        for i, (peer, slots) in enumerate(zip(peers, SLOTS, strict=False))
    ]


def assert_mean_of(items, results):
    """All of `items`' contributors committed every group as its contributors' weighted mean, with equal digests."""
    for result in results:
        assert not result.dropped, result.dropped
        assert {member.peer_id for member in result.roster} == {item.member.peer_id for item in items}
    for name in {name for item in items for name in item.deltas}:
        holders = sorted((item for item in items if name in item.deltas), key=lambda item: item.member.peer_id)
        parts, tokens = [item.deltas[name] for item in holders], [float(item.member.tokens) for item in holders]
        exact = weighted_mean(parts, tokens) if len(parts) > 1 else parts[0]
        means = [result.committed[name] for item, result in zip(items, results, strict=True) if name in item.deltas]
        assert {digest(mean) for mean in means} == {digest(exact)}
        torch.testing.assert_close(means[0].double(), plain_mean(items, name), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "phase", ["dies before its first byte", "dies in the middle", "dies before it confirms"], ids=str
)
def test_survivors_of_a_killed_member_commit_the_mean_of_the_survivors(party, tmp_path, seed, phase):
    victim = PeerProcess(tmp_path / "victim", party[0].addresses, is_rogue=True).wait_until_ready()
    victim.call("misbehave", phase)
    items = contributions([*party, victim], seed)
    begin_average([*party, victim], items, expected=4)
    results = [peer.finish() for peer in party]
    victim.process.join(60)
    assert victim.process.exitcode == -9, "it should have died in the round"
    assert_mean_of(items[:3], results)


@pytest.mark.parametrize("how", ["confirms another digest", "never confirms"])
def test_without_a_members_confirmation_the_others_redo_the_round_without_it(party, rogue, seed, how):
    """It has everybody else's confirmation, so it commits and is gone; the next roster tells it that it is behind."""
    peers = [*party, rogue]
    items = contributions(peers, seed)
    rogue.call("misbehave", how)
    results = average(peers, items, expected=4)
    rogue.call("misbehave", "")
    assert_mean_of(items[:3], results[:3])
    assert_mean_of(items, average(peers, items, expected=4))


@pytest.mark.parametrize("how", ["sends a wrong shape", "means NaN", "tells each another mean"])
def test_a_member_that_lies_again_and_again_costs_all_of_them_the_round_and_no_more(party, rogue, seed, how):
    peers = [*party, rogue]
    items = contributions(peers, seed)
    rogue.call("misbehave", how)
    results = average(peers, items, expected=4)[:3]
    rogue.call("misbehave", "")
    for item, result in zip(items, results, strict=False):
        assert not result.committed
        assert set(result.dropped) == set(item.deltas)
        assert all(result.dropped.values()), "every drop has a reason"
    assert_mean_of(items, average(peers, items, expected=4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38], ids=["nan", "inf", "overflow"])
def test_a_delta_that_is_not_finite_is_nobodys_mean(party, rogue, seed, value):
    """An overflow is finite in every contribution, and infinite in the sum."""
    peers = [*party, rogue]
    items = contributions(peers, seed)
    items[3].deltas["shared"][123] = value
    for result in average(peers, items, expected=4):
        assert not result.committed
        assert set(result.dropped) >= {"shared"}
    items = contributions(peers, seed)
    assert_mean_of(items, average(peers, items, expected=4))


def test_a_round_that_failed_early_is_redone_before_its_start_was_due(party, rogue, seed):
    """All met long before the round's end; a DHT that keeps the later of two records must not hide who meets again."""
    peers = [*party, rogue]
    items = contributions(peers, seed)
    rogue.call("misbehave", "confirms another digest")
    results = average(peers, items, expected=4, meeting_seconds=500.0)
    rogue.call("misbehave", "")
    assert_mean_of(items[:3], results[:3])


def test_a_bad_delta_of_a_slot_costs_that_slot_alone(party, rogue, seed):
    peers = [*party, rogue]
    items = contributions(peers, seed)
    items[3].deltas["slot-2"][5] = float("nan")
    results = average(peers, items, expected=4)
    for item, result in zip(items, results, strict=True):
        assert set(result.committed) == set(item.deltas) - {"slot-2"}
        assert set(result.dropped) == set(item.deltas) & {"slot-2"}
