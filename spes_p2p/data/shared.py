"""The order in which the peers of a run train data that all of them have: each window once an epoch, in no table.

Windows are numbered through all epochs. The number of a window within an epoch goes through a permutation of that
epoch, which is computed, not stored. A certificate's cursor says which numbers its voters train next (`shares` in
`swarm/certificate.py`), in batches: draw d of a run with batches of B windows are the numbers B d to B d + B. A peer
that has no share, or has used it up, reads the same windows by a permutation of its own.

Shape legend: B windows of a batch, T tokens of a sequence, I indices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import LongTensor

from spes_p2p.config import DataConfig
from spes_p2p.data.windows import TokenFile, Windows
from spes_p2p.errors import DataError

PROBE_SEQUENCES = 2
"""Fewest sequences of the run's training text that the loss gate measures."""
PROBE_TOKENS = 1024
"""Fewest tokens that it measures."""
MAX_PROBE_PARTS = 8
"""Most times as many sequences, where few of their tokens are learned."""
FEISTEL_ROUNDS = 6
MIN_WINDOWS = 8
"""Fewest windows of an epoch."""


def probe_sequences(sequence_length: int) -> int:
    """Return the number of sequences of T tokens that the loss gate measures."""
    return max(PROBE_SEQUENCES, math.ceil(PROBE_TOKENS / sequence_length))  # guard: first


def check_state(state: Mapping[str, Any], identity: Mapping[str, Any], what: str) -> None:
    """Check that a saved position belongs to this order of a text or of data, which the error names.

    Raises:
        DataError: it has other tokens, another length or another seed.
    """
    for name, value in identity.items():
        if state.get(name) != value:
            raise DataError(
                f"the saved data order has {name}={state.get(name)!r}, this one {value!r}; "
                f"restore {what} and settings, or start without --resume"
            )


class KeyedPermutation:
    """A permutation of the numbers below `size`, computed number by number.

    A Feistel network permutes the numbers of an even number of bits, at most 4 * `size` of them; it is applied again
    until the result is below `size`. The round function is no cipher: the order is mixed well, not secret.

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains (2002), "cycle-walking".

    Args:
        size: At least 1, below 2^62.
        key: Different keys give different orders.
    """

    def __init__(self, size: int, key: str) -> None:
        self._size = size
        self._half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.shake_256(key.encode()).digest(8 * FEISTEL_ROUNDS)
        self._keys = np.frombuffer(digest, "<u8")

    def __call__(self, indices_I: np.ndarray) -> np.ndarray:
        """Return the places of numbers below `size`, `[I]` int64."""
        values_I = self._permuted(indices_I.astype(np.uint64))
        while len(outside := np.flatnonzero(values_I >= self._size)):
            values_I[outside] = self._permuted(values_I[outside])
        return values_I.astype(np.int64)

    def _permuted(self, values_I: np.ndarray) -> np.ndarray:
        left_I, right_I = values_I >> self._half_bits, values_I & self._mask
        for key in self._keys:
            left_I, right_I = right_I, left_I ^ (_mixed(right_I + key) & self._mask)
        return (left_I << self._half_bits) | right_I


def _mixed(values_I: np.ndarray) -> np.ndarray:
    """Return 64 bits that all depend on all bits of the input: the finaliser of SplitMix64."""
    values_I = (values_I ^ (values_I >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values_I = (values_I ^ (values_I >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values_I ^ (values_I >> np.uint64(31))


class SharedOrder:
    """How far a peer has drawn its share of the order that all peers have, and its own order behind it."""

    def __init__(self) -> None:
        self._share: range | None = None
        self._own = ""
        self._num_drawn = 0

    def deal(self, share: range, own: str) -> None:
        """Draw the batches of a share from now on, and then the batches behind it, in another order.

        Args:
            share: Batches of the common order; perhaps none, at the place from which on the other order is read.
            own: Names that order.
        """
        self._share, self._own, self._num_drawn = share, own, 0

    def _next_draw(self, num_sequences: int) -> tuple[np.ndarray, str] | None:
        """Return the numbers of the next batch's windows, `[B]`, and the name of the order; None before a deal."""
        if self._share is None:
            return None
        draw = self._share.start + self._num_drawn
        self._num_drawn += 1
        return draw * num_sequences + np.arange(num_sequences), "" if draw < self._share.stop else self._own


class SharedSource(SharedOrder):
    """Windows of a corpus that all peers have, in one order for all; a `TokenSource`.

    Before the first deal it gives the windows that the loss gate measures, which are never trained. The state is no
    position, because the certificates know it.

    Args:
        file: Training tokens.
        windows: Their windows.
        data: Packing and sequence length T.

    Raises:
        DataError: the corpus has too little text.
    """

    def __init__(self, file: TokenFile, windows: Windows, data: DataConfig) -> None:
        super().__init__()
        self._windows = windows
        is_full = data.packing == "pack" and not data.are_separate
        self._num_probes = probe_sequences(data.sequence_length) * (1 if is_full else MAX_PROBE_PARTS)
        self.epoch_windows = len(windows) - self._num_probes
        """Windows of an epoch."""
        if self.epoch_windows < MIN_WINDOWS:
            raise DataError(
                f"the training text has {len(windows)} sequences of {data.sequence_length} tokens, of which "
                f"{self._num_probes} are measured and not trained, and an epoch has at least {MIN_WINDOWS}; give more "
                f"text, or lower data.sequence_length"
            )
        self._identity = {"tokens": file.key, "sequence_length": data.sequence_length, "packing": data.packing}
        self._key = ":".join(map(str, self._identity.values()))
        self._all = KeyedPermutation(len(windows), self._key)
        self._probed = 0

    def next_batch(self, num_sequences: int) -> LongTensor:
        draw = self._next_draw(num_sequences)
        return self.next_probes(num_sequences) if draw is None else self.gather(*draw)

    def next_probes(self, num_sequences: int) -> LongTensor:
        """Return the next of the windows that are measured and never trained, `[B, T + 1]`, again and again."""
        self._probed += num_sequences
        places = np.arange(self._probed - num_sequences, self._probed)
        return self._windows.gather(self._all(places % self._num_probes))

    def places(self, numbers_I: np.ndarray, own: str = "") -> np.ndarray:
        """Return the windows behind numbers through all epochs, `[I]`, in the common order or in another one."""
        epochs_I, places_I = np.divmod(numbers_I, self.epoch_windows)
        indices_I = np.empty(len(numbers_I), np.int64)
        for epoch in np.unique(epochs_I).tolist():
            here_I = epochs_I == epoch
            order = KeyedPermutation(self.epoch_windows, f"{self._key}:{epoch}:{own}")
            indices_I[here_I] = self._all(self._num_probes + order(places_I[here_I]))
        return indices_I

    def gather(self, numbers_I: np.ndarray, own: str = "") -> LongTensor:
        """Return the windows behind numbers through all epochs, `[I, T + 1]`, as `places` finds them."""
        return self._windows.gather(self.places(numbers_I, own))

    def state_dict(self) -> dict[str, Any]:
        return dict(self._identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_state(state, self._identity, "data")
