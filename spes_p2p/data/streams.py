"""Files as streams of bytes: whole or a part, out of gzip or zstd, with errors in one line."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from spes_p2p.errors import DataError, one_line

COMPRESSED = {".gz", ".zst", ".zstd"}
CHUNK_BYTES = 2**20
MAX_ROW_BYTES = 2**26
"""Longest line of JSON, element of an array, cell of parquet and sample of MDS, which are read whole."""


class Range(NamedTuple):
    """Part of a file, `start` to `stop`: bytes of text and JSON lines, row groups of parquet."""

    start: int
    stop: int


@contextlib.contextmanager
def explained(path: Path) -> Iterator[None]:
    """Raise what a file's reading raises as one line with the remedy."""
    try:
        yield
    except EOFError as error:
        raise _cut(path) from error
    except (OSError, zlib.error) as error:
        if "Truncated compressed stream" in str(error):  # as pyarrow says of zstd
            raise _cut(path) from error
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise  # of a file written meanwhile
        raise unreadable(path, error) from error


def _cut(path: Path) -> DataError:
    return DataError(f"{path} ends in the middle of its compressed data; fetch it again, or leave it out")


def unreadable(path: Path, error: Exception) -> DataError:
    return DataError(f"cannot read {path}: {one_line(error)}; check the file, or leave it out")


@contextlib.contextmanager
def opened(path: Path, part: Range | None) -> Iterator[Any]:
    """Open a file, or a part of it, as a buffered stream of its decompressed bytes."""
    if path.suffix.lower() in COMPRESSED:
        with decompressed(path, path.suffix.lower()) as stream:
            yield stream
        return
    with path.open("rb") as file:
        yield io.BufferedReader(_Slice(file, part), CHUNK_BYTES) if part is not None else file


@contextlib.contextmanager
def decompressed(path: Path, suffix: str) -> Iterator[Any]:
    """Open a file of gzip or zstd, by `suffix`, as a buffered stream of its content.

    Raises:
        DataError: the file is no such file, damaged or truncated.
    """
    with explained(path):
        if suffix == ".gz":
            with gzip.open(path) as stream:
                yield stream
            return
        import pyarrow  # slow to import

        # Unlike zstandard's reader it tells a truncated file from a whole one, and inflates no more than is read.
        with pyarrow.input_stream(str(path), compression="zstd", buffer_size=0) as content:
            yield io.BufferedReader(content, CHUNK_BYTES)


class _Slice(io.RawIOBase):
    """The bytes of a part of a file."""

    def __init__(self, file: BinaryIO, part: Range) -> None:
        self._file = file
        self._left = part.stop - part.start
        file.seek(part.start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), self._left))
        buffer[: len(data)] = data
        self._left -= len(data)
        return len(data)
