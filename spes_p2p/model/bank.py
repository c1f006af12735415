"""The experts of one layer: this peer trains the claimed ones and keeps the rest frozen.

Shape legend: T tokens, D model width, K chosen experts per token, E experts, O output features, I input features of
one expert's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.config import FAMILIES
from spes_p2p.dtensor import distribute_like, full_tensor
from spes_p2p.errors import ConfigError
from spes_p2p.model.frozen import WEIGHT_NAMES, FrozenStore, Weight
from spes_p2p.model.kernels import Kernel, RoutedExperts, Routing

_STOCK_LAYOUT = {"is_transposed": False, "has_bias": False, "is_concatenated": True, "has_gate": True}


class ClaimedExperts(nn.Module):
    """A bank's trained experts, by slot; FSDP shards and gathers them as one unit around `forward`."""

    def __init__(self, slots: Mapping[int, nn.ParameterDict]) -> None:
        super().__init__()
        self.slots = nn.ModuleDict({str(slot): params for slot, params in slots.items()})

    def forward(
        self,
        kernel: Kernel,
        routing: Routing,
        frozen: Sequence[Mapping[str, Weight]],
        x_TD: Tensor,
        scores_TK: Tensor,
    ) -> Tensor:
        """See `RoutedExperts.forward`."""
        claimed = [getattr(params, name) for params in self.slots.values() for name in WEIGHT_NAMES]
        return RoutedExperts.apply(kernel, routing, frozen, x_TD, scores_TK, *claimed)


class ExpertBank(nn.Module):
    """Drop-in replacement for the `...Experts` module of a stock Hugging Face model.

    Claimed experts are leaf parameters, one pair per expert, so that an optimizer can add and remove one slot at a
    time; the others are in a `FrozenStore`. Gradients flow through frozen experts, but none is computed for them.
    Rebuild a DDP wrapper after `adopt` and `release`: DDP does not see parameters added later, and ranks would
    diverge without an error.

    A new bank is on the CPU and has no weights: `load` every expert, whole or one tensor at a time.

    Args:
        stock: Experts module to replace; only its shapes are read: `gate_up_proj` is `[E, 2I, D]`, `down_proj`
            `[E, D, I]`.

    Raises:
        ConfigError: the layout of `stock` is not supported, or this machine cannot use `storage`.
    """

    def __init__(self, stock: nn.Module, claimed: Iterable[int], storage: str, kernel: Kernel) -> None:
        super().__init__()
        check_layout(stock)
        stock_shapes = {name: tuple(getattr(stock, name).shape) for name in WEIGHT_NAMES}
        self.num_experts = stock_shapes[WEIGHT_NAMES[0]][0]
        self.shapes = {name: shape[1:] for name, shape in stock_shapes.items()}
        self.kernel = kernel
        self.frozen = FrozenStore(storage)
        self.trained = ClaimedExperts({slot: self._new_parameters() for slot in claimed})
        self._rank_experts()

    @property
    def claimed(self) -> tuple[int, ...]:
        """Trained experts, ascending."""
        return tuple(self._claimed)

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """Return the trainable weights `[O, I]` of one claimed expert, by stock name."""
        params = self.trained.slots[str(slot)]
        return {name: getattr(params, name) for name in WEIGHT_NAMES}

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Return detached fp32 copies `[O, I]` of one expert's weights, claimed or frozen."""
        if slot in self.frozen:
            return self.frozen.get(slot, torch.float32)
        params = self.parameters_of(slot)
        return {name: full_tensor(param.detach()).to(torch.float32, copy=True) for name, param in params.items()}

    def load(self, slot: int, weights_OI: Mapping[str, Tensor]) -> None:
        """Overwrite one expert, or only the given weights of it; in place if it is claimed."""
        if str(slot) not in self.trained.slots:
            self.frozen.put(slot, weights_OI)
            return
        params = self.parameters_of(slot)
        with torch.no_grad():
            for name, weight_OI in weights_OI.items():
                params[name].copy_(distribute_like(weight_OI, params[name]))

    def adopt(self, slot: int, weights_OI: Mapping[str, Tensor] | None = None) -> None:
        """Make a frozen expert trainable, from `weights_OI` or else from its stored weights."""
        assert str(slot) not in self.trained.slots, f"slot {slot} is claimed already"
        weights_OI = weights_OI or self.weights_of(slot)
        if slot in self.frozen:  # else it was never loaded
            self.frozen.remove(slot)
        self.trained.slots[str(slot)] = self._new_parameters()
        self.load(slot, weights_OI)
        self._rank_experts()

    def release(self, slot: int) -> None:
        """Freeze a claimed expert, rounded to the storage's precision."""
        assert str(slot) in self.trained.slots, f"slot {slot} is not claimed"
        self.frozen.put(slot, self.parameters_of(slot))
        del self.trained.slots[str(slot)]
        self._rank_experts()

    def gather(self) -> None:
        """Replace the claimed experts' sharded parameters by new, unsharded ones; call it on all ranks."""
        claimed = {slot: self.weights_of(slot) for slot in self._claimed}
        self.trained = ClaimedExperts({slot: self._new_parameters() for slot in claimed})
        for slot, weights_OI in claimed.items():
            self.load(slot, weights_OI)

    def forward(self, hidden_states_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """Sum each token's chosen experts by their weights: `[T, D]` in the dtype of `hidden_states_TD`."""
        if self.kernel.takes_all:
            self.frozen.pack()
        routing = Routing.of(self._rank_E[top_k_index_TK], self.num_experts)
        frozen = [{name: self.frozen.stored(slot, name) for name in WEIGHT_NAMES} for slot in self._frozen]
        x_TD = hidden_states_TD.to(compute_dtype(hidden_states_TD))
        return self.trained(self.kernel, routing, frozen, x_TD, top_k_weights_TK).to(hidden_states_TD.dtype)

    def _new_parameters(self) -> nn.ParameterDict:
        return nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, device=self.frozen.device)) for name, shape in self.shapes.items()}
        )

    def _rank_experts(self) -> None:
        """Give the claimed experts the first ranks, so that their rows form one block."""
        slots = self.trained.slots
        self._claimed = sorted(int(key) for key in slots)
        # DDP matches parameters across ranks by their order, and all slots have equal shapes: different orders on two
        # ranks would silently average different experts.
        for slot in self._claimed:
            slots[str(slot)] = slots.pop(str(slot))
        self._frozen = [slot for slot in range(self.num_experts) if slot not in self._claimed]
        rank_E = torch.empty(self.num_experts, dtype=torch.long)
        rank_E[self._claimed + self._frozen] = torch.arange(self.num_experts)
        self._rank_E = rank_E.to(self.frozen.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move tensors that are not parameters too; a change of dtype does not change the stored precision."""
        super()._apply(fn, recurse)
        device = fn(self._rank_E).device
        self._rank_E = self._rank_E.to(device)
        self.frozen.to(device)
        return self


def is_stock_experts(module: nn.Module) -> bool:
    """Tell whether `module` is a stock experts module: fused three-dimensional weights under the stock names."""
    weights = [getattr(module, name, None) for name in WEIGHT_NAMES]
    is_biased = hasattr(module, "gate_up_proj_bias")  # gpt-oss's, which no bank replaces
    return not is_biased and all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def check_layout(stock: nn.Module) -> None:
    """Raise ConfigError if a bank cannot replace an experts module, such as gpt-oss's."""
    probe = torch.linspace(-4, 4, 9)
    if not torch.equal(stock.act_fn(probe), nn.functional.silu(probe)):  # type: ignore[operator]
        raise ConfigError(f"{type(stock).__name__} has the activation {stock.act_fn}; only SiLU is supported")
    for flag, expected in _STOCK_LAYOUT.items():
        if getattr(stock, flag, expected) != expected:
            raise ConfigError(
                f"{type(stock).__name__}.{flag}={not expected} is not supported; choose model.family from "
                f"{', '.join(name for name, family in FAMILIES.items() if not family.is_dense)}"
            )


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return autocast's dtype if autocast is on, else the activations' dtype."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
