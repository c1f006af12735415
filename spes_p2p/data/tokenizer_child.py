"""A process that does nothing but tokenise with a run's tokenizer: `python -m spes_p2p.data.tokenizer_child`.

It reads the document and the chat template, and then batches of texts or conversations from its standard input and
writes ids to its standard output, or ids and writes text. Memory and processor time are limited by the kernel, so a
hostile tokenizer or template ends this process and not the peer. Nothing is opened after the start: files can be
neither written nor, with the descriptors used up, read.
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

from spes_p2p.data.chat import Chat
from spes_p2p.data.text_encoder import TextEncoder
from spes_p2p.data.tokenizer_document import open_document
from spes_p2p.errors import DataError

HEADER = struct.Struct("<QQ")
"""Before the document and the template: the document's bytes, and the run's vocabulary; then the template's bytes, and
0. Before ids: their number, and of conversations the bytes of what is said of each."""
COUNT = struct.Struct("<I")
RENDER = 2**32 - 2
"""In place of a number of texts: a number of conversations follows, their bytes, and each as JSON."""
RENDER_SECONDS = 10.0
"""Processor time of a batch of conversations, apart from that of their text."""
DECODE = 2**32 - 1
"""In place of a number of texts: a header with the number of ids, and ids to decode, follow."""
MAX_SAID_CHARACTERS = 600
"""Most characters of why a conversation has no ids."""
MAX_DECODED_BYTES = 2**16
"""Most bytes of text that ids are decoded to; the rest is cut off."""
BASE_BYTES, BYTES_PER_DOCUMENT_BYTE, BYTES_PER_TEXT_BYTE = 2**30, 48, 512
"""Memory: honest tokenizers take about 20 bytes for one of their document's, and 260 for one of a text."""
BASE_SECONDS, TEXT_BYTES_PER_SECOND = 60.0, 20_000
"""Processor time of a batch: honest tokenizers read 500,000 bytes of text in a second."""


def _limit(num_document_bytes: int, num_text_bytes: int, base_seconds: float) -> None:
    """Set what the next batch may take."""
    memory = BASE_BYTES + BYTES_PER_DOCUMENT_BYTE * num_document_bytes + BYTES_PER_TEXT_BYTE * num_text_bytes
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = used.ru_utime + used.ru_stime + base_seconds + num_text_bytes / TEXT_BYTES_PER_SECOND
    _lower(resource.RLIMIT_DATA, memory)  # guard: skip
    _lower(resource.RLIMIT_CPU, int(seconds))  # guard: skip


def _lower(kind: int, value: int) -> None:
    """Set a limit, which cannot exceed the one that the user's machine has set for good."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _read(stream: BinaryIO, num_bytes: int) -> bytes:
    """Read exactly so much; the end of the stream ends this process."""
    data = stream.read(num_bytes)
    if len(data) < num_bytes:
        sys.exit(0)
    return data


def _read_all(source: BinaryIO, count: int, num_document_bytes: int, base_seconds: float) -> list[bytes]:
    """Read a batch, once it is known what it may take."""
    lengths = np.frombuffer(_read(source, 4 * count), "<u4")
    _limit(num_document_bytes, int(lengths.sum()), base_seconds)
    return [_read(source, length) for length in lengths.tolist()]


def _start(source: BinaryIO, sink: BinaryIO) -> tuple[Chat, TextEncoder, int] | None:
    """Read document and template, and say what is in them; None if they are refused."""
    num_bytes, max_entries = HEADER.unpack(_read(source, HEADER.size))
    _limit(num_bytes, 0, BASE_SECONDS)
    payload = _read(source, num_bytes)
    template_bytes, _ = HEADER.unpack(_read(source, HEADER.size))
    template = _read(source, template_bytes).decode()
    try:
        document = open_document(payload, "the run's tokenizer", max_entries)
        num_entries = document.backend.get_vocab_size()
        encoder = TextEncoder(document.backend, document.special, template)
        chat = Chat(template, document.special, encoder)
    except DataError as error:
        sink.write((json.dumps({"error": str(error)}) + "\n").encode())
        return None
    about = {"entries": num_entries, "eos_token_id": document.eos_token_id, "special": document.special}
    text = document.text.encode("utf-8", "surrogatepass")
    sink.write((json.dumps({**about, "bytes": len(text)}) + "\n").encode() + text)
    sink.flush()
    return chat, encoder, num_bytes


def _decode(encoder: TextEncoder, ids: np.ndarray, sink: BinaryIO) -> None:
    decoded = encoder.backend.decode(ids.tolist(), skip_special_tokens=False).encode("utf-8", "replace")
    sink.write(HEADER.pack(len(decoded[:MAX_DECODED_BYTES]), 0) + decoded[:MAX_DECODED_BYTES])


def _encode(chat: Chat, encoder: TextEncoder, texts: list[bytes], sink: BinaryIO) -> None:
    ids = encoder.encode([chat.clean(text.decode()) for text in texts])
    sink.write(HEADER.pack(len(ids), 0))
    sink.write(ids.tobytes())


def _render(chat: Chat, records: list[bytes], sink: BinaryIO) -> None:
    """Write the ids of conversations, and for each its number of ids, or why it has none."""
    parts, said = [np.empty(0, "<u4")], list[int | str]()
    for record in records:
        try:
            ids = chat.encode(json.loads(record))
        except DataError as error:
            said.append(str(error)[:MAX_SAID_CHARACTERS])
        else:
            parts.append(ids)
            said.append(len(ids))
    ids, report = np.concatenate(parts), json.dumps(said).encode()
    sink.write(HEADER.pack(len(ids), len(report)))
    sink.write(ids.astype("<u4").tobytes() + report)
    gc.collect()  # templates leave cycles behind


def main() -> None:
    """Answer until the input ends."""
    gc.disable()  # it would look at the millions of lists of a large document again and again
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file would hold the volunteer's text
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    if (started := _start(source, sink)) is None:
        return
    chat, encoder, num_bytes = started
    gc.freeze()
    os.closerange(3, 256)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    while True:
        (count,) = COUNT.unpack(_read(source, COUNT.size))
        if count == DECODE:
            num_ids, _ = HEADER.unpack(_read(source, HEADER.size))
            given = np.frombuffer(_read(source, 4 * num_ids), "<u4")
            _limit(num_bytes, 4 * num_ids, BASE_SECONDS)
            _decode(encoder, given, sink)
        elif count == RENDER:
            (count,) = COUNT.unpack(_read(source, COUNT.size))
            _render(chat, _read_all(source, count, num_bytes, RENDER_SECONDS), sink)
        else:
            _encode(chat, encoder, _read_all(source, count, num_bytes, BASE_SECONDS), sink)
        sink.flush()


if __name__ == "__main__":
    main()
