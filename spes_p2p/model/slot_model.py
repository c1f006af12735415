"""The whole model seen as shared parameters and expert slots.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from spes_p2p.dtensor import like
from spes_p2p.errors import DataError
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.frozen import WEIGHT_NAMES


class SlotModel:
    """A Hugging Face model whose experts modules are `ExpertBank`s, addressed by slot.

    Slot e is expert e of every layer. Its tensors go by the stock fused names, for instance
    `model.layers.0.mlp.experts.gate_up_proj`, with the shape `[O, I]` of that one expert. All dictionaries are sorted
    by name.

    Args:
        module: The model, its banks in place; what DDP wraps, what generates text.
        banks: The banks by their name within `module`.

    Attributes:
        module: As given.
        config: The model's stock configuration.
        num_slots: Experts per layer.
    """

    def __init__(self, module: PreTrainedModel, banks: Mapping[str, ExpertBank]) -> None:
        assert banks, "a model without experts has no slots"
        self.module = module
        self.config: PretrainedConfig = module.config
        self.num_slots = next(iter(banks.values())).num_experts
        self._banks = dict(banks)
        # A partial, so that a deep copy of the module guards itself.
        module.save_pretrained = functools.partial(_save_pretrained, module)  # type: ignore[method-assign]

    @property
    def claimed(self) -> tuple[int, ...]:
        """Slots trained here, ascending."""
        return next(iter(self._banks.values())).claimed

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Every parameter outside the experts by its stock name, tied ones once."""
        inside = tuple(f"{bank}." for bank in self._banks)
        return {name: p for name, p in sorted(self.module.named_parameters()) if not name.startswith(inside)}

    def slot_parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """Trainable parameters of one claimed slot.

        Raises:
            ValueError: the slot is not claimed.
        """
        if slot not in self.claimed:
            raise ValueError(f"slot {slot} is not claimed, only {list(self.claimed)} are; adopt it first")
        return dict(sorted(self._by_name({prefix: bank.parameters_of(slot) for prefix, bank in self._banks.items()})))

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of `shared_parameters`."""
        return {name: tuple(parameter.shape) for name, parameter in self.shared_parameters().items()}

    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one slot's tensors, the same for every slot."""
        return dict(sorted(self._by_name({prefix: bank.shapes for prefix, bank in self._banks.items()})))

    def slot_weights(self, slot: int) -> dict[str, Tensor]:
        """Detached fp32 copies of one slot's weights; of a frozen slot as its storage rounded them.

        Raises:
            ValueError: no such slot.
        """
        self._check_slot(slot)
        return dict(sorted(self._by_name({prefix: bank.weights_of(slot) for prefix, bank in self._banks.items()})))

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites the shared parameters in place, all or nothing.

        Raises:
            DataError: names or shapes differ from `shared_shapes`, or a value is not finite.
        """
        check_tensors("shared", tensors, self.shared_shapes())
        with torch.no_grad():
            for name, parameter in self.shared_parameters().items():
                parameter.copy_(like(tensors[name], parameter))

    def load_slot(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrites one slot, all or nothing: in place where it is claimed, rounded to storage where it is frozen.

        Raises:
            ValueError: no such slot.
            DataError: names or shapes differ from `slot_shapes`, or a value is not finite.
        """
        self._check_slot(slot)
        for prefix, weights_OI in self._by_bank(slot, tensors).items():
            self._banks[prefix].load(slot, weights_OI)

    def adopt(self, slot: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Makes a frozen slot trainable, from `weights` or else from what its storage kept.

        The new parameters need an optimizer group, and DDP a new wrapper.

        Raises:
            ValueError: no such slot, or it is claimed already.
            DataError: as `load_slot`.
        """
        self._check_slot(slot)
        if slot in self.claimed:
            raise ValueError(f"slot {slot} is claimed already; use load_slot to change its weights")
        by_bank = self._by_bank(slot, weights) if weights is not None else {}
        for prefix, bank in self._banks.items():
            bank.adopt(slot, by_bank.get(prefix))

    def release(self, slot: int) -> None:
        """Freezes a claimed slot, rounded to storage, all or nothing; take `slot_weights` first if exact ones matter.

        Raises:
            ValueError: the slot is not claimed.
            DataError: a weight is not finite, which not every storage can hold.
        """
        if slot not in self.claimed:
            raise ValueError(f"slot {slot} is not claimed, only {list(self.claimed)} are; nothing to release")
        check_tensors(f"slot-{slot}", self.slot_parameters(slot), self.slot_shapes())
        for bank in self._banks.values():
            bank.release(slot)

    def claimed_modules(self) -> list[nn.Module]:
        """Modules within which the claimed slots' parameters are used, one per layer."""
        return [bank.trained for bank in self._banks.values()]

    def gather(self) -> None:
        """Makes claimed slots' parameters whole again, new ones, where ranks keep parts; on all ranks."""
        for bank in self._banks.values():
            bank.gather()

    def stock_state_dict(self, slots: Mapping[int, Mapping[str, Tensor]] | None = None) -> dict[str, Tensor]:
        """A snapshot of the model under the stock class's own names, tied weights aliased as there.

        Args:
            slots: True weights by slot, to export in place of what this peer has. Frozen slots left out come as
                their storage rounded them.

        Returns:
            Copies on the CPU; experts fused to `[E, O, I]` fp32.

        Raises:
            ValueError, DataError: as `load_slot`.
        """
        given = {slot: self._checked(slot, tensors) for slot, tensors in (slots or {}).items()}
        inside = tuple(f"{bank}." for bank in self._banks)
        state: dict[str, Tensor] = {}
        copies: dict[int, Tensor] = {}
        for name, tensor in self.module.state_dict().items():
            if not name.startswith(inside):
                state[name] = copies.setdefault(tensor.data_ptr(), tensor.detach().to("cpu", copy=True))
        for prefix, bank in self._banks.items():
            state |= _fused(prefix, bank, given)
        return dict(sorted(state.items()))

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot {slot} is not in a model of {self.num_slots}; choose 0 to {self.num_slots - 1}")

    def _checked(self, slot: int, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        self._check_slot(slot)
        check_tensors(f"slot-{slot}", tensors, self.slot_shapes())
        return tensors

    def _by_bank(self, slot: int, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        checked = self._checked(slot, tensors)
        return {prefix: {name: checked[f"{prefix}.{name}"] for name in WEIGHT_NAMES} for prefix in self._banks}

    @staticmethod
    def _by_name(by_bank: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, Any]]:
        return [(f"{prefix}.{name}", value) for prefix, values in by_bank.items() for name, value in values.items()]


def check_tensors(what: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors that do not fit exactly.

    Raises:
        DataError: a name is missing or unknown, a shape or kind differs, or a value is not finite.
    """
    for name in sorted(shapes.keys() ^ tensors.keys()):
        fault = "is missing" if name in shapes else "is unknown"
        raise DataError(f"{what}: tensor {name} {fault}; use a version of the same model")
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != tuple(shapes[name]) or not tensor.is_floating_point():
            raise DataError(
                f"{what}: tensor {name} is {tensor.dtype} {list(tensor.shape)}, not floating point "
                f"{list(shapes[name])}; use a version of the same model"
            )
        if not torch.isfinite(tensor).all():
            raise DataError(f"{what}: tensor {name} has values that are not finite; discard this version")


def _fused(prefix: str, bank: ExpertBank, given: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """One layer's experts `[E, O, I]` by stock name, `given` slots over the bank's own."""
    fused = {name: torch.empty(bank.num_experts, *bank.shapes[name]) for name in WEIGHT_NAMES}
    for slot in range(bank.num_experts):
        own = {} if slot in given else bank.weights_of(slot)
        for name, weight_EOI in fused.items():
            weight_EOI[slot].copy_(given[slot][f"{prefix}.{name}"] if slot in given else own[name])
    return {f"{prefix}.{name}": weight_EOI for name, weight_EOI in fused.items()}


def _save_pretrained(
    module: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Stands in for `save_pretrained`, which would write a checkpoint without its frozen experts, and say nothing."""
    if state_dict is None:
        raise ValueError(
            f"save_pretrained({os.fspath(save_directory)!r}) would leave the experts out; pass "
            f"state_dict=slot_model.stock_state_dict(), or use spes_p2p.model.export.save_checkpoint"
        )
    type(module).save_pretrained(module, save_directory, is_main_process, state_dict, **options)
