"""The stock architectures of transformers that a run may train; all that differs between them is here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Family:
    """An architecture whose layers are attention and an MLP, or a router and experts that are SwiGLUs."""

    title: str
    """Its name in plans."""
    settings: frozenset[str] = frozenset({"head_dim", "attention_bias"})
    """Settings that its configuration has and some others' lack: `head_dim`, `attention_bias`, `clip_qkv`,
    `norm_topk_prob`, and `dense_intermediate_size`, the width of layers without experts."""
    is_carried: bool = False
    """Whether a run starts from a checkpoint, whose whole configuration the manifest carries; what it trains is the
    shared part alone. Nothing else need be known of such a family."""
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
        settings=frozenset({"norm_topk_prob", "attention_bias", "clip_qkv"}),
        num_experts="num_experts",
        query_norm="whole",
    ),
    "qwen3_moe": Family(
        title="Qwen3-MoE",
        settings=frozenset({"norm_topk_prob", "attention_bias", "head_dim", "dense_intermediate_size"}),
        num_experts="num_experts",
        inner_size="moe_intermediate_size",
        fixed={"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False},
        query_norm="heads",
    ),
    "mixtral": Family(
        title="Mixtral",
        settings=frozenset({"head_dim"}),
        num_experts="num_local_experts",
        fixed={"sliding_window": None},
        block="block_sparse_moe",
        matrices=("w1", "w3", "w2"),
    ),
    "llama": Family(
        title="Llama",
        heads_divide_width=True,
        mixture="mixtral",
    ),
    "qwen3": Family(
        title="Qwen3",
        query_norm="heads",
        mixture="qwen3_moe",
    ),
    "gemma": Family(title="Gemma"),
    "gemma2": Family(title="Gemma 2", is_carried=True),
    "gemma3_text": Family(title="Gemma 3", is_carried=True),
    "gpt_oss": Family(title="gpt-oss", is_carried=True),
    "granite": Family(title="Granite", is_carried=True),
    "mistral": Family(title="Mistral", is_carried=True),
    "olmo2": Family(title="OLMo 2", is_carried=True),
    "olmo3": Family(title="OLMo 3", is_carried=True),
    "phi3": Family(title="Phi-3", is_carried=True),
    "qwen2": Family(title="Qwen2", is_carried=True),
    "smollm3": Family(title="SmolLM3", is_carried=True),
}
"""Architectures by their `model_type` in transformers."""
LOGIT_SETTINGS = ("final_logit_softcapping", "logits_scaling")
"""Settings with which a family changes the logits that the head returns, which then cannot be computed in chunks."""
TARGETS: dict[str, Literal["attention", "mlp"]] = {
    **{"q_proj": "attention", "k_proj": "attention", "v_proj": "attention", "qkv_proj": "attention"},
    **{"o_proj": "attention", "gate_proj": "mlp", "up_proj": "mlp", "gate_up_proj": "mlp", "down_proj": "mlp"},
}
"""Where linear layers belong, by the last part of their stock names."""
