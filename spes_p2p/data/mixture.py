"""Several sources of shared data with weights that change on the way: which window a position of the run is.

Positions are numbered through the whole run, as windows of a single source are. A phase of the run has blocks of
positions, in which each source has as many places as its weight says; a keyed permutation of the block mixes them. So
the position tells source and number within the source by arithmetic alone, and each number of a source belongs to one
position: what is trained once by its position is trained once an epoch of its source.

Shape legend: B windows of a batch, T tokens of a sequence, S sources, I positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import LongTensor

from spes_p2p.config import DataConfig
from spes_p2p.data.shared import KeyedPermutation, SharedOrder, SharedSource
from spes_p2p.errors import ConfigError, DataError

MIN_BLOCK = 64
"""Fewest positions of a block: with few, as with many, the sources of successive batches vary by chance alone."""


@dataclass(frozen=True)
class Phase:
    """A part of the run with fixed weights.

    Attributes:
        first: Its first position.
        before_S: Numbers of each source that earlier phases have taken.
        shares_S: Places of each source in a block.
    """

    first: int
    before_S: np.ndarray
    shares_S: np.ndarray

    @property
    def block(self) -> int:
        """Positions of a block."""
        return int(self.shares_S.sum())


class MixtureSchedule:
    """The source of each position, and the number within the source.

    A phase begins at the end of a block, so that no number of a source is left out: up to a block later than asked for.
    """

    def __init__(self, data: DataConfig) -> None:
        first, before_S = 0, np.zeros(len(data.mixture), np.int64)
        self.phases: list[Phase] = []
        for number, after_tokens in enumerate((0, *data.phases)):
            if self.phases:
                last = self.phases[-1]
                asked = -(-after_tokens // data.sequence_length)
                blocks = max(0, -(-(asked - last.first) // last.block))
                first, before_S = first + blocks * last.block, before_S + blocks * last.shares_S
            weights_S = np.array([source.weights[number] for source in data.mixture], np.int64)
            weights_S //= np.gcd.reduce(weights_S)
            self.phases.append(Phase(first, before_S, weights_S * -(-MIN_BLOCK // int(weights_S.sum()))))
        self._firsts = [phase.first for phase in self.phases]

    def __call__(self, positions_I: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the source of each position, and the number within it, both `[I]` int64."""
        sources_I, numbers_I = np.empty((2, len(positions_I)), np.int64)
        phase_I = np.searchsorted(self._firsts, positions_I, side="right") - 1
        for number in np.unique(phase_I).tolist():
            phase, is_here_I = self.phases[number], phase_I == number
            blocks_I, places_I = np.divmod(positions_I - phase.first, phase.block)
            ends_S = np.cumsum(phase.shares_S)
            for block in np.unique(blocks_I[is_here_I]).tolist():
                at = np.flatnonzero(is_here_I & (blocks_I == block))
                mixed = KeyedPermutation(phase.block, f"mixture:{number}:{block}")(places_I[at])
                sources = np.searchsorted(ends_S, mixed, side="right")
                within = mixed - (ends_S - phase.shares_S)[sources]
                sources_I[at] = sources
                numbers_I[at] = (phase.before_S + block * phase.shares_S)[sources] + within
        return sources_I, numbers_I


class MixedSource(SharedOrder):
    """Windows of several shared sources in one order for all peers; a `TokenSource`.

    Before the first deal it gives the windows of all sources that the loss gate measures.

    Args:
        sources: By name, in the order of the mixture.
        data: The mixture.
    """

    def __init__(self, sources: Mapping[str, SharedSource], data: DataConfig) -> None:
        super().__init__()
        self._sources = dict(sources)
        self._schedule = MixtureSchedule(data)
        self._probed = 0

    def next_batch(self, num_sequences: int) -> LongTensor:
        draw, sources = self._next_draw(num_sequences), list(self._sources.values())
        if draw is None:
            which_B = (self._probed + np.arange(num_sequences)) % len(sources)
            self._probed += num_sequences
            rows = {s: sources[s].next_probes(int((which_B == s).sum())) for s in np.unique(which_B).tolist()}
        else:
            positions_B, own = draw
            which_B, numbers_B = self._schedule(positions_B)
            rows = {s: sources[s].gather(numbers_B[which_B == s], own) for s in np.unique(which_B).tolist()}
        batch_BT1 = torch.empty((num_sequences, next(iter(rows.values())).shape[1]), dtype=torch.int64)
        for number, found in rows.items():
            batch_BT1[torch.from_numpy(which_B == number)] = found
        return cast(LongTensor, batch_BT1)

    def amend(self, data: DataConfig) -> None:
        """Draw by other weights from now on; they must be the same below all positions that are dealt."""
        self._schedule = MixtureSchedule(data)

    def state_dict(self) -> dict[str, Any]:
        return {"sources": {name: source.state_dict() for name, source in self._sources.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("sources")
        if not isinstance(saved, Mapping) or set(saved) != set(self._sources):
            raise DataError("the saved data order is of other sources; restore data and settings")
        for name, source in self._sources.items():
            with named(name):
                source.load_state_dict(saved[name])


@contextlib.contextmanager
def named(name: str) -> Iterator[None]:
    """Put the name of a source in front of the errors of a block."""
    try:
        yield
    except (DataError, ConfigError) as error:
        raise type(error)(f"source {name}: {error}") from error
