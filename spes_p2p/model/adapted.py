"""Builds a model with adapters over a frozen base, and draws the adapters of a run's start.

Shape legend: E experts, r rank; of any weight, O and I are the output and input features.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from spes_p2p.config import TARGETS, RunConfig
from spes_p2p.model.bank import ExpertBank, is_stock_experts
from spes_p2p.model.build import check_attention, draw_buffers, meta_model
from spes_p2p.model.kernels import LoopKernel
from spes_p2p.model.lora import A, AdapterBank, FrozenEmbedding, FrozenHead, FrozenLinear, frozen
from spes_p2p.model.slot_model import SlotModel


class Base(Protocol):
    """The frozen weights under adapters."""

    def tensors(self, slot: int | None) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights of one slot `[O, I]`, or for None the shared ones, by the names of `SlotModel`.

        Memory holds one at a time. They are in any floating-point precision.
        """


def build_adapted(
    run: RunConfig,
    base: Base,
    *,
    vocab_size: int,
    storage: str,
    attention: str = "sdpa",
    device: torch.device | str = "cpu",
) -> SlotModel:
    """Build a run's model with adapters, which have no values yet, on the CPU.

    The base goes tensor by tensor to its storage: matrices of layers in `storage`, the embedding and the head in bf16
    unless `storage` is `fp32`, and norms, biases and routers in fp32.

    Raises:
        ConfigError: `storage` or `attention` is unknown or cannot be used here.
        DataError: the base is damaged.
    """
    check_attention(attention, torch.device(device))
    model = _skeleton(run, vocab_size, storage, attention)
    module, wide = model.module, torch.float32 if storage == "fp32" else torch.bfloat16
    for name, tensor in base.tensors(None):
        owner, _, key = name.rpartition(".")
        _load_shared(module.get_submodule(owner), key, tensor, wide)
    for slot in range(run.model.num_experts):
        for name, weight_OI in base.tensors(slot):
            owner, _, key = name.rpartition(".")
            bank: Any = module.get_submodule(owner)
            bank.frozen.put(slot, {key: weight_OI})
    draw_buffers(module)
    module.tie_weights(recompute_mapping=False)
    return model


def outline_adapted(run: RunConfig, vocab_size: int) -> SlotModel:
    """Return a run's model with adapters without its base: its configuration, and names and shapes of the factors."""
    return _skeleton(run, vocab_size, "fp32", "sdpa", "meta")


def _skeleton(run: RunConfig, vocab_size: int, storage: str, attention: str, device: str = "cpu") -> SlotModel:
    """Return the model with factors in place, and a base that is still to be loaded."""
    adapter = run.adapter
    assert adapter is not None
    module = meta_model(run.model, vocab_size, run.data.sequence_length, attention)
    layers = [
        (name, child) for name, child in module.named_modules() if name != "lm_head" and isinstance(child, nn.Linear)
    ]
    banks: dict[str, AdapterBank] = {}
    for name, child in [(name, child) for name, child in module.named_modules() if is_stock_experts(child)]:
        if "experts" in adapter.targets:
            banks[name] = AdapterBank(child, adapter, storage, device)
            module.set_submodule(name, banks[name])
        else:
            module.set_submodule(name, ExpertBank(child, (), storage, LoopKernel()))
    for name, child in layers:
        target = TARGETS[name.rpartition(".")[2]]
        own = adapter if target in adapter.targets else None
        module.set_submodule(name, FrozenLinear(child, storage, own, device))
    table: Any = module.get_input_embeddings()
    embedding = FrozenEmbedding(table.num_embeddings, table.embedding_dim, device="meta")
    embedding.scale = getattr(table, "scalar_embed_scale", 1.0)
    module.set_input_embeddings(embedding)
    head: Any = module.get_output_embeddings()
    module.set_output_embeddings(FrozenHead(head.in_features, head.out_features, bias=False, device="meta"))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(parameter.requires_grad and ".lora_" in name)
    return SlotModel(module, banks if adapter.experts == "slots" else {})


def _load_shared(owner: nn.Module, key: str, tensor: Tensor, wide: torch.dtype) -> None:
    """Give a module one tensor of the base."""
    if isinstance(owner, FrozenLinear) and key == "weight":
        owner.load(tensor)
        return
    is_table = isinstance(owner, nn.Embedding | FrozenHead)
    owner.register_parameter(key, frozen(tensor.to(wide if is_table else torch.float32, copy=True)))


def drawn_factor(name: str, shape: tuple[int, ...], seed: int, expert: int | None = None) -> Tensor:
    """Return a factor `[r, I]` or `[O, r]` at a run's start, each from a seed of its own: B is 0, and A uniform.

    `[E, r, I]` and `[E, O, r]` are drawn expert by expert.

    Source: peft's Kaiming initialisation with a = sqrt(5), which is uniform within 1 / sqrt(I).
    """
    if len(shape) == 3:
        return torch.stack([drawn_factor(name, shape[1:], seed, each) for each in range(shape[0])])
    if not name.endswith(A):
        return torch.zeros(shape)
    place = name if expert is None else f"{name} {expert}"
    digest = hashlib.sha256(f"{seed} {place}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
    bound = shape[1] ** -0.5
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)


class InitialFactors:
    """The factors of a run's start, by slot, drawn when they are asked for; the model may be an outline."""

    def __init__(self, model: SlotModel, seed: int) -> None:
        self._shapes = model.shapes()
        self._seed = seed

    def read(self, slot: int | None) -> dict[str, Tensor]:
        """Return the factors of one slot, or for None the shared ones, under the names of `SlotModel`."""
        return {name: drawn_factor(name, shape, self._seed, slot) for name, shape in self._shapes[slot].items()}
