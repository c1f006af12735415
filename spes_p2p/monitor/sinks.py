"""Where a watch shows its view: `metrics.jsonl`, the console, and Weights & Biases."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, Protocol, TextIO

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spes_p2p.errors import ConfigError, DataError, SpesError
from spes_p2p.monitor.view import PeerView, RoundSummary, SwarmView, short_id, sync_share
from spes_p2p.presentation import MAX_QUOTE_CHARS, printable
from spes_p2p.swarm.names import slot_ranges
from spes_p2p.swarm.records import Metrics

log = logging.getLogger(__name__)

METRICS_FILE = "metrics.jsonl"
MAX_CONSOLE_PEERS = 40
MAX_WANDB_PEERS = 100
"""Peers with curves of their own in W&B; the swarm's curves include the others."""


class Sink(Protocol):
    """Receives one view after another, and remembers what it has shown."""

    def update(self, view: SwarmView) -> None:
        """Take the newest view."""

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        """Take the held-out loss after round `number`; `view` holds it already."""

    def close(self) -> None:
        """Write what is pending and release all resources. Idempotent."""


class SinkError(SpesError):
    """A sink has failed for good."""


class Sinks:
    """All sinks of a watch as one: a sink that fails is dropped with an error in the log, and the others go on.

    Otherwise a full disk or a failed service would end the monitor, which has the model to save.
    """

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Pass every later call on to a sink."""
        self._sinks.append(sink)

    def update(self, view: SwarmView) -> None:
        self._tell(lambda sink: sink.update(view))

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        self._tell(lambda sink: sink.evaluated(view, number, loss))

    def close(self) -> None:
        self._tell(lambda sink: sink.close())

    def _tell(self, tell: Callable[[Sink], None]) -> None:
        for sink in list(self._sinks):
            try:
                tell(sink)
            except (OSError, SinkError) as error:
                self._sinks.remove(sink)
                log.error("dropping %s: %s; mend that and start again with --resume", type(sink).__name__, error)


# ------------------------------------------------------------------ metrics.jsonl


def _append_event(file: TextIO, kind: str, time: float, fields: Mapping[str, Any]) -> None:
    """Append an event and flush it; a number that is not finite becomes null, since JSON has none."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    file.write(json.dumps({"kind": kind, "time": time, **finite}, allow_nan=False) + "\n")
    file.flush()


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file; a last line that a crash cut short is skipped.

    Raises:
        DataError: the file cannot be read, or a line before the last is no event.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}; name the metrics.jsonl of a monitor") from error
    for number, line in enumerate(lines, start=1):
        if number == len(lines) and not line.endswith("\n"):
            return
        try:
            event = json.loads(line)
            event["kind"], event["time"]
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path}:{number} is no event; delete that line") from error
        yield event


def replay(path: Path, start: SwarmView | None = None) -> tuple[SwarmView, dict[str, Any]]:
    """Return the view at the end of a file, and the fields of its `run` event.

    Args:
        path: A `metrics.jsonl`.
        start: An empty view of the run; by default it is made from the `run` event.

    Raises:
        DataError: the file cannot be read, or has no `run` event.
    """
    facts: dict[str, Any] = {}
    history = _History()
    for number, event in enumerate(read_events(path), start=1):
        try:
            if event["kind"] == "run":
                facts = facts or {key: value for key, value in event.items() if key != "kind"}
                start = start or SwarmView(event["num_slots"], event["total_rounds"], absence_seconds=0.0)
            history.apply(event)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number} is no {event['kind']} event; delete that line") from error
    if start is None:
        raise DataError(f"{path} names no run; it is not the metrics.jsonl of a monitor")
    return history.view(start), facts


class _History:
    """Events collected into one view; an immutable view per event would take quadratic time."""

    def __init__(self) -> None:
        self._now = 0.0
        self._published = 0
        self._members: dict[str, PeerView] = {}
        self._reports: dict[tuple[int, str], Metrics] = {}
        self._held_out: dict[int, float] = {}

    def apply(self, event: Mapping[str, Any]) -> None:
        self._now = event["time"]
        match event["kind"]:
            case "report":
                report = Metrics.model_validate_json(json.dumps({name: event[name] for name in Metrics.model_fields}))
                self._reports[report.round, report.peer_id] = report
            case "membership":
                self._members[event["peer_id"]] = PeerView(
                    event["peer_id"], event["state"], tuple(event["slots"]), round=0, last_seen=event["time"]
                )
            case "round":
                self._published = max(self._published, event["round"])
            case "evaluation":
                self._held_out[event["round"]] = math.nan if event["loss"] is None else event["loss"]

    def view(self, start: SwarmView) -> SwarmView:
        newest = {peer: report for (_, peer), report in sorted(self._reports.items())}
        peers = {
            peer: replace(member, report=newest.get(peer), round=newest[peer].round if peer in newest else 0)
            for peer, member in self._members.items()
        }
        return replace(
            start,
            now=self._now,
            published=self._published,
            peers=peers,
            reports=self._reports,
            held_out=dict(sorted(self._held_out.items())),
        )


class JsonlSink:
    """Appends events to a file and flushes each.

    Args:
        path: The file; an existing one is continued.
        facts: Fields of the `run` event.
        start: The view that the file already holds, as `replay` returns it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], start: SwarmView) -> None:
        self._reports = set(start.reports)
        self._rounds = start.published
        self._evaluations = set(start.held_out)
        self._members = {peer.peer_id: (peer.state, peer.slots) for peer in start.peers.values()}
        try:
            if path.exists():
                _drop_unfinished_line(path)
            self._file = path.open("a", encoding="utf-8")
            _append_event(self._file, "run", start.now, facts)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error

    def update(self, view: SwarmView) -> None:
        for peer in view.peers.values():
            self._write_membership(view, peer)
        for key in sorted(view.reports.keys() - self._reports):
            _append_event(self._file, "report", view.now, view.reports[key].model_dump())
        self._reports |= view.reports.keys()
        for number in sorted(view.rounds):
            if number > self._rounds:
                _append_event(self._file, "round", view.now, _round_fields(view, number))
                self._rounds = number

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        if number not in self._evaluations:
            self._evaluations.add(number)
            fields = {"round": number, "loss": loss, "total_tokens": view.tokens_until(number)}
            _append_event(self._file, "evaluation", view.now, fields)

    def close(self) -> None:
        self._file.close()

    def _write_membership(self, view: SwarmView, peer: PeerView) -> None:
        known = self._members.get(peer.peer_id)
        if known == (peer.state, peer.slots):
            return
        self._members[peer.peer_id] = (peer.state, peer.slots)
        was_here = known is not None and known[0] != "left"
        change = "left" if peer.state == "left" else "changed" if was_here else "joined"
        fields = {"peer_id": peer.peer_id, "change": change, "state": peer.state, "slots": list(peer.slots)}
        _append_event(self._file, "membership", view.now, fields)


def _drop_unfinished_line(path: Path) -> None:
    """Cut a last line without an end off; appending would otherwise glue two events together."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def _round_fields(view: SwarmView, number: int) -> dict[str, Any]:
    fields = asdict(view.rounds[number]) | {"active_peers": len(view.active), "covered_slots": view.num_covered}
    return fields | {"total_tokens": view.tokens_until(number)}


# ------------------------------------------------------------------ the console


class ConsoleSink:
    """Prints the run on a console.

    Args:
        run_id: Shown in the title.
        mode: `live` redraws a table, `plain` prints a line per complete round and per evaluation.
        console: Where to print; by default standard output.
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
        """Print the complete rounds up to `last`; the newest one waits for the reports of its slower members."""
        assert self._view is not None
        for number in sorted(self._view.rounds):
            if self._rounds < number <= last:
                self._rounds = number
                self._print(_round_line(self._view, number))

    def _print(self, line: str) -> None:
        # Soft wrap keeps one line per event, however narrow the terminal or log is.
        self._console.print(Text(line), soft_wrap=True)


def _round_line(view: SwarmView, number: int) -> str:
    summary = view.rounds[number]
    parts = [
        f"round {number}/{view.total_rounds}",
        f"{summary.num_peers} peers",
        f"{summary.tokens_per_second:,.0f} tokens/s",
        f"loss {number_or_dash(summary.loss)}",
        f"coverage {_coverage(view)}",
        *_staleness(summary),
        *(f"{peer.short_id}: {slot_ranges(peer.slots)}" for peer in view.active[:MAX_CONSOLE_PEERS]),
    ]
    return "  ".join(map(printable, parts))


def render(run_id: str, view: SwarmView) -> Group:
    """Return the live display: a line about the swarm above the table of peers."""
    newest = view.newest
    head = [
        f"{run_id}  round {view.round}/{view.total_rounds}",
        f"{len(view.active)} active",
        f"{view.tokens:,} tokens",
        f"{newest.tokens_per_second:,.0f} tokens/s" if newest else "",
        f"loss {number_or_dash(newest.loss)}" if newest else "",
        "held-out {1:.4f} (round {0})".format(*max(view.held_out.items())) if view.held_out else "held-out -",
        f"coverage {_coverage(view)}",
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
    return [peer.short_id, peer.state, str(peer.round), *numbers, seen, slot_ranges(peer.slots)]


def _staleness(summary: RoundSummary) -> list[str]:
    """Return the age of the oldest slot that a peer used, where peers do not fetch every slot in every round."""
    return [f"slots up to {summary.stale_rounds} rounds old"] if summary.stale_rounds else []


def _coverage(view: SwarmView) -> str:
    orphans = f", orphans {slot_ranges(view.orphans[:16])}" if view.orphans and view.active else ""
    return f"{view.num_covered}/{view.num_slots}{orphans}"


# ------------------------------------------------------------------ Weights & Biases


class WandbSink:
    """Logs curves to Weights & Biases, offline unless WANDB_MODE is set: no account is needed.

    Args:
        directory: Where W&B keeps its files.
        project: W&B project.
        name: Name of the W&B run.
        config: The run's settings, shown beside the curves.

    Raises:
        ConfigError: wandb is not installed, or does not start.
    """

    def __init__(self, directory: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb needs the wandb package; run: pip install wandb") from error
        try:
            self._run = wandb.init(
                project=project,
                name=printable(name, MAX_QUOTE_CHARS),
                config=_shown(config),
                dir=str(directory),
                mode=os.environ.get("WANDB_MODE", "offline"),  # type: ignore[arg-type]
                settings=wandb.Settings(console="off", silent=True, x_disable_stats=True, save_code=False),
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(f"W&B does not start: {error}; set WANDB_MODE=offline or drop --wandb") from error
        for pattern in ("swarm/*", "peer/*"):
            self._run.define_metric(pattern, step_metric="round")
        self._reports: set[tuple[int, str]] = set()
        self._curves: set[str] = set()
        self._rounds = 0
        self._is_open = True

    def update(self, view: SwarmView) -> None:
        for key in sorted(view.reports.keys() - self._reports):
            self._log_peer(view, key)
        self._reports |= view.reports.keys()
        for number in sorted(view.rounds):
            if number > self._rounds:
                self._rounds = number
                self._log({"round": number, **_swarm_values(view, number)})

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        self._log({"round": number, "swarm/held_out_loss": loss, "swarm/total_tokens": view.tokens_until(number)})

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._call(self._run.finish)

    def _log(self, values: Mapping[str, float]) -> None:
        self._call(lambda: self._run.log(dict(values)))

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # W&B raises errors of its own, its mailbox and its process: all are fatal to it
            raise SinkError(f"W&B: {error!r}") from error

    def _log_peer(self, view: SwarmView, key: tuple[int, str]) -> None:
        number, peer_id = key
        if peer_id not in self._curves and len(self._curves) >= MAX_WANDB_PEERS:
            return
        self._curves.add(peer_id)
        report, prefix = view.reports[key], f"peer/{short_id(peer_id)}"
        values = {"loss": report.loss, "tokens_per_second": report.tokens_per_second, "tokens": report.tokens}
        known = {f"{prefix}/{name}": value for name, value in values.items() if value is not None}
        self._log({"round": number, **known})


def _shown(value: Any) -> Any:
    """Return settings with every string in them printable."""
    if isinstance(value, Mapping):
        return {printable(key, MAX_QUOTE_CHARS): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return printable(value, MAX_QUOTE_CHARS) if isinstance(value, str) else value  # guard: settings-shown


def _swarm_values(view: SwarmView, number: int) -> dict[str, float]:
    summary = view.rounds[number]
    return {
        "swarm/loss": summary.loss,
        "swarm/tokens_per_second": summary.tokens_per_second,
        "swarm/tokens": summary.tokens,
        "swarm/peers": summary.num_peers,
        "swarm/covered_slots": view.num_covered,
        "swarm/agreement": summary.agreement,
        "swarm/sync_share": summary.sync_share,
    }
