"""Bytes of an element as it travels, by codec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import psutil

from spes_p2p.codecs import PART_NUMEL, Segment, format_of
from spes_p2p.config import CodecName, ModelConfig

SMALL_NUMEL = 4096
"""Tensors of fewer elements keep an optimizer's state in fp32, as bitsandbytes has it."""

Kind = Literal["table", "matrix", "vector"]


@dataclass(frozen=True)
class ModelSize:
    """A model's parameters; the whole has S + E P."""

    shared_params: int
    """S: everything outside the experts, each tensor counted once."""
    slot_params: int
    """P: one expert of every layer."""
    num_slots: int
    """E."""
    matrix_params: int = 0
    """Of the shared ones, those that Muon takes: matrices of attention and routers."""
    small_shared_params: int = 0
    """Of the shared ones, those in tensors too small for 8-bit state."""
    small_slot_params: int = 0
    """Of a slot's, those in tensors too small for 8-bit state."""
    num_layers: int = 1
    """L."""

    @property
    def total_params(self) -> int:
        return self.shared_params + self.num_slots * self.slot_params

    def trained_params(self, claimed: int) -> int:
        """Parameters that a peer with so many slots trains."""
        return self.shared_params + claimed * self.slot_params

    def frozen_params(self, claimed: int) -> int:
        """Parameters that it keeps frozen."""
        return (self.num_slots - claimed) * self.slot_params


def model_size(model: ModelConfig, vocab_size: int) -> ModelSize:
    """Counts parameters from the configured shapes, without building the model.

    Args:
        model: Shapes; heads are `hidden_size / num_heads` wide in every family.
        vocab_size: Rows of the embedding.
    """
    shared = list(_shared_tensors(model, vocab_size))
    slot = [2 * model.intermediate_size * model.hidden_size, model.intermediate_size * model.hidden_size]
    return ModelSize(
        shared_params=sum(numel * count for _, numel, count in shared),
        slot_params=model.num_layers * sum(slot),
        num_slots=model.num_experts,
        matrix_params=sum(numel * count for kind, numel, count in shared if kind == "matrix"),
        small_shared_params=sum(numel * count for _, numel, count in shared if numel < SMALL_NUMEL),
        small_slot_params=model.num_layers * sum(numel for numel in slot if numel < SMALL_NUMEL),
        num_layers=model.num_layers,
    )


def _shared_tensors(model: ModelConfig, vocab_size: int) -> Iterator[tuple[Kind, int, int]]:
    """Kind, elements and number of the tensors outside the experts."""
    width, layers = model.hidden_size, model.num_layers
    head_width = width // model.num_heads
    key_width = head_width * model.num_kv_heads
    yield "table", vocab_size * width, 1 if model.tie_embeddings else 2
    yield "matrix", width * width, 2 * layers  # queries and output
    yield "matrix", width * key_width, 2 * layers  # keys and values
    yield "matrix", model.num_experts * width, layers  # routers
    yield "vector", width, 2 * layers + 1  # norms
    # OLMoE normalises queries and keys over all heads at once, Qwen3 within each head, Mixtral not at all.
    if model.family == "olmoe":
        yield "vector", width, layers
        yield "vector", key_width, layers
    elif model.family == "qwen3_moe":
        yield "vector", head_width, 2 * layers


_UNLIMITED = 2**60
"""What version 1 of control groups writes where there is no limit is larger than this."""
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version: the files of limit and use, and what the part of the use is called that can be given back."""


def free_memory_bytes(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory that new processes can use without swapping, as the system or a container's limit has it.

    Args:
        groups: Names the control groups of this process.
        mount: Where control groups are mounted.
    """
    return min(int(psutil.virtual_memory().available), *_free_in_groups(groups, mount))


def _free_in_groups(groups: Path, mount: Path) -> list[int]:
    """What each limit that holds for this process leaves free."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:  # no Linux
        return [_UNLIMITED]
    free = [_UNLIMITED]
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if not controllers or controllers == "memory":
            version, root = (2, mount) if not controllers else (1, mount / "memory")
            # A limit further up holds as well; within a container the name may be that on the host, and not be there.
            for folder in [root / name.strip("/"), *(root / name.strip("/")).parents]:
                if folder.is_relative_to(root):
                    free += _free_in(folder, version)
    return free


def _free_in(folder: Path, version: int) -> Iterator[int]:
    limit_file, used_file, spare_name = _FILES[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # the root group has no limit, or this version is not mounted
        return
    if limit.isdigit() and int(limit) < _UNLIMITED:
        yield max(0, int(limit) - used + int(stat.get(spare_name, 0)))


FP32 = 4
"""Bytes of a number in fp32, in which everything trained is held."""


@cache
def element_bytes(codec: CodecName) -> float:
    """Returns the bytes of one element of a long vector, its share of the scales included."""
    return format_of((Segment(PART_NUMEL, codec),), 0).num_bytes / PART_NUMEL


def is_exact(codec: CodecName) -> bool:
    """Tells whether nothing is lost on the way, so that no error is fed back."""
    return format_of((Segment(PART_NUMEL, codec),), 0).is_exact
