"""The frozen base of a run with adapters as documents that peers send each other: one of the shared part, one per slot.

A document holds the tensors one after the other, sorted by name and without a header: every peer derives names, shapes
and precisions from the run. Matrices of layers are in the precision that the run names, the embedding and the head in
bf16, unless that is fp32, and norms, biases and routers in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import BlockHasher, digest_of
from spes_p2p.config import RunConfig, Storage
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import write_atomic
from spes_p2p.model.adapted import Base
from spes_p2p.model.build import outline
from spes_p2p.model.frozen import ENCODERS, Plain, Weight, unavailable, weight_of

TABLES = ("model.embed_tokens.weight", "lm_head.weight")
LOCAL_BASE = "base.txt"


class BaseLayout:
    """Names, shapes and precisions of a base, by slot; None is the shared part.

    Raises:
        ConfigError: this machine cannot encode the run's precision.
    """

    def __init__(self, run: RunConfig, vocab_size: int) -> None:
        assert run.adapter is not None
        model = outline(run.model, vocab_size, run.data.sequence_length)
        self.num_slots = model.num_slots
        self._precision: Storage = run.adapter.base
        if (reason := unavailable(self._precision)) is not None:
            raise ConfigError(f"adapter.base={self._precision} cannot be used here: {reason}")
        self._shapes = model.shapes()

    def tensors(self, slot: int | None) -> Iterator[tuple[str, tuple[int, ...], Storage]]:
        """Yield the name, shape and precision of each tensor of a document."""
        for name, shape in self._shapes[slot].items():
            yield name, shape, self._precision_of(name, slot)

    def _precision_of(self, name: str, slot: int | None) -> Storage:
        if slot is not None or name.endswith("_proj.weight"):
            return self._precision
        return "bf16" if name in TABLES and self._precision != "fp32" else "fp32"

    def num_bytes(self, slot: int | None) -> int:
        """Return the length of a document."""
        return sum(KeptForm(precision, math.prod(shape)).num_bytes for _, shape, precision in self.tensors(slot))


def encode_base(base: Base, layout: BaseLayout, slot: int | None) -> memoryview:
    """Return the document of one slot, or for None the shared part; of the base, memory holds a tensor at a time.

    Raises:
        DataError: the base is damaged.
    """
    data = bytearray()
    for (name, shape, precision), (found, tensor) in zip(layout.tensors(slot), base.tensors(slot), strict=True):
        assert name == found and tuple(tensor.shape) == shape, f"{found} {list(tensor.shape)}, not {name} {list(shape)}"
        weight: Weight = ENCODERS[precision](tensor)
        for part in weight.PARTS:
            data += getattr(weight, part).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return memoryview(data)


class BaseFiles:
    """A base in documents on disk, whose digests by slot the manifest names; each is verified while it is read."""

    def __init__(self, folder: Path, layout: BaseLayout, digests: Mapping[int | None, str]) -> None:
        self._folder = folder
        self._layout = layout
        self._digests = digests

    def tensors(self, slot: int | None) -> Iterator[tuple[str, Tensor]]:
        """Yield a document's tensors; those in 8 or 4 bits as fp32.

        Raises:
            DataError: the document is missing or damaged.
        """
        path = self._folder / f"{base_name(slot)}.0.{self._digests[slot]}.bin"
        hasher = BlockHasher()
        try:
            with path.open("rb") as file:
                for name, shape, precision in self._layout.tensors(slot):
                    form = KeptForm(precision, math.prod(shape))
                    raw = np.empty(form.num_bytes, dtype=np.uint8)
                    if file.readinto(raw.data) != raw.nbytes:  # type: ignore[attr-defined]
                        raise DataError(f"{path} is too short; join again with --overwrite")
                    hasher.update(raw.data)
                    weight = weight_of(precision, list(form.views(torch.from_numpy(raw), 0, form.numel)), shape)
                    yield name, weight.weight_OI if isinstance(weight, Plain) else weight.dense(torch.float32)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; join again with --overwrite") from error
        if digest_of(hasher.finish()) != self._digests[slot]:  # guard: never
            raise DataError(f"{path} is damaged; join again with --overwrite")


def note_base(output: Path, source: Path) -> None:
    """Note in a peer's folder where this machine's copy of the base is, so that exports name it."""
    with write_atomic(output / LOCAL_BASE) as stream:
        stream.write(str(source.resolve()).encode())


def local_base(output: Path) -> str:
    """Return the folder that `note_base` has noted; empty if there is none any more."""
    noted = output / LOCAL_BASE
    base = noted.read_text() if noted.is_file() else ""
    return base if Path(base, "config.json").is_file() else ""


def base_name(slot: int | None) -> str:
    """Return the name of a document of a base."""
    return "base-shared" if slot is None else f"base-slot-{slot}"


def base_digests(run: RunConfig) -> dict[int | None, str]:
    """Return the digests of a base's documents, which the manifest names, by slot."""
    assert run.model.start is not None
    return {None: run.model.start.shared, **dict(enumerate(run.model.start.slots))}
