"""The records that the DHT may hold: strict, small, signed by their owner, and short-lived.

A key such as `{run}.v14.claims.{bucket}` holds one subkey per peer. Values are JSON, because every node parses them
before it trusts them, and JSON has no types that execute code.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spes_p2p.config import MAX_LEASE_SECONDS, Address, PeerId
from spes_p2p.config.machine import OwnerName
from spes_p2p.errors import RecordError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.invites import ShownInvite

PROTOCOL = "v14"
NUM_BUCKETS = 4
"""Keys that peers' records are spread over, so that a key's dictionary stays far below libp2p's 4 MiB."""
MAX_RECORD_BYTES = 1536
MAX_LIFETIME_SECONDS = MAX_LEASE_SECONDS
MAX_SLOTS = 4096
MAX_CLAIMED = 128
"""Slots that one peer can claim: more do not fit a record."""
MAX_TIME = 1e10
"""Largest time in seconds, DHT time included."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]  # guard: first
Count = Annotated[int, Field(ge=0, le=2**53)]  # guard: first
Seconds = Annotated[float, Field(ge=0, le=MAX_TIME, allow_inf_nan=False)]  # guard: first
Number = Annotated[float, Field(ge=-1e12, le=1e12, allow_inf_nan=False)]  # guard: first
Slot = Annotated[int, Field(ge=0, lt=MAX_SLOTS)]  # guard: first
Software = Annotated[str, Field(max_length=64, pattern=r"^[0-9A-Za-z][0-9A-Za-z.+_-]*$")]  # guard: first
"""A version of spes_p2p."""


class Strict(BaseModel):
    """Base of what peers send each other: immutable, without unknown fields, and of the stated types."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",  # guard: "forbid" -> "ignore"
        strict=True,  # guard: strict=True -> strict=False
    )


class Record(Strict):
    """Base of all records."""

    kind: ClassVar[str]
    """Part of the record's DHT keys."""
    bucketed: ClassVar[bool] = True
    """Whether the records are spread over `NUM_BUCKETS` keys."""

    peer_id: PeerId
    """The owner's libp2p id, which must be the signer's."""

    @classmethod
    def keys(cls, run_id: str) -> list[str]:
        """Return all DHT keys of records of this kind."""
        prefix = f"{run_id}.{PROTOCOL}.{cls.kind}"
        return [f"{prefix}.{bucket}" for bucket in range(NUM_BUCKETS)] if cls.bucketed else [prefix]

    def key(self, run_id: str) -> str:
        """Return this record's DHT key."""
        keys = self.keys(run_id)
        return keys[hashlib.sha256(self.peer_id.encode()).digest()[0] % len(keys)]

    def encode(self) -> bytes:
        """Return the record as JSON.

        Raises:
            RecordError: the record exceeds MAX_RECORD_BYTES.
        """
        data = self.model_dump_json().encode()
        if len(data) > MAX_RECORD_BYTES:
            raise RecordError(f"{self.kind} record of {len(data)} bytes exceeds {MAX_RECORD_BYTES}; claim fewer slots")
        return data

    @classmethod
    def decode(cls, data: object):
        """Return the record that `data` encodes.

        Raises:
            RecordError: `data` is too large, or no such record.
        """
        if not isinstance(data, bytes) or len(data) > MAX_RECORD_BYTES:
            raise RecordError(f"{cls.kind} record is not bytes of at most {MAX_RECORD_BYTES}")
        try:
            return cls.model_validate_json(data)
        except ValidationError as error:
            raise RecordError(f"malformed {cls.kind} record: {problem_of(error)}") from error


class ManifestRecord(Record):
    """Declares the run's manifest, which this peer serves as a document."""

    kind: ClassVar[str] = "manifest"
    bucketed: ClassVar[bool] = False

    digest: Digest
    """Digest of what the manifest's founder has signed."""
    revision: Count = 0
    """Number of the newest revision of it that this peer has read, and serves."""


class Claim(Record):
    """A lease: this peer trains these slots until the record expires."""

    kind: ClassVar[str] = "claims"

    state: Literal["joining", "active"]
    slots: tuple[Slot, ...] = Field(default=(), max_length=MAX_CLAIMED)
    """Slots that this peer trains, ascending."""
    max_slots: Annotated[int, Field(ge=0, le=MAX_CLAIMED)]
    """Number of slots that this peer could train; 0 while it is paused, and when it leaves."""
    since: Seconds
    """DHT time at which this peer joined."""
    invite: ShownInvite = ""
    """Proof of this peer's invite."""

    @model_validator(mode="after")
    def _check_slots(self) -> Claim:
        if list(self.slots) != sorted(set(self.slots)) or len(self.slots) > self.max_slots:
            raise ValueError("slots must ascend and number at most max_slots")
        return self

    @property
    def leaves(self) -> bool:
        """Whether the peer takes part in no further round."""
        return self.state == "joining" and not self.max_slots


class Progress(Record):
    """A peer's position in its round."""

    kind: ClassVar[str] = "progress"

    round: Count
    """The last round that this peer has committed; it trains the next one."""
    ends_at: Seconds
    """DHT time at which the next round's training ends; 0 while unknown."""
    certificate: Digest | Literal[""] = ""
    """Digest of the body of `round`'s certificate, where the peer's chain of certificates ends; empty at first."""
    is_done: bool = False
    """This peer has made all local steps of the next round."""


class Metrics(Record):
    """One peer's report of a finished round, for the monitor."""

    kind: ClassVar[str] = "metrics"

    round: Count
    step: Count
    """Local optimizer steps since the peer joined."""
    tokens: Count
    """Tokens trained in this round."""
    total_tokens: Count
    """Tokens trained since the peer joined."""
    loss: Number | None
    """Mean cross entropy over the round, nats per token; None if no step of it changed the model."""
    tokens_per_second: Number
    slots: tuple[Slot, ...] = Field(max_length=MAX_CLAIMED)
    num_members: Count
    """Members of the round's roster."""
    committed: Count
    """Groups that this peer committed."""
    dropped: Count
    """Groups that this peer dropped."""
    clipped: Count = 0
    """Parts of others' vectors that this peer, as a reducer, has clipped."""
    shared_digest: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    """First half of the shared anchor's digest: equal on all members after a commit."""
    train_seconds: Seconds
    matchmaking_seconds: Seconds
    averaging_seconds: Seconds
    exchange_seconds: Seconds
    other_seconds: Seconds
    """Rest of the round's wall time: outer step, waiting for the certificate, loss gate, checkpoint."""
    bytes_in: Count
    bytes_out: Count
    stale_rounds: Count = 0
    """Largest lag of a slot of this peer's model behind its holders' version, in rounds."""


class Contact(Record):
    """A peer's addresses and software."""

    kind: ClassVar[str] = "contacts"

    addresses: tuple[Address, ...] = Field(max_length=4)
    """Multiaddrs; none for a peer in client mode."""
    software: Software
    name: OwnerName = ""
    """Of the peer's owner, if they have set one."""


RECORD_TYPES: tuple[type[Record], ...] = (ManifestRecord, Claim, Progress, Metrics, Contact)
