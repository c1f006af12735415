"""Memory and processor time of real peers on one machine without a GPU, and a run of many simulated ones.

    .venv/bin/python benchmarks/real_size.py [--only home half ...] [--write]

Memory is the proportional set size over all processes of a peer, every half second: pages that processes share are
divided among them. Peers are ended, and the row says so, when the machine has less than a gigabyte left.
"""

from __future__ import annotations

import math
import random
import shutil
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import yaml

from benchmarks.cluster import ROOT
from benchmarks.large_peers import FETCHED, TOGETHER, Peer, committed, gigabytes, said, start, wait_for, watch
from benchmarks.records import measure_parts
from benchmarks.tables import Row
from spes_p2p.cli import entry_point, load_settings
from spes_p2p.commands.plan import vocabulary
from spes_p2p.config import CommandConfig, ModelConfig, RunConfig
from spes_p2p.config.commands import PlanConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import SpesError
from spes_p2p.planner.memory import Setup, peer_memory, with_programs
from spes_p2p.planner.size import run_size
from spes_p2p.sim.simulator import Scenario, simulate

SHAPE, HOME_1B, HOME = (ROOT / "configs" / f"{name}.yaml" for name in ("spes_1b", "home_1b", "home_7b"))
VOCABULARY, SEQUENCE = 8192, 128
REAL_VOCABULARY = 151_665
MAX_PLAN_ERROR, MAX_PROCESSOR_SECONDS = 0.1, 10.0
HOME_TOKENS, HOME_ROUNDS = 4096, 3
HALF_LAYERS, HALF_TOKENS = 8, 64
MAX_NEWCOMER_GB, MAX_FOUNDER_GB, MAX_HALF_NEWCOMER_GB = 5.5, 15.0, 12.0
SMALLER = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1280}
SMALLER_BILLIONS = 0.269
"""Parameters with 16 experts."""
SMALL_MACHINE = ("--activation-checkpointing", "--inner-optimizer", "adamw8bit")
HOME_MACHINE = ("--max-slots", "4", "--micro-batch-size", "4", *SMALL_MACHINE)
HALF_MACHINE = ("--max-slots", "1", "--micro-batch-size", "1", "--gradients", "bf16", "--yes", *SMALL_MACHINE)
SMALLER_MACHINE = ("--max-slots", "4", "--micro-batch-size", "8", "--storage", "nf4", *SMALL_MACHINE)
MEASURED_ROUNDS = 3
MANY, MANY_ROUNDS = 256, 2
Part = Literal["home", "half", "processor", "many"]


class RealSizeConfig(CommandConfig):
    """Memory and processor time of peers of real size."""

    only: list[Part] = []
    """What to measure; by default all."""
    work: Path = Path("runs/real_size")
    """Folder of the peers; emptied first."""
    write: bool = False
    """Keep the rows in benchmarks/results/real_size.json and .md."""


def _plan(settings: Path, slots: int, *machine: str, is_alone: bool = False) -> int:
    """Return the bytes that `spes plan` prints for these settings, slots and flags."""
    config = load_settings(PlanConfig, ["--config", str(settings), *machine])
    vocab_size = vocabulary(config.run.data)
    setup = replace(with_programs(Setup.of(config.run, config, vocab_size)), is_alone=is_alone)
    return peer_memory(run_size(config.run, vocab_size), slots, setup).host_bytes


def _planned(what: str, peers: Sequence[Peer], plan: int) -> Row:
    """Compare peers' peaks with the plan."""
    shares = [peer.peak_bytes / plan for peer in peers]
    found = f"{', '.join(f'{share:.2f}' for share in shares)} (planned: {plan / 1e9:.1f} GB)"
    is_met = all(abs(share - 1) <= MAX_PLAN_ERROR for share in shares)
    return Row(f"{what}, measured / planned", found, f"{1 - MAX_PLAN_ERROR:.2f} to {1 + MAX_PLAN_ERROR:.2f}", is_met)


def home_rows(work: Path) -> Iterator[Row]:
    """Yield the peaks of two peers of `configs/home_1b.yaml`; its text, tokenizer and lengths suit this machine."""
    settings = yaml.safe_load(HOME_1B.read_text())
    settings["run"]["data"] = {"source": "embedded", "vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    settings["run"]["train"] |= {"batch_size": 8, "precision": "fp32"}
    settings["run"]["round"] |= {"tokens": HOME_TOKENS}
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings))
    peers = [first := start(work, "first", "--config", str(path))]
    try:
        wait_for(address := first.folder / "address", first)
        if address.exists():
            peers.append(start(work, "second", "--initial-peers", address.read_text().split()[0], *HOME_MACHINE))
        failure = watch(peers, committed(HOME_ROUNDS))
    finally:
        for peer in peers:
            peer.end()
    peaks = " and ".join(map(gigabytes, peers)) + (f"; {failure}" if failure else "")
    what = f"two peers of {HOME_1B.name} (vocabulary 8 192, sequences of 128, {HOME_TOKENS} tokens a round)"
    rounds = ", ".join(str(peer.rounds) for peer in peers)
    yield Row(f"{what}: rounds committed by each", rounds, f"{HOME_ROUNDS}", not failure)
    yield Row("- peak of each", peaks, "", None)
    yield _planned("- that", peers, _plan(path, 4))


def half_rows(work: Path) -> Iterator[Row]:
    """Yield what half of the layers of 7B take: of a founder alone, and of a newcomer while the founder pauses."""
    settings = _half_settings(work)
    peers = [founder := start(work, "founder", "--config", str(settings))]
    try:
        failure = watch(peers, committed(2))
        peak = founder.peak_bytes
        what = "4.0 B parameters (home_7b with half of its layers), one slot: a founder alone, two rounds: peak"
        found = gigabytes(founder) + (f"; {failure}" if failure else "")
        yield Row(what, found, f"{MAX_FOUNDER_GB} GB", not failure and peak <= MAX_FOUNDER_GB * 1e9)
        yield _planned("- that", [founder], _plan(settings, 1, is_alone=True))
        if failure:
            return
        founder.end()
        peers = [founder := start(work, "resumed", *HALF_MACHINE, folder=founder.folder)]
        failure = watch(peers, said(FETCHED))
        pause = [sys.executable, "-m", "spes_p2p", "ctl", "pause", "--output", str(founder.folder)]
        subprocess.run(pause, cwd=ROOT, check=True)  # before it trains: both peers fit this machine
        address = (founder.folder / "address").read_text().split()[0]
        peers.append(newcomer := start(work, "newcomer", "--initial-peers", address, *HALF_MACHINE))
        failure = watch(peers, said(FETCHED), least=newcomer)
    finally:
        for peer in peers:
            peer.end()
    fetched = FETCHED.search(newcomer.log.read_text(errors="replace"))
    fetched_gb = float(fetched[1]) / 1e3 if fetched else math.inf
    is_met = fetched_gb <= MAX_NEWCOMER_GB
    yield Row("- a newcomer: fetched before it trains", f"{fetched_gb:.2f} GB", f"{MAX_NEWCOMER_GB} GB", is_met)
    found = f"{newcomer.peak_bytes / 1e9:.1f} GB" + (f"; {failure}" if failure else "")
    is_met = not failure and newcomer.peak_bytes <= MAX_HALF_NEWCOMER_GB * 1e9
    yield Row("- its peak until it trains", found, f"{MAX_HALF_NEWCOMER_GB} GB", is_met)


def _half_settings(work: Path) -> Path:
    """Write the settings of a run of 4.0 B parameters, with a tokenizer as large as its model's; return the file."""
    settings = yaml.safe_load(HOME.read_text())
    draw = random.Random(0)
    words = ("".join(draw.choices(string.ascii_lowercase, k=24)) for _ in range(REAL_VOCABULARY // 5))
    train_bpe((f"{word} {word}" for word in words), REAL_VOCABULARY).save_pretrained(work / "tokenizer")
    run = settings["run"]
    run["data"] = {"source": "embedded", "tokenizer": str(work / "tokenizer"), "sequence_length": HALF_TOKENS}
    run["round"] = {"mode": "steps", "steps": 1, "total": 10_000, "min_peers": 1, "copies": 2, "max_seconds": 1800}
    run["model"] |= {"num_layers": HALF_LAYERS}
    run["train"] |= {"precision": "fp32", "batch_size": 1}
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings | {"storage": "nf4", "gradients": "bf16"}))
    return path


def processor_rows(work: Path) -> Iterator[Row]:
    """Yield the processor time of a round of 0.27 B parameters besides training, of one of two peers."""
    each = [_processor_seconds(work / f"{steps}", steps) for steps in (1, 3)]
    besides = (3 * each[0] - each[1]) / 2
    found = f"{besides / SMALLER_BILLIONS:.1f} s ({besides:.1f} s in all; a step {(each[1] - each[0]) / 2:.1f} s)"
    what = "processor seconds of one round besides training, per 1e9 parameters of the model, 0.27B"
    yield Row(what, found, f"{MAX_PROCESSOR_SECONDS:.0f} s", besides / SMALLER_BILLIONS <= MAX_PROCESSOR_SECONDS)


def _processor_seconds(work: Path, steps: int) -> float:
    """Return the processor time of one of two peers per round, over three rounds.

    Raises:
        SpesError: the peers have not come so far.
    """
    work.mkdir()
    settings = yaml.safe_load(SHAPE.read_text())
    run = settings["run"]
    run |= {"frozen_storage": "nf4", "codecs": run["codecs"] | {"shared": "int4", "slots": "int4"}}
    run["model"] |= SMALLER
    run["data"] = {"source": "embedded", "vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    run["train"] |= {"precision": "fp32", "batch_size": 8, "warmup_rounds": 0.5}
    run["round"] |= {"steps": steps, "total": 10_000, "min_peers": 2, "max_seconds": 600}
    run.pop("merge")
    (path := work / "settings.yaml").write_text(
        yaml.safe_dump(settings | {"storage": "nf4", "inner_optimizer": "adamw8bit"})
    )
    peers = [first := start(work, "first", "--config", str(path))]
    try:
        wait_for(first.folder / "address", first)
        address = (first.folder / "address").read_text().split()[0]
        peers.append(start(work, "second", "--initial-peers", address, *SMALLER_MACHINE))
        failure, seconds = "", []
        for rounds in (2, 2 + MEASURED_ROUNDS):  # the first rounds allocate
            failure = failure or watch(peers, said(TOGETHER, rounds), least=first)
            seconds.append(first.processor_seconds())
    finally:
        for peer in peers:
            peer.end()
    if failure:
        raise SpesError(failure)
    return (seconds[1] - seconds[0]) / MEASURED_ROUNDS


def many_rows(_: Path) -> Iterator[Row]:
    """Yield how many peers of one simulated run commit the same round."""
    model = ModelConfig(hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, num_experts=64)
    run = RunConfig.model_validate(
        {
            "model": model.model_dump(),
            "data": {"vocab_size": 512, "sequence_length": 16},
            "train": {"batch_size": 1},
            "round": {"mode": "steps", "steps": 1, "total": MANY_ROUNDS},
        }
    )
    scenario = Scenario(run=run, peers=MANY, max_slots=1, held_out_tokens=run.data.sequence_length, threads=1)
    found = simulate(scenario)
    last = [reports[-1] for reports in found.reports if reports and reports[-1].round == MANY_ROUNDS]
    agreeing = Counter(report.shared_digest for report in last).most_common(1)[0][1]
    what = f"peers in one simulated run that commit the same round {MANY_ROUNDS}"
    yield Row(what, f"{agreeing} of {MANY}", f"{MANY}", agreeing == MANY)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "home": home_rows,
    "half": half_rows,
    "processor": processor_rows,
    "many": many_rows,
}


def main(config: RealSizeConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""

    def measure(part: str) -> Iterator[Row]:
        shutil.rmtree(config.work, ignore_errors=True)
        config.work.mkdir(parents=True)
        return PARTS[part](config.work.resolve())

    parts = {part: partial(measure, part) for part in PARTS}
    return measure_parts("real_size", parts, config.only, config.write)


if __name__ == "__main__":
    entry_point(RealSizeConfig, main)
