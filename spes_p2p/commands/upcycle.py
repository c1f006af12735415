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

from spes_p2p.config.commands import UpcycleConfig, UpcycleSettings
from spes_p2p.errors import ConfigError
from spes_p2p.model.export import MATRICES, ON_DISK, Shards, written_folder
from spes_p2p.model.safetensor_files import HEAD, SafetensorFiles, read_config
from spes_p2p.model.start import check_family, effective
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say

KEPT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
"""Files that are copied, beside the weights and what describes them: tokenizer, templates, settings of generation."""


@dataclass(frozen=True)
class Family:
    """A dense architecture, and the mixture that it becomes.

    Attributes:
        dense: Class of the dense model.
        mixture: Class of the mixture.
        model_type: Its model type.
        configure: Makes the mixture's configuration from the dense one, the number of experts and `top_k`.
    """

    dense: str
    mixture: str
    model_type: str
    configure: Callable[[PretrainedConfig, int, int], PretrainedConfig]


def _qwen3_moe_config(dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
    return Qwen3MoeConfig(
        **_kept_fields(dense, Qwen3MoeConfig) | {"use_sliding_window": False},
        num_experts=num_experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        moe_intermediate_size=dense.intermediate_size,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    )


def _mixtral_config(dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
    # Mixtral always normalises the chosen experts' weights.
    kept = _kept_fields(dense, MixtralConfig) | {"sliding_window": None}  # which Llama does not read
    return MixtralConfig(**kept, num_local_experts=num_experts, num_experts_per_tok=top_k)


def _kept_fields(dense: PretrainedConfig, mixture: type[PretrainedConfig]) -> dict[str, Any]:
    """Return the dense model's settings that the mixture has too."""
    fields, own = dense.to_dict(), {"model_type", "architectures", "transformers_version", "layer_types"}
    return {name: fields[name] for name in (vars(mixture()).keys() | {"head_dim"}) & fields.keys() - own}


@functools.cache
def families() -> dict[str, Family]:
    """Return the families by the dense model's type."""
    qwen3 = Family(
        dense="Qwen3ForCausalLM",
        mixture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        configure=_qwen3_moe_config,
    )
    llama = Family(
        dense="LlamaForCausalLM",
        mixture="MixtralForCausalLM",
        model_type="mixtral",
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
    check_family(settings.source, dense, {kind: family.dense for kind, family in families().items()})
    family = families()[dense.model_type]
    config = family.configure(dense, settings.num_experts, settings.top_k)
    after = effective(config)
    for name, value in effective(dense).items():
        if value and value != after.get(name):
            raise ConfigError(
                f"{settings.source} has {name}={getattr(dense, name)}, which {family.mixture} cannot express; give "
                f"--from a checkpoint without"
            )
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
            for path in (path for pattern in KEPT_FILES for path in settings.source.glob(pattern)):
                if path.name != "config.json" and not path.name.endswith(".index.json"):
                    copy = scratch / path.relative_to(settings.source)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
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
