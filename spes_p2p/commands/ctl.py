"""`spes ctl VERB`: the verbs of a running peer's page, from a terminal or a script."""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from spes_p2p.config.commands import CtlConfig
from spes_p2p.config.controls import duration, words
from spes_p2p.errors import ConfigError
from spes_p2p.presentation import printable, say

ANSWER_SECONDS = 20.0
RUNS = "runs"
"""Where peers' output folders lie by default."""
# The names of the page's files and header, which this does not import: aiohttp takes half a second.
PAGE_FILE, TOKEN_FILE, TOKEN_HEADER = "page", "control-token", "X-Spes-Token"


def main(config: CtlConfig) -> int:
    """Ask the peer and print what it does now; return the exit code."""
    values, output = _values(config), config.output or _only_peer(Path(RUNS))
    host, port, address = _page(output)
    if config.verb == "link":
        _ask((host, port), "status", {}, output)  # a link to a peer that has ended is of no use
        say(f"{address}#token={_token(output)}")
        return 0
    for line in told(_ask((host, port), config.verb, values, output)):
        say(line)
    return 0


def told(state: Mapping[str, Any]) -> list[str]:
    """Return a peer's state in lines."""
    lines = [f"{state['state']}: {state['reason']}"]
    for name in ("limits", "rules"):
        chosen = {key: value for key, value in state[name].items() if not _is_default(value)}
        if chosen:
            lines.append(f"{name}: " + ", ".join(f"{key}={_word(key, value)}" for key, value in chosen.items()))
    return [printable(line) for line in lines]


def _is_default(value: object) -> bool:
    return value is None or value is True or value == []


def _word(key: str, value: object) -> str:
    if key == "duty" and isinstance(value, float):
        return f"{100 * value:g}%"
    return ",".join(map(str, value)) if isinstance(value, list) else "no" if value is False else str(value)


def _values(config: CtlConfig) -> dict[str, Any]:
    """Return a verb's values.

    Raises:
        ConfigError: they do not go with the verb.
    """
    given = config.values
    if config.verb in ("set", "rules"):
        if not given:
            raise ConfigError(f"{config.verb} needs NAME=VALUE, as in `spes ctl set threads=2`; see --help")
        return words(given)
    if config.verb == "pause" and given:
        duration(given[0])
        if len(given) == 1:
            return {"for": given[0]}
    if given:
        raise ConfigError(f"{config.verb} takes no {given[-1][:60]!r}; leave it out")
    return {}


def _only_peer(runs: Path) -> Path:
    """Return the output folder of the peer in `runs`, of several that of the only one whose page answers.

    Raises:
        ConfigError: there is none, or there are several.
    """
    # Of `spes peer` and `join`, of `local`, and of `cluster`.
    found = sorted(token.parent for place in ("*", "*/*", "*/*/*") for token in runs.glob(f"{place}/{TOKEN_FILE}"))
    if len(found) > 1:
        found = [folder for folder in found if _answers(folder)]
    if not found:
        raise _no_page(f"{runs}/")
    if len(found) > 1:
        raise ConfigError(f"several peers in {runs}/: name one, as in --output {found[0]}")
    return found[0]


def _answers(output: Path) -> bool:
    """Tell whether a peer's page takes connections."""
    try:
        host, port, _ = _page(output)
        socket.create_connection((host, port), ANSWER_SECONDS, source_address=(host, 0)).close()
    except (OSError, ConfigError):
        return False
    return True


def _page(output: Path) -> tuple[str, int, str]:
    """Return host, port and address of a peer's page.

    Raises:
        ConfigError: the folder names none.
    """
    try:
        address = (output / PAGE_FILE).read_text(encoding="utf-8").strip()
        parts = urlsplit(address)
        port = parts.port
    except (OSError, ValueError) as error:
        raise _no_page(output) from error
    if port is None:
        raise ConfigError(f"{output / PAGE_FILE} holds no address; start the peer again")
    try:
        host = str(ipaddress.ip_address(parts.hostname or ""))
    except ValueError:  # this machine's name: the page listens on all addresses
        host = "127.0.0.1"
    return host, port, address


def _no_page(where: object) -> ConfigError:
    return ConfigError(
        f"no peer with a page in {where}; one that has just started has it within a minute; else name its --output, "
        f"and start it without --page off"
    )


def _token(output: Path) -> str:
    try:
        return (output / TOKEN_FILE).read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise ConfigError(f"no peer with controls runs in {output}; name the --output of a running peer") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {output / TOKEN_FILE}: {error}; run this as the peer's user") from error


def _ask(place: tuple[str, int], verb: str, values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """Send a verb to the peer's page; return its answer.

    Raises:
        ConfigError: no peer answers, or it refuses.
    """
    body = json.dumps(values) if values else None
    headers = {TOKEN_HEADER: _token(output)}
    # From an address to itself: only on this machine, of which no other may have the token.
    # guard: , source_address=(place[0], 0) ->
    wire = http.client.HTTPConnection(*place, ANSWER_SECONDS, source_address=(place[0], 0))
    try:
        wire.request("POST", f"/control/{verb}", body, headers)
        answer = wire.getresponse()
        text = answer.read(2**24).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise ConfigError(f"the peer in {output} does not answer on port {place[1]}: {error}; start it") from error
    finally:
        wire.close()
    if answer.status == 404:
        raise ConfigError(f"port {place[1]} serves no peer's page; name the --output of a running peer")
    if answer.status != 200:
        raise ConfigError(text.strip()[:400] or f"the peer answers {answer.status}; see its log")
    try:
        return dict(json.loads(text))
    except ValueError as error:
        raise ConfigError(f"what answers on port {place[1]} is no peer; start the peer in {output} again") from error
