"""Where the experts live that this peer does not train.

Shape legend: O output features, I input features of one expert's weight.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.errors import ConfigError

PRECISIONS: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


class FrozenStore:
    """Keeps each frozen expert's weights `[O, I]` small, outside a module's parameters and buffers.

    A stored tensor is never written to, only replaced: a backward pass under way keeps the weights of its forward pass.

    Args:
        precision: `fp32`, or `bf16` for half the memory; `put` rounds.
        device: Where the experts are kept.

    Raises:
        ConfigError: `precision` is unknown.
    """

    def __init__(self, precision: str, device: torch.device | str = "cpu") -> None:
        if precision not in PRECISIONS:
            raise ConfigError(f"storage={precision!r} is unknown; choose one of {', '.join(PRECISIONS)}")
        self.precision = precision
        self.device = torch.device(device)
        self._experts: dict[int, dict[str, Tensor]] = {}

    def __contains__(self, expert: int) -> bool:
        return expert in self._experts

    def __len__(self) -> int:
        return len(self._experts)

    def put(self, expert: int, tensors: Mapping[str, Tensor]) -> None:
        """Stores rounded copies of one expert's tensors, in place of those it had."""
        dtype = PRECISIONS[self.precision]
        self._experts[expert] = {
            name: tensor.detach().to(self.device, dtype, copy=True).contiguous() for name, tensor in tensors.items()
        }

    def get(self, expert: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of one expert's tensors in `dtype`."""
        return {name: tensor.to(dtype, copy=True) for name, tensor in self._experts[expert].items()}

    def stored(self, expert: int, name: str) -> Tensor:
        """One tensor as it is kept, for reading only."""
        return self._experts[expert][name]

    def remove(self, expert: int) -> None:
        """Forgets one expert.

        Raises:
            KeyError: the expert is not here.
        """
        del self._experts[expert]

    def nbytes(self) -> int:
        """Bytes of all stored tensors."""
        return sum(tensor.nbytes for tensors in self._experts.values() for tensor in tensors.values())

    def to(self, device: torch.device) -> None:
        """Moves every expert to `device`, in its stored precision."""
        self.device = device
        self._experts = {
            expert: {name: tensor.to(device) for name, tensor in tensors.items()}
            for expert, tensors in self._experts.items()
        }
