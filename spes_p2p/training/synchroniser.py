"""The leader's side of a round: rosters, commits, versions. Touches the swarm and anchors, never the model."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from spes_p2p.codecs import Layout
from spes_p2p.config import MachineConfig, RunConfig
from spes_p2p.errors import JoinError
from spes_p2p.swarm.clock import clamp_tokens, round_end
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.interface import Contribution, RoundResult, Swarm
from spes_p2p.swarm.quorum import active_of, has_begun, voters_of
from spes_p2p.swarm.records import Claim, Progress
from spes_p2p.swarm.roster import SHARED, Member, derive_groups, distrusted, is_bundle, lag_of, moments_name, slot_name
from spes_p2p.training.anchors import Anchors, merge_shifts
from spes_p2p.training.checkpoint import go_back
from spes_p2p.training.round_work import Synchronised, Trained, Update
from spes_p2p.training.slots import Holdings

log = logging.getLogger(__name__)

OPENING_SECONDS = 120.0
"""Longest that a newcomer, or one that has fallen behind, waits for the others to be between two rounds."""
SETTLE_SECONDS = 3.0
"""Between announcing and acting where all start together: longer than a record needs to reach everybody."""
POLL_SECONDS = 0.5


def wait_for_peers(holdings: Holdings, swarm: Swarm, needed: int) -> dict[str, Claim]:
    """Return the claims once so many peers have announced themselves, and a moment later if all of them are new."""
    started, told = holdings.clock(), 0
    while True:
        claims = holdings.claims()
        present = len(claims)
        is_under_way = any(c.state == "active" for peer, c in claims.items() if peer != swarm.peer_id)
        if present >= needed and (is_under_way or holdings.clock() - started >= SETTLE_SECONDS):
            return claims
        if present < needed and present != told:
            log.info("waiting for peers: %d of %d are here", present, needed)
            told = present
        swarm.wait(POLL_SECONDS)


def begin(swarm: Swarm, names: Sequence[str], initial: Callable[[], Mapping[str, Tensor]] | None) -> None:
    """Publish the run's start of what is lacking here.

    Args:
        swarm: To publish in.
        names: Of all that belongs to the model.
        initial: Makes the bundles of all names; None where only what others have trained will do.

    Raises:
        JoinError: something is lacking that only others have.
    """
    lacking = [name for name in names if name not in swarm.versions()]
    if not lacking:
        return
    if initial is None:
        raise JoinError(f"{', '.join(lacking)}: not whole here, nor with any peer reached; give more --initial-peers")
    bundles = initial()
    swarm.publish(0, {name: bundles[name] for name in lacking})


class Others:
    """The progress of everybody else.

    Args:
        swarm: The peer's swarm.
        holdings: Knows who takes part, and who has a vote.
    """

    def __init__(self, swarm: Swarm, holdings: Holdings) -> None:
        self._swarm, self._holdings = swarm, holdings

    def progress(self, peers: Sequence[str]) -> list[Progress]:
        """Return what those of `peers` that are others have announced."""
        others = set(peers) - {self._swarm.peer_id}
        return [record for peer, record in self._swarm.read(Progress).items() if peer in others]  # type: ignore[misc]

    def active(self) -> list[Progress]:
        """Return what all others have announced that take part in rounds."""
        return self.progress(self._holdings.active())

    def are_ahead(self, round: int) -> bool:
        """Tell whether most of those who have a vote train a later round."""
        voters = self.progress(self._holdings.voters())
        return 2 * sum(record.round > round for record in voters) > len(voters)  # guard: majority-ahead

    def are_synchronising(self, seconds: float) -> bool:
        """Tell whether anybody has ended a round since, at most so long ago."""
        return any(record.ends_at > self._swarm.now() - seconds for record in self.active())

    def round_end(self, round: int, since: float | None = None) -> float:
        """Return the DHT time at which most of those who have a vote say that this round's training ends.

        It is 0 if none of them trains that round now.

        Args:
            round: The round.
            since: A round that has ended after this DHT time counts, too; by default only one that has not ended.
        """
        voters, since = self.progress(self._holdings.voters()), self._swarm.now() if since is None else since
        ends = [record.ends_at for record in voters if record.round == round and record.ends_at > since]
        return statistics.median_low(ends) if ends else 0.0  # guard: round-end


PUNCTUAL = 0.5
"""Share of the matchmaking's patience by which a step may end, or begin, after its round: later would be in vain."""


class Synchroniser:
    """One peer's dealings with its swarm, round after round.

    Args:
        swarm: The peer's swarm.
        run: The run's settings.
        holdings: This peer's claims.
        anchors: This peer's anchors, empty at first.
        layout: Layout of one slot's vector.
        machine: What this machine may send and fetch.
    """

    def __init__(
        self,
        swarm: Swarm,
        run: RunConfig,
        *,
        holdings: Holdings,
        anchors: Anchors,
        layout: Layout,
        machine: MachineConfig | None = None,
    ) -> None:
        self.swarm, self.anchors, self.holdings = swarm, anchors, holdings
        self.round, self.is_late = 0, False  # late: others had committed rounds when it came
        self.last = Synchronised.of(RoundResult(roster=()), 0.0)
        self._run, self._layout, self._machine = run, layout, machine or MachineConfig()
        self._sync_seconds, self._expected_since, self._others = 0.0, 0.0, Others(swarm, holdings)

    # ------------------------------------------------------------------ joining

    def open(
        self, initial: Callable[[], Mapping[str, Tensor]] | None, saved: Mapping[Path, Version] | None = None
    ) -> Update:
        """Announce, meet the others' records, take over the swarm's state, and claim slots.

        Args:
            initial: Makes the bundles of the run's start, of all names; None if this peer has been in the run before.
            saved: Versions of this peer's checkpoint by file, after a restart.

        Raises:
            JoinError: the swarm's state could not be fetched.
        """
        self.holdings.announce("joining")
        self.is_late = has_begun(wait_for_peers(self.holdings, self.swarm, self._run.round.min_peers))
        if saved:
            go_back(self.swarm, self.holdings.others(), saved)
        model = (SHARED, *map(slot_name, range(self._run.model.num_experts)))
        if initial and not self.is_late:
            begin(self.swarm, model, initial)
        self.holdings.catch_up(self.holdings.others())
        begin(self.swarm, model, initial)
        self.round = self.swarm.versions()[SHARED].round
        self.anchors.set(SHARED, self.swarm.load(SHARED))
        self.holdings.rebalance(self.round)
        self._announce(0.0)
        self._expected_since = self.swarm.now()
        held_moments = self.holdings.held_moments()
        names = [name for name in self.swarm.versions() if is_bundle(name) or name in held_moments]
        return Update(self.holdings.slots, {name: self.holdings.load(name) for name in names})

    def meet(self, tokens_per_second: float) -> Update:
        """Agree on when the first round ends: with those in the middle of one, or by a roster without deltas."""
        flats, ends_at = self._find_place()
        if ends_at is not None:
            self._announce(ends_at)
            return Update(self.holdings.slots, flats, ends_at)
        update = self.finish(Trained({}, 0, tokens_per_second, 0.0), starts_at=0.0)
        return Update(update.slots, flats | dict(update.flats), update.ends_at)

    def _find_place(self, routed: Mapping[int, int] | None = None) -> tuple[dict[str, Tensor], float | None]:
        """Go on with the others to their next round; return what that has changed, and when it ends, if any is on.

        Whoever would train on by itself while they synchronise would only be late for the next one, too.
        """
        flats: dict[str, Tensor] = {}
        times, deadline = self._run.round, self.holdings.clock() + OPENING_SECONDS
        while self.holdings.clock() < deadline:
            # Where this peer is expected, the others wait for it after the round's end, and a step is better than none.
            since = max(self._expected_since, self.swarm.now() - PUNCTUAL * times.matchmaking_seconds)
            claims, announced = self.holdings.claims(), self._others.round_end(self.round, since)
            if not has_begun(claims) and len(active_of(claims)) < times.min_peers:
                self.swarm.wait(POLL_SECONDS)
            elif self._others.are_ahead(self.round):
                flats |= self._catch_up(min_round=self.round + 1, routed=routed)
                self.swarm.wait(POLL_SECONDS)
            elif times.mode == "steps" or announced:
                return flats, self._bounded(announced)
            elif self._others.are_synchronising(2 * times.matchmaking_seconds + times.averaging_seconds):
                self.swarm.wait(POLL_SECONDS)  # the next round's end is known soon
            else:
                break
        return flats, None

    def _catch_up(self, **how: Any) -> dict[str, Tensor]:
        """Take over the swarm's state; return what that has changed, which is nothing if `shared` does not come."""
        try:
            flats = self.holdings.catch_up(self.holdings.others(), **how)
        except JoinError as error:
            log.warning("round %d: %s", self.round + 1, error)
            return {}
        self.round = self.swarm.versions()[SHARED].round
        return flats

    # ------------------------------------------------------------------ a round

    def finish(self, trained: Trained, *, starts_at: float) -> Update:
        """Average what was trained, commit what is whole, publish, pull, and look at the claims again.

        Args:
            trained: This peer's work since the anchors; without any it only meets the others.
            starts_at: DHT time from which the roster may stand without everybody.
        """
        began = self.swarm.now()
        self._wait_until_done(has_trained=bool(trained.local))  # guard: infinite-peer
        claims = self.holdings.claims()
        expected = len(active_of(claims))
        contribution = self._contribution(trained, began, voters_of(self.holdings.trusted(claims)))
        result = self._average(contribution, expected, starts_at)
        averaged = self.holdings.clock()
        if len(result.roster) > 1:
            self.holdings.distrusted = distrusted(result.roster)
        if result.is_behind:
            log.warning("round %d: the majority has gone on without this peer; catching up", self.round + 1)
            flats, ends_at = self._catch_up(routed=trained.routed), None
            if not self._run.round.overlap:  # else it trains meanwhile
                found, ends_at = self._find_place(trained.routed)
                flats |= found
        else:
            flats, ends_at = self._commit(result, trained), None
        self.last = Synchronised.of(result, self.holdings.clock() - averaged, self.holdings.stale_rounds)
        flats |= self.holdings.rebalance(self.round)
        held = self.holdings.held_moments()  # not those of slots given up just now
        flats = {name: flat for name, flat in flats.items() if is_bundle(name) or name in held}
        flats |= {name: self.anchors.weights(name) for name in self.anchors.names}
        ends_at = ends_at or self._next_end(result, expected)
        self._announce(ends_at)
        if not self._run.round.overlap:  # else training has not waited for it
            self._sync_seconds = (self._sync_seconds + min(self.swarm.now() - began, 3600.0)) / 2
        return Update(self.holdings.slots, flats, ends_at)

    def _average(self, contribution: Contribution, expected: int, starts_at: float) -> RoundResult:
        """Average, unless the others already have: their progress says so before and after a vain matchmaking."""
        missed = RoundResult(
            roster=(contribution.member,),
            dropped=dict.fromkeys(contribution.deltas, "the others have gone on"),
            is_behind=True,
        )
        if self._others.are_ahead(self.round):
            return missed
        result = self.swarm.average(contribution, expected=expected, starts_at=starts_at)
        if len(result.roster) == 1 and expected > 1 and self._others.are_ahead(self.round):
            return replace(missed, matchmaking_seconds=result.matchmaking_seconds)
        return result

    def rescue_orphans(self) -> Update | None:
        """Return what to load if slots that lost their last holder fall to this peer; looks once per heartbeat."""
        masters = self.holdings.rescue_orphans()
        if not masters:
            return None
        self.holdings.announce("active")
        return Update(self.holdings.slots, masters)

    def _contribution(self, trained: Trained, began: float, voters: Sequence[str]) -> Contribution:
        rounds = {name: version.round for name, version in self.swarm.versions().items()}
        local = trained.local or {name: self.anchors.weights(name) for name in self.anchors.names}
        member = Member(
            peer_id=self.swarm.peer_id,
            round=self.round,
            tokens=clamp_tokens(trained.tokens, trained.tokens_per_second, trained.seconds),
            slots=self.holdings.slots,
            slot_rounds=tuple(rounds[slot_name(slot)] for slot in self.holdings.slots),
            lags=tuple(lag_of(rounds.get(slot_name(slot)), self.round) for slot in range(self._run.model.num_experts)),
            anchors={name: self.anchors.digest(name) for name in self.anchors.names},
            tokens_per_second=trained.tokens_per_second,
            ready_at=began,
            sync_seconds=self._sync_seconds,
            uplink_mbit=self._machine.uplink_mbit,
            refreshes=self._machine.refresh_slots is not None,
            voters=tuple(voters),
            electorate=len(voters),
        )
        deltas = {
            name: self.anchors.contribution(name, flat, trained.moments.get(name), self.round + 1)
            for name, flat in local.items()
        }
        return Contribution(member, deltas)

    def _wait_until_done(self, *, has_trained: bool) -> None:
        """In mode `steps`, wait until all peers have made theirs."""
        if self._run.round.mode == "steps" and has_trained:
            self.swarm.announce(self._progress(0.0, is_done=True))
            deadline = self.holdings.clock() + self._run.round.max_seconds
            while self.holdings.clock() < deadline and any(
                record.round < self.round or (record.round == self.round and not record.is_done)
                for record in self._others.active()
            ):
                self.swarm.wait(POLL_SECONDS)

    def _commit(self, result: RoundResult, trained: Trained) -> dict[str, Tensor]:
        """Step the anchors, publish them, and pull the slots of others; return what changed of the latter."""
        if trained.tokens:
            for name, reason in result.dropped.items():
                log.warning("round %d: dropped %s: %s", self.round + 1, name, reason)
        if SHARED not in result.committed:
            return {}
        groups = derive_groups(result.roster)
        shifts = self._merge_shifts(groups.round + 1)
        moments: dict[str, Tensor] = {}
        for name, mean in result.committed.items():
            mean_moments = self.anchors.commit(name, mean, shifts.get(name))
            if mean_moments is not None:
                moments[moments_name(name)] = mean_moments
        self.round, self.holdings.has_committed = groups.round + 1, True
        me = self.swarm.peer_id
        astray = {n for n in self.anchors.names if n != SHARED and me not in groups.members.get(n, ())}
        whole = [name for name in self.anchors.names if name not in astray]
        # A merge moves a slot by more than its mean delta, which then does not lead to its new version.
        followed = [
            name for name in result.committed if name in result.encoded and name in whole and name not in shifts
        ]
        unaveraged = [name for name in whole if moments_name(name) not in moments]
        bundles = {n: self.anchors.bundle(n) for n in whole} | moments | self._own_moments(trained, unaveraged)
        deltas = {name: result.encoded[name] for name in followed}
        self.swarm.publish(self.round, bundles, deltas)
        flats = self.holdings.fetch(result.roster, self.round, whole, trained.routed)
        flats |= self.holdings.fetch_newest(astray - groups.members.keys())
        for name in astray & set(flats):
            self.anchors.set(name, self.swarm.load(name))
        return flats | moments

    def _own_moments(self, trained: Trained, names: Sequence[str]) -> dict[str, Tensor]:
        """Return this peer's moments of its slots, where some are published for those who adopt one."""
        if not self.anchors.publishes_moments(self.round):
            return {}
        own = {name: trained.moments[name] for name in names if name in trained.moments and name != SHARED}
        return {moments_name(name): moments for name, moments in own.items() if moments.isfinite().all()}

    def _merge_shifts(self, round: int) -> dict[str, Tensor]:
        if not self._run.merge.alpha:
            return {}
        slots = [slot for slot in range(self._run.model.num_experts) if slot_name(slot) in self.swarm.versions()]
        weights = {slot: self.holdings.load(slot_name(slot)) for slot in slots}
        return merge_shifts(self._run.merge, round, self._layout, weights, self.holdings.slots)

    def _next_end(self, result: RoundResult, expected: int) -> float:
        """Return when the next round ends; who met nobody goes by what the others have announced."""
        if len(result.roster) == 1 and expected > 1 and (announced := self._others.round_end(self.round)):
            return self._bounded(announced)
        # A synchronisation that took much longer than the last ones must not eat the next round.
        counted = [member for member in result.roster if member.peer_id not in self.holdings.distrusted]
        # Whoever is left out itself and has met nobody has only its own word.
        ends_at = round_end(self._run.round, counted or result.roster)
        return self._bounded(max(ends_at, self.swarm.now() + self._run.round.min_seconds))

    def _bounded(self, ends_at: float) -> float:
        """Return a round's end that others have had a say in, no later than any honest one."""
        return min(ends_at, self.swarm.now() + self._run.round.max_seconds + self._run.round.exchange_seconds)

    # ------------------------------------------------------------------ records

    def _progress(self, ends_at: float, *, is_done: bool = False) -> Progress:
        return Progress(peer_id=self.swarm.peer_id, round=self.round, ends_at=ends_at, is_done=is_done)

    def _announce(self, ends_at: float) -> None:
        self.swarm.announce(self._progress(ends_at))
        self.holdings.announce("active")
