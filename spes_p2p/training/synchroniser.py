"""The leader's side of a round: rosters, commits, versions. Touches the swarm and anchors, never the model."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from spes_p2p.codecs.vectors import Layout
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.errors import JoinError
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.interface import Contribution, RoundResult, Swarm
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.quorum import active_of, has_begun, voters_of
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import Member, Roster, lag_of
from spes_p2p.training.anchors import Anchors, merge_shifts
from spes_p2p.training.checkpoint import rollback_alone
from spes_p2p.training.round_work import RoundWork, StateUpdate, StoredVectors, SyncStats
from spes_p2p.training.slots import HeldSlots

log = logging.getLogger(__name__)

REJOIN_SECONDS = 120.0
"""Longest that a newcomer, or a peer that has fallen behind, waits for a place between two rounds of the others."""
SETTLE_SECONDS = 3.0
"""Time between announcing and acting if all peers start together: longer than a record takes to reach everyone."""
POLL_SECONDS = 0.5
PUNCTUAL = 0.5
"""Share of `matchmaking_seconds` after the round's end within which a step may still end or start."""


def wait_for_peers(held: HeldSlots, swarm: Swarm, needed: int) -> dict[str, Claim]:
    """Return the claims once `needed` peers have announced themselves, and `SETTLE_SECONDS` later if all are new."""
    started, announced = held.clock(), 0
    while True:
        claims = held.claims()
        present = len(claims)
        is_under_way = any(claim.state == "active" for peer, claim in claims.items() if peer != swarm.peer_id)
        if present >= needed and (is_under_way or held.clock() - started >= SETTLE_SECONDS):
            return claims
        if present < needed and present != announced:
            log.info("waiting for peers: %d of %d are here", present, needed)
            announced = present
        swarm.wait(POLL_SECONDS)


def publish_initial(
    swarm: Swarm, names: Sequence[VectorName], initial: Callable[[], Mapping[VectorName, Tensor]] | None
) -> None:
    """Publish the run's initial version of each name that this peer has no version of.

    Raises:
        JoinError: a version is missing and `initial` is None, because only trained versions will do.
    """
    missing = [name for name in names if name not in swarm.versions()]
    if not missing:
        return
    if initial is None:
        raise JoinError(f"{', '.join(missing)}: not whole here, nor with any peer reached; give more --initial-peers")
    vectors = initial()
    for name in missing:  # one at a time, because a checkpoint's vectors are read when they are asked for
        swarm.publish(0, {name: vectors[name]})


class ProgressTracker:
    """Where the other peers are in the run, by their progress records; no single record decides anything.

    Args:
        swarm: The peer's swarm.
        held: Knows the active peers and the voters.
    """

    def __init__(self, swarm: Swarm, held: HeldSlots) -> None:
        self._swarm = swarm
        self._held = held

    def progress(self, peers: Sequence[str]) -> list[Progress]:
        """Return the records of those of `peers` that are other peers."""
        others = set(peers) - {self._swarm.peer_id}
        return [record for peer, record in self._swarm.read(Progress).items() if peer in others]  # type: ignore[misc]

    def active(self) -> list[Progress]:
        """Return the records of all other active peers."""
        return self.progress(self._held.active())

    def are_ahead(self, round: int) -> bool:
        """Tell whether most voters train a later round."""
        voters = self.progress(self._held.voters())
        return 2 * sum(record.round > round for record in voters) > len(voters)  # guard: majority-ahead

    def are_synchronising(self, seconds: float) -> bool:
        """Tell whether the training of some peer's round has ended within the last `seconds`."""
        return any(record.ends_at > self._swarm.now() - seconds for record in self.active())

    def round_end(self, round: int, since: float | None = None) -> float:
        """Return the DHT time at which this round's training ends, as the median of the voters; 0 if none trains it.

        Args:
            round: The round.
            since: Count rounds that end after this DHT time; by default after now.
        """
        since = self._swarm.now() if since is None else since
        voters = self.progress(self._held.voters())
        ends = [record.ends_at for record in voters if record.round == round and record.ends_at > since]
        return statistics.median_low(ends) if ends else 0.0  # guard: round-end


class Synchroniser:
    """Takes one peer through its rounds with the swarm.

    Args:
        swarm: The peer's swarm.
        run: The run's settings.
        held: This peer's claims.
        anchors: This peer's anchors, empty at first.
        layout: Layout of one slot's vector.
        machine: What this machine may send and fetch.
    """

    def __init__(
        self,
        swarm: Swarm,
        run: RunConfig,
        *,
        held: HeldSlots,
        anchors: Anchors,
        layout: Layout,
        machine: MachineConfig | None = None,
    ) -> None:
        self.swarm = swarm
        self.anchors = anchors
        self.held = held
        self.round = 0
        self.is_late = False
        """Whether others had committed rounds when this peer came."""
        self.stats = SyncStats.of(RoundResult(roster=Roster()), 0.0)
        """Of the last synchronisation."""
        self._run = run
        self._layout = layout
        self._machine = machine or MachineConfig()
        self._sync_seconds = 0.0
        self._expected_since = 0.0
        self._others = ProgressTracker(swarm, held)

    # ------------------------------------------------------------------ joining

    def open(
        self,
        initial: Callable[[], Mapping[VectorName, Tensor]] | None,
        saved: Mapping[Path, Version] | None = None,
    ) -> StateUpdate:
        """Announce this peer, read the others' records, take over the swarm's state, and claim slots.

        Args:
            initial: Makes the published vectors of the run's start; None if this peer has been in the run before.
            saved: Versions of this peer's checkpoint by file, after a restart.

        Raises:
            JoinError: the swarm's state could not be fetched.
        """
        self.held.announce("joining")
        self.is_late = has_begun(wait_for_peers(self.held, self.swarm, self._run.round.min_peers))
        if saved:
            rollback_alone(self.swarm, self.held.others(), saved)
        model = (SHARED, *map(VectorName.of_slot, range(self._run.model.num_experts)))
        if initial and not self.is_late:
            publish_initial(self.swarm, model, initial)
        self.held.catch_up(self.held.others())
        publish_initial(self.swarm, model, initial)
        self.round = self.swarm.versions()[SHARED].round
        self.anchors.set(SHARED, self.swarm.load(SHARED))
        self.held.rebalance(self.round)
        self._announce(0.0)
        self._expected_since = self.swarm.now()
        versions = self.swarm.versions()
        names = [name for name in (*model, *sorted(self.held.held_moments())) if name in versions]
        return StateUpdate(self.held.slots, StoredVectors(names, self.held.load))

    def meet(self, work: RoundWork) -> StateUpdate:
        """Agree on the end of the first round: the others' current round, or by a roster without deltas.

        Args:
            work: Without vectors and tokens; says how fast this peer is.
        """
        vectors, ends_at = self._rejoin()
        if ends_at is not None:
            self._announce(ends_at)
            return StateUpdate(self.held.slots, vectors, ends_at)
        update = self.synchronise(work, starts_at=0.0)
        return StateUpdate(update.slots, vectors | update.vectors, update.ends_at)

    def _rejoin(self, routed: Mapping[int, int] | None = None) -> tuple[StoredVectors, float | None]:
        """Follow the others to their next round; return what changed, and its end if a round is on.

        A peer that trained by itself while the others synchronise would only be late for their next round, too.
        """
        vectors = StoredVectors()
        times, deadline = self._run.round, self.held.clock() + REJOIN_SECONDS
        while self.held.clock() < deadline:
            # An expected peer is waited for after the round's end: one step is better than none.
            since = max(self._expected_since, self.swarm.now() - PUNCTUAL * times.matchmaking_seconds)
            claims, announced = self.held.claims(), self._others.round_end(self.round, since)
            if not has_begun(claims) and len(active_of(claims)) < times.min_peers:
                self.swarm.wait(POLL_SECONDS)
            elif self._others.are_ahead(self.round):
                vectors |= self._catch_up(min_round=self.round + 1, routed=routed)
                self.swarm.wait(POLL_SECONDS)
            elif times.mode == "steps" or announced:
                return vectors, self._bounded(announced)
            elif self._others.are_synchronising(2 * times.matchmaking_seconds + times.averaging_seconds):
                self.swarm.wait(POLL_SECONDS)  # the next round's end is known soon
            else:
                break
        return vectors, None

    def _catch_up(self, min_round: int = 0, routed: Mapping[int, int] | None = None) -> StoredVectors:
        """Take over the swarm's state; return what changed, which is nothing if `shared` cannot be fetched."""
        try:
            vectors = self.held.catch_up(self.held.others(), min_round, routed)
        except JoinError as error:
            log.warning("round %d: %s", self.round + 1, error)
            return StoredVectors()
        self.round = self.swarm.versions()[SHARED].round
        return vectors

    # ------------------------------------------------------------------ a round

    def synchronise(self, work: RoundWork, *, starts_at: float) -> StateUpdate:
        """Average what was trained, commit what is whole, publish it, fetch the others' versions, adjust the claims.

        Args:
            work: This peer's training since the anchors; empty work only meets the others.
            starts_at: DHT time from which the roster may stand without everyone.
        """
        began = self.swarm.now()
        self._await_steps(has_trained=bool(work.vectors))  # guard: infinite-peer
        claims = self.held.claims()
        expected = len(active_of(claims))
        contribution = self._contribution(work, began, voters_of(self.held.trusted(claims)))
        result = self._average(contribution, expected, starts_at)  # another peer's fault drops groups, raises nothing
        averaged = self.held.clock()
        if len(result.roster) > 1:
            self.held.distrusted = result.roster.distrusted
        ends_at: float | None = None
        if result.is_behind:
            log.warning("round %d: the majority has gone on without this peer; catching up", self.round + 1)
            vectors = self._catch_up(routed=work.routed)
            if not self._run.round.overlap:  # with overlap, training goes on meanwhile
                found, ends_at = self._rejoin(work.routed)
                vectors |= found
        else:
            vectors = self._commit(result, work)
        self.stats = SyncStats.of(result, self.held.clock() - averaged, self.held.stale_rounds)
        vectors |= self.held.rebalance(self.round)  # before the loss gate judges what was fetched
        held_moments = self.held.held_moments()  # slots may just have been released
        vectors = vectors.only(lambda name: name.is_weights or name in held_moments)
        vectors |= {name: self.anchors.weights(name) for name in self.anchors.names}
        ends_at = ends_at or self._next_end(result, expected)
        self._announce(ends_at)
        if not self._run.round.overlap:  # with overlap, training does not wait for it
            self._sync_seconds = (self._sync_seconds + min(self.swarm.now() - began, 3600.0)) / 2
        return StateUpdate(self.held.slots, vectors, ends_at)

    def _await_steps(self, *, has_trained: bool) -> None:
        """In mode `steps`, wait until all peers have made the round's steps."""
        if self._run.round.mode == "steps" and has_trained:
            self.swarm.announce(self._progress(0.0, is_done=True))
            deadline = self.held.clock() + self._run.round.max_seconds
            while self.held.clock() < deadline and any(
                record.round < self.round or (record.round == self.round and not record.is_done)
                for record in self._others.active()
            ):
                self.swarm.wait(POLL_SECONDS)

    def _contribution(self, work: RoundWork, began: float, voters: Sequence[str]) -> Contribution:
        """Return this peer's roster entry and its deltas from the anchors."""
        rounds = {name: version.round for name, version in self.swarm.versions().items()}
        of_slot = VectorName.of_slot
        member = Member(
            peer_id=self.swarm.peer_id,
            round=self.round,
            tokens=clamp_tokens(work.tokens, work.tokens_per_second, work.seconds),
            slots=self.held.slots,
            slot_rounds=tuple(rounds[of_slot(slot)] for slot in self.held.slots),
            lags=tuple(lag_of(rounds.get(of_slot(slot)), self.round) for slot in range(self._run.model.num_experts)),
            anchors={name: self.anchors.digest(name) for name in self.anchors.names},
            tokens_per_second=work.tokens_per_second,
            ready_at=began,
            sync_seconds=self._sync_seconds,
            uplink_mbit=self._machine.uplink_mbit,
            refreshes=self._machine.refresh_slots is not None,
            voters=tuple(voters),
            electorate=len(voters),
        )
        own = work.vectors or {name: self.anchors.weights(name) for name in self.anchors.names}
        deltas = {
            name: self.anchors.contribution(name, vector, work.moments.get(name), self.round + 1)
            for name, vector in own.items()
        }
        return Contribution(member, deltas)

    def _average(self, contribution: Contribution, expected: int, starts_at: float) -> RoundResult:
        """Average, unless most others train a later round: checked before, and after a matchmaking in vain."""
        missed = RoundResult(
            roster=Roster([contribution.member]),
            dropped=dict.fromkeys(contribution.deltas, "the others have gone on"),
            is_behind=True,
        )
        if self._others.are_ahead(self.round):
            return missed
        result = self.swarm.average(contribution, expected=expected, starts_at=starts_at)
        if len(result.roster) == 1 and expected > 1 and self._others.are_ahead(self.round):
            return replace(missed, matchmaking_seconds=result.matchmaking_seconds)
        return result

    def _commit(self, result: RoundResult, work: RoundWork) -> StoredVectors:
        """Step the anchors by the means, publish the new versions, fetch the others'; return what changed.

        Nothing changes unless `shared` was committed. A group that was dropped stays at its anchor.
        """
        if work.tokens:
            for reason, names in by_reason(result.dropped).items():
                log.warning("round %d: dropped %s: %s", self.round + 1, names, reason)
        if SHARED not in result.committed:
            return StoredVectors()
        roster, me = result.roster, self.swarm.peer_id
        round = roster.round + 1
        shifts = self._merge_shifts(round)
        moments: dict[VectorName, Tensor] = {}
        for name, mean in result.committed.items():
            mean_moments = self.anchors.commit(name, mean, shifts.get(name))
            if mean_moments is not None:
                moments[name.moments] = mean_moments
        self.round = round
        self.held.has_committed = True
        # A slot that is held here, but whose newest version others average without this peer.
        astray = {name for name in self.anchors.names if name != SHARED and me not in roster.members_of(name)}
        own = [name for name in self.anchors.names if name not in astray]
        # A merge moves a slot by more than its mean delta, so the delta does not lead to its new version.
        deltas = {
            name: result.encoded[name]
            for name in result.committed
            if name in result.encoded and name in own and name not in shifts
        }
        unaveraged = [name for name in own if name.moments not in moments]
        vectors = {name: self.anchors.bundle(name) for name in own} | moments | self._own_moments(work, unaveraged)
        self.swarm.publish(round, vectors, deltas)
        fetched = self.held.fetch(roster, round, own, work.routed)
        fetched |= self.held.fetch_newest(astray - roster.groups.keys())
        for name in astray & set(fetched):
            self.anchors.set(name, self.swarm.load(name))
        return fetched | moments

    def _own_moments(self, work: RoundWork, names: Sequence[VectorName]) -> dict[VectorName, Tensor]:
        """Return this peer's moments of its slots, in rounds that publish them for peers that adopt a slot."""
        if not self.anchors.publishes_moments(self.round):
            return {}
        own = {name: work.moments[name] for name in names if name in work.moments and name != SHARED}
        return {name.moments: moments for name, moments in own.items() if moments.isfinite().all()}

    def _merge_shifts(self, round: int) -> dict[VectorName, Tensor]:
        if not self._run.merge.alpha:
            return {}
        of_slot, versions = VectorName.of_slot, self.swarm.versions()
        slots = [slot for slot in range(self._run.model.num_experts) if of_slot(slot) in versions]
        weights = {slot: self.held.load(of_slot(slot)) for slot in slots}
        return merge_shifts(self._run.merge, round, self._layout, weights, self.held.slots)

    def _next_end(self, result: RoundResult, expected: int) -> float:
        """Return the next round's end: by the roster, or as the others have announced it if this peer met none."""
        if len(result.roster) == 1 and expected > 1 and (announced := self._others.round_end(self.round)):
            return self._bounded(announced)
        # A peer that is distrusted itself and has met none has only its own word.
        counted = [member for member in result.roster if member.peer_id not in self.held.distrusted]
        ends_at = round_end(self._run.round, counted or result.roster)
        # A synchronisation that took much longer than the last ones must not eat the next round.
        return self._bounded(max(ends_at, self.swarm.now() + self._run.round.min_seconds))

    def _bounded(self, ends_at: float) -> float:
        """Return `ends_at`, capped at the latest end that an honest roster can give."""
        return min(ends_at, self.swarm.now() + self._run.round.max_seconds + self._run.round.exchange_seconds)

    def rescue_orphans(self) -> StateUpdate | None:
        """Return what to load if slots that lost their last holder fall to this peer; checks once per heartbeat."""
        masters = self.held.rescue_orphans()
        if not masters:
            return None
        self.held.announce("active")
        return StateUpdate(self.held.slots, masters)

    # ------------------------------------------------------------------ records

    def _progress(self, ends_at: float, *, is_done: bool = False) -> Progress:
        return Progress(peer_id=self.swarm.peer_id, round=self.round, ends_at=ends_at, is_done=is_done)

    def _announce(self, ends_at: float) -> None:
        self.swarm.announce(self._progress(ends_at))
        self.held.announce("active")
