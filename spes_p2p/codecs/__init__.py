"""Tensors to flat vectors, vectors to bytes in few bits, bytes to digests, and back."""

from spes_p2p.codecs.feedback import Feedback, encode_with_error
from spes_p2p.codecs.format import (
    CODECS,
    NON_NEGATIVE_CODECS,
    PART_NUMEL,
    Format,
    Part,
    Segment,
    codec_named,
    format_of,
    joined,
)
from spes_p2p.codecs.int8 import INT8_BLOCK, dequantise_int8, int8_blocks, quantise_int8
from spes_p2p.codecs.layout import Layout, Shape
from spes_p2p.codecs.vectors import digest, digest_of_file, from_bytes, to_bytes
from spes_p2p.codecs.wire import Codec

__all__ = [
    "CODECS",
    "INT8_BLOCK",
    "NON_NEGATIVE_CODECS",
    "PART_NUMEL",
    "Codec",
    "Feedback",
    "Format",
    "Layout",
    "Part",
    "Segment",
    "Shape",
    "codec_named",
    "dequantise_int8",
    "digest",
    "digest_of_file",
    "encode_with_error",
    "format_of",
    "from_bytes",
    "int8_blocks",
    "joined",
    "quantise_int8",
    "to_bytes",
]
