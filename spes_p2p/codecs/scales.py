"""The scales of blocks: 16 bits each, so short that what is decoded with them is exact, on every machine.

Shape legend: B blocks of W elements, K kinds of values.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError

SMALLEST_SCALE = 2.0**-100
"""Smaller scales become 0. Far from the numbers so small that some processors take them for 0."""


def to_scale_bits(scale: Tensor, up: bool = False) -> Tensor:
    """Rounds scales to nine significant bits; returns the 16 that say so: fp32's exponent, then eight of its fraction.

    Args:
        scale: Finite fp32 numbers that are not negative, any shape.
        up: Never round down.
    """
    scale = scale.masked_fill(scale < SMALLEST_SCALE, 0.0)
    return ((scale.view(torch.int32) + (0x7FFF if up else 0x4000)) >> 15).to(torch.int16)


def from_scale_bits(bits: Tensor) -> Tensor:
    """Returns the fp32 scales of their 16 bits; never negative, and not finite only in bytes that we did not write."""
    return ((bits.to(torch.int32) & 0xFFFF) << 15).view(torch.float32)


def divisors(scale: Tensor) -> Tensor:
    """Returns the scales as divisors; of a scale of 0 one that makes zeros."""
    return scale.masked_fill(scale == 0, torch.inf)


def check_scales(scale: Tensor, largest: float) -> None:
    """Raises ExchangeError where an encoder would not have written such scales, to the point of NaN."""
    is_good = ((scale >= SMALLEST_SCALE) | (scale == 0)) & (scale <= largest)
    if not bool(is_good.all()):
        worst = float(scale.masked_select(~is_good)[0])
        raise ExchangeError(
            f"payload holds a scale of {worst:.3g}, neither 0 nor from 2^-100 to {largest:.3g}; "
            f"fetch it from another peer"
        )


def tree_sum_(values_KWB: Tensor) -> Tensor:
    """Returns the sums [K, B] over W, a power of two, in the same order on every processor; overwrites the values."""
    while (width := values_KWB.shape[1]) > 1:
        first_KWB, second_KWB = values_KWB.split(width // 2, dim=1)
        values_KWB = first_KWB.add_(second_KWB)
    return values_KWB[:, 0]
