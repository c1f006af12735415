"""A server on loopback that speaks as much of the Hugging Face hub's API as a model repository is written by.

All files are sent within the commit, as the hub asks for small ones; large ones would go by its own storage.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

import pytest


class Repository(ThreadingHTTPServer):
    """Any repository; there is one.

    Attributes:
        commits: Files of each commit by path, and its message, by its hash, in order.
        tags: Hashes by tag.
        branches: Hashes by branch, without the main one.
        tokens: Authorization headers of all requests, each with the last one that had it.
        is_private: Whether it was made so; None if it was not made.
        is_failing: Whether it refuses everything.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answers)
        self.commits: dict[str, tuple[dict[str, bytes], str]] = {}
        self.tags: dict[str, str] = {}
        self.branches: dict[str, str] = {}
        self.main = ""
        self.tokens: dict[str | None, str] = {}
        self.is_private: bool | None = None
        self.is_failing = False

    @property
    def url(self) -> str:
        """Value of HF_ENDPOINT."""
        return f"http://127.0.0.1:{self.server_address[1]}"

    def files(self, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a tag, a commit or the main branch."""
        commit = self.tags.get(revision) or self.branches.get(revision) or self.main
        return self.commits.get(revision if revision in self.commits else commit, ({}, ""))[0]


class _Answers(BaseHTTPRequestHandler):
    server: Repository

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def do_DELETE(self) -> None:
        self._answer()

    def _answer(self) -> None:
        here, path = self.server, unquote(urlsplit(self.path).path).strip("/").split("/")
        if path[-1] == "agent-harnesses":  # what huggingface_hub asks for itself once a day, without a token
            return self._send({}, 404)
        here.tokens[self.headers.get("Authorization")] = f"{self.command} {self.path}, {self.headers.get('User-Agent')}"
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if here.is_failing:
            return self._send({"error": "the hub is down"}, 503)
        if "resolve" in path:
            return self._file(path[-2], path[-1])
        match path[1], path[-2]:
            case "repos", _:
                asked = json.loads(body)
                here.is_private = asked.get("visibility") == "private" or bool(asked.get("private"))
                self._send({"url": f"{here.url}/someone/run", "id": "1", "name": "someone/run"})
            case "validate-yaml", _:
                self._send({"errors": [], "warnings": []})
            case _, "preupload":
                files = json.loads(body)["files"]
                self._send({"files": [{**f, "uploadMode": "regular", "shouldIgnore": False} for f in files]})
            case _, "commit":
                self._commit(body, path[-1])
            case _, "branch":
                if self.command == "DELETE":
                    del here.branches[path[-1]]
                else:
                    here.branches[path[-1]] = here.main
                self._send({})
            case _, "tag":
                if self.command == "DELETE":
                    del here.tags[path[-1]]
                else:
                    here.tags[json.loads(body)["tag"]] = path[-1]
                self._send({})
            case _, "tree":
                self._send(
                    [
                        {"type": "file", "path": name, "size": len(data), "oid": "0" * 40}
                        for name, data in here.files(path[-1]).items()
                    ]
                )
            case _ if path[-1] == "refs":
                tags = [
                    {"name": name, "ref": f"refs/tags/{name}", "targetCommit": at} for name, at in here.tags.items()
                ]
                self._send({"branches": [], "converts": [], "tags": tags})
            case _:
                names = [{"rfilename": name} for name in here.files()]
                self._send(
                    {
                        "id": "someone/run",
                        "sha": here.main or "0" * 40,
                        "siblings": names,
                        "private": True,
                        "tags": [],
                    }
                )

    def _commit(self, body: bytes, revision: str) -> None:
        files, message = dict(self.server.files(revision)), ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        name = hashlib.sha1(body).hexdigest()
        self.server.commits[name] = (files, message)
        if revision in self.server.branches:
            self.server.branches[revision] = name
        else:
            self.server.main = name
        self._send({"commitOid": name, "commitUrl": f"{self.server.url}/someone/run/commit/{name}"})

    def _file(self, revision: str, name: str) -> None:
        data = self.server.files(revision).get(name)
        if data is None:
            return self._send({}, 404, {"X-Error-Code": "EntryNotFound"})
        commit = self.server.tags.get(revision, revision)
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
        self._send(data, 200, headers)

    def _send(self, body: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        kind = {"Content-Type": "application/json", "Content-Length": str(len(data))}
        for name, value in {**kind, **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def hub_repository(monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """Make a server of one repository the hub of this process, which read HF_ENDPOINT when it was imported."""
    from huggingface_hub import constants

    server = Repository()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
