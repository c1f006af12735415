"""What a benchmark's child processes are told, as JSON files, and the data that all of them read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter
from torch import LongTensor
from transformers import PreTrainedTokenizerBase

from spes_p2p.commands.monitor import EVALUATION_BATCH, MonitorConfig
from spes_p2p.config import Frozen, RunConfig
from spes_p2p.data.packing import TokenSource, held_out_batches, train_sources
from spes_p2p.data.tokenizer import resolve_tokenizer


class Subject(Frozen):
    """The experiment that everything is compared with."""

    run: RunConfig
    """The run's settings."""
    peers: int
    """Peers that the experiment started; peer i reads its data in the order of seed i."""
    text: tuple[Path, ...] = ()
    """Files of the data source `files`."""
    cache: Path
    """Where trained tokenizers and tokenised text are kept."""

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one local step of one peer."""
        return self.run.train.batch_size * self.run.data.sequence_length

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the run's tokenizer, as its founder resolves it."""
        return resolve_tokenizer(self.run.data, self.text, self.cache)

    def source(self, peer: int) -> TokenSource:
        """Return a peer's own training sequences, in its order, from their start."""
        return train_sources(self.run.data, self.tokenizer(), paths=self.text, cache=self.cache)(peer)

    def held_out(self) -> list[LongTensor]:
        """Return the batches that the experiment's monitor evaluates on."""
        return held_out_batches(
            self.run.data,
            self.tokenizer(),
            paths=self.text,
            cache=self.cache,
            num_sequences=MonitorConfig.model_fields["held_out_sequences"].default,
            batch_size=EVALUATION_BATCH,
            seed=self.run.seed,
        )


class StockTask(Frozen):
    """Train the stock model until the window that the parent announces is over; tell when each step ended."""

    kind: Literal["stock"] = "stock"
    subject: Subject
    peer: int
    """Whose data to train on."""
    ready: Path
    """File to make once training is warm."""
    window: Path
    """File in which the parent will write the window's start and end, in seconds of the monotonic clock."""


class BaselineTask(Frozen):
    """Train this project's model in one process, evaluating after each round's number of steps."""

    kind: Literal["baseline"] = "baseline"
    subject: Subject
    slots: tuple[int, ...]
    """Expert slots to train; the others stay as initialised."""
    num_sources: int
    """Peers whose batches are put together into one, from peer 0 on."""
    steps: tuple[int, ...]
    """Optimizer steps of each round."""


Task = StockTask | BaselineTask


def write_task(path: Path, task: Task) -> None:
    """Write a task for a child."""
    path.write_text(task.model_dump_json(indent=1))


def read_task(path: Path) -> Task:
    """Return the task that `path` holds."""
    return TypeAdapter(Task).validate_json(path.read_bytes())


def write_result(task_path: Path, result: dict[str, Any]) -> None:
    """Write a task's result beside it."""
    _result_path(task_path).write_text(json.dumps(result))


def read_result(task_path: Path) -> dict[str, Any]:
    """Return the result of the task at `task_path`."""
    return json.loads(_result_path(task_path).read_text())


def _result_path(task_path: Path) -> Path:
    return task_path.with_suffix(".result.json")
