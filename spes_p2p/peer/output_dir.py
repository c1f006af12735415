"""A peer's output directory: checked before anything happens, locked while the peer lives."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from spes_p2p.errors import ConfigError

STARTING = ".starting"
"""In a directory until its first start has succeeded; the next start empties a directory that still holds it."""
OURS = {"identity.key", "versions", "run.yaml", STARTING}
"""What marks an output directory as one that --overwrite may delete."""

_held: set[int] = set()
"""File descriptors of directories that are this process's own."""


def check_output(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Check an output directory before anything is written.

    Raises:
        ConfigError: it holds something and neither flag is given, it holds nothing to resume, it is a file, or
            nothing in it is ours to overwrite.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; drop one")
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
        return {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    except OSError as error:
        raise ConfigError(f"cannot read --output {directory}: {error.strerror}; name another") from error


@contextlib.contextmanager
def alone_in(directory: Path, lock: str = ".") -> Iterator[None]:
    """Keep other processes of ours out of a directory, for as long as this one lives.

    Args:
        directory: It is there.
        lock: What is locked in it: by default the directory itself, else a file, made if absent.

    Raises:
        ConfigError: another process has the lock.
    """
    _forks_let_go()
    held = os.open(directory / lock, os.O_RDONLY | os.O_CREAT * (lock != "."), 0o600)
    _held.add(held)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            _lock(held, directory)
        yield
    finally:
        _held.discard(held)
        os.close(held)


def _lock(held: int, directory: Path) -> None:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)  # guard: output-lock
    except BlockingIOError as error:
        raise ConfigError(f"--output {directory} is in use by another process; name another") from error


@functools.cache
def _forks_let_go() -> None:
    """Have forks close a peer's directories: a peer that is killed cannot end its forks, which would keep the lock."""

    def let_go() -> None:
        for held in _held:
            os.close(held)
        _held.clear()

    os.register_at_fork(after_in_child=let_go)


@contextlib.contextmanager
def fresh_output(directory: Path) -> Iterator[Callable[[], None]]:
    """Empty a directory for the block; unless the block calls what it is given, delete what it wrote.

    Raises:
        ConfigError: it cannot be written, or another process writes there.
    """
    existed, starting = directory.exists(), directory / STARTING
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(directory))
            starting.touch()  # a start that is killed from here on leaves a directory that the next one takes
            delete(path for path in list(directory.iterdir()) if path != starting)
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
