"""MosaicML's MDS: an `index.json` and its shards, of tokens or of text.

Shape legend: D samples, V variable columns, C columns.
Source: https://github.com/mosaicml/streaming, `MDSWriter`, and the fixtures that it wrote (tests/fixtures/shards).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import json
import logging
import mmap
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from spes_p2p.data.shard import Shard, check_size, checked_shard, gather, mapped
from spes_p2p.data.streams import MAX_ROW_BYTES, decompressed
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import cache_folder, content_digests, visible_files, write_atomic

log = logging.getLogger(__name__)

MDS, MDS_INDEX = ".mds", "index.json"
MDS_DTYPES = {8: "u1", 9: "i1", 16: "<u2", 17: "<i2", 32: "<u4", 33: "<i4", 64: "<u8", 65: "<i8"}
MDS_NAMES = ("tokens", "input_ids")
"""Columns that hold tokens; else the only column that holds an array does."""


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
    if "train" not in names or MDS_INDEX in names or len(names) == 1:
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


def open_mds(path: Path, vocab_size: int, cache: Path) -> list[Shard]:
    """Open the shards of an `index.json`; compressed ones are unpacked into the cache."""
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
    at_D = np.frombuffer(buffer, "<u4", num_samples + 1, 4).astype(np.int64)
    variable = [number for number, size in enumerate(sizes) if size is None]
    bytes_DV = gather(buffer, at_D[:-1], 4 * len(variable)).view("<u4").reshape(num_samples, -1).astype(np.int64)
    sizes_DC = np.stack(
        [
            bytes_DV[:, variable.index(number)] if size is None else np.full(num_samples, size, np.int64)
            for number, size in enumerate(sizes)
        ]
    ).T
    starts_D = at_D[:-1] + 4 * len(variable) + sizes_DC[:, :column].sum(axis=1)
    ends_D = at_D[:-1] + 4 * len(variable) + sizes_DC.sum(axis=1)
    if num_samples != entry["samples"] or (at_D[1:] != ends_D).any() or at_D[-1] > len(buffer):
        raise DataError(f"{source} has other samples than {index.name} says; it is damaged, fetch it again")
    dtype, header = _mds_layout(source, buffer, encodings[column], starts_D)
    lengths_D, rest_D = np.divmod(sizes_DC[:, column] - header, dtype.itemsize)
    if rest_D.any():
        raise DataError(f"{source} has columns {names[column]!r} that are no whole {dtype.name} ids; write it again")
    return checked_shard(path, dtype, starts_D + header, lengths_D, source=source)


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
        check_size(raw, entry["raw_data"]["bytes"])
        return raw, raw
    packed = index.parent / _plain(index, entry["zip_data"]["basename"])
    if not str(entry["compression"]).startswith("zstd"):
        raise DataError(f"{packed} is compressed with {entry['compression']}; write the shards with zstd, or without")
    check_size(packed, entry["zip_data"]["bytes"])
    unpacked = cache_folder(cache, "mds") / f"{packed.name}.{content_digests([packed], cache)[0][:32]}.raw"
    limit = int(entry["raw_data"]["bytes"])
    if not (unpacked.exists() and unpacked.stat().st_size == limit):
        if limit > (free := shutil.disk_usage(unpacked.parent).free):
            raise ConfigError(f"{unpacked.parent} has {free:,} bytes free, {packed} unpacks to {limit:,}; set --cache")
        with decompressed(packed, ".zst") as stream, write_atomic(unpacked) as target:
            left = limit
            while chunk := stream.read(2**20):
                left -= len(chunk)
                if left < 0:  # guard: never
                    break
                target.write(chunk)
            if left:
                raise DataError(f"{packed} does not decompress to the {limit} bytes of {index.name}; fetch it again")
    return packed, unpacked


def _plain(index: Path | str, name: Any) -> str:
    """Return a file name of an index, which must not lead out of its folder; a merged index names subfolders."""
    if not isinstance(name, str) or name.startswith("/") or ".." in Path(name).parts:  # guard: never
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
        codes = np.unique(gather(buffer, at_D, 1))
        if len(codes) != 1 or int(codes[0]) not in MDS_DTYPES:
            raise DataError(f"{source} mixes types of arrays, or has floats; write its ids as ndarray:uint32")
        dtype, at_D = np.dtype(MDS_DTYPES[int(codes[0])]), at_D + 1
    if dtype.kind not in "iu":
        raise DataError(f"{source} holds {dtype.name}, not ids; write them as ndarray:uint32")
    if len(args) == 2:
        return dtype, at_D - starts_D
    shapes_D = gather(buffer, at_D, 1)[:, 0].astype(np.int64)
    return dtype, at_D - starts_D + 1 + (shapes_D >> 2) * 2 ** (shapes_D & 3)


def samples(path: Path, stream: BinaryIO) -> Iterator[list[tuple[str, str, bytes]]]:
    """Yield name, encoding and content of the columns of each sample of a shard of MDS.

    A shard is the number of samples, where they begin, their columns as JSON, and the samples; a sample is the sizes of
    its columns of no fixed size, and its columns. All numbers are u32.
    """
    try:
        (number,) = struct.unpack("<I", stream.read(4))
        starts = struct.unpack(f"<{number + 1}I", stream.read(4 * number + 4))
        about = json.loads(stream.read(max(starts[0] - 4 * number - 8, 0)))
        columns = [*zip(*(about[f"column_{key}"] for key in ("names", "encodings", "sizes")), strict=True)]
        sizes = struct.Struct(f"<{sum(size is None for _, _, size in columns)}I")
        for start, stop in itertools.pairwise(starts):
            if not 0 <= stop - start <= MAX_ROW_BYTES:
                raise ValueError("a sample is too long")
            sample = stream.read(stop - start)
            rest, variable = io.BytesIO(sample[sizes.size :]), iter(sizes.unpack_from(sample))
            cells = [(name, kind, rest.read(next(variable) if size is None else size)) for name, kind, size in columns]
            if sizes.size + sum(len(cell) for _, _, cell in cells) != stop - start:
                raise ValueError("a sample does not end where the next begins")
            yield cells
    except (KeyError, TypeError, ValueError, RecursionError, struct.error) as error:
        raise DataError(f"{path} is no whole shard of MDS; fetch it again, or leave it out") from error
