"""What a training step minimises, and what the held-out set measures.

Shape legend: B sequences, T tokens of a sequence, V vocabulary entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from spes_p2p.config import TrainConfig
from spes_p2p.errors import DataError
from spes_p2p.model.balance import balance_loss, router_z_loss
from spes_p2p.model.slot_model import SlotModel


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
