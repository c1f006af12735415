"""The training loop of one peer: train until the round ends, synchronise, load, save, report. All ranks run it.

`TrainingLoop._one_round` is the whole of a round on one screen; `Synchroniser.synchronise` is the leader's part of it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import Tensor

from spes_p2p.config import RunConfig
from spes_p2p.data.mixture import MixedSource
from spes_p2p.data.shared import SharedOrder
from spes_p2p.errors import AbsentError, DataError
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.swarm.names import SHARED, VectorName, slot_ranges
from spes_p2p.swarm.records import Metrics
from spes_p2p.training.checkpoint import PeerCheckpoint, Saved
from spes_p2p.training.checkpointer import Checkpointer
from spes_p2p.training.controls import Controls, Decision, Intent, decide
from spes_p2p.training.dealer import deal
from spes_p2p.training.loss_gate import LossGate
from spes_p2p.training.process_group import ProcessGroup, give_back_freed
from spes_p2p.training.round_work import RoundWork, StateUpdate, StoredVectors
from spes_p2p.training.slots import active_of
from spes_p2p.training.synchroniser import PUNCTUAL, Synchroniser
from spes_p2p.training.trainer import Trainer

log = logging.getLogger(__name__)

CLAIMED_FACTOR_SHARE = 0.2
"""Share of the run over which SPES's factor on claimed experts rises to 1."""
RETURN_SECONDS = 10.0
"""Pause between two tries of a peer that comes back."""
MAX_FRUITLESS = 5
"""Attempts in a row without a finite step after which a peer ends."""
REMEDY = "if it is so on other peers too, lower train.lr (spes amend); if only here, restart with --resume --device cpu"


class TrainingLoop:
    """Runs a peer from its first roster to the run's last round.

    Args:
        run: The run's settings.
        trainer: This rank's share of the training.
        group: The peer's ranks.
        sync: The leader's connection to the swarm; None on other ranks.
        gate: Judges the slots that others publish; None accepts all.
        checkpoint: Where the leader saves the peer's state after each round; None saves nothing.
        controls: The owner's controls, on the leader; None lets the peer train.
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
        controls: Controls | None = None,
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._group = group
        self._sync = sync
        self._gate = gate
        self._checkpointer = Checkpointer(checkpoint, trainer, group, sync)
        self._controls = controls
        self._on_round: Callable[[Metrics], None] | None = None
        self._round = 0
        self._total_tokens = 0
        self._tokens_per_second = self._places_per_second = 0.0
        self._share = range(0)  # of shared data
        self._round_started = 0.0  # DHT time
        self._round_ends = 0.0  # DHT time
        self._last_report = self._trainer.clock()
        self._halted_seconds = 0.0
        self._step_seconds = 0.0
        self._num_fruitless = 0
        self.is_ended = False
        """Whether the peer was asked to end, and has."""
        self.brought_steps = 0
        """Local steps that have been brought to a synchronisation."""
        self.begun_rounds = 0
        """Rounds that this peer began to train, whether they were committed or not."""

    def open(self, initial: Callable[[], Mapping[VectorName, Tensor]] | None, saved: Saved | None = None) -> None:
        """Enter the swarm and load its state; on all ranks.

        Args:
            initial: Makes the published vectors of the run's start; on the leader only.
            saved: This peer's checkpoint, after a restart.
        """
        self._stand_by()
        if self.is_ended:
            return
        update = self._lead(lambda sync: sync.open(initial))
        self._load(update)
        if saved is not None:
            self._total_tokens = saved.state.total_tokens
            self._checkpointer.restore(saved)
        follows = self._group.from_leader(lambda: self._sync is not None and self._sync.follows_others)
        tokens, places = self._trainer.calibrate(measures=not follows)
        self._tokens_per_second = tokens
        self._places_per_second = places
        if saved is None:
            self._checkpointer.save(self._round, self._trainer.steps, 0, self._trainer.data.state_dict(), is_last=False)

    def run(self, on_round: Callable[[Metrics], None] | None = None) -> None:
        """Meet the others, and train until the run's last round is committed.

        Args:
            on_round: Called on the leader with the report of each round that this peer commits.
        """
        self._on_round = on_round
        try:
            if not self.is_ended:
                self._meet()
            self._follow_amendments()
            while not (self._is_over or self.is_ended):
                self._one_round()
                self._follow_amendments()
                self.is_ended = self._group.from_leader(lambda: self._intent(0.0).ends) or self.is_ended
        finally:
            self._checkpointer.close()

    def _meet(self) -> None:
        """Learn when the first round ends.

        A peer that comes late may meet the others as they end a round: it commits that round without tokens of its own.
        """
        work = RoundWork(
            vectors={},
            tokens=0,
            tokens_per_second=self._tokens_per_second,
            places_per_second=self._places_per_second,
            seconds=0.0,
            steps=self._trainer.steps,
            total_tokens=self._total_tokens,
            data=self._trainer.data.state_dict(),
        )
        self._load(self._lead(lambda sync: sync.meet(work)))
        if self._group.from_leader(lambda: self._sync is not None and self._sync.stats.num_committed > 0):
            self._conclude(work)

    def _one_round(self) -> None:
        """Run one round. Its vectors are local to this call, so they are freed before the next round."""
        work = self._train()  # local vectors, moments, tokens, routed
        if work is None or self._is_over:
            return  # its owner has taken it out; or the others have gone on meanwhile, and ended the run
        before = self._round
        self._load(self._lead(lambda sync: sync.synchronise(work, closes_from=self._round_ends)))
        if self._round > before:
            self._conclude(work)

    def _follow_amendments(self) -> None:
        """Go on with the settings that the founder has changed, if the last certificate says so."""
        run = self._group.from_leader(lambda: self._sync.amended() if self._sync is not None else None)
        if run is not None:
            self._run = run
            if run.data.mixture:
                cast(MixedSource, self._trainer.data).amend(run.data)

    @property
    def _is_over(self) -> bool:
        return self._round >= self._run.round.total

    # ------------------------------------------------------------------ training

    def _train(self) -> RoundWork | None:
        """Make local steps until the round ends.

        Returns:
            What was trained; None if the owner's controls have taken this peer out of the round.
        """
        began, tokens, weighted_loss, steps, finite_steps = self._trainer.clock(), 0, 0.0, 0, 0
        self._round_started = self._now()
        self.begun_rounds += 1
        self._deal()
        while ((done := self._share_done(steps)) < 1.0 or not steps) and not self._is_over:
            act = self._act(done, steps)
            if act in ("stand aside", "end"):
                self._stand_aside(is_ended=act == "end")
                return None
            if act == "bring":
                break
            if act == "wait":
                continue
            began_step = self._trainer.clock()
            step = self._trainer.step(*self._rates(self._round + min(done, 1.0)))
            self._step_seconds = self._trainer.clock() - began_step
            steps += 1
            if step.tokens:  # the loss of a step that changed nothing may be NaN  # guard: infinite-step
                finite_steps += 1
                tokens += step.tokens
                weighted_loss += step.loss * step.tokens
            self._rescue_orphans()
        seconds = self._trainer.clock() - began - self._halted_seconds
        if steps:
            self._tokens_per_second = tokens / seconds
            places = steps * self._run.train.batch_size * self._run.data.sequence_length
            self._places_per_second = places / seconds
        self._total_tokens += tokens
        if steps:
            self._count_attempt(finite_steps, steps)
        if self._run.data.is_shared:
            words = "round %d: trained %d batches, %d of them from its share, which begins at batch %d"
            log.info(words, self._round + 1, steps, min(steps, len(self._share)), self._share.start)
        return self._work(tokens, weighted_loss, seconds, steps)

    def _deal(self) -> None:
        """Draw this peer's share of shared data from now on, and then in an order of its own; on all ranks."""
        if self._run.data.is_shared:
            self._share, own = self._group.from_leader(lambda: deal(cast(Synchroniser, self._sync).swarm, self._round))
            cast(SharedOrder, self._trainer.data).deal(self._share, own)

    def _count_attempt(self, finite_steps: int, steps: int) -> None:
        """Count the attempts in a row without a finite step, which repeat one round; end this peer after some."""
        self._num_fruitless = 0 if finite_steps else self._num_fruitless + 1
        fault = f"round {self._round + 1}: none of {steps} steps had a finite gradient"
        if self._num_fruitless >= MAX_FRUITLESS:
            raise DataError(f"{fault}, in {MAX_FRUITLESS} attempts in a row; {REMEDY}")
        if self._num_fruitless:
            log.warning("%s; going on from the swarm's versions; %s", fault, REMEDY)

    def _work(self, tokens: int, weighted_loss: float, seconds: float, steps: int) -> RoundWork:
        """Return what was trained, at what speed, and start the counters again."""
        give_back_freed()  # gradients and activations: the round's vectors take as much
        work = RoundWork(
            vectors=self._vectors(),
            tokens=tokens,
            tokens_per_second=self._tokens_per_second if steps else 0.0,
            places_per_second=self._places_per_second if steps else 0.0,
            seconds=seconds,
            moments=self._moments(),
            routed=self._trainer.routed_tokens(),
            loss=weighted_loss / tokens if tokens else None,
            steps=self._trainer.steps,
            total_tokens=self._total_tokens,
            data=self._trainer.data.state_dict(),
            batches=steps,
        )
        self.brought_steps = self._trainer.steps
        self._halted_seconds = 0.0
        return work

    def _vectors(self) -> Mapping[VectorName, Tensor]:
        """Return what was trained; each vector is read when it is asked for."""
        trainer = self._trainer
        room = self._sync.swarm.room(trainer.slots) if self._sync is not None else {}
        if trainer.is_sharded:  # all ranks must help to read them
            return trainer.all_vectors(room)
        names = trainer.names if self._group.is_leader else ()
        return StoredVectors(names, lambda name: trainer.vector(name, room.get(name)))

    def _moments(self) -> Mapping[VectorName, Tensor]:
        """Return the moments that the run averages."""
        return self._trainer.all_moments(self._run.averaged_moments)

    # ------------------------------------------------------------------ the owner's controls

    def _intent(self, wait_seconds: float) -> Intent:
        """Return, on the leader, what its owner wants; a paused peer waits for a moment first."""
        step_seconds, self._step_seconds = self._step_seconds, 0.0
        return self._controls.intent(step_seconds, wait_seconds) if self._controls is not None else Intent()

    def _act(self, done: float, steps: int) -> str:
        """Return the next action of all ranks (`Decision.act`)."""
        by_steps = self._run.round.mode == "steps"

        def of_leader() -> Decision:
            if self._controls is None or self._sync is None:
                return Decision()
            began, held = self._trainer.clock(), self._sync.held
            # The others would wait for a peer that rests or waits beyond the round's end.
            has_end = not (by_steps or done >= 1.0)
            intent = self._intent(max(0.0, self._round_ends - self._now()) if has_end else math.inf)
            held.limit(intent.slots)
            # A peer that trains reads no records between its steps.
            others = set() if intent.trains else set(active_of(held.claims())) - {self._sync.swarm.peer_id}
            if not intent.trains:
                self._halted_seconds += self._trainer.clock() - began
            elif has_end and steps and self._share_elapsed(steps) >= 1.0:
                return Decision("wait", intent.threads)  # its rest has lasted until the round's end
            return decide(
                intent,
                has_trained=steps > 0,
                is_due=done >= 1.0 or by_steps,
                has_others=bool(others),
                has_voters=not others.isdisjoint(self._sync.swarm.last().voters),
                lease_seconds=self._run.round.lease_seconds,
            )

        decision = self._group.from_leader(of_leader)
        if decision.threads not in (None, torch.get_num_threads()):
            torch.set_num_threads(decision.threads)
        if decision.act == "leave":
            raise KeyboardInterrupt
        return decision.act

    def _stand_by(self) -> None:
        """Wait until this peer may train, or is to end."""
        while True:
            intent = self._group.from_leader(lambda: self._intent(math.inf))
            if intent.leaves:
                raise KeyboardInterrupt
            self.is_ended = intent.ends
            if intent.trains or self.is_ended:
                if self._sync is not None:
                    self._sync.held.limit(intent.slots)
                return

    def _stand_aside(self, *, is_ended: bool) -> None:
        """Give the slots to others until this peer may train again; then join them as a late peer does."""
        self._halted_seconds = 0.0
        self.is_ended = is_ended
        if is_ended:
            return

        def aside(sync: Synchroniser) -> StateUpdate:
            sync.held.stand_aside()
            assert self._controls is not None
            self._controls.tell("its slots are handed over; it serves what it has")
            return StateUpdate(())

        self._lead(aside)
        while not self._has_come_back():
            if self.is_ended:
                return
        self._meet()

    def _has_come_back(self) -> bool:
        """Wait until this peer may train, and enter the swarm again; tell whether it has, since others may be away."""
        self._stand_by()
        if self.is_ended:
            return False
        try:
            self._load(self._lead(Synchroniser.come_back))
        except AbsentError as error:  # on all ranks
            log.warning("coming back: %s (next try in %.0f s)", error, RETURN_SECONDS, extra={"heals": True})
            if self._group.from_leader(lambda: self._sync is not None and self._sync.swarm.wait(RETURN_SECONDS)):
                raise
            return False
        return True

    # ------------------------------------------------------------------ when a round ends

    def _share_done(self, steps: int) -> float:
        """Return the share of the round that is over, by steps or by the leader's clock."""
        if self._run.round.mode == "steps":
            return steps / self._run.round.steps_of(self._round + 1)
        return self._group.from_leader(lambda: self._share_elapsed(steps))

    def _share_elapsed(self, steps: int) -> float:
        """Return the share of the round's time that is over: 1 if another step would end too late."""
        now, began = self._now(), self._round_started
        share = (now - began) / max(self._round_ends - began, 1e-3)
        step_seconds = (now - began - self._halted_seconds) / max(steps, 1)
        tolerance = PUNCTUAL * self._run.round.matchmaking_seconds
        return max(share, 1.0) if steps and now + step_seconds > self._round_ends + tolerance else share

    def _now(self) -> float:
        return self._sync.swarm.now() if self._sync is not None else 0.0

    def _rates(self, rounds_elapsed: float) -> tuple[float, float]:
        """Return the learning rate, and SPES's factor on claimed experts in the balance loss."""
        lr = rate_of_step(self._run, rounds_elapsed)
        start = self._run.train.claimed_balance_factor
        risen = min(1.0, rounds_elapsed / (CLAIMED_FACTOR_SHARE * self._run.round.total))
        return lr, start + (1.0 - start) * risen

    def _rescue_orphans(self) -> None:
        update: StateUpdate | None = None

        def rescue() -> bool:
            nonlocal update
            update = self._sync.rescue_orphans() if self._sync is not None else None
            return update is not None

        if self._group.from_leader(rescue):
            ends_at = self._round_ends
            self._load(self._lead(lambda sync: update or StateUpdate(())))
            self._round_ends = ends_at

    # ------------------------------------------------------------------ synchronising

    def _lead(self, work: Callable[[Synchroniser], StateUpdate]) -> StateUpdate:
        """Let the leader synchronise; every rank learns the slots, the round and its end, the leader the vectors."""
        update: StateUpdate | None = None

        def compute() -> tuple[tuple[int, ...], int, float]:
            nonlocal update
            assert self._sync is not None
            update = work(self._sync)
            return update.slots, self._sync.round, update.ends_at

        slots, round, ends_at = self._group.from_leader(compute)
        self._round = round
        self._round_ends = ends_at
        return update or StateUpdate(slots)

    def _load(self, update: StateUpdate) -> None:
        """Bring this rank's model to the leader's state, as far as the loss gate admits it."""
        adopted = {VectorName.of_slot(slot) for slot in set(update.slots) - set(self._trainer.slots)}
        vectors = None
        if self._sync is not None:  # a slot whose moments were fetched may have been given up since
            trained = {SHARED, *map(VectorName.of_slot, update.slots)}
            vectors = (StoredVectors() | update.vectors).only(lambda name: name.is_weights or name.weights in trained)
        masters = vectors.only(adopted.__contains__) if vectors is not None else None
        self._trainer.set_slots(update.slots, masters)
        if self._gate is not None:
            self._gate.load(vectors, self._sync, adopted=adopted)
        elif vectors is not None:
            self._trainer.load(vectors.only(lambda name: name not in adopted))
        else:
            self._trainer.load(None)
        give_back_freed()

    # ------------------------------------------------------------------ saving and reporting

    def _conclude(self, work: RoundWork) -> None:
        """Save and report a committed round."""
        self._checkpointer.save(self._round, work.steps, work.total_tokens, work.data, is_last=self._is_over)
        if self._sync is None:
            return
        began, self._last_report = self._last_report, self._trainer.clock()
        report = self._sync.report(work, self._trainer.slots, self._last_report - began)
        _log_report(report)
        self._sync.swarm.report(report)
        if self._on_round is not None:
            self._on_round(report)


def _log_report(report: Metrics) -> None:
    loss = "none" if report.loss is None else f"{report.loss:.3f}"
    stale = f"; slots up to {report.stale_rounds} rounds old" if report.stale_rounds else ""
    log.info(
        "round %d: %d peers, loss %s, %.0f tokens/s, shared %s, slots %s; "
        "%.1f s training, %.1f matchmaking, %.1f averaging, %.1f exchange, %.1f other%s",
        *(report.round, report.num_members, loss, report.tokens_per_second, report.shared_digest),
        slot_ranges(report.slots),
        *(report.train_seconds, report.matchmaking_seconds, report.averaging_seconds),
        *(report.exchange_seconds, report.other_seconds, stale),
    )
