"""Writes the model as an ordinary Hugging Face checkpoint."""

from __future__ import annotations

import contextlib
import copy
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.utils import logging as hf_logging

from spes_p2p.errors import ConfigError
from spes_p2p.fs import scratch_path
from spes_p2p.model.slot_model import check_tensors


def save_checkpoint(
    config: PretrainedConfig, state_dict: Mapping[str, Tensor], directory: str | Path, tokenizer: Any = None
) -> None:
    """Write config, safetensors and tokenizer, so that `AutoModelForCausalLM.from_pretrained(directory)` loads them.

    The checkpoint is written beside `directory` and renamed: a reader sees the old one, the new one, or for the
    moment between two renames none, but never half of one.

    Args:
        config: The model's stock configuration.
        state_dict: Every weight under the stock class's names, as `SlotModel.stock_state_dict` returns them.
        directory: Folder of the checkpoint; replaces an older checkpoint there.
        tokenizer: Tokenizer to save with the model.

    Raises:
        ConfigError: `directory` exists and is not a checkpoint.
        DataError: names, shapes or values of `state_dict` do not fit `config`.
    """
    target = Path(directory).resolve()
    if target.exists() and not (target / "config.json").is_file() and not _is_empty(target):
        raise ConfigError(f"{target} exists and is no checkpoint; choose another directory")
    with torch.device("meta"):
        stock = AutoModelForCausalLM.from_config(copy.deepcopy(config))
    shapes = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    check_tensors("checkpoint", state_dict, shapes)
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_path(target) as scratch:
        with _no_progress_bar():
            stock.save_pretrained(scratch, state_dict=dict(state_dict))
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        apply_umask(scratch)
        _replace(target, scratch)


def _replace(target: Path, scratch: Path) -> None:
    """Rename `scratch` to `target`; the old target moves away first, since no folder can be renamed over a full one."""
    if not target.exists():
        scratch.rename(target)
        return
    old = scratch.with_suffix(".old")
    target.rename(old)
    scratch.rename(target)
    shutil.rmtree(old)


def apply_umask(folder: Path) -> None:
    """Give a folder's files the access rights that the umask gave the folder; safetensors leaves its files at 0600."""
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


@contextlib.contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Keep `save_pretrained` from drawing on the terminal."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()
