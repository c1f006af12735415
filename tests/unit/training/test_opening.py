"""What a peer begins with: the run's start only where nobody has anything later."""

import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from virtual import VOCAB, VirtualPeer, World, make_peer, tiny_run

from spes_p2p.codecs.vectors import LazyVectors
from spes_p2p.config import ModelConfig, RoundConfig, RunConfig
from spes_p2p.sim.network import VirtualNode
from spes_p2p.sim.peer import VirtualSwarm
from spes_p2p.swarm.names import VectorName
from spes_p2p.training.build import build_initial
from spes_p2p.training.opening import ENTERING_TRIES

ALONE = RoundConfig(mode="steps", steps=3, total=20, min_peers=1, max_seconds=60, exchange_seconds=20)


class Lacking(VirtualSwarm):
    """A swarm in which nobody who is asked has this slot any more."""

    def inventory(self, peers):
        return {p: {n: v for n, v in have.items() if n != "slot-3"} for p, have in super().inventory(peers).items()}


class CutOff(VirtualSwarm):
    """A swarm from which the first downloads fail."""

    failing_pulls = ENTERING_TRIES - 1

    def pull(self, wanted, *peers, **more):
        if self.failing_pulls:
            self.failing_pulls -= 1
            return dict.fromkeys(wanted, "no peer answers")
        return super().pull(wanted, *peers, **more)


def join_late(
    run: RunConfig, swarm: type[VirtualSwarm] = VirtualSwarm, *, min_peers: int = 1
) -> tuple[VirtualPeer, int]:
    """Let one peer train and another join it after two rounds; return the latter and how often it made the start."""
    world = World()
    first = make_peer(run, 4, world)
    late_run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": min_peers})})
    late = VirtualPeer(late_run, world, world.swarm(1, swarm), index=1, max_slots=2)
    first._tokens_per_second = late._tokens_per_second = 50.0  # rounds last four seconds
    made: list[Mapping[str, torch.Tensor]] = []

    def start() -> Mapping[str, torch.Tensor]:
        made.append(late.initial())
        return made[-1]

    def wait_and_live() -> None:
        while len(first.reports) < 2:
            world.wait(0.1)
        late.live(start, lambda report: None)

    world.run([lambda: first.live(first.initial, lambda report: None), wait_and_live])
    assert late.reports[0].round > 2 and late.reports[-1].num_members == 2
    return late, len(made)


@pytest.mark.parametrize(
    "swarm, times", [pytest.param(VirtualSwarm, 0, marks=pytest.mark.full), (Lacking, 1), (CutOff, 0)]
)
def test_a_newcomer_makes_the_start_of_a_run_only_for_what_nobody_has(swarm, times):
    """Of a large model it takes minutes, and as much disk as the model."""
    late, made = join_late(tiny_run(round=ALONE), swarm)
    assert made == times and late.swarm.versions()["shared"].round == ALONE.total


def test_a_newcomer_joins_a_run_of_which_fewer_peers_than_its_start_needs_are_left():
    """The others go on with the run that they have; a newcomer that waited for `min_peers` would wait for ever."""
    late, made = join_late(tiny_run(round=ALONE), min_peers=3)
    assert made == 0 and late.swarm.versions()["shared"].round == ALONE.total


class Counting(VirtualSwarm):
    """Counts the vectors that it has returned or been given and that are still in memory."""

    def __init__(self, network: VirtualNode, folder: Path) -> None:
        super().__init__(network, folder)
        self.present: list[weakref.ref[torch.Tensor]] = []
        self.most, self.loads = 0, 0

    def count(self, vector: torch.Tensor) -> torch.Tensor:
        self.present = [each for each in self.present if each() is not None] + [weakref.ref(vector)]
        self.most = max(self.most, len(self.present))
        return vector

    def load(self, name, *, before=False):
        self.loads += 1
        return self.count(super().load(name, before=before))

    def publish(self, round, bundles):
        for bundle in bundles.values():
            self.count(bundle)
        return super().publish(round, bundles)


def test_a_founder_and_a_newcomer_never_hold_more_than_two_vectors_of_the_swarms_state():
    """One that is being read and the one before it, of sixteen slots; anchors of those that it trains come on top."""
    shape = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    run = tiny_run(model=ModelConfig(**shape, num_experts=16, top_k=2), round=ALONE)
    world = World(16)
    founder = VirtualPeer(run, world, world.swarm(0, Counting), index=0, max_slots=4)
    late = VirtualPeer(run, world, world.swarm(1, Counting), index=1, max_slots=2)
    seen: dict[int, tuple[int, int]] = {}

    def live(peer: VirtualPeer) -> None:
        opened = peer.loop.open

        def watched(*arguments):
            opened(*arguments)
            seen[peer.index] = (peer.swarm.most, peer.swarm.loads)

        peer.loop.open = watched
        peer.live(partial(build_initial, run, VOCAB, peer.sync.anchors, peer.trainer.layouts), lambda report: None)

    def join_late() -> None:
        while len(founder.reports) < 2:
            world.wait(0.1)
        live(late)

    world.run([lambda: live(founder), join_late])
    assert {index: most <= 2 for index, (most, _) in seen.items()} == {0: True, 1: True}, seen
    assert all(loads >= 16 for _, loads in seen.values()), "every slot was read"


def test_lazy_vectors_are_read_each_time_they_are_asked_for_and_only_then():
    read: list[str] = []
    vectors = LazyVectors(["a", "b"], lambda name: read.append(name) or torch.zeros(1))
    assert "a" in vectors and "c" not in vectors and list(vectors) == ["a", "b"] and len(vectors) == 2 and not read
    assert [name for name, _ in vectors.items()] == read == ["a", "b"] and vectors["a"] is not vectors["a"]


def test_moments_of_a_slot_that_was_given_up_after_they_were_fetched_are_not_loaded():
    """A late peer catches up, meets the others, and gives up a slot that they hold, too."""
    peer = make_peer(tiny_run(), 2)
    vectors = peer.initial()
    peer.trainer.load(vectors)
    held = tuple(map(VectorName.of_slot, (0, 1)))
    peer.trainer.set_slots((0, 1), {name: vectors[name] for name in held})
    kinds = peer.trainer.optimizer.kinds(held[0])
    moments = {name.moments: peer.trainer.moments(name, kinds) + 1 for name in held}
    peer.sync.held.slots = (0,)
    peer.loop._load(moments)
    assert peer.slots == (0,)
    assert torch.equal(peer.trainer.moments(held[0], kinds), moments[held[0].moments]), "those of the other are"
