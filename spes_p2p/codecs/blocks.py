"""Codecs by blocks: the elements of a block share a scale, and each is a few bits of it. Here those of 8 bits.

Encoded, the scales of all blocks come first and the codes of all elements after them; zeros fill up the last block.
Every decoded value is one product that fp32 holds exactly, or the square of one, so all machines agree on it.

Shape legend: N elements of a vector, B blocks of W elements, P bytes of codes.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

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

    def encode(self, flat_N: Tensor, out: Tensor) -> None:
        num_blocks = self._num_blocks(flat_N.numel())
        if not num_blocks:
            return
        edge = 2 * self.scales * num_blocks
        padding = num_blocks * self.block - flat_N.numel()
        padded_N = torch.cat((flat_N, flat_N.new_zeros(padding))) if padding else flat_N
        scale_bits = self.encode_blocks(padded_N.view(num_blocks, self.block), out[edge:], padding)
        out[:edge].copy_(scale_bits.reshape(-1).view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor) -> None:
        num_blocks = self._num_blocks(out_N.numel())
        if not num_blocks:
            return
        edge = 2 * self.scales * num_blocks
        is_whole = num_blocks * self.block == out_N.numel()
        padded_N = out_N if is_whole else out_N.new_empty(num_blocks * self.block)
        # a message may begin at an odd byte; its copy does not
        scale_bits = data[:edge].clone().view(torch.int16).view(num_blocks, self.scales)
        self.decode_blocks(scale_bits, data[edge:], padded_N.view(num_blocks, self.block))
        if not is_whole:
            out_N.copy_(padded_N[: out_N.numel()])

    @abstractmethod
    def encode_blocks(self, flat_BW: Tensor, codes_P: Tensor, padding: int) -> Tensor:
        """Writes the codes to `codes_P`, uint8, and returns the scales, int16 [B, scales].

        Args:
            flat_BW: The values, at least one block.
            codes_P: Where the codes go.
            padding: Elements at the end that only fill up.
        """

    @abstractmethod
    def decode_blocks(self, scale_bits: Tensor, codes_P: Tensor, out_BW: Tensor) -> None:
        """Writes to `out_BW` the values of what `encode_blocks` gave."""

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

    def encode_blocks(self, flat_BW: Tensor, codes_P: Tensor, padding: int) -> Tensor:
        scratch_BW = flat_BW.abs()
        largest_B1 = scratch_BW.amax(dim=1, keepdim=True)
        if not bool((largest_B1 < torch.inf).all()):
            raise self.refusal()
        scale_bits = to_scale_bits(largest_B1.div_(127))
        torch.div(flat_BW, divisors(from_scale_bits(scale_bits)), out=scratch_BW)
        codes_P.view(torch.int8).view_as(flat_BW).copy_(scratch_BW.round_())
        return scale_bits

    def decode_blocks(self, scale_bits: Tensor, codes_P: Tensor, out_BW: Tensor) -> None:
        codes_BW = codes_P.view(torch.int8).view_as(out_BW)
        if int(codes_BW.amin()) < -127:
            raise ExchangeError("payload holds the int8 -128, which is no level; fetch it from another peer")
        scale_B1 = from_scale_bits(scale_bits)
        check_scales(scale_B1, self.LARGEST_SCALE)
        out_BW.copy_(codes_BW).mul_(scale_B1)


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

    def encode_blocks(self, flat_BW: Tensor, codes_P: Tensor, padding: int) -> Tensor:
        # numpy's root is the processor's own, correctly rounded; torch's is not. That of a negative value is NaN.
        with np.errstate(invalid="ignore"):
            root_BW = torch.from_numpy(np.sqrt(flat_BW.detach().numpy()))
        largest_B1 = root_BW.amax(dim=1, keepdim=True)
        if not bool((largest_B1 < torch.inf).all()):
            raise self.refusal()
        scale_bits = to_scale_bits(largest_B1.div_(255).clamp_(max=self.LARGEST_SCALE), up=True)
        steps_BW = root_BW.div_(divisors(from_scale_bits(scale_bits))).ceil_()
        codes_P.view_as(flat_BW).copy_(steps_BW.clamp_(max=255))
        return scale_bits

    def decode_blocks(self, scale_bits: Tensor, codes_P: Tensor, out_BW: Tensor) -> None:
        codes_BW = codes_P.view_as(out_BW)
        scale_B1 = from_scale_bits(scale_bits)
        check_scales(scale_B1, self.LARGEST_SCALE)
        out_BW.copy_(codes_BW).mul_(scale_B1).square_()
        if bool((scale_B1 < 2.0**-63).any()):  # some squares may be too small for some machines, or for all
            out_BW.clamp_(min=SMALLEST).masked_fill_((codes_BW == 0) | (scale_B1 == 0), 0.0)
