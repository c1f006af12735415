"""Model sizes by shape, bytes per element by codec, and this machine's free memory."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Literal

import psutil

from spes_p2p.codecs.format import PART_NUMEL, Format, Segment
from spes_p2p.config import AdapterTarget, CodecName, ModelConfig, RunConfig

SMALL_NUMEL = 4096
"""Tensors with fewer elements keep an optimizer's state in fp32, as in bitsandbytes."""

LOOK_SECONDS = 60.0
"""Longest that a look at a GPU may take: the child imports PyTorch."""

Kind = Literal["table", "matrix", "vector"]


@dataclass(frozen=True)
class ModelSize:
    """A model's numbers of parameters; the whole has S + E P."""

    shared_params: int  # S: outside the experts, tied ones counted once
    slot_params: int  # P: of one expert in every layer
    num_slots: int  # E
    matrix_params: int = 0  # shared ones that Muon takes: matrices of attention and routers
    small_shared_params: int = 0  # shared ones in tensors too small for 8-bit state
    small_slot_params: int = 0  # a slot's in tensors too small for 8-bit state
    num_layers: int = 1  # L
    # Of a run with adapters, the base:
    base_params: int = 0  # of its matrices, which a machine holds in its storage
    table_params: int = 0  # of the embedding and head, in bf16 unless the storage is fp32
    kept_params: int = 0  # of norms, biases and routers, in fp32
    expert_params: int = 0  # of the matrices of experts
    slot_base_params: int = 0  # of one expert of every layer, which one document holds

    @property
    def is_adapted(self) -> bool:
        """Whether the trained parameters are adapters over a frozen base."""
        return self.base_params > 0

    @property
    def total_params(self) -> int:
        """All that is trained by some peer, which versions and checkpoints hold."""
        return self.shared_params + self.num_slots * self.slot_params

    def active_params(self, top_k: int) -> int:
        """Return the parameters that one token uses, if it is routed to `top_k` experts."""
        return self.shared_params + top_k * self.slot_params

    def trained_params(self, claimed: int) -> int:
        """Return the parameters that a peer with `claimed` slots trains."""
        return self.shared_params + claimed * self.slot_params

    def frozen_params(self, claimed: int) -> int:
        """Return the parameters that a peer with `claimed` slots keeps frozen."""
        return (self.num_slots - claimed) * self.slot_params


def model_size(model: ModelConfig, vocab_size: int) -> ModelSize:
    """Count parameters from the configured shapes, without building the model."""
    shared = list(_shared_tensors(model, model.embedding_rows(vocab_size)))
    slot = [2 * model.intermediate_size * model.hidden_size, model.intermediate_size * model.hidden_size]
    slot = [] if model.is_dense else slot
    return ModelSize(
        shared_params=sum(numel * count for _, numel, count in shared),
        slot_params=model.num_layers * sum(slot),
        num_slots=model.num_experts,
        matrix_params=sum(numel * count for kind, numel, count in shared if kind == "matrix"),
        small_shared_params=sum(numel * count for _, numel, count in shared if numel < SMALL_NUMEL),
        small_slot_params=model.num_layers * sum(numel for numel in slot if numel < SMALL_NUMEL),
        num_layers=model.num_layers,
    )


def run_size(run: RunConfig, vocab_size: int) -> ModelSize:
    """Count the parameters of what a run trains: its model, or adapters over it."""
    whole, adapter, model = model_size(run.model, vocab_size), run.adapter, run.model
    if adapter is None:
        return whole
    shared, slot = list[int](), list[int]()
    for target, num_out, num_in, count in _adapted_matrices(model):
        if target not in adapter.targets:
            continue
        factors = [adapter.rank * num_out, adapter.rank * num_in]
        experts = model.num_experts if target == "experts" else 1
        if target == "experts" and adapter.experts == "slots":
            slot += [numel for numel in factors for _ in range(count)]
        else:
            shared += [experts * numel for numel in factors for _ in range(count)]
    tables = sum(
        numel * n for kind, numel, n in _shared_tensors(model, model.embedding_rows(vocab_size)) if kind == "table"
    )
    routers = model.num_layers * model.num_experts * model.hidden_size
    matrices = whole.matrix_params - routers + model.num_experts * whole.slot_params
    return ModelSize(
        shared_params=sum(shared),
        slot_params=sum(slot),
        num_slots=run.num_slots,
        matrix_params=sum(shared),
        small_shared_params=sum(numel for numel in shared if numel < SMALL_NUMEL),
        small_slot_params=sum(numel for numel in slot if numel < SMALL_NUMEL),
        num_layers=model.num_layers,
        base_params=matrices,
        table_params=tables,
        kept_params=whole.total_params - matrices - tables,
        expert_params=model.num_experts * whole.slot_params,
        slot_base_params=whole.slot_params,
    )


def _adapted_matrices(model: ModelConfig) -> Iterator[tuple[AdapterTarget, int, int, int]]:
    """Yield the target, outputs, inputs and number of the matrices that may have adapters, experts' once for all."""
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_layers
    query_width, key_width = model.head_dim * model.num_heads, model.head_dim * model.num_kv_heads
    if model.stock.is_carried and model.start is not None:
        for each in model.start.tensors:
            if each.kind == "attention" or each.kind == "mlp":
                yield each.kind, each.shape[0], each.shape[-1], each.count
        return
    yield "attention", query_width, width, layers
    yield "attention", key_width, width, 2 * layers
    yield "attention", width, query_width, layers
    if model.is_dense:
        yield "mlp", inner, width, 2 * layers
        yield "mlp", width, inner, layers
    else:
        yield "experts", 2 * inner, width, layers
        yield "experts", width, inner, layers


def _shared_tensors(model: ModelConfig, num_rows: int) -> Iterator[tuple[Kind, int, int]]:
    """Yield kind, elements and number of the tensors outside the experts."""
    width, layers = model.hidden_size, model.num_layers
    head_width = model.head_dim
    query_width, key_width = head_width * model.num_heads, head_width * model.num_kv_heads
    if model.stock.is_carried and model.start is not None:
        for each in model.start.tensors:
            kind: Kind = each.kind if each.kind == "table" or each.kind == "vector" else "matrix"
            yield kind, prod(each.shape), each.count
        return
    yield "table", num_rows * width, 1 if model.tie_embeddings else 2
    yield "matrix", width * query_width, 2 * layers  # queries and output
    yield "matrix", width * key_width, 2 * layers  # keys and values
    if model.is_dense:
        yield "matrix", model.intermediate_size * width, 3 * layers  # gate, up and down
    else:
        yield "matrix", model.num_experts * width, layers  # routers
    yield "vector", width, 2 * layers + 1  # norms
    if model.start is not None and model.start.attention_bias:
        yield "vector", query_width, layers
        yield "vector", key_width, 2 * layers
        yield "vector", width, layers
    if model.stock.query_norm == "whole":
        yield "vector", query_width, layers
        yield "vector", key_width, layers
    elif model.stock.query_norm == "heads":
        yield "vector", head_width, 2 * layers


_UNLIMITED = 2**60
"""Version 1 of control groups writes a larger number if there is no limit."""
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version: the files of limit and use, and the name of the reclaimable part of the use."""


def free_memory_bytes(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory that new processes can use without swapping, within the system's and a container's limits.

    Args:
        groups: File that names this process's control groups.
        mount: Mount point of control groups.
    """
    return min(int(psutil.virtual_memory().available), *_free_in_groups(groups, mount))


def free_gpu_bytes() -> int | None:
    """Return the free memory of the first GPU that PyTorch finds; None if it finds none or does not answer.

    A child looks: what has looked at a GPU must not fork any more.
    """
    look = "import torch; print(torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else '')"
    with contextlib.suppress(subprocess.SubprocessError, OSError, ValueError):
        answer = subprocess.check_output(
            [sys.executable, "-c", look], stderr=subprocess.DEVNULL, text=True, timeout=LOOK_SECONDS
        )
        return int(answer)
    return None


def _free_in_groups(groups: Path, mount: Path) -> list[int]:
    """Return what each limit on this process leaves free."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:  # no Linux
        return [_UNLIMITED]
    free = [_UNLIMITED]
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if not controllers or controllers == "memory":
            version, root = (2, mount) if not controllers else (1, mount / "memory")
            # Parents' limits apply too. In a container the name may be the host's, and its folder absent.
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
"""Bytes of an fp32 number; everything trained is held in fp32."""


@cache
def element_bytes(codec: CodecName) -> float:
    """Return the bytes of one element of a long vector, including its share of the scales."""
    return Format([Segment(PART_NUMEL, codec)]).num_bytes / PART_NUMEL


def is_exact(codec: CodecName) -> bool:
    """Tell whether a codec is lossless, so that no residual is kept."""
    return Format([Segment(PART_NUMEL, codec)]).is_exact
