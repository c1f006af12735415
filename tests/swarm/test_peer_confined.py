"""A peer needs no more than `compose.yaml` leaves it: no root, no capability, no place to write to but its folder."""

from __future__ import annotations

import json
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

from spes_p2p.cli import load_settings
from spes_p2p.config import PeerConfig, RoundConfig
from spes_p2p.peer.output_dir import can_resume, check_output
from spes_p2p.training.checkpoint import LAST_SECONDS

pytestmark = pytest.mark.timeout(480)

SECONDS = 150
REACHED_BY_ALL = all(parent.stat().st_mode & 0o001 for parent in Path(sys.executable).resolve().parents)
ENTRY = json.loads(re.search(r"^ENTRYPOINT (.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)[1])
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


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to give things up")
def test_a_peer_without_privileges_on_a_read_only_tree_trains_to_the_end(folder: Path) -> None:
    """And again after that: a container's second start has the words of its first."""
    peer = ["--run-id", "confined", "--config", folder / "settings.yaml", "--device", "cpu"]
    peer += ["--text", folder / "corpus.jsonl", "--threads", "1", "--seed-seconds", "0", "--host", "127.0.0.1"]
    words = ["unshare", "-m", "sh", "-c", CONFINED, "sh", ROOT, UID, *ENTRY, *peer]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "HOME": str(folder), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    for start in ("first", "second"):
        ended = subprocess.run(list(map(str, words)), env=environment, capture_output=True, text=True, timeout=SECONDS)
        assert ended.returncode == 0, f"{start}: {ended.stderr[-3000:]}"
        assert "the run is finished" in ended.stderr
    assert {path.stat().st_uid for path in (folder / "peer").rglob("*")} == {UID}
    assert (folder / "peer" / "identity.key").stat().st_mode & 0o777 in (0o400, 0o600)
    health = [sys.executable, "-m", "spes_p2p", "health", "--output", folder / "peer"]
    assert subprocess.run(list(map(str, health)), cwd=ROOT, timeout=SECONDS).returncode == 0


@pytest.mark.parametrize(
    ("left", "word"),
    [
        ([], None),
        (["peer"], None),
        (["peer/identity.key", "peer/versions"], "--resume"),
        (["peer/identity.key", "peer/.starting"], None),
    ],
)
def test_a_containers_start_goes_on_with_what_its_volume_holds(
    left: list[str], word: str | None, tmp_path: Path
) -> None:
    """As `can_resume` tells it, and as the peer then takes it."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    output = tmp_path / "data dir" / "peer"
    for name in left:
        (output.parent / name).mkdir(parents=True)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(output.parent)}
    words = [*ENTRY, "--run-id", "a name"]
    told = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=30)
    first = ["-m", "spes_p2p", "peer", "--output", str(output), "--cache", str(output.parent / "cache")]
    assert told.stdout.splitlines() == [*first, *filter(None, [word]), "--run-id", "a name"]
    assert can_resume(output) == (word == "--resume")
    check_output(output, resume=word == "--resume", overwrite=False)


def test_a_container_has_the_time_to_leave_in_order_and_comes_back_unless_the_run_is_over() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["peer"]
    minutes = int(service["stop_grace_period"].removesuffix("m"))
    assert 60 * minutes > RoundConfig().exchange_seconds + LAST_SECONDS, "handing over, and the last save"
    assert service["restart"] == "on-failure", "who has finished the run ends with 0"


def test_the_container_takes_everything_away() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["peer"]
    assert service["cap_drop"] == ["ALL"] and service["security_opt"] == ["no-new-privileges:true"]
    assert service["read_only"] and service["pids_limit"] and service["mem_limit"]
    image = (ROOT / "Dockerfile").read_text()
    assert re.search(r"^USER 10001:10001$", image, re.MULTILINE) and "--require-hashes" in image
    assert "HEALTHCHECK" in image


@pytest.mark.parametrize(("code", "ended"), [(0, 0), (2, 0), (75, 75), (1, 1), (130, 0)])
def test_a_container_is_not_started_again_after_a_mistake_in_its_settings(
    code: int, ended: int, tmp_path: Path
) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f"#!/bin/sh\nexit {code}\n")
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    told = subprocess.run(ENTRY, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30)
    assert told.returncode == ended and ("start this container again" in told.stderr) == (code == 2)


def test_a_containers_end_reaches_its_peer_which_takes_its_time(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(
        "#!/bin/sh\ntrap 'sleep 0.5; echo handed over; exit 130' TERM\necho here\nwhile :; do sleep 0.1; done\n"
    )
    python.chmod(0o755)
    environment = {"PATH": f"{python.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    with subprocess.Popen(ENTRY, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None and started.stdout.readline() == "here\n"
        started.terminate()
        assert started.stdout.readline() == "handed over\n" and started.wait(SECONDS) == 0


def test_a_container_shows_its_page_to_this_machine_alone() -> None:
    for service in yaml.safe_load((ROOT / "compose.yaml").read_text())["services"].values():
        (page,) = (port for port in service["ports"] if port.endswith(":8080"))
        assert page.startswith("127.0.0.1:") and service["shm_size"] and service["volumes"] == ["data:/data"]
        assert service["command"][-2:] == ["--page", "0.0.0.0:8080"]
        words = [word.replace("${RUN_ID-}", "r") for word in service["command"]]
        assert load_settings(PeerConfig, words).port == 4001


def test_the_image_for_cpus_has_the_same_packages_without_cudas() -> None:
    """As its build takes them out of the lock."""
    (program,) = re.findall(r"awk '(.*)' /requirements", (ROOT / "Dockerfile").read_text())
    words = ["awk", program, str(ROOT / "requirements.lock")]
    kept = subprocess.run(words, capture_output=True, text=True, check=True, timeout=30).stdout
    names = [
        set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
        for text in ((ROOT / "requirements.lock").read_text(), kept)
    ]
    gone = names[0] - names[1]
    assert gone >= {"torch", "triton", "nvidia-cublas"} and len(names[1]) > 100
    assert all(re.match(r"(nvidia-|cuda-|triton$|torch$)", name) for name in gone)
    assert all(line.startswith("    --hash=") or "==" in line for line in kept.splitlines())


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


def test_the_dockerfile_has_no_mistake_that_hadolint_knows() -> None:
    words = [Path(sys.executable).parent / "hadolint", ROOT / "Dockerfile"]
    told = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=60)
    assert told.returncode == 0, told.stdout


def test_what_the_image_holds_is_all_that_its_entry_point_and_health_check_need(tmp_path: Path) -> None:
    """What `.dockerignore` leaves of the copied folders, without an engine; a build would refuse what it leaves out."""
    image = (ROOT / "Dockerfile").read_text()
    left = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = dict(re.findall(r"^COPY (\S+) (/\S*)$", image, re.MULTILINE))
    assert copied.keys() == left and "scripts" in copied
    for source, target in copied.items():
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, tmp_path / target[1:], symlinks=True)
    environment = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    here = tmp_path / "app"
    assert (here / "spes_p2p" / "configs" / "local_experiment.yaml").resolve().is_relative_to(here)
    check = json.loads(re.search(r"HEALTHCHECK .*\\\n +CMD (.*)$", image, re.MULTILINE)[1])
    for words, said in (([*ENTRY, "--help"], "usage: spes peer"), (check, "has not joined yet")):
        told = subprocess.run(words, cwd=here, env=environment, capture_output=True, text=True, timeout=60)
        assert said in told.stdout + told.stderr, told
