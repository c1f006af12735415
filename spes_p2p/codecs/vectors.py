"""Flat vectors to bytes and back, and bytes to digests.

Shape legend: N elements of a bundle.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError


def to_bytes(flat_N: Tensor) -> memoryview:
    """Return a contiguous fp32, or uint8, CPU vector as little-endian bytes, without a copy."""
    assert flat_N.is_contiguous() and flat_N.device.type == "cpu"
    if flat_N.dtype == torch.uint8:
        return flat_N.numpy().data
    assert flat_N.dtype == torch.float32
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


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a file in hex; it is read piece by piece."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(data: bytes | memoryview | Tensor) -> str:
    """Return the SHA-256 of bytes, or of the bytes of a flat fp32 or uint8 vector, in hex."""
    if isinstance(data, Tensor):
        data = to_bytes(data)
    return hashlib.sha256(data).hexdigest()
