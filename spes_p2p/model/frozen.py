"""Compact storage of the experts that this peer does not train.

Shape legend: O output features, I input features of one expert's weight, N = O * I, B blocks that share a scale.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import Tensor

from spes_p2p.codecs.kept import INT8_BLOCK, NF4_BLOCK, dequantise_int8, quantise_int8, quantise_nf4
from spes_p2p.errors import ConfigError

W = TypeVar("W", bound="Weight")
GATE_UP, DOWN = "gate_up_proj", "down_proj"
WEIGHT_NAMES = (GATE_UP, DOWN)
"""Stock names of an expert's weights, in the order in which stock draws them."""


class Weight(Protocol):
    """One expert's weight `[O, I]` in some precision; replaced as a whole, never modified in place."""

    PARTS: ClassVar[tuple[str, ...]]
    """Names of the fields that hold its tensors."""
    BLOCK: ClassVar[int]
    """Elements that share a scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        """`(O, I)`."""

    def dense(self, dtype: torch.dtype) -> Tensor:
        """Return the weight `[O, I]` in `dtype`, read-only; without a copy if it is stored in that dtype."""

    def write(self, out_OI: Tensor) -> None:
        """Write the weight to contiguous memory, in its dtype; only if it is whole."""


@dataclass(frozen=True)
class Plain:
    """A dense weight."""

    PARTS: ClassVar[tuple[str, ...]] = ("weight_OI",)
    BLOCK: ClassVar[int] = 1
    weight_OI: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.weight_OI.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.weight_OI.to(dtype)

    def write(self, out_OI: Tensor) -> None:
        out_OI.copy_(self.weight_OI.view_as(out_OI))


@dataclass(frozen=True)
class _InBlocks:
    """A weight in codes, plus an fp32 scale per block (`codecs/kept.py`)."""

    PARTS: ClassVar[tuple[str, ...]] = ("codes", "scales_B")
    codes: Tensor
    scales_B: Tensor
    shape: tuple[int, ...]


class Int8(_InBlocks):
    """A weight in 8 bits per element."""

    BLOCK: ClassVar[int] = INT8_BLOCK

    def dense(self, dtype: torch.dtype) -> Tensor:
        return dequantise_int8(self.codes, self.scales_B).view(self.shape).to(dtype)

    def write(self, out_OI: Tensor) -> None:
        rows = len(self.scales_B), INT8_BLOCK
        torch.mul(self.codes.view(rows), self.scales_B[:, None], out=out_OI.view(rows))


class Nf4(_InBlocks):
    """A weight in 4 bits per element, which bitsandbytes decodes; the last block is padded."""

    BLOCK: ClassVar[int] = NF4_BLOCK

    def dense(self, dtype: torch.dtype) -> Tensor:
        functional, state = _bitsandbytes(), self._state(dtype)
        flat_N = functional.dequantize_4bit(self.codes.view(-1, 1), state).view(-1)
        return flat_N[: math.prod(self.shape)].view(self.shape)

    def write(self, out_OI: Tensor) -> None:
        if out_OI.device.type == "cpu":  # there bitsandbytes cannot
            out_OI.copy_(self.dense(out_OI.dtype))
            return
        state = self._state(out_OI.dtype)
        _bitsandbytes().dequantize_4bit(self.codes.view(-1, 1), state, out=out_OI.view(state.shape))

    def _state(self, dtype: torch.dtype) -> Any:
        return _bitsandbytes().QuantState(
            absmax=self.scales_B,
            # One row per block: bitsandbytes 0.50 on CPUs silently mixes up rows that are not a multiple of a block.
            shape=torch.Size((len(self.scales_B), NF4_BLOCK)),
            code=_nf4_code(self.codes.device),
            blocksize=NF4_BLOCK,
            quant_type="nf4",
            dtype=dtype,
        )


@functools.cache
def _bitsandbytes() -> ModuleType:
    """Import bitsandbytes, which is optional and slow to import."""
    # On a CPU it warns about a missing package for a matrix product that is not used here.
    noisy = logging.getLogger("bitsandbytes.backends.cpu.ops")
    noisy.addFilter(lambda record: "gemm_4bit_forward" not in record.getMessage())
    import bitsandbytes.functional

    return bitsandbytes.functional


@functools.cache
def _nf4_code(device: torch.device) -> Tensor:
    """Return the 16 values that 4 bits encode, before scaling."""
    return _bitsandbytes().get_4bit_type("nf4", device=device)


ENCODERS: dict[str, Callable[[Tensor], Weight]] = {
    "fp32": lambda weight_OI: Plain(weight_OI.to(torch.float32, copy=True).contiguous()),
    "bf16": lambda weight_OI: Plain(weight_OI.to(torch.bfloat16, copy=True).contiguous()),
    "int8": lambda weight_OI: Int8(*quantise_int8(weight_OI.reshape(-1)), tuple(weight_OI.shape)),
    "nf4": lambda weight_OI: Nf4(*quantise_nf4(weight_OI.reshape(-1)), tuple(weight_OI.shape)),
}
"""Encode a dense weight, by precision; the result shares no memory with it."""


def weight_of(precision: str, parts: Sequence[Tensor], shape: tuple[int, ...]) -> Weight:
    """Return a weight that consists of these codes, and scales."""
    codes, *scales = parts
    if not scales:
        return Plain(codes.view(shape))
    return Int8(codes, scales[0], shape) if precision == "int8" else Nf4(codes, scales[0], shape)


def is_whole(weight: Weight) -> bool:
    """Tell whether a weight is made of whole blocks, so that its neighbours' blocks follow its own."""
    return math.prod(weight.shape) % weight.BLOCK == 0


def moved(weight: W, device: torch.device) -> W:
    """Return the weight on `device`, in its stored precision."""
    return replace(weight, **{part: getattr(weight, part).to(device) for part in weight.PARTS})  # type: ignore[type-var]


def write_all(weights: Sequence[Weight], out_EOI: Tensor) -> None:
    """Write weights of one shape to contiguous memory; those that lie side by side, see `FrozenStore.pack`, at once."""
    start = 0
    while start < len(weights):
        stop = start + 1
        while stop < len(weights) and _follows(weights[stop - 1], weights[stop]):
            stop += 1
        run = weights[start:stop]
        if is_whole(run[0]):
            _joined(run).write(out_EOI[start:stop].flatten(0, 1))
        else:
            out_EOI[start].copy_(run[0].dense(out_EOI.dtype))
        start = stop


def _follows(weight: Weight, following: Weight) -> bool:
    """Tell whether all parts of a weight lie directly behind those of another one of the same kind and shape."""
    return (
        type(weight) is type(following)
        and is_whole(weight)
        and all(
            getattr(weight, part).data_ptr() + getattr(weight, part).nbytes == getattr(following, part).data_ptr()
            and getattr(weight, part).untyped_storage().data_ptr()
            == getattr(following, part).untyped_storage().data_ptr()
            for part in weight.PARTS
        )
    )


def _joined(run: Sequence[W]) -> W:
    """Return weights that lie side by side as one, `[E * O, I]`."""
    if len(run) == 1:
        return run[0]
    parts = {}
    for part in run[0].PARTS:
        first: Tensor = getattr(run[0], part)
        parts[part] = first.as_strided((len(run) * len(first), *first.shape[1:]), first.stride())
    num_rows, num_columns = run[0].shape
    shape = {} if isinstance(run[0], Plain) else {"shape": (len(run) * num_rows, num_columns)}
    return replace(run[0], **parts, **shape)  # type: ignore[type-var]


class FrozenStore:
    """Stores each frozen expert's weights `[O, I]` in few bits, outside a module's parameters and buffers.

    A stored weight is replaced, never modified in place: a backward pass under way keeps its forward pass's weights.
    Bytes per element are 4 for `fp32`, 2 for `bf16`, 1 + 4/128 for `int8` and 1/2 + 4/64 for `nf4`. Storing what was
    read from a store gives the same bytes.

    Args:
        precision: `fp32`, `bf16`, `int8` or `nf4`, both by blocks (`codecs/kept.py`).

    Raises:
        ConfigError: `precision` is unknown, or this machine cannot use it.
    """

    def __init__(self, precision: str) -> None:
        if precision not in ENCODERS:
            raise ConfigError(f"storage={precision!r} is unknown; choose one of {', '.join(ENCODERS)}")
        if (reason := unavailable(precision)) is not None:
            raise ConfigError(f"storage={precision} cannot be used here: {reason}")
        self.precision = precision
        self.device = torch.device("cpu")
        self._experts: dict[int, dict[str, Weight]] = {}
        self._is_packed = True

    def __contains__(self, expert: int) -> bool:
        return expert in self._experts

    def __len__(self) -> int:
        return len(self._experts)

    def put(self, expert: int, tensors: Mapping[str, Tensor]) -> None:
        """Store rounded copies of an expert's tensors, in place of older ones of the same names."""
        encode = ENCODERS[self.precision]
        encoded = {name: encode(tensor.detach().to(self.device)) for name, tensor in tensors.items()}
        self._experts[expert] = self._experts.get(expert, {}) | encoded
        self._is_packed = False

    def put_parts(self, expert: int, name: str, parts: Sequence[Tensor], shape: tuple[int, ...]) -> None:
        """Store one tensor of an expert from what its encoded form consists of, in the order of `Weight.PARTS`."""
        weight = weight_of(self.precision, [part.to(self.device) for part in parts], shape)
        self._experts[expert] = self._experts.get(expert, {}) | {name: weight}
        self._is_packed = False

    def pack(self) -> None:
        """Put all experts' weights of a name side by side, ascending, so that a kernel can read them at once.

        Nothing happens unless one was stored, removed or moved since. One name's weights are in memory twice meanwhile.
        """
        if self._is_packed:
            return
        experts = sorted(self._experts)
        for name in {name: None for weights in self._experts.values() for name in weights}:
            weights = [self._experts[expert][name] for expert in experts]
            parts = zip(*(_side_by_side(weights, part) for part in weights[0].PARTS), strict=True)
            for expert, weight, own in zip(experts, weights, parts, strict=True):
                self._experts[expert][name] = replace(weight, **dict(zip(weight.PARTS, own, strict=True)))  # type: ignore[type-var]
        self._is_packed = True

    def get(self, expert: int, dtype: torch.dtype) -> dict[str, Tensor]:
        """Return copies of one expert's tensors in `dtype`."""
        return {name: weight.dense(dtype).clone() for name, weight in self._experts[expert].items()}

    def stored(self, expert: int, name: str) -> Weight:
        """Return one weight in its stored precision."""
        return self._experts[expert][name]

    def remove(self, expert: int) -> None:
        """Drop one expert."""
        del self._experts[expert]
        self._is_packed = False

    def nbytes(self) -> int:
        """Return the bytes of all stored weights and their scales."""
        stored = (weight for weights in self._experts.values() for weight in weights.values())
        return sum(getattr(weight, part).nbytes for weight in stored for part in weight.PARTS)

    def to(self, device: torch.device) -> None:
        """Move every expert to `device`, in its stored precision."""
        self.device = device
        self._is_packed = False
        self._experts = {
            expert: {name: moved(weight, device) for name, weight in weights.items()}
            for expert, weights in self._experts.items()
        }


def _side_by_side(weights: Sequence[Weight], part: str) -> Sequence[Tensor]:
    """Return copies of the weights' tensors of this name, one behind the other in memory."""
    tensors: list[Tensor] = [getattr(weight, part) for weight in weights]
    return torch.cat(tensors).split([len(tensor) for tensor in tensors])


def unavailable(precision: str) -> str | None:
    """Return why this machine cannot store experts in `precision`, with the remedy; None if it can."""
    if precision != "nf4":
        return None
    try:
        weight = ENCODERS["nf4"](torch.ones(1, NF4_BLOCK))
        works = torch.equal(weight.dense(torch.float32), torch.ones(1, NF4_BLOCK))
    except ImportError as error:
        return f"bitsandbytes is missing ({error}); install spes-p2p[all], or set --storage int8 if the run's is fp32"
    except (RuntimeError, OSError, AttributeError) as error:  # a native library that was built for another machine
        return f"bitsandbytes does not run ({error}); set --storage int8 if the run's is fp32"
    return None if works else "bitsandbytes computes wrongly; set --storage int8 if the run's is fp32"
