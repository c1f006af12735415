"""Codecs by blocks: the elements of a block share a scale, and each is a few bits of it. Here those of 8 bits.

Encoded, the scales of all blocks come first and the codes of all elements after them; zeros fill up the last block.
Rows of equal length can be encoded together, one after the other: an operation on few elements costs mostly its call.
Every decoded value is one product that fp32 holds exactly, or the square of one, so all machines agree on it.

Shape legend: R rows of N elements or Y bytes, B blocks of W elements, P bytes of codes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spes_p2p.codecs.scales import check_scales, divisors, from_scale_bits, to_scale_bits
from spes_p2p.codecs.wire import SMALLEST, Codec
from spes_p2p.errors import ExchangeError


class BlockCodec(Codec):
    """What codecs by blocks have in common."""

    block: ClassVar[int]
    """Elements W of a block."""
    scales: ClassVar[int] = 1
    """Scales of a block, 16 bits each."""
    bits: ClassVar[int]
    """Bits of an element's code."""

    def num_bytes(self, numel: int) -> int:
        return self._num_blocks(numel) * (2 * self.scales + self.block * self.bits // 8)

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        flat_RN, out_RY = flat_N.view(rows, -1), out.view(rows, -1)
        num_blocks = self._num_blocks(flat_RN.shape[1])
        if not num_blocks:
            return
        edge = 2 * self.scales * num_blocks
        padding = num_blocks * self.block - flat_RN.shape[1]
        padded_RN = pad(flat_RN, (0, padding)) if padding else flat_RN
        scale_bits = self.encode_blocks(padded_RN.view(rows, num_blocks, self.block), out_RY[:, edge:], padding)
        out_RY[:, :edge].copy_(scale_bits.reshape(rows, -1).view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        out_RN, data_RY = out_N.view(rows, -1), data.view(rows, -1)
        num_blocks = self._num_blocks(out_RN.shape[1])
        if not num_blocks:
            return
        edge = 2 * self.scales * num_blocks
        is_whole = num_blocks * self.block == out_RN.shape[1]
        padded_RN = out_RN if is_whole else out_N.new_empty(rows, num_blocks * self.block)
        # a message may begin at an odd byte; its copy does not
        scale_bits = data_RY[:, :edge].contiguous().clone().view(torch.int16).view(rows, num_blocks, self.scales)
        self.decode_blocks(scale_bits, data_RY[:, edge:], padded_RN.view(rows, num_blocks, self.block))
        if not is_whole:
            out_RN.copy_(padded_RN[:, : out_RN.shape[1]])

    @abstractmethod
    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor, padding: int) -> Tensor:
        """Writes the codes to `codes_RP`, uint8, and returns the scales, int16 [R, B, scales].

        Args:
            flat_RBW: The values, at least one block.
            codes_RP: Where the codes go.
            padding: Elements at the end of a row that only fill it up.
        """

    @abstractmethod
    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        """Writes to `out_RBW` the values of what `encode_blocks` gave."""

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)


class Int8(BlockCodec):
    """255 even levels from minus to plus a block's largest magnitude: 8.125 bits an element.

    The error is at most half a step, 1/254 of the block's largest, and a twentieth of its norm.
    """

    name = "int8"
    block = 128
    bits = 8

    LARGEST_SCALE = 2.0**121 * (1 + 2.0**-7)
    """That of fp32's largest number; times 127 it is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor, padding: int) -> Tensor:
        scratch_RBW = flat_RBW.abs()
        largest_RB1 = scratch_RBW.amax(dim=-1, keepdim=True)
        if not bool((largest_RB1 < torch.inf).all()):
            raise self.refusal()
        scale_bits = to_scale_bits(largest_RB1.div_(127))
        torch.div(flat_RBW, divisors(from_scale_bits(scale_bits)), out=scratch_RBW)
        codes_RP.view(torch.int8).view_as(flat_RBW).copy_(scratch_RBW.round_())
        return scale_bits

    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        codes_RBW = codes_RP.view(torch.int8).view_as(out_RBW)
        if int(codes_RBW.amin()) < -127:
            raise ExchangeError("payload holds the int8 -128, which is no level; fetch it from another peer")
        scale_RB1 = from_scale_bits(scale_bits)
        check_scales(scale_RB1, self.LARGEST_SCALE)
        out_RBW.copy_(codes_RBW).mul_(scale_RB1)


class RootInt8(BlockCodec):
    """256 even levels of the square root, rounded up, for second moments: 8.125 bits an element.

    A second moment divides an update by its root, so it is the root that has to be near. As it is rounded up, no
    positive value becomes 0 and no update grows. The root's error is less than one step, 1/254 of the block's largest.
    """

    name = "int8"
    non_negative = True
    block = 128
    bits = 8

    LARGEST_SCALE = 2.0**56 * (1 + 2.0**-8)
    """That of fp32's largest number; the square of 255 times it is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor, padding: int) -> Tensor:
        # numpy's root is the processor's own, correctly rounded; torch's is not. That of a negative value is NaN.
        with np.errstate(invalid="ignore"):
            root_RBW = torch.from_numpy(np.sqrt(flat_RBW.detach().numpy()))
        largest_RB1 = root_RBW.amax(dim=-1, keepdim=True)
        if not bool((largest_RB1 < torch.inf).all()):
            raise self.refusal()
        scale_bits = to_scale_bits(largest_RB1.div_(255).clamp_(max=self.LARGEST_SCALE), up=True)
        steps_RBW = root_RBW.div_(divisors(from_scale_bits(scale_bits))).ceil_()
        codes_RP.view_as(flat_RBW).copy_(steps_RBW.clamp_(max=255))
        return scale_bits

    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        codes_RBW = codes_RP.view_as(out_RBW)
        scale_RB1 = from_scale_bits(scale_bits)
        check_scales(scale_RB1, self.LARGEST_SCALE)
        out_RBW.copy_(codes_RBW).mul_(scale_RB1).square_()
        if bool((scale_RB1 < 2.0**-63).any()):  # some squares may be too small for some machines, or for all
            out_RBW.clamp_(min=SMALLEST).masked_fill_((codes_RBW == 0) | (scale_RB1 == 0), 0.0)
