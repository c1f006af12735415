"""Sparse codecs: the largest few elements of each chunk in two magnitudes, for deltas whose rest the sender keeps.

Shape legend: R rows, C chunks of N elements and Y bytes, K kept elements of a chunk, L low bits of a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from spes_p2p.codecs.blocks import Codec, check_scales, from_scale_bits, to_scale_bits
from spes_p2p.errors import ExchangeError

Array = np.ndarray
INFINITY = 0x7F800000
"""fp32's bits; those of larger magnitudes, and of NaN, are not less."""
LARGEST_SCALE = 2.0**128 - 2.0**119
"""Largest fp32 with nine significant bits."""
SPLITS = 3
"""Times that the border between the two magnitudes moves to the middle of both means."""


@dataclass(frozen=True)
class Sparse(Codec):
    """One element of `rarity` of each chunk, the largest, in 2 bits: 0.289 bits per element at 1/32, 0.883 at 1/8.

    A chunk of N elements keeps K = ceil(N / rarity). Its bytes are two scales of 16 bits, the means of the smaller and
    of the larger magnitudes, and then bits: K that choose the scale, K signs, and the positions in Elias-Fano code,
    which has a fixed length: their L = floor(log2(N / K)) low bits, first of all those of weight 1, and a field of
    K + ((N - 1) >> L) bits of which bit (p_i >> L) + i is set for the position p_i.

    Every machine writes the same bytes: of equal magnitudes the first are kept, and sums are made in one order.
    """

    rarity: int
    is_sparse = True
    block = 4096
    max_error = 0.9999
    """With one large element and many that are nearly as small as those left out."""

    def _sizes(self, numel: int) -> tuple[int, int, int]:
        """Return K, L, and the bytes of a chunk of so many elements."""
        kept = -(-numel // self.rarity)
        low = (numel // kept).bit_length() - 1
        return kept, low, 4 + -(-(3 * kept + kept * low + ((numel - 1) >> low)) // 8)

    def num_bytes(self, numel: int) -> int:
        count, rest = divmod(numel, self.block)
        return count * self._sizes(self.block)[2] + (self._sizes(rest)[2] if rest else 0)

    def _runs(self, numel: int) -> Iterator[tuple[slice, slice, int]]:
        """Yield where a row's whole chunks are, and the shorter last one: elements, bytes, elements of each chunk."""
        edge, end = numel // self.block * self.block, self.num_bytes(numel)
        byte_edge = self.num_bytes(edge)
        if edge:
            yield slice(0, edge), slice(0, byte_edge), self.block
        if edge < numel:
            yield slice(edge, numel), slice(byte_edge, end), numel - edge

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        flat_RN, out_RY = flat_N.numpy().reshape(rows, -1), out.numpy().reshape(rows, -1)
        for here, bytes_here, numel in self._runs(flat_RN.shape[1]):
            out_RY[:, bytes_here] = self._encode_chunks(flat_RN[:, here].reshape(-1, numel)).reshape(rows, -1)

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        data_RY, out_RN = data.numpy().reshape(rows, -1), out_N.numpy().reshape(rows, -1)
        for here, bytes_here, numel in self._runs(out_RN.shape[1]):
            data_CY = data_RY[:, bytes_here].reshape(-1, self._sizes(numel)[2])
            out_RN[:, here] = self._decode_chunks(data_CY, numel).reshape(rows, -1)

    def _encode_chunks(self, flat_CN: Array) -> Array:
        (count, numel), (kept, low, num_bytes) = flat_CN.shape, self._sizes(flat_CN.shape[1])
        size_CN = flat_CN.view(np.int32) & 0x7FFFFFFF  # ordered as the magnitudes are
        largest_CK = np.sort(np.partition(size_CN, numel - kept, axis=1)[:, numel - kept :], axis=1)
        if largest_CK[:, -1].max() >= INFINITY:
            raise self.refusal()
        is_kept_CN = size_CN >= largest_CK[:, :1]
        for chunk in (np.count_nonzero(is_kept_CN, axis=1) > kept).nonzero()[0]:
            ties = (size_CN[chunk] == largest_CK[chunk, 0]).nonzero()[0]
            is_kept_CN[chunk, ties[kept - np.count_nonzero(is_kept_CN[chunk]) :]] = False
        place_CK = is_kept_CN.ravel().nonzero()[0].reshape(count, kept)
        value_CK = flat_CN.ravel()[place_CK]
        place_CK = (place_CK - numel * np.arange(count)[:, None]).astype(np.int32)
        border_C1, scale_bits_C2 = _two_scales(largest_CK.view(np.float32).astype(np.float64))
        is_large_CK = (np.abs(value_CK) > border_C1) & (scale_bits_C2[:, :1] != scale_bits_C2[:, 1:])
        is_nothing_CK = np.where(is_large_CK, scale_bits_C2[:, 1:], scale_bits_C2[:, :1]) == 0

        bits = np.zeros((count, 8 * num_bytes - 32), dtype=np.uint8)
        bits[:, :kept] = is_large_CK
        bits[:, kept : 2 * kept] = (value_CK < 0) & ~is_nothing_CK
        edge = (2 + low) * kept
        bits[:, 2 * kept : edge] = ((place_CK[:, None] >> _column(low)) & 1).reshape(count, -1)
        np.put_along_axis(bits, edge + (place_CK >> low) + np.arange(kept), 1, axis=1)
        data_CY = np.concatenate((scale_bits_C2.view(np.uint8), np.packbits(bits, axis=1)), axis=1)
        is_lost_C = (is_nothing_CK & (value_CK != 0)).any(axis=1)
        if is_lost_C.any():  # a scale that became 0: keep the places that a decoded chunk would
            data_CY[is_lost_C] = self._encode_chunks(self._decode_chunks(data_CY[is_lost_C], numel))
        return data_CY

    def _decode_chunks(self, data_CY: Array, numel: int) -> Array:
        count, (kept, low, _) = len(data_CY), self._sizes(numel)
        scale_C2 = from_scale_bits(torch.from_numpy(data_CY[:, :4].copy().view(np.int16))).numpy()
        check_scales(torch.from_numpy(scale_C2), LARGEST_SCALE)
        bits = np.unpackbits(data_CY[:, 4:], axis=1)
        edge, end = (2 + low) * kept, (3 + low) * kept + ((numel - 1) >> low)
        high = bits[:, edge:end].view(bool)
        if (np.count_nonzero(high, axis=1) != kept).any() or bits[:, end:].any():  # guard: never
            raise self.malformed()
        place_CK = high.ravel().nonzero()[0].reshape(count, kept) - (end - edge) * np.arange(count)[:, None]
        place_CK = (place_CK.astype(np.int32) - _column(kept).T) << low
        for bit in range(low):
            place_CK |= bits[:, (2 + bit) * kept : (3 + bit) * kept].astype(np.int32) << bit
        is_large_CK, is_negative_CK = bits[:, :kept].view(bool), bits[:, kept : 2 * kept].view(bool)
        size_CK = np.where(is_large_CK, scale_C2[:, 1:], scale_C2[:, :1])
        if (  # guard: never
            (place_CK[:, -1] >= numel).any()
            or (place_CK[:, 1:] <= place_CK[:, :-1]).any()
            or (scale_C2[:, 0] > scale_C2[:, 1]).any()
            or (is_large_CK.any(axis=1) != (scale_C2[:, 0] != scale_C2[:, 1])).any()
            or is_large_CK.all(axis=1).any()
            or (is_negative_CK & (size_CK == 0)).any()
        ):
            raise self.malformed()
        out_CN = np.zeros((count, numel), dtype=np.float32)
        np.put_along_axis(out_CN, place_CK, np.where(is_negative_CK, -size_CK, size_CK), axis=1)
        return out_CN

    def malformed(self) -> ExchangeError:
        return ExchangeError("payload holds a sparse chunk that no encoder writes; fetch it from another peer")


def _column(num: int) -> Array:
    """Return the numbers from 0, [num, 1]."""
    return np.arange(num, dtype=np.int32)[:, None]


def _two_scales(largest_CK: Array) -> tuple[Array, Array]:
    """Return the border between small and large of ascending magnitudes, fp64 [C, 1], and both means, int16 [C, 2]."""
    kept = largest_CK.shape[1]
    sum_CK = np.cumsum(largest_CK, axis=1)  # one after the other, so that every machine rounds alike
    all_C1 = sum_CK[:, -1:]
    next_C1 = all_C1 / kept
    for _ in range(SPLITS):
        border_C1 = next_C1
        small_C1 = np.count_nonzero(largest_CK <= border_C1, axis=1, keepdims=True)
        below_C1 = np.where(small_C1 > 0, np.take_along_axis(sum_CK, np.maximum(small_C1, 1) - 1, axis=1), 0.0)
        low_C1 = below_C1 / np.maximum(small_C1, 1)
        high_C1 = (all_C1 - below_C1) / np.maximum(kept - small_C1, 1)
        low_C1, high_C1 = np.where(small_C1 > 0, low_C1, high_C1), np.where(small_C1 < kept, high_C1, low_C1)
        next_C1 = (low_C1 + high_C1) / 2
    scale_C2 = np.minimum(np.concatenate((low_C1, high_C1), axis=1), LARGEST_SCALE).astype(np.float32)
    return border_C1, to_scale_bits(torch.from_numpy(scale_C2)).numpy()
