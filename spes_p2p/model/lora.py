"""Low-rank adapters over a frozen base: linear layers, and the experts of a layer, one routed row after the other.

Shape legend: T tokens, D model width, K chosen experts per token, E experts, N rows of one expert, I inner width of an
expert, G = 2 * I its gate and up features, r rank; of any weight, O and I are the output and input features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spes_p2p.config import AdapterConfig
from spes_p2p.model.bank import check_layout, compute_dtype
from spes_p2p.model.frozen import DOWN, ENCODERS, GATE_UP, WEIGHT_NAMES, FrozenStore, Weight, moved
from spes_p2p.model.kernels import Routing, buffers_of, swiglu, swiglu_back, zeros_to_sum

A, B = "lora_A", "lora_B"
"""Names of the factors, as in peft."""
FACTORS = tuple(f"{weight}.{factor}" for weight in WEIGHT_NAMES for factor in (A, B))
"""Names of an expert's factors, in their order."""


class FrozenProduct(torch.autograd.Function):
    """`x W^T` of a stored weight, which is made dense for the product alone, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return F.linear(x, weight.dense(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        return (grads[0] @ ctx.weight.dense(grads[0].dtype) if ctx.needs_input_grad[0] else None), None


class FrozenLinear(nn.Module):
    """A linear layer whose weight is frozen in few bits, with an adapter or without."""

    def __init__(self, stock: nn.Linear, storage: str, adapter: AdapterConfig | None, device: str = "cpu") -> None:
        super().__init__()
        self.out_features = stock.out_features
        self.in_features = stock.in_features
        self._encode = ENCODERS[storage]
        self._weight: Weight | None = None
        self._scale = 0.0
        self.bias = None if stock.bias is None else frozen(torch.empty(stock.out_features, device=device))
        if adapter is not None:
            self._scale = adapter.scale
            for name, shape in ((A, (adapter.rank, self.in_features)), (B, (self.out_features, adapter.rank))):
                self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device)))

    def load(self, weight_OI: Tensor) -> None:
        """Take the base's weight, rounded to storage."""
        assert tuple(weight_OI.shape) == (self.out_features, self.in_features)
        self._weight = self._encode(weight_OI)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x W^T + b + scale (x A^T) B^T` in the dtype of the computation."""
        assert self._weight is not None, "the base has not been loaded"
        x = x.to(compute_dtype(x))
        y = FrozenProduct.apply(x, self._weight)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if self._scale:
            low = F.linear(x, getattr(self, A).to(x.dtype))
            y = y + self._scale * F.linear(low, getattr(self, B).to(x.dtype))
        return y

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the stored weight, too; a change of dtype does not change its precision."""
        super()._apply(fn, recurse)
        if self._weight is not None:
            self._weight = moved(self._weight, fn(torch.empty(0)).device)
        return self


class FrozenEmbedding(nn.Embedding):
    """An embedding that is frozen, perhaps in fewer bits; the residual stream begins in fp32 as without adapters."""

    scale = 1.0
    """Factor of the embedded tokens: Gemma's."""

    def forward(self, input: Tensor) -> Tensor:
        return F.embedding(input, self.weight).float() * self.scale


class FrozenHead(nn.Linear):
    """An output head whose weight is frozen, perhaps in fewer bits than the products."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(compute_dtype(x)))


def frozen(tensor: Tensor) -> nn.Parameter:
    """Return a parameter that is not trained."""
    return nn.Parameter(tensor, requires_grad=False)


# ---------------------------------------------------------------------- experts


class RoutedAdapters(torch.autograd.Function):
    """Each token's weighted sum over its experts' outputs, `[T, D]`, with an adapter on each expert.

    Products with the factors are made per routed row: no sum of a weight and its adapter is ever in memory. The
    backward pass keeps gate and up of every row, the input of every token, and the base in its stored precision.

    Source: LoRA (https://arxiv.org/abs/2106.09685), in the loop of `LoopKernel`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        base: Sequence[Mapping[str, Weight]],
        scale: float,
        routing: Routing,
        x_TD: Tensor,
        scores_TK: Tensor,
        *factors: Tensor,
    ) -> Tensor:
        """Compute the sums.

        `base` has each expert's stored weights. The factors come one expert's after the other, in the order of
        `FACTORS`; all of an expert's are trained, or none.
        """
        dtype = x_TD.dtype
        scores_R1 = scores_TK.reshape(-1, 1)[routing.order_R].to(dtype)
        inner = base[0][DOWN].shape[1]
        gate_up_RG = x_TD.new_empty(len(scores_R1), 2 * inner)
        y_TD = zeros_to_sum(x_TD)
        buffers = buffers_of(routing, x_TD, x_TD.shape[1], inner)
        for expert, (token_N, scores_N1, gate_up_NG) in routing.split(routing.token_R, scores_R1, gate_up_RG):
            row_ND, hidden_NI = (buffer[: len(token_N)] for buffer in buffers)
            gate_a, gate_b, down_a, down_b = (factor.to(dtype) for factor in factors[_place(expert)])
            torch.index_select(x_TD, 0, token_N, out=row_ND)
            torch.mm(row_ND, base[expert][GATE_UP].dense(dtype).t(), out=gate_up_NG)
            gate_up_NG.addmm_(row_ND @ gate_a.t(), gate_b.t(), alpha=scale)
            swiglu(gate_up_NG, scores_N1, hidden_NI)
            torch.mm(hidden_NI, base[expert][DOWN].dense(dtype).t(), out=row_ND)
            row_ND.addmm_(hidden_NI @ down_a.t(), down_b.t(), alpha=scale)
            y_TD.index_add_(0, token_N, row_ND.to(y_TD.dtype))
        ctx.base, ctx.scale = base, scale
        # The routing too, as in `RoutedExperts`: a pass that is computed again may route a token otherwise.
        ctx.save_for_backward(gate_up_RG, scores_R1, x_TD, *routing.tensors, *factors)
        return y_TD.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_RG, scores_R1, x_TD, *saved = ctx.saved_tensors
        routing, factors = Routing.unpack(saved)
        base, scale, grad_TD = ctx.base, ctx.scale, grads[0].contiguous()
        dtype, inner = grad_TD.dtype, gate_up_RG.shape[1] // 2
        grad_x_TD, grad_scores_R1 = zeros_to_sum(grad_TD), torch.empty_like(scores_R1)
        # Zeros for an expert without rows: DDP would wait forever for a missing gradient.
        is_trained = ctx.needs_input_grad[-len(factors) :]
        sums = [torch.zeros_like(each) if own else None for each, own in zip(factors, is_trained, strict=True)]
        buffers = buffers_of(routing, grad_TD, grad_TD.shape[1], inner, inner, 2 * inner)
        by_expert = routing.split(routing.token_R, scores_R1, gate_up_RG, grad_scores_R1)
        for expert, (token_N, scores_N1, gate_up_NG, grad_scores_N1) in by_expert:
            row_ND, grad_NI, hidden_NI, grad_gate_up_NG = (buffer[: len(token_N)] for buffer in buffers)
            gate_a, gate_b, down_a, down_b = (factor.to(dtype) for factor in factors[_place(expert)])
            gate_a_sum, gate_b_sum, down_a_sum, down_b_sum = sums[_place(expert)]
            torch.index_select(grad_TD, 0, token_N, out=row_ND)
            low_Nr = (row_ND @ down_b).mul_(scale)
            torch.mm(row_ND, base[expert][DOWN].dense(dtype), out=grad_NI)
            grad_NI.addmm_(low_Nr, down_a)
            swiglu_back(gate_up_NG, scores_N1, grad_NI, hidden_NI, grad_gate_up_NG, grad_scores_N1)
            if down_a_sum is not None and down_b_sum is not None:
                down_a_sum.copy_(low_Nr.t() @ hidden_NI)
                down_b_sum.copy_((row_ND.t() @ (hidden_NI @ down_a.t())).mul_(scale))
            torch.index_select(x_TD, 0, token_N, out=row_ND)
            low_Nr = (grad_gate_up_NG @ gate_b).mul_(scale)
            if gate_a_sum is not None and gate_b_sum is not None:
                gate_a_sum.copy_(low_Nr.t() @ row_ND)
                gate_b_sum.copy_((grad_gate_up_NG.t() @ (row_ND @ gate_a.t())).mul_(scale))
            torch.mm(grad_gate_up_NG, base[expert][GATE_UP].dense(dtype), out=row_ND)
            row_ND.addmm_(low_Nr, gate_a)
            grad_x_TD.index_add_(0, token_N, row_ND.to(grad_x_TD.dtype))
        return (None, None, None, grad_x_TD.to(dtype), grad_scores_R1[:, 0][routing.place_TK], *sums)


def _place(expert: int) -> slice:
    """Return where an expert's factors are among those of all."""
    return slice(expert * len(FACTORS), (expert + 1) * len(FACTORS))


class AdapterBank(nn.Module):
    """The experts of one layer: a frozen base, and an adapter on each expert.

    In a run whose adapters belong to slots it is addressed by slot as an `ExpertBank` is, and the weights of a slot are
    its factors, of which those of claimed slots are trained. Otherwise the factors of all experts are parameters of the
    module, stacked to `[E, O, I]`.

    Attributes:
        frozen: The base, for all experts.
        shapes: Shapes of an expert's factors, in the order of `FACTORS`.
        claimed: Trained slots, ascending.
    """

    def __init__(self, stock: nn.Module, adapter: AdapterConfig, storage: str, device: str = "cpu") -> None:
        super().__init__()
        check_layout(stock)
        self.num_experts = getattr(stock, GATE_UP).shape[0]
        self.frozen = FrozenStore(storage)
        self.claimed: tuple[int, ...] = ()
        self.shapes: dict[str, tuple[int, ...]] = {}
        for weight in WEIGHT_NAMES:
            num_out, num_in = getattr(stock, weight).shape[1:]
            self.shapes |= {f"{weight}.{A}": (adapter.rank, num_in), f"{weight}.{B}": (num_out, adapter.rank)}
        self._scale = adapter.scale
        self._slots = nn.ModuleList()
        if adapter.experts == "slots":
            for _ in range(self.num_experts):
                factors = nn.ParameterList(torch.empty(shape, device=device) for shape in self.shapes.values())
                self._slots.append(factors.requires_grad_(False))
            return
        for weight in WEIGHT_NAMES:
            shapes = {factor: (self.num_experts, *self.shapes[f"{weight}.{factor}"]) for factor in (A, B)}
            stacked = {factor: torch.empty(shape, device=device) for factor, shape in shapes.items()}
            self.add_module(weight, nn.ParameterDict(stacked))

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """Return the factors of one slot by name; those of a claimed slot are trained."""
        return dict(zip(self.shapes, self._slots[slot].parameters(), strict=True))

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Return detached copies of one slot's factors."""
        return {name: factor.detach().clone() for name, factor in self.parameters_of(slot).items()}

    def load(self, slot: int, weights: Mapping[str, Tensor]) -> None:
        """Overwrite one slot's factors in place."""
        with torch.no_grad():
            for name, factor in self.parameters_of(slot).items():
                factor.copy_(weights[name])

    def adopt(self, slot: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Make a frozen slot trainable, from `weights` or else from its factors."""
        if weights is not None:
            self.load(slot, weights)
        self._slots[slot].requires_grad_(True)
        self.claimed = tuple(sorted((*self.claimed, slot)))

    def release(self, slot: int) -> None:
        """Freeze a claimed slot."""
        self._slots[slot].requires_grad_(False)
        self._slots[slot].zero_grad()
        self.claimed = tuple(each for each in self.claimed if each != slot)

    def forward(self, hidden_states_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """Sum each token's chosen experts by their weights: `[T, D]` in the dtype of `hidden_states_TD`."""
        routing = Routing.of(top_k_index_TK, self.num_experts)
        x_TD = hidden_states_TD.to(compute_dtype(hidden_states_TD))
        base = [{name: self.frozen.stored(slot, name) for name in WEIGHT_NAMES} for slot in range(self.num_experts)]
        by_expert: Iterable[Iterable[Tensor]] = (factors.parameters() for factors in self._slots)
        if not len(self._slots):
            by_expert = zip(*(self.get_parameter(name).unbind() for name in self.shapes), strict=True)
        factors = [factor for own in by_expert for factor in own]
        y_TD = RoutedAdapters.apply(base, self._scale, routing, x_TD, top_k_weights_TK, *factors)
        return y_TD.to(hidden_states_TD.dtype)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the base too; a change of dtype does not change the stored precision."""
        super()._apply(fn, recurse)
        self.frozen.to(fn(torch.empty(0)).device)
        return self
