"""What a commit does to anchors: the outer optimizer, and merging of similar experts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from spes_p2p.config import MergeConfig, OuterStep


class OuterOptimizer:
    """Plain averaging or Nesterov SGD over averaged deltas, on the CPU, without state of its own.

    After its inner steps a peer has moved its parameters from the anchor `theta` to `theta_i`; the swarm averages
    `delta_i = theta - theta_i` and steps the anchor by it. `mean` takes `theta - delta`, which is the average of the
    `theta_i`; `nesterov` is `torch.optim.SGD(nesterov=True)` with `delta` as its gradient.

    The step is a pure function, so that a round that fails after it has changed nothing; whoever commits the round
    keeps the returned momentum with the anchor.

    Source: DiLoCo, Algorithm 1 (https://arxiv.org/abs/2311.08105).

    Args:
        outer: Which of the two, and its rate and momentum; a run may have one for `shared` and another for slots.
    """

    def __init__(self, outer: OuterStep) -> None:
        self._outer = outer

    @property
    def has_state(self) -> bool:
        """Whether `step` returns a momentum that belongs to the anchor's state."""
        return self._outer.has_momentum

    def step(self, anchor: Tensor, delta: Tensor, momentum: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The next anchor, and the next momentum if there is one; the arguments stay as they are.

        Args:
            anchor: Committed parameters [P], fp32, CPU.
            delta: The swarm's averaged pseudo-gradient [P], fp32, CPU.
            momentum: What the previous step returned [P]; None in a bundle's first step and always with `mean`.
        """
        for vector in (anchor, delta) if momentum is None else (anchor, delta, momentum):
            assert vector.shape == anchor.shape and vector.dim() == 1, f"flat vectors of one length, not {vector.shape}"
            assert vector.dtype == torch.float32 and vector.device.type == "cpu", f"{vector.dtype} on {vector.device}"
        if not self.has_state:
            assert momentum is None, "`mean` has no momentum"
            return anchor - delta, None
        # Products and sums are rounded one by one: `add(alpha=)` may fuse them, or not, by CPU, and all peers have to
        # arrive at the same bits.
        new_momentum = delta.clone() if momentum is None else (momentum * self._outer.momentum).add_(delta)
        update = (new_momentum * self._outer.momentum).add_(delta).mul_(self._outer.lr)
        return anchor - update, new_momentum


SIMILARITY_DECIMALS = 9


def merge_alpha(merge: MergeConfig, round: int) -> float:
    """How far experts move in this round: a share in [0, 1] that decays linearly, 0 in rounds without a merge.

    Source: SPES, `spes_server_knowledge_transfer.py`, with rounds for steps:
    `alpha_start * (1 - min(step / decay_steps, 1))` when `step % merge_interval == 0`.
    """
    if round % merge.interval_rounds:
        return 0.0
    return merge.alpha * (1 - min(round / merge.decay_rounds, 1.0))


def merge_experts(gate_up_EOD: Tensor, down_EDI: Tensor, alpha: float, top_k: int) -> tuple[Tensor, Tensor]:
    """Moves every expert of one layer by `alpha` towards the mean of its `top_k` most similar others.

    Similar means the cosine of the flattened *gate* projections only (SPES's `w1`: the first half of `gate_up`'s rows),
    as in SPES's code; the up and down projections move along but have no say. Every expert moves by
    `w + alpha * mean_j(w_j - w)`, all from the values before the merge.

    Args:
        gate_up_EOD: Fused gate and up projections of one layer, in Hugging Face's layout.
        down_EDI: Down projections of the same layer.
        alpha: Share of the way, in [0, 1]; 0 changes nothing.
        top_k: Neighbours per expert, at least 1; capped at E - 1, so that a single expert stays as it is.

    Returns:
        New `gate_up_EOD` and `down_EDI`, in the arguments' dtypes; the arguments stay as they are.

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
    """The indices of each expert's most similar others, ascending.

    All peers must choose alike, though their matrix products sum in different orders: cosines are taken in fp64, those
    that agree to 9 decimals count as equal, and the lower index wins.
    """
    directions_EX = F.normalize(gate_EID.flatten(1).double(), dim=1)
    cosine_EE = (directions_EX @ directions_EX.T).round(decimals=SIMILARITY_DECIMALS)
    cosine_EE.fill_diagonal_(-torch.inf)
    order_EE = cosine_EE.sort(dim=1, descending=True, stable=True).indices
    return order_EE[:, :num_neighbours].sort(dim=1).values.tolist()


def _move(weight_EXY: Tensor, neighbours_EK: list[list[int]], alpha: float) -> Tensor:
    """One weight's experts, each moved towards its neighbours' mean; sums run in fp32, in ascending order."""
    merged_EXY = torch.empty_like(weight_EXY)
    for expert, neighbours in enumerate(neighbours_EK):
        own_XY = weight_EXY[expert].float()
        pull_XY = torch.zeros_like(own_XY)
        for neighbour in neighbours:
            pull_XY += weight_EXY[neighbour].float() - own_XY
        merged_EXY[expert] = own_XY + pull_XY.div_(len(neighbours)).mul_(alpha)
    return merged_EXY
