"""One voter's promises in the open round, on disk before another peer hears of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from spes_p2p.errors import ConfigError
from spes_p2p.fs import sync, write_atomic
from spes_p2p.swarm.certificate import MAX_VOTERS, Attempt, Document, Vote
from spes_p2p.swarm.proposal import Proof, Proposal
from spes_p2p.swarm.records import Count, Digest, Seconds

MAX_WRITE_SECONDS = 60.0
"""Longest that the file takes to reach the disk."""


class Promises(Document):
    """What a voter has promised in one round, on one branch of the chain."""

    previous: Digest | Literal[""] = ""
    """Body that the round extends."""
    round: Count = 0
    attempt: Attempt | None = None
    """Attempt of the newest entry: the voter votes in no earlier one."""
    voted: Proposal | None = None
    """The proposal of the newest vote for a body that names none absent."""
    shrunk: Vote | None = None
    """The newest vote for a body that names absent voters."""
    lost_at: Seconds | None = None
    """DHT time at which the voter noticed that earlier promises are lost; it votes in rounds that began later."""
    proofs: tuple[Proof, ...] = Field(default=(), max_length=MAX_VOTERS)
    """The newest proofs against voters, of any round: no other peer may have them."""

    @property
    def next_attempt(self) -> int:
        """The first attempt that the voter may enter: a vote is stated in a later one."""
        return max(self.attempt or 0, 0 if self.voted is None else self.voted.attempt + 1)

    def votes(self) -> list[tuple[int, str]]:
        """Return attempt and body of the newest votes."""
        voted, shrunk = self.voted, self.shrunk
        found = [] if voted is None else [(voted.attempt, voted.body.digest)]
        return found if shrunk is None else [*found, (shrunk.attempt, shrunk.body)]


class _Saved(Document):
    written_ns: Annotated[int, Field(ge=0)]
    promises: Promises


class PromiseFile:
    """A voter's promises on disk.

    A file that was restored from a backup or copied has forgotten votes. The time of the last change to its inode
    tells: only the kernel sets it, and a restored file's is later than the time written in it. (A machine that is set
    back as a whole is not noticed; its two signatures convict it.)

    Args:
        path: The file; its folder exists.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def save(self, promises: Promises) -> None:
        """Write the promises; durable when this returns."""
        with write_atomic(self._path) as stream:
            stream.write(_Saved(written_ns=time.time_ns(), promises=promises).encode())
        sync(self._path.parent)

    def load(self) -> Promises | None:
        """Return the promises; None if the file is missing, copied or restored.

        Raises:
            ConfigError: the file is damaged.
        """
        if not self._path.exists():
            return None
        try:
            saved = _Saved.model_validate_json(self._path.read_bytes())
            age_ns = self._path.stat().st_ctime_ns - saved.written_ns
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"cannot read {self._path}: {' '.join(str(error).split())[:200]}; delete it to vote again later"
            ) from error
        return saved.promises if age_ns <= MAX_WRITE_SECONDS * 1e9 else None  # guard: always
