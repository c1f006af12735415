"""The kernels that compute a layer's experts, the choice among them, and the autograd function around them.

Shape legend: T tokens, K chosen experts per token, E experts, C claimed ones of them, R = T * K routed rows sorted by
expert, N rows of one expert, D model width, I intermediate width of an expert, G = 2 * I its gate and up features. Of
any weight, O and I are the output and input features.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_p2p.errors import ConfigError, one_line
from spes_p2p.model.frozen import DOWN, GATE_UP, WEIGHT_NAMES, Plain, Weight, write_all

log = logging.getLogger(__name__)

Weights = Mapping[str, Sequence[Weight]]
"""Experts' weights by stock name, one per expert in order of rank, claimed experts first."""


@dataclass(frozen=True)
class Routing:
    """The assignment of rows to experts and tokens; rows are sorted by their experts' ranks.

    Attributes:
        token_R: Token of each row.
        order_R: Index of each row among the choices `[T * K]`.
        place_TK: Row of each choice.
        ends_E: End of each expert's rows, which begin at the previous expert's end; int32.
        counts_E: Number of each expert's rows.
    """

    token_R: Tensor
    order_R: Tensor
    place_TK: Tensor
    ends_E: Tensor
    counts_E: Tensor

    @classmethod
    def of(cls, rank_TK: Tensor, num_experts: int) -> Routing:
        """Sort the chosen experts' ranks, `[T, K]`."""
        rank_R, order_R = torch.sort(rank_TK.reshape(-1), stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        counts_E = torch.bincount(rank_R, minlength=num_experts)
        return cls(
            token_R=order_R // rank_TK.shape[1],
            order_R=order_R,
            place_TK=place_R.view(rank_TK.shape),
            ends_E=counts_E.cumsum(0, dtype=torch.int32),
            counts_E=counts_E,
        )

    @functools.cached_property
    def counts(self) -> list[int]:
        """Number of each expert's rows, on the host; reading it waits for the device."""
        return self.counts_E.tolist()

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All that it consists of, in the order of its fields."""
        return self.token_R, self.order_R, self.place_TK, self.ends_E, self.counts_E

    @classmethod
    def unpack(cls, saved: Sequence[Tensor]) -> tuple[Routing, Sequence[Tensor]]:
        """Return the routing whose `tensors` come first among saved ones, and the rest."""
        count = len(fields(cls))
        return cls(*saved[:count]), saved[count:]

    def split(self, *tensors_R: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Yield every expert that has rows, with its part of each tensor."""
        parts = zip(*(tensor_R.split(self.counts) for tensor_R in tensors_R), strict=True)
        return ((expert, views) for expert, views in enumerate(parts) if self.counts[expert])

    def sum_by_token(self, y_RD: Tensor) -> Tensor:
        """Sum the rows of each token to `[T, D]`; unlike index_add, in the same order on every device."""
        return F.embedding_bag(self.place_TK, y_RD, mode="sum")


def swiglu(gate_up_RG: Tensor, scores_R1: Tensor, out_RI: Tensor) -> Tensor:
    """Write `silu(gate) * up * score` to `out_RI` and return it."""
    gate_RI, up_RI = gate_up_RG.chunk(2, dim=-1)
    torch.ops.aten.silu.out(gate_RI, out=out_RI)
    return out_RI.mul_(up_RI).mul_(scores_R1)


def swiglu_back(
    gate_up_RG: Tensor,
    scores_R1: Tensor,
    grad_RI: Tensor,
    hidden_RI: Tensor,
    grad_gate_up_RG: Tensor,
    grad_scores_R1: Tensor,
) -> None:
    """Compute the gradients of `swiglu` in as few passes and buffers as possible.

    Writes the output again to `hidden_RI`, and the gradients to the tensors of these names; overwrites `grad_RI`, the
    gradient of the output.
    """
    gate_RI, up_RI = gate_up_RG.chunk(2, dim=-1)
    grad_gate_RI, grad_up_RI = grad_gate_up_RG.chunk(2, dim=-1)
    silu_RI = torch.ops.aten.silu.out(gate_RI, out=grad_up_RI)
    torch.mul(silu_RI, up_RI, out=hidden_RI)
    torch.sum(torch.mul(grad_RI, hidden_RI, out=grad_gate_RI), dim=-1, keepdim=True, out=grad_scores_R1)
    hidden_RI.mul_(scores_R1)
    grad_RI.mul_(scores_R1)
    silu_RI.mul_(grad_RI)
    torch.ops.aten.silu_backward.grad_input(grad_RI.mul_(up_RI), gate_RI, grad_input=grad_gate_RI)


class Kernel:
    """One way to compute a layer's experts, opaque to autograd."""

    name: ClassVar[str]
    takes_all: ClassVar[bool] = False
    """Whether it reads all experts' weights at once, so that they should lie side by side."""

    def available(self, device: torch.device) -> str | None:
        """Return why this machine cannot use the kernel on `device`; None if it can."""
        return None

    def slow(self, device: torch.device) -> str | None:
        """Return why `auto` should take another kernel on `device`; None if it should not."""
        return None

    def refuses(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """Return why the kernel cannot take weights of these shapes `(O, I)`; None if it can."""
        return None

    def forward(self, routing: Routing, weights: Weights, x_TD: Tensor, scores_R1: Tensor) -> tuple[Tensor, Tensor]:
        """Sum `down(swiglu(gate_up(x)) * score)` over each token's experts.

        Returns:
            The sums `[T, D]`, and the outputs `[R, G]` of `gate_up`, in the dtype of `x_TD`.
        """
        raise NotImplementedError

    def backward(
        self,
        routing: Routing,
        weights: Weights,
        num_claimed: int,
        x_TD: Tensor | None,
        scores_R1: Tensor,
        gate_up_RG: Tensor,
        grad_TD: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        """Compute the gradients of `x_TD` and `scores_R1`, and of the weights of the first `num_claimed` experts.

        `gate_up_RG` is the second result of `forward`, and `grad_TD` the gradient of the first. `x_TD` may be None if
        no expert is claimed. The gradients of an expert without rows are zeros: DDP would wait forever for a missing
        one.
        """
        raise NotImplementedError


class LoopKernel(Kernel):
    """Computes one expert's whole SwiGLU after the other: the reference, and the fastest on CPUs.

    An expert's rows stay in the cache from one product to the next, in buffers that all experts share. Only one stored
    weight at a time is made dense.
    """

    name = "loop"

    def forward(self, routing: Routing, weights: Weights, x_TD: Tensor, scores_R1: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, down = weights[GATE_UP], weights[DOWN]
        gate_up_RG = x_TD.new_empty(len(scores_R1), gate_up[0].shape[0])
        y_TD = zeros_to_sum(x_TD)
        buffers = buffers_of(routing, x_TD, x_TD.shape[1], down[0].shape[1])
        for expert, (token_N, scores_N1, gate_up_NG) in routing.split(routing.token_R, scores_R1, gate_up_RG):
            row_ND, hidden_NI = (buffer[: len(token_N)] for buffer in buffers)
            torch.index_select(x_TD, 0, token_N, out=row_ND)
            torch.mm(row_ND, gate_up[expert].dense(x_TD.dtype).t(), out=gate_up_NG)
            swiglu(gate_up_NG, scores_N1, hidden_NI)
            torch.mm(hidden_NI, down[expert].dense(x_TD.dtype).t(), out=row_ND)
            y_TD.index_add_(0, token_N, row_ND.to(y_TD.dtype))
        return y_TD.to(x_TD.dtype), gate_up_RG

    def backward(
        self,
        routing: Routing,
        weights: Weights,
        num_claimed: int,
        x_TD: Tensor | None,
        scores_R1: Tensor,
        gate_up_RG: Tensor,
        grad_TD: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        gate_up, down, dtype = weights[GATE_UP], weights[DOWN], grad_TD.dtype
        grad_x_TD, grad_scores_R1 = zeros_to_sum(grad_TD), torch.empty_like(scores_R1)
        grads = {name: _grads(routing, weights[name][:num_claimed], grad_TD) for name in weights}
        buffers = buffers_of(routing, grad_TD, grad_TD.shape[1], *2 * [down[0].shape[1]], gate_up[0].shape[0])
        by_expert = routing.split(routing.token_R, scores_R1, gate_up_RG, grad_scores_R1)
        for expert, (token_N, scores_N1, gate_up_NG, grad_scores_N1) in by_expert:
            row_ND, grad_NI, hidden_NI, grad_gate_up_NG = (buffer[: len(token_N)] for buffer in buffers)
            torch.index_select(grad_TD, 0, token_N, out=row_ND)
            torch.mm(row_ND, down[expert].dense(dtype), out=grad_NI)
            swiglu_back(gate_up_NG, scores_N1, grad_NI, hidden_NI, grad_gate_up_NG, grad_scores_N1)
            if expert < num_claimed:
                assert x_TD is not None
                torch.mm(row_ND.t(), hidden_NI, out=grads[DOWN][expert])
                torch.index_select(x_TD, 0, token_N, out=row_ND)
                torch.mm(grad_gate_up_NG.t(), row_ND, out=grads[GATE_UP][expert])
            torch.mm(grad_gate_up_NG, gate_up[expert].dense(dtype), out=row_ND)
            grad_x_TD.index_add_(0, token_N, row_ND.to(grad_x_TD.dtype))
        return grad_x_TD.to(dtype), grad_scores_R1, grads


def zeros_to_sum(like_TD: Tensor) -> Tensor:
    """Return zeros that accumulate experts' outputs, in fp32: otherwise each addition would round."""
    return torch.zeros_like(like_TD, dtype=torch.promote_types(like_TD.dtype, torch.float32))


def buffers_of(routing: Routing, like: Tensor, *widths: int) -> list[Tensor]:
    """Allocate buffers of each width for the rows of any one expert."""
    most = max(routing.counts)
    return [like.new_empty(most, width) for width in widths]


def _grads(routing: Routing, weights: Sequence[Weight], like: Tensor) -> list[Tensor]:
    """Allocate the gradients of the first experts' weights, zeros for an expert without rows."""
    counted = zip(weights, routing.counts, strict=False)
    return [like.new_empty(weight.shape) if count else like.new_zeros(weight.shape) for weight, count in counted]


ALIGNMENT = 8
"""Row alignment that `grouped_mm` needs, in elements: 16 bytes in bf16."""
MIN_CAPABILITY = (8, 0)
"""Oldest CUDA compute capability that `grouped_mm` runs on."""
FAST_CAPABILITIES = (9, 10)
"""Major CUDA compute capabilities for which PyTorch has one launch for a whole product: Hopper and B200. Elsewhere its
`grouped_mm` is a loop that waits for the device before each product."""


class StackedKernel(Kernel):
    """Base of kernels that take all experts' weights as one tensor, stacked for each product and then dropped."""

    takes_all = True

    def forward(self, routing: Routing, weights: Weights, x_TD: Tensor, scores_R1: Tensor) -> tuple[Tensor, Tensor]:
        x_RD = x_TD.index_select(0, routing.token_R)
        gate_up_RG = self._times(x_RD, routing, weights[GATE_UP], transposed=True)
        del x_RD
        hidden_RI = swiglu(gate_up_RG, scores_R1, gate_up_RG.new_empty(len(gate_up_RG), gate_up_RG.shape[1] // 2))
        y_RD = self._times(hidden_RI, routing, weights[DOWN], transposed=True)
        return routing.sum_by_token(y_RD), gate_up_RG

    def backward(
        self,
        routing: Routing,
        weights: Weights,
        num_claimed: int,
        x_TD: Tensor | None,
        scores_R1: Tensor,
        gate_up_RG: Tensor,
        grad_TD: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        grad_RD = grad_TD.index_select(0, routing.token_R)
        grad_RI = self._times(grad_RD, routing, weights[DOWN], transposed=False)
        grad_gate_up_RG, hidden_RI = torch.empty_like(gate_up_RG), torch.empty_like(grad_RI)
        grad_scores_R1 = torch.empty_like(scores_R1)
        swiglu_back(gate_up_RG, scores_R1, grad_RI, hidden_RI, grad_gate_up_RG, grad_scores_R1)
        grads: dict[str, list[Tensor]] = {GATE_UP: [], DOWN: []}
        if num_claimed:
            assert x_TD is not None
            prefix = slice(0, sum(routing.counts[:num_claimed]))
            x_RD = x_TD.index_select(0, routing.token_R[prefix])
            grads[DOWN] = self._weight_grads(grad_RD[prefix], hidden_RI[prefix], routing, num_claimed)
            grads[GATE_UP] = self._weight_grads(grad_gate_up_RG[prefix], x_RD, routing, num_claimed)
            del x_RD
        del grad_RD, grad_RI, hidden_RI
        grad_x_RD = self._times(grad_gate_up_RG, routing, weights[GATE_UP], transposed=False)
        return routing.sum_by_token(grad_x_RD), grad_scores_R1, grads

    def _times(self, rows: Tensor, routing: Routing, weights: Sequence[Weight], *, transposed: bool) -> Tensor:
        """Multiply every row by its expert's weight, or by its transpose."""
        out_features, in_features = weights[0].shape
        if not len(rows):
            return rows.new_empty(0, out_features if transposed else in_features)
        stacked_EOI = rows.new_empty(len(weights), out_features, in_features)
        write_all(weights, stacked_EOI)
        return self._rows_times(rows, routing, stacked_EOI, transposed)

    def _weight_grads(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> list[Tensor]:
        """Return the gradients `[O, I]` of the claimed experts' weights, zeros for an expert without rows."""
        if not len(grad_RO):
            return [grad_RO.new_zeros(grad_RO.shape[1], x_RI.shape[1]) for _ in range(num_claimed)]
        grads_OI = self._columns_times(grad_RO, x_RI, routing, num_claimed).unbind(0)
        # On some GPUs grouped_mm leaves garbage there: https://github.com/pytorch/pytorch/issues/172439
        counts = routing.counts[:num_claimed]
        return [grad if count else torch.zeros_like(grad) for grad, count in zip(grads_OI, counts, strict=True)]

    def _rows_times(self, rows: Tensor, routing: Routing, weights_EOI: Tensor, transposed: bool) -> Tensor:
        raise NotImplementedError

    def _columns_times(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> Tensor:
        raise NotImplementedError


class GroupedMMKernel(StackedKernel):
    """`torch.nn.functional.grouped_mm`: one launch per product on CUDA devices in bf16; elsewhere torch loops."""

    name = "grouped_mm"

    def available(self, device: torch.device) -> str | None:
        if not hasattr(torch.nn.functional, "grouped_mm"):
            return f"PyTorch {torch.__version__} has no grouped_mm, which came with 2.10"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is older than Ampere"
        return None

    def slow(self, device: torch.device) -> str | None:
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] not in FAST_CAPABILITIES:
            return f"PyTorch has no fast one for {torch.cuda.get_device_name(device)}"
        return None

    def refuses(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        odd = sorted({size for shape in shapes for size in shape if size % ALIGNMENT})
        return f"an expert's sizes {odd} are no multiples of {ALIGNMENT}" if odd else None

    def _rows_times(self, rows: Tensor, routing: Routing, weights_EOI: Tensor, transposed: bool) -> Tensor:
        weights = weights_EOI.transpose(1, 2) if transposed else weights_EOI
        return torch.nn.functional.grouped_mm(rows, weights, offs=routing.ends_E)

    def _columns_times(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> Tensor:
        return torch.nn.functional.grouped_mm(grad_RO.t(), x_RI, offs=routing.ends_E[:num_claimed])


class MegablocksKernel(StackedKernel):
    """megablocks' grouped products: prebuilt for the package `kernels`, or from the package `grouped_gemm`.

    Source: MegaBlocks (https://arxiv.org/abs/2211.15841).
    """

    name = "megablocks"

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it computes on CUDA devices, not on {device.type}"
        try:
            _grouped_gemm()
        except ImportError as error:
            return f"{error}; pip install 'spes-p2p[megablocks]' or see docs/planning.md"
        return None

    def _rows_times(self, rows: Tensor, routing: Routing, weights_EOI: Tensor, transposed: bool) -> Tensor:
        return _grouped_gemm().gmm(_bf16(rows), weights_EOI, torch.tensor(routing.counts), trans_b=transposed)

    def _columns_times(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> Tensor:
        counts_C = torch.tensor(routing.counts[:num_claimed])
        return _grouped_gemm().gmm(_bf16(grad_RO), x_RI, counts_C, trans_a=True)


HUB_REPOSITORY = "kernels-community/megablocks"
MEGABLOCKS: dict[str, Callable[[], Any]] = {
    HUB_REPOSITORY: lambda: importlib.import_module("kernels").get_kernel(HUB_REPOSITORY, version=1).gg_backend,
    "grouped_gemm": lambda: importlib.import_module("grouped_gemm.backend"),
}
"""Where megablocks' products come from, without their autograd: prebuilt, or compiled on this machine."""


@functools.cache
def _grouped_gemm() -> Any:
    """Load products from the first place that has them, and log which; raise ImportError if none has."""
    failures = ""
    for name, load in MEGABLOCKS.items():
        try:
            found = load()
        except Exception as error:  # noqa: BLE001 - packages, hub and builds fail with types of their own
            failures += f"; not {name}: {one_line(error)}"
        else:
            log.info("kernel megablocks: products of %s%s", name, failures)
            return found
    raise ImportError(failures.removeprefix("; "))


def _bf16(rows: Tensor) -> Tensor:
    """Return the rows, unless they are in another precision."""
    if rows.dtype != torch.bfloat16:
        raise ConfigError(
            f"kernel=megablocks computes in bf16 only, not in {rows.dtype}; set train.precision=bf16 or --kernel auto"
        )
    return rows


class RoutedExperts(torch.autograd.Function):
    """Each token's weighted sum over its experts' outputs, `[T, D]` in the dtype of `x_TD`.

    Routing weights multiply the input of the down projection, not its output: their gradient then needs no output.
    The backward pass keeps gate and up of every row, the input of every token if an expert is claimed, and the weights
    only in their stored precision.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernel: Kernel,
        routing: Routing,
        frozen: Sequence[Mapping[str, Weight]],
        x_TD: Tensor,
        scores_TK: Tensor,
        *claimed: Tensor,
    ) -> Tensor:
        """Compute the sums.

        `claimed` are the claimed experts' weights, each one's in the order of `WEIGHT_NAMES`; frozen experts rank
        after them.
        """
        scores_R1 = scores_TK.reshape(-1, 1)[routing.order_R].to(x_TD.dtype)
        y_TD, gate_up_RG = kernel.forward(routing, _by_name(claimed, frozen), x_TD, scores_R1)
        ctx.kernel = kernel
        ctx.frozen = frozen
        # The routing too: a pass that is computed again may route a token otherwise, and its rows are in its own order.
        ctx.save_for_backward(gate_up_RG, scores_R1, x_TD if claimed else None, *routing.tensors, *claimed)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_RG, scores_R1, x_TD, *saved = ctx.saved_tensors
        routing, claimed = Routing.unpack(saved)
        weights, num_claimed = _by_name(claimed, ctx.frozen), len(claimed) // len(WEIGHT_NAMES)
        grad_x_TD, grad_scores_R1, by_name = ctx.kernel.backward(
            routing, weights, num_claimed, x_TD, scores_R1, gate_up_RG, grads[0].contiguous()
        )
        in_turn = (by_name[name][expert] for expert in range(num_claimed) for name in WEIGHT_NAMES)
        return (None, None, None, grad_x_TD, grad_scores_R1[:, 0][routing.place_TK], *in_turn)


def _by_name(claimed: Sequence[Tensor], frozen: Sequence[Mapping[str, Weight]]) -> dict[str, list[Weight]]:
    return {
        name: [*map(Plain, claimed[index :: len(WEIGHT_NAMES)]), *(weights[name] for weights in frozen)]
        for index, name in enumerate(WEIGHT_NAMES)
    }


KERNELS: dict[str, type[Kernel]] = {kind.name: kind for kind in (LoopKernel, GroupedMMKernel, MegablocksKernel)}
PREFERRED = {"cpu": ("loop",), "cuda": ("grouped_mm", "loop")}
"""Kernels that `auto` tries in turn, by type of device."""


def choose_kernel(name: str, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Kernel:
    """Return the kernel called `name`, or for `auto` the fastest usable one, and log the reason.

    Raises:
        ConfigError: the kernel is unknown, or cannot be used here.
    """
    if name == "auto":
        return _automatic(device, shapes)
    found = kernel_named(name, device, shapes)
    log.info("experts are computed by kernel %s (--kernel)", name)
    return found


def kernel_named(name: str, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Kernel:
    """Return the kernel called `name`, as `choose_kernel` but without `auto` and without a log line."""
    if name not in KERNELS:
        raise ConfigError(f"kernel={name!r} is unknown; choose auto or one of {', '.join(KERNELS)}")
    found = KERNELS[name]()
    if (reason := found.available(device) or found.refuses(shapes)) is not None:
        raise ConfigError(f"kernel={name} cannot be used here: {reason}; set --kernel auto")
    return found


def _automatic(device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Kernel:
    passed_over = ""
    for name in PREFERRED.get(device.type, ("loop",)):
        found = KERNELS[name]()
        reason = found.available(device) or found.slow(device) or found.refuses(shapes)
        if reason is None:
            log.info("kernel auto: %s, the fastest on %s that can be used%s", name, device.type, passed_over)
            return found
        passed_over += f"; not {name}: {reason}"
    raise AssertionError("the loop kernel can be used anywhere")
