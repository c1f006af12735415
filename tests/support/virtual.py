"""Virtual peers for tests: the simulator's, on tokens that need no corpus."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import DataConfig, ModelConfig, RoundConfig, RunConfig, TrainConfig
from spes_p2p.sim import peer as simulated
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.sim.peer import VirtualKeys, VirtualSwarm
from spes_p2p.swarm.averaging.encoding import Vectors
from spes_p2p.swarm.certificate import Body, Certificate, SlotState, Vote, genesis
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.training.build import build_initial
from spes_p2p.training.loss_gate import public_text

VOCAB = 64
PROBE = 10**6
"""Seed of the tokens that the loss gate measures; no peer's."""
DELAY_SECONDS = 0.02


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


def peer_id(index: int) -> str:
    return hashed_peer_id(f"test peer {index}".encode())


class World:
    """The network of a test's virtual peers, and the certificates of their run.

    Args:
        num_slots: Experts per layer of the run's model.
        start: The run's genesis; by default the one that the first peer founds.
    """

    opened: list[World] = []
    """Closed after each test."""

    def __init__(self, num_slots: int = 4, start: Body | None = None) -> None:
        self.network = VirtualNetwork()
        self.network.delay = lambda sender, receiver: DELAY_SECONDS
        self.start = start or genesis("run", peer_id(0), digest(b"run"), num_slots, map(peer_id, range(64)))
        self.swarms: list[VirtualSwarm] = []
        self._certificates: list[Certificate] = []
        self._folder = tempfile.TemporaryDirectory()
        World.opened.append(self)

    def close(self) -> None:
        self.network.close()
        self._folder.cleanup()

    def swarm(
        self, index: int | str, kind: Callable[..., Any] = VirtualSwarm, *more: Any, client_mode: bool = False
    ) -> Any:
        """Return the swarm of a peer, by its number or its id, that has not entered the run yet."""
        name = index if isinstance(index, str) else peer_id(index)
        node = self.network.node(name, "run", client_mode=client_mode)
        self.swarms.append(kind(node, Path(self._folder.name), *more))
        return self.swarms[-1]

    def enter(self, swarm: VirtualSwarm, run: RunConfig, vectors: Vectors, max_slots: int = 2) -> None:
        """Let a peer enter the run, with the certificates so far."""
        swarm.enter(run.round, vectors, self.start, max_slots=max_slots, is_new=True)
        for certificate in self._certificates:
            self._follow(swarm, certificate)

    def _follow(self, swarm: VirtualSwarm, certificate: Certificate) -> None:
        async def follow() -> None:
            swarm.consensus._agreement.following.follow(certificate)

        swarm.network.run(follow(), 10.0)

    def now(self) -> float:
        return self.network.loop.time()

    def wait(self, seconds: float) -> None:
        """Let time pass, in a peer's thread or while none runs."""
        self.network.loop.call(asyncio.sleep(seconds), seconds + 1.0)

    def run(self, lives: Sequence[Callable[[], None]]) -> None:
        """Run peers until all have ended."""
        self.network.loop.live(lives)

    @property
    def bodies(self) -> list[Body]:
        """The bodies of the run, from its genesis on, as the peer that knows most has them."""
        entered = [swarm for swarm in self.swarms if swarm._consensus is not None]
        newest = max(entered, key=lambda swarm: swarm.last().round, default=None)
        return [self.start] if newest is None else [newest.consensus.body_at(r) for r in range(newest.last().round + 1)]

    def certify(
        self, round: int, versions: Iterable[Version] = (), *, voters: Sequence[str] = (), **changes: Any
    ) -> Body:
        """Give all peers a certificate of this round; those before it have the same voters.

        Args:
            round: Later than the last round.
            versions: The versions that the certificate names.
            voters: Those of the last certificate by default.
            changes: Other fields of the last body.
        """
        named = {version.name: version for version in versions}
        last = self._certificates[-1].body if self._certificates else self.bodies[-1]
        while last.round < round:
            fields = {
                **{name: getattr(last, name) for name in Body.model_fields},
                "round": last.round + 1,
                "previous": last.digest,
                "voters": tuple(voters) or last.voters,
                "seats": dict.fromkeys(voters, "") or last.seats,
            }
            if last.round + 1 == round:
                slots = list(last.slots)
                for name, version in named.items():
                    if name.is_weights and name.slot is not None:
                        slots[name.slot] = SlotState(round=version.round, digest=version.digest)
                shared = named["shared"].digest if "shared" in named else last.shared
                fields |= {"shared": shared, "slots": tuple(slots), "members": ()} | changes
            body = Body(**fields)
            self._add(body, last)
            last = body
        return last

    def _add(self, body: Body, last: Body) -> None:
        vote = {"run": body.run, "round": body.round, "previous": last.digest, "attempt": 0, "body": body.digest}
        signed = {voter: Vote(**vote, peer_id=voter).signed(VirtualKeys(voter)) for voter in last.voters}
        signatures = {voter: each.signature for voter, each in signed.items()}
        self._certificates.append(Certificate(body=body, attempt=0, signatures=signatures))
        for swarm in self.swarms:
            if swarm._consensus is not None and not swarm.network.is_closed:
                self._follow(swarm, self._certificates[-1])


class VirtualPeer(simulated.VirtualPeer):
    """The simulator's own peer, on random tokens; its index is its data's seed."""

    def __init__(self, run: RunConfig, world: World, swarm: VirtualSwarm, *, index: int, max_slots: int) -> None:
        self.probe_BT1 = public_text(lambda seed: RandomTokens(PROBE + seed, 16), 16)
        machine = simulated.VirtualMachine(max_slots)
        super().__init__(run, swarm, world.start, RandomTokens(index, 16), self.probe_BT1, machine, vocab_size=VOCAB)
        self.world, self.config, self.index, self.anchors = world, run, index, self.sync.anchors

    def initial(self) -> dict[VectorName, torch.Tensor]:
        return dict(build_initial(self.config, VOCAB, self.sync.anchors, self.trainer.layouts))


def make_peer(run: RunConfig, max_slots: int, world: World | None = None) -> VirtualPeer:
    """Return one peer, alone unless the world has others."""
    world = world or World(run.model.num_experts)
    index = len(world.swarms)
    return VirtualPeer(run, world, world.swarm(index), index=index, max_slots=max_slots)


def run_peers(peers: Sequence[VirtualPeer], on_round: Callable[[VirtualPeer, Any], None] = lambda *_: None) -> None:
    """Run peers to the run's end, all from the first one's start."""
    initial = peers[0].initial
    peers[0].world.run([lambda peer=peer: peer.live(initial, lambda report: on_round(peer, report)) for peer in peers])


def run_virtual(run: RunConfig, *, num_peers: int, max_slots: int) -> list[VirtualPeer]:
    """Run peers to the run's end; return them."""
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers})})
    world = World(run.model.num_experts)
    peers = [make_peer(run, max_slots, world) for _ in range(num_peers)]
    run_peers(peers)
    for peer in peers:
        assert len(peer.reports) == run.round.total, "a peer did not finish"
    return peers
