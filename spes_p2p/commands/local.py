"""`spes local`: a swarm of peers and a monitor on this machine, each a process of its own."""

from __future__ import annotations

import logging
import multiprocessing
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NoReturn

import yaml
from pydantic import ValidationError

from spes_p2p.cli import EXIT_INTERRUPTED, Terminated, end_at_once, entry_point, explain, leave
from spes_p2p.commands import monitor
from spes_p2p.commands.early import RUN_FILE, check_experiment
from spes_p2p.config import FOUNDED, DataConfig, KeptRounds, MachineConfig, PeerConfig, RunConfig, check_machine
from spes_p2p.config.changes import check_kept_settings
from spes_p2p.config.commands import ExperimentConfig, MonitorConfig
from spes_p2p.config.machine import SEED_SECONDS
from spes_p2p.config_file import read_settings
from spes_p2p.data.conversations import founding
from spes_p2p.data.packing import held_out_by_source, train_sources
from spes_p2p.data.remote import url_of, with_fetched
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.fs import private_folder, write_atomic
from spes_p2p.monitor.events import METRICS_FILE, read_events
from spes_p2p.monitor.model_folder import ModelFolder, export
from spes_p2p.peer import life
from spes_p2p.peer.joining import ADDRESS_FILE, FRIENDS_FILE, LINK_FILE, kept
from spes_p2p.peer.output_dir import can_resume, check_output, delete
from spes_p2p.presentation import say
from spes_p2p.swarm.hivemind_fixes.processes import die_with_parent

log = logging.getLogger(__name__)

STOP_SECONDS = 30.0
TAIL_LINES = 12


class Child(ForkProcess):
    """A fork of this process, in which all is imported, for a command with a log of its own."""

    def __init__(self, name: str, arguments: Sequence[str], log: Path, *, on_terminal: bool = False) -> None:
        super().__init__(target=_run, args=(arguments, log.absolute(), on_terminal), name=name)
        self.log = log

    def is_running(self) -> bool:
        """Check whether it still runs.

        Raises:
            SpesError: it ended with an error of its own, and the end of its log is printed. A process that was killed,
                or was asked to leave, is a fact of life, not an error.
        """
        code = self.exitcode
        if code is not None and code > 0 and not self.has_left:
            say(self.tail())  # an error is one line, and cut
            raise SpesError(f"{self.name} failed with exit code {code}; the lines above are the end of {self.log}")
        return code is None

    @property
    def has_left(self) -> bool:
        """Whether it has handed its slots over, as it was asked to."""
        return self.exitcode == EXIT_INTERRUPTED

    def killer(self) -> str | None:
        """Return the name of the signal that killed it, if one did."""
        return signal.Signals(-self.exitcode).name if self.exitcode is not None and self.exitcode < 0 else None

    def tail(self) -> str:
        """Return the last lines of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:])


PROGRAMS: dict[str, tuple[Any, Callable[[Any], int]]] = {
    "peer": (PeerConfig, life.main),
    "monitor": (MonitorConfig, monitor.main),
}
"""What a child can run."""


def _run(arguments: Sequence[str], log: Path, on_terminal: bool) -> NoReturn:
    """Run a command in a child, and end with its exit code.

    It does not see this command's `SPES_` variables: they configure the parent, which passes on what is meant for it.

    Args:
        arguments: The command, one of PROGRAMS, and its flags.
        log: File for its standard error, and its output unless `on_terminal`; appended to.
        on_terminal: Let it write to the parent's standard output.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_at_once)
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    die_with_parent(parent.pid)
    os.setsid()
    with open(os.devnull) as nothing, open(log, "ab") as file:
        os.dup2(nothing.fileno(), 0)
        os.dup2(file.fileno(), 2)
        if not on_terminal:
            os.dup2(file.fileno(), 1)
    for name in [name for name in os.environ if name.startswith("SPES_")]:
        del os.environ[name]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    sys.argv = [sys.argv[0], *arguments]
    sys.orig_argv = [sys.executable, "-m", "spes_p2p", *arguments]  # what a peer starts again with
    settings, main = PROGRAMS[arguments[0]]
    try:
        entry_point(settings, main, arguments[1:], program=f"spes {arguments[0]}")
    except SystemExit as ended:
        leave(int(ended.code or 0))


def stop(children: Sequence[Child]) -> None:
    """Ask all to end, and kill those that have not after STOP_SECONDS."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + STOP_SECONDS
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        child.kill()
        child.join()


START_SECONDS = 180.0
POLL_SECONDS = 0.5
PIDS_FILE = "pids.txt"
OWN_PATHS = ("text", "data")
"""The user's own files that the peers and the monitor read."""
ENOUGH_TOKENS = 0.95
"""Share of the tokens asked for below which the experiment says that they are fewer."""


def main(config: ExperimentConfig) -> int:
    """Run the experiment; return the exit code."""
    config = _resumed(config) if config.resume else _with_data(config)
    num_slots = config.run.num_slots
    slots = config.max_slots or min(-(-2 * num_slots // config.peers), num_slots)
    if slots > num_slots:
        raise ConfigError(f"max_slots={slots} exceeds the run's {num_slots} slots; lower it, or leave it out")
    check_machine(config.run, config)
    check_output(config.output, resume=config.resume, overwrite=config.overwrite)
    if config.resume and _is_finished(config):
        say(f"the run is finished; to prolong it: {_spes('amend', config.output / 'peer-0', '--run.round.total', 'N')}")
        return 0
    try:
        _in_a_fork(_prepare_corpus, config)
        if config.overwrite and config.output.exists():
            delete(list(config.output.iterdir()))  # the folder may be a mount point, or a link to another disk
        return Experiment(config, slots).run()
    finally:
        _end_forks()


def _in_a_fork(prepare: Callable[[ExperimentConfig], None], config: ExperimentConfig) -> None:
    """Call a function in a fork: tokenising starts threads, and a process with threads must not fork."""
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("fork"), die_with_parent, (os.getpid(),))
    try:
        pool.submit(prepare, config).result()
    except KeyboardInterrupt:
        _end_forks()
        raise
    finally:
        pool.shutdown()


def _end_forks() -> None:
    for fork in multiprocessing.active_children():
        fork.kill()


def _resumed(config: ExperimentConfig) -> ExperimentConfig:
    """Take the run, its text, its peers, their slots and how they compute from the interrupted experiment.

    Not from the folders of its peers: one that was interrupted at its start has none.

    Raises:
        ConfigError: `output` holds none.
    """
    check_experiment(config.output)
    kept = read_settings(file := config.output / RUN_FILE, "--output")
    try:
        run = RunConfig.model_validate(kept.pop("run", None), context=FOUNDED)
    except ValidationError as error:
        raise ConfigError(f"{file} is damaged, or of another version; start anew with --overwrite") from error
    from_file = [] if "config" in config.model_fields_set else [_run_in(config.config)]  # not of the user's choice
    check_kept_settings(config.run, [*from_file, run], config.output / "peer-0", spared=("round.min_peers",))
    own = {name: [Path(path) for path in kept.pop(name, [])] for name in OWN_PATHS}
    chosen = _chosen(config) | ({"max_slots": config.max_slots} if config.max_slots else {})
    return config.model_copy(update={**kept, **chosen, **own, "run": run, "peers": run.round.min_peers})


def _is_finished(config: ExperimentConfig) -> bool:
    """Check whether the model of the last round is saved, and no revision prolongs the run."""
    metrics, folder = config.output / METRICS_FILE, config.output / "peer-0"
    if not (metrics.exists() and (config.output / "model").exists() and can_resume(folder)):
        return False
    last = max((event["round"] for event in read_events(metrics) if event["kind"] == "evaluation"), default=0)
    if last < config.run.round.total:
        return False
    own = kept(PeerConfig(run_id=config.run_id, output=folder, resume=True))
    return own.is_finished and last >= own.runs[-1].round.total


def _run_in(file: Path) -> RunConfig:
    """Return the run's settings in a YAML file of ours."""
    return RunConfig.model_validate(read_settings(file, "--config").get("run") or {})


def _with_data(config: ExperimentConfig) -> ExperimentConfig:
    """Fold --text, --data and --dataset into the run's data settings."""
    given = [name for name in ("text", "data", "dataset") if getattr(config, name)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]} exclude each other; drop one")
    shards = [] if config.text or config.dataset else config.data or config.run.data.paths
    is_local = config.dataset is None or Path(config.dataset).exists()
    text = [Path(config.dataset)] if config.dataset is not None and is_local else config.text
    data: dict[str, Any] = {"paths": []}  # the peers get them as flags
    if given:
        data |= {"source": "files"} if is_local else {"source": "hub", "name": config.dataset}
    try:
        chosen = DataConfig.model_validate({**config.run.data.model_dump(), **data})
    except ValidationError as error:
        raise ConfigError(f"--dataset: {explain(error)}") from error
    run = config.run.model_copy(update={"data": chosen})
    return config.model_copy(update={"run": run, "text": text, "data": shards})


def _prepare_corpus(config: ExperimentConfig) -> None:
    """Train the tokenizer and tokenise once, before N peers would; nothing is written yet if the corpus is bad."""
    cache = config.cache
    data = with_fetched(config.corpus(config.run.data), cache)
    tokenizer = resolve_tokenizer(data, config.text, cache)
    data = founding(data, tokenizer)
    if data.source != "hub":
        train_sources(data, tokenizer, paths=config.text, cache=cache)(0)
        held_out_by_source(data, tokenizer, paths=config.text, cache=cache, num_sequences=8, batch_size=8, seed=0)


class Experiment:
    """Starts the processes, watches them, and leaves none behind."""

    def __init__(self, config: ExperimentConfig, max_slots: int) -> None:
        self._config = config
        self._max_slots = max_slots
        self._peers: list[Child] = []
        self._monitor: Child | None = None

    def run(self) -> int:
        """Run to the end; return 0 if the monitor saw the run finish."""
        out, run = self._config.output, self._config.run
        try:
            private_folder(out)
            (out / "logs").mkdir(exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot write --output {out}: {error.strerror}; name a writable one") from error
        run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": self._config.peers})})
        settings = {"run": run.model_dump(mode="json"), **_own(self._config), "run_id": self._config.run_id}
        settings |= {"max_slots": self._max_slots} | _chosen(self._config)
        leaves_model = True
        try:
            if not self._config.resume:
                with write_atomic(out / RUN_FILE) as stream:
                    stream.write(yaml.safe_dump(settings, sort_keys=False).encode())
            link = self._start()
            say(_opening(self._config, link, self._max_slots, self._peers[:2][-1]))
            code = self._watch()
        except KeyboardInterrupt as interrupt:
            say("\nstopping ...")
            code = EXIT_INTERRUPTED
            leaves_model = not isinstance(interrupt, Terminated)
        finally:
            stop([*self._peers, *([self._monitor] if self._monitor else [])])
        if code and leaves_model:
            self._export()
        say(_summary(self._config, code))
        return code

    def _export(self) -> None:
        """Write the newest model that a peer or the monitor has, where the monitor did not see the run's end."""
        out = self._config.output
        newest: dict[Path, int] = {}
        for folder in (out, *(self._folder(index) for index in range(self._config.peers))):
            try:
                newest[folder] = ModelFolder(folder).choose(None)[0]
            except SpesError as error:
                log.debug("no model in %s: %s", folder, error)
        for folder in sorted(newest, key=lambda folder: -newest[folder]):
            try:
                say(f"\nmodel      {out / 'model'}: {export(folder, out / 'model', overwrite=True)}")
            except SpesError as error:
                log.warning("no model from %s: %s", folder, error)
            else:
                return

    def _start(self) -> str:
        """Start one peer, which has something to resume if any has, then the others; return the run's link."""
        first, *others = sorted(range(self._config.peers), key=lambda index: not can_resume(self._folder(index)))
        address_file = self._folder(first) / ADDRESS_FILE  # it may be there from an earlier start, and names its port
        before = address_file.stat().st_mtime_ns if address_file.exists() else None
        # The monitor may lack versions of a finished run, which a resumed founder serves only if it is told to.
        serves = ["--seed-seconds", f"{SEED_SECONDS:g}"]
        founds = ["--config", str(self._config.output / RUN_FILE)]
        founder = self._start_peer(first, serves if can_resume(self._folder(first)) else founds)
        deadline = time.monotonic() + START_SECONDS
        while not (
            address_file.exists()
            and address_file.stat().st_mtime_ns != before
            and address_file.read_text().endswith("\n")
        ):
            if not founder.is_running() or time.monotonic() > deadline:
                raise SpesError(f"the first peer did not start within {START_SECONDS:.0f} s; see {founder.log}")
            founder.join(POLL_SECONDS)
        address = address_file.read_text().strip()
        friends = [file for index in range(self._config.peers) if (file := self._folder(index) / FRIENDS_FILE).exists()]
        invite = ["--invite", str(friends[0])] if friends else []
        for index in others:
            self._start_peer(index, ["--initial-peers", address, *invite])
        self._monitor = self._start_monitor(address)
        return (self._folder(first) / LINK_FILE).read_text().strip()

    def _folder(self, index: int) -> Path:
        return self._config.output / f"peer-{index}"

    def _start_peer(self, index: int, extra: Sequence[str]) -> Child:
        output = self._folder(index)
        arguments = [
            *("--run-id", self._config.run_id, "--output", str(output), "--max-slots", str(self._max_slots or "auto")),
            *("--threads", "1", "--data-seed", str(index), "--host", "127.0.0.1"),
            "--yes",  # the run is this user's own
            "--alone",  # on one machine no peer is cut off: one that does not answer is dead
            *("--cache", str(self._config.cache), "--log-level", self._config.log_level),
            *(["--resume"] if can_resume(output) else []),
            *_flags(_chosen(self._config)),
            *extra,
        ]
        self._peers.append(self._spawn(f"peer-{index}", "peer", arguments))
        return self._peers[-1]

    def _start_monitor(self, address: str) -> Child:
        arguments = [
            *("--run-id", self._config.run_id, "--initial-peers", address, "--output", str(self._config.output)),
            *("--cache", str(self._config.cache), "--threads", "1", "--yes"),
            *(["--wandb"] if self._config.wandb else []),
            *(["--resume"] if self._config.resume else []),
            *(["--skip-unusable"] if self._config.skip_unusable else []),
        ]
        return self._spawn("monitor", "monitor", arguments, on_terminal=True)

    def _spawn(self, name: str, command: str, arguments: Sequence[str], *, on_terminal: bool = False) -> Child:
        log = self._config.output / "logs" / f"{name}.log"
        child = Child(name, [command, *arguments, *_own_words(self._config)], log, on_terminal=on_terminal)
        child.start()
        with open(log.parent / PIDS_FILE, "a" if self._peers else "w") as pids:
            pids.write(f"{child.pid}\n")
        return child

    def _watch(self) -> int:
        """Wait for the monitor's end; note peers that die on the way."""
        assert self._monitor is not None
        running = list(self._peers)
        while (code := self._monitor.exitcode) is None:
            for child in list(running):
                if not child.is_running():
                    running.remove(child)
                    if killer := child.killer():
                        say(f"{child.name} was killed by {killer}; the swarm goes on without it")
                    elif child.has_left:
                        say(f"{child.name} has left, as it was asked to; the swarm goes on without it")
            self._monitor.join(POLL_SECONDS)
        if code:
            say(self._monitor.tail())
        return code


def _own(config: ExperimentConfig) -> dict[str, list[str]]:
    """Return the text and token shards by flag; patterns stay as they are."""
    is_mixed = bool(config.run.data.mixture)
    own = {name: getattr(config, name) for name in OWN_PATHS}
    return {name: [_absolute(path, is_named=is_mixed) for path in paths] for name, paths in own.items()}


def _own_words(config: ExperimentConfig) -> list[str]:
    """Return the text and token shards as flags."""
    return [word for flag, paths in _own(config).items() for path in paths for word in (f"--{flag}", path)]


def _absolute(path: Path, *, is_named: bool) -> str:
    """Return a path from the root; in NAME=PATH only the path changes; a URL stays."""
    name, separator, rest = str(path).partition("=") if is_named else ("", "", str(path))
    return f"{name}{separator}{rest if url_of(Path(rest)) else Path(rest).expanduser().absolute()}"


def _chosen(config: ExperimentConfig) -> dict[str, Any]:
    """Return what was chosen about the machine, about its checkpoints, and about its data."""
    fields = (*MachineConfig.model_fields, *KeptRounds.model_fields, "skip_unusable", "device")
    choices = {name: getattr(config, name) for name in fields if name in config.model_fields_set}
    return {name: value for name, value in choices.items() if value is not None}


def _flags(choices: Mapping[str, Any]) -> list[str]:
    """Return settings as a peer's flags."""
    flags = []
    for name, value in choices.items():
        flag = name.replace("_", "-")
        flags.append(f"--{'' if value else 'no-'}{flag}" if isinstance(value, bool) else f"--{flag}={value}")
    return flags


def _opening(config: ExperimentConfig, link: str, slots: int, peer: Child) -> str:
    out = config.output
    words = ["join", link, "--output", out / "peer-by-hand", "--max-slots", slots, "--threads", 1]
    return (
        f"{config.peers} peers train run {config.run_id!r}; logs and {PIDS_FILE} in {out / 'logs'}\n"
        f"join by hand:  {_spes(*words, *_own_words(config))}\n"
        f"kill {peer.name}:   kill -KILL {peer.pid}\n"
        "stop:          Ctrl-C\n"
    )


def _summary(config: ExperimentConfig, code: int) -> str:
    out = config.output
    resume = _spes("local", "--resume", "--output", out)
    if code:
        return f"\nstopped before the run's end; continue it:  {resume}"
    return _trained(config) + (
        f"\nmodel      {out / 'model'}  (an ordinary Hugging Face checkpoint)\n"
        f"report     {out / 'report.html'}\nmetrics    {out / METRICS_FILE}\nsettings   {out / RUN_FILE}\n\n"
        f"talk to it:  {_spes('chat', out / 'model')}\n"
        f"evaluate:  {_spes('evaluate', out / 'model')}\n"
        f"resume:    {resume}   (after an interruption)\n"
        f"join:      while it runs, with the command printed at the start; it is in {out / 'logs' / 'peer-0.log'} too"
    )


def _trained(config: ExperimentConfig) -> str:
    """Say how many tokens were trained, and if they are fewer than the settings ask for: rounds also end by time."""
    metrics = config.output / METRICS_FILE
    if not metrics.exists():
        return ""
    tokens = max((event.get("total_tokens", 0) for event in read_events(metrics)), default=0)
    rounds = config.run.round
    asked = rounds.total * rounds.tokens
    said = f"\ntrained    {tokens:,} tokens in {rounds.total} rounds"
    if rounds.mode == "tokens" and not rounds.samples and tokens < ENOUGH_TOKENS * asked:
        return (
            f"{said}, {tokens / asked:.0%} of the {asked:,} that its settings ask for; this machine was busy, or too "
            f"slow for round.max_seconds={rounds.max_seconds:g}: expect a higher loss\n"
        )
    return f"{said}\n"


def _spes(*words: object) -> str:
    """Return a command of this program, for a shell of this machine in this working directory."""
    script = Path(sys.executable).parent / "spes"
    file = script if script.exists() else Path(sys.executable)
    shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
    start = "spes" if shutil.which("spes") == str(script) else shown
    return shlex.join(map(str, [start, *([] if script.exists() else ["-m", "spes_p2p"]), *words]))
