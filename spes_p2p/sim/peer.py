"""One peer of a simulation: a real peer's trainer, rounds and synchroniser in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import LongTensor, Tensor

from spes_p2p.config import RunConfig
from spes_p2p.data.packing import TokenSource
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.records import Metrics
from spes_p2p.training.build import build_synchroniser, build_trainer
from spes_p2p.training.loop import Rounds
from spes_p2p.training.loss_gate import LossGate
from spes_p2p.training.process_group import ProcessGroup

SERVE_SECONDS = 30.0
"""For so long a peer serves the run's last versions, as real ones do by default."""


class Leaves(Exception):
    """Raised in a peer's thread when it leaves, as Ctrl-C is in a real one's."""


class Dies(Exception):
    """Raised in a peer's thread when it is killed."""


class PacedTokens:
    """Batches that take time.

    Args:
        source: Where they come from.
        spend: Called with the tokens of each batch before it is handed out.
    """

    def __init__(self, source: TokenSource, spend: Callable[[int], None]) -> None:
        self._source, self._spend = source, spend

    def next_batch(self, num_sequences: int) -> LongTensor:
        tokens_BT1 = self._source.next_batch(num_sequences)
        self._spend(tokens_BT1[:, 1:].numel())
        return tokens_BT1

    def state_dict(self) -> dict[str, Any]:
        return self._source.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._source.load_state_dict(state)


class VirtualPeer:
    """A peer with its own model, optimizer and data.

    Args:
        run: The run's settings.
        swarm: This peer's; not shared.
        data: Its batches.
        probe_BT1: Public sequences that the loss gate measures.
        vocab_size: Entries of the run's tokenizer.
        max_slots: Slots it can train.
        tokens_per_second: Its speed, in virtual seconds.
        run_id: The run's name.
        device: "auto", "cpu" or "cuda".
    """

    def __init__(
        self,
        run: RunConfig,
        swarm: MemorySwarm,
        data: TokenSource,
        probe_BT1: LongTensor,
        *,
        vocab_size: int,
        max_slots: int,
        tokens_per_second: float = 1000.0,
        run_id: str = "run",
        device: str = "cpu",
    ) -> None:
        self.swarm, self._clock, self._tokens_per_second = swarm, swarm.clock, tokens_per_second
        group = ProcessGroup(device)
        paced = PacedTokens(data, self._spend)
        self.trainer = build_trainer(run, vocab_size, paced, group, clock=self._clock.now)
        self.sync = build_synchroniser(swarm, run, self.trainer, run_id=run_id, max_slots=max_slots)
        swarm.enter(self.sync.anchors.vectors())
        gate = LossGate(self.trainer, group, probe_BT1)
        self.rounds = Rounds(run, self.trainer, group, self.sync, gate=gate, start=self._clock.start)
        self.reports: list[Metrics] = []
        self._strike: tuple[float, float] | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots it trains, or trained until it ended."""
        return self.trainer.slots

    def live(self, initial: Callable[[], Mapping[str, Tensor]], on_round: Callable[[Metrics], None]) -> None:
        """Join, train to the run's end, leave.

        Args:
            initial: Makes the bundles of the run's start.
            on_round: Called with the report of each round; it may raise `Leaves`, or strike the peer.
        """

        def report(metrics: Metrics) -> None:
            self.reports.append(metrics)
            on_round(metrics)

        try:
            self.rounds.open(initial)
            self.rounds.run(report)
            self._clock.advance(SERVE_SECONDS)
            self.sync.holdings.leave()
        except Leaves:
            self.sync.holdings.leave()
        except Dies:
            pass
        self.swarm.close()

    def strike(self, after_seconds: float, seconds: float = math.inf) -> None:
        """Stand still in the middle of training, for ever by default.

        Args:
            after_seconds: Struck is the first batch that ends so long from now or later.
            seconds: For so long it does nothing, and nothing of it answers.
        """
        self._strike = self._clock.now() + after_seconds, seconds

    def _spend(self, tokens: int) -> None:
        """Let a batch take its time, and be struck in it if that is due."""
        self._clock.advance(tokens / self._tokens_per_second)
        if self._strike is None or self._clock.now() < self._strike[0]:
            return
        (_, seconds), self._strike = self._strike, None
        if math.isinf(seconds):
            raise Dies
        self.swarm.pause(seconds)
