"""The experts' kernels behind one interface, the choice among them, and what autograd sees of them.

Shape legend: T tokens, K chosen experts per token, R = T * K routed rows sorted by expert, D model width, O, I output
and input features of one expert's weight, G its gate and up features.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_p2p.errors import ConfigError
from spes_p2p.model.frozen import WEIGHT_NAMES, Plain, Weight
from spes_p2p.model.grouped_kernels import GroupedMMKernel, MegablocksKernel
from spes_p2p.model.loop_kernel import LoopKernel
from spes_p2p.model.routing import Routing

log = logging.getLogger(__name__)


class Kernel(Protocol):
    """One way of computing what a layer's experts do; autograd does not look inside.

    Weights come by stock name, one per expert in order of rank, claimed experts first.
    """

    name: str

    def available(self, device: torch.device) -> str | None:
        """None where this machine can use the kernel on `device`, else the reason why not."""

    def refuses(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        """None where the kernel can take weights of these shapes `(O, I)`, else the reason why not."""

    def forward(
        self, routing: Routing, weights: Mapping[str, Sequence[Weight]], x_TD: Tensor, scores_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Every token's sum over its experts, `down(swiglu(gate_up(x)) * score)`.

        Returns:
            The sums `[T, D]`, and of every row what `gate_up` gave, `[R, G]`, in the dtype of `x_TD`.
        """

    def backward(
        self,
        routing: Routing,
        weights: Mapping[str, Sequence[Weight]],
        num_claimed: int,
        x_TD: Tensor | None,
        scores_R1: Tensor,
        gate_up_RG: Tensor,
        grad_TD: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        """The gradients, given that of the sums.

        Args:
            routing: As in `forward`.
            weights: As in `forward`.
            num_claimed: So many experts, the first, get gradients.
            x_TD: As in `forward`; None if no expert is claimed.
            scores_R1: As in `forward`.
            gate_up_RG: As `forward` returned it.
            grad_TD: Gradient of the sums.

        Returns:
            Those of `x_TD` and `scores_R1`, and by name those of the claimed experts' weights, zeros without rows: DDP
            would wait forever for one that is missing.
        """


class RoutedExperts(torch.autograd.Function):
    """Every token's weighted sum over its experts' outputs, `[T, D]` in the dtype of `x_TD`.

    Routing weights multiply what goes into the down projection, not what comes out: their gradient then needs no
    output. What is kept for the backward pass is gate and up of every row, the input of every token if an expert is
    claimed, and of weights nothing but themselves, as they are stored.
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
        """Computes it.

        Args:
            ctx: Autograd's.
            kernel: By which.
            routing: Of the tokens.
            frozen: Weights by name of the experts that rank behind the claimed ones.
            x_TD: Tokens.
            scores_TK: Routing weights.
            *claimed: Weights of the claimed experts, of each in order of `WEIGHT_NAMES`.
        """
        scores_R1 = scores_TK.reshape(-1, 1)[routing.order_R].to(x_TD.dtype)
        y_TD, gate_up_RG = kernel.forward(routing, _by_name(claimed, frozen), x_TD, scores_R1)
        ctx.kernel, ctx.routing, ctx.frozen = kernel, routing, frozen
        ctx.save_for_backward(gate_up_RG, scores_R1, x_TD if claimed else None, *claimed)
        return y_TD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate_up_RG, scores_R1, x_TD, *claimed = ctx.saved_tensors
        weights, num_claimed = _by_name(claimed, ctx.frozen), len(claimed) // len(WEIGHT_NAMES)
        grad_x_TD, grad_scores_R1, by_name = ctx.kernel.backward(
            ctx.routing, weights, num_claimed, x_TD, scores_R1, gate_up_RG, grads[0].contiguous()
        )
        in_turn = (by_name[name][expert] for expert in range(num_claimed) for name in WEIGHT_NAMES)
        return (None, None, None, grad_x_TD, grad_scores_R1[:, 0][ctx.routing.place_TK], *in_turn)


def _by_name(claimed: Sequence[Tensor], frozen: Sequence[Mapping[str, Weight]]) -> dict[str, list[Weight]]:
    return {
        name: [*map(Plain, claimed[index :: len(WEIGHT_NAMES)]), *(weights[name] for weights in frozen)]
        for index, name in enumerate(WEIGHT_NAMES)
    }


KERNELS: dict[str, type[Kernel]] = {
    LoopKernel.name: LoopKernel,
    GroupedMMKernel.name: GroupedMMKernel,
    MegablocksKernel.name: MegablocksKernel,
}
PREFERRED = {"cpu": ("loop",), "cuda": ("grouped_mm", "loop")}
"""What `auto` tries in turn, by kind of device; on CPUs `loop` measures faster than `grouped_mm`."""


def choose_kernel(name: str, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Kernel:
    """The kernel called `name`; for `auto` the fastest that can be used, and a line in the log that says why.

    Args:
        name: `auto`, or one of `KERNELS`.
        device: Where the experts will be.
        shapes: Of an expert's weights.

    Raises:
        ConfigError: no such kernel, or it cannot be used here.
    """
    if name == "auto":
        return _automatic(device, shapes)
    found = kernel_named(name, device, shapes)
    log.info("kernel %s, as asked for", name)
    return found


def kernel_named(name: str, device: torch.device, shapes: Sequence[tuple[int, ...]]) -> Kernel:
    """As `choose_kernel`, without `auto` and without a word."""
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
        reason = found.available(device) or found.refuses(shapes)
        if reason is None:
            log.info("kernel auto: %s, the fastest on %s that can be used%s", name, device.type, passed_over)
            return found
        passed_over += f"; not {name}: {reason}"
    raise AssertionError("the loop kernel can be used anywhere")
