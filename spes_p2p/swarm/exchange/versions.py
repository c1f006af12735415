"""The names under which peers fetch vectors and documents from each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from spes_p2p.codecs.vectors import block_hashes, digest_of
from spes_p2p.swarm.names import SLOT, VectorName
from spes_p2p.swarm.records import Count, Digest, Strict

MAX_REFUSED = 1024
"""Refused versions that a peer remembers."""
MANIFEST: Literal["manifest"] = "manifest"
REVISION: Literal["revision"] = "revision"
TOKENIZER = "tokenizer"
"""A run's documents; the revision exists once the founder has changed the run's settings."""
_PART = rf"(base-)?(shared|{SLOT})"
Text = Annotated[str, Field(pattern=rf"^(tokenizer|manifest|revision|{_PART}|kept-{SLOT})$")]  # guard: first
Name = Annotated[Text, AfterValidator(lambda name: name if is_document(name) else VectorName(name))]


def is_document(name: str) -> bool:
    """Check whether a name is a document's: manifest, tokenizer, or part of a base; all others are vectors'."""
    return name in (MANIFEST, REVISION, TOKENIZER) or name.startswith("base-")


class Version(Strict):
    """Names a vector or document of the run, which peers fetch from each other by its digest.

    A certificate names the digests of vectors, the manifest those of documents.
    """

    name: Name
    round: Count
    digest: Digest
    """SHA-256 of the hashes of the bytes' blocks; see `codecs.vectors`."""
    num_bytes: Annotated[Count, Field(gt=0)]

    @classmethod
    def of(cls, name: str, round: int, data: bytes | memoryview, hashes: bytes = b"") -> Version:
        """Name the version with these bytes; `hashes` are those of its blocks, if they have been made already."""
        return cls(name=name, round=round, digest=digest_of(hashes or block_hashes(data)), num_bytes=len(data))


class RefusedVersions:
    """Versions that a peer takes from no other: the last ones that it has refused, and false ones of round 0.

    Attributes:
        initial: Digests of the versions of round 0 by name, if the run's manifest states them.
    """

    def __init__(self) -> None:
        self.initial: Mapping[str, str] = {}
        self._digests: dict[str, None] = {}

    def add(self, digest: str) -> None:
        """Remember a digest, in place of the oldest beyond MAX_REFUSED."""
        self._digests[digest] = None
        for oldest in list(self._digests)[:-MAX_REFUSED]:  # guard: never
            del self._digests[oldest]

    def __contains__(self, digest: object) -> bool:
        return digest in self._digests

    def refuses(self, version: Version) -> bool:
        """Check whether offers of a version are to be ignored."""
        is_false = version.round == 0 and self.initial.get(version.name, version.digest) != version.digest
        return version.digest in self or is_false  # guard: operand
