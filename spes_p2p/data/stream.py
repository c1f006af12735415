"""Training sequences packed on the fly from a streamed data set.

Shapes: B sequences of a batch, T tokens of a sequence, W windows of a block.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers import PreTrainedTokenizerBase

from spes_p2p.config import DataConfig
from spes_p2p.data.hub import load, row_text, rows
from spes_p2p.data.sources import Document, in_held_out_part
from spes_p2p.data.tokens import encode
from spes_p2p.data.windows import MIN_WINDOWS, check_state, gather, num_windows, too_little, unsigned
from spes_p2p.errors import DataError

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
