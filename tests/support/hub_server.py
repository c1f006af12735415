"""A server on loopback that speaks as much of the Hugging Face hub's API as data sets and checkpoints are read by."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

COMMIT = "c" * 40
PRIVATE = ".private"


class HubServer(ThreadingHTTPServer):
    """Serves the data sets `root/OWNER/NAME/`, of which a file `.private` makes one private, and the checkpoints
    `root/models/OWNER/NAME/`.

    Attributes:
        asked: Paths of all requests, in order.
        status: What each request is answered with, if it is not 0.
    """

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.root = root
        self.asked: list[str] = []
        self.status = 0

    @property
    def url(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, name: str) -> list[Path]:
        """Files of a data set, none if there is no such data set."""
        folder = self.root / name
        return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != PRIVATE)


class _Answers(BaseHTTPRequestHandler):
    server: HubServer

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.server.asked.append(path)
        if self.server.status:
            return self._send(b"", self.server.status, {}, with_body=with_body)
        parts = path.strip("/").removeprefix("api/").split("/")
        if parts[0] != "datasets":
            return self._model(path, parts, with_body=with_body)
        if not self.server.files(name := "/".join(parts[1:3])):
            return self._send(b"", 404, {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        if not path.startswith("/api/"):
            return self._file(self.server.root / name / "/".join(parts[5:]), with_body=with_body)
        verb = parts[3] if len(parts) > 3 else "revision"
        body = self._tree(name, "/".join(parts[5:])) if verb == "tree" else self._info(name)
        return self._send(json.dumps(body).encode(), 200, {"Content-Type": "application/json"}, with_body=with_body)

    def _model(self, path: str, parts: list[str], *, with_body: bool) -> None:
        """Answer about the checkpoint in `root/models/OWNER/NAME/`."""
        parts = parts[1:] if path.startswith("/api/") else parts
        name = f"models/{'/'.join(parts[:2])}"
        if not self.server.files(name):
            return self._send(b"", 404, {"X-Error-Code": "RepoNotFound"}, with_body=with_body)
        if len(parts) > 3 and parts[3] not in (COMMIT, "main"):
            return self._send(b"", 404, {"X-Error-Code": "RevisionNotFound"}, with_body=with_body)
        if not path.startswith("/api/"):
            return self._file(self.server.root / name / "/".join(parts[4:]), with_body=with_body)
        is_tree = parts[2:3] == ["tree"]
        body = self._tree(name, "/".join(parts[4:])) if is_tree else self._info(name) | {"id": "/".join(parts[:2])}
        return self._send(json.dumps(body).encode(), 200, {"Content-Type": "application/json"}, with_body=with_body)

    def _info(self, name: str) -> dict:
        folder, files = self.server.root / name, self.server.files(name)
        card, readme = {}, folder / "README.md"
        if readme.exists():
            card = yaml.safe_load(readme.read_text().split("---")[1])
        siblings = [{"rfilename": str(path.relative_to(folder)), "size": path.stat().st_size} for path in files]
        is_private = (folder / PRIVATE).exists()
        return {"id": name, "sha": COMMIT, "private": is_private, "tags": [], "siblings": siblings, "cardData": card}

    def _tree(self, name: str, below: str) -> list[dict]:
        folder = self.server.root / name
        entries = []
        for path in sorted((folder / below).rglob("*")):
            entry = {"path": str(path.relative_to(folder)), "oid": "0" * 40}
            kind = {"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
            if "recursive=true" in self.path.lower() or path.parent == folder / below:
                entries.append(entry | kind)
        return entries

    def _file(self, path: Path, *, with_body: bool) -> None:
        if not path.is_file():
            return self._send(b"", 404, {"X-Error-Code": "EntryNotFound"}, with_body=with_body)
        content, status = path.read_bytes(), 200
        headers = {
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        if (asked := self.headers.get("Range", "")).startswith("bytes="):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end = int(first), min(int(last or len(content)), len(content) - 1)
            headers["Content-Range"] = f"bytes {begin}-{end}/{len(content)}"
            content, status = content[begin : end + 1], 206
        return self._send(content, status, headers, with_body=with_body)

    def _send(self, body: bytes, status: int, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)


@contextlib.contextmanager
def hub_of(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Make a server of the data sets in `root` the hub of this process, which read HF_ENDPOINT when it was imported."""
    import datasets.config
    from huggingface_hub import HfFileSystem, constants

    HfFileSystem.clear_instance_cache()  # it knows the files of an earlier server, which may have had the same port
    server = HubServer(root)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", server.url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
