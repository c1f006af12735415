"""What a user can mend is one line on standard error, exit code 2, and nothing written."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from forked_commands import Ended, Forked, ForkServer
from lanes import sample
from peer_processes import MARK, Commands, commands_in, files_of, free_port, friends_words, write_corpus, write_settings

DATA_LOG = r"spes_p2p\.data\."
# Nothing here may take longer; for unreachable peers that is what is promised.
SECONDS = 30.0
NOBODY = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@dataclass
class World:
    """A machine with settings, a corpus, a live run, and what an ended run has left."""

    commands: Commands
    server: ForkServer
    folder: Path
    live: str = ""
    """Address of the peer of run `live`."""
    searching: Forked | None = None
    """A peer that asks for a run which that peer does not know; it takes its time."""

    @property
    def settings(self) -> Path:
        return self.folder / "settings.yaml"

    @property
    def corpus(self) -> Path:
        return self.folder / "corpus.jsonl"

    @property
    def output(self) -> Path:
        return self.folder / "output"

    def start(self, *words: str | Path, output: Path | None = None, **environment: str) -> Forked:
        common = ["--cache", self.folder / "cache", "--device", "cpu", "--threads", "1"]
        common += [] if "--host" in words else ["--host", "127.0.0.1"]  # tests stay on this machine
        common += friends_words(self.folder, words)
        return self.server.start("peer", ["--output", output or self.output, *common, *words], **environment)

    def found(self, output: Path, run_id: str, **changes: dict) -> Forked:
        """Found a run that waits for more peers; return once it can be joined."""
        settings = write_settings(self.folder / f"{output.name}.yaml", round={"min_peers": 9}, **changes)
        peer = self.start("--run-id", run_id, "--config", settings, "--text", self.corpus, output=output)
        self.wait_for(peer, output / "address")
        return peer

    @staticmethod
    def wait_for(peer: Forked, file: Path) -> None:
        for _ in range(int(4 * SECONDS)):
            if file.exists() and file.read_text().endswith("\n"):
                return
            with pytest.raises(AssertionError):
                peer.end(0.25)
        raise AssertionError(f"no {file}: {peer.stderr()}")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("bad_input")
    write_settings(folder / "settings.yaml")
    write_corpus(folder / "corpus.jsonl")
    with commands_in(folder) as commands:
        environment = {**os.environ, MARK: commands.mark}
        world = World(commands, ForkServer(folder / "results", environment), folder)
        ended = world.found(folder / "ended", "live", seed=1)
        deadline = time.monotonic() + SECONDS
        while (folder / "ended" / ".starting").exists():  # until then an interrupted start leaves nothing
            assert time.monotonic() < deadline
            threading.Event().wait(0.05)
        ended.signal(signal.SIGINT)
        assert ended.end(SECONDS).code == 130
        world.found(folder / "live", "live")
        world.live = (folder / "live" / "address").read_text().strip()
        words = ["--run-id", "unknown", "--initial-peers", world.live]
        world.searching = world.start(*words, output=folder / "unknown")
        yield world
        world.server.close()


@pytest.fixture(autouse=True)
def clean_output(world: World) -> None:
    shutil.rmtree(world.output, ignore_errors=True)


def assert_refused(ended: Ended, value: str, remedy: str, *, logs: str = "(?!)", code: int = 2) -> None:
    """Hold what a command said against the promise; lines of its log that match `logs` may come before.

    Another test's peer may have taken the port where this one listened before.
    """
    assert ended.code == code, ended
    assert ended.stdout == ""
    expected = rf"[-\d]+ [:,\d]+ (I ({logs})|W .* is occupied)|\w+ing .* half a minute to load"
    lines = [line for line in ended.stderr.splitlines() if not re.match(expected, line)]
    assert len(lines) == 1 and lines[0].startswith("error: "), ended.stderr
    assert value in lines[0] and remedy in lines[0], lines[0]


# ---------------------------------------------------------------------- settings and corpora


@dataclass(frozen=True)
class Bad:
    """A founder's bad input.

    Attributes:
        words: Makes the flags, preparing files where it needs them; text and settings are added unless named.
        value: What the message must name.
        remedy: What it must advise.
        variables: Environment.
    """

    words: Callable[[World], list[str | Path]]
    value: str
    remedy: str
    variables: dict[str, str] | None = None


def text(name: str, content: bytes) -> Callable[[World], list[str | Path]]:
    def words(world: World) -> list[str | Path]:
        path = world.folder / name
        path.write_bytes(content)
        return ["--text", path]

    return words


def folder(name: str) -> Callable[[World], list[str | Path]]:
    def words(world: World) -> list[str | Path]:
        (world.folder / name).mkdir(exist_ok=True)
        return ["--text", world.folder / name]

    return words


def settings(**changes: object) -> Callable[[World], list[str | Path]]:
    def words(world: World) -> list[str | Path]:
        return ["--config", write_settings(world.folder / "bad.yaml", **changes)]  # type: ignore[arg-type]

    return words


def flags(*words: str) -> Callable[[World], list[str | Path]]:
    return lambda world: list(words)


def top_level_key(world: World) -> list[str | Path]:
    path = world.folder / "bad.yaml"
    path.write_text(world.settings.read_text() + "max_slot: 3\n")
    return ["--config", path]


def occupied_port(world: World) -> list[str | Path]:
    return ["--port", world.live.split("/")[4]]


BAD = {
    "unknown top-level key": Bad(top_level_key, "'max_slot'", "known keys"),
    "unknown section": Bad(settings(modle={"num_experts": 3}), "modle", "remove it"),
    "unknown key of a section": Bad(settings(model={"experts": 3}), "run.model.experts", "remove it"),
    "unknown flag": Bad(flags("--bogus", "1"), "--bogus", "--help"),
    "unknown variable": Bad(flags(), "SPES_MAX_SLOT", "unset it", {"SPES_MAX_SLOT": "3"}),
    "bad variable": Bad(flags(), "port='x'", "--help", {"SPES_PORT": "x"}),
    "run id with a dot": Bad(flags("--run-id", "a.b"), "run_id='a.b'", "--help"),
    "top_k above experts": Bad(flags("--run.model.top-k", "5"), "model.top_k=5", "4 or less"),
    "slots above experts": Bad(flags("--max-slots", "5"), "max_slots=5", "lower it"),
    "heads do not divide": Bad(flags("--run.model.num-heads", "3"), "model.num_heads=3", "divisor"),
    "heads of odd width": Bad(flags("--run.model.num-heads", "16"), "model.num_heads=16", "choose another"),
    "vocabulary without room": Bad(flags("--run.data.vocab-size", "9"), "data.vocab_size=9", "257"),
    "absent corpus": Bad(flags("--text", "absent.txt"), "absent.txt", "existing"),
    "no corpus": Bad(flags("--run.data.text-field", "body"), "'body'", "--run.data.text-field"),
    "empty corpus": Bad(text("empty.txt", b""), "empty.txt", "leave it out"),
    "blank corpus": Bad(text("blank.txt", b" \n" * 99), "blank.txt", "leave it out"),
    "empty folder": Bad(folder("nothing"), "nothing", "name a folder"),
    "corpus that is no text": Bad(text("picture.txt", b"\x89PNG\xff\x00" * 99), "picture.txt", "UTF-8"),
    "too small corpus": Bad(text("small.txt", b"a word or two"), "tokens", "give more text"),
    "occupied port": Bad(occupied_port, "127.0.0.1:", "--port"),
    "foreign address": Bad(flags("--host", "192.0.2.1"), "192.0.2.1", "choose another"),
    "malformed announcement": Bad(flags("--announce", "1.2.3.4:4000"), "'1.2.3.4:4000'", "/p2p/"),
    "founder whom nobody can call": Bad(flags("--client-mode"), "client_mode=True", "drop --client-mode"),
    "port to map that is not named": Bad(flags("--map-port"), "--map-port", "set --port"),
    "founder who is not": Bad(flags("--run-id", f"r@{NOBODY}"), NOBODY, "--run-id"),
    "founder that is no peer id": Bad(flags("--run-id", "r@somebody"), "run_id='r@somebody'", "--help"),
    "identity in a file that is none": Bad(flags("--identity", __file__), __file__, "chmod 600"),
    "resume of nothing": Bad(flags("--resume"), "output", "drop --resume"),
    "resume and overwrite": Bad(flags("--resume", "--overwrite"), "--overwrite", "drop one"),
    "absent config": Bad(flags("--config", "absent.yaml"), "absent.yaml", "existing"),
    "optimizer of another run": Bad(flags("--inner-optimizer", "lamb"), "inner_optimizer=lamb", "leave it out"),
    "narrow gradients": Bad(flags("--gradients", "bf16"), "gradients=bf16", "set inner_optimizer"),
    "kernel that is not here": Bad(flags("--kernel", "megablocks"), "kernel=megablocks", "--kernel auto"),
    "unaligned experts": Bad(
        flags("--kernel", "grouped_mm", "--run.model.intermediate-size", "100"), "kernel=grouped_mm", "--kernel auto"
    ),
}
COMMIT_BAD = {
    *("unknown key of a section", "slots above experts", "too small corpus", "occupied port", "resume of nothing"),
}
"""One of each place that refuses: the file, the flags beside it, the data, the network, the folder. Full: what the same
places refuse besides; `test_cli` and `test_config` show with every commit what flags, variables and files answer."""
if not torch.cuda.is_available():
    BAD["no CUDA"] = Bad(flags("--device", "cuda"), "device=cuda", "--device cpu")


@pytest.mark.parametrize("name", sample(BAD, COMMIT_BAD))
def test_a_founders_bad_input_is_one_line_and_nothing_is_written(world: World, name: str) -> None:
    bad = BAD[name]
    words = bad.words(world)
    for flag, value in (("--config", world.settings), ("--text", world.corpus), ("--run-id", "r")):
        words += [] if flag in words else [flag, value]
    ended = world.start(*words, **(bad.variables or {})).end(SECONDS)
    assert_refused(ended, bad.value, bad.remedy, logs=DATA_LOG)
    assert not world.output.exists()


def test_an_output_that_exists_is_left_alone_without_resume_or_overwrite(world: World) -> None:
    before = files_of(world.folder / "ended")
    words = ["--run-id", "r", "--config", world.settings, "--text", world.corpus]
    ended = world.start(*words, output=world.folder / "ended").end(SECONDS)
    assert_refused(ended, str(world.folder / "ended"), "--overwrite")
    assert files_of(world.folder / "ended") == before


def test_overwrite_spares_a_directory_that_is_not_ours(world: World) -> None:
    world.output.mkdir()
    (world.output / "thesis.tex").write_text("years of work")
    words = ["--overwrite", "--run-id", "r", "--config", world.settings, "--text", world.corpus]
    assert_refused(world.start(*words).end(SECONDS), str(world.output), "name another")
    assert files_of(world.output) == {"thesis.tex": b"years of work"}


def test_an_output_that_is_a_file_is_left_alone(world: World) -> None:
    path = world.folder / "file"
    path.write_text("mine")
    for flag in ([], ["--overwrite"], ["--resume"]):
        words = [*flag, "--run-id", "r", "--config", world.settings, "--text", world.corpus]
        assert_refused(world.start(*words, output=path).end(SECONDS), str(path), "choose another")
    assert path.read_text() == "mine"


# ---------------------------------------------------------------------- joining


@pytest.mark.full
def test_initial_peers_that_do_not_answer_are_named_within_30_seconds(world: World) -> None:
    with socket.socket() as silent:  # takes connections and never says a word
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        addresses = [f"/ip4/127.0.0.1/tcp/{port}/p2p/{NOBODY}" for port in (free_port(), silent.getsockname()[1])]
        outputs = [world.folder / "refused", world.folder / "silent"]
        starts = [
            world.start("--run-id", "live", "--initial-peers", address, output=output)
            for address, output in zip(addresses, outputs, strict=True)
        ]
        for start, address, output in zip(starts, addresses, outputs, strict=True):
            assert_refused(start.end(SECONDS), address, "--initial-peers", code=75)
            assert not output.exists()


def test_a_run_that_the_peers_reached_do_not_know_is_named(world: World) -> None:
    assert world.searching is not None
    ended = world.searching.end(SECONDS)
    waiting = r"spes_p2p\.swarm\.manifest: no peer reached has declared a run 'unknown' yet; .* check --run-id"
    assert_refused(ended, "'unknown'", "--run-id", logs=waiting)
    assert len(re.findall(waiting, ended.stderr)) == 1, "it says what it waits for, once"
    assert not (world.folder / "unknown").exists()


ADDRESSES = ["localhost:4000", "/ip4/127.0.0.1/tcp/4000", "/ip4/127.0.0.1/tcp/x/p2p/Qm"]


@pytest.mark.parametrize("address", sample(ADDRESSES, ADDRESSES[:1]))  # full: `test_processes` has more of them
def test_a_malformed_address_is_named(world: World, address: str) -> None:
    assert_refused(world.start("--run-id", "live", "--initial-peers", address).end(SECONDS), address, "/p2p/")
    assert not world.output.exists()


def test_settings_of_the_run_are_the_founders_alone(world: World) -> None:
    words = ["--run-id", "live", "--initial-peers", world.live, "--run.round.total", "9"]
    assert_refused(world.start(*words).end(SECONDS), "--run.*", "drop")
    assert not world.output.exists()


def test_a_run_of_another_founder_is_refused_and_nothing_stays_written(world: World) -> None:
    words = ["--run-id", f"live@{NOBODY}", "--initial-peers", world.live]
    assert_refused(world.start(*words).end(SECONDS), NOBODY, "--run-id", logs=r"spes_p2p\.")
    assert not world.output.exists()


JOINERS_BAD = {
    "no text": ([], "data.source=files", "--text"),
    "absent text": (["--text", "absent.txt"], "absent.txt", "existing"),
    "slots above experts": (["--text", "corpus.jsonl", "--max-slots", "5"], "max_slots=5", "lower it"),
    "narrow gradients": (["--text", "corpus.jsonl", "--gradients", "bf16"], "gradients=bf16", "set inner_optimizer"),
}
"""Flags, with files of the world's folder, and what is said of them."""


@pytest.mark.parametrize("name", sample(JOINERS_BAD, ["no text", "slots above experts"]))  # full: a founder's too
def test_a_joiners_bad_input_shows_once_the_run_is_known_and_nothing_stays_written(world: World, name: str) -> None:
    bad, value, remedy = JOINERS_BAD[name]
    words = ["--run-id", "live", "--initial-peers", world.live]
    words += [world.folder / word if Path(word).suffix else word for word in bad]
    ended = world.start(*words).end(SECONDS)
    assert_refused(ended, value, remedy, logs=r"spes_p2p\.")
    assert "this peer is" not in ended.stderr, "others have seen its claim"
    assert not world.output.exists()


def test_a_peer_of_another_run_of_the_same_name_is_refused_and_keeps_what_it_had(world: World) -> None:
    before = files_of(world.folder / "ended")
    words = ["--resume", "--run-id", "live", "--initial-peers", world.live, "--text", world.corpus]
    for _ in range(2):
        ended = world.start(*words, output=world.folder / "ended").end(SECONDS)
        assert_refused(ended, "manifest", "another --output")
        assert files_of(world.folder / "ended") == before


def test_a_peer_resumed_under_another_runs_name_is_refused_and_keeps_what_it_had(world: World) -> None:
    before = files_of(world.folder / "ended")
    ended = world.start("--resume", "--run-id", "other", output=world.folder / "ended").end(SECONDS)
    assert_refused(ended, "run 'live'", "--run-id")
    assert files_of(world.folder / "ended") == before


def test_a_directory_without_a_run_cannot_be_resumed(world: World) -> None:
    world.output.mkdir()
    (world.output / "notes.txt").write_text("mine")
    assert_refused(world.start("--resume", "--run-id", "r").end(SECONDS), str(world.output), "drop --resume")
    assert files_of(world.output) == {"notes.txt": b"mine"}


def test_a_damaged_checkpoint_is_named_with_the_remedy(world: World) -> None:
    shutil.copytree(world.folder / "ended", world.output)
    checkpoint = world.output / "checkpoint"
    (checkpoint / "round-1-step-5").mkdir(parents=True)
    (checkpoint / "round-1-step-5" / "state.json").write_text('{"round": 1, "slots": [')
    ended = world.start("--resume", "--run-id", "live", "--text", world.corpus).end(SECONDS)
    assert ended.code == 2
    assert ended.stderr.splitlines()[-1].startswith(f"error: no checkpoint in {checkpoint} is whole")
    assert f"delete {checkpoint}" in ended.stderr


# ---------------------------------------------------------------------- the local experiment


EXPERIMENT = {
    "small corpus": (text("small.txt", b"a word or two"), "tokens", "give more text"),
    "empty corpus": (text("empty.txt", b""), "empty.txt", "leave it out"),
    "absent corpus": (flags("--text", "absent.txt"), "absent.txt", "existing"),
    "slots above experts": (flags("--max-slots", "5"), "max_slots=5", "lower it"),
    "no peers": (flags("--peers", "0"), "peers='0'", "--help"),
    "text and dataset": (flags("--text", "a", "--dataset", "b"), "--dataset", "drop one"),
    "resume of nothing": (flags("--resume"), "output", "drop --resume"),
    "bad log level": (flags("--log-level", "loud"), "loud", "--help"),
    "optimizer of another run": (flags("--inner-optimizer", "muon"), "inner_optimizer=muon", "leave it out"),
}


@pytest.mark.parametrize("name", sample(EXPERIMENT, ["small corpus", "text and dataset"]))
def test_an_experiments_bad_input_is_one_line_and_nothing_is_written(world: World, name: str) -> None:
    words, value, remedy = EXPERIMENT[name]
    given = words(world)
    given += [] if "--text" in given else ["--text", world.corpus]
    given += ["--output", world.output, "--cache", world.folder / "cache", "--config", world.settings]
    assert_refused(world.server.start("experiment", given).end(SECONDS), value, remedy, logs=DATA_LOG)
    assert not world.output.exists()


def test_an_experiments_output_that_exists_is_left_alone(world: World) -> None:
    before = files_of(world.folder / "ended")
    words = ["--output", world.folder / "ended", "--text", world.corpus, "--config", world.settings]
    words += ["--cache", world.folder / "cache"]
    assert_refused(world.server.start("experiment", words).end(SECONDS), "ended", "--overwrite")
    assert files_of(world.folder / "ended") == before


# ---------------------------------------------------------------------- the scripts themselves


@pytest.mark.full
def test_the_scripts_say_it_too(world: World) -> None:
    scripts = (["peers/run_peer.py"], ["-m", "spes_p2p", "local"])
    starts = [world.commands.start(*script, "--run-id", "r", "--bogus", "--output", world.output) for script in scripts]
    for command in starts:
        assert command.end() == 2
        assert len(command.lines) == 2 and command.lines[0].startswith("error: ") and "--bogus" in command.lines[0]
    assert not world.output.exists()


def test_a_refused_start_leaves_no_process(world: World) -> None:
    before = {process.pid for process in world.commands.alive()}
    words = ["--run-id", "r", "--config", world.settings, "--text", world.corpus, *occupied_port(world)]
    assert world.start(*words).end(SECONDS).code == 2
    assert {process.pid for process in world.commands.alive()} <= before
