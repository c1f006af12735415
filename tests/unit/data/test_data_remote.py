"""Shards by HTTP: verified, resumed, never from a private address on a stranger's word. The server is aiohttp's."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import logging
import random
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from aiohttp import web

from spes_p2p.config import DataConfig, PeerConfig, RunConfig
from spes_p2p.data import remote
from spes_p2p.data.packing import train_sources
from spes_p2p.data.remote import MANIFEST, fetch, url_of, with_fetched
from spes_p2p.data.shards import ShardManifest
from spes_p2p.data.tokenise import Settings, tokenise
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, tokenizer_bytes
from spes_p2p.errors import ConfigError, DataError, OutageError
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.swarm.manifest import Manifest

from .conftest import sentences, write_rows
from .test_data_windows import FIXTURES


class ShardServer:
    """A static server with ranges, on loopback.

    Attributes:
        asked: Path and Range of each request, in order.
        answer: Answers in place of the files, if it returns something.
    """

    def __init__(self, root: Path) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: Callable[[web.Request], web.StreamResponse | None] = lambda request: None
        self.port = 0
        self._root = root
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/shards/{MANIFEST}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)

    def _serve(self, ready: threading.Event) -> None:
        @web.middleware
        async def watch(request: web.Request, handler):
            self.asked.append((request.path, request.headers.get("Range", "")))
            return self.answer(request) or await handler(request)

        async def start() -> None:
            app = web.Application(middlewares=[watch])
            app.router.add_static("/shards", self._root)
            runner = web.AppRunner(app)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(start())
        self._loop.run_forever()


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Shards of `spes tokenize`: three files of tokens."""
    folder = tmp_path_factory.mktemp("served")
    tokenizer = load_tokenizer(FIXTURES / "tokenizer")
    text = write_rows(folder / "text" / "rows.jsonl", sentences(random.Random(0), 400))
    settings = Settings(
        folder / "shards", "", tokenizer_bytes(tokenizer), len(tokenizer), "uint16", "text", 40_000, False, 500, 1
    )
    tokenise([text], settings, lambda progress: None)
    return folder / "shards"


@pytest.fixture
def served(shards: Path, tmp_path: Path) -> Path:
    shutil.copytree(shards, tmp_path / "www")
    return tmp_path / "www"


@pytest.fixture
def server(served: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ShardServer]:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.001)
    with contextlib.closing(ShardServer(served)) as server:
        yield server


def fingerprint_of(folder: Path) -> str:
    return ShardManifest.model_validate_json((folder / MANIFEST).read_bytes()).fingerprint


def files(folder: Path) -> dict[str, bytes]:
    names = {path.name for path in folder.iterdir()} - {"file_list.txt"}
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_a_path_that_is_an_address_is_known_as_one() -> None:
    for url in ("https://example.org/a/manifest.json", "http://127.0.0.1:80/x?sig=a%20b"):
        assert url_of(Path(url)) == url
    assert url_of(Path("shards/manifest.json")) is None and url_of(Path("/https/x")) is None


def test_shards_come_into_the_cache_and_are_trained_on_as_if_they_lay_here(server, served, tmp_path, caplog) -> None:
    config = PeerConfig(run_id="run", data=[server.url], cache=tmp_path / "cache")
    run = DataConfig(source="files", sequence_length=32, fingerprint=fingerprint_of(served))
    with caplog.at_level(logging.INFO, "spes_p2p"):
        data = with_fetched(config.corpus(run), config.cache)
    (manifest,) = data.paths
    assert files(manifest.parent) == files(served)
    assert "fetching 5 files" in caplog.text and "of the shards " + run.fingerprint[:12] in caplog.text
    there, here = (
        train_sources(each, resolve_tokenizer(each, [], config.cache), paths=[], cache=config.cache)(0)
        for each in (data, run.model_copy(update={"paths": [served]}))
    )
    assert there.next_batch(4).tolist() == here.next_batch(4).tolist()
    server.asked.clear()
    assert with_fetched(config.corpus(run), config.cache).paths == [manifest] and not server.asked, "kept, not fetched"


def test_a_download_that_was_cut_off_goes_on_where_it_was(server, served, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(remote, "TRIES", 2)
    num_answers = 0

    def fail_later(request: web.Request) -> web.Response | None:
        nonlocal num_answers
        num_answers += request.path.endswith("000000.npy")
        return web.Response(status=503) if num_answers > 2 else None

    server.answer = fail_later
    with pytest.raises(OutageError, match=r"503.*start again to go on"):
        fetch(server.url, tmp_path, None, is_own=True)
    (part,) = tmp_path.rglob("*.part")
    assert part.stat().st_size == 20_000
    server.answer = lambda request: None
    server.asked.clear()
    assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)
    ranges = [given for path, given in server.asked if path.endswith("000000.npy")]
    assert ranges[0] == "bytes=20000-29999"


def test_a_broken_answer_is_asked_for_again_from_its_end(server, served, tmp_path) -> None:
    whole = (served / "000000.npy").read_bytes()
    broken = []

    def break_once(request: web.Request) -> web.Response | None:
        if request.path.endswith("000000.npy") and not broken:
            broken.append(1)
            end = len(whole) - 1
            return web.Response(status=206, body=whole[:1234], headers={"Content-Range": f"bytes 0-{end}/{end + 1}"})
        return None

    server.answer = break_once
    assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)
    asked = [given for path, given in server.asked if path.endswith("000000.npy")]
    assert asked[1].startswith("bytes=1234-")


def test_a_server_without_ranges_will_do(server, served, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    server.answer = lambda request: web.Response(body=(served / Path(request.path).name).read_bytes())
    assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)


def test_a_file_that_is_not_the_manifests_is_refused_and_not_kept(server, served, tmp_path) -> None:
    damaged = bytearray((served / "000001.npy").read_bytes())
    damaged[100] ^= 1
    (served / "000001.npy").write_bytes(damaged)
    with pytest.raises(DataError, match=r"000001.npy is not the file of its manifest: its SHA-256 differs"):
        fetch(server.url, tmp_path, None, is_own=True)
    folder = tmp_path / "shards" / fingerprint_of(served)
    assert not (folder / "000001.npy").exists() and not (folder / MANIFEST).exists()


def test_shards_of_another_fingerprint_are_refused_before_they_are_fetched(server, tmp_path) -> None:
    with pytest.raises(DataError, match=r"has the fingerprint .*, this run trains on 0000"):
        fetch(server.url, tmp_path, "0" * 64, is_own=True)
    assert [path for path, _ in server.asked] == ["/shards/manifest.json"]


def test_a_manifest_whose_fingerprint_is_not_that_of_its_shards_is_refused(server, served, tmp_path) -> None:
    content = json.loads((served / MANIFEST).read_bytes())
    content["shards"][0]["sha256"] = "0" * 64
    (served / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match="has the fingerprint"):
        fetch(server.url, tmp_path, content["fingerprint"], is_own=True)


@pytest.mark.parametrize("body", [b"{}", b"", b"\xff", b'{"format": "spes-tokens"}'])
def test_what_is_no_manifest_is_refused(server, tmp_path, body: bytes) -> None:
    server.answer = lambda request: web.Response(body=body)
    with pytest.raises(DataError, match="is no manifest of shards"):
        fetch(server.url, tmp_path, None, is_own=True)


def test_an_endless_manifest_is_not_read_to_its_end(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "MAX_MANIFEST_BYTES", 10_000)
    server.answer = lambda request: web.Response(body=b" " * 10**6)
    with pytest.raises(DataError, match="more than 10000 bytes"):
        fetch(server.url, tmp_path, None, is_own=True)


def test_a_manifest_that_comes_byte_by_byte_is_given_up(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "READ_SECONDS", 0.3)
    monkeypatch.setattr(remote, "TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            taken, _ = listening.accept()
            with contextlib.suppress(OSError), taken:
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                for _ in range(300):
                    taken.sendall(b" ")
                    threading.Event().wait(0.01)

        sender = threading.Thread(target=drip, daemon=True)
        sender.start()
        with pytest.raises(DataError, match=r"has not come in 0 s; name another address"):
            fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/", tmp_path, None, is_own=True)
        sender.join(30)


@pytest.mark.parametrize("location", ["/\u00e9", "http://[", "http://a..b/"])
def test_a_redirection_to_no_address_is_one_line(server, tmp_path, location) -> None:
    server.answer = lambda request: web.Response(status=302, headers={"Location": location})
    with pytest.raises((DataError, ConfigError), match=r"no address"):
        fetch(server.url, tmp_path, None, is_own=True)
    with pytest.raises(DataError, match="leads to no address"):
        fetch(f"http://{'x' * 64}.test/", tmp_path, None, is_own=False)


def test_a_file_that_is_longer_than_its_manifest_says_is_cut(server, served, tmp_path) -> None:
    whole = (served / "000000.npy").read_bytes()

    def longer(request: web.Request) -> web.Response | None:
        return web.Response(body=whole + b"\0" * 10**6) if request.path.endswith("000000.npy") else None

    server.answer = longer
    kept = fetch(server.url, tmp_path, None, is_own=True).parent
    assert (kept / "000000.npy").read_bytes() == whole


def test_a_cache_that_is_too_small_is_told_before_the_download(server, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConfigError, match=r"free, the shards take .*set --cache"):
        fetch(server.url, tmp_path, None, is_own=True)


@pytest.mark.parametrize("status", [403, 404])
def test_an_address_without_shards_is_told_at_once(server, tmp_path, status: int) -> None:
    server.answer = lambda request: web.Response(status=status)
    with pytest.raises(DataError, match=f"answers {status}"):
        fetch(server.url, tmp_path, None, is_own=True)
    assert len(server.asked) == 1


# ---------------------------------------------------------------------- a stranger's addresses


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "10.0.0.7", "169.254.169.254", "192.168.1.1"])
def test_a_founders_address_in_a_private_network_is_not_read(host: str, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(remote, "TRIES", 1)
    with pytest.raises(ConfigError, match="no public address; if you trust it, name it yourself with --data"):
        fetch(f"http://{host}:9/shards/", tmp_path, "0" * 64, is_own=False)


def test_a_founders_address_that_leads_into_a_private_network_is_not_followed(server, tmp_path, monkeypatch) -> None:
    """A public host, as its name says, that sends the peer on to this machine."""
    resolve, connect = socket.getaddrinfo, socket.create_connection
    public = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.215.14", server.port))]
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *a, **k: public if host == "x.test" else resolve(host, *a, **k)
    )

    def connected(address, *more, **named):
        host, port = address
        return connect(("127.0.0.1" if host == "93.184.215.14" else host, port), *more, **named)

    monkeypatch.setattr(socket, "create_connection", connected)
    location = f"http://127.0.0.1:{server.port}/shards/secret"
    server.answer = lambda request: web.Response(status=302, headers={"Location": location})
    with pytest.raises(ConfigError, match=r"127.0.0.1, no public address"):
        fetch(f"http://x.test:{server.port}/shards/", tmp_path, "0" * 64, is_own=False)
    assert [path for path, _ in server.asked] == ["/shards/manifest.json"]


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "https://user@host/x", "ftp://host/x", "https://", "http://ho st/", "https://h/\x1b"]
)
def test_what_is_no_web_address_is_no_setting(url: str) -> None:
    with pytest.raises(ValueError, match="urls"):
        DataConfig(source="files", fingerprint="0" * 64, urls=[url])


def test_the_address_and_the_size_are_shown_before_a_byte_of_the_shards_is_read(
    server, served, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(remote, "_public_address", lambda host, port: host)
    data = DataConfig(source="files", fingerprint=fingerprint_of(served), urls=[server.url])
    founder = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    manifest = Manifest(
        run_id="run",
        founder=founder,
        software="0.1",
        config=RunConfig(data=data),
        vocab_size=300,
        tokenizer_digest="0" * 64,
        tokenizer_bytes=100,
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match=r"token shards .* from http://127.0.0.1.* MB\); agree to that with --yes"):
        ask_to_read(manifest, 0, yes=False)
    assert {path for path, _ in server.asked} == {"/shards/manifest.json"}
    ask_to_read(manifest, 0, yes=False, paths=[Path("own/shards")])
    monkeypatch.setattr(remote, "TRIES", 1)
    mirrored = data.model_copy(update={"urls": ["http://127.0.0.1:1/x.json", server.url]})
    manifest = manifest.model_copy(update={"config": RunConfig(data=mirrored)})
    with pytest.raises(ConfigError, match=r"from http://127.0.0.1:1/x.json or http://127.0.0.1:\d+/shards/.* MB\)"):
        ask_to_read(manifest, 0, yes=False)  # the first does not answer, and the shards would come from the second
    server.asked.clear()
    with_fetched(data, tmp_path)
    assert "/shards/manifest.json" not in {path for path, _ in server.asked}, "the sizes are those that were shown"


def test_peers_without_shards_fetch_those_of_the_run(server, served, tmp_path, monkeypatch) -> None:
    config, fingerprint = PeerConfig(run_id="run", cache=tmp_path), fingerprint_of(served)
    data = DataConfig(source="files", fingerprint=fingerprint, urls=["http://127.0.0.1:1/x.json", server.url])
    monkeypatch.setattr(remote, "TRIES", 1)
    with pytest.raises(ConfigError, match="no public address"):
        with_fetched(config.corpus(data), tmp_path)
    monkeypatch.setattr(remote, "_public_address", lambda host, port: host)
    (kept,) = with_fetched(config.corpus(data), tmp_path).paths
    assert files(kept.parent) == files(served), "from the second address: the first does not answer"
    mixed = DataConfig(
        source="files",
        mixture=[
            {"name": "web", "fingerprint": fingerprint, "weights": [1], "urls": [server.url]},
            {"name": "math", "fingerprint": "1" * 64, "weights": [1]},
        ],
    )
    own = PeerConfig(run_id="run", cache=tmp_path, data=["math=shards/math"])
    assert with_fetched(own.corpus(mixed), tmp_path).paths == [Path(f"web={kept}"), Path("math=shards/math")]


def test_settings_without_addresses_do_not_mention_them() -> None:
    assert "urls" not in RunConfig().model_dump(mode="json")["data"]
