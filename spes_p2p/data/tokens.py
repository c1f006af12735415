"""Tokens of a corpus: encoded once, kept in memory-mapped files, found again by what they were made from."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.data.sources import Document, Part, corpus_identity, documents, is_in
from spes_p2p.data.tokenizer import tokenizer_digest
from spes_p2p.fs import cache_folder, locked, write_atomic

log = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20
_TOKENISING_SECONDS = 4 * 3600.0
_LAYOUT_VERSION = 1
# Made in one reading of the corpus; where the last file stands, all do.
_MADE_TOGETHER: tuple[tuple[Part, ...], ...] = (("held_out", "train"), ("tuning", "reported"))


class TokenFile(NamedTuple):
    """One part of a tokenised corpus.

    Attributes:
        tokens_N: uint16 or uint32, read-only; documents in order, each followed by the end-of-text token.
        key: Names tokenizer, corpus and settings; equal keys mean equal tokens.
    """

    tokens_N: np.ndarray
    key: str


def token_dtype(tokenizer: PreTrainedTokenizerBase) -> np.dtype:
    """The smallest unsigned type that holds every id."""
    return np.dtype("<u2" if len(tokenizer) <= 2**16 else "<u4")


def encode(tokenizer: PreTrainedTokenizerBase, texts: Iterable[str]) -> Iterator[np.ndarray]:
    """Yields arrays of ids, about a million characters' worth each; every text is followed by the end-of-text token."""
    batch: list[str] = []
    num_characters = 0
    for text in texts:
        batch.append(text)
        num_characters += len(text)
        if num_characters >= _BATCH_CHARACTERS:
            yield _encode_batch(tokenizer, batch)
            batch, num_characters = [], 0
    if batch:
        yield _encode_batch(tokenizer, batch)


def token_file(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, paths: Sequence[Path], cache: Path, part: Part
) -> TokenFile:
    """Returns one part of an `embedded` or `files` corpus, tokenising it at first use.

    Several processes may ask at once: one tokenises, the others wait.

    Raises:
        ConfigError: no paths, or `cache` cannot be written.
        DataError: the corpus cannot be read, or another process takes hours.
    """
    dtype = token_dtype(tokenizer)
    identity = f"{_LAYOUT_VERSION}:{dtype.str}:{tokenizer_digest(tokenizer)}:{corpus_identity(data, paths)}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder = cache_folder(cache, "tokens")
    together = next(parts for parts in _MADE_TOGETHER if part in parts)
    files = {name: folder / f"{key}.{name}.bin" for name in together}
    if not files[together[-1]].exists():
        with locked(folder / key, _TOKENISING_SECONDS):
            if not files[together[-1]].exists():
                _tokenise(data, tokenizer, paths, files)
    return TokenFile(_map(files[part], dtype), key)


def _tokenise(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], files: Mapping[Part, Path]
) -> None:
    """Write the parts' files; they are renamed into place in their order."""
    started = time.monotonic()
    dtype = token_dtype(tokenizer)
    num_tokens = 0
    with contextlib.ExitStack() as stack:
        streams = {part: stack.enter_context(write_atomic(files[part])) for part in reversed(list(files))}
        for batch in _batches(documents(data, paths)):
            for part, stream in streams.items():
                for ids_N in encode(tokenizer, (document.text for document in batch if is_in(part, document, data))):
                    stream.write(ids_N.astype(dtype).tobytes())
                    num_tokens += len(ids_N)
    log.info("tokenised %d tokens of %s in %.1f s", num_tokens, " and ".join(files), time.monotonic() - started)


def _batches(source: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    num_characters = 0
    for document in source:
        batch.append(document)
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch, num_characters = [], 0
    yield batch


def _encode_batch(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> np.ndarray:
    # verbose: a corpus is longer than a model's context, and that is no warning.
    encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    flat = np.empty(sum(map(len, encoded)) + len(encoded), dtype=np.uint32)
    position = 0
    for ids in encoded:
        flat[position : position + len(ids)] = ids
        flat[position + len(ids)] = tokenizer.eos_token_id
        position += len(ids) + 1
    return flat


def _map(file: Path, dtype: np.dtype) -> np.ndarray:
    # An empty file cannot be mapped.
    return np.memmap(file, dtype=dtype, mode="r") if file.stat().st_size else np.empty(0, dtype=dtype)
