"""What all expert kernels share: tokens sorted by expert, and SwiGLU with its gradient.

Shape legend: T tokens, K chosen experts per token, E experts, R = T * K routed rows sorted by expert, D model width,
I intermediate width of an expert, G = 2 * I its gate and up features.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Which row is whose; the rows are sorted by their experts' ranks.

    Attributes:
        token_R: For every row its token.
        order_R: For every row its place among the choices `[T * K]`.
        place_TK: For every choice its row.
        ends_E: For every expert the end of its rows, which begin where the one's before end; int32.
        counts: For every expert the number of its rows, on the host.
    """

    token_R: Tensor
    order_R: Tensor
    place_TK: Tensor
    ends_E: Tensor
    counts: list[int]

    @classmethod
    def of(cls, rank_TK: Tensor, num_experts: int) -> Routing:
        """Sorts the choices `[T, K]` of experts, given by rank."""
        rank_R, order_R = torch.sort(rank_TK.reshape(-1), stable=True)
        place_R = torch.empty_like(order_R)
        place_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
        counts_E = torch.bincount(rank_R, minlength=num_experts)
        return cls(
            token_R=order_R // rank_TK.shape[1],
            order_R=order_R,
            place_TK=place_R.view(rank_TK.shape),
            ends_E=counts_E.cumsum(0, dtype=torch.int32),
            counts=counts_E.tolist(),
        )

    def split(self, *tensors_R: Tensor) -> Iterator[tuple[int, tuple[Tensor, ...]]]:
        """Every expert that has rows, with its part of each tensor."""
        parts = zip(*(tensor_R.split(self.counts) for tensor_R in tensors_R), strict=True)
        return ((expert, views) for expert, views in enumerate(parts) if self.counts[expert])

    def sum_by_token(self, y_RD: Tensor) -> Tensor:
        """Every token's sum over its rows, `[T, D]`; unlike index_add, it adds in the same order on every device."""
        return F.embedding_bag(self.place_TK, y_RD, mode="sum")


def swiglu(gate_up_RG: Tensor, scores_R1: Tensor, out_RI: Tensor) -> Tensor:
    """Writes `silu(gate) * up * score` to `out_RI` and returns it."""
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
    """The gradients of `swiglu`, in as few passes and buffers as they need.

    Args:
        gate_up_RG: As given to `swiglu`.
        scores_R1: As given to `swiglu`.
        grad_RI: Gradient of what it returned; destroyed.
        hidden_RI: Here goes what it returned, once more.
        grad_gate_up_RG: Here goes the gradient of `gate_up_RG`.
        grad_scores_R1: Here goes the gradient of `scores_R1`.
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
