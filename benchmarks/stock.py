"""Stock Hugging Face training of the run's model, as independent processes: what the swarm's pace is held against."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import LongTensor, nn
from transformers import PreTrainedModel

from benchmarks.cluster import LocalCluster
from benchmarks.tasks import StockTask, Subject
from spes_p2p.config import RunConfig
from spes_p2p.model.build import hf_config, model_class, stock_model

WARM_UP_STEPS = 5
LR_STEPS = 50
"""Steps of linear warm-up of the learning rate, against a start that diverges."""
READY_SECONDS = 300.0


@dataclass(frozen=True)
class StockPace:
    """Processes that all trained throughout one window.

    Attributes:
        seconds: Length of the window.
        tokens_per_second: Speed of each process.
        cores: CPU time over wall time, of all processes together; less than there are cores if others used them.
    """

    seconds: float
    tokens_per_second: tuple[float, ...]
    cores: float

    @property
    def total(self) -> float:
        """Tokens per second of all processes."""
        return sum(self.tokens_per_second)


# ---------------------------------------------------------------------- parent


def measure_stock(subject: Subject, folder: Path, seconds: float) -> StockPace:
    """Let one process per peer train on the peer's batches, and count what they do while all of them train.

    Every process trains before the window opens and after it closes, so they overlap throughout.

    Raises:
        SpesError: a process failed, or they did not get ready in time.
    """
    window = folder / "window.json"
    with LocalCluster(folder) as cluster:
        tasks = [
            StockTask(subject=subject, peer=peer, ready=folder / f"stock-{peer}.ready", window=window)
            for peer in range(subject.peers)
        ]
        for task in tasks:
            cluster.start(f"stock-{task.peer}", task)
        cluster.wait_until(lambda: all(task.ready.exists() for task in tasks), READY_SECONDS, "stock training to start")
        start = time.monotonic()
        scratch = window.with_suffix(".new")
        scratch.write_text(json.dumps([start, start + seconds]))
        scratch.rename(window)
        results = cluster.results(seconds + READY_SECONDS)
    return pace_in_window(results, start, start + seconds)


def pace_in_window(results: Sequence[Mapping[str, Any]], start: float, end: float) -> StockPace:
    """Return the pace within a window; steps that its edges cut count in proportion.

    Args:
        results: What each process returned: `ends`, the times at which its steps ended, `cpu`, its CPU seconds by
            then, and `tokens_per_step`.
        start: Of the window, on the same clock.
        end: End of the window.
    """
    paces, cpu = [], 0.0
    for result in results:
        ends = result["ends"]
        assert ends[0] <= start and ends[-1] >= end, "a process did not train throughout the window"
        steps_at_start, steps_at_end = np.interp([start, end], ends, np.arange(len(ends)))
        paces.append(float(steps_at_end - steps_at_start) * result["tokens_per_step"] / (end - start))
        cpu_at_start, cpu_at_end = np.interp([start, end], ends, result["cpu"])
        cpu += float(cpu_at_end - cpu_at_start)
    return StockPace(end - start, tuple(paces), cpu / (end - start))


# ---------------------------------------------------------------------- child


def train_stock(task: StockTask) -> dict[str, Any]:
    """Train until a step ends after the window; return when each step ended."""
    subject, train = task.subject, task.subject.run.train
    module = default_stock_model(subject.run, len(subject.tokenizer()))
    optimizer = torch.optim.AdamW(
        module.parameters(),
        lr=train.lr,
        betas=(train.beta1, train.beta2),
        eps=train.eps,
        weight_decay=train.weight_decay,
        fused=True,
    )
    source = subject.source(task.peer)
    ends: list[float] = []
    cpu: list[float] = []
    while not ends or ends[-1] < _window_end(task.window):
        for group in optimizer.param_groups:
            group["lr"] = train.lr * min(1.0, (len(ends) + 1) / LR_STEPS)
        stock_step(module, optimizer, source.next_batch(train.batch_size), subject.run)
        ends.append(time.monotonic())
        cpu.append(time.process_time())
        if len(ends) == WARM_UP_STEPS:
            task.ready.touch()
    return {"ends": ends, "cpu": cpu, "tokens_per_step": subject.tokens_per_step}


def default_stock_model(run: RunConfig, vocab_size: int) -> PreTrainedModel:
    """The stock model with the run's initial weights, its own choice of kernels, and its own balance loss."""
    config = hf_config(run.model, vocab_size, run.data.sequence_length)
    config.output_router_logits = True
    config.router_aux_loss_coef = run.train.balance_loss
    module = model_class(run.model.family)(config)
    module.load_state_dict(stock_model(run.model, vocab_size, run.data.sequence_length, run.seed).state_dict())
    return module.train()


def stock_step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT1: LongTensor, run: RunConfig) -> float:
    """One step as a Hugging Face training loop makes it, on as many targets as ours; return its loss."""
    targets_BT = tokens_BT1[:, 1:].contiguous()
    with torch.autocast(tokens_BT1.device.type, torch.bfloat16, enabled=run.train.precision == "bf16"):
        output = module(input_ids=tokens_BT1[:, :-1], labels=targets_BT, shift_labels=targets_BT, use_cache=False)
    output.loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), run.train.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(output.loss.item())


def _window_end(path: Path) -> float:
    return json.loads(path.read_text())[1] if path.exists() else float("inf")
