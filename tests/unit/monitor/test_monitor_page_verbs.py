"""The verbs of a peer's page over raw HTTP: what is refused, what is done, and that no other page has any."""

import json
import os
import socket
import stat
from collections.abc import Mapping
from contextlib import ExitStack, closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from spes_p2p.commands import ctl
from spes_p2p.config.commands import CtlConfig
from spes_p2p.errors import ConfigError
from spes_p2p.monitor.page import server, verbs
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own
from spes_p2p.monitor.page.verbs import MAX_BODY_BYTES, TOKEN_FILE, TOKEN_HEADER, Verbs
from spes_p2p.peer.controls import Controls
from tests.unit.monitor.swarms import peer_id
from tests.unit.monitor.test_monitor_page_server import ask, get, port_of, state

BODY = '{"for": "2h"}'


class Peer:
    """A peer's page with its controls."""

    def __init__(self, output: Path, where: str = "127.0.0.1") -> None:
        self.output = output
        self.controls = Controls(output)
        self.verbs = Verbs(self.controls.act, output)
        self.page = Page(where, state(own=Own(peer_id(0))), output, self.verbs)

    def fill(self, text: str) -> str:
        return text.replace("TOKEN", self.verbs.token).replace("PORT", str(port_of(self.page)))


@pytest.fixture
def peer(tmp_path):
    peer = Peer(tmp_path)
    yield peer
    peer.page.close()


def post(path: str, *headers: str, body: str = "", token: str | None = "TOKEN", host: str = "HOST") -> str:
    head = [f"X-Spes-Token: {token}"] if token is not None else []
    head += [f"Content-Length: {len(body)}"] if body and not any("Content-Length" in h for h in headers) else []
    return get(path, *head, *headers, host=host, method="POST") + (f"\n\n{body}" if body else "")


CHUNKS = f"{MAX_BODY_BYTES + 1:x}\r\n" + "x" * (MAX_BODY_BYTES + 1) + "\r\n0\r\n\r\n"
# What is asked, and the status of the answer; each with the right token unless the case is about it.
CASES = {
    "foreign host": (post("/control/pause", host="evil.example"), 421),
    "foreign host with the port": (post("/control/pause", host="evil.example:PORT"), 421),
    "host that begins like ours": (post("/control/leave", host="127.0.0.1:PORT.evil.example"), 421),
    "host with a user": (post("/control/leave", host="127.0.0.1@evil.example:PORT"), 421),
    "another port": (post("/control/leave", host="127.0.0.1:1"), 421),
    "another address": (post("/control/leave", host="10.0.0.1:PORT"), 421),
    "empty host": (post("/control/leave", host=""), 421),
    "foreign origin": (post("/control/pause", "Origin: http://evil.example"), 403),
    "null origin": (post("/control/pause", "Origin: null"), 403),
    "empty origin": (post("/control/pause", "Origin:"), 403),
    "origin of another port": (post("/control/pause", "Origin: http://127.0.0.1:1"), 403),
    "origin that begins like ours": (post("/control/pause", "Origin: http://HOST.evil.example"), 403),
    "cross-site": (post("/control/pause", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: cors"), 403),
    "same-site, another port": (post("/control/pause", "Sec-Fetch-Site: same-site"), 403),
    "cross-site form": (
        post("/control/pause", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"),
        403,
    ),
    "no token": (post("/control/pause", token=None), 401),
    "empty token": (post("/control/pause", token=""), 401),
    "wrong token": (post("/control/pause", token="x" * 43), 401),
    "a part of the token": (post("/control/pause", "X-Spes-Token: y", token=None), 401),
    "token with more behind it": (post("/control/pause", token="TOKENx"), 401),
    "token in bytes that are no text": (post("/control/pause", token="\u00ff\u00fe"), 401),
    "token in the query": (post("/control/pause?token=TOKEN", token=None), 401),
    "token as a cookie": (post("/control/pause", "Cookie: token=TOKEN", token=None), 401),
    "token as a bearer": (post("/control/pause", "Authorization: Bearer TOKEN", token=None), 401),
    "no token, large body": (post("/control/pause", "Content-Length: 50000", token=None), 401),
    "get on a verb": (get("/control/pause", "X-Spes-Token: TOKEN"), 405),
    "head on a verb": (get("/control/pause", "X-Spes-Token: TOKEN", method="HEAD"), 405),
    "put on a verb": (get("/control/pause", "X-Spes-Token: TOKEN", method="PUT"), 405),
    "preflight": (
        get("/control/pause", "Access-Control-Request-Method: POST", "X-Spes-Token: TOKEN", method="OPTIONS"),
        405,
    ),
    "preflight of another site": (get("/control/pause", "Origin: http://evil.example", method="OPTIONS"), 403),
    "large body": (post("/control/pause", "Content-Length: 50000"), 413),
    "body of a byte too much": (post("/control/pause", body="x" * (MAX_BODY_BYTES + 1)), 413),
    "body without a length": (post("/control/pause", "Transfer-Encoding: chunked") + "\n\n" + CHUNKS, 413),
    "body on a get of a verb": (get("/control/pause", "X-Spes-Token: TOKEN", "Content-Length: 3") + "\n\nabc", 413),
    "unknown verb": (post("/control/stop"), 400),
    "no verb": (post("/control/"), 404),
    "verb of another case": (post("/control/Pause"), 404),
    "path upwards": (post("/control/../../etc/passwd"), 404),
    "encoded path upwards": (post("/control/%2e%2e/%2e%2e/etc/passwd"), 404),
    "verb behind a verb": (post("/control/pause/leave"), 404),
    "two slashes": (post("//control/pause"), 404),
    "no json": (post("/control/pause", body="2h"), 400),
    "a list": (post("/control/pause", body='["2h"]'), 400),
    "deep json": (post("/control/pause", body="[" * 4000), 400),
    "a bad value": (post("/control/pause", body='{"for": "soon"}'), 400),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_the_owners_is_refused_and_changes_nothing(peer, case):
    text, status = CASES[case]
    answer, headers, body = ask(peer.page, peer.fill(text))
    assert answer == status, body
    assert headers["Content-Security-Policy"] == server.POLICY and headers["Cache-Control"] == "no-store"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    assert peer.verbs.token.encode() not in body and b"root:" not in body and len(body) < 300
    assert peer.controls.view()["wish"] == "run"


@pytest.mark.parametrize(
    "headers", [(), ("Origin: http://HOST", "Sec-Fetch-Site: same-origin"), ("Sec-Fetch-Site: none",)]
)
def test_the_owner_pauses_resumes_and_limits(peer, headers):
    def done(verb: str, body: str = "") -> Mapping[str, Any]:
        status, _, answer = ask(peer.page, peer.fill(post(f"/control/{verb}", *headers, body=body)))
        assert status == 200, answer
        return json.loads(answer)

    assert done("pause", BODY)["state"] == "paused" and peer.controls.view()["wish"] == "pause"
    assert done("resume")["state"] == "training"
    assert done("set", '{"threads": 2, "duty": 0.5}')["limits"]["duty"] == 0.5
    assert done("rules", '{"programs": ["blender"]}')["rules"]["programs"] == ["blender"]
    assert done("finish")["state"] == "finishing"


def test_a_body_that_does_not_come_ends_the_request(peer, monkeypatch):
    monkeypatch.setattr(verbs, "BODY_SECONDS", 0.1)
    with socket.create_connection(("127.0.0.1", port_of(peer.page)), timeout=60) as wire:
        text = peer.fill(post("/control/pause", "Content-Length: 9")).replace("HOST", f"127.0.0.1:{port_of(peer.page)}")
        wire.sendall(text.replace("\n", "\r\n").encode() + b"\r\n\r\n")
        assert b" 408 " in wire.recv(100)
    assert peer.controls.view()["wish"] == "run"


@pytest.mark.parametrize("where", ["127.0.0.2", "[::]", "0.0.0.0"])
def test_ctl_reaches_a_page_on_any_address_of_this_machine(tmp_path, where):
    peer = Peer(tmp_path, where)
    try:
        assert ctl.main(CtlConfig(verb="pause", output=tmp_path)) == 0
        assert peer.controls.view()["wish"] == "pause"
    finally:
        peer.page.close()


@pytest.mark.parametrize(("remote", "status"), [("192.0.2.7", 200), ("192.0.2.8", 403)])
def test_a_verb_that_was_sent_to_its_own_address_is_of_this_machine(peer, monkeypatch, remote, status):
    monkeypatch.setattr(web.BaseRequest, "remote", property(lambda _: remote))
    monkeypatch.setattr(web.BaseRequest, "get_extra_info", lambda *_: ("192.0.2.7", 80))
    assert ask(peer.page, peer.fill(post("/control/pause")))[0] == status


@pytest.mark.parametrize("remote", ["10.0.0.9", "2001:db8::1", None, "not an address"])
def test_a_verb_from_another_machine_is_refused_even_with_the_token(tmp_path, monkeypatch, remote):
    peer = Peer(tmp_path, "0.0.0.0")  # a container's page: all addresses
    monkeypatch.setattr(web.BaseRequest, "remote", property(lambda _: remote))
    try:
        status, _, _ = ask(peer.page, peer.fill(post("/control/pause")))
        assert status == 403 and peer.controls.view()["wish"] == "run"
    finally:
        peer.page.close()


def test_a_monitors_page_has_no_verbs(tmp_path):
    page = Page("127.0.0.1", state(), tmp_path)
    for text in (post("/control/pause", token="x"), post("/control/pause", token="x", body=BODY)):
        status, _, _ = ask(page, text)
        assert status in (404, 413)
    assert not (tmp_path / TOKEN_FILE).exists()
    assert not json.loads(ask(page, get("/state.json"))[2])["control"]
    page.close()


def test_the_tokens_file_is_the_owners_alone_and_new_at_each_start(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / TOKEN_FILE).symlink_to(elsewhere)
    before = os.umask(0)
    try:
        first = Verbs(lambda verb, values: {}, tmp_path)
    finally:
        os.umask(before)
    file = tmp_path / TOKEN_FILE
    assert stat.S_IMODE(file.lstat().st_mode) == 0o600 and not elsewhere.exists()
    assert file.read_text() == f"{first.token}\n" and len(first.token) == 43
    assert Verbs(lambda verb, values: {}, tmp_path).token != first.token
    with pytest.raises(ConfigError, match="set --page off"):
        Verbs(lambda verb, values: {}, tmp_path / "nowhere")


def control(peer: Peer, *given: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert ctl.main(CtlConfig(verb=given[0], values=list(given[1:]), output=peer.output)) == 0  # type: ignore[arg-type]
    return capsys.readouterr().out


@pytest.mark.parametrize("where", ["127.0.0.1", "[::1]", "0.0.0.0"])
def test_ctl_finds_the_peer_by_its_folder(tmp_path, where, capsys):
    peer = Peer(tmp_path, where)
    try:
        assert control(peer, "pause", "2h", capsys=capsys).startswith("paused: until ")
        assert control(peer, "resume", capsys=capsys) == "training: it trains\n"
        told = control(peer, "set", "threads=2", "duty=50%", capsys=capsys)
        assert told == "training: it trains\nlimits: threads=2, duty=50%\n"
        told = control(peer, "set", "threads=1", capsys=capsys)
        assert told == "training: it trains\nlimits: threads=1, duty=50%\n"
        told = control(peer, "rules", "programs=blender, steam", "on-battery=no", "gb-a-day=5", capsys=capsys)
        assert "rules: on_battery=no, programs=blender,steam, gb_a_day=5.0" in told
        assert f"/#token={peer.verbs.token}" in control(peer, "link", capsys=capsys)
        control(peer, "pause", capsys=capsys)
        assert control(peer, "status", capsys=capsys).startswith("paused"), "what it does now, not what the page shows"
    finally:
        peer.page.close()


def test_ctl_finds_the_only_peer_in_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no peer with a page in runs/"):
        ctl.main(CtlConfig(verb="pause"))
    (tmp_path / "runs" / "my-run").mkdir(parents=True)
    peer = Peer(tmp_path / "runs" / "my-run")
    try:
        assert ctl.main(CtlConfig(verb="pause")) == 0
        assert capsys.readouterr().out == "paused: until it is resumed; other peers may take its slots\n"
        (tmp_path / "runs" / "local" / "peer-0").mkdir(parents=True)
        other = Peer(tmp_path / "runs" / "local" / "peer-0")
        try:
            with pytest.raises(ConfigError, match="several peers in runs/: name one, as in --output runs/local/peer-0"):
                ctl.main(CtlConfig(verb="pause"))
        finally:
            other.page.close()
        assert ctl.main(CtlConfig(verb="resume")) == 0, "the other one has ended"
    finally:
        peer.page.close()


def test_ctl_says_in_one_line_what_is_wrong(peer, tmp_path):
    def refused(*given: str, output: Path = tmp_path) -> str:
        with pytest.raises(ConfigError) as error:
            ctl.main(CtlConfig(verb=given[0], values=list(given[1:]), output=output))  # type: ignore[arg-type]
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "threads='0': input should be" in refused("set", "threads=0")
    assert "set twice" in refused("set", "threads=1", "threads=2")
    assert "takes no" in refused("pause", "2h", "3h")
    assert "name its --output" in refused("pause", output=tmp_path / "nowhere")
    (tmp_path / TOKEN_FILE).write_text("x" * 43)
    assert "`spes ctl link`" in refused("pause")
    (tmp_path / TOKEN_FILE).unlink()
    assert "no peer with controls runs in" in refused("pause")
    (tmp_path / "page").write_text("what?")
    assert "holds no address" in refused("status")
    (tmp_path / "page").write_text("http://127.0.0.1:99999/")
    assert "no peer with a page" in refused("status")
    with socket.create_server(("127.0.0.1", 0)) as other:
        free = other.getsockname()[1]
    (tmp_path / "page").write_text(f"http://127.0.0.1:{free}/")
    (tmp_path / TOKEN_FILE).write_text("x" * 43)
    for verb in ("status", "link"):
        assert "does not answer" in refused(verb)
    (tmp_path / TOKEN_FILE).unlink()
    monitor = tmp_path / "monitor"
    monitor.mkdir()
    page = Page("127.0.0.1", state(), monitor)
    (monitor / TOKEN_FILE).write_text("x")
    assert "serves no peer's page" in refused("pause", output=monitor)
    page.close()


def test_ctl_sends_the_token_to_this_machine_alone(peer, monkeypatch):
    called: list[str] = []
    connect = socket.create_connection

    def note(to: tuple[str, int], *rest: Any, **more: Any) -> socket.socket:
        called.append(to[0])
        return connect(to, *rest, **more)

    monkeypatch.setattr(socket, "create_connection", note)
    (peer.output / "page").write_text(f"http://evil.example:{port_of(peer.page)}/\n")
    assert ctl.main(CtlConfig(verb="pause", output=peer.output)) == 0
    assert called == ["127.0.0.1"] and peer.controls.view()["wish"] == "pause"
    (peer.output / "page").write_text(f"http://192.0.2.77:{port_of(peer.page)}/\n")
    with pytest.raises(ConfigError, match="Cannot assign requested address"):
        ctl.main(CtlConfig(verb="resume", output=peer.output))


@pytest.mark.parametrize("asks", [True, False], ids=["requests", "silence"])
def test_a_flood_without_the_token_leaves_places_for_requests_with_it(peer, monkeypatch, asks):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    place, flood = ("127.0.0.1", port_of(peer.page)), post("/control/pause", "Content-Length: 4000", token=None)
    owner = HTTPConnection(*place, timeout=20)

    def pause() -> int:
        owner.request("POST", "/control/pause", BODY, {TOKEN_HEADER: peer.verbs.token})
        with owner.getresponse() as answer:
            return answer.status if answer.read() else 0

    with ExitStack() as opened, closing(owner):
        for _ in range(2):
            assert pause() == 200, "the connection of before the flood"
            for _ in range(6):
                opened.enter_context(socket.create_connection(place, timeout=20))
                if asks:
                    assert ask(peer.page, flood)[0] == 401, "before its body has come"
            assert ask(peer.page, peer.fill(post("/control/pause", body=BODY)))[0] == 200, "a new one"
