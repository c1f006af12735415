"""The directory that a start writes to: checked before anything happens, as it was if the start fails."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from spes_p2p.errors import ConfigError

ASIDE = ".overwritten-"
"""Begins the name of what holds, within an output, what was there before a start that is not yet kept."""
OURS = ("identity.key", "versions", "run.yaml", f"{ASIDE}*")
"""What marks an output directory as one that --overwrite may delete."""
P = ParamSpec("P")
T = TypeVar("T")


def _reads(look: Callable[Concatenate[Path, P], T]) -> Callable[Concatenate[Path, P], T]:
    """Let a function say in one line that it may not read its directory."""

    @functools.wraps(look)
    def read(directory: Path, *args: P.args, **more: P.kwargs) -> T:
        try:
            return look(directory, *args, **more)
        except OSError as error:
            raise ConfigError(f"cannot read --output {directory}: {error.strerror}; name another") from error

    return read


_held: set[int] = set()
"""File descriptors of directories that are this process's own."""


@_reads
def check_output(directory: Path, *, resume: bool, overwrite: bool) -> None:
    """Check an output directory before anything is written.

    Raises:
        ConfigError: it holds something and neither flag is given, it holds nothing to resume, it is a file, or
            nothing in it is ours to overwrite.
    """
    if resume and overwrite:
        raise ConfigError("--resume and --overwrite exclude each other; drop one")
    there = next(each for each in (directory, *directory.parents) if each.exists())
    if not there.is_dir():
        raise ConfigError(f"--output {directory}: {there} is not a directory; choose another")
    is_empty = not directory.exists() or not any(directory.iterdir())
    is_ours = any(any(directory.glob(name)) for name in OURS)
    if resume and not is_ours:
        raise ConfigError(f"--output {directory} holds nothing to resume; drop --resume or name another")
    if not is_empty and not resume:
        if not overwrite:
            raise ConfigError(f"--output {directory} exists; add --resume to continue it or --overwrite to delete it")
        if not is_ours:
            raise ConfigError(
                f"--output {directory} holds nothing of spes_p2p's, so --overwrite spares it; name another"
            )


@_reads
def can_resume(directory: Path) -> bool:
    """Tell whether a start in this directory was kept; one that was killed before has left nothing to go on with."""
    if not directory.is_dir():
        return False
    names = [path.name for path in directory.iterdir()]
    return "checkpoint" in names or (bool(names) and not any(name.startswith(ASIDE) for name in names))


@_reads
def was_cut_off(directory: Path) -> bool:
    """Tell whether the last start in this directory was killed before it was kept: another may take its place."""
    is_begun = directory.is_dir() and any(path.name.startswith(ASIDE) for path in directory.iterdir())
    return is_begun and not can_resume(directory)


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
    """Give the block an empty directory, and `directory` back as it was unless the block calls what it is given.

    What it holds is put aside within itself: it may be a mount point, which cannot be renamed.

    Raises:
        ConfigError: it cannot be written, or another process writes there.
    """
    existed, kept = directory.exists(), False
    with contextlib.ExitStack() as stack:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            stack.enter_context(alone_in(directory))
            aside = Path(tempfile.mkdtemp(prefix=ASIDE, dir=directory))
            _move(directory, aside, spared=aside)
        except OSError as error:
            raise ConfigError(f"cannot write --output {directory}: {error.strerror}; name a writable one") from error

        def keep() -> None:
            nonlocal kept
            kept = True
            shutil.rmtree(aside)

        try:
            yield keep
        finally:
            if not kept:
                delete(path for path in list(directory.iterdir()) if path != aside)
                _move(aside, directory)
                aside.rmdir()
                if not existed:
                    directory.rmdir()


def _move(source: Path, target: Path, spared: Path | None = None) -> None:
    for path in list(source.iterdir()):
        if path != spared:
            path.rename(target / path.name)


def delete(paths: Iterable[Path]) -> None:
    """Delete files and folders, where they are; of a link, the link alone."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
