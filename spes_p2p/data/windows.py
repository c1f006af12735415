"""Windows of T + 1 tokens at a stride of T, and the states that name a place among them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import LongTensor

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
