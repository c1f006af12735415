"""Serves the live page, in a thread with an event loop of its own: a slow browser holds up nothing else.

The page answers GET alone, and a request changes nothing. A peer's page has verbs as well (`verbs`), behind a token; a
monitor's has none.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import ipaddress
import json
import logging
import os
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from aiohttp import web

from spes_p2p.errors import ConfigError
from spes_p2p.monitor.curves import PrometheusText
from spes_p2p.monitor.events import Event
from spes_p2p.monitor.page.snapshot import MAX_EVENTS, PageState, Sections, Snapshots, difference
from spes_p2p.monitor.page.verbs import Verbs

log = logging.getLogger(__name__)

PAGE_FILE = "page"
"""In an output directory: the address of the page."""
LOOPBACK_HOST = "127.0.0.1"
MAX_VIEWERS = 200
MAX_CONNECTIONS = 2 * MAX_VIEWERS
"""Open at once: a peer's page must leave it the files and sockets that it trains with."""
MAX_KEPT = 8
"""Connections beyond those, for requests with the owner's token."""
TOKEN_SECONDS = 5.0
"""Time for such a connection to bring one."""
MAX_WAITING = 4
"""Messages kept for a viewer that reads slowly; then it is sent the whole state anew."""
ALIVE_SECONDS = 15.0
WRITE_SECONDS = 20.0
START_SECONDS = 10.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,  # guard: page-policy
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
    "/charts.js": ("charts.js", "text/javascript; charset=utf-8"),
    "/controls.js": ("controls.js", "text/javascript; charset=utf-8"),
    "/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
}
"""The page's files by path. No path reaches the file system."""


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
        """Return the place that `HOST:PORT`, `HOST` or `:PORT` names.

        Raises:
            ConfigError: it names none.
        """
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
        self._state = state
        self._verbs = verbs
        self._events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self._snapshots = Snapshots()
        self._prometheus = PrometheusText()
        self._shown: Sections = {}
        self._whole: bytes | None = None
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self._asked: set[web.RequestHandler] = set()
        """Connections that have brought a request."""
        self._untold: list[web.RequestHandler] = []
        """Connections in the kept places that have not brought the token, oldest first."""
        self._files = {path: (static(name), kind) for path, (name, kind) in FILES.items()}
        self._zipped = {path: gzip.compress(data, 6, mtime=0) for path, (data, _) in self._files.items()}
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
        self._state = state
        if self._viewers and not self._is_closed:
            self._loop.call_soon_threadsafe(self._publish)

    def take(self, event: Event) -> None:
        """Take an event, to be told with the next state; from any thread."""
        self._prometheus.take(event)
        self._events.append(event)

    def close(self) -> None:
        """Say goodbye to all viewers and free the port. Idempotent."""
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
        app = web.Application(middlewares=[self._check], client_max_size=1)
        app.on_response_prepare.append(_add_headers)
        for path in FILES:
            app.router.add_get(path, self._file)
        app.router.add_get("/events", self._stream, allow_head=False)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/state.json", self._json)
        if self._verbs is not None:
            self._verbs.add_to(app)
        runner = web.AppRunner(app, handle_signals=False, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        web_server = runner.server
        assert web_server is not None
        listening = await self._loop.create_server(lambda: _Door(web_server, self._keep_place), sock=self._socket)
        self._ready.set()
        silent: set[web.RequestHandler] = set()
        while not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), ALIVE_SECONDS)
            is_open = set(web_server.connections)
            for connection in is_open & silent - self._asked:  # guard: page-silence
                connection.force_close()
            silent, self._asked = is_open - self._asked, self._asked & is_open
            for viewer in self._viewers:
                if viewer.empty() and not self._stop.is_set():
                    _hand(viewer, b": alive\n\n")  # a write finds out which viewers have gone
        for viewer in self._viewers:
            _hand(viewer, None)
        listening.close()
        await runner.cleanup()

    def _keep_place(self, connection: web.RequestHandler) -> bool:
        """Let a connection beyond the most wait for its token, in place of the one that has waited longest."""
        if self._verbs is None:
            return False
        if len(self._untold) >= MAX_KEPT:
            self._turn_out(self._untold[0])
        self._untold.append(connection)
        self._loop.call_later(TOKEN_SECONDS, self._turn_out, connection)
        return True

    def _turn_out(self, connection: web.RequestHandler) -> None:
        if connection in self._untold:
            self._untold.remove(connection)
            connection.force_close()

    @web.middleware
    async def _check(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuse what no page of ours asks."""
        self._asked.add(request.protocol)
        if request.protocol in self._untold and self._verbs is not None:
            if not self._verbs.is_owners(request):  # guard: page-places
                return web.Response(status=503, text="too many connections\n", headers={"Connection": "close"})
            self._untold.remove(request.protocol)
        host, origin = request.headers.get("Host", ""), request.headers.get("Origin")
        if not self._place.accepts(host):  # guard: page-host
            return web.Response(status=421, text="this page has another name\n")
        if origin is not None and origin not in (f"http://{host}", f"https://{host}"):  # guard: page-origin
            return web.Response(status=403, text="another site's page may not ask\n")
        if not _is_own_site(request):  # guard: page-site
            return web.Response(status=403, text="another site's page may not ask\n")
        if request.body_exists and not (self._verbs and self._verbs.takes(request)):  # guard: page-body
            return web.Response(status=413, text="no request here has a body\n", headers={"Connection": "close"})
        try:
            return await handler(request)
        except web.HTTPException as error:
            return web.Response(status=error.status, text=f"{error.reason}\n")

    async def _file(self, request: web.Request) -> web.Response:
        data, kind = self._files[request.path]
        headers = {"Content-Type": kind, "Vary": "Accept-Encoding"}
        if "gzip" in request.headers.get("Accept-Encoding", ""):
            return web.Response(body=self._zipped[request.path], headers={**headers, "Content-Encoding": "gzip"})
        return web.Response(body=data, headers=headers)

    async def _json(self, request: web.Request) -> web.Response:
        return web.Response(body=_encoded(self._newest()), content_type="application/json")

    async def _metrics(self, request: web.Request) -> web.Response:
        state = self._state
        own_bytes = (state.own.sent_bytes, state.own.received_bytes) if state.own is not None else None
        text = self._prometheus.render(state.view, own_bytes)
        kind = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=text.encode(), headers=kind)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Send the whole state, then what changes, as server-sent events."""
        if len(self._viewers) >= MAX_VIEWERS:  # guard: page-viewers
            return web.Response(status=503, text="too many viewers; try again later\n", headers={"Retry-After": "30"})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        viewer: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_WAITING)
        self._publish()
        _hand(viewer, self._whole_message())
        self._viewers.add(viewer)
        try:
            while (message := await viewer.get()) is not None:
                async with asyncio.timeout(WRITE_SECONDS):
                    await response.write(message)
        except (ConnectionError, TimeoutError):
            log.debug("a viewer has gone")
        finally:
            self._viewers.discard(viewer)
        return response

    def _newest(self) -> Sections:
        """Return the newest state's sections."""
        while self._events:
            self._snapshots.take(self._events.popleft())
        state = self._state
        if not self.is_loopback:  # guard: link-at-home
            state = replace(state, link="")  # it has addresses
        return self._snapshots.of(state)

    def _publish(self) -> None:
        """Send what has changed since the last call to all viewers."""
        newest = self._newest()
        changes = difference(self._shown, newest)
        if not changes:
            return
        self._shown = newest
        self._whole = None
        message = _message("change", changes)
        for viewer in self._viewers:
            if viewer.full():
                while not viewer.empty():
                    viewer.get_nowait()
                _hand(viewer, self._whole_message())
            else:
                _hand(viewer, message)

    def _whole_message(self) -> bytes:
        if self._whole is None:
            self._whole = _message("whole", self._shown)
        return self._whole


class _Door(asyncio.Protocol):
    """Hands a new connection to the server, or closes it where there are too many and no place is kept for it."""

    def __init__(self, web_server: web.Server, keep_place: Callable[[web.RequestHandler], bool]) -> None:
        self._web_server = web_server
        self._keep_place = keep_place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        handler, is_full = self._web_server(), len(self._web_server.connections) >= MAX_CONNECTIONS
        if is_full and not self._keep_place(handler):  # guard: page-connections
            transport.close()
            return
        cast(asyncio.Transport, transport).set_protocol(handler)
        handler.connection_made(transport)


def check_place(where: str) -> None:
    """Refuse a `--page` on which no page can listen, before anything else is begun.

    Raises:
        ConfigError: it is no place, or another program has its port.
    """
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
            return socket.create_server(address[:2], family=family, backlog=MAX_VIEWERS, dualstack_ipv6=takes_both)
        except UnicodeError as error:
            raise ConfigError(f"{place.host!r} is no name of a host; choose another --page") from error
        except OSError as error:
            failure = error
    reason = os.strerror(failure.errno) if failure.errno and failure.errno > 0 else failure.strerror
    raise ConfigError(
        f"the page cannot listen on {place.host}:{place.port}: {reason}; choose another --page"
    ) from failure


def _is_own_site(request: web.Request) -> bool:
    """Tell whether a request comes from the page itself, from no page at all, or is a click on a link to the page."""
    site, mode = request.headers.get("Sec-Fetch-Site", "none"), request.headers.get("Sec-Fetch-Mode")
    is_link = mode == "navigate" and request.headers.get("Sec-Fetch-Dest") == "document" and request.path == "/"
    return site in ("same-origin", "none") or is_link


async def _add_headers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    response.headers.popall("Server", None)


def _hand(viewer: asyncio.Queue[bytes | None], message: bytes | None) -> None:
    if viewer.full():
        viewer.get_nowait()
    viewer.put_nowait(message)


def _encoded(sections: Mapping[str, Any]) -> bytes:
    return json.dumps(sections, allow_nan=False, separators=(",", ":")).encode()


def _message(kind: str, sections: Mapping[str, Any]) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encoded(sections) + b"\n\n"
