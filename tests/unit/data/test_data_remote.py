"""Shards by HTTP and S3: verified, resumed, a founder's by https alone. The servers are aiohttp's and rclone's."""

import asyncio
import contextlib
import hashlib
import io
import json
import logging
import os
import random
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from spes_p2p.config import DataConfig, PeerConfig, RunConfig
from spes_p2p.data import remote
from spes_p2p.data.packing import train_sources
from spes_p2p.data.remote import MANIFEST, fetch, url_of, with_fetched
from spes_p2p.data.shards import ShardManifest, TokenShards
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenise import Settings, tokenise
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer, tokenizer_bytes
from spes_p2p.errors import ConfigError, DataError, OutageError
from spes_p2p.peer.consent import ask_to_read
from spes_p2p.swarm.manifest import Manifest
from tests.support.s3_server import RCLONE, s3_environment, s3_server

from .conftest import sentences, write_rows
from .test_data_windows import FIXTURES


class ShardServer:
    """A static server with ranges, on loopback; with a folder of a certificate by https.

    Attributes:
        asked: Path and Range of each request, in order.
        answer: Answers in place of the files, if it returns something.
    """

    def __init__(self, root: Path, certificate: Path | None = None) -> None:
        self.asked: list[tuple[str, str]] = []
        self.answer: Callable[[web.Request], web.StreamResponse | None] = lambda request: None
        self.port = 0
        self._root = root
        self._ssl = None if certificate is None else ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        if self._ssl is not None:
            self._ssl.load_cert_chain(certificate / "own.pem", certificate / "own.key")
        self._loop = asyncio.new_event_loop()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(30)

    @property
    def url(self) -> str:
        return f"http{'s' * (self._ssl is not None)}://127.0.0.1:{self.port}/shards/{MANIFEST}"

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
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._ssl)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()

        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(start())
        self._loop.run_forever()


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
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
def served(shards, tmp_path):
    shutil.copytree(shards, tmp_path / "www")
    return tmp_path / "www"


@pytest.fixture
def server(served, monkeypatch):
    quickly(monkeypatch)
    with contextlib.closing(ShardServer(served)) as server:
        yield server


def quickly(monkeypatch: pytest.MonkeyPatch, num_retries: int = 7) -> None:
    """Ask again at once."""
    pauses = {"init_backoff": timedelta(milliseconds=1), "max_backoff": timedelta(milliseconds=2), "base": 2}
    retries = {"max_retries": num_retries, "backoff": pauses, "retry_timeout": timedelta(seconds=30)}
    monkeypatch.setattr(remote, "RETRIES", retries)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A folder with an authority's certificate, and that of 127.0.0.1 and its key."""
    folder, now = tmp_path_factory.mktemp("certificate"), datetime.now(UTC)
    keys = [ec.generate_private_key(ec.SECP256R1()) for _ in range(2)]
    names = [x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, each)]) for each in ("authority", "server")]
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    for number, (key, name, extension) in enumerate(
        zip(keys, names, (x509.BasicConstraints(ca=True, path_length=None), address), strict=True)
    ):
        made = x509.CertificateBuilder(names[0], name, key.public_key(), number + 1, now, now + timedelta(1))
        signed = made.add_extension(extension, critical=False).sign(keys[0], hashes.SHA256())
        file = folder / ("authority.pem", "own.pem")[number]
        file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    kind, plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "own.key").write_bytes(keys[1].private_bytes(serialization.Encoding.PEM, kind, plain))
    return folder


@pytest.fixture
def founders(served, certificate, monkeypatch):
    """A server by https, whose certificate this machine trusts."""
    quickly(monkeypatch, 1)
    authority = (certificate / "authority.pem").read_bytes()
    monkeypatch.setattr(remote, "CLIENT", {**remote.CLIENT, "root_certificate": authority})
    with contextlib.closing(ShardServer(served, certificate)) as server:
        yield server


def fingerprint_of(folder: Path) -> str:
    return ShardManifest.model_validate_json((folder / MANIFEST).read_bytes()).fingerprint


def files(folder: Path) -> dict[str, bytes]:
    names = {path.name for path in folder.iterdir()} - {"file_list.txt"}
    return {name: (folder / name).read_bytes() for name in sorted(names)}


def test_a_path_that_is_an_address_is_known_as_one():
    for url in ("https://example.org/a/manifest.json", "http://127.0.0.1:80/x%20y", "s3://bucket/shards"):
        assert url_of(Path(url)) == url
    assert url_of(Path("shards/manifest.json")) is None and url_of(Path("/https/x")) is None


def test_shards_come_into_the_cache_and_are_trained_on_as_if_they_lay_here(server, served, tmp_path, caplog):
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


def test_a_download_that_was_cut_off_goes_on_where_it_was(server, served, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    quickly(monkeypatch, 1)
    num_answers = 0

    def fail_later(request: web.Request) -> web.Response | None:
        nonlocal num_answers
        num_answers += request.path.endswith("000000.npy")
        return web.Response(status=503) if num_answers > 2 else None

    server.answer = fail_later
    with pytest.raises(OutageError, match=r"503.*start again to resume"):
        fetch(server.url, tmp_path, None, is_own=True)
    (part,) = tmp_path.rglob("*.part")
    assert part.stat().st_size == 20_000
    server.answer = lambda request: None
    server.asked.clear()
    assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)
    ranges = [given for path, given in server.asked if path.endswith("000000.npy")]
    assert ranges[0] == "bytes=20000-29999"


def test_a_broken_answer_is_asked_for_again_from_its_end(server, served, tmp_path):
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


def test_a_server_without_ranges_will_do(server, served, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "PIECE_BYTES", 10_000)
    server.answer = lambda request: web.Response(body=(served / Path(request.path).name).read_bytes())
    assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)


def test_a_file_that_is_not_the_manifests_is_refused_and_not_kept(server, served, tmp_path):
    damaged = bytearray((served / "000001.npy").read_bytes())
    damaged[100] ^= 1
    (served / "000001.npy").write_bytes(damaged)
    with pytest.raises(DataError, match=r"000001.npy is not the file of its manifest: its digest differs"):
        fetch(server.url, tmp_path, None, is_own=True)
    folder = tmp_path / "shards" / fingerprint_of(served)
    assert not (folder / "000001.npy").exists() and not (folder / MANIFEST).exists()


def test_shards_of_another_fingerprint_are_refused_before_they_are_fetched(server, tmp_path):
    with pytest.raises(DataError, match=r"has the fingerprint .*, this run trains on 0000"):
        fetch(server.url, tmp_path, "0" * 64, is_own=True)
    assert [path for path, _ in server.asked] == ["/shards/manifest.json"]


def test_a_manifest_whose_fingerprint_is_not_that_of_its_shards_is_refused(server, served, tmp_path):
    content = json.loads((served / MANIFEST).read_bytes())
    content["shards"][0]["sha256"] = "0" * 64
    (served / MANIFEST).write_text(json.dumps(content))
    with pytest.raises(DataError, match="has the fingerprint"):
        fetch(server.url, tmp_path, content["fingerprint"], is_own=True)


@pytest.mark.parametrize("body", [b"{}", b"", b"\xff", b'{"format": "spes-tokens"}'])
def test_what_is_no_manifest_is_refused(server, tmp_path, body):
    server.answer = lambda request: web.Response(body=body)
    with pytest.raises(DataError, match="is no manifest of shards"):
        fetch(server.url, tmp_path, None, is_own=True)


def test_an_endless_manifest_is_not_read_to_its_end(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "MAX_MANIFEST_BYTES", 10_000)
    server.answer = lambda request: web.Response(body=b" " * 10**6)
    with pytest.raises(DataError, match="more than 10000 bytes"):
        fetch(server.url, tmp_path, None, is_own=True)


def test_a_manifest_that_comes_byte_by_byte_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "READ_SECONDS", 0.3)
    quickly(monkeypatch, 0)
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def drip() -> None:
            taken, _ = listening.accept()
            with contextlib.suppress(OSError), taken:
                taken.recv(2**12)
                taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
                for _ in range(300):
                    taken.sendall(b" ")
                    threading.Event().wait(0.01)

        sender = threading.Thread(target=drip, daemon=True)
        sender.start()
        with pytest.raises(DataError, match=r"has not come in 0 s; name another address"):
            fetch(f"http://127.0.0.1:{listening.getsockname()[1]}/", tmp_path, None, is_own=True)
        sender.join(30)


@pytest.mark.parametrize("location", ["/\u00e9", "http://[", "http://a..b/", "ftp://host/x"])
def test_a_redirection_to_no_address_is_one_line(server, tmp_path, monkeypatch, location):
    quickly(monkeypatch, 0)
    server.answer = lambda request: web.Response(status=302, headers={"Location": location})
    with pytest.raises(
        DataError, match=r"^cannot read http://127.0.0.1.*; name another address$|or name another address$"
    ):
        fetch(server.url, tmp_path, None, is_own=True)


@pytest.mark.parametrize("url", ["http://[/", "https://", "http://a b:x/"])
def test_what_is_no_address_is_one_line(url, tmp_path):
    with pytest.raises(ConfigError, match=r"is no address of shards; name a https://"):
        fetch(url, tmp_path, None, is_own=True)


def test_a_redirection_is_followed(server, served, tmp_path):
    def elsewhere(request: web.Request) -> web.Response | None:
        path = request.path.replace("/moved/", "/shards/")
        return web.Response(status=302, headers={"Location": path}) if "/moved/" in request.path else None

    server.answer = elsewhere
    moved = server.url.replace("/shards/", "/moved/")
    assert files(fetch(moved, tmp_path, None, is_own=True).parent) == files(served)


def test_a_file_that_is_longer_than_its_manifest_says_is_cut(server, served, tmp_path):
    whole = (served / "000000.npy").read_bytes()

    def longer(request: web.Request) -> web.Response | None:
        return web.Response(body=whole + b"\0" * 10**6) if request.path.endswith("000000.npy") else None

    server.answer = longer
    kept = fetch(server.url, tmp_path, None, is_own=True).parent
    assert (kept / "000000.npy").read_bytes() == whole


def test_a_cache_that_is_too_small_is_told_before_the_download(server, tmp_path, monkeypatch):
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 9, 1))
    with pytest.raises(ConfigError, match=r"free, the shards take .*set --cache"):
        fetch(server.url, tmp_path, None, is_own=True)


@pytest.mark.parametrize("status", [403, 404])
def test_an_address_without_shards_is_told_at_once(server, tmp_path, status):
    server.answer = lambda request: web.Response(status=status)
    with pytest.raises(DataError, match=f"cannot read http://127.0.0.1.*: {status}.*; name another address"):
        fetch(server.url, tmp_path, None, is_own=True)
    assert len(server.asked) == 1


def test_shards_that_nothing_uses_make_room_for_others(server, served, tmp_path, monkeypatch):
    """The disk has room once one of three is gone; the oldest is in use by another process."""
    folders = [tmp_path / "shards" / name for name in ("oldest", "older", "newer")]
    for age, folder in enumerate(folders):
        folder.mkdir(parents=True)
        os.utime(folder, (age, age))
    code = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], 0), fcntl.LOCK_SH); print(flush=True); input()"
    command = [sys.executable, "-c", code, str(folders[0])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        user.stdout.readline()
        monkeypatch.setattr(
            remote.shutil,
            "disk_usage",
            lambda folder: shutil._ntuple_diskusage(10**9, 1, 10**9 * (not folders[1].exists())),
        )
        assert files(fetch(server.url, tmp_path, None, is_own=True).parent) == files(served)
        user.communicate(b"\n", timeout=30)
    assert [folder.exists() for folder in folders] == [True, False, True]


@pytest.mark.parametrize("kind", ["mds_zstd", "mds_text_zstd"])
def test_mds_shards_are_fetched_by_their_index(tmp_path, kind, monkeypatch):
    """Of tokens and of text; a damaged file is refused by its digest, if the index has one."""
    quickly(monkeypatch, 0)
    shutil.copytree(FIXTURES / kind, tmp_path / "www")
    index = json.loads((tmp_path / "www" / "index.json").read_text())
    entry = index["shards"][0]["zip_data"]
    packed = (tmp_path / "www" / entry["basename"]).read_bytes()
    entry["hashes"] = {"sha1": hashlib.sha1(packed).hexdigest(), "xxh64": "unknown here"}
    (tmp_path / "www" / "index.json").write_text(json.dumps(index))
    with contextlib.closing(ShardServer(tmp_path / "www")) as server:
        url = Path(server.url.replace(MANIFEST, "index.json"))
        data = with_fetched(DataConfig(source="files", paths=[url], text_field="text"), tmp_path)
        here = DataConfig(source="files", paths=[tmp_path / "www"])
        if "text" in kind:
            assert [each.text for each in documents(data, [])] == [each.text for each in documents(here, [])]
        else:
            there, own = (TokenShards(each.paths, 2**16, tmp_path) for each in (data, here))
            assert there.fingerprint == own.fingerprint
        (tmp_path / "www" / entry["basename"]).write_bytes(packed[:-1] + bytes([packed[-1] ^ 1]))
        with pytest.raises(DataError, match="is not the file of its manifest: its digest differs"):
            with_fetched(data.model_copy(update={"paths": [url]}), tmp_path / "other")


@pytest.mark.parametrize(
    "change", [{"basename": "../x.mds"}, {"basename": "/etc/passwd"}, {"bytes": -1}, {"bytes": "1"}]
)
def test_an_index_that_names_what_it_must_not_is_refused(server, served, tmp_path, change):
    index = json.loads((FIXTURES / "mds_raw" / "index.json").read_text())
    index["shards"][0]["raw_data"] |= change
    (served / "index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"fetch the index again|is not as MDS has it"):
        fetch(server.url.replace(MANIFEST, "index.json"), tmp_path, None, is_own=True)
    assert [path for path, _ in server.asked] == ["/shards/index.json"]


@pytest.mark.skipif(RCLONE is None, reason="no rclone here")
def test_shards_come_from_a_bucket(shards, tmp_path, monkeypatch):
    with s3_server(tmp_path / "buckets") as server:
        shutil.copytree(shards, tmp_path / "buckets" / "bucket" / "deep" / "shards")
        for name, value in s3_environment(server.port).items():
            monkeypatch.setenv(name, value)
        url = Path("s3://bucket/deep/shards")
        (kept,) = with_fetched(DataConfig(source="files", paths=[url]), tmp_path / "cache").paths
        assert files(kept.parent) == files(shards)
        with pytest.raises(DataError, match=r"^cannot read s3://bucket/none/manifest.json: 404"):
            fetch("s3://bucket/none", tmp_path / "cache", None, is_own=True)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
        with pytest.raises(DataError, match=r"^cannot read s3://bucket/deep/shards/manifest.json: 403"):
            fetch("s3://bucket/deep/shards", tmp_path / "other", None, is_own=True)


def test_a_bucket_without_credentials_names_the_variables(tmp_path, monkeypatch):
    """Without boto3, which would look in ~/.aws."""
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for those of ~/.aws"):
        fetch("s3://bucket/shards", tmp_path, None, is_own=True)
    with pytest.raises(ConfigError, match="no bucket has a name of that form"):
        fetch("s3://Key:Secret@bucket/shards", tmp_path, None, is_own=True)


def test_a_founders_shards_come_by_https_with_a_verified_certificate(founders, served, tmp_path, monkeypatch):
    fingerprint = fingerprint_of(served)
    assert files(fetch(founders.url, tmp_path, fingerprint, is_own=False).parent) == files(served)
    monkeypatch.setattr(remote, "CLIENT", {key: remote.CLIENT[key] for key in remote.CLIENT if key[:4] != "root"})
    remote._shown_manifest.cache_clear()
    with pytest.raises(OutageError, match=r"InvalidCertificate.*UnknownIssuer"):
        fetch(founders.url, tmp_path / "other", fingerprint, is_own=False)


def test_a_founders_shards_do_not_come_by_plain_http(server, served, tmp_path):
    with pytest.raises(DataError, match=r"^cannot read http://127"):
        fetch(server.url, tmp_path, fingerprint_of(served), is_own=False)
    with pytest.raises(DataError, match=r"^cannot read s3://bucket"):
        fetch("s3://bucket/shards", tmp_path, fingerprint_of(served), is_own=False)
    assert not server.asked


def test_a_founders_address_that_leads_to_plain_http_is_not_followed(founders, server, served, tmp_path):
    founders.answer = lambda request: web.Response(status=302, headers={"Location": server.url})
    with pytest.raises(DataError, match=r"^cannot read https://127"):
        fetch(founders.url, tmp_path, fingerprint_of(served), is_own=False)
    assert founders.asked and not server.asked


def test_a_founder_names_no_index_of_other_shards(founders, served, tmp_path):
    shutil.copy(FIXTURES / "mds_raw" / "index.json", served)
    with pytest.raises(DataError, match="is no manifest of shards"):
        fetch(founders.url.replace(MANIFEST, "index.json"), tmp_path, fingerprint_of(served), is_own=False)


@pytest.mark.parametrize(
    "url",
    [
        *("file:///etc/passwd", "https://user@host/x", "http://host/x", "s3://host/x", "https://"),
        *("https://ho st/", "https://h/\x1b"),
    ],
)
def test_what_is_no_web_address_is_no_setting(url):
    with pytest.raises(ValueError, match="urls"):
        DataConfig(source="files", fingerprint="0" * 64, urls=[url])


def test_the_address_and_the_size_are_shown_before_a_byte_of_the_shards_is_read(
    founders, served, tmp_path, monkeypatch
):
    data = DataConfig(source="files", fingerprint=fingerprint_of(served), urls=[founders.url])
    founder = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
    manifest = Manifest(
        **{"run_id": "run", "founder": founder, "software": "0.1", "config": RunConfig(data=data)},
        **{"vocab_size": 300, "tokenizer_digest": "0" * 64, "tokenizer_bytes": 100},
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ConfigError, match=r"token shards .* from https://127.0.0.1.* MB\); agree to that with --yes"):
        ask_to_read(manifest, 0, yes=False)
    assert {path for path, _ in founders.asked} == {"/shards/manifest.json"}
    ask_to_read(manifest, 0, yes=False, paths=[Path("own/shards")])
    mirrored = data.model_copy(update={"urls": ["https://127.0.0.1:1/x.json", founders.url]})
    manifest = manifest.model_copy(update={"config": RunConfig(data=mirrored)})
    with pytest.raises(ConfigError, match=r"from https://127.0.0.1:1/x.json or https://127.0.0.1:\d+/shards/.* MB\)"):
        ask_to_read(manifest, 0, yes=False)  # the first does not answer, and the shards would come from the second
    founders.asked.clear()
    with_fetched(data, tmp_path)
    assert "/shards/manifest.json" not in {path for path, _ in founders.asked}, "the sizes are those that were shown"


def test_peers_without_shards_fetch_those_of_the_run(founders, served, tmp_path):
    config, fingerprint = PeerConfig(run_id="run", cache=tmp_path), fingerprint_of(served)
    data = DataConfig(source="files", fingerprint=fingerprint, urls=["https://127.0.0.1:1/x.json", founders.url])
    (kept,) = with_fetched(config.corpus(data), tmp_path).paths
    assert files(kept.parent) == files(served), "from the second address: the first does not answer"
    mixed = DataConfig(
        source="files",
        mixture=[
            {"name": "web", "fingerprint": fingerprint, "weights": [1], "urls": [founders.url]},
            {"name": "math", "fingerprint": "1" * 64, "weights": [1]},
        ],
    )
    own = PeerConfig(run_id="run", cache=tmp_path, data=["math=shards/math"])
    assert with_fetched(own.corpus(mixed), tmp_path).paths == [Path(f"web={kept}"), Path("math=shards/math")]


def test_settings_without_addresses_do_not_mention_them():
    assert "urls" not in RunConfig().model_dump(mode="json")["data"]
