"""Tensors to flat vectors, vectors to bytes, bytes to digests, and back.

Shape legend: N elements of a bundle, B blocks of W elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError
from spes_p2p.parts import whole

Shape = tuple[int, ...]

INT8_BLOCK = 128
"""Elements that share one scale."""
_MIN_SCALE, _MAX_SCALE = 2.0**-126, 2.0**121
"""Scales below are too small to be exact; 127 times those above overflows."""


class Layout:
    """The order and shapes in which a bundle's named tensors lie in one flat fp32 vector.

    Every peer derives the same layout from the run's model, so a bundle crosses the network as bare numbers.

    Args:
        shapes: Shape of each tensor by name; laid out in sorted order of the names.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes.values()]
        self.numel = sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one new fp32 CPU vector [N].

        Raises:
            ValueError: names or shapes differ from the layout's.
        """
        if set(tensors) != set(self.shapes):
            raise ValueError(f"tensors {sorted(tensors)[:3]}... are not the layout's {list(self.shapes)[:3]}...")
        flat_N = torch.empty(self.numel, dtype=torch.float32)
        for piece, (name, shape) in zip(flat_N.split(self.sizes), self.shapes.items(), strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the layout says {shape}")
            piece.copy_(whole(tensors[name].detach()).reshape(-1))
        return flat_N

    def unflatten(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return views of `flat_N` by name.

        Raises:
            ValueError: `flat_N` has another length.
        """
        if flat_N.numel() != self.numel:
            raise ValueError(f"vector of {flat_N.numel()} elements does not fit a layout of {self.numel}")
        pieces = flat_N.split(self.sizes)
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}


def to_bytes(flat_N: Tensor) -> memoryview:
    """Return a contiguous fp32 CPU vector as little-endian bytes, without a copy."""
    assert flat_N.dtype == torch.float32 and flat_N.is_contiguous() and flat_N.device.type == "cpu"
    return flat_N.detach().numpy().astype("<f4", copy=False).data.cast("B")


def from_bytes(data: bytes | memoryview, numel: int) -> Tensor:
    """Return a new fp32 vector [numel] from little-endian bytes of a peer.

    Raises:
        ExchangeError: wrong length, or a value that is not finite.
    """
    if len(data) != 4 * numel:
        raise ExchangeError(f"payload of {len(data)} bytes, expected {4 * numel}; fetch it from another peer")
    flat_N = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    if not torch.isfinite(flat_N).all():
        raise ExchangeError("payload holds NaN or infinity; fetch it from another peer")
    return flat_N


def digest(data: bytes | memoryview | Tensor) -> str:
    """Return the SHA-256 of bytes, or of a flat fp32 vector's bytes, in hex."""
    return hashlib.sha256(to_bytes(data) if isinstance(data, Tensor) else data).hexdigest()


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
