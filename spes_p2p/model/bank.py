"""The experts of one layer, a few of them trained here and the rest frozen.

Shape legend: T tokens, D model width, K chosen experts per token, E experts, R = T * K routed rows,
O output features, I input features of one expert's weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from spes_p2p.errors import ConfigError
from spes_p2p.model.frozen import FrozenStore
from spes_p2p.model.kernels import Kernel

WEIGHT_NAMES = ("gate_up_proj", "down_proj")
_STOCK_LAYOUT = {"is_transposed": False, "has_bias": False, "is_concatenated": True, "has_gate": True}


class ExpertBank(nn.Module):
    """Drop-in for the `...Experts` module of a stock Hugging Face model.

    Claimed experts are leaf parameters, one pair per expert, so that an optimizer can take and drop them one slot at a
    time; the others sit in a `FrozenStore`. Gradients flow through frozen experts, but none is computed for them.
    Rebuild a DDP wrapper after `adopt` and `release`: it does not see parameters that come later, and ranks would
    drift apart without an error.

    Args:
        stock: The experts module to replace; its `gate_up_proj` is `[E, 2I, D]`, its `down_proj` `[E, D, I]`.
        claimed: Experts to train.
        storage: Precision of the frozen experts, `fp32` or `bf16`.
        kernel: How the grouped products are computed.

    Raises:
        ConfigError: `stock` lays its weights out in another way, or `storage` is unknown.
    """

    def __init__(self, stock: nn.Module, claimed: Iterable[int], storage: str, kernel: Kernel) -> None:
        super().__init__()
        check_layout(stock)
        weights_EOI: dict[str, Tensor] = {name: getattr(stock, name).detach() for name in WEIGHT_NAMES}
        first_EOI = weights_EOI[WEIGHT_NAMES[0]]
        self.num_experts = first_EOI.shape[0]
        self.shapes = {name: tuple(weight_EOI.shape[1:]) for name, weight_EOI in weights_EOI.items()}
        self.act_fn: Callable[[Tensor], Tensor] = stock.act_fn  # type: ignore[assignment]
        self.kernel = kernel
        self.frozen = FrozenStore(storage, first_EOI.device)
        self.trained = nn.ModuleDict()
        self._claimed: list[int] = []
        to_claim = set(claimed)
        for slot in range(self.num_experts):
            weights_OI = {name: weight_EOI[slot] for name, weight_EOI in weights_EOI.items()}
            if slot in to_claim:
                self.trained[str(slot)] = self._parameters_of(weights_OI)
            else:
                self.frozen.put(slot, weights_OI)
        self._rank_experts()

    @property
    def claimed(self) -> tuple[int, ...]:
        """Experts trained here, ascending."""
        return tuple(self._claimed)

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """Trainable weights `[O, I]` of one claimed expert, by stock name."""
        params = self.trained[str(slot)]
        return {name: getattr(params, name) for name in WEIGHT_NAMES}

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Detached fp32 copies `[O, I]` of one expert's weights, claimed or frozen."""
        if slot in self.frozen:
            return self.frozen.get(slot, torch.float32)
        params = self.parameters_of(slot)
        return {name: param.detach().to(torch.float32, copy=True) for name, param in params.items()}

    def load(self, slot: int, weights_OI: Mapping[str, Tensor]) -> None:
        """Overwrites one expert, in place where it is claimed."""
        if slot in self.frozen:
            self.frozen.put(slot, weights_OI)
            return
        with torch.no_grad():
            for name, param in self.parameters_of(slot).items():
                param.copy_(weights_OI[name])

    def adopt(self, slot: int, weights_OI: Mapping[str, Tensor] | None = None) -> None:
        """Turns a frozen expert into a claimed one, starting from `weights_OI` or else from the stored weights."""
        assert slot in self.frozen, f"slot {slot} is claimed already"
        self.trained[str(slot)] = self._parameters_of(weights_OI or self.weights_of(slot))
        self.frozen.remove(slot)
        self._rank_experts()

    def release(self, slot: int) -> None:
        """Turns a claimed expert into a frozen one, rounded to the storage's precision."""
        assert slot in self._claimed, f"slot {slot} is not claimed"
        self.frozen.put(slot, self.parameters_of(slot))
        del self.trained[str(slot)]
        self._rank_experts()

    def forward(self, hidden_states_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """Weighted sum over each token's chosen experts, `[T, D]` in the dtype of `hidden_states_TD`."""
        num_tokens, top_k = top_k_index_TK.shape
        x_TD = hidden_states_TD.to(_compute_dtype(hidden_states_TD))
        rank_R, order_R = torch.sort(self._rank_E[top_k_index_TK.reshape(-1)], stable=True)
        ends = torch.bincount(rank_R, minlength=self.num_experts).cumsum(0).tolist()
        token_R = order_R // top_k

        num_claimed = len(self._claimed)
        split = ends[num_claimed - 1] if num_claimed else 0
        parts_RD = []
        if num_claimed:  # even without rows: starved experts must get zero gradients
            claimed_ends, weights = ends[:num_claimed], [self.parameters_of(slot) for slot in self._claimed]
            parts_RD.append(self._swiglu(x_TD.index_select(0, token_R[:split]), claimed_ends, weights))
        if num_claimed < self.num_experts:
            frozen_ends = [end - split for end in ends[num_claimed:]]
            x_RD = x_TD.index_select(0, token_R[split:])
            parts_RD.append(self._swiglu(x_RD, frozen_ends, self._frozen_weights()))
        y_RD = torch.cat(parts_RD) * top_k_weights_TK.reshape(-1)[order_R].unsqueeze(-1)

        # Back to token order and a sum over K, not index_add: that rounds in bf16 and is not deterministic on GPUs.
        inverse_R = torch.empty_like(order_R)
        inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        y_TKD = y_RD.index_select(0, inverse_R).view(num_tokens, top_k, y_RD.shape[-1])
        return y_TKD.sum(1).to(hidden_states_TD.dtype)

    def _swiglu(self, x_RD: Tensor, ends: list[int], weights: Sequence[Mapping[str, Tensor]]) -> Tensor:
        """Each row through its own expert, `[R, D]`."""
        gate_up, down = ([weights_OI[name] for weights_OI in weights] for name in WEIGHT_NAMES)
        gate_RI, up_RI = self.kernel.grouped_linear(x_RD, ends, gate_up).chunk(2, dim=-1)
        return self.kernel.grouped_linear(self.act_fn(gate_RI) * up_RI, ends, down)

    def _frozen_weights(self) -> list[dict[str, Tensor]]:
        """Stored weights of the frozen experts, ascending."""
        slots = (slot for slot in range(self.num_experts) if slot in self.frozen)
        return [{name: self.frozen.stored(slot, name) for name in WEIGHT_NAMES} for slot in slots]

    def _parameters_of(self, weights_OI: Mapping[str, Tensor]) -> nn.ParameterDict:
        return nn.ParameterDict(
            {
                name: nn.Parameter(weights_OI[name].detach().to(self.frozen.device, torch.float32, copy=True))
                for name in WEIGHT_NAMES
            }
        )

    def _rank_experts(self) -> None:
        """Ranks claimed experts first, so that their rows come as one block."""
        self._claimed = sorted(int(key) for key in self.trained)
        # DDP pairs parameters across ranks by their order and all slots have equal shapes: ranks whose slots came in
        # another order would silently mix them up.
        for slot in self._claimed:
            self.trained[str(slot)] = self.trained.pop(str(slot))
        frozen = [slot for slot in range(self.num_experts) if slot in self.frozen]
        rank_E = torch.empty(self.num_experts, dtype=torch.long)
        rank_E[self._claimed + frozen] = torch.arange(self.num_experts)
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
        ConfigError: the weights are transposed, interleaved, have biases or no gate.
    """
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
