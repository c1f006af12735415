"""Flags over environment over YAML over defaults; whatever does not fit is one line that names value and remedy."""

import errno
import json
import logging
import os
import pty
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from lanes import sample

from spes_p2p import __version__
from spes_p2p.__main__ import COMMANDS
from spes_p2p.cli import OncePerMinute, all_flags, entry_point, help_text, load_settings
from spes_p2p.commands.early import refuse
from spes_p2p.config import PeerConfig, RunConfig, commands
from spes_p2p.config.changes import check_kept_settings
from spes_p2p.config.commands import AmendConfig, ClusterConfig, ExperimentConfig, HealthConfig, PlanConfig
from spes_p2p.errors import AbsentError, ConfigError, JoinError

ROOT = Path(__file__).parents[2]

INTERRUPTED_WHILE_FORKING = """
import os, signal, subprocess, sys, threading
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig

def main(config):
    def forked():
        print("forked", flush=True)
        signal.raise_signal(signal.SIGINT)

    os.register_at_fork(after_in_parent=forked)
    subprocess.run([sys.executable, "-c", ""], preexec_fn=lambda: None)
    return 0 if threading.Event().wait(60) else 1

sys.argv[1:] = []
entry_point(CommandConfig, main)
"""
"""Ends by itself after a minute if the interrupt is lost."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("SPES_CONFIG", raising=False)


@pytest.fixture
def yaml_file(tmp_path):
    def write(content: str) -> str:
        path = tmp_path / "run.yaml"
        path.write_text(content)
        return str(path)

    return write


def test_flags_beat_environment_beats_yaml_beats_defaults(yaml_file, monkeypatch):
    config = yaml_file("run_id: from-yaml\nport: 1001\nmax_slots: 1\nhost: 127.0.0.2\n")
    monkeypatch.setenv("SPES_PORT", "1002")
    monkeypatch.setenv("SPES_MAX_SLOTS", "2")
    peer = load_settings(PeerConfig, ["--config", config, "--max-slots", "3"])
    assert (peer.run_id, peer.host, peer.port, peer.max_slots) == ("from-yaml", "127.0.0.2", 1002, 3)
    assert peer.device == "auto"


def test_a_nested_flag_changes_one_setting_and_leaves_the_yamls_others(yaml_file, monkeypatch):
    config = yaml_file("run_id: r\nrun: {round: {total: 5, steps: 7}, train: {batch_size: 2}}\n")
    monkeypatch.setenv("SPES_RUN_TRAIN_LR", "0.5")
    run = load_settings(PeerConfig, ["--config", config, "--run.round.total", "9"]).run
    assert run is not None
    assert (run.round.total, run.round.steps, run.train.batch_size, run.train.lr) == (9, 7, 2, 0.5)
    assert run.model.num_experts == 16


def test_the_environment_may_name_the_config(yaml_file, monkeypatch):
    monkeypatch.setenv("SPES_CONFIG", yaml_file("run_id: by-variable\n"))
    assert load_settings(PeerConfig, []).run_id == "by-variable"
    assert load_settings(HealthConfig, ["--output", "runs/peer"]).minutes is None, "which has no such setting"
    monkeypatch.setenv("SPES_CONFIG", yaml_file("peers: 7\n"))
    assert load_settings(PlanConfig, []).peers == 7


def test_of_two_configs_the_last_is_read(yaml_file, tmp_path):
    first = Path(yaml_file("run_id: first\n")).rename(tmp_path / "first.yaml")
    assert (
        load_settings(PeerConfig, ["--config", str(first), "--config", yaml_file("run_id: second\n")]).run_id
        == "second"
    )


@pytest.mark.parametrize("command", [PeerConfig, ExperimentConfig])
def test_variables_of_other_commands_are_not_refused(command, monkeypatch):
    for variable in ("SPES_LINK", "SPES_COUNT", "SPES_REPORT_ONLY", "SPES_VENV", "SPES_TEST_SEED"):
        monkeypatch.setenv(variable, "1")
    assert load_settings(command, ["--run-id", "r"]).run_id == "r"


def test_a_variable_is_named_as_its_flag_in_every_command(monkeypatch):
    monkeypatch.setenv("SPES_RUN_ID", "r")
    monkeypatch.setenv("SPES_INITIAL_PEERS", "/x,/y")
    monkeypatch.setenv("SPES_YES", "true")
    for command in (PeerConfig, commands.MonitorConfig, commands.ExportConfig):
        config = load_settings(command, [])
        assert (config.run_id, config.initial_peers, config.yes) == ("r", ["/x", "/y"], True)
        assert load_settings(command, ["--initial-peers", "/z", "--no-yes"]).initial_peers == ["/z"]
    monkeypatch.setenv("SPES_FROM", "a")
    monkeypatch.setenv("SPES_TEXT", "books, old.txt")
    peer = load_settings(PeerConfig, [])
    assert (peer.start_from, peer.text) == (Path("a"), [Path("books, old.txt")])


def test_without_any_setting_of_the_run_a_peer_has_none():
    assert load_settings(PeerConfig, ["--run-id", "r"]).run is None


@pytest.mark.parametrize(
    "words",
    [
        ["--text", "a", "b", "--port", "5"],
        ["--text", "a", "--text", "b", "--port", "5"],
        ["--port", "5", "--text", "a", "b"],
        ["--text=a", "--text=b", "--port", "5"],
    ],
)
def test_a_list_takes_several_words_or_several_flags(words):
    peer = load_settings(PeerConfig, ["--run-id", "r", *words])
    assert peer.text == [Path("a"), Path("b")] and peer.port == 5


@pytest.mark.parametrize(
    "words",
    [
        ["--run.adapter.targets", "attention", "mlp"],
        ["--run.adapter.targets=attention", "--run.adapter.targets=mlp"],
        ["--run.adapter.targets", "attention", "--run.adapter.targets", "mlp"],
        ["--run.adapter.targets", "attention,mlp"],
    ],
)
def test_a_nested_list_does_so_too(words):
    run = load_settings(PeerConfig, ["--run-id", "r", *words, "--run.data.source", "files", "--port", "5"]).run
    assert run is not None and run.adapter is not None and run.adapter.targets == ["attention", "mlp"]


def test_a_nested_list_of_paths_may_have_commas():
    words = ["--run.data.source", "files", "--run.data.paths", "books, old", "b", "--run.data.text-field", "t"]
    run = load_settings(PeerConfig, ["--run-id", "r", *words]).run
    assert run is not None and run.data.paths == [Path("books, old"), Path("b")]


@pytest.mark.parametrize("words", [["--text", "books, old/ä.txt", "b"], ["--text=books, old/ä.txt", "--text=b"]])
def test_a_path_with_a_comma_is_one_path(words):
    peer = load_settings(PeerConfig, ["--run-id", "r", *words, "--initial-peers", "/x,/y"])
    assert peer.text == [Path("books, old/ä.txt"), Path("b")] and peer.initial_peers == ["/x", "/y"]


def test_every_list_flag_takes_several_words():
    words = ["--run-id", "r", "--initial-peers", "/x", "/y", "--announce", "/z", "/w"]
    peer = load_settings(PeerConfig, words)
    assert peer.initial_peers == ["/x", "/y"] and peer.announce == ["/z", "/w"]
    experiment = load_settings(ExperimentConfig, ["--text", "a", "b"])
    assert experiment.text == [Path("a"), Path("b")]


def one_line(words: list[str], cls=PeerConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        load_settings(cls, words)
    message = str(raised.value)
    assert message and "\n" not in message
    return message


def test_an_unknown_variable_of_ours_is_an_error_and_a_strangers_is_not(monkeypatch):
    monkeypatch.setenv("OTHER_MAX_SLOT", "3")
    load_settings(PeerConfig, ["--run-id", "r"])
    monkeypatch.setenv("SPES_MAX_SLOT", "3")
    assert "SPES_MAX_SLOT; did you mean SPES_MAX_SLOTS? unset it" in one_line(["--run-id", "r"])


def test_an_unknown_nested_variable_is_an_error(monkeypatch):
    monkeypatch.setenv("SPES_RUN_ROUND_TOTALS", "3")
    assert "totals" in one_line(["--run-id", "r"]).lower()


def test_a_toml_file_gives_the_same_settings_as_yaml(tmp_path, yaml_file):
    path = tmp_path / "run.toml"
    path.write_text('run_id = "r"\ntext = ["a", "b"]\n[run.round]\ntotal = 5\n[run.train]\nlr = 0.002\n')
    text = "run_id: r\ntext: [a, b]\nrun: {round: {total: 5}, train: {lr: 0.002}}"
    ours, theirs = (load_settings(PeerConfig, ["--config", file]) for file in (str(path), yaml_file(text)))
    assert ours.model_dump(exclude={"config"}) == theirs.model_dump(exclude={"config"})
    run = load_settings(PeerConfig, ["--config", str(path), "--run.round.total", "7"]).run
    assert run is not None and (run.round.total, run.train.lr) == (7, 0.002)
    for content, said in (
        ("[run", "is not valid TOML"),
        ("[round]\ntotal = 3", "did you mean run.round?"),
        ("x = 1\nx = 2", "TOML"),
    ):
        path.write_text(content)
        assert said in one_line(["--run-id", "r", "--config", str(path)])


@pytest.fixture
def restored_signals():
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    hook = sys.unraisablehook
    yield
    sys.unraisablehook = hook
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def raiser(error: BaseException) -> Callable[[PeerConfig], int]:
    def main(config: PeerConfig) -> int:
        raise error

    return main


@pytest.mark.parametrize(
    ("main", "code", "stderr"),
    [
        (lambda config: 0, 0, ""),
        (lambda config: 1, 1, ""),
        (raiser(JoinError("another run; check it")), 2, "error: another run; check it\n"),
        (raiser(AbsentError("no answer; check it")), 75, "error: no answer; check it\n"),
        (raiser(KeyboardInterrupt()), 130, ""),
        (lambda config: signal.raise_signal(signal.SIGTERM), 130, ""),
    ],
    ids=["done", "failed", "users-error", "absent-peers", "ctrl-c", "terminated"],
)
def test_a_commands_end_is_its_exit_code(main, code, stderr, monkeypatch, capsys, restored_signals):
    monkeypatch.setattr(sys, "argv", ["run_peer.py", "--run-id", "r"])
    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, main)
    assert ended.value.code == code and capsys.readouterr().err == stderr


def test_an_interrupt_counts_even_where_a_shell_has_had_it_ignored(monkeypatch, restored_signals):
    """As it does for all that it starts in its background."""
    monkeypatch.setattr(sys, "argv", ["run_peer.py", "--run-id", "r"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, lambda config: signal.raise_signal(signal.SIGINT))
    assert ended.value.code == 130


COMPUTING_AT_THE_END = """
import atexit, threading, torch
from concurrent.futures import ThreadPoolExecutor
from spes_p2p.__main__ import start

def compute():
    while True:
        torch.add(ones, ones)
        computes.set()

ones, computes = torch.ones(1000), threading.Event()
atexit.register(print, "tidied up")
threading.Thread(target=compute, daemon=True).start()
executor = ThreadPoolExecutor(1)  # its thread waits until the end
executor.submit(computes.wait)
start("health", ["--output", "nowhere"])
"""


def test_a_thread_that_computes_at_the_end_does_not_change_the_exit_code(tmp_path):
    """Hivemind's thread for futures may. The interpreter's own end aborts the process: SIGABRT."""
    words = [sys.executable, "-c", COMPUTING_AT_THE_END]
    ended = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "has not joined yet\ntidied up\n", "")


def test_an_interrupt_during_a_fork_counts(tmp_path):
    script = tmp_path / "command.py"
    script.write_text(INTERRUPTED_WHILE_FORKING)
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout) == (130, "forked\n"), ended.stderr


MAX_ANSWER_SECONDS = 3.0
"""CPU time until a command answers `--help` or a wrong flag. It takes a quarter of a second on an idle machine;
an import of torch would take longer than this on any."""
SCREENS = 2 * 26
"""Lines of two screens."""
HEAVY = ("torch", "transformers", "hivemind", "datasets", "numpy", "matplotlib")


def spes(*words: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "spes_p2p", *words]
    variables = {**os.environ, "COLUMNS": "80", **environment}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=variables, timeout=120, check=False)


@pytest.mark.parametrize(
    ("chosen", "found"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=str,
)
def test_threads_that_wait_leave_their_core_to_other_programs_unless_told_otherwise(chosen, found):
    """OpenMP reads the variable when torch is imported."""
    script = (
        "import os, sys; from spes_p2p import __main__, cli; "
        "cli.entry_point = lambda *_: (print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules), sys.exit(0)); "
        "__main__.start('plan', [])"
    )
    variables = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    words = [sys.executable, "-c", script]
    ended = subprocess.run(words, capture_output=True, text=True, env=variables | chosen, timeout=120, check=False)
    assert ended.stdout.split() == [found, "False"], ended


def test_without_a_command_it_says_what_to_type_first():
    ended = spes()
    assert ended.returncode == 0 and len(ended.stdout.splitlines()) <= SCREENS / 2
    assert "spes local" in ended.stdout and "spes join LINK" in ended.stdout
    assert all(f"\n  {name} " in ended.stdout or f"spes {name} " in ended.stdout for name in COMMANDS)


def test_a_mistyped_command_is_told_the_right_one():
    ended = spes("locl")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "error: unknown command 'locl'; did you mean local? see spes --help\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_commands_help_fits_two_screens_and_names_its_flags(name):
    settings = getattr(commands, COMMANDS[name][0])
    text = help_text(settings, "--help", 80, f"spes {name}")
    assert len(text.splitlines()) <= SCREENS and max(map(len, text.splitlines())) <= 80
    assert f"usage: spes {name}" in text
    own = [flag for flag in all_flags(settings) if not flag.section]
    assert own and all(flag.names[-1] in text for flag in own)
    assert all(flag.text for flag in all_flags(settings))


@pytest.mark.parametrize("settings", [PeerConfig, ExperimentConfig, PlanConfig], ids=lambda c: c.__name__)
def test_the_runs_settings_are_one_line_of_the_help_and_have_a_help_of_their_own(settings):
    text, run = help_text(settings, "--help", 80), help_text(settings, "--help-run", 80)
    assert "--run.*" in text and "--help-run" in text and "--run.model.family" not in text
    assert "--run.model.num-experts N" in run and "--run.outer.momentum X" in run
    assert "Experts E per layer; slot e is expert e of every layer." in " ".join(run.split())
    assert "--max-slots" not in run


@pytest.mark.parametrize("word", ["--help", "-h", "--help-run", "--help-all"])
def test_help_exits_with_0_without_the_flags_that_a_command_needs(word, monkeypatch, capsys, restored_signals):
    monkeypatch.setattr(sys, "argv", ["run_peer.py", word])
    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, lambda config: 1)
    assert ended.value.code == 0
    assert ("Multiaddrs of peers in the swarm" in capsys.readouterr().out) == (word != "--help-run")


@pytest.mark.parametrize(
    "words",
    sample(
        ["", "--version", "plan --help", "peer --help-run", "plan --config spes_1b"], commit=["", "peer --help-run"]
    ),
)
def test_a_command_whose_output_is_read_no_longer_ends_without_a_word(words):
    ours, theirs = os.pipe()
    os.close(ours)  # as `head` does after its last line
    done = subprocess.run(
        [sys.executable, "-m", "spes_p2p", *words.split()],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        timeout=300,
    )
    os.close(theirs)
    assert (done.returncode, done.stderr) == (0, "")


def test_help_in_full_tells_every_flags_whole_text():
    text = " ".join(help_text(PeerConfig, "--help-all", 80).split())
    assert "If the rate is about half of the others' or less, they reduce in its place" in text
    assert "If the rate is about half" not in " ".join(help_text(PeerConfig, "--help", 80).split())


ANSWERS = """
import json, os, resource, sys

import spes_p2p.__main__ as program
import spes_p2p.config.commands

for words in json.loads(sys.argv[1]):
    end, other = os.pipe()
    if (pid := os.fork()) == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)

        def leave(code):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            imported = sorted({name.partition(".")[0] for name in sys.modules})
            os.write(other, json.dumps([code, imported, usage.ru_utime + usage.ru_stime]).encode())
            leave_at_once(0)

        leave_at_once, os._exit = os._exit, leave
        program.start(words[0], words[1:])
    os.close(other)
    print(os.fdopen(end).read(), flush=True)
    os.waitpid(pid, 0)
"""
"""Answers each list of words in a fork; prints its exit code, what is imported, and its own CPU seconds."""


def test_flags_are_answered_before_anything_heavy_is_imported():
    cases = [[name, word] for name in COMMANDS for word in ("--help", "--no-such-flag")]
    words = [sys.executable, "-c", ANSWERS, json.dumps(cases)]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    for (name, word), (code, imported, _) in zip(cases, answers, strict=True):
        assert code == (0 if word == "--help" else 2), (name, word)
        assert "pydantic" in imported and not set(imported) & set(HEAVY), (name, word)
    whole = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    forks = [seconds for _, _, seconds in answers]
    assert whole - sum(forks) + max(forks) < MAX_ANSWER_SECONDS, "of the common imports and the slowest answer"


def test_an_error_in_a_flag_is_told_before_anything_heavy_is_imported(tmp_path):
    taken = socket.create_server(("127.0.0.1", 0))
    port = str(taken.getsockname()[1])
    made = tmp_path / "made"
    made.mkdir()
    (made / "file").touch()
    upcycled = ["--output", "out", "--num-experts", "4", "--top-k", "2"]
    peer = ["peer", "--run-id", "r"]
    cases = [
        *(["export", "runs/nothere"], ["export"], ["export", str(made)], ["export", "Spes:abc"]),
        *([*peer, "--output", str(made)], [*peer, "--output", "out", "--resume"], [*peer, "--text", "nowhere.txt"]),
        *([*peer, "--data", "nowhere"], [*peer, "--initial-peers", "203.0.113.7:4001"], ["join", "spes:abc"]),
        *(["local", "--output", str(made / "file" / "x")], [*peer, "--output", str(made / "file")]),
        *(["local", "--output", str(made)], ["local", "--resume", "--output", "out"], ["local", "--dataset", "books"]),
        *(["cluster", "--shared", "s", "--run-id", "r", "--text", "nowhere.txt"], ["monitor", "spes:abc"]),
        *(["monitor", "--run-id", "r", "--initial-peers", "/ip4/1.2.3.4"], ["simulate", "nowhere.yaml"]),
        *(["evaluate", "nowhere"], ["evaluate", str(made)], ["plan", "--from", "nowhere"], ["amend", "nowhere"]),
        *(["upcycle", "--from", "nowhere", *upcycled], ["invite", "nowhere"]),
        *([*peer, "--port", port], [*peer, "--page", f":{port}"]),
        *(["chat", "nowhere"], ["chat", "spes:abc"], ["chat", str(made)]),
        ["tokenize", "--file-glob", "nowhere*.txt", "--output-prefix", "shards/"],
    ]
    words = [sys.executable, "-c", ANSWERS, json.dumps(cases)]
    with taken:
        ended = subprocess.run(words, capture_output=True, text=True, timeout=120, check=True, cwd=tmp_path)
    for words, line in zip(cases, ended.stdout.splitlines(), strict=True):
        code, imported, _ = json.loads(line)
        assert code == 2 and not set(imported) & set(HEAVY), words
    assert [path.name for path in tmp_path.iterdir()] == ["made"], "nothing is written"


def test_a_rank_finds_the_output_that_its_leader_has_begun(tmp_path, monkeypatch):
    (tmp_path / "identity.key").touch()
    rank = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in rank.items():
        monkeypatch.setenv(name, value)
    refuse(PeerConfig(run_id="r", output=tmp_path))


@pytest.mark.parametrize("words", ["peers/run_peer.py", "monitor/run_monitor.py", "-m spes_p2p", "-m spes_p2p export"])
def test_outside_the_environment_the_remedy_is_one_line(words):
    ended = subprocess.run([sys.executable, "-S", *words.split()], capture_output=True, text=True, cwd=ROOT, timeout=60)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 2 and line.startswith("error: No module named") and "./scripts/setup.sh" in line


def test_ctrl_c_while_it_imports_ends_it_quietly(tmp_path):
    # The interrupt comes from the first heavy import itself, so it always hits.
    (tmp_path / "torch.py").write_text("import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n")
    ended = spes("peer", "--run-id", "r", "--output", str(tmp_path / "out"), PYTHONPATH=str(tmp_path))
    begins = "founding run r (to join a run: spes join LINK); it takes up to half a minute to load\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", begins)


def chained() -> Exception:
    try:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/peer/versions/3.bin")
    except OSError as error:
        failure = RuntimeError("cannot save")
        failure.__cause__ = error
        return failure


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "runs/peer/versions/3.bin"), chained()], ids=["os", "in"]
)
def test_a_full_disk_is_one_line_with_the_remedy(error, capsys, restored_signals):
    def main(config: PeerConfig) -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, main, ["--run-id", "r"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "runs/peer/versions/3.bin" in said and "--resume" in said


def test_any_other_error_of_the_system_is_not_taken_for_a_full_disk(restored_signals):
    with pytest.raises(PermissionError):
        entry_point(PeerConfig, raiser(PermissionError(errno.EACCES, "denied")), ["--run-id", "r"])


def test_a_path_without_permission_is_one_line_with_the_remedy(capsys, restored_signals):
    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, raiser(PermissionError(errno.EACCES, "denied", "/other/key")), ["--run-id", "r"])
    assert ended.value.code == 2
    said = "error: no permission for /other/key; name another path, or change its owner or mode\n"
    assert capsys.readouterr().err == said


def test_a_really_full_disk_ends_in_one_line(capsys, restored_signals):
    def main(config: PeerConfig) -> int:
        Path("/dev/full").write_bytes(b"a checkpoint")
        return 0

    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, main, ["--run-id", "r"])
    assert ended.value.code == 2 and "no space left on the disk" in capsys.readouterr().err


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_memory_that_runs_out_ends_in_one_line(device, capsys, restored_signals):
    def main(config: PeerConfig) -> int:
        return torch.empty(2**50, dtype=torch.uint8, device=device).numel()

    with pytest.raises(SystemExit) as ended:
        entry_point(PeerConfig, main, ["--run-id", "r"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith("error: out of memory: ") and said.count("\n") == 1


def test_a_warning_that_repeats_is_said_once_a_minute_with_its_number():
    now = 0.0
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            heard.append(record.getMessage())

    handler, log = Heard(), logging.Logger("test")
    handler.addFilter(OncePerMinute(lambda: now))
    log.addHandler(handler)
    for second in range(61):
        now = float(second)
        log.warning("the DHT took too long to read %s records", "claim")
        log.info("round %d", 3)
        if second == 30:
            log.warning("the DHT took too long to read %s records", "metrics")
        log.warning("%d s late", second, extra={"heals": True})
    warnings = [text for text in heard if text != "round 3"]
    assert warnings == [
        "the DHT took too long to read claim records",
        "0 s late",
        "the DHT took too long to read metrics records",
        "the DHT took too long to read claim records (59 more times in the 60 s before)",
        "60 s late (59 more times in the 60 s before)",
    ]
    assert heard.count("round 3") == 61, "what is no warning is not held back"


def test_the_same_command_is_found_under_both_names_and_as_a_module():
    scripts = [Path(sys.executable).parent / name for name in ("spes", "spes_p2p")]
    assert all(script.exists() for script in scripts), "run scripts/setup.sh"
    starts = [*([str(script)] for script in scripts), [sys.executable, "-m", "spes_p2p"]]
    said = {subprocess.run([*words, "--version"], capture_output=True, check=True).stdout for words in starts}
    assert said == {f"spes_p2p {__version__}\n".encode()}


def test_a_config_that_ships_is_found_by_its_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for word in ("spes_1b", "spes_1b.yaml", "configs/spes_1b.yaml"):
        run = load_settings(PeerConfig, ["--run-id", "r", "--config", word]).run
        assert run is not None and run.model.num_experts > 1 and run.model != RunConfig().model
    (tmp_path / "spes_1b.yaml").write_text("run: {round: {total: 77}}\n")
    run = load_settings(PeerConfig, ["--run-id", "r", "--config", "spes_1b.yaml"]).run
    assert run is not None and run.round.total == 77, "a file of one's own comes first"
    assert "absent" in one_line(["--run-id", "r", "--config", "absent"])
    assert load_settings(ExperimentConfig, []).run.train.optimizer == "muon"


@pytest.mark.parametrize(
    ("command", "words", "warmup"),
    [
        (ExperimentConfig, ["--run.round.total", "3"], 0.6),
        (ExperimentConfig, ["--run.round.total=20", "--run.train.schedule", "wsd"], 4),
        (ExperimentConfig, ["--run.train.schedule-rounds", "5"], 1),
        (PeerConfig, ["--run-id", "r", "--config", f"{ROOT}/configs/home_1b.yaml", "--run.round.total", "5"], 0.2),
        (PlanConfig, ["--config", "spes_9b", "--run.round.total", "5"], 0.05),
        (
            ClusterConfig,
            ["--run-id", "r", "--shared", "jobs", "--config", "spes_9b", "--run.round.total", "1500"],
            None,
        ),
        (ExperimentConfig, ["--run.round.total", "60"], None),
        (AmendConfig, ["runs/peer", "--config", "home_1b", "--run.round.total", "5"], None),
    ],
)
def test_the_warm_up_of_a_shipped_config_shrinks_with_the_run_in_one_line(command, words, warmup, caplog, monkeypatch):
    run = load_settings(command, words).run
    assert run is not None
    said = [record.getMessage() for record in caplog.records]
    if warmup is None:
        assert not said
        return
    assert run.train.warmup_rounds == pytest.approx(warmup)
    assert len(said) == 1 and f"{warmup:g} rounds" in said[0] and "--run.train.warmup-rounds" in said[0]
    monkeypatch.setenv("RANK", "1")  # of torchrun's processes, the first one says it
    caplog.clear()
    assert load_settings(command, words).run == run and not caplog.records


def test_an_experiment_resumes_as_it_tells_at_its_end():
    """Its shipped file had lost its warm-up, so the default's was taken for the user's choice, and refused."""
    kept = load_settings(ExperimentConfig, []).run
    check_kept_settings(load_settings(ExperimentConfig, ["--resume"]).run, [kept], Path("peer-0"))


@pytest.mark.parametrize("command", [ExperimentConfig, PeerConfig, PlanConfig])
def test_a_warm_up_that_a_person_has_set_is_refused_where_it_does_not_fit(command, yaml_file, monkeypatch):
    named = ["--run-id", "r"] if command is PeerConfig else []
    own = yaml_file("run: {train: {warmup_rounds: 20}, round: {total: 500}}\n")
    monkeypatch.setenv("SPES_RUN_ROUND_TOTAL", "4")
    for words, number in ((["--config", own], 20), (["--config", "home_1b", "--run.train.warmup-rounds", "50"], 50)):
        with pytest.raises(
            ConfigError, match=rf"^train.warmup_rounds={number} is longer than round.total=4; set it to"
        ):
            load_settings(command, [*named, *words])


def test_a_terminal_shows_that_the_program_loads_and_a_file_does_not(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    words = [sys.executable, "-m", "spes_p2p", "health", "--output", str(tmp_path / "absent")]
    leader, follower = pty.openpty()
    with subprocess.Popen(words, stderr=follower, stdout=subprocess.DEVNULL) as shown:
        first = os.read(leader, 4096)
    os.close(follower)
    os.close(leader)
    assert first.startswith(b"loading PyTorch"), first
    assert shown.returncode == 1, "it has not joined yet"
    assert b"loading" not in subprocess.run(words, capture_output=True).stderr
    leader, follower = pty.openpty()
    subprocess.run(words, stderr=follower, stdout=follower, env=os.environ | {"TERM": "dumb"})
    os.close(follower)
    assert b"\x1b" not in (shown := os.read(leader, 4096)) and b"not joined" in shown
    os.close(leader)


def test_paths_begin_at_home_where_the_shell_left_the_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "peer.yaml").write_text("identity: ~/key\n")
    words = ["--run-id", "r", "--config=~/peer.yaml", "--output=~/run", "--text", "~/a", "~/b"]
    config = load_settings(PeerConfig, words)
    assert (config.output, config.identity) == (tmp_path / "run", tmp_path / "key")
    assert config.text == [tmp_path / "a", tmp_path / "b"] and config.cache == tmp_path / ".cache" / "spes_p2p"
    with pytest.raises(ConfigError, match="--output ~no-such-user/run: there is no such home folder; name another"):
        load_settings(PeerConfig, ["--run-id", "r", "--output=~no-such-user/run"])


def commands_of_pages() -> list[str]:
    """Return the `spes` commands of the pages' code blocks, without comments, each on one line."""
    pages = [page.read_text() for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"))]
    blocks = [block for page in pages for block in re.findall(r"^```[a-z]*\n(.*?)^```", page, re.M | re.S)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for notebook in (ROOT / "notebooks").glob("*.ipynb"):
        lines += [line for cell in json.loads(notebook.read_text())["cells"] for line in cell["source"]]
    return [match[1] for line in lines if (match := re.match(r"(?:\$ |!)?spes (.*?)(?:\s+#.*)?$", line))]


@pytest.mark.parametrize("command", commands_of_pages())
def test_commands_of_the_pages_have_known_flags_and_files(command):
    name, *words = shlex.split(command)
    known = {name for flag in all_flags(getattr(commands, COMMANDS[name][0])) for name in flag.names}
    assert {word.split("=")[0] for word in words if word.startswith("--")} <= known
    assert not any(word == "spes" and after in COMMANDS for word, after in pairwise(words))  # two on one line
    assert all((ROOT / word).is_file() for word in words if word.startswith("configs/"))
