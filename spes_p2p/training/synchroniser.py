"""What a round needs of the swarm: meet, average and agree, commit, and when it ends. Never touches the model."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from spes_p2p.codecs.vectors import Layout, LazyVectors, digest
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName, by_reason
from spes_p2p.swarm.records import Progress
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.training.anchors import Anchors, merge_shifts
from spes_p2p.training.dealer import batches_to_ask
from spes_p2p.training.holdings import certified
from spes_p2p.training.slots import HeldSlots, active_of

log = logging.getLogger(__name__)

Judge = Callable[[Mapping[VectorName, Tensor]], Collection[VectorName]]
POLL_SECONDS = 0.5
PUNCTUAL = 0.5
"""Share of `matchmaking_seconds` after the round's end within which a step may still end or start."""


@dataclass(frozen=True)
class Trained:
    """What a peer brings to a round.

    Attributes:
        deltas: Contributions of `shared` and the held slots as flat fp32 vectors; empty if it only meets the others.
        places_per_second: The speed counted in positions of its sequences, with padding and what is not learned.
        routed: Tokens routed to each slot, over all layers; slots without tokens are left out.
        loss: Mean cross entropy, nats per token; None if no step had a finite gradient.
    """

    deltas: Mapping[VectorName, Tensor]
    tokens: int
    tokens_per_second: float
    seconds: float
    places_per_second: float = 0.0
    routed: Mapping[int, int] = field(default_factory=dict)
    loss: float | None = None
    batches: int = 0


class Synchroniser:
    """One peer's side of what the swarm decides together.

    Args:
        anchors: This peer's anchors, empty at first.
    """

    def __init__(
        self,
        swarm: HivemindSwarm,
        run: RunConfig,
        *,
        held: HeldSlots,
        anchors: Anchors,
        layout: Layout,
        machine: MachineConfig | None = None,
    ) -> None:
        self.swarm = swarm
        self.run = run
        self.anchors = anchors
        self.held = held
        self.round = 0
        self.num_committed = 0
        """Groups of this peer that the last synchronisation has committed."""
        self._expected: Collection[str] = ()
        self.expected_since = 0.0
        """DHT time from which the others wait for this peer."""
        self._layout = layout
        self._machine = machine or MachineConfig()
        self._synced = deque[float](maxlen=3)
        """Seconds of the last synchronisations."""

    # ------------------------------------------------------------------ meet, average, agree

    def await_steps(self) -> None:
        """In mode `steps`, wait until all peers have made the round's steps."""
        if self.run.round.mode == "steps":
            self.announce(0.0, is_done=True)
            deadline = self.held.clock() + self.run.round.max_seconds
            while self.held.clock() < deadline and any(
                record.round < self.round or (record.round == self.round and not record.is_done)
                for record in self.records(active_of(self.held.trusted(self.held.claims())))
            ):
                if self.swarm.wait(POLL_SECONDS):
                    return

    def settle(
        self, trained: Trained, began: float, closes_from: float, judge: Judge | None = None
    ) -> tuple[RoundResult, dict[VectorName, Tensor], Body | None]:
        """Average, and agree on the result, attempt by attempt, until the round is decided; give it up after some.

        Args:
            began: DHT time at which its training ended.
            closes_from: DHT time from which the roster may be closed without the rest.
            judge: Returns which of some vectors make this peer's model worse; None accepts all.

        Returns:
            The result that was decided on, or the last one; what the certificate names of what follows from it: new
            bundles, their kept forms, and mean moments; the certificate's body, None if there is none, or this peer is
            behind.
        """
        tried: list[tuple[RoundResult, dict[VectorName, Tensor], dict[VectorName, str]]] = []
        if trained.deltas:  # guard: trained.deltas -> trained.tokens
            self.await_steps()
        self._expected = self.held.expected(self.held.claims())
        contribution = self._contribution(trained, began)

        def stage(result: RoundResult) -> Staged | None:
            has_met = bool(result.roster) or not self.round
            if has_met and not any(member.tokens for member in (*result.roster, contribution.member)):
                tried.append((result, {}, {}))
                return None  # they meet to agree when their first round ends
            staged = self._stage(result)
            digests = {name: digest(vector) for name, vector in staged.items() if not name.is_moments}
            tried.append((result, staged, digests))
            del tried[:-2]  # vectors as large as the model's; the body of the attempt before may be proposed again
            harmful = self._harmful(result.roster, staged, judge)
            if harmful:
                log.warning("round %d: not confirming what makes this model worse: %s", self.round + 1, sorted(harmful))
            confirmed = {} if SHARED in harmful else {n: d for n, d in digests.items() if n.weights not in harmful}
            return confirmed, self.next_end(result, self.round + 2)

        body: Body | None = None
        if not self.is_behind:  # another peer's fault drops groups; it raises nothing
            body = self.swarm.agree(contribution, stage, expected=self._expected, closes_from=closes_from)
        shared = body.shared if body is not None else ""
        decided = [each for each in tried if each[2].get(SHARED) == shared]
        result, staged, digests = (decided or tried or [(RoundResult(), {}, {})])[-1]
        if body is None or not decided:
            false = {name.weights for name in staged}
        else:
            false = {name.weights for name, made in digests.items() if certified(body, name, {}) != made}
        if trained.tokens:
            reasons = {name: _why_false(name, body) for name in sorted(false & staged.keys())}
            result = replace(result, dropped={**reasons, **result.dropped})
            for reason, names in by_reason(result.dropped).items():
                log.warning("round %d: dropped %s: %s", self.round + 1, names, reason)
        return result, {name: vector for name, vector in staged.items() if name.weights not in false}, body

    def _harmful(self, roster: Roster, staged: Mapping[VectorName, Tensor], judge: Judge | None) -> Collection[str]:
        """Return what makes this voter's model worse: `shared` of a small roster with guests, slots only they hold."""
        is_voter = self.swarm.peer_id in self.swarm.last().voters
        if judge is None or not is_voter or not roster.guests:  # guard: always
            return ()
        judged = [SHARED] if SHARED in staged and roster.is_small else []
        judged += [n for n in staged if n.slot is not None and n.is_weights and {*roster.groups[n]} <= roster.guests]
        forms = {name: self.held.form(name) for name in judged if self.held.has(name)}
        return judge({n: staged[f] if f.is_kept else self.anchors.weights_of(n, staged[f]) for n, f in forms.items()})

    @property
    def is_behind(self) -> bool:
        """Whether others of the expected peers have gone on from another model than this peer's."""
        return len(self._expected) > 1 and (self.swarm.last().round > self.round or self.held.is_astray)

    def _contribution(self, trained: Trained, began: float) -> Contribution:
        """Return this peer's roster entry, and its deltas from anchors that count."""
        usable = self.held.usable()
        if SHARED not in usable:
            log.warning(
                "round %d: the others are at round %d, but no peer with its model can be reached; waiting for one",
                *(self.round + 1, self.swarm.last().round),
            )
        last = self.swarm.consensus.body_at(self.round) or self.swarm.last()
        member = Member(
            peer_id=self.swarm.peer_id,
            round=self.round,
            previous=last.digest,
            tokens=clamp_tokens(trained.tokens, trained.tokens_per_second, trained.seconds),
            slots=tuple(slot for slot in self.held.slots if VectorName.of_slot(slot) in usable),
            replicates=tuple(slot for slot in self.held.replicates if VectorName.of_slot(slot) in self.anchors.names),
            batches=batches_to_ask(self.run, self.round + 1, trained.batches),
            starts=dict(self.held.starts()),
            tokens_per_second=trained.places_per_second if self.run.round.samples else trained.tokens_per_second,
            ready_at=began,
            sync_seconds=statistics.median(self._synced or (0.0,)),  # a single stall does not lengthen the next rounds
            uplink_mbit=self._machine.uplink_mbit,
        )
        anchors, round = self.anchors, self.round + 1
        deltas = trained.deltas or LazyVectors(
            usable, lambda name: anchors.contribution(name, anchors.weights(name).clone(), None, round)
        )
        return Contribution(member, LazyVectors([name for name in deltas if name in usable], deltas.__getitem__))

    def _stage(self, result: RoundResult) -> dict[VectorName, Tensor]:
        """Return the bundles that would follow from a result, their kept forms, and mean moments; anchors stay."""
        staged: dict[VectorName, Tensor] = {}
        if SHARED not in result.means:
            return staged
        shifts = self._merge_shifts(result.roster.round + 1)
        for name, mean in result.means.items():
            staged[name], moments = self.anchors.stepped(name, mean, shifts.get(name))
            if moments is not None:
                staged[name.moments] = moments
        return staged | {self.anchors.kept_name(n): self.anchors.kept_form(n, staged[n]) for n in result.means}

    def _merge_shifts(self, round: int) -> dict[VectorName, Tensor]:
        slots = [slot for slot in range(self.run.num_slots) if self.held.has(VectorName.of_slot(slot))]

        def weights(slot: int) -> Tensor:
            name = self.anchors.kept_name(VectorName.of_slot(slot))  # as all peers have them
            return self.anchors.weights_of(name, self.swarm.load(name))

        stepped = tuple(name.slot for name in self.anchors.names if name.slot is not None)
        return merge_shifts(self.run.merge, round, self._layout, LazyVectors(slots, weights), stepped)

    def commit(self, body: Body | None, result: RoundResult, staged: Mapping[VectorName, Tensor]) -> None:
        """Publish what the certificate names, and take it as the anchors; the other anchors stay."""
        if len(result.roster) > 1:
            self.held.has_met(result.roster, self._expected)
        if body is not None and staged:
            self.round = body.round
            self.swarm.publish(body.round, {name: vector for name, vector in staged.items() if not name.is_moments})
        own = [name for name in staged if name.is_weights]
        for name in own:
            self.anchors.set(name, self.swarm.mapped(name))
        self.num_committed = len({*own} & {*self.held.names})
        self.held.unloaded.update((*own, *self.held.names))  # the model has what was trained instead
        self.swarm.keep_residuals(result, own, [name for name in self.held.names if _is_unchanged(name, body)])

    # ------------------------------------------------------------------ when a round ends

    def end_round(self, ends_at: float | None, result: RoundResult, began: float) -> float:
        """Announce when the next round's training ends, and return it.

        Args:
            ends_at: DHT time that others have named.
            result: Says it otherwise, by its roster.
            began: DHT time at which the synchronisation that ends here began.
        """
        ends_at = ends_at or self.next_end(result, self.round + 1)
        self.announce(ends_at)
        self._synced.append(min(self.swarm.now() - began, 3600.0))
        return ends_at

    def next_end(self, result: RoundResult, round: int) -> float:
        """Return the DHT time at which a round's training ends: by the roster, or as announced if it met none.

        While round r + 1 is decided, `self.round` is r, and the certificate carries the end of r + 2.
        """
        # A peer that is distrusted itself and has met none has only its own word.
        last, least = self.swarm.last(), self.run.round.least_seconds(round)
        counted = [member for member in result.roster if member.peer_id not in self.held.distrusted]
        voters = [member for member in counted if member.peer_id in last.voters]  # guard: always
        members = (voters if last.round else counted) or list(result.roster)
        if not members:
            announced = self.announced_end(self.round)
            return self.bounded(announced or self.swarm.now() + least)
        ends_at = round_end(self.run.round, round, self.run.round_tokens, counted or members, members)
        # A synchronisation that took much longer than the last ones must not eat the next round.
        return self.bounded(max(ends_at, self.swarm.now() + least))

    @property
    def follows_others(self) -> bool:
        """Whether this peer came while others train, who have said when their round ends; its own speed says nothing.

        After a restart of all, no peer has: they must state their speeds.
        """
        by_clock = self.run.round.mode == "tokens"
        return self.round > 0 and not (by_clock and not self.announced_end(self.round))

    def bounded(self, ends_at: float) -> float:
        """Return `ends_at`, capped at the latest end that an honest roster can give."""
        return min(ends_at, self.swarm.now() + self.run.round.max_seconds + self.run.round.exchange_seconds)

    def announced_end(self, round: int, since: float | None = None) -> float:
        """Return the DHT time at which this round's training ends, as the median of the voters; 0 if none trains it.

        Args:
            since: Count rounds that end after this DHT time; by default after now.
        """
        since = self.swarm.now() if since is None else since
        voters = self.records(self.swarm.last().voters)
        ends = [record.ends_at for record in voters if record.round == round and record.ends_at > since]
        return statistics.median_low(ends) if ends else 0.0  # guard: statistics.median_low -> max

    # ------------------------------------------------------------------ records

    def announce(self, ends_at: float, *, is_done: bool = False) -> None:
        """Publish this peer's place in the run.

        Args:
            ends_at: DHT time at which its round's training ends.
            is_done: Whether it has made the round's steps.
        """
        last = self.swarm.last()
        certificate = last.digest if last.round == self.round > 0 else ""
        me, round = self.swarm.peer_id, self.round
        self.swarm.announce(
            Progress(peer_id=me, round=round, ends_at=ends_at, certificate=certificate, is_done=is_done)
        )
        if not is_done:
            self.held.announce("active")

    def records(self, peers: Sequence[str]) -> list[Progress]:
        """Return the progress records of those of `peers` that are other peers; no single one decides anything."""
        others = set(peers) - {self.swarm.peer_id}
        return [record for peer, record in self.swarm.read(Progress).items() if peer in others]  # type: ignore[misc]


def _why_false(name: VectorName, body: Body | None) -> str:
    """Return why a round's certificate does not name what this peer has made of a vector."""
    return "too few have confirmed it" if _is_unchanged(name, body) else "the round's certificate names another version"


def _is_unchanged(name: VectorName, body: Body | None) -> bool:
    """Check whether a round's certificate leaves a slot as it was."""
    return body is not None and name.slot is not None and body.slots[name.slot].round < body.round
