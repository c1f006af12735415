"""Virtual peers for tests: the simulator's, on tokens that need no corpus."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch

from spes_p2p.config import DataConfig, ModelConfig, RoundConfig, RunConfig, TrainConfig
from spes_p2p.sim import simulator
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.certificate import Body, MemberEntry, SlotState
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.training.build import build_initial
from spes_p2p.training.loss_gate import public_text

VOCAB = 64
PROBE = 10**6
"""Seed of the tokens that the loss gate measures; no peer's."""


class RandomTokens:
    """Batches drawn from a seed and a position: real enough to train on, and exactly resumable."""

    def __init__(self, seed: int, length: int) -> None:
        self._seed, self._length, self._position = seed, length, 0

    def next_batch(self, num_sequences: int) -> torch.Tensor:
        self._position += 1
        generator = torch.Generator().manual_seed(1_000_003 * self._seed + self._position)
        steps = torch.randint(0, 3, (num_sequences, self._length + 1), generator=generator)
        return (steps.cumsum(1) % VOCAB).long()

    def state_dict(self) -> dict:
        return {"position": self._position}

    def load_state_dict(self, state: dict) -> None:
        self._position = state["position"]


def tiny_run(**changes) -> RunConfig:
    """A run of a tiny model, in mode `steps` unless changed.

    It has one layer; that a slot is an expert of every layer is shown by the model's tests and the golden runs.
    """
    model = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    fields = {
        "model": ModelConfig(**model, num_experts=4, top_k=2),
        "data": DataConfig(sequence_length=16, vocab_size=VOCAB),
        "train": TrainConfig(batch_size=4, lr=1e-2),
        "round": RoundConfig(mode="steps", steps=3, total=3, min_peers=2, max_seconds=60, exchange_seconds=20),
        "frozen_storage": "fp32",
    }
    return RunConfig(**(fields | changes))


class VirtualPeer(simulator.VirtualPeer):
    """The simulator's own peer, on random tokens; its index is its data's seed."""

    def __init__(self, run: RunConfig, swarm: MemorySwarm, *, index: int, max_slots: int) -> None:
        self.probe_BT1 = public_text(lambda seed: RandomTokens(PROBE + seed, 16), 16)
        machine = simulator.VirtualMachine(max_slots)
        super().__init__(run, swarm, RandomTokens(index, 16), self.probe_BT1, machine, vocab_size=VOCAB)
        self.config, self.index, self.anchors = run, index, self.sync.anchors

    def initial(self) -> dict[VectorName, torch.Tensor]:
        return dict(build_initial(self.config, VOCAB, self.sync.anchors, self.trainer.layouts))


class HiddenSwarm(MemorySwarm):
    """The view of a peer that nobody can call: it reaches nobody else like it.

    Args:
        hub: Where the others are.
        peer_id: This peer's.
        hidden: All such peers' ids.
    """

    def __init__(self, hub: MemoryHub, peer_id: str, hidden: Collection[str]) -> None:
        super().__init__(hub, peer_id)
        self._hidden = frozenset(hidden) - {peer_id}

    def average(self, contribution: Contribution, *, expected: int, closes_from: float) -> RoundResult:
        member = contribution.member.model_copy(update={"calls_only": True})
        return super().average(replace(contribution, member=member), expected=expected, closes_from=closes_from)

    def inventory(self, peers: Sequence[str]) -> Mapping[str, Mapping[str, Version]]:
        return super().inventory([peer for peer in peers if peer not in self._hidden])

    def _has(self, peer: str, name: str) -> bool:
        return peer not in self._hidden and super()._has(peer, name)


def peer_id(index: int) -> str:
    return hashed_peer_id(f"test peer {index}".encode())


def certify(
    hub: MemoryHub,
    round: int,
    versions: Iterable[Version] = (),
    *,
    voters: Sequence[str] = (),
    ends_at: float = 0.0,
    members: Sequence[MemberEntry] = (),
) -> Body:
    """Make a certificate of this round the hub's last one; those before it have the same voters.

    Args:
        hub: Of a run with as many slots as the versions need.
        round: Later than the hub's last round.
        versions: The versions that the certificate names.
        voters: Those of the last certificate by default.
        ends_at: DHT time at which the next round's training ends.
        members: Members of the last round.
    """
    named = {version.name: version for version in versions}
    while (last := hub.bodies[-1]).round < round:
        fields = {
            **{name: getattr(last, name) for name in Body.model_fields},
            "round": last.round + 1,
            "previous": last.digest,
            "voters": tuple(voters) or last.voters,
        }
        if last.round + 1 == round:
            slots = list(last.slots)
            for name, version in named.items():
                if name.is_weights and name.slot is not None:
                    slots[name.slot] = SlotState(round=version.round, digest=version.digest)
            shared = named["shared"].digest if "shared" in named else last.shared
            fields |= {"shared": shared, "slots": tuple(slots), "ends_at": ends_at, "members": tuple(members)}
        hub.bodies.append(Body(**fields))
    return hub.bodies[-1]


def run_virtual(run: RunConfig, *, num_peers: int, max_slots: int) -> list[VirtualPeer]:
    """Run peers to the run's end; return them."""
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers})})
    hub = MemoryHub("run", matchmaking_seconds=10.0, min_peers=num_peers, num_slots=run.model.num_experts)
    peers = [VirtualPeer(run, MemorySwarm(hub, peer_id(i)), index=i, max_slots=max_slots) for i in range(num_peers)]
    initial = peers[0].initial
    hub.clock.run([lambda peer=peer: peer.live(initial, lambda report: None) for peer in peers])
    for peer in peers:
        assert len(peer.reports) == run.round.total, "a peer did not finish"
    return peers
