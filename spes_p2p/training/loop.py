"""The training loop of one peer: local steps until the round ends, then synchronise. All ranks run it.

With `round.overlap` it does not wait for the synchronisation: it trains the next round, and corrects what it has when
the result is there (`overlap`). The last round's is waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.optim.inner import rate_of_step
from spes_p2p.swarm.records import Metrics
from spes_p2p.swarm.roster import slot_name
from spes_p2p.training.checkpoint import PeerCheckpoint, Saved
from spes_p2p.training.checkpointer import Saving
from spes_p2p.training.loss_gate import LossGate
from spes_p2p.training.overlap import Correction, Flight, Task, ThreadTask
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.reports import Work, log_report, report_of
from spes_p2p.training.round_work import Trained, Update
from spes_p2p.training.synchroniser import PUNCTUAL, Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

CLAIMED_FACTOR_SHARE = 0.2
"""Share of the run over which SPES's factor on claimed experts rises to 1."""
UNFINISHED = 0.999
"""Share of a round that is over at most while nobody knows when it ends."""
LEAVING_SECONDS = 5.0
"""For so long a peer that is interrupted lets a synchronisation end that is under way."""


class Rounds:
    """Runs a peer from its first roster to the run's last round.

    Args:
        run: The run's settings.
        trainer: This rank's share of the training.
        group: The peer's ranks.
        sync: The leader's dealings with the swarm; None on other ranks.
        gate: Looks at what others publish of their slots; None takes it as it comes.
        checkpoint: Where the leader saves the peer's state after each round; None saves nothing.
        run_id: The run's name, for the checkpoint.
        start: Begins work beside the training; a virtual peer's is in virtual time.
    """

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainer,
        group: ProcessGroup,
        sync: Synchroniser | None,
        *,
        gate: LossGate | None = None,
        checkpoint: PeerCheckpoint | None = None,
        run_id: str = "run",
        start: Callable[[Callable[[], Correction]], Task[Correction]] = ThreadTask,
    ) -> None:
        self._run, self._trainer, self._group, self._sync = run, trainer, group, sync
        self._gate = gate
        self._saving, self._start = Saving(checkpoint, run_id, trainer, group, sync), start
        self._on_round: Callable[[Metrics], None] | None = None
        self._flight: Flight | None = None
        self._round = self._total_tokens = 0
        self._speed = 0.0
        self._started_at = self._ends_at = 0.0
        self._began = self._trainer.clock()
        self._waited_seconds = self._halted_seconds = 0.0
        self.brought_steps = 0
        """Local steps that have been brought to a synchronisation."""
        self.begun_rounds = 0
        """Times that this peer began to train a round; what came of them is in its reports."""

    def open(self, initial: Callable[[], Mapping[str, Tensor]] | None, saved: Saved | None = None) -> None:
        """Enter the swarm and load its state; on all ranks.

        Args:
            initial: Makes the bundles of the run's start; the leader's only.
            saved: This peer's checkpoint, after a restart.
        """
        outcome = self._lead(lambda sync: sync.open(initial, saved.files if saved is not None else None))
        self._apply(outcome)
        if saved is not None:
            self._total_tokens = saved.state.total_tokens
            self._saving.take_up(saved, outcome[0])
        is_late = self._group.from_leader(lambda: self._sync is not None and self._sync.is_late)
        self._speed = self._trainer.calibrate(measures=not is_late)  # the others have announced when their round ends
        if saved is None:
            self._saving.save(self._round, self._trainer.steps, 0, self._trainer.data.state_dict(), is_last=False)
        self._apply(self._lead(lambda sync: sync.meet(self._speed)))

    def run(self, on_round: Callable[[Metrics], None] | None = None) -> None:
        """Train until the run's last round is committed.

        Args:
            on_round: Called on the leader with the report of each round.
        """
        self._on_round = on_round
        try:
            while not self._is_over:
                self._run_one()
        finally:
            if self._flight is not None:
                self._flight.abandon(LEAVING_SECONDS)
            self._saving.close()

    def settle(self, seconds: float) -> None:
        """Before this peer leaves, let a synchronisation end that it was interrupted in; for so long at most."""
        if self._flight is not None:
            self._flight.abandon(seconds)

    @property
    def _is_over(self) -> bool:
        return self._round >= self._run.round.total

    def _run_one(self) -> None:
        """Train once, and synchronise or begin to; the round's vectors are gone when the next one's are made."""
        work, before = self._train(), self._round
        if self._is_over:
            return  # the others have gone on, and ended the run
        if self._run.round.overlap and self._round + 1 < self._run.round.total:
            self._depart(work)
            return
        began = self._trainer.clock()
        self._apply(self._lead(lambda sync: sync.finish(work.trained, starts_at=self._ends_at)))
        if self._round > before:
            waited = work.waited_seconds + self._trainer.clock() - began if self._run.round.overlap else None
            self._conclude(work, waited)

    # ------------------------------------------------------------------ training

    def _train(self) -> Work:
        """Make local steps until the round ends; whatever was under way has landed then."""
        began, tokens, weighted_loss, steps = self._trainer.clock(), 0, 0.0, 0
        self._started_at = self._now()
        self.begun_rounds += 1
        while ((done := self._share_done(steps)) < 1.0 or not steps) and not self._is_over:
            position = self._round + (self._flight is not None) + min(done, 1.0)
            step = self._trainer.step(*self._rates(position))
            steps += 1
            if step.tokens:  # the loss of a step that changed nothing may be NaN  # guard: infinite-step
                tokens, weighted_loss = tokens + step.tokens, weighted_loss + step.loss * step.tokens
            if self._flight is None:
                self._rescue_orphans()
            else:
                self._flight.advance(step.tokens)
                self._land_if_due(self._flight)
        if self._flight is not None:
            self._land(self._flight)
        seconds = self._trainer.clock() - began - self._halted_seconds
        self._speed = tokens / seconds
        self._total_tokens += tokens
        if not tokens:
            log.warning(
                "round %d: none of %d steps had a finite gradient; going on from the swarm's versions. If it comes "
                "again, to others too, the run needs a lower train.lr; if to this alone, --resume with --device cpu",
                *(self._round + 1, steps),
            )
        return self._work(tokens, weighted_loss, seconds)

    def _work(self, tokens: int, weighted_loss: float, seconds: float) -> Work:
        """Return what was trained, and begin to count anew."""
        local, moments = self._trainer.all_flats(), self._moments()
        self.brought_steps = self._trainer.steps
        work = Work(
            trained=Trained(local, tokens, self._speed, seconds, moments, self._trainer.routed_tokens()),
            loss=weighted_loss / tokens if tokens else None,
            steps=self._trainer.steps,
            total_tokens=self._total_tokens,
            data=self._trainer.data.state_dict(),
            ended=self._trainer.clock(),
            waited_seconds=self._waited_seconds,
        )
        self._waited_seconds = self._halted_seconds = 0.0
        return work

    def _moments(self) -> dict[str, Tensor]:
        """Return what is averaged, or published for those who adopt a slot."""
        names = self._trainer.names if self._run.averaged_moments else self._trainer.names[1:]
        return self._trainer.all_moments(self._run.kept_moments, names)

    def _share_done(self, steps: int) -> float:
        """Return the share of the round that is over, by steps or by the common clock; the leader's word counts."""
        if self._run.round.mode == "steps":
            return steps / self._run.round.steps
        return self._group.from_leader(lambda: self._share_elapsed(steps))

    def _share_elapsed(self, steps: int) -> float:
        """Return the share of the round's time that is over; a slow machine's is, if it can end no other step in it.

        Until a synchronisation that is under way has landed nobody knows that time, but no round outlasts the longest.
        """
        now, began = self._now(), self._started_at
        share = (now - began) / max(self._ends_at - began, 1e-3)
        if self._flight is not None:
            return min(share, UNFINISHED) if now - began < self._run.round.max_seconds else 1.0
        step_seconds = (now - began - self._halted_seconds) / max(steps, 1)
        patience = PUNCTUAL * self._run.round.matchmaking_seconds
        return max(share, 1.0) if steps and now + step_seconds > self._ends_at + patience else share

    def _now(self) -> float:
        return self._sync.swarm.now() if self._sync is not None else 0.0

    def _rates(self, rounds_elapsed: float) -> tuple[float, float]:
        lr = rate_of_step(self._run, rounds_elapsed)
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
        if self._gate is not None:
            self._gate.load(flats, self._sync, adopted=new)
        else:
            self._trainer.load({n: flat for n, flat in flats.items() if n not in new} if flats is not None else None)

    # ------------------------------------------------------------------ synchronising while training

    def _depart(self, work: Work) -> None:
        """Begin to synchronise; until it lands, nothing else here touches the leader's synchroniser."""
        task, sync, starts_at, trained = None, self._sync, self._ends_at, work.trained
        if sync is not None:
            task = self._start(lambda: Correction.of(sync.finish(trained, starts_at=starts_at), trained))
            # Taken to last as long as this one until its end is known.
            self._ends_at = self._now() + max(0.0, starts_at - self._started_at)
        self._flight = Flight(work, self._run.round.overlap, task)

    def _land_if_due(self, flight: Flight) -> None:
        ends_by_time = self._run.round.mode == "tokens"
        if self._group.from_leader(lambda: flight.is_due(self._now() if ends_by_time else None)):
            self._land(flight)

    def _land(self, flight: Flight) -> None:
        """Wait for a synchronisation and apply what came of it to what was trained on meanwhile."""
        began, before = self._trainer.clock(), self._round
        landed: Correction | None = None

        def land(sync: Synchroniser) -> Update:
            nonlocal landed
            landed = flight.land()
            return landed.update

        outcome = self._lead(land)
        self._flight = None
        self._waited_seconds += self._trainer.clock() - began
        self._apply(outcome)
        self._trainer.shift(landed.shifts if landed else None)
        moments, own = (landed.moments, landed.before) if landed else (None, None)
        self._trainer.load_moments_late(moments, own, flight.optimizer_steps)
        if self._round > before:
            self._conclude(flight.work, flight.work.waited_seconds, ended=flight.work.ended)
        self._halted_seconds += self._trainer.clock() - began

    # ------------------------------------------------------------------ reporting

    def _conclude(self, work: Work, waited_seconds: float | None, ended: float | None = None) -> None:
        """Save and report a committed round, whose time ended when it was brought, or ends now."""
        self._saving.save(self._round, work.steps, work.total_tokens, work.data, is_last=self._is_over)
        if self._sync is None:
            return
        ended = self._trainer.clock() if ended is None else ended
        wall_seconds, self._began = ended - self._began, ended
        report = report_of(self._sync, work, self._trainer.slots, wall_seconds, waited_seconds)
        log_report(report)
        self._sync.swarm.report(report)
        if self._on_round is not None:
            self._on_round(report)
