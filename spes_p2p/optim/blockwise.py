"""bitsandbytes' AdamW with 8-bit state, and how a parameter is updated piece by piece."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from spes_p2p.errors import ConfigError

MIN_8BIT_SIZE = 4096
"""Parameters with fewer elements keep their state in fp32, as in bitsandbytes."""
BLOCK_SIZE = 256
"""Elements that share a scale in 8-bit state; fixed in bitsandbytes."""
PIECE_NUMEL = 2**20
"""Elements that a CPU updates at once with 8-bit state: whole blocks, with temporaries of some MB."""


def is_quantised(param: Parameter) -> bool:
    """Tell whether a parameter's state is in 8 bits."""
    return param.numel() >= MIN_8BIT_SIZE


def adamw8bit(device: torch.device) -> Callable[..., torch.optim.Optimizer]:
    """Return bitsandbytes' AdamW8bit, which updates piece by piece, after a trial step on a small tensor.

    Raises:
        ConfigError: bitsandbytes is missing, or the trial failed.
    """
    remedy = "pip install 'bitsandbytes>=0.50', or set adamw"
    try:
        import bitsandbytes
    except ImportError as error:
        raise ConfigError(f"optimizer adamw8bit needs bitsandbytes ({error}); {remedy}") from error
    trial = Parameter(torch.zeros(MIN_8BIT_SIZE, device=device))
    trial.grad = torch.zeros_like(trial)
    try:
        bitsandbytes.optim.AdamW8bit([trial]).step()
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"optimizer adamw8bit does not work on {device.type} here ({reason}); {remedy}") from error
    return _piecewise(bitsandbytes.optim.AdamW8bit)


def _piecewise(base: type[torch.optim.Optimizer]) -> type[torch.optim.Optimizer]:
    """Make a bitsandbytes optimizer update a large parameter piece by piece, with gradients in a narrower dtype or not.

    Stock reads narrow gradients as if they had the parameter's dtype, and on a CPU it makes several fp32 copies of all
    that it updates at once. Pieces are whole blocks, so the result is the same to the bit. A narrow gradient is dropped
    after its parameter's step.
    """

    class Piecewise(base):  # type: ignore[misc, valid-type]
        def update_step(self, group: dict[str, Any], p: Parameter, gindex: int, pindex: int) -> None:
            assert p.grad is not None
            narrow, grad, state = p.grad_dtype, p.grad, self.state[p]
            if not is_quantised(p):
                p.grad = None
                p.grad_dtype = p.dtype
                p.grad = grad.to(p.dtype)
                super().update_step(group, p, gindex, pindex)
            else:
                p.data = p.data.contiguous()
                size = PIECE_NUMEL if p.device.type == "cpu" else p.numel()
                for start in range(0, p.numel(), size):
                    here = slice(start, min(start + size, p.numel()))
                    step = self._update(group, p, grad, here, (gindex, pindex))
                state["step"] = step
            if grad.dtype != p.dtype:
                p.grad = None
                p.grad_dtype = narrow

        def _update(
            self, group: dict[str, Any], p: Parameter, grad: Tensor, here: slice, index: tuple[int, int]
        ) -> int:
            """Update elements of a parameter; return the number of the step."""
            blocks = slice(here.start // BLOCK_SIZE, -(-here.stop // BLOCK_SIZE))
            piece = Parameter(p.data.view(-1)[here])
            piece.grad = grad.reshape(-1)[here].to(p.dtype)
            self.state[piece] = state = dict(self.state[p])
            for kind, value in self.state[p].items():
                if kind.startswith("state"):
                    state[kind] = value.view(-1)[here]
                elif kind.startswith("absmax"):
                    state[kind] = value[blocks]
            super().update_step(group, piece, *index)
            del self.state[piece]
            return state["step"]

    return Piecewise
