"""How fast this machine would train a run, measured before it takes part."""

from __future__ import annotations

import time

import torch

from spes_p2p.config import MachineConfig, ModelConfig, RunConfig
from spes_p2p.model.build import build_slot_model
from spes_p2p.model.loss import TrainingLoss
from spes_p2p.planner.size import model_size

MEASURE_SECONDS = 10.0
PIECE_PARAMS = 100_000_000
"""A larger model is measured by a piece of about this size."""
PIECE_VOCABULARY, PIECE_TOKENS = 8192, 8192
"""Most entries of a piece's vocabulary, and most tokens of one pass."""
FIRST_TOKENS = 32


def measured_speed(
    run: RunConfig, vocab_size: int, claimed: int, machine: MachineConfig, device: str
) -> tuple[float, str]:
    """Return the tokens per second of forward and backward passes, and in words what was measured.

    Of a model with more than PIECE_PARAMS, a piece with fewer layers, experts and entries is measured, and the model's
    speed follows from both's floating-point operations. The optimizer's step is not in it.

    Raises:
        ConfigError: this machine cannot compute so.
    """
    model, share = run.model, claimed / max(1, run.num_slots)
    small = piece(model, vocab_size)
    vocabulary = vocab_size if small == model else min(vocab_size, PIECE_VOCABULARY)
    slots = build_slot_model(
        small,
        vocab_size=vocabulary,
        sequence_length=run.data.sequence_length,
        seed=0,
        claimed=range(round(share * small.num_experts)),
        storage=machine.storage or run.frozen_storage,
        kernel=machine.kernel,
        attention=machine.attention,
        device=device,
    )
    module = slots.module
    torch.nn.Module.to(module, torch.device(device))
    if machine.activation_checkpointing:
        module.activation_checkpointing_enable({"use_reentrant": False})
    loss, began, count, speed = TrainingLoss(slots, run.train), time.monotonic(), FIRST_TOKENS, 0.0
    while True:
        length = min(count, run.data.sequence_length)
        tokens_BT1 = torch.randint(vocabulary, (count // length, length + 1), device=device)
        started = time.monotonic()
        parts = loss(tokens_BT1)
        parts.total.backward()
        parts.cross_entropy.item()  # waits for a GPU
        module.zero_grad()
        seconds = time.monotonic() - started
        ratio = token_operations(small, vocabulary, share, length) / token_operations(model, vocab_size, share, length)
        speed = tokens_BT1[:, 1:].numel() / seconds * ratio
        if time.monotonic() - began + 2 * seconds > MEASURE_SECONDS:
            break
        count = min(2 * count, PIECE_TOKENS)
    cut = f"{small.num_layers} of {model.num_layers} layers, {small.num_experts} of {model.num_experts} experts"
    return speed, "the model itself" if small == model else f"a piece ({cut})"


def piece(model: ModelConfig, vocab_size: int) -> ModelConfig:
    """Return a model, or a piece of it that any machine can hold."""
    if model_size(model, vocab_size).total_params <= PIECE_PARAMS or model.start is not None:
        return model
    small = model.model_copy(update={"num_experts": min(model.num_experts, 2 * model.top_k), "num_layers": 1})
    layer = model_size(small, 0).total_params
    layers = max(1, min(model.num_layers, PIECE_PARAMS // layer))
    return small.model_copy(update={"num_layers": layers})


def token_operations(model: ModelConfig, vocab_size: int, share: float, length: int) -> float:
    """Return the floating-point operations per token of a forward and backward pass over sequences of `length`.

    A matrix takes two per weight in each of the forward pass, its inputs' gradients and its own; the latter only of the
    `share` of the experts that is trained.
    """
    size = model_size(model, vocab_size)
    dense = size.matrix_params + vocab_size * model.hidden_size
    scores = model.num_layers * length * model.head_dim * model.num_heads
    return 6 * (dense + scores) + (4 + 2 * share) * model.top_k * size.slot_params
