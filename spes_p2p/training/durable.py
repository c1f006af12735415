"""Files that are still there after the power was cut."""

from __future__ import annotations

import os
from pathlib import Path


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
