"""Checkpoints away from this machine: in a store, as parts named by their SHA-256 and a manifest; or on the hub.

An interrupted upload goes on with the parts that lack. A manifest comes last, so that what it names is there; two
rounds that share parts share objects.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.config.link import PeerId
from spes_p2p.config.machine import RunId
from spes_p2p.errors import ConfigError, DataError, one_line
from spes_p2p.fs import scratch_path
from spes_p2p.monitor.stores import S3_PLACE, Store, StoreError, open_store
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.records import Count, Digest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

log = logging.getLogger(__name__)

PART_BYTES = 2**23
"""What an interruption costs at most; a kill in the middle of a part sends it again."""
MAX_PART_BYTES = 2**30
MAX_MANIFEST_BYTES = 2**24
MANIFEST_FILE = "checkpoint.json"
"""In a checkpoint's folder: its manifest."""
HUB_SCHEME = "hf://"
_PARTS, _ROUNDS = "parts/", "rounds/"
_ROUND = re.compile(r"rounds/round-(\d{6,})\.json", re.ASCII)
_TAG = re.compile(r"round-(\d{6,})", re.ASCII)
HUB_SECONDS = 60.0
"""Time for the hub to take or send the next bytes."""
_OLDER_BRANCH = "older"
"""Branch of the hub to which a round older than that of the main branch is committed, until it has its tag."""
FileName = Annotated[str, Field(max_length=200, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]  # guard: stored-name


class StoredFile(BaseModel):
    """One file of a checkpoint."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: FileName
    num_bytes: Count
    parts: tuple[Digest, ...]
    """SHA-256 of each `part_bytes` of it, and of what is left."""


class CheckpointManifest(BaseModel):
    """What a checkpoint is, and the SHA-256 of all of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: Annotated[int, Field(ge=1, le=1)] = 1
    run_id: RunId
    manifest: Digest
    """Of the run."""
    founder: PeerId
    round: Count
    held_out: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Held-out loss in nats per token; None if it was not measured."""
    written_at: float
    """Seconds since 1970."""
    part_bytes: Annotated[int, Field(ge=1, le=MAX_PART_BYTES)]
    files: tuple[StoredFile, ...] = Field(min_length=1, max_length=100_000)

    @property
    def name(self) -> str:
        """What the checkpoint's folder is called."""
        return f"round-{self.round:06d}"

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each part, by its SHA-256."""
        return {
            part: min(self.part_bytes, file.num_bytes - index * self.part_bytes)
            for file in self.files
            for index, part in enumerate(file.parts)
        }

    @classmethod
    def parse(cls, data: bytes) -> CheckpointManifest:
        """Return the manifest that these bytes hold.

        Raises:
            DataError: they hold none, or one whose files have too few or too many parts.
        """
        try:
            found = cls.model_validate_json(data)
        except ValidationError as error:
            raise DataError(f"no manifest of a checkpoint: {problem_of(error)}") from error
        if any(len(file.parts) != -(-file.num_bytes // found.part_bytes) for file in found.files):
            raise DataError("the manifest of a checkpoint has files of other lengths than their parts")
        return found


def describe(
    folder: Path, *, run_id: str, manifest: str, founder: str, round: int, held_out: float | None
) -> CheckpointManifest:
    """Return the manifest of the checkpoint in a folder, and leave it there too."""
    files = []
    for path in sorted(each for each in folder.iterdir() if each.is_file() and each.name != MANIFEST_FILE):
        parts = tuple(hashlib.sha256(data).hexdigest() for data in _pieces(path, PART_BYTES))
        files.append(StoredFile(name=path.name, num_bytes=path.stat().st_size, parts=parts))
    found = CheckpointManifest(
        run_id=run_id,
        manifest=manifest,
        founder=founder,
        round=round,
        held_out=held_out if held_out is not None and math.isfinite(held_out) else None,
        written_at=time.time(),
        part_bytes=PART_BYTES,
        files=tuple(files),
    )
    (folder / MANIFEST_FILE).write_text(found.model_dump_json())
    return found


def _pieces(path: Path, num_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        while data := file.read(num_bytes):
            yield data


def to_keep(checkpoints: Iterable[CheckpointManifest], keep_last: int) -> set[int]:
    """Return the rounds to keep: the newest `keep_last`, and the one with the least held-out loss."""
    known = {each.round: each for each in checkpoints}
    measured = [(each.held_out, -each.round) for each in known.values() if each.held_out is not None]
    best = {-min(measured)[1]} if measured else set()
    return set(sorted(known)[-keep_last:]) | best


class Uploaded(NamedTuple):
    """What an upload came to."""

    sent_bytes: int
    kept_bytes: int
    """Of it, what was there already."""


class Destination(Protocol):
    """Where checkpoints go. All methods raise StoreError."""

    def upload(self, folder: Path, checkpoint: CheckpointManifest, wait: Callable[[int], None]) -> Uploaded:
        """Upload a checkpoint.

        Args:
            folder: Where its files are.
            checkpoint: Its manifest.
            wait: Is told the bytes sent so far after each part; it keeps to a rate, and raises to stop.
        """

    def tidy(self, keep_last: int) -> list[int]:
        """Delete all but the best and the newest checkpoints; return the rounds that stay."""


def open_destination(place: str) -> Destination:
    """Return the destination at a place: `s3://BUCKET/PREFIX`, `hf://OWNER/NAME`, or a folder.

    Raises:
        ConfigError: what it needs is not installed.
    """
    if place.startswith(HUB_SCHEME):
        return HubRepository(place.removeprefix(HUB_SCHEME))
    return StoredCheckpoints(open_store(place), place)


class StoredCheckpoints:
    """Checkpoints in a store. One monitor writes to it at a time; any number of machines may read.

    Args:
        store: The store.
        place: Its name, for messages.
    """

    def __init__(self, store: Store, place: str) -> None:
        self._store = store
        self._place = place

    def checkpoints(self) -> dict[int, CheckpointManifest]:
        """Return all checkpoints, by round, ascending.

        Raises:
            StoreError: the store cannot be read.
            DataError: a manifest is damaged.
        """
        rounds = {int(form[1]): name for name in self._store.sizes(_ROUNDS) if (form := _ROUND.fullmatch(name))}
        found = {}
        for number, name in sorted(rounds.items()):
            try:
                found[number] = CheckpointManifest.parse(self._store.get(name, MAX_MANIFEST_BYTES))
            except DataError as error:
                raise DataError(f"{self._place}: {name}: {error}; delete it there, or name another place") from error
        return found

    def upload(self, folder: Path, checkpoint: CheckpointManifest, wait: Callable[[int], None]) -> Uploaded:
        """Upload a checkpoint, its manifest last; parts that are there stay."""
        for other in self.checkpoints().values():
            if other.manifest != checkpoint.manifest:
                raise StoreError(
                    f"{self._place} has checkpoints of another run {other.run_id!r}; name another place with --upload"
                )
        sent = kept = 0
        for attempt in (1, 2):  # again what another monitor has deleted meanwhile, or a server has lost
            there = self._store.sizes(_PARTS)
            lacking = {part for part, size in checkpoint.parts.items() if there.get(_PARTS + part) != size}
            if attempt == 1:
                kept = sum(size for part, size in checkpoint.parts.items() if part not in lacking)
            elif lacking:
                log.warning("%s lacks %d parts that it has taken; sending them again", self._place, len(lacking))
            for part, data in _parts_of(folder, checkpoint, lacking):
                self._store.put(_PARTS + part, data)
                sent += len(data)
                wait(sent)
        text = checkpoint.model_dump_json().encode()
        self._store.put(f"{_ROUNDS}{checkpoint.name}.json", text)
        return Uploaded(sent + len(text), kept)

    def tidy(self, keep_last: int) -> list[int]:
        """Delete checkpoints, then the parts that no other one has, also those of uploads that were given up."""
        found = self.checkpoints()
        kept = to_keep(found.values(), keep_last)
        self._store.delete(f"{_ROUNDS}{each.name}.json" for number, each in found.items() if number not in kept)
        named = {_PARTS + part for number in kept for part in found[number].parts}
        self._store.delete(sorted(self._store.sizes(_PARTS).keys() - named))
        return sorted(kept)

    def download(self, round: int | None, output: Path, *, overwrite: bool = False) -> CheckpointManifest:
        """Write a checkpoint to a folder, whole or not at all, each part verified by its SHA-256.

        An interrupted download goes on where it was: it stays beside the output, under a name that ends in `.part`.

        Args:
            round: Its round; by default the newest.
            output: The folder.
            overwrite: Replace what the folder holds.

        Raises:
            StoreError: the store cannot be read, or lacks a part.
            DataError: the store has no such round, or something in it is damaged.
            ConfigError: the output cannot be written.
        """
        found = self.checkpoints()
        if not found:
            raise DataError(f"{self._place} has no checkpoint; name the place of a monitor's --upload")
        number = max(found) if round is None else round
        if number not in found:
            raise DataError(f"{self._place} has rounds {', '.join(map(str, found))}, not {number}; set --round to one")
        checkpoint = found[number]
        partial = output.with_name(f".{output.name}.{checkpoint.name}.part")
        try:
            partial.mkdir(parents=True, exist_ok=True)
            for file in checkpoint.files:
                self._fetch(file, checkpoint.part_bytes, partial / file.name)
            (partial / MANIFEST_FILE).write_text(checkpoint.model_dump_json())
            with scratch_path(output) as old:
                if overwrite and output.exists():
                    output.rename(old)
                partial.rename(output)
        except OSError as error:
            raise ConfigError(f"cannot write --output {output}: {error}; make room there, or name another") from error
        return checkpoint

    def _fetch(self, file: StoredFile, part_bytes: int, path: Path) -> None:
        path.touch()
        with path.open("r+b") as stream:
            for index, part in enumerate(file.parts):
                here = stream.read(min(part_bytes, file.num_bytes - index * part_bytes))
                if hashlib.sha256(here).hexdigest() == part:
                    continue
                data = self._store.get(_PARTS + part, part_bytes)
                if hashlib.sha256(data).hexdigest() != part:  # guard: stored-digest
                    raise DataError(
                        f"{self._place}: {_PARTS}{part[:12]}... is damaged; delete it there, and the monitor sends it "
                        f"again with its next checkpoint; or name another --round"
                    )
                stream.seek(index * part_bytes)
                stream.write(data)
            stream.truncate(file.num_bytes)


def _parts_of(folder: Path, checkpoint: CheckpointManifest, wanted: Collection[str]) -> Iterator[tuple[str, bytes]]:
    """Yield each wanted part once, with its SHA-256.

    Raises:
        StoreError: a file is not what the manifest says.
    """
    left = set(wanted)
    for file in checkpoint.files:
        if not left.isdisjoint(file.parts):
            for part, data in zip(file.parts, _pieces(folder / file.name, checkpoint.part_bytes), strict=False):
                if part in left:
                    if hashlib.sha256(data).hexdigest() != part:
                        raise StoreError(f"{folder / file.name} has changed since it was written; is the disk damaged?")
                    left.remove(part)
                    yield part, data
    if left:
        raise StoreError(f"{folder} is cut short; is the disk damaged?")


class HubRepository:
    """Checkpoints in a model repository of the hub: the newest on its main branch, each with a tag `round-000123`.

    A commit appears whole or not at all; the hub names large files by their SHA-256, and takes none twice. The token is
    that of `hf auth login`, or HF_TOKEN. A repository that does not exist is made, private.

    Args:
        name: Its `OWNER/NAME` there.
    """

    def __init__(self, name: str) -> None:
        from huggingface_hub.utils import disable_progress_bars

        disable_progress_bars()  # the terminal is the watch's
        self._name = name

    @property
    def _api(self) -> HfApi:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import get_session

        get_session().timeout = HUB_SECONDS  # it has none, and is made anew after some failures
        return HfApi()

    def upload(self, folder: Path, checkpoint: CheckpointManifest, wait: Callable[[int], None]) -> Uploaded:
        """Commit a checkpoint in place of the last one, and tag it; an older one gets its tag alone."""
        lost = ", no held-out loss" if checkpoint.held_out is None else f", held-out loss {checkpoint.held_out:.4f}"
        found = self.checkpoints()
        if any(other.manifest != checkpoint.manifest for other in found.values()):
            raise StoreError(f"{HUB_SCHEME}{self._name} has checkpoints of another run; name another with --upload")
        is_there = checkpoint.round in found
        with self._errors():
            if not is_there:
                branch = _OLDER_BRANCH if checkpoint.round < max(found, default=0) else None
                if branch is not None:
                    self._api.create_branch(self._name, branch=branch, exist_ok=True)
                commit = self._api.upload_folder(
                    repo_id=self._name,
                    revision=branch,
                    folder_path=folder,
                    allow_patterns=[MANIFEST_FILE, *(file.name for file in checkpoint.files)],
                    delete_patterns=["*"],
                    commit_message=f"Round {checkpoint.round} of run {checkpoint.run_id}{lost}",
                )
                self._api.create_tag(self._name, tag=checkpoint.name, revision=commit.oid)  # type: ignore[union-attr]
                if branch is not None:
                    self._api.delete_branch(self._name, branch=branch)
        wait(0)
        return Uploaded(0, checkpoint.num_bytes) if is_there else Uploaded(checkpoint.num_bytes, 0)

    def checkpoints(self) -> Mapping[int, CheckpointManifest]:
        """Return the checkpoints that have a tag, by round."""
        with self._errors():
            self._api.create_repo(self._name, private=True, exist_ok=True)
            tags = [each.name for each in self._api.list_repo_refs(self._name).tags]
            found = {}
            for tag in (tag for tag in tags if _TAG.fullmatch(tag)):
                path = self._api.hf_hub_download(self._name, MANIFEST_FILE, revision=tag)
                try:
                    manifest = CheckpointManifest.parse(Path(path).read_bytes())
                except DataError as error:
                    place = f"{HUB_SCHEME}{self._name}"
                    raise DataError(f"{place}: {tag}: {error}; delete that tag, or name another place") from error
                found[manifest.round] = manifest
        return found

    def tidy(self, keep_last: int) -> list[int]:
        """Delete the tags of the others. The commits stay in the repository's history."""
        found = self.checkpoints()
        kept = to_keep(found.values(), keep_last)
        with self._errors():
            for number in found.keys() - kept:
                self._api.delete_tag(self._name, tag=found[number].name)
        return sorted(kept)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except DataError:  # of a damaged manifest
            raise
        except Exception as error:  # huggingface_hub and what it stands on raise errors of many types
            raise StoreError(
                f"{HUB_SCHEME}{self._name}: {one_line(error)}; log in with `hf auth login`, and check the name"
            ) from error


def read_checkpoints(folder: Path) -> dict[int, tuple[Path, CheckpointManifest]]:
    """Return the checkpoints of a monitor's folder by round; those without a whole manifest are left out."""
    found = {}
    for path in sorted(folder.glob(f"round-*/{MANIFEST_FILE}")):
        try:
            checkpoint = CheckpointManifest.parse(path.read_bytes())
        except DataError as error:
            log.warning("%s: %s; leaving it out", path, error)
        else:
            found[checkpoint.round] = (path.parent, checkpoint)
    return dict(sorted(found.items()))


def is_store(place: str | Path) -> bool:
    """Tell whether a place has uploaded checkpoints: it is a bucket, or a folder with manifests."""
    return bool(S3_PLACE.fullmatch(str(place))) or any(Path(place).expanduser().glob(f"{_ROUNDS}round-*.json"))


def drop(folder: Path) -> None:
    """Delete a checkpoint's folder; a process that is killed meanwhile leaves no half of one under its name."""
    with scratch_path(folder) as old:
        folder.rename(old)
