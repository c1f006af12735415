"""Grouped linear layers: every row times the weight of the expert that it was routed to.

Shape legend: R rows sorted by expert, I input features, O output features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spes_p2p.errors import ConfigError


class Kernel(Protocol):
    """One way of computing a grouped linear layer."""

    name: str

    def available(self) -> str | None:
        """None where this machine can use the kernel, else the reason why not."""

    def grouped_linear(self, x_RI: Tensor, ends: Sequence[int], weights_OI: Sequence[Tensor]) -> Tensor:
        """Multiplies rows `ends[i - 1]:ends[i]` by `weights_OI[i]` transposed, in the dtype of `x_RI`.

        Every weight that requires a gradient gets one, zeros where it had no row. Where none does, nothing of
        `x_RI` is saved for the backward pass.

        Returns:
            `[R, O]` in the dtype of `x_RI`.
        """


class LoopKernel:
    """One matrix product per expert that has rows: the reference, at home on CPUs."""

    name = "loop"

    def available(self) -> str | None:
        return None

    def grouped_linear(self, x_RI: Tensor, ends: Sequence[int], weights_OI: Sequence[Tensor]) -> Tensor:
        return _LoopLinear.apply(x_RI, tuple(ends), *weights_OI)


class _LoopLinear(torch.autograd.Function):
    """Autograd of `LoopKernel`: weights may be wider than the rows and are cast one expert at a time."""

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, ends: tuple[int, ...], *weights_OI: Tensor) -> Tensor:
        y_RO = x_RI.new_empty(x_RI.shape[0], weights_OI[0].shape[0])
        for start, end, weight_OI in _groups(ends, weights_OI):
            torch.mm(x_RI[start:end], weight_OI.to(x_RI.dtype).t(), out=y_RO[start:end])
        ctx.ends = ends
        ctx.trains = any(ctx.needs_input_grad[2:])
        if ctx.trains:
            ctx.save_for_backward(x_RI, *weights_OI)
        else:
            # Not save_for_backward: hooks that offload activations must not copy weights that stay where they are.
            ctx.frozen_OI = weights_OI
        return y_RO

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_RO = grads[0].contiguous()
        weights_OI = ctx.saved_tensors[1:] if ctx.trains else ctx.frozen_OI
        grad_RI = None
        if ctx.needs_input_grad[0]:
            grad_RI = grad_RO.new_empty(grad_RO.shape[0], weights_OI[0].shape[1])
            for start, end, weight_OI in _groups(ctx.ends, weights_OI):
                torch.mm(grad_RO[start:end], weight_OI.to(grad_RO.dtype), out=grad_RI[start:end])
        if not ctx.trains:
            return (grad_RI, None, *[None] * len(weights_OI))
        return (grad_RI, None, *_weight_grads(grad_RO, ctx.saved_tensors[0], ctx.ends, weights_OI))


def _weight_grads(grad_RO: Tensor, x_RI: Tensor, ends: Sequence[int], weights_OI: Sequence[Tensor]) -> list[Tensor]:
    """One gradient per weight, which autograd casts; zeros for a starved expert, or DDP would wait for it forever."""
    grads_OI, start = [], 0
    for end, weight_OI in zip(ends, weights_OI, strict=True):
        if end > start:
            grad_OI = grad_RO.new_empty(weight_OI.shape)
            torch.mm(grad_RO[start:end].t(), x_RI[start:end], out=grad_OI)
            grads_OI.append(grad_OI)
        else:
            grads_OI.append(torch.zeros_like(weight_OI))
        start = end
    return grads_OI


def _groups(ends: Sequence[int], weights_OI: Sequence[Tensor]) -> Iterator[tuple[int, int, Tensor]]:
    """Row range and weight of every expert that has rows."""
    start = 0
    for end, weight_OI in zip(ends, weights_OI, strict=True):
        if end > start:
            yield start, end, weight_OI
        start = end


KERNELS: dict[str, type[Kernel]] = {LoopKernel.name: LoopKernel}


def kernel(name: str) -> Kernel:
    """The kernel called `name`, usable on this machine.

    Raises:
        ConfigError: no such kernel, or this machine cannot use it.
    """
    if name not in KERNELS:
        raise ConfigError(f"kernel={name!r} is unknown; choose one of {', '.join(KERNELS)}")
    found = KERNELS[name]()
    if (reason := found.available()) is not None:
        raise ConfigError(f"kernel={name!r} cannot be used here: {reason}; choose another of {', '.join(KERNELS)}")
    return found
