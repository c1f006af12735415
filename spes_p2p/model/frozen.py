"""Where the experts live that this peer does not train.

Shape legend: O output features, I input features of one expert's weight, N = O * I, B blocks that share a scale.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import ModuleType
from typing import ClassVar, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from spes_p2p.codecs import dequantise_int8, quantise_int8
from spes_p2p.errors import ConfigError

W = TypeVar("W", bound="Weight")
GATE_UP, DOWN = "gate_up_proj", "down_proj"
WEIGHT_NAMES = (GATE_UP, DOWN)
"""Stock names of an expert's weights, in the order in which stock draws them."""
NF4_BLOCK = 64
NF4_PIECE = 2**16
"""Elements to pack at a time: on CPUs bitsandbytes takes some ten times their memory for it."""


class Weight(Protocol):
    """One expert's weight `[O, I]` however it is kept. It is never written to once it is in use, only replaced."""

    PARTS: ClassVar[tuple[str, ...]]
    """The tensors that it consists of, by name."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(O, I)`."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight `[O, I]` in `dtype`, for reading only and for a moment; no copy where it is kept so."""


@dataclass(frozen=True)
class Plain:
    """A weight kept as it is."""

    PARTS: ClassVar[tuple[str, ...]] = ("weight_OI",)
    weight_OI: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight_OI.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight_OI.to(dtype)


@dataclass(frozen=True)
class Int8:
    """A weight in 8 bits per element, and 32 per block of 128 for the scale."""

    PARTS: ClassVar[tuple[str, ...]] = ("values_N", "scales_B")
    values_N: Tensor
    scales_B: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight_OI: Tensor) -> Int8:
        return cls(*quantise_int8(weight_OI.reshape(-1)), tuple(weight_OI.shape))

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantise_int8(self.values_N, self.scales_B).view(self.shape).to(dtype)


@dataclass(frozen=True)
class Nf4:
    """A weight in 4 bits per element, and 32 per block of 64 for the scale; the last block is filled up.

    Source: QLoRA, section 3 (https://arxiv.org/abs/2305.14314), by bitsandbytes.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("packed", "scales_B")
    packed: Tensor
    scales_B: Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, weight_OI: Tensor) -> Nf4:
        if not torch.isfinite(weight_OI).all():
            raise ValueError("NaN or infinity cannot be held in nf4; discard these values and take the last good ones")
        whole_N = weight_OI.reshape(-1)
        if rest := len(whole_N) % NF4_BLOCK:
            whole_N = F.pad(whole_N, (0, NF4_BLOCK - rest))
        pieces = []
        for piece_N in whole_N.split(NF4_PIECE):
            packed, state = _bitsandbytes().quantize_4bit(piece_N.float(), blocksize=NF4_BLOCK, quant_type="nf4")
            pieces.append((packed, state.absmax))
        packed, scales_B = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        return cls(packed, scales_B, tuple(weight_OI.shape))

    def dense(self, dtype: torch.dtype) -> Tensor:
        functional = _bitsandbytes()
        state = functional.QuantState(
            absmax=self.scales_B,
            # One row per block: bitsandbytes 0.50 on CPUs silently mixes up rows that are no multiple of a block.
            shape=torch.Size((len(self.scales_B), NF4_BLOCK)),
            code=_nf4_code(self.packed.device),
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )
        flat_N = functional.dequantize_4bit(self.packed, state).view(-1)
        return flat_N[: math.prod(self.shape)].view(self.shape)


@functools.cache
def _bitsandbytes() -> ModuleType:
    """bitsandbytes' functions; it is optional and slow to import."""
    # On a CPU it warns that a matrix product of its own, which is not used here, needs another package.
    noisy = logging.getLogger("bitsandbytes.backends.cpu.ops")
    noisy.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())
    import bitsandbytes.functional

    return bitsandbytes.functional


@functools.cache
def _nf4_code(device: torch.device) -> Tensor:
    """The 16 values that 4 bits stand for, times the scale."""
    return _bitsandbytes().get_4bit_type("nf4", device=device)


ENCODERS: dict[str, Callable[[Tensor], Weight]] = {
    "fp32": lambda weight_OI: Plain(weight_OI.to(torch.float32, copy=True).contiguous()),
    "bf16": lambda weight_OI: Plain(weight_OI.to(torch.bfloat16, copy=True).contiguous()),
    "int8": Int8.of,
    "nf4": Nf4.of,
}
"""How a dense weight is kept, by precision; none shares memory with it."""


def moved(weight: W, device: torch.device) -> W:
    """The weight on `device`, as it is kept."""
    return replace(weight, **{part: getattr(weight, part).to(device) for part in weight.PARTS})  # type: ignore[type-var]


class FrozenStore:
    """Keeps each frozen expert's weights `[O, I]` small, outside a module's parameters and buffers.

    A stored weight is never written to, only replaced: a backward pass under way keeps the weights of its forward pass.
    Bytes per element are 4 for `fp32`, 2 for `bf16`, 1 + 4/128 for `int8` and 1/2 + 4/64 for `nf4`. Storing what was
    read from a store gives the same bytes.

    Args:
        precision: `fp32`, `bf16`, `int8` (by blocks, see `codecs.quantise_int8`) or `nf4` (by bitsandbytes).
        device: Where the experts are kept.

    Raises:
        ConfigError: `precision` is unknown, or this machine cannot use it.
    """

    def __init__(self, precision: str, device: torch.device | str = "cpu") -> None:
        if precision not in ENCODERS:
            raise ConfigError(f"storage={precision!r} is unknown; choose one of {', '.join(ENCODERS)}")
        if (reason := unavailable(precision)) is not None:
            raise ConfigError(f"storage={precision} cannot be used here: {reason}")
        self.precision = precision
        self.device = torch.device(device)
        self._experts: dict[int, dict[str, Weight]] = {}

    def __contains__(self, expert: int) -> bool:
        return expert in self._experts

    def __len__(self) -> int:
        return len(self._experts)

    def put(self, expert: int, tensors: Mapping[str, Tensor]) -> None:
        """Stores rounded copies of tensors of one expert, in place of those of these names.

        Raises:
            ValueError: a value is not finite and `int8` or `nf4` cannot hold it; nothing was changed.
        """
        encode = ENCODERS[self.precision]
        encoded = {name: encode(tensor.detach().to(self.device)) for name, tensor in tensors.items()}
        self._experts[expert] = self._experts.get(expert, {}) | encoded

    def get(self, expert: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Copies of one expert's tensors in `dtype`."""
        return {name: weight.dense(dtype).clone() for name, weight in self._experts[expert].items()}

    def stored(self, expert: int, name: str) -> Weight:
        """One weight as it is kept."""
        return self._experts[expert][name]

    def remove(self, expert: int) -> None:
        """Forgets one expert.

        Raises:
            KeyError: the expert is not here.
        """
        del self._experts[expert]

    def nbytes(self) -> int:
        """Bytes of all stored weights, their scales included."""
        stored = (weight for weights in self._experts.values() for weight in weights.values())
        return sum(getattr(weight, part).nbytes for weight in stored for part in weight.PARTS)

    def to(self, device: torch.device) -> None:
        """Moves every expert to `device`, in its stored precision."""
        self.device = device
        self._experts = {
            expert: {name: moved(weight, device) for name, weight in weights.items()}
            for expert, weights in self._experts.items()
        }


def unavailable(precision: str) -> str | None:
    """None where this machine can keep experts in `precision`, else what is missing and what to do."""
    if precision != "nf4":
        return None
    try:
        weight = Nf4.of(torch.ones(1, NF4_BLOCK))
        works = torch.equal(weight.dense(torch.float32), torch.ones(1, NF4_BLOCK))
    except ImportError as error:
        return f"bitsandbytes is missing ({error}); install spes-p2p[all], or set --storage int8"
    except (RuntimeError, OSError, AttributeError) as error:  # a native library that was built for another machine
        return f"bitsandbytes does not run ({error}); set --storage int8"
    return None if works else "bitsandbytes computes wrongly; set --storage int8"
