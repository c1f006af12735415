"""Files that appear whole or not at all, are shared by processes of one machine, and survive a power cut."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from filelock import FileLock, Timeout

from spes_p2p.errors import ConfigError, DataError


def cache_folder(cache: Path, kind: str) -> Path:
    """Returns the folder for one kind of file, made if absent.

    Raises:
        ConfigError: it cannot be made or written.
    """
    folder = cache.expanduser() / kind
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot use cache {folder}: {error.strerror}; set --cache to a writable folder") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cache {folder} is not writable; set --cache to a writable folder")
    return folder


@contextlib.contextmanager
def locked(file: Path, timeout_seconds: float) -> Iterator[None]:
    """Holds the lock of `file` among processes; one that dies lets go of it.

    Raises:
        DataError: another process held it for longer than `timeout_seconds`.
    """
    lock = file.with_name(f"{file.name}.lock")
    try:
        with FileLock(lock, timeout=timeout_seconds):
            yield
    except Timeout as error:
        raise DataError(
            f"another process has been making {file} for {timeout_seconds:.0f} s; wait for it, or set another --cache"
        ) from error


@contextlib.contextmanager
def write_atomically(file: Path) -> Iterator[BinaryIO]:
    """Opens a stream whose bytes appear under `file` when the block ends well, and nowhere if it does not."""
    scratch = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with scratch.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        scratch.replace(file)
    finally:
        scratch.unlink(missing_ok=True)


def link_file(source: Path, target: Path) -> bool:
    """Let a file appear under a second name without a second copy; return whether the file system can.

    Raises:
        FileNotFoundError: there is no such file.
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # another file system, or one without links
        return False
    return True


def sync(path: Path) -> None:
    """Return once a file's bytes, or a folder's entries, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
