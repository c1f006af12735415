"""Memory that a peer shares with its averager's process: vectors to send, means, and residuals."""

from __future__ import annotations

import mmap
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
        result: The encoded mean, uint8; unused by a sole holder, whose source is the mean.
        residual: Rounding error that earlier committed means left in this reducer's slice of the delta, fp32.
        new_residual: Rounding error of the newest mean, committed or not.
    """

    def __init__(self, format: Format) -> None:
        numel = 0 if format.is_exact else format.segments[0].numel
        memories = [_shared(size) for size in (format.num_bytes, format.num_bytes, 4 * numel, 4 * numel)]
        self._of_round = memories[:3]
        source, result, new_residual, residual = map(_bytes_of, memories)
        self.source = source
        self.result = result
        self.new_residual = new_residual.view(torch.float32)
        self.residual = residual.view(torch.float32)
        self.has_residual = False

    def mean(self, *, is_own: bool) -> Tensor:
        """Return the encoded mean of a group: a sole holder's own vector, so that its result takes no memory."""
        return self.source if is_own else self.result

    def free(self) -> None:
        """Give back the memory of all but the residual; what is read from it is zeros."""
        for memory in filter(None, self._of_round):
            memory.madvise(mmap.MADV_REMOVE)

    def reset_residual(self) -> None:
        if self.has_residual:
            self.residual.zero_()
            self.has_residual = False


def _shared(num_bytes: int) -> mmap.mmap | None:
    """Return zeros that forks share; None for none.

    The kernel backs them with memory where they are written; residuals, in this reducer's own slice. Unlike torch's
    shared tensors they have no name, so that no killed process can leave them behind.
    """
    return mmap.mmap(-1, num_bytes) if num_bytes else None


def _bytes_of(memory: mmap.mmap | None) -> Tensor:
    return torch.empty(0, dtype=torch.uint8) if memory is None else torch.frombuffer(memory, dtype=torch.uint8)


class BufferPool:
    """Buffers for every group that a peer may be in at once: of `shared`, each slot it holds, each that it replicates.

    Args:
        encoding: Formats of the vectors.
        max_slots: Slots that the peer may hold and replicate at once.
    """

    def __init__(self, encoding: DeltaEncoding, max_slots: int) -> None:
        names = [SHARED, *[VectorName.of_slot(0)] * max_slots]
        self._all = [Buffers(encoding.format(name, 0)) for name in names]  # all segments travel in round 0
        self._slots: tuple[int, ...] = ()
        self._replicas: tuple[int, ...] = ()

    def of(self, slots: tuple[int, ...]) -> dict[VectorName, Buffers]:
        """Return the buffers of a peer with these slots, by group."""
        return dict(zip([SHARED, *map(VectorName.of_slot, slots)], self._all, strict=False))

    def assign(self, slots: tuple[int, ...], replicas: tuple[int, ...] = ()) -> dict[VectorName, Buffers]:
        """Return the buffers of `shared` and of slots that the peer holds and replicates.

        If the held slots change, all residuals of slots are discarded; if the others do, theirs.
        """
        if (slots, replicas) != (self._slots, self._replicas):
            for buffers in self._all[1 + (len(slots) if slots == self._slots else 0) :]:
                buffers.reset_residual()
            self._slots, self._replicas = slots, replicas
        return self.of((*slots, *replicas))

    def take(self, slots: tuple[int, ...], encoded: dict[VectorName, Tensor]) -> None:
        """Move encoded vectors of `shared` and these slots to where they are sent from, if they are not there yet."""
        places = {buffers.source.data_ptr() for buffers in self._all}
        own = self.of(slots)
        for name, buffers in own.items():  # one at another's place, because slots have changed, would be overwritten
            if encoded[name].data_ptr() in places - {buffers.source.data_ptr()}:
                encoded[name] = encoded[name].clone()
        for name, buffers in own.items():
            place = buffers.source[: encoded[name].numel()]
            if encoded[name].data_ptr() != place.data_ptr():
                place.copy_(encoded[name])
            encoded[name] = place

    def keep_residuals(self, residuals: Mapping[VectorName, tuple[int, Tensor]]) -> None:
        """Add what encoding the committed means has left over to a later round's means; as in `Attempt.residuals`."""
        buffers = self.of((*self._slots, *self._replicas))
        for name, (start, residual) in residuals.items():
            buffers[name].residual[start : start + residual.numel()] = residual
            buffers[name].has_residual = True

    def free(self) -> None:
        """Give back the memory of the last round's vectors, which has been decided."""
        for buffers in self._all:
            buffers.free()

    def reset_residuals(self) -> None:
        """Discard all residuals: the peer did not commit the round, so its next deltas have another start."""
        for buffers in self._all:
            buffers.reset_residual()
