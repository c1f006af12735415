"""`spes plan`: tell a volunteer what a run would need of a machine."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path

from spes_p2p.config import AdapterConfig, DataConfig, KeptRounds, ModelConfig, RunConfig, check_machine
from spes_p2p.config.commands import PlanConfig
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.planner.memory import (
    Setup,
    base_bytes,
    disk_bytes,
    fits,
    peer_bytes,
    peer_memory,
    shortage,
    slots_that_fit,
    with_programs,
)
from spes_p2p.planner.size import ModelSize, free_gpu_bytes, free_memory_bytes, run_size
from spes_p2p.planner.tables import days_lines, memory_lines, model_lines, start_lines, time_lines, traffic_lines
from spes_p2p.planner.traffic import (
    Course,
    RoundTraffic,
    newcomer_bytes,
    of_moments_round,
    round_traffic,
    transfer_seconds,
)
from spes_p2p.presentation import say

log = logging.getLogger(__name__)

ANY_MEMORY = 2**60
"""Stands for the bytes of a GPU of unknown memory."""


def main(config: PlanConfig) -> int:
    """Print the plan; return the exit code.

    Raises:
        ConfigError: it does not fit, or cannot be made.
        DataError: a local tokenizer cannot be read.
    """
    run, vocab_size = _run(config)
    check_machine(run, config, config.ranks)
    if config.host_memory_gb and config.device != "cuda":
        raise ConfigError("--host-memory-gb goes with --device cuda; without a GPU set --memory-gb")
    size = run_size(run, vocab_size)
    setup = Setup.of(run, config, vocab_size, num_ranks=config.ranks, on_gpu=config.device == "cuda")
    setup = replace(with_programs(setup), is_alone=config.peers == 1)
    memory, host = _available(config)
    claimed = _claimed(config, size, setup, memory, host)
    num_peers = config.peers or max(2, run.round.min_peers)
    traffic = round_traffic(size, claimed, num_peers, setup)
    fullest = round_traffic(size, claimed, num_peers, of_moments_round(setup))
    kept = KeptRounds().keep_last
    base = base_bytes(size, setup.base) if size.is_adapted else 0
    speed = config.tokens_per_second or _measured(config, run, vocab_size, claimed)
    links = config.uplink_mbit or config.downlink_mbit, config.downlink_mbit or config.uplink_mbit
    lines = [
        *model_lines(run, size, setup, claimed, vocab_size),
        *memory_lines(peer_memory(size, claimed, setup)),
        *traffic_lines(traffic, num_peers, size, claimed),
        *start_lines(base + newcomer_bytes(size, claimed, setup), disk_bytes(size, claimed, kept, setup), kept),
        *time_lines(run, (traffic, fullest), num_peers, links, speed),
    ]
    if speed is not None:
        one_more = round_traffic(size, claimed, num_peers + 1, setup)
        both = (_course(run, num_peers, speed, links, traffic), _course(run, num_peers + 1, speed, links, one_more))
        lines += days_lines(run, size, both, num_peers, config.watts)
    if run.model == ModelConfig() and "model" not in config.run.model_fields_set:
        lines.insert(0, "the default model: neither run.model nor --from names another")
    say("\n".join(lines))
    is_limited = config.memory_gb or config.host_memory_gb
    does_fit = fits(size, claimed, setup, memory, host)
    if is_limited and not does_fit:
        raise ConfigError(shortage(size, claimed, setup, memory, host))
    if memory < ANY_MEMORY:
        needed = peer_bytes(size, claimed, setup) / 1e9
        say(f"\n{'fits' if does_fit else 'does not fit'}: {needed:.3g} of {memory / 1e9:.3g} GB")
        say(_most(size, setup, memory, host))
    return 0


def _course(
    run: RunConfig, num_peers: int, speed: float, links: tuple[float | None, float | None], traffic: RoundTraffic
) -> Course:
    uplink, downlink = links
    seconds = transfer_seconds(traffic, uplink, downlink).total if uplink and downlink else 0.0
    return Course.of(run, num_peers, speed, seconds)


def _measured(config: PlanConfig, run: RunConfig, vocab_size: int, claimed: int) -> float | None:
    """Return this machine's speed; None if the plan is for another one, or for what is not measured."""
    is_elsewhere = config.memory_gb or config.host_memory_gb or config.ranks > 1
    if is_elsewhere or run.adapter is not None or run.model.start is not None:
        return None
    from spes_p2p.training.speed import MEASURE_SECONDS, measured_speed  # takes seconds, as PyTorch does

    log.info("measuring this machine for %.0f s; --tokens-per-second X spares it", MEASURE_SECONDS)
    try:
        speed, what = measured_speed(run, vocab_size, claimed, config, config.device)
    except (ConfigError, RuntimeError) as error:
        log.warning("the speed of this machine is unknown: %s; set --tokens-per-second", error)
        return None
    log.info("measured %s: %.0f tokens/s", what, speed)
    return speed


def _run(config: PlanConfig) -> tuple[RunConfig, int]:
    """Return the run's settings, with the checkpoint's model if it starts from one, and its vocabulary.

    Raises:
        ConfigError: a run cannot have such a model, or adapters have no base.
        DataError: a file of the checkpoint or the tokenizer cannot be read.
    """
    run, source = config.run, config.start_from
    if source is None:
        if config.adapter is not None or run.adapter is not None:
            raise ConfigError("adapters need a base: name a checkpoint with --from, or drop --adapter and run.adapter")
        return run, vocabulary(run.data)
    from spes_p2p.model.start import over_checkpoint  # loads PyTorch and transformers

    adapter = run.adapter or (None if config.adapter is None else AdapterConfig())
    run = over_checkpoint(run, source).model_copy(update={"adapter": adapter})
    assert run.model.start is not None
    return run, run.model.start.vocab_size


def vocabulary(data: DataConfig) -> int:
    """Return a tokenizer's size: counted if it is in a local folder, otherwise as the settings say.

    Raises:
        DataError: the folder's tokenizer cannot be read.
    """
    file = Path(data.tokenizer or "") / "tokenizer.json"
    if data.tokenizer is None or not file.is_file():
        return data.vocab_size
    from tokenizers import Tokenizer

    try:
        text = file.read_text(encoding="utf-8")
        text = json.loads(text).get("tokenizer.json", text)  # beside the shards of `spes tokenize`, as runs send it
        return Tokenizer.from_str(text).get_vocab_size(with_added_tokens=True)
    except Exception as error:  # tokenizers raises bare Exceptions
        raise DataError(f"cannot read {file}: {error}; name a folder with a tokenizer.json") from error


def _available(config: PlanConfig) -> tuple[int, int | None]:
    """Return the bytes for training, by default this machine's, and those of a GPU's host, if known."""
    host = int(config.host_memory_gb * 1e9) if config.host_memory_gb else None
    if config.memory_gb:
        return int(config.memory_gb * 1e9), host
    if config.device != "cuda":
        return free_memory_bytes(), host
    # To look at a GPU takes seconds.
    return (config.max_slots == "auto" and free_gpu_bytes()) or ANY_MEMORY, host


def _claimed(config: PlanConfig, size: ModelSize, setup: Setup, memory: int, host: int | None) -> int:
    if config.max_slots == "auto":
        if memory == ANY_MEMORY:
            raise ConfigError("--device cuda needs to know how much memory a GPU has; set --memory-gb, or --slots")
        return slots_that_fit(size, setup, memory, host)
    if config.max_slots > size.num_slots:
        raise ConfigError(
            f"--slots {config.max_slots} exceeds the run's {size.num_slots} slots; lower it, or leave it out"
        )
    return config.max_slots


def _most(size: ModelSize, setup: Setup, memory: int, host: int | None) -> str:
    there = f"a {'GPU' if setup.on_gpu else 'machine'} with {memory / 1e9:.3g} GB free"
    try:
        fitting = slots_that_fit(size, setup, memory, host)
        return (
            f"{there} can train {fitting} of {size.num_slots} slots at most"
            if size.num_slots
            else f"{there} can train it"
        )
    except ConfigError as error:
        return f"{there} can train none: {error}"
