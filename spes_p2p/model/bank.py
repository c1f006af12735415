"""The experts of one layer, a few of them trained here and the rest frozen.

Shape legend: T tokens, D model width, K chosen experts per token, E experts, O output features, I input features of
one expert's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.dtensor import like, whole
from spes_p2p.errors import ConfigError
from spes_p2p.model.frozen import WEIGHT_NAMES, FrozenStore, Weight
from spes_p2p.model.kernels import Kernel, RoutedExperts, Routing

_STOCK_LAYOUT = {"is_transposed": False, "has_bias": False, "is_concatenated": True, "has_gate": True}


class ClaimedExperts(nn.Module):
    """The experts of a bank that are trained here. FSDP splits and gathers them as one, around `forward`.

    Args:
        slots: Parameters of each, by stock name.
    """

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
        """As `RoutedExperts.forward`."""
        claimed = [getattr(params, name) for params in self.slots.values() for name in WEIGHT_NAMES]
        return RoutedExperts.apply(kernel, routing, frozen, x_TD, scores_TK, *claimed)


class ExpertBank(nn.Module):
    """Drop-in for the `...Experts` module of a stock Hugging Face model.

    Claimed experts are leaf parameters, one pair per expert, so that an optimizer can take and drop them one slot at a
    time; the others sit in a `FrozenStore`. Gradients flow through frozen experts, but none is computed for them.
    Rebuild a DDP wrapper after `adopt` and `release`: it does not see parameters that come later, and ranks would
    drift apart without an error.

    A new bank is on the CPU and has no weights: `load` every expert, whole or one tensor at a time.

    Args:
        stock: The experts module to stand in for, of which only the shapes are read: its `gate_up_proj` is
            `[E, 2I, D]`, its `down_proj` `[E, D, I]`.
        claimed: Experts to train.
        storage: Precision of the frozen experts, see `FrozenStore`.
        kernel: How the grouped products are computed.

    Raises:
        ConfigError: `stock` is made in another way, or this machine cannot use `storage`.
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
        """Experts trained here, ascending."""
        return tuple(self._claimed)

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """Trainable weights `[O, I]` of one claimed expert, by stock name."""
        params = self.trained.slots[str(slot)]
        return {name: getattr(params, name) for name in WEIGHT_NAMES}

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Detached fp32 copies `[O, I]` of one expert's weights, claimed or frozen."""
        if slot in self.frozen:
            return self.frozen.get(slot, torch.float32)
        params = self.parameters_of(slot)
        return {name: whole(param.detach()).to(torch.float32, copy=True) for name, param in params.items()}

    def load(self, slot: int, weights_OI: Mapping[str, Tensor]) -> None:
        """Overwrites one expert, or those of its weights that are given, in place where it is claimed.

        Raises:
            ValueError: a value is not finite and the storage cannot hold it; nothing was changed.
        """
        if str(slot) not in self.trained.slots:
            self.frozen.put(slot, weights_OI)
            return
        params = self.parameters_of(slot)
        with torch.no_grad():
            for name, weight_OI in weights_OI.items():
                params[name].copy_(like(weight_OI, params[name]))

    def adopt(self, slot: int, weights_OI: Mapping[str, Tensor] | None = None) -> None:
        """Turns a frozen expert into a claimed one, starting from `weights_OI` or else from the stored weights."""
        assert str(slot) not in self.trained.slots, f"slot {slot} is claimed already"
        weights_OI = weights_OI or self.weights_of(slot)
        self.frozen.remove(slot)
        self.trained.slots[str(slot)] = self._new_parameters()
        self.load(slot, weights_OI)
        self._rank_experts()

    def release(self, slot: int) -> None:
        """Turns a claimed expert into a frozen one, rounded to the storage's precision.

        Raises:
            ValueError: as `load`.
        """
        assert str(slot) in self.trained.slots, f"slot {slot} is not claimed"
        self.frozen.put(slot, self.parameters_of(slot))
        del self.trained.slots[str(slot)]
        self._rank_experts()

    def gather(self) -> None:
        """Makes the claimed experts' parameters whole again, new ones, where ranks keep parts; on all ranks."""
        claimed = {slot: self.weights_of(slot) for slot in self._claimed}
        self.trained = ClaimedExperts({slot: self._new_parameters() for slot in claimed})
        for slot, weights_OI in claimed.items():
            self.load(slot, weights_OI)

    def forward(self, hidden_states_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """Weighted sum over each token's chosen experts, `[T, D]` in the dtype of `hidden_states_TD`."""
        routing = Routing.of(self._rank_E[top_k_index_TK], self.num_experts)
        frozen = [{name: self.frozen.stored(slot, name) for name in WEIGHT_NAMES} for slot in self._frozen]
        x_TD = hidden_states_TD.to(_compute_dtype(hidden_states_TD))
        return self.trained(self.kernel, routing, frozen, x_TD, top_k_weights_TK).to(hidden_states_TD.dtype)

    def _new_parameters(self) -> nn.ParameterDict:
        """Uninitialised parameters of one expert."""
        return nn.ParameterDict(
            {name: nn.Parameter(torch.empty(shape, device=self.frozen.device)) for name, shape in self.shapes.items()}
        )

    def _rank_experts(self) -> None:
        """Ranks claimed experts first, so that their rows come as one block."""
        slots = self.trained.slots
        self._claimed = sorted(int(key) for key in slots)
        # DDP pairs parameters across ranks by their order and all slots have equal shapes: ranks whose slots came in
        # another order would silently mix them up.
        for slot in self._claimed:
            slots[str(slot)] = slots.pop(str(slot))
        self._frozen = [slot for slot in range(self.num_experts) if slot not in self._claimed]
        rank_E = torch.empty(self.num_experts, dtype=torch.long)
        rank_E[self._claimed + self._frozen] = torch.arange(self.num_experts)
        self._rank_E = rank_E.to(self.frozen.device)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Carries what is no parameter along on device moves; a change of dtype leaves the stored precision alone."""
        super()._apply(fn, recurse)
        device = fn(self._rank_E).device
        self._rank_E = self._rank_E.to(device)
        self.frozen.to(device)
        return self


def is_stock_experts(module: nn.Module) -> bool:
    """Whether `module` is a stock experts module: fused three-dimensional weights under the usual names."""
    weights = [getattr(module, name, None) for name in WEIGHT_NAMES]
    return all(isinstance(weight, Tensor) and weight.dim() == 3 for weight in weights)


def check_layout(stock: nn.Module) -> None:
    """Refuses experts modules that a bank cannot stand in for, such as gpt-oss's.

    Raises:
        ConfigError: the weights are transposed, interleaved, have biases or no gate, or the activation is not SiLU.
    """
    probe = torch.linspace(-4, 4, 9)
    if not torch.equal(stock.act_fn(probe), nn.functional.silu(probe)):  # type: ignore[operator]
        raise ConfigError(f"{type(stock).__name__} has the activation {stock.act_fn}; only SiLU is supported")
    for flag, expected in _STOCK_LAYOUT.items():
        if getattr(stock, flag, expected) != expected:
            raise ConfigError(
                f"{type(stock).__name__}.{flag}={not expected} is not supported; choose model.family from olmoe, "
                f"qwen3_moe, mixtral"
            )


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else that of the activations."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
