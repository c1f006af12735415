"""Writes the model as an ordinary Hugging Face checkpoint, one slot in memory at a time.

Shape legend: I inner width of an expert, D model width.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from spes_p2p.config import FAMILIES
from spes_p2p.errors import ConfigError
from spes_p2p.fs import scratch_path
from spes_p2p.model.frozen import DOWN, GATE_UP
from spes_p2p.model.slot_model import SlotModel, check_tensors

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
"""A checkpoint's weights; of one in several files, what maps each tensor to its file."""
GENERATION = "generation_config.json"
SHARD_BYTES = 2**25
"""Slots share a file up to this size, so that a small model is one file; a larger slot has a file of its own."""
IN_MEMORY = "mlp"
"""A layer's module of router and experts, in all stock classes; on disk it is `Family.block`."""


def save_checkpoint(
    model: SlotModel,
    directory: str | Path,
    read: Callable[[int | None], Mapping[str, Tensor]] | None = None,
    *,
    tokenizer: Any = None,
    card: str = "",
) -> int:
    """Write config, weights in fp32 and tokenizer, as `AutoModelForCausalLM.from_pretrained(directory)` loads them.

    The checkpoint is written beside `directory` and renamed: a reader sees the old one, the new one, or for the
    moment between two renames none, but never half of one. Returns the number of parameters.

    Args:
        model: The model's configuration and shapes; may be an `outline`.
        read: Returns one slot's weights, or for None the shared ones, under the names of `SlotModel`; by default the
            model's own. Called once for each, in order; what it returns is dropped before memory holds another file's.
        card: Text of the model card, README.md; none is written if it is empty.

    Raises:
        ConfigError: `directory` exists and is not a checkpoint.
        DataError: names, shapes or values of what `read` returns do not fit the model.
    """
    with written_folder(directory, "config.json", tokenizer, card) as scratch:
        shards = Shards(scratch, SHARD_BYTES)
        for slot, shapes in model.shapes().items():
            shards.make_room(4 * sum(map(prod, shapes.values())))  # before memory holds the slot too
            found = (read or model.weights)(slot)
            check_tensors("shared" if slot is None else f"slot-{slot}", found, shapes)
            in_fp32 = {name: tensor.float() for name, tensor in found.items()}
            shards.add(on_disk_names(model.config.model_type, slot, in_fp32))
            del found, in_fp32
        shards.close()
        write_settings(model, scratch, tokenizer)
    return shards.num_params


def write_settings(model: SlotModel, folder: Path, tokenizer: Any) -> None:
    """Write a checkpoint's config.json and generation_config.json."""
    model.config.architectures = [type(model.module).__name__]
    model.config.save_pretrained(folder)
    if model.module.generation_config is not None:
        generation = copy.copy(model.module.generation_config)
        if generation.eos_token_id is None and tokenizer is not None:
            generation.eos_token_id = tokenizer.eos_token_id  # otherwise no text that the model writes ends
        # Not `save_pretrained`, which refuses what some released checkpoints say.
        (folder / GENERATION).write_text(generation.to_json_string(), encoding="utf-8")


class Shards:
    """Writes tensors to files, and their index if the files are several.

    Args:
        max_bytes: Size of a file, unless what was added at once is larger.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.num_params = 0
        self._folder = folder
        self._max_bytes = max_bytes
        self._pending: dict[str, Tensor] = {}
        self._files: list[dict[str, int]] = []

    def make_room(self, num_bytes: int) -> None:
        """Write what is in memory, unless so many bytes more fit its file."""
        if self._pending and sum(each.nbytes for each in self._pending.values()) + num_bytes > self._max_bytes:
            self._flush()

    def add(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Write tensors with their names, together with earlier or later ones."""
        for name, tensor in tensors:
            self._pending[name] = tensor.contiguous()
            self.num_params += tensor.numel()

    def _flush(self) -> None:
        save_file(self._pending, self._folder / f"{len(self._files)}.safetensors", metadata={"format": "pt"})
        self._files.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self._pending = {}

    def close(self) -> None:
        """Write what is left, give the files their names, and write the index."""
        self._flush()
        count = len(self._files)
        names = [f"model-{n:05}-of-{count:05}.safetensors" if count > 1 else WEIGHTS for n in range(1, count + 1)]
        for number, name in enumerate(names):
            (self._folder / f"{number}.safetensors").rename(self._folder / name)
        if count > 1:
            where = {tensor: name for name, held in zip(names, self._files, strict=True) for tensor in held}
            total = sum(size for held in self._files for size in held.values())
            index = {"metadata": {"total_size": total, "total_parameters": self.num_params}, "weight_map": where}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def written_folder(directory: str | Path, marker: str, tokenizer: Any, card: str) -> Iterator[Path]:
    """Yield a new folder beside `directory`, which then replaces it; tokenizer and model card are saved in it.

    Args:
        directory: Folder to write; a folder there must have the file `marker`, or be empty.
        marker: File that all such folders have.

    Raises:
        ConfigError: `directory` exists and is of another kind.
    """
    target = Path(directory).resolve()
    if target.exists() and not (target / marker).is_file() and not (target.is_dir() and not any(target.iterdir())):
        kind = "checkpoint" if marker == "config.json" else "adapter"
        raise ConfigError(f"{target} exists and is no {kind}; choose another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    with scratch_path(target) as scratch:
        scratch.mkdir()
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        yield scratch
        if card:
            (scratch / "README.md").write_text(card, encoding="utf-8")
        apply_umask(scratch)
        _replace(target, scratch)


def on_disk_names(model_type: str, slot: int | None, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors under the names of stock checkpoints, where each expert's matrices are tensors."""
    family = FAMILIES[model_type]
    gate, up, down = family.matrices
    for name, tensor in tensors.items():
        stored = name.replace(f".{IN_MEMORY}.", f".{family.block}.")
        if slot is None:
            yield stored, tensor.contiguous()
            continue
        prefix, _, kind = stored.rpartition(".")
        if kind == GATE_UP:
            gate_ID, up_ID = tensor.contiguous().chunk(2)
            yield f"{prefix}.{slot}.{gate}.weight", gate_ID
            yield f"{prefix}.{slot}.{up}.weight", up_ID
        else:
            assert kind == DOWN
            yield f"{prefix}.{slot}.{down}.weight", tensor.contiguous()


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
