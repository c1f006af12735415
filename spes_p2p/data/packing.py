"""Training sequences: windows over the tokenised corpus in an order that can be resumed exactly.

Shapes: B sequences of a batch, T tokens of a sequence, N tokens of a corpus.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import LongTensor
from transformers import PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.data.sources import Part, documents, is_in
from spes_p2p.data.stream import StreamSource
from spes_p2p.data.tokens import TokenFile, encode, token_file
from spes_p2p.data.windows import MIN_WINDOWS, check_state, gather, num_windows, too_little, unsigned
from spes_p2p.errors import DataError


class TokenSource(Protocol):
    """Training sequences without end, in an order that a state of a few numbers restores."""

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Returns the next sequences, `[B, T + 1]`: inputs and, shifted by one, targets."""

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the order, as JSON-able values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a place that `state_dict` returned.

        Raises:
            DataError: the state is malformed or belongs to other tokens or another order.
        """


class WindowSource:
    """Windows of a tokenised corpus, every one once per epoch, each epoch in a new order.

    Args:
        file: Training tokens.
        sequence_length: T; window i covers tokens i*T to i*T + T, its last token being the next one's first.
        order_seed: Keys the orders; peers use different ones.

    Raises:
        DataError: too little text.
    """

    def __init__(self, file: TokenFile, sequence_length: int, order_seed: int):
        self._file, self._sequence_length, self._order_seed = file, sequence_length, order_seed
        self._num_windows = num_windows(len(file.tokens_N), sequence_length)
        if self._num_windows < MIN_WINDOWS:
            raise too_little("training", len(file.tokens_N), sequence_length, "give more text")
        self._epoch = self._position = 0
        self._order = self._permutation()

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Returns the next sequences, `[B, T + 1]`."""
        parts: list[np.ndarray] = []
        missing = num_sequences
        while missing > 0:
            if self._position == self._num_windows:
                self._epoch, self._position = self._epoch + 1, 0
                self._order = self._permutation()
            part = self._order[self._position : self._position + missing]
            parts.append(part)
            self._position += len(part)
            missing -= len(part)
        return gather(self._file.tokens_N, np.concatenate(parts), self._sequence_length)

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the order."""
        return {**self._identity(), "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a place that `state_dict` returned.

        Raises:
            DataError: the state is malformed or belongs to other tokens or another order.
        """
        check_state(state, self._identity())
        epoch, position = state.get("epoch"), state.get("position")
        if not (isinstance(epoch, int) and isinstance(position, int) and epoch >= 0):
            raise DataError(f"data order state has epoch={epoch!r}, position={position!r}; resume from another save")
        if not 0 <= position <= self._num_windows:
            raise DataError(
                f"data order state has position={position} of {self._num_windows}; resume from another save"
            )
        self._epoch, self._position = epoch, position
        self._order = self._permutation()

    def _identity(self) -> dict[str, Any]:
        return {"tokens": self._file.key, "sequence_length": self._sequence_length, "order_seed": self._order_seed}

    def _permutation(self) -> np.ndarray:
        return np.random.default_rng([unsigned(self._order_seed), self._epoch]).permutation(self._num_windows)


def train_source(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, paths: Sequence[Path], cache: Path, order_seed: int
) -> TokenSource:
    """Returns training sequences of the configured corpus, without end and without held-out documents.

    All ranks of a peer pass the same `order_seed` and see one order: each draws the whole batch and takes its rows.

    Args:
        data: Source and sequence length.
        tokenizer: The run's tokenizer.
        paths: Files and folders of the source `files`.
        cache: Folder for token files.
        order_seed: Keys the order; peers use different ones.

    Raises:
        ConfigError: no paths for the source `files`, or `cache` cannot be written.
        DataError: the corpus cannot be read, or has fewer than 8 windows.
    """
    return train_sources(data, tokenizer, paths=paths, cache=cache)(order_seed)


def train_sources(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, paths: Sequence[Path], cache: Path
) -> Callable[[int], TokenSource]:
    """Returns `train_source` as a function of the order's seed alone, having found the corpus once for all."""
    if data.source == "hub":
        return partial(StreamSource, data, tokenizer)
    file = token_file(data, tokenizer, paths=paths, cache=cache, part="train")
    return partial(WindowSource, file, data.sequence_length)


def held_out_batches(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    paths: Sequence[Path],
    cache: Path,
    num_sequences: int,
    batch_size: int,
    seed: int,
    part: Part = "held_out",
) -> list[LongTensor]:
    """Returns fixed batches `[B, T + 1]` of held-out text, the last one possibly smaller.

    Args:
        data: Source, sequence length and held-out share.
        tokenizer: The run's tokenizer.
        paths: Files and folders of the source `files`.
        cache: Folder for token files.
        num_sequences: Sequences wanted; all there are where there are fewer, but at least 8.
        batch_size: B.
        seed: Chooses among the windows where there are more than wanted; a stream gives its first.
        part: Which documents: all that are held out, or one half of them.

    Raises:
        ConfigError: as `train_source`.
        DataError: the corpus cannot be read, or its held-out part is too small.
    """
    if data.source == "hub":
        texts = (document.text for document in documents(data) if is_in(part, document, data))
        tokens_N = _first_tokens(tokenizer, texts, num_sequences * data.sequence_length + 1)
    else:
        tokens_N = token_file(data, tokenizer, paths=paths, cache=cache, part=part).tokens_N
    found = num_windows(len(tokens_N), data.sequence_length)
    if found < min(MIN_WINDOWS, num_sequences):
        raise too_little(
            "held-out", len(tokens_N), data.sequence_length, "give more text, raise data.held_out_fraction"
        )
    chosen = np.arange(found)
    if found > num_sequences:
        chosen = np.sort(np.random.default_rng(unsigned(seed)).choice(found, num_sequences, replace=False))
    return window_batches(tokens_N, chosen, data.sequence_length, batch_size)


def window_batches(
    tokens_N: np.ndarray, indices: np.ndarray, sequence_length: int, batch_size: int
) -> list[LongTensor]:
    """Returns the windows of the given indices as batches `[B, T + 1]`, the last one possibly smaller."""
    starts = range(0, len(indices), batch_size)
    return [gather(tokens_N, indices[start : start + batch_size], sequence_length) for start in starts]


def _first_tokens(tokenizer: PreTrainedTokenizerBase, texts: Any, num_tokens: int) -> np.ndarray:
    parts, found = [np.empty(0, dtype=np.uint32)], 0
    # Few texts at a time: a stream must not be read further than needed.
    while found < num_tokens and (some := list(islice(texts, 16))):
        for ids_N in encode(tokenizer, some):
            parts.append(ids_N)
            found += len(ids_N)
    return np.concatenate(parts)[:num_tokens]
