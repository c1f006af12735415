"""How much memory this machine, or this container, has left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_UNLIMITED = 2**60
"""What version 1 of control groups writes where there is no limit is larger than this."""
_FILES = {
    2: ("memory.max", "memory.current", "inactive_file"),
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}
"""By version: the files of limit and use, and what the part of the use is called that can be given back."""


def free_memory_bytes(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> int:
    """Returns the memory that new processes can use without swapping, as the system or a container's limit has it.

    Args:
        groups: Names the control groups of this process.
        mount: Where control groups are mounted.
    """
    return min(int(psutil.virtual_memory().available), *_free_in_groups(groups, mount))


def _free_in_groups(groups: Path, mount: Path) -> list[int]:
    """What each limit that holds for this process leaves free."""
    try:
        lines = [line.split(":", 2) for line in groups.read_text().splitlines()]
    except OSError:  # no Linux
        return [_UNLIMITED]
    free = [_UNLIMITED]
    for _, controllers, name in (line for line in lines if len(line) == 3):
        if not controllers or controllers == "memory":
            version, root = (2, mount) if not controllers else (1, mount / "memory")
            # A limit further up holds as well; within a container the name may be that on the host, and not be there.
            for folder in [root / name.strip("/"), *(root / name.strip("/")).parents]:
                if folder.is_relative_to(root):
                    free += _free_in(folder, version)
    return free


def _free_in(folder: Path, version: int) -> Iterator[int]:
    limit_file, used_file, spare_name = _FILES[version]
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # the root group has no limit, or this version is not mounted
        return
    if limit.isdigit() and int(limit) < _UNLIMITED:
        yield max(0, int(limit) - used + int(stat.get(spare_name, 0)))
