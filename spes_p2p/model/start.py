"""Starts a run from a Hugging Face checkpoint: its settings, and its weights slot by slot.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor
from transformers import PretrainedConfig
from transformers.masking_utils import create_causal_mask
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from spes_p2p.config import FAMILIES, MAX_START_SLOTS, ModelConfig, RopeConfig, RunConfig, StartConfig
from spes_p2p.config.checkpoint import Generation
from spes_p2p.errors import ConfigError, DataError, one_line
from spes_p2p.model.build import hf_config, model_class, own_settings, tensor_counts
from spes_p2p.model.export import GENERATION, IN_MEMORY
from spes_p2p.model.frozen import GATE_UP
from spes_p2p.model.safetensor_files import SafetensorFiles, read_config
from spes_p2p.model.slot_model import SlotModel

NO_DIGEST = "0" * 64
"""Stands in a `StartConfig` until the weights have been read."""
OWN_LOSSES = frozenset({"output_router_logits"})
"""Settings of the stock losses, which the run's own replace."""
TRAINED_SEQUENCE = 1_024
"""Tokens of a sequence of a run over a checkpoint: conversations of several turns are whole in it."""


def over_checkpoint(run: RunConfig, source: Path) -> RunConfig:
    """Return a run with the model of a checkpoint; unless chosen, its sequences have TRAINED_SEQUENCE tokens, or fewer
    where the model allows no more.

    Raises:
        ConfigError: the run has a model of its own, or cannot have this one.
        DataError: the checkpoint cannot be read.
    """
    if run.model != ModelConfig():
        raise ConfigError("the checkpoint gives the model's shape; drop run.model, or --from")
    data, model = run.data, model_of(source)
    assert model.start is not None
    if "sequence_length" not in data.model_fields_set:
        longest = min(TRAINED_SEQUENCE, model.start.max_position_embeddings)
        data = data.model_copy(update={"sequence_length": longest})
    return run.model_copy(update={"model": model, "data": data})


def model_of(source: Path) -> ModelConfig:
    """Return the settings of the model that a checkpoint holds, without its digests.

    Nothing that the stock model reads of the checkpoint's configuration is lost: what a run cannot express is refused
    by name. Other keys do not count.

    Raises:
        ConfigError: a run cannot train such a model.
        DataError: config.json is missing or damaged.
    """
    config = read_config(source)
    check_family(source, config, FAMILIES)
    family = FAMILIES[config.model_type]
    rope: dict[str, Any] = {"rope_theta": 1e4} if family.is_carried else config.rope_parameters or {}
    num_experts = 0 if family.is_dense else getattr(config, family.num_experts)
    if num_experts > MAX_START_SLOTS:
        raise ConfigError(
            f"{source} has {num_experts} experts per layer, and a run has {MAX_START_SLOTS} slots at most; give "
            f"--from a checkpoint with fewer experts"
        )
    fields = effective(config)
    try:
        start = StartConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            head_dim=getattr(config, "head_dim", None),
            dense_intermediate_size=config.intermediate_size if "dense_intermediate_size" in family.settings else None,
            attention_bias=fields.get("attention_bias") or False,
            clip_qkv=fields.get("clip_qkv"),
            initializer_range=config.initializer_range,
            rope=RopeConfig(**{key: value for key, value in rope.items() if key in RopeConfig.model_fields}),
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
            router_aux_loss_coef=getattr(config, "router_aux_loss_coef", None) or None,
            shared=NO_DIGEST,
            slots=[NO_DIGEST] * num_experts,
            kept=[NO_DIGEST] * num_experts,
            generation=_generation(source),
            **(_carried(source, config, fields) if family.is_carried else {}),
        )
        model = ModelConfig(
            family=config.model_type,
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            intermediate_size=fields[family.inner_size],
            num_experts=num_experts,
            top_k=0 if family.is_dense else config.num_experts_per_tok,
            norm_topk_prob=bool(fields.get("norm_topk_prob", True)),
            tie_embeddings=config.tie_word_embeddings,
            rope_theta=rope["rope_theta"],
            norm_eps=config.rms_norm_eps,
            start=start,
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{source}: config.json has settings that no run can have: {one_line(error)}; give --from another "
            f"checkpoint"
        ) from error
    _check_lossless(source, config, model)
    return model


def _check_lossless(source: Path, config: PretrainedConfig, model: ModelConfig) -> None:
    """Raise ConfigError if a run's model differs from a checkpoint's in a setting that the stock model reads."""
    fields = effective(config)
    built = hf_config(model, config.vocab_size, 1)
    after = effective(built)
    for name in sorted(fields.keys() - OWN_LOSSES):
        if fields[name] != after[name]:
            raise ConfigError(
                f"{source}: config.json sets {name}={getattr(config, name)!r}, where a run has "
                f"{getattr(built, name, None)!r}; give --from a checkpoint that agrees"
            )


def _carried(source: Path, config: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration that the manifest carries, and the tensors of its model.

    Raises:
        ConfigError: no run trains such a model.
    """
    for name, value in fields.items():
        if value and (name.endswith(("dropout", "pdrop")) or name == "use_bidirectional_attention"):
            raise ConfigError(f"{source}: config.json sets {name}={value!r}, which no run has; give --from another")
    with torch.device("meta"):
        module = model_class(config.model_type)(copy.deepcopy(config))
    return {"config": fields, "tensors": tensor_counts(module)}


def _generation(source: Path) -> dict[str, Any]:
    """Return what a checkpoint's generation_config.json sets to plain values."""
    try:
        fields = dict(json.loads((source / GENERATION).read_bytes()))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"cannot read {source / GENERATION}: {error}; download the checkpoint again") from error
    fields.pop("transformers_version", None)
    return {name: value for name, value in fields.items() if _is_plain({name: value})}


def _is_plain(setting: dict[str, Any]) -> bool:
    try:
        return bool(TypeAdapter(Generation).validate_python(setting))
    except ValidationError:
        return False


def check_family(source: Path, config: PretrainedConfig, families: Iterable[str]) -> None:
    """Raise ConfigError if a checkpoint is not of one of these families, or has quantised weights."""
    classes = {kind: str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]) for kind in families}
    found = classes.get(config.model_type, "")
    architecture = (config.architectures or [found or f"a model of type {config.model_type!r}"])[0]
    if not found or found.lower() != architecture.lower():  # the first Llama was spelled LLaMA
        raise ConfigError(f"{source} holds {architecture}; give --from one of {', '.join(classes.values())}")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{source} holds quantised weights; give --from the checkpoint that they were made of")


@functools.cache
def _names_read(model_type: str) -> frozenset[str]:
    """Return the names of the settings that the code of a stock model reads, that of its masks included."""
    code = sys.modules[model_class(model_type).__module__]
    masks = [each for each in vars(code).values() if getattr(each, "__module__", "") == create_causal_mask.__module__]
    text = "".join(map(inspect.getsource, [code, *masks]))
    return frozenset(re.findall(r'config(?:\.|, ")([a-z]\w*)', text)) - {"rope_parameters", "layer_types"}


def effective(config: PretrainedConfig) -> dict[str, Any]:
    """Return what a stock model makes of its configuration: what its code reads, by name.

    Unset, false and zero are the same, a derived value stands for an unset one, and a window that no layer or no
    position needs is none. Position embeddings count by their frequencies.

    Raises:
        ConfigError: there are no such position embeddings.
    """
    if FAMILIES[config.model_type].is_carried:
        return {name: value for name, value in config.to_dict().items() if name in own_settings(type(config))}
    found = {name: getattr(config, name, None) or None for name in _names_read(config.model_type)}
    found = {name: value for name, value in found.items() if not callable(value)}
    found["head_dim"] = found["head_dim"] or config.hidden_size // config.num_attention_heads
    is_slid = "sliding_attention" in (getattr(config, "layer_types", None) or ["sliding_attention"])
    if not is_slid or (found.get("sliding_window") or 0) >= config.max_position_embeddings:
        found |= dict.fromkeys(found.keys() & {"sliding_window"})
    model = model_class(config.model_type)
    rotary_class = getattr(sys.modules[model.__module__], model.__name__.replace("ForCausalLM", "RotaryEmbedding"))
    try:
        rotary = rotary_class(config)
    except (ValueError, KeyError, TypeError, ArithmeticError) as error:
        raise ConfigError(
            f"{config.name_or_path}: transformers makes no positions of rope_parameters={config.rope_parameters} in "
            f"config.json ({one_line(error)}); give --from another checkpoint"
        ) from error
    return found | {"rope_parameters": (rotary.rope_type, rotary.attention_scaling, rotary.inv_freq.tolist())}


def another_checkpoint(source: Path, name: str) -> ConfigError:
    """Return the error for a checkpoint of which something has another digest than the run's."""
    return ConfigError(
        f"{source} is not the checkpoint that the run starts from: its {name} is another; drop --from, and peers send "
        f"the weights"
    )


class StartWeights:
    """A checkpoint's weights by slot.

    Experts may be stored one by one, as stock checkpoints are, or fused. Of the model shapes are read; it may be an
    `outline`.

    Raises:
        DataError: a file or tensor is missing or damaged, or has another shape than config.json says.
    """

    def __init__(self, source: Path, model: SlotModel) -> None:
        self._files = SafetensorFiles(source)
        self._files.check_tied(model.config)
        self._shapes = model.shapes()
        self._family = FAMILIES[model.config.model_type]
        for name, shape in self._shapes[None].items():
            self._files.check(self._stored(name), shape)
        for name, (num_out, num_in) in model.slot_shapes().items():
            if name in self._files:
                self._files.check(name, (model.num_slots, num_out, num_in))
                continue
            for slot in range(model.num_slots):
                parts = self._parts(name, slot)
                for part in parts:
                    self._files.check(part, (num_out // len(parts), num_in))

    def read(self, slot: int | None) -> dict[str, Tensor]:
        """Return the weights of one slot `[O, I]`, or for None the shared ones, in fp32 under the names of `SlotModel`.

        Raises:
            DataError: a value is not finite.
        """
        if slot is None:
            return {name: self._files.read(self._stored(name)).float() for name in self._shapes[None]}
        return {name: self._expert(name, slot).float() for name in self._shapes[slot]}

    def tensors(self, slot: int | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the same tensors one by one, in their stored precision.

        Raises:
            DataError: a value is not finite.
        """
        for name in self._shapes[slot]:
            yield name, self._files.read(self._stored(name)) if slot is None else self._expert(name, slot)

    def _expert(self, name: str, slot: int) -> Tensor:
        if name in self._files:
            return self._files.read(name, slot)
        return torch.cat([self._files.read(part) for part in self._parts(name, slot)])

    def _stored(self, name: str) -> str:
        return name.replace(f".{IN_MEMORY}.", f".{self._family.block}.")

    def _parts(self, name: str, slot: int) -> list[str]:
        """Return the stored matrices that a fused one consists of, top to bottom."""
        prefix, _, kind = self._stored(name).rpartition(".")
        gate, up, down = self._family.matrices
        return [f"{prefix}.{slot}.{matrix}.weight" for matrix in ((gate, up) if kind == GATE_UP else (down,))]
