"""What a study found, in numbers: means and spreads over seeds, curves, and how much of each gap was closed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from spes_p2p.study.results import RunResult
from spes_p2p.study.settings import Gap, Study

Results = Mapping[tuple[str, int], RunResult]
"""By variant and seed."""


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
        tokens: Trained per peer, mean over peers and seeds.
        megabytes: Sent per peer, mean over peers and seeds.
        expert_megabytes: Memory of all experts on the peer that needs most.
        memory_megabytes: All planned memory of that peer.
        wall_seconds: Per run, mean over seeds.
        curve: Loss over the run.
    """

    name: str
    title: str
    loss: Spread
    gaps: Mapping[str, Spread]
    tokens: float
    megabytes: float
    expert_megabytes: float
    memory_megabytes: float
    wall_seconds: float
    curve: Curve


def summarise(study: Study, results: Results) -> list[Row]:
    """Return one row for each variant that has finished a run, in the study's order."""
    rows = []
    for variant in study.variants.values():
        own = {seed: results[variant.name, seed] for seed in study.seeds if (variant.name, seed) in results}
        if own:
            gaps = {gap.name: gap_spread(gap, variant.name, results) for gap in study.gaps if variant.name in gap.of}
            found = {name: spread for name, spread in gaps.items() if spread is not None}
            rows.append(_row(variant.name, variant.title, own, found))
    return rows


def _row(name: str, title: str, own: Mapping[int, RunResult], gaps: Mapping[str, Spread]) -> Row:
    peers = [peer for result in own.values() for peer in result.peers]
    return Row(
        name=name,
        title=title,
        loss=Spread({seed: result.loss for seed, result in own.items()}),
        gaps=gaps,
        tokens=mean(result.evaluations[-1].tokens_per_peer for result in own.values()),
        megabytes=mean(peer.bytes_out for peer in peers) / 1e6,
        expert_megabytes=max(peer.expert_bytes for peer in peers) / 1e6,
        memory_megabytes=max(peer.memory_bytes for peer in peers) / 1e6,
        wall_seconds=mean(result.wall_seconds for result in own.values()),
        curve=_curve(list(own.values())),
    )


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
