"""Speed and memory of a peer's steps on a GPU, at real size.

    .venv/bin/python -m benchmarks.gpu [--device cpu] [--write]

Equal results to the CPU's are tested: `pytest -m gpu`.

With `--device cpu` the same code runs with tiny shapes: a try without a card, whose figures mean nothing.
"""

from __future__ import annotations

import functools
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Literal

import torch
import yaml
from torch import Tensor

from benchmarks.cluster import ROOT
from benchmarks.experts import RandomTokens, module_rows
from benchmarks.records import measure_parts
from benchmarks.stock import stock_step
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, MachineConfig, RunConfig
from spes_p2p.model.build import FAMILIES, build_slot_model, hf_config
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import model_size
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

VOCABULARY, SEED = 512, 7
MAX_PLAN_ERROR = 0.10
STEPS, WARM_UP, PAIRS = 5, 2, 15
RUNS = {"home_1b": 4, "home_7b": 1}
"""Shipped runs whose steps are measured, with the slots that a peer trains."""
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 64}
"""The shape of a try on a CPU."""
Device = Literal["cpu", "cuda"]


class GpuConfig(CommandConfig):
    """Speed and memory on a GPU."""

    device: Device = "cuda"
    """Where to measure; on a CPU the shapes are tiny."""
    write: bool = False
    """Keep a GPU's rows in benchmarks/results, under its name."""


def step_size_rows(device: Device) -> Iterator[Row]:
    """Yield speed and peak memory of a peer's steps in shipped runs, beside its plan, and of stock Hugging Face."""
    for name, claimed in RUNS.items():
        yield from _run_rows(name, claimed, "loop" if device == "cpu" else "grouped_mm", device)
        _empty(device)
    yield from _stock_rows(device)


def _run_rows(name: str, claimed: int, kernel: str, device: Device) -> Iterator[Row]:
    run, machine, vocab_size = _shipped(name, device)
    machine = machine.model_copy(update={"kernel": kernel})
    trainer = _loaded(run, machine, vocab_size, claimed, device)
    seconds, peak = _measured(functools.partial(trainer.step, 1e-4), device)
    setup = Setup.of(run, machine, vocab_size, on_gpu=device == "cuda")
    plan = peer_memory(model_size(run.model, vocab_size), claimed, setup).device_bytes
    tokens = run.train.batch_size * run.data.sequence_length
    slots = f"{claimed} slots" if claimed > 1 else "one slot"
    what = f"{name}, {slots}, {kernel}, microbatch {machine.micro_batch_size} x {run.data.sequence_length}"
    yield Row(f"{what}: tokens/s", f"{tokens / seconds:,.0f}", "", None)
    error = abs(peak / plan - 1) if peak else 0.0
    found = f"{peak / 1e9:.2f} GB, planned {plan / 1e9:.2f}"
    yield Row("- peak of the card", found, "within 10 %", error <= MAX_PLAN_ERROR)


def _shipped(name: str, device: Device) -> tuple[RunConfig, MachineConfig, int]:
    settings = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    run = RunConfig.model_validate(settings.pop("run"))
    settings = {key: value for key, value in settings.items() if key in MachineConfig.model_fields}
    machine, vocab_size = MachineConfig.model_validate(settings), run.data.vocab_size
    batch_size = 4 * (machine.micro_batch_size or 1)
    data = run.data
    if device == "cpu":
        run = run.model_copy(update={"model": run.model.model_copy(update=TINY)})
        data, vocab_size = data.model_copy(update={"sequence_length": 64}), VOCABULARY
    train = run.train.model_copy(update={"batch_size": batch_size})
    return run.model_copy(update={"train": train, "data": data}), machine, vocab_size


def _loaded(run: RunConfig, machine: MachineConfig, vocab_size: int, claimed: int, device: Device) -> Trainer:
    """Return a trainer whose weights are drawn on the device, every slot the same: speed and memory do not differ."""
    model = build_slot_model(
        run.model,
        vocab_size=vocab_size,
        sequence_length=run.data.sequence_length,
        seed=None,
        claimed=range(claimed),
        storage=machine.storage or run.frozen_storage,
        kernel=machine.kernel,
        device=device,
    )
    group = Ranks(device)
    torch.nn.Module.to(model.module, group.device)
    model.load_shared({name: _drawn(shape, device) for name, shape in model.shared_shapes().items()})
    slot_weights = {name: _drawn(shape, device) for name, shape in model.slot_shapes().items()}
    for slot in range(run.model.num_experts):
        model.load_slot(slot, slot_weights)
    model.module.train()
    tokens = RandomTokens(vocab_size, run.data.sequence_length, "cpu", SEED)
    return Trainer(model, run.train, tokens, group, machine)


def _drawn(shape: tuple[int, ...], device: Device) -> Tensor:
    return 0.02 * torch.randn(shape, device=device)


def _measured(step: Callable[[], object], device: Device) -> tuple[float, int]:
    """Return the median seconds of a step, and the peak of all of them."""
    _empty(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for _ in range(WARM_UP + STEPS):
        began = time.monotonic()
        step()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - began)
    return statistics.median(seconds[WARM_UP:]), 0 if device == "cpu" else torch.cuda.max_memory_allocated()


def _empty(device: Device) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def _stock_rows(device: Device) -> Iterator[Row]:
    """Yield stock Hugging Face training of the whole 1B model, weights in fp32, under bf16 autocast."""
    run, machine, vocab_size = _shipped("home_1b", device)
    micro = machine.micro_batch_size or 1
    run = run.model_copy(update={"train": run.train.model_copy(update={"batch_size": micro})})
    config = hf_config(run.model, vocab_size, run.data.sequence_length)
    config.output_router_logits = True
    with torch.device(device):
        module = FAMILIES[run.model.family][1](config).train()
    module.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    tokens = RandomTokens(vocab_size, run.data.sequence_length, device, SEED)
    seconds, peak = _measured(lambda: stock_step(module, optimizer, tokens.next_batch(micro), run), device)
    what = f"stock Hugging Face, the 1B model, all experts trained, batch {micro} x {run.data.sequence_length}"
    yield Row(f"{what}: tokens/s", f"{micro * run.data.sequence_length / seconds:,.0f}", "", None)
    yield Row("- peak of the card", f"{peak / 1e9:.2f} GB", "", None)


def main(config: GpuConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    name = torch.cuda.get_device_name() if config.device == "cuda" else "cpu"
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    parts = {"steps": functools.partial(step_size_rows, config.device)}
    if config.device == "cuda":
        parts["experts"] = functools.partial(module_rows, "cuda", PAIRS)
    return measure_parts(f"gpu-{slug}", parts, [], config.write and config.device == "cuda")


if __name__ == "__main__":
    entry_point(GpuConfig, main)
