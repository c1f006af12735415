"""Versions on disk.

They lie on disk, not in memory: slots that a peer does not train cost it no memory, a restarted peer still has
them, and the last copy of a dead peer's expert survives on each peer that has pulled it.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import shutil
import threading
from collections.abc import Collection, Mapping
from pathlib import Path

from spes_p2p.codecs.paged import PagedVector
from spes_p2p.codecs.vectors import block_hashes, digest_of, has_digest, hashes_of_file
from spes_p2p.errors import ExchangeError
from spes_p2p.fs import link_file, scratch_path, write_atomic
from spes_p2p.swarm.exchange.blocks import ALL, LIST, Unfinished, encode_have, read_block
from spes_p2p.swarm.exchange.versions import RefusedVersions, Version, is_document
from spes_p2p.swarm.names import AnyName

log = logging.getLogger(__name__)

PIECE_BYTES = 2**18
"""Bytes written at a time; larger writes cost ten times the processor's time where memory is fragmented."""
UNFINISHED = ".part"
"""Suffix of the file of a version on its way here."""
KEEP_PER_NAME = 2
"""Versions kept of each name: the newest, and the one that slower peers may still be fetching."""


class VersionStore:
    """Versions on disk, safe to read in one thread while another adds.

    Their files are the only list of them. Files are immutable and appear whole, except those of versions on their way
    here. Of a name the latest round is the newest version: a peer that goes back to an older one deletes later ones.

    Args:
        directory: Folder of the store; its versions survive a restart.

    Attributes:
        refused: Digests of bad versions, which must not come back.
    """

    def __init__(self, directory: Path) -> None:
        self.refused = RefusedVersions()
        self._directory = directory
        self._lock = threading.RLock()
        directory.mkdir(parents=True, exist_ok=True)
        self._versions = versions_in(directory)
        self._by_digest = {each.digest: each for kept in self._versions.values() for each in kept}
        self._hashes: dict[str, bytes] = {}
        """Hashes of the blocks of versions that this process has stored or compared, by digest; empty if not needed."""
        self._parts = {path.name.partition(".")[0]: path for path in directory.glob(f"*{UNFINISHED}")}
        """Files of the versions that last began to come, by name."""
        self._unfinished: dict[str, Unfinished] = {}

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

    def add(
        self,
        items: Mapping[AnyName, tuple[Version, bytes | memoryview]],
        hashes: Mapping[AnyName, bytes] | None = None,
    ) -> None:
        """Store verified versions with their bytes, visible all at once; delete the oldest ones.

        Args:
            hashes: Hashes of their blocks; those left out are made when a peer first asks for the list.
        """
        for version, data in items.values():
            self._write(version, data)
        with self._lock:
            for name, (version, data) in items.items():
                self._write(version, data)  # another thread may have displaced and deleted it since
                self._insert(version)
                self._hashes.setdefault(version.digest, (hashes or {}).get(name, b""))

    def _write(self, version: Version, data: bytes | memoryview) -> None:
        if not self.path(version).exists():
            write_whole(self.path(version), data)

    def takes_known(self, version: Version) -> bool:
        """Store a version whose bytes this peer has, perhaps of another round; return whether it has them."""
        with self._lock:
            known = self.find(version.name, version.digest)
            if known is None or not self.path(known).exists():
                return False
            self.restore({self.path(known): version})
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

    def _insert(self, version: Version) -> None:
        older = self._versions.get(version.name, [])
        kept = [version, *(old for old in older if old.round < version.round)][:KEEP_PER_NAME]
        self._versions[version.name] = kept
        self._by_digest[version.digest] = version
        # Only the displaced files: those of other threads may be written and not inserted yet.
        for old in older:
            if old not in kept:
                self._forget(old)

    def _forget(self, version: Version) -> None:
        self.path(version).unlink(missing_ok=True)
        everything = itertools.chain.from_iterable(self._versions.values())
        same = next((each for each in everything if each.digest == version.digest), None)
        if same is not None:  # of another round, or of another slot that began alike
            self._by_digest[version.digest] = same
        else:
            self._by_digest.pop(version.digest, None)
            self._hashes.pop(version.digest, None)

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
            self._hashes[version.digest] = unfinished.hashes

    def end(self, unfinished: Unfinished) -> None:
        """Serve no more of what did not become complete; its file stays for the next time."""
        if self._unfinished.get(unfinished.version.digest) is unfinished:
            del self._unfinished[unfinished.version.digest]

    def have(self, digest: str) -> bytes:
        """Return what a HAVE message says of a version."""
        if digest in self._by_digest:
            return encode_have(ALL)
        unfinished = self._unfinished.get(digest)
        return encode_have(0) if unfinished is None else encode_have(unfinished.have, unfinished.num_blocks)

    def read_part(self, digest: str, number: int) -> bytes | None:
        """Return a block of a version, or its LIST; None if it is not here."""
        version, unfinished = self._by_digest.get(digest), self._unfinished.get(digest)
        if version is None:
            return None if unfinished is None else unfinished.read(number)
        try:
            if number != LIST:
                return read_block(self.path(version), number)
            if not self._hashes.get(digest):
                hashes = hashes_of_file(self.path(version))
                self._check(version, digest_of(hashes))
                self._hashes[digest] = hashes
            return self._hashes[digest]
        except (ExchangeError, OSError):  # it is damaged, or a newer version has replaced it
            return None

    # ------------------------------------------------------------------ deleting

    def keep_only(self, names: Collection[str]) -> None:
        """Delete vectors of other names, once the run's names are known, so that no other peer fetches them."""
        for name in [name for name in self.newest() if name not in names and not is_document(name)]:
            log.warning("%s is no part of this run; it is deleted", name)
            self.delete_all(name)

    def repair(self) -> None:
        """Delete damaged versions, and the unfinished files of a process that was killed."""
        for version in [version for kept in self._versions.values() for version in kept]:
            if not has_digest(self.path(version), version.digest):
                log.warning("%s is damaged; it is deleted, and taken from elsewhere", self.path(version))
                self.delete(version)
        for stray in self._directory.glob("*.tmp"):
            stray.unlink()

    def refuse(self, version: Version) -> None:
        """Delete a bad version, and do not take it again in this process."""
        self.refused.add(version.digest)  # guard: skip
        self.delete(version)

    def delete(self, version: Version) -> None:
        """Delete a version; it can be pulled again."""
        with self._lock:
            kept = self._versions.get(version.name, [])
            self._versions[version.name] = [other for other in kept if other.digest != version.digest]
            for each in {version, *kept}.difference(self._versions[version.name]):
                self._forget(each)

    def delete_all(self, name: str) -> None:
        """Delete all versions of a name."""
        while (version := self.find(name)) is not None:
            self.delete(version)

    # ------------------------------------------------------------------ reading

    def read(self, name: str, *, before: bool = False, round: int | None = None) -> bytes:
        """Return the verified bytes of the newest version of a name, of the one before it, or of a round's.

        Raises:
            ExchangeError: there is none, or its file is damaged.
        """
        version = self._wanted(name, before, round)
        try:
            data = self.path(version).read_bytes()
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error
        self._check(version, digest_of(block_hashes(data)))
        return data

    def _wanted(self, name: str, before: bool, round: int | None = None) -> Version:
        with self._lock:
            kept = [each for each in self._versions.get(name, []) if round in (None, each.round)][before:]
        if not kept:
            what = " before its newest" if before else "" if round is None else f" of round {round}"
            raise ExchangeError(f"this peer has no version of {name}{what}")
        return kept[0]

    def _check(self, version: Version, found: str) -> None:
        if found != version.digest:  # guard: never
            self.delete(version)
            raise ExchangeError(f"{self.path(version)} was damaged and is deleted; it can be pulled again")

    def map(self, name: str, *, before: bool = False, is_trusted: bool = False) -> PagedVector:
        """Return the newest version of an fp32 vector, or the one before it, where it lies.

        Args:
            is_trusted: Whether what this process has stored or compared is not compared with its digest again.

        Raises:
            ExchangeError: there is none, or its file is damaged.
        """
        version = self._wanted(name, before)
        try:
            if not (is_trusted and version.digest in self._hashes):
                self._check(version, digest_of(hashes_of_file(self.path(version))))
            return PagedVector.of_file(self.path(version))
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error


def versions_in(directory: Path) -> dict[str, list[Version]]:
    """Return the versions in a store's folder by name, newest first, as the names of their files say.

    Of two versions of one name and round, which a killed process may have left, the file written last counts.
    """
    found: dict[str, list[tuple[int, int, Version]]] = {}
    for path in sorted(directory.glob("*.bin")):
        with contextlib.suppress(ValueError, OSError):  # not one of the store's, or empty after a power cut
            name, round, digest, _ = path.name.split(".")
            stat = path.stat()
            version = Version(name=name, round=int(round), digest=digest, num_bytes=stat.st_size)
            if file_name(version) == path.name:
                found.setdefault(version.name, []).append((version.round, stat.st_mtime_ns, version))
    newest_first = {name: sorted(kept, key=lambda each: each[:2], reverse=True) for name, kept in found.items()}
    return {name: [version for _, _, version in kept] for name, kept in newest_first.items()}


def file_name(version: Version) -> str:
    """Return the name of a version's file, which says all of it but the length."""
    return f"{version.name}.{version.round}.{version.digest}.bin"


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Write a file that appears with all its bytes, in place of an older one."""
    with write_atomic(path, durable=False) as file, memoryview(data) as view:
        for start in range(0, len(view), PIECE_BYTES):
            file.write(view[start : start + PIECE_BYTES])
