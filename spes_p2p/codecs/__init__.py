"""Tensors to flat vectors, vectors to bytes in few bits, bytes to digests, and back."""

from spes_p2p.codecs.blocks import INT8_BLOCK, Codec, dequantise_int8, num_int8_blocks, quantise_int8
from spes_p2p.codecs.format import (
    CODECS,
    NON_NEGATIVE_CODECS,
    PART_NUMEL,
    ErrorFeedback,
    Format,
    Part,
    Segment,
    codec_named,
    encode_with_error,
    format_of,
    join_parts,
)
from spes_p2p.codecs.vectors import Layout, Shape, digest, digest_of_file, from_bytes, to_bytes

__all__ = [
    "CODECS",
    "INT8_BLOCK",
    "NON_NEGATIVE_CODECS",
    "PART_NUMEL",
    "Codec",
    "ErrorFeedback",
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
    "join_parts",
    "num_int8_blocks",
    "quantise_int8",
    "to_bytes",
]
