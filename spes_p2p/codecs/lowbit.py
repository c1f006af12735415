"""Codecs of four and two bits, for deltas whose error is fed back.

Both are contractions: what rounding leaves over has a smaller norm than the block that was rounded, whatever lies in
it, so fed back it stays bounded (https://arxiv.org/abs/1901.09847).

Shape legend: R rows, B blocks of W elements, P bytes of packed codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.codecs.blocks import BlockCodec
from spes_p2p.codecs.scales import SMALLEST_SCALE, check_scales, divisors, from_scale_bits, to_scale_bits, tree_sum_


class Int4(BlockCodec):
    """16 even levels: 4.25 bits an element.

    The scale has a sign, which makes the block's largest magnitude the level -8; the other sign has seven levels. The
    error is at most half a step, 1/16 of the block's largest, and for values beyond the seventh level one step. It has
    at most half of the block's norm; a tenth of it where values are Gaussian.
    """

    name = "int4"
    block = 64
    bits = 4

    LARGEST_SCALE = 2.0**125 - 2.0**117
    """The largest bf16 of which -8 times is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor, padding: int) -> Tensor:
        most_RB1, least_RB1 = flat_RBW.amax(dim=-1, keepdim=True), flat_RBW.amin(dim=-1, keepdim=True)
        extreme_RB1 = most_RB1.where(most_RB1 >= -least_RB1, least_RB1)
        if not bool(extreme_RB1.isfinite().all()):
            raise self.refusal()
        scale_RB1 = extreme_RB1.div_(-8).clamp_(-self.LARGEST_SCALE, self.LARGEST_SCALE)
        scale_RB1 = scale_RB1.masked_fill_(scale_RB1.abs() < SMALLEST_SCALE, 0.0).to(torch.bfloat16)
        steps_RBW = torch.div(flat_RBW, divisors(scale_RB1.float())).round_().clamp_(max=7)
        first_RP, second_RP = steps_RBW.to(torch.int8).view(len(flat_RBW), 2, -1).unbind(1)
        codes_RP.view(torch.int8).copy_(first_RP.bitwise_and_(15).bitwise_or_(second_RP.bitwise_left_shift_(4)))
        return scale_RB1.view(torch.int16)

    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        scale_RB1 = scale_bits.view(torch.bfloat16).float()
        check_scales(scale_RB1.abs(), self.LARGEST_SCALE)
        signed_RP = codes_RP.view(torch.int8)
        first_RP, second_RP = out_RBW.view(len(out_RBW), 2, -1).unbind(1)
        # shifted to the right, the four bits keep their sign
        first_RP.copy_(signed_RP.bitwise_left_shift(4).bitwise_right_shift_(4))
        second_RP.copy_(signed_RP.bitwise_right_shift(4))
        out_RBW.mul_(scale_RB1)


class Int2(BlockCodec):
    """Four levels, two magnitudes with either sign: 2.25 bits an element.

    The magnitudes are the means of the block's small and of its large ones, parted by three steps of k-means. The
    error's norm is a third of Gaussian values', nothing for a block of one outlier, and never above
    sqrt(1 - 0.99 / W) of the block's.
    """

    name = "int2"
    block = 128
    scales = 2
    bits = 2

    LARGEST_SCALE = 2.0**128 - 2.0**119
    """The largest number of nine bits."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor, padding: int) -> Tensor:
        rows = zip(flat_RBW, codes_RP, strict=True)
        return torch.stack([self._encode_row(flat_BW, codes_P, padding) for flat_BW, codes_P in rows])

    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        for row in zip(scale_bits, codes_RP, out_RBW, strict=True):
            self._decode_row(*row)

    def _encode_row(self, flat_BW: Tensor, codes_P: Tensor, padding: int) -> Tensor:
        # a block is a column: additions go over whole rows. A W-th of the values, so that no sum overflows.
        flat_WB = flat_BW.t().contiguous()
        size_WB = flat_WB.abs().mul_(1 / self.block)
        num_B = torch.full((len(flat_BW),), float(self.block))
        num_B[-1] -= padding
        border_B = tree_sum_(size_WB[None].clone())[0] / num_B
        if not bool(border_B.isfinite().all()):
            raise self.refusal()
        is_large_WB, small_large_2WB = torch.empty_like(size_WB), torch.empty(2, *size_WB.shape)
        for _ in range(3):
            torch.gt(size_WB, border_B, out=is_large_WB)
            torch.mul(size_WB, is_large_WB, out=small_large_2WB[1])
            torch.sub(size_WB, small_large_2WB[1], out=small_large_2WB[0])
            num_large_B = is_large_WB.sum(dim=0)
            nums_2B = torch.stack((num_B - num_large_B, num_large_B)).clamp_(min=1)
            levels_2B = tree_sum_(small_large_2WB) / nums_2B
            border_B = (levels_2B[0] + levels_2B[1]) / 2
        is_negative_WB = torch.lt(flat_WB, 0, out=size_WB)
        codes_4P = is_large_WB.add_(is_negative_WB.mul_(2)).to(torch.int8).view(4, -1)
        packed_P = codes_P.view(torch.int8).copy_(codes_4P[0])
        for quarter in (1, 2, 3):
            packed_P.bitwise_or_(codes_4P[quarter].bitwise_left_shift_(2 * quarter))
        return to_scale_bits(levels_2B.mul_(self.block).clamp_(max=self.LARGEST_SCALE).t())

    def _decode_row(self, scale_bits: Tensor, codes_P: Tensor, out_BW: Tensor) -> None:
        levels_B2 = from_scale_bits(scale_bits)
        check_scales(levels_B2, self.LARGEST_SCALE)
        low_B, high_B = levels_B2.t().contiguous()
        codes_WB = torch.stack([codes_P.bitwise_right_shift(shift) for shift in (0, 2, 4, 6)]).view(self.block, -1)
        is_large_WB = codes_WB.bitwise_and(1).float()
        sign_WB = codes_WB.bitwise_and_(2).float().neg_().add_(1)
        # one of the two is 0, so the sum is exact
        size_WB = is_large_WB.mul(high_B).add_(is_large_WB.neg_().add_(1).mul_(low_B))
        out_BW.copy_(size_WB.mul_(sign_WB).t())
