"""A process that does nothing but tokenise with a run's tokenizer: `python -m spes_p2p.data.tokenizer_child`.

It reads the document and then batches of texts from its standard input and writes ids to its standard output, or ids
and writes text. Memory
and processor time are limited by the kernel, so a hostile tokenizer ends this process and not the peer. Nothing is
opened after the start: files can be neither written nor, with the descriptors used up, read.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import struct
import sys
from typing import BinaryIO

import numpy as np

from spes_p2p.data.tokenizer_document import open_document
from spes_p2p.errors import DataError

HEADER = struct.Struct("<QQ")
"""Before the document: its bytes, and the run's vocabulary. Before ids: their number, and 0."""
COUNT = struct.Struct("<I")
DECODE = 2**32 - 1
"""In place of a number of texts: a header with the number of ids, and ids to decode, follow."""
MAX_DECODED_BYTES = 2**16
"""Most bytes of text that ids are decoded to; the rest is cut off."""
BASE_BYTES, BYTES_PER_DOCUMENT_BYTE, BYTES_PER_TEXT_BYTE = 2**30, 48, 512
"""Memory: honest tokenizers take about 20 bytes for one of their document's, and 260 for one of a text."""
BASE_SECONDS, TEXT_BYTES_PER_SECOND = 60.0, 20_000
"""Processor time of a batch: honest tokenizers read 500,000 bytes of text in a second."""


def _limit(num_document_bytes: int, num_text_bytes: int) -> None:
    """Set what the next batch may take."""
    memory = BASE_BYTES + BYTES_PER_DOCUMENT_BYTE * num_document_bytes + BYTES_PER_TEXT_BYTE * num_text_bytes
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + BASE_SECONDS + num_text_bytes / TEXT_BYTES_PER_SECOND
    resource.setrlimit(resource.RLIMIT_DATA, (memory, resource.RLIM_INFINITY))  # guard: tokenizer-memory
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY))  # guard: tokenizer-time


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    """Read exactly so much; the end of the stream ends this process."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        sys.exit(0)
    return data


def main() -> None:
    """Answer until the input ends."""
    gc.disable()  # it would look at the millions of lists of a large document again and again
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the volunteer's text
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    num_bytes, max_entries = HEADER.unpack(_read(source, HEADER.size))
    _limit(num_bytes, 0)
    try:
        document = open_document(_read(source, num_bytes), "the run's tokenizer", max_entries)
    except DataError as error:
        sink.write((json.dumps({"error": str(error)}) + "\n").encode())
        return
    backend, end = document.backend, document.eos_token_id
    about = {"entries": backend.get_vocab_size(), "eos_token_id": end, "special": document.special}
    text = document.text.encode("utf-8", "surrogatepass")
    sink.write((json.dumps({**about, "bytes": len(text)}) + "\n").encode() + text)
    sink.flush()
    del document, text
    os.closerange(3, 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    while True:
        (count,) = COUNT.unpack(_read(source, COUNT.size))
        if count == DECODE:
            num_ids, _ = HEADER.unpack(_read(source, HEADER.size))
            given = np.frombuffer(_read(source, 4 * num_ids), "<u4")
            _limit(num_bytes, 4 * num_ids)
            decoded = backend.decode(given.tolist(), skip_special_tokens=False).encode("utf-8", "replace")
            sink.write(HEADER.pack(len(decoded[:MAX_DECODED_BYTES]), 0) + decoded[:MAX_DECODED_BYTES])
            sink.flush()
            continue
        lengths = np.frombuffer(_read(source, 4 * count), "<u4")
        _limit(num_bytes, int(lengths.sum()))
        texts = [_read(source, length).decode() for length in lengths.tolist()]
        parts = [[*encoding.ids, end] for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]
        ids = np.fromiter((token for part in parts for token in part), "<u4", sum(map(len, parts)))
        sink.write(HEADER.pack(len(ids), 0))
        sink.write(ids.tobytes())
        sink.flush()


if __name__ == "__main__":
    main()
