"""How many parameters a model has, split the way the swarm and the optimizers split them.

Legend: V vocabulary, D width, I width of one expert, E experts, L layers, S shared parameters, P parameters of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spes_p2p.config import ModelConfig

SMALL_NUMEL = 4096
"""Tensors of fewer elements keep an optimizer's state in fp32, as bitsandbytes has it."""

Kind = Literal["table", "matrix", "vector"]


@dataclass(frozen=True)
class ModelSize:
    """A model's parameters; the whole has S + E P."""

    shared_params: int
    """S: everything outside the experts, each tensor counted once."""
    slot_params: int
    """P: one expert of every layer."""
    num_slots: int
    """E."""
    matrix_params: int = 0
    """Of the shared ones, those that Muon takes: matrices of attention and routers."""
    small_shared_params: int = 0
    """Of the shared ones, those in tensors too small for 8-bit state."""
    small_slot_params: int = 0
    """Of a slot's, those in tensors too small for 8-bit state."""
    num_layers: int = 1
    """L."""

    @property
    def total_params(self) -> int:
        return self.shared_params + self.num_slots * self.slot_params

    def trained_params(self, claimed: int) -> int:
        """Parameters that a peer with so many slots trains."""
        return self.shared_params + claimed * self.slot_params

    def frozen_params(self, claimed: int) -> int:
        """Parameters that it keeps frozen."""
        return (self.num_slots - claimed) * self.slot_params


def model_size(model: ModelConfig, vocab_size: int) -> ModelSize:
    """Counts parameters from the configured shapes, without building the model.

    Args:
        model: Shapes; heads are `hidden_size / num_heads` wide in every family.
        vocab_size: Rows of the embedding.
    """
    shared = list(_shared_tensors(model, vocab_size))
    slot = [2 * model.intermediate_size * model.hidden_size, model.intermediate_size * model.hidden_size]
    return ModelSize(
        shared_params=sum(numel * count for _, numel, count in shared),
        slot_params=model.num_layers * sum(slot),
        num_slots=model.num_experts,
        matrix_params=sum(numel * count for kind, numel, count in shared if kind == "matrix"),
        small_shared_params=sum(numel * count for _, numel, count in shared if numel < SMALL_NUMEL),
        small_slot_params=model.num_layers * sum(numel for numel in slot if numel < SMALL_NUMEL),
        num_layers=model.num_layers,
    )


def _shared_tensors(model: ModelConfig, vocab_size: int) -> Iterator[tuple[Kind, int, int]]:
    """Kind, elements and number of the tensors outside the experts."""
    width, layers = model.hidden_size, model.num_layers
    head_width = width // model.num_heads
    key_width = head_width * model.num_kv_heads
    yield "table", vocab_size * width, 1 if model.tie_embeddings else 2
    yield "matrix", width * width, 2 * layers  # queries and output
    yield "matrix", width * key_width, 2 * layers  # keys and values
    yield "matrix", model.num_experts * width, layers  # routers
    yield "vector", width, 2 * layers + 1  # norms
    # OLMoE normalises queries and keys over all heads at once, Qwen3 within each head, Mixtral not at all.
    if model.family == "olmoe":
        yield "vector", width, layers
        yield "vector", key_width, layers
    elif model.family == "qwen3_moe":
        yield "vector", head_width, 2 * layers
