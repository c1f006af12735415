"""One decoder, and the judgement that all fuzzers share: expected errors and unexpected ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """One decoder.

    Attributes:
        name: For reports.
        decode: Takes a stranger's bytes.
        may_raise: What refuses them properly.
        seeds: Sound content: JSON's, or MessagePack's if `is_packed`.
        is_packed: Which of the two it reads.
    """

    name: str
    decode: Callable[[bytes], Any]
    may_raise: tuple[type[Exception], ...]
    seeds: Sequence[Any]
    is_packed: bool = False

    def is_refused_properly(self, data: bytes) -> Exception | None:
        """Return the error that it should not have raised, if it did."""
        try:
            self.decode(data)
        except self.may_raise:
            return None
        except Exception as error:  # noqa: BLE001 - finding these is what this is for
            return error
        return None
