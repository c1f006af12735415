"""One key per peer: it names the peer on libp2p and signs its records and versions."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Collection
from pathlib import Path

import multihash
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.p2p import PeerID
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from spes_p2p.errors import ConfigError

MIN_KEY_BITS = 2048
MAX_KEY_BITS = 4096
KEY_EXPONENT = 65537
MAX_KEYS = 4096
"""Other peers' keys that are kept: more than a roster has members."""


class Identity:
    """A peer's RSA key, in a file that only its owner can read.

    Args:
        path: Identity file in libp2p's protobuf form, as `p2pd` reads it; made if absent.

    Raises:
        ConfigError: the file cannot be read or written, is no identity, or can be read by other users.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_new = not path.exists()
        if self.is_new:
            _create(path)
        try:
            mode, data = path.stat().st_mode, path.read_bytes()
            self.peer_id = PeerID.from_identity(data).to_base58()
            der = crypto_pb2.PrivateKey.FromString(data).data
        except Exception as error:  # protobuf and cryptography raise a dozen types for a damaged file
            raise ConfigError(f"{path} is not a readable identity file; name another one or delete it") from error
        if mode & 0o077:  # guard: never
            raise ConfigError(f"identity {path} can be read by others; run: chmod 600 {path}")
        self.private_key = RSAPrivateKey.__new__(RSAPrivateKey)
        self.private_key._private_key = serialization.load_der_private_key(der, password=None)
        self.public_key = self.private_key.get_public_key().to_bytes()

    def sign(self, data: bytes) -> bytes:
        """Return this peer's signature of `data` (RSA-PSS over SHA-256, base64)."""
        return self.private_key.sign(data)


class IdentityKeys:
    """Signs with a peer's identity, and checks the signatures of peers whose public keys it has learnt.

    A peer id is the hash of its key, so a key needs no other proof of its owner (`certificate.Keys`).

    Attributes:
        held: Peers whose keys no stranger's key displaces.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity = identity
        self.peer_id = identity.peer_id
        self.held: Collection[str] = frozenset()
        self._known: dict[str, bytes] = {}
        self.learn(identity.public_key)

    def learn(self, public_key: bytes) -> str:
        """Keep an OpenSSH-encoded key, and return its peer's id; raise as `peer_id_of` does.

        If there are too many, forget the oldest one of no held peer.
        """
        peer_id = peer_id_of(public_key)
        self._known.pop(peer_id, None)
        self._known[peer_id] = public_key
        while len(self._known) > MAX_KEYS:  # guard: never
            others = [peer for peer in self._known if peer != self.peer_id]
            del self._known[next((peer for peer in others if peer not in self.held), others[0])]  # guard: always
        return peer_id

    def public_key(self, peer_id: str) -> str:
        """Return a peer's OpenSSH-encoded key; empty if it is unknown."""
        return self._known.get(peer_id, b"").decode()

    def sign(self, data: bytes) -> str:
        """Return this peer's signature of `data`, in base64."""
        return self._identity.sign(data).decode()

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        """Check whether the signature is that peer's, of this data; False if its public key is unknown."""
        key = self._known.get(peer_id)
        return key is not None and RSAPublicKey.from_bytes(key).verify(data, signature.encode())


def _create(path: Path) -> None:
    key = crypto_pb2.PrivateKey(key_type=crypto_pb2.KeyType.RSA, data=RSAPrivateKey().to_bytes())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # O_EXCL with the final mode: no other user can read or replace the key at any moment.
        with os.fdopen(
            os.open(
                path,
                os.O_WRONLY | os.O_CREAT | os.O_EXCL,  # guard: | os.O_EXCL ->
                0o600,  # guard: 0o600 -> 0o640
            ),
            "wb",
        ) as file:
            file.write(key.SerializeToString())
    except OSError as error:
        raise ConfigError(f"cannot write identity {path}: {error.strerror}; choose a writable --output") from error


@functools.lru_cache(MAX_KEYS)
def peer_id_of(public_key: bytes) -> str:
    """Return the libp2p peer id (base58) that belongs to an OpenSSH-encoded RSA public key.

    Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md

    Raises:
        ValueError: no such key, not in OpenSSH's own form, or slow to verify with.
    """
    try:
        key = serialization.load_ssh_public_key(public_key)
    except Exception as error:  # hostile keys make cryptography raise any of a dozen types
        raise ValueError("not an OpenSSH public key") from error
    if (
        not isinstance(key, rsa.RSAPublicKey) or not MIN_KEY_BITS <= key.key_size <= MAX_KEY_BITS  # guard: operand
    ):
        raise ValueError(f"not an RSA key of {MIN_KEY_BITS} to {MAX_KEY_BITS} bits")
    if key.public_numbers().e != KEY_EXPONENT:  # guard: never
        raise ValueError(f"its exponent is not {KEY_EXPONENT}")
    if (  # guard: never
        public_key != key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    ):
        raise ValueError("one key must have one name, and this one has something added")
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return hashed_peer_id(crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=der).SerializeToString())


def hashed_peer_id(identity: bytes) -> str:
    """Hash what names a peer into its id: an encoded public key, or a virtual peer's seed and index."""
    return PeerID(multihash.encode(hashlib.sha256(identity).digest(), 0x12)).to_base58()


def is_signed_by(peer_id: str, public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Check whether `signature` of `data` is by the peer whose libp2p id is `peer_id`."""
    try:
        return (
            peer_id_of(public_key) == peer_id  # guard: operand
            and bool(RSAPublicKey.from_bytes(public_key).verify(data, signature))
        )
    except Exception:  # noqa: BLE001 - hostile keys make cryptography raise any of a dozen types; all mean "no"
        return False
