"""Reads a Hugging Face checkpoint's configuration, and its tensors one at a time; runs no code that comes with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
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


class _Place(NamedTuple):
    """Where a tensor lies: its file, its bytes from `start` on, and what they are."""

    file: BinaryIO
    start: int
    dtype: torch.dtype | None
    shape: tuple[int, ...]


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Floating-point types by their names in a file."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PIECE_BYTES = 2**22


class SafetensorFiles:
    """The tensors of a checkpoint's files, which `stack` keeps open.

    Tensors are read, not mapped: the pages of a mapped file would count as this process's memory beside what it keeps.

    Raises:
        DataError: a file is missing or damaged.
    """

    def __init__(self, source: Path, stack: ExitStack) -> None:
        self._source = source
        self._files: dict[str, _Place] = {}
        for path in _weight_files(source):
            try:
                with safe_open(path, framework="pt"):  # checks that offsets, types and shapes agree
                    pass
                file = stack.enter_context(path.open("rb"))
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            except (OSError, SafetensorError, ValueError) as error:
                raise DataError(f"cannot read {path}: {error}; download the checkpoint again") from error
            for name, entry in header.items():
                if name != "__metadata__":
                    start = 8 + length + entry["data_offsets"][0]
                    self._files[name] = _Place(file, start, DTYPES.get(entry["dtype"]), tuple(entry["shape"]))

    def __contains__(self, name: object) -> bool:
        return name in self._files

    def check(self, name: str, shape: Sequence[int]) -> None:
        """Refuse a checkpoint in which a tensor is missing or has another shape.

        Raises:
            DataError: so it is.
        """
        found = list(self._files[name].shape) if name in self._files else None
        if found != list(shape):
            state = "is missing" if found is None else f"has shape {found}, not {list(shape)} as config.json says"
            raise DataError(f"{self._source}: tensor {name} {state}; give --from a whole checkpoint")

    def check_tied(self, config: PretrainedConfig) -> None:
        """Refuse a checkpoint with a head of its own where config.json ties the head to the embedding.

        transformers uses such a head, with a warning; a run would train another model.

        Raises:
            DataError: so it is.
        """
        if not config.tie_word_embeddings or HEAD not in self._files or EMBEDDING not in self._files:
            return
        head, embedding = self._files[HEAD], self._files[EMBEDDING]
        if head.dtype is None:
            return  # `read` refuses it
        is_same = head[2:] == embedding[2:]
        if not is_same or any(a != b for a, b in zip(_pieces(head), _pieces(embedding), strict=True)):
            raise DataError(
                f"{self._source}: config.json ties {HEAD} to {EMBEDDING}, but they differ; set tie_word_embeddings to "
                f"false there"
            )

    def read(self, name: str, row: int | None = None) -> Tensor:
        """Read one tensor, or one row of its first dimension, in its stored precision.

        Raises:
            DataError: it holds NaN or infinity, or is not floating-point.
        """
        place = self._files[name]
        tensor = _read(place, row) if place.dtype is not None else None
        if tensor is None or not torch.isfinite(tensor).all():
            raise DataError(
                f"{self._source}: tensor {name} is not of finite floating-point numbers; give --from another checkpoint"
            )
        return tensor


def _pieces(place: _Place) -> Iterator[bytes]:
    """Yield a tensor's bytes."""
    assert place.dtype is not None
    left, at = prod(place.shape) * place.dtype.itemsize, place.start
    while left:
        place.file.seek(at)
        piece = place.file.read(min(PIECE_BYTES, left))
        if not piece:
            raise DataError(f"{place.file.name} became shorter while it was read; give --from a whole checkpoint")
        at, left = at + len(piece), left - len(piece)
        yield piece


def _read(place: _Place, row: int | None) -> Tensor:
    shape = place.shape if row is None else place.shape[1:]
    assert place.dtype is not None
    raw = np.empty(prod(shape) * place.dtype.itemsize, dtype=np.uint8)
    place.file.seek(place.start + (row or 0) * raw.nbytes)
    if place.file.readinto(raw.data) != raw.nbytes:  # type: ignore[attr-defined]
        raise DataError(f"{place.file.name} became shorter while it was read; give --from a whole checkpoint")
    return torch.from_numpy(raw).view(place.dtype).view(shape)


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
