"""What a puller wants, what it asks of a peer, and what that answers before any bytes."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.exchange.versions import DOCUMENTS, CodecKind, Name, Version
from spes_p2p.swarm.records import Count, Digest

MAX_WAIT_SECONDS = 3600.0
MAX_DELTAS = 256


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @classmethod
    def parse(cls, data: bytes):
        """Return the message that a peer sent.

        Raises:
            ExchangeError: malformed.
        """
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise ExchangeError(f"sent a malformed message: {error.errors()[0]['msg']}") from error


class Request(_Message):
    """Asks for a version; ranges of its bytes are asked for once it is offered."""

    name: Name
    min_round: Count
    """Older versions do not help."""
    timeout: Annotated[float, Field(ge=0, le=MAX_WAIT_SECONDS, allow_inf_nan=False)]
    """Seconds that the caller would wait for such a version to be published."""
    have: Digest | Literal[""] = ""
    """The version that the caller has."""
    max_deltas: Annotated[int, Field(ge=0, le=MAX_DELTAS)] = 0
    """Most deltas that it would apply to that one."""
    digest: Digest | Literal[""] = ""
    """The version that the caller has begun to fetch elsewhere, and would rather have than any other."""
    at_once: bool = False
    """Send the whole payload right behind the offer, which saves a round trip; asked of one peer at a time."""


class Answer(_Message):
    """What the peer offers."""

    state: Literal["busy", "absent", "refused", "same", "deltas", "whole"]
    """`busy`: ask again later; `absent`: it has no such version; `refused`: no such request is answered; `same`: the
    caller's version is the newest; otherwise what the payload is made of."""
    version: Annotated[str, Field(max_length=4096)] = ""
    """The signed description of the version offered."""
    num_deltas: Annotated[int, Field(ge=0, le=MAX_DELTAS)] = 0


@dataclass
class Wanted:
    """What is to be fetched.

    Attributes:
        name: Of the version.
        min_round: Least round that helps.
        num_bytes: Most bytes of a document, exact bytes of a vector.
        delta_bytes: Exact bytes of one delta; 0 where none can be applied.
        max_deltas: Most of them.
        relays: All who fetch it now, this peer included, and share it out among themselves; usually nobody.
        uplinks: What they may send.
        codec: What its bytes are.
        authors: Of whom one must have signed it; anybody may if empty.
        refused: Digests of versions that are not wanted, whoever has signed them.
    """

    name: str
    min_round: int
    num_bytes: int
    delta_bytes: int = 0
    max_deltas: int = 0
    relays: Sequence[str] = ()
    uplinks: Mapping[str, float] = field(default_factory=dict)
    codec: CodecKind = "fp32"
    authors: Collection[str] = ()
    refused: Container[str] = ()

    def check(self, version: Version) -> None:
        """Compare what is offered with what is wanted.

        Raises:
            ExchangeError: it is something else.
        """
        if self.authors and version.author not in self.authors:  # guard: founders-manifest
            raise ExchangeError(f"offered {version.name} by {version.author}, not by {' or '.join(self.authors)}")
        if version.digest in self.refused:  # guard: refused-version
            raise ExchangeError(f"offered {version.name} of round {version.round}, which was refused here")
        is_document = self.name in DOCUMENTS
        fits = version.num_bytes <= self.num_bytes if is_document else version.num_bytes == self.num_bytes
        codec = "raw" if is_document else self.codec
        if (  # guard: version-wanted
            version.name != self.name or version.round < self.min_round or not fits or version.codec != codec
        ):
            raise ExchangeError(
                f"offered {version.name} of round {version.round}, {version.num_bytes} bytes, {version.codec}; "
                f"wanted {self.name} of round {self.min_round}, {self.num_bytes} bytes, {codec}"
            )

    def payload_bytes(self, version: Version, answer: Answer, asked: int) -> int:
        """Return the exact bytes of an offered payload.

        Args:
            version: Offered.
            answer: Offers it.
            asked: Most deltas asked for.

        Raises:
            ExchangeError: it cannot be one.
        """
        if answer.state == "whole":
            return version.num_bytes
        num_bytes = answer.num_deltas * self.delta_bytes
        if (  # guard: delta-count
            answer.state != "deltas" or not 0 < answer.num_deltas <= asked or not 0 < num_bytes < version.num_bytes
        ):
            raise ExchangeError(f"offered {answer.num_deltas} deltas ({answer.state}), of at most {asked}")
        return num_bytes
