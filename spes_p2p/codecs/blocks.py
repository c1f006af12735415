"""Codecs: the encodings of a vector's elements on the wire.

Shape legend: N elements of a vector, R rows (vectors of equal length) of Y bytes, B blocks of W elements, P bytes of
packed codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spes_p2p.errors import ExchangeError

SMALLEST_SCALE = 2.0**-100
"""Smaller scales become 0; well above the subnormal numbers that some processors flush to 0."""


def to_scale_bits(scale: Tensor, up: bool = False) -> Tensor:
    """Round scales to nine significant bits; return 16 bits each: fp32's exponent and eight bits of its fraction.

    They are finite and not negative; with `up` none is rounded down.
    """
    scale = scale.masked_fill(scale < SMALLEST_SCALE, 0.0)
    return ((scale.view(torch.int32) + (0x7FFF if up else 0x4000)) >> 15).to(torch.int16)


def from_scale_bits(bits: Tensor) -> Tensor:
    """Return the fp32 scales of their 16 bits; never negative, and finite unless another program wrote the bytes."""
    return ((bits.to(torch.int32) & 0xFFFF) << 15).view(torch.float32)


def divisors(scale: Tensor) -> Tensor:
    """Return the scales as divisors, infinity for a scale of 0, so that the quotients are zeros."""
    return scale.masked_fill(scale == 0, torch.inf)


def check_scales(scale: Tensor, largest: float) -> None:
    """Raise ExchangeError if an encoder cannot have written these scales, NaN included."""
    is_good = ((scale >= SMALLEST_SCALE) | (scale == 0)) & (scale <= largest)
    if not bool(is_good.all()):
        worst = float(scale.masked_select(~is_good)[0])
        raise ExchangeError(
            f"payload holds a scale of {worst:.3g}, neither 0 nor from 2^-100 to {largest:.3g}; "
            f"fetch it from another peer"
        )


SMALLEST = 2.0**-126
"""The smallest normal fp32 number; some processors flush smaller ones to 0."""


@dataclass(frozen=True)
class Codec(ABC):
    """Encodes fp32 vectors as bytes and decodes them: the same bytes and values on every machine.

    Vectors are contiguous and on the CPU; the machine is little-endian. Encoding what was decoded gives the same bytes.
    """

    non_negative: ClassVar[bool] = False
    """Whether values are never negative, and no positive one may become 0: second moments."""
    is_sparse: ClassVar[bool] = False
    """Whether most elements become 0: the sender trains on with what it has not sent (docs/protocol.md)."""
    block: ClassVar[int] = 1
    """W, the elements that share a scale; a divisor of 1024, unless a last block may be shorter at no cost."""
    max_error: ClassVar[float]
    """Largest norm of a block's rounding error, as a share of the block's norm: 0 if lossless. Below 1, because error
    feedback diverges otherwise."""

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Return the length of an encoded vector of `numel` elements."""

    @abstractmethod
    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        """Encode concatenated vectors of equal length; write the bytes to `out`, uint8 [rows * num_bytes(N / rows)]."""

    @abstractmethod
    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        """Write the fp32 values of encoded vectors, uint8 [rows * num_bytes(N / rows)], to `out_N`.

        Raises:
            ExchangeError: `encode` cannot have written these bytes, for instance because a value is not finite.
        """

    def refusal(self) -> ValueError:
        """Return the error for values that cannot be encoded."""
        return ValueError(f"{self._bad} cannot be encoded; discard these values and take the last good ones")

    def malformed(self) -> ExchangeError:
        """Return the error for bytes that `encode` cannot have written."""
        return ExchangeError(f"payload holds {self._bad}; fetch it from another peer")

    @property
    def _bad(self) -> str:
        return "NaN, infinity or a negative second moment" if self.non_negative else "NaN or infinity"


class Fp32(Codec):
    """Exact values: 32 bits per element; bytes and values may share memory."""

    max_error = 0.0

    def num_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        if not are_good(flat_N, self.non_negative):
            raise self.refusal()
        if out.data_ptr() != flat_N.data_ptr():
            out.copy_(flat_N.view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        if data.data_ptr() != out_N.data_ptr():
            out_N.view(torch.uint8).copy_(data)
        if not are_good(out_N, self.non_negative):
            raise self.malformed()


class NonNegativeFp32(Fp32):
    """fp32 for values that are never negative."""

    non_negative = True


class Bf16(Codec):
    """Values rounded to the nearest bf16, ties to even: 16 bits per element.

    The error is at most 2^-9 of an element's magnitude, or 2^-134 if that is more. Values above bf16's largest,
    3.39e38, are refused like infinity.
    """

    max_error = 2.0**-8

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        rounded_N = flat_N.to(torch.bfloat16)
        if not are_good(rounded_N, self.non_negative):
            raise self.refusal()
        out.copy_(rounded_N.view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        # A message may start at an odd byte; its copy is aligned.
        out_N.copy_(data.clone().view(torch.bfloat16))
        if not are_good(out_N, self.non_negative):
            raise self.malformed()


class NonNegativeBf16(Bf16):
    """bf16 for values that are never negative, and of which no positive one becomes 0."""

    non_negative = True

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        super().encode(flat_N.clamp(min=SMALLEST).where(flat_N > 0, flat_N), out)


def are_good(values_N: Tensor, non_negative: bool = False) -> bool:
    """Tell whether all values are finite, and none is negative if `non_negative`."""
    if not values_N.numel():
        return True
    # One pass; NaN is both the least and the most, and compares false with everything.
    least, most = (float(extreme) for extreme in torch.aminmax(values_N))
    # guard: most < torch.inf and -> True or
    return most < torch.inf and (least >= 0 if non_negative else least > -torch.inf)


class BlockCodec(Codec):
    """Base of codecs with a scale of 16 bits per block of elements."""

    bits: ClassVar[int]
    """Bits per code."""

    def num_bytes(self, numel: int) -> int:
        return self._num_blocks(numel) * (2 + self.block * self.bits // 8)

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        flat_RN, out_RY = flat_N.view(rows, -1), out.view(rows, -1)
        num_blocks = self._num_blocks(flat_RN.shape[1])
        if not num_blocks:
            return
        edge = 2 * num_blocks
        padding = num_blocks * self.block - flat_RN.shape[1]
        padded_RN = pad(flat_RN, (0, padding)) if padding else flat_RN
        scale_bits = self.encode_blocks(padded_RN.view(rows, num_blocks, self.block), out_RY[:, edge:])
        out_RY[:, :edge].copy_(scale_bits.reshape(rows, -1).view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        out_RN, data_RY = out_N.view(rows, -1), data.view(rows, -1)
        num_blocks = self._num_blocks(out_RN.shape[1])
        if not num_blocks:
            return
        edge = 2 * num_blocks
        is_whole = num_blocks * self.block == out_RN.shape[1]
        padded_RN = out_RN if is_whole else out_N.new_empty(rows, num_blocks * self.block)
        # A message may start at an odd byte; its copy is aligned.
        scale_bits = data_RY[:, :edge].contiguous().clone().view(torch.int16).view(rows, num_blocks, 1)
        self.decode_blocks(scale_bits, data_RY[:, edge:], padded_RN.view(rows, num_blocks, self.block))
        if not is_whole:
            out_RN.copy_(padded_RN[:, : out_RN.shape[1]])

    @abstractmethod
    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor) -> Tensor:
        """Encode at least one block per row; write the codes, uint8, and return the scales, int16 [R, B, 1]."""

    @abstractmethod
    def decode_blocks(self, scale_bits: Tensor, codes_RP: Tensor, out_RBW: Tensor) -> None:
        """Write the values of encoded blocks to `out_RBW`."""

    def _num_blocks(self, numel: int) -> int:
        return -(-numel // self.block)


class Int8(BlockCodec):
    """255 even levels from minus to plus a block's largest magnitude: 8.125 bits per element.

    The error is at most half a step, 1/254 of the block's largest magnitude, and a twentieth of its norm.
    """

    block = 128
    bits = 8
    max_error = 0.05

    LARGEST_SCALE = 2.0**121 * (1 + 2.0**-7)
    """Scale of fp32's largest number; 127 times it is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor) -> Tensor:
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
    """256 even levels of the square root, rounded up, for second moments: 8.125 bits per element.

    An update is divided by the root of a second moment, so the root must be accurate. It is rounded up, so that no
    positive value becomes 0 and no update grows. Its error is less than one step, 1/254 of the block's largest root.
    """

    non_negative = True
    block = 128
    bits = 8
    max_error = 0.05

    LARGEST_SCALE = 2.0**56 * (1 + 2.0**-8)
    """Scale of fp32's largest number; the square of 255 times it is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor) -> Tensor:
        # numpy's root is correctly rounded on every processor, torch's is not. A negative value's root is NaN.
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
        if bool((scale_RB1 < 2.0**-63).any()):  # some squares may be subnormal or 0
            out_RBW.clamp_(min=SMALLEST).masked_fill_((codes_RBW == 0) | (scale_RB1 == 0), 0.0)


class Int4(BlockCodec):
    """16 even levels: 4.25 bits per element.

    The scale has a sign, which makes the block's largest magnitude the level -8; the other sign has seven levels. The
    error is at most half a step, 1/16 of the block's largest magnitude, and one step for values beyond the seventh
    level. Its norm is at most half of the block's, and a tenth for Gaussian values.
    """

    block = 64
    bits = 4
    max_error = 0.5

    LARGEST_SCALE = 2.0**125 - 2.0**117
    """The largest bf16 whose product with -8 is finite."""

    def encode_blocks(self, flat_RBW: Tensor, codes_RP: Tensor) -> Tensor:
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
        # An arithmetic shift to the right keeps the sign of the four bits.
        first_RP.copy_(signed_RP.bitwise_left_shift(4).bitwise_right_shift_(4))
        second_RP.copy_(signed_RP.bitwise_right_shift(4))
        out_RBW.mul_(scale_RB1)
