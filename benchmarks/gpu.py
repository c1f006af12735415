"""What a GPU gives: the CPU's results, its speed and memory at real size, and real peers that share one card.

    .venv/bin/python -m benchmarks.gpu [--only parity steps ...] [--device cpu] [--results DIR]

On `--device cpu` the same code runs with tiny shapes: a try before a card is at hand, whose figures mean nothing. Each
part takes a minute or two, and its rows are written when it ends.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import torch
import yaml
from torch import LongTensor, Tensor

from benchmarks.cluster import ROOT
from benchmarks.experts import RandomTokens, module_rows
from benchmarks.large_peers import FETCHED, SPENT, TOGETHER, Peer, gigabytes, said, start, wait_for, watch
from benchmarks.real_size import home_settings
from benchmarks.scoreboard import Scoreboard
from benchmarks.stock import stock_step
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, MachineConfig, ModelConfig, RunConfig, TrainConfig
from spes_p2p.model.build import build_slot_model, hf_config, model_class
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import model_size
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

VOCABULARY, SEED = 512, 7
SMALL = ModelConfig(hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=4, intermediate_size=128, num_experts=8)
MAX_EXACT, MAX_BF16_LOSS = 1e-4, 2e-3
"""Largest relative errors against the CPU in fp32: of a gradient in fp32, and of the loss under bf16 autocast."""
MAX_PLAN_ERROR = 0.10
STEPS, WARM_UP = 5, 2
RUNS = {"home_1b": 4, "home_7b": 1}
"""Shipped runs whose steps are measured, with the slots that a peer trains."""
TOGETHER_ROUNDS = 3
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 64}
"""The shape of a try on a CPU."""
Device = Literal["cpu", "cuda"]
Part = Literal["parity", "experts", "steps", "peers", "seven"]


class GpuConfig(CommandConfig):
    """Results, speed and memory on a GPU."""

    only: list[Part] = []
    """What to measure; by default all."""
    device: Device = "cuda"
    """Where to measure; on a CPU the shapes are tiny."""
    results: Path | None = None
    """Folder in which to leave a GPU's figures, under its name, and which a page beside it shows."""
    work: Path = Path("runs/gpu")
    """Folder of the peers and of profiles; emptied first."""


class Bench(NamedTuple):
    """What a part is measured with: where, and a folder for what it leaves."""

    device: Device
    work: Path

    @property
    def is_tiny(self) -> bool:
        """Whether this is only a try."""
        return self.device == "cpu"


# ---------------------------------------------------------------------- equal results


def parity_rows(bench: Bench) -> Iterator[Row]:
    """Yield how far loss and gradients are from those of the loop kernel in fp32 on the CPU, of the same model."""
    kernels = ("loop",) if bench.is_tiny else ("loop", "grouped_mm")
    tokens_BT1 = torch.randint(VOCABULARY, (4, 65), generator=torch.Generator().manual_seed(SEED))
    for storage in ("fp32", "int8", "nf4"):
        reference = _gradients(_small_model(storage, "loop"), tokens_BT1, "fp32")
        for kernel in kernels:
            for precision, what, most in (("fp32", "loss and gradients", MAX_EXACT), ("bf16", "loss", MAX_BF16_LOSS)):
                model = _small_model(storage, kernel)
                torch.nn.Module.to(model.module, torch.device(bench.device))
                found = _gradients(model, tokens_BT1.to(bench.device), precision)  # type: ignore[arg-type]
                compared = reference if precision == "fp32" else ("loss",)  # in bf16 some tokens are routed otherwise
                error = max(_error(found[name], reference[name]) for name in compared)
                name = f"{what}, {kernel}, {precision}, frozen {storage}: largest error against the CPU in fp32"
                yield Row(name, f"{error:.1e}", f"{most:.0e}", error <= most)
    for storage in ("int8", "nf4"):
        on_cpu, moved = _small_model(storage, "loop"), _small_model(storage, "loop")
        torch.nn.Module.to(moved.module, torch.device(bench.device))
        same = all(
            torch.equal(weight, moved.slot_weights(slot)[name].cpu())
            for slot in range(on_cpu.num_slots)
            for name, weight in on_cpu.slot_weights(slot).items()
        )
        yield Row(
            f"frozen experts in {storage}, decoded: bits of the CPU", "equal" if same else "differ", "equal", same
        )
    for optimizer in ("adamw", "adamw8bit"):
        losses = [_losses(device, optimizer) for device in ("cpu", bench.device)]
        error = max(abs(own / other - 1) for own, other in zip(*losses, strict=True))
        name = f"20 steps of {optimizer}: largest difference of the loss from the CPU's"
        yield Row(name, f"{100 * error:.2f} %", "1 %", error <= 0.01)


def _small_model(storage: str, kernel: str) -> SlotModel:
    shape = {"vocab_size": VOCABULARY, "sequence_length": 64, "seed": SEED}
    return build_slot_model(SMALL, claimed=[1, 4], storage=storage, kernel=kernel, device="cpu", **shape)  # type: ignore[arg-type]


def _gradients(model: SlotModel, tokens_BT1: Tensor, precision: Literal["fp32", "bf16"]) -> dict[str, Tensor]:
    loss = TrainingLoss(model, TrainConfig(precision=precision))(cast(LongTensor, tokens_BT1)).total
    loss.backward()
    grads = {name: param.grad for name, param in model.module.named_parameters() if param.grad is not None}
    return {"loss": loss.detach().cpu()} | {name: grad.float().cpu() for name, grad in grads.items()}


def _error(found: Tensor, reference: Tensor) -> float:
    return float((found.double() - reference.double()).norm() / reference.double().norm())


def _losses(device: str, optimizer: str) -> list[float]:
    model = _small_model("fp32", "loop")
    model.module.train()
    machine = MachineConfig(inner_optimizer=optimizer)  # type: ignore[arg-type]
    train = TrainConfig(precision="fp32", batch_size=4)
    trainer = Trainer(model, train, RandomTokens(VOCABULARY, 64, "cpu", SEED), Ranks(device), machine)
    return [trainer.step(1e-3).loss for _ in range(20)]


# ---------------------------------------------------------------------- steps at real size


def expert_rows(bench: Bench) -> Iterator[Row]:
    """Yield `benchmarks/experts.py`'s rows of the expert module against stock Hugging Face."""
    if not bench.is_tiny:
        yield from module_rows(bench.device, 15)


def step_size_rows(bench: Bench) -> Iterator[Row]:
    """Yield speed and peak memory of a peer's steps in shipped runs, beside its plan, and of stock Hugging Face."""
    for name, claimed in RUNS.items():
        yield from _run_rows(name, claimed, "loop" if bench.is_tiny else "grouped_mm", bench)
        _empty(bench)
    yield from _stock_rows(bench)


def _run_rows(name: str, claimed: int, kernel: str, bench: Bench) -> Iterator[Row]:
    run, machine, vocab_size = _shipped(name, bench)
    machine = machine.model_copy(update={"kernel": kernel})
    trainer = _loaded(run, machine, vocab_size, claimed, bench)
    seconds, peak = _measured(functools.partial(trainer.step, 1e-4), bench)
    setup = Setup.of(run, machine, vocab_size, on_gpu=not bench.is_tiny)
    plan = peer_memory(model_size(run.model, vocab_size), claimed, setup).device_bytes
    tokens = run.train.batch_size * run.data.sequence_length
    slots = f"{claimed} slots" if claimed > 1 else "one slot"
    what = f"{name}, {slots}, {kernel}, microbatch {machine.micro_batch_size} x {run.data.sequence_length}"
    yield Row(f"{what}: tokens/s", f"{tokens / seconds:,.0f}", "", None)
    error = abs(peak / plan - 1) if peak else 0.0
    found = f"{peak / 1e9:.2f} GB, planned {plan / 1e9:.2f}"
    yield Row("- peak of the card", found, "within 10 %", error <= MAX_PLAN_ERROR)
    _profile(trainer, bench.work / f"profile-{name}-{kernel}.txt", bench)


def _shipped(name: str, bench: Bench) -> tuple[RunConfig, MachineConfig, int]:
    settings = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    run = RunConfig.model_validate(settings.pop("run"))
    settings = {key: value for key, value in settings.items() if key in MachineConfig.model_fields}
    machine, vocab_size = MachineConfig.model_validate(settings), run.data.vocab_size
    batch_size = 4 * (machine.micro_batch_size or 1)
    data = run.data
    if bench.is_tiny:
        run = run.model_copy(update={"model": run.model.model_copy(update=TINY)})
        data, vocab_size = data.model_copy(update={"sequence_length": 64}), VOCABULARY
    train = run.train.model_copy(update={"batch_size": batch_size})
    return run.model_copy(update={"train": train, "data": data}), machine, vocab_size


def _loaded(run: RunConfig, machine: MachineConfig, vocab_size: int, claimed: int, bench: Bench) -> Trainer:
    """Return a trainer whose weights are drawn on the device, every slot the same: speed and memory do not differ."""
    model = build_slot_model(
        run.model,
        vocab_size=vocab_size,
        sequence_length=run.data.sequence_length,
        seed=None,
        claimed=range(claimed),
        storage=machine.storage or run.frozen_storage,
        kernel=machine.kernel,
        device=bench.device,
    )
    group = Ranks(bench.device)
    torch.nn.Module.to(model.module, group.device)
    model.load_shared({name: _drawn(shape, bench) for name, shape in model.shared_shapes().items()})
    slot_weights = {name: _drawn(shape, bench) for name, shape in model.slot_shapes().items()}
    for slot in range(run.model.num_experts):
        model.load_slot(slot, slot_weights)
    model.module.train()
    tokens = RandomTokens(vocab_size, run.data.sequence_length, "cpu", SEED)
    return Trainer(model, run.train, tokens, group, machine)


def _drawn(shape: tuple[int, ...], bench: Bench) -> Tensor:
    return 0.02 * torch.randn(shape, device=bench.device)


def _measured(step: Callable[[], object], bench: Bench) -> tuple[float, int]:
    """Return the median seconds of a step, and the peak of all of them."""
    _empty(bench)
    if not bench.is_tiny:
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        began = time.monotonic()
        step()
        if not bench.is_tiny:
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[WARM_UP:]), 0 if bench.is_tiny else torch.cuda.max_memory_allocated()


def _empty(bench: Bench) -> None:
    gc.collect()
    if not bench.is_tiny:
        torch.cuda.empty_cache()


def _profile(trainer: Trainer, path: Path, bench: Bench) -> None:
    """Leave where a step's time goes."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if not bench.is_tiny:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        trainer.step(1e-4)
    by = "self_cpu_time_total" if bench.is_tiny else "self_cuda_time_total"
    averages = profile.key_averages()
    columns = averages.table(sort_by=by, row_limit=30, max_name_column_width=60)
    path.write_text(columns + "\n" + averages.table(sort_by="self_cpu_time_total", row_limit=25))


def _stock_rows(bench: Bench) -> Iterator[Row]:
    """Yield stock Hugging Face training of the whole 1B model, weights in fp32, under bf16 autocast."""
    run, machine, vocab_size = _shipped("home_1b", bench)
    micro = machine.micro_batch_size or 1
    run = run.model_copy(update={"train": run.train.model_copy(update={"batch_size": micro})})
    config = hf_config(run.model, vocab_size, run.data.sequence_length)
    config.output_router_logits = True
    with torch.device(bench.device):
        module = model_class(run.model.family)(config).train()
    module.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    tokens = RandomTokens(vocab_size, run.data.sequence_length, bench.device, SEED)
    seconds, peak = _measured(lambda: stock_step(module, optimizer, tokens.next_batch(micro), run), bench)
    what = f"stock Hugging Face, the 1B model, all experts trained, batch {micro} x {run.data.sequence_length}"
    yield Row(f"{what}: tokens/s", f"{micro * run.data.sequence_length / seconds:,.0f}", "", None)
    yield Row("- peak of the card", f"{peak / 1e9:.2f} GB", "", None)


# ---------------------------------------------------------------------- peers


def peer_rows(bench: Bench) -> Iterator[Row]:
    """Yield what two peers of the 1B shape take that share the card and one machine."""
    settings = yaml.safe_load((ROOT / "configs" / "home_1b.yaml").read_text())
    run = settings["run"]
    run["data"] = {"source": "embedded", "vocab_size": 8192, "sequence_length": 512}
    run["train"] |= {"batch_size": 32, "warmup_rounds": 2}
    run["round"] = {"mode": "steps", "steps": 10, "total": 10_000, "min_peers": 1, "copies": 2, "max_seconds": 600}
    yield from _pair_rows(bench, "peers", settings, 4, 4, "home_1b, 4 of 16 slots, 10 steps of 16 384 tokens a round")


def seven_rows(bench: Bench) -> Iterator[Row]:
    """Yield what two peers of `home_7b` take that share the card and one machine: a founder, and a newcomer to it."""
    settings = home_settings(
        bench.work, data={"sequence_length": 2048}, train={"batch_size": 8, "warmup_rounds": 2}, round={"steps": 2}
    )
    yield from _pair_rows(bench, "seven", settings, 1, 1, "home_7b, one of 32 slots, 2 steps of 16 384 tokens a round")


def _pair_rows(bench: Bench, name: str, settings: dict[str, Any], slots: int, micro: int, what: str) -> Iterator[Row]:
    if bench.is_tiny:
        settings["run"]["model"] |= TINY
        settings["run"]["data"] = {"source": "embedded", "vocab_size": 4096, "sequence_length": 64}
        settings["run"]["train"] |= {"batch_size": 4, "precision": "fp32"}
    (work := bench.work / name).mkdir()
    (path := work / "settings.yaml").write_text(yaml.safe_dump(settings))
    flags = ["--device", bench.device, "--max-slots", str(slots)]
    machine = ["--micro-batch-size", str(micro), "--activation-checkpointing", "--inner-optimizer", "adamw8bit"]
    before = _card_bytes()
    peers = [founder := start(work, "founder", "--config", str(path), *flags)]
    try:
        wait_for(founder.folder / "address", founder)
        failure = watch(peers, lambda peer: peer.rounds >= 1)
        alone, card_alone = copy.copy(founder), _card_bytes() - before
        if not failure:
            address = (founder.folder / "address").read_text().split()[0]
            peers.append(start(work, "newcomer", "--initial-peers", address, *flags, *machine, "--yes"))
            failure = watch(peers, said(TOGETHER, TOGETHER_ROUNDS))
        card_both = _card_bytes() - before
    finally:
        for peer in peers:
            peer.end()
            shutil.copy(peer.log, bench.work / f"{name}-{peer.log.name}")
    yield from _of_the_pair(what, alone, peers, failure)
    yield Row(
        "- the card, with CUDA's contexts: one peer; two", f"{card_alone / 1e9:.1f}; {card_both / 1e9:.1f} GB", "", None
    )


def _of_the_pair(what: str, alone: Peer, peers: list[Peer], failure: str) -> Iterator[Row]:
    first = alone.first_round_seconds
    yield Row(f"{what}: start to the first committed round", f"{first:.0f} s" if first else failure, "", None)
    yield Row("- host, of the founder until then", gigabytes(alone), "", None)
    if len(peers) < 2:
        return
    founder, newcomer = peers
    text = founder.log.read_text(errors="replace")
    yield Row(
        "- host, of the founder and of the newcomer, in rounds of both", "; ".join(map(gigabytes, peers)), "", None
    )
    fetched = FETCHED.search(newcomer.log.read_text(errors="replace"))
    yield Row("- fetched by the newcomer", f"{float(fetched[1]) / 1e3:.2f} GB" if fetched else failure, "", None)
    spent = [list(map(float, found)) for found in SPENT.findall(text)]
    medians = [f"{statistics.median(values):.1f}" for values in zip(*spent, strict=True)]
    names = ("training", "matchmaking", "averaging", "exchange", "other")
    found = ", ".join(f"{seconds} s {name}" for seconds, name in zip(medians, names, strict=False))
    yield Row(f"- a round of both, median of {len(spent)}", found or failure, "", not failure)


def _card_bytes() -> int:
    """Return the bytes of the card in use; 0 without one."""
    with contextlib.suppress(OSError, subprocess.CalledProcessError, ValueError):
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
        return int(subprocess.check_output(query, text=True).split()[0]) * 2**20
    return 0


# ---------------------------------------------------------------------- the command

PARTS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "parity": parity_rows,
    "experts": expert_rows,
    "steps": step_size_rows,
    "peers": peer_rows,
    "seven": seven_rows,
}


def main(config: GpuConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    shutil.rmtree(config.work, ignore_errors=True)
    config.work.mkdir(parents=True)
    bench = Bench(config.device, config.work.resolve())
    device = torch.cuda.get_device_name() if config.device == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")
    board = Scoreboard(
        (config.results or Path()) / f"gpu-{slug}.json", ROOT / "benchmarks/results/gpu-nvidia-h200.md", "GPU", PARTS
    )
    is_kept = config.results is not None and not bench.is_tiny
    is_reached = board.run(config.only, lambda _: bench, (lambda _: {"device": device}) if is_kept else None)
    return 0 if is_reached else 1


if __name__ == "__main__":
    entry_point(GpuConfig, main)
