"""Whole rounds of real trainers over the in-memory swarm."""

import pytest
import torch
from virtual import VirtualPeer, run_virtual, tiny_run

from spes_p2p.config import MergeConfig, OuterConfig, RoundConfig
from spes_p2p.swarm.reduce import weighted_mean
from spes_p2p.swarm.roster import SHARED, slot_name


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outer": OuterConfig(optimizer="nesterov")},
        {"merge": MergeConfig(alpha=0.1, decay_rounds=10)},
        {"outer": OuterConfig(optimizer="nesterov"), "merge": MergeConfig(alpha=0.1)},
        {"round": RoundConfig(mode="tokens", tokens=2000, min_seconds=0.2, max_seconds=2, total=3, min_peers=2)},
    ],
    ids=["mean", "nesterov", "merge", "nesterov-merge", "tokens"],
)
def test_all_members_end_each_round_bit_identical(tmp_path, changes):
    peers = run_virtual(tiny_run(**changes), tmp_path, num_peers=3, max_slots=3)
    for reports in zip(*(peer.reports for peer in peers), strict=True):
        assert len({report.shared_digest for report in reports}) == 1
        assert {report.num_members for report in reports} == {3}
        assert all(not report.dropped for report in reports)
    digests = {tuple(peer.reports[i].shared_digest for i in range(3)) for peer in peers}
    assert len({digest for row in digests for digest in row}) == 3, "every round changes the shared anchor"
    for slot in range(4):
        holders = [peer for peer in peers if slot in peer.slots]
        assert holders, "every slot is held"
        assert len({peer.anchors.digest(slot_name(slot)) for peer in holders}) == 1


def test_frozen_experts_are_the_holders_versions_after_a_round(tmp_path):
    peers = run_virtual(tiny_run(), tmp_path, num_peers=2, max_slots=2)
    for slot in range(4):
        expected = next(peer for peer in peers if slot in peer.slots).anchors.weights(slot_name(slot))
        for peer in peers:
            actual = peer.trainer.layouts["slot"].flatten(peer.trainer.model.slot_weights(slot))
            assert torch.equal(actual, expected)


def test_a_round_is_the_token_weighted_mean_of_what_the_members_trained(tmp_path):
    """Compared with a plain replay: each peer trained alone from the same start, averaged by hand."""
    run = tiny_run(round=RoundConfig(mode="steps", steps=3, total=1, min_peers=2, max_seconds=60))
    peers = run_virtual(run, tmp_path, num_peers=2, max_slots=2)
    replays = []
    for peer in peers:
        alone = VirtualPeer(run, peer.swarm, index=peer.index, max_slots=2)
        initial = alone.initial()
        alone.trainer.set_slots(peer.slots, {slot_name(s): initial[slot_name(s)] for s in peer.slots})
        for step in range(3):
            alone.trainer.step(*alone.rounds._rates(step / 3))
        replays.append(
            {SHARED: alone.trainer.flat(SHARED), **{n: alone.trainer.flat(n) for n in map(slot_name, peer.slots)}}
        )
    order = sorted(range(2), key=lambda i: peers[i].swarm.peer_id)
    deltas = [initial[SHARED] - replays[i][SHARED] for i in order]
    expected = initial[SHARED] - weighted_mean(deltas, [192.0, 192.0])
    assert torch.equal(peers[0].anchors.weights(SHARED), expected)
    for peer, replay in zip(peers, replays, strict=True):
        for slot in peer.slots:
            name = slot_name(slot)
            assert torch.equal(peer.anchors.weights(name), initial[name] - (initial[name] - replay[name]))
