"""What happens in a watched run, as events: made from views, each once, kept in `metrics.jsonl`, and read back.

`docs/monitoring.md` documents every kind of event and its fields.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor.view import PeerView, RoundSummary, Sample, SwarmView
from spes_p2p.swarm.records import Metrics

METRICS_FILE = "metrics.jsonl"
Event = Mapping[str, Any]
"""`kind`, `time` (DHT time, Unix seconds) and the kind's fields."""


class EventLog:
    """Turns one view after another into events, each of them once.

    A round's event waits for the reports of all its members, or for the next round: so each sink gets the same numbers.

    Args:
        start: The view whose events are known already.
    """

    def __init__(self, start: SwarmView) -> None:
        self._reports = set(start.reports)
        self._round = start.published
        self._evaluations = set(start.held_out)
        self._samples = set(start.samples)
        self._total_rounds = start.total_rounds
        self._members = {peer.peer_id: (peer.state, peer.slots) for peer in start.peers.values()}

    def of(self, view: SwarmView, *, is_last: bool = False) -> list[Event]:
        """Return what is new in a view; with `is_last` also a round that some members have not reported."""
        events = [self._membership(view, peer) for peer in view.peers.values()]
        if view.total_rounds != self._total_rounds:
            self._total_rounds = view.total_rounds
            events.append(_event("amendment", view, {"total_rounds": view.total_rounds}))
        if new := view.reports.keys() - self._reports:
            self._reports = set(view.reports)
            events += [_event("report", view, view.reports[key].model_dump()) for key in sorted(new)]
        complete = view.published if is_last or view.is_reported(view.published) else view.published - 1
        for number in sorted(view.rounds.keys() - range(self._round + 1)):
            if number <= complete:
                self._round = number
                of_round = asdict(view.rounds[number]) | {"active_peers": len(view.active)}
                of_round |= {"covered_slots": view.num_covered, "total_tokens": view.tokens_until(number)}
                events.append(_event("round", view, of_round))
        for number in sorted(view.samples.keys() - self._samples):
            self._samples.add(number)
            samples = view.samples[number]
            events += [_event("sample", view, {"round": number, **sample._asdict()}) for sample in samples]
        for number in sorted(view.held_out.keys() - self._evaluations):
            self._evaluations.add(number)
            fields: dict[str, Any] = {"round": number, "loss": view.held_out[number]}
            fields["total_tokens"] = view.tokens_until(number)
            if sources := view.held_out_sources.get(number):
                fields["sources"] = {name: loss if math.isfinite(loss) else None for name, loss in sources.items()}
            events.append(_event("evaluation", view, fields))
        return [event for event in events if event is not None]

    def _membership(self, view: SwarmView, peer: PeerView) -> Event | None:
        known = self._members.get(peer.peer_id)
        if known == (peer.state, peer.slots):
            return None
        self._members[peer.peer_id] = (peer.state, peer.slots)
        was_here = known is not None and known[0] != "left"
        change = "left" if peer.state == "left" else "changed" if was_here else "joined"
        fields = {"peer_id": peer.peer_id, "change": change, "state": peer.state, "slots": list(peer.slots)}
        return _event("membership", view, fields)


def _event(kind: str, view: SwarmView, fields: Mapping[str, Any]) -> Event:
    return {"kind": kind, "time": view.now, **fields}


# ------------------------------------------------------------------ the file


class Sink(Protocol):
    """Receives events, each once, and one view after another; by default it does nothing with a view."""

    def take(self, event: Event, view: SwarmView) -> None:
        """Take an event, which `docs/monitoring.md` describes, and the newest view."""

    def update(self, view: SwarmView) -> None:
        """Take the newest view; its events have been taken."""
        return

    def close(self) -> None:
        """Write what is pending and release all resources. Idempotent."""
        return


class JsonlSink(Sink):
    """Appends events to a file, each whole or not at all.

    Args:
        path: The file; an existing one is continued.
        facts: Fields of the `run` event.
        now: DHT time.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], now: float) -> None:
        try:
            if path.exists():
                _drop_unfinished_line(path)
            self._file = path.open("ab", buffering=0)  # a buffer would write a part of an event again after a failure
            self._append({"kind": "run", "time": now, **facts})
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error

    def take(self, event: Event, view: SwarmView) -> None:
        """Append an event."""
        self._append(event)

    def _append(self, event: Event) -> None:
        """Append an event; a number that is not finite becomes null, since JSON has none."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in event.items()}
        line = (json.dumps(finite, allow_nan=False) + "\n").encode()
        if self._file.write(line) != len(line):
            raise OSError("an event was cut short")

    def close(self) -> None:
        self._file.close()


def _drop_unfinished_line(path: Path) -> None:
    """Cut a last line without an end off; appending would otherwise glue two events together."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


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
    """Return the view at the end of a file, and the fields of its first `run` event.

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
        self._rounds: dict[int, RoundSummary] = {}
        self._total_rounds: int | None = None
        self._members: dict[str, PeerView] = {}
        self._reports: dict[tuple[int, str], Metrics] = {}
        self._held_out: dict[int, float] = {}
        self._held_out_sources: dict[int, Mapping[str, float]] = {}
        self._samples: dict[int, tuple[Sample, ...]] = {}

    def apply(self, event: Event) -> None:
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
                stated: dict[str, Any] = {name: event[name] for name in RoundSummary.__dataclass_fields__}
                stated |= {name: math.nan for name, value in stated.items() if value is None}
                self._rounds[event["round"]] = RoundSummary(**stated)
            case "amendment":
                self._total_rounds = int(event["total_rounds"])
            case "evaluation":
                self._held_out[event["round"]] = math.nan if event["loss"] is None else event["loss"]
                if sources := event.get("sources"):
                    known = {str(name): math.nan if loss is None else float(loss) for name, loss in sources.items()}
                    self._held_out_sources[event["round"]] = known
            case "sample":
                sample = Sample(*(str(event[name]) for name in Sample._fields))
                self._samples[event["round"]] = (*self._samples.get(event["round"], ()), sample)

    def view(self, start: SwarmView) -> SwarmView:
        newest = {peer: report for (_, peer), report in sorted(self._reports.items())}
        peers = {
            peer: replace(member, report=newest.get(peer), round=newest[peer].round if peer in newest else 0)
            for peer, member in self._members.items()
        }
        return replace(
            start,
            now=self._now,
            total_rounds=self._total_rounds or start.total_rounds,
            published=max(self._rounds, default=0),
            peers=peers,
            reports=self._reports,
            rounds=dict(sorted(self._rounds.items())),
            held_out=dict(sorted(self._held_out.items())),
            held_out_sources=self._held_out_sources,
            samples=self._samples,
        )
