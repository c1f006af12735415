"""What a resumed experiment starts, wherever it was interrupted: also before its peers had anything to go on with."""

import contextlib
import itertools
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
import yaml
from model_folders import PeerFolder, assert_same
from transformers import PreTrainedModel

from spes_p2p.cli import EXIT_INTERRUPTED, Terminated, load_settings
from spes_p2p.commands import local
from spes_p2p.commands.local import ExperimentConfig
from spes_p2p.config import ModelConfig, PeerConfig, RoundConfig, RunConfig
from spes_p2p.errors import ConfigError
from spes_p2p.peer.joining import ADDRESS_FILE, LINK_FILE
from spes_p2p.peer.output_dir import can_resume, check_output
from spes_p2p.swarm.p2p.identity import Identity

Words = dict[str, list[str]]
PEERS, SLOTS = 4, 3
SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "intermediate_size": 8}


class Idle:
    """A child that does nothing: a monitor that ends at once, or a peer that runs on."""

    pids = itertools.count(4711)
    started: ClassVar[Words] = {}

    def __init__(self, name: str, words: list[str], log: Path, *, on_terminal: bool = False) -> None:
        self.name, self.words, self.pid = name, words, next(self.pids)
        self.exitcode = 0 if name == "monitor" else None
        assert log.stem == name and words[0] == ("monitor" if on_terminal else "peer")

    is_running, has_left, killer = local.Child.is_running, local.Child.has_left, local.Child.killer

    def start(self) -> None:
        self.started[self.name] = self.words
        output = Path(self.words[self.words.index("--output") + 1])
        output.mkdir(parents=True, exist_ok=True)
        (output / LINK_FILE).write_text(f"link-of-{self.name}\n")
        (output / ADDRESS_FILE).write_text(f"address-of-{self.name}\n")

    def join(self, timeout: float | None = None) -> None:
        """Nothing is waited for."""


@pytest.fixture
def started(monkeypatch):
    """What was started last, in that order: each child's words by its name."""
    started: Words = {}
    monkeypatch.setattr(Idle, "started", started)
    monkeypatch.setattr(local, "Child", Idle)
    monkeypatch.setattr(local, "stop", lambda children: None)
    monkeypatch.setattr(local, "_in_a_fork", lambda prepare, config: None)  # nothing to tokenise
    return started


@pytest.fixture
def interrupted(tmp_path, started):
    """Starts an experiment, leaves of its peers' folders only what is named, and resumes it."""

    def resume(**left: str) -> Words:
        run = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
        common = {"output": tmp_path / "out", "cache": tmp_path / "cache"}
        begun = ExperimentConfig(run=run, peers=PEERS, max_slots=SLOTS, run_id="mine", **common)
        assert local.main(begun) == 0
        assert [name for name, words in started.items() if "--config" in words] == ["peer-0"]
        for index in range(PEERS):
            folder = tmp_path / "out" / f"peer-{index}"
            (folder / ADDRESS_FILE).unlink()
            (folder / LINK_FILE).unlink()
            if name := left.get(f"peer_{index}"):
                (folder / name).mkdir()
            else:
                folder.rmdir()
        started.clear()
        assert local.main(ExperimentConfig(resume=True, **common)) == 0
        return started

    return resume


def flag(words: Sequence[str], name: str) -> str:
    return words[words.index(name) + 1]


def peers_of(started: Words) -> Words:
    """Return the peers alone, once it is clear that they are those of the first start, and join whom they should."""
    first, *others = peers = {name: words for name, words in started.items() if name != "monitor"}
    assert sorted(peers) == [f"peer-{index}" for index in range(PEERS)]
    assert {flag(words, "--max-slots") for words in peers.values()} == {str(SLOTS)}
    assert {flag(words, "--run-id") for words in started.values()} == {"mine"}
    assert "--initial-peers" not in peers[first]
    assert {flag(started[name], "--initial-peers") for name in [*others, "monitor"]} == {f"address-of-{first}"}
    return peers


def test_an_experiment_interrupted_before_its_peers_kept_anything_starts_them_all_anew(interrupted, tmp_path):
    peers = peers_of(interrupted())
    assert next(iter(peers)) == "peer-0" and flag(peers["peer-0"], "--config") == str(tmp_path / "out" / "run.yaml")
    assert not any("--resume" in words for words in peers.values())


def test_peers_with_nothing_to_resume_join_those_that_go_on(interrupted):
    """Whichever those are: also where the founder's folder is gone, what the others have trained counts."""
    peers = peers_of(interrupted(peer_2="versions"))
    assert next(iter(peers)) == "peer-2"
    assert [name for name, words in peers.items() if "--resume" in words] == ["peer-2"]
    assert not any("--config" in words for words in peers.values())
    assert flag(peers["peer-2"], "--seed-seconds") == "30", "of a finished run, too, for the monitor's sake"


def test_a_peer_killed_before_its_start_was_kept_is_started_anew(interrupted):
    peers = peers_of(interrupted(peer_0="versions", peer_1=".starting"))
    assert "--resume" in peers["peer-0"] and "--resume" not in peers["peer-1"]


def test_what_the_founder_is_told_to_begin_with_is_a_peers_configuration(interrupted, tmp_path):
    interrupted()
    kept = yaml.safe_load((tmp_path / "out" / "run.yaml").read_text())
    assert set(kept) <= set(PeerConfig.model_fields) and PeerConfig(**kept).run.round.min_peers == PEERS


def test_a_first_start_that_was_killed_is_not_resumed_and_does_not_refuse_the_next(tmp_path):
    assert not can_resume(tmp_path) and not can_resume(tmp_path / "none")
    for name in ("identity.key", ".starting"):
        (tmp_path / name).touch()
    assert not can_resume(tmp_path)
    with pytest.raises(ConfigError, match="holds nothing to resume; drop --resume"):
        check_output(tmp_path, resume=True, overwrite=False)
    check_output(tmp_path, resume=False, overwrite=False)


@pytest.mark.parametrize("look", [can_resume, partial(check_output, resume=False, overwrite=False)])
def test_an_output_that_cannot_be_looked_into_is_one_line(look, tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read --output .*: File name too long; name another"):
        look(tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("trained", "told"),
    [(1000, ""), (960, ""), (800, "80% of the 1,000 that its settings ask for"), (0, "0% of the 1,000")],
)
def test_an_experiment_says_how_many_tokens_it_trained_and_if_they_are_too_few(trained, told, tmp_path):
    config = ExperimentConfig(output=tmp_path, run=RunConfig(round=RoundConfig(tokens=100, total=10)))
    events = [{"total_tokens": 0}, {}, {"total_tokens": trained}]
    lines = [json.dumps({"kind": "round", "time": 0.0} | event) + "\n" for event in events]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    summary = local._summary(config, 0)
    assert f"{trained:,} tokens in 10 rounds" in summary
    assert (told in summary) if told else ("ask for" not in summary)


@pytest.mark.parametrize(("interrupt", "leaves"), [(KeyboardInterrupt, True), (Terminated, False)])
def test_ctrl_c_leaves_the_newest_model_of_any_peer_and_sigterm_does_not_wait_for_one(
    interrupt, leaves, tmp_path, started, monkeypatch, capsys
):
    out = tmp_path / "out"
    identity = Identity(tmp_path / "key")

    def watch(experiment: local.Experiment) -> int:
        folders = {name: PeerFolder(out / name, identity) for name in ("peer-1", "peer-2")}
        folders["peer-1"].save(1)
        models.append(folders["peer-2"].save(2))
        raise interrupt

    models: list[PreTrainedModel] = []
    monkeypatch.setattr(local.Experiment, "_watch", watch)
    run = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
    config = ExperimentConfig(run=run, peers=PEERS, max_slots=SLOTS, output=out, cache=tmp_path / "cache")
    assert local.main(config) == 130 and (out / "model").exists() == leaves
    printed = capsys.readouterr().out
    assert ("round 2 of run" in printed) == leaves and "continue it" in printed
    if leaves:
        assert_same(out / "model", models[0])


def test_a_peer_that_leaves_as_it_was_asked_to_ends_no_experiment(tmp_path, started, monkeypatch, capsys):
    start = Idle.start

    def leave(child: Idle) -> None:
        start(child)
        child.exitcode = {"peer-1": EXIT_INTERRUPTED}.get(child.name)

    def end(child: Idle, timeout: float | None = None) -> None:
        child.exitcode = child.exitcode or 0

    monkeypatch.setattr(Idle, "start", leave)
    monkeypatch.setattr(Idle, "join", end)
    config = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
    places = {"output": tmp_path / "out", "cache": tmp_path / "cache"}
    assert local.main(ExperimentConfig(run=config, peers=PEERS, max_slots=SLOTS, **places)) == 0
    assert "peer-1 has left, as it was asked to; the swarm goes on without it" in capsys.readouterr().out


def test_which_checkpoints_to_keep_is_passed_on_to_the_peers(tmp_path, started):
    run = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
    common = {"output": tmp_path / "out", "cache": tmp_path / "cache"}
    assert local.main(ExperimentConfig(run=run, peers=2, max_slots=8, keep_last=3, keep_every=5, **common)) == 0
    for name in ("peer-0", "peer-1"):
        assert {"--keep-last=3", "--keep-every=5"} <= set(started[name])


@pytest.mark.parametrize("name", ["with space", "it's $HOME", "plain"])
def test_printed_commands_are_what_a_shell_takes_for_them(name, tmp_path, started, capsys):
    out, text = tmp_path / name / "out", tmp_path / name / "text.txt"
    run = RunConfig.model_validate({"model": {**SHAPE, "num_experts": 8, "top_k": 2}, "data": {"source": "files"}})
    config = ExperimentConfig(run=run, peers=2, max_slots=8, output=out, text=[text], cache=tmp_path / "cache")
    assert local.main(config) == 0
    printed = capsys.readouterr().out + local._summary(config, 1)
    commands = dict(line.split(":  ", 1) for line in printed.splitlines() if ":  " in line)
    del commands["join"]  # which says where the command is
    words = {name: shlex.split(command.partition("   (")[0]) for name, command in commands.items()}
    assert words["join by hand"][-6:] == ["--max-slots", "8", "--threads", "1", "--text", str(text)]
    assert words["join by hand"][-8:-6] == ["--output", str(out / "peer-by-hand")]
    assert words["evaluate"][-2:] == ["evaluate", str(out / "model")]
    for resume in (words["resume"], words["stopped before the run's end; continue it"]):
        assert resume[-4:] == ["local", "--resume", "--output", str(out)]
    (out / local.RUN_FILE).write_text(yaml.safe_dump({"run": run.model_dump(mode="json"), "run_id": "local"}))
    longer = load_settings(ExperimentConfig, ["--resume", "--output", str(out), "--run.round.total", "77"])
    with pytest.raises(ConfigError, match="or change") as refused:
        local._resumed(longer)
    amend = ["spes", "amend", str(out / "peer-0"), "--run.round.total", "77"]
    assert shlex.split(str(refused.value).rpartition("settings with: ")[2]) == amend


def test_the_numbers_of_all_processes_lie_beside_the_logs(tmp_path, started):
    run = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
    common = {"output": tmp_path / "out", "cache": tmp_path / "cache"}
    for resume in (False, True):  # those of an earlier start are of other programs now
        first = next(Idle.pids) + 1
        assert local.main(ExperimentConfig(run=run, peers=PEERS, max_slots=SLOTS, resume=resume, **common)) == 0
        written = (tmp_path / "out" / "logs" / "pids.txt").read_text()
        assert written == "".join(f"{first + index}\n" for index in range(PEERS + 1))
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700, "the logs may quote its user's text"


@pytest.mark.parametrize("device", [None, "auto", "cpu"])
def test_peers_train_on_the_device_that_they_find_unless_one_is_chosen(device, tmp_path, started):
    run = RunConfig(model=ModelConfig(**SHAPE, num_experts=8, top_k=2), round=RoundConfig(min_peers=1))
    chosen = {} if device is None else {"device": device}
    common = {"output": tmp_path / "out", "cache": tmp_path / "cache"}
    for more in ({"run": run, "peers": PEERS, "max_slots": SLOTS, **chosen}, {"resume": True}):
        assert local.main(ExperimentConfig(**common, **more)) == 0
        for name, words in started.items():
            flags = words[words.index("--config") + 1] if "--config" in words else None
            found = [word for word in words if word.startswith("--device")]
            assert found == ([f"--device={device}"] if device and name != "monitor" else [])
            assert flags is None or load_settings(PeerConfig, words[1:]).device == (device or "auto")


def test_paths_of_sources_are_made_absolute_behind_their_names_and_addresses_stay(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    source = {"name": "web", "fingerprint": "0" * 64, "weights": [1]}
    run = RunConfig.model_validate({"data": {"source": "files", "mixture": [source]}})
    config = ExperimentConfig(data=["web=shards/web", "web=https://example.org/manifest.json"])
    mixed = local._own(config.model_copy(update={"run": run}))["data"]
    assert mixed == [f"web={tmp_path}/shards/web", "web=https:/example.org/manifest.json"]
    assert PeerConfig(run_id="r", data=mixed).shards == [Path(each) for each in mixed]
    assert local._own(ExperimentConfig(data=["a=b.npy"]))["data"] == [f"{tmp_path}/a=b.npy"]


def test_settings_given_with_resume_that_the_run_does_not_have_are_refused(tmp_path):
    kept = RunConfig.model_validate({"round": {"total": 9, "min_peers": 2}})
    (tmp_path / local.RUN_FILE).write_text(yaml.safe_dump({"run": kept.model_dump(mode="json"), "run_id": "local"}))
    common = ["--resume", "--output", str(tmp_path)]
    for same in ([], ["--run.round.total", "9"]):
        assert local._resumed(load_settings(ExperimentConfig, [*common, *same])).run == kept
    with pytest.raises(ConfigError, match=r"round.total is 77 by .* has 9; .*spes amend .*peer-0 --run"):
        local._resumed(load_settings(ExperimentConfig, [*common, "--run.round.total", "77"]))


CHILDREN = """
import os, pathlib, signal, sys
from spes_p2p.commands.local import PROGRAMS, Child

PROGRAMS["peer"] = PROGRAMS["peer"][0], lambda config: signal.pause()
log = pathlib.Path(sys.argv[1])
words = (["peer", "--help"], ["peer", "--max-slot", "4"], ["peer", "--run-id", "r"])
children = [Child(f"peer-{index}", each, log) for index, each in enumerate(words)]
for child in children:
    child.start()
for child in children[:2]:
    child.join(60)
print(*(child.exitcode for child in children), children[2].pid, flush=True)
if sys.argv[2] == "dies":
    os._exit(0)
children[2].kill()
children[2].join(60)
print(children[2].exitcode)
"""


@pytest.mark.parametrize("end", ["kills", "dies"])
def test_a_child_runs_a_command_in_a_log_of_its_own_and_dies_with_its_parent(tmp_path, end):
    log = tmp_path / "peer.log"
    words = [sys.executable, "-c", CHILDREN, str(log), end]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    first, *rest = ended.stdout.splitlines()
    *codes, pid = first.split()
    assert codes == ["0", "2", "None"] and rest == (["-9"] if end == "kills" else []), ended.stderr
    assert "usage: spes peer" in log.read_text() and "did you mean --max-slots" in log.read_text()
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(pid)).wait(20)
