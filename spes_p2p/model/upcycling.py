"""From a dense Hugging Face checkpoint to a mixture of experts that computes the same: every expert is the dense MLP.

Shape legend: D model width, E experts.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, PretrainedConfig, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from spes_p2p.config import CommandConfig, Fraction, PositiveFloat, PositiveInt
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say

INDEX = "model.safetensors.index.json"
"""Where a checkpoint of several files says which tensor is in which."""


def read_config(source: Path) -> PretrainedConfig:
    """Returns a checkpoint's configuration.

    Raises:
        DataError: there is none, or it cannot be understood.
    """
    if not (source / "config.json").is_file():
        raise DataError(f"{source} is no checkpoint (no config.json); give --from a folder written by save_pretrained")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged or unknown configuration fails with types of its own
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {source / 'config.json'}: {reason}; give --from another checkpoint") from error


class DenseWeights:
    """A dense checkpoint's tensors, read one at a time.

    Args:
        source: Folder of the checkpoint.
        dense: Its configuration.
        stack: Keeps its files open.

    Raises:
        DataError: a file or tensor is missing or damaged, or a shape is not the configuration's.
    """

    def __init__(self, source: Path, dense: PretrainedConfig, stack: ExitStack) -> None:
        self._source = source
        self._files: dict[str, Any] = {}
        for file in _weight_files(source):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise DataError(f"cannot read {file}: {error}; download the checkpoint again") from error
            self._files |= dict.fromkeys(opened.keys(), opened)
        with torch.device("meta"):
            expected = AutoModelForCausalLM.from_config(dense).state_dict()
        if dense.tie_word_embeddings:
            expected.pop("lm_head.weight")
        self.names = tuple(expected)
        self.num_layers: int = dense.num_hidden_layers
        for name, tensor in expected.items():
            self._check(name, list(tensor.shape))

    def _check(self, name: str, shape: list[int]) -> None:
        found = self._files[name].get_slice(name).get_shape() if name in self._files else None
        if found != shape:
            state = "is missing" if found is None else f"has shape {found}, not {shape} as config.json says"
            raise DataError(f"{self._source}: tensor {name} {state}; give --from a whole checkpoint")

    def read(self, name: str) -> Tensor:
        """One tensor, as it is on disk.

        Raises:
            DataError: it holds NaN or infinity, or is no floating point.
        """
        tensor: Tensor = self._files[name].get_tensor(name)
        if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
            raise DataError(
                f"{self._source}: tensor {name} is not of finite floating-point numbers; give --from another checkpoint"
            )
        return tensor


def _weight_files(source: Path) -> list[Path]:
    names = ["model.safetensors"]
    if (source / INDEX).is_file():
        try:
            names = sorted(set(json.loads((source / INDEX).read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"cannot read {source / INDEX}: {error}; download the checkpoint again") from error
    for name in names:
        if Path(name).name != name or not (source / name).is_file():
            raise DataError(f"{source} lacks {name}; give --from a whole checkpoint, its weights as safetensors")
    return [source / name for name in names]


MLP = ("gate_proj", "up_proj", "down_proj")
"""The three matrices of a dense SwiGLU, by their stock names."""
KEPT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range"),
    *("rms_norm_eps", "use_cache", "tie_word_embeddings", "rope_parameters", "attention_dropout", "pad_token_id"),
    *("bos_token_id", "eos_token_id", "dtype"),
)
"""What a mixture's configuration takes over as it is."""
KEPT_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "tokenizer.model", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Files that are copied where there are any."""


class UpcycleConfig(CommandConfig):
    """A mixture of experts from a dense checkpoint: Qwen3-MoE from Qwen3, Mixtral from Llama."""

    model_config = SettingsConfigDict(
        env_prefix="SPES_UPCYCLE_", cli_prog_name="upcycle.py", cli_shortcuts={"source": "from"}
    )

    source: Path
    """Folder of the dense checkpoint, its weights as safetensors."""
    output: Path
    """Folder to write; must be empty or not exist."""
    num_experts: PositiveInt
    """Experts of every layer."""
    top_k: PositiveInt
    """Experts each token is routed to; their weights are normalised."""
    router_std: PositiveFloat = 0.02
    """Standard deviation of the routers' weights. Small but not 0: ties would send every token to the same experts."""
    noise_std: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Standard deviation of noise on the experts' weights, which makes them differ from the start."""
    noise_fraction: Fraction = 0.0
    """Share of each expert's weights that get noise."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Of routers and noise; equal seeds give equal files."""


def main(config: UpcycleConfig) -> int:
    """Upcycle a checkpoint; return the exit code."""
    written = upcycle(config)
    say(f"wrote {config.output}: {written}")
    return 0


class Family:
    """A dense architecture, and how its mixture is spelled on disk."""

    source: ClassVar[str]
    """Class of the dense model."""
    target: ClassVar[str]
    """Class of the mixture."""
    block: ClassVar[str]
    """Of a layer, the module with router and experts."""
    names: ClassVar[tuple[str, str, str]]
    """The experts' matrices, in the order of `MLP`."""
    refused: ClassVar[tuple[str, ...]]
    """Settings that the mixture cannot express."""

    @classmethod
    def mixture(cls, dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
        """The mixture's configuration."""
        raise NotImplementedError

    @classmethod
    def _kept(cls, dense: PretrainedConfig) -> dict[str, Any]:
        fields = {name: getattr(dense, name) for name in KEPT_FIELDS}
        return fields | {"output_router_logits": False, "architectures": [cls.target]}


class Qwen3(Family):
    source, target = "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
    block, names = "mlp", MLP
    refused = ("use_sliding_window",)

    @classmethod
    def mixture(cls, dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
        return Qwen3MoeConfig(
            **cls._kept(dense),
            attention_bias=dense.attention_bias,
            use_sliding_window=False,
            num_experts=num_experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
            moe_intermediate_size=dense.intermediate_size,
            decoder_sparse_step=1,
            mlp_only_layers=[],
        )


class Llama(Family):
    source, target = "LlamaForCausalLM", "MixtralForCausalLM"
    block, names = "block_sparse_moe", ("w1", "w3", "w2")
    refused = ("attention_bias", "mlp_bias")

    @classmethod
    def mixture(cls, dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
        # Mixtral always normalises the chosen experts' weights.
        return MixtralConfig(
            **cls._kept(dense), num_local_experts=num_experts, num_experts_per_tok=top_k, sliding_window=None
        )


FAMILIES: dict[str, type[Family]] = {"qwen3": Qwen3, "llama": Llama}
"""By the dense model's type."""


def upcycle(config: UpcycleConfig) -> str:
    """Writes the mixture, whole or not at all, and returns what it is in a few words.

    Since the chosen experts' weights add up to 1 and all experts are equal, the mixture's logits are the dense model's
    until training or noise makes the experts differ. No more than one layer is in memory.

    Source: Sparse Upcycling (https://arxiv.org/abs/2212.05055); SPES's `upcycling_qwen3_to_olmoe.py`, but to a target
    that keeps Qwen3's attention.

    Raises:
        ConfigError: settings that contradict each other, a dense model that no mixture here can express, or an output
            that cannot be written.
        DataError: the checkpoint is missing, damaged or of another kind.
    """
    _check_settings(config)
    dense = read_config(config.source)
    family = _check_model(dense, config.source)
    mixture = family.mixture(dense, config.num_experts, config.top_k)
    target = config.output.resolve()
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        with ExitStack() as stack:
            weights = DenseWeights(config.source, dense, stack)
            scratch.mkdir(parents=True)
            num_params = _write_weights(scratch, weights, family, config)
        mixture.save_pretrained(scratch)
        for name in KEPT_FILES:
            if (config.source / name).is_file():
                shutil.copyfile(config.source / name, scratch / name)
        if target.exists():
            target.rmdir()
        scratch.rename(target)
    except OSError as error:
        raise ConfigError(f"cannot write {target}: {error.strerror or error}; choose another --output") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return f"{family.target} with {config.num_experts} experts, {params_text(num_params)} parameters"


# ---------------------------------------------------------------------- checks


def _check_settings(config: UpcycleConfig) -> None:
    if config.top_k > config.num_experts:
        raise ConfigError(f"--top-k {config.top_k} exceeds --num-experts {config.num_experts}; lower it")
    if bool(config.noise_std) != bool(config.noise_fraction):
        raise ConfigError(
            f"--noise-std {config.noise_std:g} and --noise-fraction {config.noise_fraction:g} make no noise; "
            f"set both, or neither"
        )
    if config.output.exists() and (not config.output.is_dir() or any(config.output.iterdir())):
        raise ConfigError(f"--output {config.output} exists and is not empty; choose another folder")


def _check_model(dense: PretrainedConfig, source: Path) -> type[Family]:
    known = {family.source: family for family in FAMILIES.values()}
    architectures = list(dense.architectures or ["a model without a name"])
    family = known.get(architectures[0])
    if family is None or FAMILIES.get(dense.model_type) is not family:
        raise ConfigError(f"{source} holds {architectures[0]}; give --from one of {', '.join(known)}")
    if getattr(dense, "quantization_config", None) is not None:
        raise ConfigError(f"{source} holds quantised weights; give --from the checkpoint that they were made of")
    for setting in family.refused:
        if getattr(dense, setting, False):
            raise ConfigError(
                f"{source} has {setting}={getattr(dense, setting)}, which {family.target} cannot express; "
                f"give --from a checkpoint without"
            )
    rope = (dense.rope_parameters or {}).get("rope_type", "default")
    if rope != "default" and rope not in ROPE_INIT_FUNCTIONS:
        raise ConfigError(
            f"{source} has rope_type={rope!r}, which {family.target} cannot express; "
            f"give --from a checkpoint with one of default, {', '.join(sorted(ROPE_INIT_FUNCTIONS))}"
        )
    return family


def _write_weights(folder: Path, weights: DenseWeights, family: type[Family], config: UpcycleConfig) -> int:
    """Writes a file for every layer and one for the rest, with their index; returns the number of parameters."""
    generator = torch.Generator().manual_seed(config.seed)
    where: dict[str, str] = {}
    num_bytes = num_params = 0
    parts = [
        _rest(weights),
        *(_layer(weights, layer, family, config, generator) for layer in range(weights.num_layers)),
    ]
    for number, part in enumerate(parts, 1):
        tensors = dict(part)
        file = f"model-{number:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / file, metadata={"format": "pt"})
        where |= dict.fromkeys(tensors, file)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
        num_params += sum(tensor.numel() for tensor in tensors.values())
        del tensors  # before the next layer is made
    index = {"metadata": {"total_size": num_bytes, "total_parameters": num_params}, "weight_map": where}
    (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return num_params


def _rest(weights: DenseWeights) -> Iterator[tuple[str, Tensor]]:
    """Everything outside the layers."""
    for name in weights.names:
        if not name.startswith("model.layers."):
            yield name, weights.read(name)


def _layer(
    weights: DenseWeights, layer: int, family: type[Family], config: UpcycleConfig, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """One layer: what is not its MLP as it is, a router, and the MLP once for every expert."""
    prefix = f"model.layers.{layer}."
    for name in weights.names:
        if name.startswith(prefix) and not name.startswith(f"{prefix}mlp."):
            yield name, weights.read(name)
    dense = {name: weights.read(f"{prefix}mlp.{name}.weight") for name in MLP}
    gate_ID = dense["gate_proj"]
    router_ED = torch.randn(config.num_experts, gate_ID.shape[1], generator=generator) * config.router_std
    yield f"{prefix}{family.block}.gate.weight", router_ED.to(gate_ID.dtype)
    for expert in range(config.num_experts):
        for name, stored in zip(MLP, family.names, strict=True):
            weight = _with_noise(dense[name], config, generator)
            yield f"{prefix}{family.block}.experts.{expert}.{stored}.weight", weight


def _with_noise(weight: Tensor, config: UpcycleConfig, generator: torch.Generator) -> Tensor:
    """A copy of a matrix; where there is to be noise, on a random share of its elements."""
    if not config.noise_std:
        return weight.clone()
    chosen = torch.rand(weight.shape, generator=generator) < config.noise_fraction
    noise = torch.randn(weight.shape, generator=generator).mul_(config.noise_std)
    return (weight.float() + noise.mul_(chosen)).to(weight.dtype)
