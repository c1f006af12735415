"""Published tensor bundles: signed manifests, and the files that hold their bytes.

Bytes lie on disk, not in memory: what a peer does not train costs it no RAM twice, a restarted peer still has
them, and the last copy of a dead peer's expert survives with everybody who pulled it.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.codecs import digest
from spes_p2p.errors import ExchangeError, RecordError
from spes_p2p.swarm.identity import Identity, is_signed_by
from spes_p2p.swarm.records import Count, Digest, PeerId

KEEP_PER_NAME = 2
"""Versions kept of each name: the newest, and the one that slower peers may still be fetching."""
MAX_MANIFEST_BYTES = 4096
DOCUMENTS = ("manifest", "tokenizer")
"""Names whose bytes are a document; all others are vectors."""
Name = Annotated[str, Field(pattern=r"^(tokenizer|manifest|(moments-)?(shared|slot-\d{1,4}))$")]


class Version(BaseModel):
    """The signed description of a published bundle; whoever has the bytes may serve it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    run_id: Annotated[str, Field(max_length=64)]
    name: Name
    round: Count
    digest: Digest
    """SHA-256 of the bytes."""
    num_bytes: Count
    codec: Literal["fp32", "raw"]
    """`fp32`: a flat little-endian vector; `raw`: a document."""
    author: PeerId
    public_key: Annotated[str, Field(max_length=1024)]
    signature: Annotated[str, Field(max_length=1024)] = ""

    def signed_part(self) -> bytes:
        """Return the bytes that the author signs: everything but the signature."""
        return json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True).encode()

    @classmethod
    def sign(cls, identity: Identity, run_id: str, name: str, round: int, data: bytes | memoryview, codec) -> Version:
        """Return the signed version of a bundle's bytes."""
        unsigned = cls(
            run_id=run_id,
            name=name,
            round=round,
            digest=digest(data),
            num_bytes=len(data),
            codec=codec,
            author=identity.peer_id,
            public_key=identity.public_key.decode(),
        )
        return unsigned.model_copy(update={"signature": identity.sign(unsigned.signed_part()).decode()})

    @classmethod
    def verify(cls, data: bytes | str, run_id: str) -> Version:
        """Return the version that a peer described.

        Raises:
            RecordError: malformed, of another run, or not signed by its author.
        """
        try:
            if len(data) > MAX_MANIFEST_BYTES:
                raise RecordError(f"version manifest exceeds {MAX_MANIFEST_BYTES} bytes")
            version = cls.model_validate_json(data)
        except ValidationError as error:
            raise RecordError(f"malformed version manifest: {error.errors()[0]['msg']}") from error
        if version.run_id != run_id:
            raise RecordError(f"version {version.name} belongs to run {version.run_id}")
        signature, key = version.signature.encode(), version.public_key.encode()
        if not is_signed_by(version.author, key, version.signed_part(), signature):
            raise RecordError(f"version {version.name} is not signed by its author {version.author}")
        return version


class VersionStore:
    """Versions on disk, safe to read from one thread while another adds.

    The newest of a name is the one added last: who catches up with a majority may go back a round. Files are
    immutable: a new version is a new file, moved in whole. Serving opens the file, so that deleting an old version
    does not disturb a transfer under way.

    Args:
        directory: Folder of the store; an index in it makes it survive a restart.
        run_id: Versions of other runs are refused.
    """

    def __init__(self, directory: Path, run_id: str) -> None:
        self._directory, self._run_id = directory, run_id
        self._changed = threading.Condition()
        self._versions: dict[str, list[Version]] = {}
        directory.mkdir(parents=True, exist_ok=True)
        self._read_index()

    def newest(self) -> dict[str, Version]:
        """Return the newest version of each name."""
        with self._changed:
            return {name: versions[0] for name, versions in self._versions.items() if versions}

    def path(self, version: Version) -> Path:
        """Return the file that holds a version's bytes; named by digest, never by what a peer says."""
        return self._directory / f"{version.name}.{version.digest}.bin"

    def add(self, items: Mapping[str, tuple[Version, bytes | memoryview]]) -> None:
        """Store verified versions with their bytes, all visible at once; drop the oldest ones."""
        for version, data in items.values():
            if not self.path(version).exists():
                _write_whole(self.path(version), data)
        with self._changed:
            for name, (version, data) in items.items():
                if not self.path(version).exists():  # displaced, and deleted, by another thread meanwhile
                    _write_whole(self.path(version), data)
                older = self._versions.get(name, [])
                kept = [version, *(old for old in older if old.round != version.round)][:KEEP_PER_NAME]
                self._versions[name] = kept
                # Only what this call displaced: other threads' files may be written, but not listed yet.
                for path in {self.path(old) for old in older} - {self.path(new) for new in kept}:
                    path.unlink(missing_ok=True)
            self._write_index()
            self._changed.notify_all()

    def discard(self, version: Version) -> None:
        """Forget a version whose bytes turned out damaged, so that it can be pulled again."""
        with self._changed:
            others = [other for other in self._versions.get(version.name, []) if other.digest != version.digest]
            self._versions[version.name] = others
            self.path(version).unlink(missing_ok=True)
            self._write_index()

    def read(self, name: str) -> bytes:
        """Return the bytes of the newest version of `name`, verified.

        Raises:
            ExchangeError: there is none, or the file is damaged.
        """
        version = self.newest().get(name)
        if version is None:
            raise ExchangeError(f"this peer has no version of {name}")
        try:
            data = self.path(version).read_bytes()
        except OSError as error:
            raise ExchangeError(f"cannot read {self.path(version)}: {error.strerror}") from error
        if digest(data) != version.digest:
            self.discard(version)
            raise ExchangeError(f"{self.path(version)} was damaged and is deleted; it can be pulled again")
        return data

    def wait_for(self, name: str, min_round: int, timeout: float) -> Version | None:
        """Return the newest version of `name` once it is of `min_round` or later; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                versions = self._versions.get(name)
                if versions and versions[0].round >= min_round:
                    return versions[0]
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._changed.wait(remaining):
                    return None

    def _write_index(self) -> None:
        index = [version.model_dump() for versions in self._versions.values() for version in versions]
        _write_whole(self._directory / "index.json", json.dumps(index).encode())

    def _read_index(self) -> None:
        index = self._directory / "index.json"
        if not index.exists():
            return
        try:
            entries = [json.dumps(entry) for entry in json.loads(index.read_text())]
        except (OSError, ValueError, TypeError) as error:
            raise ExchangeError(f"{index} is damaged; delete {self._directory} and join again") from error
        for entry in entries:
            version = Version.verify(entry, self._run_id)
            if self.path(version).exists():
                self._versions.setdefault(version.name, []).append(version)


def _write_whole(path: Path, data: bytes | memoryview) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    temporary.write_bytes(data)
    temporary.replace(path)
