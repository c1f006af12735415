"""What is read back from a store is what was uploaded, and no upload stops or slows a watch."""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hub_repository import hub_repository
from model_folders import PeerFolder, assert_same
from s3_server import RCLONE, SECRET, interrupted_upload, s3_environment, s3_server

from spes_p2p.cli import load_settings
from spes_p2p.commands import export as export_command
from spes_p2p.config.commands import ExportConfig, MonitorConfig
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor import uploads as uploads_module
from spes_p2p.monitor.checkpoints import Checkpoints, Uploads
from spes_p2p.monitor.model_folder import ModelFolder, export
from spes_p2p.monitor.stores import FolderStore, StoreError, open_store
from spes_p2p.monitor.uploads import (
    MANIFEST_FILE,
    CheckpointManifest,
    StoredCheckpoints,
    Uploaded,
    describe,
    open_destination,
    to_keep,
)
from spes_p2p.swarm.p2p.identity import Identity

OWNER = "QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM"
PART = 1000
SECONDS = 60.0
needs_rclone = pytest.mark.skipif(RCLONE is None, reason="rclone is not installed: extra `dev`")


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "seed" not in request.fixturenames:
        monkeypatch.setattr(uploads_module, "PART_BYTES", PART)


@pytest.fixture(params=["folder", pytest.param("s3", marks=needs_rclone)])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder, and a bucket of a real server."""
    if request.param == "folder":
        yield str(tmp_path / "store")
        return
    with s3_server(tmp_path / "served") as server:
        for name, value in s3_environment(server.port).items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/some/run"


def checkpoint(folder: Path, round: int = 7, loss: float | None = 2.5, run: str = "0" * 64) -> CheckpointManifest:
    """Make a checkpoint of which one file is the same in all rounds."""
    folder.mkdir()
    (folder / "config.json").write_bytes(b"the same " * 500)
    (folder / "model.safetensors").write_bytes(random.Random(round).randbytes(10 * PART + 10))
    (folder / "empty").touch()
    return describe(folder, run_id="run", manifest=run, founder=OWNER, round=round, held_out=loss)


def stored(place: str) -> StoredCheckpoints:
    return StoredCheckpoints(open_store(place), place)


def assert_files_equal(first: Path, second: Path) -> None:
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in names)


def go_on(sent: int) -> None:
    """Keep to no rate."""


def test_what_comes_back_is_what_was_uploaded_and_nothing_is_sent_twice(place: str, tmp_path: Path) -> None:
    first, second = checkpoint(tmp_path / "a", 7), checkpoint(tmp_path / "b", 8)
    sent = stored(place).upload(tmp_path / "a", first, go_on)
    assert sent.kept_bytes == 0 and sent.sent_bytes > first.num_bytes - 4 * PART, "equal parts are one"
    again = stored(place).upload(tmp_path / "a", first, go_on)
    assert again.sent_bytes == len(first.model_dump_json())
    shared = stored(place).upload(tmp_path / "b", second, go_on)
    assert shared.sent_bytes < 10 * PART + 10 + 3000 and shared.kept_bytes > 0, "config.json was there"
    for number, folder in ((None, "b"), (7, "a")):
        stored(place).download(number, tmp_path / f"back-{folder}")
        assert_files_equal(tmp_path / folder, tmp_path / f"back-{folder}")
    with pytest.raises(DataError, match="rounds 7, 8, not 9; set --round"):
        stored(place).download(9, tmp_path / "c")


def test_an_upload_that_was_cut_off_shows_nothing_and_goes_on(place: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "a")

    def cut(sent: int) -> None:
        if sent > 5 * PART:
            raise StoreError("cut off")

    with pytest.raises(StoreError, match="cut off"):
        stored(place).upload(tmp_path / "a", made, cut)
    assert not stored(place).checkpoints()
    with pytest.raises(DataError, match="has no checkpoint"):
        stored(place).download(None, tmp_path / "none")
    rest = stored(place).upload(tmp_path / "a", made, go_on)
    assert rest.kept_bytes >= 5 * PART and rest.sent_bytes < made.num_bytes
    stored(place).download(None, tmp_path / "back")
    assert_files_equal(tmp_path / "a", tmp_path / "back")


def test_the_best_and_the_newest_stay_and_with_them_only_their_parts(place: str, tmp_path: Path) -> None:
    losses = {1: 5.0, 2: 1.5, 3: 4.0, 4: None, 5: 3.0}
    for number, loss in losses.items():
        stored(place).upload(tmp_path / f"{number}", checkpoint(tmp_path / f"{number}", number, loss), go_on)
    open_store(place).put("notes.txt", b"somebody else's")
    assert stored(place).tidy(2) == [2, 4, 5]
    found = stored(place).checkpoints()
    assert list(found) == [2, 4, 5]
    named = {f"parts/{part}" for each in found.values() for part in each.parts}
    assert set(open_store(place).sizes("parts/")) == named
    assert open_store(place).get("notes.txt", 100) == b"somebody else's"
    for number in found:
        stored(place).download(number, tmp_path / f"back-{number}")
        assert_files_equal(tmp_path / f"{number}", tmp_path / f"back-{number}")


def test_to_keep() -> None:
    manifest = CheckpointManifest.model_construct
    rounds = [manifest(round=number, held_out=loss) for number, loss in {1: 2.0, 2: 1.0, 3: 1.0, 4: None}.items()]
    assert to_keep(rounds, 1) == {3, 4}, "of equal ones the newer"
    assert to_keep(rounds[3:], 2) == {4} and to_keep([], 2) == set()


def test_a_damaged_part_is_refused_and_an_interrupted_download_goes_on(place: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "a")
    stored(place).upload(tmp_path / "a", made, go_on)
    part = next(file for file in made.files if file.name == "model.safetensors").parts[4]
    data = open_store(place).get(f"parts/{part}", PART)
    open_store(place).put(f"parts/{part}", bytes(PART))
    with pytest.raises(DataError, match=f"parts/{part[:12]}... is damaged"):
        stored(place).download(None, tmp_path / "back")
    assert not (tmp_path / "back").exists()
    open_store(place).delete([f"parts/{made.files[0].parts[0]}"])  # of config.json, which is here already
    open_store(place).put(f"parts/{part}", data)
    stored(place).download(None, tmp_path / "back")
    assert_files_equal(tmp_path / "a", tmp_path / "back")


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", ".ssh", "a/b", "", "a\n"])
def test_a_manifest_names_files_in_its_folder_alone(name: str, tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "a").model_dump()
    made["files"][0]["name"] = name
    text = CheckpointManifest.model_construct(**made).model_dump_json(warnings=False)
    FolderStore(tmp_path / "store").put("rounds/round-000007.json", text.encode())
    with pytest.raises(DataError, match=r"round-000007.json: no manifest of a checkpoint: files.0.name"):
        stored(str(tmp_path / "store")).download(None, tmp_path / "back")


def test_what_is_larger_than_it_may_be_is_not_read(place: str) -> None:
    open_store(place).put("parts/x", bytes(11))
    assert open_store(place).get("parts/x", 11) == bytes(11)
    with pytest.raises(StoreError, match="more than 10 bytes"):
        open_store(place).get("parts/x", 10)


def test_lengths_must_fit_the_parts(tmp_path: Path) -> None:
    made = checkpoint(tmp_path / "a")
    longer = made.files[0].model_copy(update={"num_bytes": 10**9})
    with pytest.raises(DataError, match="other lengths"):
        CheckpointManifest.parse(made.model_copy(update={"files": (longer,)}).model_dump_json().encode())


def test_another_runs_store_is_left_alone(place: str, tmp_path: Path) -> None:
    stored(place).upload(tmp_path / "a", checkpoint(tmp_path / "a"), go_on)
    with pytest.raises(StoreError, match="checkpoints of another run 'run'; name another place"):
        stored(place).upload(tmp_path / "b", checkpoint(tmp_path / "b", 8, run="1" * 64), go_on)
    assert list(stored(place).checkpoints()) == [7]


# ------------------------------------------------------------------ beside the watch


class Failing:
    """A destination that fails until it is mended, and then notes what comes."""

    def __init__(self) -> None:
        self.is_mended = False
        self.attempts = threading.Semaphore(0)
        self.rounds: list[int] = []
        self.failure: Exception = StoreError("no route to the store")

    def upload(self, folder: Path, checkpoint: CheckpointManifest, wait: Callable[[int], None]) -> Uploaded:
        self.attempts.release()
        if not self.is_mended:
            raise self.failure
        self.rounds.append(checkpoint.round)
        return Uploaded(1, 0)

    def tidy(self, keep_last: int) -> list[int]:
        return self.rounds


def test_a_failing_upload_holds_nothing_up_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    failing = Failing()
    uploads = Uploads("there", lambda: failing, keep_last=2, retry_seconds=0.01)
    for number in (1, 2, 3):
        uploads.start((tmp_path / f"{number}", checkpoint(tmp_path / f"{number}", number)))
        for _ in range(4):
            assert failing.attempts.acquire(timeout=SECONDS)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "cannot upload round 1 to there: no route to the store; the watch goes on" in caplog.text
    failing.is_mended = True
    assert uploads.finish()
    assert failing.rounds == [3], "the newest only"
    uploads.close()


def test_the_best_checkpoint_is_uploaded_though_newer_ones_came_before_it_was(tmp_path: Path) -> None:
    failing = Failing()
    uploads = Uploads("there", lambda: failing, keep_last=2, retry_seconds=0.01)
    for number, loss in {1: 5.0, 2: 3.0, 3: 4.0, 4: 4.5}.items():
        made = checkpoint(tmp_path / f"{number}", number).model_copy(update={"held_out": loss})
        uploads.start((tmp_path / f"{number}", made))
    failing.is_mended = True
    assert uploads.finish()
    assert [number for number in failing.rounds if number in (2, 4)] == [4, 2] and 3 not in failing.rounds
    uploads.close()


def test_the_best_checkpoint_is_uploaded_once_though_the_store_keeps_a_better_one(tmp_path: Path) -> None:
    """Of an earlier monitor: the store drops this one's best, which must not be sent again and again."""
    made = checkpoint(tmp_path / "a")
    failing = Failing()
    failing.is_mended = True
    failing.tidy = lambda keep_last: []  # type: ignore[method-assign]
    uploads = Uploads("there", lambda: failing, keep_last=1, retry_seconds=0.01)
    uploads.start((tmp_path / "a", made))
    assert uploads.finish() and failing.rounds == [7]
    uploads.close()


@pytest.mark.parametrize("failure", [StoreError("no route to the store"), KeyError("ETag")])
def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path: Path, failure: Exception) -> None:
    failing = Failing()
    failing.failure = failure
    uploads = Uploads("there", lambda: failing, keep_last=2, retry_seconds=0.01)
    uploads.start((tmp_path / "a", checkpoint(tmp_path / "a")))
    assert not uploads.finish()
    uploads.close()


def test_a_rate_is_kept_on_average(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last part is waited for until as many seconds after the start as all bytes take at this rate: 23 s."""
    made = checkpoint(tmp_path / "a")
    uploads = Uploads("there", lambda: stored(str(tmp_path / "store")), keep_last=2, mbit=0.005)
    waits: list[tuple[float, float]] = []
    monkeypatch.setattr(uploads._stopped, "wait", lambda seconds: bool(waits.append((time.monotonic(), seconds))))
    began = time.monotonic()
    uploads.start((tmp_path / "a", made))
    assert uploads.finish()
    end = max(at + seconds for at, seconds in waits)
    seconds = sum(made.parts.values()) * 8 / 0.005e6
    assert began + seconds <= end <= waits[0][0] + seconds
    uploads.close()


def test_a_monitors_checkpoints_are_the_models_of_their_rounds(tmp_path: Path) -> None:
    """Kept here and there by one rule, written again after a restart, and exported from the store by one command."""
    peer = PeerFolder(tmp_path / "peer", Identity(tmp_path / "identity"))
    run, place = ModelFolder(peer.folder).manifest, str(tmp_path / "store")

    def start(every: int = 2) -> tuple[Checkpoints, Uploads]:
        uploads = Uploads(place, lambda: stored(place), keep_last=1, retry_seconds=0.01)
        save = lambda folder, number, loss: export(peer.folder, folder, number, held_out=loss)  # noqa: E731
        return Checkpoints(tmp_path / "kept", run, save, every=every, keep_last=1, uploads=uploads), uploads

    checkpoints, uploads = start()
    models = {}
    for number, loss in {1: 9.0, 2: 3.0, 3: 8.0, 4: 5.0, 5: 4.0}.items():
        models[number] = peer.save(number)
        checkpoints.evaluated(number, loss)
        assert uploads.finish()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["round-000002", "round-000004"]
    checkpoints.close()
    checkpoints, uploads = start()
    models[6] = peer.save(6)
    export(peer.folder, tmp_path / "model", 6)
    checkpoints.take(6, 6.0, made=tmp_path / "model")
    checkpoints.finish()
    checkpoints.close()
    assert list(stored(place).checkpoints()) == [2, 6] and stored(place).checkpoints()[2].held_out == 3.0
    for number in (2, 6):
        output = tmp_path / f"back-{number}"
        flags = [place, "--output", str(output), "--round", f"{number}"]
        assert export_command.main(load_settings(ExportConfig, flags)) == 0
        assert_same(output, models[number])
        assert "Held-out loss: 3.0000" in (tmp_path / "back-2" / "README.md").read_text()
    with pytest.raises(ConfigError, match="add --overwrite"):
        export_command.main(load_settings(ExportConfig, [place, "--output", str(output)]))
    export_command.main(load_settings(ExportConfig, [place, "--output", str(output), "--overwrite", "--round", "2"]))
    assert_same(output, models[2])
    (mine := tmp_path / "thesis").mkdir()
    (mine / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="thesis exists and is no checkpoint; name another folder"):
        export_command.main(load_settings(ExportConfig, [place, "--output", str(mine), "--overwrite"]))
    assert (mine / "notes.txt").read_text() == "mine", "a checkpoint is replaced, and nothing else"


@pytest.mark.parametrize(
    "place",
    ["gs://bucket/run", "http://127.0.0.1:9000/bucket", "s3://KEY:SECRET@bucket/x", "s3://", "hf://name", "s3:bucket"],
)
def test_a_place_of_another_form_is_refused_with_what_there_is(place: str) -> None:
    flags = ["--run-id", "run", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x", "--upload", place]
    forms = "name s3://BUCKET/PREFIX, hf://OWNER/NAME or a folder, and no credentials"
    with pytest.raises(ConfigError, match=forms) as told:
        load_settings(MonitorConfig, flags)
    assert "SECRET" not in str(told.value)


@needs_rclone
@pytest.mark.parametrize("fault", ["no credentials", "wrong key", "no bucket", "no server"])
def test_a_store_that_refuses_is_one_line_without_secrets(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spes_p2p.monitor import stores

    monkeypatch.setattr(stores, "TRIES", 1)
    with s3_server(tmp_path / "served") as server:
        variables = s3_environment(server.port)
        if fault == "no credentials":
            variables |= {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}
        if fault == "wrong key":
            variables["AWS_ACCESS_KEY_ID"] = "AKIAOTHER"
        if fault == "no server":
            server.kill()
        for name, value in variables.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        place = "s3://absent/run" if fault == "no bucket" else "s3://bucket/run"
        with pytest.raises(StoreError) as told:
            stored(place).upload(tmp_path / "a", checkpoint(tmp_path / "a"), go_on)
    words = {"no credentials": "set AWS_ACCESS_KEY_ID", "wrong key": "InvalidAccessKey", "no bucket": "NoSuchBucket"}
    assert "\n" not in str(told.value) and SECRET not in str(told.value)
    assert words.get(fault, "Could not connect") in str(told.value)


@pytest.mark.full  # a minute; with every commit one is cut off, above
@needs_rclone
def test_an_upload_of_300_mb_killed_five_times_sends_at_most_a_third_more(tmp_path: Path, seed: int) -> None:
    found = interrupted_upload(tmp_path, 300_000_000, seed)
    assert found.is_equal and found.sent_bytes <= 1.3 * found.num_bytes, found
    assert SECRET not in (tmp_path / "uploader.log").read_text()


def test_a_hub_that_says_nothing_ends_no_upload_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads_module, "HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    made = checkpoint(tmp_path / "1", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"hf://someone/run: .*timed out"):
            open_destination("hf://someone/run").upload(tmp_path / "1", made, go_on)


def test_a_hub_repository_has_the_newest_model_and_a_tag_for_each_that_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_neverInAnyLog")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_repository(monkeypatch) as hub:
        destination = open_destination("hf://someone/run")
        for number, loss in {1: 2.0, 3: 3.0, 4: 4.0}.items():
            made = checkpoint(tmp_path / f"{number}", number, loss)
            destination.upload(tmp_path / f"{number}", made, go_on)
            destination.upload(tmp_path / f"{number}", made, go_on)
        assert hub.is_private and len(hub.commits) == 3
        assert destination.tidy(1) == [1, 4] and hub.tags.keys() == {"round-000001", "round-000004"}
        best = checkpoint(tmp_path / "2", 2, 1.0)  # was skipped for the newest
        destination.upload(tmp_path / "2", best, go_on)
        assert destination.tidy(1) == [2, 4] and hub.tags.keys() == {"round-000002", "round-000004"}
        assert not hub.branches
        for number, revision in ((4, "main"), (2, "round-000002")):
            folder = tmp_path / f"{number}"
            assert hub.files(revision) == {path.name: path.read_bytes() for path in folder.iterdir()}
        other = checkpoint(tmp_path / "other", 9, run="1" * 64)
        with pytest.raises(StoreError, match="hf://someone/run has checkpoints of another run"):
            destination.upload(tmp_path / "other", other, go_on)
        damaged, whole = "f" * 40, hub.tags["round-000002"]
        hub.commits, hub.tags["round-000002"] = {damaged: ({MANIFEST_FILE: b"{}"}, ""), **hub.commits}, damaged
        with pytest.raises(DataError, match=r"someone/run: round-000002: .*; delete that tag, or name another"):
            destination.checkpoints()
        hub.tags["round-000002"] = whole
        assert hub.tokens.keys() == {"Bearer hf_neverInAnyLog"}, hub.tokens
        hub.is_failing = True
        with pytest.raises(StoreError, match=r"hf://someone/run: .*; log in with `hf auth login`") as told:
            destination.upload(tmp_path / "other", other, go_on)
        assert "neverInAnyLog" not in str(told.value)
