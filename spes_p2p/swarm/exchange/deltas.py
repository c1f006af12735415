"""Encoded mean deltas on disk, each leading from one version of a name to the next."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.swarm.exchange.versions import SLOT

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
        temporary = draft_of(path)
        temporary.write_bytes(data)
        with self._lock:
            temporary.replace(path)
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


def draft_of(path: Path) -> Path:
    """Return where this thread writes a file until it appears, whole, under its name."""
    return path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
