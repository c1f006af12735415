"""The swarm on a terminal: a table that refreshes, or one plain line per round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from monitor.view import PeerView, RoundSummary, SwarmView, sync_share

MAX_ROWS = 40


class ConsoleSink:
    """Shows the newest view.

    Args:
        run_id: Shown in the title.
        mode: `live` redraws a table, `plain` prints a line per complete round and per evaluation.
        console: Where to; by default standard output.
        after_round: Rounds up to this one were shown before a resume.
    """

    def __init__(
        self,
        run_id: str,
        mode: Literal["auto", "live", "plain"],
        console: Console | None = None,
        *,
        after_round: int = 0,
    ) -> None:
        self._run_id = run_id
        self._console = console or Console(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        self._rounds = after_round
        self._view: SwarmView | None = None
        if mode == "live" or (mode == "auto" and self._console.is_terminal):
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()

    def update(self, view: SwarmView) -> None:
        if self._live is not None:
            self._live.update(render(self._run_id, view))
            return
        self._view = view
        self._print_rounds(view.published if view.is_reported(view.published) else view.published - 1)

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        if self._live is not None:
            self._live.update(render(self._run_id, view))
        else:
            self._print(f"round {number}/{view.total_rounds}: held-out loss {loss:.4f}")

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        elif self._view is not None:
            self._print_rounds(self._view.published)

    def _print_rounds(self, last: int) -> None:
        """Print the complete rounds up to `last`; the newest waits for the slower of its members' reports."""
        assert self._view is not None
        for number in sorted(self._view.rounds):
            if self._rounds < number <= last:
                self._rounds = number
                self._print(round_line(self._view, number))

    def _print(self, line: str) -> None:
        # One line is one line, however narrow the terminal or log is.
        self._console.print(Text(line), soft_wrap=True)


def round_line(view: SwarmView, number: int) -> str:
    """Return a complete round in one line."""
    summary = view.rounds[number]
    parts = [
        f"round {number}/{view.total_rounds}",
        f"{summary.num_peers} peers",
        f"{summary.tokens_per_second:,.0f} tokens/s",
        f"loss {number_or_dash(summary.loss)}",
        f"held-out {_held_out(view)}",
        f"coverage {_coverage(view)}",
        *_stale(summary),
        *(f"{peer.short_id}: {slot_ranges(peer.slots)}" for peer in view.active[:MAX_ROWS]),
    ]
    return "  ".join(map(printable, parts))


def render(run_id: str, view: SwarmView) -> Group:
    """Return the live display: the swarm's line over the table of peers."""
    newest = view.newest
    head = [
        f"{run_id}  round {view.round}/{view.total_rounds}",
        f"{len(view.active)} active",
        f"{view.tokens:,} tokens",
        f"{newest.tokens_per_second:,.0f} tokens/s" if newest else "",
        f"loss {number_or_dash(newest.loss)}" if newest else "",
        f"held-out {_held_out(view)}",
        f"coverage {_coverage(view)}",
        *(_stale(newest) if newest else ()),
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("peer", "state", "round", "loss", "tokens/s", "syncing", "seen", "slots"):
        table.add_column(title, justify="left" if title in ("peer", "state", "slots") else "right", no_wrap=True)
    here = [peer for peer in view.peers.values() if peer.state != "left"]
    for peer in here[:MAX_ROWS]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(view, peer)))
    hidden = len(here) - MAX_ROWS
    rest = [Text(f"and {hidden} more peers")] if hidden > 0 else []
    return Group(Text(printable("  ".join(part for part in head if part))), table, *rest)


def slot_ranges(slots: Sequence[int]) -> str:
    """Return ascending slots in short: `0-3,7`."""
    spans: list[list[int]] = []
    for slot in slots:
        if spans and slot == spans[-1][1] + 1:
            spans[-1][1] = slot
        else:
            spans.append([slot, slot])
    return ",".join(f"{first}-{last}" if last > first else f"{first}" for first, last in spans) or "none"


def number_or_dash(value: float | None, digits: int = 4) -> str:
    """Return a number for people; a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def printable(text: str) -> str:
    """Return text without characters that could steer a terminal."""
    return "".join(character if character.isprintable() else "�" for character in text)


def _cells(view: SwarmView, peer: PeerView) -> list[str]:
    report = peer.report
    numbers = ["-"] * 3
    if report is not None:
        numbers = [number_or_dash(report.loss), f"{report.tokens_per_second:,.0f}", f"{sync_share(report):.0%}"]
    seen = f"{max(0.0, view.now - peer.last_seen):.0f} s"
    return [peer.short_id, peer.state, str(peer.round), *numbers, seen, slot_ranges(peer.slots)]


def _held_out(view: SwarmView) -> str:
    if not view.held_out:
        return "-"
    number, loss = max(view.held_out.items())
    return f"{loss:.4f} (round {number})"


def _stale(summary: RoundSummary) -> list[str]:
    """Return how old others' slots are where a peer does not fetch all of them in every round."""
    return [f"slots up to {summary.stale_rounds} rounds old"] if summary.stale_rounds else []


def _coverage(view: SwarmView) -> str:
    covered = view.num_slots - len(view.orphans)
    orphans = f", orphans {slot_ranges(view.orphans[:16])}" if view.orphans and view.active else ""
    return f"{covered}/{view.num_slots}{orphans}"
