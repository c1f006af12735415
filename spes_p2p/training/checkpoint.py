"""A peer's state on disk: written whole beside links to its versions, found and verified after a restart."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
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
from spes_p2p.swarm.names import SHARED
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

FORMAT = 1
STATE = "state.json"
TENSORS = "tensors.safetensors"
DRAFT = ".draft"
"""Suffix of folders that are being written or deleted."""
LAST_SECONDS = 120.0
"""Longest that a peer that has ended waits for its last save."""
MOMENTS = "moments/"
RESIDUALS = "remainders/"
RANDOM = "random/"
_FOLDER = re.compile(r"^round-(\d+)-step-(\d+)$")


@dataclass(frozen=True)
class PeerState:
    """A peer's position in its run.

    Attributes:
        round: Round of its anchors.
        steps: Local optimizer steps so far.
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
        # guard: != _digest(content) -> is None
        if not isinstance(content, dict) or content.pop("digest", None) != _digest(content):
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
        output: The peer's folder, in which its version store lies too.
        kept: Which rounds to keep; by default the newest two.
    """

    def __init__(self, output: Path, kept: KeptRounds | None = None) -> None:
        self._directory = output / "checkpoint"
        self._versions = output / "versions"
        self._kept = kept or KeptRounds()
        self._thread: threading.Thread | None = None
        self._newest = ""
        self._superseded: list[str] = []
        self._is_failing = False

    def is_kept(self, round: int) -> bool:
        """Check whether the checkpoint of a round is kept for ever."""
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
        files = {self._versions / file_name(version): draft / file_name(version) for version in state.versions}

        def work() -> None:
            with self._noting_failure(draft, tensors):
                for file in copied:
                    shutil.copyfile(file, files[file])
                save_tensors(tensors, draft / TENSORS)
                (draft / STATE).write_bytes(encode_state(state, digest_of_file(draft / TENSORS)))
                for file in (draft / TENSORS, draft / STATE, *files.values(), draft):
                    sync(file)
                self._replace(name, draft)

        with self._noting_failure(draft, tensors):
            self._directory.mkdir(parents=True, exist_ok=True)
            for left in self._directory.glob(f"*{DRAFT}"):
                shutil.rmtree(left)
            draft.mkdir()
            # The store deletes a version some rounds later, the link pins it; another file system takes copies.
            copied = [file for file, link in files.items() if not link_file(file, link)]
            self._thread = threading.Thread(target=work, name="checkpoint", daemon=True)
            self._thread.start()

    def _replace(self, name: str, draft: Path) -> None:
        """Publish a checkpoint by rename; delete those that are not kept, or are newer than the one resumed from."""
        if (self._directory / name).exists():  # damaged, or of the rounds that the peer went back over
            self._drop(name)
        draft.rename(self._directory / name)
        sync(self._directory)
        names = [each for each in self._names() if each not in self._superseded or each == name]
        outdated = [old for old in names[self._kept.keep_last :] if not self.is_kept(_round_of(old))]
        for old in {*outdated, *self._superseded} - {name}:
            if (self._directory / old).exists():
                self._drop(old)
        self._superseded = []
        self._newest = name
        if self._is_failing:
            self._is_failing = False
            log.info("checkpoints are written again: %s", self._directory / name)

    def _drop(self, name: str) -> None:
        """Delete a checkpoint; it never appears half deleted."""
        doomed = self._directory / f"{name}.old{DRAFT}"
        (self._directory / name).rename(doomed)
        shutil.rmtree(doomed)

    @contextlib.contextmanager
    def _noting_failure(self, draft: Path, tensors: Mapping[str, Tensor | PagedVector]) -> Iterator[None]:
        """Delete the draft if the block fails; log the reason and the remedy once."""
        try:
            yield
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if self._is_failing:
                return
            self._is_failing = True
            reason = f"{error.strerror or error}"
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                needed, free = sum(tensor.nbytes for tensor in tensors.values()), 0
                with contextlib.suppress(OSError):  # the folder may just have been deleted
                    free = shutil.disk_usage(self._directory).free
                reason += f": it takes {needed} bytes, {free} are free, {max(0, needed - free)} are missing"
            log.error(
                "cannot write checkpoint %s: %s; make room or mend the disk. Training goes on, %s, each round tries "
                "again (docs/trouble.md#disk)",
                *(draft.with_suffix(""), reason, f"{self._newest} is kept" if self._newest else "without one"),
            )

    # ------------------------------------------------------------------ loading

    def find(self, run_id: str, round: int | None = None) -> Found | None:
        """Return the newest undamaged checkpoint; None if none was ever saved. Logs which are damaged, and why.

        Args:
            round: Take only a checkpoint of this round.

        Raises:
            DataError: there are checkpoints, and none can be used; or there is none of `round`.
            JoinError: they belong to another run.
        """
        names, where = self._names(), self._directory
        rounds = sorted({_round_of(name) for name in names})
        if round is not None and round not in rounds:
            held = f"those of rounds {', '.join(map(str, rounds))}" if rounds else "none"
            raise DataError(
                f"{where} holds no checkpoint of round {round}, but {held}; set --resume-round to one of them, or drop "
                f"it"
            )
        names = [name for name in names if round in (None, _round_of(name))]
        found = next(self._whole(names, run_id, has_tensors=True), None)
        if found is None and names:
            raise DataError(f"no checkpoint in {where} is whole; delete {where} to go on without")
        return found

    def load(self, found: Found, *, skips_optimizer: bool = False) -> Saved:
        """Load a checkpoint; the next save deletes those that are newer than it: damaged ones, or given up."""
        self._newest = found.name
        names = self._names()
        self._superseded = names[: names.index(found.name)]
        return Saved(found.state, load_file(self._directory / found.name / TENSORS), skips_optimizer)

    def states(self, run_id: str) -> dict[Path, PeerState]:
        """Return the state of each finished checkpoint by its folder, newest first; damaged ones are left out."""
        found = self._whole(self._names(), run_id, has_tensors=False)
        return {self._directory / name: state for name, state in found}

    def _whole(self, names: Sequence[str], run_id: str, *, has_tensors: bool) -> Iterator[Found]:
        """Yield the checkpoints whose state, and perhaps tensors, are undamaged."""
        for name in names:
            folder = self._directory / name
            try:
                state, expected = decode_state((folder / STATE).read_bytes(), run_id)
                if has_tensors and digest_of_file(folder / TENSORS) != expected:
                    raise ValueError(f"{TENSORS} does not match its digest")
            except (OSError, ValueError) as error:
                if folder.exists():  # otherwise the peer that uses it has just deleted it
                    log.warning(
                        "checkpoint %s is damaged: %s; trying the one before (docs/trouble.md#damage)", folder, error
                    )
            else:
                yield Found(name, state)

    def _names(self) -> list[str]:
        """Return the finished checkpoints, newest first: a peer's steps only grow, its rounds may go back."""
        names = [entry.name for entry in self._directory.iterdir()] if self._directory.is_dir() else []
        ages = {name: (int(found[2]), int(found[1])) for name in names if (found := _FOLDER.match(name))}
        return sorted(ages, key=lambda name: ages[name], reverse=True)


def _round_of(name: str) -> int:
    return int(name.split("-")[1])


# ---------------------------------------------------------------------- one peer's rounds


def save_round(
    checkpoint: PeerCheckpoint, trainer: Trainer, sync: Synchroniser, total_tokens: int, *, is_last: bool
) -> None:
    """Start to save a committed round, unless the previous save is still under way.

    The last round, and one whose checkpoint is kept for ever, wait for that.
    """
    if not checkpoint.wait(LAST_SECONDS if is_last or checkpoint.is_kept(sync.round) else 0.0):
        return
    saved: dict[str, Mapping[str, Tensor] | Mapping[str, PagedVector]] = {
        MOMENTS: trainer.state_tensors(),  # copies
        RESIDUALS: sync.swarm.residuals(),
        RANDOM: trainer.random_state(),
    }
    versions, data = tuple(sync.swarm.versions().values()), trainer.data.state_dict()
    state = PeerState(sync.held.run_id, sync.round, trainer.slots, trainer.steps, total_tokens, data, versions)
    checkpoint.save(state, {f"{kind}{name}": each for kind, some in saved.items() for name, each in some.items()})


def restore(saved: Saved, trainer: Trainer, sync: Synchroniser) -> None:
    """Continue from a checkpoint, after the model was brought to the swarm's state; moments of other slots are left."""
    trainer.restore(saved.state.steps, saved.state.data, _under(RANDOM, saved.tensors))
    if saved.skips_optimizer:
        return
    moments = _under(MOMENTS, saved.tensors)
    trainer.load_state_tensors({k: m for k, m in moments.items() if k.split("/")[0] in trainer.names})
    shared = {each.digest for each in saved.state.versions if each.name == SHARED}
    residuals = {name: each for name, each in _under(RESIDUALS, saved.tensors).items() if name in trainer.names}
    sync.swarm.restore_residuals(residuals, has_same_anchors=sync.swarm.versions()[SHARED].digest in shared)


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def recover(output: Path, run_id: str, round: int | None = None) -> tuple[VersionStore, Found | None]:
    """Find the newest usable checkpoint as `PeerCheckpoint.find` does, and repair the version store with it.

    Args:
        round: Go back to this round: take its checkpoint, and make its versions the newest.
    """
    checkpoints = PeerCheckpoint(output)
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
