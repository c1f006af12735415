"""The swarm's state according to its records: a pure fold of snapshots into one immutable view.

Records are signed, strict and bounded when they arrive here, but any peer may lie in its own. No single peer moves the
swarm's round or outweighs the others: rounds follow the majority of active peers, weights are capped, and a report
with an implausible number is dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from statistics import median, median_low
from typing import TYPE_CHECKING, Literal, NamedTuple

from spes_p2p.swarm.claims import coverage
from spes_p2p.swarm.records import Claim, Metrics, Progress

if TYPE_CHECKING:
    from spes_p2p.swarm.hivemind_swarm import HivemindSwarm

MAX_PEERS = 2048
"""Peers remembered: identities cost nothing, so a flood of them must not exhaust memory."""
MAX_LOSS = 100.0
MAX_TOKENS = 10**12
MAX_TOKENS_PER_SECOND = 1e9
MAX_ROUND_SECONDS = 1e6
WEIGHT_CAP = 4
"""A report's weight is at most this many times the round's median tokens."""
KEPT_ROUNDS = 8
"""Newest rounds whose reports a view keeps while it is folded; of older rounds it keeps the summaries. Rounds further
ahead are a liar's. A page is open for weeks in the process that trains, and a report takes 3 KB."""
PHASES = ("train", "matchmaking", "averaging", "exchange", "other")


@dataclass(frozen=True)
class Snapshot:
    """All unexpired records at DHT time `now`, by peer id."""

    now: float
    claims: Mapping[str, Claim] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    voters: frozenset[str] = frozenset()

    def of(self, peers: Collection[str] | None) -> Snapshot:
        """Return the records of these peers, of all if None: those of others could be anything."""
        if peers is None:
            return self
        claims, progress, metrics = (
            {peer: record for peer, record in records.items() if peer in peers}  # guard: certified-figures
            for records in (self.claims, self.progress, self.metrics)
        )
        return Snapshot(self.now, claims, progress, metrics, self.voters)  # type: ignore[arg-type]


def look(swarm: HivemindSwarm) -> Snapshot:
    """Return all peers' records; those of strangers are among them until `Snapshot.of` drops them.

    Raises:
        OSError: the DHT is too slow, or its process has ended: what was read before says nothing of now.
    """
    claims, progress, metrics = (swarm.read_now(kind) for kind in (Claim, Progress, Metrics))
    voters = frozenset(swarm.last().voters)
    return Snapshot(swarm.now(), claims, progress, metrics, voters)  # type: ignore[arg-type]  # validated when read


class Sample(NamedTuple):
    """How the swarm's model continues the beginning of its first held-out sequence.

    Attributes:
        prompt: The beginning, the same in every round; of a conversation all before its first reply.
        text: The model's continuation.
        truth: What follows in the held-out text.
    """

    prompt: str
    text: str
    truth: str


@dataclass(frozen=True)
class PeerView:
    """One peer that has, or had, a claim.

    Attributes:
        round: Round in training; 0 while unknown.
        ends_at: DHT time at which that round's training ends; 0 while unknown.
        last_seen: DHT time at which the claim was last seen unexpired.
        report: The newest report.
    """

    peer_id: str
    state: Literal["joining", "active", "left"]
    slots: tuple[int, ...]
    round: int
    last_seen: float
    report: Metrics | None = None
    ends_at: float = 0.0


@dataclass(frozen=True)
class RoundSummary:
    """Aggregate of one round's reports.

    Attributes:
        tokens: Sum of capped tokens, without those of peers that committed nothing.
        cap: Most tokens of one report that count.
        seconds: Median wall time.
        tokens_per_second: Tokens over wall time, synchronisation included.
        loss: Median training loss of the voters, of all if no voter has trained, nats per token; NaN without tokens.
        agreement: Share of reports with the most common digest of the shared parameters.
        phases: Median seconds by phase.
        sync_share: Median share of the wall time not spent training.
        dropped: Groups that were dropped, summed over the members that dropped them.
        stale_rounds: Greatest age, in rounds, of a slot in any peer's model.
    """

    round: int
    num_peers: int
    tokens: int
    seconds: float
    tokens_per_second: float
    loss: float
    agreement: float
    phases: Mapping[str, float]
    sync_share: float
    dropped: int
    stale_rounds: int = 0
    cap: int = 0


@dataclass(frozen=True)
class SwarmView:
    """The swarm at one moment, and its history.

    Attributes:
        num_slots: Experts per layer.
        total_rounds: Rounds in the run.
        absence_seconds: Time after which a claim that is no longer seen counts as gone; a single failed read does not.
        now: DHT time of the newest snapshot.
        published: Newest round that a majority of the active peers finished.
        peers: By peer id, including peers that left.
        reports: By (round, peer id), of the last rounds; a second report of the same round is ignored.
        held_out: Held-out loss of the swarm's model by round.
        held_out_sources: The same by source, where the run mixes some.
        samples: Text of the swarm's model by round.
        voters: Those of the last certificate: their losses count.
    """

    num_slots: int
    total_rounds: int
    absence_seconds: float
    now: float = 0.0
    published: int = 0
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    reports: Mapping[tuple[int, str], Metrics] = field(default_factory=dict)
    held_out: Mapping[int, float] = field(default_factory=dict)
    held_out_sources: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    samples: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    voters: frozenset[str] = frozenset()

    @cached_property
    def active(self) -> tuple[PeerView, ...]:
        """Peers that train, in the order of their ids."""
        return tuple(peer for _, peer in sorted(self.peers.items()) if peer.state == "active")

    @cached_property
    def round(self) -> int:
        """Latest round that a majority of the active peers has reached."""
        return _majority_reached([peer.round for peer in self.active])

    @cached_property
    def coverage(self) -> tuple[int, ...]:
        """Number of holders of each slot."""
        held = {peer.peer_id: tuple(s for s in peer.slots if s < self.num_slots) for peer in self.active}
        return tuple(coverage(held, self.num_slots))

    @cached_property
    def ends_at(self) -> float:
        """DHT time at which the training of the current round ends, as the median of its peers; 0 while unknown."""
        ends = [peer.ends_at for peer in self.active if peer.round == self.round and peer.ends_at > 0]
        return median_low(ends) if ends else 0.0

    @property
    def orphans(self) -> tuple[int, ...]:
        """Slots without a holder."""
        return tuple(slot for slot, holders in enumerate(self.coverage) if not holders)

    @property
    def num_covered(self) -> int:
        """Number of slots with a holder."""
        return self.num_slots - len(self.orphans)

    @cached_property
    def rounds(self) -> Mapping[int, RoundSummary]:
        """Summaries of the complete rounds, ascending."""
        by_round: dict[int, list[Metrics]] = {}
        for (number, _), report in sorted(self.reports.items()):
            if number <= self.published:
                by_round.setdefault(number, []).append(report)
        return {number: summarise(reports, self.voters) for number, reports in by_round.items()}

    @cached_property
    def totals(self) -> Mapping[int, int]:
        """Tokens trained in all complete rounds up to each one."""
        return dict(zip(self.rounds, accumulate(summary.tokens for summary in self.rounds.values()), strict=True))

    def is_reported(self, number: int) -> bool:
        """Tell whether all members of a round have reported it."""
        reports = [report for (known, _), report in self.reports.items() if known == number]
        return bool(reports) and len(reports) >= max(report.num_members for report in reports)

    @cached_property
    def whole(self) -> list[int]:
        """Complete rounds of which no report is to come: all members have reported, or a later round is complete."""
        is_whole = self.is_reported(self.published) or not self.absence_seconds  # of a past run nothing is to come
        return [number for number in self.rounds if number < self.published or is_whole]

    @property
    def newest(self) -> RoundSummary | None:
        """Summary of the newest whole round."""
        return self.rounds[self.whole[-1]] if self.whole else None

    @property
    def tokens(self) -> int:
        """Tokens trained in all complete rounds."""
        return self.tokens_until(self.published)

    def tokens_until(self, number: int) -> int:
        """Return the tokens trained in complete rounds up to `number`."""
        if number in self.totals:
            return self.totals[number]
        return max((total for known, total in self.totals.items() if known <= number), default=0)

    def ending_at(self, total_rounds: int) -> SwarmView:
        """Return the view of a run whose founder has changed its number of rounds."""
        if total_rounds == self.total_rounds:
            return self
        return _with_known_rounds(replace(self, total_rounds=total_rounds), self, ())

    def evaluated(
        self, number: int, loss: float, samples: tuple[Sample, ...] = (), sources: Mapping[str, float] | None = None
    ) -> SwarmView:
        """Return the view with the held-out loss after round `number`, samples of text, and the loss by source."""
        samples_by_round = {**self.samples, number: samples} if samples else self.samples
        held_out = dict(sorted({**self.held_out, number: loss}.items()))
        by_source = {**self.held_out_sources, number: sources} if sources else self.held_out_sources
        changed = replace(self, held_out=held_out, samples=samples_by_round, held_out_sources=by_source)
        return _with_known_rounds(changed, self, ())


def fold(view: SwarmView, snapshot: Snapshot) -> SwarmView:
    """Return the view after one more snapshot of the records."""
    new = {
        (report.round, peer): report
        for peer, report in snapshot.metrics.items()
        if report.round > view.published - KEPT_ROUNDS  # an older one may have been counted
        and (report.round, peer) not in view.reports
        and is_plausible(report, view.total_rounds)
    }
    reports = {**view.reports, **new} if new else view.reports
    newest = {peer.peer_id: peer.report for peer in view.peers.values()}
    for (number, peer), report in new.items():
        known = newest.get(peer)
        if known is None or known.round < number:
            newest[peer] = report
    peers: dict[str, PeerView] = {}
    seen = [*view.peers, *(peer for peer in sorted(snapshot.claims) if peer not in view.peers)]
    kept = set(sorted(seen, key=lambda peer: peer not in snapshot.claims)[:MAX_PEERS])  # guard: monitor-peers
    for peer in (peer for peer in seen if peer in kept):
        peers[peer] = _fold_peer(view, snapshot, peer, newest.get(peer))
    finished = [p.report.round if p.report else 0 for p in peers.values() if p.state == "active"]
    published = max(view.published, _majority_reached(finished))
    changed = {*(number for number, _ in new), *range(view.published + 1, published + 1)}
    folded = replace(view, now=snapshot.now, published=published, voters=snapshot.voters, peers=peers, reports=reports)
    folded = _with_known_rounds(folded, view, changed)
    near = range(published - KEPT_ROUNDS + 1, published + KEPT_ROUNDS + 1)  # guard: future-reports
    newest_rounds = {key: report for key, report in reports.items() if key[0] in near}
    if len(newest_rounds) == len(reports):
        return folded
    return _with_known_rounds(replace(folded, reports=newest_rounds), folded, ())


def _with_known_rounds(view: SwarmView, before: SwarmView, changed: Collection[int]) -> SwarmView:
    """Return `view` with the summaries of the earlier view, those of the changed rounds made anew.

    A page on a peer reads records every other second for days; to summarise all rounds each time would cost the
    training more with every round.
    """
    by_round: dict[int, list[Metrics]] = {number: [] for number in changed if number <= view.published}
    if by_round:
        for (number, _), report in sorted(view.reports.items()):
            if number in by_round:
                by_round[number].append(report)
    new = {number: summarise(reports, view.voters) for number, reports in by_round.items() if reports}
    rounds = {**before.rounds, **new} if new else before.rounds
    view.__dict__["rounds"] = dict(sorted(rounds.items())) if new else rounds  # where a cached_property keeps its value
    return view


def _fold_peer(view: SwarmView, snapshot: Snapshot, peer: str, report: Metrics | None) -> PeerView:
    claim, known = snapshot.claims.get(peer), view.peers.get(peer)
    if claim is None:
        assert known is not None
        is_gone = snapshot.now - known.last_seen >= view.absence_seconds
        return replace(known, state="left" if is_gone else known.state, report=report)
    progress = snapshot.progress.get(peer)
    number = progress.round if progress is not None else known.round if known is not None else 0
    ends_at = progress.ends_at if progress is not None else known.ends_at if known is not None else 0.0
    return PeerView(
        peer_id=peer,
        state=claim.state,
        slots=tuple(slot for slot in claim.slots if slot < view.num_slots),
        round=min(number, view.total_rounds),
        ends_at=ends_at,
        last_seen=snapshot.now,
        report=report,
    )


def is_plausible(report: Metrics, total_rounds: int) -> bool:
    """Tell whether all numbers of a report are possible for a real machine."""
    seconds = wall_seconds(report)
    return (
        1 <= report.round <= total_rounds
        and all(map(math.isfinite, (report.loss or 0.0, report.tokens_per_second, seconds)))
        and (
            0 <= report.loss <= MAX_LOSS  # guard: loss-bound
            if report.loss is not None
            else not report.tokens  # guard: loss-of-tokens
        )
        and 0 <= report.tokens_per_second <= MAX_TOKENS_PER_SECOND
        and report.tokens <= MAX_TOKENS
        and seconds <= MAX_ROUND_SECONDS
    )


def summarise(reports: list[Metrics], voters: Collection[str] = ()) -> RoundSummary:
    """Return the summary of one round's reports (at least one)."""
    kept = [report.tokens if report.committed else 0 for report in reports]
    cap = WEIGHT_CAP * median_low(filter(None, kept)) if any(kept) else 0
    weights = [min(tokens, cap) for tokens in kept]  # guard: report-weight
    tokens, seconds = sum(weights), median(map(wall_seconds, reports))
    trained = {r.peer_id: r.loss for r, weight in zip(reports, weights, strict=True) if weight and r.loss is not None}
    losses = [loss for peer, loss in trained.items() if peer in voters] or list(trained.values())  # guard: voters-loss
    digests = Counter(report.shared_digest for report in reports)
    return RoundSummary(
        round=reports[0].round,
        num_peers=len(reports),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else 0.0,
        loss=median(losses) if losses else math.nan,
        agreement=max(digests.values()) / len(reports),
        phases={phase: median(phase_seconds(report)[phase] for report in reports) for phase in PHASES},
        sync_share=median(map(sync_share, reports)),
        dropped=sum(min(report.dropped, 4097) for report in reports),
        stale_rounds=max(min(report.stale_rounds, report.round) for report in reports),
        cap=cap,
    )


def phase_seconds(report: Metrics) -> dict[str, float]:
    """Return the wall time of the reported round by phase."""
    return {phase: getattr(report, f"{phase}_seconds") for phase in PHASES}


def wall_seconds(report: Metrics) -> float:
    """Return the wall time of the reported round."""
    return sum(phase_seconds(report).values())


def sync_share(report: Metrics) -> float:
    """Return the share of the round's wall time that was not spent training."""
    seconds = wall_seconds(report)
    return 1.0 - report.train_seconds / seconds if seconds else 0.0


def short_id(peer_id: str) -> str:
    """Return the last six characters of a peer id."""
    return peer_id[-6:]


def _majority_reached(rounds: list[int]) -> int:
    """Return the latest round that more than half of the peers have reached."""
    return sorted(rounds, reverse=True)[len(rounds) // 2] if rounds else 0
