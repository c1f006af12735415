"""Kernels that compute all experts' products at once, for GPUs.

Shape legend: T tokens, R routed rows sorted by expert, E experts, C claimed ones of them, D model width, I intermediate
width of an expert, G = 2 * I its gate and up features, O output features of any weight.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping, Sequence
from types import ModuleType

import torch
from torch import Tensor

from spes_p2p.errors import ConfigError
from spes_p2p.model.frozen import DOWN, GATE_UP, Weight
from spes_p2p.model.routing import Routing, swiglu, swiglu_back

ALIGNMENT = 8
"""Elements to which `grouped_mm` needs a row aligned: 16 bytes in bf16."""
MIN_CAPABILITY = (8, 0)
"""Oldest CUDA devices that `grouped_mm` runs on."""


class StackedKernel:
    """Base of kernels that take all experts' weights as one tensor.

    It is stacked for each product, in the dtype of the rows, and dropped after it: what is kept of a weight is what its
    owner keeps.
    """

    def forward(
        self, routing: Routing, weights: Mapping[str, Sequence[Weight]], x_TD: Tensor, scores_R1: Tensor
    ) -> tuple[Tensor, Tensor]:
        x_RD = x_TD.index_select(0, routing.token_R)
        gate_up_RG = self._times(x_RD, routing, weights[GATE_UP], transposed=True)
        del x_RD
        hidden_RI = swiglu(gate_up_RG, scores_R1, gate_up_RG.new_empty(len(gate_up_RG), gate_up_RG.shape[1] // 2))
        y_RD = self._times(hidden_RI, routing, weights[DOWN], transposed=True)
        return routing.sum_by_token(y_RD), gate_up_RG

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
        """Every row times its expert's weight, or that transposed."""
        out_features, in_features = weights[0].shape
        if not len(rows):
            return rows.new_empty(0, out_features if transposed else in_features)
        stacked_EOI = rows.new_empty(len(weights), out_features, in_features)
        for weight_OI, weight in zip(stacked_EOI, weights, strict=True):
            weight_OI.copy_(weight.dense(rows.dtype))
        return self._rows_times(rows, routing, stacked_EOI, transposed)

    def _weight_grads(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> list[Tensor]:
        """The gradients `[O, I]` of the claimed experts' weights, zeros for one without rows."""
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
    """`torch.nn.functional.grouped_mm`: one launch per product on CUDA devices in bf16; a loop of its own elsewhere."""

    name = "grouped_mm"

    def available(self, device: torch.device) -> str | None:
        if not hasattr(torch.nn.functional, "grouped_mm"):
            return f"PyTorch {torch.__version__} has no grouped_mm, which came with 2.10"
        if device.type == "cuda" and torch.cuda.get_device_capability(device) < MIN_CAPABILITY:
            return f"{torch.cuda.get_device_name(device)} is older than Ampere"
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
    """megablocks' products, from its package `grouped_gemm`; docs/kernels.md says how to install it.

    Source: MegaBlocks (https://arxiv.org/abs/2211.15841).
    """

    name = "megablocks"

    def available(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return f"it computes on CUDA devices, not on {device.type}"
        try:
            _grouped_gemm()
        except (ImportError, OSError) as error:
            return f"grouped_gemm cannot be imported ({error}), see docs/kernels.md"
        return None

    def refuses(self, shapes: Sequence[tuple[int, ...]]) -> str | None:
        return None

    def _rows_times(self, rows: Tensor, routing: Routing, weights_EOI: Tensor, transposed: bool) -> Tensor:
        return _grouped_gemm().gmm(_bf16(rows), weights_EOI, torch.tensor(routing.counts), trans_b=transposed)

    def _columns_times(self, grad_RO: Tensor, x_RI: Tensor, routing: Routing, num_claimed: int) -> Tensor:
        counts_C = torch.tensor(routing.counts[:num_claimed])
        return _grouped_gemm().gmm(_bf16(grad_RO), x_RI, counts_C, trans_a=True)


@functools.cache
def _grouped_gemm() -> ModuleType:
    """The package's products without its autograd."""
    return importlib.import_module("grouped_gemm.backend")


def _bf16(rows: Tensor) -> Tensor:
    """The rows, which are in bf16.

    Raises:
        ConfigError: they are not.
    """
    if rows.dtype != torch.bfloat16:
        raise ConfigError(
            f"kernel=megablocks computes in bf16 only, not in {rows.dtype}; set train.precision=bf16 or --kernel auto"
        )
    return rows
