"""The formats of token shards: those of SPES and OLMo, NumPy, datatrove, Megatron and MosaicML; nothing is copied.

A new format is a row of `FORMATS`. Each names one kind of file, by the end of its name: the file that is opened. That
file holds the tokens (`.npy`, `.ds`), or is the index of files that do (Megatron's `.idx` of a `.bin` of the same name,
MDS's `index.json` of all `.mds` of its folder).

Shape legend: D documents of a file, S sequences of a Megatron file.
Sources of the layouts: the writers' own code, and the fixtures that they wrote (tests/fixtures/shards).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError
from typing import NamedTuple

import numpy as np

from spes_p2p.data.mds import MDS, MDS_INDEX, is_mds_index, open_mds
from spes_p2p.data.shard import (
    Shard,
    ascending,
    check_size,
    checked_shard,
    dtype_by_size,
    from_ends,
    raw_dtype,
    read_index,
    whole_file,
)
from spes_p2p.errors import DataError

DOCUMENTS_SUFFIX = ".docs"
"""Suffix of the documents of a raw `.npy`: rows of three little-endian u64, `DOCUMENT_FIELDS`."""
DOCUMENT_FIELDS = [("end", "<u8"), ("split", "<u8"), ("half", "<u8")]
"""End of a document in tokens, and the two numbers by which it is held out (`sources.split_number`)."""
NUMPY_MAGIC, MEGATRON_MAGIC = b"\x93NUMPY", b"MMIDIDX\x00\x00"
MEGATRON_HEADER_BYTES = 34
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


def is_raw(path: Path) -> bool:
    """Tell whether a file holds ids alone, without a header, as `spes tokenize` writes them."""
    with path.open("rb") as stream:
        return path.suffix == ".npy" and stream.read(len(NUMPY_MAGIC)) != NUMPY_MAGIC


def _numpy(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Open SPES's and OLMo's raw ids, which are called `.npy` but have no header, or a true NumPy file."""
    if not is_raw(path):
        return [_true_numpy(path)]
    index = path.with_suffix(DOCUMENTS_SUFFIX)
    if not index.exists():
        return [whole_file(path, raw_dtype(path, vocab_size))]
    documents_D = read_index(index, np.dtype(DOCUMENT_FIELDS))
    ends_D = ascending(index, documents_D["end"])
    splits_D2 = np.stack([documents_D["split"], documents_D["half"]], axis=1)
    return [from_ends(path, dtype_by_size(path, int(ends_D[-1]), index), ends_D, splits_D2=splits_D2)]


def _true_numpy(path: Path) -> Shard:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    # Truncated, or it holds Python objects; NumPy parses the header as Python, and lets that parser's errors through.
    except (ValueError, OverflowError, SyntaxError, TokenError) as error:
        raise DataError(f"cannot read {path}: {error}; write the ids again, as integers") from error
    if array.dtype.kind not in "iu" or array.ndim not in (1, 2) or not array.flags.c_contiguous:
        raise DataError(f"{path} is {array.ndim}-dimensional {array.dtype}, not rows of integer ids; write it as such")
    if array.dtype.byteorder == ">":
        raise DataError(f"{path} is big-endian; write it with .astype('<u4')")
    dtype = array.dtype.newbyteorder("<")
    if array.ndim == 1:
        return whole_file(path, dtype, array.offset)
    num_rows, length = array.shape
    starts_D = array.offset + np.arange(num_rows, dtype=np.int64) * length * dtype.itemsize
    return checked_shard(path, dtype, starts_D, np.full(num_rows, length, np.int64))


def _datatrove(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Open ids back to back, with the documents' ends in `.ds.index`."""
    index = path.with_name(f"{path.name}.index")
    if not index.exists():
        return [whole_file(path, raw_dtype(path, vocab_size))]
    ends_D = ascending(index, read_index(index, np.dtype("<u8")))
    return [from_ends(path, dtype_by_size(path, int(ends_D[-1]), index), ends_D)]


def _megatron(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Open `.bin` with its `.idx`: i32 lengths of sequences, i64 byte offsets, i64 first sequences of documents.

    Sequences of one document that follow each other are one document here.
    """
    data, tokens = path.read_bytes().ljust(MEGATRON_HEADER_BYTES, b"\0"), path.with_suffix(".bin")
    if not data.startswith(MEGATRON_MAGIC):
        raise DataError(f"{path} is no Megatron index; name the .idx beside a .bin")
    num_sequences, num_documents = np.frombuffer(data, "<u8", 2, 18).tolist()
    num_bytes = MEGATRON_HEADER_BYTES + 12 * num_sequences + 8 * num_documents
    check_size(path, num_bytes, num_bytes + num_sequences)
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    if version != 1 or code not in MEGATRON_DTYPES:
        raise DataError(f"{path} has version {version} and type {code}, not version 1 of integers; convert it")
    if not tokens.exists():
        raise DataError(f"{tokens} does not exist, but {path.name} does; fetch it as well")
    lengths_S = np.frombuffer(data, "<i4", num_sequences, MEGATRON_HEADER_BYTES).astype(np.int64)
    starts_S = np.frombuffer(data, "<i8", num_sequences, MEGATRON_HEADER_BYTES + 4 * num_sequences)
    first_D = np.frombuffer(data, "<i8", num_documents, MEGATRON_HEADER_BYTES + 12 * num_sequences)[:-1]
    dtype = np.dtype(MEGATRON_DTYPES[code])
    follows_S = starts_S[1:] == starts_S[:-1] + lengths_S[:-1] * dtype.itemsize
    if num_sequences and 0 < len(first_D) < num_sequences and follows_S.all():
        if first_D[0] != 0 or (np.diff(first_D) <= 0).any() or first_D[-1] >= num_sequences:
            raise DataError(f"{path} has documents that do not ascend; it is damaged, write it again")
        starts_S, lengths_S = starts_S[first_D], np.add.reduceat(lengths_S, first_D)
    return [checked_shard(tokens, dtype, starts_S, lengths_S)]


class ShardFormat(NamedTuple):
    """A format of token shards.

    Attributes:
        ending: End of the name of the file that is opened.
        open: Returns its shards; takes the path, the size of the vocabulary, and a folder for decompressed files.
        tokens: Ending of the files of tokens, if the opened file is their index; None if it holds the tokens.
        beside: Endings of other files of the format, which are skipped in a folder.
        is_one: Tells by its content whether a file is of the format, if other programs use the same name.
    """

    ending: str
    open: Callable[[Path, int, Path], list[Shard]]
    tokens: str | None = None
    beside: tuple[str, ...] = ()
    is_one: Callable[[Path], bool] | None = None


FORMATS = (
    ShardFormat(".npy", _numpy, None, (DOCUMENTS_SUFFIX,)),
    ShardFormat(".ds", _datatrove, None, (".index", ".metadata", ".loss")),
    ShardFormat(".idx", _megatron, ".bin"),
    ShardFormat(MDS_INDEX, open_mds, MDS, (".zstd", ".lock"), is_mds_index),
)
TOKENS = {each.ending for each in FORMATS} | {each.tokens for each in FORMATS}
"""Endings of files of tokens."""
SIDECARS = tuple(ending for each in FORMATS for ending in (each.tokens, *each.beside) if ending)
"""Endings of files that are not opened themselves."""


def format_of(path: Path) -> ShardFormat | None:
    """Return the format of a file that can be opened; None if it is no shard, or belongs to another file."""
    found = next((each for each in FORMATS if path.name.endswith(each.ending)), None)
    return None if found is not None and found.is_one is not None and not found.is_one(path) else found


def open_shards(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Return the shards of one file that `locate` found.

    Args:
        path: A file of one of the `FORMATS`.
        vocab_size: Tells uint16 from uint32 if a file does not.
        cache: Folder for decompressed shards.

    Raises:
        DataError: the file cannot be read, is truncated, or holds something else.
        ConfigError: `cache` cannot be written.
    """
    found = format_of(path)
    assert found is not None, path
    try:
        return found.open(path, vocab_size, cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the cache's disk
            raise
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}; check the file") from error
