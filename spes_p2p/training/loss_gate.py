"""The loss gate: what others publish of their slots is kept only if it does not make this peer's model worse.

A group of five or more judges its members' deltas (`swarm/averaging/audit.py`). Of a slot with one holder nobody sees
the delta, and of one with two or three its length alone is bounded; what is left is to look at what comes out. All
peers measure the same public text, each for itself: nobody's word counts.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence

from torch import LongTensor, Tensor

from spes_p2p.data.packing import TokenSource
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.roster import is_bundle
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

PROBE_SEQUENCES = 2
"""Of the run's training text, at least: two forward passes of them in a round."""
PROBE_TOKENS = 1024
"""They hold so many at least. On 32 of them honest rounds of eight were up to 0.24 nats worse than the best before; on
1024 up to 0.05, at ten times the usual learning rate."""
PROBE_SEED = 0
"""Of the order whose first sequences they are."""
MOST_WORSE = 0.1
"""Nats per token by which the model may be worse than it was: twice what honest rounds were on so many tokens."""
MOST_CHANCE = 0.2
"""Nats that are added to that at most, for what chance does: by how much the model has become worse in a round while
others' slots stayed as they were. At ten times the usual learning rate three honest peers' did by so much, and was
better a round later."""
SHARE_OF_IT = 0.5
"""Of both, what one slot may do to a model that is so much worse, in all rounds together in which it is. Of 560 honest
ones tried so, at three times the usual learning rate, one did more; and no model of theirs was so much worse."""
MEMORY_ROUNDS = 8
"""The model is held against the best of so many rounds, and a slot's length against the least."""
MOST_LONGER = 30.0
"""Times as long as it was is more than training makes of a slot, twice what honest first rounds did at ten times the
usual learning rate. What a scaled delta does to the loss may come a round later, by way of `shared`."""


def public_text(source: Callable[[int], TokenSource], sequence_length: int) -> LongTensor:
    """Return the sequences that all peers of a run measure, `[B, T + 1]`.

    Args:
        source: Returns the run's training sequences in the order of a seed, as `train_sources` makes it.
        sequence_length: Tokens of each, T.
    """
    return source(PROBE_SEED).next_batch(
        max(PROBE_SEQUENCES, math.ceil(PROBE_TOKENS / sequence_length))  # guard: probe-size
    )


class LossGate:
    """Puts what a synchronisation has brought into the model, and takes back what does it harm; on all ranks.

    Args:
        trainer: This rank's share of the training.
        group: The peer's ranks.
        probe_BT1: What `public_text` returns; the same on all ranks.
    """

    def __init__(self, trainer: Trainer, group: ProcessGroup, probe_BT1: LongTensor) -> None:
        self._trainer, self._group, self._probe_BT1 = trainer, group, probe_BT1
        self._losses: deque[float] = deque(maxlen=MEMORY_ROUNDS)
        self._rises: deque[float] = deque(maxlen=MEMORY_ROUNDS)
        self._harms: dict[str, float] = {}
        self._lengths: dict[str, deque[float]] = defaultdict(lambda: deque(maxlen=MEMORY_ROUNDS))

    def load(
        self, vectors: Mapping[str, Tensor] | None, sync: Synchroniser | None, adopted: Collection[str] = ()
    ) -> None:
        """Put flat vectors into the model, as `Trainer.load` does; slots that do harm stay as they were.

        Versions that are taken back so are refused in the swarm as well: they are neither served nor adopted, and held
        against their maker, where there is but one. Whoever joins or catches up takes what the others have taken:
        all of its model is theirs then, and the losses of the one before say nothing of it.

        Args:
            vectors: By name; only the leader passes them.
            sync: The leader's dealings with the swarm; None on other ranks.
            adopted: Slots that this peer trains only from now on: what it begins with, others have made.
        """
        trained = set(self._trainer.names) - set(adopted)  # guard: adopted-judged
        others = self._group.from_leader(lambda: [n for n in sorted(vectors or ()) if is_bundle(n) and n not in trained])
        self._trainer.load(
            {n: flat for n, flat in vectors.items() if n not in others}  # guard: others-chance
            if vectors is not None
            else None
        )
        if not others:
            return
        if self._group.from_leader(lambda: sync is not None and not sync.last.num_committed):  # guard: catching-up-gate
            self._losses.clear()
            self._rises.clear()
            self._lengths.clear()
        if self._losses and not adopted:  # what is adopted is in the model already  # guard: adopted-rise
            rise = self._measure() - self._losses[-1]
            self._rises.append(rise if rise > 0 else 0.0)
        self._trainer.load({n: vectors[n] for n in others} if vectors is not None else None)
        others = self._without_longer(others, vectors, sync)
        most_worse = MOST_WORSE + min(max(self._rises, default=0.0), MOST_CHANCE)  # guard: chance-bound
        loss = self._measure()
        if (  # guard: worse-slots
            self._losses and not loss <= min(self._losses) + most_worse  # guard: slow-harm
        ):
            loss = self._try_one_by_one(others, sync, most_worse)
        else:
            self._harms.clear()
        if math.isfinite(loss):
            self._losses.append(loss)

    def _without_longer(
        self, names: Sequence[str], vectors: Mapping[str, Tensor] | None, sync: Synchroniser | None
    ) -> list[str]:
        """Go back to the slots as they were of which no training makes what they have become; return the others."""

        def lengths() -> dict[str, float]:
            return {name: (vectors or {})[name].norm().item() for name in names}

        kept = []
        for name, length in self._group.from_leader(lengths).items():
            least = min(self._lengths[name], default=0.0) or math.inf  # guard: stepwise-longer
            if not length <= MOST_LONGER * least and self._put(name, sync, before=True):  # guard: longer-slot
                if sync is not None:
                    _refuse(name, sync, f"it is {length / least:.0f} times as long", is_clear=True)
            else:
                self._lengths[name].append(length)
                kept.append(name)
        return kept

    def _measure(self) -> float:
        loss = self._trainer.loss_on(self._probe_BT1)
        return self._group.from_leader(lambda: loss)

    def _try_one_by_one(self, names: Sequence[str], sync: Synchroniser | None, most_worse: float) -> float:
        """Go back to the slots as they were, and take those that do no harm; return the loss with them."""
        names, kept = [name for name in names if self._put(name, sync, before=True)], list[str]()
        loss = before = self._measure()
        is_broken = not math.isfinite(loss)  # by this peer's own part, for which nobody else can be blamed
        for name in names:
            self._put(name, sync)
            found = self._measure()
            harm = self._harms.get(name, 0.0) + found - loss  # guard: harm-adds-up
            if is_broken or harm <= SHARE_OF_IT * most_worse:
                loss, self._harms[name] = found, 0.0 if is_broken else harm
                kept.append(name)
            else:
                is_clear = not found <= loss + most_worse
                is_clear = is_clear and not self._measure_without(kept, sync) <= before + most_worse  # guard: two-slots
                self._put(name, sync, before=True)
                if sync is not None:
                    said = f"{found:.2f} nats per token of public text instead of {loss:.2f}"
                    _refuse(name, sync, said, is_clear=is_clear)
        return loss

    def _measure_without(self, names: Sequence[str], sync: Synchroniser | None) -> float:
        """Return the loss with these slots as they were: two may do harm together that neither does alone."""
        for name in names:
            self._put(name, sync, before=True)
        loss = self._measure()
        for name in names:
            self._put(name, sync)
        return loss

    def _put(self, name: str, sync: Synchroniser | None, *, before: bool = False) -> bool:
        """Put a slot's newest version into the model, or the one before it; return False where there is none."""
        vectors: dict[str, Tensor] = {}
        if sync is not None:
            try:
                vectors = {name: sync.held.load(name, before=before)}
            except ExchangeError:
                log.info("%s has no version before its newest; it stays", name)
        found = self._group.from_leader(lambda: bool(vectors))
        if found:
            self._trainer.load(vectors if sync is not None else None)
        return found


def _refuse(name: str, sync: Synchroniser, harm: str, *, is_clear: bool) -> None:
    """Refuse a version, also as an anchor; who alone has made one that does clear harm is suspect."""
    version, makers = sync.swarm.versions()[name], sync.held.makers.get(name, ())
    log.warning(
        "round %d: %s of %s makes this model worse: %s; keeping the version before",
        *(version.round, name, version.author[-6:], harm),
    )
    is_suspect = is_clear and list(makers) == [version.author]
    sync.swarm.refuse(
        name,
        {version.author: f"its {name} makes the model worse: {harm}"} if is_suspect else {},  # guard: only-maker
    )
    if name in sync.anchors.names:  # guard: refused-anchor
        sync.anchors.set(name, sync.swarm.load(name))
