"""Fine-tuning: memory and time of a step of expert adapters, against peft's.

    .venv/bin/python -m benchmarks.tuning [--write]

Memory is a process's own, read from `/proc/self`; each case has a process. Times are CPU seconds of one thread.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from benchmarks.records import measure_parts
from benchmarks.tables import Row
from spes_p2p.config import AdapterConfig, DataConfig, MachineConfig, RunConfig, TrainConfig
from spes_p2p.model.adapted import InitialFactors, build_adapted
from spes_p2p.model.build import outline
from spes_p2p.model.start import StartWeights, model_of
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.trainer import Trainer

MIB = 2**20
MAX_MEMORY, MAX_RECOMPUTED, MAX_STEP = 0.6, 0.3, 0.7
TOKENS, WARM_UP, STEPS = 512, 2, 5


def memory_rows(folder: Path) -> Iterator[Row]:
    """Yield the memory and the CPU time of a step of expert adapters, against peft's."""
    source = _write_moe(folder / "facts")
    cases = {
        (kind, again): _in_child(_steps, kind, source, again) for kind in ("ours", "peft") for again in (False, True)
    }
    (own, own_seconds), (theirs, their_seconds) = cases["ours", False], cases["peft", False]
    (own_again, again_seconds), (their_again, _) = cases["ours", True], cases["peft", True]
    shape = f"16 experts of 512 in 4 layers of width 512, {TOKENS} tokens, rank 8"
    yield Row(f"expert LoRA, {shape}: MiB above the loaded base, ours / peft's", f"{own:.0f} / {theirs:.0f}")
    yield _at_most("- ratio", own / theirs, MAX_MEMORY)
    yield Row("- with recomputation, MiB", f"{own_again:.0f} / {their_again:.0f}")
    yield _at_most("- ours with recomputation / peft's plain", own_again / theirs, MAX_RECOMPUTED)
    yield Row("- CPU seconds of a step, ours / peft's", f"{own_seconds:.2f} / {their_seconds:.2f}")
    yield _at_most("- ratio", own_seconds / their_seconds, MAX_STEP)
    yield Row("- ours with recomputation, CPU seconds", f"{again_seconds:.2f}")


def _at_most(figure: str, ratio: float, most: float) -> Row:
    return Row(figure, f"{ratio:.4f}" if most < 0.1 else f"{ratio:.3f}", f"<= {most}", ratio <= most)


def _in_child(work: Callable[..., Any], *arguments: Any) -> Any:
    """Return what a function returns in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(work, arguments)


def _steps(kind: str, source: Path, recomputes: bool) -> tuple[float, float]:
    """Train some steps; return the peak in MiB over the loaded model, and the CPU seconds of a step."""
    torch.set_num_threads(1)
    tokens = torch.randint(256, (1, TOKENS + 1))
    step = (_own_step if kind == "ours" else _peft_step)(source, recomputes, tokens)
    loaded = _rss()
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    seconds = []
    for number in range(WARM_UP + STEPS):
        began = time.process_time()
        step()
        if number >= WARM_UP:
            seconds.append(time.process_time() - began)
    return (_rss("VmHWM") - loaded) / MIB, sorted(seconds)[len(seconds) // 2]


def _rss(field: str = "VmRSS") -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def _own_step(source: Path, recomputes: bool, tokens: torch.Tensor) -> Callable[[], Any]:
    run = _run_over(source, TOKENS, targets=["experts"])
    base = StartWeights(source, outline(run.model, 256, TOKENS))
    model = build_adapted(run, base, vocab_size=256, storage="fp32")
    model.load_shared(InitialFactors(model, 0).read(None))
    machine = MachineConfig(activation_checkpointing=recomputes)
    trainer = Trainer(model, run.train, _Same(tokens), Ranks("cpu"), machine)
    return lambda: trainer.step(1e-3)


class _Same:
    """A token source of one batch."""

    def __init__(self, tokens: torch.Tensor) -> None:
        self._tokens = tokens

    def next_batch(self, num_sequences: int) -> Any:
        assert num_sequences == len(self._tokens)
        return self._tokens

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


def _peft_step(source: Path, recomputes: bool, tokens: torch.Tensor) -> Callable[[], Any]:
    from peft import LoraConfig, get_peft_model

    names = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=[], target_parameters=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32), settings)
    model.train()
    if recomputes:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)

    def step() -> None:
        logits = model(tokens[:, :-1], use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _run_over(source: Path, sequence_length: int, **adapter: Any) -> RunConfig:
    train = TrainConfig(batch_size=1, balance_loss=0.0, router_z_loss=0.0)
    data = DataConfig(sequence_length=sequence_length)
    return RunConfig(model=model_of(source), data=data, train=train, adapter=AdapterConfig(**adapter))


def _write_moe(folder: Path) -> Path:
    """Write a Qwen3-MoE with random weights."""
    shape: dict[str, Any] = {
        "vocab_size": 1024,
        "hidden_size": 512,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
    }
    heads: dict[str, Any] = {
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 1024,
    }
    config = Qwen3MoeConfig(**shape, **heads, num_experts=16, num_experts_per_tok=2, tie_word_embeddings=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="keep the rows in benchmarks/results/tuning.json and .md")
    with tempfile.TemporaryDirectory(prefix="tuning-") as folder:
        measured = {"memory": partial(memory_rows, Path(folder))}
        sys.exit(measure_parts("tuning", measured, [], parser.parse_args().write))
