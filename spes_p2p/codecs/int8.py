"""int8 by blocks, for what stays in memory: frozen experts.

Shape legend: N elements of a vector, B blocks of W elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

INT8_BLOCK = 128
"""Elements that share one scale."""
_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**121
"""Scales below are too small to be exact; 127 times those above overflows."""


def quantise_int8(flat_N: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds a flat vector to int8, each block of `INT8_BLOCK` elements with its own scale.

    A scale is the block's largest magnitude over 127, rounded to 17 significant bits. Its products with an int8 are
    therefore exact in fp32: every machine decodes the same bits, and quantising what was decoded gives the same bytes.

    Args:
        flat_N: Floating-point vector on any device; its length need be no multiple of the block.

    Returns:
        Values int8 [N] in [-127, 127], and scales fp32 [ceil(N / INT8_BLOCK)]. A block whose magnitudes all lie under
        about 1e-36 counts as zeros, with the scale 0.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    values_N = torch.empty(flat_N.shape, dtype=torch.int8, device=flat_N.device)
    scales_B = torch.empty(int8_blocks(flat_N.numel()), dtype=torch.float32, device=flat_N.device)
    for part_BW, values_BW, scales_B1 in _int8_parts(flat_N.float(), values_N, scales_B):
        scratch_BW = part_BW.abs()
        scales_B1.copy_(_int8_scale(scratch_BW.amax(dim=1, keepdim=True)))
        torch.div(part_BW, scales_B1.where(scales_B1 > 0, 1.0), out=scratch_BW)
        values_BW.copy_(scratch_BW.round_().clamp_(-127, 127))
    if not torch.isfinite(scales_B).all():
        raise ValueError("NaN or infinity cannot be held in int8; discard these values and take the last good ones")
    return values_N, scales_B


def dequantise_int8(values_N: Tensor, scales_B: Tensor) -> Tensor:
    """Returns the fp32 vector [N] that `quantise_int8` rounded to.

    Raises:
        ValueError: there is not one scale to every block.
    """
    if scales_B.numel() != int8_blocks(values_N.numel()):
        raise ValueError(
            f"{scales_B.numel()} scales do not fit {values_N.numel()} values in blocks of {INT8_BLOCK}; "
            f"pass the two that quantise_int8 returned together"
        )
    flat_N = values_N.to(torch.float32)
    for part_BW, _, scales_B1 in _int8_parts(flat_N, values_N, scales_B):
        part_BW.mul_(scales_B1)
    return flat_N


def int8_blocks(numel: int) -> int:
    """Returns the number of blocks, and so of scales, of a vector."""
    return -(-numel // INT8_BLOCK)


def _int8_scale(largest_B1: Tensor) -> Tensor:
    """Scales of blocks with these largest magnitudes; not finite where those are not."""
    scale_B1 = (largest_B1 / 127).view(torch.int32).add_(0x40).bitwise_and_(~0x7F).view(torch.float32)
    scale_B1 = scale_B1.clamp_(max=_MAX_SCALE).where(torch.isfinite(largest_B1), torch.nan)
    return scale_B1.where(scale_B1.nan_to_num(1.0) >= _MIN_SCALE, 0.0)


def _int8_parts(flat_N: Tensor, values_N: Tensor, scales_B: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Views of both vectors as whole blocks with their scales, then of the elements left at the end."""
    whole = flat_N.numel() // INT8_BLOCK
    edge = whole * INT8_BLOCK
    if whole:
        yield flat_N[:edge].view(whole, -1), values_N[:edge].view(whole, -1), scales_B[:whole, None]
    if edge < flat_N.numel():
        yield flat_N[None, edge:], values_N[None, edge:], scales_B[whole:, None]
