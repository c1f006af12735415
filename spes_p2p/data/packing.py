"""Training sequences: windows over the tokenised corpus in an order that can be resumed exactly.

Shapes: B sequences of a batch, T tokens of a sequence, N tokens of a corpus.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.data.hub import load, row_text, rows
from spes_p2p.data.sources import Document, Part, documents, in_held_out_part, is_in
from spes_p2p.data.tokens import TokenFile, encode, token_file
from spes_p2p.errors import DataError

# Fewer make an epoch that is hardly more than one batch.
MIN_WINDOWS = 8


def num_windows(num_tokens: int, sequence_length: int) -> int:
    """Windows in a run of tokens; a tail shorter than a window is left out."""
    return max(num_tokens - 1, 0) // sequence_length


def gather(tokens_N: np.ndarray, indices_B: np.ndarray, sequence_length: int) -> LongTensor:
    """Copies the windows of the given indices into `[B, T + 1]` int64."""
    positions_BT1 = indices_B[:, None] * sequence_length + np.arange(sequence_length + 1)
    return cast(LongTensor, torch.from_numpy(tokens_N[positions_BT1].astype(np.int64)))


def too_little(part: str, num_tokens: int, sequence_length: int, remedy: str) -> DataError:
    """The error for a corpus that is too small to use."""
    return DataError(
        f"the {part} text has {num_tokens} tokens, less than {MIN_WINDOWS} sequences of {sequence_length}; "
        f"{remedy}, or lower data.sequence_length"
    )


def check_state(state: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Checks that a saved place belongs to this order.

    Raises:
        DataError: it names other tokens, another length or another seed.
    """
    for name, value in identity.items():
        if state.get(name) != value:
            raise DataError(
                f"the saved data order has {name}={state.get(name)!r}, this one {value!r}; "
                f"restore text and settings, or start without --resume"
            )


def unsigned(seed: int) -> int:
    """NumPy takes no negative seeds."""
    return seed % 2**64


BLOCK_DOCUMENTS = 1024
BLOCK_CHARACTERS = 8 * 2**20
# Below this many shards their order alone would send all peers through the same text; parquet can be cut further.
_FEW_SHARDS = 64


class StreamSource:
    """Windows of a streamed data set: shards in a seeded order, documents shuffled block by block.

    A block is a run of documents; its permutation depends on seed, epoch and block number alone. The state is therefore
    the data set's place at the block's start, the few tokens carried over from the block before, and the number of
    windows already given: small, and exact where a rolling shuffle buffer would lose its content.

    Args:
        data: Data set, split, text field, sequence length T.
        tokenizer: The run's tokenizer.
        order_seed: Keys the order of shards and documents.

    Raises:
        DataError: the data set cannot be streamed or has too little text.
    """

    def __init__(self, data: DataConfig, tokenizer: PreTrainedTokenizerBase, order_seed: int):
        self._data, self._tokenizer, self._order_seed = data, tokenizer, order_seed
        dataset = load(data)
        self._base = dataset.reshard() if dataset.num_shards < _FEW_SHARDS else dataset
        self._carry = np.empty(0, dtype=np.uint32)
        self._begin_epoch(0)
        self._next_block()
        self._check_size()

    def next_batch(self, num_sequences: int) -> LongTensor:
        """Returns the next sequences, `[B, T + 1]`.

        Raises:
            DataError: the stream broke, or a row holds no text.
        """
        parts: list[Tensor] = []
        missing = num_sequences
        while missing > 0:
            while self._given == self._num_windows:
                self._next_block()
            indices = np.arange(self._given, min(self._given + missing, self._num_windows))
            parts.append(gather(self._tokens, indices, self._data.sequence_length))
            self._given += len(indices)
            missing -= len(indices)
        return cast(LongTensor, torch.cat(parts))

    def state_dict(self) -> dict[str, Any]:
        """Returns the place in the stream."""
        return {**self._identity(), **copy.deepcopy(self._block_start), "given": self._given}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a place that `state_dict` returned, re-reading one block.

        Raises:
            DataError: the state is malformed or belongs to another stream or order, or the stream cannot be read.
        """
        check_state(state, self._identity())
        try:
            carry = np.array(state["carry"], dtype=np.uint32)
            self._begin_epoch(int(state["epoch"]), int(state["block"]))
            self._dataset.load_state_dict(state["dataset"])
            self._carry = carry
            self._next_block()
            given = int(state["given"])
        except (KeyError, TypeError, ValueError, OverflowError, IndexError) as error:
            raise DataError(f"the saved data order is damaged ({error!r}); resume from another save") from error
        if not 0 <= given <= self._num_windows:
            raise DataError(f"the saved data order has given={given} of {self._num_windows}; resume from another save")
        self._given = given

    def _check_size(self) -> None:
        start = self.state_dict()
        found = self._num_windows
        while found < MIN_WINDOWS and self._epoch == 0:
            self._next_block()
            found += self._num_windows
        if found < MIN_WINDOWS:
            raise too_little("training", len(self._tokens), self._data.sequence_length, "choose a larger data set")
        if self._block_start["block"] > 0:
            self.load_state_dict(start)

    def _identity(self) -> dict[str, Any]:
        return {
            "name": self._data.name,
            "split": self._data.split,
            "sequence_length": self._data.sequence_length,
            "order_seed": self._order_seed,
        }

    def _begin_epoch(self, epoch: int, block: int = 0) -> None:
        self._epoch, self._block = epoch, block
        # A buffer of one row shuffles shards only, and loses nothing on resume.
        self._dataset = self._base.shuffle(generator=self._generator(), buffer_size=1, max_buffer_input_shards=1)
        self._rows: Iterator[dict[str, Any]] = rows(self._dataset, self._data)

    def _generator(self, *more: int) -> np.random.Generator:
        return np.random.default_rng([unsigned(self._order_seed), self._epoch, *more])

    def _next_block(self) -> None:
        start = {
            "epoch": self._epoch,
            "block": self._block,
            "carry": self._carry.tolist(),
            "dataset": copy.deepcopy(self._dataset.state_dict()),
        }
        try:
            texts, at_end = self._read_block()
        except DataError:
            # A broken generator looks like an exhausted one: reopen it, so that the next call tries this block again.
            self._dataset.load_state_dict(start["dataset"])
            self._rows = rows(self._dataset, self._data)
            raise
        if at_end and not texts and self._block == 0:
            raise too_little("training", len(self._carry), self._data.sequence_length, "choose a larger data set")
        order = self._generator(self._block).permutation(len(texts))
        self._tokens = np.concatenate([self._carry, *encode(self._tokenizer, (texts[i] for i in order))])
        self._num_windows, self._given = num_windows(len(self._tokens), self._data.sequence_length), 0
        self._carry = self._tokens[self._num_windows * self._data.sequence_length :]
        self._block_start = start
        if at_end:
            self._begin_epoch(self._epoch + 1)
        else:
            self._block += 1

    def _read_block(self) -> tuple[list[str], bool]:
        """Returns training texts, and whether the data set ended."""
        texts: list[str] = []
        num_characters = 0
        while len(texts) < BLOCK_DOCUMENTS and num_characters < BLOCK_CHARACTERS:
            row = next(self._rows, None)
            if row is None:
                return texts, True
            text = row_text(row, self._data)
            if text and not in_held_out_part(Document("", text), self._data):
                texts.append(text)
                num_characters += len(text)
        return texts, False


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
