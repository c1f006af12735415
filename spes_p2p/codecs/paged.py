"""Flat vectors in files, of which little is in memory at a time.

Shape legend: N elements of a vector.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

PIECE_NUMEL = 2**22
"""Elements that are in memory at once."""


@dataclass(frozen=True)
class Pages:
    """A vector's memory for a while: with a file, pages are in memory from their first use until `release`.

    A file is mapped until no tensor shows it any more.
    """

    values_N: Tensor
    memory: mmap.mmap | None = None

    def release(self) -> None:
        """Give pages back to the system; they are read again from its cache, or from the disk."""
        if self.memory is not None:
            self.memory.madvise(mmap.MADV_DONTNEED)


class PagedVector:
    """A flat fp32 vector: elements `start` to `stop` of a file or, if it is small or there is no disk, of a tensor.

    Only a scratch file may be written.
    """

    def __init__(self, held: Tensor | BinaryIO, start: int, stop: int, *, is_scratch: bool = False) -> None:
        self._held = held
        self._span = slice(start, stop)
        self._is_scratch = is_scratch
        self.numel = stop - start
        self.nbytes = 4 * self.numel

    @classmethod
    def of(cls, flat_N: Tensor) -> PagedVector:
        """Return a vector in memory."""
        return cls(flat_N, 0, flat_N.numel())

    @classmethod
    def of_file(cls, path: Path) -> PagedVector:
        """Return the vector of a file that nothing changes any more; it may be deleted meanwhile."""
        file = path.open("rb")
        return cls(file, 0, os.fstat(file.fileno()).st_size // 4)

    @classmethod
    def scratch(cls, numel: int, folder: Path | None) -> PagedVector:
        """Return room for a vector: where it has several pieces and there is a folder, in a nameless file there."""
        if folder is None or numel <= PIECE_NUMEL or sys.platform != "linux":
            return cls.of(torch.empty(numel))
        file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - it ends with the vector
        os.posix_fallocate(file.fileno(), 0, 4 * numel)  # a write to a page without room would end the process
        return cls(file, 0, numel, is_scratch=True)

    def part(self, start: int, stop: int) -> PagedVector:
        """Return elements `start` to `stop`."""
        first = self._span.start
        return PagedVector(self._held, first + start, first + stop, is_scratch=self._is_scratch)

    def open(self) -> Pages:
        """Return the vector's memory; a tensor of it is not to be written, unless it is a scratch."""
        if isinstance(self._held, Tensor):
            return Pages(self._held[self._span])
        if not self.numel:
            return Pages(torch.empty(0))
        access = mmap.ACCESS_WRITE if self._is_scratch else mmap.ACCESS_COPY  # torch has no tensors to read only
        memory = mmap.mmap(self._held.fileno(), 0, access=access)
        return Pages(torch.frombuffer(memory, dtype=torch.float32)[self._span], memory)

    def whole(self) -> Tensor:
        """Return the vector, which takes memory where it is read, until the tensor ends."""
        return self.open().values_N

    def pieces(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the vector piece by piece, with each one's place; a piece leaves memory when the next is asked for."""
        pages = self.open()
        for start in range(0, self.numel, PIECE_NUMEL):
            here = slice(start, min(start + PIECE_NUMEL, self.numel))
            yield here, pages.values_N[here]
            pages.release()


DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""Names in the format safetensors."""


def save_tensors(tensors: Mapping[str, Tensor | PagedVector], path: Path) -> None:
    """Write tensors on the CPU as safetensors; of a vector in a file, piece by piece.

    The library's own `save_file` needs all that it writes in memory at once.
    """
    header: dict[str, object] = {}
    end = 0
    for name, each in tensors.items():
        shape, dtype = (
            ([each.numel], torch.float32) if isinstance(each, PagedVector) else (list(each.shape), each.dtype)
        )
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [end, end + each.nbytes]}
        end += each.nbytes
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for each in tensors.values():
            pieces = each.pieces() if isinstance(each, PagedVector) else [(slice(0, None), each)]
            for _, piece in pieces:
                file.write(piece.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
