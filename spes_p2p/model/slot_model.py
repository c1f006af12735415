"""The model as shared parameters and expert slots; a dense model has no slots.

Shape legend: E experts, O output features, I input features of one expert's weight.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import Layout
from spes_p2p.dtensor import distribute_like
from spes_p2p.errors import DataError
from spes_p2p.model.bank import ExpertBank
from spes_p2p.model.lora import AdapterBank

Bank = ExpertBank | AdapterBank
V = TypeVar("V")


class SlotModel:
    """A Hugging Face model whose experts modules are `ExpertBank`s, addressed by slot.

    Slot e is expert e of every layer. Its tensors have the stock fused names, for instance
    `model.layers.0.mlp.experts.gate_up_proj`, and the shape `[O, I]` of one expert. Dictionaries are sorted by name.
    Of a model with adapters (`model/adapted.py`), the adapters' factors are all there is: `shared_parameters` are those
    outside the slots, and a slot's tensors its expert's.

    Args:
        module: The model with its banks in place; DDP wraps it, and it generates text.
        banks: The banks by their name within `module`; none in a dense model.

    Attributes:
        config: The model's stock configuration.
        num_slots: Experts per layer; 0 of a dense model.
    """

    def __init__(self, module: PreTrainedModel, banks: Mapping[str, ExpertBank] | Mapping[str, AdapterBank]) -> None:
        self.module = module
        self.config: PretrainedConfig = module.config
        self.num_slots = next((bank.num_experts for bank in banks.values()), 0)
        self._banks: dict[str, Bank] = dict(banks)
        # A partial, so that a deep copy of the module guards itself.
        module.save_pretrained = functools.partial(_save_pretrained, module)  # type: ignore[method-assign]

    @property
    def claimed(self) -> tuple[int, ...]:
        """Trained slots, ascending."""
        return next((bank.claimed for bank in self._banks.values()), ())

    def shared_parameters(self) -> dict[str, nn.Parameter]:
        """Return every trained parameter outside the slots by its stock name, tied ones once."""
        inside = tuple(f"{bank}." for bank in self._banks)
        named = sorted(self.module.named_parameters())
        return {name: p for name, p in named if p.requires_grad and not name.startswith(inside)}

    def slot_parameters(self, slot: int) -> dict[str, nn.Parameter]:
        """Return the trainable parameters of one claimed slot."""
        assert slot in self.claimed, f"slot {slot} is not claimed, only {list(self.claimed)} are"
        return self._by_name(lambda bank: bank.parameters_of(slot))

    def shared_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of `shared_parameters`."""
        return {name: tuple(parameter.shape) for name, parameter in self.shared_parameters().items()}

    def layouts(self) -> dict[str, Layout]:
        """Return the layouts of the flat vectors of `shared` and of a `slot`."""
        return {"shared": Layout(self.shared_shapes()), "slot": Layout(self.slot_shapes())}

    def slot_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of one slot's tensors, equal for all slots."""
        return self._by_name(lambda bank: bank.shapes)

    def shapes(self) -> dict[int | None, dict[str, tuple[int, ...]]]:
        """Return the shapes by slot; under None the shared ones."""
        return {None: self.shared_shapes(), **dict.fromkeys(range(self.num_slots), self.slot_shapes())}

    def slot_weights(self, slot: int) -> dict[str, Tensor]:
        """Return detached fp32 copies of one slot's weights; a frozen slot's are rounded by its storage."""
        self._check_slot(slot)
        return self._by_name(lambda bank: bank.weights_of(slot))

    def weights(self, slot: int | None) -> Mapping[str, Tensor]:
        """Return the weights of one slot as `slot_weights` does; of None, the shared ones, detached."""
        if slot is not None:
            return self.slot_weights(slot)
        return {name: parameter.detach() for name, parameter in self.shared_parameters().items()}

    def load_shared(self, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite the shared parameters in place, all or nothing; `check_tensors` raises DataError."""
        check_tensors("shared", tensors, self.shared_shapes())
        with torch.no_grad():
            for name, parameter in self.shared_parameters().items():
                parameter.copy_(distribute_like(tensors[name], parameter))

    def load_slot(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Overwrite one slot, all or nothing: in place if it is claimed, rounded to storage if it is frozen.

        `check_tensors` raises DataError.
        """
        for prefix, weights_OI in self._by_bank(slot, tensors).items():
            self._banks[prefix].load(slot, weights_OI)

    def load_kept(self, slot: int, data: Tensor) -> None:
        """Overwrite one frozen slot from its kept form, uint8, which its storage takes as it is.

        It is the form of a flat vector of the tensors in the order of `slot_shapes`.
        """
        self._check_slot(slot)
        start, shapes = 0, self.slot_shapes()
        bank = next(iter(self._banks.values()))
        form = KeptForm(bank.frozen.precision, sum(map(math.prod, shapes.values())))
        for name, shape in shapes.items():
            prefix, _, part = name.rpartition(".")
            stop = start + math.prod(shape)
            self._banks[prefix].frozen.put_parts(slot, part, form.parts(data, start, stop), shape)
            start = stop

    def adopt(self, slot: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Make a frozen slot trainable, from `weights` or else from its stored weights.

        The new parameters need an optimizer group, and DDP a new wrapper.
        `check_tensors` raises DataError.
        """
        self._check_slot(slot)
        assert slot not in self.claimed, f"slot {slot} is claimed already"
        by_bank = self._by_bank(slot, weights) if weights is not None else {}
        for prefix, bank in self._banks.items():
            bank.adopt(slot, by_bank.get(prefix))

    def release(self, slot: int) -> None:
        """Freeze a claimed slot, rounded to storage, all or nothing; read `slot_weights` first if you need exact ones.

        `check_tensors` raises DataError.
        """
        assert slot in self.claimed, f"slot {slot} is not claimed, only {list(self.claimed)} are"
        check_tensors(f"slot-{slot}", self.slot_parameters(slot), self.slot_shapes())
        for bank in self._banks.values():
            bank.release(slot)

    def claimed_modules(self) -> list[nn.Module]:
        """Return the modules that use the claimed slots' parameters, one per layer."""
        return [bank.trained for bank in self._banks.values() if isinstance(bank, ExpertBank)]

    def gather(self) -> None:
        """Replace the claimed slots' sharded parameters by new, unsharded ones; call it on all ranks."""
        for bank in self._banks.values():
            assert isinstance(bank, ExpertBank), "adapters are not sharded"
            bank.gather()

    def _check_slot(self, slot: int) -> None:
        assert 0 <= slot < self.num_slots, f"slot {slot} is not in a model of {self.num_slots}"

    def _by_bank(self, slot: int, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        self._check_slot(slot)
        check_tensors(f"slot-{slot}", tensors, self.slot_shapes())
        return {
            prefix: {name: tensors[f"{prefix}.{name}"] for name in bank.shapes} for prefix, bank in self._banks.items()
        }

    def _by_name(self, read: Callable[[Bank], Mapping[str, V]]) -> dict[str, V]:
        """Return what `read` returns of every bank, under the stock names."""
        values = {f"{prefix}.{name}": v for prefix, bank in self._banks.items() for name, v in read(bank).items()}
        return dict(sorted(values.items()))


def check_tensors(what: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise DataError if names or shapes are not exactly these, or a value is not floating-point or not finite."""
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


def _save_pretrained(
    module: PreTrainedModel,
    save_directory: str | os.PathLike[str],
    is_main_process: bool = True,
    state_dict: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Replace `save_pretrained`, which would write a checkpoint without its frozen experts and without an error."""
    if state_dict is None:
        raise ValueError(
            f"save_pretrained({os.fspath(save_directory)!r}) would leave the experts out; use "
            f"spes_p2p.model.export.save_checkpoint"
        )
    type(module).save_pretrained(module, save_directory, is_main_process, state_dict, **options)
