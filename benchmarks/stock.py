"""Stock Hugging Face training of a run's model: what this project's pace is compared with."""

from __future__ import annotations

import torch
from torch import LongTensor, nn
from transformers import PreTrainedModel

from spes_p2p.config import RunConfig
from spes_p2p.model.build import hf_config, model_class, stock_model


def default_stock_model(run: RunConfig, vocab_size: int) -> PreTrainedModel:
    """The stock model with the run's initial weights, its own choice of kernels, and its own balance loss."""
    config = hf_config(run.model, vocab_size, run.data.sequence_length)
    config.output_router_logits = True
    config.router_aux_loss_coef = run.train.balance_loss
    module = model_class(run.model.family)(config)
    module.load_state_dict(stock_model(run.model, vocab_size, run.data.sequence_length, run.seed).state_dict())
    return module.train()


def stock_step(module: nn.Module, optimizer: torch.optim.Optimizer, tokens_BT1: LongTensor, run: RunConfig) -> float:
    """One step as a Hugging Face training loop makes it, on as many targets as ours; return its loss."""
    targets_BT = tokens_BT1[:, 1:].contiguous()
    with torch.autocast(tokens_BT1.device.type, torch.bfloat16, enabled=run.train.precision == "bf16"):
        output = module(input_ids=tokens_BT1[:, :-1], labels=targets_BT, shift_labels=targets_BT, use_cache=False)
    output.loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), run.train.clip_norm)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return float(output.loss.item())
