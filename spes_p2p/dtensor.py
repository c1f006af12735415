"""Plain tensors and tensors sharded over a peer's ranks (FSDP2's DTensor), handled alike."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def _is_sharded(tensor: Any) -> bool:
    """Check whether a tensor is sharded, without the import: it takes 40 MB, and whoever shards has made it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def full_tensor(tensor: Any) -> Tensor:
    """Return the unsharded tensor. For a sharded one this is a collective: all ranks must call it."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor


def distribute_like(tensor: Tensor, other: Any) -> Tensor:
    """Move an unsharded tensor to the device of `other`, and shard it if `other` is sharded.

    Args:
        tensor: Tensor that is equal on every rank.
        other: Tensor of the same shape.

    Returns:
        The tensor on the device of `other`: whole, or this rank's shard of it.
    """
    on_device = tensor.to(other.device)
    if not _is_sharded(other):
        return on_device
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(on_device, other.device_mesh, other.placements, src_data_rank=None)
