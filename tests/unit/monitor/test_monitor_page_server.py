"""The page's server over raw HTTP: what it refuses, what it sends, and that nothing of it is left behind."""

import contextlib
import gzip
import http.client
import json
import multiprocessing
import re
import socket
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest
from pydantic import ValidationError

from spes_p2p.config.commands import MonitorConfig
from spes_p2p.errors import ConfigError
from spes_p2p.monitor.page import server
from spes_p2p.monitor.page.server import Page, Place
from spes_p2p.monitor.page.snapshot import Own, PageState
from spes_p2p.monitor.view import SwarmView
from tests.unit.monitor.swarms import peer_id, small_history

RUN = {"run_id": "run"}


def state(view: SwarmView | None = None, own: Own | None = None) -> PageState:
    return PageState(view or small_history(3)[-1], RUN, own)


@pytest.fixture
def page(tmp_path):
    shown = Page("127.0.0.1", state(), tmp_path)
    yield shown
    shown.close()


def port_of(page: Page) -> int:
    return int(page.address.rstrip("/").rpartition(":")[2])


def ask(page: Page, text: str) -> tuple[int, dict[str, str], bytes]:
    """Send a request as it stands, `HOST` replaced by the page's; return status, headers and body."""
    port = port_of(page)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as wire:
        head, _, body = text.partition("\n\n")
        request = head.replace("HOST", f"127.0.0.1:{port}").replace("\n", "\r\n") + "\r\n\r\n" + body
        wire.sendall(request.encode())
        answer = http.client.HTTPResponse(wire, method=text.split(" ")[0])
        answer.begin()
        return answer.status, dict(answer.headers), answer.read()


def get(path: str, *headers: str, host: str = "HOST", method: str = "GET") -> str:
    return "\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", "Connection: close", *headers])


LINK = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document")
# What is asked, and the status of the answer.
CASES = {
    "foreign host": (get("/", host="evil.example"), 421),
    "foreign host with the port": (get("/", host="evil.example:PORT"), 421),
    "foreign host, metrics": (get("/metrics", host="evil.example"), 421),
    "host that begins like ours": (get("/", host="127.0.0.1:PORT.evil.example"), 421),
    "host with a user": (get("/", host="127.0.0.1@evil.example:PORT"), 421),
    "another port": (get("/", host="127.0.0.1:1"), 421),
    "another address": (get("/", host="10.0.0.1:PORT"), 421),
    "no host": ("GET / HTTP/1.0", 421),
    "empty host": (get("/", host=""), 421),
    "foreign origin": (get("/state.json", "Origin: http://evil.example"), 403),
    "null origin": (get("/state.json", "Origin: null"), 403),
    "empty origin": (get("/state.json", "Origin:"), 403),
    "origin of another port": (get("/state.json", "Origin: http://127.0.0.1:1"), 403),
    "origin that begins like ours": (get("/", "Origin: http://HOST.evil.example"), 403),
    "cross-site script": (get("/state.json", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors"), 403),
    "same-site, another port": (get("/state.json", "Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors"), 403),
    "cross-site frame": (get("/", *LINK[:2], "Sec-Fetch-Dest: iframe"), 403),
    "link to the data": (get("/state.json", *LINK), 403),
    "preflight": (get("/", "Access-Control-Request-Method: POST", method="OPTIONS"), 405),
    "preflight of another site": (get("/", "Origin: http://evil.example", method="OPTIONS"), 403),
    "verb": (get("/", method="POST"), 405),
    "verb with a large body": (get("/pause", "Content-Length: 50000", method="POST"), 413),
    "unknown verb": (get("/pause", method="POST"), 404),
    "put": (get("/page.js", method="PUT"), 405),
    "delete": (get("/", method="DELETE"), 405),
    "body on a get": (get("/", "Content-Length: 3") + "\n\nabc", 413),
    "endless body on a get": (get("/", "Transfer-Encoding: chunked") + "\n\n3\r\nabc\r\n", 413),
    "path upwards": (get("/../etc/passwd"), 404),
    "encoded path upwards": (get("/%2e%2e/%2e%2e/etc/passwd"), 404),
    "path through a file": (get("/page.js/../../server.py"), 404),
    "backslashes": (get("/..\\server.py"), 404),
    "null byte": (get("/page.js%00.html"), 404),
    "code": (get("/server.py"), 404),
    "two slashes": (get("//evil.example/"), 404),
    "unknown": (get("/pause"), 404),
    "file by its name": (get("/index.html"), 404),
}


@pytest.mark.parametrize("case", CASES)
def test_what_no_page_of_ours_asks_is_refused(page, case):
    text, status = CASES[case]
    answer, headers, body = ask(page, text.replace("PORT", str(port_of(page))))
    assert answer == status, body
    assert headers["Content-Security-Policy"] == server.POLICY and headers["X-Content-Type-Options"] == "nosniff"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert b"root:" not in body and len(body) < 200


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        (get("/"), b"<!doctype html>"),
        (get("/", host="localhost:PORT"), b"<!doctype html>"),
        (get("/", host="[::1]:PORT"), b"<!doctype html>"),
        (get("/", *LINK), b"<!doctype html>"),
        (get("/", "Origin: http://HOST"), b"<!doctype html>"),
        (get("/page.js", "Sec-Fetch-Site: same-origin"), b'"use strict"'),
        (get("/uPlot.iife.min.js"), b"/*! https://github.com/leeoniya/uPlot"),
        (get("/state.json"), b"{"),
        (get("/metrics"), b"# HELP"),
        (get("/", method="HEAD"), b""),
    ],
)
def test_what_the_page_asks_is_answered(page, text, begins):
    status, headers, body = ask(page, text.replace("PORT", str(port_of(page))))
    assert status == 200 and body.startswith(begins)
    assert "unsafe" not in headers["Content-Security-Policy"] and headers["Server"] == "spes"


def test_a_public_page_takes_addresses_and_its_own_name_but_no_foreign_name():
    place = Place("monitor.example.org", 8080)
    for host in ("203.0.113.7:8080", "127.0.0.1:9000", "[2001:db8::1]:8080", "monitor.example.org", "localhost:8080"):
        assert place.accepts(host), host
    for host in ("evil.example:8080", "203.0.113.7.evil.example", "", "monitor.example.org.evil.example"):
        assert not place.accepts(host), host
    assert Place.parse("[::1]:80").is_loopback and Place.parse(":81") == Place("127.0.0.1", 81)
    assert not Place.parse("0.0.0.0").is_loopback


def test_the_page_has_no_address_of_a_peer_and_no_whole_id(page):
    _, _, body = ask(page, get("/state.json"))
    text = body.decode()
    assert not re.search(r"/ip[46]/|/tcp/|\d+\.\d+\.\d+\.\d+", text) and peer_id(0) not in text
    assert peer_id(0)[-10:] in text


@pytest.mark.parametrize(
    "where", ["nowhere:0x", "a b:1", "host:123456", "http://host/", "host:80:90", "127.0.0.1:80/x"]
)
def test_a_place_that_is_none_is_refused(where):
    with pytest.raises(ValidationError, match="page"):
        MonitorConfig(run_id="run", initial_peers=["x"], page=where)


def test_a_port_that_is_taken_is_one_line_with_the_remedy(page, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(ConfigError, match=r"Address already in use; choose another --page"):
        Page(f"127.0.0.1:{port_of(page)}", state(), other)
    with pytest.raises(ConfigError, match="choose another --page"):
        Page("no-such-host.invalid:0", state(), other)
    with pytest.raises(ConfigError, match=r"try 127\.0\.0\.1:8080"):
        Page("127.0.0.1:99999", state(), other)


def test_a_restart_keeps_the_pages_address_if_its_port_is_free(tmp_path):
    first = Page("127.0.0.1", state(), tmp_path)
    assert (tmp_path / "page").read_text() == f"{first.address}\n"
    first.close()
    first.close()
    second = Page("127.0.0.1", state(), tmp_path)
    assert second.address == first.address
    third = Page("127.0.0.1", state(), tmp_path)
    assert third.address != second.address, "taken"
    second.close()
    third.close()


def test_a_fork_does_not_keep_the_port(page):
    context = multiprocessing.get_context("fork")
    started, ended = context.Event(), context.Event()

    def stay() -> None:
        started.set()
        ended.wait()

    child = context.Process(target=stay, daemon=True)
    child.start()
    assert started.wait(60)
    page.close()
    try:
        with socket.create_server(("127.0.0.1", port_of(page))):
            assert child.is_alive()
    finally:
        ended.set()
        child.join(20)


def test_who_has_the_newest_state_is_not_sent_it_again(page):
    view = small_history(3)[-1]
    status, headers, body = ask(page, get("/state.json", "Accept-Encoding: gzip"))
    same = f"If-None-Match: {headers['ETag']}"
    assert status == 200 and json.loads(gzip.decompress(body))["now"]["round"] == 4
    assert int(headers["Age"]) < 10 and headers["Vary"] == "Accept-Encoding"
    page.show(state(replace(view, now=view.now + 1.0)))
    status, headers, body = ask(page, get("/state.json", same))
    assert (status, body) == (304, b""), "the time is no news"
    page.take({"kind": "control", "time": 5.0, "state": "paused", "reason": "as asked"})
    status, headers, body = ask(page, get("/state.json", same))
    assert status == 200 and json.loads(body)["events"][-1] == [5, "this peer: paused; as asked"]
    assert json.loads(body)["now"]["at"] == view.now + 1.0
    page.show(state(small_history(4)[-1]))
    status, _, body = ask(page, get("/state.json", f"If-None-Match: {headers['ETag']}"))
    assert status == 200 and list(json.loads(body)["rounds"]) == ["1", "2", "3", "4"]


def test_an_answer_says_how_old_the_state_is(page, monkeypatch):
    """By it a browser tells a monitor that hangs from one in whose run nothing happens."""
    monkeypatch.setattr(page, "_shown_at", page._shown_at - 100.0)
    _, headers, _ = ask(page, get("/state.json"))
    assert 100 <= int(headers["Age"]) < 130
    _, headers, _ = ask(page, get("/state.json", f"If-None-Match: {headers['ETag']}"))
    assert 100 <= int(headers["Age"]) < 130


def test_of_too_many_connections_that_which_has_been_quiet_longest_is_closed(page, monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    place = ("127.0.0.1", port_of(page))
    with ExitStack() as opened:
        browser = opened.enter_context(contextlib.closing(http.client.HTTPConnection(*place, timeout=20)))
        for _ in range(5):
            browser.request("GET", "/page.css")
            assert browser.getresponse().read()
            silent = opened.enter_context(socket.create_connection(place, timeout=20))
            browser.request("GET", "/page.css")
            assert browser.getresponse().read(), "the same connection: it was not the one that said nothing"
            opened.enter_context(socket.create_connection(place, timeout=20))
            assert silent.recv(1) == b""


def test_showing_a_state_costs_the_caller_nothing_while_nobody_looks(page):
    view, before = small_history(3)[-1], time.thread_time()
    for _ in range(1000):
        page.show(state(view))
    assert time.thread_time() - before < 0.5, "a reference, and no snapshot"


def test_prometheus_reads_this_machines_traffic_on_a_peers_page(tmp_path):
    page = Page("127.0.0.1", state(own=Own(peer_id(0), sent_bytes=77, received_bytes=88)), tmp_path)
    _, headers, body = ask(page, get("/metrics"))
    assert headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert b"spes_sent_bytes_total 77.0\n" in body and b"spes_received_bytes_total 88.0\n" in body
    page.close()


@pytest.mark.parametrize(("where", "is_shown"), [("127.0.0.1", True), ("[::1]", True), ("0.0.0.0", False)])
def test_the_link_stands_on_pages_that_no_other_machine_can_read(where, is_shown, tmp_path):
    link = "spes:run.eNqVzMEOgiAY"
    page = Page(where, PageState(small_history(3)[-1], RUN, link=link), tmp_path)
    assert (link in page._state_document().body.decode()) == is_shown
    page.close()
