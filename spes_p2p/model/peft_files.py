"""Adapters in peft's layout: read to go on from, written by an export, and merged into their base.

Shape legend: E experts, r rank; of any weight, O and I are the output and input features.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from spes_p2p.config import TARGETS, AdapterConfig, AdapterTarget, RunConfig
from spes_p2p.errors import ConfigError, DataError, one_line
from spes_p2p.model.adapted import Base, InitialFactors
from spes_p2p.model.export import Shards, on_disk_names, write_settings, written_folder
from spes_p2p.model.frozen import GATE_UP, WEIGHT_NAMES
from spes_p2p.model.lora import A, B
from spes_p2p.model.safetensor_files import opened
from spes_p2p.model.slot_model import SlotModel

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."
EXPERTS = ".mlp.experts."
MAX_ADAPTER_BYTES = 2**34
MERGED_BYTES = 2**30
"""Size of a file of a merged checkpoint."""
PLAIN_STARTS = (True, False, None, "gaussian", "orthogonal", "eva")
"""Values of peft's `init_lora_weights` with which an adapter belongs to the base as it is; others change the base."""
UNSUPPORTED = (
    *("use_dora", "use_rslora", "lora_bias", "fan_in_fan_out", "use_qalora", "use_bdlora", "rank_pattern"),
    *("alpha_pattern", "modules_to_save", "layers_to_transform", "layer_replication", "trainable_token_indices"),
    "alora_invocation_tokens",
)
"""Settings of peft that a run cannot express, unless they are off or empty."""

Read = Callable[[int | None], Mapping[str, Tensor]]


# ---------------------------------------------------------------------- reading


def adapter_of(source: Path, chosen: AdapterConfig | None) -> AdapterConfig:
    """Return the adapter settings of a folder in peft's layout: its rank, alpha and targets, and what else is chosen.

    Raises:
        ConfigError: a run cannot go on from such an adapter.
        DataError: the folder is no adapter, or is damaged.
    """
    settings = _read_config(source)
    for name in (*UNSUPPORTED, "bias"):
        if settings.get(name) and settings[name] != "none":
            raise ConfigError(
                f"{source} has {name}={settings[name]!r}, which no run has; give --adapter another folder, or lora"
            )
    if settings.get("init_lora_weights") not in PLAIN_STARTS:
        raise ConfigError(
            f"{source} has init_lora_weights={settings['init_lora_weights']!r}, which has changed its base; convert it "
            f"with peft's path_initial_model_for_weight_conversion, or give --adapter another folder"
        )
    if settings.get("peft_type") != "LORA":
        raise ConfigError(f"{source} is a {settings.get('peft_type')!r} adapter; give --adapter a folder of LORA")
    with _weights(source) as file:
        targets = list(dict.fromkeys(map(_target, file.keys())))
    fields = {"rank": settings.get("r"), "alpha": settings.get("lora_alpha"), "targets": targets}
    try:
        return AdapterConfig.model_validate((chosen or AdapterConfig()).model_dump() | fields)
    except ValueError as error:
        raise ConfigError(
            f"{source / CONFIG} has settings that no run can have: {one_line(error)}; give another"
        ) from error


def _read_config(source: Path) -> dict[str, Any]:
    if not (source / CONFIG).is_file():
        raise DataError(f"{source} is no adapter (no {CONFIG}); give --adapter lora, or a folder that peft has saved")
    try:
        settings = json.loads((source / CONFIG).read_bytes()[: 2**20])
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {source / CONFIG}: {error}; give another folder") from error
    if not isinstance(settings, dict):
        raise DataError(f"{source / CONFIG} is no JSON object; give another folder")
    return settings


def named_base(source: Path) -> str | None:
    """Return the base that an adapter's folder names: a name on the hub, or a folder of another machine."""
    name = _read_config(source).get("base_model_name_or_path")
    return name if isinstance(name, str) and name else None


def _weights(source: Path) -> contextlib.AbstractContextManager[Any]:
    if not (source / WEIGHTS).is_file():
        raise DataError(f"{source} lacks {WEIGHTS}; give a folder that peft has saved, its weights as safetensors")
    return opened(source / WEIGHTS, "copy the adapter again")


def _target(name: str) -> AdapterTarget:
    """Return the target to which one of peft's tensors belongs."""
    if EXPERTS in name:
        return "experts"
    parts = name.split(".")
    found = next((TARGETS[part] for part in parts if part in TARGETS), None)
    if found is None or not any(f".{factor}." in name for factor in (A, B)):
        raise ConfigError(f"an adapter with {name[:100]!r} is of no kind that a run has; give another")
    return found


class AdapterFiles:
    """The factors of an adapter in peft's layout, by slot.

    A matrix of a target that the adapter leaves out gets factors as at the start of a new adapter, whose product is 0.
    The model may be an outline.

    Raises:
        ConfigError: the adapter is of another base.
        DataError: it is damaged.
    """

    def __init__(self, source: Path, model: SlotModel, run: RunConfig) -> None:
        assert run.adapter is not None
        self._source = source
        self._rank = run.adapter.rank
        self._num_experts = run.model.num_experts
        self._initial = InitialFactors(model, run.seed)
        with _weights(source) as file:
            if (source / WEIGHTS).stat().st_size > MAX_ADAPTER_BYTES:
                raise DataError(f"{source / WEIGHTS} is larger than any adapter of a run; give another")
            self._tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in self._tensors.items():
            if not tensor.is_floating_point() or not torch.isfinite(tensor).all():
                raise DataError(f"{source / WEIGHTS}: {name} is not of finite floating-point numbers; give another")
        self._shapes = model.shapes()
        unread = set(self._tensors)
        for shapes in self._shapes.values():
            unread -= set(map(self._stored, shapes))
        if unread:
            raise ConfigError(
                f"{source} has {min(unread)}, which this run's base or adapter has not; give --adapter one of this base"
            )

    def read(self, slot: int | None) -> dict[str, Tensor]:
        """Return the factors of one slot, or for None the shared ones, in fp32 under the names of `SlotModel`.

        Raises:
            ConfigError: a shape is another than the run's.
        """
        initial = self._initial.read(slot)
        for name, shape in self._shapes[slot].items():
            stored = self._tensors.get(self._stored(name))
            if stored is None:
                continue
            factor = stored.float()
            if EXPERTS in f".{name}.":
                factor = self._by_expert(name, factor)[slice(None) if slot is None else slot]
            if tuple(factor.shape) != shape:
                raise ConfigError(
                    f"{self._source}: {self._stored(name)} has shape {list(stored.shape)}, which does not fit the "
                    f"run's base; give --adapter one of this base"
                )
            initial[name] = factor
        return initial

    def _stored(self, name: str) -> str:
        prefix, _, factor = name.rpartition(".")
        if EXPERTS in name:
            # The inner wrapper is the first target's: told by its shape, which no setting says.
            prefix, _, weight = prefix.rpartition(".")
            wrapper = self._wrapper(prefix, weight)
            return f"{PREFIX}{wrapper}.{factor}.weight"
        return f"{PREFIX}{prefix}.{factor}.weight"

    def _wrapper(self, experts: str, weight: str) -> str:
        outer, inner = experts, f"{experts}.base_layer"
        stored = [self._tensors.get(f"{PREFIX}{outer}.{factor}.weight") for factor in (A, B)]
        if stored[0] is None or stored[1] is None:
            return inner
        shapes = self._shapes[None] if len(self._shapes) == 1 else self._shapes[0]
        # Both sides: hidden size and inner size may be equal.
        sides = shapes[f"{experts}.{weight}.{A}"][-1], shapes[f"{experts}.{weight}.{B}"][-2]
        return outer if (stored[0].shape[-1], stored[1].shape[0]) == sides else inner

    def _by_expert(self, name: str, stored: Tensor) -> Tensor:
        """Return `[E, r, I]` or `[E, O, r]` of peft's `[E r, I]` or `[O, r E]`."""
        rank, experts = self._rank, self._num_experts
        rows = stored if name.endswith(A) else stored.T
        if rows.shape[:1] != (rank * experts,):
            raise ConfigError(f"{self._source}: {name} is not of {experts} experts with rank {rank}; give another")
        return stored.view(experts, rank, -1) if name.endswith(A) else stored.view(-1, rank, experts).permute(2, 0, 1)


# ---------------------------------------------------------------------- writing


class Factors:
    """A run's factors by weight.

    Args:
        model: The run's model with adapters; may be an outline.
        read: Returns one slot's factors, or for None the shared ones.
    """

    def __init__(self, model: SlotModel, run: RunConfig, read: Read) -> None:
        assert run.adapter is not None
        self.adapter = run.adapter
        self._found = dict(read(None))
        for slot in range(model.num_slots):
            for name, factor in read(slot).items():
                self._found.setdefault(name, torch.empty(model.num_slots, *factor.shape))[slot] = factor
        self.weights = sorted({name.rpartition(".")[0] for name in self._found})

    def of(self, weight: str) -> tuple[Tensor, Tensor]:
        """Return A and B of a weight: `[r, I]` and `[O, r]`, of experts `[E, r, I]` and `[E, O, r]`."""
        return self._found[f"{weight}.{A}"].float(), self._found[f"{weight}.{B}"].float()

    def merged(self, name: str, slot: int | None, base_OI: Tensor) -> Tensor:
        """Return a weight of the base, of one expert or of the shared part, with its adapter added."""
        weight = name if slot is not None else name.removesuffix(".weight")
        if weight not in self.weights:
            return base_OI
        a, b = (factor if slot is None else factor[slot] for factor in self.of(weight))
        return (base_OI.float() + self.adapter.scale * (b @ a)).to(base_OI.dtype)


def save_adapter(factors: Factors, directory: Path, *, tokenizer: Any = None, card: str = "", base: str = "") -> int:
    """Write an adapter as `peft.PeftModel.from_pretrained(model, directory)` loads it; return its parameters.

    Args:
        base: The base for adapter_config.json: on the hub, `owner/name@commit`, or a folder; empty if neither is known.

    Raises:
        ConfigError: `directory` exists and is no adapter.
    """
    tensors: dict[str, Tensor] = {}
    for weight in factors.weights:
        a, b = factors.of(weight)
        name = weight
        if EXPERTS in f".{weight}.":
            experts, _, kind = weight.rpartition(".")
            name = f"{experts}.base_layer" if kind == GATE_UP else experts
            a, b = a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)
        tensors[f"{PREFIX}{name}.{A}.weight"] = a.contiguous()
        tensors[f"{PREFIX}{name}.{B}.weight"] = b.contiguous()
    with written_folder(directory, CONFIG, tokenizer, card) as scratch:
        save_file(tensors, scratch / WEIGHTS, metadata={"format": "pt"})
        (scratch / CONFIG).write_text(json.dumps(_peft_settings(factors, base), indent=2, sort_keys=True) + "\n")
    return sum(tensor.numel() for tensor in tensors.values())


def _peft_settings(factors: Factors, base: str) -> dict[str, Any]:
    """Return the content of adapter_config.json."""
    targets = factors.adapter.targets
    name, _, commit = (base, "", "") if Path(base).is_absolute() else base.partition("@")
    modules = [part for part, target in TARGETS.items() if target in targets]
    ends = {weight.rpartition(".")[2] for weight in factors.weights if EXPERTS not in weight}
    has_experts = any(EXPERTS in weight for weight in factors.weights)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": name or None,
        "revision": commit or None,
        "r": factors.adapter.rank,
        "lora_alpha": factors.adapter.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": [name for name in modules if name in ends],
        "target_parameters": [f"mlp.experts.{name}" for name in WEIGHT_NAMES if has_experts],
    }


def save_merged(
    model: SlotModel, factors: Factors, base: Base, directory: Path, *, tokenizer: Any = None, card: str = ""
) -> int:
    """Write the base with the adapters added to it, as an ordinary checkpoint; return its parameters.

    Tensors keep the base's precision. Memory holds one file of MERGED_BYTES, or one tensor if that is larger.

    The model may be an outline; the base is not quantised.

    Raises:
        ConfigError: `directory` exists and is no checkpoint.
        DataError: the base is damaged.
    """
    with written_folder(directory, "config.json", tokenizer, card) as scratch:
        shards, dtype = Shards(scratch, MERGED_BYTES), torch.float32
        for slot in (None, *range(model.num_slots)):
            for name, tensor in base.tensors(slot):
                dtype = tensor.dtype if slot is not None or tensor.ndim > 1 else dtype
                merged = factors.merged(name, slot, tensor)
                for part in on_disk_names(model.config.model_type, slot, {name: merged}):
                    shards.make_room(part[1].nbytes)
                    shards.add([part])
        shards.close()
        model.config.dtype = dtype
        write_settings(model, scratch, tokenizer)
    return shards.num_params
