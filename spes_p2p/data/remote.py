"""Token shards that this machine fetches by HTTP: into the cache, by range requests, verified by their manifest.

The address is either this machine's own word (--data https://...), or a stranger's: the founder's, in the run's
settings. A stranger's address reaches public hosts alone, is asked for first, and is of shards whose fingerprint the
run names, so that nobody can make a volunteer read its own network, or anything else than these shards.
"""

from __future__ import annotations

import http.client
import ipaddress
import logging
import re
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, urljoin, urlsplit

from pydantic import ValidationError

from spes_p2p.cli import explain
from spes_p2p.config import DataConfig
from spes_p2p.data.shards import MANIFEST, ShardManifest, fingerprint_of
from spes_p2p.errors import ConfigError, DataError, OutageError, one_line
from spes_p2p.fs import cache_folder, digest_of_file, locked, write_atomic
from spes_p2p.presentation import size_text

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_MANIFEST_BYTES, MAX_TOKENIZER_BYTES = 2**25, 2**26
DOCUMENT_BYTES = 24
PIECE_BYTES = 2**26
"""Bytes of one request: what a broken connection can cost."""
READ_BYTES = 2**18
WAIT_SECONDS = 30.0
READ_SECONDS = 600.0
"""Time for a whole manifest or tokenizer."""
TRIES = 8
"""Requests in a row without a byte after which an address is given up."""
PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.5, 30.0
MAX_REDIRECTS = 4
SAY_SECONDS = 5.0
MAX_FETCHING_SECONDS = 7 * 86_400.0
_URL = re.compile(r"(https?):/+(.+)", re.DOTALL)


def url_of(path: Path) -> str | None:
    """Return the address that a path of --data is, if it is one: a `Path` has lost one of its slashes."""
    found = _URL.fullmatch(str(path))
    return f"{found[1]}://{found[2]}" if found else None


def with_fetched(data: DataConfig, cache: Path) -> DataConfig:
    """Return data settings whose shards lie on this machine: those behind addresses are fetched into the cache.

    Args:
        data: With this machine's `paths`; without any, shards with a fingerprint come from the run's `urls`.
        cache: Folder that keeps them.

    Raises:
        ConfigError: an address may not be read, or the cache is too small.
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
        ConfigError: an address may not be read.
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
    """Return the size of the shards at a stranger's address, by their manifest."""
    return num_bytes_of(_shown_manifest(Address.manifest(url, is_own=False), fingerprint)[1])


def _local(paths: Sequence[Path], urls: Sequence[str], fingerprint: str | None, cache: Path) -> list[Path]:
    if not paths and fingerprint is not None and urls:
        return [_of_any(urls, lambda url: fetch(url, cache, fingerprint, is_own=False))]
    found = [(path, url_of(path)) for path in paths]
    return [path if url is None else fetch(url, cache, fingerprint, is_own=True) for path, url in found]


def _of_any(urls: Sequence[str], read: Callable[[str], T]) -> T:
    """Return what is read from the first of a stranger's addresses that has the shards."""
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
    """Fetch the shards of a manifest into the cache, and return the manifest there.

    Files that are there stay; an interrupted download goes on where it was.

    Args:
        url: Address of a `manifest.json`, or of the folder that it is in.
        cache: The cache.
        fingerprint: Of the shards; None takes any.
        is_own: Whether this machine's user has named the address; others reach public hosts only.

    Raises:
        ConfigError: the host is not public, or the cache is too small.
        DataError: the address has no such shards, or cannot be read.
    """
    if fingerprint is not None and (kept := cache_folder(cache, "shards") / fingerprint / MANIFEST).exists():
        return kept
    where = Address.manifest(url, is_own=is_own)
    content, manifest = (read_remote_manifest if is_own else _shown_manifest)(where, fingerprint)
    folder = cache_folder(cache, "shards") / manifest.fingerprint
    kept = folder / MANIFEST
    with locked(folder, MAX_FETCHING_SECONDS):
        if kept.exists() and kept.read_bytes() == content:
            return kept
        folder.mkdir(exist_ok=True)
        wanted = [each for each in _files_of(manifest) if not (folder / each.name).exists()]
        left = sum(each.num_bytes - _size(folder / f"{each.name}.part") for each in wanted if each.is_exact)
        log.info(
            "fetching %d files, %s, of the shards %s from %s into %s",
            *(len(wanted), size_text(left), manifest.fingerprint[:12], where.origin, folder),
        )
        if left > (free := shutil.disk_usage(folder).free):
            raise ConfigError(
                f"{folder} has {size_text(free)} free, the shards take {size_text(left)} more; set --cache"
            )
        progress = _Progress(left)
        for each in wanted:
            _fetch_file(where, each, folder, progress)
        with write_atomic(kept) as stream:
            stream.write(content)
    return kept


def read_remote_manifest(where: Address, fingerprint: str | None) -> tuple[bytes, ShardManifest]:
    """Return a manifest's bytes, and the manifest.

    Raises:
        DataError: there is none, or it is of other shards.
    """
    content = _read(where, MAX_MANIFEST_BYTES)
    try:
        manifest = ShardManifest.model_validate_json(content)
    except ValidationError as error:
        raise DataError(f"{where.url} is no manifest of shards: {explain(error, 'docs/data.md')}") from error
    said = fingerprint_of([(manifest.dtype, entry.sha256) for entry in manifest.shards])
    if said != manifest.fingerprint or fingerprint not in (None, said):  # guard: remote-fingerprint
        raise DataError(f"{where.url} has the fingerprint {said}, this run trains on {fingerprint}; name another")
    return content, manifest


@lru_cache(64)
def _shown_manifest(where: Address, fingerprint: str | None) -> tuple[bytes, ShardManifest]:
    """Read a stranger's manifest once: its sizes are those that this machine's user has been asked about."""
    return read_remote_manifest(where, fingerprint)


def num_bytes_of(manifest: ShardManifest) -> int:
    """Return the size of a manifest's shards."""
    return sum(each.num_bytes for each in _files_of(manifest) if each.is_exact)


@dataclass(frozen=True)
class _File:
    """A file beside a manifest; of a tokenizer only the largest size is known."""

    name: str
    num_bytes: int
    sha256: str
    is_exact: bool = True


def _files_of(manifest: ShardManifest) -> list[_File]:
    files = [_File(manifest.tokenizer_file, MAX_TOKENIZER_BYTES, manifest.tokenizer_sha256, is_exact=False)]
    for entry in manifest.shards:
        files.append(_File(entry.file, entry.bytes, entry.sha256))
        files.append(_File(entry.documents_file, DOCUMENT_BYTES * entry.documents, entry.documents_sha256))
    return list({each.name: each for each in files}.values())


def _fetch_file(where: Address, file: _File, folder: Path, progress: _Progress) -> None:
    """Fetch one file, verify it, and rename it into place.

    Raises:
        DataError: it is not the manifest's.
    """
    part, source = folder / f"{file.name}.part", where.beside(file.name)
    if file.is_exact:
        _download(source, part, file.num_bytes, progress)
    else:
        _append(part, 0, _read(source, file.num_bytes))
    if not file.num_bytes:
        _append(part, 0, b"")
    if digest_of_file(part) != file.sha256:  # guard: remote-digest
        part.unlink()
        raise DataError(f"{source.url} is not the file of its manifest: its SHA-256 differs; tell who serves it")
    part.replace(folder / file.name)


# ---------------------------------------------------------------------- HTTP


@dataclass(frozen=True)
class Address:
    """An http address, and whether it may lead anywhere.

    Attributes:
        url: The address.
        is_own: Whether this machine's user has named it.
    """

    url: str
    is_own: bool

    @classmethod
    def of(cls, url: str, *, is_own: bool) -> Address:
        """Return an address.

        Raises:
            ConfigError: it is no http address.
        """
        try:
            parts = urlsplit(url)
            is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_http = False
        if not is_http:
            raise ConfigError(f"{url} is no address of shards; name a https://.../manifest.json")
        return cls(url, is_own)

    @classmethod
    def manifest(cls, url: str, *, is_own: bool) -> Address:
        """Return the address of a manifest, where it or its folder is named."""
        return cls.of(url if url.endswith(".json") else f"{url.rstrip('/')}/{MANIFEST}", is_own=is_own)

    @property
    def origin(self) -> str:
        """The host, for people."""
        return urlsplit(self.url).netloc

    def beside(self, name: str) -> Address:
        """Return the address of a file in the same folder."""
        return Address.of(urljoin(self.url, quote(name)), is_own=self.is_own)

    def open(self, start: int, length: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        """Ask for some bytes; follow redirections.

        Raises:
            ConfigError: it leads to a host that is not public.
            DataError: it leads to no host, or to what is no address.
            OSError, http.client.HTTPException: it cannot be reached.
        """
        try:
            return self._open(start, length)
        except ValueError as error:  # a name that no resolver takes, or what a server sends in place of an address
            raise DataError(f"{self.url} leads to no address: {one_line(error)}; name another") from error

    def _open(self, start: int, length: int) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        url = self.url
        for _ in range(MAX_REDIRECTS + 1):
            parts = urlsplit(url)
            connection = _connection(parts.scheme, parts.hostname or "", parts.port, is_own=self.is_own)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            try:
                connection.request("GET", target, headers={"Range": f"bytes={start}-{start + length - 1}"})
                response = connection.getresponse()
            except BaseException:
                connection.close()
                raise
            if response.status not in (301, 302, 303, 307, 308):
                return connection, response
            connection.close()
            url = Address.of(urljoin(url, response.headers.get("Location", "")), is_own=self.is_own).url
        raise http.client.HTTPException(f"more than {MAX_REDIRECTS} redirections")


def _connection(scheme: str, host: str, port: int | None, *, is_own: bool) -> http.client.HTTPConnection:
    """Return a connection to a host; a stranger's goes to a public address, and to the one that was looked at."""
    address = host if is_own else _public_address(host, port or (443 if scheme == "https" else 80))
    if scheme == "http":
        made = http.client.HTTPConnection(host, port, timeout=WAIT_SECONDS)
    else:
        made = http.client.HTTPSConnection(host, port, timeout=WAIT_SECONDS, context=ssl.create_default_context())
    # The name stays the host's, for its certificate; the bytes go to the address.
    made._create_connection = lambda at, *more: socket.create_connection((address, at[1]), *more)  # type: ignore[attr-defined]
    return made


def _public_address(host: str, port: int) -> str:
    """Return an address of a host, all of which must be public.

    Raises:
        ConfigError: one is not.
    """
    found = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    for address in found:
        if not ipaddress.ip_address(address.partition("%")[0]).is_global:  # guard: public-shards
            raise ConfigError(
                f"the run's founder names shards on {host}, which is {address}, no public address; if you trust it, "
                f"name it yourself with --data"
            )
    return found[0]


def _read(where: Address, most: int) -> bytes:
    """Return all bytes of an address.

    Raises:
        DataError: it cannot be read, or has more than `most` bytes.
    """

    def attempt() -> bytes:
        content, deadline = bytearray(), time.monotonic() + READ_SECONDS
        for chunk in _answer(where, 0, most + 1)[1]:
            content += chunk
            if time.monotonic() > deadline:  # guard: remote-seconds
                raise DataError(f"{where.url} has not come in {READ_SECONDS:.0f} s; name another address")
            if len(content) > most:  # guard: remote-bytes
                raise DataError(f"{where.url} has more than {most} bytes; it is no manifest or tokenizer")
        return bytes(content)

    failures = 0
    while True:
        try:
            return attempt()
        except (OSError, http.client.HTTPException) as error:
            failures = _failed(where, error, failures)


def _download(where: Address, part: Path, num_bytes: int, progress: _Progress) -> None:
    """Bring a file to its length, piece by piece, from where an earlier process has left it.

    Raises:
        ConfigError: the file cannot be written.
        DataError: the address cannot be read.
    """
    failures = 0
    while (done := _size(part)) < num_bytes:
        try:
            start, chunks = _answer(where, done, min(PIECE_BYTES, num_bytes - done))
            for chunk in chunks:
                _append(part, start, chunk[: num_bytes - start])  # guard: remote-length
                start += len(chunk)
                progress.add(len(chunk))
                if start >= num_bytes:
                    break
        except (OSError, http.client.HTTPException) as error:
            failures = _failed(where, error, failures if _size(part) <= done else 0)
        else:
            if _size(part) <= done:
                failures = _failed(where, http.client.HTTPException(f"it ends after {done} bytes"), failures)


def _append(part: Path, start: int, chunk: bytes) -> None:
    """Write a chunk at its place; what is behind it, of an answer that began anew, goes."""
    try:
        with part.open("r+b" if part.exists() else "wb") as stream:
            stream.truncate(start)
            stream.seek(start)
            stream.write(chunk)
    except OSError as error:
        raise ConfigError(f"cannot write {part}: {error.strerror}; make room, or set --cache") from error


def _failed(where: Address, error: Exception, failures: int) -> int:
    """Wait before the next request; return the failures in a row.

    Raises:
        OutageError: there are too many.
    """
    reason = str(error) or type(error).__name__
    if failures + 1 >= TRIES:
        raise OutageError(
            f"cannot read {where.url}: {reason}; start again to go on, or name another address"
        ) from error
    pause = min(PAUSE_SECONDS * 2.0**failures, MAX_PAUSE_SECONDS)
    log.warning("%s: %s; asking again in %.1f s", where.url, reason, pause)
    threading.Event().wait(pause)
    return failures + 1


def _answer(where: Address, start: int, length: int) -> tuple[int, Iterator[bytes]]:
    """Ask for some bytes; return where the answer begins, which is 0 if the server knows no ranges, and its bytes.

    Raises:
        DataError: the server has no such file.
        OSError, http.client.HTTPException: it cannot be reached, or does not answer.
    """
    connection, response = where.open(start, length)

    def chunks() -> Iterator[bytes]:
        try:
            while chunk := response.read1(READ_BYTES):
                yield chunk
        finally:
            connection.close()

    if response.status in (200, 206):
        return start if response.status == 206 else 0, chunks()
    connection.close()
    if response.status in (401, 403, 404, 410):
        raise DataError(f"{where.url} answers {response.status} {response.reason}; name another address")
    raise http.client.HTTPException(f"it answers {response.status} {response.reason}")


class _Progress:
    """Says now and then how much has come.

    Args:
        total: Bytes to come.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._began = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said >= SAY_SECONDS:
            self._said = now
            rate = self._done / (now - self._began)
            log.info(
                "fetched %s of %s of the shards, %s/s", size_text(self._done), size_text(self._total), size_text(rate)
            )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
