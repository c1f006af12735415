"""`spes upcycle`: from a dense Hugging Face checkpoint to a mixture of experts that computes the same.

Every expert is the dense MLP.

Shape legend: D model width, E experts.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from spes_p2p.config import FAMILIES, Family
from spes_p2p.config.commands import UpcycleConfig, UpcycleSettings
from spes_p2p.errors import ConfigError
from spes_p2p.model.build import config_class, model_class
from spes_p2p.model.export import Shards, written_folder
from spes_p2p.model.safetensor_files import HEAD, SafetensorFiles, read_config
from spes_p2p.model.start import check_family, effective
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say

KEPT_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "additional_chat_templates/*.jinja")
"""Files that are copied, beside the weights and what describes them: tokenizer, templates, settings of generation."""


def _mixture_config(dense: PretrainedConfig, model_type: str, num_experts: int, top_k: int) -> PretrainedConfig:
    """Return the mixture's configuration: the dense model's settings that it has too, and its own."""
    family, mixture = FAMILIES[model_type], config_class(model_type)
    fields, own = dense.to_dict(), {"model_type", "architectures", "transformers_version", "layer_types"}
    kept = {name: fields[name] for name in (vars(mixture()).keys() | {"head_dim"}) & fields.keys() - own}
    experts = {
        family.num_experts: num_experts,
        "num_experts_per_tok": top_k,
        family.inner_size: dense.intermediate_size,
    }
    if "norm_topk_prob" in family.settings:  # Mixtral always normalises the chosen experts' weights
        experts["norm_topk_prob"] = True
    return mixture(**kept | dict(family.fixed) | experts)


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
    check_family(settings.source, dense, [name for name, family in FAMILIES.items() if family.mixture])
    model_type = FAMILIES[dense.model_type].mixture
    mixture = model_class(model_type).__name__
    config = _mixture_config(dense, model_type, settings.num_experts, settings.top_k)
    after = effective(config)
    for name, value in effective(dense).items():
        if value and value != after.get(name):
            raise ConfigError(
                f"{settings.source} has {name}={getattr(dense, name)}, which {mixture} cannot express; give "
                f"--from a checkpoint without"
            )
    config.architectures = [mixture]
    target = settings.output.resolve()
    try:
        files, names = _opened(settings.source, dense)
        with written_folder(target, "config.json", None, "") as scratch:
            generator, shards = torch.Generator().manual_seed(settings.seed), Shards(scratch, 0)
            shards.add((name, files.read(name)) for name in names if not name.startswith("model.layers."))
            for layer in range(dense.num_hidden_layers):
                shards.make_room(1)  # a file for each layer, written before the next one is made
                shards.add(_layer(files, names, layer, FAMILIES[model_type], settings, generator))
            shards.close()
            config.save_pretrained(scratch)
            for path in (path for pattern in KEPT_FILES for path in settings.source.glob(pattern)):
                if path.name != "config.json" and not path.name.endswith(".index.json"):
                    copy = scratch / path.relative_to(settings.source)
                    copy.parent.mkdir(exist_ok=True)
                    shutil.copyfile(path, copy)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}; choose another --output") from error
    return mixture, shards.num_params


def _opened(source: Path, dense: PretrainedConfig) -> tuple[SafetensorFiles, tuple[str, ...]]:
    """Return a dense checkpoint's files, and the names of its tensors."""
    files = SafetensorFiles(source)
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
    matrices = ("gate_proj", "up_proj", "down_proj")
    dense = {name: files.read(f"{prefix}mlp.{name}.weight") for name in matrices}
    gate_ID = dense["gate_proj"]
    router_ED = torch.randn(settings.num_experts, gate_ID.shape[1], generator=generator) * settings.router_std
    yield f"{prefix}{family.block}.gate.weight", router_ED.to(gate_ID.dtype)
    for expert in range(settings.num_experts):
        for name, stored in zip(matrices, family.matrices, strict=True):
            weight = _with_noise(dense[name], settings, generator)
            yield f"{prefix}{family.block}.experts.{expert}.{stored}.weight", weight


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
