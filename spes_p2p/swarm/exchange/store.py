"""Versions on disk.

They lie on disk, not in memory: slots that a peer does not train cost it no memory, a restarted peer still has
them, and the last copy of a dead peer's expert survives on each peer that has pulled it.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import BLOCK_BYTES, block_hashes, digest_of, has_digest, hashes_of_file
from spes_p2p.errors import ExchangeError
from spes_p2p.fs import link_file, scratch_path, write_atomic
from spes_p2p.swarm.exchange.blocks import LIST, Have, Unfinished
from spes_p2p.swarm.exchange.versions import RefusedVersions, Version, is_document
from spes_p2p.swarm.names import AnyName

log = logging.getLogger(__name__)

PIECE_BYTES = 2**18
"""Bytes written at a time; larger writes cost ten times the processor's time where memory is fragmented."""
SPARE_LINES = 256
"""Outdated lines of the index after which it is written anew."""
INDEX = "index.jsonl"
UNFINISHED = ".part"
"""Suffix of the file of a version on its way here."""
KEEP_PER_NAME = 2
"""Versions kept of each name: the newest, and the one that slower peers may still be fetching."""


class VersionStore:
    """Versions on disk, safe to read in one thread while another adds.

    The newest version of a name is the one added last; its round may be lower, as a peer that joins a majority may go
    back. Files are immutable and appear whole, but for those of versions on their way here.

    Args:
        directory: Folder of the store; an index in it makes it survive a restart.
        run_id: Versions of other runs are refused.

    Attributes:
        refused: Digests of bad versions, which must not come back.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self.refused = RefusedVersions()
        self._directory = directory
        self._run_id = run_id
        self._lock = threading.RLock()
        self._versions: dict[str, list[Version]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._index = directory / INDEX
        self._num_lines = 0
        self._stored: set[str] = set()
        """Digests of the versions here whose files this process has written."""
        self._by_digest: dict[str, Version] | None = None
        self._parts = {path.name.partition(".")[0]: path for path in directory.glob(f"*{UNFINISHED}")}
        """Files of the versions that last began to come, by name."""
        self._unfinished: dict[str, Unfinished] = {}
        self._hashes: dict[str, bytes] = {}
        """Hashes of the blocks of versions here, by digest, as far as they were needed."""
        self._read_index()

    def newest(self) -> dict[str, Version]:
        """Return the newest version of each name."""
        with self._lock:
            return {name: versions[0] for name, versions in self._versions.items() if versions}

    def find(self, name: str, digest: str = "") -> Version | None:
        """Return the newest version of a name, or the one with this digest; None if it is not here."""
        with self._lock:
            return next((version for version in self._versions.get(name, ()) if digest in ("", version.digest)), None)

    def path(self, version: Version) -> Path:
        """Return the file of a version's bytes."""
        return self._directory / file_name(version)

    # ------------------------------------------------------------------ adding

    def add(self, items: Mapping[AnyName, tuple[Version, bytes | memoryview]]) -> None:
        """Store verified versions with their bytes, visible all at once; delete the oldest ones."""
        for version, data in items.values():
            if not self.path(version).exists():
                write_whole(self.path(version), data)
        with self._lock:
            for version, data in items.values():
                if not self.path(version).exists():  # another thread has displaced and deleted it since
                    write_whole(self.path(version), data)
                self._insert(version)
                self._stored.add(version.digest)
            self._append_to_index([version for version, _ in items.values()])

    def takes_known(self, version: Version) -> bool:
        """Store a version whose bytes this peer has, perhaps of another round; return whether it has them."""
        with self._lock:
            if not self.path(version).exists():
                return False
            if self.find(version.name) != version:
                self._insert(version)
                self._append_to_index([version])
            return True

    def restore(self, files: Mapping[Path, Version]) -> None:
        """Make versions the newest again, from verified files elsewhere, whose bytes are shared if possible."""
        with self._lock:
            for file, version in files.items():
                path = self.path(version)
                if not (path.exists() and path.samefile(file)):
                    with scratch_path(path) as scratch:
                        if not link_file(file, scratch):
                            shutil.copyfile(file, scratch)
                        scratch.replace(path)
                self._insert(version)
            self._append_to_index(list(files.values()))

    def _insert(self, version: Version) -> None:
        older = self._versions.get(version.name, [])
        kept = [version, *(old for old in older if old.round != version.round)][:KEEP_PER_NAME]
        self._versions[version.name] = kept
        self._by_digest = None
        self._stored -= {old.digest for old in older} - {new.digest for new in kept}
        # Only the displaced files: those of other threads may be written and not inserted yet.
        for path in {self.path(old) for old in older} - {self.path(new) for new in kept}:
            path.unlink(missing_ok=True)

    # ------------------------------------------------------------------ blocks

    def begin(self, version: Version) -> Unfinished:
        """Return where the blocks of a version go; those that came before a restart are found there."""
        path = self.path(version).with_suffix(UNFINISHED)
        if (stale := self._parts.get(version.name, path)) != path:
            stale.unlink(missing_ok=True)
        self._parts[version.name] = path
        self._unfinished[version.digest] = unfinished = Unfinished(version, path)
        return unfinished

    def finish(self, unfinished: Unfinished) -> None:
        """Store a version that is complete and verified."""
        version = unfinished.version
        with self._lock:
            unfinished.path.replace(self.path(version))
            self._insert(version)
            self._stored.add(version.digest)
            self._hashes[version.digest] = unfinished.hashes
            self._append_to_index([version])

    def end(self, unfinished: Unfinished) -> None:
        """Serve no more of what did not become complete; its file stays for the next time."""
        if self._unfinished.get(unfinished.version.digest) is unfinished:
            del self._unfinished[unfinished.version.digest]

    def have(self, digest: str) -> Have:
        """Return what this peer has of a version."""
        if self._of_digest(digest) is not None:
            return Have(None)
        unfinished = self._unfinished.get(digest)
        return Have() if unfinished is None else unfinished.have()

    def read_part(self, digest: str, number: int) -> bytes | None:
        """Return a block of a version, or its LIST; None if it is not here."""
        version, unfinished = self._of_digest(digest), self._unfinished.get(digest)
        if version is None:
            return None if unfinished is None else unfinished.read(number)
        try:
            if number == LIST:
                if not self._hashes.get(digest):
                    self._hashes[digest] = hashes_of_file(self.path(version))
                return self._hashes[digest]
            with self.path(version).open("rb", buffering=0) as file:
                return os.pread(file.fileno(), BLOCK_BYTES, BLOCK_BYTES * number) or None
        except OSError:  # a newer version has replaced it
            return None

    def _of_digest(self, digest: str) -> Version | None:
        with self._lock:
            if self._by_digest is None:
                self._by_digest = {each.digest: each for kept in self._versions.values() for each in kept}
                self._hashes = {each: hashes for each, hashes in self._hashes.items() if each in self._by_digest}
            return self._by_digest.get(digest)

    # ------------------------------------------------------------------ deleting

    def keep_only(self, names: Collection[str]) -> None:
        """Delete vectors of other names, once the run's names are known, so that no other peer fetches them."""
        for name in [name for name in self.newest() if name not in names and not is_document(name)]:
            while (version := self.find(name)) is not None:
                log.warning("%s is no part of this run; it is deleted", name)
                self.delete(version)

    def repair(self) -> None:
        """Delete damaged versions, and the unfinished files of a process that was killed."""
        for name in list(self._versions):
            while (version := self.find(name)) is not None and not has_digest(self.path(version), version.digest):
                log.warning("%s is damaged; it is deleted, and taken from elsewhere", self.path(version))
                self.delete(version)
        listed = {self.path(version) for kept in self._versions.values() for version in kept}
        for stray in [*self._directory.glob("*.tmp"), *(set(self._directory.glob("*.bin")) - listed)]:
            stray.unlink()

    def refuse(self, version: Version) -> None:
        """Delete a bad version, and do not take it again in this process."""
        self.refused.add(version.digest)  # guard: refused-remembered
        self.delete(version)

    def delete(self, version: Version) -> None:
        """Delete a version; it can be pulled again."""
        with self._lock:
            others = [other for other in self._versions.get(version.name, []) if other.digest != version.digest]
            self._versions[version.name] = others
            self._by_digest = None
            self._stored.discard(version.digest)
            self.path(version).unlink(missing_ok=True)

    # ------------------------------------------------------------------ reading

    def read(self, name: str, *, before: bool = False, digest: str = "") -> bytes:
        """Return the verified bytes of the newest version of `name`, of the one before it, or of that with a digest.

        Raises:
            ExchangeError: there is none, or its file is damaged.
        """
        version = self._wanted(name, before, digest)
        try:
            data = self.path(version).read_bytes()
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error
        self._check(version, digest_of(block_hashes(data)))
        return data

    def _wanted(self, name: str, before: bool = False, digest: str = "") -> Version:
        with self._lock:
            kept = [each for each in self._versions.get(name, [])[before:] if digest in ("", each.digest)]
        if not kept:
            which = " before its newest" if before else f" with digest {digest[:12]}" if digest else ""
            raise ExchangeError(f"this peer has no version of {name}{which}")
        return kept[0]

    def _check(self, version: Version, found: str) -> None:
        if found != version.digest:  # guard: disk-digest
            self.delete(version)
            raise ExchangeError(f"{self.path(version)} was damaged and is deleted; it can be pulled again")

    def map(self, name: str, *, before: bool = False, is_trusted: bool = False) -> PagedVector:
        """Return the newest version of an fp32 vector, or the one before it, where it lies.

        Args:
            name: Its name.
            before: Whether the one before the newest is wanted.
            is_trusted: Whether what this process has stored itself is not compared with its digest again.

        Raises:
            ExchangeError: there is none, or its file is damaged.
        """
        version = self._wanted(name, before)
        try:
            is_known = is_trusted and version.digest in self._stored
            if not is_known:
                self._check(version, digest_of(hashes_of_file(self.path(version))))
            return PagedVector.of_file(self.path(version))
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error

    # ------------------------------------------------------------------ the index

    def _append_to_index(self, versions: Sequence[Version]) -> None:
        """Add versions in order; a deleted version keeps its line and is recognised by its missing file.

        Raises:
            OSError: the disk is full; the index is as it was.
        """
        lines = _lines(versions)
        with self._index.open("ab", buffering=0) as file:
            size = file.tell()
            if (written := file.write(lines)) < len(lines):
                file.truncate(size)
                raise OSError(errno.ENOSPC, f"{written} of {len(lines)} bytes fit", str(self._index))
        self._num_lines += len(versions)
        if self._num_lines > SPARE_LINES + 4 * KEEP_PER_NAME * len(self._versions):
            self._rewrite_index()

    def _rewrite_index(self) -> None:
        versions = [version for kept in self._versions.values() for version in reversed(kept)]
        write_whole(self._index, _lines(versions))
        self._num_lines = len(versions)

    def _read_index(self) -> None:
        """Load what an earlier process has stored."""
        if not self._index.exists():
            return
        versions = [Version.verify(line, self._run_id) for line in read_index(self._directory)]  # guard: edited-index
        for version in versions:
            if self.path(version).exists():
                self._insert(version)
        self._rewrite_index()


def read_index(directory: Path) -> list[bytes]:
    """Return the lines of a store's index, oldest version first: each is the JSON of a `Version`, not yet verified.

    A last line that a killed process could not finish, or a running one is writing, is left out.

    Raises:
        ExchangeError: the index cannot be read, or a line of it is no JSON.
    """
    index = directory / INDEX
    try:
        lines = [line for line in index.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
        for line in lines:
            json.loads(line)
    except (OSError, ValueError) as error:
        raise ExchangeError(f"{index} is damaged; delete {directory} and join again") from error
    return lines


def _lines(versions: Iterable[Version]) -> bytes:
    return b"".join(version.model_dump_json().encode() + b"\n" for version in versions)


def file_name(version: Version) -> str:
    """Return the name of a version's file: it carries the digest, and no text that a peer chooses."""
    return f"{version.name}.{version.digest}.bin"


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file that appears with all its bytes, in place of an older one."""
    with write_atomic(path, durable=False) as file, memoryview(data) as view:
        for start in range(0, len(view), PIECE_BYTES):
            file.write(view[start : start + PIECE_BYTES])
