"""A peer's output directory: checked before anything happens, locked while the peer lives."""

from __future__ import annotations

import contextlib
import fcntl
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spes_p2p.errors import ConfigError
from spes_p2p.fs import private_folder

STARTING = ".starting"
"""In a directory until its first start has succeeded; the next start empties a directory that still holds it."""
OURS = {"identity.key", "versions", "run.yaml", STARTING}
"""What marks an output directory as one that --overwrite may delete."""
LOCK = ".lock"


def check_output(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Check an output directory before anything is written.

    Raises:
        ConfigError: it holds something and neither flag is given, it holds nothing to resume, it is a file, or
            nothing in it is ours to overwrite.
    """
    names = _names(directory)
    there = next(each for each in (directory, *directory.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"--output {directory}: {there} is not a directory; choose another")
    is_ours = not OURS.isdisjoint(names)
    if resume:
        if STARTING in names or not is_ours:
            raise ConfigError(f"--output {directory} holds nothing to resume; drop --resume or name another")
    elif names and STARTING not in names:
        if not overwrite:
            raise ConfigError(f"--output {directory} exists; add --resume to continue it or --overwrite to delete it")
        if not is_ours:
            raise ConfigError(
                f"--output {directory} holds nothing of spes_p2p's, so --overwrite spares it; name another"
            )


def can_resume(directory: Path) -> bool:
    """Check whether an earlier start in this directory has succeeded."""
    names = _names(directory)
    return bool(names) and STARTING not in names


def _names(directory: Path) -> set[str]:
    try:
        return {path.name for path in directory.iterdir()} - {LOCK} if directory.is_dir() else set()
    except OSError as error:
        raise ConfigError(f"cannot read --output {directory}: {error.strerror}; name another") from error


@contextlib.contextmanager
def alone_in(directory: Path, lock: str = LOCK) -> Iterator[None]:
    """Keep other processes of ours out of a directory that is there, by a lock on a file in it, while this one lives.

    A fork does not inherit it: a peer that is killed cannot end its forks, which would keep it.

    Raises:
        ConfigError: another process has the lock, or the directory cannot be written.
    """
    try:
        file = (directory / lock).open("ab")
    except OSError as error:
        raise ConfigError(f"cannot write --output {directory}: {error.strerror}; name a writable one") from error
    with file:
        with contextlib.suppress(OSError):  # a file system without locks
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: skip
            except BlockingIOError as error:
                raise ConfigError(f"--output {directory} is in use by another process; name another") from error
        yield


@contextlib.contextmanager
def fresh_output(directory: Path) -> Iterator[Callable[[], None]]:
    """Empty a directory for the block; unless the block calls what it is given, delete what it wrote.

    Raises:
        ConfigError: it cannot be written, or another process writes there.
    """
    existed, starting = directory.exists(), directory / STARTING
    with contextlib.ExitStack() as stack:
        try:
            private_folder(directory)
            stack.enter_context(alone_in(directory))
            starting.touch()  # a start that is killed from here on leaves a directory that the next one takes
            delete(path for path in list(directory.iterdir()) if path.name not in (STARTING, LOCK))
        except OSError as error:
            raise ConfigError(f"cannot write --output {directory}: {error.strerror}; name a writable one") from error
        try:
            yield starting.unlink
        finally:
            if starting.exists():
                delete(path for path in list(directory.iterdir()) if path != starting)
                starting.unlink()
                if not existed:
                    directory.rmdir()


def delete(paths: Iterable[Path]) -> None:
    """Delete files and folders, where they are; of a link, the link alone."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
