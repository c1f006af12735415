"""A peer needs no more than `compose.yaml` leaves it: no root, no capability, no place to write to but its folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from peer_processes import ROOT, write_corpus, write_settings

pytestmark = pytest.mark.timeout(240)

SECONDS = 150
REACHED_BY_ALL = all(parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents)
UID = 10001 if REACHED_BY_ALL else 0
"""Where this Python lies in root's own home no other user can run it: then root, without capabilities."""
CONFINED = """
mount -o bind,ro "$1" "$1" && cd "$1" && uid=$2 && shift 2
exec setpriv --reuid $uid --regid $uid --clear-groups --no-new-privs --inh-caps=-all --bounding-set=-all "$@"
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder of the unprivileged user's own; pytest's are root's."""
    folder = Path(tempfile.mkdtemp(prefix="confined-"))
    write_corpus(folder / "corpus.jsonl")
    write_settings(folder / "settings.yaml")
    for path in [folder, *folder.iterdir()]:
        os.chown(path, UID, UID)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to give things up")
def test_a_peer_without_privileges_on_a_read_only_tree_trains_to_the_end(folder: Path) -> None:
    peer = ["peers/run_peer.py", "--run-id", "confined", "--config", folder / "settings.yaml", "--device", "cpu"]
    peer += ["--text", folder / "corpus.jsonl", "--output", folder / "out", "--cache", folder / "cache"]
    peer += ["--threads", "1", "--seed-seconds", "0"]
    words = ["unshare", "-m", "sh", "-c", CONFINED, "sh", ROOT, UID, sys.executable, *peer]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    ended = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "the run is finished" in ended.stderr
    assert {path.stat().st_uid for path in (folder / "out").rglob("*")} == {UID}
    assert (folder / "out" / "identity.key").stat().st_mode & 0o777 in (0o400, 0o600)
    health = [sys.executable, "scripts/health.py", "--output", folder / "out"]
    assert subprocess.run(list(map(str, health)), cwd=ROOT, timeout=SECONDS).returncode == 0


def test_the_container_takes_everything_away() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["peer"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] and service["pids_limit"] and service["mem_limit"]
    image = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", image, re.MULTILINE) and "--require-hashes" in image
    assert "HEALTHCHECK" in image


def test_every_requirement_of_the_container_is_pinned_and_hashed() -> None:
    entries = re.split(r"\n(?=\S)", (ROOT / "requirements.lock").read_text().strip())
    assert all(re.match(r"[\w.-]+==\S+ ", entry) and "--hash=sha256:" in entry for entry in entries)
    pinned = {match[1].lower().replace("_", "-") for entry in entries if (match := re.match(r"([\w.-]+)==", entry))}
    tested = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    versions = {name.lower().replace("_", "-"): version for name, version in (line.split("==") for line in tested)}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()
        assert versions.get(name.lower().replace("_", "-"), version) == version, "the tests ran with another version"
    assert {"torch", "hivemind", "transformers", "safetensors"} <= pinned
