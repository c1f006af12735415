"""Serves the live page, in a thread with an event loop of its own: a slow browser holds up nothing else.

A browser asks for `/state.json` every other second, and gets 304 as long as nothing has changed. The page answers GET
alone, and a request changes nothing. A peer's page has verbs as well (`verbs`), behind a token; a monitor's has none.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from spes_p2p.errors import ConfigError
from spes_p2p.monitor.curves import Prometheus
from spes_p2p.monitor.events import Event
from spes_p2p.monitor.page.snapshot import MAX_EVENTS, PageState, Told, in_words, sections_of
from spes_p2p.monitor.page.verbs import Verbs

PAGE_FILE = "page"
"""In an output directory: the address of the page."""
LOOPBACK_HOST = "127.0.0.1"
MAX_CONNECTIONS = 400
"""Open at once: a peer's page must leave it the files and sockets that it trains with."""
BACKLOG = 200
START_SECONDS = 10.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,  # guard: POLICY -> ""
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Server": "spes",
}
TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
FILES = ("index.html", "page.css", "page.js", "charts.js", "controls.js", "uPlot.min.css", "uPlot.iife.min.js")


def static(name: str) -> bytes:
    """Return one of the page's files."""
    return (resources.files("spes_p2p.monitor.page") / "static" / name).read_bytes()


@dataclass(frozen=True)
class Place:
    """Where a page listens."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Place:
        """Return the place that `HOST:PORT`, `HOST` or `:PORT` names; ConfigError if it names none."""
        try:
            parts = urlsplit(f"//{text}")
            host, port = parts.hostname or LOOPBACK_HOST, parts.port or 0
        except ValueError as error:
            raise ConfigError(f"--page {text} is no HOST:PORT: {error}; try 127.0.0.1:8080") from error
        return cls(host, port)

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host == "localhost" or (_is_ip(self.host) and ipaddress.ip_address(self.host).is_loopback)

    def accepts(self, host: str) -> bool:
        """Tell whether a Host header names this page.

        A website whose name is made to point here (DNS rebinding) sends its own name, never an IP address. So a page
        that listens on more than loopback, perhaps behind another port, takes every IP address.
        """
        try:
            parts = urlsplit(f"//{host}")
            name, port = parts.hostname or "", parts.port or 80
        except ValueError:
            return False
        if parts.netloc.lower() != host.lower() or parts.username is not None:
            return False
        if self.is_loopback:
            return name in ("localhost", "127.0.0.1", "::1", self.host) and port == self.port
        return _is_ip(name) or name in ("localhost", self.host, socket.gethostname().lower())


def _is_ip(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Document:
    """What a path of the page answers with."""

    def __init__(self, body: bytes, kind: str, tag: str | None = None) -> None:
        self.body = body
        self.kind = kind
        self.tag = tag

    @cached_property
    def zipped(self) -> bytes:
        return gzip.compress(self.body, 6, mtime=0)


class _Server(web.Server):
    """Has at most `MAX_CONNECTIONS`: one more closes that whose newest request is the oldest, or that has brought none.

    So neither silent connections nor a flood of them keep the others out.
    """

    def __init__(self, answer: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]) -> None:
        super().__init__(answer, handler_cancellation=True, access_log=None)
        self._quiet: dict[web.RequestHandler, None] = {}
        """Connections, that which has been quiet longest first."""

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._quiet[handler] = None
        if len(self._quiet) > MAX_CONNECTIONS:  # guard: never
            longest = next(iter(self._quiet))
            del self._quiet[longest]
            longest.force_close()

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._quiet.pop(handler, None)

    def asked(self, handler: web.RequestHandler, *, by_owner: bool) -> None:
        """Take note of a request; the owner's connections are closed for no other's."""
        self._quiet.pop(handler, None)
        if by_owner:  # guard: never
            return
        self._quiet[handler] = None


class Page:
    """The live page of one process.

    `show` takes a state by one reference and returns at once: what the page costs is spent in its own thread, and only
    while someone looks. Start it after the last fork of the process.

    Args:
        where: `HOST:PORT`; port 0, or none, lets the system choose.
        state: What to show first.
        output: Directory for the file with the page's address. A page without a port of its own takes the one that
            this file names, if it is free, so that a restart keeps its address.
        verbs: What its owner may do by it; None for nothing.

    Attributes:
        address: The page's URL.

    Raises:
        ConfigError: it cannot listen there.
    """

    def __init__(self, where: str, state: PageState, output: Path, verbs: Verbs | None = None) -> None:
        place = Place.parse(where)
        self._socket = _listen(place, output / PAGE_FILE)
        self._place = Place(place.host, self._socket.getsockname()[1])
        self._verbs = verbs
        self._told: Told = ()
        self._prometheus = Prometheus()
        self._newest: tuple[PageState, Told, Document] | None = None
        self._files = {f"/{name}": Document(static(name), TYPES[name.rpartition(".")[2]]) for name in FILES}
        self._files["/"] = self._files.pop("/index.html")
        self.show(state)
        self._loop = asyncio.SelectorEventLoop()
        self._ready = threading.Event()
        self._stop = asyncio.Event()
        self._is_closed = False
        held = self._socket.fileno()
        # A killed process cannot end its forks, which would keep the port.
        os.register_at_fork(after_in_child=lambda: None if self._is_closed else os.close(held))
        host = f"[{place.host}]" if ":" in place.host else place.host
        if place.host in ("0.0.0.0", "::"):
            host = socket.gethostname()
        self.address = f"http://{host}:{self._place.port}/"
        self._thread = threading.Thread(target=self._run, name="page", daemon=True)
        self._thread.start()
        self._ready.wait(START_SECONDS)
        (output / PAGE_FILE).write_text(f"{self.address}\n")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self._place.is_loopback

    def show(self, state: PageState) -> None:
        """Show a state; from any thread."""
        self._state, self._shown_at = state, time.monotonic()

    def take(self, event: Event) -> None:
        """Take an event, to be told with the next state; from any thread."""
        self._prometheus.take(event)
        if words := in_words(event):
            self._told = (*self._told, (round(event["time"]), words))[-MAX_EVENTS:]

    def close(self) -> None:
        """End all connections and free the port. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(START_SECONDS)

    # ------------------------------------------------------------------ the page's thread

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        self._server = _Server(self._answer)
        runner = web.ServerRunner(self._server, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, self._socket, backlog=BACKLOG).start()
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        is_owners = self._verbs is not None and self._verbs.is_owners(request)
        self._server.asked(request.protocol, by_owner=is_owners)
        response = self._refusal(request) or await self._answer_own(request)
        response.headers.update(HEADERS)
        return response

    def _refusal(self, request: web.BaseRequest) -> web.Response | None:
        """Refuse what no page of ours asks."""
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._place.accepts(host):  # guard: never
            return web.Response(status=421, text="this page has another name\n")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):  # guard: never
            return web.Response(status=403, text="another site's page may not ask\n")
        if not _is_own_site(request):  # guard: never
            return web.Response(status=403, text="another site's page may not ask\n")
        if request.body_exists and not (self._verbs and self._verbs.takes(request)):  # guard: never
            return web.Response(status=413, text="no request here has a body\n", headers={"Connection": "close"})
        return None

    async def _answer_own(self, request: web.BaseRequest) -> web.Response:
        if self._verbs is not None and (verb := self._verbs.named(request.path)):
            return await self._verbs.answer(request, verb)
        if request.path not in (*self._files, "/state.json", "/metrics"):
            return web.Response(status=404, text="Not Found\n")
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, text="Method Not Allowed\n", headers={"Allow": "GET, HEAD"})
        if request.path == "/metrics":
            own = self._state.own
            own_bytes = (own.sent_bytes, own.received_bytes) if own is not None else None
            text = self._prometheus.render(self._state.view, own_bytes)
            return web.Response(body=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})
        document = self._files.get(request.path) or self._state_document()
        headers = {"Vary": "Accept-Encoding"}
        if document.tag is not None:
            headers |= {"ETag": document.tag, "Age": str(int(time.monotonic() - self._shown_at))}
            if request.headers.get("If-None-Match") == document.tag:
                return web.Response(status=304, headers=headers)
        headers["Content-Type"] = f"{document.kind}; charset=utf-8"
        if "gzip" not in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=document.body, headers=headers)
        return web.Response(body=document.zipped, headers=headers | {"Content-Encoding": "gzip"})

    def _state_document(self) -> Document:
        """Return the newest state; its tag says nothing of when it was made."""
        state, told = self._state, self._told
        if self._newest is None or self._newest[0] is not state or self._newest[1] is not told:
            shown = state
            if not self.is_loopback:  # guard: never
                shown = replace(state, link="")  # it has addresses
            sections = sections_of(shown, told)
            timeless = sections | {"now": sections["now"] | {"at": 0}}
            tag = f'"{hashlib.sha256(_encoded(timeless)).hexdigest()[:32]}"'
            self._newest = state, told, Document(_encoded(sections), "application/json", tag)
        return self._newest[2]


def check_place(where: str) -> None:
    """Raise ConfigError for a `--page` on which no page can listen, before anything else is begun."""
    if where != "off" and (place := Place.parse(where)).port:
        _listen(place, Path(os.devnull)).close()


def _listen(place: Place, kept: Path) -> socket.socket:
    """Return a socket that listens at a place, on the port of an earlier start if none is asked for."""
    ports = [place.port]
    if not place.port and kept.is_file():
        earlier = kept.read_text(errors="replace").strip().rstrip("/").rpartition(":")[2]
        ports = [int(earlier), 0] if earlier.isdigit() and int(earlier) < 65536 else ports
    for port in ports:
        try:
            family, _, _, _, address = socket.getaddrinfo(place.host, port, type=socket.SOCK_STREAM)[0]
            takes_both = place.host == "::" and socket.has_dualstack_ipv6()
            return socket.create_server(address[:2], family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
        except UnicodeError as error:
            raise ConfigError(f"{place.host!r} is no name of a host; choose another --page") from error
        except OSError as error:
            failure = error
    reason = os.strerror(failure.errno) if failure.errno and failure.errno > 0 else failure.strerror
    raise ConfigError(
        f"the page cannot listen on {place.host}:{place.port}: {reason}; choose another --page"
    ) from failure


def _is_own_site(request: web.BaseRequest) -> bool:
    """Tell whether a request comes from the page itself, from no page at all, or is a click on a link to the page."""
    site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode")
    is_link = mode == "navigate" and request.headers.get("Sec-Fetch-Dest") == "document" and request.path == "/"
    return site in ("same-origin", "none") or is_link


def _encoded(sections: Any) -> bytes:
    return json.dumps(sections, allow_nan=False, separators=(",", ":")).encode()
