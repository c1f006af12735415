"""The training loop of one peer: local steps until the round ends, then synchronise. All ranks run it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.errors import DataError
from spes_p2p.optim.schedule import learning_rate
from spes_p2p.swarm.records import Metrics
from spes_p2p.swarm.roster import SHARED, slot_name
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState
from spes_p2p.training.passages import Trained, Update
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.synchroniser import Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

CLAIMED_FACTOR_SHARE = 0.2
"""Share of the run over which SPES's factor on claimed experts rises to 1."""


class Rounds:
    """Runs a peer from its first roster to the run's last round.

    Args:
        run: The run's settings.
        trainer: This rank's share of the training.
        group: The peer's ranks.
        sync: The leader's dealings with the swarm; None on other ranks.
        checkpoint: Where the leader saves the peer's state after each round; None saves nothing.
        run_id: The run's name, for the checkpoint.
    """

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainer,
        group: ProcessGroup,
        sync: Synchroniser | None,
        *,
        checkpoint: PeerCheckpoint | None = None,
        run_id: str = "run",
    ) -> None:
        self._run, self._trainer, self._group, self._sync = run, trainer, group, sync
        self._checkpoint, self._run_id = checkpoint, run_id
        self._round = 0
        self._total_tokens = 0
        self._speed = 0.0
        self._ends_at = 0.0
        self._began = self._trainer.clock()

    def open(
        self, initial: Mapping[str, Tensor] | None, resumed: PeerState | None, moments: Mapping[str, Tensor]
    ) -> None:
        """Enter the swarm and load its state; on all ranks.

        Args:
            initial: Bundles of the run's start; the leader's only.
            resumed: This peer's state before a restart.
            moments: Its optimizer moments then; those of slots no longer held are left out.
        """
        self._apply(self._lead(lambda sync: sync.open(initial or {})))
        if resumed is not None:
            self._trainer.steps, self._total_tokens = resumed.steps, resumed.total_tokens
            self._trainer.data.load_state_dict(dict(resumed.data))
            groups = (SHARED, *map(slot_name, self._trainer.slots))
            kept = {name: tensor for name, tensor in moments.items() if name.split("/")[0] in groups}
            self._load_moments(kept)
        self._speed = self._trainer.calibrate()
        self._apply(self._lead(lambda sync: sync.meet(self._speed)))

    def _load_moments(self, kept: Mapping[str, Tensor]) -> None:
        try:
            self._trainer.optimizer.load_state_tensors(kept)
        except ValueError as error:
            raise DataError(
                f"the checkpoint's moments do not fit this optimizer ({error}); resume with the --inner-optimizer that "
                f"wrote them, or delete the checkpoint's folder to go on without them"
            ) from error

    def run(self, on_round: Callable[[Metrics], None] | None = None) -> None:
        """Train until the run's last round is committed.

        Args:
            on_round: Called on the leader with the report of each round.
        """
        while self._round < self._run.round.total:
            self._run_one(on_round)

    def _run_one(self, on_round: Callable[[Metrics], None] | None) -> None:
        """Train and synchronise once; the round's vectors are gone before the next one's training."""
        before = self._round
        trained, loss = self._train()
        self._apply(self._finish(trained))
        if self._round > before:
            state = self._trainer.state_tensors() if self._checkpoint is not None else {}
            if self._sync is not None:
                self._conclude(self._sync, trained, loss, state, on_round)

    # ------------------------------------------------------------------ training

    def _train(self) -> tuple[Trained, float]:
        """Make local steps until the round ends; return the work and its mean loss, nats per token."""
        began, tokens, weighted_loss, steps = self._trainer.clock(), 0, 0.0, 0
        started_at = self._now()
        while (done := self._share_done(steps, started_at)) < 1.0 or not steps:
            step = self._trainer.step(*self._rates(self._round + min(done, 1.0)))
            tokens, weighted_loss, steps = tokens + step.tokens, weighted_loss + step.loss * step.tokens, steps + 1
            self._rescue_orphans()
        seconds = self._trainer.clock() - began
        self._speed = tokens / seconds
        self._total_tokens += tokens
        local, moments = self._trainer.all_flats(), self._trainer.all_moments(self._run.averaged_moments)
        return Trained(local, tokens, self._speed, seconds, moments), weighted_loss / max(tokens, 1)

    def _share_done(self, steps: int, started_at: float) -> float:
        """Return the share of the round that is over, by steps or by the common clock; the leader's word counts."""
        if self._run.round.mode == "steps":
            return steps / self._run.round.steps
        return self._group.from_leader(lambda: (self._now() - started_at) / max(self._ends_at - started_at, 1e-3))

    def _now(self) -> float:
        return self._sync.swarm.now() if self._sync is not None else 0.0

    def _rates(self, rounds_elapsed: float) -> tuple[float, float]:
        lr = learning_rate(self._run.train, rounds_elapsed, self._run.round.total)
        start = self._run.train.claimed_balance_factor
        risen = min(1.0, rounds_elapsed / (CLAIMED_FACTOR_SHARE * self._run.round.total))
        return lr, start + (1.0 - start) * risen

    def _rescue_orphans(self) -> None:
        update = self._sync.rescue_orphans() if self._sync is not None else None
        if self._group.from_leader(lambda: update is not None):
            ends_at = self._ends_at
            self._apply(self._lead(lambda sync: update or Update(())))
            self._ends_at = ends_at

    # ------------------------------------------------------------------ synchronising

    def _finish(self, trained: Trained) -> tuple[Update, int, float]:
        return self._lead(lambda sync: sync.finish(trained, starts_at=self._ends_at))

    def _lead(self, work: Callable[[Synchroniser], Update]) -> tuple[Update, int, float]:
        """Let the leader synchronise; return its update, round and round end on every rank."""
        update: Update | None = None

        def compute() -> tuple[tuple[int, ...], int, float]:
            nonlocal update
            assert self._sync is not None
            update = work(self._sync)
            return update.slots, self._sync.round, update.ends_at

        slots, round, ends_at = self._group.from_leader(compute)
        return update or Update(slots), round, ends_at

    def _apply(self, outcome: tuple[Update, int, float]) -> None:
        """Bring this rank's model to the leader's state."""
        update, self._round, self._ends_at = outcome
        new = {slot_name(slot) for slot in set(update.slots) - set(self._trainer.slots)}
        flats = update.flats if self._sync is not None else None
        masters = {name: flats[name] for name in sorted(new)} if flats is not None else None
        self._trainer.set_slots(update.slots, masters)
        self._trainer.load({n: flat for n, flat in flats.items() if n not in new} if flats is not None else None)

    # ------------------------------------------------------------------ reporting

    def _conclude(
        self,
        sync: Synchroniser,
        trained: Trained,
        loss: float,
        state: Mapping[str, Tensor],
        on_round: Callable[[Metrics], None] | None,
    ) -> None:
        if self._checkpoint is not None:
            self._checkpoint.save(self._state(), state)
        report = self._report(sync, trained, loss)
        log.info(
            "round %d: %d peers, loss %.3f, %.0f tokens/s, shared %s, slots %s; "
            "%.1f s training, %.1f matchmaking, %.1f averaging, %.1f exchange, %.1f other",
            *(report.round, report.num_members, report.loss, report.tokens_per_second, report.shared_digest),
            ",".join(map(str, report.slots)),
            *(report.train_seconds, report.matchmaking_seconds, report.averaging_seconds),
            *(report.exchange_seconds, report.other_seconds),
        )
        sync.swarm.report(report)
        if on_round is not None:
            on_round(report)

    def _state(self) -> PeerState:
        return PeerState(
            run_id=self._run_id,
            round=self._round,
            slots=self._trainer.slots,
            steps=self._trainer.steps,
            total_tokens=self._total_tokens,
            data=self._trainer.data.state_dict(),
        )

    def _report(self, sync: Synchroniser, trained: Trained, loss: float) -> Metrics:
        now = self._trainer.clock()
        wall, self._began = now - self._began, now
        last, (bytes_in, bytes_out) = sync.last, sync.swarm.traffic()
        spent = trained.seconds + last.matchmaking_seconds + last.averaging_seconds + last.exchange_seconds
        return Metrics(
            peer_id=sync.swarm.peer_id,
            round=self._round,
            step=self._trainer.steps,
            tokens=trained.tokens,
            total_tokens=self._total_tokens,
            loss=loss,
            tokens_per_second=trained.tokens_per_second,
            slots=self._trainer.slots,
            num_members=last.num_members,
            committed=last.num_committed,
            dropped=last.num_dropped,
            shared_digest=sync.anchors.digest(SHARED),
            train_seconds=trained.seconds,
            matchmaking_seconds=last.matchmaking_seconds,
            averaging_seconds=last.averaging_seconds,
            exchange_seconds=last.exchange_seconds,
            other_seconds=max(0.0, wall - spent),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
        )
