"""What a peer will need before anything starts: parameters, bytes, and how many slots fit.

Legend: V vocabulary, D width, I width of one expert, E experts, L layers, C claimed slots,
S shared parameters, P parameters of one slot.
"""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from spes_p2p.config import ModelConfig, Storage
from spes_p2p.errors import ConfigError

TRAINED_BYTES = 16  # per parameter, fp32: weight, gradient, AdamW's two moments
SCRATCH_BYTES = 16  # per trained parameter, fp32 on the host: the round's anchor, its delta, both moments on the way
FROZEN_BYTES: dict[Storage, int] = {"fp32": 4, "bf16": 2}  # per frozen parameter


@dataclass(frozen=True)
class ModelSize:
    """A model's parameters, split the way the swarm splits its work; the whole has S + E P."""

    shared_params: int
    """S: everything outside the experts, each tensor counted once."""
    slot_params: int
    """P: one expert of every layer."""
    num_slots: int
    """E."""

    @property
    def total_params(self) -> int:
        return self.shared_params + self.num_slots * self.slot_params


def model_size(model: ModelConfig, vocab_size: int) -> ModelSize:
    """Counts parameters from the configured shapes, without building the model.

    Args:
        model: Shapes; heads are `hidden_size / num_heads` wide in every family.
        vocab_size: Rows of the embedding.
    """
    width = model.hidden_size
    head_width = width // model.num_heads
    key_width = head_width * model.num_kv_heads
    attention = 2 * width * width + 2 * width * key_width
    # OLMoE normalises queries and keys over all heads at once, Qwen3 within each head, Mixtral not at all.
    query_key_norms = {"olmoe": width + key_width, "qwen3_moe": 2 * head_width, "mixtral": 0}[model.family]
    router = model.num_experts * width
    layer = attention + query_key_norms + router + 2 * width
    embeddings = vocab_size * width * (1 if model.tie_embeddings else 2)
    return ModelSize(
        shared_params=embeddings + model.num_layers * layer + width,
        slot_params=model.num_layers * 3 * width * model.intermediate_size,
        num_slots=model.num_experts,
    )


def peer_bytes(size: ModelSize, claimed: int, storage: Storage, other_bytes: int = 0) -> int:
    """Memory of a peer that trains `claimed` slots: `32 (S + C P) + b (E - C) P`.

    Of the 32 bytes 16 are fp32 AdamW's and 16 the round's anchor, delta and moments on their way to the others; b is
    the storage's bytes per frozen parameter. Activations are not in it. Without the second 16 the formula met the
    measured memory of a small OLMoE within 2 %.

    Args:
        size: From `model_size`.
        claimed: C, in [0, E].
        storage: Precision of the E - C frozen experts.
        other_bytes: Added as it is: what the caller knows to need for activations, data and the rest of the process.
    """
    assert 0 <= claimed <= size.num_slots, f"{claimed} of {size.num_slots} slots"
    trained = size.shared_params + claimed * size.slot_params
    frozen = (size.num_slots - claimed) * size.slot_params
    return (TRAINED_BYTES + SCRATCH_BYTES) * trained + FROZEN_BYTES[storage] * frozen + other_bytes


def slots_that_fit(size: ModelSize, storage: Storage, memory_bytes: int, other_bytes: int = 0) -> int:
    """The most slots a peer can claim within `memory_bytes`; the arguments are those of `peer_bytes`.

    Raises:
        ConfigError: Not even one slot fits.
    """
    one = peer_bytes(size, 1, storage, other_bytes)
    if one > memory_bytes:
        raise ConfigError(
            f"training one expert slot with --storage {storage} needs {_gib(one)}, "
            f"{_gib(one - memory_bytes)} more than the {_gib(memory_bytes)} available; free some memory"
            + (", use --storage bf16" if storage == "fp32" else "")
            + " or join a run with a smaller model"
        )
    per_slot = peer_bytes(size, 1, storage) - peer_bytes(size, 0, storage)
    return min(size.num_slots, 1 + (memory_bytes - one) // per_slot)


def free_memory_bytes() -> int:
    """Memory that new processes can use without swapping, as the system estimates it.

    The system's view: a container's smaller limit is not seen.
    """
    return int(psutil.virtual_memory().available)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.3g} GiB"
