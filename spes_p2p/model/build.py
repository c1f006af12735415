"""Builds a stock Hugging Face model, and one with expert banks, from a run's ModelConfig.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
)

from spes_p2p.config import TARGETS, ModelConfig, StartConfig, TensorCount
from spes_p2p.errors import ConfigError, one_line
from spes_p2p.model.bank import ExpertBank, is_stock_experts
from spes_p2p.model.frozen import WEIGHT_NAMES, FrozenStore
from spes_p2p.model.kernels import choose_kernel, kernel_named
from spes_p2p.model.slot_model import SlotModel

CUT_OFF_ROWS = 256
"""Rows of a matrix whose large weights are drawn again at a time: about what a processor's cache holds."""


class _Drawing:
    """Draws a model's initial weights as stock does, each tensor and each expert's matrix from a seed of its own.

    Any peer can therefore draw any tensor alone. A cutoff gives truncated normal distributions: what lies beyond it is
    drawn again. The caller's random state does not change.

    Source: the distributions are transformers'; `init_cutoff_factor` of OLMo and SPES cuts by the inverse of the
    distribution function.

    Args:
        cutoff: Standard deviations beyond which a weight is drawn again, at least 1, so that few rounds of draws are
            needed; None draws none again.
    """

    def __init__(self, module: PreTrainedModel, seed: int, cutoff: float | None) -> None:
        self._module = module
        self._seed = seed
        self._cutoff = cutoff

    def outside_experts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules that have tensors of their own, other than experts modules and tied ones, by name."""
        tied = set(self._module.all_tied_weights_keys)
        for name, child in self._module.named_modules():
            tensors = [*child.named_parameters(recurse=False), *child.named_buffers(recurse=False)]
            is_tied = tied.issuperset(f"{name}.{key}" for key, _ in tensors)  # also where there is nothing to draw
            if not is_tied and not is_stock_experts(child):
                yield name, child

    def draw(self, name: str, child: nn.Module) -> None:
        """Draw the tensors of a module outside the experts, on the CPU."""
        child.to_empty(device="cpu", recurse=False)
        with self._random_state_of(name):
            self._module._init_weights(child)
            for weight in child.parameters(recurse=False):
                self._cut_off(weight)

    def draw_expert(self, name: str, experts: nn.Module, key: str, slot: int, weight_1OI: nn.Parameter) -> Tensor:
        """Draw one matrix `key` of an experts module on the meta device into `weight_1OI`; return it as `[O, I]`."""
        on_meta_EOI = getattr(experts, key)
        setattr(experts, key, weight_1OI)
        with self._random_state_of(f"{name}.{key}.{slot}"):
            self._module._init_weights(experts)
            self._cut_off(weight_1OI[0])
        setattr(experts, key, on_meta_EOI)
        return weight_1OI.detach()[0]

    def _cut_off(self, weight: Tensor) -> None:
        """Draw in place what is too large in a matrix; vectors stay."""
        if self._cutoff is None or weight.ndim != 2:
            return
        std = self._module.config.initializer_range
        for rows_RI in weight.detach().split(CUT_OFF_ROWS):
            beyond_N = (rows_RI.abs() > std * self._cutoff).flatten().nonzero()[:, 0]
            drawn_N = torch.full((len(beyond_N),), math.inf)
            while num_beyond := int((is_beyond_N := drawn_N.abs() > std * self._cutoff).sum()):
                drawn_N[is_beyond_N] = torch.normal(0.0, std, (num_beyond,))
            rows_RI.view(-1)[beyond_N] = drawn_N

    @contextlib.contextmanager
    def _random_state_of(self, name: str) -> Iterator[None]:
        """Within the block, draw from the seed of a tensor."""
        digest = hashlib.sha256(f"{self._seed} {name}".encode()).digest()
        generator = torch.random.default_generator
        outer = generator.get_state()
        generator.manual_seed(int.from_bytes(digest[:8], "little"))
        try:
            yield
        finally:
            generator.set_state(outer)


def initialise(
    module: PreTrainedModel, seed: int, banks: Mapping[str, ExpertBank] | None = None, cutoff: float | None = None
) -> None:
    """Give a model on the meta device its initial weights, on the CPU.

    Equal seeds give equal weights, with banks or without. The caller's random state does not change.

    Args:
        banks: Banks that receive the weights of the experts modules of these names; those modules stay on the meta
            device.
        cutoff: Standard deviations beyond which a weight is drawn again; None draws none again.
    """
    drawing = _Drawing(module, seed, cutoff)
    for name, child in drawing.outside_experts():
        drawing.draw(name, child)
    for name, experts in _stock_experts(module).items():
        fused = {key: torch.empty(getattr(experts, key).shape) for key in WEIGHT_NAMES} if not banks else {}
        for key in WEIGHT_NAMES:
            num_experts, *shape = getattr(experts, key).shape
            weight_1OI = nn.Parameter(torch.empty(1, *shape))  # reused: freed tensors would fragment the heap
            for slot in range(num_experts):
                weight_OI = drawing.draw_expert(name, experts, key, slot, weight_1OI)
                if banks:
                    banks[name].load(slot, {key: weight_OI})
                else:
                    fused[key][slot] = weight_OI
        for key, weight_EOI in fused.items():
            setattr(experts, key, nn.Parameter(weight_EOI))
    module.tie_weights(recompute_mapping=False)


def _stock_experts(module: nn.Module) -> dict[str, nn.Module]:
    return {name: child for name, child in module.named_modules() if is_stock_experts(child)}


class InitialWeights:
    """A model's initial weights by slot, drawn when they are asked for, equal to those of `stock_model`."""

    def __init__(self, model: ModelConfig, vocab_size: int, sequence_length: int, seed: int) -> None:
        self._module = meta_model(model, vocab_size, sequence_length)
        self._drawing = _Drawing(self._module, seed, model.init_cutoff)

    def read(self, slot: int | None) -> dict[str, Tensor]:
        """Return the weights of one slot `[O, I]`, or for None the shared ones, under the names of `SlotModel`."""
        if slot is None:
            return self._shared()
        drawn: dict[str, Tensor] = {}
        for name, experts in _stock_experts(self._module).items():
            for key in WEIGHT_NAMES:
                weight_1OI = nn.Parameter(torch.empty(1, *getattr(experts, key).shape[1:]))
                drawn[f"{name}.{key}"] = self._drawing.draw_expert(name, experts, key, slot, weight_1OI)
        return drawn

    def _shared(self) -> dict[str, Tensor]:
        drawn: dict[str, Tensor] = {}
        for name, child in self._drawing.outside_experts():
            self._drawing.draw(name, child)
            drawn |= {f"{name}.{key}": weight.detach() for key, weight in child.named_parameters(recurse=False)}
            child.to_empty(device="meta", recurse=False)
        return drawn


def draw_buffers(module: PreTrainedModel) -> None:
    """Bring the buffers of a model on the meta device to the CPU: those of rotary embeddings."""
    drawing = _Drawing(module, 0, None)
    for name, child in drawing.outside_experts():
        if not any(True for _ in child.parameters(recurse=False)):
            drawing.draw(name, child)


def _leave_undrawn(module: PreTrainedModel) -> None:
    """Bring a model on the meta device to the CPU with NaN for weights, so that one that is never loaded shows."""
    drawing = _Drawing(module, 0, None)
    for name, child in drawing.outside_experts():
        if any(True for _ in child.buffers(recurse=False)):
            drawing.draw(name, child)
        else:
            child.to_empty(device="cpu", recurse=False)
        for weight in child.parameters(recurse=False):
            nn.init.constant_(weight, math.nan)
    module.tie_weights(recompute_mapping=False)


def config_class(family: str) -> type[PretrainedConfig]:
    """Return the stock configuration of a family."""
    return CONFIG_MAPPING[family]


def model_class(family: str) -> type[PreTrainedModel]:
    """Return the stock model of a family."""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[config_class(family)]
    return found


OPTIONAL = frozenset({"head_dim", "attention_bias", "clip_qkv", "norm_topk_prob"})
"""Settings that only some families' configurations have."""
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
    if model.stock.is_carried:
        return _carried_config(model, vocab_size, sequence_length)
    fields: dict[str, Any] = {
        "vocab_size": model.embedding_rows(vocab_size),
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": sequence_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    if model.norm_eps is not None:
        fields["rms_norm_eps"] = model.norm_eps
    if not model.is_dense:
        fields |= {
            model.stock.num_experts: model.num_experts,
            "num_experts_per_tok": model.top_k,
            "norm_topk_prob": model.norm_topk_prob,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.0,
        }
    fields |= {model.stock.inner_size: model.intermediate_size, "head_dim": model.head_dim, **model.stock.fixed}
    if model.start is not None:
        fields |= _start_fields(model, model.start, vocab_size, sequence_length)
    for name in OPTIONAL - model.stock.settings:
        fields.pop(name, None)
    return config_class(model.family)(**fields)


def own_settings(kind: type[PretrainedConfig]) -> set[str]:
    """Return the names of the settings that a stock configuration has itself.

    What all models of transformers share is not among them: it names kernels and code that would be downloaded.
    """
    own = kind.__mro__[: kind.__mro__.index(PretrainedConfig)]
    return {"head_dim"}.union(*(vars(each).get("__annotations__", ()) for each in own))


def _carried_config(model: ModelConfig, vocab_size: int, sequence_length: int) -> PretrainedConfig:
    """Return the configuration that a manifest carries, in which the run's bounded settings count."""
    assert model.start is not None
    start, kind = model.start, config_class(model.family)
    _check_room(start, vocab_size, sequence_length)
    if foreign := start.config.keys() - own_settings(kind):  # guard: never
        raise ConfigError(f"the run's model has settings that {kind.__name__} lacks: {min(foreign)}; leave this run")
    bounded: dict[str, Any] = {
        "vocab_size": start.vocab_size,
        "hidden_size": model.hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "intermediate_size": model.intermediate_size,
        "max_position_embeddings": start.max_position_embeddings,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "bos_token_id": start.bos_token_id,
        "eos_token_id": start.eos_token_id,
        "pad_token_id": start.pad_token_id,
    }
    bounded |= {"head_dim": start.head_dim} if start.head_dim is not None else {}
    try:
        return kind(**{**start.config, **bounded}, dtype="float32")
    except Exception as error:  # transformers checks values by rules and with errors of its own
        raise ConfigError(f"the checkpoint's settings make no {kind.__name__}: {one_line(error)}") from error


def tensor_counts(module: PreTrainedModel) -> list[TensorCount]:
    """Count the tensors of a model that has no slots, tied ones once; it may be on the meta device."""
    found: Counter[tuple[str, tuple[int, ...]]] = Counter()
    tables = (module.get_input_embeddings(), module.get_output_embeddings())
    for name, parameter in module.named_parameters():
        prefix, _, key = name.rpartition(".")
        owner = module.get_submodule(prefix)
        kind = "table" if owner in tables else "vector"
        if isinstance(owner, nn.Linear) and kind == "vector" and key == "weight":
            kind = TARGETS[prefix.rpartition(".")[2]]
        found[kind, tuple(parameter.shape)] += 1
    counts = [{"kind": kind, "shape": shape, "count": count} for (kind, shape), count in sorted(found.items())]
    return [TensorCount.model_validate(each) for each in counts]


def _check_room(start: StartConfig, vocab_size: int, sequence_length: int) -> None:
    """Raise ConfigError if a checkpoint has too few rows or positions for a run."""
    if vocab_size > start.vocab_size:  # guard: never
        raise ConfigError(
            f"the tokenizer has {vocab_size} entries, and the checkpoint's embedding {start.vocab_size} rows; set "
            f"data.tokenizer to the checkpoint's"
        )
    if sequence_length > start.max_position_embeddings:
        raise ConfigError(
            f"data.sequence_length={sequence_length} exceeds the {start.max_position_embeddings} positions of the "
            f"checkpoint; set it to that or less"
        )


def _start_fields(model: ModelConfig, start: StartConfig, vocab_size: int, sequence_length: int) -> dict[str, Any]:
    """Return the fields of the checkpoint that a run starts from."""
    _check_room(start, vocab_size, sequence_length)
    fields: dict[str, Any] = {
        "max_position_embeddings": start.max_position_embeddings,
        "rope_parameters": start.rope.model_dump(exclude_none=True) | {"rope_theta": model.rope_theta},
        "initializer_range": start.initializer_range,
        "pad_token_id": start.pad_token_id,
        "bos_token_id": start.bos_token_id,
        "eos_token_id": start.eos_token_id,
        "attention_bias": start.attention_bias,
        "clip_qkv": start.clip_qkv,
    }
    if not model.is_dense:
        fields["router_aux_loss_coef"] = start.router_aux_loss_coef or 0.0
    if start.dense_intermediate_size is not None:
        fields["intermediate_size"] = start.dense_intermediate_size
    return fields


def stock_model(model: ModelConfig, vocab_size: int, sequence_length: int, seed: int) -> PreTrainedModel:
    """Build the stock model with its initial weights; equal seeds give the weights of `build_slot_model`.

    The caller's random state does not change.
    """
    module = meta_model(model, vocab_size, sequence_length)
    initialise(module, seed, cutoff=model.init_cutoff)
    return module


def build_slot_model(
    model: ModelConfig,
    *,
    vocab_size: int,
    sequence_length: int,
    seed: int | None,
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
        seed: Seed of the initial weights; equal seeds give equal weights for any `claimed`. None draws none: `shared`
            and every slot must be loaded before the model is used.
        claimed: Slots to train; may be empty, or all.
        storage: Precision of the frozen slots.
        device: Device that the model will run on, for the choice of the kernel; by default a CUDA device if one exists.

    Raises:
        ConfigError: a claimed slot lies outside the model or is listed twice, or `storage`, `kernel` or `attention` is
            unknown or cannot be used here.
    """
    _check_claimed(model, claimed)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    check_attention(attention, target)
    module = meta_model(model, vocab_size, sequence_length, attention)
    banks = _banks(module, claimed, storage, kernel, target)
    if seed is None:
        _leave_undrawn(module)
    else:
        initialise(module, seed, banks, model.init_cutoff)
    return _with_banks(module, banks)


def outline(model: ModelConfig, vocab_size: int, sequence_length: int) -> SlotModel:
    """Return the model on the meta device: its configuration, names and shapes, without a single weight."""
    module = meta_model(model, vocab_size, sequence_length)
    return _with_banks(module, _banks(module, (), "fp32", "loop", torch.device("cpu")))


def _banks(
    module: PreTrainedModel, claimed: Sequence[int], storage: str, kernel: str, target: torch.device
) -> dict[str, ExpertBank]:
    """Return an empty bank for each experts module, by its name; none in a dense model."""
    stock = _stock_experts(module)
    if not stock:
        return {}
    shapes = [tuple(getattr(next(iter(stock.values())), name).shape[1:]) for name in WEIGHT_NAMES]
    chosen = choose_kernel(kernel, target, shapes)
    return {name: ExpertBank(experts, claimed, storage, chosen) for name, experts in stock.items()}


def _with_banks(module: PreTrainedModel, banks: Mapping[str, ExpertBank]) -> SlotModel:
    for name, bank in banks.items():
        module.set_submodule(name, bank)
    return SlotModel(module, banks)


def check_attention(attention: str, device: torch.device) -> None:
    """Raise ConfigError if an attention kernel is unknown, or is `flash` without a GPU or its package."""
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
    """Raise ConfigError, without building, if `build_slot_model` would refuse a storage or kernel on a CPU."""
    FrozenStore(storage)
    if kernel != "auto" and not model.is_dense:
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


def meta_model(model: ModelConfig, vocab_size: int, sequence_length: int, attention: str = "sdpa") -> PreTrainedModel:
    """Return the stock model on the meta device.

    Raises:
        ConfigError: the settings of a checkpoint's rotary embedding do not go together.
    """
    config = hf_config(model, vocab_size, sequence_length)
    is_carried = model.stock.is_carried
    if not is_carried or attention != "sdpa":  # some attention is not sdpa's, such as that of gpt-oss
        config._attn_implementation = ATTENTION[attention]
    # The stock default, a grouped kernel, refuses rows that are not aligned to 16 bytes, on CPUs too.
    config._experts_implementation = "eager"
    try:
        with torch.device("meta"):
            module = model_class(model.family)(config)
    except Exception as error:  # a manifest may carry any setting
        reason = one_line(error)
        raise ConfigError(f"the checkpoint's settings make no model ({reason}); take the checkpoint's own") from error
    if is_carried and model.start is not None and tensor_counts(module) != model.start.tensors:  # guard: never
        raise ConfigError("the run's model has other tensors than its manifest says; leave this run")
    if model.start is not None and model.start.generation:
        module.generation_config = GenerationConfig(**model.start.generation)
    return module
