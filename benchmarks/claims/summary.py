"""Figures of many simulated swarms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.claims.checker import Report

CAUSES = {"death": "a death", "leave": "a leave", "partition": "a partition", "change": "a start or an exchange"}


@dataclass
class Summary:
    """Reports of many swarms, added up.

    Attributes:
        seeds: Number of swarms.
        faulty: Violations by seed.
        total: Everything else, added up.
    """

    seeds: int = 0
    faulty: dict[int, list[str]] = field(default_factory=dict)
    total: Report = field(default_factory=Report)

    def add(self, seed: int, report: Report) -> None:
        """Add one swarm's report."""
        self.seeds += 1
        if report.violations:
            self.faulty[seed] = report.violations
        for cause, seconds in report.orphaned_seconds.items():
            self.total.orphaned_seconds.setdefault(cause, []).extend(seconds)
        for name in ("adoptions", "peer_seconds"):
            setattr(self.total, name, getattr(self.total, name) + getattr(report, name))

    def figures(self) -> dict[str, Any]:
        """Return everything to keep."""
        waits = self.total.orphaned_seconds
        return {
            "seeds": self.seeds,
            "faulty": self.faulty,
            "orphaned_seconds": {cause: quantiles(waits[cause]) for cause in CAUSES if waits.get(cause)},
            "peer_hours": self.total.peer_seconds / 3600,
            "changes_per_peer_hour": self.changes_per_peer_hour,
        }

    @property
    def changes_per_peer_hour(self) -> float:
        """Slots that changed hands, per hour of one peer."""
        return 3600 * self.total.adoptions / max(self.total.peer_seconds, 1.0)

    def markdown(self, peers: str) -> str:
        """Return a section of the report."""
        rows = [f"## {peers} peers", "", f"Swarms: {self.seeds}, of which **{len(self.faulty)}** violated anything"]
        if self.faulty:
            rows[-1] += f" (seeds {', '.join(map(str, self.faulty))})"
        total = self.total
        rows += [
            f"in {total.peer_seconds / 3600:.0f} peer-hours. "
            f"{self.changes_per_peer_hour:.1f} slots were adopted per peer-hour.",
            "",
            "| a slot without a holder after | cases | covered again after, median | p99 | longest |",
            "| --- | ---: | ---: | ---: | ---: |",
        ]
        for cause, words in CAUSES.items():
            if total.orphaned_seconds.get(cause):
                figures = quantiles(total.orphaned_seconds[cause])
                seconds = " | ".join(f"{figures[key]:.1f} s" for key in ("p50", "p99", "max"))
                rows.append(f"| {words} | {figures['cases']} | {seconds} |")
        return "\n".join(rows)


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return number, median, 99th percentile and maximum."""
    ordered = sorted(seconds)
    at = {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for name, share in (("p50", 0.5), ("p99", 0.99))
    }
    return {"cases": len(ordered), **at, "max": ordered[-1]}
