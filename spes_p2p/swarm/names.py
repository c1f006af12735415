"""Names of the vectors that peers average, store and fetch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

SLOT = r"slot-(?:0|[1-9][0-9]{0,3})"  # guard: (?:0|[1-9][0-9]{0,3}) -> \d{1,4}
"""A slot has one name: `slot-01`, or 1 in another script's digits, would otherwise be read as slot 1, too."""
_VECTOR = re.compile(rf"(moments-)?(shared|{SLOT})|kept-{SLOT}")


class VectorName(str):
    """`shared`, `slot-7`, `moments-shared`, `moments-slot-7` or `kept-slot-7`.

    A name is a string in its wire form, so that records, files and messages carry it as it is. Names sort as strings:
    that order decides how groups are laid out, and so belongs to the protocol.

    Raises:
        ValueError: the text names no vector.
    """

    __slots__ = ()

    def __new__(cls, text: str) -> VectorName:
        if isinstance(text, VectorName):
            return text
        if not _VECTOR.fullmatch(text):
            raise ValueError(
                f"{text[:64]!r} names no vector; expected shared, slot-N, moments- before one of them, or kept-slot-N"
            )
        return super().__new__(cls, text)

    @classmethod
    def of_slot(cls, slot: int) -> VectorName:
        """Return the name of a slot's weights."""
        return cls(f"slot-{slot}")

    @property
    def slot(self) -> int | None:
        """The expert slot that the vector belongs to; None for the shared parameters."""
        return int(self.rpartition("-")[2]) if "slot-" in self else None

    @property
    def is_weights(self) -> bool:
        """Whether the vector holds model weights in fp32, and neither optimizer moments nor a kept form."""
        return not (self.is_moments or self.is_kept)

    @property
    def is_moments(self) -> bool:
        """Whether the vector holds optimizer moments."""
        return self.startswith("moments-")

    @property
    def is_kept(self) -> bool:
        """Whether the vector is the kept form of a slot: its weights as peers that do not train it keep them."""
        return self.startswith("kept-")

    @property
    def weights(self) -> VectorName:
        """The name of the weights that the vector holds, or holds the moments or the kept form of."""
        return self if self.is_weights else VectorName(self.removeprefix("moments-").removeprefix("kept-"))

    @property
    def moments(self) -> VectorName:
        """The name of the optimizer moments of these weights."""
        return VectorName(f"moments-{self.weights}")

    @property
    def kept(self) -> VectorName:
        """The name of the kept form of these weights of a slot."""
        return VectorName(f"kept-{self.weights}")

    @property
    def kind(self) -> str:
        """`shared`, `slot`, `moments-shared`, `moments-slot` or `kept-slot`: all vectors of a kind have one length."""
        return self.partition("slot-")[0] + "slot" if "slot-" in self else str(self)


def by_reason(reasons: Mapping[VectorName, str]) -> dict[str, str]:
    """Join the names that share a reason, so that a log says each reason once.

    Returns:
        The names of each reason, `slot-2, slot-10`.
    """
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return {reason: ", ".join(each) for reason, each in names.items()}


SHARED = VectorName("shared")
AnyName = TypeVar("AnyName", bound=str)
"""Name of a vector, or of a document that peers fetch the same way."""


def slot_ranges(slots: Sequence[int]) -> str:
    """Return ascending slots in short: `0-3,7`."""
    spans: list[list[int]] = []
    for slot in slots:
        if spans and slot == spans[-1][1] + 1:
            spans[-1][1] = slot
        else:
            spans.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans) or "none"
