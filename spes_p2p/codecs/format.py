"""The format of a round's vectors in bytes, part by part, and error feedback.

Shape legend: N elements of a vector.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from spes_p2p.codecs import CODECS
from spes_p2p.codecs.blocks import Codec
from spes_p2p.codecs.paged import PIECE_NUMEL, PagedVector
from spes_p2p.errors import ConfigError, ExchangeError

PART_NUMEL = 65_536
"""Largest part, in elements: fits a processor's cache and one message."""
MIN_PART_NUMEL = 16_384
PARTS = 64
"""Parts that a long segment has at least, so that many members can reduce about equal shares of it."""
DENSE = "int4"
"""Codec of the first rounds of a run in a sparse one."""


def codec_named(name: str, non_negative: bool = False) -> Codec:
    """Return a codec by name.

    Raises:
        ConfigError: no codec, or none for non-negative values, has that name.
    """
    offered = {each: classes[non_negative] for each, classes in CODECS.items() if classes[non_negative]}
    if name not in offered:
        what = "a codec of second moments" if non_negative else "a codec"
        raise ConfigError(f"{name} is not {what}; choose one of {', '.join(offered)}")
    arguments = [int(each) for each in name.split("-")[1:]]
    return pkgutil.resolve_name(f"spes_p2p.codecs.{offered[name]}")(*arguments)


@dataclass(frozen=True)
class Segment:
    """A contiguous run of elements of one kind: a delta, or an optimizer's moments."""

    numel: int
    codec: str
    """A name in `CODECS`."""
    non_negative: bool = False
    """Whether these are second moments: decoded values are never negative, and no positive one becomes 0."""
    interval: int = 1
    """The segment travels in rounds that are multiples of this."""
    dense_rounds: int = 0
    """Rounds at the run's start in which it travels in `DENSE`."""

    def at(self, round: int) -> Segment:
        """Return the segment as it travels in a round."""
        return replace(self, codec=DENSE) if 0 < round <= self.dense_rounds else self

    def __post_init__(self) -> None:
        assert self.numel >= 0 and self.interval >= 1, f"segment of numel={self.numel}, interval={self.interval}"


@dataclass(frozen=True)
class Part:
    """A unit that is encoded by itself: elements `start` to `stop` of the vector, bytes `byte_start` to `byte_stop`.

    Attributes:
        codec: Codec of its segment.
        segment: Index of its segment.
        rows: Number of equal parts that it consists of; see `join_parts`.
    """

    start: int
    stop: int
    byte_start: int
    byte_stop: int
    codec: Codec
    segment: int
    rows: int = 1

    @property
    def numel(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        """Bytes when encoded."""
        return self.byte_stop - self.byte_start

    def encode(self, flat_part_N: Tensor, out: Tensor) -> None:
        """Write its bytes to `out`, uint8 [num_bytes]; raises as its codec."""
        self.codec.encode(flat_part_N, out, self.rows)

    def decode(self, data: Tensor, out_part_N: Tensor) -> None:
        """Write the values of its bytes to `out_part_N`; raises as its codec."""
        self.codec.decode(data, out_part_N, self.rows)

    def with_next(self, part: Part) -> Part | None:
        """Join this part and the next; None if they differ or the result would be too large."""
        is_alike = (part.codec, part.segment, part.numel * self.rows) == (self.codec, self.segment, self.numel)
        if part.start != self.stop or not is_alike or self.numel + part.numel > PART_NUMEL:
            return None
        return replace(self, stop=part.stop, byte_stop=part.byte_stop, rows=self.rows + 1)


def join_parts(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Join equal neighbours, as many as fit a processor's cache: the same bytes with fewer calls."""
    runs: list[Part] = []
    for part in parts:
        if runs and (longer := runs[-1].with_next(part)):
            runs[-1] = longer
        else:
            runs.append(part)
    return tuple(runs)


class Format:
    """Encodes and decodes vectors of these segments, part by part or all at once, with the same bytes.

    Attributes:
        parts: The vector's parts in order.
        joined_parts: The same parts, with equal neighbours joined.

    Raises:
        ConfigError: a codec is unknown, or cannot encode second moments.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)
        parts: list[Part] = []
        start = byte_start = 0
        for number, segment in enumerate(self.segments):
            codec, end = codec_named(segment.codec, segment.non_negative), start + segment.numel
            while start < end:
                stop = min(start + part_numel(segment.numel), end)
                byte_stop = byte_start + codec.num_bytes(stop - start)
                parts.append(Part(start, stop, byte_start, byte_stop, codec, number))
                start, byte_start = stop, byte_stop
        self.parts = tuple(parts)
        self.joined_parts = join_parts(parts)
        self.numel = start
        self.num_bytes = byte_start
        self.is_exact = all(part.codec.max_error == 0 for part in parts)

    def encode(self, flat_N: Tensor, out: Tensor | None = None) -> Tensor:
        """Return a vector's bytes, uint8 [num_bytes], in `out` if it is given."""
        flat_N = checked(flat_N, self.numel)
        data = torch.empty(self.num_bytes, dtype=torch.uint8) if out is None else out
        for part in self.joined_parts:
            part.encode(flat_N[part.start : part.stop], data[part.byte_start : part.byte_stop])
        return data

    def decode(self, data: Tensor | bytes | memoryview, out: Tensor | None = None) -> Tensor:
        """Decode a peer's bytes to an fp32 vector [N], in `out` if it is given.

        Raises:
            ExchangeError: the length is wrong, or `encode` cannot have written these bytes; `out` is then undefined.
        """
        payload = _payload(data, self.num_bytes)
        flat_N = torch.empty(self.numel) if out is None else out
        for part in self.joined_parts:
            encoded = _as_tensor(payload[part.byte_start : part.byte_stop])
            part.decode(encoded, flat_N[part.start : part.stop])
        return flat_N

    def encode_part(self, part: Part, flat_part_N: Tensor) -> Tensor:
        """Return the bytes of one part's values; raises as `encode`."""
        data = torch.empty(part.num_bytes, dtype=torch.uint8)
        part.encode(checked(flat_part_N, part.numel), data)
        return data

    def decode_part(self, part: Part, data: Tensor | bytes | memoryview) -> Tensor:
        """Return the fp32 values of one part's bytes; raises as `decode`."""
        payload = _payload(data, part.num_bytes)
        flat_part_N = torch.empty(part.numel)
        part.decode(_as_tensor(payload), flat_part_N)
        return flat_part_N


def part_numel(numel: int) -> int:
    """Return the size of a segment's parts but for the last, in elements; a multiple of every codec's block."""
    return min(max(-(-numel // PARTS) // 1024 * 1024, MIN_PART_NUMEL), PART_NUMEL)


def checked(flat_N: Tensor, numel: int) -> Tensor:
    """Check the length of a flat vector, and detach it."""
    assert flat_N.dtype == torch.float32 and flat_N.is_contiguous() and flat_N.device.type == "cpu"
    if flat_N.numel() != numel:
        raise ValueError(f"vector of {flat_N.numel()} elements, expected {numel}; pass it in the round's own format")
    return flat_N.detach()


def _payload(data: Tensor | bytes | memoryview, num_bytes: int) -> Tensor | memoryview:
    """Check the length of a message, and return a view whose slices are not copies."""
    assert not isinstance(data, Tensor) or data.dtype == torch.uint8
    payload = data if isinstance(data, Tensor) else memoryview(data).cast("B")
    if len(payload) != num_bytes:
        raise ExchangeError(f"payload of {len(payload)} bytes, expected {num_bytes}; fetch it from another peer")
    return payload


def _as_tensor(data: Tensor | memoryview) -> Tensor:
    """Return a part's bytes as a tensor; a copy if they are read-only, which torch does not support."""
    if isinstance(data, Tensor):
        return data
    return torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)


class ErrorFeedback:
    """Adds the rounding error of one round's deltas (the residual) to the next round's, so that no error is lost.

    `encode` changes nothing: keep the new residual at the commit, so that a failed round repeats from the old one.

    Source: Seide et al., 1-bit stochastic gradient descent (Interspeech 2014); Karimireddy et al.
    (https://arxiv.org/abs/1901.09847) prove convergence for every codec whose error is smaller than the value.

    Args:
        folder: Where residuals lie that are too large for memory; None keeps them there.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder
        self._residuals: dict[str, PagedVector] = {}

    @property
    def names(self) -> set[str]:
        """Names with a residual."""
        return set(self._residuals)

    def encode(
        self, name: str, format: Format, flat_N: Tensor, *, has_residual: bool = False
    ) -> tuple[Tensor, PagedVector | None]:
        """Encode a vector plus the residual of its first segment, the delta; moments have no residual.

        Args:
            has_residual: Whether the vector contains the residual already.

        Returns:
            The bytes, uint8 [format.num_bytes], and the new residual to `keep` at the commit; None if the delta's
            codec is exact. Of an exact format they are the vector's own memory, unless it has an old residual.
        """
        numel = format.segments[0].numel if format.segments else 0
        kept = None if has_residual else self._residuals.get(name)
        if kept is not None and kept.numel != numel:
            raise ValueError(f"the error kept for {name} has {kept.numel} elements, not {numel}; forget it first")
        is_exact = not numel or format.parts[0].codec.max_error == 0
        if kept is None and is_exact:
            return format.encode(flat_N, flat_N.view(torch.uint8) if format.is_exact else None), None
        flat_N = checked(flat_N, format.numel)
        data = torch.empty(format.num_bytes, dtype=torch.uint8)
        error = PagedVector.scratch(numel, self._folder)
        old, new = kept.open() if kept is not None else None, error.open()
        released = 0
        for part in format.joined_parts:
            here, bytes_here = slice(part.start, part.stop), data[part.byte_start : part.byte_stop]
            if part.start < numel:
                kept_part_N = None if old is None else old.values_N[here]
                _encode_with_error(part, flat_N[here], kept_part_N, bytes_here, new.values_N[here])
            else:
                part.encode(flat_N[here], bytes_here)
            if part.stop - released >= PIECE_NUMEL:
                released = part.stop
                for pages in filter(None, (old, new)):
                    pages.release()
        return data, None if is_exact else error

    def keep(self, name: str, error: PagedVector | None) -> None:
        """Replace a name's residual by the one that `encode` returned."""
        if error is None:
            self.drop(name)
        else:
            self._residuals[name] = error

    def restore(self, residuals: Mapping[str, Tensor]) -> None:
        """Continue with copies of the residuals of an earlier process, whose anchors were the same."""
        for name, error_N in residuals.items():
            error = PagedVector.scratch(error_N.numel(), self._folder)
            for here, piece in error.pieces():
                piece.copy_(error_N[here])
            self._residuals[name] = error

    def residuals(self) -> dict[str, PagedVector]:
        """Return the residuals by name; they are replaced, never modified."""
        return dict(self._residuals)

    def drop(self, name: str) -> None:
        """Drop a name's residual, if it has one."""
        self._residuals.pop(name, None)


def encode_with_error(part: Part, flat_part_N: Tensor, error_part_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encode one part's values plus an earlier residual, if any; return the bytes, uint8, and the new residual."""
    flat_part_N = checked(flat_part_N, part.numel)
    data = torch.empty(part.num_bytes, dtype=torch.uint8)
    new_error_N = torch.empty_like(flat_part_N)
    _encode_with_error(part, flat_part_N, error_part_N, data, new_error_N)
    return data, new_error_N


def _encode_with_error(part: Part, flat_N: Tensor, kept_N: Tensor | None, data: Tensor, error_N: Tensor) -> None:
    """Write a part's bytes to `data`, and its new residual to `error_N`."""
    wanted_N = flat_N if kept_N is None else flat_N + kept_N
    part.encode(wanted_N, data)
    part.decode(data, error_N)
    torch.sub(wanted_N, error_N, out=error_N)
