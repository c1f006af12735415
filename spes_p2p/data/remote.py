"""Shards at https, http and S3 addresses: fetched into the cache by range reads, and verified by their manifest.

An address comes from this machine's user (`--data https://...`) or from the run's founder, in the run's settings. The
founder's is read with a verified certificate only, after the user has agreed, and must have the fingerprint that the
run names: otherwise a volunteer would fetch something else than these shards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import obstore
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, UnauthenticatedError
from obstore.store import HTTPStore
from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import DataConfig
from spes_p2p.data.buckets import open_bucket
from spes_p2p.data.mds import MDS_INDEX, mds_entries
from spes_p2p.data.shards import MANIFEST, ShardManifest, fingerprint_of
from spes_p2p.errors import ConfigError, DataError, OutageError, SpesError
from spes_p2p.fs import cache_folder, digest_of_file, locked, write_atomic
from spes_p2p.presentation import size_text

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MANIFEST_BYTES, MAX_TOKENIZER_BYTES = 2**25, 2**26
DOCUMENT_BYTES = 24
PIECE_BYTES, READ_BYTES = 2**26, 2**18
"""Bytes of one request, and of what is written at a time."""
READ_SECONDS = 600.0
"""Time for a whole manifest or tokenizer."""
CLIENT = {"connect_timeout": "30s", "read_timeout": "30s", "timeout": "1h"}
RETRIES = {
    "max_retries": 7,
    "backoff": {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=30), "base": 2},
    "retry_timeout": timedelta(minutes=5),
}
SAY_SECONDS = 5.0
MAX_FETCHING_SECONDS = 7 * 86_400.0
_URL = re.compile(r"(https?|s3):/+(.+)", re.DOTALL)
_REASON = re.compile(r'status code: (\d+[^:\n]*)|(?:message|error): "([^"]{1,200})"|(InvalidCertificate\([^)]*)')


def url_of(path: Path) -> str | None:
    """Return the address that a path of --data is, if it is one: a `Path` has lost one of its slashes."""
    found = _URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def with_fetched(data: DataConfig, cache: Path) -> DataConfig:
    """Return data settings whose shards are on this machine: those at addresses are fetched into the cache.

    Args:
        data: With this machine's `paths`; without any, shards with a fingerprint come from the run's `urls`.
        cache: Folder that keeps them.

    Raises:
        ConfigError: an address is malformed, credentials are missing, or the cache is too small.
        DataError: no address has the shards.
    """
    if data.mixture:
        return data.model_copy(update={"paths": [*_of_sources(data, cache)]})
    return data.model_copy(update={"paths": _local(data.paths, data.urls, data.fingerprint, cache)})


def _of_sources(data: DataConfig, cache: Path) -> Iterator[Path]:
    """Yield this machine's files of each source as NAME=PATH."""
    given: dict[str, list[Path]] = {}
    for path in data.paths:
        name, _, rest = str(path).partition("=")
        given.setdefault(name, []).append(Path(rest))
    for source in data.mixture:
        paths = _local(given.pop(source.name, []), source.urls, source.fingerprint, cache)
        yield from (Path(f"{source.name}={path}") for path in paths)
    yield from (Path(f"{name}={path}" if path != Path() else name) for name, rest in given.items() for path in rest)


def strangers(data: DataConfig, paths: Sequence[Path]) -> Iterator[tuple[str, Sequence[str], int]]:
    """Yield fingerprint, addresses and size of the shards that `with_fetched` would fetch from the run's addresses.

    Raises:
        DataError: no address has the shards.
    """
    named = {str(path).partition("=")[0] for path in paths}
    wanted = [(each.fingerprint, each.urls) for each in data.mixture if each.name not in named]
    if data.fingerprint is not None and not paths:
        wanted.append((data.fingerprint, data.urls))
    for fingerprint, urls in wanted:
        if urls:
            yield fingerprint, urls, _of_any(urls, partial(_size_at, fingerprint))


def _size_at(fingerprint: str, url: str) -> int:
    files = _files_of(_Place(url, is_own=False), _shown_manifest(url, fingerprint), fingerprint)[1]
    return sum(each.num_bytes or 0 for each in files)


@lru_cache(64)
def _shown_manifest(url: str, fingerprint: str) -> bytes:
    """Read a founder's manifest once: its sizes are those that this machine's user has been asked about."""
    place = _Place(url, is_own=False)
    content = place.read(place.name, MAX_MANIFEST_BYTES)
    _files_of(place, content, fingerprint)
    return content


def _local(paths: Sequence[Path], urls: Sequence[str], fingerprint: str | None, cache: Path) -> list[Path]:
    if not paths and fingerprint is not None and urls:
        return [_of_any(urls, lambda url: fetch(url, cache, fingerprint, is_own=False))]
    found = [(path, url_of(path)) for path in paths]
    return [path if url is None else fetch(url, cache, fingerprint, is_own=True) for path, url in found]


def _of_any(urls: Sequence[str], read: Callable[[str], T]) -> T:
    """Return what is read from the first of a founder's addresses that has the shards."""
    failures = []
    for url in urls:
        try:
            return read(url)
        except DataError as error:
            failures.append(error)
            log.warning("%s", error)
    kind = OutageError if any(isinstance(failure, OutageError) for failure in failures) else DataError
    raise kind(f"no address of the run has its shards ({failures[-1]}); name yours with --data")


def fetch(url: str, cache: Path, fingerprint: str | None, *, is_own: bool) -> Path:
    """Fetch shards into the cache, and return their manifest or index there.

    Files that are there stay, and an interrupted download resumes. If the disk has no room, the shards of other
    addresses that no process uses go, those first that were not used for longest.

    Args:
        url: Address of a `manifest.json`, of the folder that it is in, or of the `index.json` of MDS shards.
        cache: The cache.
        fingerprint: Of the shards; None takes any.
        is_own: Whether this machine's user has named the address; others are read by https alone.

    Raises:
        ConfigError: the address is malformed, or the cache is too small.
        DataError: the address has no such shards, or cannot be read.
    """
    place, shards = _Place(url, is_own=is_own), cache_folder(cache, "shards")
    if fingerprint is not None and (kept := shards / fingerprint / MANIFEST).exists():
        _use(kept.parent)
        return kept
    content = place.read(place.name, MAX_MANIFEST_BYTES) if is_own else _shown_manifest(url, str(fingerprint))
    key, files = _files_of(place, content, fingerprint)
    folder, kept = shards / key, shards / key / place.name
    with locked(folder, MAX_FETCHING_SECONDS):
        folder.mkdir(exist_ok=True)
        _use(folder)
        if kept.exists() and kept.read_bytes() == content:
            return kept
        wanted = [each for each in files if not (folder / each.name).exists()]
        left = sum((each.num_bytes or 0) - _size(folder / f"{each.name}.part") for each in wanted)
        log.info(
            "fetching %d files, %s, of the shards %s from %s into %s",
            *(len(wanted), size_text(left), key[:12], place.base, folder),
        )
        _make_room(shards, left)
        progress = _Progress(left)
        for each in wanted:
            _fetch_file(place, each, folder, progress)
        with write_atomic(kept) as stream:
            stream.write(content)
    return kept


def _use(folder: Path) -> None:
    """Keep fetched shards on the disk until this process ends."""
    if os.access(folder, os.W_OK):  # a cache may be shared with other users
        os.utime(folder)
    fcntl.flock(os.open(folder, os.O_RDONLY), fcntl.LOCK_SH)  # released at the end of the process, however it ends


def _make_room(shards: Path, num_bytes: int) -> None:
    """Delete fetched shards that no process uses, the oldest first, until the disk has room."""
    folders = [each for each in shards.iterdir() if each.is_dir() and os.access(each, os.W_OK)]
    for old in sorted(folders, key=lambda each: each.stat().st_mtime):
        if num_bytes <= shutil.disk_usage(shards).free:
            return
        lock = os.open(old, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            log.info("deleting the shards in %s, which nothing uses, to make room", old)
            shutil.rmtree(old)
        finally:
            os.close(lock)
    if num_bytes > (free := shutil.disk_usage(shards).free):
        raise ConfigError(
            f"{shards} has {size_text(free)} free, the shards take {size_text(num_bytes)} more; set --cache"
        )


class _File(NamedTuple):
    """A file beside a manifest, with its digests by their algorithms; no manifest knows the size of its tokenizer."""

    name: str
    num_bytes: int | None
    digests: dict[str, str]


def _files_of(place: _Place, content: bytes, fingerprint: str | None) -> tuple[str, list[_File]]:
    """Return what identifies the shards of a manifest or an index, and their files."""
    url = place.url(place.name)
    if place.name == MDS_INDEX and place.is_own:
        return hashlib.sha256(content).hexdigest(), [_File(*each) for each in mds_entries(url, content)]
    try:
        manifest = ShardManifest.model_validate_json(content)
    except ValidationError as error:
        raise DataError(f"{url} is no manifest of shards: {explain(error, 'docs/data.md')}") from error
    actual = fingerprint_of([(manifest.dtype, entry.sha256) for entry in manifest.shards])
    if actual != manifest.fingerprint or fingerprint not in (None, actual):  # guard: never
        raise DataError(f"{url} has the fingerprint {actual}, this run trains on {fingerprint}; name another")
    files: dict[str, tuple[int | None, str]] = {manifest.tokenizer_file: (None, manifest.tokenizer_sha256)}
    files |= {each.file: (each.bytes, each.sha256) for each in manifest.shards}
    files |= {each.documents_file: (DOCUMENT_BYTES * each.documents, each.documents_sha256) for each in manifest.shards}
    return actual, [_File(name, num_bytes, {"sha256": digest}) for name, (num_bytes, digest) in files.items()]


def _fetch_file(place: _Place, file: _File, folder: Path, progress: _Progress) -> None:
    """Fetch one file, verify it, and rename it into place."""
    part = folder / f"{file.name}.part"
    part.parent.mkdir(parents=True, exist_ok=True)
    if file.num_bytes:
        place.download(file.name, part, file.num_bytes, progress)
    else:
        _append(part, 0, place.read(file.name, MAX_TOKENIZER_BYTES) if file.num_bytes is None else b"")
    if any(digest_of_file(part, name) != digest for name, digest in file.digests.items()):  # guard: never
        part.unlink()
        raise DataError(
            f"{place.url(file.name)} is not the file of its manifest: its digest differs; tell who serves it"
        )
    part.replace(folder / file.name)


class _Place:
    """The folder of a manifest at an address.

    Args:
        url: Of the manifest, or of its folder.
        is_own: Whether this machine's user has named it.

    Attributes:
        name: The manifest's name.
        base: Address of the folder.
    """

    def __init__(self, url: str, *, is_own: bool) -> None:
        self.is_own = is_own
        self.base, _, self.name = (url if url.endswith(".json") else f"{url.rstrip('/')}/{MANIFEST}").rpartition("/")
        self._store: Any
        if is_own and self.base.startswith("s3://"):
            self._store = open_bucket(self.base)
            return
        options: Any = {**CLIENT, "allow_http": is_own}  # guard: is_own -> True
        try:
            self._store = HTTPStore(self.base, client_options=options, retry_config=RETRIES)  # type: ignore[arg-type]
        except (BaseError, ValueError) as error:
            raise ConfigError(f"{url} is no address of shards; name a https://.../manifest.json") from error

    def url(self, name: str) -> str:
        """Return the address of a file, for people."""
        return f"{self.base}/{name}"

    def read(self, name: str, most: int) -> bytes:
        """Return all bytes of a file."""
        content, deadline = bytearray(), time.monotonic() + READ_SECONDS
        with self._explained(name):
            for chunk in obstore.get(self._store, name).stream(1):
                content += chunk
                if time.monotonic() > deadline:  # guard: never
                    raise DataError(f"{self.url(name)} has not come in {READ_SECONDS:.0f} s; name another address")
                if len(content) > most:  # guard: never
                    raise DataError(f"{self.url(name)} has more than {most} bytes; it is no manifest or tokenizer")
        return bytes(content)

    def download(self, name: str, part: Path, num_bytes: int, progress: _Progress) -> None:
        """Bring a file to its length, piece by piece, from where an earlier process has left it."""
        while (done := _size(part)) < num_bytes:
            try:
                with self._explained(name):
                    start, chunks = self._stream(name, done, min(done + PIECE_BYTES, num_bytes), num_bytes)
                    for chunk in chunks:
                        _append(part, start, bytes(chunk)[: num_bytes - start])  # guard: [: num_bytes - start] ->
                        start += len(chunk)
                        progress.add(len(chunk))
                        if start >= num_bytes:
                            break
                    if start <= done:
                        raise OSError(f"it ends after {done} bytes")
            except OutageError as error:
                if _size(part) <= done:
                    raise
                log.warning("%s", error)

    def _stream(self, name: str, start: int, stop: int, num_bytes: int) -> tuple[int, Iterable[Any]]:
        """Return where the answer begins, which is 0 if the server knows no ranges, and its bytes."""
        try:  # some answer the whole range with the whole file, which is no range for the library
            found = obstore.get(self._store, name, options={"range": (start, stop)} if stop - start < num_bytes else {})
        except NotSupportedError:
            found = obstore.get(self._store, name)
        return found.range[0], found.stream(READ_BYTES)

    @contextlib.contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Raise what reading raises as one line: the library has tried again already."""
        try:
            yield
        except SpesError:
            raise
        except (BaseError, OSError, ValueError) as error:
            found = _REASON.search(str(error))
            reason = " ".join(
                (next(filter(None, found.groups())) if found else str(error).partition("\n\n")[0]).split()
            )
            if isinstance(error, FileNotFoundError | PermissionDeniedError | UnauthenticatedError):
                raise DataError(f"cannot read {self.url(name)}: {reason}; name another address") from error
            raise OutageError(
                f"cannot read {self.url(name)}: {reason}; start again to resume, or name another address"
            ) from error


def _append(part: Path, start: int, chunk: bytes) -> None:
    """Write a chunk at its place, in place of all that is behind it."""
    try:
        with part.open("r+b" if part.exists() else "wb") as stream:
            stream.truncate(start)
            stream.seek(start)
            stream.write(chunk)
    except OSError as error:
        raise ConfigError(f"cannot write {part}: {error.strerror}; make room, or set --cache") from error


class _Progress:
    """Logs every few seconds how much has come of `total` bytes."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._logged = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._logged >= SAY_SECONDS:
            self._logged = now
            sizes = (size_text(each) for each in (self._done, self._total, self._done / (now - self._began)))
            log.info("fetched %s of %s of the shards, %s/s", *sizes)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
