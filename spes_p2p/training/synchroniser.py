"""The leader's side of a round: rosters, commits, versions. Touches the swarm and anchors, never the model."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from torch import Tensor

from spes_p2p.codecs.vectors import Layout, digest
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.errors import AbsentError
from spes_p2p.optim.outer import merge_alpha
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.interface import Contribution, RoundResult, Swarm
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.records import Claim, Metrics, Progress
from spes_p2p.swarm.roster import Member
from spes_p2p.training.anchors import Anchors, merge_shifts
from spes_p2p.training.dealer import batches_to_ask
from spes_p2p.training.round_work import RoundWork, StateUpdate, StoredVectors, SyncStats
from spes_p2p.training.slots import HeldSlots, active_of

log = logging.getLogger(__name__)

REJOIN_SECONDS = 120.0
"""Longest that a newcomer, or a peer that has fallen behind, waits for a place between two rounds of the others."""
SETTLE_SECONDS = 3.0
"""Time between announcing and acting if all peers start together: longer than a record takes to reach everyone."""
POLL_SECONDS = 0.5
ENTERING_TRIES = 8
"""Times that a newcomer asks for the swarm's state: in short rounds the others may move on before the download ends."""
ATTEMPTS = 3
"""Attempts at a round after which its work is given up, and the round trained anew."""
PUNCTUAL = 0.5
"""Share of `matchmaking_seconds` after the round's end within which a step may still end or start."""


@dataclass(frozen=True)
class Staged:
    """What this peer would commit of an attempt.

    Attributes:
        bundles: The new bundles of `shared` and of its slots.
        moments: The mean moments of the same names, where the run averages them.
        kept: The kept forms of these slots, where slots have such.
        digests: Digests of the bundles and of the kept forms.
    """

    bundles: Mapping[VectorName, Tensor] = field(default_factory=dict)
    moments: Mapping[VectorName, Tensor] = field(default_factory=dict)
    kept: Mapping[VectorName, Tensor] = field(default_factory=dict)
    digests: Mapping[VectorName, str] = field(default_factory=dict)


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
        self.stats = SyncStats.of(RoundResult(), 0, 0.0)
        """Of the last synchronisation."""
        self.amended: Callable[[], RunConfig | None] = lambda: None
        """Returns the run's settings if the last certificate has changed them."""
        self._run = run
        self._layout = layout
        self._machine = machine or MachineConfig()
        self._synced = deque[float](maxlen=3)
        """Seconds of the last synchronisations."""
        self._expected_since = 0.0

    # ------------------------------------------------------------------ joining

    def open(self, initial: Callable[[], Mapping[VectorName, Tensor]] | None) -> StateUpdate:
        """Announce this peer, read the others' records, take over the swarm's state, and claim slots.

        Args:
            initial: Makes the published vectors of the run's start; None if this peer has been in the run before.

        Raises:
            AbsentError: the swarm's state could not be fetched.
        """
        received = self.swarm.traffic()[0]
        self.held.announce("joining")
        self._wait_for_peers(self._run.round.min_peers)
        self.swarm.catch_up()
        is_late = self.swarm.last().round > 0
        model = (SHARED, *map(VectorName.of_slot, range(self._run.num_slots)))
        if initial and not is_late:
            self._publish_initial(model, initial)
        self._fetch_newest()
        self._publish_initial(model, initial)
        self.round = self.held.model_round()
        self.held.rebalance()
        self.held.fetch()
        log.info("entered the run at round %d: fetched %.1f MB", self.round, (self.swarm.traffic()[0] - received) / 1e6)
        self._announce(0.0)
        self._expected_since = self.swarm.now()
        versions = self.swarm.versions()
        names = [name for name in model if self.held.form(name) in versions]
        return StateUpdate(self.held.slots, StoredVectors(names, self.held.load))

    def _wait_for_peers(self, needed: int) -> None:
        """Wait until `needed` peers have announced themselves, or others go on with a certified run.

        If no peer trains yet, it is `SETTLE_SECONDS` at the least.
        """
        started, announced = self.held.clock(), 0
        while True:
            claims = self.held.claims()
            present = len(claims)
            others = set(active_of(claims)) - {self.swarm.peer_id}
            if present >= needed and (others or self.held.clock() - started >= SETTLE_SECONDS):
                return
            if others and self._go_on(claims, others):
                return
            if present < needed and present != announced:
                log.info("waiting for peers: %d of %d are here", present, needed)
                announced = present
            self.swarm.wait(POLL_SECONDS)

    def _go_on(self, claims: Mapping[str, Claim], others: Set[str]) -> bool:
        """Tell whether some of the others that train are of a run that has a certificate."""
        self.swarm.catch_up()
        return bool(self.swarm.last().round and others & self.held.trusted(claims).keys())

    def _publish_initial(
        self, names: Sequence[VectorName], initial: Callable[[], Mapping[VectorName, Tensor]] | None
    ) -> None:
        """Publish the run's initial version, or kept form, of each name that this peer lacks.

        Raises:
            AbsentError: a version is missing and `initial` is None, because only trained versions will do.
        """
        missing = [name for name in names if self.held.form(name) not in self.swarm.versions()]
        if not missing:
            return
        if initial is None:
            raise AbsentError(
                f"{', '.join(missing)}: neither this peer nor any that it reached has it whole; give more "
                f"--initial-peers"
            )
        vectors = initial()
        for name in missing:  # one at a time, because a checkpoint's vectors are read when they are asked for
            self.held.publish_initial(name, vectors[name])

    def _fetch_newest(self) -> None:
        """Fetch what the last certificate names; where the others have gone on meanwhile, what the next one names.

        Raises:
            AbsentError: the swarm's state could not be fetched.
        """
        for left in reversed(range(ENTERING_TRIES)):
            try:
                self.held.catch_up(self.held.others())
                return
            except AbsentError:
                if not left or self.swarm.wait(POLL_SECONDS):
                    raise
                self.swarm.catch_up()

    def meet(self, work: RoundWork) -> StateUpdate:
        """Learn when the first round ends: from the others' current round, or by a roster without deltas.

        Args:
            work: Without vectors and tokens; says how fast this peer is.
        """
        self.stats = SyncStats.of(RoundResult(), 0, 0.0)
        vectors, ends_at = self._rejoin()
        if ends_at is not None:
            self._announce(ends_at)
            return StateUpdate(self.held.slots, vectors, ends_at)
        update = self.synchronise(work, closes_from=0.0)
        return StateUpdate(update.slots, vectors | update.vectors, update.ends_at)

    def _rejoin(self, routed: Mapping[int, int] | None = None) -> tuple[StoredVectors, float | None]:
        """Follow the others to their next round; return what changed, and the end of the round under way, if any.

        A peer that trained by itself while the others synchronise would only be late for their next round, too.
        """
        vectors = StoredVectors()
        times, deadline = self._run.round, self.held.clock() + REJOIN_SECONDS
        while self.held.clock() < deadline:
            # An expected peer is waited for after the round's end: one step is better than none.
            since = max(self._expected_since, self.swarm.now() - PUNCTUAL * times.matchmaking_seconds)
            claims, last = self.held.claims(), self.swarm.last()
            announced = last.ends_at if last.ends_at > since else self._announced_end(self.round, since)
            if not last.round and len(active_of(claims)) < times.min_peers:
                pass
            elif last.round > self.round and len(active_of(claims)) > 1:
                vectors |= self._catch_up(routed)
            elif times.mode == "steps" or announced:
                return vectors, self._bounded(announced)
            elif not self._are_synchronising(2 * times.matchmaking_seconds + times.averaging_seconds):
                break
            if self.swarm.wait(POLL_SECONDS):  # the next round's end is known soon
                break
        return vectors, None

    def _catch_up(self, routed: Mapping[int, int] | None = None) -> StoredVectors:
        """Take over the swarm's state; return what changed, which is nothing if `shared` cannot be fetched."""
        try:
            vectors = self.held.catch_up(self.held.others(), routed)
        except AbsentError as error:
            log.warning("round %d: %s", self.round + 1, error, extra={"heals": True})
            return StoredVectors()
        self.round = self.held.model_round()
        return vectors

    # ------------------------------------------------------------------ a round

    def synchronise(self, work: RoundWork, *, closes_from: float) -> StateUpdate:
        """Average what was trained, commit and publish what the certificate names, fetch other versions, adjust claims.

        Args:
            work: This peer's training since the anchors; empty work only meets the others.
            closes_from: DHT time from which the roster may be closed without the rest.
        """
        began, number = self.swarm.now(), self.round + 1
        self._await_steps(has_trained=bool(work.vectors))  # guard: infinite-peer
        expected = self.held.expected(self.held.claims())
        result, staged, body = self._decide(work, began, len(expected), closes_from)
        averaged = self.held.clock()
        if len(result.roster) > 1:
            self.held.has_met(result.roster, expected)
        vectors = StoredVectors()
        own: list[VectorName] = []
        ends_at: float | None = None
        if body is not None and staged.digests.get(SHARED) == body.shared:
            own = _certified(body, staged)
            vectors = self._commit(body, result, staged, own)
            self.held.rebalance()
            vectors |= self.held.fetch(result.roster, work.routed)
            ends_at = body.ends_at
        else:
            self.swarm.settle(result, ())
            if self._is_behind(len(expected)):
                log.warning("round %d: the others have decided it without this peer; catching up", number)
                vectors = self._catch_up(work.routed)
                found, ends_at = self._rejoin(work.routed)
                vectors |= found
            elif body is not None and SHARED in self.held.lost:
                # Alone, it has made a certified round again, to another result: after another device or optimizer.
                log.warning("round %d: the certified result is lost; going on from the round before", body.round)
                self.round = body.round
            self.held.rebalance()
            vectors |= self.held.fetch(only=[name for name in self.held.names if name != SHARED])
        if work.tokens:
            reasons = dict.fromkeys(staged.bundles.keys() - set(own), "the round's certificate names another version")
            for reason, names in by_reason({**reasons, **result.dropped}).items():
                log.warning("round %d: dropped %s: %s", number, names, reason)
        committed = len(set(own).intersection(work.vectors or self.held.names))
        self.stats = SyncStats.of(result, committed, self.held.clock() - averaged, self.held.stale_rounds)
        # Slots may just have been released.
        vectors = vectors.only(lambda name: name.is_weights or name.weights in self.held.names)
        vectors |= {name: self.anchors.weights(name) for name in self.held.names}
        ends_at = ends_at or self._next_end(result, self.round + 1)
        self._announce(ends_at)
        self._synced.append(min(self.swarm.now() - began, 3600.0))
        return StateUpdate(self.held.slots, vectors, ends_at)

    def _is_behind(self, expected: int) -> bool:
        """Tell whether others of so many peers have gone on from another model than this peer's."""
        return expected > 1 and (self.swarm.last().round > self.round or self.held.is_astray)

    def _decide(
        self, work: RoundWork, began: float, expected: int, closes_from: float
    ) -> tuple[RoundResult, Staged, Body | None]:
        """Average, and confirm the result, until the round is decided; give it up after some attempts.

        Returns:
            The result that was decided on, or the last one; what this peer would commit of it; the body of the round's
            certificate, or None if there is none, or this peer is behind.
        """
        tried: list[tuple[RoundResult, Staged]] = []
        contribution = self._contribution(work, began)
        body: Body | None = None
        while body is None and len(tried) < ATTEMPTS and not self.swarm.wait(0.0):
            if self._is_behind(expected):
                break
            # Another peer's fault drops groups; it raises nothing.
            result = self.swarm.average(contribution, expected=expected, closes_from=closes_from)
            # One without a roster gives the attempt up: without its word the others may lack a quorum to meet again.
            has_met = bool(result.roster) or not self.round
            if has_met and not any(member.tokens for member in (*result.roster, contribution.member)):
                return result, Staged(), None  # they meet to agree when their first round ends
            tried.append((result, self._stage(result)))
            body = self.swarm.decide(result, tried[-1][1].digests, self._next_end(result, self.round + 2))
            closes_from = self.swarm.now()
        shared = body.shared if body is not None else ""
        decided = [each for each in tried if each[1].digests.get(SHARED) == shared]
        result, staged = (decided or tried or [(RoundResult(), Staged())])[-1]
        return result, staged, body

    def _stage(self, result: RoundResult) -> Staged:
        """Return what this peer would commit of a result; its anchors stay as they are."""
        if SHARED not in result.means:
            return Staged()
        shifts = self._merge_shifts(result.roster.round + 1)
        bundles: dict[VectorName, Tensor] = {}
        moments: dict[VectorName, Tensor] = {}
        for name, mean in result.means.items():
            bundles[name], mean_moments = self.anchors.stepped(name, mean, shifts.get(name))
            if mean_moments is not None:
                moments[name.moments] = mean_moments
        slots = [name for name in bundles if name != SHARED] if self.anchors.form is not None else []
        kept = {name.kept: self.anchors.kept_form(name, bundles[name]) for name in slots}
        digests = {name: digest(data) for name, data in (bundles | kept).items()}
        return Staged(bundles, moments, kept, digests)

    def _await_steps(self, *, has_trained: bool) -> None:
        """In mode `steps`, wait until all peers have made the round's steps."""
        if self._run.round.mode == "steps" and has_trained:
            self.swarm.announce(self._progress(0.0, is_done=True))
            deadline = self.held.clock() + self._run.round.max_seconds
            while self.held.clock() < deadline and any(
                record.round < self.round or (record.round == self.round and not record.is_done)
                for record in self._active_records()
            ):
                if self.swarm.wait(POLL_SECONDS):
                    return

    def report(self, work: RoundWork, slots: tuple[int, ...], wall_seconds: float) -> Metrics:
        """Return the report of the round that was committed last."""
        stats = self.stats
        bytes_in, bytes_out = self.swarm.traffic()
        spent = work.seconds + stats.matchmaking_seconds + stats.averaging_seconds + stats.exchange_seconds
        return Metrics(
            peer_id=self.swarm.peer_id,
            round=self.round,
            step=work.steps,
            tokens=work.tokens,
            total_tokens=work.total_tokens,
            loss=work.loss,
            tokens_per_second=work.tokens_per_second,
            slots=slots,
            num_members=stats.num_members,
            committed=stats.num_committed,
            dropped=stats.num_dropped,
            clipped=stats.num_clipped,
            shared_digest=self.swarm.versions()[SHARED].digest[:16],
            train_seconds=work.seconds,
            matchmaking_seconds=stats.matchmaking_seconds,
            averaging_seconds=stats.averaging_seconds,
            exchange_seconds=stats.exchange_seconds,
            other_seconds=max(0.0, wall_seconds - spent),
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            stale_rounds=stats.stale_rounds,
        )

    def _contribution(self, work: RoundWork, began: float) -> Contribution:
        """Return this peer's roster entry and its deltas from the anchors."""
        usable = self.held.usable()
        if SHARED not in usable:
            log.warning(
                "round %d: the others are at round %d, but no peer with its model can be reached; waiting for one",
                *(self.round + 1, self.swarm.last().round),
            )
        last = self.swarm.certified(self.round) or self.swarm.last()
        member = Member(
            peer_id=self.swarm.peer_id,
            round=self.round,
            previous=last.digest,
            tokens=clamp_tokens(work.tokens, work.tokens_per_second, work.seconds),
            slots=tuple(slot for slot in self.held.slots if VectorName.of_slot(slot) in usable),
            keeps=self.held.replicated(),
            batches=batches_to_ask(self._run, self.round + 1, work.batches),
            starts=dict(self.held.starts()),
            tokens_per_second=work.places_per_second if self._run.round.samples else work.tokens_per_second,
            ready_at=began,
            sync_seconds=statistics.median(self._synced or (0.0,)),  # a single stall does not lengthen the next rounds
            uplink_mbit=self._machine.uplink_mbit,
        )
        own = work.vectors or StoredVectors(usable, self.anchors.weights)
        overwrites = bool(work.vectors)
        moments = work.moments if self.anchors.averages_moments(self.round + 1) else {}

        def delta(name: VectorName) -> Tensor:
            vector, round = own[name], self.round + 1
            return self.anchors.contribution(name, vector, moments.get(name), round, overwrites=overwrites)

        names = [name for name in own if name in usable]
        # What is read anew each time is in memory only while it is encoded.
        is_read = isinstance(own, StoredVectors)
        return Contribution(member, StoredVectors(names, delta) if is_read else {name: delta(name) for name in names})

    def _commit(self, body: Body, result: RoundResult, staged: Staged, own: Sequence[VectorName]) -> StoredVectors:
        """Take what the certificate names as the anchors, and publish it; return what the model needs of it.

        A group that was dropped stays at its anchor.
        """
        self.round = body.round
        moments = {name.moments: staged.moments[name.moments] for name in own if name.moments in staged.moments}
        bundles = {name: staged.bundles[name] for name in own}
        bundles |= {name: form for name, form in staged.kept.items() if name.weights in own}
        self.swarm.publish(body.round, bundles)
        for name in own:
            self.anchors.set(name, self.swarm.mapped(name))
        self.swarm.settle(result, own)
        return StoredVectors(own, self.held.load) | moments

    def _merge_shifts(self, round: int) -> dict[VectorName, Tensor]:
        if not merge_alpha(self._run.merge, round):
            return {}
        of_slot, versions = VectorName.of_slot, self.swarm.versions()
        slots = [slot for slot in range(self._run.num_slots) if self.held.form(of_slot(slot)) in versions]
        weights = {slot: self.held.common_weights(of_slot(slot)) for slot in slots}
        stepped = (*self.held.slots, *self.held.replicated())
        return merge_shifts(self._run.merge, round, self._layout, weights, stepped)

    def _next_end(self, result: RoundResult, round: int) -> float:
        """Return the DHT time at which a round's training ends: by the roster, or as announced if it met none.

        While round r + 1 is decided, `self.round` is r, and the certificate carries the end of r + 2.
        """
        # A peer that is distrusted itself and has met none has only its own word.
        last, least = self.swarm.last(), self._run.round.least_seconds(round)
        counted = [member for member in result.roster if member.peer_id not in self.held.distrusted]
        voters = [member for member in counted if member.peer_id in last.voters]  # guard: voters-clock
        members = (voters if last.round else counted) or list(result.roster)
        if not members:
            announced = self._announced_end(self.round)
            return self._bounded(announced or self.swarm.now() + least)
        ends_at = round_end(self._run.round, round, self._run.round_tokens, counted or members, members)
        # A synchronisation that took much longer than the last ones must not eat the next round.
        return self._bounded(max(ends_at, self.swarm.now() + least))

    @property
    def follows_others(self) -> bool:
        """Whether this peer came while others train, who have said when their round ends; its own speed says nothing.

        After a restart of all, no peer has: they must state their speeds.
        """
        by_clock = self._run.round.mode == "tokens"
        return self.round > 0 and not (by_clock and not self._announced_end(self.round))

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

    def _records(self, peers: Sequence[str]) -> list[Progress]:
        """Return the progress records of those of `peers` that are other peers; no single one decides anything."""
        others = set(peers) - {self.swarm.peer_id}
        return [record for peer, record in self.swarm.read(Progress).items() if peer in others]  # type: ignore[misc]

    def _active_records(self) -> list[Progress]:
        """Return the progress records of all other active peers whose claims count."""
        return self._records(active_of(self.held.trusted(self.held.claims())))

    def _are_synchronising(self, seconds: float) -> bool:
        """Tell whether the training of some voter's round has ended within the last `seconds`."""
        voters = self._records(self.swarm.last().voters)
        return any(record.ends_at > self.swarm.now() - seconds for record in voters)

    def _announced_end(self, round: int, since: float | None = None) -> float:
        """Return the DHT time at which this round's training ends, as the median of the voters; 0 if none trains it.

        Args:
            round: The round.
            since: Count rounds that end after this DHT time; by default after now.
        """
        since = self.swarm.now() if since is None else since
        voters = self._records(self.swarm.last().voters)
        ends = [record.ends_at for record in voters if record.round == round and record.ends_at > since]
        return statistics.median_low(ends) if ends else 0.0  # guard: round-end

    def _progress(self, ends_at: float, *, is_done: bool = False) -> Progress:
        last = self.swarm.last()
        certificate = last.digest if last.round == self.round > 0 else ""
        return Progress(
            peer_id=self.swarm.peer_id,
            round=self.round,
            ends_at=ends_at,
            certificate=certificate,
            is_done=is_done,
        )

    def _announce(self, ends_at: float) -> None:
        self.swarm.announce(self._progress(ends_at))
        self.held.announce("active")


def _certified(body: Body, staged: Staged) -> list[VectorName]:
    """Return the names of what a certificate confirms of this peer's result."""
    digests: dict[VectorName, str | None] = {SHARED: body.shared}
    for slot, state in enumerate(body.slots):
        name = VectorName.of_slot(slot)
        digests |= {name: state.digest, name.kept: state.kept}
    false = {name.weights for name, found in staged.digests.items() if digests[name] != found}
    return [name for name in staged.bundles if name not in false]
