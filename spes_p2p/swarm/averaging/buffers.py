"""Memory that a peer shares with its averager's process: vectors to send, means, and residuals."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.codecs.format import Format
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.names import SHARED, VectorName


class Buffers:
    """Shared memory for one group.

    Args:
        format: The largest format in which the group's vector travels.

    Attributes:
        source: The encoded vector to send, uint8.
        result: The encoded mean, uint8.
        residual: Rounding error that earlier committed means left in this reducer's slice of the delta, fp32.
        new_residual: Rounding error of the newest mean, committed or not.
    """

    def __init__(self, format: Format) -> None:
        self.source = _shared(torch.uint8, format.num_bytes)
        self.result = _shared(torch.uint8, format.num_bytes)
        # The kernel backs these with memory only where they are written: in this reducer's own slice.
        numel = 0 if format.is_exact else format.segments[0].numel
        self.residual = _shared(torch.float32, numel)
        self.new_residual = _shared(torch.float32, numel)
        self.has_residual = False

    def reset_residual(self) -> None:
        if self.has_residual:
            self.residual.zero_()
            self.has_residual = False


def _shared(dtype: torch.dtype, numel: int) -> Tensor:
    storage = torch.UntypedStorage._new_shared(max(numel, 1) * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload]


class BufferPool:
    """Buffers for every group that a peer may be in at once: those of `shared`, then one for each slot it holds.

    Args:
        encoding: How vectors travel.
        max_slots: Slots that the peer may hold at once.
    """

    def __init__(self, encoding: DeltaEncoding, max_slots: int) -> None:
        names = [SHARED, *[VectorName.of_slot(0)] * max_slots]
        self._all = [Buffers(encoding.format(name, 0)) for name in names]  # all segments travel in round 0
        self._slots: tuple[int, ...] = ()

    def of(self, slots: tuple[int, ...]) -> dict[VectorName, Buffers]:
        """Return the buffers of a peer that holds these slots, by group."""
        return dict(zip([SHARED, *map(VectorName.of_slot, slots)], self._all, strict=False))

    def assign(self, slots: tuple[int, ...]) -> dict[VectorName, Buffers]:
        """Return the buffers of `shared` and these slots; if the slots change, all residuals of slots are discarded."""
        if slots != self._slots:
            for buffers in self._all[1:]:
                buffers.reset_residual()
            self._slots = slots
        return self.of(slots)

    def keep_residuals(self, residuals: Mapping[VectorName, tuple[int, Tensor]]) -> None:
        """Add what encoding the committed means has left over to a later round's means; as in `Attempt.residuals`."""
        buffers = self.of(self._slots)
        for name, (start, residual) in residuals.items():
            buffers[name].residual[start : start + residual.numel()] = residual
            buffers[name].has_residual = True

    def reset_residuals(self) -> None:
        """Discard all residuals: the peer did not commit the round, so its next deltas have another start."""
        for buffers in self._all:
            buffers.reset_residual()
