"""Text to shards of token ids, by several processes: the same bytes whatever their number, and after any kill.

Files are cut into pieces that depend on the files alone. Each piece becomes a part on disk, whole or not at all; an
interrupted command starts again with the parts that are there. When all parts are, they are joined to shards.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout

from spes_p2p.data.readers import ranges
from spes_p2p.data.shard_formats import DOCUMENT_FIELDS, DOCUMENTS_SUFFIX
from spes_p2p.data.shards import (
    FILE_LIST,
    MANIFEST,
    TOKENIZER,
    ShardEntry,
    ShardManifest,
    SkippedEntry,
    SourceEntry,
    fingerprint_of,
    read_manifest,
)
from spes_p2p.data.sources import corpus_files
from spes_p2p.data.text_encoder import ENCODING_VERSION
from spes_p2p.data.token_parts import IDS_SUFFIX, How, Piece, checked_state, make_parts, part_info
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.fs import State, content_digests, write_atomic

PIECE_BYTES = 2**21, 2**24
"""Least and most text of a piece: what a kill costs each process at most."""
PIECES = 64
"""Pieces of the whole work, where their bounds allow it, so that processes end at about the same time."""
COPY_BYTES = 2**22


@dataclass(frozen=True)
class Settings:
    """What the bytes of the shards depend on, and how they are made.

    Attributes:
        folder: Where they are written.
        stem: What their names begin with.
        tokenizer: Payload of `tokenizer_bytes`.
        vocab_size: Its entries.
        dtype: `uint16` or `uint32`.
        text_field: Column of the text.
        max_shard_bytes: Largest size of a shard.
        skip_unusable: Leave out what cannot be used, and count it.
        batch_size: Most documents tokenised at a time.
        processes: Number of processes.
        cache: Folder that remembers the digests of files.
        template: The tokenizer's chat template, whose control tokens text does not contain; empty if it has none.
    """

    folder: Path
    stem: str
    tokenizer: bytes
    vocab_size: int
    dtype: str
    text_field: str
    max_shard_bytes: int
    skip_unusable: bool
    batch_size: int
    processes: int
    cache: Path | None = None
    template: str = ""

    @property
    def partial(self) -> Path:
        """Folder of the parts of an unfinished run."""
        return self.folder / f".{self.stem}partial"

    @functools.cached_property
    def tokenizer_sha256(self) -> str:
        """Digest of the tokenizer."""
        return hashlib.sha256(self.tokenizer).hexdigest()


@dataclass
class Source:
    """A file and its pieces, or why it is left out."""

    path: Path
    num_bytes: int
    sha256: str
    pieces: list[Piece] = field(default_factory=list)
    unusable: str | None = None


class Progress(NamedTuple):
    """How far the work is: bytes of text done and in all, and tokens written since the start."""

    done_bytes: int
    total_bytes: int
    num_tokens: int


def split_prefix(prefix: str) -> tuple[Path, str]:
    """Return the folder of a prefix, and what names in it begin with.

    Raises:
        ConfigError: the names would be hidden.
    """
    path = Path(prefix).expanduser()
    folder, stem = (path, "") if prefix.endswith("/") or path.is_dir() else (path.parent, path.name)
    if stem.startswith("."):
        raise ConfigError(f"--output-prefix {prefix} makes hidden files; choose a name without a dot in front")
    return folder, stem


def find_files(patterns: Sequence[Path]) -> list[Path]:
    """Return the files of patterns and folders, each once and sorted within its pattern.

    Raises:
        ConfigError, DataError: as `corpus_files`.
    """
    found: dict[Path, Path] = {}
    for path, _ in corpus_files(patterns, "--file-glob"):
        found.setdefault(path.resolve(), path)
    return list(found.values())


def tokenise(files: Sequence[Path], settings: Settings, on_progress: Callable[[Progress], None]) -> ShardManifest:
    """Write shards, their documents, tokenizer, `file_list.txt` and manifest; the manifest comes last.

    Args:
        files: Text in any format of `read_file`.
        settings: What to make.
        on_progress: Called now and then.

    Raises:
        ConfigError: the folder cannot be written.
        DataError: a file cannot be used, changes meanwhile, or the folder holds something else.
    """
    try:
        settings.folder.mkdir(parents=True, exist_ok=True)
        states = [checked_state(path) for path in files]
        digests = content_digests(files, settings.cache)
        if (finished := _finished(files, digests, settings)) is not None:
            shutil.rmtree(settings.partial, ignore_errors=True)
            return finished
        settings.partial.mkdir(exist_ok=True)
        with _alone(settings):
            for leftover in settings.partial.glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
            with write_atomic(settings.partial / TOKENIZER) as stream:
                stream.write(settings.tokenizer)
            sources = _plan(files, states, digests, settings)
            _work(sources, settings, on_progress)
            manifest = _publish(sources, settings)
        shutil.rmtree(settings.partial)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"no space left on the disk at {settings.folder}; make room there, and start the same command again: "
                f"it continues"
            ) from error
        where = error.filename or settings.folder
        raise ConfigError(f"cannot write {where}: {error.strerror}; choose another --output-prefix") from error
    return manifest


@contextlib.contextmanager
def _alone(settings: Settings) -> Iterator[None]:
    """Keep other processes away from this prefix."""
    try:
        with FileLock(settings.partial / "lock", timeout=0):
            yield
    except Timeout as error:
        raise DataError(
            f"another process tokenises to {settings.folder / settings.stem}; wait for it, or choose another "
            f"--output-prefix"
        ) from error


def _shards_of(settings: Settings, *suffixes: str) -> list[Path]:
    """Return the shards of this prefix alone: of another, this one may be the beginning."""
    number = re.compile(re.escape(settings.stem) + r"\d{6}")
    return [path for path in settings.folder.iterdir() if path.suffix in suffixes and number.fullmatch(path.stem)]


def _finished(files: Sequence[Path], digests: Sequence[str], settings: Settings) -> ShardManifest | None:
    """Return the manifest, if this very work is done: the same content under the same names, wherever it lies."""
    path = settings.folder / f"{settings.stem}{MANIFEST}"
    if path.exists():
        manifest = read_manifest(path)
        made = [(Path(source.name).name, source.sha256) for source in manifest.sources]
        skipped = [(Path(entry.name).name, entry.sha256) for entry in manifest.skipped]
        given = zip((file.name for file in files), digests, strict=True)
        text = [each for each in given if each not in skipped]
        how = (manifest.tokenizer_sha256, manifest.dtype, manifest.text_field, manifest.max_shard_bytes)
        asked = (settings.tokenizer_sha256, settings.dtype, settings.text_field, settings.max_shard_bytes)
        is_lenient = bool(skipped) or any(source.skipped_rows for source in manifest.sources)
        if made == text and how == asked and (settings.skip_unusable or not is_lenient):
            return manifest
    elif settings.partial.exists() or not _shards_of(settings, ".npy"):
        return None
    raise DataError(
        f"{settings.folder / settings.stem} has shards of other text or settings; delete them, or choose another "
        f"--output-prefix"
    )


def _plan(files: Sequence[Path], states: Sequence[State], digests: Sequence[str], settings: Settings) -> list[Source]:
    """Cut the files into pieces."""
    least, most = PIECE_BYTES
    sizes = [size for _, size, *_ in states]
    piece_bytes = min(max(sum(sizes) // PIECES, least), most)
    sources = []
    for path, size, state, digest in zip(files, sizes, states, digests, strict=True):
        source = Source(path, size, digest)
        try:
            parts = ranges(path, piece_bytes)
        except DataError as error:
            _refuse(source, error, settings)
            parts = []
        for part in parts:
            what = [ENCODING_VERSION, settings.tokenizer_sha256, settings.dtype, settings.text_field]
            what += [settings.template, settings.skip_unusable, str(path.resolve()), digest, part]
            key = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:32]
            source.pieces.append(Piece(path, part, size // len(parts), state, digest, settings.partial / key))
        sources.append(source)
    return sources


def _refuse(source: Source, error: DataError, settings: Settings) -> None:
    """Leave a file out, if that was asked for."""
    if not settings.skip_unusable:
        raise error
    source.unusable = str(error)


def _work(sources: Sequence[Source], settings: Settings, on_progress: Callable[[Progress], None]) -> None:
    """Make the parts that are missing, and leave out the files of those that cannot be made."""
    pieces = [piece for source in sources for piece in source.pieces]
    total_bytes = sum(piece.num_bytes for piece in pieces)
    todo = [piece for piece in pieces if part_info(piece) is None]
    before = total_bytes - sum(piece.num_bytes for piece in todo)
    if todo:
        make_parts(
            todo,
            settings.partial / TOKENIZER,
            How(settings.text_field, settings.dtype, settings.batch_size, settings.skip_unusable, settings.template),
            settings.processes,
            lambda done, tokens: on_progress(Progress(before + done, total_bytes, tokens)),
        )
    for source in sources:
        infos = [info for piece in source.pieces if (info := part_info(piece)) is not None]
        reasons = [info["unusable"] for info in infos if info["unusable"]]
        if not reasons and source.unusable is None and not any(info["documents"] for info in infos):
            reasons = [f"{source.path} holds no text; leave it out"]
        if reasons:
            _refuse(source, DataError(reasons[0]), settings)


# ---------------------------------------------------------------------- shards


class _Span(NamedTuple):
    """Documents of a part that lie together in one shard."""

    part: Path
    rows_D: np.ndarray
    position: int
    """Their first token in the part."""

    @property
    def num_tokens(self) -> int:
        return int(self.rows_D["end"][-1]) - self.position


def _spans_by_shard(parts: Iterable[Path], most_tokens: int) -> Iterator[list[_Span]]:
    """Yield the spans of each shard, which ends where a document does."""
    shard: list[_Span] = []
    for part in parts:
        rows_D = np.fromfile(part.with_suffix(DOCUMENTS_SUFFIX), DOCUMENT_FIELDS)
        ends_D = rows_D["end"].astype(np.int64)
        first = position = 0
        while first < len(rows_D):
            room = most_tokens - sum(span.num_tokens for span in shard)
            count = int(np.searchsorted(ends_D[first:] - position, room, side="right"))
            if not count and shard:
                yield shard
                shard = []
                continue
            last = first + max(count, 1)
            shard.append(_Span(part, rows_D[first:last], position))
            first, position = last, int(ends_D[last - 1])
    if shard:
        yield shard


def _write_shard(number: int, spans: Sequence[_Span], settings: Settings) -> ShardEntry:
    """Copy spans to a shard and its documents, in the folder of the parts."""
    name, itemsize = f"{settings.stem}{number:06d}", np.dtype(settings.dtype).itemsize
    file, documents_file = settings.partial / f"{name}.npy", settings.partial / f"{name}{DOCUMENTS_SUFFIX}"
    digests = hashlib.sha256(), hashlib.sha256()
    tokens = 0
    with write_atomic(file) as ids, write_atomic(documents_file) as documents:
        for span in spans:
            with span.part.with_suffix(IDS_SUFFIX).open("rb") as source:
                source.seek(span.position * itemsize)
                left = span.num_tokens * itemsize
                while chunk := source.read(min(left, COPY_BYTES)):
                    ids.write(chunk)
                    digests[0].update(chunk)
                    left -= len(chunk)
            if left:
                raise DataError(f"a part is damaged; delete {settings.partial}, and start again")
            rows_D = span.rows_D.copy()
            rows_D["end"] = rows_D["end"] - np.uint64(span.position) + np.uint64(tokens)
            documents.write(rows_D.tobytes())
            digests[1].update(rows_D.tobytes())
            tokens += span.num_tokens
    return ShardEntry(
        file=file.name,
        documents_file=documents_file.name,
        tokens=tokens,
        documents=sum(len(span.rows_D) for span in spans),
        bytes=tokens * itemsize,
        sha256=digests[0].hexdigest(),
        documents_sha256=digests[1].hexdigest(),
    )


def _publish(sources: Sequence[Source], settings: Settings) -> ShardManifest:
    """Join the parts, and move everything into place."""
    used = [source for source in sources if source.unusable is None]
    if not used:
        raise DataError("none of the files holds usable text; see why with --no-skip-unusable")
    parts = (piece.target for source in used for piece in source.pieces)
    most_tokens = settings.max_shard_bytes // np.dtype(settings.dtype).itemsize
    shards = [_write_shard(number, spans, settings) for number, spans in enumerate(_spans_by_shard(parts, most_tokens))]
    manifest = _manifest(sources, shards, settings)
    for stale in _shards_of(settings, ".npy", DOCUMENTS_SUFFIX):
        stale.unlink()
    for entry in shards:
        for name in (entry.documents_file, entry.file):
            (settings.partial / name).replace(settings.folder / name)
    lines = "".join(f"{(settings.folder / entry.file).resolve()}\n" for entry in shards)
    texts = {TOKENIZER: settings.tokenizer, FILE_LIST: lines.encode()}
    texts[MANIFEST] = (manifest.model_dump_json(indent=1) + "\n").encode()
    for name, data in texts.items():
        with write_atomic(settings.folder / f"{settings.stem}{name}") as stream:
            stream.write(data)
    return manifest


def _manifest(sources: Sequence[Source], shards: list[ShardEntry], settings: Settings) -> ShardManifest:
    entries, skipped = [], []
    for source in sources:
        if source.unusable is not None:
            skipped.append(SkippedEntry(name=str(source.path), sha256=source.sha256, reason=source.unusable))
            continue
        infos = [info for piece in source.pieces if (info := part_info(piece)) is not None]
        counts = {name: sum(info[name] for info in infos) for name in ("documents", "tokens", "skipped_rows")}
        size = source.num_bytes
        entries.append(SourceEntry(name=str(source.path), sha256=source.sha256, bytes=size, **counts))
    return ShardManifest(
        format="spes-tokens",
        version=1,
        fingerprint=fingerprint_of([(settings.dtype, shard.sha256) for shard in shards]),
        tokens=sum(shard.tokens for shard in shards),
        documents=sum(shard.documents for shard in shards),
        dtype=settings.dtype,  # type: ignore[arg-type]
        tokenizer_file=f"{settings.stem}{TOKENIZER}",
        tokenizer_sha256=settings.tokenizer_sha256,
        vocab_size=settings.vocab_size,
        text_field=settings.text_field,
        max_shard_bytes=settings.max_shard_bytes,
        shards=shards,
        sources=entries,
        skipped=skipped,
    )
