"""A layer's experts and a peer's steps against stock Hugging Face: on a GPU at real size, on a CPU at small sizes.

    .venv/bin/python -m benchmarks.gpu [--device cpu] [--write]

Experts: banks and stock take turns in one process, and a ratio is the median of the turns' ratios. The clock is the
device's own, or this process's CPU time on one thread; weights are in bf16, or in fp32. Steps on a CPU are a try
without a card, whose figures mean nothing. `pytest -m gpu` compares a GPU's results with the CPU's.
"""

from __future__ import annotations

import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median
from typing import Any, Literal, cast

import torch
import yaml
from torch import LongTensor, Tensor, nn

from benchmarks.cluster import ROOT
from benchmarks.machine import cpu_name
from benchmarks.records import measure_parts
from benchmarks.stock import default_stock_model, stock_step
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, MachineConfig, ModelConfig, RunConfig
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.build import build_slot_model, hf_config, model_class
from spes_p2p.model.frozen import unavailable
from spes_p2p.model.kernels import KERNELS
from spes_p2p.planner.memory import Setup, peer_memory
from spes_p2p.planner.size import model_size
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

VOCABULARY, SEED = 512, 7
MAX_PLAN_ERROR, MAX_MODULE = 0.10, 0.72
STEPS, PAIRS, WARM_UP = 5, 15, 2
RUNS = {"home_1b": 4, "home_7b": 1}
"""Shipped runs whose steps are measured, with the slots that a peer trains."""
DEFAULT_GOALS = {16: 0.95, 8: 0.85}
"""Slots that a peer trains of the default model, and the most that a step may take of stock's on a CPU."""
TINY = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "intermediate_size": 64}
OLMOE = ModelConfig(hidden_size=2048, num_heads=16, num_kv_heads=16, intermediate_size=1024, num_experts=64, top_k=8)
SMALL = ModelConfig(hidden_size=512, num_heads=8, num_kv_heads=8, intermediate_size=512, num_experts=16)
Device = Literal["cpu", "cuda"]


class GpuConfig(CommandConfig):
    """A peer's speed and memory on a device."""

    device: Device = "cuda"
    """Where to measure; on a CPU the shapes are small."""
    write: bool = False
    """Keep the rows in benchmarks/results, under the device's name."""
    log_level: LogLevel = "warning"


def main(config: GpuConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if config.device == "cuda" else cpu_name()
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    parts = {"experts": partial(expert_rows, config.device), "steps": partial(step_rows, config.device)}
    return measure_parts(f"gpu-{slug}", parts, [], config.write)


def timed(turn: Callable[[], object], device: Device) -> float:
    """Return the seconds of a turn, on the device's clock."""
    if device == "cpu":
        began = time.process_time()
        turn()
        return time.process_time() - began
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    turn()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3


# ---------------------------------------------------------------------- one layer's experts


def expert_rows(device: Device) -> Iterator[Row]:
    """Yield the time of forward pass, backward pass and optimizer, over that of stock with all experts trained."""
    model, num_tokens = (SMALL, 1024) if device == "cpu" else (OLMOE, 16_384)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    run = RunConfig().model_copy(update={"model": model.model_copy(update={"num_layers": 1})})
    stock = cast(nn.Module, default_stock_model(run, vocab_size=8).model.layers[0].mlp.experts)
    banks = {
        f"{claimed} of {model.num_experts}, frozen {storage}, {kernel}": _bank(stock, claimed, storage, kernel)
        for claimed, storage, kernel in _plans(model, device)
    }
    x_TD = torch.randn(num_tokens, model.hidden_size, device=device, dtype=dtype, requires_grad=True)
    index_TK = torch.rand(num_tokens, model.num_experts, device=device).argsort(-1)[:, : model.top_k]
    weights_TK = torch.rand(index_TK.shape, device=device, dtype=dtype, requires_grad=True)
    inputs = x_TD, index_TK, weights_TK, torch.randn_like(x_TD)
    modules = {"stock": stock.to(device, dtype), **{name: bank.to(device) for name, bank in banks.items()}}
    turns = {name: _turn(module, inputs) for name, module in modules.items()}
    seconds = [{name: timed(turn, device) for name, turn in turns.items()} for _ in range(WARM_UP + PAIRS)][WARM_UP:]
    for number, name in enumerate(banks):
        ratio = median(each[name] / each["stock"] for each in seconds)
        figure = f"experts / stock grouped_mm, hidden {model.hidden_size}, {num_tokens} tokens: {name}"
        yield Row(figure, f"{ratio:.3f}", *(() if number else (f"<= {MAX_MODULE}", ratio <= MAX_MODULE)))


def _plans(model: ModelConfig, device: Device) -> Iterator[tuple[int, str, str]]:
    """Yield the slots claimed, the frozen storage and the kernel of each bank to measure, the one with a goal first."""
    few, every = model.num_experts // 4, model.num_experts
    best, exact = ("loop", "fp32") if device == "cpu" else ("grouped_mm", "bf16")
    yield few, exact, best
    yield every, exact, best
    yield from ((few, storage, best) for storage in ("int8", "nf4") if unavailable(storage) is None)
    for kernel, kind in KERNELS.items():
        if kernel != best and kind().available(torch.device(device)) is None:
            yield few, exact, kernel


def _bank(stock: nn.Module, claimed: int, storage: str, kernel: str) -> ExpertBank:
    bank = ExpertBank(stock, range(claimed), storage, KERNELS[kernel]())
    for slot in range(bank.num_experts):
        bank.load(slot, {name: getattr(stock, name).detach()[slot] for name in bank.shapes})
    return bank


def _turn(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Callable[[], object]:
    x_TD, index_TK, weights_TK, grad_TD = inputs
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def turn() -> None:
        module(x_TD, index_TK, weights_TK).backward(grad_TD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        x_TD.grad = weights_TK.grad = None

    return turn


# ---------------------------------------------------------------------- a peer's steps


def step_rows(device: Device) -> Iterator[Row]:
    """Yield speed and peak memory of a peer's steps in shipped runs, beside its plan, and of stock Hugging Face."""
    for name, claimed in RUNS.items():
        run, machine, vocab_size = _shipped(name, device)
        trainer = _trainer(run, machine, vocab_size, claimed, device)
        seconds, peak = _measured(partial(trainer.step, 1e-4), device)
        del trainer
        setup = Setup.of(run, machine, vocab_size, on_gpu=device == "cuda")
        plan = peer_memory(model_size(run.model, vocab_size), claimed, setup).device_bytes
        length = run.data.sequence_length
        what = f"{name}, slots: {claimed}, {machine.kernel}, microbatch {machine.micro_batch_size} x {length}"
        yield Row(f"{what}: tokens/s", f"{run.train.batch_size * length / seconds:,.0f}")
        is_met = abs(peak / plan - 1) <= MAX_PLAN_ERROR if peak else None
        yield Row("- peak of the card", f"{peak / 1e9:.2f} GB, planned {plan / 1e9:.2f}", "within 10 %", is_met)
    yield from _stock_rows(device) if device == "cuda" else _default_rows()


def _default_rows() -> Iterator[Row]:
    """Yield the time of the default model's steps over stock Hugging Face's, batch 4 x 256, AdamW."""
    run = RunConfig.model_validate({"data": {"vocab_size": 4096, "sequence_length": 256}, "train": {"batch_size": 4}})
    size = run.data.vocab_size, run.data.sequence_length
    stock, tokens = default_stock_model(run, size[0]), RandomTokens(*size, "cpu")
    adamw = torch.optim.AdamW(stock.parameters(), fused=True)
    turns: dict[str, Callable[[], object]] = {"": lambda: stock_step(stock, adamw, tokens.next_batch(4), run)}
    for compiled, claimed in itertools.product(("off", "auto"), DEFAULT_GOALS):
        trainer = _trainer(run, MachineConfig.model_validate({"compile": compiled}), size[0], claimed, "cpu")
        turns[f"default model, {claimed} of 16 slots, --compile {compiled}: step / stock"] = partial(trainer.step, 1e-3)
    seconds = [{name: timed(turn, "cpu") for name, turn in turns.items()} for _ in range(WARM_UP + PAIRS)][WARM_UP:]
    for name in list(turns)[1:]:
        ratio, goal = median(each[name] / each[""] for each in seconds), DEFAULT_GOALS[int(name.split()[2])]
        yield Row(name, f"{ratio:.3f}", f"<= {goal}", ratio <= goal)


def _shipped(name: str, device: Device) -> tuple[RunConfig, MachineConfig, int]:
    settings = yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())
    run = RunConfig.model_validate(settings.pop("run"))
    own = {key: value for key, value in settings.items() if key in MachineConfig.model_fields}
    machine = MachineConfig.model_validate({**own, "kernel": "loop" if device == "cpu" else "grouped_mm"})
    data, vocab_size = run.data, run.data.vocab_size
    if device == "cpu":
        run = run.model_copy(update={"model": run.model.model_copy(update=TINY)})
        data, vocab_size = data.model_copy(update={"sequence_length": 64}), VOCABULARY
    train = run.train.model_copy(update={"batch_size": 4 * (machine.micro_batch_size or 1)})
    return run.model_copy(update={"train": train, "data": data}), machine, vocab_size


def _trainer(run: RunConfig, machine: MachineConfig, vocab_size: int, claimed: int, device: Device) -> Trainer:
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
    nn.Module.to(model.module, group.device)

    def drawn(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {name: 0.02 * torch.randn(shape, device=device) for name, shape in shapes.items()}

    model.load_shared(drawn(model.shared_shapes()))
    slot_weights = drawn(model.slot_shapes())
    for slot in range(run.model.num_experts):
        model.load_slot(slot, slot_weights)
    model.module.train()
    return Trainer(model, run.train, RandomTokens(vocab_size, run.data.sequence_length, "cpu"), group, machine)


def _measured(step: Callable[[], object], device: Device) -> tuple[float, int]:
    """Return the median seconds of a step, and the peak of all of them."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds = [timed(step, device) for _ in range(WARM_UP + STEPS)]
    return median(seconds[WARM_UP:]), torch.cuda.max_memory_allocated() if device == "cuda" else 0


def _stock_rows(device: Device) -> Iterator[Row]:
    """Yield stock Hugging Face training of the whole 1B model, weights in fp32, under bf16 autocast."""
    run, machine, vocab_size = _shipped("home_1b", device)
    micro, length = machine.micro_batch_size or 1, run.data.sequence_length
    config = hf_config(run.model, vocab_size, length)
    config.output_router_logits = True
    with torch.device(device):
        module = model_class(run.model.family)(config).train()
    module.activation_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    tokens = RandomTokens(vocab_size, length, device)
    seconds, peak = _measured(lambda: stock_step(module, optimizer, tokens.next_batch(micro), run), device)
    what = f"stock Hugging Face, the 1B model, all experts trained, batch {micro} x {length}"
    yield Row(f"{what}: tokens/s", f"{micro * length / seconds:,.0f}")
    yield Row("- peak of the card", f"{peak / 1e9:.2f} GB")


class RandomTokens:
    """Random tokens; a `TokenSource`."""

    def __init__(self, vocab_size: int, sequence_length: int, device: str) -> None:
        self._vocab_size = vocab_size
        self._length = sequence_length + 1
        self._generator = torch.Generator(device).manual_seed(SEED)

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Return `[B, T + 1]`."""
        size, device = (num_sequences, self._length), self._generator.device
        return cast(LongTensor, torch.randint(self._vocab_size, size, generator=self._generator, device=device))

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no place to go on from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


if __name__ == "__main__":
    entry_point(GpuConfig, main)
