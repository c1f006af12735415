"""What a swarm's `metrics.jsonl` says about its pace and about where its time went.

    .venv/bin/python -m benchmarks.accounts runs/local

Counted are the complete rounds from the second to the last. A report has durations, not times, and the first round's
contain the peer's start-up (starting the process, meeting the others, calibrating), which is no part of a round.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from spes_p2p.errors import DataError
from spes_p2p.monitor.events import METRICS_FILE, read_events, replay
from spes_p2p.monitor.view import PHASES, SwarmView, phase_seconds, wall_seconds
from spes_p2p.presentation import say
from spes_p2p.swarm.records import Metrics


@dataclass(frozen=True)
class Account:
    """A swarm's pace over its counted rounds.

    Attributes:
        rounds: First and last round counted.
        peers: Peers that reported all of them: the ones whose time is counted.
        tokens: Trained by all peers in these rounds and committed.
        lost_tokens: Trained, but not committed; no part of `tokens`.
        wall_seconds: From the first counted round's start to the last one's end: the sum of a peer's rounds, each
            being training, matchmaking, averaging, exchange and the rest; of the peer with the largest sum.
        shares: By phase, its seconds over all seconds of the counted peers.
    """

    rounds: tuple[int, int]
    peers: int
    tokens: int
    lost_tokens: int
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
    seconds = sum(map(wall_seconds, (report for own in whole for report in own)))
    return Account(
        rounds=(first, last),
        peers=len(whole),
        tokens=sum(report.tokens for report in counted if report.committed),
        lost_tokens=sum(report.tokens for report in counted if not report.committed),
        wall_seconds=max(sum(map(wall_seconds, own)) for own in whole),
        shares={
            phase: sum(phase_seconds(report)[phase] for own in whole for report in own) / seconds for phase in PHASES
        },
    )


def observed_seconds(path: Path, rounds: tuple[int, int]) -> float | None:
    """Return the same wall time by the monitor's clock, independent of what peers say about themselves.

    From the first sight of a peer's report of the round before the first counted one to that of the last one; the
    longest of all peers. Each end is off by the monitor's polling interval at most, usually a second. None if no peer
    was seen at both ends.
    """
    seen: dict[str, dict[int, float]] = {}
    for event in read_events(path):
        if event["kind"] == "report":
            seen.setdefault(event["peer_id"], {}).setdefault(event["round"], event["time"])
    before, last = rounds[0] - 1, rounds[1]
    spans = [times[last] - times[before] for times in seen.values() if before in times and last in times]
    return max(spans, default=None)


def local_steps(view: SwarmView, tokens_per_step: int) -> list[int]:
    """Return the mean over peers of the local steps made in each complete round, the first included.

    Raises:
        DataError: a round is missing.
    """
    if missing := sorted(set(range(1, view.published + 1)) - set(view.rounds)):
        raise DataError(f"no peer's report of round {missing[0]} was seen; use a run that was watched throughout")
    return [round(fmean(_tokens_of(view, number)) / tokens_per_step) for number in sorted(view.rounds)]


def _tokens_of(view: SwarmView, number: int) -> Iterable[int]:
    return [report.tokens for (known, _), report in view.reports.items() if known == number]


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        view, _ = replay(folder / METRICS_FILE)
        say(f"{folder}: wall time not training {account(view).not_training:.1%}")
