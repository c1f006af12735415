"""Tokens of a corpus: encoded once, kept in memory-mapped files, found again by what they were made from."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.data.cache import cache_folder, locked, write_atomically
from spes_p2p.data.sources import Document, corpus_identity, documents, in_held_out_part
from spes_p2p.data.tokenizer import tokenizer_digest

log = logging.getLogger(__name__)

_BATCH_CHARACTERS = 2**20
_TOKENISING_SECONDS = 4 * 3600.0
_LAYOUT_VERSION = 1


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
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, paths: Sequence[Path], cache: Path, held_out: bool
) -> TokenFile:
    """Returns one side of the split of an `embedded` or `files` corpus, tokenising it at first use.

    Several processes may ask at once: one tokenises, the others wait.

    Raises:
        ConfigError: no paths, or `cache` cannot be written.
        DataError: the corpus cannot be read, or another process takes hours.
    """
    dtype = token_dtype(tokenizer)
    identity = f"{_LAYOUT_VERSION}:{dtype.str}:{tokenizer_digest(tokenizer)}:{corpus_identity(data, paths)}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    folder = cache_folder(cache, "tokens")
    held_out_file, train_file = folder / f"{key}.held_out.bin", folder / f"{key}.train.bin"
    # The training part is renamed into place last: where it stands, both do.
    if not train_file.exists():
        with locked(folder / key, _TOKENISING_SECONDS):
            if not train_file.exists():
                _tokenise(data, tokenizer, paths, held_out_file, train_file)
    return TokenFile(_map(held_out_file if held_out else train_file, dtype), key)


def _tokenise(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, paths: Sequence[Path], held_out_file: Path, train_file: Path
) -> None:
    started = time.monotonic()
    dtype = token_dtype(tokenizer)
    num_tokens = 0
    with write_atomically(train_file) as train, write_atomically(held_out_file) as held_out:
        for batch in _batches(documents(data, paths)):
            for is_held_out, stream in ((False, train), (True, held_out)):
                texts = (document.text for document in batch if in_held_out_part(document, data) == is_held_out)
                for ids_N in encode(tokenizer, texts):
                    stream.write(ids_N.astype(dtype).tobytes())
                    num_tokens += len(ids_N)
    log.info("tokenised %d tokens in %.1f s into %s", num_tokens, time.monotonic() - started, train_file.parent)


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
