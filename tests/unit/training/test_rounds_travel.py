"""What a round publishes leads those who do not hold it to the same bits, whatever it costs in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from virtual import VirtualPeer, peer_id, tiny_run

from spes_p2p.codecs.format import Format
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import CodecConfig, MergeConfig, OuterConfig, RoundConfig, RunConfig
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.anchors import Anchors
from spes_p2p.training.fetch_plan import staleness_bound

LOSSY = CodecConfig(shared="int4", slots="int4", moments="int8", moments_interval=2)
MIXED = OuterConfig(optimizer="nesterov", lr=0.5)


class FollowedSwarm(MemorySwarm):
    """Follows every published delta from the version before, as a peer that does not hold the group would.

    Args:
        hub: Where it meets the others.
        index: Makes its id.
        run: The run's settings.
    """

    def __init__(self, hub: MemoryHub, index: int, run: RunConfig) -> None:
        super().__init__(hub, peer_id(index))
        self._run = run
        self.follower: Anchors | None = None
        self.followed: dict[int, set[str]] = {}
        self.moments_rounds: set[int] = set()
        self.pulls: list[dict[str, Any]] = []

    def publish(
        self, round: int, bundles: Mapping[str, Tensor], deltas: Mapping[str, bytes] | None = None
    ) -> Mapping[str, Any]:
        self.moments_rounds |= {round for name in bundles if name.startswith("moments-")}
        for name, delta in (deltas or {}).items():
            assert self.follower is not None
            mean_delta = Format(self.follower.segments()[VectorName(name).kind][:1]).decode(delta)
            assert digest(self.follower.advance(name, self.load(name), mean_delta)) == digest(bundles[name])
            self.followed.setdefault(round, set()).add(name)
        return super().publish(round, bundles, deltas)

    def pull(self, wanted: Mapping[str, Sequence[str]], **settings: Any) -> Mapping[str, str]:
        self.pulls.append({"wanted": dict(wanted), **settings})
        return super().pull(wanted, **settings)


def run_followed(run: RunConfig, num_peers: int, max_slots: int, machines: Mapping[int, dict] | None = None):
    """Run peers to the run's end on swarms that check what is published; return peers and swarms."""
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers})})
    hub = MemoryHub("run", matchmaking_seconds=10.0)
    swarms = [FollowedSwarm(hub, i, run) for i in range(num_peers)]
    peers = [VirtualPeer(run, swarm, index=i, max_slots=max_slots) for i, swarm in enumerate(swarms)]
    for swarm, peer in zip(swarms, peers, strict=True):
        swarm.follower = Anchors(run, {kind: layout.numel for kind, layout in peer.trainer.layouts.items()})
    for index, choices in (machines or {}).items():
        sync = peers[index].sync
        sync._machine = sync._machine.model_copy(update=choices)
        sync.held.refresh_slots = sync._machine.refresh_slots
    initial = peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    return peers, swarms


@pytest.mark.parametrize(
    "outer", [{}, pytest.param({"optimizer": "nesterov"}, marks=pytest.mark.full)], ids=["mean", "nesterov"]
)
def test_a_published_delta_leads_to_the_published_version(outer):
    rounds = RoundConfig(mode="steps", steps=2, total=4, min_peers=2, max_seconds=60, exchange_seconds=20)
    peers, swarms = run_followed(tiny_run(codecs=LOSSY, outer=OuterConfig.model_validate(outer), round=rounds), 3, 2)
    for round in range(1, 5):
        digests = {peer.reports[round - 1].shared_digest for peer in peers}
        assert len(digests) == 1
        for peer, swarm in zip(peers, swarms, strict=True):
            assert swarm.followed[round] >= {SHARED, *(f"slot-{slot}" for slot in peer.slots)}
    assert all(swarm.moments_rounds == {2, 4} for swarm in swarms), "moments travel every other round"


def test_a_merge_is_no_delta():
    """It moves a slot by more than what was averaged; the shared parameters it leaves alone."""
    rounds = RoundConfig(mode="steps", steps=2, total=4, min_peers=2, max_seconds=60, exchange_seconds=20)
    merge = MergeConfig(alpha=0.1, interval_rounds=2, decay_rounds=10)
    peers, swarms = run_followed(tiny_run(codecs=LOSSY, merge=merge, round=rounds), 2, 2)
    for peer, swarm in zip(peers, swarms, strict=True):
        held = {f"slot-{slot}" for slot in peer.slots}
        assert [swarm.followed[round] for round in (1, 2, 3, 4)] == 2 * [{SHARED, *held}, {SHARED}]


def test_exact_deltas_are_not_published_beside_their_versions():
    _, swarms = run_followed(tiny_run(), 2, 2)
    assert not any(swarm.followed for swarm in swarms)


def test_a_peer_that_fetches_few_slots_stays_within_its_bound_and_says_how_old_they_are():
    rounds = RoundConfig(mode="steps", steps=2, total=8, min_peers=2, max_seconds=60, exchange_seconds=20, copies=1)
    peers, _ = run_followed(tiny_run(round=rounds), 3, 1, {0: {"refresh_slots": 1}})
    few, others = peers[0], peers[1:]
    bound = staleness_bound(2, 1)  # three slots are held, one of them by itself
    assert {report.stale_rounds for report in few.reports} == {bound - 1}
    assert all(report.stale_rounds == 0 for peer in others for report in peer.reports)
    slot_bytes = 4 * few.trainer.layouts["slot"].numel
    pulled = [peer.reports[-1].bytes_in - peer.reports[1].bytes_in for peer in (few, others[0])]
    assert pulled[1] - pulled[0] == 6 * slot_bytes


def test_the_slots_of_a_slow_holder_are_passed_on_by_those_who_fetch_them():
    peers, swarms = run_followed(
        tiny_run(),
        4,
        1,
        {0: {"uplink_mbit": 5.0}, 1: {"uplink_mbit": 50.0}, 2: {"uplink_mbit": 50.0}, 3: {"uplink_mbit": 60.0}},
    )
    slow, fast = swarms[0], swarms[1:]
    (slot,) = (f"slot-{slot}" for slot in peers[0].slots)
    chain = tuple(sorted(swarm.peer_id for swarm in fast))
    links = {swarm.peer_id: uplink for swarm, uplink in zip(swarms, (5.0, 50.0, 50.0, 60.0), strict=True)}
    for swarm in fast:
        in_rounds = [pull for pull in swarm.pulls if pull["relays"]]
        assert len(in_rounds) == 3 and all(pull["relays"] == {slot: chain} for pull in in_rounds)
        assert all(pull["uplinks"] == links and pull["wanted"][slot] == [slow.peer_id] for pull in in_rounds)
    assert not any(pull["relays"] for pull in slow.pulls), "it fetches from those who can send"


def test_routed_tokens_are_counted_over_layers_and_once():
    run = tiny_run(model=tiny_run().model.model_copy(update={"num_layers": 2}))
    peer = VirtualPeer(run, MemorySwarm(MemoryHub("run"), peer_id(0)), index=0, max_slots=2)
    peer.trainer.load(peer.initial())
    for _ in range(2):
        peer.trainer.step(1e-3)
    routed = peer.trainer.routed_tokens()
    assert sorted(routed) == [0, 1, 2, 3]
    assert sum(routed.values()) == 2 * 4 * 16 * 2 * 2  # steps, sequences, tokens, layers, experts per token
    assert peer.trainer.routed_tokens() == {}


def test_routed_tokens_are_those_of_the_router():
    """Compared with a forward pass of the plain model."""
    peer = VirtualPeer(tiny_run(), MemorySwarm(MemoryHub("run"), peer_id(0)), index=0, max_slots=2)
    peer.trainer.load(peer.initial())
    tokens_BT1 = peer.trainer.data.next_batch(4)
    peer.trainer.data.load_state_dict({"position": 0})
    with torch.no_grad():
        logits = peer.trainer.model.module(tokens_BT1[:, :-1], output_router_logits=True).router_logits
    expected = sum(torch.bincount(layer.topk(2, dim=-1).indices.flatten(), minlength=4) for layer in logits)
    peer.trainer.step(1e-3)
    assert peer.trainer.routed_tokens() == dict(enumerate(expected.tolist()))
