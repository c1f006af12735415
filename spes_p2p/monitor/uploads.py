"""Checkpoints in a folder, in a bucket that speaks S3, or in a model repository of the hub.

A folder or a bucket has `round-000123/` for each: `checkpoint.json` is written first, then the model's files, and
`SHA256SUMS` last. Without that last file it is half an upload: no reader takes it, and the next attempt resumes it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import LocalStore
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.config.link import PeerId
from spes_p2p.config.machine import RunId
from spes_p2p.data.buckets import open_bucket
from spes_p2p.errors import ConfigError, DataError, SpesError, one_line
from spes_p2p.fs import digest_of_file, scratch_path
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.records import Count, Digest

if TYPE_CHECKING:
    from huggingface_hub import HfApi

INFO_FILE, SUMS_FILE = "checkpoint.json", "SHA256SUMS"
MAX_READ_BYTES = 2**24
"""Most that one of these two has."""
CHUNK_BYTES, CHUNKS = 2**23, 2
"""What memory holds of a file."""
HUB_SECONDS = 60.0
"""Time for the hub to take or send the next bytes."""
_ROUND = re.compile(r"round-(\d{6,})", re.ASCII)
# guard: [A-Za-z0-9_][A-Za-z0-9._-]{0,199} -> .*
_SUM = re.compile(r"([0-9a-f]{64})  ([A-Za-z0-9_][A-Za-z0-9._-]{0,199})", re.ASCII)
_REASON = re.compile(r"<Code>(\w+)</Code>(?:\s*<Message>([^<]*))?", re.ASCII)
_OLDER_BRANCH = "older"
"""Branch of the hub to which a round older than that of the main branch is committed, until it has its tag."""


class StoreError(SpesError):
    """A place cannot be reached, refuses, or lacks what it should have."""


class Checkpoint(BaseModel):
    """Which model a checkpoint is; its `checkpoint.json`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: RunId
    manifest: Digest
    """Of the run."""
    founder: PeerId
    round: Count
    held_out: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """Held-out loss in nats per token; None if it was not measured."""
    written_at: float
    """Seconds since 1970."""
    sums: Digest
    """SHA-256 of its SHA256SUMS, which has those of all other files."""

    @property
    def name(self) -> str:
        """What the checkpoint's folder is called."""
        return f"round-{self.round:06d}"

    @classmethod
    def parse(cls, data: bytes, place: str, name: str) -> Checkpoint:
        """Return what the `checkpoint.json` of a round says; DataError if it is damaged, or of another round."""
        where = f"{place}/{name}/{INFO_FILE}"
        try:
            made = cls.model_validate_json(data)
        except ValidationError as error:
            raise DataError(
                f"{where} is damaged: {problem_of(error)}; delete that round, or name another place"
            ) from error
        if made.name != name:
            raise DataError(f"{where} is that of {made.name}; delete that round, or name another place")
        return made


def to_keep(checkpoints: Iterable[Checkpoint], keep_last: int) -> set[int]:
    """Return the rounds to keep: the newest `keep_last`, and the one with the least held-out loss."""
    known = {each.round: each for each in checkpoints}
    measured = [(each.held_out, -each.round) for each in known.values() if each.held_out is not None]
    best = {-min(measured)[1]} if measured else set()
    return set(sorted(known)[-keep_last:]) | best


def open_place(place: str) -> Store | HubRepository:
    """Return what is at `s3://BUCKET/PREFIX`, `hf://OWNER/NAME`, or in a folder.

    Raises:
        ConfigError: credentials or settings of S3 are missing or wrong, or the folder cannot be made.
    """
    return HubRepository(place) if place.startswith("hf://") else Store(place)


class Store:
    """Checkpoints in a bucket, or in a folder, which is made. One monitor writes to it; any machine may read.

    All methods raise StoreError if the place cannot be reached or refuses, and DataError if it holds damage.

    Args:
        place: `s3://BUCKET/PREFIX`, or the folder.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._folder = None if place.startswith("s3://") else Path(place).expanduser()
        with self._errors("open"):
            self._store = open_bucket(place) if self._folder is None else LocalStore(self._folder, mkdir=True)

    def checkpoints(self) -> dict[int, Checkpoint]:
        """Return the whole checkpoints by round, ascending."""
        found = {}
        with self._errors("read"):
            for name in self._rounds():
                if {INFO_FILE, SUMS_FILE} <= self._sizes(name).keys():
                    made = Checkpoint.parse(self._read(f"{name}/{INFO_FILE}"), self._place, name)
                    found[made.round] = made
        return found

    def upload(self, folder: Path, stop: Event) -> int:
        """Upload the checkpoint in a folder until `stop` is set; return the bytes sent.

        Files that an earlier attempt has sent stay.
        """
        mine, sent = (folder / INFO_FILE).read_bytes(), 0
        with self._errors("write"):
            there = self._sizes(folder.name)
            if there and (INFO_FILE not in there or self._read(f"{folder.name}/{INFO_FILE}") != mine):
                self._delete(folder.name, there)  # an attempt with another model of this round
                there = {}
            sums = read_sums(folder)
            for path in (folder / name for name in (INFO_FILE, *sums, SUMS_FILE)):
                if there.get(path.name) != (size := path.stat().st_size):
                    if stop.is_set():
                        raise StoreError("this monitor ends")
                    if path.name in sums and digest_of_file(path) != sums[path.name]:
                        raise StoreError(f"{path} has changed since it was written; delete {folder}")
                    to = f"{folder.name}/{path.name}"
                    obstore.put(self._store, to, path, chunk_size=CHUNK_BYTES, max_concurrency=CHUNKS)
                    sent += size
        return sent

    def tidy(self, kept: Collection[int]) -> None:
        """Delete the other rounds, also those whose upload was abandoned."""
        with self._errors("delete from"):
            for name in self._rounds():
                if int(name[6:]) not in kept and INFO_FILE in (there := self._sizes(name)):
                    self._delete(name, there)

    def download(self, round: int | None, output: Path, *, overwrite: bool = False) -> Checkpoint:
        """Write the checkpoint of a round, by default the newest, to a folder: whole or not at all, and verified.

        An interrupted download resumes with the missing files, which stay beside the output in `.NAME.round-N.part`.

        Raises:
            ConfigError: the output cannot be written.
        """
        found = self.checkpoints()
        if not found:
            raise DataError(f"{self._place} has no checkpoint; name the place of a monitor's --upload")
        number = max(found) if round is None else round
        if number not in found:
            raise DataError(f"{self._place} has rounds {', '.join(map(str, found))}, not {number}; set --round to one")
        name, partial = found[number].name, output.with_name(f".{output.name}.{found[number].name}.part")
        try:
            partial.mkdir(parents=True, exist_ok=True)
            self._fetch(name, partial / SUMS_FILE, found[number].sums)
            for file, digest in read_sums(partial).items():
                self._fetch(name, partial / file, digest)
            (partial / INFO_FILE).write_text(found[number].model_dump_json())
            with scratch_path(output) as old:
                if overwrite and output.exists():
                    output.rename(old)
                partial.rename(output)
        except OSError as error:
            raise ConfigError(f"cannot write --output {output}: {error}; make room there, or name another") from error
        return found[number]

    def _fetch(self, name: str, file: Path, digest: str) -> None:
        if file.exists() and digest_of_file(file) == digest:
            return
        with file.open("wb") as stream:
            stream.writelines(self._chunks(f"{name}/{file.name}"))
        if digest_of_file(file) != digest:  # guard: never
            raise DataError(
                f"{self._place}/{name}/{file.name} is damaged; name another --round, or delete this one there: a "
                f"monitor that has it still sends it again"
            )

    def _chunks(self, path: str) -> Iterator[bytes]:
        with self._errors("read"):
            yield from obstore.get(self._store, path).stream(CHUNK_BYTES)

    def _rounds(self) -> list[str]:
        names = obstore.list_with_delimiter(self._store)["common_prefixes"]
        return sorted((name for name in names if _ROUND.fullmatch(name)), key=lambda name: int(name[6:]))

    def _sizes(self, name: str) -> dict[str, int]:
        found = obstore.list_with_delimiter(self._store, name)["objects"]
        return {Path(each["path"]).name: each["size"] for each in found}

    def _read(self, path: str) -> bytes:
        found = obstore.get(self._store, path)
        if found.meta["size"] > MAX_READ_BYTES:  # guard: never
            raise DataError(f"{self._place}/{path} has more than {MAX_READ_BYTES:,} bytes; delete that round")
        return bytes(found.bytes())

    def _delete(self, name: str, files: Collection[str]) -> None:
        """Delete a round; an interruption leaves what counts as half an upload, which `tidy` deletes."""
        if self._folder is not None:
            with scratch_path(self._folder / name) as old:
                (self._folder / name).rename(old)
            return
        for group in ({SUMS_FILE}, {*files} - {SUMS_FILE, INFO_FILE}, {INFO_FILE}):
            obstore.delete(self._store, [f"{name}/{each}" for each in group.intersection(files)])

    @contextlib.contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            code = _REASON.search(str(error))
            text = ": ".join(filter(None, code.groups())) if code else str(error).partition("\n\nDebug source")[0]
            reason = " ".join(text.split())[:300]
            raise StoreError(f"cannot {verb} {self._place}: {reason}; check the place and your rights there") from error


class HubRepository:
    """Checkpoints in a model repository of the hub: the newest on its main branch, each with a tag `round-000123`.

    A commit appears whole or not at all, and the hub takes no large file twice. The token is that of `hf auth login`,
    or HF_TOKEN. A repository that does not exist is made, private.

    Args:
        place: `hf://OWNER/NAME`.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._name = place.removeprefix("hf://")

    def checkpoints(self) -> dict[int, Checkpoint]:
        """Return the checkpoints that have a tag, by round, ascending."""
        found = {}
        with self._api() as api:
            api.create_repo(self._name, private=True, exist_ok=True)
            for tag in (each.name for each in api.list_repo_refs(self._name).tags):
                if _ROUND.fullmatch(tag):
                    data = Path(api.hf_hub_download(self._name, INFO_FILE, revision=tag)).read_bytes()
                    found[int(tag[6:])] = Checkpoint.parse(data, self._place, tag)
        return dict(sorted(found.items()))

    def upload(self, folder: Path, stop: Event) -> int:
        """Commit a checkpoint in place of the last one, and tag it; an older one gets its tag alone."""
        files = [INFO_FILE, *read_sums(folder), SUMS_FILE]
        made = Checkpoint.parse((folder / INFO_FILE).read_bytes(), str(folder.parent), folder.name)
        loss = "not measured" if made.held_out is None else f"{made.held_out:.4f}"
        branch = _OLDER_BRANCH if made.round < max(self.checkpoints(), default=0) else None
        with self._api() as api:
            if branch is not None:
                api.create_branch(self._name, branch=branch, exist_ok=True)
            commit: Any = api.upload_folder(
                repo_id=self._name,
                revision=branch,
                folder_path=folder,
                allow_patterns=files,
                delete_patterns=["*"],
                commit_message=f"Round {made.round} of run {made.run_id}, held-out loss {loss}",
            )
            api.create_tag(self._name, tag=made.name, revision=commit.oid)
            if branch is not None:
                api.delete_branch(self._name, branch=branch)
        return sum((folder / name).stat().st_size for name in files)

    def tidy(self, kept: Collection[int]) -> None:
        """Delete the tags of the others. The commits stay in the repository's history."""
        for number in self.checkpoints().keys() - kept:
            with self._api() as api:
                api.delete_tag(self._name, tag=f"round-{number:06d}")

    @contextlib.contextmanager
    def _api(self) -> Iterator[HfApi]:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import disable_progress_bars, get_session

        disable_progress_bars()  # the terminal is the watch's
        get_session().timeout = HUB_SECONDS  # it has none, and is made again after some failures
        try:
            yield HfApi()
        except SpesError:
            raise
        except Exception as error:  # huggingface_hub and what it stands on raise errors of many types
            raise StoreError(
                f"{self._place}: {one_line(error)}; log in with `hf auth login`, and check the name"
            ) from error


def read_sums(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that a folder's SHA256SUMS names; DataError if one is not in that folder."""
    with (folder / SUMS_FILE).open("rb") as file:
        text = file.read(MAX_READ_BYTES).decode(errors="replace")
    lines = [_SUM.fullmatch(line) for line in text.split("\n")[:-1]]
    if not all(lines):
        raise DataError(
            f"{SUMS_FILE} of {folder.name} names something else than files of its folder; name another round"
        )
    return {form[2]: form[1] for form in lines if form}
