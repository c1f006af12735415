"""A swarm's pace, and the phases that its time went into, by its `metrics.jsonl`.

    .venv/bin/python -m benchmarks.accounts runs/local

The complete rounds from the second to the last count. The first one contains each peer's start-up.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spes_p2p.errors import DataError
from spes_p2p.monitor.events import METRICS_FILE, replay
from spes_p2p.monitor.view import PHASES, SwarmView, phase_seconds, wall_seconds
from spes_p2p.presentation import say
from spes_p2p.swarm.records import Metrics


@dataclass(frozen=True)
class Account:
    """A swarm's pace over its counted rounds.

    Attributes:
        rounds: First and last round counted.
        tokens: Tokens that all peers trained and committed in these rounds.
        wall_seconds: The longest sum of a peer's rounds, of the peers that reported all of them.
        shares: By phase, its share of these peers' time.
    """

    rounds: tuple[int, int]
    tokens: int
    wall_seconds: float
    shares: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Summed training throughput, synchronisation included."""
        return self.tokens / self.wall_seconds

    @property
    def not_training(self) -> float:
        """Share of the wall time that was not spent training."""
        return 1.0 - self.shares["train"]


def account(view: SwarmView) -> Account:
    """Return the account of a run.

    Raises:
        DataError: fewer than two complete rounds, or no peer reported all of them.
    """
    first, last = min(view.rounds, default=0) + 1, view.published
    if len(view.rounds) < 2 or first > last:
        raise DataError(f"the run has {len(view.rounds)} complete rounds, and the first is not counted; run more")
    counted = [report for (number, _), report in view.reports.items() if first <= number <= last]
    by_peer: dict[str, list[Metrics]] = {}
    for report in counted:
        by_peer.setdefault(report.peer_id, []).append(report)
    whole = [own for own in by_peer.values() if len(own) == last - first + 1]
    if not whole:
        raise DataError(f"no peer reported all of rounds {first} to {last}; use a run that was not interrupted")
    phases = [phase_seconds(report) for own in whole for report in own]
    seconds = sum(wall_seconds(report) for own in whole for report in own)
    return Account(
        rounds=(first, last),
        tokens=sum(report.tokens for report in counted if report.committed),
        wall_seconds=max(sum(map(wall_seconds, own)) for own in whole),
        shares={phase: sum(each[phase] for each in phases) / seconds for phase in PHASES},
    )


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        say(f"{folder}: wall time not training {account(replay(folder / METRICS_FILE)[0]).not_training:.1%}")
