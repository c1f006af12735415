"""What a study found, in numbers: means and spreads over seeds, curves, and how much of each gap was closed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from spes_p2p.study.results import RunResult
from spes_p2p.study.settings import Gap, Study, Variant

Results = Mapping[tuple[str, int], RunResult]
"""By variant and seed."""
TOKENS_TOLERANCE = 0.01
"""Relative: a round by tokens ends with somebody's batch, not with the exact number."""


@dataclass(frozen=True)
class Spread:
    """A number measured with several seeds.

    Attributes:
        values: By seed.
    """

    values: Mapping[int, float]

    @property
    def mean(self) -> float:
        return mean(self.values.values())

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation over seeds; None with a single one, or with one that is not finite."""
        values = list(self.values.values())
        return stdev(values) if len(values) > 1 and all(map(math.isfinite, values)) else None


@dataclass(frozen=True)
class Curve:
    """Held-out loss of one variant, after every round that all of its finished seeds measured.

    Attributes:
        tokens: Per peer, mean over seeds.
        steps: Optimizer steps that those tokens are, at the batch of the variant's peers.
        megabytes: Sent per peer, mean over seeds.
        mean: Loss, mean over seeds.
        low: Least over seeds.
        high: Most over seeds.
    """

    tokens: Sequence[float]
    steps: Sequence[float]
    megabytes: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@dataclass(frozen=True)
class Row:
    """One variant's numbers.

    Attributes:
        name: The variant's.
        title: For people.
        loss: Held-out loss at the end, nats per token.
        gaps: Share of each gap that it closed, by the gap's name; only those with a value.
        unequal: Gaps among them whose ends were trained on other numbers of tokens than it was; see `has_equal_tokens`.
        tokens: Trained per peer, mean over peers and seeds.
        tokens_range: Trained by the peer that trained least, and by the one that trained most.
        megabytes: Sent per peer, mean over peers and seeds.
        expert_megabytes: Memory of all experts on the peer that needs most.
        memory_megabytes: All planned memory of that peer.
        wall_seconds: Per run, mean over seeds.
        curve: Loss over the run.
        remarks: What must be known of some of its runs beside their losses, and of which seeds.
    """

    name: str
    title: str
    loss: Spread
    gaps: Mapping[str, Spread]
    unequal: frozenset[str]
    tokens: float
    tokens_range: tuple[int, int]
    megabytes: float
    expert_megabytes: float
    memory_megabytes: float
    wall_seconds: float
    curve: Curve
    remarks: Mapping[str, Sequence[int]]


def summarise(study: Study, results: Results) -> list[Row]:
    """Return one row for each variant that has finished a run, in the study's order."""
    rows = []
    for variant in study.variants.values():
        own = {seed: results[variant.name, seed] for seed in study.seeds if (variant.name, seed) in results}
        if own:
            rows.append(_row(study, variant, own, results))
    return rows


def _row(study: Study, variant: Variant, own: Mapping[int, RunResult], results: Results) -> Row:
    gaps, unequal = dict[str, Spread](), set[str]()
    for gap in study.gaps:
        spread = gap_spread(gap, variant.name, results) if variant.name in gap.of else None
        if spread is not None:
            gaps[gap.name] = spread
            ends = [(results[gap.solo, seed], results[gap.centralised, seed], own[seed]) for seed in spread.values]
            unequal |= set() if all(has_equal_tokens(*runs) for runs in ends) else {gap.name}
    peers = [peer for result in own.values() for peer in result.peers]
    tokens = [peer.tokens for peer in peers]
    remarks: dict[str, list[int]] = {}
    for seed, result in own.items():
        for remark in result.remarks:
            remarks.setdefault(remark, []).append(seed)
    return Row(
        name=variant.name,
        title=variant.title,
        loss=Spread({seed: result.loss for seed, result in own.items()}),
        gaps=gaps,
        unequal=frozenset(unequal),
        tokens=mean(tokens),
        tokens_range=(min(tokens), max(tokens)),
        megabytes=mean(peer.bytes_out for peer in peers) / 1e6,
        expert_megabytes=max(peer.expert_bytes for peer in peers) / 1e6,
        memory_megabytes=max(peer.memory_bytes for peer in peers) / 1e6,
        wall_seconds=mean(result.wall_seconds for result in own.values()),
        curve=_curve(list(own.values())),
        remarks=remarks,
    )


def has_equal_tokens(solo: RunResult, centralised: RunResult, ours: RunResult) -> bool:
    """Return whether each peer trained as many tokens as the lone one, and all together as many as the centralised one.

    Only then does a gap compare ways to train, and not how much was trained.
    """
    of_solo, of_all, own = (sum(peer.tokens for peer in run.peers) for run in (solo, centralised, ours))
    each = [(peer.tokens, of_solo / len(solo.peers)) for peer in ours.peers]
    return all(math.isclose(*pair, rel_tol=TOKENS_TOLERANCE) for pair in [*each, (own, of_all)])


def gap_spread(gap: Gap, variant: str, results: Results) -> Spread | None:
    """Return the share of a gap that a variant closed, by seed; None where no seed can tell."""
    shares = {}
    for seed in [seed for name, seed in results if name == variant]:
        ends = [results.get((name, seed)) for name in (gap.solo, gap.centralised)]
        if ends[0] is not None and ends[1] is not None:
            shares[seed] = gap_closed(ends[0].loss, ends[1].loss, results[variant, seed].loss)
    known = {seed: share for seed, share in shares.items() if share is not None}
    return Spread(known) if known else None


def gap_closed(solo: float, centralised: float, loss: float) -> float | None:
    """Return (solo - loss) / (solo - centralised); None where centralised is no better than solo, or a loss not finite.

    Args:
        solo: Loss of a peer that trains alone.
        centralised: Loss of one machine with everybody's tokens.
        loss: Loss of what is asked about; below 0 it is worse than solo, above 1 better than centralised.
    """
    if not all(map(math.isfinite, (solo, centralised, loss))) or solo <= centralised:
        return None
    return (solo - loss) / (solo - centralised)


def _curve(own: Sequence[RunResult]) -> Curve:
    by_round = [{point.round: point for point in result.evaluations} for result in own]
    common = sorted(set.intersection(*(set(points) for points in by_round)))
    columns = [[points[number] for points in by_round] for number in common]
    run = own[0].scenario["run"]
    step_tokens = run["train"]["batch_size"] * run["data"]["sequence_length"]
    tokens = [mean(point.tokens_per_peer for point in column) for column in columns]
    return Curve(
        tokens=tokens,
        steps=[number / step_tokens for number in tokens],
        megabytes=[mean(point.bytes_out_per_peer for point in column) / 1e6 for column in columns],
        mean=[mean(point.loss for point in column) for column in columns],
        low=[min(point.loss for point in column) for column in columns],
        high=[max(point.loss for point in column) for column in columns],
    )
