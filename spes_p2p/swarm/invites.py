"""Invites: a closed run admits the peers that its founder has invited, and every peer checks them without a server.

An invite is a line of text: a public key that the founder has signed for the run with an end time, and its private key.
A peer shows the signed part to all others and, in place of the private key, a signature of its own peer id, so that a
peer that overhears the proof cannot use it. Two identities may use one invite.
"""

from __future__ import annotations

import base64
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field

from spes_p2p.errors import RecordError
from spes_p2p.swarm.p2p.identity import Identity, is_signed_by

MAX_IDENTITIES = 2
"""Identities that may use one invite."""
ShownInvite = Annotated[str, Field(max_length=768, pattern=r"^[A-Za-z0-9+/=.]*$")]  # guard: invite-text
"""What a peer shows of its invite, unverified; empty without one."""
_KEY = r"[A-Za-z0-9+/]{43}="
_SIGNED = rf"({_KEY})\.([0-9]{{1,11}})\.([A-Za-z0-9+/=]{{1,600}})"
_INVITE = re.compile(rf"({_SIGNED})\.({_KEY})")
_SHOWN = re.compile(rf"{_SIGNED}\.([A-Za-z0-9+/]{{86}}==)")


def issue(founder: Identity, run_id: str, expires: int) -> str:
    """Return a new invite to a run that ends at `expires`, in seconds since 1970 (UTC)."""
    private = Ed25519PrivateKey.generate()
    public = _text(private.public_key().public_bytes_raw())
    signature = founder.sign(_signed_part(run_id, public, expires)).decode()
    return f"{public}.{expires}.{signature}.{_text(private.private_bytes_raw())}"


def show(invite: str, run_id: str, peer_id: str) -> str:
    """Return the proof of an invite that a peer shows to the others.

    Raises:
        RecordError: the text is no invite.
    """
    form = _INVITE.fullmatch(invite)
    if form is None:
        raise RecordError("has something else than an invite")
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(form[5]))
    return f"{form[1]}.{_text(private.sign(_proven_part(run_id, peer_id)))}"


@dataclass(frozen=True)
class GuestList:
    """Checks the invites of a closed run.

    Attributes:
        run_id: The run's name.
        founder: The founder's peer id; the founder needs no invite.
        founder_key: The founder's public key, in OpenSSH's format.
        shown: Proof of this peer's own invite; empty for the founder and for a monitor.
    """

    run_id: str
    founder: str
    founder_key: str
    shown: str = ""

    def check(self, peer: str, shown: str, now: float) -> str:
        """Return the public key of a peer's invite.

        Args:
            peer: The peer's authenticated id.
            shown: The peer's proof, unverified.
            now: Seconds since 1970.

        Raises:
            RecordError: the invite is not to this run, belongs to another peer, or has ended.
        """
        form = _SHOWN.fullmatch(shown)
        if form is None:
            raise RecordError("has no invite" if not shown else "has something else than an invite")
        key, expires, signature, proof = form[1], int(form[2]), form[3], form[4]
        if not _is_by(self.founder, self.founder_key, self.run_id, key, expires, signature):  # guard: invite-founder
            raise RecordError(f"has an invite that {self.founder} did not sign for run {self.run_id!r}")
        if not _is_proven(key, self.run_id, peer, proof):  # guard: invite-overheard
            raise RecordError("shows an invite that is another peer's")
        if expires < now:  # guard: invite-end
            raise RecordError(f"has an invite that ended {now - expires:.0f} s ago")
        return key

    def refusals(self, shown: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the peers that may not take part, with reasons; of an invite's identities, the two smallest ids may.

        Args:
            shown: Proofs by authenticated peer id.
            now: Seconds since 1970; peers that must agree use the same time.
        """
        refused: dict[str, str] = {}
        users: dict[str, list[str]] = {}
        for peer, text in sorted(shown.items()):
            if peer == self.founder:
                continue
            try:
                users.setdefault(self.check(peer, text, now), []).append(peer)
            except RecordError as error:
                refused[peer] = f"{peer} {error}"
        surplus = [peer for peers in users.values() for peer in peers[MAX_IDENTITIES:]]  # guard: invite-identities
        return refused | {peer: f"{peer} is one too many on its invite" for peer in surplus}


def _signed_part(run_id: str, key: str, expires: int) -> bytes:
    return f"spes_p2p invite {run_id} {key} {expires}".encode()


def _proven_part(run_id: str, peer_id: str) -> bytes:
    return f"spes_p2p guest {run_id} {peer_id}".encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@functools.lru_cache(maxsize=4096)
def _is_by(founder: str, founder_key: str, run_id: str, key: str, expires: int, signature: str) -> bool:
    return is_signed_by(founder, founder_key.encode(), _signed_part(run_id, key, expires), signature.encode())


@functools.lru_cache(maxsize=4096)
def _is_proven(key: str, run_id: str, peer_id: str, proof: str) -> bool:
    try:
        public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key))
        public.verify(base64.b64decode(proof), _proven_part(run_id, peer_id))
    except (InvalidSignature, ValueError):
        return False
    return True
