"""Files that appear whole or not at all, are shared by the processes of one machine, and survive a power cut."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from spes_p2p.errors import ConfigError, DataError

MAKING_SECONDS = 4 * 3600.0
"""Longest that a process waits for what another one makes for both."""
TICK_SECONDS = 0.02
"""Longest tick of a file system's clock, within which two edits of a file have the same time."""

State = tuple[int, int, int, int]
"""Inode, size, modification time and change time of a file."""


def private_folder(folder: Path) -> None:
    """Make a folder that no other user can read, and its parents; one that is there keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # guard: 0o700 -> 0o755


def cache_folder(cache: Path, kind: str) -> Path:
    """Return the cache's folder for one kind of file; make it if it is absent.

    Raises:
        ConfigError: the folder cannot be made or written.
    """
    folder = cache.expanduser() / kind
    try:
        private_folder(folder)
    except OSError as error:
        raise ConfigError(f"cannot use cache {folder}: {error.strerror}; set --cache to a writable folder") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cache {folder} is not writable; set --cache to a writable folder")
    return folder


@contextlib.contextmanager
def locked(file: Path, timeout_seconds: float) -> Iterator[None]:
    """Hold a lock on `file` against other processes; the lock of a process that dies is released.

    Raises:
        DataError: another process held the lock for longer than `timeout_seconds`.
    """
    lock = file.with_name(f"{file.name}.lock")
    try:
        with FileLock(lock, timeout=timeout_seconds):
            yield
    except Timeout as error:
        raise DataError(
            f"another process has been making {file} for {timeout_seconds:.0f} s; wait for it, or set another --cache"
        ) from error


def make_once(done: Path, lock: Path, make: Callable[[], None], check: Callable[[], None] = lambda: None) -> None:
    """Call `make` unless the file `done` is there; of several processes one makes it, and the others wait for hours.

    Raises:
        DataError: another process took longer than that, or `check` raises it after `make`: `done` is then deleted.
    """
    if not done.exists():
        with locked(lock, MAKING_SECONDS):
            if not done.exists():
                make()
                try:
                    check()
                except DataError:
                    done.unlink()
                    raise


def file_state(path: Path) -> State:
    """Return what is equal only while nobody touches a file: its content is then unchanged."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def digest_of_file(path: Path, algorithm: str = "sha256") -> str:
    """Return the digest of a file in hex, without reading it whole into memory."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


def content_digests(paths: Sequence[Path], cache: Path | None) -> list[str]:
    """Return the SHA-256 of each file's content, which decides whether text or shards are others than before.

    `cache` remembers the digests of files that are listed together, until the state of one of them changes.

    Raises:
        ConfigError: `cache` cannot be written.
        DataError: a file cannot be read.
    """
    try:
        states = {path: file_state(path) for path in paths}
        key = hashlib.sha256(repr([(str(path.resolve()), state) for path, state in states.items()]).encode())
        memory = cache_folder(cache, "digests") / key.hexdigest()[:32] if cache is not None else None
        known = memory.read_text().split() if memory is not None and memory.exists() else []
        if len(known) == len(paths):  # else a power cut has emptied it
            return known
        if any(state[3] > time.time_ns() - TICK_SECONDS * 1e9 for state in states.values()):
            threading.Event().wait(TICK_SECONDS)  # so that no later edit has the same time
        found = [digest_of_file(path) for path in paths]
    except OSError as error:
        raise DataError(f"cannot read {error.filename}: {error.strerror}; restore it, or leave it out") from error
    if memory is not None:
        with write_atomic(memory, durable=False) as target:
            target.write("\n".join(found).encode())
    return found


def matches(pattern: Path) -> list[Path]:
    """Return what a path or pattern names, in sorted order; as much of it as exists is taken literally."""
    folder = _existing(pattern)
    if folder == pattern:
        return [pattern]
    rest = pattern.relative_to(folder)
    found = map(Path, glob.glob(str(Path(glob.escape(str(folder))) / rest), recursive=True))
    return sorted(path for path in found if path.exists())  # no link to nowhere


def unmatched(pattern: Path, flag: str) -> ConfigError:
    """Return the error for a path or pattern that names nothing."""
    if not glob.has_magic(str(pattern)):
        return ConfigError(f"{pattern} does not exist; give {flag} an existing file or folder")
    folder = _existing(pattern)
    return ConfigError(
        f"{pattern} matches no file: {folder.absolute()} has no {pattern.relative_to(folder)}, and *, ? and [] in what "
        f"does not exist make a pattern; give {flag} an existing file or folder, or another pattern"
    )


def _existing(path: Path) -> Path:
    return next(each for each in (path, *path.parents) if each.exists())


def visible_files(folder: Path) -> list[Path]:
    """Return a folder's files in sorted order, without hidden files and those of hidden folders.

    Raises:
        PermissionError: this user may not list the folder.
    """
    os.scandir(folder).close()  # `rglob` finds nothing in such a folder
    found = (file for file in folder.rglob("*") if file.is_file())
    return sorted(file for file in found if not any(part.startswith(".") for part in file.relative_to(folder).parts))


@contextlib.contextmanager
def scratch_path(target: Path) -> Iterator[Path]:
    """Give the block an unused path beside `target`, whose file or folder is deleted if it is still there at the end.

    A process that is killed leaves it behind, under a name that ends in `.tmp`.
    """
    scratch = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        yield scratch
    finally:
        if scratch.is_dir():
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            scratch.unlink(missing_ok=True)


@contextlib.contextmanager
def write_atomic(file: Path, *, durable: bool = True, is_private: bool = False) -> Iterator[BinaryIO]:
    """Open a stream whose bytes replace `file` when the block succeeds, and are dropped when it raises.

    Args:
        file: The file to write, in a folder that exists.
        durable: Sync the bytes to disk first, so that a power cut leaves the old file or the new one.
        is_private: Let no other user read it.
    """
    with scratch_path(file) as scratch:
        with scratch.open("wb") as stream:
            if is_private:
                os.fchmod(stream.fileno(), 0o600)  # guard: skip
            yield stream
            if durable:
                stream.flush()
                os.fsync(stream.fileno())
        scratch.replace(file)


def link_file(source: Path, target: Path) -> bool:
    """Give a file a second name without a second copy of its bytes; return whether the file system can.

    Raises:
        FileNotFoundError: `source` does not exist.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        return False
    return True


def sync(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
