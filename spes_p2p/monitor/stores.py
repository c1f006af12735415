"""Places for objects by name: a folder, or a bucket that speaks S3.

An object appears whole or not at all, and its name never gets other bytes. What a server says about checksums is not
believed: two of those tried took a wrong SHA-256 without a word.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.errors import ConfigError, SpesError, one_line
from spes_p2p.fs import write_atomic

S3_SCHEME = "s3://"
S3_PLACE = re.compile(r"s3:/{1,2}([a-z0-9][a-z0-9.-]{1,61}[a-z0-9])(?:/([\w./-]*))?", re.ASCII)
"""One slash too: a path loses the other."""
CONNECT_SECONDS, READ_SECONDS, TRIES = 15, 60, 4
MAX_DELETED = 1000
"""Names in a request, by S3's own limit."""


class StoreError(SpesError):
    """A store cannot be reached, refuses, or lacks what it should have."""


class Store(Protocol):
    """Objects by name. All methods raise StoreError."""

    def put(self, name: str, data: bytes) -> None:
        """Keep an object, whole or not at all."""

    def get(self, name: str, max_bytes: int) -> bytes:
        """Return an object; StoreError if it is larger."""

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the bytes of each object whose name begins with `prefix`, by name."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete objects; those that are not there count as deleted."""


def open_store(place: str | Path) -> Store:
    """Return the store at a place: `s3://BUCKET/PREFIX`, or a folder.

    Raises:
        ConfigError: boto3 is not installed, or its own settings are wrong.
    """
    if (found := S3_PLACE.fullmatch(str(place))) is None:
        return FolderStore(Path(place).expanduser())
    return S3Store(found[1], (found[2] or "").strip("/"))


class FolderStore:
    """A folder, perhaps of another machine.

    Args:
        folder: Made when it is first written to.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, name: str, data: bytes) -> None:
        with _folder_errors(path := self._folder / name):
            path.parent.mkdir(parents=True, exist_ok=True)
            with write_atomic(path) as file:
                file.write(data)

    def get(self, name: str, max_bytes: int) -> bytes:
        with _folder_errors(path := self._folder / name), path.open("rb") as file:
            return _within(file.read(max_bytes + 1), max_bytes, path)

    def sizes(self, prefix: str) -> Mapping[str, int]:
        folder = (self._folder / f"{prefix}x").parent
        with _folder_errors(folder):
            found = ((path.relative_to(self._folder).as_posix(), path) for path in folder.glob("**/*"))
            return {name: path.stat().st_size for name, path in found if name.startswith(prefix) and path.is_file()}

    def delete(self, names: Iterable[str]) -> None:
        with _folder_errors(self._folder):
            for name in names:
                (self._folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _folder_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror}") from error


def _within(data: bytes, max_bytes: int, where: object) -> bytes:
    if len(data) > max_bytes:  # guard: store-bytes
        raise StoreError(f"{where} has more than {max_bytes:,} bytes")
    return data


class S3Store:
    """Objects below a prefix of a bucket that speaks S3.

    Credentials, region and endpoint come from boto3's own places: `AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL`, `~/.aws` and
    the rest. They stand in no message of this class.

    Args:
        bucket: Its name.
        prefix: What all names begin with; "" for nothing.

    Raises:
        ConfigError: boto3 is not installed, or its own settings are wrong.
    """

    def __init__(self, bucket: str, prefix: str) -> None:
        try:
            import boto3
            from botocore.config import Config
            from botocore.exceptions import BotoCoreError
        except ImportError as error:
            raise ConfigError(
                "s3:// needs boto3; run: pip install 'spes-p2p[s3]', or ./scripts/setup.sh s3 in a checkout"
            ) from error
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        config = Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"mode": "standard", "total_max_attempts": TRIES},
            request_checksum_calculation="when_required",  # older servers refuse the trailers that newer ones want
            response_checksum_validation="when_required",
        )
        try:
            # Of a session of its own: the default one would keep credentials that have been renewed meanwhile.
            self._client: Any = boto3.session.Session().client("s3", config=config)
        except (BotoCoreError, ValueError) as error:
            raise ConfigError(f"s3://{bucket}: {one_line(error)}; check AWS_ENDPOINT_URL and ~/.aws/config") from error

    def put(self, name: str, data: bytes) -> None:
        md5 = base64.b64encode(hashlib.md5(data, usedforsecurity=False).digest()).decode()
        with self._errors("put", name):
            self._client.put_object(Bucket=self._bucket, Key=self._prefix + name, Body=data, ContentMD5=md5)

    def get(self, name: str, max_bytes: int) -> bytes:
        with self._errors("get", name):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._prefix + name)
            with contextlib.closing(answer["Body"]) as body:
                return _within(body.read(max_bytes + 1), max_bytes, self._shown(name))

    def sizes(self, prefix: str) -> Mapping[str, int]:
        found = {}
        with self._errors("list", prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._prefix + prefix):
                for each in page.get("Contents", ()):
                    found[each["Key"].removeprefix(self._prefix)] = each["Size"]
        return found

    def delete(self, names: Iterable[str]) -> None:
        keys = [{"Key": self._prefix + name} for name in names]
        for begin in range(0, len(keys), MAX_DELETED):
            part = keys[begin : begin + MAX_DELETED]
            with self._errors("delete", f"{len(part)} objects"):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": part, "Quiet": True})
            if failed := answer.get("Errors"):
                raise StoreError(f"{self._shown('')}: {len(failed)} objects stay: {failed[0].get('Message')}")

    def _shown(self, name: str) -> str:
        return f"{S3_SCHEME}{self._bucket}/{self._prefix}{name}"

    @contextlib.contextmanager
    def _errors(self, verb: str, name: str) -> Iterator[None]:
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

        try:
            yield
        except NoCredentialsError as error:
            remedy = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws/credentials"
            raise StoreError(f"{self._shown('')}: boto3 finds no credentials; {remedy}") from error
        except (BotoCoreError, ClientError, OSError) as error:
            raise StoreError(f"cannot {verb} {self._shown(name)}: {one_line(error)}") from error
