"""What a codec is, and the two that hold every element by itself: fp32 and bf16.

Shape legend: N elements of a vector.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from spes_p2p.errors import ExchangeError

SMALLEST = 2.0**-126
"""The smallest positive number that every processor keeps; some take those below for 0."""


@dataclass(frozen=True)
class Codec(ABC):
    """Turns fp32 vectors into bytes and back: the same bytes and the same values on every machine.

    Vectors are contiguous and on the CPU; the machine is little-endian, as all are that torch trains on.
    """

    name = ""
    non_negative = False

    @abstractmethod
    def num_bytes(self, numel: int) -> int:
        """Returns the length of an encoded vector of `numel` elements."""

    @abstractmethod
    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        """Writes the bytes of vectors that lie one behind the other to `out`, uint8 [rows * num_bytes(N / rows)].

        Args:
            flat_N: The values.
            out: Where the bytes go.
            rows: How many vectors they are, all of the same length.

        Raises:
            ValueError: a value is NaN or infinite, too large, or negative where none may be.
        """

    @abstractmethod
    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        """Writes to `out_N` the fp32 values of what `encode` gave, uint8 [rows * num_bytes(N / rows)].

        Raises:
            ExchangeError: `encode` would not have written such bytes: their values are not finite, say.
        """

    def refusal(self) -> ValueError:
        """What to raise of values that cannot be encoded."""
        return ValueError(f"{self._bad} cannot be encoded; discard these values and take the last good ones")

    def malformed(self) -> ExchangeError:
        """What to raise of bytes that no codec of ours wrote."""
        return ExchangeError(f"payload holds {self._bad}; fetch it from another peer")

    @property
    def _bad(self) -> str:
        return "NaN, infinity or a negative second moment" if self.non_negative else "NaN or infinity"


class Fp32(Codec):
    """The values as they are: 32 bits an element."""

    name = "fp32"

    def num_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        if not _are_good(flat_N, self.non_negative):
            raise self.refusal()
        out.copy_(flat_N.view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        out_N.view(torch.uint8).copy_(data)
        if not _are_good(out_N, self.non_negative):
            raise self.malformed()


class NonNegativeFp32(Fp32):
    """fp32 of values that are never negative."""

    non_negative = True


class Bf16(Codec):
    """The values rounded to the nearest bf16, ties to even: 16 bits an element.

    The error is at most 2^-9 of an element's magnitude, or 2^-134 if that is more. Values above bf16's largest,
    3.39e38, are refused like infinity.
    """

    name = "bf16"

    def num_bytes(self, numel: int) -> int:
        return 2 * numel

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        rounded_N = flat_N.to(torch.bfloat16)
        if not _are_good(rounded_N, self.non_negative):
            raise self.refusal()
        out.copy_(rounded_N.view(torch.uint8))

    def decode(self, data: Tensor, out_N: Tensor, rows: int = 1) -> None:
        # a message may begin at an odd byte; its copy does not
        out_N.copy_(data.clone().view(torch.bfloat16))
        if not _are_good(out_N, self.non_negative):
            raise self.malformed()


class NonNegativeBf16(Bf16):
    """bf16 of values that are never negative, and of which none that is positive becomes 0."""

    non_negative = True

    def encode(self, flat_N: Tensor, out: Tensor, rows: int = 1) -> None:
        super().encode(flat_N.clamp(min=SMALLEST).where(flat_N > 0, flat_N), out)


def _are_good(values_N: Tensor, non_negative: bool) -> bool:
    """Returns whether all values are finite, and none is negative where none may be."""
    if not values_N.numel():
        return True
    # one pass; NaN comes out as both, and compares as false with everything
    least, most = (float(extreme) for extreme in torch.aminmax(values_N))
    return most < torch.inf and (least >= 0 if non_negative else least > -torch.inf)  # guard: finite-values
