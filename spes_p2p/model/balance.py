"""Losses that keep the router from overusing a few experts.

Shape legend: B sequences, S tokens of a sequence, T = BS tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def balance_loss(
    router_logits: Sequence[Tensor],
    top_k: int,
    *,
    num_sequences: int,
    claimed: Sequence[int] = (),
    claimed_factor: float = 1.0,
    routed_E: Tensor | None = None,
) -> Tensor:
    """Load-balance loss, the mean over layers and sequences of `E * sum_e f_e P_e`.

    `f_e` is expert e's share of a sequence's routed rows and `P_e` its mean router probability there. 1 when balanced,
    `E / top_k` when all tokens go to the same experts. Counted over a batch, `f_e` would be known only after the last
    microbatch's forward pass; counted over a sequence, the loss is a mean over sequences, and does not depend on how
    a batch is split. Stock transformers adds up the layers before multiplying, and so calls it balanced when each
    layer collapses onto other experts.

    Source: Switch Transformers, equations 4-6 (https://arxiv.org/abs/2101.03961), per layer as in megablocks and per
    sequence as in DeepSeek-V3, equations 17-20 (https://arxiv.org/abs/2412.19437); the factor is SPES's
    `decayed_load_balance_loss.py` (https://arxiv.org/abs/2602.11543).

    Args:
        router_logits: One `[T, E]` per layer, the tokens of each sequence in one piece.
        top_k: Experts per token.
        num_sequences: B, which divides T.
        claimed: Experts that this peer trains.
        claimed_factor: Multiplies the counts of `claimed`; below 1 it makes routing to them cheaper.
        routed_E: To this is added how many tokens chose each expert, over all layers; integers.

    Returns:
        A scalar in fp32.

    Raises:
        ValueError: no layers.
    """
    _require_layers(router_logits)
    losses = []
    for logits_TE in router_logits:
        probs_BSE = logits_TE.float().softmax(dim=-1).unflatten(0, (num_sequences, -1))
        num_tokens, num_experts = probs_BSE.shape[1:]
        chosen_BX = probs_BSE.detach().topk(top_k, dim=-1).indices.flatten(1)
        counts_BE = probs_BSE.new_zeros(num_sequences, num_experts)
        counts_BE.scatter_add_(1, chosen_BX, torch.ones_like(chosen_BX, dtype=torch.float32))
        if routed_E is not None:
            routed_E += counts_BE.sum(dim=0).to(routed_E.dtype)
        if claimed:
            counts_BE[:, list(claimed)] *= claimed_factor
        share_BE = counts_BE / (num_tokens * top_k)
        losses.append(num_experts * (share_BE * probs_BSE.mean(dim=1)).sum(dim=-1).mean())
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
