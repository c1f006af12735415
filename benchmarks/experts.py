"""What the expert bank costs against stock Hugging Face: one layer, forward and backward pass and optimizer.

    .venv/bin/python benchmarks/experts.py [--pairs 15] [--write]

On a GPU it is a part of `benchmarks/gpu.py`.

Everything of a table runs in one process and takes turns, and a ratio is the median of the turns' ratios: what else the
machine does at the time changes both alike. On a CPU the clock is this process's CPU time on one thread, in fp32. On a
CUDA device it is the device's own, in bf16, at the size of OLMoE's layers; there stock keeps even its weights in bf16,
for under autocast its grouped_mm computes in fp32.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import LongTensor, Tensor, nn

from benchmarks.records import measure_parts
from benchmarks.stock import default_stock_model
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel, ModelConfig, PositiveInt, RunConfig
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.frozen import unavailable
from spes_p2p.model.kernels import KERNELS

MAX_MODULE = 0.72
WARM_UP_TURNS = 2
STOCK = "stock"
Device = Literal["cpu", "cuda"]


class ExpertsConfig(CommandConfig):
    """The expert bank's speed against stock Hugging Face."""

    pairs: PositiveInt = 15
    """Turns of each."""
    write: bool = False
    """Keep the rows in benchmarks/results/experts.json and .md."""
    log_level: LogLevel = "warning"


class Shape(NamedTuple):
    """One layer's experts, the tokens of one batch, and the slots of a peer that trains a few."""

    model: ModelConfig
    tokens: int
    claimed: int

    def __str__(self) -> str:
        model = self.model
        return f"hidden {model.hidden_size}, intermediate {model.intermediate_size}, {self.tokens} tokens"


def shapes(device: Device) -> list[Shape]:
    """Return the shapes to measure: small ones on a CPU, one that fills the device on CUDA."""
    if device == "cuda":
        olmoe = ModelConfig(hidden_size=2048, num_heads=16, num_kv_heads=16, intermediate_size=1024, num_experts=64)
        return [Shape(olmoe.model_copy(update={"top_k": 8}), tokens=16384, claimed=16)]
    facts = ModelConfig(hidden_size=512, num_heads=8, num_kv_heads=8, num_experts=16)
    widths = (facts.model_copy(update={"intermediate_size": width}) for width in (512, 256))
    return [Shape(model, tokens=1024, claimed=4) for model in widths]


def module_rows(device: Device, pairs: int) -> Iterator[Row]:
    """Yield the expert module's rows: forward, backward and optimizer, against stock with all experts trained."""
    for shape in shapes(device):
        turns = {
            f"{claimed} of {shape.model.num_experts}, frozen {storage}, {kernel}": (claimed, storage, kernel)
            for claimed, storage, kernel in _plans(shape, device)
        }
        seconds = _take_turns(_module_turns(shape, turns, device), pairs, device)
        for number, name in enumerate(turns):
            figure = f"expert module / stock grouped_mm, {shape}: {name}"
            yield _row(figure, _ratio(seconds, name), MAX_MODULE if number == 0 else None)


def _plans(shape: Shape, device: Device) -> Iterator[tuple[int, str, str]]:
    """Yield the slots claimed, the frozen storage and the kernel of each bank to measure, the one with a goal first."""
    few, every = shape.claimed, shape.model.num_experts
    best, exact = ("loop", "fp32") if device == "cpu" else ("grouped_mm", "bf16")
    yield few, exact, best
    yield every, exact, best
    for storage in ("int8", "nf4"):
        if unavailable(storage) is None:
            yield few, storage, best
    for kernel, kind in KERNELS.items():
        if kernel != best and kind().available(torch.device(device)) is None:
            yield few, exact, kernel


def _row(figure: str, ratio: float, most: float | None) -> Row:
    if most is None:
        return Row(figure, f"{ratio:.3f}")
    return Row(figure, f"{ratio:.3f}", f"<= {most}", ratio <= most)


def _ratio(seconds: Mapping[str, list[float]], name: str) -> float:
    """The median over turns of what one took, in what stock took in the same turn."""
    return statistics.median(own / stock for own, stock in zip(seconds[name], seconds[STOCK], strict=True))


def _take_turns(turns: Mapping[str, Callable[[], object]], pairs: int, device: Device) -> dict[str, list[float]]:
    """Let each do its turn, one after the other, again and again; return the seconds of every turn."""
    seconds: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(WARM_UP_TURNS + pairs):
        for name, turn in turns.items():
            took = _seconds(turn, device)
            if number >= WARM_UP_TURNS:
                seconds[name].append(took)
    return seconds


def _seconds(turn: Callable[[], object], device: Device) -> float:
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


def _module_turns(
    shape: Shape, plans: Mapping[str, tuple[int, str, str]], device: Device
) -> dict[str, Callable[[], object]]:
    """Return what trains stock experts, and banks with the same weights, on one batch."""
    run = RunConfig().model_copy(update={"model": shape.model.model_copy(update={"num_layers": 1})})
    stock = cast(nn.Module, default_stock_model(run, vocab_size=8).model.layers[0].mlp.experts)
    banks = {name: _bank(stock, *plan).to(device) for name, plan in plans.items()}
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    stock.to(device, dtype)
    x_TD = torch.randn(shape.tokens, shape.model.hidden_size, device=device, dtype=dtype, requires_grad=True)
    index_TK = torch.rand(shape.tokens, shape.model.num_experts, device=device).argsort(-1)[:, : shape.model.top_k]
    weights_TK = torch.rand(index_TK.shape, device=device, dtype=dtype, requires_grad=True)
    inputs = x_TD, index_TK, weights_TK, torch.randn_like(x_TD)
    return {name: _module_turn(module, inputs) for name, module in {STOCK: stock, **banks}.items()}


def _bank(stock: nn.Module, claimed: int, storage: str, kernel: str) -> ExpertBank:
    bank = ExpertBank(stock, range(claimed), storage, KERNELS[kernel]())
    for slot in range(bank.num_experts):
        bank.load(slot, {name: getattr(stock, name).detach()[slot] for name in bank.shapes})
    return bank


def _module_turn(module: nn.Module, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> Callable[[], object]:
    x_TD, index_TK, weights_TK, grad_TD = inputs
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)

    def turn() -> None:
        module(x_TD, index_TK, weights_TK).backward(grad_TD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        x_TD.grad = weights_TK.grad = None

    return turn


class RandomTokens:
    """Random tokens; a `TokenSource`."""

    def __init__(self, vocab_size: int, sequence_length: int, device: torch.device | str, seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._shape = (sequence_length + 1,)
        self._generator = torch.Generator(device).manual_seed(seed)

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Return `[B, T + 1]`."""
        size = (num_sequences, *self._shape)
        drawn = torch.randint(self._vocab_size, size, generator=self._generator, device=self._generator.device)
        return cast(LongTensor, drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: there is no place to go on from."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


def main(config: ExpertsConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    torch.set_num_threads(1)
    parts = {"module": partial(module_rows, "cpu", config.pairs)}
    return measure_parts("experts", parts, [], config.write)


if __name__ == "__main__":
    entry_point(ExpertsConfig, main)
