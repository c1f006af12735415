"""Validation of DHT records: every node checks each record when it stores it and when it reads it."""

from __future__ import annotations

import logging
import math
import time

import msgpack
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase

from spes_p2p.errors import RecordError
from spes_p2p.swarm.hivemind_fixes.serializer import ShallowSerializer
from spes_p2p.swarm.p2p.identity import Identity, peer_id_of
from spes_p2p.swarm.records import MAX_LIFETIME_SECONDS, MAX_RECORD_BYTES, RECORD_TYPES, Record

log = logging.getLogger(__name__)

MAX_SUBKEY_BYTES = 1024
MAX_SIGNATURE_BYTES = 512
CLOCK_SKEW_SECONDS = 5.0
MAX_VALID = 8192
"""Valid records that are remembered, 2.5 KB each at most."""


class RecordValidator(RecordValidatorBase):
    """Signs this peer's records, and refuses invalid ones.

    A record is valid if its key belongs to the run, its subkey is the owner's public key, the signature is the owner's,
    the owner's libp2p id is the record's `peer_id`, its lifetime is at most MAX_LIFETIME_SECONDS, and it parses
    strictly.
    """

    def __init__(self, run_id: str, identity: Identity) -> None:
        self._types: dict[bytes, type[Record]] = {
            DHTID.generate(source=key).to_bytes(): kind for kind in RECORD_TYPES for key in kind.keys(run_id)
        }
        self._run_id = run_id
        self._signer = RSASignatureValidator(identity.private_key)
        self._valid: dict[DHTRecord, None] = {}
        """Records that have passed, those checked last at the end: each is checked again whenever it is read."""

    @property
    def subkey(self) -> bytes:
        """The subkey of this peer's records."""
        return self._signer.local_public_key

    def validate(self, record: DHTRecord) -> bool:
        if record in self._valid:  # a record that is valid stays so until it expires
            return True
        try:
            self._check(record)
        except RecordError as error:
            log.debug("refused a record of %s: %s", _signer_of(record), error)
            return False
        except Exception as error:  # noqa: BLE001  # guard: never
            # Bytes from any peer must not crash the DHT node.
            log.debug("refused a record of %s that broke the validator: %r", _signer_of(record), error)
            return False
        self._valid[record] = None
        while len(self._valid) > MAX_VALID:  # guard: len(self._valid) > MAX_VALID -> False
            del self._valid[next(iter(self._valid))]
        return True

    def sign_value(self, record: DHTRecord) -> bytes:
        return self._signer.sign_value(record)

    def strip_value(self, record: DHTRecord) -> bytes:
        return self._signer.strip_value(record)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        return isinstance(other, RecordValidator)

    def _check(self, record: DHTRecord) -> None:
        if not math.isfinite(record.expiration_time):  # guard: never
            raise RecordError("expiration is not finite")
        if record.expiration_time > time.time() + MAX_LIFETIME_SECONDS + CLOCK_SKEW_SECONDS:  # guard: never
            raise RecordError(f"lives longer than {MAX_LIFETIME_SECONDS:.0f} s")
        if len(record.subkey) > MAX_SUBKEY_BYTES:  # guard: never
            raise RecordError("subkey is too long")
        kind = self._types.get(record.key)
        if kind is None:
            raise RecordError("key does not belong to this run")  # guard: raise RecordError -> return None and
        if len(record.value) > MAX_RECORD_BYTES + MAX_SIGNATURE_BYTES:  # guard: never
            raise RecordError("value is too long")
        subkey = ShallowSerializer.loads(record.subkey)
        owner = owner_of(subkey)
        if record.subkey != msgpack.packb(subkey):  # guard: never
            # Other nodes pack the subkey again when they pass the record on; the signature would then not match.
            raise RecordError("subkey is packed in an unusual way")
        if not self._signer.validate(record):  # guard: never
            raise RecordError("signature is missing or wrong")
        value = ShallowSerializer.loads(self._signer.strip_value(record))
        found = kind.decode(value)
        if found.peer_id != owner:  # guard: never
            raise RecordError("signer is not the peer that the record names")
        if DHTID.generate(source=found.key(self._run_id)).to_bytes() != record.key:  # guard: never
            raise RecordError("record lies under a key that is not its own")


def owner_of(subkey: object) -> str:
    """Return the peer id of the public key in a subkey.

    Raises:
        RecordError: the subkey contains no key in the expected form.
    """
    prefix, suffix = RSASignatureValidator.PUBLIC_KEY_FORMAT.split(b"_key_")
    if not isinstance(subkey, bytes) or not (subkey.startswith(prefix) and subkey.endswith(suffix)):
        raise RecordError("subkey is not an owner's key")  # guard: raise RecordError -> return "" and
    try:
        return peer_id_of(subkey[len(prefix) : -len(suffix)])
    except ValueError as error:
        raise RecordError("subkey holds no RSA key") from error


def _signer_of(record: DHTRecord) -> str:
    """Return the claimed signer of a record, for the log."""
    try:
        return owner_of(ShallowSerializer.loads(record.subkey[:MAX_SUBKEY_BYTES]))
    except RecordError:
        return "an unknown owner"
