"""The forms in which peers keep the weights of slots that they do not train, and in which these travel.

A form follows from the fp32 values, to the bit, on every machine, and encoding what was decoded gives the same bytes.

Shape legend: N elements of a vector, B blocks of W elements that share a scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from spes_p2p.codecs.blocks import SMALLEST_SCALE, are_good, divisors
from spes_p2p.errors import ExchangeError

PIECE_NUMEL = 2**18
"""Elements encoded at a time, whole blocks: temporary tensors stay small."""

INT8_BLOCK = 128
"""Elements that share one scale."""
_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**121
"""Smaller scales are not exact; 127 times larger ones overflows."""


def quantise_int8(flat_N: Tensor) -> tuple[Tensor, Tensor]:
    """Round a flat vector to int8, each block of `INT8_BLOCK` elements with its own scale.

    A scale is the block's largest magnitude over 127, rounded to 17 significant bits. Its products with an int8 are
    therefore exact in fp32: every machine decodes the same bits, and quantising those gives the same bytes.

    Returns:
        Values int8 [N] in [-127, 127], and scales fp32 [ceil(N / INT8_BLOCK)]. A block whose magnitudes are all below
        about 1e-36 becomes zeros, with the scale 0.
    """
    values_N = torch.empty(flat_N.shape, dtype=torch.int8, device=flat_N.device)
    scales_B = torch.empty(num_int8_blocks(flat_N.numel()), dtype=torch.float32, device=flat_N.device)
    for part_BW, values_BW, scales_B1 in _int8_parts(flat_N.float(), values_N, scales_B):
        scratch_BW = part_BW.abs()
        scales_B1.copy_(_int8_scale(scratch_BW.amax(dim=1, keepdim=True)))
        torch.div(part_BW, scales_B1.where(scales_B1 > 0, 1.0), out=scratch_BW)
        values_BW.copy_(scratch_BW.round_().clamp_(-127, 127))
    if not torch.isfinite(scales_B).all():
        raise ValueError("NaN or infinity cannot be held in int8; discard these values and take the last good ones")
    return values_N, scales_B


def dequantise_int8(values_N: Tensor, scales_B: Tensor) -> Tensor:
    """Return the fp32 vector [N] of values and scales from `quantise_int8`."""
    assert len(scales_B) == num_int8_blocks(len(values_N)), f"{len(scales_B)} scales, {len(values_N)} values"
    flat_N = values_N.to(torch.float32)
    for part_BW, _, scales_B1 in _int8_parts(flat_N, values_N, scales_B):
        part_BW.mul_(scales_B1)
    return flat_N


def num_int8_blocks(numel: int) -> int:
    """Return the number of blocks, and so of scales, of a vector."""
    return -(-numel // INT8_BLOCK)


def _int8_scale(largest_B1: Tensor) -> Tensor:
    """Return the scales of blocks with these largest magnitudes; not finite if those are not."""
    scale_B1 = (largest_B1 / 127).view(torch.int32).add_(0x40).bitwise_and_(~0x7F).view(torch.float32)
    scale_B1 = scale_B1.clamp_(max=_MAX_SCALE).where(torch.isfinite(largest_B1), torch.nan)
    return scale_B1.where(scale_B1.nan_to_num(1.0) >= _MIN_SCALE, 0.0)


def _int8_parts(flat_N: Tensor, values_N: Tensor, scales_B: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield views of the vectors and their scales: of the whole blocks, then of the remaining elements."""
    whole = flat_N.numel() // INT8_BLOCK
    edge = whole * INT8_BLOCK
    if whole:
        yield flat_N[:edge].view(whole, -1), values_N[:edge].view(whole, -1), scales_B[:whole, None]
    if edge < flat_N.numel():
        yield flat_N[None, edge:], values_N[None, edge:], scales_B[whole:, None]


NF4_BLOCK = 64
"""Elements that share one scale."""
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634),
    *(0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
"""The values of the 16 codes, exact in fp32. Source: QLoRA, appendix E (https://arxiv.org/abs/2305.14314)."""
NF4_BORDERS = (
    *(-0.8480963706970215, -0.6106328964233398, -0.4599952697753906, -0.33967941999435425, -0.23460739850997925),
    *(-0.13791173696517944, -0.045525018125772476, 0.03979014977812767, 0.120255246758461, 0.2035212516784668),
    *(0.2920137643814087, 0.3893125355243683, 0.5016634464263916, 0.6427869200706482, 0.8614784479141235),
)
"""The means of neighbours, rounded to fp32; values above the k-th have a code above k."""


def quantise_nf4(flat_N: Tensor) -> tuple[Tensor, Tensor]:
    """Round a vector to 16 levels, each block of `NF4_BLOCK` elements with its own scale, its largest magnitude.

    bitsandbytes decodes the result. A quotient on a border gets the lower level.

    Returns:
        Codes uint8 [B * 32], two elements a byte, the first in the high bits; scales fp32 [B]. The last block is
        padded with zeros. A block whose magnitudes are all below 2^-100 becomes zeros, with the scale 0.
    """
    num_blocks = -(-flat_N.numel() // NF4_BLOCK)
    packed = torch.empty(num_blocks * NF4_BLOCK // 2, dtype=torch.uint8, device=flat_N.device)
    scales_B = torch.empty(num_blocks, dtype=torch.float32, device=flat_N.device)
    padding = num_blocks * NF4_BLOCK - flat_N.numel()
    for start in range(0, num_blocks, PIECE_NUMEL // NF4_BLOCK):
        stop = min(start + PIECE_NUMEL // NF4_BLOCK, num_blocks)
        piece_N = flat_N[start * NF4_BLOCK : stop * NF4_BLOCK].float()
        part_BW = (pad(piece_N, (0, padding)) if padding and stop == num_blocks else piece_N).view(-1, NF4_BLOCK)
        largest_B = part_BW.abs().amax(dim=1)
        scales_B[start:stop] = largest_B.masked_fill(largest_B < SMALLEST_SCALE, 0.0)
        share_BW = part_BW / divisors(scales_B[start:stop, None])
        # In fp32, as torch compares three times slower into another type.
        codes_BW, is_above_BW = torch.zeros_like(share_BW), torch.empty_like(share_BW)
        for border in NF4_BORDERS:
            codes_BW += torch.gt(share_BW, border, out=is_above_BW)
        pairs = codes_BW.to(torch.uint8).view(torch.int16).view(-1)  # the first code of a pair is the low byte
        packed[start * NF4_BLOCK // 2 : stop * NF4_BLOCK // 2] = pairs.bitwise_left_shift(4).add_(pairs >> 8)
    if not bool((scales_B < torch.inf).all()):
        raise ValueError("NaN or infinity cannot be held in nf4; discard these values and take the last good ones")
    return packed, scales_B


def dequantise_nf4(packed: Tensor, scales_B: Tensor) -> Tensor:
    """Return the fp32 values [B * W] of codes and scales from `quantise_nf4`."""
    pairs_P = _nf4_pairs().take(packed.long())
    return pairs_P.view(torch.float32).view(-1, NF4_BLOCK).mul_(scales_B[:, None]).view(-1)


@cache
def _nf4_pairs() -> Tensor:
    """Return the fp32 values of a byte's two codes before scaling, both in one element: int64 [256]."""
    levels = torch.tensor(NF4_LEVELS)
    return torch.cartesian_prod(levels, levels).view(torch.int64).view(-1)


@cache
def _nf4_squares() -> Tensor:
    """Return the sums of the squares of a byte's two codes, before scaling: fp32 [256]."""
    return _nf4_pairs().view(torch.float32).view(-1, 2).square().sum(dim=1)


def _round_to_bf16(flat_N: Tensor) -> tuple[Tensor]:
    rounded_N = flat_N.to(torch.bfloat16)
    if not are_good(rounded_N):
        raise ValueError("NaN or infinity cannot be held in bf16; discard these values and take the last good ones")
    return (rounded_N,)


@dataclass(frozen=True)
class Form:
    """A precision in which weights are kept: codes, and if they have any, the scales of blocks.

    Attributes:
        block: Elements that share a scale.
        packed: Elements of a code; the last block is padded if they are several.
        dtypes: Of the codes, and of the scales.
        encode: Returns codes and scales of fp32 values, or raises ValueError if one is not finite.
        decode: Returns the fp32 values of codes and scales, those of padding included.
    """

    block: int
    packed: int
    dtypes: tuple[torch.dtype, ...]
    encode: Callable[[Tensor], tuple[Tensor, ...]]
    decode: Callable[..., Tensor]

    def sizes(self, numel: int) -> tuple[int, ...]:
        """Return the numbers of codes and scales of a vector."""
        num_blocks = -(-numel // self.block)
        num_codes = numel if self.packed == 1 else num_blocks * self.block // self.packed
        return (num_codes, num_blocks)[: len(self.dtypes)]


FORMS: dict[str, Form] = {
    "fp32": Form(1, 1, (torch.float32,), lambda flat_N: (flat_N,), lambda codes: codes),
    "bf16": Form(1, 1, (torch.bfloat16,), _round_to_bf16, lambda codes: codes.float()),
    "int8": Form(INT8_BLOCK, 1, (torch.int8, torch.float32), quantise_int8, dequantise_int8),
    "nf4": Form(NF4_BLOCK, 2, (torch.uint8, torch.float32), quantise_nf4, dequantise_nf4),
}


class KeptForm:
    """One slot's weights in the form in which peers that do not train it keep it.

    The bytes are the codes, followed by their blocks' scales, over the whole flat vector. Every tensor begins with a
    block, so that a store takes its part of the bytes as it is: the number of elements of each is a multiple of 128
    (`RunConfig.kept_form`).

    Args:
        storage: A name in `FORMS`.
        numel: Elements of a slot.
    """

    def __init__(self, storage: str, numel: int) -> None:
        self.storage = storage
        self.numel = numel
        self._kind = FORMS[storage]
        self.num_bytes = self._places(0, numel)[-1].stop

    def encode(self, flat_N: Tensor) -> Tensor:
        """Return the form of fp32 values on the CPU, uint8 [num_bytes]."""
        assert flat_N.numel() == self.numel, f"a slot of {flat_N.numel()} elements, not {self.numel}"
        data = torch.empty(self.num_bytes, dtype=torch.uint8)
        for start, stop in self._pieces():
            for place, part in zip(self._places(start, stop), self._kind.encode(flat_N[start:stop]), strict=True):
                data[place] = part.view(torch.uint8)
        return data

    def _pieces(self) -> Iterator[tuple[int, int]]:
        return ((start, min(start + PIECE_NUMEL, self.numel)) for start in range(0, self.numel, PIECE_NUMEL))

    def _places(self, start: int, stop: int) -> list[slice]:
        """Return where the codes, and the scales, of elements `start` to `stop` are; both are borders of blocks."""
        places, begin = [], 0
        sizes = (self._kind.sizes(numel) for numel in (start, stop, self.numel))
        for dtype, first, last, total in zip(self._kind.dtypes, *sizes, strict=True):
            places.append(slice(begin + first * dtype.itemsize, begin + last * dtype.itemsize))
            begin += total * dtype.itemsize
        return places

    def parts(self, data: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return copies of what a store keeps of elements `start` to `stop`, whole blocks: codes, and scales."""
        block = self._kind.block
        assert start % block == 0 and (stop % block == 0 or stop == self.numel), f"{start} to {stop}"
        return tuple(part.clone() for part in self.views(data, start, stop))

    def views(self, data: Tensor, start: int, stop: int) -> Iterator[Tensor]:
        """Yield the same, which share memory with `data` where it is aligned."""
        for place, dtype in zip(self._places(start, stop), self._kind.dtypes, strict=True):
            yield (data[place].clone() if place.start % dtype.itemsize else data[place]).view(dtype)

    def values(self, data: Tensor) -> Tensor:
        """Return the fp32 values [N] of a form, uint8 [num_bytes]."""
        flat_N = torch.empty(self.numel)
        for start, stop in self._pieces():
            flat_N[start:stop] = self._kind.decode(*self.parts(data, start, stop))[: stop - start]
        return flat_N

    def length(self, data: Tensor) -> float:
        """Return the Euclidean norm of a form's values."""
        squares = 0.0
        for start, stop in self._pieces():
            parts = self.parts(data, start, stop)
            if self.storage == "nf4":
                blocks_B = _nf4_squares().take(parts[0].long()).view(-1, NF4_BLOCK // 2).sum(dim=1)
                squares += float(blocks_B.double() @ parts[1].double().square())
            else:
                squares += float(self._kind.decode(*parts).norm()) ** 2
        return math.sqrt(squares)

    def decode(self, data: bytes | memoryview) -> Tensor:
        """Return a peer's bytes as a form, uint8 [num_bytes].

        Raises:
            ExchangeError: the length is wrong, or `encode` cannot have written these bytes.
        """
        if len(data) != self.num_bytes:
            raise ExchangeError(f"payload of {len(data)} bytes, expected {self.num_bytes}; fetch it from another peer")
        form = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
        *_, numbers = self.views(form, 0, self.numel)
        if not are_good(numbers, non_negative=len(self._kind.dtypes) > 1):  # guard: never
            raise ExchangeError(f"payload holds {self.storage} values that are not finite; fetch it from another peer")
        return form
