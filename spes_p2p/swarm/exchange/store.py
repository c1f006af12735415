"""Versions on disk, and the deltas that lead from one to the next.

Bytes lie on disk, not in memory: what a peer does not train costs it no RAM twice, a restarted peer still has
them, and the last copy of a dead peer's expert survives with everybody who pulled it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from spes_p2p.codecs import digest, digest_of_file
from spes_p2p.errors import ExchangeError
from spes_p2p.fs import link_file, scratch_path, write_atomic
from spes_p2p.swarm.exchange.versions import DOCUMENTS, RefusedVersions, Version
from spes_p2p.swarm.names import SLOT

log = logging.getLogger(__name__)

_FILE = re.compile(rf"^((?:shared|{SLOT}))\.([0-9a-f]{{64}})\.from\.([0-9a-f]{{64}})\.delta$")


@dataclass(frozen=True)
class Delta:
    """One step between versions.

    Attributes:
        base: Digest of the version that it starts from.
        digest: Digest of the version that it leads to.
        path: File that holds the encoded delta.
    """

    base: str
    digest: str
    path: Path


class DeltaStore:
    """The last deltas of each name, safe to use from several threads.

    They outlive the versions between them. What is written here needs no index: its name says what it is, and a chain
    that does not lead where it says is found out by the digest at its end.

    Args:
        directory: Folder of the store; what it holds from before a restart is used again.

    Attributes:
        keep: Most deltas kept of each name; at first those that are there.
    """

    def __init__(self, directory: Path) -> None:
        self.keep = 0
        self._directory, self._lock = directory, threading.Lock()
        self._deltas: dict[str, dict[str, Delta]] = {}
        for path in sorted(directory.glob("*.delta"), key=lambda path: path.stat().st_mtime_ns):
            if found := _FILE.match(path.name):
                name, digest, base = found.groups()
                self._deltas.setdefault(name, {})[digest] = Delta(base, digest, path)

    def add(self, name: str, base: str, digest: str, data: bytes | memoryview) -> None:
        """Keep a delta, as the newest of its name."""
        if not self.keep:
            return
        path = self._directory / f"{name}.{digest}.from.{base}.delta"
        with contextlib.ExitStack() as stack:
            with write_atomic(path, durable=False) as file:
                file.write(data)
                stack.enter_context(self._lock)  # before the file appears, so that no other thread deletes it unlisted
            kept = self._deltas.setdefault(name, {})
            replaced = kept.pop(digest, None)
            kept[digest] = Delta(base, digest, path)
            dropped = [kept.pop(oldest) for oldest in list(kept)[: max(0, len(kept) - self.keep)]]
            for old in [*dropped, *([replaced] if replaced else [])]:
                if old.path != path:
                    old.path.unlink(missing_ok=True)

    def chain(self, name: str, base: str, digest: str, most: int) -> Sequence[Delta]:
        """Return the deltas from `base` to `digest`, in order; none if there is a gap, or they are more than `most`."""
        chain: list[Delta] = []
        with self._lock:
            kept = self._deltas.get(name, {})
            while digest != base:
                if digest not in kept or len(chain) >= min(most, len(kept)):
                    return []
                chain.append(kept[digest])
                digest = kept[digest].base
        return chain[::-1]


PIECE_BYTES = 2**18
"""Written at a time: where memory is fragmented, pieces of megabytes cost ten times the processor's time."""
SPARE_LINES = 256
"""Of the index that are out of date before it is written anew."""
INDEX = "index.jsonl"
KEEP_PER_NAME = 2
"""Versions kept of each name: the newest, and the one that slower peers may still be fetching."""


class VersionStore:
    """Versions on disk, safe to read from one thread while another adds.

    The newest of a name is the one added last: who catches up with a majority may go back a round. Files are
    immutable: a new version is a new file, moved in whole. Serving opens the file, so that deleting an old version
    does not disturb a transfer under way.

    Args:
        directory: Folder of the store; an index in it makes it survive a restart.
        run_id: Versions of other runs are refused.

    Attributes:
        deltas: What leads from older versions to these.
        refused: Digests of versions that were bad, and shall not come back.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory, self._run_id = directory, run_id
        self._lock = threading.RLock()
        self._versions: dict[str, list[Version]] = {}
        self.refused = RefusedVersions()
        self._listeners: list[Callable[[], None]] = []
        directory.mkdir(parents=True, exist_ok=True)
        self._index, self._num_lines = directory / INDEX, 0
        self.deltas = DeltaStore(directory)
        self._read_index()

    def newest(self) -> dict[str, Version]:
        """Return the newest version of each name."""
        with self._lock:
            return {name: versions[0] for name, versions in self._versions.items() if versions}

    def find(self, name: str, digest: str = "") -> Version | None:
        """Return the newest version of a name, or the one with this digest, if this peer has it."""
        with self._lock:
            return next((version for version in self._versions.get(name, ()) if digest in ("", version.digest)), None)

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener`, in whatever thread adds versions, after each time some were."""
        self._listeners.append(listener)

    def path(self, version: Version) -> Path:
        """Return the file that holds a version's bytes."""
        return self._directory / file_name(version)

    def add(self, items: Mapping[str, tuple[Version, bytes | memoryview]]) -> None:
        """Store verified versions with their bytes, all visible at once; drop the oldest ones."""
        for version, data in items.values():
            if not self.path(version).exists():
                write_whole(self.path(version), data)
        with self._lock:
            for version, data in items.values():
                if not self.path(version).exists():  # displaced, and deleted, by another thread meanwhile
                    write_whole(self.path(version), data)
                self._list(version)
            self._append_to_index([version for version, _ in items.values()])
        self._tell()

    def store_known_bytes(self, version: Version) -> None:
        """Store a version whose bytes this peer has already, from an older one.

        Raises:
            ExchangeError: it has them no more.
        """
        with self._lock:
            if not self.path(version).exists():
                raise ExchangeError(f"{self.path(version)} is gone")
            self._list(version)
            self._append_to_index([version])
        self._tell()

    def restore(self, files: Mapping[Path, Version]) -> None:
        """Have versions as the newest again, from files elsewhere that were verified."""
        with self._lock:
            for file, version in files.items():
                if not (self.path(version).exists() and self.path(version).samefile(file)):
                    link_or_copy(file, self.path(version))
                self._list(version)
            self._append_to_index(list(files.values()))
        self._tell()

    def keep_only(self, names: Collection[str]) -> None:
        """Forget vectors of other names, once it is known which the run has: what nobody can load nobody shall have."""
        for name in set(self.newest()) - {*names, *DOCUMENTS}:
            while (version := self.find(name)) is not None:
                log.warning("%s of %s is no part of this run; it is deleted", name, version.author)
                self.delete(version)

    def repair(self) -> None:
        """Forget versions whose bytes are damaged, and delete what a peer that was killed had half written."""
        for name in list(self._versions):
            while (version := self.find(name)) is not None and not self._is_whole(version):
                log.warning("%s is damaged; it is deleted, and taken from elsewhere", self.path(version))
                self.delete(version)
        listed = {self.path(version) for kept in self._versions.values() for version in kept}
        for stray in [*self._directory.glob("*.tmp"), *(set(self._directory.glob("*.bin")) - listed)]:
            stray.unlink()

    def _is_whole(self, version: Version) -> bool:
        try:
            return digest_of_file(self.path(version)) == version.digest
        except OSError:
            return False

    def _list(self, version: Version) -> None:
        older = self._versions.get(version.name, [])
        kept = [version, *(old for old in older if old.round != version.round)][:KEEP_PER_NAME]
        self._versions[version.name] = kept
        # Only what this call displaced: other threads' files may be written, but not listed yet.
        for path in {self.path(old) for old in older} - {self.path(new) for new in kept}:
            path.unlink(missing_ok=True)

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()

    def refuse(self, version: Version) -> None:
        """Forget a version that turned out bad, and remember that it did, until this process ends."""
        self.refused.add(version.digest)  # guard: refused-remembered
        self.delete(version)

    def delete(self, version: Version) -> None:
        """Forget a version that turned out damaged, or is of no use; it can be pulled again."""
        with self._lock:
            others = [other for other in self._versions.get(version.name, []) if other.digest != version.digest]
            self._versions[version.name] = others
            self.path(version).unlink(missing_ok=True)

    def read(self, name: str, *, before: bool = False) -> bytes:
        """Return the bytes of the newest version of `name`, or of the one before it, verified.

        Raises:
            ExchangeError: there is none, or the file is damaged.
        """
        with self._lock:
            kept = self._versions.get(name, [])[before:]
        if not kept:
            raise ExchangeError(f"this peer has no version of {name}{' before its newest' if before else ''}")
        version = kept[0]
        try:
            data = self.path(version).read_bytes()
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error
        if digest(data) != version.digest:  # guard: disk-digest
            self.delete(version)
            raise ExchangeError(f"{self.path(version)} was damaged and is deleted; it can be pulled again")
        return data

    def load(self, name: str, digest: str) -> Tensor:
        """Return a version's bytes, unverified, as a new fp32 vector: what is made of it is verified.

        Raises:
            ExchangeError: this peer has it no more.
        """
        version = self.find(name, digest)
        if version is None:
            raise ExchangeError(f"this peer has no version {digest[:16]} of {name}")
        try:
            return torch.from_numpy(np.fromfile(self.path(version), dtype="<f4"))
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error

    # ------------------------------------------------------------------ the index

    def _append_to_index(self, versions: Sequence[Version]) -> None:
        """Note versions in the order in which they were added; those that are gone are known by their missing files."""
        with self._index.open("ab") as file:
            file.write(b"".join(version.model_dump_json().encode() + b"\n" for version in versions))
        self._num_lines += len(versions)
        if self._num_lines > SPARE_LINES + 4 * KEEP_PER_NAME * len(self._versions):
            self._rewrite_index()

    def _rewrite_index(self) -> None:
        versions = [version for kept in self._versions.values() for version in reversed(kept)]
        write_whole(self._index, b"".join(version.model_dump_json().encode() + b"\n" for version in versions))
        self._num_lines = len(versions)

    def _read_index(self) -> None:
        """Take up what an earlier process has left; a last line that it could not finish counts for nothing."""
        if not self._index.exists():
            return
        try:
            lines = [line for line in self._index.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
            for line in lines:
                json.loads(line)
        except (OSError, ValueError) as error:
            raise ExchangeError(f"{self._index} is damaged; delete {self._directory} and join again") from error
        versions = [Version.verify(line, self._run_id) for line in lines]  # guard: edited-index
        for version in versions:
            if self.path(version).exists():
                self._list(version)
        self._rewrite_index()


def file_name(version: Version) -> str:
    """Return the name of the file that holds a version's bytes: by digest, never by what a peer says."""
    return f"{version.name}.{version.digest}.bin"


def link_or_copy(source: Path, target: Path) -> None:
    """Let a file appear, whole, under a second name: with its bytes shared where the file system can."""
    with scratch_path(target) as scratch:
        if not link_file(source, scratch):
            shutil.copyfile(source, scratch)
        scratch.replace(target)


def write_whole(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Make a file appear with all its bytes, in place of any before it."""
    with write_atomic(path, durable=False) as file, memoryview(data) as view:
        for start in range(0, len(view), PIECE_BYTES):
            file.write(view[start : start + PIECE_BYTES])
