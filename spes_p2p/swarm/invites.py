"""Invites: the founder says who may train in a closed run, and who may vote; every peer checks it without a server.

An invite is a line of text: a public key that the founder has signed for one founding of the run, with an end time, how
many identities may use it and whether they may vote, and its private key. A peer shows the signed part to all others
and, in place of the private key, a signature of its own peer id, so that a peer that overhears the proof cannot use it.
"""

from __future__ import annotations

import base64
import functools
import re
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field

from spes_p2p.errors import RecordError

if TYPE_CHECKING:
    from spes_p2p.swarm.certificate import Keys

MAX_KNOWN = 4096
"""Checked proofs that are remembered: each claim is read every few seconds."""
ID_LETTERS = 16
SHOWN_LETTERS = 6
"""Letters of them on a page and in a log."""
ShownInvite = Annotated[str, Field(max_length=768, pattern=r"^[A-Za-z0-9+/=.]*$")]  # guard: first
"""What a peer shows of its invite, unverified; empty without one."""
InviteId = Annotated[str, Field(max_length=ID_LETTERS, pattern=r"^[A-Za-z0-9+/]*$")]
"""First letters of an invite's public key; empty for the founder's own seat."""
_KEY = r"[A-Za-z0-9+/]{43}="
_SIGNED = rf"({_KEY})\.([0-9]{{1,11}})\.([1-9][0-9]{{0,3}})\.([01])\.([A-Za-z0-9+/=]{{1,600}})"
_INVITE = re.compile(rf"({_SIGNED})\.({_KEY})")
_SHOWN = re.compile(rf"{_SIGNED}\.([A-Za-z0-9+/]{{86}}==)")


class Invite(NamedTuple):
    """What the founder has signed.

    Attributes:
        id: First letters of its key.
        places: Identities that may use it.
        votes: Whether they may vote.
    """

    id: str
    places: int
    votes: bool

    def has_place(self, seats: Mapping[str, str]) -> bool:
        """Tell whether another identity may use it, beside those that have seats by it."""
        return sum(each == self.id for each in seats.values()) < self.places


def issue(founder: Keys, founding: str, expires: int, *, places: int = 1, votes: bool = False) -> str:
    """Return a new invite to the founding with this digest, until `expires`, in seconds since 1970 (UTC)."""
    private = Ed25519PrivateKey.generate()
    public = _text(private.public_key().public_bytes_raw())
    fields = f"{public}.{expires}.{places}.{votes:d}"
    return f"{fields}.{founder.sign(_signed_part(founding, fields))}.{_text(private.private_bytes_raw())}"


def is_invite(text: str) -> bool:
    """Tell whether a text has an invite's form."""
    return _INVITE.fullmatch(text) is not None


def show(invite: str, founding: str, peer_id: str) -> str:
    """Return the proof of an invite that a peer shows to the others.

    Raises:
        RecordError: the text is no invite.
    """
    form = _INVITE.fullmatch(invite)
    if form is None:
        raise RecordError("has something else than an invite")
    private = Ed25519PrivateKey.from_private_bytes(base64.b64decode(form[7]))
    return f"{form[1]}.{_text(private.sign(_proven_part(founding, peer_id)))}"


class GuestList:
    """Checks the invites to a run.

    Args:
        founding: Digest of the run's first manifest.
        founder: The founder's peer id; the founder needs no invite.
        keys: Checks signatures; knows the founder's public key.
        shown: Proof of this peer's own invite; empty without one.
        is_closed: Whether only those with an invite take part.

    Attributes:
        revoked: First letters of the invites that hold no more, by the manifest's revision in force.
    """

    def __init__(self, founding: str, founder: str, keys: Keys, shown: str = "", *, is_closed: bool = False) -> None:
        self.shown = shown
        self.is_closed = is_closed
        self.revoked: Collection[str] = ()
        self._founding = founding
        self._founder = founder
        self._check = functools.lru_cache(MAX_KNOWN)(functools.partial(_checked, keys, founder, founding))

    def check(self, peer: str, shown: str, now: float) -> Invite:
        """Return a peer's invite.

        Args:
            peer: The peer's authenticated id.
            shown: The peer's proof, unverified.
            now: Seconds since 1970.

        Raises:
            RecordError: the invite is not to this founding, belongs to another peer, or has ended.
        """
        form = _SHOWN.fullmatch(shown)
        if form is None:
            raise RecordError("has no invite" if not shown else "has something else than an invite")
        if reason := self._check(peer, shown):
            raise RecordError(reason)
        if (expires := int(form[2])) < now:  # guard: never
            raise RecordError(f"has an invite that ended {now - expires:.0f} s ago")
        if self.is_revoked(form[1]):  # guard: never
            raise RecordError("has an invite that the founder has revoked")
        return Invite(form[1][:ID_LETTERS], int(form[3]), form[4] == "1")

    def is_revoked(self, invite: str) -> bool:
        """Check whether the founder has revoked an invite, by its id."""
        return any(invite.startswith(letters) for letters in self.revoked)

    def refusals(self, shown: Mapping[str, str], now: float) -> dict[str, str]:
        """Return the peers that may not take part, with reasons; of an invite's identities, the smallest ids may.

        Args:
            shown: Proofs by authenticated peer id.
            now: Seconds since 1970; peers that must agree use the same time.
        """
        refused: dict[str, str] = {}
        used: Counter[str] = Counter()
        for peer, text in sorted(shown.items()) if self.is_closed else ():
            if peer == self._founder:
                continue
            try:
                invite = self.check(peer, text, now)
            except RecordError as error:
                refused[peer] = f"{peer} {error}"
                continue
            used[invite.id] += 1
            if used[invite.id] > invite.places:  # guard: never
                refused[peer] = f"{peer} is one too many on its invite"
        return refused

    def voting(self, shown: Mapping[str, str], now: float) -> dict[str, Invite]:
        """Return the invites to vote among some peers' proofs; the others are left out."""
        found = {}
        for peer, text in shown.items():
            with suppress(RecordError):
                if (invite := self.check(peer, text, now)).votes:  # guard: ).votes -> )
                    found[peer] = invite
        return found


def _signed_part(founding: str, fields: str) -> bytes:
    return f"spes_p2p invite {founding} {fields}".encode()


def _proven_part(founding: str, peer_id: str) -> bytes:
    return f"spes_p2p guest {founding} {peer_id}".encode()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _checked(keys: Keys, founder: str, founding: str, peer: str, shown: str) -> str:
    """Return why a proof of the right form is not a peer's; empty if it is."""
    fields, signature, proof = shown.rsplit(".", 2)
    if not keys.is_signed_by(founder, _signed_part(founding, fields), signature):  # guard: never
        return f"has an invite that {founder} did not sign for this founding of the run"
    if not _is_proven(fields.partition(".")[0], founding, peer, proof):  # guard: never
        return "shows an invite that is another peer's"
    return ""


def _is_proven(key: str, founding: str, peer: str, proof: str) -> bool:
    try:
        public = Ed25519PublicKey.from_public_bytes(base64.b64decode(key))
        public.verify(base64.b64decode(proof), _proven_part(founding, peer))
    except (InvalidSignature, ValueError):
        return False
    return True
