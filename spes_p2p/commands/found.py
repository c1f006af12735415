"""`spes found`: five questions, the plan, and a running founder; each answer has a default and a flag."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from spes_p2p.cli import load_settings
from spes_p2p.commands.plan import vocabulary
from spes_p2p.config import PeerConfig
from spes_p2p.config.commands import FoundConfig, PlanConfig
from spes_p2p.config.machine import find_config
from spes_p2p.errors import ConfigError
from spes_p2p.fs import matches
from spes_p2p.peer.output_dir import check_output
from spes_p2p.peer.settings import LINKED_PEERS, for_link
from spes_p2p.planner.size import free_gpu_bytes, run_size
from spes_p2p.planner.tables import params_text
from spes_p2p.presentation import say

SIZES = ("local_experiment", "home_1b", "home_7b")
DEFAULT_SIZE, DEFAULT_MBIT = 2, 20.0
APART = {"run_id", "output", "config", "yes", "tokens_per_second"}
"""Settings that do not go into the run's file."""


def main(config: FoundConfig) -> int:
    """Ask, plan, write the run's file, and become its founder's peer.

    Raises:
        ConfigError: an answer is missing or cannot be, or the output exists.
    """
    settings = config.model_dump(mode="json", exclude_unset=True)
    run_id = _name(config.run_id or _asked(config, "what is the run for?", "my-run", lambda word: bool(_name(word))))
    settings = _over(_model(config), settings)
    run: dict[str, Any] = {"data": {}} | settings.get("run", {})
    settings["run"] = run
    usual, text = "as its settings say", ""
    if not (config.text or config.data):
        text = _asked(config, "whose text? a folder of yours, or", usual, lambda word: word == usual or _exists(word))
        settings |= {"text": [text]} if text != usual else {}
    if text != usual:
        run["data"] = {key: run["data"][key] for key in run["data"] if key not in ("name", "split")}
        run["data"]["source"] = "files"
    if "invite_only" not in run:
        who = _asked(config, "who may join? all, or invited", "all", ("all", "invited").__contains__)
        run["invite_only"] = who == "invited"
    if config.uplink_mbit is None:
        rate = _asked(config, "upload rate of this link, Mbit/s?", f"{DEFAULT_MBIT:g}", _is_rate)
        settings["uplink_mbit"] = float(rate)
    output = config.output or Path("runs") / run_id
    check_output(output, resume=False, overwrite=False)
    settings = {key: value for key, value in settings.items() if key not in APART}
    peer = PeerConfig.model_validate({**settings, "run_id": run_id, "output": output})
    assert peer.run is not None
    settings["run"] = for_link(peer, peer.run, vocabulary(peer.run.data)).model_dump(mode="json", exclude_unset=True)
    return _found(config, settings, run_id, output)


def _found(config: FoundConfig, settings: dict[str, Any], run_id: str, output: Path) -> int:
    file = output.with_name(f"{output.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")
    spes = [sys.executable, "-m", "spes_p2p"]
    plan = ["plan", "--config", str(file), "--peers", str(LINKED_PEERS)]
    plan += ["--device", "cuda"] if config.device in (None, "cuda") and free_gpu_bytes() else []
    plan += ["--tokens-per-second", str(config.tokens_per_second)] if config.tokens_per_second else []
    # In a process of its own: what has used a GPU or many threads must not fork, as a peer does.
    if code := subprocess.run([*spes, *plan], check=False).returncode:
        return code
    words = ["peer", "--run-id", run_id, "--config", str(file), "--output", str(output)]
    say(f"\nwrote {file}; the founder: spes {shlex.join(words)}")
    if _asked(config, "found it now?", "y", ("y", "n").__contains__) == "n":
        return 0
    os.execv(sys.executable, [*spes, *words])


def _model(config: FoundConfig) -> dict[str, Any]:
    """Return the settings of the model's file; none if flags or a file name a model."""
    if config.config is not None or (config.run is not None and "model" in config.run.model_fields_set):
        return {}
    runs = [load_settings(PlanConfig, [name]).run for name in SIZES]
    sizes = [params_text(run_size(run, vocabulary(run.data)).total_params) for run in runs]
    rows = [f"{number} {name} ({size})" for number, (name, size) in enumerate(zip(SIZES, sizes, strict=True), 1)]
    answer = _asked(config, f"which model? {', '.join(rows)}, or a file", str(DEFAULT_SIZE), _is_model)
    return PeerConfig.read_file({"config": SIZES[int(answer) - 1] if answer.isdigit() else answer})


def _asked(config: FoundConfig, question: str, default: str, is_valid: Callable[[str], bool]) -> str:
    """Return an answer: the default without a terminal, and with --yes."""
    if config.yes or not sys.stdin.isatty():
        return default
    while True:
        try:
            answer = input(f"{question} [{default}] ").strip() or default
        except EOFError as error:
            raise ConfigError("there are no more answers; give them as flags, or --yes for the defaults") from error
        if is_valid(answer):
            return answer
        say(f"{answer} is no answer to that")


def _over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Return settings with those of `above` in place of the same ones `below`."""
    both = (key for key in below if isinstance(below[key], dict) and isinstance(above.get(key), dict))
    return {**below, **above, **{key: _over(below[key], above[key]) for key in both}}


def _name(words: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]+", "-", words).strip("-_")[:64]


def _is_model(word: str) -> bool:
    return 1 <= int(word) <= len(SIZES) if word.isdigit() else find_config(Path(word)).is_file()


def _exists(word: str) -> bool:
    return bool(matches(Path(word).expanduser()))


def _is_rate(word: str) -> bool:
    return re.fullmatch(r"\d{1,6}(\.\d+)?", word) is not None and float(word) > 0
