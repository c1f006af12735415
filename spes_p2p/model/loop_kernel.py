"""The `loop` kernel: one expert after the other.

Shape legend: T tokens, R routed rows sorted by expert, N rows of one expert, D model width, I intermediate width of an
expert, G = 2 * I its gate and up features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from spes_p2p.model.frozen import DOWN, GATE_UP, Weight
from spes_p2p.model.routing import Routing, swiglu, swiglu_back


class LoopKernel:
    """Each expert's whole SwiGLU before the next one's: the reference, and the fastest on CPUs.

    An expert's rows then stay in the cache from one product to the next, in buffers that all experts share. Of weights
    that are kept otherwise than they are used, one at a time is made dense.
    """

    name = "loop"

    def available(self, device: torch.device) -> str | None:
        return None

    def refuses(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None

    def forward(
        self, routing: Routing, weights: Mapping[str, Sequence[Weight]], x_TD: Tensor, scores_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        gate_up, down = weights[GATE_UP], weights[DOWN]
        gate_up_RG = x_TD.new_empty(len(scores_R1), gate_up[0].shape[0])
        y_TD = _zeros_to_sum(x_TD)
        buffers = _buffers(routing, x_TD, x_TD.shape[1], down[0].shape[1])
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
        weights: Mapping[str, Sequence[Weight]],
        num_claimed: int,
        x_TD: Tensor | None,
        scores_R1: Tensor,
        gate_up_RG: Tensor,
        grad_TD: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, list[Tensor]]]:
        gate_up, down, dtype = weights[GATE_UP], weights[DOWN], grad_TD.dtype
        grad_x_TD, grad_scores_R1 = _zeros_to_sum(grad_TD), torch.empty_like(scores_R1)
        grads = {name: _grads(routing, weights[name][:num_claimed], grad_TD) for name in weights}
        buffers = _buffers(routing, grad_TD, grad_TD.shape[1], *2 * [down[0].shape[1]], gate_up[0].shape[0])
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


def _zeros_to_sum(like_TD: Tensor) -> Tensor:
    """Zeros to add experts' outputs to: in fp32, or each addition would round."""
    return torch.zeros_like(like_TD, dtype=torch.promote_types(like_TD.dtype, torch.float32))


def _buffers(routing: Routing, like: Tensor, *widths: int) -> list[Tensor]:
    """Memory for the rows of one expert, whichever, of each width."""
    most = max(routing.counts)
    return [like.new_empty(most, width) for width in widths]


def _grads(routing: Routing, weights: Sequence[Weight], like: Tensor) -> list[Tensor]:
    """Memory for the gradients of the first experts' weights, zeros for one without rows."""
    counted = zip(weights, routing.counts, strict=False)
    return [like.new_empty(weight.shape) if count else like.new_zeros(weight.shape) for weight, count in counted]
