"""The names under which peers fetch vectors and documents from each other."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunId
from spes_p2p.errors import RecordError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.names import SHARED, SLOT, VectorName
from spes_p2p.swarm.p2p.identity import Identity, is_signed_by
from spes_p2p.swarm.records import Count, Digest, PeerId, Strict

MAX_DESCRIPTION_BYTES = 4096
MAX_REFUSED = 1024
"""Refused versions that a peer remembers."""
REVISION = "revision"
DOCUMENTS = ("manifest", "tokenizer", REVISION)
"""Names of a run's documents; the last one is there once the founder has changed the run's settings."""
CodecKind = Literal["fp32", "coded", "raw"]
_PART = rf"(base-)?(shared|{SLOT})"
Text = Annotated[str, Field(pattern=rf"^(tokenizer|manifest|revision|{_PART}|kept-{SLOT})$")]  # guard: version-name
Name = Annotated[Text, AfterValidator(lambda name: name if is_document(name) else VectorName(name))]


def is_document(name: str) -> bool:
    """Tell whether a name is a document's: manifest, tokenizer, or part of a base; all others are vectors'."""
    return name in DOCUMENTS or name.startswith("base-")


def vector_names(num_slots: int, *, has_kept: bool = False) -> frozenset[VectorName]:
    """Return the names of a run's vectors: weights, and slots' kept forms.

    A version of another name fits no part of the model, whatever its signature.
    """
    slots = [VectorName.of_slot(slot) for slot in range(num_slots)]
    return frozenset([SHARED, *slots, *(name.kept for name in slots if has_kept)])


class Version(Strict):
    """Names a vector or document that peers fetch from each other by its digest.

    A certificate names the digests of vectors, and the manifest those of a base. Documents that change the run are
    signed by their author; whoever has them may serve them.
    """

    run_id: RunId
    name: Name
    round: Count
    digest: Digest
    """SHA-256 of the hashes of the bytes' blocks; see `codecs.vectors`."""
    num_bytes: Count
    author: PeerId | Literal[""] = ""
    public_key: Annotated[str, Field(max_length=1024, pattern=r"^(ssh-rsa [A-Za-z0-9+/=]+)?$")] = ""
    signature: Annotated[str, Field(max_length=1024, pattern=r"^[A-Za-z0-9+/=]*$")] = ""

    @property
    def codec(self) -> CodecKind:
        """`fp32`: a flat little-endian vector; `coded`: a slot's kept form; `raw`: a document."""
        if is_document(self.name):
            return "raw"
        return "coded" if VectorName(self.name).is_kept else "fp32"

    def signed_part(self) -> bytes:
        """Return the bytes that the author signs: all fields but the signature."""
        return json.dumps(self.model_dump(exclude={"signature"}), sort_keys=True).encode()

    @classmethod
    def sign(cls, identity: Identity, run_id: str, name: str, round: int, data: bytes | memoryview) -> Version:
        """Name a document, and sign it."""
        unsigned = cls(
            run_id=run_id,
            name=name,
            round=round,
            digest=digest(data),
            num_bytes=len(data),
            author=identity.peer_id,
            public_key=identity.public_key.decode(),
        )
        return unsigned.model_copy(update={"signature": identity.sign(unsigned.signed_part()).decode()})

    @classmethod
    def verify(cls, data: bytes | str, run_id: str) -> Version:
        """Parse a version; raise RecordError if it is malformed, of another run, or a document without a signature."""
        try:
            if len(data) > MAX_DESCRIPTION_BYTES:
                raise RecordError(f"description of a version exceeds {MAX_DESCRIPTION_BYTES} bytes")
            version = cls.model_validate_json(data)
        except ValidationError as error:
            raise RecordError(f"malformed description of a version: {problem_of(error)}") from error
        if version.run_id != run_id:  # guard: version-run
            raise RecordError(f"version {version.name} belongs to run {version.run_id}")
        signature, key = version.signature.encode(), version.public_key.encode()
        if version.name not in DOCUMENTS:
            return version
        if not is_signed_by(version.author, key, version.signed_part(), signature):  # guard: version-signature
            raise RecordError(f"version {version.name} is not signed by its author {version.author}")
        return version


class RefusedVersions:
    """Versions that a peer takes from no other: the last ones that it has refused, and false ones of round 0.

    Attributes:
        initial: Digests of the versions of round 0 by name, where the run's manifest states them.
    """

    def __init__(self) -> None:
        self.initial: Mapping[str, str] = {}
        self._digests: dict[str, None] = {}

    def add(self, digest: str) -> None:
        """Remember a digest, in place of the oldest beyond MAX_REFUSED."""
        self._digests[digest] = None
        for oldest in list(self._digests)[:-MAX_REFUSED]:  # guard: refused-memory
            del self._digests[oldest]

    def __contains__(self, digest: object) -> bool:
        return digest in self._digests

    def refuses(self, version: Version) -> bool:
        """Tell whether offers of a version are to be ignored."""
        if (
            version.round == 0 and self.initial.get(version.name, version.digest) != version.digest
        ):  # guard: initial-digest
            return True
        return version.digest in self
