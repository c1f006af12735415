"""A file of tokens, of any format: where its documents lie, and the checks that all formats share.

Shape legend: D documents of a file.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spes_p2p.errors import DataError
from spes_p2p.fs import State, file_state

SAMPLE_TOKENS = 2**16


@dataclass(frozen=True)
class Shard:
    """The tokens of one file.

    Attributes:
        path: File that is mapped.
        source: File that the user named, for messages.
        dtype: Little-endian integers.
        starts_D: First byte of each document, int64.
        lengths_D: Tokens of each document, int64.
        has_documents: Whether these are documents; otherwise all tokens of the file are one run, D = 1.
        splits_D2: The two numbers that decide each document's split, uint64, where the file has them.
        stat: State of `path` when it was opened.
    """

    path: Path
    source: Path
    dtype: np.dtype
    starts_D: np.ndarray
    lengths_D: np.ndarray
    has_documents: bool = True
    splits_D2: np.ndarray | None = None
    stat: State = (0, 0, 0, 0)


def checked_shard(path: Path, dtype: np.dtype, starts_D: np.ndarray, lengths_D: np.ndarray, **more: Any) -> Shard:
    """Return a shard after checking that its documents lie within its file."""
    state = file_state(path)
    if len(starts_D):
        if starts_D.min() < 0 or lengths_D.min() < 0:
            raise DataError(f"{path}: its index has negative positions; it is damaged, write it again")
        if (last := int((starts_D + lengths_D * dtype.itemsize).max())) > state[1]:
            raise DataError(f"{path} has {state[1]} bytes, but its index {last}; it is truncated, fetch it again")
    if not lengths_D.sum():
        raise DataError(f"{path} holds no tokens; leave it out")
    return Shard(path, more.pop("source", path), dtype, starts_D, lengths_D, stat=state, **more)


def from_ends(path: Path, dtype: np.dtype, ends_D: np.ndarray, **more: Any) -> Shard:
    """Return a shard of documents that follow each other."""
    lengths_D = np.diff(ends_D, prepend=0)
    return checked_shard(path, dtype, (ends_D - lengths_D) * dtype.itemsize, lengths_D, **more)


def dtype_by_size(path: Path, num_tokens: int, index: Path) -> np.dtype:
    """Return the type of so many tokens that fill a file."""
    size = path.stat().st_size
    for name in ("<u2", "<u4"):
        if num_tokens and num_tokens * np.dtype(name).itemsize == size:
            return np.dtype(name)
    raise DataError(
        f"{path} has {size} bytes, but {index.name} counts {num_tokens} tokens, of two or four bytes each; it is "
        f"truncated, or the index belongs to another file: fetch both again"
    )


def raw_dtype(path: Path, vocab_size: int) -> np.dtype:
    """Tell uint16 from uint32 in a file without a header, by the vocabulary and the high halves of its first ids.

    Ids of a small vocabulary as uint32 have high halves of 0; as uint16, every second id would have to be token 0.
    """
    size = path.stat().st_size
    if vocab_size > 2**16:
        dtype = np.dtype("<u4")
    else:
        first_N = np.fromfile(path, "<u2", count=SAMPLE_TOKENS)
        is_wide = size % 4 == 0 and len(first_N) > 1 and not first_N[1::2].any()
        dtype = np.dtype("<u4" if is_wide else "<u2")
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is no number of {dtype.name} tokens; it is truncated, or data.tokenizer "
            f"is not the one that made it"
        )
    return dtype


def whole_file(path: Path, dtype: np.dtype, start: int = 0) -> Shard:
    """Return a shard without documents."""
    length = (path.stat().st_size - start) // dtype.itemsize
    return checked_shard(path, dtype, np.array([start], np.int64), np.array([length], np.int64), has_documents=False)


def check_size(file: Path, *expected: int) -> None:
    """Refuse a file that has none of some sizes.

    Raises:
        DataError: it has not.
    """
    if (size := file.stat().st_size) not in expected:
        raise DataError(f"{file} has {size} bytes instead of {expected[0]}; it is truncated, fetch it again")


def read_index(path: Path, dtype: np.dtype) -> np.ndarray:
    """Read a file of fixed records."""
    if (size := path.stat().st_size) % dtype.itemsize or not size:
        raise DataError(f"{path} has {size} bytes, which is no number of records; it is truncated, fetch it again")
    return np.fromfile(path, dtype)


def ascending(path: Path, ends_D: np.ndarray) -> np.ndarray:
    """Return ends of documents as int64, if they never fall."""
    if (ends_D >= 2**62).any() or (np.diff(ends_D.astype(np.int64)) < 0).any():
        raise DataError(f"{path} is no index of documents: its ends do not ascend; write it again")
    return ends_D.astype(np.int64)


def gather(buffer: mmap.mmap, at_D: np.ndarray, num_bytes: int) -> np.ndarray:
    """Copy `num_bytes` at each position, `[D, num_bytes]` uint8."""
    whole = np.frombuffer(buffer, np.uint8)
    return np.ascontiguousarray(whole[at_D[:, None] + np.arange(num_bytes)])


def mapped(path: Path) -> mmap.mmap:
    """Map a file into memory, read-only.

    Raises:
        OSError: it cannot be opened.
    """
    with path.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
