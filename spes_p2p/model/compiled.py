"""A model's attention, norms and dense layers, fused by `torch.compile`; experts have kernels of their own."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from spes_p2p.errors import one_line
from spes_p2p.model.bank import ExpertBank

log = logging.getLogger(__name__)


def compile_parts(module: nn.Module, device: torch.device) -> None:
    """Have the parts of each layer that hold no experts, and the last norm, compiled at their first use.

    Parts of all layers have the same code. If this machine has no compiler, a log line says so, and nothing changes.
    """
    try:
        torch.compile(lambda x: 2 * x)(torch.ones(2, device=device))
    except (RuntimeError, OSError) as error:
        log.warning("--compile auto: torch.compile does not work here (%s); training goes on without", one_line(error))
        return
    torch._dynamo.config.suppress_errors = True  # what it cannot compile runs as it is, with a log line
    decoder: Any = module.model
    parts = [part for layer in decoder.layers for part in layer.children()]
    for part in (*parts, decoder.norm):
        if not any(isinstance(inner, ExpertBank) for inner in part.modules()):
            part.compile()
