"""Starts a run from a Hugging Face checkpoint: its settings, and its weights slot by slot.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from spes_p2p.config import DENSE_FAMILIES, MAX_START_SLOTS, ModelConfig, RopeConfig, RunConfig, StartConfig
from spes_p2p.errors import ConfigError, one_line
from spes_p2p.model.build import FAMILIES, hf_config
from spes_p2p.model.export import IN_MEMORY, MATRICES, ON_DISK
from spes_p2p.model.frozen import GATE_UP
from spes_p2p.model.safetensor_files import SafetensorFiles, read_config
from spes_p2p.model.slot_model import SlotModel

NO_DIGEST = "0" * 64
"""Stands in a `StartConfig` until the weights have been read."""
_FREE = frozenset(
    {
        *("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache", "_name_or_path"),
        # The run's own losses replace the stock ones.
        *("output_router_logits", "router_aux_loss_coef"),
        *("max_window_layers", "sliding_window", "use_sliding_window"),  # checked apart
    }
)
"""Fields of config.json that may differ from what a run builds: they change no weight and no logit in training."""


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

    Nothing of the checkpoint's configuration is lost: a field that a run cannot express is refused by name.

    Raises:
        ConfigError: a run cannot train such a model.
        DataError: config.json is missing or damaged.
    """
    config = read_config(source)
    _check_family(source, config)
    fields = config.to_dict()
    is_mixtral, is_qwen = config.model_type == "mixtral", config.model_type == "qwen3_moe"
    is_dense, rope = config.model_type in DENSE_FAMILIES, config.rope_parameters or {}
    num_experts = 0 if is_dense else config.num_local_experts if is_mixtral else config.num_experts
    if num_experts > MAX_START_SLOTS:
        raise ConfigError(
            f"{source} has {num_experts} experts per layer, and a run has {MAX_START_SLOTS} slots at most; give "
            f"--from a checkpoint with fewer experts"
        )
    try:
        start = StartConfig(
            vocab_size=config.vocab_size,
            max_position_embeddings=config.max_position_embeddings,
            head_dim=fields.get("head_dim"),
            dense_intermediate_size=config.intermediate_size if is_qwen else None,
            attention_bias=fields.get("attention_bias") or False,
            clip_qkv=fields.get("clip_qkv"),
            initializer_range=config.initializer_range,
            rope=RopeConfig(**{key: value for key, value in rope.items() if key != "rope_theta"}),
            **{f"{name}_token_id": fields.get(f"{name}_token_id") for name in ("bos", "eos", "pad")},
            shared=NO_DIGEST,
            slots=[NO_DIGEST] * num_experts,
        )
        model = ModelConfig(
            family=config.model_type,  # type: ignore[arg-type]
            hidden_size=config.hidden_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            intermediate_size=fields["moe_intermediate_size" if is_qwen else "intermediate_size"],
            num_experts=num_experts,
            top_k=0 if is_dense else config.num_experts_per_tok,
            norm_topk_prob=fields.get("norm_topk_prob", True),
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
    _check_nothing_lost(source, config, hf_config(model, config.vocab_size, 1))
    return model


def _check_family(source: Path, config: PretrainedConfig) -> None:
    names = [cls.__name__ for _, cls in FAMILIES.values()]
    architecture = (config.architectures or ["a model without a name"])[0]
    if config.model_type not in FAMILIES or FAMILIES[config.model_type][1].__name__ != architecture:
        raise ConfigError(f"{source} holds {architecture}; give --from one of {', '.join(names)}")
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(f"{source} holds quantised weights; give --from the checkpoint that they were made of")
    window = getattr(config, "sliding_window", None)
    if window is not None and (getattr(config, "use_sliding_window", True)):
        raise ConfigError(f"{source} attends within a window of {window} tokens; give --from a checkpoint without")


def _check_nothing_lost(source: Path, stored: PretrainedConfig, built: PretrainedConfig) -> None:
    before, after = _flat(stored), _flat(built)
    for name in sorted((before.keys() | after.keys()) - _FREE):
        if before.get(name) != after.get(name):
            raise ConfigError(
                f"{source}: config.json sets {name}={before.get(name)!r}, where a run has {after.get(name)!r}; give "
                f"--from a checkpoint that agrees"
            )


def _flat(config: PretrainedConfig) -> dict[str, Any]:
    fields = config.to_dict()
    rope = {f"rope_parameters.{key}": value for key, value in (fields.pop("rope_parameters", None) or {}).items()}
    return fields | rope


class StartWeights:
    """A checkpoint's weights by slot, read from files that `stack` keeps open.

    Experts may be stored one by one, as stock checkpoints are, or fused.

    Args:
        source: Folder of the checkpoint.
        model: The model, of which shapes are read; may be an `outline`.
        stack: Closes the files.

    Raises:
        DataError: a file or tensor is missing or damaged, or has another shape than config.json says.
    """

    def __init__(self, source: Path, model: SlotModel, stack: ExitStack) -> None:
        self._files = SafetensorFiles(source, stack)
        self._files.check_tied(model.config)
        self._shapes = model.shapes()
        block, matrices = ON_DISK.get(model.config.model_type, (IN_MEMORY, MATRICES))
        self._block = block
        self._matrices = matrices
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
        return name.replace(f".{IN_MEMORY}.", f".{self._block}.")

    def _parts(self, name: str, slot: int) -> list[str]:
        """Return the stored matrices that a fused one consists of, top to bottom."""
        prefix, _, kind = self._stored(name).rpartition(".")
        gate, up, down = self._matrices
        return [f"{prefix}.{slot}.{matrix}.weight" for matrix in ((gate, up) if kind == GATE_UP else (down,))]
