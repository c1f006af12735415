"""Folders as peers leave them, with models that differ from round to round."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import Layout, digest, to_bytes
from spes_p2p.config import DataConfig, KeptRounds, ModelConfig, OuterConfig, RunConfig
from spes_p2p.data.tokenizer import tokenizer_bytes, train_bpe
from spes_p2p.model.build import outline, stock_model
from spes_p2p.swarm.exchange.store import VersionStore
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.manifest import Manifest
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState

SLOTS, SEQUENCE = 4, 16
TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}


class PeerFolder:
    """A folder as a peer leaves it: bundles of weights and outer momentum, saved after each round.

    Args:
        folder: Its output.
        identity: Signs the versions.
        data: The run's data.
        kept: Which rounds to keep.
        shape: Changes to the model.
        run: The run, instead of one of such data and shape.
        tokenizer: Its tokenizer, instead of a small one.
    """

    def __init__(
        self,
        folder: Path,
        identity: Identity,
        data: DataConfig | None = None,
        kept: KeptRounds | None = None,
        shape: Mapping[str, int] = TINY,
        run: RunConfig | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.folder, self.identity = folder, identity
        self.store = VersionStore(folder / "versions")
        self.checkpoint = PeerCheckpoint(folder, kept)
        tokenizer = tokenizer or train_bpe([f"{number} plus {number} is known" for number in range(50)], 300)
        self.run = run or RunConfig(
            model=ModelConfig(**{**TINY, "num_experts": SLOTS, "top_k": 2} | dict(shape)),
            data=data or DataConfig(source="files", sequence_length=SEQUENCE),
            outer=OuterConfig(optimizer="nesterov"),
        )
        document = tokenizer_bytes(tokenizer)
        self.vocab_size = len(tokenizer)
        manifest = Manifest(
            run_id="run",
            founder=identity.peer_id,
            software="test",
            config=self.run,
            vocab_size=self.vocab_size,
            tokenizer_digest=digest(document),
            tokenizer_bytes=len(document),
        )
        self.add(0, {"manifest": manifest.encode(), "tokenizer": document})
        bare = outline(self.run.model, self.vocab_size, self.run.data.sequence_length)
        self.shared, self.slot = Layout(bare.shared_shapes()), Layout(bare.slot_shapes())

    def add(self, round: int, data: Mapping[str, bytes]) -> None:
        self.store.add({n: (Version.of(n, round, d), d) for n, d in data.items()})

    def publish(self, round: int, slots: range | list[int] = range(SLOTS), *, shared: bool = True) -> PreTrainedModel:
        """Publish a model of its own for each round, of which slots outside `slots` stay as they were."""
        model = stock_model(self.run.model, self.vocab_size, SEQUENCE, 100 + round)
        state = model.state_dict()
        flats = {"shared": self.shared.flatten({name: state[name] for name in self.shared.shapes})} if shared else {}
        for slot in slots:
            flats[f"slot-{slot}"] = self.slot.flatten({name: state[name][slot] for name in self.slot.shapes})
        bundles = {name: torch.cat([flat, torch.ones_like(flat)]) for name, flat in flats.items()}
        self.add(round, {name: bytes(to_bytes(bundle)) for name, bundle in bundles.items()})
        return model

    def round_off(self, slot: int, round: int) -> PreTrainedModel:
        """Keep only the kept form of a slot's version of a round; return a model whose slot has the rounded weights."""
        assert self.run.kept_form is not None
        form, model = (
            KeptForm(self.run.kept_form, self.slot.numel),
            stock_model(self.run.model, self.vocab_size, SEQUENCE, 100 + round),
        )
        state = model.state_dict()
        data = form.encode(self.slot.flatten({name: state[name][slot] for name in self.slot.shapes}))
        version = self.store.find(f"slot-{slot}")
        while version is not None:
            self.store.delete(version)
            version = self.store.find(f"slot-{slot}")
        self.add(round, {f"kept-slot-{slot}": data.numpy().tobytes()})
        for name, rounded in self.slot.unflatten(form.values(data)).items():
            state[name][slot] = rounded
        return model

    def save(self, round: int, slots: range | list[int] = range(SLOTS)) -> PreTrainedModel:
        model = self.publish(round, slots)
        versions = tuple(self.store.newest().values())
        self.checkpoint.save(PeerState("run", round, (0,), 10 * round, 1234 * round, {}, versions), {})
        assert self.checkpoint.wait(60)
        return model


def assert_same(
    checkpoint: Path, expected: PreTrainedModel, stale: Mapping[int, PreTrainedModel] | None = None
) -> None:
    """Fail unless stock transformers load `expected`, with the slots of other models instead of its own."""
    loaded, info = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    wanted = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    for slot, other in (stale or {}).items():
        for name in (name for name in wanted if ".experts." in name):
            wanted[name][slot] = other.state_dict()[name][slot]
    assert loaded.state_dict().keys() == wanted.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, wanted[name]), name
