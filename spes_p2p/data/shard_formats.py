"""Where the tokens lie in files of SPES and OLMo, NumPy, datatrove, Megatron and MosaicML; nothing is copied.

Shape legend: D documents of a file, S sequences of a Megatron file, V variable columns of an MDS file.
Sources of the layouts: the writers' own code, and the fixtures that they wrote (tests/fixtures/shards).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import mmap
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np

from spes_p2p.data.readers import MDS, decompressed
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import State, cache_folder, content_digests, file_state, visible_files, write_atomic

log = logging.getLogger(__name__)

DOCUMENTS_SUFFIX = ".docs"
"""Suffix of the documents of a raw `.npy`: rows of three little-endian u64, `DOCUMENT_FIELDS`."""
DOCUMENT_FIELDS = [("end", "<u8"), ("split", "<u8"), ("half", "<u8")]
"""End of a document in tokens, and the two numbers by which it is held out (`sources.split_number`)."""
NUMPY_MAGIC, MEGATRON_MAGIC = b"\x93NUMPY", b"MMIDIDX\x00\x00"
MEGATRON_HEADER_BYTES = 34
MEGATRON_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
MDS_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
MDS_INDEX = "index.json"
MDS_NAMES = ("tokens", "input_ids")
"""Columns that hold tokens; else the only column that holds an array does."""
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


def open_shards(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Return the shards of one file that `locate` found.

    Args:
        path: A `.npy`, `.ds`, `.idx` or `index.json` file.
        vocab_size: Tells uint16 from uint32 where a file does not.
        cache: Folder for decompressed MDS shards.

    Raises:
        DataError: the file cannot be read, is truncated, or holds something else.
        ConfigError: `cache` cannot be written.
    """
    try:
        if path.suffix == ".npy":
            return [_numpy(path, vocab_size)]
        if path.suffix == ".ds":
            return [_datatrove(path, vocab_size)]
        if path.suffix == ".idx":
            return [_megatron(path)]
        return _mds(path, cache)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):  # the cache's disk
            raise
        raise DataError(f"cannot read {error.filename or path}: {error.strerror}; check the file") from error


def is_raw(path: Path) -> bool:
    """Tell whether a file holds ids alone, without a header, as `spes tokenize` writes them."""
    with path.open("rb") as stream:
        return path.suffix == ".npy" and stream.read(len(NUMPY_MAGIC)) != NUMPY_MAGIC


def _shard(path: Path, dtype: np.dtype, starts_D: np.ndarray, lengths_D: np.ndarray, **more: Any) -> Shard:
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


def _from_ends(path: Path, dtype: np.dtype, ends_D: np.ndarray, **more: Any) -> Shard:
    """Return a shard of documents that follow each other."""
    lengths_D = np.diff(ends_D, prepend=0)
    return _shard(path, dtype, (ends_D - lengths_D) * dtype.itemsize, lengths_D, **more)


def _dtype_by_size(path: Path, num_tokens: int, index: Path) -> np.dtype:
    """Return the type of so many tokens that fill a file."""
    size = path.stat().st_size
    for name in ("<u2", "<u4"):
        if num_tokens and num_tokens * np.dtype(name).itemsize == size:
            return np.dtype(name)
    raise DataError(
        f"{path} has {size} bytes, but {index.name} counts {num_tokens} tokens, of two or four bytes each; it is "
        f"truncated, or the index belongs to another file: fetch both again"
    )


def _raw_dtype(path: Path, vocab_size: int) -> np.dtype:
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


def _whole(path: Path, dtype: np.dtype, start: int = 0) -> Shard:
    """Return a shard without documents."""
    length = (path.stat().st_size - start) // dtype.itemsize
    return _shard(path, dtype, np.array([start], np.int64), np.array([length], np.int64), has_documents=False)


def _numpy(path: Path, vocab_size: int) -> Shard:
    """Open SPES's and OLMo's raw ids, which are called `.npy` but have no header, or a true NumPy file."""
    if not is_raw(path):
        return _true_numpy(path)
    index = path.with_suffix(DOCUMENTS_SUFFIX)
    if not index.exists():
        return _whole(path, _raw_dtype(path, vocab_size))
    documents_D = _index(index, np.dtype(DOCUMENT_FIELDS))
    ends_D = _ascending(index, documents_D["end"])
    splits_D2 = np.stack([documents_D["split"], documents_D["half"]], axis=1)
    return _from_ends(path, _dtype_by_size(path, int(ends_D[-1]), index), ends_D, splits_D2=splits_D2)


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
        return _whole(path, dtype, array.offset)
    num_rows, length = array.shape
    starts_D = array.offset + np.arange(num_rows, dtype=np.int64) * length * dtype.itemsize
    return _shard(path, dtype, starts_D, np.full(num_rows, length, np.int64))


def _index(path: Path, dtype: np.dtype) -> np.ndarray:
    """Read a file of fixed records."""
    if (size := path.stat().st_size) % dtype.itemsize or not size:
        raise DataError(f"{path} has {size} bytes, which is no number of records; it is truncated, fetch it again")
    return np.fromfile(path, dtype)


def _ascending(path: Path, ends_D: np.ndarray) -> np.ndarray:
    """Return ends of documents as int64, if they never fall."""
    if (ends_D >= 2**62).any() or (np.diff(ends_D.astype(np.int64)) < 0).any():
        raise DataError(f"{path} is no index of documents: its ends do not ascend; write it again")
    return ends_D.astype(np.int64)


def _datatrove(path: Path, vocab_size: int) -> Shard:
    """Open ids back to back, with the documents' ends in `.ds.index`."""
    index = path.with_name(f"{path.name}.index")
    if not index.exists():
        return _whole(path, _raw_dtype(path, vocab_size))
    ends_D = _ascending(index, _index(index, np.dtype("<u8")))
    return _from_ends(path, _dtype_by_size(path, int(ends_D[-1]), index), ends_D)


def _megatron(path: Path) -> Shard:
    """Open `.bin` with its `.idx`: i32 lengths of sequences, i64 byte offsets, i64 first sequences of documents.

    Sequences of one document that follow each other are one document here.
    """
    data, tokens = path.read_bytes(), path.with_suffix(".bin")
    if not data.startswith(MEGATRON_MAGIC):
        raise DataError(f"{path} is no Megatron index; name the .idx beside a .bin")
    if len(data) < MEGATRON_HEADER_BYTES:
        raise DataError(f"{path} has {len(data)} bytes; it is truncated, fetch it again")
    version, code = int.from_bytes(data[9:17], "little"), data[17]
    if version != 1 or code not in MEGATRON_DTYPES:
        raise DataError(f"{path} has version {version} and type {code}, not version 1 of integers; convert it")
    num_sequences, num_documents = np.frombuffer(data, "<u8", 2, 18).tolist()
    expected = MEGATRON_HEADER_BYTES + 12 * num_sequences + 8 * num_documents
    if len(data) not in (expected, expected + num_sequences):
        raise DataError(f"{path} has {len(data)} bytes instead of {expected}; it is truncated, fetch it again")
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
    return _shard(tokens, dtype, starts_S, lengths_S)


# ---------------------------------------------------------------------- MosaicML's MDS


def is_mds_index(path: Path) -> bool:
    """Tell whether a file is the `index.json` of MDS shards."""
    if path.name != MDS_INDEX:
        return False
    content = _json(path)
    return isinstance(content, dict) and isinstance(content.get("shards"), list) and "version" in content


def holds_text(index: Path) -> bool:
    """Tell whether the samples of MDS shards are text, and no tokens."""
    with _as_mds(index, 0):
        encodings = {str(kind).partition(":")[0] for kind in _json(index)["shards"][0]["column_encodings"]}
    return not encodings & {"ndarray", "bytes", "pkl"} and "str" in encodings


def listed(folder: Path) -> list[Path]:
    """Return a folder's visible files; of MDS shards in folders of their splits, those of `train`."""
    files = visible_files(folder)
    names = {file.relative_to(folder).parts[0] for file in files if is_mds_index(file)}
    if "train" not in names or "index.json" in names or len(names) == 1:
        return files
    log.info("of %s only the split train is read; name the folder of another to read that", folder)
    return [file for file in files if folder / "train" in file.parents]


def with_mds_shards(files: Sequence[Path]) -> list[Path]:
    """Return files with the shards of MDS in place of their indexes, each once, even if a second index names it.

    Raises:
        DataError: an index is damaged, or a shard is missing.
    """
    indexes = [file for file in files if is_mds_index(file)]
    shards = {shard for index in indexes for shard in _mds_files(index)}
    return sorted({file for file in files if file not in indexes and not (indexes and MDS in file.suffixes)} | shards)


def _mds_files(index: Path) -> Iterator[Path]:
    """Yield the files of an index's shards: as they are, or else compressed."""
    for number, entry in enumerate(_json(index)["shards"]):
        with _as_mds(index, number):
            given = [entry[key]["basename"] for key in ("raw_data", "zip_data") if entry[key]]
            files = [index.parent / _plain(index, name) for name in given]
        if not (there := [file for file in files if file.is_file()]):
            raise DataError(f"{files[-1]} does not exist, but {index} names it; fetch it")
        yield there[0]


def mds_entries(index: str, content: bytes) -> Iterator[tuple[str, int, dict[str, str]]]:
    """Yield name, size and digests of the files that an index names; of a compressed shard, the compressed file.

    Raises:
        DataError: the index is damaged.
    """
    with _as_mds(index, 0):
        entries = json.loads(content)["shards"]
    for number, entry in enumerate(entries):
        with _as_mds(index, number):
            file = entry["zip_data"] or entry["raw_data"]
            if not 0 <= file["bytes"] < 2**62:
                raise ValueError(file["bytes"])
            digests = {
                kind: str(file["hashes"][kind]) for kind in file["hashes"] if kind in hashlib.algorithms_available
            }
            yield _plain(index, file["basename"]), file["bytes"], digests


@contextlib.contextmanager
def _as_mds(index: Path | str, number: int) -> Iterator[None]:
    """Raise what a malformed entry of an index raises as one line."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        raise DataError(f"{index}: shard {number} is not as MDS has it ({error!r}); fetch it again") from error


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON; fetch it again") from error


def _mds(path: Path, cache: Path) -> list[Shard]:
    content = _json(path)
    if content.get("version") != 2 or not content["shards"]:
        raise DataError(
            f"{path} has version {content.get('version')!r} and {len(content['shards'])} shards, not version 2; "
            f"write them with MDSWriter of mosaicml-streaming"
        )
    shards = []
    for number, entry in enumerate(content["shards"]):
        with _as_mds(path, number):
            shards.append(_mds_shard(path, entry, cache))
    return shards


def _mds_shard(index: Path, entry: dict[str, Any], cache: Path) -> Shard:
    names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
    if entry["format"] != "mds" or not len(names) == len(encodings) == len(sizes):
        raise DataError(f"{index} has shards of format {entry['format']!r}, not mds; write them with MDSWriter")
    if "pkl" in encodings:
        raise DataError(f"{index} has pickled columns, which can run code; write ids as ndarray:uint32")
    column = _token_column(index, names, encodings)
    source, path = _mds_file(index, entry, cache)
    buffer = mapped(path)
    num_samples = int(np.frombuffer(buffer, "<u4", 1)[0])
    if num_samples != entry["samples"]:
        raise DataError(f"{source} has {num_samples} samples, {index.name} says {entry['samples']}; fetch it again")
    at_D = np.frombuffer(buffer, "<u4", num_samples + 1, 4).astype(np.int64)
    variable = [number for number, size in enumerate(sizes) if size is None]
    bytes_DV = _gather(buffer, at_D[:-1], 4 * len(variable)).view("<u4").reshape(num_samples, -1).astype(np.int64)
    sizes_DC = np.stack(
        [
            bytes_DV[:, variable.index(number)] if size is None else np.full(num_samples, size, np.int64)
            for number, size in enumerate(sizes)
        ]
    ).T
    starts_D = at_D[:-1] + 4 * len(variable) + sizes_DC[:, :column].sum(axis=1)
    if (at_D[1:] != at_D[:-1] + 4 * len(variable) + sizes_DC.sum(axis=1)).any() or at_D[-1] > len(buffer):
        raise DataError(f"{source} has samples that do not end where the next begins; it is damaged, fetch it again")
    dtype, header = _mds_layout(source, buffer, encodings[column], starts_D)
    lengths_D, rest_D = np.divmod(sizes_DC[:, column] - header, dtype.itemsize)
    if rest_D.any():
        raise DataError(f"{source} has columns {names[column]!r} that are no whole {dtype.name} ids; write it again")
    return _shard(path, dtype, starts_D + header, lengths_D, source=source)


def _token_column(index: Path, names: list[str], encodings: list[str]) -> int:
    """Return the column that holds tokens."""
    arrays = [number for number, kind in enumerate(encodings) if kind.split(":")[0] in ("ndarray", "bytes")]
    named = [number for number in arrays if names[number] in MDS_NAMES]
    arrays = named or [number for number in arrays if encodings[number] != "bytes"]
    if len(arrays) != 1:
        columns = ", ".join(f"{name} ({kind})" for name, kind in zip(names, encodings, strict=True))
        raise DataError(
            f"{index} has no one column of ids (it has: {columns}); call it tokens, as ndarray:uint32, or "
            f"tokenise its text with spes tokenize"
        )
    return arrays[0]


def _mds_file(index: Path, entry: dict[str, Any], cache: Path) -> tuple[Path, Path]:
    """Return a shard's file, and the file with its content: in the cache, if the former is compressed."""
    raw = index.parent / _plain(index, entry["raw_data"]["basename"])
    if raw.exists() or not entry["zip_data"]:
        if (size := raw.stat().st_size) != entry["raw_data"]["bytes"]:
            raise DataError(f"{raw} has {size} bytes instead of {entry['raw_data']['bytes']}; fetch it again")
        return raw, raw
    packed = index.parent / _plain(index, entry["zip_data"]["basename"])
    if not str(entry["compression"]).startswith("zstd"):
        raise DataError(f"{packed} is compressed with {entry['compression']}; write the shards with zstd, or without")
    if (size := packed.stat().st_size) != entry["zip_data"]["bytes"]:
        raise DataError(f"{packed} has {size} bytes instead of {entry['zip_data']['bytes']}; fetch it again")
    unpacked = cache_folder(cache, "mds") / f"{packed.name}.{content_digests([packed], cache)[0][:32]}.raw"
    limit = int(entry["raw_data"]["bytes"])
    if not (unpacked.exists() and unpacked.stat().st_size == limit):
        if limit > (free := shutil.disk_usage(unpacked.parent).free):
            raise ConfigError(f"{unpacked.parent} has {free:,} bytes free, {packed} unpacks to {limit:,}; set --cache")
        with decompressed(packed, ".zst") as stream, write_atomic(unpacked) as target:
            written = 0
            while chunk := stream.read(2**20):
                written += len(chunk)
                if written > limit:  # guard: mds-bomb
                    break
                target.write(chunk)
            if written != limit:
                raise DataError(f"{packed} does not decompress to the {limit} bytes of {index.name}; fetch it again")
    return packed, unpacked


def _plain(index: Path | str, name: Any) -> str:
    """Return a file name of an index, which must not lead out of its folder; a merged index names subfolders."""
    if not isinstance(name, str) or name.startswith("/") or ".." in Path(name).parts:  # guard: shard-file-name
        raise DataError(f"{index} names the file {str(name)[:100]!r}, which is no plain name; fetch the index again")
    return name


def _mds_layout(source: Path, buffer: mmap.mmap, encoding: str, starts_D: np.ndarray) -> tuple[np.dtype, Any]:
    """Return the type of a column's ids, and the bytes before them, `[D]` or one number."""
    kind, *args = encoding.split(":")
    if kind == "bytes":  # without a type: llm-foundry writes int64
        return np.dtype("<i8"), 0
    at_D = starts_D
    if args:
        dtype = np.dtype(args[0]).newbyteorder("<")
    else:
        codes = np.unique(_gather(buffer, at_D, 1))
        if len(codes) != 1 or int(codes[0]) not in MDS_DTYPES:
            raise DataError(f"{source} mixes types of arrays, or has floats; write its ids as ndarray:uint32")
        dtype, at_D = np.dtype(MDS_DTYPES[int(codes[0])]), at_D + 1
    if dtype.kind not in "iu":
        raise DataError(f"{source} holds {dtype.name}, not ids; write them as ndarray:uint32")
    if len(args) == 2:
        return dtype, at_D - starts_D
    shapes_D = _gather(buffer, at_D, 1)[:, 0].astype(np.int64)
    return dtype, at_D - starts_D + 1 + (shapes_D >> 2) * 2 ** (shapes_D & 3)


def _gather(buffer: mmap.mmap, at_D: np.ndarray, num_bytes: int) -> np.ndarray:
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
