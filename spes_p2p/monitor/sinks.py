"""Where a watch shows its view: sinks, what becomes of one that fails, and the console."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spes_p2p.errors import SpesError
from spes_p2p.monitor.events import Event, EventLog, Sink
from spes_p2p.monitor.view import PeerView, RoundSummary, SwarmView, short_id, sync_share
from spes_p2p.presentation import printable, takes_escapes
from spes_p2p.swarm.names import slot_ranges

log = logging.getLogger(__name__)

MAX_CONSOLE_PEERS = 40
RETRY_SECONDS = 30.0
MAX_BACKLOG = 100_000
"""Events kept for a sink that has failed; the oldest are lost first."""


class SinkError(SpesError):
    """A sink has failed."""


@dataclass
class _Place:
    """A sink by name, how to open it again, and the events that it has yet to take."""

    name: str
    open: Callable[[], Sink]
    sink: Sink | None
    backlog: deque[Event] = field(default_factory=lambda: deque(maxlen=MAX_BACKLOG))
    retry_at: float = 0.0


class Sinks:
    """All sinks of a watch as one: one that fails is dropped with one warning, and opened again later.

    Otherwise a full disk or a failed service would end the monitor, which has the model to save. What a sink misses
    meanwhile, it takes when it is there again. All sinks know the view `start` already.
    """

    def __init__(self, start: SwarmView, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._log = EventLog(start)
        self._view = start
        self._retry_seconds = retry_seconds
        self._places: list[_Place] = []

    def add(self, name: str, open: Callable[[], Sink], before: Iterable[Event] = ()) -> None:
        """Open a sink and pass earlier events, and every later event and view, on to it; raises what that raises."""
        sink = open()
        for event in before:
            sink.take(event, self._view)
        self._places.append(_Place(name, open, sink))

    def update(self, view: SwarmView, *, is_last: bool = False) -> None:
        """Pass a view and its events on."""
        self._view = view
        events = self._log.of(view, is_last=is_last)
        for place in self._places:
            place.backlog.extend(events)
            if place.sink is not None or time.monotonic() >= place.retry_at:
                self._pass_on(place, view)

    def close(self) -> None:
        """Pass the last round on, though it may lack reports, and close all sinks."""
        self.update(self._view, is_last=True)
        for place in self._places:
            if place.sink is not None:
                try:
                    place.sink.close()
                except (OSError, SinkError) as error:
                    log.warning("closing %s: %s", place.name, error)
            if place.sink is None or place.backlog:
                log.error("%s lacks the last %d events of this watch", place.name, len(place.backlog))

    def _pass_on(self, place: _Place, view: SwarmView) -> None:
        sink = place.sink
        try:
            if sink is None:
                sink = place.sink = place.open()
                log.info("%s goes on", place.name)
            while place.backlog:
                sink.take(place.backlog[0], view)
                place.backlog.popleft()
            sink.update(view)
        except (OSError, SpesError) as error:
            place.retry_at = time.monotonic() + self._retry_seconds
            if sink is None:
                log.debug("%s does not open: %s", place.name, error)
                return
            place.sink = None
            log.warning("dropping %s: %s; trying again every %.0f s", place.name, error, self._retry_seconds)
            with contextlib.suppress(OSError, SinkError):
                sink.close()


# ------------------------------------------------------------------ the console


class _Console(Console):
    """A console whose reader may go: the watch goes on without it."""

    def on_broken_pipe(self) -> None:
        with contextlib.suppress(SystemExit):  # rich would end the process
            super().on_broken_pipe()


class ConsoleSink:
    """Prints the run on a console.

    Mode `live` redraws a table, `plain` prints a line per complete round and per evaluation; `auto` is `live` on a
    terminal.
    """

    def __init__(self, run_id: str, mode: Literal["auto", "live", "plain"], console: Console | None = None) -> None:
        self._run_id = run_id
        self._console = console or _Console(highlight=False, markup=False, emoji=False)
        self._live: Live | None = None
        if mode == "live" or (mode == "auto" and self._console.is_terminal and takes_escapes()):
            self._live = Live(console=self._console, refresh_per_second=2)
            self._live.start()

    def take(self, event: Event, view: SwarmView) -> None:
        if self._live is not None:
            return
        if event["kind"] == "round":
            self._print(_round_line(view, event["round"]))
        elif event["kind"] == "evaluation":
            sources = view.held_out_sources.get(event["round"], {})
            by_source = ", ".join(f"{name} {number_or_dash(loss)}" for name, loss in sources.items())
            line = f"round {event['round']}/{view.total_rounds}: held-out loss {event['loss']:.4f}"
            self._print(f"{line} ({by_source})" if by_source else line)

    def update(self, view: SwarmView) -> None:
        if self._live is not None:
            self._live.update(render(self._run_id, view))

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _print(self, line: str) -> None:
        # Soft wrap keeps one line per event, however narrow the terminal or log is.
        self._console.print(Text(line), soft_wrap=True)


def _round_line(view: SwarmView, number: int) -> str:
    summary = view.rounds[number]
    holders = view.active[:MAX_CONSOLE_PEERS] if view.num_slots else ()
    parts = [
        f"round {number}/{view.total_rounds}",
        f"{summary.num_peers} peers",
        *_speed(summary),
        f"loss {number_or_dash(summary.loss)}",
        *_coverage(view),
        *_staleness(summary),
        *(f"{short_id(peer.peer_id)}: {slot_ranges(peer.slots)}" for peer in holders),
    ]
    return "  ".join(map(printable, parts))


def render(run_id: str, view: SwarmView) -> Group:
    """Return the live display: a line about the swarm above the table of peers."""
    newest = view.newest
    head = [
        f"{run_id}  round {view.published}/{view.total_rounds}",
        f"{len(view.active)} active",
        f"{view.tokens:,} tokens",
        *(_speed(newest) if newest else ()),
        f"loss {number_or_dash(newest.loss)}" if newest else "",
        "held-out {1:.4f} (round {0})".format(*max(view.held_out.items())) if view.held_out else "held-out -",
        *_coverage(view),
        *(_staleness(newest) if newest else ()),
    ]
    table = Table(box=box.SIMPLE_HEAD)
    for title in ("peer", "state", "round", "loss", "tokens/s", "syncing", "seen", "slots"):
        table.add_column(title, justify="left" if title in ("peer", "state", "slots") else "right", no_wrap=True)
    here = [peer for peer in view.peers.values() if peer.state != "left"]
    for peer in here[:MAX_CONSOLE_PEERS]:
        table.add_row(*(Text(printable(cell)) for cell in _cells(view, peer)))
    hidden = len(here) - MAX_CONSOLE_PEERS
    rest = [Text(f"and {hidden} more peers")] if hidden > 0 else []
    return Group(Text(printable("  ".join(part for part in head if part))), table, *rest)


def number_or_dash(value: float | None) -> str:
    """Return a number with four digits; a dash for None or a number that is not finite."""
    return "-" if value is None or not math.isfinite(value) else f"{value:.4f}"


def _cells(view: SwarmView, peer: PeerView) -> list[str]:
    report = peer.report
    numbers = ["-"] * 3
    if report is not None:
        numbers = [number_or_dash(report.loss), f"{report.tokens_per_second:,.0f}", f"{sync_share(report):.0%}"]
    seen = f"{max(0.0, view.now - peer.last_seen):.0f} s"
    return [short_id(peer.peer_id), peer.state, str(peer.round), *numbers, seen, slot_ranges(peer.slots)]


def _speed(summary: RoundSummary) -> list[str]:
    """Return the speed; nothing where no member's report has come."""
    return [f"{summary.tokens_per_second:,.0f} tokens/s"] if summary.seconds else []


def _staleness(summary: RoundSummary) -> list[str]:
    """Return the age of the oldest slot that a peer used, where peers do not fetch every slot in every round."""
    return [f"slots up to {summary.stale_rounds} rounds old"] if summary.stale_rounds else []


def _coverage(view: SwarmView) -> list[str]:
    """Return how many slots have a holder; nothing where the run has none."""
    orphans = f", orphans {slot_ranges(view.orphans[:16])}" if view.orphans and view.active else ""
    return [f"coverage {view.num_covered}/{view.num_slots}{orphans}"] if view.num_slots else []
