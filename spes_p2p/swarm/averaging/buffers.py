"""Memory that a peer shares with its averager's process: what it sends, what comes of it, and what rounding leaves."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from spes_p2p.codecs import Format
from spes_p2p.swarm.averaging.encoding import DeltaEncoding
from spes_p2p.swarm.roster import SHARED, slot_name


class Buffers:
    """What the averager's process shares with its peer for one group: bytes in, bytes out, and rounding errors.

    Args:
        format: The largest that may travel here.
    """

    def __init__(self, format: Format) -> None:
        self.source = _shared(torch.uint8, format.num_bytes)
        self.result = _shared(torch.uint8, format.num_bytes)
        # The kernel gives these memory only where they are written to: in this reducer's own slice.
        numel = 0 if format.is_exact else format.segments[0].numel
        self.error = _shared(torch.float32, numel)
        self.new_error = _shared(torch.float32, numel)
        self._is_clean = True

    def left(self, start: int, stop: int) -> tuple[int, Tensor]:
        """Return where the slice starts that this peer has reduced, and what that has left over."""
        return start, self.new_error[start:stop]

    def keep(self, start: int, error: Tensor) -> None:
        """Let what a committed mean has left over go with a later round's."""
        self.error[start : start + error.numel()] = error
        self._is_clean = False

    def forget_error(self) -> None:
        """Give up what was left over."""
        if not self._is_clean:
            self.error.zero_()
            self._is_clean = True


def _shared(dtype: torch.dtype, numel: int) -> Tensor:
    storage = torch.UntypedStorage._new_shared(max(numel, 1) * dtype.itemsize, device="cpu")
    return torch.empty(0, dtype=dtype).set_(storage, 0, (numel,))  # type: ignore[call-overload]


class BufferPool:
    """Buffers for every group that a peer may be in at once: first those of `shared`, then one for each slot.

    Args:
        encoding: How vectors travel.
        max_slots: Slots that the peer may hold at once.

    Attributes:
        all: In that order.
    """

    def __init__(self, encoding: DeltaEncoding, max_slots: int) -> None:
        self.all = [
            Buffers(format) for format in (encoding.largest(SHARED), *[encoding.largest(slot_name(0))] * max_slots)
        ]
        self._slots: tuple[int, ...] = ()

    def assign(self, slots: tuple[int, ...]) -> None:
        """Give the places to these slots; errors of slots that move are given up."""
        if slots != self._slots:
            for buffers in self.all[1:]:
                buffers.forget_error()
            self._slots = slots

    @property
    def by_name(self) -> dict[str, Buffers]:
        """Those in use, by the name of their group."""
        return dict(zip([SHARED, *map(slot_name, self._slots)], self.all, strict=False))

    def fill(self, encoded: Mapping[str, Tensor]) -> None:
        """Put in what is to be sent."""
        for name, buffers in self.by_name.items():
            buffers.source[: encoded[name].numel()].copy_(encoded[name])

    def keep_errors(self, left: Mapping[str, tuple[int, Tensor]]) -> None:
        """Let what the means of committed groups have left over go with a later round's.

        Args:
            left: As in the attempt.
        """
        places = self.by_name
        for name, (start, error) in left.items():
            places[name].keep(start, error)

    def forget_errors(self) -> None:
        """Give up what was left over, because the anchors have been replaced."""
        for buffers in self.all:
            buffers.forget_error()
