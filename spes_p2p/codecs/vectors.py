"""Converts named tensors to flat vectors, vectors to bytes, and back; names bytes by the hashes of their blocks.

Shape legend: N elements of a vector.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from spes_p2p.dtensor import full_tensor
from spes_p2p.errors import ExchangeError


def to_bytes(flat_N: Tensor) -> memoryview:
    """Return a contiguous fp32 or uint8 CPU vector as little-endian bytes, without a copy."""
    assert flat_N.is_contiguous() and flat_N.device.type == "cpu"
    if flat_N.dtype == torch.uint8:
        return flat_N.numpy().data
    assert flat_N.dtype == torch.float32
    return flat_N.detach().numpy().astype("<f4", copy=False).data.cast("B")


def from_bytes(data: bytes | memoryview, numel: int) -> Tensor:
    """Return a new fp32 vector [numel] from a peer's little-endian bytes.

    Raises:
        ExchangeError: the length is wrong, or a value is not finite.
    """
    if len(data) != 4 * numel:
        raise ExchangeError(f"payload of {len(data)} bytes, expected {4 * numel}; fetch it from another peer")
    flat_N = torch.from_numpy(np.frombuffer(data, dtype="<f4").astype(np.float32))
    if not torch.isfinite(flat_N).all():
        raise ExchangeError("payload holds NaN or infinity; fetch it from another peer")
    return flat_N


BLOCK_BYTES = 2**20
"""Length of a version's blocks, but for the last one, which may be shorter."""
HASH_BYTES = 32


class BlockHasher:
    """Hashes bytes, as they come, in blocks of BLOCK_BYTES: with the hashes, each block can be verified alone."""

    def __init__(self) -> None:
        self._hashes = bytearray()
        self._block = hashlib.sha256()
        self._room = BLOCK_BYTES

    def update(self, data: bytes | memoryview) -> None:
        """Hash the bytes that come next."""
        rest = memoryview(data)
        while rest:
            if not self._room:
                self._hashes += self._block.digest()
                self._block, self._room = hashlib.sha256(), BLOCK_BYTES
            piece, rest = rest[: self._room], rest[self._room :]
            self._block.update(piece)
            self._room -= len(piece)

    def finish(self) -> bytes:
        """Return the SHA-256 of each block, one after the other; no bytes at all are one empty block."""
        return bytes(self._hashes + self._block.digest())


def block_hashes(data: bytes | memoryview | Tensor) -> bytes:
    """Return the SHA-256 of each block of bytes, or of the bytes of a flat fp32 or uint8 vector."""
    hasher = BlockHasher()
    hasher.update(to_bytes(data) if isinstance(data, Tensor) else data)
    return hasher.finish()


def hashes_of_file(path: Path) -> bytes:
    """Return the SHA-256 of each block of a file, of which one block is in memory at a time."""
    hasher, block = BlockHasher(), memoryview(bytearray(BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(block):
            hasher.update(block[:count])
    return hasher.finish()


def digest_of(hashes: bytes) -> str:
    """Return the digest of a version whose blocks have these hashes: their SHA-256, in hex."""
    return hashlib.sha256(hashes).hexdigest()


def digest(data: bytes | memoryview | Tensor) -> str:
    """Return the digest of a version with these bytes, or with those of a flat fp32 or uint8 vector."""
    return digest_of(block_hashes(data))


def has_digest(path: Path, digest: str) -> bool:
    """Check whether a file can be read, and holds the version with this digest."""
    try:
        return digest_of(hashes_of_file(path)) == digest
    except OSError:
        return False


Shape = tuple[int, ...]
Name = TypeVar("Name", bound=str | int)


class LazyVectors(Mapping[Name, Tensor]):
    """Flat vectors by name, each read again when it is asked for, so that memory need not hold more than one."""

    def __init__(self, names: Iterable[Name], read: Callable[[Name], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: Name) -> Tensor:
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names  # without reading it, as `Mapping` would

    def __iter__(self) -> Iterator[Name]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Layout:
    """The order and shapes of named tensors in one flat fp32 vector, sorted by name.

    Every peer derives the same layout from the run's model, so vectors cross the network as bare numbers.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes.values()]
        self.numel = sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one fp32 CPU vector [N]."""
        assert set(tensors) == set(self.shapes), f"{sorted(tensors)[:3]}..., not {list(self.shapes)[:3]}..."
        flat_N = torch.empty(self.numel, dtype=torch.float32)
        for piece, (name, shape) in zip(flat_N.split(self.sizes), self.shapes.items(), strict=True):
            assert tuple(tensors[name].shape) == shape, f"{name}: {tuple(tensors[name].shape)}, not {shape}"
            piece.copy_(full_tensor(tensors[name].detach()).reshape(-1))
        return flat_N

    def unflatten(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return views of `flat_N` by name."""
        assert flat_N.numel() == self.numel, f"vector of {flat_N.numel()} elements, not {self.numel}"
        pieces = flat_N.split(self.sizes)
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}
