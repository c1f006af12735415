"""The loss gate: what others publish of their slots is kept only if it does not make this peer's model worse.

A group of five or more judges its members' deltas (`swarm/averaging/witness.py`). Of a slot with one holder nobody sees
the delta, and of one with two or three its length alone is bounded; what is left is to look at what comes out. All
peers measure the same public text, each for itself: nobody's word counts.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import LongTensor, Tensor

from spes_p2p.data.packing import TokenSource
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.roster import is_bundle
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

PROBE_SEQUENCES = 2
"""Of the run's training text: one forward pass of them in a round."""
PROBE_SEED = 0
"""Of the order whose first sequences they are."""
MOST_WORSE = 0.1
"""Nats per token by which the model may be worse than it was. Honest slots make it better, but for what a high learning
rate does to all at once; that is no slot's doing, and found out by trying them one by one."""
SHARE_OF_IT = 0.25
"""Of that, what one slot may have done to a model that got so much worse: or a little in each of several rounds."""
MEMORY_ROUNDS = 8
"""The model is held against the best of so many rounds."""


def public_text(source: Callable[[int], TokenSource]) -> LongTensor:
    """Return the sequences that all peers of a run measure, `[B, T + 1]`.

    Args:
        source: Returns the run's training sequences in the order of a seed, as `train_sources` makes it.
    """
    return source(PROBE_SEED).next_batch(PROBE_SEQUENCES)


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

    def load(self, flats: Mapping[str, Tensor] | None, sync: Synchroniser | None) -> None:
        """Put flat vectors into the model, as `Trainer.load` does; slots that do harm stay as they were.

        Versions that are taken back so are refused in the swarm as well: they are neither served nor adopted, and held
        against their maker, where there is but one.

        Args:
            flats: By name; only the leader passes them.
            sync: The leader's dealings with the swarm; None on other ranks.
        """
        self._trainer.load(flats)
        trained = set(self._trainer.names)
        others = self._group.from_leader(lambda: [n for n in sorted(flats or ()) if is_bundle(n) and n not in trained])
        if not others:
            return
        loss = self._measure()
        if self._losses and not loss <= min(self._losses) + MOST_WORSE:
            loss = self._try_one_by_one(others, sync)
        if math.isfinite(loss):
            self._losses.append(loss)

    def _measure(self) -> float:
        loss = self._trainer.loss_on(self._probe_BT1)
        return self._group.from_leader(lambda: loss)

    def _try_one_by_one(self, names: Sequence[str], sync: Synchroniser | None) -> float:
        """Go back to the slots as they were, and take those that do no harm; return the loss with them."""
        names = [name for name in names if self._put(name, sync, before=True)]
        loss = self._measure()
        is_broken = not math.isfinite(loss)  # by this peer's own part, for which nobody else can be blamed
        for name in names:
            self._put(name, sync)
            found = self._measure()
            if is_broken or found <= loss + SHARE_OF_IT * MOST_WORSE:
                loss = found
            else:
                self._put(name, sync, before=True)
                if sync is not None:
                    harm = f"{found:.2f} nats per token of public text instead of {loss:.2f}"
                    _refuse(name, sync, harm, is_clear=not found <= loss + MOST_WORSE)
        return loss

    def _put(self, name: str, sync: Synchroniser | None, *, before: bool = False) -> bool:
        """Put a slot's newest version into the model, or the one before it; return False where there is none."""
        flats: dict[str, Tensor] = {}
        if sync is not None:
            try:
                flats = {name: sync.holdings.load(name, before=before)}
            except ExchangeError:
                log.info("%s has no version before its newest; it stays", name)
        found = self._group.from_leader(lambda: bool(flats))
        if found:
            self._trainer.load(flats if sync is not None else None)
        return found


def _refuse(name: str, sync: Synchroniser, harm: str, *, is_clear: bool) -> None:
    """Refuse a version; who alone has made one that does clear harm is suspect."""
    version, makers = sync.swarm.versions()[name], sync.holdings.makers.get(name, ())
    log.warning(
        "round %d: %s of %s makes this model worse: %s; keeping the version before",
        *(version.round, name, version.author[-6:], harm),
    )
    is_suspect = is_clear and list(makers) == [version.author]
    sync.swarm.refuse(name, {version.author: f"its {name} makes the model worse: {harm}"} if is_suspect else {})
