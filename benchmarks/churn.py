"""What it costs a swarm that its peers come and go: rounds, and the model's loss at equal tokens.

    .venv/bin/python benchmarks/churn.py [--write]

The figures are those that `spes_p2p simulate configs/churn.yaml --output benchmarks/results/churn` has left.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean

from benchmarks.records import say_rows
from benchmarks.tables import HEAD, Row, fill, markdown_table
from spes_p2p.cli import entry_point
from spes_p2p.commands.simulate import Spread
from spes_p2p.config import CommandConfig
from spes_p2p.sim.scenario import Scenario
from spes_p2p.sim.sweep import Point, RunResult, load_sweep, stored_runs

SWEEP, RESULTS = Path("configs/churn.yaml"), Path("benchmarks/results/churn")
PAGE = Path("docs/membership.md")
UNDISTURBED, CHURN = "undisturbed", "churn"
MIN_REPLACED, MIN_COMMITTED, MAX_WORSE = 30.0, 95.0, 1.0
"""Per cent."""
PERIOD_SECONDS = 600.0


class ChurnBenchmarkConfig(CommandConfig):
    """What it costs that peers come and go."""

    study: Path = SWEEP
    """The sweep of churn."""
    results: Path = RESULTS
    """Its output."""
    write: bool = False
    """Put the table into docs/membership.md."""


def main(config: ChurnBenchmarkConfig) -> int:
    """Print the rows; return 1 if a goal was missed."""
    rows = say_rows(churn_rows(config.study, config.results))
    if config.write:
        fill(PAGE, "CHURN", markdown_table(HEAD, [row.cells for row in rows]))
    return 0 if all(row.is_reached is not False for row in rows) else 1


def churn_rows(path: Path = SWEEP, results: Path = RESULTS) -> Iterator[Row]:
    """Yield how many rounds were committed under churn, and by how much the loss is worse; nothing without results."""
    runs = stored_runs(load_sweep(path), results)
    churned = {seed: run for (variant, seed), run in runs.items() if variant == CHURN}
    if not churned:
        return
    replaced = mean(map(replaced_share, churned.values()))
    what = f"peers replaced in 10 minutes, mean of {len(churned)} seeds"
    yield Row(what, f"{replaced:.1f} %", f"{MIN_REPLACED:g} %", replaced >= MIN_REPLACED)
    peers = [peer for run in churned.values() for peer in run.peers]
    begun = sum(peer.begun_rounds or 0 for peer in peers)
    committed = sum(peer.committed_rounds or 0 for peer in peers)
    share = 100 * committed / begun
    what = "rounds committed while 30 % of peers are replaced every 10 minutes"
    figure = f"{share:.1f} % ({committed} of {begun} that peers began)"
    yield Row(what, figure, f">= {MIN_COMMITTED:g} %", share >= MIN_COMMITTED)
    yield from _loss_rows(runs)


def _loss_rows(runs: Mapping[tuple[str, int], RunResult]) -> Iterator[Row]:
    seeds = sorted(seed for variant, seed in runs if variant == CHURN and (UNDISTURBED, seed) in runs)
    if not seeds:
        return
    pairs = {seed: (runs[UNDISTURBED, seed], runs[CHURN, seed]) for seed in seeds}
    worse = Spread({seed: 100 * (loss_ratio(*pair) - 1) for seed, pair in pairs.items()})
    deviation = f" ± {worse.deviation:.2f}" if worse.deviation is not None else ""
    what = f"held-out loss under that churn against undisturbed, equal tokens, {len(seeds)} seeds"
    yield Row(what, f"{worse.mean:+.2f} %{deviation}", f"+{MAX_WORSE:g} %", worse.mean <= MAX_WORSE)


def replaced_share(run: RunResult) -> float:
    """Return the share of a run's peers, in percent, that was replaced in 10 minutes of virtual time."""
    churn = Scenario.model_validate(run.scenario).churn
    assert churn is not None, "a run of the variant with churn"
    return 100 * (len(run.peers) - churn.present) / churn.present * PERIOD_SECONDS / run.virtual_seconds


def loss_ratio(undisturbed: RunResult, churned: RunResult) -> float:
    """Return the loss of a swarm with churn over that of one without, at as many tokens as both have learned from.

    Those tokens are in committed rounds; what the dead had trained, and what was dropped, counts on neither side. Each
    round of the two has another number of them, and the longer run is taken back to where it had as many as the other's
    whole: its learning rate was a little higher there, which speaks for neither of two runs that are nearly as long.
    """
    tokens = min(_tokens(undisturbed.evaluations[-1]), _tokens(churned.evaluations[-1]))
    return loss_at(churned.evaluations, tokens) / loss_at(undisturbed.evaluations, tokens)


def loss_at(evaluations: Sequence[Point], tokens: int) -> float:
    """Return the loss after a number of committed tokens, interpolated between the evaluations before and after."""
    for before, after in pairwise(evaluations):
        if _tokens(before) <= tokens <= _tokens(after):
            share = (tokens - _tokens(before)) / max(_tokens(after) - _tokens(before), 1)
            return before.loss + share * (after.loss - before.loss)
    return evaluations[-1].loss


def _tokens(point: Point) -> int:
    assert point.committed_tokens is not None, "the sweep is younger than what counts them"
    return point.committed_tokens


if __name__ == "__main__":
    entry_point(ChurnBenchmarkConfig, main)
