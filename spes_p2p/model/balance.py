"""Losses that keep the router from overusing a few experts.

Shape legend: T tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(
    router_logits: Sequence[Tensor], top_k: int, *, claimed: Sequence[int] = (), claimed_factor: float = 1.0
) -> Tensor:
    """Load-balance loss, the mean over layers of `E * sum_e f_e P_e`.

    `f_e` is expert e's share of the routed rows and `P_e` its mean router probability. 1 when balanced, `E / top_k`
    when all tokens go to the same experts. Stock transformers adds up the layers before multiplying, and so calls it
    balanced when each layer collapses onto other experts.

    Source: Switch Transformers, equations 4-6 (https://arxiv.org/abs/2101.03961), per layer as in megablocks; the
    factor is SPES's `decayed_load_balance_loss.py` (https://arxiv.org/abs/2602.11543).

    Args:
        router_logits: One `[T, E]` per layer.
        top_k: Experts per token.
        claimed: Experts that this peer trains.
        claimed_factor: Multiplies the counts of `claimed`; below 1 it makes routing to them cheaper.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: no layers.
    """
    _require_layers(router_logits)
    losses = []
    for logits_TE in router_logits:
        probs_TE = logits_TE.float().softmax(dim=-1)
        num_tokens, num_experts = probs_TE.shape
        chosen_TK = probs_TE.detach().topk(top_k, dim=-1).indices
        share_E = torch.bincount(chosen_TK.flatten(), minlength=num_experts) / (num_tokens * top_k)
        if claimed:
            share_E[list(claimed)] *= claimed_factor
        losses.append(num_experts * (share_E * probs_TE.mean(dim=0)).sum())
    return torch.stack(losses).mean()


def router_z_loss(router_logits: Sequence[Tensor]) -> Tensor:
    """Mean over layers and tokens of the router's squared log-partition: keeps its logits small.

    Source: ST-MoE, equation 5 (https://arxiv.org/abs/2202.08906).

    Args:
        router_logits: One `[T, E]` per layer.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: no layers.
    """
    _require_layers(router_logits)
    return torch.stack([logits_TE.float().logsumexp(dim=-1).square().mean() for logits_TE in router_logits]).mean()


def _require_layers(router_logits: Sequence[Tensor]) -> None:
    if not router_logits:
        raise ValueError("router_logits is empty; call the model with output_router_logits=True")
