"""`metrics.jsonl`: everything a watch saw, one line per event, enough to draw the report again.

Every line is an object with `kind` and `time` (seconds since the epoch):

- `run`: facts of the run, at the start and again after a resume
- `report`: one peer's account of one finished round, as in `records.Metrics`
- `membership`: a peer joined, left, or changed its state or slots
- `round`: what the reports of a round add up to, when a majority has finished it; later reports do not change it
- `evaluation`: held-out loss of the swarm's model after a round
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from monitor.view import PeerView, SwarmView
from spes_p2p.errors import DataError
from spes_p2p.swarm.records import Metrics


def append_line(file, kind: str, time: float, fields: Mapping[str, Any]) -> None:
    """Append an event and hand it to the system; a number that is not finite becomes null, as JSON has none."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in fields.items()}
    file.write(json.dumps({"kind": kind, "time": time, **finite}, allow_nan=False) + "\n")
    file.flush()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a file; a last line cut short by a crash is passed over.

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


def drop_unfinished_line(path: Path) -> None:
    """Cut a last line without an end off, so that appending does not glue two events together."""
    data = path.read_bytes()
    if not data.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(data.rfind(b"\n") + 1)


def replay(path: Path, start: SwarmView | None = None) -> tuple[SwarmView, dict[str, Any]]:
    """Return the view at the end of a file, and the facts of its run.

    Args:
        path: A `metrics.jsonl`.
        start: An empty view of the run; by default of the run that the file names.

    Raises:
        DataError: the file cannot be read, or names no run.
    """
    facts: dict[str, Any] = {}
    history = _History()
    for number, event in enumerate(read_lines(path), start=1):
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
    """Events gathered; a view is immutable, and one per event would take time quadratic in their number."""

    def __init__(self) -> None:
        self._now, self._published = 0.0, 0
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


def round_fields(view: SwarmView, number: int) -> dict[str, Any]:
    """Return a complete round's summary as an event."""
    covered = sum(holders > 0 for holders in view.coverage)
    fields = asdict(view.rounds[number]) | {"active_peers": len(view.active), "covered_slots": covered}
    return fields | {"total_tokens": view.tokens_until(number)}
