"""A dense Hugging Face checkpoint on disk, read one tensor at a time."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from spes_p2p.errors import DataError

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
