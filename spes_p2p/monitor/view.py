"""The swarm's state according to its certificates and records: a pure fold of snapshots into one immutable view.

Rounds, members and tokens are those of certificates. Records are signed, strict and bounded when they arrive here, but
any peer may lie in its own: those of peers that no certificate knows do not count, of reports those of the voters do,
and one with an implausible number is dropped.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from spes_p2p.monitor.credit import SETTLED_AFTER, Credit, cap_of, counted, of_voters
from spes_p2p.swarm.certificate import Body
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
KEPT_ROUNDS = 8
"""Newest rounds whose reports a view keeps while it is folded; of older rounds it keeps the summaries. Rounds further
ahead are a liar's. A page is open for weeks in the process that trains, and a report takes 3 KB."""
T = TypeVar("T")
PHASES = ("train", "matchmaking", "averaging", "exchange", "other")


@dataclass(frozen=True)
class Snapshot:
    """The unexpired records that count at DHT time `now`, by peer id, the bodies of the last rounds, by round,
    and the names of peers' owners."""

    now: float
    claims: Mapping[str, Claim] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    metrics: Mapping[str, Metrics] = field(default_factory=dict)
    bodies: Mapping[int, Body] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def look(swarm: HivemindSwarm) -> Snapshot:
    """Return the certificates, and the records of this peer and of those that a certificate knows.

    Before the first certificate all peers count.

    Raises:
        OSError: the DHT is too slow, or its process has ended: what was read before says nothing of now.
    """
    known, me = swarm.consensus.known(), swarm.peer_id
    claims, progress, metrics = (
        {
            peer: record
            for peer, record in swarm.read_now(kind).items()
            if known is None or peer in known or peer == me  # guard: always
        }
        for kind in (Claim, Progress, Metrics)
    )
    return Snapshot(swarm.now(), claims, progress, metrics, swarm.consensus.bodies(), swarm.names())  # type: ignore[arg-type]


class Sample(NamedTuple):
    """How the swarm's model continues the beginning of its first held-out sequence."""

    prompt: str
    """The beginning, the same in every round; of a conversation all before its first reply."""
    text: str
    truth: str
    """What follows in the held-out text."""


@dataclass(frozen=True)
class PeerView:
    """One peer that has, or had, a claim."""

    peer_id: str
    state: Literal["joining", "active", "left"]
    slots: tuple[int, ...]
    round: int
    """The last round that it says it has committed; 0 while unknown."""
    last_seen: float
    """DHT time at which the claim was last seen unexpired."""
    report: Metrics | None = None
    """The newest."""


@dataclass(frozen=True)
class RoundSummary:
    """What a round's certificate says, and what its members report."""

    round: int
    num_peers: int
    """Members."""
    tokens: int
    """Sum of the members' capped tokens that the round's mean contains."""
    seconds: float
    """Median wall time of the voters, as the figures below of all members if no voter has reported."""
    tokens_per_second: float
    """Tokens over wall time, synchronisation included; NaN without reports."""
    loss: float
    """Median training loss of those that have trained, nats per token; NaN without any."""
    agreement: float
    """Share of all members' reports with the most common digest of the shared parameters; NaN without reports."""
    phases: Mapping[str, float]
    """Median seconds by phase."""
    sync_share: float
    """Median share of the wall time not spent training; NaN without reports."""
    dropped: int
    """Groups that were dropped, summed over the members that dropped them."""
    stale_rounds: int = 0
    """Greatest age, in rounds, of a slot in any member's model."""
    cap: int = 0
    """Most tokens of one member that count."""


@dataclass(frozen=True)
class SwarmView:
    """The swarm at one moment, and its history."""

    num_slots: int
    total_rounds: int
    absence_seconds: float
    """Time after which a claim that is no longer seen counts as gone; a single failed read does not."""
    now: float = 0.0
    """DHT time of the newest snapshot."""
    published: int = 0
    """Newest round with a certificate."""
    peers: Mapping[str, PeerView] = field(default_factory=dict)
    """By peer id, including peers that left."""
    reports: Mapping[tuple[int, str], Metrics] = field(default_factory=dict)
    """By round and peer id, of the last rounds; a second report of the same round is ignored."""
    held_out: Mapping[int, float] = field(default_factory=dict)
    """Held-out loss of the swarm's model by round."""
    held_out_sources: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The same by source, if the run mixes some."""
    samples: Mapping[int, tuple[Sample, ...]] = field(default_factory=dict)
    """Text of the swarm's model by round."""
    rounds: Mapping[int, RoundSummary] = field(default_factory=dict)
    """Those whose certificates this peer has seen, ascending."""
    bodies: Mapping[int, Body] = field(default_factory=dict)
    """Of the last rounds, by round."""
    settled: Credit = field(default_factory=Credit)
    """Of the rounds before the last ones."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Of peers' owners, by peer id."""

    @cached_property
    def credit(self) -> Credit:
        """Tokens that counted, by peer."""
        return self.settled.plus(self.bodies.values(), names=self.names)

    @cached_property
    def active(self) -> tuple[PeerView, ...]:
        """Peers that train, in the order of their ids."""
        return tuple(peer for _, peer in sorted(self.peers.items()) if peer.state == "active")

    @cached_property
    def coverage(self) -> tuple[int, ...]:
        """Number of holders of each slot."""
        held = {peer.peer_id: tuple(s for s in peer.slots if s < self.num_slots) for peer in self.active}
        return tuple(coverage(held, self.num_slots))

    @property
    def ends_at(self) -> float:
        """DHT time at which the training of the current round ends; 0 while unknown."""
        return self.bodies[self.published].ends_at if self.published in self.bodies else 0.0

    @property
    def orphans(self) -> tuple[int, ...]:
        """Slots without a holder."""
        return tuple(slot for slot, holders in enumerate(self.coverage) if not holders)

    @property
    def num_covered(self) -> int:
        """Number of slots with a holder."""
        return self.num_slots - len(self.orphans)

    @cached_property
    def totals(self) -> Mapping[int, int]:
        """Tokens trained in all rounds known here up to each one."""
        return dict(zip(self.rounds, accumulate(summary.tokens for summary in self.rounds.values()), strict=True))

    def is_reported(self, number: int) -> bool:
        """Check whether all members of a round have reported it."""
        body = self.bodies.get(number)
        return body is not None and all((number, member.peer_id) in self.reports for member in body.members)

    @cached_property
    def whole(self) -> list[int]:
        """Rounds of which no report is to come: all members have reported, or a later round has a certificate."""
        is_whole = self.is_reported(self.published) or not self.absence_seconds  # of a past run nothing is to come
        return [number for number in self.rounds if number < self.published or is_whole]

    @property
    def newest(self) -> RoundSummary | None:
        """Summary of the newest whole round."""
        return self.rounds[self.whole[-1]] if self.whole else None

    @property
    def tokens(self) -> int:
        """Tokens trained in all rounds known here."""
        return self.tokens_until(self.published)

    def tokens_until(self, number: int) -> int:
        """Return the tokens trained in rounds up to `number`."""
        if number in self.totals:
            return self.totals[number]
        return max((total for known, total in self.totals.items() if known <= number), default=0)

    def evaluated(
        self, number: int, loss: float, samples: tuple[Sample, ...] = (), sources: Mapping[str, float] | None = None
    ) -> SwarmView:
        """Return the view with the held-out loss after round `number`, samples of text, and the loss by source."""
        samples_by_round = {**self.samples, number: samples} if samples else self.samples
        held_out = dict(sorted({**self.held_out, number: loss}.items()))
        by_source = {**self.held_out_sources, number: sources} if sources else self.held_out_sources
        return replace(self, held_out=held_out, samples=samples_by_round, held_out_sources=by_source)


def fold(view: SwarmView, snapshot: Snapshot) -> SwarmView:
    """Return the view after one more snapshot."""
    bodies = snapshot.bodies or view.bodies
    published = max(bodies, default=view.published)
    # guard: published + KEPT_ROUNDS + 1 -> 10**9
    near = range(published - KEPT_ROUNDS + 1, published + KEPT_ROUNDS + 1)
    new = {
        (report.round, peer): report
        for peer, report in snapshot.metrics.items()
        if report.round in near and (report.round, peer) not in view.reports and is_plausible(report, view.total_rounds)
    }
    reports = {**view.reports, **new}
    newest = {peer.peer_id: peer.report for peer in view.peers.values()}
    for (number, peer), report in new.items():
        known = newest.get(peer)
        if known is None or known.round < number:
            newest[peer] = report
    peers: dict[str, PeerView] = {}
    seen = [*view.peers, *(peer for peer in sorted(snapshot.claims) if peer not in view.peers)]
    kept = set(sorted(seen, key=lambda peer: peer not in snapshot.claims)[:MAX_PEERS])  # guard: [:MAX_PEERS] ->
    for peer in (peer for peer in seen if peer in kept):
        peers[peer] = _fold_peer(view, snapshot, peer, newest.get(peer))
    # A page reads records every other second for days: what has not changed is not summarised again.
    changed = {number for number, body in bodies.items() if view.bodies.get(number) is not body}
    changed |= {number for number, _ in new if number in bodies}
    by_round: dict[int, list[Metrics]] = {number: [] for number in sorted(changed)}
    for (number, _), report in sorted(reports.items()) if changed else ():
        if number in by_round:
            by_round[number].append(report)
    rounds = {number: summarise(bodies[number], reported) for number, reported in by_round.items()}
    if changed:  # of a run that went back, the later rounds are void
        rounds = {number: each for number, each in sorted({**view.rounds, **rounds}.items()) if number <= published}
    return replace(
        view,
        now=snapshot.now,
        published=published,
        peers=peers,
        reports={key: report for key, report in reports.items() if key[0] in near},
        rounds=rounds if changed else view.rounds,
        bodies=bodies,
        settled=view.settled.plus(bodies.values(), published - SETTLED_AFTER, snapshot.names),
        names=snapshot.names or view.names,
    )


def _fold_peer(view: SwarmView, snapshot: Snapshot, peer: str, report: Metrics | None) -> PeerView:
    claim, known = snapshot.claims.get(peer), view.peers.get(peer)
    if claim is None:
        assert known is not None
        is_gone = snapshot.now - known.last_seen >= view.absence_seconds
        return replace(known, state="left" if is_gone else known.state, report=report)
    progress = snapshot.progress.get(peer)
    number = progress.round if progress is not None else known.round if known is not None else 0
    return PeerView(
        peer_id=peer,
        state=claim.state,
        slots=tuple(slot for slot in claim.slots if slot < view.num_slots),
        round=min(number, view.total_rounds),
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
            0 <= report.loss <= MAX_LOSS  # guard: <= MAX_LOSS ->
            if report.loss is not None
            else not report.tokens  # guard: not report.tokens -> True
        )
        and 0 <= report.tokens_per_second <= MAX_TOKENS_PER_SECOND
        and report.tokens <= MAX_TOKENS
        and seconds <= MAX_ROUND_SECONDS
    )


def summarise(body: Body, reports: Sequence[Metrics]) -> RoundSummary:
    """Return the summary of a round: what its certificate says, and what of the reports is of its members."""
    tokens = {member.peer_id: member.tokens for member in body.members}
    trained = {peer: count for peer, count in tokens.items() if count}
    cap, total = cap_of(body), sum(counted(body).values())
    heard_of = {report.peer_id: report for report in reports if report.peer_id in tokens}  # guard: always
    losses = {peer: report.loss for peer, report in heard_of.items() if peer in trained and report.loss is not None}
    heard, digests = of_voters(body, heard_of), Counter(report.shared_digest for report in heard_of.values())
    seconds = median(map(wall_seconds, heard)) if heard else 0.0
    return RoundSummary(
        round=body.round,
        num_peers=len(tokens),
        tokens=total,
        seconds=seconds,
        tokens_per_second=total / seconds if seconds else math.nan,
        loss=median(of_voters(body, losses)) if losses else math.nan,
        agreement=max(digests.values()) / len(heard_of) if heard_of else math.nan,
        phases={phase: median(phase_seconds(each)[phase] for each in heard) if heard else 0.0 for phase in PHASES},
        sync_share=median(map(sync_share, heard)) if heard else math.nan,
        dropped=sum(min(report.dropped, 4097) for report in heard_of.values()),
        stale_rounds=max((min(report.stale_rounds, body.round) for report in heard_of.values()), default=0),
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
