"""`spes upcycle`: from a dense Hugging Face checkpoint to a mixture of experts that computes the same.

Every expert is the dense MLP.

Shape legend: D model width, E experts.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spes_p2p.config.commands import UpcycleConfig, UpcycleSettings
from spes_p2p.errors import ConfigError
from spes_p2p.model.export import MATRICES, ON_DISK, Shards, written_folder
from spes_p2p.model.safetensor_files import HEAD, SafetensorFiles, read_config
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say

KEPT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters", "attention_dropout", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "dtype"),
)
"""Fields that the mixture's configuration copies from the dense model's."""
KEPT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files that are copied if they exist."""


@dataclass(frozen=True)
class Family:
    """A dense architecture, and the mixture that it becomes.

    Attributes:
        dense: Class of the dense model.
        mixture: Class of the mixture.
        model_type: Its model type.
        refused: Settings of the dense model that the mixture cannot express.
        configure: Makes the mixture's configuration from the dense one, the number of experts and `top_k`.
    """

    dense: str
    mixture: str
    model_type: str
    refused: tuple[str, ...]
    configure: Callable[[PretrainedConfig, int, int], PretrainedConfig]


def _qwen3_moe_config(dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_kept_fields(dense),
        attention_bias=dense.attention_bias,
        use_sliding_window=False,
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        moe_intermediate_size=dense.intermediate_size,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _mixtral_config(dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
    # Mixtral always normalises the chosen experts' weights.
    return MixtralConfig(
        **_kept_fields(dense), num_local_experts=num_experts, num_experts_per_tok=top_k, sliding_window=None
    )


def _kept_fields(dense: PretrainedConfig) -> dict[str, Any]:
    return {name: getattr(dense, name) for name in KEPT_FIELDS} | {"output_router_logits": False}


@functools.cache
def families() -> dict[str, Family]:
    """Return the families by the dense model's type."""
    qwen3 = Family(
        dense="Qwen3ForCausalLM",
        mixture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        refused=("use_sliding_window",),
        configure=_qwen3_moe_config,
    )
    llama = Family(
        dense="LlamaForCausalLM",
        mixture="MixtralForCausalLM",
        model_type="mixtral",
        refused=("attention_bias", "mlp_bias"),
        configure=_mixtral_config,
    )
    return {"qwen3": qwen3, "llama": llama}


def upcycle(settings: UpcycleSettings) -> tuple[str, int]:
    """Write the mixture, whole or not at all.

    The chosen experts' weights add up to 1 and all experts are equal, so the mixture's logits are the dense model's
    until training or noise makes the experts differ. Only one layer is in memory at a time.

    Source: Sparse Upcycling (https://arxiv.org/abs/2212.05055); SPES's `upcycling_qwen3_to_olmoe.py`, but to a target
    that keeps Qwen3's attention.

    Returns:
        The mixture's architecture, and its number of parameters.

    Raises:
        ConfigError: the settings contradict each other, no mixture here can express the dense model, or the output
            cannot be written.
        DataError: the checkpoint is missing, damaged or of another kind.
    """
    _check_settings(settings)
    dense = read_config(settings.source)
    family = _family_of(dense, settings.source)
    config = family.configure(dense, settings.num_experts, settings.top_k)
    config.architectures = [family.mixture]
    target = settings.output.resolve()
    try:
        with ExitStack() as stack:
            files, names = _opened(settings.source, dense, stack)
            scratch = stack.enter_context(written_folder(target, "config.json", None, ""))
            generator, shards = torch.Generator().manual_seed(settings.seed), Shards(scratch, 0)
            shards.add((name, files.read(name)) for name in names if not name.startswith("model.layers."))
            for layer in range(dense.num_hidden_layers):
                shards.make_room(1)  # a file for each layer, written before the next one is made
                shards.add(_layer(files, names, layer, family, settings, generator))
            shards.close()
            config.save_pretrained(scratch)
            for name in KEPT_FILES:
                if (settings.source / name).is_file():
                    shutil.copyfile(settings.source / name, scratch / name)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}; choose another --output") from error
    return family.mixture, shards.num_params


def _opened(source: Path, dense: PretrainedConfig, stack: ExitStack) -> tuple[SafetensorFiles, tuple[str, ...]]:
    """Return a dense checkpoint's files, which `stack` keeps open, and the names of its tensors."""
    files = SafetensorFiles(source, stack)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(dense).state_dict()
    files.check_tied(dense)
    if dense.tie_word_embeddings:
        expected.pop(HEAD)
    for name, tensor in expected.items():
        files.check(name, tensor.shape)
    return files, tuple(expected)


def _check_settings(settings: UpcycleSettings) -> None:
    if settings.top_k > settings.num_experts:
        raise ConfigError(f"--top-k {settings.top_k} exceeds --num-experts {settings.num_experts}; lower it")
    if bool(settings.noise_std) != bool(settings.noise_fraction):
        raise ConfigError(
            f"--noise-std {settings.noise_std:g} and --noise-fraction {settings.noise_fraction:g} make no noise; "
            f"set both, or neither"
        )
    if settings.output.exists() and (not settings.output.is_dir() or any(settings.output.iterdir())):
        raise ConfigError(f"--output {settings.output} exists and is not empty; choose another folder")


def _family_of(dense: PretrainedConfig, source: Path) -> Family:
    """Look up the family of a dense model."""
    known = {family.dense: family for family in families().values()}
    architectures = list(dense.architectures or ["a model without a name"])
    family = known.get(architectures[0])
    if family is None or families().get(dense.model_type) is not family:
        raise ConfigError(f"{source} holds {architectures[0]}; give --from one of {', '.join(known)}")
    if getattr(dense, "quantization_config", None) is not None:
        raise ConfigError(f"{source} holds quantised weights; give --from the checkpoint that they were made of")
    for setting in family.refused:
        if getattr(dense, setting, False):
            raise ConfigError(
                f"{source} has {setting}={getattr(dense, setting)}, which {family.mixture} cannot express; "
                f"give --from a checkpoint without"
            )
    rope = (dense.rope_parameters or {}).get("rope_type", "default")
    if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"{source} has rope_type={rope!r}, which {family.mixture} cannot express; "
            f"give --from a checkpoint with one of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    return family


def _layer(
    files: SafetensorFiles,
    names: Sequence[str],
    layer: int,
    family: Family,
    settings: UpcycleSettings,
    generator: torch.Generator,
) -> Iterator[tuple[str, Tensor]]:
    """Yield one layer: its tensors outside the MLP, a new router, and the MLP once for each expert."""
    prefix = f"model.layers.{layer}."
    for name in names:
        if name.startswith(prefix) and not name.startswith(f"{prefix}mlp."):
            yield name, files.read(name)
    dense = {name: files.read(f"{prefix}mlp.{name}.weight") for name in MATRICES}
    block, matrices = ON_DISK[family.model_type]
    gate_ID = dense["gate_proj"]
    router_ED = torch.randn(settings.num_experts, gate_ID.shape[1], generator=generator) * settings.router_std
    yield f"{prefix}{block}.gate.weight", router_ED.to(gate_ID.dtype)
    for expert in range(settings.num_experts):
        for name, stored in zip(MATRICES, matrices, strict=True):
            weight = _with_noise(dense[name], settings, generator)
            yield f"{prefix}{block}.experts.{expert}.{stored}.weight", weight


def _with_noise(weight: Tensor, settings: UpcycleSettings, generator: torch.Generator) -> Tensor:
    """Copy a matrix, and add noise to a random share of its elements if the settings ask for noise."""
    if not settings.noise_std:
        return weight.clone()
    chosen = torch.rand(weight.shape, generator=generator) < settings.noise_fraction
    noise = torch.randn(weight.shape, generator=generator).mul_(settings.noise_std)
    return (weight.float() + noise.mul_(chosen)).to(weight.dtype)


def main(config: UpcycleConfig) -> int:
    """Upcycle a checkpoint; return the exit code.

    Raises:
        ConfigError, DataError: as `upcycle`.
    """
    architecture, num_params = upcycle(config)
    say(
        f"wrote {config.output}: {architecture} with {config.num_experts} experts, {params_text(num_params)} parameters"
    )
    return 0
