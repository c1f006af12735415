"""What a training step minimises, and what the held-out set measures.

Shape legend: B sequences, T tokens of a sequence, V vocabulary entries.

Shape legend: B sequences, S tokens of a sequence, T = BS tokens, E experts, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from spes_p2p.config import TrainConfig
from spes_p2p.errors import DataError
from spes_p2p.model.slot_model import SlotModel


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


class LossParts(NamedTuple):
    """Scalars of one forward pass in fp32; a tuple, because DDP and FSDP look for tensors in tuples only."""

    total: Tensor
    """Weighted sum of the others; the one that carries a graph."""
    cross_entropy: Tensor
    """Mean over tokens, in nats."""
    balance: Tensor
    """`balance_loss` before its coefficient."""
    z: Tensor
    """`router_z_loss` before its coefficient."""


class TrainingLoss(nn.Module):
    """The model and its loss as one module: what DDP wraps, since it reduces gradients of its own forward pass only.

    Args:
        slot_model: The model to train; its claims are read at every call.
        train: Precision and loss coefficients.

    Attributes:
        routed_E: Tokens that have chosen each expert, over layers and calls, on the device, so that counting waits for
            nothing; None before the first call, and whoever reads it may set it back to that.
    """

    def __init__(self, slot_model: SlotModel, train: TrainConfig) -> None:
        super().__init__()
        self.module = slot_model.module
        self.slot_model = slot_model
        self.train_config = train
        self.routed_E: Tensor | None = None

    def forward(self, tokens_BT1: LongTensor, claimed_factor: float = 1.0) -> LossParts:
        """`causal_lm_loss` of `[B, T + 1]` tokens."""
        if self.routed_E is None:
            self.routed_E = torch.zeros(self.slot_model.num_slots, dtype=torch.int64, device=tokens_BT1.device)
        return causal_lm_loss(
            self.module,
            tokens_BT1,
            train=self.train_config,
            top_k=self.slot_model.config.num_experts_per_tok,
            claimed=self.slot_model.claimed,
            claimed_factor=claimed_factor,
            routed_E=self.routed_E,
        )


def causal_lm_loss(
    module: nn.Module,
    tokens_BT1: LongTensor,
    *,
    train: TrainConfig,
    top_k: int,
    claimed: Sequence[int] = (),
    claimed_factor: float = 1.0,
    routed_E: Tensor | None = None,
) -> LossParts:
    """Next-token cross entropy plus the router's losses, under autocast where `train.precision` says bf16.

    Each part is a mean over sequences, so that parts of a batch, weighted by their sequences, add up to the whole.

    Args:
        module: A Hugging Face mixture-of-experts model.
        tokens_BT1: `[B, T + 1]`; the first T are the input, the last T the targets.
        train: Precision and loss coefficients.
        top_k: Experts per token.
        claimed: Experts that this peer trains.
        claimed_factor: SPES's factor on their counts in the balance loss.
        routed_E: As in `balance_loss`.
    """
    with torch.autocast(tokens_BT1.device.type, torch.bfloat16, enabled=train.precision == "bf16"):
        output = module(input_ids=tokens_BT1[:, :-1], output_router_logits=True, use_cache=False)
    cross_entropy = _cross_entropy(output.logits, tokens_BT1)
    balance = balance_loss(
        output.router_logits,
        top_k,
        num_sequences=len(tokens_BT1),
        claimed=claimed,
        claimed_factor=claimed_factor,
        routed_E=routed_E,
    )
    z = router_z_loss(output.router_logits)
    total = cross_entropy + train.balance_loss * balance + train.router_z_loss * z
    return LossParts(total, cross_entropy.detach(), balance.detach(), z.detach())


def held_out_loss(module: nn.Module, batches: Iterable[LongTensor]) -> float:
    """Mean cross entropy in nats per token over `[B, T + 1]` batches of any sizes, in evaluation mode.

    Raises:
        DataError: no batches.
    """
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    nats, num_tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch_BT1 in batches:
                tokens_BT1 = batch_BT1.to(device)
                logits_BTV = module(input_ids=tokens_BT1[:, :-1], use_cache=False).logits
                count = tokens_BT1[:, 1:].numel()
                nats += _cross_entropy(logits_BTV, tokens_BT1).item() * count
                num_tokens += count
    finally:
        module.train(was_training)
    if not num_tokens:
        raise DataError("the held-out set is empty; raise data.held_out_fraction or add text")
    return nats / num_tokens


def _cross_entropy(logits_BTV: Tensor, tokens_BT1: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT1[:, 1:].flatten())
