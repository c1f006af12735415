"""The loss gate: a peer keeps the slots that others publish only if they do not make its model worse.

A group of five or more audits its members' deltas (`swarm/averaging/audit.py`). No other peer sees the delta of a slot
with one holder, and with two or three holders only its length is bounded; so each peer measures the result. All peers
use the same public text (on files of their own: their own, or the probe of the founder), and each trusts only its own
measurement. docs/security.md explains the constants.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import cast

import torch
from torch import LongTensor, Tensor

from spes_p2p.codecs.vectors import LazyVectors
from spes_p2p.data.packing import TokenSource
from spes_p2p.data.shared import MAX_PROBE_PARTS, PROBE_TOKENS, probe_sequences
from spes_p2p.errors import ExchangeError
from spes_p2p.model.loss import num_targets
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

PROBE_SEED = 0
"""Seed of the data order that the probe's sequences come from."""
MAX_WORSE = 0.1
"""Nats per token by which a round may make the model worse."""
MAX_CHANCE = 0.2
"""Largest number of nats added to that for chance: what a round of this peer's own training has just added."""
MAX_SHARED_WORSE = 0.3
"""Nats per token by which the means of `shared` that a voter confirms may make its model worse, over those rounds."""
SLOT_SHARE = 0.5
"""Share of both that one slot may cause, summed over the rounds in which the model is that much worse."""
MEMORY_ROUNDS = 8
"""Rounds over which the best loss and the smallest length of a slot are remembered."""
MAX_LONGER = 30.0
"""Factor by which a slot's vector may grow beyond its smallest remembered length. The loss may show a scaled delta only
a round later, by way of `shared`."""


def public_text(source: Callable[[int], TokenSource], sequence_length: int) -> LongTensor:
    """Return the sequences that all peers of a run measure, `[B, T + 1]`.

    Args:
        source: Makes the run's training sequences in the order of a seed, as `train_sources` returns it.
    """
    sequences, count = source(PROBE_SEED), probe_sequences(sequence_length)
    parts: list[Tensor] = [sequences.next_batch(count)]
    # Of conversations, a sequence teaches little.
    while sum(map(num_targets, parts)) < PROBE_TOKENS // 2 and len(parts) < MAX_PROBE_PARTS:  # guard: never
        parts.append(sequences.next_batch(count))
    return cast(LongTensor, torch.cat(parts))


class LossGate:
    """Loads the result of a synchronisation into the model, and takes back slots that do harm.

    Args:
        probe_BT1: The result of `public_text`.
    """

    def __init__(self, trainer: Trainer, sync: Synchroniser, probe_BT1: LongTensor) -> None:
        self._trainer = trainer
        self._sync = sync
        self._probe_BT1 = probe_BT1
        self._losses: deque[float] = deque(maxlen=MEMORY_ROUNDS)
        self._rises: deque[float] = deque(maxlen=MEMORY_ROUNDS)
        self._harms: dict[VectorName, float] = {}
        self._worse: dict[VectorName, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY_ROUNDS - 1))
        """By how much the versions that this peer confirmed made its model worse."""
        self._lengths: dict[VectorName, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY_ROUNDS))

    def load(self, vectors: Mapping[VectorName, Tensor], adopted: Collection[VectorName] = ()) -> None:
        """Load flat vectors as `Trainer.load` does; slots that do harm stay as they were.

        A version that is taken back is refused in the swarm as well: it is neither served nor adopted, and counts
        against its maker if it has only one. A peer that joins or catches up accepts what the others have accepted:
        its whole model is theirs then, and earlier losses say nothing about it.

        Args:
            vectors: What the synchronisation returned.
            adopted: Slots that this peer trains only from now on: their start was made by others.
        """
        trained = set(self._trainer.names) - set(adopted)  # guard: - set(adopted) ->
        others = [name for name in sorted(vectors) if name.is_weights and name not in trained]
        own = [name for name in vectors if name not in others]  # guard: always
        self._trainer.load(LazyVectors(own, vectors.__getitem__))
        if not others:
            return
        if not self._sync.num_committed:  # guard: never
            self._losses.clear()
            self._rises.clear()
            self._lengths.clear()
        if self._losses and not adopted:  # adopted slots are in the model already  # guard: operand
            rise = self._measure() - self._losses[-1]
            self._rises.append(rise if rise > 0 else 0.0)
        lengths: dict[VectorName, float] = {}

        def measured(name: VectorName) -> Tensor:
            flat, form = vectors[name], self._sync.anchors.form
            lengths[name] = flat.norm().item() if form is None or flat.dtype != torch.uint8 else form.length(flat)
            return flat

        self._trainer.load(LazyVectors(others, measured))
        others = self._without_longer(lengths)
        most_worse = MAX_WORSE + min(max(self._rises, default=0.0), MAX_CHANCE)  # guard: first
        loss = self._measure()
        if (  # guard: never
            self._losses and not loss <= min(self._losses) + most_worse  # guard: min(self._losses) -> self._losses[-1]
        ):
            loss = self._try_one_by_one(others, most_worse)
        else:
            self._harms.clear()
        if math.isfinite(loss):
            self._losses.append(loss)

    def harmful(self, vectors: Mapping[VectorName, Tensor]) -> set[VectorName]:
        """Return those of some new vectors that make this peer's model worse, each alone; the model stays as it is.

        Each is compared with the version before it in this peer's model as it has trained it, and harm adds up.
        """
        found = set[VectorName]()
        for name, flat in vectors.items():
            is_trained, recent = name in self._trainer.names, self._worse[name]
            own = self._trainer.vector(name) if is_trained else self._sync.held.load(name)
            before = self._measure_with(name, self._sync.anchors.weights(name) if is_trained else own)
            worse = self._measure_with(name, flat) - before
            self._trainer.load({name: own})
            if not sum(recent) + worse <= (MAX_SHARED_WORSE if name == SHARED else MAX_WORSE):  # guard: never
                found.add(name)
            else:
                recent.append(max(worse, 0.0))  # guard: skip
        return found

    def _measure_with(self, name: VectorName, vector: Tensor) -> float:
        self._trainer.load({name: vector})
        return self._measure()

    def _without_longer(self, lengths: Mapping[VectorName, float]) -> list[VectorName]:
        """Restore the slots that are much longer than the shortest version remembered; return the others."""
        kept = []
        for name, length in lengths.items():
            # guard: self._lengths[name] -> list(self._lengths[name])[-1:]
            least = min(self._lengths[name], default=0.0) or math.inf
            is_longer = not length <= MAX_LONGER * least
            if is_longer and self._put(name, before=True):  # guard: never
                self._refuse(name, f"it is {length / least:.0f} times as long", is_clear=True)
            else:
                self._lengths[name].append(length)
                kept.append(name)
        return kept

    def _measure(self) -> float:
        return self._trainer.loss_on(self._probe_BT1)

    def _try_one_by_one(self, names: Sequence[VectorName], most_worse: float) -> float:
        """Restore all slots, then load those that do no harm; return the loss with them."""
        names, kept = [name for name in names if self._put(name, before=True)], list[VectorName]()
        loss = before = self._measure()
        is_broken = not math.isfinite(loss)  # by this peer's own part, so no other peer is to blame
        for name in names:
            self._put(name)
            found = self._measure()
            harm = self._harms.get(name, 0.0) + found - loss  # guard: self._harms.get(name, 0.0) + ->
            if is_broken or harm <= SLOT_SHARE * most_worse:
                loss, self._harms[name] = found, 0.0 if is_broken else harm
                kept.append(name)
            else:
                is_clear = not found <= loss + most_worse
                is_clear = is_clear and not self._measure_without(kept) <= before + most_worse  # guard: skip
                self._put(name, before=True)
                if self._lengths[name]:
                    self._lengths[name].pop()  # later versions are compared with those that stay
                harm_text = f"{found:.2f} nats per token of public text instead of {loss:.2f}"
                self._refuse(name, harm_text, is_clear=is_clear)
        return loss

    def _measure_without(self, names: Sequence[VectorName]) -> float:
        """Return the loss without these slots' new versions: two may do harm together that neither does alone."""
        for name in names:
            self._put(name, before=True)
        loss = self._measure()
        for name in names:
            self._put(name)
        return loss

    def _put(self, name: VectorName, *, before: bool = False) -> bool:
        """Load a slot's newest version, or the one before it; return False if there is none."""
        try:
            vector = self._sync.held.load(name, before=before)
        except ExchangeError as error:
            log.info("%s stays as it is: %s", name, error)
            return False
        self._trainer.load({name: vector})
        return True

    def _refuse(self, name: VectorName, harm: str, *, is_clear: bool) -> None:
        """Refuse a version, also as an anchor; its maker is suspect if it made it alone and the harm is clear."""
        held = self._sync.held
        version, makers = self._sync.swarm.versions()[held.form(name)], held.makers.get(name, ())
        log.warning(
            "round %d: %s of %s makes this model worse: %s; keeping the version before (docs/trouble.md#loss)",
            *(version.round, name, ", ".join(peer[-6:] for peer in makers) or "peers that have left", harm),
        )
        is_suspect = is_clear and len(makers) == 1
        held.refuse(
            name,
            {makers[0]: f"its {name} makes the model worse: {harm}"} if is_suspect else {},  # guard: never
        )
