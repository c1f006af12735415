"""The outer optimizer, which steps the anchors at a commit, and the merging of similar experts."""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod

import torch
from torch import Tensor
from torch.nn import functional as F

from spes_p2p.config import MergeConfig, OuterConfig
from spes_p2p.config.run import OUTER


class OuterOptimizer(ABC):
    """Steps an anchor by the swarm's averaged delta, on the CPU; a momentum is an argument and a result.

    After its inner steps a peer has moved its parameters from the anchor `theta` to `theta_i`; the swarm averages
    `delta_i = theta - theta_i` and steps the anchor by the mean. All peers must compute the same bits.

    The step is a pure function, so that a round that fails after it has changed nothing. At a commit, store the
    returned momentum with the anchor.

    Source: DiLoCo, Algorithm 1 (https://arxiv.org/abs/2311.08105).
    """

    def __init__(self, outer: OuterConfig) -> None:
        self._outer = outer
        self.has_state = outer.has_momentum
        """Whether `step` returns a momentum, which is then part of the anchor's state."""

    def step(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the next anchor, and the next momentum or None; the arguments do not change.

        Args:
            anchor: Committed parameters [P], fp32, CPU.
            delta: The swarm's averaged pseudo-gradient [P], fp32, CPU.
            momentum: Momentum that the previous step returned [P]; None counts as zeros.
        """
        assert self.has_state or momentum is None, f"{self._outer.optimizer} has no momentum"
        for vector in (anchor, delta) if momentum is None else (anchor, delta, momentum):
            assert vector.shape == anchor.shape and vector.dim() == 1, f"flat vectors of one length, not {vector.shape}"
            assert vector.dtype == torch.float32 and vector.device.type == "cpu", f"{vector.dtype} on {vector.device}"
        return self._step(anchor, delta, momentum)

    @abstractmethod
    def _step(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Compute `step`, element by element: anchors are stepped in pieces."""


def outer_optimizer(outer: OuterConfig) -> OuterOptimizer:
    """Return a run's outer optimizer."""
    return pkgutil.resolve_name(f"spes_p2p.optim.{OUTER[outer.optimizer][0]}")(outer)


class Mean(OuterOptimizer):
    """Takes the mean of the peers' parameters: `theta - delta`."""

    def _step(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return anchor - delta, None


class Nesterov(OuterOptimizer):
    """`torch.optim.SGD(nesterov=True)` with the delta as its gradient."""

    def _step(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        # Each product and sum is rounded separately: `add(alpha=)` fuses them on some CPUs only.
        new_momentum = delta.clone() if momentum is None else (momentum * self._outer.momentum).add_(delta)
        update = (new_momentum * self._outer.momentum).add_(delta).mul_(self._outer.lr)
        return anchor - update, new_momentum


SIMILARITY_DECIMALS = 9


def merge_alpha(merge: MergeConfig, round: int) -> float:
    """Return how far experts move in this round: a share in [0, 1] that decays linearly, 0 in rounds without a merge.

    Source: SPES, `spes_server_knowledge_transfer.py`, with rounds for steps:
    `alpha_start * (1 - min(step / decay_steps, 1))` when `step % merge_interval == 0`.
    """
    if round % merge.interval_rounds:
        return 0.0
    return merge.alpha * (1 - min(round / merge.decay_rounds, 1.0))


def merge_experts(gate_up_EOD: Tensor, down_EDI: Tensor, alpha: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Move every expert of one layer by `alpha` towards the mean of its `top_k` most similar others.

    Similarity is the cosine of the flattened *gate* projections only (SPES's `w1`: the first half of `gate_up`'s rows),
    as in SPES's code; the up and down projections move along. An expert becomes `w + alpha * mean_j(w_j - w)`, computed
    from the values before the merge. `top_k` is capped at E - 1, so that a single expert does not move. Returns new
    tensors in the arguments' dtypes.

    Source: SPES (https://arxiv.org/abs/2602.11543), `spes_server_knowledge_transfer.py`.
    """
    assert gate_up_EOD.shape[0] == down_EDI.shape[0] and gate_up_EOD.shape[1] % 2 == 0, "not one layer's experts"
    assert 0 <= alpha <= 1 and top_k >= 1, f"alpha={alpha} top_k={top_k}"
    num_neighbours = min(top_k, gate_up_EOD.shape[0] - 1)
    if alpha == 0 or num_neighbours == 0:
        return gate_up_EOD.clone(), down_EDI.clone()
    neighbours_EK = _most_similar(gate_up_EOD[:, : gate_up_EOD.shape[1] // 2], num_neighbours)
    return _move(gate_up_EOD, neighbours_EK, alpha), _move(down_EDI, neighbours_EK, alpha)


def _most_similar(gate_EID: Tensor, num_neighbours: int) -> list[list[int]]:
    """Return the indices of each expert's most similar others, ascending.

    All peers must choose the same, although their matrix products sum in different orders: cosines are fp64, rounded
    to 9 decimals, and of equal ones the lower index wins.
    """
    directions_EX = F.normalize(gate_EID.flatten(1).double(), dim=1)
    cosine_EE = (directions_EX @ directions_EX.T).round(decimals=SIMILARITY_DECIMALS)
    cosine_EE.fill_diagonal_(-torch.inf)
    order_EE = cosine_EE.sort(dim=1, descending=True, stable=True).indices
    return order_EE[:, :num_neighbours].sort(dim=1).values.tolist()


def _move(weight_EXY: Tensor, neighbours_EK: list[list[int]], alpha: float) -> Tensor:
    """Move each expert of one weight towards its neighbours' mean; sums are in fp32 and ascending order."""
    merged_EXY = torch.empty_like(weight_EXY)
    for expert, neighbours in enumerate(neighbours_EK):
        own_XY = weight_EXY[expert].float()
        pull_XY = torch.zeros_like(own_XY)
        for neighbour in neighbours:
            pull_XY += weight_EXY[neighbour].float() - own_XY
        merged_EXY[expert] = own_XY + pull_XY.div_(len(neighbours)).mul_(alpha)
    return merged_EXY
