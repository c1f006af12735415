"""The training loss (cross entropy and the router's losses) and the held-out loss.

Shape legend: B sequences, S tokens of a sequence, T = B S tokens of a batch, C tokens of a chunk, D model width, E
experts, X = S K choices of a sequence, V vocabulary entries, P rows of a head on a GPU, V or a few more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import LongTensor, Tensor, nn

from spes_p2p.config import FAMILIES, LOGIT_SETTINGS, TrainConfig
from spes_p2p.data.windows import CONTEXT
from spes_p2p.errors import DataError
from spes_p2p.model.bank import compute_dtype
from spes_p2p.model.slot_model import SlotModel
from spes_p2p.planner.activations import head_rows

ALIGNED_ROWS = 64
"""A GPU's fast products want rows of logits that begin at multiples of 16 bytes; a vocabulary may have an odd size."""
ALIGNED_DEVICES = {"cuda"}


def balance_loss(
    router_logits: Sequence[Tensor],
    top_k: int,
    *,
    num_sequences: int,
    claimed: Sequence[int] = (),
    claimed_factor: float = 1.0,
    routed_E: Tensor | None = None,
    learned_BS: Tensor | None = None,
) -> Tensor:
    """Compute the load-balance loss, the mean over layers and sequences of `E * sum_e f_e P_e`.

    `f_e` is expert e's share of a sequence's routed rows and `P_e` its mean router probability there. The loss is 1
    when balanced, and `E / top_k` when all tokens go to the same experts. Counts are per sequence, so that the loss
    does not depend on how a batch is split into microbatches. Stock transformers pools the layers before it multiplies,
    and so calls a model balanced in which each layer collapses onto different experts.

    Source: Switch Transformers, equations 4-6 (https://arxiv.org/abs/2101.03961), per layer as in megablocks and per
    sequence as in DeepSeek-V3, equations 17-20 (https://arxiv.org/abs/2412.19437); the factor is SPES's
    `decayed_load_balance_loss.py` (https://arxiv.org/abs/2602.11543).

    Args:
        router_logits: One `[T, E]` per layer, the tokens of each sequence contiguous.
        top_k: Experts per token.
        num_sequences: B, which divides T.
        claimed: Experts that this peer trains.
        claimed_factor: Multiplies the counts of `claimed`; below 1 it makes routing to them cheaper.
        routed_E: Accumulates the number of tokens that chose each expert, over all layers; integers.
        learned_BS: Tokens that are counted, by default all; a sequence weighs by their number.

    Returns:
        A scalar in fp32.
    """
    losses = []
    for logits_TE in router_logits:
        probs_BSE = logits_TE.float().softmax(dim=-1).unflatten(0, (num_sequences, -1))
        num_tokens, num_experts = probs_BSE.shape[1:]
        chosen_BX = probs_BSE.detach().topk(top_k, dim=-1).indices.flatten(1)
        counted_BX = torch.ones_like(chosen_BX, dtype=torch.float32)
        if learned_BS is not None:
            counted_BX = learned_BS.float().repeat_interleave(top_k, dim=1)
        counts_BE = probs_BSE.new_zeros(num_sequences, num_experts).scatter_add_(1, chosen_BX, counted_BX)
        if routed_E is not None:
            routed_E += counts_BE.sum(dim=0).to(routed_E.dtype)
        if claimed and claimed_factor != 1.0:
            counts_BE[:, list(claimed)] *= claimed_factor
        if learned_BS is None:
            share_BE = counts_BE / (num_tokens * top_k)
            losses.append(num_experts * (share_BE * probs_BSE.mean(dim=1)).sum(dim=-1).mean())
        else:
            learned_B1 = learned_BS.sum(dim=1, keepdim=True)
            share_BE = counts_BE / (learned_B1.clamp(min=1) * top_k)
            sums_BE = (probs_BSE * learned_BS.unsqueeze(-1)).sum(dim=1)
            losses.append(num_experts * (share_BE * sums_BE).sum() / learned_B1.sum().clamp(min=1))
    return torch.stack(losses).mean()


def router_z_loss(router_logits: Sequence[Tensor], learned_BS: Tensor | None = None) -> Tensor:
    """Return the mean over layers and tokens of the squared log-partition of `[T, E]` logits, which keeps them small.

    Source: ST-MoE, equation 5 (https://arxiv.org/abs/2202.08906).
    """
    squares = (logits_TE.float().logsumexp(dim=-1).square() for logits_TE in router_logits)
    return torch.stack([_mean(squares_T, learned_BS) for squares_T in squares]).mean()


def _mean(values_T: Tensor, learned_BS: Tensor | None) -> Tensor:
    """Return the mean over the tokens that are counted."""
    if learned_BS is None:
        return values_T.mean()
    return (values_T * learned_BS.flatten()).sum() / learned_BS.sum().clamp(min=1)


class LossParts(NamedTuple):
    """fp32 scalars of one forward pass, in a tuple because DDP and FSDP look for tensors in tuples only."""

    total: Tensor
    """Weighted sum of cross entropy, `balance_loss`, `router_z_loss` and the outputs' z-loss; the one with a graph."""
    cross_entropy: Tensor
    """Mean over tokens, in nats."""


class TrainingLoss(nn.Module):
    """The model and its loss as one module for DDP, which reduces only the gradients of its own forward pass.

    Attributes:
        routed_E: Tokens that have chosen each expert, over layers and calls, on the device, so that counting never
            synchronises; None before the first call, and a reader may reset it to None.
    """

    def __init__(self, slot_model: SlotModel, train: TrainConfig) -> None:
        super().__init__()
        self.module = slot_model.module
        self.slot_model = slot_model
        self.train_config = train
        self.routed_E: Tensor | None = None

    def forward(self, tokens_BS1: LongTensor, claimed_factor: float = 1.0) -> LossParts:
        """Return `causal_lm_loss` of `[B, S + 1]` tokens."""
        if self.routed_E is None:
            self.routed_E = torch.zeros(self.slot_model.num_slots, dtype=torch.int64, device=tokens_BS1.device)
        return causal_lm_loss(
            self.module,
            tokens_BS1,
            train=self.train_config,
            top_k=getattr(self.slot_model.config, "num_experts_per_tok", 0),
            claimed=self.slot_model.claimed,
            claimed_factor=claimed_factor,
            routed_E=self.routed_E if len(self.routed_E) else None,  # experts that no slots stand for are not counted
        )


def causal_lm_loss(
    module: nn.Module,
    tokens_BS1: LongTensor,
    *,
    train: TrainConfig,
    top_k: int,
    claimed: Sequence[int] = (),
    claimed_factor: float = 1.0,
    routed_E: Tensor | None = None,
) -> LossParts:
    """Compute next-token cross entropy plus the router's losses, under autocast if `train.precision` is bf16.

    Each part is a mean over targets, so that microbatches, weighted by their `num_targets`, add up to the batch.

    Of `[B, S + 1]` tokens, the first S are the input, the last S the targets; marked ones (`data/windows.py`) are no
    targets. `top_k` is 0 of a dense model, which has no router; the other arguments are those of `balance_loss`.
    """
    inputs, learned_BS = model_inputs(module, tokens_BS1)
    with (
        torch.autocast(tokens_BS1.device.type, torch.bfloat16, enabled=train.precision == "bf16"),
        _loss_in_head(module, tokens_BS1, learned_BS, train.output_z_loss, train.precision) as is_in_head,
    ):
        options = {"output_router_logits": True} if top_k else {}
        output = module(**inputs, **options, use_cache=False)
    losses = output.logits if is_in_head else _loss_of(output.logits, tokens_BS1, learned_BS, train.output_z_loss)
    total, cross_entropy = losses.unbind()
    if top_k:
        balance = balance_loss(
            output.router_logits,
            top_k,
            num_sequences=len(tokens_BS1),
            claimed=claimed,
            claimed_factor=claimed_factor,
            routed_E=routed_E,
            learned_BS=learned_BS,
        )
        z = router_z_loss(output.router_logits, learned_BS)
        total = total + train.balance_loss * balance + train.router_z_loss * z
    return LossParts(total, cross_entropy.detach())


def num_targets(tokens_BS1: Tensor) -> int:
    """Return the number of tokens of `[B, S + 1]` that are learned: all behind the first, but marked ones."""
    return int((tokens_BS1[:, 1:] >= 0).sum())


def model_inputs(module: nn.Module, tokens_BS1: Tensor) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return what a model reads of `[B, S + 1]` tokens, and which inputs have a target (`[B, S]`; None: all).

    If a document of two tokens or more begins behind the first token, positions start again at each document. From
    them transformers makes attention that stays within documents. Its flash attention does so for single rows only:
    all sequences are one row there, and logits are `[1, B S, V]`.
    """
    learned_BS = tokens_BS1[:, 1:] >= 0
    if not (tokens_BS1 < 0).any():
        return {"input_ids": tokens_BS1[:, :-1]}, None
    begins_BS1 = (tokens_BS1 < 0) & (tokens_BS1 > CONTEXT // 2)
    ids_BS = token_ids(tokens_BS1)[:, :-1]
    # Behind padding and documents of one token nothing is learned, so what they see makes no difference.
    if not (begins_BS1[:, 1:-1] & ~begins_BS1[:, 2:]).any():
        return {"input_ids": ids_BS}, learned_BS
    index_S = torch.arange(ids_BS.shape[1], device=ids_BS.device)
    starts_BS = torch.where(begins_BS1[:, :-1], index_S, 0).cummax(dim=1).values
    inputs = {"input_ids": ids_BS, "position_ids": index_S - starts_BS}
    if "flash" in str(getattr(module.config, "_attn_implementation", None)):
        inputs = {name: tensor_BS.reshape(1, -1) for name, tensor_BS in inputs.items()}
    return inputs, learned_BS


def token_ids(tokens: Tensor) -> Tensor:
    """Return the ids of tokens that may be marked as in `data/windows.py`."""
    ids = torch.where(tokens > CONTEXT // 2, ~tokens, tokens - CONTEXT)
    return torch.where(tokens < 0, ids, tokens)


def held_out_loss(module: nn.Module, batches: Iterable[LongTensor]) -> float:
    """Return the mean cross entropy in nats per token over `[B, S + 1]` batches of any sizes, in evaluation mode.

    Raises:
        DataError: `batches` is empty.
    """
    device = next(module.parameters()).device
    was_training = module.training
    module.eval()
    nats, num_tokens = 0.0, 0
    try:
        with torch.no_grad():
            for batch_BS1 in batches:
                tokens_BS1 = batch_BS1.to(device)
                inputs, learned_BS = model_inputs(module, tokens_BS1)
                with _loss_in_head(module, tokens_BS1, learned_BS) as is_in_head:
                    logits = module(**inputs, use_cache=False).logits
                losses = logits if is_in_head else _loss_of(logits, tokens_BS1, learned_BS)
                count = num_targets(tokens_BS1)
                nats += losses[1].item() * count
                num_tokens += count
    finally:
        module.train(was_training)
    if not num_tokens:
        raise DataError("the held-out set is empty; raise data.held_out_fraction or add text")
    return nats / num_tokens


def _loss_of(logits_BSV: Tensor, tokens_BS1: Tensor, learned_BS: Tensor | None, z_factor: float = 0.0) -> Tensor:
    """Return the cross entropy with the outputs' z-loss, and without, `[2]`; the second has no graph.

    The log-partition is the target's logit plus its cross entropy.

    Source of the z-loss: PaLM, section 5 (https://arxiv.org/abs/2204.02311).
    """
    logits_TV, targets_T = logits_BSV.float().flatten(0, 1), tokens_BS1[:, 1:].flatten().clamp(min=0)
    nats_T = F.cross_entropy(logits_TV, targets_T, reduction="none")
    total = cross_entropy = _mean(nats_T, learned_BS)
    if z_factor:
        partition_T = nats_T + logits_TV.gather(1, targets_T[:, None])[:, 0]
        total = total + z_factor * _mean(partition_T.square(), learned_BS)
    return torch.stack([total, cross_entropy.detach()])


# ---------------------------------------------------------------------- the loss in the head


@contextlib.contextmanager
def _loss_in_head(
    module: nn.Module,
    tokens_BS1: Tensor,
    learned_BS: Tensor | None,
    z_factor: float = 0.0,
    precision: Literal["fp32", "bf16"] = "fp32",
) -> Iterator[bool]:
    """Within the block, let a model's head return what `_loss_of` returns of its logits.

    The head computes within the model's own forward pass, where FSDP has gathered its weight. Yields whether it does: a
    head that this program has not built is left alone.
    """
    config: Any = module.config
    # A composite model has its vocabulary elsewhere, and some models change what their head returns.
    if config.model_type not in FAMILIES or any(getattr(config, name, None) for name in LOGIT_SETTINGS):
        yield False
        return
    head: Any = module.get_output_embeddings()  # type: ignore[operator]
    assert isinstance(head, nn.Linear) and head.bias is None
    targets_T = tokens_BS1[:, 1:].flatten().clamp(min=0)
    num_rows = head_rows(len(targets_T), config.vocab_size, precision)

    def losses(hidden_BSD: Tensor) -> Tensor:
        has_graph, dtype = torch.is_grad_enabled(), compute_dtype(hidden_BSD)
        options = learned_BS, z_factor, num_rows, dtype, has_graph
        return HeadLoss.apply(hidden_BSD.flatten(0, 1), head.weight, targets_T, *options)

    head.forward = losses
    try:
        yield True
    finally:
        del head.forward


class HeadLoss(torch.autograd.Function):
    """Mean cross entropy and z-loss of a linear head, chunk by chunk; the forward pass computes the gradients too.

    Memory holds the logits of one chunk, which become their own gradient, and no product is computed twice. The
    weight's gradient adds up over chunks in the weight's own precision.

    Source: Liger Kernel, section 3.2 (https://arxiv.org/abs/2410.10989), without its kernel.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        targets_T: Tensor,
        learned_BS: Tensor | None,
        z_factor: float,
        num_rows: int,
        dtype: torch.dtype,
        has_graph: bool,
    ) -> Tensor:
        """Return what `_loss_of` returns, in fp32, from products of `num_rows` tokens in `dtype`."""
        rounded_TD, rounded_PD = hidden_TD.to(dtype), _aligned(weight_VD.to(dtype))
        nats_T = torch.empty(len(targets_T), device=hidden_TD.device)
        share_T, partition_T = torch.full_like(nats_T, 1 / len(targets_T)), torch.empty_like(nats_T)
        if learned_BS is not None:
            share_T = learned_BS.flatten() / learned_BS.sum().clamp(min=1)
        grad_TD = torch.empty_like(hidden_TD) if has_graph else None
        is_trained = has_graph and ctx.needs_input_grad[1]  # else a frozen head
        grad_VD = torch.zeros_like(weight_VD) if is_trained else None
        for start in range(0, len(targets_T), num_rows):
            rows = slice(start, start + num_rows)
            chunk = rounded_TD[rows], targets_T[rows], share_T[rows], z_factor, rounded_PD, len(weight_VD)
            nats_T[rows], partition_T[rows] = _add_chunk(*chunk, None if grad_TD is None else grad_TD[rows], grad_VD)
        if grad_TD is not None:
            ctx.save_for_backward(grad_TD)
        ctx.grad_VD = grad_VD  # which is no activation
        cross_entropy = _mean(nats_T, learned_BS)
        return torch.stack([cross_entropy + z_factor * _mean(partition_T.square(), learned_BS), cross_entropy])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_2: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden_TD` and `weight_VD`, once: they are scaled where they lie."""
        grad_TD, grad_VD = ctx.saved_tensors[0].mul_(grad_2[0]), ctx.grad_VD
        ctx.grad_VD = None
        return (grad_TD, None if grad_VD is None else grad_VD.mul_(grad_2[0]), *6 * [None])


def _aligned(weight_VD: Tensor) -> Tensor:
    """Return the weight, on a GPU with rows of zeros up to a multiple of `ALIGNED_ROWS`."""
    missing = -len(weight_VD) % ALIGNED_ROWS if weight_VD.device.type in ALIGNED_DEVICES else 0
    return F.pad(weight_VD, (0, 0, 0, missing)) if missing else weight_VD


def _add_chunk(  # a function, because a loop would keep the last chunk's logits until it has the next one's
    rounded_CD: Tensor,
    targets_C: Tensor,
    share_C: Tensor,
    z_factor: float,
    rounded_PD: Tensor,
    vocab_size: int,
    grad_CD: Tensor | None,
    grad_VD: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return each token's cross entropy and log-partition; write its gradient, and add the chunk's to the weight's."""
    logits_CP = F.linear(rounded_CD, rounded_PD).float()
    logits_CV, target_C1 = logits_CP[:, :vocab_size], targets_C[:, None]
    chosen_C = logits_CV.gather(1, target_C1)[:, 0]
    highest_C1 = logits_CV.amax(dim=1, keepdim=True)
    sum_C = logits_CV.sub_(highest_C1).exp_().sum(dim=1)
    partition_C = sum_C.log() + highest_C1[:, 0]
    if grad_CD is not None:
        logits_CV.mul_((share_C * (1 + 2 * z_factor * partition_C) / sum_C)[:, None])
        logits_CV.scatter_add_(1, target_C1, -share_C[:, None])
        logits_CP[:, vocab_size:] = 0.0
        rounded_CP = logits_CP.to(rounded_PD.dtype)
        grad_CD.copy_(rounded_CP @ rounded_PD)
        if grad_VD is not None and rounded_CP.dtype == grad_VD.dtype:
            grad_VD.addmm_(rounded_CP[:, :vocab_size].T, rounded_CD)
        elif grad_VD is not None:
            grad_VD += (rounded_CP.T @ rounded_CD)[:vocab_size]
    return partition_C - chosen_C, partition_C
