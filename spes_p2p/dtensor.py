"""Tensors of which each of a peer's ranks keeps a part (FSDP2), and whole ones, seen alike."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: Tensor) -> Tensor:
    """Return all of a tensor. Where ranks keep parts of it they exchange them, so all of them must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(tensor: Tensor, other: Tensor) -> Tensor:
    """Return a whole tensor on the device of `other`, and this rank's part of it where ranks keep parts of `other`.

    Args:
        tensor: The same on every rank.
        other: Of the same shape.
    """
    on_device = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return on_device
    return distribute_tensor(on_device, other.device_mesh, other.placements, src_data_rank=None)
