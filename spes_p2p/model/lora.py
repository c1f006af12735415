"""Low-rank adapters over a frozen base: linear layers, and the experts of a layer, one routed row after the other.

Shape legend: T tokens, D model width, K chosen experts per token, E experts, N rows of one expert, I inner width of an
expert, G = 2 * I its gate and up features, r rank; of any weight, O and I are the output and input features.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
    """A linear layer whose weight is frozen in few bits, with an adapter or without.

    Args:
        stock: Layer to replace; only its shapes are read. Its bias is frozen, too.
        storage: Precision of the weight, see `FrozenStore`.
        adapter: Rank, scale and trained factors; None adds none.
        device: Device of the factors.
    """

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
            _add_adapter(self, (self.out_features, self.in_features), adapter, device)

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


def _add_adapter(module: nn.Module, shape: tuple[int, int], adapter: AdapterConfig, device: str) -> None:
    """Register the factors of a weight `(O, I)`."""
    num_out, num_in = shape
    for name, own in ((A, (adapter.rank, num_in)), (B, (num_out, adapter.rank))):
        is_trained = name == B or adapter.factors == "both"
        module.register_parameter(name, nn.Parameter(torch.empty(own, device=device), requires_grad=is_trained))


def adapt_router(router: nn.Module, adapter: AdapterConfig, device: str = "cpu") -> None:
    """Give a router's weight `[E, D]` an adapter; the sum is small, and made before each forward pass."""
    base_ED: Any = router.weight
    del router._parameters["weight"]
    router.base = base_ED
    _add_adapter(router, tuple(base_ED.shape), adapter, device)
    router.register_forward_pre_hook(functools.partial(_sum_router, adapter.scale))
    router.register_forward_hook(_drop_sum)


def _sum_router(scale: float, router: Any, _: Any) -> None:
    router.weight = router.base + scale * getattr(router, B) @ getattr(router, A)


def _drop_sum(router: Any, *_: Any) -> None:
    del router.weight


# ---------------------------------------------------------------------- experts


def factor_shapes(shapes: Mapping[str, tuple[int, ...]], rank: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of an expert's factors, from those of its weights `(O, I)`."""
    return {
        f"{weight}.{factor}": (rank, num_in) if factor == A else (num_out, rank)
        for weight, (num_out, num_in) in shapes.items()
        for factor in (A, B)
    }


@dataclass(frozen=True)
class _Place:
    """Where a factor is: a trained tensor by its position, perhaps a row of a stacked one, or a frozen tensor."""

    position: int = -1
    row: int | None = None
    tensor: Tensor | None = None

    def read(self, trained: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        if self.tensor is not None:
            return self.tensor.to(dtype)
        found = trained[self.position]
        return (found if self.row is None else found[self.row]).to(dtype)

    def add(self, grads: Sequence[Tensor], grad: Tensor) -> None:
        """Put a gradient where the factor's is; each factor has one."""
        found = grads[self.position]
        (found if self.row is None else found[self.row]).copy_(grad)

    @property
    def is_trained(self) -> bool:
        return self.tensor is None


@dataclass(frozen=True)
class AdaptedExperts:
    """What `RoutedAdapters` reads beside tensors.

    Attributes:
        base: Stored weights by name, for each expert.
        factors: Places of the factors by name, for each expert.
        scale: Factor of the products B A.
    """

    base: Sequence[Mapping[str, Weight]]
    factors: Sequence[Mapping[str, _Place]]
    scale: float

    def factor(self, expert: int, weight: str, trained: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return A and B of one weight of an expert."""
        places = self.factors[expert]
        a, b = (places[f"{weight}.{factor}"].read(trained, dtype) for factor in (A, B))
        return a, b


class RoutedAdapters(torch.autograd.Function):
    """Each token's weighted sum over its experts' outputs, `[T, D]`, with an adapter on each expert.

    Products with the factors are made per routed row: no sum of a weight and its adapter is ever in memory. The
    backward pass keeps gate and up of every row, the input of every token, and the base in its stored precision.

    Source: LoRA (https://arxiv.org/abs/2106.09685), in the loop of `LoopKernel`.
    """

    @staticmethod
    def forward(
        ctx: Any, experts: AdaptedExperts, routing: Routing, x_TD: Tensor, scores_TK: Tensor, *trained: Tensor
    ) -> Tensor:
        """Compute the sums.

        Args:
            ctx: Autograd's context.
            experts: Base and places of the factors.
            routing: Assignment of the tokens.
            x_TD: Hidden states of the tokens.
            scores_TK: Routing weights.
            *trained: Factors that get gradients.
        """
        scale, dtype = experts.scale, x_TD.dtype
        scores_R1 = scores_TK.reshape(-1, 1)[routing.order_R].to(dtype)
        inner = experts.base[0][DOWN].shape[1]
        gate_up_RG = x_TD.new_empty(len(scores_R1), 2 * inner)
        y_TD = zeros_to_sum(x_TD)
        buffers = buffers_of(routing, x_TD, x_TD.shape[1], inner)
        for expert, (token_N, scores_N1, gate_up_NG) in routing.split(routing.token_R, scores_R1, gate_up_RG):
            row_ND, hidden_NI = (buffer[: len(token_N)] for buffer in buffers)
            (gate_a, gate_b), (down_a, down_b) = (
                experts.factor(expert, weight, trained, dtype) for weight in WEIGHT_NAMES
            )
            torch.index_select(x_TD, 0, token_N, out=row_ND)
            torch.mm(row_ND, experts.base[expert][GATE_UP].dense(dtype).t(), out=gate_up_NG)
            gate_up_NG.addmm_(row_ND @ gate_a.t(), gate_b.t(), alpha=scale)
            swiglu(gate_up_NG, scores_N1, hidden_NI)
            torch.mm(hidden_NI, experts.base[expert][DOWN].dense(dtype).t(), out=row_ND)
            row_ND.addmm_(hidden_NI @ down_a.t(), down_b.t(), alpha=scale)
            y_TD.index_add_(0, token_N, row_ND.to(y_TD.dtype))
        ctx.experts = experts
        # The routing too, as in `RoutedExperts`: a pass that is computed again may route a token otherwise.
        ctx.save_for_backward(gate_up_RG, scores_R1, x_TD, *routing.tensors, *trained)
        return y_TD.to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_RG, scores_R1, x_TD, *saved = ctx.saved_tensors
        routing, trained = Routing.unpack(saved)
        experts, grad_TD = ctx.experts, grads[0].contiguous()
        dtype, scale, inner = grad_TD.dtype, experts.scale, gate_up_RG.shape[1] // 2
        grad_x_TD, grad_scores_R1 = zeros_to_sum(grad_TD), torch.empty_like(scores_R1)
        factors = [torch.zeros_like(factor) for factor in trained]
        buffers = buffers_of(routing, grad_TD, grad_TD.shape[1], inner, inner, 2 * inner)
        by_expert = routing.split(routing.token_R, scores_R1, gate_up_RG, grad_scores_R1)
        for expert, (token_N, scores_N1, gate_up_NG, grad_scores_N1) in by_expert:
            row_ND, grad_NI, hidden_NI, grad_gate_up_NG = (buffer[: len(token_N)] for buffer in buffers)
            (gate_a, gate_b), (down_a, down_b) = (
                experts.factor(expert, weight, trained, dtype) for weight in WEIGHT_NAMES
            )
            places = experts.factors[expert]
            torch.index_select(grad_TD, 0, token_N, out=row_ND)
            low_Nr = (row_ND @ down_b).mul_(scale)
            torch.mm(row_ND, experts.base[expert][DOWN].dense(dtype), out=grad_NI)
            grad_NI.addmm_(low_Nr, down_a)
            swiglu_back(gate_up_NG, scores_N1, grad_NI, hidden_NI, grad_gate_up_NG, grad_scores_N1)
            _add_factors(factors, places, DOWN, row_ND, low_Nr, hidden_NI, down_a, scale)
            torch.index_select(x_TD, 0, token_N, out=row_ND)
            low_Nr = (grad_gate_up_NG @ gate_b).mul_(scale)
            _add_factors(factors, places, GATE_UP, grad_gate_up_NG, low_Nr, row_ND, gate_a, scale)
            torch.mm(grad_gate_up_NG, experts.base[expert][GATE_UP].dense(dtype), out=row_ND)
            row_ND.addmm_(low_Nr, gate_a)
            grad_x_TD.index_add_(0, token_N, row_ND.to(grad_x_TD.dtype))
        return (None, None, grad_x_TD.to(dtype), grad_scores_R1[:, 0][routing.place_TK], *factors)


def _add_factors(
    grads: Sequence[Tensor],
    places: Mapping[str, _Place],
    weight: str,
    grad_NO: Tensor,
    low_Nr: Tensor,
    input_NI: Tensor,
    a_rI: Tensor,
    scale: float,
) -> None:
    """Put the gradients of a weight's trained factors into `grads`.

    Args:
        grads: Gradients of the trained factors.
        places: Of this expert's factors.
        weight: The weight.
        grad_NO: Gradient of its output.
        low_Nr: That, times B and the scale.
        input_NI: Its input.
        a_rI: Its factor A.
        scale: Factor of the product B A.
    """
    if (place := places[f"{weight}.{A}"]).is_trained:
        place.add(grads, low_Nr.t() @ input_NI)
    if (place := places[f"{weight}.{B}"]).is_trained:
        place.add(grads, (grad_NO.t() @ (input_NI @ a_rI.t())).mul_(scale))


class AdapterBank(nn.Module):
    """The experts of one layer: a frozen base, and an adapter on each expert.

    In a run whose adapters belong to slots it is addressed by slot as an `ExpertBank` is, and the weights of a slot are
    its factors: those of claimed slots are trained, the others are frozen. Otherwise the factors of all experts are
    parameters of the module, stacked to `[E, O, I]`.

    Args:
        stock: Experts module to replace; only its shapes are read.
        adapter: Rank, scale, trained factors and their owner.
        storage: Precision of the base, see `FrozenStore`.
        device: Device of the factors.

    Attributes:
        frozen: The base, for all experts.
        seeded: Factors that stay as the run's seed draws them, by expert.
    """

    def __init__(self, stock: nn.Module, adapter: AdapterConfig, storage: str, device: str = "cpu") -> None:
        super().__init__()
        check_layout(stock)
        base = {name: tuple(getattr(stock, name).shape[1:]) for name in WEIGHT_NAMES}
        self.num_experts = getattr(stock, GATE_UP).shape[0]
        self.frozen = FrozenStore(storage)
        self._scale = adapter.scale
        whole = factor_shapes(base, adapter.rank)
        is_trained = {name: adapter.factors == "both" or name.endswith(B) for name in whole}
        self.shapes = {name: shape for name, shape in whole.items() if is_trained[name]}
        self.seeded_shapes = {name: shape for name, shape in whole.items() if not is_trained[name]}
        self.seeded: dict[int, dict[str, Tensor]] = {}
        self._untrained: dict[int, dict[str, Tensor]] = {}
        self.trained = nn.ModuleDict()
        self._is_stacked = adapter.experts == "shared"
        if self._is_stacked:
            shapes = {name: (self.num_experts, *shape) for name, shape in self.shapes.items()}
            for name, parameters in _parameters(shapes, torch.device(device)).items():
                self.add_module(name, parameters)

    # ------------------------------------------------------------------ slots

    @property
    def claimed(self) -> tuple[int, ...]:
        """Trained slots, ascending."""
        return tuple(sorted(map(int, self.trained)))

    def parameters_of(self, slot: int) -> dict[str, nn.Parameter]:
        """Return the trainable factors of one claimed slot by name."""
        modules = self.trained[str(slot)]
        return {name: modules.get_parameter(name) for name in self.shapes}

    def weights_of(self, slot: int) -> dict[str, Tensor]:
        """Return detached fp32 copies of one slot's factors."""
        found: Mapping[str, Tensor] = self._untrained.get(slot) or self.parameters_of(slot)
        return {name: tensor.detach().to(torch.float32, copy=True) for name, tensor in found.items()}

    def load(self, slot: int, weights: Mapping[str, Tensor]) -> None:
        """Overwrite one slot's factors; in place if it is claimed."""
        if str(slot) not in self.trained:
            device = self.frozen.device
            self._untrained[slot] = {name: tensor.detach().to(device, copy=True) for name, tensor in weights.items()}
            return
        with torch.no_grad():
            for name, parameter in self.parameters_of(slot).items():
                parameter.copy_(weights[name])

    def adopt(self, slot: int, weights: Mapping[str, Tensor] | None = None) -> None:
        """Make a frozen slot trainable, from `weights` or else from its factors."""
        assert str(slot) not in self.trained, f"slot {slot} is claimed already"
        weights = weights or self.weights_of(slot)
        self._untrained.pop(slot, None)
        self.trained[str(slot)] = _parameters(self.shapes, self.frozen.device)
        self.load(slot, weights)
        for key in map(str, self.claimed):  # DDP matches parameters across ranks by their order
            self.trained[key] = self.trained.pop(key)

    def release(self, slot: int) -> None:
        """Freeze a claimed slot."""
        weights = self.weights_of(slot)
        del self.trained[str(slot)]
        self.load(slot, weights)

    # ------------------------------------------------------------------ computing

    def forward(self, hidden_states_TD: Tensor, top_k_index_TK: Tensor, top_k_weights_TK: Tensor) -> Tensor:
        """Sum each token's chosen experts by their weights: `[T, D]` in the dtype of `hidden_states_TD`."""
        routing = Routing.of(top_k_index_TK, self.num_experts)
        x_TD = hidden_states_TD.to(compute_dtype(hidden_states_TD))
        factors, trained = self._places()
        base = [{name: self.frozen.stored(slot, name) for name in WEIGHT_NAMES} for slot in range(self.num_experts)]
        experts = AdaptedExperts(base, factors, self._scale)
        return RoutedAdapters.apply(experts, routing, x_TD, top_k_weights_TK, *trained).to(hidden_states_TD.dtype)

    def _places(self) -> tuple[list[dict[str, _Place]], list[Tensor]]:
        """Return the place of each expert's factors by name, and the factors that get gradients."""
        trained: list[Tensor] = []
        places: list[dict[str, _Place]] = [{} for _ in range(self.num_experts)]
        for name in self.shapes if self._is_stacked else ():
            for expert, found in enumerate(places):
                found[name] = _Place(len(trained), expert)
            trained.append(self.get_parameter(name))
        for slot in self.claimed:
            for name, parameter in self.parameters_of(slot).items():
                places[slot][name] = _Place(len(trained))
                trained.append(parameter)
        for tensors in (self._untrained, self.seeded):
            for slot, own in tensors.items():
                places[slot] |= {name: _Place(tensor=tensor) for name, tensor in own.items()}
        return places, trained

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move tensors that are not parameters too; a change of dtype does not change the stored precision."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        self.frozen.to(device)
        for tensors in (self._untrained, self.seeded):
            for own in tensors.values():
                own.update({name: tensor.to(device) for name, tensor in own.items()})
        return self


def _parameters(shapes: Mapping[str, Iterable[int]], device: torch.device) -> nn.ModuleDict:
    """Return factors as parameters by weight and factor."""
    modules: dict[str, nn.ParameterDict] = {}
    for name, shape in shapes.items():
        weight, _, factor = name.partition(".")
        modules.setdefault(weight, nn.ParameterDict())[factor] = nn.Parameter(torch.empty(*shape, device=device))
    return nn.ModuleDict(modules)
