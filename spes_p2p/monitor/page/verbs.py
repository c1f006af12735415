"""The verbs of a peer's page: POST /control/VERB with the owner's token, from this machine alone.

The server has checked Host, Origin and site before. The token is in a file that only the owner can read, and a header
of our own carries it, which no form and no other site's page can send.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from aiohttp import web

from spes_p2p.errors import ConfigError
from spes_p2p.presentation import printable

TOKEN_FILE = "control-token"
"""In a peer's output: the token of its verbs, for its owner's eyes alone."""
TOKEN_HEADER = "X-Spes-Token"
TOKEN_BYTES = 32
PATH = "/control/"
_VERB = re.compile(PATH + "([a-z]+)")
MAX_BODY_BYTES = 4096
BODY_SECONDS = 5.0
CLOSE = {"Connection": "close"}
NO_VALUES = 'the values are no JSON object; send one, as in {"for": "2h"}'


class Verbs:
    """What the owner of a peer may do by its page.

    Args:
        act: Does a verb with its values and returns the state as JSON's types. It raises ConfigError for what does not
            fit, and is called in a thread of its own, because it writes a file.
        output: The peer's folder, which gets a file with a new token.

    Raises:
        ConfigError: the token's file cannot be written.
    """

    def __init__(self, act: Callable[[str, Mapping[str, Any]], Mapping[str, Any]], output: Path) -> None:
        self._act = act
        self.token = _new_token(output / TOKEN_FILE)

    def named(self, path: str) -> str | None:
        """Return the verb that a path names; None if it names none."""
        form = _VERB.fullmatch(path)
        return form[1] if form else None

    def is_owners(self, request: web.BaseRequest) -> bool:
        """Check whether a request carries the token."""
        given = request.headers.get(TOKEN_HEADER, "")
        return hmac.compare_digest(given.encode(errors="replace"), self.token.encode())

    def takes(self, request: web.BaseRequest) -> bool:
        """Check whether a request may have a body: it is a verb's."""
        return request.method == "POST" and request.path.startswith(PATH)

    async def answer(self, request: web.BaseRequest, verb: str) -> web.Response:
        """Do a verb, and return the peer's state."""
        if request.method != "POST":
            return _refusal(405, "verbs are posted")
        if not _is_near(request):  # guard: never
            return _refusal(403, "verbs are for this machine alone")
        if not self.is_owners(request):  # guard: never
            return _refusal(
                401, f"this needs the token in {TOKEN_FILE}; `spes ctl link` prints the page's link with it"
            )
        length = request.content_length
        if request.body_exists and (length is None or length > MAX_BODY_BYTES):  # guard: never
            return _refusal(413, f"a verb's values take {MAX_BODY_BYTES} bytes at most")
        try:
            async with asyncio.timeout(BODY_SECONDS):
                values = _values(await request.content.readexactly(length) if length else b"")
            state = await asyncio.to_thread(self._act, verb, values)
        except (TimeoutError, asyncio.IncompleteReadError):
            return _refusal(408, "the values did not come")
        except ConfigError as error:
            return _refusal(400, str(error))
        return web.json_response(state)


def _values(body: bytes) -> Mapping[str, Any]:
    """Return a verb's values, none of an empty body; ConfigError if it is no JSON object."""
    try:
        values = json.loads(body) if body else {}
        if isinstance(values, dict):
            return values
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{NO_VALUES}: {error}") from error
    raise ConfigError(NO_VALUES)


def _refusal(status: int, reason: str) -> web.Response:
    return web.Response(status=status, text=f"{printable(reason)}\n", headers=CLOSE)


def _is_near(request: web.BaseRequest) -> bool:
    """Check whether a request comes from this machine: over loopback, or from the very address that it was sent to."""
    try:
        remote = ipaddress.ip_address(request.remote or "")
        here = ipaddress.ip_address(request.get_extra_info("sockname")[0])
    except (TypeError, ValueError):
        return False
    return (getattr(remote, "ipv4_mapped", None) or remote).is_loopback or remote == here


def _new_token(file: Path) -> str:
    """Write a new token. An old one is void: of a peer that has ended, another user's process may have been told it."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    try:
        file.unlink(missing_ok=True)
        opened = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)  # guard: 0o600 -> 0o666
        with os.fdopen(opened, "w") as stream:
            stream.write(token + "\n")
    except OSError as error:
        raise ConfigError(
            f"cannot write {file}: {error.strerror}; make --output writable, or set --page off"
        ) from error
    return token
