"""The order of a bundle's named tensors in one flat vector.

Shape legend: N elements of a bundle.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from spes_p2p.parts import whole

Shape = tuple[int, ...]


class Layout:
    """The order and shapes in which a bundle's named tensors lie in one flat fp32 vector.

    Every peer derives the same layout from the run's model, so a bundle crosses the network as bare numbers.

    Args:
        shapes: Shape of each tensor by name; laid out in sorted order of the names.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes: dict[str, Shape] = {name: tuple(shapes[name]) for name in sorted(shapes)}
        self.sizes = [int(np.prod(shape, dtype=np.int64)) for shape in self.shapes.values()]
        self.numel = sum(self.sizes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return the tensors as one new fp32 CPU vector [N].

        Raises:
            ValueError: names or shapes differ from the layout's.
        """
        if set(tensors) != set(self.shapes):
            raise ValueError(f"tensors {sorted(tensors)[:3]}... are not the layout's {list(self.shapes)[:3]}...")
        flat_N = torch.empty(self.numel, dtype=torch.float32)
        for piece, (name, shape) in zip(flat_N.split(self.sizes), self.shapes.items(), strict=True):
            if tuple(tensors[name].shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensors[name].shape)}, the layout says {shape}")
            piece.copy_(whole(tensors[name].detach()).reshape(-1))
        return flat_N

    def unflatten(self, flat_N: Tensor) -> dict[str, Tensor]:
        """Return views of `flat_N` by name.

        Raises:
            ValueError: `flat_N` has another length.
        """
        if flat_N.numel() != self.numel:
            raise ValueError(f"vector of {flat_N.numel()} elements does not fit a layout of {self.numel}")
        pieces = flat_N.split(self.sizes)
        return {name: piece.view(shape) for piece, (name, shape) in zip(pieces, self.shapes.items(), strict=True)}
