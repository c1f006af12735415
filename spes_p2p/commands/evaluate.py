"""How good a checkpoint is: held-out loss on text, and accuracies on lm-eval tasks.

Reads an ordinary Hugging Face checkpoint, so it measures this project's models and any other by the same rule.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import LongTensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.config.commands import EvaluateConfig
from spes_p2p.data.packing import encode, num_windows, window_batches
from spes_p2p.data.sources import documents, split_documents
from spes_p2p.data.tokenizer import load_tokenizer
from spes_p2p.errors import ConfigError, DataError
from spes_p2p.model.loss import held_out_loss
from spes_p2p.presentation import say


class Metric(NamedTuple):
    """One row of the report: `text` / `loss` / 3.21, or a task's name, its metric and value."""

    subject: str
    name: str
    value: float


def load_checkpoint(directory: Path) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Loads model and tokenizer for evaluation, on the GPU where there is one.

    Raises:
        DataError: no checkpoint there, a damaged one, or one without a tokenizer.
    """
    if not (directory / "config.json").is_file():
        raise DataError(f"{directory} is no checkpoint (no config.json); name a folder written by save_pretrained")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:  # configuration, safetensors and shapes each fail with types of their own
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"cannot load checkpoint {directory}: {reason}; export it again") from error
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.to(device).eval(), load_tokenizer(directory)


def text_batches(
    tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], sequence_length: int, batch_size: int, limit: int | None
) -> list[LongTensor]:
    """Cuts all text of `paths`, or the embedded corpus's held-out part, into batches `[B, T + 1]`.

    Args:
        tokenizer: The checkpoint's.
        paths: Text, jsonl or parquet files or folders; none takes the embedded corpus.
        sequence_length: Tokens per sequence, T.
        batch_size: Sequences per batch, B.
        limit: Sequences at most, from the start.

    Raises:
        ConfigError: a path does not exist.
        DataError: a file cannot be read, or there is less text than one sequence.
    """
    data = DataConfig(source="files" if paths else "embedded")
    chosen = documents(data, paths) if paths else split_documents(data, (), held_out=True)
    parts = list(encode(tokenizer, (document.text for document in chosen)))
    tokens_N = np.concatenate([np.empty(0, dtype=np.uint32), *parts])
    found = num_windows(len(tokens_N), sequence_length)
    if not found:
        raise DataError(f"the text has {len(tokens_N)} tokens; give more, or lower --sequence-length={sequence_length}")
    return window_batches(tokens_N, np.arange(found)[:limit], sequence_length, batch_size)


def text_metrics(model: nn.Module, batches: Sequence[LongTensor], subject: str) -> list[Metric]:
    """Measures held-out loss in nats per token, and its exponential."""
    num_rows, largest = model.get_input_embeddings().weight.shape[0], max(int(batch.max()) for batch in batches)  # type: ignore[operator]
    if largest >= num_rows:
        raise DataError(f"the tokenizer gives id {largest}, the model embeds {num_rows}; they do not belong together")
    loss = held_out_loss(model, batches)
    num_tokens = sum(batch[:, 1:].numel() for batch in batches)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return [
        Metric(subject, "loss", loss),
        Metric(subject, "perplexity", perplexity),
        Metric(subject, "tokens", float(num_tokens)),
    ]


def task_metrics(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    task_path: Path | None,
    batch_size: int,
    limit: int | None,
) -> list[Metric]:
    """Runs lm-eval tasks.

    Args:
        model: A causal language model; tasks run on its device.
        tokenizer: The checkpoint's.
        tasks: Names of tasks or groups.
        task_path: Folder of task YAMLs, looked through before the ones that come with lm-eval.
        batch_size: Requests per forward pass.
        limit: Documents per task at most.

    Raises:
        ConfigError: lm-eval is not installed, or a task or `task_path` does not exist.
        DataError: a task's data cannot be had.
    """
    try:
        import lm_eval
        from datasets.exceptions import DatasetsError
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise ConfigError(
            f"--tasks needs lm-eval ({error}); pip install 'spes-p2p[all]', or ./scripts/setup.sh all in a checkout"
        ) from error
    manager = _task_manager(tasks, task_path)
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    try:
        # Standard errors by bootstrap would take longer than a small evaluation itself.
        result = lm_eval.simple_evaluate(
            adapter, tasks=list(tasks), task_manager=manager, limit=limit, bootstrap_iters=0, log_samples=False
        )
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"cannot run {', '.join(tasks)}: {reason}; check the task's data and the network") from error
    return _flatten(result["results"])


def _task_manager(tasks: Sequence[str], task_path: Path | None) -> Any:
    """Indexing lm-eval's own ten thousand YAMLs takes long, so it is done only for names that are not local."""
    from lm_eval.tasks import TaskManager

    if task_path is not None and not task_path.is_dir():
        raise ConfigError(f"--task-path {task_path} is no folder; name one that holds task YAML files")
    include = str(task_path) if task_path else None
    manager = TaskManager(include_path=include, include_defaults=False) if include else None
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = TaskManager(include_path=include)
    if unknown := sorted(set(tasks) - set(manager.all_tasks)):
        raise ConfigError(f"unknown task {unknown[0]!r}; see `lm-eval ls tasks`, or name your folder with --task-path")
    return manager


def _flatten(results: dict[str, dict[str, Any]]) -> list[Metric]:
    rows = []
    for task, values in results.items():
        for name, value in values.items():
            if isinstance(value, int | float) and "stderr" not in name and name != "sample_len":
                rows.append(Metric(task, name.removesuffix(",none"), float(value)))
    return rows


def main(config: EvaluateConfig) -> int:
    """Print what `evaluate` measures."""
    say(table(evaluate(config)))
    return 0


def evaluate(config: EvaluateConfig) -> list[Metric]:
    """Evaluates one checkpoint: tasks if given, text if given or if no tasks are.

    Raises:
        ConfigError, DataError: as the functions above.
    """
    for path in config.text:
        if not path.expanduser().exists():  # before a large model is loaded
            raise ConfigError(f"{path} does not exist; give --text an existing file or folder")
    model, tokenizer = load_checkpoint(config.checkpoint.expanduser())
    rows: list[Metric] = []
    if config.text or not config.tasks:
        batches = text_batches(tokenizer, config.text, config.sequence_length, config.batch_size, config.limit)
        rows += text_metrics(model, batches, "text" if config.text else "embedded held-out")
    if config.tasks:
        rows += task_metrics(model, tokenizer, config.tasks, config.task_path, config.batch_size, config.limit)
    if config.json_file is not None:
        write_json(rows, config.json_file)
    return rows


def table(rows: Sequence[Metric]) -> str:
    """Formats metrics for a terminal."""
    width = max(len(row.subject) for row in rows)
    names = max(len(row.name) for row in rows)
    return "\n".join(f"{row.subject:<{width}}  {row.name:<{names}}  {_number(row.value):>12}" for row in rows)


def write_json(rows: Sequence[Metric], file: Path) -> None:
    """Writes metrics as `{subject: {name: value}}`.

    Raises:
        ConfigError: `file` cannot be written.
    """
    nested: dict[str, dict[str, float | None]] = {}
    for row in rows:
        # JSON has no infinity.
        nested.setdefault(row.subject, {})[row.name] = row.value if math.isfinite(row.value) else None
    try:
        file.write_text(json.dumps(nested, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write --json {file}: {error.strerror}; name another file") from error


def _number(value: float) -> str:
    return f"{value:.0f}" if value.is_integer() and abs(value) >= 2 else f"{value:.4f}"
