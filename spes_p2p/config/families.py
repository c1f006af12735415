"""The stock architectures of transformers that a run may train; all that differs between them is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """An architecture whose layers are attention and a SwiGLU, or a router and experts that are SwiGLUs."""

    title: str
    """Its name in plans."""
    stock: str
    """The start of transformers' class names, before `Config` and `ForCausalLM`."""
    settings: frozenset[str]
    """Settings that its configuration has and some others' lack: `head_dim`, `attention_bias`, `clip_qkv`,
    `norm_topk_prob`, and `dense_intermediate_size`, the width of layers without experts."""
    num_experts: str = ""
    """Its configuration's name of the number of experts; empty in a dense model."""
    inner_size: str = "intermediate_size"
    """Its configuration's name of the inner width of an expert, or of a dense layer."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Settings of its configuration that no run changes."""
    query_norm: Literal["none", "whole", "heads"] = "none"
    """Whether queries and keys are normalised, over all heads at once or within each head."""
    heads_divide_width: bool = False
    """Whether the number of heads must divide the hidden size, whatever the width of a head."""
    block: str = "mlp"
    """Name of a layer's router and experts in stock checkpoints; in memory it is `mlp` in all families."""
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """Names of an expert's matrices in stock checkpoints."""
    mixture: str = ""
    """The family of mixtures that `spes upcycle` makes of this dense one."""

    @property
    def is_dense(self) -> bool:
        """Whether it has no experts: a run has no slots then, and peers train and average all of the model."""
        return not self.num_experts


FAMILIES: dict[str, Family] = {
    "olmoe": Family(
        title="OLMoE",
        stock="Olmoe",
        settings=frozenset({"norm_topk_prob", "attention_bias", "clip_qkv"}),
        num_experts="num_experts",
        query_norm="whole",
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        stock="Qwen3Moe",
        settings=frozenset({"norm_topk_prob", "attention_bias", "head_dim", "dense_intermediate_size"}),
        num_experts="num_experts",
        inner_size="moe_intermediate_size",
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        query_norm="heads",
    ),
    "mixtral": Family(
        title="Mixtral",
        stock="Mixtral",
        settings=frozenset({"head_dim"}),
        num_experts="num_local_experts",
        fixed={"sliding_window": None},
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    ),
    "llama": Family(
        title="Llama",
        stock="Llama",
        settings=frozenset({"head_dim", "attention_bias"}),
        heads_divide_width=True,
        mixture="mixtral",
    ),
    "qwen3": Family(
        title="Qwen3",
        stock="Qwen3",
        settings=frozenset({"head_dim", "attention_bias"}),
        query_norm="heads",
        mixture="qwen3_moe",
    ),
    "gemma": Family(title="Gemma", stock="Gemma", settings=frozenset({"head_dim", "attention_bias"})),
}
"""Architectures by their `model_type` in transformers."""
