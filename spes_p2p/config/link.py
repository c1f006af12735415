"""A run in one word, `spes:NAME.LETTERS`: its founder, up to three addresses and, in a closed run, an invite.

The letters survive chats, browsers and shells: they are base64 without `+`, `/` and `=`. Their checksum tells when a
part was lost.
"""

from __future__ import annotations

import base64
import html
import re
import zlib
from typing import Annotated

from pydantic import Field, ValidationError

from spes_p2p.config.checkpoint import Frozen
from spes_p2p.config.machine import RunId
from spes_p2p.errors import ConfigError

PeerId = Annotated[str, Field(min_length=40, max_length=64, pattern=r"^[1-9A-HJ-NP-Za-km-z]+$")]  # guard: first
Address = Annotated[str, Field(max_length=200, pattern=r"^(/[A-Za-z0-9.:_-]+)+$")]
"""The characters of a multiaddr; code that uses an address checks its form and its peer id."""
InviteText = Annotated[str, Field(max_length=768, pattern=r"^[A-Za-z0-9+/=.]*$")]
RecentText = Annotated[str, Field(pattern=r"^([0-9]{1,9}:[0-9a-f]{64})?$")]
MAX_ADDRESSES = 3
"""One address that answers is enough."""
MAX_LINK_CHARS = 4096
MAX_TEXT_BYTES = 8192
_FORM = re.compile(r"\W*(_*)spes:([a-z0-9][a-z0-9_-]*)\.([a-z0-9_-]+)\W*", re.IGNORECASE | re.ASCII)
_TAG = re.compile(r"</?[a-z]\w*(\s[^<>]*)?/?>", re.IGNORECASE)
_ADDED = "\"'<>`*\\="
"""Characters that chats and mails add to a long word, besides spaces and those that are not seen."""


class JoinLink(Frozen):
    """What a newcomer must know of a run before it can reach it."""

    run_id: RunId
    founder: PeerId
    addresses: tuple[Address, ...] = Field(min_length=1, max_length=MAX_ADDRESSES)
    invite: InviteText = ""
    recent: RecentText = ""
    """Round and digest of a recent certificate, or of the founding."""

    @property
    def founded(self) -> str:
        """The run as `--run-id` names it."""
        return "@".join(filter(None, (self.run_id, self.founder, self.recent)))

    def encode(self) -> str:
        """Return the link."""
        text = "\n".join([self.founder, self.invite, *self.addresses, *filter(None, [self.recent])]).encode()
        return f"spes:{self.run_id}.{base64.urlsafe_b64encode(zlib.compress(text, 9)).decode().rstrip('=')}"

    @classmethod
    def parse(cls, text: str) -> JoinLink:
        """Return the link that a text holds, whatever a chat has put around and between its letters.

        Raises:
            ConfigError: it is no link, or a part of it is missing.
        """
        word = _TAG.sub("", html.unescape(text[:MAX_LINK_CHARS]))
        word = "".join(each for each in word if each.isprintable() and each != " " and each not in _ADDED)
        form = _FORM.fullmatch(word)
        if form is None:
            raise ConfigError(f"{word[:60]!r} is no link to a run; copy the whole word that begins with spes:")
        try:
            founder, invite, *lines = _unpack(form[3].removesuffix(form[1])).split("\n")
            recent = lines.pop() if not lines[-1].startswith("/") else ""
            return cls(run_id=form[2], founder=founder, invite=invite, addresses=tuple(lines), recent=recent)
        except (ValueError, IndexError, zlib.error, ValidationError) as error:
            raise ConfigError(
                f"the link to run {form[2][:64]!r} is damaged, perhaps cut short; copy the whole word again"
            ) from error


def _unpack(letters: str) -> str:
    packed = base64.urlsafe_b64decode(letters + "=" * (-len(letters) % 4))
    unpacking = zlib.decompressobj()
    text = unpacking.decompress(packed, MAX_TEXT_BYTES)  # guard: , MAX_TEXT_BYTES ->
    if not unpacking.eof or unpacking.unused_data:
        raise ValueError("not whole")
    return text.decode("ascii")
