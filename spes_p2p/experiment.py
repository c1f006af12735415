"""The local experiment: a swarm of peers and a monitor as processes of this machine, watched to their end."""

from __future__ import annotations

import functools
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, YamlConfigSettingsSource

from spes_p2p.config import PositiveInt, RunConfig, RunId
from spes_p2p.data.sources import documents
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import ConfigError, SpesError
from spes_p2p.peer import ADDRESS_FILE, prepare_output
from spes_p2p.swarm.processes import die_with_parent

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parent.parent
START_SECONDS = 180.0
STOP_SECONDS = 30.0
TAIL_LINES = 12


class ExperimentConfig(BaseSettings):
    """A swarm on this machine: `./scripts/run_local_experiment.sh [--peers 4] [--output DIR] [--text FILE ...]`."""

    model_config = SettingsConfigDict(
        env_prefix="SPES_",
        env_nested_delimiter="__",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_prog_name="run_local_experiment.sh",
        cli_implicit_flags=True,
        cli_avoid_json=True,
        nested_model_default_partial_update=True,
    )

    config: Path = ROOT / "configs" / "local_experiment.yaml"
    """YAML file with the run's settings under `run` and defaults for these flags."""
    run: RunConfig = RunConfig()
    """The run's settings: `--run.round.total 12`, `--run.train.lr 1e-3`, ..."""
    run_id: RunId = "local"
    """Name of the run."""
    peers: Annotated[int, Field(ge=1, le=64)] = 4
    """Peers to start."""
    max_slots: PositiveInt | None = None
    """Slots per peer; by default two holders for each slot."""
    output: Path = Path("runs/local")
    """Directory for everything that the experiment leaves behind."""
    text: list[Path] = []
    """Files or folders (text, jsonl, parquet) to train on instead of the embedded corpus."""
    dataset: str | None = None
    """A local jsonl, parquet or text file, or the name of a `datasets` data set, streamed where the hub is reachable."""
    resume: bool = False
    """Continue an interrupted experiment."""
    overwrite: bool = False
    """Delete what `output` holds and start anew."""
    wandb: bool = False
    """Let the monitor log to Weights & Biases, offline unless WANDB_MODE says otherwise."""
    cache: Path = Path("~/.cache/spes_p2p")
    """Where trained tokenizers and tokenised text are kept."""
    log_level: str = "info"
    """Least severe event in the logs."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings, env_settings, YamlConfigSettingsSource(settings_cls))


@dataclass
class Child:
    """A process of the experiment, its name and its log."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path


def main(config: ExperimentConfig) -> int:
    """Run the experiment; return the exit code."""
    config = _with_data(config)
    num_experts = config.run.model.num_experts
    slots = config.max_slots or min(-(-2 * num_experts // config.peers), num_experts)
    if slots > num_experts:
        raise ConfigError(f"max_slots={slots} exceeds model.num_experts={num_experts}; set it to {num_experts} or less")
    _prepare_corpus(config)
    prepare_output(config.output, resume=config.resume, overwrite=config.overwrite)
    return Experiment(config, slots).run()


def _with_data(config: ExperimentConfig) -> ExperimentConfig:
    """Fold --text and --dataset into the run's data settings."""
    if config.dataset is None and not config.text:
        return config
    if config.dataset is not None and config.text:
        raise ConfigError("--text and --dataset exclude each other; drop one")
    is_local = config.dataset is None or Path(config.dataset).exists()
    text = [Path(config.dataset)] if config.dataset is not None and is_local else config.text
    data = {"source": "files"} if is_local else {"source": "hub", "name": config.dataset}
    run = config.run.model_copy(update={"data": config.run.data.model_copy(update=data)})
    return config.model_copy(update={"run": run, "text": text})


def _prepare_corpus(config: ExperimentConfig) -> None:
    """Train the tokenizer once, before N peers would; a bad corpus is reported before anything is written."""
    if config.run.data.source != "hub":
        next(iter(documents(config.run.data, config.text)))
    resolve_tokenizer(config.run.data, config.text, config.cache.expanduser())


class Experiment:
    """Starts the processes, watches them, and leaves none behind.

    Args:
        config: The experiment's settings.
        max_slots: Slots per peer.
    """

    def __init__(self, config: ExperimentConfig, max_slots: int) -> None:
        self._config, self._max_slots = config, max_slots
        self._peers: list[Child] = []
        self._monitor: Child | None = None

    def run(self) -> int:
        """Run to the end; return 0 if the monitor saw the run finish."""
        out = self._config.output
        out.mkdir(parents=True, exist_ok=True)
        run = self._config.run
        if run.round.min_peers < self._config.peers:
            run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": self._config.peers})})
        (out / "run.yaml").write_text(yaml.safe_dump({"run": run.model_dump(mode="json")}, sort_keys=False))
        try:
            address = self._start()
            say(_opening(self._config, address))
            code = self._watch()
        except KeyboardInterrupt:
            say("\nstopping ...")
            code = 130
        finally:
            self._stop()
        say(_summary(self._config, code))
        return code

    def _start(self) -> str:
        founder = self._start_peer(
            0, [] if self._config.resume else ["--config", str(self._config.output / "run.yaml")]
        )
        address_file = self._config.output / "peer-0" / ADDRESS_FILE
        address_file.unlink(missing_ok=True)
        deadline = time.monotonic() + START_SECONDS
        while not (address_file.exists() and address_file.read_text().endswith("\n")):
            self._check(founder)
            if time.monotonic() > deadline:
                raise SpesError(f"the first peer did not start within {START_SECONDS:.0f} s; see {founder.log}")
            _wait(founder.process, 0.2)
        address = address_file.read_text().strip()
        for index in range(1, self._config.peers):
            self._start_peer(index, ["--initial-peers", address])
        self._monitor = self._start_monitor(address)
        return address

    def _start_peer(self, index: int, extra: Sequence[str]) -> Child:
        output = self._config.output / f"peer-{index}"
        resume = self._config.resume and output.exists()
        command = [
            *("peers/run_peer.py", "--run-id", self._config.run_id, "--output", str(output)),
            *("--max-slots", str(self._max_slots), "--threads", "1", "--device", "cpu"),
            *("--data-seed", str(index), "--cache", str(self._config.cache), "--log-level", self._config.log_level),
            *(["--resume"] if resume else []),
            *extra,
        ]
        self._peers.append(self._spawn(f"peer-{index}", command))
        return self._peers[-1]

    def _start_monitor(self, address: str) -> Child:
        command = [
            *("monitor/run_monitor.py", "--run-id", self._config.run_id, "--initial-peers", address),
            *("--output", str(self._config.output), "--cache", str(self._config.cache), "--threads", "1"),
            *(["--wandb"] if self._config.wandb else []),
            *(["--resume"] if self._config.resume else []),
        ]
        return self._spawn("monitor", command, on_terminal=True)

    def _spawn(self, name: str, command: Sequence[str], *, on_terminal: bool = False) -> Child:
        text = [word for path in self._config.text for word in ("--text", str(path.resolve()))]
        path = self._config.output / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        for variable in [v for v in environment if v.startswith("SPES_")]:
            del environment[variable]
        with path.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, str(ROOT / command[0]), *command[1:], *text],
                stdin=subprocess.DEVNULL,
                stdout=None if on_terminal else file,
                stderr=file,
                env=environment,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
        return Child(name, process, path)

    def _check(self, child: Child) -> bool:
        """Tell whether a peer still runs; a peer that was killed is a fact of life, one that failed is not.

        Raises:
            SpesError: it ended with an error of its own.
        """
        code = child.process.poll()
        if code is None:
            return True
        if code > 0:
            raise SpesError(f"{child.name} failed with exit code {code}:\n{_tail(child.log)}")
        return False

    def _watch(self) -> int:
        """Wait for the monitor's end; note peers that die on the way."""
        assert self._monitor is not None
        running = {child.name for child in self._peers}
        while self._monitor.process.poll() is None:
            for child in self._peers:
                if child.name in running and not self._check(child):
                    running.remove(child.name)
                    if child.process.returncode < 0:
                        killer = signal.Signals(-child.process.returncode).name
                        say(f"{child.name} was killed by {killer}; the swarm goes on without it")
            _wait(self._monitor.process, 0.5)
        if self._monitor.process.returncode > 0:
            say(_tail(self._monitor.log))
        else:
            for child in self._peers:  # they leave by themselves once the monitor has archived the model
                _wait(child.process, STOP_SECONDS)
        return self._monitor.process.returncode

    def _stop(self) -> None:
        children = [*self._peers, *([self._monitor] if self._monitor else [])]
        for child in children:
            if child.process.poll() is None:
                child.process.terminate()
        deadline = time.monotonic() + STOP_SECONDS
        for child in children:
            if not _wait(child.process, deadline - time.monotonic()):
                child.process.kill()
                child.process.wait()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Wait for a process; tell whether it has ended."""
    try:
        process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return False
    return True


def _tail(path: Path) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-TAIL_LINES:])


def _opening(config: ExperimentConfig, address: str) -> str:
    return (
        f"{config.peers} peers train run {config.run_id!r}; logs in {config.output / 'logs'}\n"
        f"join by hand:  {_python()} peers/run_peer.py --run-id {config.run_id} --initial-peers {address} "
        f"--output {config.output / 'peer-by-hand'}\n"
        f"kill one:      kill -9 $(pgrep -f {config.output / 'peer-1'} | head -1)\n"
        "stop:          Ctrl-C\n"
    )


def _summary(config: ExperimentConfig, code: int) -> str:
    out = config.output
    resume = f"./scripts/run_local_experiment.sh --resume --output {out}"
    if code:
        return f"\nstopped before the run's end; continue it:  {resume}"
    return (
        f"\nmodel      {out / 'model'}  (an ordinary Hugging Face checkpoint)\n"
        f"report     {out / 'report.html'}\nmetrics    {out / 'metrics.jsonl'}\nsettings   {out / 'run.yaml'}\n\n"
        f"evaluate:  {_python()} scripts/evaluate.py {out / 'model'}\n"
        f"resume:    {resume}   (after an interruption)\n"
        f"join:      a running experiment prints the command when it starts; see {out / 'logs' / 'peer-0.log'}"
    )


def _python() -> str:
    executable = Path(sys.executable)
    return str(executable.relative_to(Path.cwd())) if executable.is_relative_to(Path.cwd()) else str(executable)


def say(text: str) -> None:
    """Tell the user; a command's standard output is its result, not its log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
