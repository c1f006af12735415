"""What is read back from a place is what was uploaded, and no upload stops or slows a watch."""

import hashlib
import logging
import random
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import obstore
import pytest
from hub_repository import hub_repository
from model_folders import PeerFolder, assert_same
from s3_server import RCLONE, SECRET, s3_environment, s3_server

from spes_p2p.cli import load_settings
from spes_p2p.commands import export as export_command
from spes_p2p.commands.early import is_store
from spes_p2p.config.commands import ExportConfig, MonitorConfig
from spes_p2p.data import buckets
from spes_p2p.errors import ConfigError, DataError, SpesError
from spes_p2p.monitor import checkpoints as checkpoints_module
from spes_p2p.monitor import uploads as uploads_module
from spes_p2p.monitor.checkpoints import Checkpoints, describe
from spes_p2p.monitor.model_folder import ModelFolder, export
from spes_p2p.monitor.uploads import INFO_FILE, SUMS_FILE, Checkpoint, Store, StoreError, open_place, to_keep
from spes_p2p.swarm.p2p.identity import Identity

RUN: Any = SimpleNamespace(run_id="run", digest="0" * 64, founder="QmQ2rWrZ2XfZ9Dzsr3HwFvfTyjBpAXnZ8LV1GNGi1aSUuM")
OTHER: Any = SimpleNamespace(**{**vars(RUN), "digest": "1" * 64})
SECONDS = 60.0
GO_ON = threading.Event()
needs_rclone = pytest.mark.skipif(RCLONE is None, reason="rclone is not installed: extra `dev`")


@pytest.fixture(params=["folder", pytest.param("s3", marks=needs_rclone)])
def place(request, tmp_path, monkeypatch):
    """A folder, and a bucket of a real server."""
    if request.param == "folder":
        yield str(tmp_path / "the #1 store, 100%41")
        return
    with s3_server(tmp_path / "served") as server:
        for name, value in s3_environment(server.port).items():
            monkeypatch.setenv(name, value)
        yield "s3://bucket/some/run"


def model(folder: Path, round: int, loss: float | None = None) -> None:
    """Write a model of which two files differ from round to round."""
    folder.mkdir(parents=True)
    for name, num_bytes in {"config.json": 300, "empty": 0}.items():
        (folder / name).write_bytes(bytes(num_bytes))
    for index in (1, 2):
        (folder / f"model-{index}.safetensors").write_bytes(random.Random(f"{round} {index}").randbytes(5000))


def checkpoint(folder: Path, round: int = 7, loss: float | None = 2.5, run: Any = RUN, more: bytes = b"") -> Path:
    """Make a checkpoint, and return its folder."""
    made = folder / f"round-{round:06d}"
    model(made, round)
    (made / "model-3.safetensors").write_bytes(more)
    describe(made, run, round, loss)
    return made


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def objects(place: str) -> dict[str, int]:
    """Return the bytes of each object of a place by name."""
    return {each["path"]: each["size"] for page in obstore.list(Store(place)._store) for each in page}


def put(place: str, name: str, data: bytes) -> None:
    obstore.put(Store(place)._store, name, data)


def test_what_comes_back_is_what_was_uploaded(place, tmp_path):
    several = random.Random(1).randbytes(2 * uploads_module.CHUNK_BYTES + 10)
    made = {number: checkpoint(tmp_path, number, more=several) for number in (7, 8)}
    for folder in made.values():
        size = sum(path.stat().st_size for path in folder.iterdir())
        assert [Store(place).upload(folder, GO_ON) for _ in range(2)] == [size, 0], "nothing is sent twice"
    assert objects(place) == {
        f"{each.name}/{path.name}": path.stat().st_size for each in made.values() for path in each.iterdir()
    }
    assert list(Store(place).checkpoints()) == [7, 8] and is_store(place)
    for number, folder in ((None, made[8]), (7, made[7])):
        Store(place).download(number, back := tmp_path / f"back-{number}")
        assert files_of(folder) == files_of(back)
        subprocess.run(["sha256sum", "--check", "--strict", SUMS_FILE], cwd=back, check=True)
    with pytest.raises(DataError, match="rounds 7, 8, not 9; set --round"):
        Store(place).download(9, tmp_path / "c")


@needs_rclone
@pytest.mark.parametrize("has_boto3", [False, True])
def test_two_variables_are_enough_for_s3_and_boto3_reads_the_users_files(has_boto3, tmp_path, monkeypatch):
    with s3_server(tmp_path / "served") as server:
        variables = s3_environment(server.port)
        if has_boto3:
            key, secret, url = (
                variables.pop(f"AWS_{name}") for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL")
            )
            variables["AWS_CONFIG_FILE"] = str(tmp_path / "config")
            profile = f"[default]\naws_access_key_id={key}\naws_secret_access_key={secret}\nendpoint_url={url}\n"
            (tmp_path / "config").write_text(profile)
        else:
            monkeypatch.setitem(sys.modules, "boto3.session", None)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        Store("s3://bucket").upload(made := checkpoint(tmp_path), GO_ON)
        Store("s3://bucket").download(7, tmp_path / "back")
    assert files_of(made) == files_of(tmp_path / "back")


def test_an_upload_that_was_cut_off_shows_nothing_and_goes_on(place, tmp_path, monkeypatch):
    made, send = checkpoint(tmp_path), obstore.put
    names: list[str] = []

    def cut(store: Any, name: str, *rest: Any, **options: Any) -> object:
        names.append(name.partition("/")[2])
        if len(names) in (3, 6, 10):
            raise OSError("cut off")
        return send(store, name, *rest, **options)

    monkeypatch.setattr(obstore, "put", cut)
    for _ in range(2):
        with pytest.raises(StoreError, match="cut off"):
            Store(place).upload(made, GO_ON)
        assert not Store(place).checkpoints() and (place.startswith("s3:") or not is_store(place))
        with pytest.raises(DataError, match="has no checkpoint"):
            Store(place).download(None, tmp_path / "none")
    Store(place).upload(made, GO_ON)
    assert names[0] == INFO_FILE and names[-1] == SUMS_FILE and len(names) == 7 + 2, "what was sent stays"
    Store(place).download(None, tmp_path / "back")
    assert files_of(made) == files_of(tmp_path / "back")
    (made / "model-1.safetensors").write_bytes(bytes(5000))  # another model of the same round, of equal sizes
    describe(made, RUN, 7, 2.5)
    with pytest.raises(StoreError, match="cut off"):
        Store(place).upload(made, GO_ON)
    assert not Store(place).checkpoints(), "half of one and half of the other"
    Store(place).upload(made, GO_ON)
    Store(place).download(None, tmp_path / "other")
    assert files_of(made) == files_of(tmp_path / "other")


def test_a_file_that_has_changed_on_the_disk_is_not_uploaded(tmp_path):
    made = checkpoint(tmp_path)
    (made / "model-1.safetensors").write_bytes(bytes(5000))
    with pytest.raises(StoreError, match=r"model-1.safetensors has changed since it was written; delete .*round-0*7"):
        Store(str(tmp_path / "store")).upload(made, GO_ON)
    assert not Store(str(tmp_path / "store")).checkpoints()


def test_the_best_and_the_newest_stay_and_nothing_of_the_others(place, tmp_path, monkeypatch):
    for number, loss in {1: 5.0, 2: 1.5, 3: 4.0, 4: None, 5: 3.0}.items():
        Store(place).upload(checkpoint(tmp_path, number, loss), GO_ON)
    put(place, "notes.txt", b"somebody else's")
    put(place, "round-000001-mine/x", b"mine")
    with monkeypatch.context() as patched, pytest.raises(StoreError, match="this monitor ends"):
        (stop := threading.Event()).set()
        patched.setattr(stop, "is_set", iter([False, True]).__next__)
        Store(place).upload(checkpoint(tmp_path, 6), stop)
    Store(place).tidy(to_keep(Store(place).checkpoints().values(), 2))
    assert list(Store(place).checkpoints()) == [2, 4, 5]
    assert {name.partition("/")[0] for name in objects(place)} == {
        *("notes.txt", "round-000001-mine", "round-000002", "round-000004", "round-000005")
    }
    for number in (2, 4, 5):
        Store(place).download(number, tmp_path / f"back-{number}")


def test_to_keep():
    made = Checkpoint.model_construct
    rounds = [made(round=number, held_out=loss) for number, loss in {1: 2.0, 2: 1.0, 3: 1.0, 4: None}.items()]
    assert to_keep(rounds, 1) == {3, 4}, "of equal ones the newer"
    assert to_keep(rounds[3:], 2) == {4} and to_keep([], 2) == set()


def test_a_damaged_file_is_refused_and_an_interrupted_download_goes_on(place, tmp_path):
    made = checkpoint(tmp_path)
    Store(place).upload(made, GO_ON)
    for name in (SUMS_FILE, "model-2.safetensors"):
        put(place, f"round-000007/{name}", bytes((made / name).stat().st_size))
        with pytest.raises(DataError, match=f"round-000007/{name} is damaged; name another --round, or delete"):
            Store(place).download(None, tmp_path / "back")
        assert not (tmp_path / "back").exists()
        put(place, f"round-000007/{name}", (made / name).read_bytes())
    put(place, "round-000007/model-1.safetensors", b"which is here already")
    Store(place).download(None, tmp_path / "back")
    assert files_of(made) == files_of(tmp_path / "back")


BAD_INPUT = {
    **{
        name: (SUMS_FILE, f"{'0' * 64}  {name}\n", "names something else than files of its folder")
        for name in ("../x", "/etc/passwd", ".ssh", "a/b", "", "a\r")
    },
    "no digest": (SUMS_FILE, "0" * 63 + "  a\n", "names something else than files of its folder"),
    "no JSON": (INFO_FILE, "{", r"checkpoint.json is damaged: .*; delete that round, or name another place"),
    "no number": (INFO_FILE, '{"held_out": NaN}', "checkpoint.json is damaged"),
    "another round": (INFO_FILE, "8", "checkpoint.json is that of round-000008; delete that round"),
    "too large": (INFO_FILE, " " * (2**24 + 1), r"checkpoint.json has more than 16,777,216 bytes; delete that round"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_refused_in_one_line(case, tmp_path):
    name, text, told = BAD_INPUT[case]
    store, made = Store(str(tmp_path / "store")), checkpoint(tmp_path)
    if name == SUMS_FILE or text == "8":
        info = Checkpoint.model_validate_json((made / INFO_FILE).read_bytes())
        other = {"round": 8} if text == "8" else {"sums": hashlib.sha256(text.encode()).hexdigest()}
        (made / INFO_FILE).write_text(info.model_copy(update=other).model_dump_json())
    if text != "8":
        (made / name).write_bytes(text.encode())
    made.rename(tmp_path / "store" / made.name)
    with pytest.raises(DataError, match=told) as error:
        store.download(None, tmp_path / "back")
    assert "\n" not in str(error.value) and not (tmp_path / "back").exists()


class Failing:
    """A place that fails until it is mended, and then notes what comes."""

    def __init__(self) -> None:
        self.is_mended = False
        self.attempts = threading.Semaphore(0)
        self.rounds: list[int] = []
        self.known: dict[int, Checkpoint] = {}
        self.failure: Exception = StoreError("no route to the store")

    def checkpoints(self) -> dict[int, Checkpoint]:
        return self.known

    def upload(self, folder: Path, stop: threading.Event) -> int:
        self.attempts.release()
        if not self.is_mended:
            raise self.failure
        made = Checkpoint.model_validate_json((folder / INFO_FILE).read_bytes())
        self.rounds.append(made.round)
        self.known = {**self.known, made.round: made}
        return 1

    def tidy(self, kept: set[int]) -> None:
        self.known = {number: made for number, made in self.known.items() if number in kept}


@pytest.fixture
def failing(monkeypatch):
    failing = Failing()
    monkeypatch.setattr(checkpoints_module, "open_place", lambda _: failing)
    return failing


def checkpoints_of(folder: Path, place: str = "there") -> Checkpoints:
    return Checkpoints(folder, RUN, model, every=1, keep_last=1, upload=place, retry_seconds=0.01)


def end(checkpoints: Checkpoints) -> None:
    checkpoints.finish()
    checkpoints.close()


def test_a_failing_upload_holds_nothing_up_and_is_said_once(tmp_path, failing, caplog):
    caplog.set_level(logging.INFO)
    checkpoints = checkpoints_of(tmp_path / "kept")
    for number, loss in {1: 5.0, 2: 3.0, 3: 4.0, 4: 4.5}.items():
        checkpoints.evaluated(number, loss)
        for _ in range(3):
            assert failing.attempts.acquire(timeout=SECONDS)
    assert [record.levelno for record in caplog.records].count(logging.WARNING) == 1
    assert "cannot upload round 1 to there: no route to the store; the watch goes on" in caplog.text
    failing.is_mended = True
    end(checkpoints)
    assert failing.rounds == [4, 2], "the newest, then the best"


def test_what_the_place_would_drop_again_is_not_uploaded(tmp_path, failing):
    """It has a better one, of an earlier monitor."""
    made = checkpoint(tmp_path, 3, 1.0)
    failing.is_mended, failing.known = True, {3: Checkpoint.model_validate_json((made / INFO_FILE).read_bytes())}
    checkpoints = checkpoints_of(tmp_path / "kept")
    for number, loss in {4: 2.0, 5: 3.0}.items():
        checkpoints.evaluated(number, loss)
        checkpoints.finish()
    checkpoints.close()
    end(checkpoints_of(tmp_path / "kept"))  # both are here still
    assert failing.rounds == [4, 5] and failing.known.keys() == {3, 5}


@pytest.mark.parametrize("failure", [StoreError("no route to the store"), KeyError("ETag")])
def test_the_end_of_a_run_does_not_wait_for_ever(tmp_path, failing, failure, caplog):
    failing.failure = failure
    checkpoints = checkpoints_of(tmp_path / "kept")
    checkpoints.evaluated(1, 2.0)
    end(checkpoints)
    assert f"the run's last model was not uploaded; it is in {tmp_path / 'kept'}" in caplog.text


def test_another_runs_place_is_left_alone(place, tmp_path, caplog):
    Store(place).upload(checkpoint(tmp_path, 1, run=OTHER), GO_ON)
    before = objects(place)
    checkpoints = checkpoints_of(tmp_path / "kept", place)
    checkpoints.evaluated(8, 1.0)
    end(checkpoints)
    assert f"{place} has checkpoints of another run; name another place with --upload" in caplog.text
    assert objects(place) == before


def test_a_monitors_checkpoints_are_the_models_of_their_rounds(tmp_path):
    """Kept here and there by one rule, written again after a restart, and exported from the store by one command."""
    peer = PeerFolder(tmp_path / "peer", Identity(tmp_path / "identity"))
    run, place = ModelFolder(peer.folder).manifest, str(tmp_path / "store")

    def start() -> Checkpoints:
        save = lambda folder, number, loss: export(peer.folder, folder, number, held_out=loss)  # noqa: E731
        return Checkpoints(tmp_path / "kept", run, save, every=2, keep_last=1, upload=place)

    checkpoints = start()
    models = {}
    for number, loss in {1: 9.0, 2: 3.0, 3: 8.0, 4: 5.0, 5: 4.0}.items():
        models[number] = peer.save(number)
        checkpoints.evaluated(number, loss)
        checkpoints.finish()
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["round-000002", "round-000004"]
    checkpoints.close()
    checkpoints = start()
    models[6] = peer.save(6)
    export(peer.folder, tmp_path / "model", 6)
    checkpoints.take(6, 6.0, made=tmp_path / "model")
    end(checkpoints)
    assert list(Store(place).checkpoints()) == [2, 6] and Store(place).checkpoints()[2].held_out == 3.0
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
def test_a_place_of_another_form_is_refused_with_what_there_is(place):
    flags = ["--run-id", "run", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/x", "--upload", place]
    forms = "name s3://BUCKET/PREFIX, hf://OWNER/NAME or a folder, and no credentials"
    with pytest.raises(ConfigError, match=forms) as told:
        load_settings(MonitorConfig, flags)
    assert "SECRET" not in str(told.value)


@needs_rclone
@pytest.mark.parametrize("fault", ["no credentials", "no boto3", "wrong key", "no bucket", "no server"])
def test_a_store_that_refuses_is_one_line_without_secrets(fault, tmp_path, monkeypatch):
    monkeypatch.setattr(buckets, "RETRIES", 0)
    with s3_server(tmp_path / "served") as server:
        variables = s3_environment(server.port)
        if fault in ("no credentials", "no boto3"):
            variables |= {"AWS_ACCESS_KEY_ID": ""}
        if fault == "no boto3":
            monkeypatch.setitem(sys.modules, "boto3.session", None)
        if fault == "wrong key":
            variables["AWS_ACCESS_KEY_ID"] = "AKIAOTHER"
        if fault == "no server":
            server.kill()
        for name, value in variables.items():
            monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
        place = "s3://absent/run" if fault == "no bucket" else "s3://bucket/run"
        with pytest.raises(SpesError) as told:
            Store(place).upload(checkpoint(tmp_path), GO_ON)
    words = {
        "no credentials": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
        "no boto3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or for those of ~/.aws run: pip install",
        "wrong key": "cannot write s3://bucket/run: InvalidAccessKeyId: The Access Key Id you provided does not exist",
        "no bucket": "cannot write s3://absent/run: NoSuchBucket: The specified bucket does not exist; check the place",
        "no server": "error sending request",
    }
    assert words[fault] in str(told.value) and "\n" not in str(told.value) and SECRET not in str(told.value)


UPLOADER = """
import sys
from pathlib import Path
from types import SimpleNamespace
from spes_p2p.cli import set_up_logging
from spes_p2p.monitor.checkpoints import Checkpoints
set_up_logging("debug")
run = SimpleNamespace(digest="0" * 64)
Checkpoints(Path(sys.argv[1]), run, None, every=None, keep_last=2, upload=sys.argv[2], retry_seconds=0.2).finish()
"""


@pytest.mark.full  # a minute; with every commit one is cut off, above
@needs_rclone
def test_an_upload_that_is_killed_five_times_and_its_server_twice_is_whole_in_the_end(tmp_path, monkeypatch, seed):
    draw, made, log = random.Random(seed), tmp_path / "kept" / "round-000007", tmp_path / "uploader.log"
    made.mkdir(parents=True)
    for index in range(40):
        (made / f"model-{index:05d}.safetensors").write_bytes(draw.randbytes(2**20 + 2**23 * (index % 4 == 0)))
    describe(made, RUN, 7, 2.5)
    there, deadline = tmp_path / "served" / "bucket" / "run" / made.name, time.monotonic() + 10 * SECONDS
    with s3_server(tmp_path / "served") as server:
        for name, value in s3_environment(server.port).items():
            monkeypatch.setenv(name, value)

        def start() -> subprocess.Popen[bytes]:
            with log.open("ab") as file:
                return subprocess.Popen(
                    [sys.executable, "-c", UPLOADER, str(made.parent), "s3://bucket/run"], stderr=file
                )

        client = start()
        for who in draw.sample("cccccss", 7):
            at = len(list(there.glob("*"))) + draw.randint(1, 5)
            while len(list(there.glob("*"))) < at:
                assert time.monotonic() < deadline and client.poll() is None, log.read_text()[-2000:]
                time.sleep(0.002)
            if who == "s":
                server.kill()
                server.start()
            else:
                client.kill()
                client.wait()
                client = start()
        assert client.wait(5 * SECONDS) == 0 and not Store("s3://bucket/run").upload(made, GO_ON), log.read_text()
        Store("s3://bucket/run").download(None, tmp_path / "back")
    assert files_of(made) == files_of(tmp_path / "back") and SECRET not in log.read_text()


def test_a_hub_that_says_nothing_ends_no_upload_late(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads_module, "HUB_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(StoreError, match=r"hf://someone/run: .*timed out"):
            open_place("hf://someone/run").upload(checkpoint(tmp_path), GO_ON)


def test_a_hub_repository_has_the_newest_model_and_a_tag_for_each_that_stays(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_neverInAnyLog")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with hub_repository(monkeypatch) as hub:
        hf = open_place("hf://someone/run")
        made = {number: checkpoint(tmp_path, number, loss) for number, loss in {1: 2.0, 2: 1.0, 3: 3.0, 4: 4.0}.items()}
        for number in (1, 3, 4, 2):  # the second was skipped for the newest
            hf.upload(made[number], GO_ON)
        assert hub.is_private and len(hub.commits) == 4 and not hub.branches
        hf.tidy(to_keep(hf.checkpoints().values(), 1))
        assert list(hf.checkpoints()) == [2, 4] and hub.tags.keys() == {"round-000002", "round-000004"}
        for number, revision in ((4, "main"), (2, "round-000002")):
            assert hub.files(revision) == files_of(made[number])
        damaged, whole = "f" * 40, hub.tags["round-000002"]
        hub.commits, hub.tags["round-000002"] = {damaged: ({INFO_FILE: b"{}"}, ""), **hub.commits}, damaged
        with pytest.raises(
            DataError, match=r"someone/run/round-000002/checkpoint.json is damaged: .*; delete that round"
        ):
            hf.checkpoints()
        hub.tags["round-000002"] = whole
        assert hub.tokens.keys() == {"Bearer hf_neverInAnyLog"}, hub.tokens
        hub.is_failing = True
        with pytest.raises(StoreError, match=r"hf://someone/run: .*; log in with `hf auth login`") as told:
            hf.upload(made[1], GO_ON)
        assert "neverInAnyLog" not in str(told.value)
