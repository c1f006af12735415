"""Parts: the token ids and documents of pieces of text, each written by one of several processes, whole or not at all.

This module is all that a process imports, so it knows neither torch nor transformers.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from tokenizers import Tokenizer

from spes_p2p.data.readers import batches, read_file
from spes_p2p.data.shard_formats import DOCUMENT_FIELDS, DOCUMENTS_SUFFIX
from spes_p2p.data.sources import SPLIT_SEED, TUNING_SEED, split_number
from spes_p2p.data.streams import Range
from spes_p2p.data.text_encoder import TextEncoder
from spes_p2p.errors import DataError
from spes_p2p.fs import State, digest_of_file, file_state, write_atomic

BATCH_CHARACTERS = 2**18
POLL_SECONDS = 0.5
_SERVED = "forkserver"  # processes share what is imported; tokenizers' threads of this one would not survive a fork
IDS_SUFFIX = ".ids"


class Piece(NamedTuple):
    """A part of a file that one process tokenises.

    Attributes:
        path: The file.
        part: What to read of it; None for all.
        num_bytes: Its size, for the progress.
        state: The file's state when the work was planned.
        sha256: Digest of its content then.
        target: The part's file, without suffix.
    """

    path: Path
    part: Range | None
    num_bytes: int
    state: State
    sha256: str
    target: Path


class How(NamedTuple):
    """How text is read and tokenised."""

    text_field: str
    dtype: str
    batch_size: int
    skip_unusable: bool
    template: str = ""


def make_parts(
    pieces: Sequence[Piece],
    tokenizer_file: Path,
    how: How,
    num_processes: int,
    on_progress: Callable[[int, int], None],
) -> None:
    """Make the parts of pieces.

    Args:
        pieces: What is not made yet.
        tokenizer_file: Payload of `tokenizer_bytes`.
        how: How to read and tokenise.
        num_processes: Processes at a time.
        on_progress: Called now and then with the bytes of text that are done, and the ids written.

    Raises:
        DataError: a file cannot be used or changes meanwhile, or a process was killed.
        OSError: a part cannot be written.
    """
    # The largest first: a compressed file is one piece, and must not be the last to begin.
    in_order = sorted(pieces, key=lambda piece: -piece.num_bytes)
    num_processes = min(num_processes, len(pieces))
    context = multiprocessing.get_context(_SERVED)
    context.set_forkserver_preload([__name__])
    start = (tokenizer_file, how.template, context.Value("Q", 0), context.Event())
    done_bytes = 0
    if num_processes == 1:
        _load(*start)
        for piece in in_order:
            _make_part(piece, how)
            done_bytes += piece.num_bytes
            on_progress(done_bytes, start[2].value)
        return
    pool = ProcessPoolExecutor(num_processes, context, initializer=_start_process, initargs=start)
    try:
        running: dict[Future[None], Piece] = {pool.submit(_make_part, piece, how): piece for piece in in_order}
        while running:
            finished, _ = wait(running, POLL_SECONDS, FIRST_COMPLETED)
            for future in finished:
                done_bytes += running.pop(future).num_bytes
                future.result()
            on_progress(done_bytes, start[2].value)
    except BrokenProcessPool as error:
        raise DataError(
            "a process that tokenises was killed, perhaps for want of memory; start the same command again, with "
            "fewer --processes or a smaller --batch-size: it continues"
        ) from error
    finally:
        start[3].set()
        pool.shutdown(cancel_futures=True)


def checked_state(path: Path) -> State:
    """Return the state of a file of text.

    Raises:
        DataError: it is gone.
    """
    try:
        return file_state(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}; restore it, or leave it out") from error


def part_info(piece: Piece) -> dict[str, Any] | None:
    """Return what a finished part holds."""
    try:
        return json.loads(piece.target.with_suffix(".json").read_bytes())
    except FileNotFoundError:
        return None


class _Process(NamedTuple):
    """What a process that tokenises has."""

    encoder: TextEncoder
    tokens: Any
    stop: Any


def _start_process(tokenizer_file: Path, template: str, tokens: Any, stop: Any) -> None:
    """Prepare a new process: it leaves Ctrl-C to its parent, and ends with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait_for([parent.sentinel]), os._exit(1)), daemon=True).start()
    _load(tokenizer_file, template, tokens, stop)


def _load(tokenizer_file: Path, template: str, tokens: Any, stop: Any) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # each process has one core
    files = json.loads(tokenizer_file.read_bytes())
    backend = Tokenizer.from_str(files["tokenizer.json"])
    global _process
    _process = _Process(TextEncoder(backend, json.loads(files["special_tokens.json"]), template), tokens, stop)


_process: _Process | None = None
"""Set in processes that tokenise."""


def _make_part(piece: Piece, how: How) -> None:
    """Write a part: ids, documents, and last what it holds, whose file marks it as whole."""
    bad: list[str] = []
    info: dict[str, Any] = {"documents": 0, "tokens": 0, "unusable": None}
    try:
        with (
            write_atomic(piece.target.with_suffix(IDS_SUFFIX)) as ids,
            write_atomic(piece.target.with_suffix(DOCUMENTS_SUFFIX)) as documents,
        ):
            on_bad = (lambda error: bad.append(str(error))) if how.skip_unusable else None
            texts = (text for _, text in read_file(piece.path, how.text_field, piece.part, on_bad))
            for batch in batches(texts, len, BATCH_CHARACTERS, how.batch_size):
                info["documents"] += len(batch)
                info["tokens"] += _encode_batch(batch, np.dtype(how.dtype), ids, documents, info["tokens"])
    except DataError as error:
        if not how.skip_unusable:
            raise
        info["unusable"] = str(error)
    if checked_state(piece.path) != piece.state and digest_of_file(piece.path) != piece.sha256:
        raise DataError(f"{piece.path} was changed while it was tokenised; start the same command again")
    with write_atomic(piece.target.with_suffix(".json")) as stream:
        stream.write(json.dumps({**info, "skipped_rows": len(bad)}).encode())


def _encode_batch(texts: list[str], dtype: np.dtype, ids: BinaryIO, documents: BinaryIO, num_before: int) -> int:
    """Write the ids and documents of some texts; return the number of ids."""
    assert _process is not None
    if _process.stop.is_set():
        raise DataError("tokenising was stopped; start the same command again: it continues")
    encoded = _process.encoder.documents(texts)
    rows_D = np.empty(len(texts), DOCUMENT_FIELDS)
    rows_D["end"] = num_before + np.cumsum([len(ids) for ids in encoded])
    flat_N = np.fromiter((token for ids in encoded for token in ids), dtype, int(rows_D["end"][-1]) - num_before)
    for row, text in enumerate(texts):
        rows_D["split"][row] = split_number("", text, SPLIT_SEED)
        rows_D["half"][row] = split_number("", text, TUNING_SEED)
    ids.write(flat_N.tobytes())
    documents.write(rows_D.tobytes())
    with _process.tokens.get_lock():
        _process.tokens.value += len(flat_N)
    return len(flat_N)
