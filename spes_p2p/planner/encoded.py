"""Bytes of an element as it travels, by codec."""

from __future__ import annotations

from functools import cache

from spes_p2p.codecs import PART_NUMEL, Segment, format_of
from spes_p2p.config import CodecName

FP32 = 4
"""Bytes of a number in fp32, in which everything trained is held."""


@cache
def element_bytes(codec: CodecName) -> float:
    """Returns the bytes of one element of a long vector, its share of the scales included."""
    return format_of((Segment(PART_NUMEL, codec),), 0).num_bytes / PART_NUMEL


def is_exact(codec: CodecName) -> bool:
    """Tells whether nothing is lost on the way, so that no error is fed back."""
    return format_of((Segment(PART_NUMEL, codec),), 0).is_exact
