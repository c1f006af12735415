"""What a peer begins with: the run's start only where nobody has anything later."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from virtual import VirtualPeer, peer_id, tiny_run

from spes_p2p.config import RoundConfig, RunConfig
from spes_p2p.sim.swarm import MemoryHub, MemorySwarm

ALONE = RoundConfig(mode="steps", steps=3, total=20, min_peers=1, max_seconds=60, exchange_seconds=20)


class Lacking(MemorySwarm):
    """A swarm in which nobody who is asked has this slot any more."""

    def inventory(self, peers):
        return {p: {n: v for n, v in have.items() if n != "slot-3"} for p, have in super().inventory(peers).items()}


def join_late(run: RunConfig, swarm: type[MemorySwarm] = MemorySwarm) -> tuple[VirtualPeer, int]:
    """Let one peer train and another join it after two rounds; return the latter and how often it made the start."""
    hub = MemoryHub("run", matchmaking_seconds=2.0)
    first = VirtualPeer(run, MemorySwarm(hub, peer_id(0)), index=0, max_slots=4)
    late = VirtualPeer(run, swarm(hub, peer_id(1)), index=1, max_slots=2)
    made: list[Mapping[str, torch.Tensor]] = []

    def start() -> Mapping[str, torch.Tensor]:
        made.append(late.initial())
        return made[-1]

    def wait_and_live() -> None:
        while len(first.reports) < 2:
            hub.clock.wait(0.1)
        late.live(start, lambda report: None)

    hub.clock.run([lambda: first.live(first.initial, lambda report: None), wait_and_live])
    assert late.reports[0].round > 2 and late.reports[-1].num_members == 2
    return late, len(made)


@pytest.mark.parametrize("swarm, times", [pytest.param(MemorySwarm, 0, marks=pytest.mark.full), (Lacking, 1)])
def test_a_newcomer_makes_the_start_of_a_run_only_for_what_nobody_has(swarm, times):
    """Of a large model it takes minutes, and as much disk as the model."""
    late, made = join_late(tiny_run(round=ALONE), swarm)
    assert made == times
    assert late.swarm.versions()["shared"].round == ALONE.total
