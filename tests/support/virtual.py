"""Virtual peers for tests: the real trainer, rounds and anchors over an in-memory swarm, one thread each."""

from __future__ import annotations

import threading

import torch

from spes_p2p.config import DataConfig, ModelConfig, RoundConfig, RunConfig, TrainConfig
from spes_p2p.model.build import build_slot_model, stock_model
from spes_p2p.swarm.identity import Identity
from spes_p2p.swarm.memory import MemoryHub, MemorySwarm
from spes_p2p.training.anchors import Anchors, initial_bundles
from spes_p2p.training.holdings import Holdings
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.rounds import Rounds
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

VOCAB = 64


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
    """A run of a tiny model, in mode `steps` unless changed."""
    model = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}
    fields = {
        "model": ModelConfig(**model, num_experts=4, top_k=2),
        "data": DataConfig(sequence_length=16, vocab_size=VOCAB),
        "train": TrainConfig(batch_size=4, lr=1e-2),
        "round": RoundConfig(mode="steps", steps=3, total=3, min_peers=2, max_seconds=60, exchange_seconds=20),
        "frozen_storage": "fp32",
    }
    return RunConfig(**(fields | changes))


class VirtualPeer:
    """One peer with its own model, optimizer and data, meeting others in a hub."""

    def __init__(self, run: RunConfig, swarm, *, index: int, max_slots: int, run_id: str = "run") -> None:
        self.config, self.swarm, self.index = run, swarm, index
        model = build_slot_model(
            run.model, vocab_size=VOCAB, sequence_length=16, seed=run.seed, claimed=(), storage=run.frozen_storage
        )
        group = ProcessGroup("cpu")
        self.trainer = Trainer(model, run.train, RandomTokens(index, 16), group)
        self.anchors = Anchors(run.outer, {kind: layout.numel for kind, layout in self.trainer.layouts.items()})
        self.holdings = Holdings(swarm, run, run_id=run_id, anchors=self.anchors, max_slots=max_slots)
        self.sync = Synchroniser(
            swarm, run, holdings=self.holdings, anchors=self.anchors, layout=self.trainer.layouts["slot"]
        )
        self.rounds = Rounds(run, self.trainer, group, self.sync)
        self._initial = self.initial()  # here, not in the peer's thread: threads share the random generator
        self.reports: list = []
        self.error: BaseException | None = None

    def initial(self) -> dict[str, torch.Tensor]:
        stock = stock_model(self.config.model, VOCAB, 16, self.config.seed)
        return initial_bundles(self.anchors, self.trainer.layouts, stock.state_dict(), self.config.model.num_experts)

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots held at the end."""
        return self.trainer.slots

    def live(self) -> None:
        try:
            self.rounds.open(self._initial, None, {})
            self.rounds.run(self.reports.append)
            self.holdings.leave()
        except BaseException as error:
            self.error = error
            raise


def run_virtual(run: RunConfig, tmp_path, *, num_peers: int, max_slots: int) -> list[VirtualPeer]:
    """Run peers to the run's end; return them."""
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers})})
    hub = MemoryHub("run", matchmaking_seconds=10.0)
    peers = [
        VirtualPeer(run, MemorySwarm(hub, Identity(tmp_path / f"key{i}")), index=i, max_slots=max_slots)
        for i in range(num_peers)
    ]
    threads = [threading.Thread(target=peer.live, daemon=True) for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    for peer in peers:
        assert peer.error is None, peer.error
        assert len(peer.reports) == run.round.total, "a peer did not finish"
    return peers
