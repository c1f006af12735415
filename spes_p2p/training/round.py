"""One round of a peer: train, meet, average, agree, commit, fetch, load. The rest of this folder serves this page.

Only the leader rank runs it; docs/protocol.md follows a round through all files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spes_p2p.codecs.vectors import LazyVectors
from spes_p2p.config import RunConfig
from spes_p2p.config.controls import Intent
from spes_p2p.errors import DataError
from spes_p2p.optim.schedule import rate_of_step
from spes_p2p.swarm.averaging.outcome import RoundResult
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.names import SHARED, VectorName, slot_ranges
from spes_p2p.swarm.records import Metrics
from spes_p2p.training import opening
from spes_p2p.training.checkpoint import LAST_SECONDS, PeerCheckpoint, Saved, restore, save_round
from spes_p2p.training.dealer import deal
from spes_p2p.training.loss_gate import LossGate
from spes_p2p.training.slots import active_of
from spes_p2p.training.synchroniser import PUNCTUAL, Synchroniser, Trained
from spes_p2p.training.trainer import Step, Trainer

log = logging.getLogger(__name__)

CLAIMED_FACTOR_SHARE = 0.2
"""Share of the run over which SPES's factor on claimed experts rises to 1."""
IDLE_SECONDS = 0.5
"""Longest that a peer that makes no steps waits before it looks at its owner's wish again."""
MAX_FRUITLESS = 5
"""Times in a row that a peer trains a round without a finite step before it ends."""
REMEDY = (
    "if it is so on other peers too, lower train.lr (spes amend); if only here, restart with --resume --device cpu "
    "(docs/trouble.md#loss)"
)


class TrainingLoop:
    """Runs a peer from its first roster to the run's last round.

    Args:
        gate: Judges the slots that others publish; None accepts all.
        checkpoint: Where the peer's state is saved after each round; None saves nothing.
        intent: Returns what the owner wants after a rest by the duty cycle, from the seconds of the last step and the
            longest rest.
    """

    def __init__(
        self,
        run: RunConfig,
        trainer: Trainer,
        sync: Synchroniser,
        *,
        gate: LossGate | None = None,
        checkpoint: PeerCheckpoint | None = None,
        intent: Callable[[float, float], Intent] = lambda step_seconds, rest_seconds: Intent(),
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._sync = sync
        self._gate = gate
        self._checkpoint = checkpoint
        self._wanted = intent
        self._on_round: Callable[[Metrics], None] = lambda report: None
        self._total_tokens = 0
        self._tokens_per_second = self._places_per_second = 0.0
        self._round_ends = 0.0  # DHT time
        self._last_report = self._trainer.clock()
        self._step_seconds = 0.0
        self._num_fruitless = 0
        self.amended: Callable[[], RunConfig | None] = lambda: None
        """Returns the run's settings if the last certificate has changed them."""
        self.is_ended = False
        """Whether the peer was asked to end, and has."""
        self.brought_steps = 0
        """Local steps that have been brought to a synchronisation."""
        self.begun_rounds = 0
        """Rounds that this peer began to train, whether they were committed or not."""

    def _one_round(self, trained: Trained | None = None) -> None:
        """Run the round after the last certificate. On return the peer trains from a newer one, or the same again.

        Args:
            trained: Of a peer that has just come: nothing, it only meets the others. By default it trains.
        """
        trained = trained or self._train()  # local steps; the deltas are read when they are sent
        if trained is None:
            return
        sync, held, began, before = self._sync, self._sync.held, self._now(), self._sync.round
        judge = self._gate.harmful if self._gate is not None else None
        result, staged, body = sync.settle(trained, began, self._round_ends, judge)  # meet, average, agree: by attempts
        settled_at = held.clock()
        moments = {name: vector for name, vector in staged.items() if name.is_moments}
        sync.commit(body, result, staged)  # the versions are published, and are the new anchors
        result, staged = replace(result, means={}), {}  # as large as what was trained
        if body is not None and sync.num_committed:
            held.rebalance()  # which slots are this peer's from now on
            opening.try_to_fetch(sync, trained.routed, result.roster)  # what the certificate names and is not here
            ends_at: float | None = body.ends_at
        else:
            ends_at = self._go_on(trained, body)
        self._round_ends = sync.end_round(ends_at, result, began)
        seconds = held.clock() - settled_at
        self._load(moments)  # others' slots, as far as the model is no worse with them
        if sync.round > before:
            self._save()
            self._report(trained, result, seconds)

    # ------------------------------------------------------------------ the run

    def open(self, initial: opening.Initial | None, saved: Saved | None = None) -> None:
        """Enter the swarm and load its state.

        Args:
            saved: This peer's checkpoint, after a restart.
        """
        intent = self._intent(0.0)
        self.is_ended = intent.ends
        if self.is_ended:
            return
        opening.enter(self._sync, initial)
        self._load()
        if saved is not None:
            self._total_tokens = saved.state.total_tokens
            restore(saved, self._trainer, self._sync)
            self._keep(self._trainer.names)
        if intent.trains:
            tokens, places = self._trainer.calibrate(measures=not self._sync.follows_others)
            self._tokens_per_second = tokens
            self._places_per_second = places
        if saved is None:
            self._save()

    def run(self, on_round: Callable[[Metrics], None] | None = None) -> None:
        """Meet the others, and train until the run's last round is committed.

        Args:
            on_round: Called with the report of each round that this peer commits.
        """
        self._on_round = on_round or self._on_round
        try:
            if not self.is_ended:
                self._meet()
            self._follow_amendments()
            while not (self._is_over or self.is_ended):
                self._one_round()
                self._follow_amendments()
                self.is_ended = self._intent(0.0).ends or self.is_ended
        finally:
            if self._checkpoint is not None:
                self._checkpoint.wait(LAST_SECONDS)

    def _meet(self) -> None:
        """Learn when the first round ends: from the others' present round, or from a roster without deltas.

        A peer that comes late may meet the others as they end a round: it commits that round without tokens of its own.
        """
        ends_at = opening.rejoin(self._sync)
        self._round_ends = ends_at or 0.0
        if ends_at is None:
            self._one_round(Trained({}, 0, self._tokens_per_second, 0.0, self._places_per_second))
        else:
            self._sync.announce(ends_at)
            self._load()

    def _follow_amendments(self) -> None:
        """Go on with the settings that the founder has changed, if the last certificate says so."""
        run = self.amended()
        if run is not None:
            self._run = run
            if run.data.mixture:
                self._trainer.amend(run.data)

    @property
    def _is_over(self) -> bool:
        return self._sync.round >= self._run.round.total

    # ------------------------------------------------------------------ training

    def _train(self) -> Trained | None:
        """Make local steps until the round ends.

        Returns:
            What was trained; None if the owner has ended this peer before it has trained anything, or others the run.
        """
        trainer, run, steps = self._trainer, self._run, Steps(self._trainer.clock(), self._now())
        self.begun_rounds += 1
        share = range(0)
        if run.data.is_shared:  # its share, and then an order of its own
            share, own = deal(self._sync.swarm, self._sync.round)
            trainer.deal(share, own)
        self._make_steps(steps)
        seconds = trainer.clock() - steps.began - steps.paused_seconds
        if steps.num:
            self._tokens_per_second = steps.tokens / seconds
            self._places_per_second = steps.num * run.train.batch_size * run.data.sequence_length / seconds
            self._count_fruitless(steps)
        self._total_tokens += steps.tokens
        if run.data.is_shared:
            words = "round %d: trained %d batches, %d of them from its share, which begins at batch %d"
            log.info(words, self._sync.round + 1, steps.num, min(steps.num, len(share)), share.start)
        trainer.give_back()  # gradients and activations: the round's vectors take as much
        self.brought_steps = trainer.steps
        if self._is_over or self.is_ended:
            return None
        return Trained(
            deltas=self._deltas(),
            tokens=steps.tokens,
            tokens_per_second=self._tokens_per_second if steps.num else 0.0,
            seconds=seconds,
            places_per_second=self._places_per_second if steps.num else 0.0,
            routed=trainer.routed_tokens(),
            loss=steps.weighted_loss / steps.tokens if steps.tokens else None,
            batches=steps.num,
        )

    def _make_steps(self, steps: Steps) -> None:
        """Make steps until the round ends, or the owner ends a peer that has made none."""
        while not self._is_over and ((done := self._share_done(steps)) < 1.0 or not steps.num):
            is_due = done >= 1.0 or not self._has_end
            left = math.inf if is_due else self._round_ends - self._now()
            intent = self._intent(left)  # the others would wait for a peer that rests beyond the round's end
            if not intent.trains or (self._run.num_slots and not self._trainer.slots):  # paused, or just resumed
                self.is_ended = intent.ends and not intent.trains and not steps.num
                # A paused peer that is alone ends no round, but waits to be resumed.
                is_met = is_due and (intent.trains or intent.ends or len(active_of(self._sync.held.claims())) > 1)
                if self.is_ended or is_met:
                    return
                began = self._trainer.clock()
                self._sync.swarm.wait(max(0.0, min(left, IDLE_SECONDS)))
                steps.paused_seconds += self._trainer.clock() - began
            elif not steps.num or self._share_done(steps) < 1.0:  # else its rest has lasted until the round's end
                began = self._trainer.clock()
                steps.add(self._trainer.step(*self._rates(self._sync.round + min(done, 1.0))))
                self._step_seconds = self._trainer.clock() - began
                if self._sync.held.rescue_orphans():
                    self._load()

    def _deltas(self) -> LazyVectors[VectorName]:
        """Return how far training has moved each vector from its anchor, then the moments that the run averages."""
        trainer, anchors, round = self._trainer, self._sync.anchors, self._sync.round + 1

        def delta(name: VectorName) -> Tensor:
            kinds = self._run.averaged_moments(name.kind) if anchors.averages_moments(round) else ()
            moments = trainer.moments(name, kinds) if kinds else None
            return anchors.contribution(name, trainer.vector(name), moments, round)

        return LazyVectors(trainer.names, delta)

    def _count_fruitless(self, steps: Steps) -> None:
        """Count how often in a row a round was trained without a finite step; end this peer after some."""
        self._num_fruitless = 0 if steps.tokens else self._num_fruitless + 1
        fault = f"round {self._sync.round + 1}: none of {steps.num} steps had a finite gradient"
        if self._num_fruitless >= MAX_FRUITLESS:
            raise DataError(f"{fault}, for the {MAX_FRUITLESS}th time in a row; {REMEDY}")
        if self._num_fruitless:
            log.warning("%s; going on from the swarm's versions; %s", fault, REMEDY)

    def _rates(self, rounds_elapsed: float) -> tuple[float, float]:
        """Return the learning rate, and SPES's factor on claimed experts in the balance loss."""
        lr = rate_of_step(self._run, rounds_elapsed)
        start = self._run.train.claimed_balance_factor
        risen = min(1.0, rounds_elapsed / (CLAIMED_FACTOR_SHARE * self._run.round.total))
        return lr, start + (1.0 - start) * risen

    # ------------------------------------------------------------------ the owner's controls

    def _intent(self, rest_seconds: float) -> Intent:
        """Return what the owner wants, after a rest of `rest_seconds` at most; a paused peer claims no slots."""
        step_seconds, self._step_seconds = self._step_seconds, 0.0
        intent = self._wanted(step_seconds, max(0.0, rest_seconds))
        if intent.leaves:
            raise KeyboardInterrupt
        self._sync.held.limit(intent.slots if intent.trains else 0)
        if intent.threads not in (None, torch.get_num_threads()):
            self._trainer.use_threads(intent.threads)
        return intent

    # ------------------------------------------------------------------ when a round ends

    @property
    def _has_end(self) -> bool:
        """Whether the round ends at a time, and not after a number of steps."""
        return self._run.round.mode == "tokens"

    def _share_done(self, steps: Steps) -> float:
        """Return the share of the round that is over; by the clock, 1 also if another step would end too late."""
        if not self._has_end:
            return steps.num / self._run.round.steps_of(self._sync.round + 1)
        now, began = self._now(), steps.began_at
        share = (now - began) / (self._round_ends - began) if now < self._round_ends else 1.0
        step_seconds = (now - began - steps.paused_seconds) / max(steps.num, 1)
        tolerance = PUNCTUAL * self._run.round.matchmaking_seconds
        return max(share, 1.0) if steps.num and now + step_seconds > self._round_ends + tolerance else share

    def _now(self) -> float:
        return self._sync.swarm.now()

    # ------------------------------------------------------------------ what was synchronised

    def _go_on(self, trained: Trained, body: Body | None) -> float | None:
        """Go on after a round that this peer has not committed; return the next round's end, if others have said it."""
        sync, held, ends_at = self._sync, self._sync.held, None
        if sync.is_behind:
            late = "round %d: the others have decided it without this peer; catching up (docs/trouble.md#slow-rounds)"
            log.warning(late, sync.round + 1)
            opening.try_to_fetch(sync, trained.routed)
            ends_at = opening.rejoin(sync, trained.routed)
        elif body is not None and SHARED in held.unoffered:
            # Alone, it has made a certified round again, to another result: after another device or optimizer.
            log.warning("round %d: the certified result is lost; going on from the round before", body.round)
            sync.round = body.round
        held.rebalance()
        held.fetch(only=[name for name in held.names if name != SHARED])
        return ends_at

    def _load(self, moments: Mapping[VectorName, Tensor] | None = None) -> None:
        """Bring the model to the swarm's state, as far as the loss gate admits it.

        Args:
            moments: Means of a round; a slot may have been given up since they were averaged.
        """
        held, anchors, trainer = self._sync.held, self._sync.anchors, self._trainer
        adopted = {VectorName.of_slot(slot) for slot in set(held.slots) - set(trainer.slots)}
        trainer.set_slots(held.slots, LazyVectors(sorted(adopted), held.load))
        own = {*held.names} & {*anchors.names}
        vectors = LazyVectors(held.to_load(), lambda name: (anchors.weights if name in own else held.load)(name))
        if self._gate is not None:
            self._gate.load(vectors, adopted)
        else:
            trainer.load(LazyVectors([name for name in vectors if name not in adopted], vectors.__getitem__))
        trainer.load({name: vector for name, vector in (moments or {}).items() if name.weights in trainer.names})
        self._keep([name for name in vectors if name in own], own - adopted)
        trainer.give_back()

    def _keep(self, names: Collection[VectorName], trained: Collection[VectorName] | None = None) -> None:
        """Train on with what was not sent yet, where a sparse codec leaves most of it: the anchor minus the residual.

        Args:
            names: Vectors that the model has as their anchors are.
            trained: Vectors that were trained before now, too; by default `names`.
        """
        residuals, anchors = self._sync.swarm.kept_residuals(names if trained is None else trained), self._sync.anchors

        def local(name: VectorName) -> Tensor:
            residual = residuals[name].whole()
            return anchors.less(name, residual, torch.empty_like(residual))

        self._trainer.load(LazyVectors([name for name in names if name in residuals], local))

    def _save(self) -> None:
        if self._checkpoint is not None:
            save_round(self._checkpoint, self._trainer, self._sync, self._total_tokens, is_last=self._is_over)

    def _report(self, trained: Trained, result: RoundResult, exchange_seconds: float) -> None:
        """Report a committed round."""
        sync, swarm = self._sync, self._sync.swarm
        began, self._last_report = self._last_report, self._trainer.clock()
        waits = max(0.0, result.matchmaking_seconds), max(0.0, result.averaging_seconds), exchange_seconds
        bytes_in, bytes_out = swarm.traffic()
        report = Metrics(
            peer_id=swarm.peer_id,
            round=sync.round,
            step=self._trainer.steps,
            tokens=trained.tokens,
            total_tokens=self._total_tokens,
            loss=trained.loss,
            tokens_per_second=trained.tokens_per_second,
            slots=self._trainer.slots,
            num_members=len(result.roster),
            committed=sync.num_committed,
            dropped=len(result.dropped),
            clipped=result.num_clipped,
            shared_digest=swarm.versions()[SHARED].digest[:16],
            train_seconds=trained.seconds,
            matchmaking_seconds=waits[0],
            averaging_seconds=waits[1],
            exchange_seconds=waits[2],
            other_seconds=max(0.0, self._last_report - began - trained.seconds - sum(waits)),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            stale_rounds=sync.held.stale_rounds,
        )
        loss = "none" if report.loss is None else f"{report.loss:.3f}"
        stale = f"; slots up to {report.stale_rounds} rounds old" if report.stale_rounds else ""
        log.info(
            "round %d: %d peers, loss %s, %.0f tokens/s, shared %s, slots %s; "
            "%.1f s training, %.1f matchmaking, %.1f averaging, %.1f exchange, %.1f other%s",
            *(report.round, report.num_members, loss, report.tokens_per_second, report.shared_digest),
            *(slot_ranges(report.slots), report.train_seconds, *waits, report.other_seconds, stale),
        )
        swarm.report(report)
        self._on_round(report)


@dataclass
class Steps:
    """The local steps of a round, while it is trained.

    Attributes:
        began: The trainer's time at the round's beginning.
        began_at: The same in DHT time.
        tokens: Tokens of those with a finite gradient.
        weighted_loss: Sum over these tokens of the loss, nats.
        paused_seconds: Time for which the owner had paused the training.
    """

    began: float
    began_at: float
    num: int = 0
    tokens: int = 0
    weighted_loss: float = 0.0
    paused_seconds: float = 0.0

    def add(self, step: Step) -> None:
        """Count a step."""
        self.num += 1
        if step.tokens:  # the loss of a step that changed nothing may be NaN  # guard: always
            self.tokens += step.tokens
            self.weighted_loss += step.loss * step.tokens
