"""LAMB, which none of the libraries at hand has as its paper does.

bitsandbytes' LAMB is Adam with a cap on the update, and in 8 bits without even that; pytorch_optimizer's leaves out the
bias correction and clamps weight norms at 10; timm's comes with torchvision.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor


class Lamb(torch.optim.Optimizer):
    """AdamW whose step, with its decay, is stretched to `lr` times the tensor's own norm.

    State is AdamW's: `exp_avg`, `exp_avg_sq`, and `step` as an fp32 scalar. Where a tensor or its step is zero, the
    step is AdamW's. The paper's `phi` is the identity, as in its experiments.

    Source: LAMB, Algorithm 2 (https://arxiv.org/abs/1904.00962).

    Args:
        groups: Parameter groups.
        lr: Share of a tensor's norm that one step covers.
        betas: Decays of the moments.
        eps: Added to the root of the second moment.
        weight_decay: Decoupled weight decay.
    """

    def __init__(
        self,
        groups: Iterable[Mapping[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        super().__init__(
            [dict(group) for group in groups], {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of every parameter that has a gradient."""
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    update = self._update(param, group)
                    norm, update_norm = torch.linalg.vector_norm(param), torch.linalg.vector_norm(update)
                    ratio = torch.where((norm > 0) & (update_norm > 0), norm / update_norm, 1.0)
                    param.sub_(update.mul_(ratio * group["lr"]))

    def _update(self, param: Tensor, group: Mapping[str, Any]) -> Tensor:
        """The paper's `r_t + lambda x_t`; moves the moments on."""
        (beta1, beta2), state = group["betas"], self.state[param]
        if not state:
            state["step"] = torch.zeros((), device=param.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
        state["step"] += 1
        step = state["step"].item()
        state["exp_avg"].lerp_(param.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(param.grad, param.grad, value=1 - beta2)
        root = (state["exp_avg_sq"] / (1 - beta2**step)).sqrt_().add_(group["eps"])
        return (state["exp_avg"] / (1 - beta1**step)).div_(root).add_(param, alpha=group["weight_decay"])
