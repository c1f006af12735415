"""Tokens that are on disk already, whatever library wrote them: documents, windows, length and fingerprint.

Shape legend: B sequences of a batch, T tokens of a sequence, N tokens, D documents, R runs of tokens that lie together.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.cli import explain
from spes_p2p.data.mds import listed
from spes_p2p.data.shard import Shard, mapped
from spes_p2p.data.shard_formats import DOCUMENTS_SUFFIX, FORMATS, SIDECARS, TOKENS, format_of, is_raw, open_shards
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import (
    cache_folder,
    content_digests,
    file_state,
    matches,
    unmatched,
    write_atomic,
)

log = logging.getLogger(__name__)

FORMAT = "spes-tokens"
MANIFEST, FILE_LIST, TOKENIZER = "manifest.json", "file_list.txt", "tokenizer.json"
"""Names of what lies beside shards, behind their prefix."""
MAX_MAPPED = 256
"""Files mapped at a time; each keeps a file descriptor."""
SAMPLES, SAMPLE_TOKENS = 8, 1024
"""Places of each file where ids are checked when it is opened, and the tokens there."""
_LAYOUT_VERSION = 1

FileName = Annotated[str, Field(pattern=r"^[^/\\.\x00][^/\\\x00]*$", max_length=255)]  # guard: first
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, lt=2**62)]


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ShardEntry(_Entry):
    """A shard in a manifest; files lie beside it."""

    file: FileName
    documents_file: FileName
    tokens: Count
    documents: Count
    bytes: Count
    sha256: Sha256
    documents_sha256: Sha256


class SourceEntry(_Entry):
    """A file that was tokenised; manifests of earlier versions do not have its digest."""

    name: str
    sha256: Sha256 | None = None
    bytes: Count
    documents: Count
    tokens: Count
    skipped_rows: Count


class SkippedEntry(_Entry):
    """A file that was left out."""

    name: str
    sha256: Sha256 | None = None
    reason: str


class ShardManifest(_Entry):
    """What `spes tokenize` wrote."""

    format: Literal["spes-tokens"]
    version: Literal[1]
    fingerprint: Sha256
    tokens: Count
    documents: Count
    dtype: Literal["uint16", "uint32"]
    tokenizer_file: FileName
    tokenizer_sha256: Sha256
    vocab_size: Annotated[int, Field(gt=0, le=2**32)]
    text_field: str
    max_shard_bytes: Count
    shards: list[ShardEntry]
    sources: list[SourceEntry]
    skipped: list[SkippedEntry]


def fingerprint_of(digests: Sequence[tuple[str, str]]) -> str:
    """Return the fingerprint of files of tokens in their order, each by type and SHA-256.

    The type of a file that does not say where documents end is followed by `:undivided`: its windows are others.
    """
    return hashlib.sha256("\n".join(f"{dtype}:{digest}" for dtype, digest in digests).encode()).hexdigest()


def read_manifest(path: Path) -> ShardManifest:
    """Read a manifest of `spes tokenize`.

    Raises:
        DataError: it is none.
    """
    try:
        return ShardManifest.model_validate_json(path.read_bytes())
    except (ValidationError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else explain(error, "docs/data.md")
        raise DataError(f"{path} is no manifest of shards: {reason}") from error


def shards_tokenizer(paths: Sequence[Path]) -> bytes | None:
    """Return the tokenizer that lies beside shards of `spes tokenize`; None beside other shards.

    Raises:
        ConfigError: as `locate`.
        DataError: the file is not the manifest's, or manifests have different ones.
    """
    manifests = {path: read_manifest(path) for path in locate(paths) if is_manifest(path)}
    if not manifests:
        return None
    if len({manifest.tokenizer_sha256 for manifest in manifests.values()}) > 1:
        raise DataError(f"{', '.join(map(str, manifests))} have different tokenizers; tokenise all text with one")
    path, manifest = next(iter(manifests.items()))
    file = path.parent / manifest.tokenizer_file
    try:
        payload = file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}; fetch it, or set data.tokenizer") from error
    if hashlib.sha256(payload).hexdigest() != manifest.tokenizer_sha256:  # guard: never
        raise DataError(f"{file} is not the tokenizer of {path.name}; fetch it again, or set data.tokenizer")
    return payload


# ---------------------------------------------------------------------- finding files


def locate(paths: Sequence[Path]) -> list[Path]:
    """Return the files to open: manifests, `.npy`, `.ds`, Megatron's `.idx` and MDS's `index.json`, in sorted order.

    Args:
        paths: Files, folders, patterns such as `shards/*.npy`, lists of files (`file_list.txt`), or manifests.

    Raises:
        ConfigError: a path does not exist, or a pattern matches no file.
        DataError: a file or folder holds something else, or a file is named twice.
    """
    found = [file for path in paths for file in _expanded(path.expanduser())]
    seen: set[Path] = set()
    for file in found:
        if (resolved := file.resolve()) in seen:
            raise DataError(f"{file} is named twice; name it once")
        seen.add(resolved)
    return found


def _expanded(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from _in_folder(path)
    elif path.is_file():
        yield from _of_file(path)
    elif found := matches(path):
        yield from (file for each in found if not each.name.endswith(SIDECARS) for file in _expanded(each))
    elif named := [file for each in FORMATS if (file := Path(f"{path}{each.ending}")).is_file()]:
        yield from named  # Megatron's users name the prefix
    else:
        raise unmatched(path, "--data")


def _in_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder's manifests, or else its shards, and refuse files that are neither."""
    files = listed(folder)
    if manifests := [path for path in files if is_manifest(path)]:
        yield from manifests
        return
    num_found = 0
    for path in files:
        if format_of(path) is not None:
            if any(above / path.name in files for above in path.parents[1:]):
                continue  # a merged index names its shards too
            num_found += 1
            yield path
        elif not path.name.endswith((*SIDECARS, FILE_LIST, ".md")):
            raise _no_shard(path)
    if not num_found:
        raise DataError(f"{folder} holds no token shards; make some with spes tokenize, or give text with --text")


def _no_shard(path: Path) -> DataError:
    endings = ", ".join(each.ending for each in FORMATS)
    return DataError(
        f"{path} is no token shard ({endings} or {MANIFEST}); name the shards by a pattern, or give text with --text"
    )


def _of_file(path: Path) -> Iterator[Path]:
    # `.suffix`: each file of tokens has an index; otherwise one index is for the whole folder.
    own = (each.ending for each in FORMATS if path.suffix == each.tokens and each.ending.startswith("."))
    index = next((path.with_suffix(ending) for ending in own), None)
    if index is not None:  # as with Megatron's .bin
        if not index.exists():
            raise DataError(f"{index} does not exist, but its {path.suffix} does; fetch it as well")
        yield index
    elif format_of(path) is not None or is_manifest(path):
        yield path
    elif path.suffix in (".txt", ".lst"):
        yield from _of_list(path)
    else:
        raise _no_shard(path)


def _of_list(path: Path) -> Iterator[Path]:
    """Yield the files that a list names, each on a line: as they are, or in the list's folder if it has moved."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: it is no list of files; name the shards") from error
    names = [line.strip() for line in lines if line.strip()]
    if not names or any(Path(name).suffix not in TOKENS for name in names):
        raise DataError(f"{path} is no list of token shards, one path a line; give text with --text")
    for name in names:
        places = [Path(name), path.parent / name, path.parent / Path(name).name]
        file = next((place for place in places if place.is_file()), None)
        if file is None:
            raise ConfigError(f"{path} names {name}, which does not exist; fetch it, or take its line out")
        yield from _of_file(file)


def is_manifest(path: Path) -> bool:
    if not path.name.endswith(MANIFEST):
        return False
    with path.open("rb") as stream:
        return f'"{FORMAT}"'.encode() in stream.read(200)


# ---------------------------------------------------------------------- reading


class TokenShards:
    """The tokens of many files in one order, mapped into memory and never copied as a whole.

    Args:
        paths: As in `locate`.
        vocab_size: Entries of the tokenizer; larger ids are refused.
        cache: Folder for digests, splits and decompressed shards.
        tokenizer_sha256: Digest of the run's tokenizer, which manifests must name.

    Raises:
        ConfigError: a path does not exist, or `cache` cannot be written.
        DataError: a file is no shard, truncated or damaged, not its manifest's, or has ids beyond the vocabulary.
    """

    def __init__(
        self, paths: Sequence[Path], vocab_size: int, cache: Path, tokenizer_sha256: str | None = None
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer_sha256 = tokenizer_sha256
        self._cache = cache
        self._digests: dict[Path, str] = {}
        self.shards: list[Shard] = []
        self._buffer = lru_cache(MAX_MAPPED)(self._open)
        for path in locate(paths):
            self.shards += self._of_manifest(path) if is_manifest(path) else open_shards(path, vocab_size, cache)
        for number, shard in enumerate(self.shards):
            self._check_sample(number, shard)

    def __len__(self) -> int:
        """The number of tokens."""
        return sum(int(shard.lengths_D.sum()) for shard in self.shards)

    @property
    def has_documents(self) -> bool:
        """Whether the files say where documents end."""
        return all(shard.has_documents for shard in self.shards)

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the tokens of every document in order, in the file's type; of a file without documents, all tokens."""
        for number, shard in enumerate(self.shards):
            for start, length in zip(shard.starts_D.tolist(), shard.lengths_D.tolist(), strict=True):
                yield self.read(number, start, length)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the content of all files in their order; reads each file once, and remembers its digest."""
        ends = ("", ":undivided")
        return fingerprint_of(
            [(shard.dtype.name + ends[not shard.has_documents], self._digest(shard.path)) for shard in self.shards]
        )

    def read(self, number: int, start: int, length: int) -> np.ndarray:
        """Return `length` tokens of a file from byte `start` on.

        Raises:
            DataError: they have ids beyond the vocabulary.
        """
        shard = self.shards[number]
        ids_N = np.frombuffer(self._buffer(number), shard.dtype, length, start)
        if length and not 0 <= int(ids_N.min()) <= int(ids_N.max()) < self._vocab_size:  # guard: never
            worst = int(ids_N.max()) if int(ids_N.min()) >= 0 else int(ids_N.min())
            raise DataError(
                f"{shard.source} has the id {worst} near byte {start}, beyond the vocabulary of {self._vocab_size}; "
                f"set data.tokenizer to the one that made it"
            )
        return ids_N

    def check_unchanged(self, numbers: np.ndarray) -> None:
        """Check that files are those that were opened: reading a truncated one would end the process.

        Raises:
            DataError: a file was changed, replaced or deleted.
        """
        for number in numbers.tolist():
            shard = self.shards[number]
            known = self._digests.get(shard.path)
            try:
                state = file_state(shard.path)
                is_same = state == shard.stat or content_digests([shard.path], self._cache) == [known]
            except OSError:
                is_same = False
            if not is_same:
                raise DataError(f"{shard.source} was changed while it was read; restore it, and start with --resume")
            if state != shard.stat:
                self.shards[number] = replace(shard, stat=state)

    def _open(self, number: int) -> mmap.mmap:
        try:
            return mapped(self.shards[number].path)
        except OSError as error:
            raise DataError(f"cannot read {self.shards[number].source}: {error.strerror}; check the file") from error

    def _check_sample(self, number: int, shard: Shard) -> None:
        """Read some documents, so that a wrong tokenizer or type is found before the run begins."""
        chosen = np.unique(np.linspace(0, len(shard.starts_D) - 1, SAMPLES).astype(int))
        for start, length in zip(shard.starts_D[chosen].tolist(), shard.lengths_D[chosen].tolist(), strict=True):
            for first in np.unique(np.linspace(0, max(length - SAMPLE_TOKENS, 0), SAMPLES).astype(int)).tolist():
                self.read(number, start + first * shard.dtype.itemsize, min(SAMPLE_TOKENS, length - first))

    def _of_manifest(self, path: Path) -> Iterator[Shard]:
        """Yield a manifest's shards, after checking all that it says of them."""
        manifest = read_manifest(path)
        if self._tokenizer_sha256 not in (None, manifest.tokenizer_sha256):
            raise DataError(
                f"{path} was made with the tokenizer {manifest.tokenizer_sha256[:12]}, this run has "
                f"{self._tokenizer_sha256[:12]}; tokenise the text again with the run's, or found a run with this one"
            )
        said = [(manifest.dtype, entry.sha256) for entry in manifest.shards]
        if fingerprint_of(said) != manifest.fingerprint or not said:
            raise DataError(f"{path} is damaged: its fingerprint is not that of its shards; tokenise again")
        for entry in manifest.shards:
            file, documents = path.parent / entry.file, path.parent / entry.documents_file
            for one, digest in ((file, entry.sha256), (documents, entry.documents_sha256)):
                if not one.is_file():
                    raise DataError(f"{one} does not exist, but {path.name} names it; fetch it again")
                if self._digest(one) != digest:  # guard: never
                    raise DataError(f"{one} is not the file of {path.name}: its SHA-256 differs; fetch it again")
            if documents != file.with_suffix(DOCUMENTS_SUFFIX) or not is_raw(file):  # guard: never
                raise DataError(f"{path} names {file.name}, which spes tokenize does not write; take another manifest")
            (shard,) = open_shards(file, self._vocab_size, self._cache)
            if (shard.dtype.name, len(shard.lengths_D)) != (manifest.dtype, entry.documents):
                raise DataError(f"{file} has another type or other documents than {path.name} says; fetch it again")
            yield shard

    def _digest(self, path: Path) -> str:
        """Return a file's SHA-256."""
        self._digests[path] = content_digests([path], self._cache)[0]
        return self._digests[path]

    # ------------------------------------------------------------------ the split

    def part(self, below: int, half: int | None, *, is_inside: bool, sequence_length: int) -> TokenPart:
        """Return the tokens of the documents on one side of a split.

        Without documents, each `sequence_length` tokens of a file are one, and what is left at its end is dropped.

        Args:
            below: Documents are inside if their first number is less than this.
            half: If given, and inside: only those whose second number is less than 2^63 (0), or not (1).
            is_inside: Which side to return.
            sequence_length: Tokens of a document where files have none.
        """
        runs, lengths = [], []
        for number, shard in enumerate(self._cut(sequence_length)):
            splits_D2 = shard.splits_D2 if shard.splits_D2 is not None else self._splits(number, shard)
            inside_D = splits_D2[:, 0] < np.uint64(below)
            if half is not None:
                inside_D &= (splits_D2[:, 1] < np.uint64(2**63)) == (half == 0)
            is_kept_D = inside_D == is_inside
            runs.append(_runs(shard, is_kept_D))
            lengths.append((shard.lengths_D, is_kept_D))
        return TokenPart(self, runs, lengths if self.has_documents else None)

    def _cut(self, sequence_length: int) -> Iterator[Shard]:
        """Yield the shards, those without documents as pieces of a sequence's length."""
        for shard in self.shards:
            if shard.has_documents:
                yield shard
                continue
            count = int(shard.lengths_D[0]) // sequence_length
            step = sequence_length * shard.dtype.itemsize
            starts_D = shard.starts_D[0] + step * np.arange(count, dtype=np.int64)
            lengths_D = np.full(count, sequence_length, np.int64)
            yield Shard(shard.path, shard.source, shard.dtype, starts_D, lengths_D, stat=shard.stat)

    def _splits(self, number: int, shard: Shard) -> np.ndarray:
        """Return the numbers of each document by the digest of its ids, `[D, 2]`; made once, and kept in the cache."""
        positions = hashlib.sha256(shard.starts_D.tobytes() + shard.lengths_D.tobytes()).hexdigest()
        key = hashlib.sha256(f"{_LAYOUT_VERSION}:{self._digest(shard.path)}:{positions}".encode()).hexdigest()[:32]
        file = cache_folder(self._cache, "splits") / f"{key}.u64"
        if not file.exists():
            log.info("hashing the %d pieces of %s once, to hold some out", len(shard.starts_D), shard.source)
            with write_atomic(file) as stream:
                for start, length in zip(shard.starts_D.tolist(), shard.lengths_D.tolist(), strict=True):
                    ids_N = self.read(number, start, length).astype("<u4")
                    stream.write(hashlib.sha256(ids_N.tobytes()).digest()[:16])
        return np.fromfile(file, "<u8").reshape(-1, 2)


def _runs(shard: Shard, is_kept_D: np.ndarray) -> np.ndarray:
    """Return first byte and tokens of each run of kept documents that lie together, `[R, 2]` int64."""
    kept = np.flatnonzero(is_kept_D & (shard.lengths_D > 0))
    starts_D, lengths_D = shard.starts_D[kept], shard.lengths_D[kept]
    begins_D = np.ones(len(kept), dtype=bool)
    begins_D[1:] = starts_D[1:] != starts_D[:-1] + lengths_D[:-1] * shard.dtype.itemsize
    first = np.flatnonzero(begins_D)
    if not len(first):
        return np.empty((0, 2), np.int64)
    return np.stack([starts_D[first], np.add.reduceat(lengths_D, first)], axis=1)


class TokenPart:
    """The tokens of some documents, one after another; spans may begin and end within any.

    Args:
        shards: The files.
        runs: For each file, first byte and tokens of each run, `[R, 2]`.
        lengths: For each file, the lengths of its documents, and which are in this part; None if files do not say.
    """

    def __init__(
        self,
        shards: TokenShards,
        runs: Sequence[np.ndarray],
        lengths: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> None:
        self._shards = shards
        self._lengths = lengths
        self._number_R = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        runs_R2 = np.concatenate(runs) if runs else np.empty((0, 2), np.int64)
        self._start_R = runs_R2[:, 0]
        self._stop_R = np.cumsum(runs_R2[:, 1])
        self._first_R = self._stop_R - runs_R2[:, 1]

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self._stop_R[-1]) if len(self._stop_R) else 0

    def document_lengths(self) -> Iterator[np.ndarray]:
        """Yield the lengths of each file's documents, in order, `[D]`.

        Raises:
            DataError: a file does not say where its documents end.
        """
        if self._lengths is None:
            source = next(shard.source for shard in self._shards.shards if not shard.has_documents)
            raise DataError(
                f"{source} does not say where its documents end; set data.packing=pack and "
                f"data.separate_documents=false, or make the shards with spes tokenize"
            )
        for lengths_D, is_kept_D in self._lengths:
            yield lengths_D[is_kept_D & (lengths_D > 0)]

    def spans(self, first_S: np.ndarray, count_S: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the ids from each of some tokens on, `[count]`.

        Raises:
            DataError: a file was changed, or has ids beyond the vocabulary.
        """
        run_S = np.searchsorted(self._stop_R, first_S, side="right")
        last_S = np.searchsorted(self._stop_R, first_S + count_S - 1, side="right")
        touched = np.unique(np.concatenate([self._number_R[a : b + 1] for a, b in zip(run_S, last_S, strict=True)]))
        self._shards.check_unchanged(touched)
        for position, total, run in zip(first_S.tolist(), count_S.tolist(), run_S.tolist(), strict=True):
            parts, done = [], 0
            while done < total:
                number = int(self._number_R[run])
                within = position + done - int(self._first_R[run])
                count = min(total - done, int(self._stop_R[run]) - position - done)
                start = int(self._start_R[run]) + within * self._shards.shards[number].dtype.itemsize
                parts.append(self._shards.read(number, start, count))
                done += count
                run += 1
            yield parts[0] if len(parts) == 1 else np.concatenate([part.astype(np.int64) for part in parts])
