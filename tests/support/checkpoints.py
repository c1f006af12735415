"""Small checkpoints of each architecture that a run may start from, as stock transformers makes them; a new one too."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from spes_p2p.config import FAMILIES
from spes_p2p.model.build import config_class

VOCAB, ROWS, SEQUENCE, EXPERTS = 300, 320, 24, 4
DENSE: dict[str, Any] = {
    "vocab_size": ROWS,  # more than the tokenizer's entries
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "rms_norm_eps": 3e-6,
    "bos_token_id": 3,
    "eos_token_id": 5,
    "pad_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
OWN: dict[str, dict[str, Any]] = {
    "olmoe": {"clip_qkv": 0.5, "norm_topk_prob": False, "tie_word_embeddings": False},
    "qwen3_moe": {
        "head_dim": 16,  # four heads of 16 in a model of width 32
        "attention_bias": True,
        "norm_topk_prob": True,
        "rope_parameters": YARN,
        "tie_word_embeddings": True,
    },
    "llama": {"rope_parameters": LLAMA3, "attention_bias": True, "tie_word_embeddings": False},
    **{family: {"sliding_window": 8, "query_pre_attn_scalar": 16} for family in ("gemma2", "gemma3_text")},
    "gpt_oss": {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": YARN},
    "granite": {"attention_multiplier": 0.2, "logits_scaling": 0.6, "residual_multiplier": 0.8},
    "olmo3": {"sliding_window": 8},
    "phi3": {"head_dim": 8},  # its rotary embedding knows no other
    "qwen3": {"head_dim": 16, "rope_parameters": YARN, "tie_word_embeddings": True},
}
"""Settings of some families that others lack, or that a run is to keep."""


def config_of(family: str) -> PretrainedConfig:
    stock = FAMILIES[family]
    fields = DENSE | dict(stock.fixed) | ({"head_dim": 24} if "head_dim" in stock.settings else {})
    if not stock.is_dense:
        fields |= {"num_experts_per_tok": 2, stock.num_experts: EXPERTS}
    if stock.inner_size not in DENSE:
        fields[stock.inner_size] = 40
    return config_class(family)(**fields | OWN.get(family, {}))


CONFIGS = {family: config_of(family) for family in FAMILIES}
MIXTURES = tuple(name for name, family in FAMILIES.items() if not family.is_dense)


def stock(family: str) -> PreTrainedModel:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(copy.deepcopy(CONFIGS[family]))  # saving changes a configuration
    with torch.no_grad():  # biases and norms begin at 0 and 1, where a lost one would not show
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def saved(folder: Path, family: str, **options: Any) -> Path:
    stock(family).save_pretrained(folder, **options)
    return folder


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(VOCAB, shape, generator=torch.Generator().manual_seed(1))


class Batches:
    """A token source of given batches."""

    def __init__(self, batches: list[torch.Tensor]) -> None:
        self._batches = iter(batches)

    def next_batch(self, batch_size: int) -> torch.Tensor:
        batch = next(self._batches)
        assert len(batch) == batch_size
        return batch
