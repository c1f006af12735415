"""A peer's state on disk: written whole beside its versions, found and verified after a restart."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from safetensors.torch import load_file
from torch import Tensor

from spes_p2p.codecs.paged import PagedVector, save_tensors
from spes_p2p.codecs.vectors import has_digest
from spes_p2p.config import KeptRounds
from spes_p2p.errors import DataError, JoinError
from spes_p2p.fs import digest_of_file, link_file, sync
from spes_p2p.swarm.exchange.store import VersionStore, file_name
from spes_p2p.swarm.exchange.versions import Version

log = logging.getLogger(__name__)

FORMAT = 1


@dataclass(frozen=True)
class PeerState:
    """A peer's position in its run.

    Attributes:
        run_id: The run it belongs to.
        round: Round of its anchors.
        slots: Slots it held.
        steps: Local optimizer steps so far.
        total_tokens: Tokens trained so far.
        data: State of its token source.
        versions: Of all vectors and documents that it had.
    """

    run_id: str
    round: int
    slots: tuple[int, ...]
    steps: int
    total_tokens: int
    data: Mapping[str, Any]
    versions: tuple[Version, ...] = ()


def encode_state(state: PeerState, tensors_digest: str) -> bytes:
    """Return a state as JSON, with digests of itself and of the file of tensors beside it."""
    content = {
        "format": FORMAT,
        **vars(state),
        "data": dict(state.data),
        "versions": [version.model_dump() for version in state.versions],
        "tensors": tensors_digest,
    }
    return json.dumps({"digest": _digest(content), **content}, indent=1).encode()


def decode_state(data: bytes, run_id: str) -> tuple[PeerState, str]:
    """Return a state and the digest of its tensors.

    Raises:
        ValueError: damaged, or of a format that this software does not know.
        JoinError: it belongs to another run.
    """
    try:
        content = json.loads(data)
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):  # guard: state-digest
            raise ValueError("the state does not match its digest")
        if content.pop("format") != FORMAT:
            raise ValueError("another version of spes_p2p has written it")
        if content["run_id"] != run_id:
            raise JoinError(f"the checkpoint belongs to run {content['run_id']}")
        tensors_digest = content.pop("tensors")
        content["versions"] = tuple(map(Version.model_validate, content["versions"]))
        content["slots"] = tuple(content["slots"])
        return PeerState(**content), tensors_digest
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"this is not the state of a peer: {error!r}") from error


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


STATE = "state.json"
TENSORS = "tensors.safetensors"
DRAFT = ".draft"
"""Suffix of folders that are being written or deleted."""
_FOLDER = re.compile(r"^round-(\d+)-step-(\d+)$")


class Found(NamedTuple):
    """A checkpoint whose state and tensors were verified: the name of its folder, and the peer's position."""

    name: str
    state: PeerState


class Saved(NamedTuple):
    """A loaded checkpoint: a `Found` with its tensors, by names such as `moments/...`.

    Attributes:
        skips_optimizer: Whether the inner optimizer starts from zero: these moments are not loaded.
    """

    state: PeerState
    tensors: Mapping[str, Tensor]
    skips_optimizer: bool = False


class PeerCheckpoint:
    """The checkpoints of one peer: of its newest rounds, and of every n-th.

    A save writes in a thread of its own, without a copy of its tensors. A save that comes while another is under way is
    skipped, so that memory holds one set of tensors at most. A save that fails leaves the older checkpoints, logs one
    error, and is tried again after the next round.

    Args:
        directory: Holds the folders.
        versions: Folder of the peer's version store.
        kept: Which rounds to keep; by default the newest two.
    """

    def __init__(self, directory: Path, versions: Path, kept: KeptRounds | None = None) -> None:
        self._directory = directory
        self._versions = versions
        self._kept = kept or KeptRounds()
        self._thread: threading.Thread | None = None
        self._newest = ""
        self._superseded: list[str] = []
        self._is_failing = False

    def is_kept(self, round: int) -> bool:
        """Tell whether the checkpoint of a round is kept for ever."""
        return self._kept.keep_every is not None and round > 0 and round % self._kept.keep_every == 0

    # ------------------------------------------------------------------ saving

    def wait(self, seconds: float) -> bool:
        """Wait for the save under way, at most so long; return whether it has ended."""
        if self._thread is None:
            return True
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def save(self, state: PeerState, tensors: Mapping[str, Tensor | PagedVector]) -> None:
        """Start to save; does nothing while an earlier save is under way.

        Args:
            state: The peer's position; the store may drop its versions once this has returned.
            tensors: They must not change until the save is done.
        """
        name = f"round-{state.round}-step-{state.steps}"
        if not self.wait(0.0) or name == self._newest:
            return
        draft = self._directory / f"{name}{DRAFT}"
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        try:
            copies = self._begin(draft, state.versions)
        except OSError as error:
            self._fail(draft, error, num_bytes)
            return
        num_bytes += sum(version.num_bytes for version in copies)

        def work() -> None:
            try:
                for version in copies:
                    shutil.copyfile(self._versions / file_name(version), draft / file_name(version))
                write_folder(draft, state, tensors)
                self._replace(name, draft)
            except OSError as error:
                self._fail(draft, error, num_bytes)

        self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self._thread.start()

    def _begin(self, draft: Path, versions: Sequence[Version]) -> list[Version]:
        """Link the versions' files, which the store deletes some rounds later; return those that must be copied."""
        self._directory.mkdir(parents=True, exist_ok=True)
        for left in self._directory.glob(f"*{DRAFT}"):
            shutil.rmtree(left)
        draft.mkdir()
        return [v for v in versions if not link_file(self._versions / file_name(v), draft / file_name(v))]

    def _replace(self, name: str, draft: Path) -> None:
        """Publish a checkpoint by rename; delete those that are not kept, or are newer than the one resumed from."""
        if (self._directory / name).exists():  # damaged, or of the rounds that the peer went back over
            self._drop(self._directory / name)
        draft.rename(self._directory / name)
        sync(self._directory)
        names = [each for each in self._names() if each not in self._superseded or each == name]
        outdated = [old for old in names[self._kept.keep_last :] if not self.is_kept(_round_of(old))]
        for old in {*outdated, *self._superseded} - {name}:
            if (self._directory / old).exists():
                self._drop(self._directory / old)
        self._superseded = []
        self._newest = name
        if self._is_failing:
            self._is_failing = False
            log.info("checkpoints are written again: %s", self._directory / name)

    def _drop(self, folder: Path) -> None:
        """Delete a checkpoint; it never appears half deleted."""
        doomed = folder.with_name(f"{folder.name}.old{DRAFT}")
        folder.rename(doomed)
        shutil.rmtree(doomed)

    def _fail(self, draft: Path, error: OSError, num_bytes: int) -> None:
        """Delete the draft; log the reason and the remedy once."""
        shutil.rmtree(draft, ignore_errors=True)
        if self._is_failing:
            return
        self._is_failing = True
        reason = f"{error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            with contextlib.suppress(OSError):  # the folder may just have been deleted
                free = shutil.disk_usage(self._directory if self._directory.exists() else self._directory.parent).free
                reason += f": it takes {num_bytes} bytes, {free} are free, {max(0, num_bytes - free)} are missing"
        log.error(
            "cannot write checkpoint %s: %s; make room or mend the disk. Training goes on, %s, each round tries again",
            *(draft.with_suffix(""), reason, f"{self._newest} is kept" if self._newest else "without one"),
        )

    # ------------------------------------------------------------------ loading

    def find(self, run_id: str, round: int | None = None) -> Found | None:
        """Return the newest undamaged checkpoint; None if none was ever saved. Logs which are damaged, and why.

        Args:
            run_id: The run's name.
            round: Take only a checkpoint of this round.

        Raises:
            DataError: there are checkpoints, and none can be used; or there is none of `round`.
            JoinError: they belong to another run.
        """
        reasons: list[str] = []
        names = self._names()
        if round is not None:
            rounds = sorted({_round_of(name) for name in names})
            if round not in rounds:
                held = f"those of rounds {', '.join(map(str, rounds))}" if rounds else "none"
                raise DataError(
                    f"{self._directory} holds no checkpoint of round {round}, but {held}; set --resume-round to one of "
                    f"them, or drop it"
                )
            names = [name for name in names if _round_of(name) == round]
        for name in names:
            folder = self._directory / name
            try:
                state, expected = decode_state((folder / STATE).read_bytes(), run_id)
                if digest_of_file(folder / TENSORS) != expected:
                    raise ValueError(f"{TENSORS} does not match its digest")
                return Found(name, state)
            except (OSError, ValueError) as error:
                reasons.append(f"checkpoint {folder} is damaged: {error}")
                log.warning("%s; trying the one before", reasons[-1])
        if reasons:
            raise DataError(f"{reasons[0]}, and no other is whole; delete {self._directory} to go on without")
        return None

    def load(self, found: Found, *, skips_optimizer: bool = False) -> Saved:
        """Load a checkpoint; the next save deletes those that are newer than it: damaged ones, or given up."""
        self._newest = found.name
        names = self._names()
        self._superseded = names[: names.index(found.name)]
        return Saved(found.state, load_file(self._directory / found.name / TENSORS), skips_optimizer)

    def states(self, run_id: str) -> dict[Path, PeerState]:
        """Return the state of each finished checkpoint by its folder, newest first; damaged ones are left out."""
        states: dict[Path, PeerState] = {}
        for name in self._names():
            try:
                states[self._directory / name] = decode_state((self._directory / name / STATE).read_bytes(), run_id)[0]
            except FileNotFoundError:
                continue  # the peer that uses it has deleted it meanwhile
            except (OSError, ValueError) as error:
                log.warning("checkpoint %s is damaged: %s", self._directory / name, error)
        return states

    def _names(self) -> list[str]:
        """Return the finished checkpoints, newest first: a peer's steps only grow, its rounds may go back."""
        names = [entry.name for entry in self._directory.iterdir()] if self._directory.is_dir() else []
        ages = {name: (int(found[2]), int(found[1])) for name in names if (found := _FOLDER.match(name))}
        return sorted(ages, key=lambda name: ages[name], reverse=True)


def _round_of(name: str) -> int:
    found = _FOLDER.match(name)
    assert found is not None
    return int(found[1])


def write_folder(folder: Path, state: PeerState, tensors: Mapping[str, Tensor | PagedVector]) -> None:
    """Add state and tensors to a folder of version files, and sync all of it to the disk.

    Raises:
        OSError: the disk is full, or fails.
    """
    save_tensors(tensors, folder / TENSORS)
    content = encode_state(state, digest_of_file(folder / TENSORS))
    (folder / STATE).write_bytes(content)
    for name in (TENSORS, STATE, *map(file_name, state.versions)):
        sync(folder / name)
    sync(folder)


def checkpoint_of(output: Path, kept: KeptRounds | None = None) -> PeerCheckpoint:
    """Return the checkpoints in a peer's output folder."""
    return PeerCheckpoint(output / "checkpoint", output / "versions", kept)


def recover(output: Path, run_id: str, round: int | None = None) -> tuple[VersionStore, Found | None]:
    """Find the newest usable checkpoint, and repair the version store with it.

    Args:
        output: The peer's output folder.
        run_id: The run's name.
        round: Go back to this round: take its checkpoint, and make its versions the newest.

    Raises:
        DataError: there are checkpoints, and none can be used; or there is none of `round`.
    """
    checkpoints = checkpoint_of(output)
    found = checkpoints.find(run_id, round)
    store = VersionStore(output / "versions")
    store.repair()
    for folder, state in checkpoints.states(run_id).items():
        if round is not None and state.round > round:
            continue
        goes_back = round is not None and found is not None and folder.name == found.name
        there = {} if goes_back else store.newest()
        files = {folder / file_name(version): version for version in state.versions if version.name not in there}
        if whole := {file: version for file, version in files.items() if has_digest(file, version.digest)}:
            log.info("taking %s from %s", ", ".join(sorted(version.name for version in whole.values())), folder)
            store.restore(whole)
    return store, found
