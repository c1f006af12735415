"""Builds a stock Hugging Face model, and one with expert banks, from a run's ModelConfig.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from spes_p2p.config import ModelConfig, StartConfig
from spes_p2p.errors import ConfigError
from spes_p2p.model.bank import ExpertBank, is_stock_experts
from spes_p2p.model.frozen import WEIGHT_NAMES, FrozenStore
from spes_p2p.model.kernels import choose_kernel, kernel_named
from spes_p2p.model.slot_model import SlotModel

DRAW_BLOCK = 16
"""Numbers that PyTorch's `normal_` draws at a time on CPUs, in tensors of at least as many elements."""
CUT_OFF_ROWS = 4096
"""Rows of a matrix whose large weights are drawn again at a time, so that little memory is needed."""


def initialise(
    module: PreTrainedModel, seed: int, banks: Mapping[str, ExpertBank] | None = None, cutoff: float | None = None
) -> None:
    """Give a model on the meta device its stock initial weights, on the CPU.

    Equal seeds give equal weights, with banks or without. The caller's random state does not change.

    Args:
        module: The stock model.
        seed: Seed of the weights.
        banks: Banks that receive the weights of the experts modules of these names; those modules stay on the meta
            device.
        cutoff: Standard deviations beyond which a weight is drawn again; None draws none again.
    """
    banks = banks or {}
    redraw = _Redraw(module.config.initializer_range, cutoff, seed) if cutoff is not None else None
    state = torch.Generator().manual_seed(seed).get_state()
    tied = set(module.all_tied_weights_keys)
    for name, child in module.named_modules():
        tensors = (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False))
        if tied.issuperset(f"{name}.{key}" for key, _ in tensors):  # also where there is nothing to initialise
            continue
        with _drawing_from(state), torch.no_grad():
            if name in banks:
                _fill(banks[name], module, child, name, redraw)
            else:
                child.to_empty(device="cpu", recurse=False)
                module._init_weights(child)
                if redraw is not None:
                    for key, weight in child.named_parameters(recurse=False):
                        redraw(f"{name}.{key}", weight)
    module.tie_weights(recompute_mapping=False)


class _Redraw:
    """Draws weights again that lie too far from 0: the result is a truncated normal distribution.

    Each matrix, and each expert's matrix, is drawn from a generator of its own, so that experts drawn one by one equal
    those drawn at once.

    Source: `init_cutoff_factor` of OLMo and SPES, there by the inverse of the distribution function.

    Args:
        std: Standard deviation of the distribution before the cut.
        cutoff: Largest weight, in standard deviations; at least 1, so that few rounds of draws are needed.
        seed: The model's.
    """

    def __init__(self, std: float, cutoff: float, seed: int) -> None:
        self._std = std
        self._largest = std * cutoff
        self._seed = seed

    def __call__(self, name: str, weight: Tensor) -> None:
        """Draw in place what is too large in the weight `name`: a matrix, or experts' matrices; vectors stay."""
        if weight.ndim == 3:
            for slot, weight_OI in enumerate(weight):
                self.expert(name, slot, weight_OI)
        elif weight.ndim == 2:
            self._draw(name, weight)

    def expert(self, name: str, slot: int, weight_OI: Tensor) -> None:
        """Draw in place what is too large in the weight `name` of expert `slot`."""
        self._draw(f"{name}.{slot}", weight_OI)

    def _draw(self, name: str, weight_OI: Tensor) -> None:
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
        for rows_RI in weight_OI.detach().split(CUT_OFF_ROWS):
            while num_beyond := int((is_beyond_RI := rows_RI.abs() > self._largest).sum()):
                rows_RI[is_beyond_RI] = torch.normal(0.0, self._std, (num_beyond,), generator=generator)


@contextlib.contextmanager
def _drawing_from(state: Tensor) -> Iterator[None]:
    """Draw from `state` within the block, update `state`, then restore torch's CPU generator."""
    generator = torch.random.default_generator
    outer = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        state.copy_(generator.get_state())
        generator.set_state(outer)


def _fill(bank: ExpertBank, module: PreTrainedModel, experts: nn.Module, where: str, redraw: _Redraw | None) -> None:
    """Draw the weights of an experts module as stock does, and load them into a bank.

    Stock draws all experts' tensors of one name at once. Drawing one expert at a time gives the same numbers if its
    size is a multiple of `DRAW_BLOCK`, as in any useful model; otherwise all experts are drawn at once.
    """
    for name, on_meta_EOI in [(name, getattr(experts, name)) for name in WEIGHT_NAMES]:
        num_experts, *shape = on_meta_EOI.shape
        at_once = num_experts if on_meta_EOI[0].numel() % DRAW_BLOCK else 1
        drawn_EOI = nn.Parameter(torch.empty(at_once, *shape))  # reused: freed tensors would fragment the heap
        setattr(experts, name, drawn_EOI)
        for start in range(0, num_experts, at_once):
            module._init_weights(experts)
            for slot, weight_OI in enumerate(drawn_EOI.detach(), start):
                if redraw is not None:
                    redraw.expert(f"{where}.{name}", slot, weight_OI)
                bank.load(slot, {name: weight_OI})
        setattr(experts, name, on_meta_EOI)


FAMILIES: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
}


ATTENTION = {"sdpa": "sdpa", "flash": "flash_attention_2", "eager": "eager"}
"""transformers' names of attention kernels."""


def hf_config(model: ModelConfig, vocab_size: int, sequence_length: int) -> PretrainedConfig:
    """Return the stock configuration of `model`.

    Special tokens stay unset unless the run starts from a checkpoint that sets them, because the stock defaults may lie
    outside a small vocabulary. The stock balance loss stays off, because it pools the layers.

    Raises:
        ConfigError: the heads have an odd width, which rotary position embeddings cannot halve, or the tokenizer or the
            sequences are larger than the checkpoint allows.
    """
    if model.head_dim % 2:
        raise ConfigError(
            f"model.hidden_size={model.hidden_size} over model.num_heads={model.num_heads} gives heads of odd width "
            f"{model.head_dim}; choose another number of heads"
        )
    fields: dict[str, Any] = {
        "vocab_size": model.embedding_rows(vocab_size),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
        "num_experts_per_tok": model.top_k,
        "max_position_embeddings": sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.0,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    if model.norm_eps is not None:
        fields["rms_norm_eps"] = model.norm_eps
    fields |= _family_fields(model)
    if model.start is not None:
        fields |= _start_fields(model, model.start, vocab_size, sequence_length)
    return FAMILIES[model.family][0](**fields)


def _family_fields(model: ModelConfig) -> dict[str, Any]:
    """Return the fields that the families name differently."""
    if model.family == "mixtral":
        return {"num_local_experts": model.num_experts, "head_dim": model.head_dim, "sliding_window": None}
    fields: dict[str, Any] = {"num_experts": model.num_experts, "norm_topk_prob": model.norm_topk_prob}
    if model.family == "qwen3_moe":
        fields |= {
            "moe_intermediate_size": model.intermediate_size,
            "head_dim": model.head_dim,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    return fields


def _start_fields(model: ModelConfig, start: StartConfig, vocab_size: int, sequence_length: int) -> dict[str, Any]:
    """Return the fields of the checkpoint that a run starts from."""
    if vocab_size > start.vocab_size:  # guard: start-vocabulary
        raise ConfigError(
            f"the tokenizer has {vocab_size} entries, and the checkpoint's embedding {start.vocab_size} rows; set "
            f"data.tokenizer to the checkpoint's"
        )
    if sequence_length > start.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={sequence_length} exceeds the {start.max_position_embeddings} positions of the "
            f"checkpoint; set it to that or less"
        )
    fields: dict[str, Any] = {
        "max_position_embeddings": start.max_position_embeddings,
        "rope_parameters": start.rope.model_dump(exclude_none=True) | {"rope_theta": model.rope_theta},
        "initializer_range": start.initializer_range,
        "pad_token_id": start.pad_token_id,
        "bos_token_id": start.bos_token_id,
        "eos_token_id": start.eos_token_id,
    }
    if model.family != "mixtral":
        fields["attention_bias"] = start.attention_bias
    if model.family == "olmoe":
        fields["clip_qkv"] = start.clip_qkv
    if start.dense_intermediate_size is not None:
        fields["intermediate_size"] = start.dense_intermediate_size
    return fields


def stock_model(model: ModelConfig, vocab_size: int, sequence_length: int, seed: int) -> PreTrainedModel:
    """Build the stock model with stock initial weights; equal seeds give the weights of `build_slot_model`.

    The caller's random state does not change.
    """
    module = _meta_model(model, vocab_size, sequence_length)
    initialise(module, seed, cutoff=model.init_cutoff)
    return module


def build_slot_model(
    model: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    seed: int,
    claimed: Sequence[int],
    storage: str,
    kernel: str = "loop",
    attention: str = "sdpa",
    device: torch.device | str | None = None,
) -> SlotModel:
    """Build the model with an `ExpertBank` in every layer, on the CPU.

    The model is made on the meta device and filled tensor by tensor: beyond its own size, building takes less memory
    than two dense experts of one layer.

    Args:
        model: Shape of the model.
        vocab_size: Entries of the tokenizer.
        sequence_length: Longest sequence in tokens.
        seed: Seed of the initial weights; equal seeds give equal weights for any `claimed`.
        claimed: Slots to train; may be empty, or all.
        storage: Precision of the frozen slots: `fp32`, `bf16`, `int8` or `nf4`.
        kernel: Name of the expert kernel, or `auto`.
        attention: Attention kernel: `sdpa`, `flash` or `eager`.
        device: Device that the model will run on, for the choice of the kernel; by default a CUDA device if one exists.

    Raises:
        ConfigError: a claimed slot lies outside the model or is listed twice, or `storage`, `kernel` or `attention` is
            unknown or cannot be used here.
    """
    _check_claimed(model, claimed)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_attention(attention, target)
    module = _meta_model(model, vocab_size, sequence_length, attention)
    banks = _banks(module, claimed, storage, kernel, target)
    initialise(module, seed, banks, model.init_cutoff)
    return _with_banks(module, banks)


def outline(model: ModelConfig, vocab_size: int, sequence_length: int) -> SlotModel:
    """Return the model on the meta device: its configuration, names and shapes, without a single weight."""
    module = _meta_model(model, vocab_size, sequence_length)
    return _with_banks(module, _banks(module, (), "fp32", "loop", torch.device("cpu")))


def _banks(
    module: PreTrainedModel, claimed: Sequence[int], storage: str, kernel: str, target: torch.device
) -> dict[str, ExpertBank]:
    """Return an empty bank for each experts module, by its name."""
    stock = {name: child for name, child in module.named_modules() if is_stock_experts(child)}
    shapes = [tuple(getattr(next(iter(stock.values())), name).shape[1:]) for name in WEIGHT_NAMES]
    chosen = choose_kernel(kernel, target, shapes)
    return {name: ExpertBank(experts, claimed, storage, chosen) for name, experts in stock.items()}


def _with_banks(module: PreTrainedModel, banks: Mapping[str, ExpertBank]) -> SlotModel:
    for name, bank in banks.items():
        module.set_submodule(name, bank)
    return SlotModel(module, banks)


def check_attention(attention: str, device: torch.device) -> None:
    """Refuse an attention kernel that this machine cannot use.

    Raises:
        ConfigError: it is unknown, or `flash` without a GPU or its package.
    """
    if attention not in ATTENTION:
        raise ConfigError(f"unknown attention={attention}; choose from {', '.join(ATTENTION)}")
    if attention != "flash":
        return
    if device.type != "cuda":
        raise ConfigError(
            f"attention=flash needs a CUDA GPU, and this peer trains on {device.type}; set attention=sdpa"
        )
    if importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "attention=flash needs the package flash-attn, which is not installed; run "
            "pip install flash-attn --no-build-isolation, or set attention=sdpa"
        )


def check_build(model: ModelConfig, storage: str, kernel: str) -> None:
    """Refuse, without building, a storage or kernel that `build_slot_model` would refuse on a CPU.

    Raises:
        ConfigError: `storage` or `kernel` is unknown or cannot be used here.
    """
    FrozenStore(storage)
    if kernel != "auto":
        width, inner = model.hidden_size, model.intermediate_size
        kernel_named(kernel, torch.device("cpu"), [(2 * inner, width), (width, inner)])


def _check_claimed(model: ModelConfig, claimed: Sequence[int]) -> None:
    for slot in claimed:
        if not 0 <= slot < model.num_experts:
            raise ConfigError(
                f"claimed slot {slot} is not in a model with model.num_experts={model.num_experts}; "
                f"choose from 0 to {model.num_experts - 1}"
            )
    if len(set(claimed)) != len(claimed):
        raise ConfigError(f"claimed slots {list(claimed)} contain a slot twice; name each once")


def _meta_model(model: ModelConfig, vocab_size: int, sequence_length: int, attention: str = "sdpa") -> PreTrainedModel:
    config = hf_config(model, vocab_size, sequence_length)
    config._attn_implementation = ATTENTION[attention]
    # The stock default, a grouped kernel, refuses rows that are not aligned to 16 bytes, on CPUs too.
    config._experts_implementation = "eager"
    with torch.device("meta"):
        return FAMILIES[model.family][1](config)
