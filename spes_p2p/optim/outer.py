"""The outer optimizer: how an averaged delta moves the anchor.

Legend: P parameters of one bundle, flattened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.config import OuterStep


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
