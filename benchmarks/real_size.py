"""What peers of the 1B shape take on one machine without a GPU: memory and time, beside what they have to reach.

    .venv/bin/python benchmarks/real_size.py [--only logits plan ...] [--write]

Memory is the proportional set size over all processes of a peer, every half second: pages that processes share are
divided among them. Peers are ended, and the row says so, when the machine has less than a gigabyte left.
"""

from __future__ import annotations

import math
import random
import shutil
import statistics
import string
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from torch.distributed._tools.mem_tracker import MemTracker

from benchmarks.certificate_bytes import measure as decision_bytes
from benchmarks.cluster import ROOT
from benchmarks.large_peers import FETCHED, SPENT, TOGETHER, Peer, committed, gigabytes, said, start, wait_for, watch
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point, load_settings
from spes_p2p.commands.plan import vocabulary
from spes_p2p.config import CommandConfig, MachineConfig, ModelConfig, RunConfig, TrainConfig
from spes_p2p.config.commands import PlanConfig
from spes_p2p.data.tokenizer import train_bpe
from spes_p2p.errors import SpesError
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.planner.memory import Setup, peer_memory, with_programs
from spes_p2p.planner.size import model_size, run_size
from spes_p2p.planner.traffic import newcomer_bytes, round_traffic
from spes_p2p.sim.simulator import Scenario, simulate
from spes_p2p.sim.sweep import load_sweep, stored_runs
from spes_p2p.swarm.certificate import MemberEntry, genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.roster import Member, stated_links

SHAPE = ROOT / "configs" / "spes_1b.yaml"
VOCABULARY, SEQUENCE, ROUNDS, STEPS = 8192, 128, 5, 2
REAL_VOCABULARY, MICRO_BATCH = 151_665, (8, 512)
MAX_PLAN_ERROR = 0.1
MAX_PEER_GB, MAX_START_SECONDS, MAX_ROUND_SECONDS, MAX_LOGITS_MB = 7.5, 40.0, 5.0, 0.1
HOME_1B, HOME_TOKENS, HOME_ROUNDS = ROOT / "configs" / "home_1b.yaml", 4096, 3
HOME, HOME_PEERS, HOME_SLOTS = ROOT / "configs" / "home_7b.yaml", 4, 8
MAX_ROUND_GB, MAX_BUDGET_GB, MAX_NEWCOMER_GB = 4.6, 2.9, 5.5
MAX_FOUNDER_GB, MAX_HALF_NEWCOMER_GB = 15.0, 12.0
SMALLER = {"hidden_size": 512, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8, "intermediate_size": 1280}
"""With 16 experts, 0.27 B parameters."""
SMALL_MACHINE = ("--activation-checkpointing", "--inner-optimizer", "adamw8bit")
MACHINE = ("--max-slots", "4", "--micro-batch-size", "8", "--storage", "int8", *SMALL_MACHINE)
HOME_MACHINE = ("--max-slots", "4", "--micro-batch-size", "4", *SMALL_MACHINE)
HALF_MACHINE = ("--max-slots", "1", "--micro-batch-size", "1", "--gradients", "bf16", "--yes", *SMALL_MACHINE)
"""Flags of peers that join the 1B shape, `home_1b`, and half of 7B."""
SMALLER_MACHINE = ("--max-slots", "4", "--micro-batch-size", "8", "--storage", "nf4", *SMALL_MACHINE)
MAX_PROCESSOR_SECONDS, MEASURED_ROUNDS = 10.0, 3
HOME_SETTINGS, HOME_RESULTS = ROOT / "configs" / "home_settings.yaml", ROOT / "benchmarks" / "results" / "home_settings"
SEEDS, STUDENT, MAX_EXCESS = 8, 2.365, (0.3, 1.0)
"""Student's t for 95 % of both sides and seven degrees of freedom; percent."""
HALF_LAYERS, HALF_TOKENS = 8, 64
MANY, MANY_ROUNDS, MAX_MESSAGE_KIB = 256, 2, 256.0


Part = Literal[
    "logits", "plan", "newcomer", "start", "pair", "late", "home", "half", "processor", "processor_1b", "loss", "many"
]


class RealSizeConfig(CommandConfig):
    """Memory and time of peers of the 1B shape."""

    only: list[Part] = []
    """What to measure; by default all."""
    work: Path = Path("runs/real_size")
    """Folder of the peers; emptied first."""
    write: bool = False
    """Leave what was measured in benchmarks/results/real_size.json, and in real_size.md beside it."""


def _settings(work: Path, *, min_peers: int, rounds: int, steps: int = STEPS, storage: str | None = None) -> Path:
    """Write the settings of a run of the 1B shape with a small vocabulary, or of a smaller one; return the file."""
    settings = yaml.safe_load(SHAPE.read_text())
    run = settings["run"]
    if storage is not None:
        run |= {"frozen_storage": storage, "codecs": run["codecs"] | {"shared": "int4", "slots": "int4"}}
        run["model"] |= SMALLER
    run["data"] = {"source": "embedded", "vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    run["train"] |= {"precision": "fp32", "batch_size": 8, "warmup_rounds": 0.5}
    run["round"] |= {"steps": steps, "total": rounds, "min_peers": min_peers, "max_seconds": 600}
    run.pop("merge")
    held = "int8" if storage is None else "nf4"
    settings |= {"storage": held, "inner_optimizer": "adamw8bit"}
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings))
    return path


def start_rows(work: Path) -> Iterator[Row]:
    """Yield how long a peer alone takes from its process's start to its first committed round, and its peak."""
    settings = _settings(work, min_peers=1, rounds=1)
    alone = start(work, "alone", "--config", str(settings))
    try:
        failure = watch([alone], committed(1))
    finally:
        alone.end()
    seconds = alone.first_round_seconds
    found = f"{seconds:.0f} s" if seconds is not None else failure
    is_met = seconds is not None and seconds <= MAX_START_SECONDS
    yield Row("start of the 1B shape, alone, to the first committed round", found, f"{MAX_START_SECONDS:.0f} s", is_met)
    yield _planned("- its peak, all processes", [alone], _plan(settings, 4, is_alone=True))


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


def pair_rows(work: Path) -> Iterator[Row]:
    """Yield the peaks of two peers that train five rounds beside each other."""
    peers, failure = _two(work, _settings(work, min_peers=2, rounds=ROUNDS), ROUNDS, *MACHINE)
    peaks = " and ".join(map(gigabytes, peers)) + (f"; {failure}" if failure else "")
    what = (
        "two peers of the 1B shape (vocabulary 8 192; 4 slots; int8; adamw8bit; sequences of 128), 5 rounds of 2 steps"
    )
    is_met = not failure and all(peer.peak_bytes <= MAX_PEER_GB * 1e9 for peer in peers)
    yield Row(f"{what}: peak of each", peaks, f"{MAX_PEER_GB} GB", is_met)
    yield Row("- rounds committed by each", ", ".join(str(peer.rounds) for peer in peers), f"{ROUNDS}", not failure)


def _two(work: Path, settings: Path, rounds: int, *machine: str) -> tuple[list[Peer], str]:
    """Have a founder and a peer that joins it commit some rounds; return them, ended, and why that failed, or ""."""
    peers = [first := start(work, "first", "--config", str(settings))]
    try:
        wait_for(address := first.folder / "address", first)
        if address.exists():
            peers.append(start(work, "second", "--initial-peers", address.read_text().split()[0], *machine))
        return peers, watch(peers, committed(rounds))
    finally:
        for peer in peers:
            peer.end()


def home_rows(work: Path) -> Iterator[Row]:
    """Yield the peaks of two peers of `configs/home_1b.yaml`; its text, tokenizer and lengths suit this machine."""
    settings = yaml.safe_load(HOME_1B.read_text())
    settings["run"]["data"] = {"source": "embedded", "vocab_size": VOCABULARY, "sequence_length": SEQUENCE}
    settings["run"]["train"] |= {"batch_size": 8, "precision": "fp32"}
    settings["run"]["round"] |= {"tokens": HOME_TOKENS}
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings))
    peers, failure = _two(work, path, HOME_ROUNDS, *HOME_MACHINE)
    peaks = " and ".join(map(gigabytes, peers)) + (f"; {failure}" if failure else "")
    what = f"two peers of {HOME_1B.name} (vocabulary 8 192, sequences of 128, {HOME_TOKENS} tokens a round)"
    rounds = ", ".join(str(peer.rounds) for peer in peers)
    yield Row(f"{what}: rounds committed by each", rounds, f"{HOME_ROUNDS}", not failure)
    yield Row("- peak of each", peaks, "", None)
    yield _planned("- that", peers, _plan(path, 4))


def late_rows(work: Path) -> Iterator[Row]:
    """Yield the peaks of a peer that is killed and resumed beside one that joined it after its second round."""
    settings = _settings(work, min_peers=1, rounds=10_000)
    peers = [first := start(work, "first", "--config", str(settings))]
    try:
        failure = watch(peers, committed(2))
        address = (first.folder / "address").read_text().split()[0]
        peers.append(second := start(work, "second", "--initial-peers", address, *MACHINE))
        failure = failure or watch(peers, said(TOGETHER))
        first.end()
        resumed = start(work, "resumed", *MACHINE, folder=first.folder)
        peers = [second, resumed]
        failure = failure or watch(peers, said(TOGETHER))
    finally:
        for peer in peers:
            peer.end()
    peers = [first, second, resumed]
    peaks = "; ".join(map(gigabytes, peers)) + (f"; {failure}" if failure else "")
    what = (
        "- the second joining after round 2; the first killed by -9 and resumed beside it: "
        "peaks of the first, of the second, of the first resumed"
    )
    is_met = not failure and all(peer.peak_bytes <= MAX_PEER_GB * 1e9 for peer in peers)
    yield Row(what, peaks, f"{MAX_PEER_GB} GB", is_met)
    yield _planned("- their peaks, two side by side", peers, _plan(settings, 4))


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


def home_settings(work: Path, **changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `home_7b`'s settings for the embedded text, with a tokenizer as large as its model's.

    Args:
        work: Folder that keeps the tokenizer.
        **changes: Values by section of `run`.
    """
    settings = yaml.safe_load(HOME.read_text())
    if not (folder := work / "tokenizer").exists():
        draw = random.Random(0)
        words = ("".join(draw.choices(string.ascii_lowercase, k=24)) for _ in range(REAL_VOCABULARY // 5))
        train_bpe((f"{word} {word}" for word in words), REAL_VOCABULARY).save_pretrained(folder)
    run = settings["run"]
    run["data"] = {"source": "embedded", "tokenizer": str(folder)}
    run["round"] = {"mode": "steps", "total": 10_000, "min_peers": 1, "copies": 2, "max_seconds": 1800}
    for section, values in changes.items():
        run[section] |= values
    return settings | {"storage": "nf4"}


def _half_settings(work: Path) -> Path:
    """Write the settings of a run of 4.0 B parameters; return the file."""
    settings = home_settings(
        work,
        model={"num_layers": HALF_LAYERS},
        data={"sequence_length": HALF_TOKENS},
        train={"precision": "fp32", "batch_size": 1},
        round={"steps": 1},
    )
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings | {"gradients": "bf16"}))
    return path


def logits_rows(_: Path) -> Iterator[Row]:
    """Yield what logits take per token of a microbatch: the peak of forward and backward pass above the parameters."""
    model = ModelConfig(hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=16, num_experts=4)
    shape = {"vocab_size": REAL_VOCABULARY, "sequence_length": MICRO_BATCH[1], "seed": 0}
    built = build_slot_model(model, claimed=[0], storage="fp32", **shape)  # type: ignore[arg-type]
    loss = TrainingLoss(built, TrainConfig(output_z_loss=1e-5))
    tokens_BT1 = torch.randint(REAL_VOCABULARY, (MICRO_BATCH[0], MICRO_BATCH[1] + 1))
    with MemTracker() as tracker:
        loss(tokens_BT1).total.backward()  # type: ignore[arg-type]
    peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    kept = sum(parameter.nbytes for parameter in built.module.parameters())
    megabytes = (peak - 2 * kept) / 1e6 / (MICRO_BATCH[0] * MICRO_BATCH[1])
    what = (
        f"logits' memory at V = {REAL_VOCABULARY:,}, per token of a microbatch of {MICRO_BATCH[0]} x {MICRO_BATCH[1]}"
    )
    yield Row(what.replace(",", " ", 1), f"{megabytes:.3f} MB", f"{MAX_LOGITS_MB} MB", megabytes <= MAX_LOGITS_MB)


def plan_rows(_: Path) -> Iterator[Row]:
    """Yield what a round of 7B moves as `home_7b` ships, and what a newcomer to half of its layers fetches."""
    run = RunConfig.model_validate(yaml.safe_load(HOME.read_text())["run"])
    size = model_size(run.model, run.data.vocab_size)
    sent, received = 4 * size.trained_params(HOME_SLOTS), 4 * size.total_params  # a peer of SPES and its server, fp32
    for refresh, most in ((None, MAX_ROUND_GB), (8, MAX_BUDGET_GB)):
        setup = Setup.of(run, MachineConfig(refresh_slots=refresh), None)
        total = round_traffic(size, HOME_SLOTS, HOME_PEERS, setup).total
        share = (sent + received) / (2 * total)
        what = (
            "all slots refreshed"
            if refresh is None
            else f"{refresh} of the others' {size.num_slots - HOME_SLOTS} slots refreshed"
        )
        found = f"{total / 1e9:.2f} + {total / 1e9:.2f} GB (1/{share:.1f} of a peer's with SPES's server)"
        name = f"bytes up and down per peer and round, {HOME.stem}, {HOME_PEERS} peers of {HOME_SLOTS} slots: {what}"
        yield Row(name, found, f"{most} + {most} GB", total <= most * 1e9)
    half = run.model.model_copy(update={"num_layers": run.model.num_layers // 2})
    fetched = newcomer_bytes(model_size(half, run.data.vocab_size), 1, Setup.of(run, MachineConfig(), None))
    what = f"bytes that a newcomer fetches, {HOME.stem} with half of its layers, one slot, planned"
    yield Row(what, f"{fetched / 1e9:.2f} GB", f"{MAX_NEWCOMER_GB} GB", fetched <= MAX_NEWCOMER_GB * 1e9)


def newcomer_rows(work: Path) -> Iterator[Row]:
    """Yield what a newcomer to a run of 0.27 B parameters fetches and takes, with slots in fp32 and in their kept form.

    In both runs it holds others' slots in nf4.
    """
    for storage in ("fp32", "nf4"):
        shutil.rmtree(work / storage, ignore_errors=True)
        (folder := work / storage).mkdir()
        settings = _settings(folder, min_peers=1, rounds=10_000, storage=storage)
        founder = start(folder, "founder", "--config", str(settings))
        peers = [founder]
        try:
            failure = watch(peers, committed(2))
            address = (founder.folder / "address").read_text().split()[0]
            machine = ["--micro-batch-size", "8", "--storage", "nf4", *SMALL_MACHINE]
            joins = ["--initial-peers", address, "--max-slots", "1"]
            peers.append(newcomer := start(folder, "newcomer", *joins, *machine))
            failure = failure or watch(peers, committed(founder.rounds + 3), least=newcomer)
        finally:
            for peer in peers:
                peer.end()
        fetched = FETCHED.search(newcomer.log.read_text(errors="replace"))
        disk = sum(file.stat().st_size for file in (newcomer.folder / "versions").iterdir())
        name = f"newcomer, 0.27 B parameters, 1 of 16 slots, the others in nf4, slots travel in {storage}"
        yield Row(f"{name}: fetched before it trains", f"{fetched[1]} MB" if fetched else failure, "", None)
        yield Row("- its peak, all processes", gigabytes(newcomer) + (f"; {failure}" if failure else ""), "", None)
        yield _planned("- that", [newcomer], _plan(settings, 1, *machine))
        yield _planned("- the founder, with 4 slots", [founder], _plan(settings, 4))
        yield Row("- the newcomer's versions on disk after three rounds", f"{disk / 1e6:.0f} MB", "", None)
        rounds = SPENT.findall(founder.log.read_text(errors="replace"))  # of two peers; the founder waits for no steps
        seconds = statistics.median(sum(map(float, besides)) for _, *besides in rounds) if rounds else math.inf
        figure, is_met = f"{seconds:.1f} s", seconds <= MAX_ROUND_SECONDS
        yield Row(
            "- a round of both: time in which the founder does not train", figure, f"{MAX_ROUND_SECONDS:.0f} s", is_met
        )


def processor_rows(work: Path) -> Iterator[Row]:
    """Yield the processor time of a round of 0.27 B parameters besides training, of one of two peers."""
    yield _processor_row(work, "0.27B", "nf4", 0.269)


def large_processor_rows(work: Path) -> Iterator[Row]:
    """Yield the same of the 1B shape."""
    yield _processor_row(work, "1B", None, 0.947)


def _processor_row(work: Path, name: str, storage: str | None, billions: float) -> Row:
    """Compare rounds of one step with rounds of three."""
    each = [_processor_seconds(work / f"{name}-{steps}", steps, storage) for steps in (1, 3)]
    besides = (3 * each[0] - each[1]) / 2
    found = f"{besides / billions:.1f} s ({besides:.1f} s in all; a training step {(each[1] - each[0]) / 2:.1f} s)"
    what = f"processor seconds of one round besides training, per 1e9 parameters of the model, {name}"
    return Row(what, found, f"{MAX_PROCESSOR_SECONDS:.0f} s", besides / billions <= MAX_PROCESSOR_SECONDS)


def _processor_seconds(work: Path, steps: int, storage: str | None) -> float:
    """Return the processor time of one of two peers per round, over three rounds.

    Raises:
        SpesError: the peers have not come so far.
    """
    work.mkdir()
    settings = _settings(work, min_peers=2, rounds=10_000, steps=steps, storage=storage)
    peers = [first := start(work, "first", "--config", str(settings))]
    try:
        wait_for(first.folder / "address", first)
        address = (first.folder / "address").read_text().split()[0]
        machine = MACHINE if storage is None else SMALLER_MACHINE
        peers.append(start(work, "second", "--initial-peers", address, *machine))
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


def loss_rows(_: Path) -> Iterator[Row]:
    """Yield what `configs/home_settings.yaml` has found: the held-out loss of home settings against fp32 everywhere."""
    runs = stored_runs(load_sweep(HOME_SETTINGS), HOME_RESULTS)
    excesses = [100 * (runs["home", seed].loss / runs["fp32", seed].loss - 1) for seed in range(SEEDS)]
    mean, reach = statistics.mean(excesses), STUDENT * statistics.stdev(excesses) / math.sqrt(SEEDS)
    found = f"{mean:+.2f} %; {mean + reach:+.2f} %"
    most = f"{MAX_EXCESS[0]:+.1f} %; {MAX_EXCESS[1]:+.1f} %"
    what = (
        f"held-out loss, home settings against fp32 everywhere, {SEEDS} paired seeds, 600 steps: mean; upper end (95 %)"
    )
    yield Row(what, found, most, mean <= MAX_EXCESS[0] and mean + reach <= MAX_EXCESS[1])


def many_rows(_: Path) -> Iterator[Row]:
    """Yield a simulated run of many peers, and the largest messages that such a swarm's rounds send."""
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
    kib = [1000 * decision_bytes(MANY)["largest_kb"] / 1024, _roster_bytes(MANY) / 1024]
    told = "{:.0f} KiB of a decision, {:.0f} KiB of a roster".format(*kib)
    what = f"- largest messages of a round of {MANY} peers, 64 voters, all behind routers"
    yield Row(what, told, f"{MAX_MESSAGE_KIB:.0f} KiB", max(kib) <= MAX_MESSAGE_KIB)


def _roster_bytes(num_peers: int) -> int:
    """Return the bytes of a roster of peers that train eight slots and are connected to all others by introductions."""
    peers = sorted(hashed_peer_id(str(index).encode()) for index in range(num_peers))
    slots = {peer: tuple(range(8 * index % 64, 8 * index % 64 + 8)) for index, peer in enumerate(peers)}
    members = tuple(MemberEntry(peer_id=peer, tokens=10**6, slots=slots[peer]) for peer in peers)
    start = genesis("many", peers[0], "0" * 64, 64)
    last = start.model_copy(update={"members": members})
    entries = (
        Member(
            peer_id=peer,
            round=100,
            previous=last.digest,
            tokens=10**6,
            slots=slots[peer],
            tokens_per_second=1234.56789,
            ready_at=1_800_000_000.123456,
            sync_seconds=123.456789,
            uplink_mbit=12.5,
            calls_only=True,
            links=stated_links(peer, [other for other in peers if other != peer], last),
        )
        for peer in peers
    )
    return sum(len(entry.model_dump_json()) + len(entry.peer_id) for entry in entries)


PARTS: dict[str, Callable[[Path], Iterator[Row]]] = {
    "logits": logits_rows,
    "plan": plan_rows,
    "newcomer": newcomer_rows,
    "start": start_rows,
    "pair": pair_rows,
    "late": late_rows,
    "home": home_rows,
    "half": half_rows,
    "processor": processor_rows,
    "processor_1b": large_processor_rows,
    "loss": loss_rows,
    "many": many_rows,
}
RESULTS = ROOT / "benchmarks/results/real_size.json"
BOARD = Scoreboard(RESULTS, RESULTS.with_suffix(".md"), "REAL SIZE", PARTS)


def main(config: RealSizeConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""

    def emptied(_: str) -> Path:
        shutil.rmtree(config.work, ignore_errors=True)
        config.work.mkdir(parents=True)
        return config.work.resolve()

    return 0 if BOARD.run(config.only, emptied, (lambda _: {}) if config.write else None) else 1


if __name__ == "__main__":
    entry_point(RealSizeConfig, main)
