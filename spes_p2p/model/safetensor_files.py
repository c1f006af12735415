"""Reads a Hugging Face checkpoint's configuration, and its tensors one at a time; runs no code that comes with it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from spes_p2p.errors import DataError
from spes_p2p.model.export import INDEX


def read_config(source: Path) -> PretrainedConfig:
    """Read a checkpoint's configuration.

    Raises:
        DataError: it is missing, or transformers cannot read it.
    """
    if not (source / "config.json").is_file():
        raise DataError(f"{source} is no checkpoint (no config.json); give --from a folder written by save_pretrained")
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged or unknown configuration fails with types of its own
        reason = " ".join(str(error).split())[:200]
        raise DataError(f"cannot read {source / 'config.json'}: {reason}; give --from another checkpoint") from error


class SafetensorFiles:
    """The tensors of a checkpoint's files, which `stack` keeps open.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self._source = source
        self._files: dict[str, Any] = {}
        for file in _weight_files(source):
            try:
                opened = stack.enter_context(safe_open(file, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise DataError(f"cannot read {file}: {error}; download the checkpoint again") from error
            self._files |= dict.fromkeys(opened.keys(), opened)

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a checkpoint in which a tensor is missing or has another shape.

        Raises:
            DataError: so it is.
        """
        found = self._files[name].get_slice(name).get_shape() if name in self._files else None
        if found != list(shape):
            state = "is missing" if found is None else f"has shape {found}, not {list(shape)} as config.json says"
            raise DataError(f"{self._source}: tensor {name} {state}; give --from a whole checkpoint")

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension, in its stored precision.

        Raises:
            DataError: it holds NaN or infinity, or is not floating-point.
        """
        file = self._files[name]
        tensor: Tensor = file.get_tensor(name) if row is None else file.get_slice(name)[row]
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
