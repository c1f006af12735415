"""`spes evaluate`: held-out loss on text, and lm-eval tasks, single or as a published suite.

Reads an ordinary Hugging Face checkpoint, so it measures this project's models and any other by the same rule. Several
processes, as torchrun or accelerate start them, share the tasks' requests; the first one measures text and reports.
"""

from __future__ import annotations

import functools
import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import LongTensor, nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from spes_p2p.commands.early import check_checkpoint
from spes_p2p.config import DataConfig
from spes_p2p.config.commands import EvaluateConfig, SuiteName
from spes_p2p.data.packing import encode, window_batches
from spes_p2p.data.sources import documents, split_documents
from spes_p2p.data.tokenizer import load_tokenizer, own_template, text_encoder
from spes_p2p.data.windows import PackedWindows, TokenFile
from spes_p2p.errors import ConfigError, DataError, SpesError, one_line
from spes_p2p.model.loss import held_out_loss
from spes_p2p.presentation import markdown_table, say

log = logging.getLogger(__name__)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INSTALL = "pip install 'spes-p2p[all]', or ./scripts/setup.sh all in a checkout"
BOOTSTRAP_SAMPLES = 1000
"""Samples for standard errors of perplexities; lm-eval's 100,000 take longer than a small evaluation itself."""
SEQUENCE_LENGTH = 256
TEXT_BATCH = 8


class TaskGroup(NamedTuple):
    """Tasks with one number of examples in their prompts; None leaves it to each task."""

    tasks: tuple[str, ...]
    num_fewshot: int | None


SUITES: dict[SuiteName, tuple[TaskGroup, ...]] = {
    "spes": (
        TaskGroup(("sciq", "piqa", "winogrande", "arc_easy", "social_iqa", "openbookqa", "boolq"), None),
        TaskGroup(("arc_challenge",), 25),
        TaskGroup(("hellaswag",), 10),
        TaskGroup(("ceval-valid", "cmmlu", "mmlu"), None),
    )
}
"""Published lists of task groups. Source of `spes`: `eval_scripts/eval_full.sh` of https://github.com/zjr2000/SPES."""


class Metric(NamedTuple):
    """One row of the report: `text` / `loss` / 3.21, or a task's name, its metric and value."""

    subject: str
    name: str
    value: float
    stderr: float | None = None
    num_fewshot: int | None = None
    is_part: bool = False  # of a group, whose row includes it


def join_ranks() -> Any:
    """Return accelerate's `Accelerator` of the processes that it or torchrun has started; None for a single process.

    Raises:
        ConfigError: there are several, and accelerate is not installed.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    try:
        from accelerate import Accelerator, InitProcessGroupKwargs
    except ImportError as error:
        raise ConfigError(f"several processes need accelerate ({error}); {INSTALL}") from error
    # A process that has finished its requests waits for the others, whose may take hours.
    patience = InitProcessGroupKwargs(timeout=timedelta(weeks=1))
    return Accelerator(cpu=not torch.cuda.is_available(), kwargs_handlers=[patience])


def load_checkpoint(
    directory: Path, precision: Literal["fp32", "bf16"] | None = None, device: torch.device | None = None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Load model and tokenizer for evaluation, by default as it is stored, and on the GPU if there is one.

    Raises:
        DataError: no checkpoint there, a damaged one, or one without a tokenizer.
    """
    check_checkpoint(directory)
    disable_progress_bar()
    set_verbosity_error()  # missing tensors are refused below
    dtype = DTYPES[precision] if precision is not None else "auto"
    try:
        found: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, trust_remote_code=False, output_loading_info=True
        )
    except Exception as error:  # configuration, safetensors and shapes each fail with types of their own
        raise DataError(f"cannot load checkpoint {directory}: {one_line(error)}; export it again") from error
    model: nn.Module = found[0]
    report: Mapping[str, Any] = found[1]
    if lacking := sorted(report["missing_keys"]):  # transformers would draw them at random
        raise DataError(f"{directory} lacks {len(lacking)} tensors, {lacking[0]} among them; export it again")
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return model.to(device).eval(), load_tokenizer(directory)


def text_batches(
    tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], sequence_length: int, batch_size: int, limit: int | None
) -> list[LongTensor]:
    """Cut all text of `paths`, or the embedded corpus's held-out part, into batches `[B, T + 1]`.

    Raises:
        ConfigError: a path does not exist.
        DataError: a file cannot be read, or there is less text than one sequence.
    """
    data = DataConfig(source="files" if paths else "embedded")
    chosen = documents(data, paths) if paths else split_documents(data, (), held_out=True)
    encoder = text_encoder(tokenizer, own_template(tokenizer))
    parts = list(encode(encoder, (document.text for document in chosen)))
    tokens_N = np.concatenate([np.empty(0, dtype=np.uint32), *parts])
    windows = PackedWindows(TokenFile(tokens_N, ""), sequence_length)
    if not len(windows):
        raise DataError(f"the text has {len(tokens_N)} tokens; give more, or lower --sequence-length={sequence_length}")
    return window_batches(windows, np.arange(len(windows))[:limit], batch_size)


def check_ids(model: nn.Module, largest: int) -> None:
    """Raise DataError if a tokenizer gives ids that a model does not embed."""
    num_rows = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    if largest >= num_rows:
        raise DataError(f"the tokenizer gives id {largest}, the model embeds {num_rows}; they do not belong together")


def text_metrics(model: nn.Module, batches: Sequence[LongTensor], subject: str) -> list[Metric]:
    """Measure held-out loss in nats per token, and its exponential."""
    check_ids(model, max(int(batch.max()) for batch in batches))
    try:
        loss = held_out_loss(model, batches)
    except IndexError as error:
        length = batches[0].shape[1] - 1
        remedy = "lower --sequence-length"
        raise ConfigError(f"the model cannot take {length} tokens at a time: {one_line(error)}; {remedy}") from error
    num_tokens = sum(batch[:, 1:].numel() for batch in batches)
    perplexity = math.exp(loss) if loss < 700 else math.inf
    values = {"loss": loss, "perplexity": perplexity, "tokens": float(num_tokens)}
    return [Metric(subject, name, value) for name, value in values.items()]


def task_groups(
    tasks: Sequence[str], suite: SuiteName | None, task_path: Path | None, num_fewshot: int | None = None
) -> list[TaskGroup]:
    """Return the groups of tasks to run, one after the other.

    Raises:
        ConfigError: lm-eval is not installed, or `task_path` or all tasks do not exist.
    """
    groups = [TaskGroup(tuple(tasks), num_fewshot)] if tasks else []
    groups += SUITES[suite] if suite else ()
    named = [task for group in groups for task in group.tasks]
    if twice := sorted({task for task in named if named.count(task) > 1}):
        raise ConfigError(
            f"{twice[0]} would be measured twice, and reported once; name it once, in --tasks or by --suite"
        )
    if groups:
        _lm_eval()
        known = _task_manager(named, task_path).all_tasks
        for task in sorted(set(named) - set(known)):
            log.warning("%s", _unknown(task))
    return groups


def task_metrics(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    group: TaskGroup,
    task_path: Path | None = None,
    batch_size: int | str = 8,
    limit: int | None = None,
    accelerator: Any = None,
) -> list[Metric]:
    """Run lm-eval tasks on the model's device; return what it reports, on ranks other than the first nothing.

    Args:
        task_path: Folder of task YAMLs, looked through before the ones that come with lm-eval.
        batch_size: Requests per forward pass, or `auto`.
        accelerator: That of the processes that share the requests; by default this one has all.

    Raises:
        ConfigError, DataError: lm-eval, a task or its data cannot be had.
    """
    lm_eval, errors = _lm_eval()
    manager = _task_manager(group.tasks, task_path)
    adapter = _adapter(model, tokenizer, batch_size, accelerator)
    try:
        if accelerator is not None:
            _load_everywhere(group, manager, errors)
        result = lm_eval.simple_evaluate(
            adapter,
            tasks=list(group.tasks),
            num_fewshot=group.num_fewshot,
            task_manager=manager,
            limit=limit,
            bootstrap_iters=BOOTSTRAP_SAMPLES,
            log_samples=False,
        )
    except errors as error:
        if accelerator is not None and isinstance(error, RuntimeError):  # of this process alone, such as its memory
            raise
        raise DataError(
            f"cannot run {', '.join(group.tasks)}: {one_line(error)}; check the task's data and the network, or set "
            f"HF_HOME to where the data has been downloaded"
        ) from error
    return _flatten(result) if result is not None else []


def _lm_eval() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return the library, and its errors for missing or too few data, for dataset scripts and for missing packages."""
    try:
        import lm_eval
        from datasets.exceptions import DatasetsError
    except ImportError as error:
        raise ConfigError(f"tasks and suites need lm-eval ({error}); {INSTALL}") from error
    return lm_eval, (OSError, ValueError, KeyError, AssertionError, RuntimeError, ImportError, DatasetsError)


def _load_everywhere(group: TaskGroup, manager: Any, errors: tuple[type[Exception], ...]) -> None:
    """Load the tasks, and raise in all processes if one fails; otherwise the others wait for its results."""
    from accelerate.utils import gather_object
    from lm_eval.tasks import get_task_dict

    failures = []
    try:
        get_task_dict(list(group.tasks), manager)
    except errors as error:
        failures.append(one_line(error))
    if failures := gather_object(failures):
        raise OSError(failures[0])


def _adapter(model: nn.Module, tokenizer: PreTrainedTokenizerBase, batch_size: int | str, accelerator: Any) -> Any:
    """Return the model as lm-eval takes it; lm-eval itself shares requests only where each process has a GPU."""
    from lm_eval.models.huggingface import HFLM

    # It warns of a model that is loaded already, as this one is on purpose.
    logging.getLogger("lm_eval.models.huggingface").setLevel(logging.ERROR)

    tokenizer.split_special_tokens = True  # a task's text holds no control tokens
    adapter = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    if accelerator is not None:
        adapter.accelerator = accelerator
        adapter._rank = accelerator.process_index
        adapter._world_size = accelerator.num_processes
    return adapter


def _task_manager(tasks: Sequence[str], task_path: Path | None) -> Any:
    """Return an index with one of the tasks at least; that of lm-eval's own only if a name is not local."""
    if task_path is not None and not task_path.is_dir():
        raise ConfigError(f"--task-path {task_path} is no folder; name one that holds task YAML files")
    include = str(task_path) if task_path else None
    manager = _index(include, False) if include else None
    if manager is None or not set(tasks) <= set(manager.all_tasks):
        manager = _index(include, True)
    if not set(tasks) & set(manager.all_tasks):
        raise _unknown(tasks[0])
    return manager


def _unknown(task: str) -> ConfigError:
    return ConfigError(f"unknown task {task!r}; see `lm-eval ls tasks`, or name your folder with --task-path")


@functools.cache
def _index(include: str | None, with_defaults: bool) -> Any:
    """Index task files, lm-eval's own ten thousand in 16 s."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=include, include_defaults=with_defaults)


def _flatten(result: dict[str, Any]) -> list[Metric]:
    found = {task: list(_numbers(values)) for task, values in result["results"].items()}
    groups = result.get("group_subtasks", {}).items()
    parts = {part for group, members in groups if found.get(group) for part in members}  # some groups have no mean
    shots = result.get("n-shot", {})
    return [
        Metric(task, name, value, stderr, shots.get(task), task in parts)
        for task, numbers in found.items()
        for name, value, stderr in numbers
    ]


def _numbers(values: dict[str, Any]) -> Iterator[tuple[str, float, float | None]]:
    """Yield the metrics of a task by name and filter, and their standard errors."""
    for key, value in values.items():
        name, _, filter_name = key.partition(",")
        if isinstance(value, int | float) and not name.endswith("_stderr") and not name.startswith("sample_"):
            error = values.get(f"{name}_stderr,{filter_name}")
            label = name if filter_name in ("", "none") else key
            yield label, float(value), float(error) if isinstance(error, int | float) else None


def main(config: EvaluateConfig) -> int:
    """Print what `evaluate` measures, also what it has measured before an error; return the exit code."""
    rows: list[Metric] = []
    try:
        evaluate(config, rows)
    finally:
        if rows:
            say(table(rows))
    return 0


def evaluate(config: EvaluateConfig, rows: list[Metric] | None = None) -> list[Metric]:
    """Evaluate one checkpoint: tasks and suites if given, text if given or if nothing else is.

    The files are written, and `rows` extended and returned, after each group of tasks. If a group fails, its tasks run
    one by one, and the error of those that cannot run comes after all others. Ranks other than the first have no rows.
    """
    for file, flag in ((config.json_file, "--json"), (config.markdown, "--markdown")):
        if file is not None and (file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK)):
            raise ConfigError(f"cannot write {flag} {file}; name a file in a folder that exists and is writable")
    groups = task_groups(config.tasks, config.suite, config.task_path, config.num_fewshot)
    accelerator = join_ranks()
    device, is_first = (None, True) if accelerator is None else (accelerator.device, accelerator.process_index == 0)
    model, tokenizer = load_checkpoint(config.checkpoint, config.precision, device)
    rows = [] if rows is None else rows
    if is_first and (config.text or not groups):
        batch_size = TEXT_BATCH if config.batch_size == "auto" else config.batch_size
        length = _sequence_length(model, config.sequence_length)
        batches = text_batches(tokenizer, config.text, length, batch_size, config.limit)
        rows += text_metrics(model, batches, "text" if config.text else "embedded held-out")
        _write(rows, config)
    flags = config.task_path, config.batch_size, config.limit, accelerator
    missing: dict[str, SpesError] = {}
    while groups:
        group = groups.pop(0)
        try:
            rows += task_metrics(model, tokenizer, group, *flags)
        except SpesError as error:
            if len(group.tasks) > 1:
                groups = [*(group._replace(tasks=(task,)) for task in group.tasks), *groups]
            else:
                missing[group.tasks[0]] = error
                if is_first and isinstance(error, DataError):  # an unknown one is in the log already
                    log.warning("%s; going on without it", error)
        if rows:
            _write(rows, config)
    if missing and is_first:  # torchrun ends the first process, which reports, when another fails
        reason = next(iter(missing.values()))
        raise DataError(f"no numbers of {', '.join(missing)}: {reason}") from reason
    return rows


def _sequence_length(model: nn.Module, chosen: int | None) -> int:
    """Return the tokens of a sequence of text.

    Raises:
        ConfigError: more are chosen than the checkpoint allows.
    """
    shape: Any = model.config
    most: int | None = getattr(shape.get_text_config(), "max_position_embeddings", None)
    if chosen is not None and most is not None and chosen > most:
        raise ConfigError(f"--sequence-length={chosen}: the checkpoint allows {most} tokens; lower it")
    return chosen or min(SEQUENCE_LENGTH, most or SEQUENCE_LENGTH)


def _write(rows: Sequence[Metric], config: EvaluateConfig) -> None:
    if config.json_file is not None:
        _write_file(as_json(rows), config.json_file, "--json")
    if config.markdown is not None:
        _write_file(table(rows), config.markdown, "--markdown")


def table(rows: Sequence[Metric]) -> str:
    """Return metrics as a Markdown table; of a group of tasks, the group's only."""
    cells = [
        (
            row.subject,
            "" if row.num_fewshot is None else str(row.num_fewshot),
            row.name,
            f"{row.value:.0f}" if row.value.is_integer() and abs(row.value) >= 2 else f"{row.value:.4f}",
            "" if row.stderr is None else f"± {row.stderr:.4f}",
        )
        for row in rows
        if not row.is_part
    ]
    return markdown_table([("task", "shots", "metric", "value", "standard error"), *cells], "<><>>")


def as_json(rows: Sequence[Metric]) -> str:
    """Return metrics as `{subject: {name: value, name_stderr: value, num_fewshot: value}}`."""
    nested: dict[str, dict[str, float | None]] = {}
    for row in rows:
        values = {row.name: row.value, f"{row.name}_stderr": row.stderr, "num_fewshot": row.num_fewshot}
        fields = {name: value for name, value in values.items() if value is not None}
        # JSON has no infinity.
        finite = {name: value if math.isfinite(value) else None for name, value in fields.items()}
        nested.setdefault(row.subject, {}).update(finite)
    return json.dumps(nested, indent=2)


def _write_file(text: str, file: Path, flag: str) -> None:
    try:
        file.write_text(f"{text}\n", encoding="utf-8")  # in place: it may be /dev/stdout, or a link
    except OSError as error:
        raise ConfigError(f"cannot write {flag} {file}: {error.strerror}; name another file") from error
