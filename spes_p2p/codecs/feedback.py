"""Error feedback: what rounding has left over goes with a later round, so that nothing is lost for good.

Shape legend: N elements of a vector.

Source: Seide et al., 1-bit stochastic gradient descent (Interspeech 2014); Karimireddy et al.
(https://arxiv.org/abs/1901.09847) prove that it converges with every codec whose error is smaller than the value.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spes_p2p.codecs.format import Format, Part, checked


class Feedback:
    """What rounding has left over, by name, to go with a later round.

    `encode` changes nothing: the new error is kept only when the round has been committed, so a failed round can be
    repeated from the same error.
    """

    def __init__(self) -> None:
        self._errors: dict[str, Tensor] = {}

    @property
    def names(self) -> set[str]:
        """Names with a kept error."""
        return set(self._errors)

    def encode(self, name: str, format: Format, flat_N: Tensor) -> tuple[Tensor, Tensor | None]:
        """Encodes a vector and the kept error of its first segment, the delta; moments are states, which have none.

        Returns:
            The bytes, uint8 [format.num_bytes], and the first segment's new error, to be kept once the bytes count;
            None where the first segment is exact.

        Raises:
            ValueError: the kept error has another length, or a value cannot be encoded.
        """
        numel = format.segments[0].numel if format.segments else 0
        kept_N = self._errors.get(name)
        if kept_N is not None and kept_N.numel() != numel:
            raise ValueError(f"the error kept for {name} has {kept_N.numel()} elements, not {numel}; forget it first")
        is_exact = not numel or format.segments[0].codec == "fp32"
        if kept_N is None and is_exact:
            return format.encode(flat_N), None
        flat_N = checked(flat_N, format.numel)
        data = torch.empty(format.num_bytes, dtype=torch.uint8)
        error_N = torch.empty(numel)
        for part in format.joined_parts:
            here, bytes_here = slice(part.start, part.stop), data[part.byte_start : part.byte_stop]
            if part.start < numel:
                kept_part_N = None if kept_N is None else kept_N[here]
                _encode_with_error(part, flat_N[here], kept_part_N, bytes_here, error_N[here])
            else:
                part.encode(flat_N[here], bytes_here)
        return data, None if is_exact else error_N

    def keep(self, name: str, error_N: Tensor | None) -> None:
        """Keeps what `encode` said is left over, in place of what was kept."""
        if error_N is None:
            self.forget(name)
        else:
            self._errors[name] = error_N

    def kept(self) -> dict[str, Tensor]:
        """Returns what is kept, by name; nobody changes these tensors, new ones replace them."""
        return dict(self._errors)

    def forget(self, name: str) -> None:
        """Drops a name's error, if there is one."""
        self._errors.pop(name, None)


def encode_with_error(part: Part, flat_part_N: Tensor, error_part_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Encodes one part's values plus the error that an earlier round left over, if any.

    Returns:
        The bytes, uint8, and the new error.

    Raises:
        ValueError: another length, or a value cannot be encoded.
    """
    flat_part_N = checked(flat_part_N, part.numel)
    data = torch.empty(part.num_bytes, dtype=torch.uint8)
    new_error_N = torch.empty_like(flat_part_N)
    _encode_with_error(part, flat_part_N, error_part_N, data, new_error_N)
    return data, new_error_N


def _encode_with_error(part: Part, flat_N: Tensor, kept_N: Tensor | None, data: Tensor, error_N: Tensor) -> None:
    """Writes a part's bytes to `data`, and to `error_N` what they leave over."""
    wanted_N = flat_N if kept_N is None else flat_N + kept_N
    part.encode(wanted_N, data)
    part.decode(data, error_N)
    torch.sub(wanted_N, error_N, out=error_N)
