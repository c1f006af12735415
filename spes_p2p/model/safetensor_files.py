"""Reads a Hugging Face checkpoint's configuration, and its tensors one at a time; runs no code that comes with it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from spes_p2p.errors import DataError, one_line
from spes_p2p.model.export import INDEX


def read_config(source: Path) -> PretrainedConfig:
    """Read a checkpoint's configuration.

    Raises:
        DataError: it is missing, or transformers cannot read it.
    """
    path = source / "config.json"
    if not path.is_file():
        if (source / "adapter_config.json").is_file():
            raise DataError(f"{source} is an adapter; name it with --adapter, and give --from the checkpoint under it")
        raise DataError(f"{source} is no checkpoint (no config.json); give --from a folder written by save_pretrained")
    kind = _model_type(path)
    if kind not in CONFIG_MAPPING:
        raise DataError(
            f"{source} holds a model of type {kind[:100]!r}, which transformers does not know, and code that comes "
            f"with a checkpoint is never run; give --from another checkpoint"
        )
    try:
        return AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # a damaged or unknown configuration fails with types of its own
        raise DataError(f"cannot read {path}: {one_line(error)}; give --from another checkpoint") from error


def _model_type(path: Path) -> str:
    """Return the `model_type` that a config.json names."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"cannot read {path}: {error}; download the checkpoint again") from error
    kind = fields.get("model_type") if isinstance(fields, dict) else None
    if not isinstance(kind, str):
        raise DataError(f"{path} names no model_type; give --from a folder written by save_pretrained")
    return kind


DTYPES = frozenset({"F64", "F32", "F16", "BF16"})
"""Floating-point types by their names in a file."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PIECE_ROWS = 2**10


class SafetensorFiles:
    """The tensors of a checkpoint's files.

    A file is opened for each tensor, because the pages of a mapped file count as this process's memory until it is
    closed.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, source: Path) -> None:
        self._source = source
        self._paths: dict[str, Path] = {}
        self._shapes: dict[str, list[int]] = {}
        for path in _weight_files(source):
            with opened(path) as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    self._paths[name], self._shapes[name] = path, file.get_slice(name).get_shape()

    def __contains__(self, name: object) -> bool:
        return name in self._paths

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Raise DataError if a tensor is missing or has another shape."""
        found = self._shapes.get(name)
        if found != list(shape):
            state = "is missing" if found is None else f"has shape {found}, not {list(shape)} as config.json says"
            raise DataError(f"{self._source}: tensor {name} {state}; give --from a whole checkpoint")

    def check_tied(self, config: PretrainedConfig) -> None:
        """Raise DataError if a checkpoint has a head of its own, and config.json ties the head to the embedding.

        transformers uses such a head, with a warning; a run would train another model.
        """
        if not config.tie_word_embeddings or HEAD not in self or EMBEDDING not in self:
            return
        with opened(self._paths[HEAD]) as first, opened(self._paths[EMBEDDING]) as second:
            head, embedding = first.get_slice(HEAD), second.get_slice(EMBEDDING)
            shape, kind = head.get_shape(), head.get_dtype()
            is_same = (shape, kind) == (embedding.get_shape(), embedding.get_dtype()) and all(
                torch.equal(head[start : start + PIECE_ROWS], embedding[start : start + PIECE_ROWS])
                for start in range(0, shape[0], PIECE_ROWS)
            )
        if not is_same and kind in DTYPES:  # `read` refuses others
            raise DataError(
                f"{self._source}: config.json ties {HEAD} to {EMBEDDING}, but they differ; set tie_word_embeddings to "
                f"false there"
            )

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension, in its stored precision.

        Raises:
            DataError: it holds NaN or infinity, or is not floating-point.
        """
        with opened(self._paths[name]) as file:
            if file.get_slice(name).get_dtype() in DTYPES:
                tensor: Tensor = (file.get_tensor(name) if row is None else file.get_slice(name)[row]).clone()
                if torch.isfinite(tensor).all():
                    return tensor
        raise DataError(
            f"{self._source}: tensor {name} is not of finite floating-point numbers; give --from another checkpoint"
        )


@contextlib.contextmanager
def opened(path: Path, remedy: str = "download the checkpoint again") -> Iterator[Any]:
    """Open one file, after a check that offsets, types and shapes in it agree; raises DataError."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(f"cannot read {path}: {error}; {remedy}") from error


def _weight_files(source: Path) -> list[Path]:
    names = ["model.safetensors"]
    if (source / INDEX).is_file():
        try:
            names = sorted(set(map(str, json.loads((source / INDEX).read_text())["weight_map"].values())))
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise DataError(f"cannot read {source / INDEX}: {error}; download the checkpoint again") from error
    for name in names:
        if Path(name).name != name or not (source / name).is_file():
            pickles = " (it has pickles, which are never read)" if any(source.glob("pytorch_model*.bin")) else ""
            raise DataError(
                f"{source} lacks {name}{pickles}; give --from a whole checkpoint, its weights as safetensors"
            )
    return [source / name for name in names]
