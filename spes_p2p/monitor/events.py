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
    """Turns the views after `start` into events, each of them once.

    A round's event waits for the reports of all its members, or for the next round: so each sink gets the same numbers.
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
    """Appends events to a new or an existing file, each whole or not at all; first a `run` event with the facts.

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
    """Return the view at the end of a `metrics.jsonl`, and the fields of its first `run` event.

    `start` is an empty view of the run; by default it is made from the `run` event.

    Raises:
        DataError: the file cannot be read, or has no `run` event.
    """
    facts: dict[str, Any] = {}
    past: dict[str, Any] = {
        name: {} for name in ("peers", "reports", "rounds", "held_out", "held_out_sources", "samples")
    }
    for number, event in enumerate(read_events(path), start=1):
        try:
            if event["kind"] == "run":
                facts = facts or {key: value for key, value in event.items() if key != "kind"}
                start = start or SwarmView(event["num_slots"], event["total_rounds"], absence_seconds=0.0)
            _collect(event, past)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path}:{number} is no {event['kind']} event; delete that line") from error
    if start is None:
        raise DataError(f"{path} names no run; it is not the metrics.jsonl of a monitor")
    for (_, peer), report in sorted(past["reports"].items()):
        if peer in past["peers"]:
            past["peers"][peer] = replace(past["peers"][peer], report=report, round=report.round)
    for name in ("rounds", "held_out"):
        past[name] = dict(sorted(past[name].items()))
    return replace(start, published=max(past["rounds"], default=0), **past), facts


def _collect(event: Event, past: dict[str, Any]) -> None:
    """Add an event to the fields of a view; an immutable view for each event would take quadratic time."""
    past["now"], number = event["time"], event.get("round")
    match event["kind"]:
        case "report":
            report = Metrics.model_validate_json(json.dumps({name: event[name] for name in Metrics.model_fields}))
            past["reports"][report.round, report.peer_id] = report
        case "membership":
            past["peers"][event["peer_id"]] = PeerView(
                event["peer_id"], event["state"], tuple(event["slots"]), round=0, last_seen=event["time"]
            )
        case "round":
            past["rounds"][number] = RoundSummary(
                **{name: _or_nan(event[name]) for name in RoundSummary.__dataclass_fields__}
            )
        case "amendment":
            past["total_rounds"] = int(event["total_rounds"])
        case "evaluation":
            past["held_out"][event["round"]] = _or_nan(event["loss"])
            if sources := event.get("sources"):
                past["held_out_sources"][number] = {str(name): _or_nan(loss) for name, loss in sources.items()}
        case "sample":
            sample = Sample(*(str(event[name]) for name in Sample._fields))
            past["samples"][event["round"]] = (*past["samples"].get(number, ()), sample)


def _or_nan(value: Any) -> Any:
    return math.nan if value is None else value
