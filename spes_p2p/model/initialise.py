"""Stock initial weights from a seed, one tensor at a time.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.frozen import WEIGHT_NAMES

DRAW_BLOCK = 16
"""Numbers that PyTorch's normal_ draws at a time, on CPUs, for a tensor of as many or more."""


def initialise(module: PreTrainedModel, seed: int, banks: Mapping[str, ExpertBank] | None = None) -> None:
    """Gives a model on the meta device its stock initial weights, on the CPU.

    Equal seeds give equal weights, with banks or without. Draws come from torch's CPU generator; the caller's random
    state is left as it was.

    Args:
        module: The stock model.
        seed: Seed of the weights.
        banks: By name, what takes an experts module's weights in its stead; that module stays on the meta device.
    """
    banks = banks or {}
    state = torch.Generator().manual_seed(seed).get_state()
    tied = set(module.all_tied_weights_keys)
    for name, child in module.named_modules():
        tensors = (*child.named_parameters(recurse=False), *child.named_buffers(recurse=False))
        if tied.issuperset(f"{name}.{key}" for key, _ in tensors):  # also where there is nothing to initialise
            continue
        with _drawing_from(state), torch.no_grad():
            if name in banks:
                _fill(banks[name], module, child)
            else:
                child.to_empty(device="cpu", recurse=False)
                module._init_weights(child)
    module.tie_weights(recompute_mapping=False)


@contextlib.contextmanager
def _drawing_from(state: Tensor) -> Iterator[None]:
    """Has torch's CPU generator draw from `state`, which is brought up to date, and go on as before afterwards."""
    generator = torch.random.default_generator
    outer = generator.get_state()
    generator.set_state(state)
    try:
        yield
    finally:
        state.copy_(generator.get_state())
        generator.set_state(outer)


def _fill(bank: ExpertBank, module: PreTrainedModel, experts: nn.Module) -> None:
    """Draws the weights of an experts module as stock does, and loads them into a bank.

    Stock draws all experts' tensors of one name at once. Drawing them one by one gives the same numbers where each is a
    multiple of `DRAW_BLOCK`, as in any model of use; of others, all of one name are drawn at once.
    """
    for name, on_meta_EOI in [(name, getattr(experts, name)) for name in WEIGHT_NAMES]:
        num_experts, *shape = on_meta_EOI.shape
        at_once = num_experts if on_meta_EOI[0].numel() % DRAW_BLOCK else 1
        drawn_EOI = nn.Parameter(torch.empty(at_once, *shape))  # one for all: heaps of holes are not given back
        setattr(experts, name, drawn_EOI)
        for start in range(0, num_experts, at_once):
            module._init_weights(experts)
            for slot, weight_OI in enumerate(drawn_EOI.detach(), start):
                bank.load(slot, {name: weight_OI})
        setattr(experts, name, on_meta_EOI)
