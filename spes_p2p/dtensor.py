"""Plain tensors and tensors sharded over a peer's ranks (FSDP2's DTensor), handled alike."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the unsharded tensor. For a sharded one this is a collective: all ranks must call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def distribute_like(tensor: Tensor, other: Tensor) -> Tensor:
    """Move an unsharded tensor to the device of `other`, and shard it if `other` is sharded.

    Args:
        tensor: Tensor that is equal on every rank.
        other: Tensor of the same shape.

    Returns:
        The tensor on the device of `other`: whole, or this rank's shard of it.
    """
    on_device = tensor.to(other.device)
    if not isinstance(other, DTensor):
        return on_device
    return distribute_tensor(on_device, other.device_mesh, other.placements, src_data_rank=None)
