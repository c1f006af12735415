from __future__ import annotations

from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spes_p2p.config import ModelConfig
from spes_p2p.errors import ConfigError
from spes_p2p.planner import ModelSize, free_memory_bytes, model_size, peer_bytes, slots_that_fit

SIZE = ModelSize(shared_params=1000, slot_params=300, num_slots=8)
VOCAB = 97


def stock_model(model: ModelConfig) -> torch.nn.Module:
    """The plain Hugging Face class of the same shapes, without memory behind it."""
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.hidden_size // model.num_heads,
        "intermediate_size": model.intermediate_size,
        "num_experts_per_tok": model.top_k,
        "tie_word_embeddings": model.tie_embeddings,
        "pad_token_id": None,
    }
    with torch.device("meta"):
        if model.family == "olmoe":
            return OlmoeForCausalLM(OlmoeConfig(**common, num_experts=model.num_experts))
        if model.family == "mixtral":
            return MixtralForCausalLM(MixtralConfig(**common, num_local_experts=model.num_experts))
        common["moe_intermediate_size"] = common.pop("intermediate_size")
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, num_experts=model.num_experts))


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["olmoe", "qwen3_moe", "mixtral"])
def test_counts_what_stock_hugging_face_builds(family: str, tied: bool, num_kv_heads: int) -> None:
    model = ModelConfig.model_validate(
        {
            "family": family,
            "tie_embeddings": tied,
            "num_kv_heads": num_kv_heads,
            "hidden_size": 48,
            "intermediate_size": 20,
            "num_layers": 3,
            "num_experts": 5,
        }
    )
    params = dict(stock_model(model).named_parameters())
    expert_params = sum(p.numel() for name, p in params.items() if ".experts." in name)
    size = model_size(model, VOCAB)
    assert size.num_slots * size.slot_params == expert_params
    assert size.shared_params == sum(p.numel() for p in params.values()) - expert_params
    assert size.total_params == sum(p.numel() for p in params.values())


def test_bytes_follow_the_formula() -> None:
    assert peer_bytes(SIZE, 2, "bf16") == 32 * 1000 + 32 * 2 * 300 + 2 * 6 * 300
    assert peer_bytes(SIZE, 2, "fp32") == 32 * 1000 + 32 * 2 * 300 + 4 * 6 * 300
    assert peer_bytes(SIZE, 8, "fp32") == peer_bytes(SIZE, 8, "bf16") == 32 * (1000 + 8 * 300)
    assert peer_bytes(SIZE, 2, "bf16", other_bytes=77) == peer_bytes(SIZE, 2, "bf16") + 77


@given(
    shared=st.integers(0, 10**12),
    slot=st.integers(1, 10**11),
    num_slots=st.integers(1, 256),
    storage=st.sampled_from(["fp32", "bf16"]),
    memory=st.integers(0, 2**44),
    other=st.integers(0, 2**36),
)
def test_claims_as_many_slots_as_fit_and_not_one_more(
    shared: int, slot: int, num_slots: int, storage: Any, memory: int, other: int
) -> None:
    size = ModelSize(shared, slot, num_slots)
    if peer_bytes(size, 1, storage, other) > memory:
        with pytest.raises(ConfigError):
            slots_that_fit(size, storage, memory, other)
        return
    claimed = slots_that_fit(size, storage, memory, other)
    assert peer_bytes(size, claimed, storage, other) <= memory
    assert claimed == num_slots or peer_bytes(size, claimed + 1, storage, other) > memory


def test_too_little_memory_says_how_much_is_missing_and_what_to_do() -> None:
    size = ModelSize(shared_params=2**26, slot_params=2**26, num_slots=1)
    assert slots_that_fit(size, "fp32", 4 * 2**30) == 1
    with pytest.raises(ConfigError, match=r"needs 4 GiB, 1 GiB more than the 3 GiB available; .*--storage bf16"):
        slots_that_fit(size, "fp32", 3 * 2**30)
    with pytest.raises(ConfigError, match="free some memory or join a run with a smaller model"):
        slots_that_fit(size, "bf16", 3 * 2**30)


def test_free_memory_is_less_than_all_memory() -> None:
    assert 0 < free_memory_bytes() < psutil.virtual_memory().total
