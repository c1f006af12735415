"""Where a view goes: to `metrics.jsonl` and to Weights & Biases. The console has a module of its own."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from spes_p2p.errors import ConfigError, DataError, SpesError
from spes_p2p.monitor.view import PeerView, SwarmView, short_id
from spes_p2p.swarm.records import Metrics

log = logging.getLogger(__name__)


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


MAX_WANDB_PEERS = 100
"""Peers with curves of their own in W&B; the others show in the swarm's."""


class Sink(Protocol):
    """Takes one view after another; keeps what it needs to tell what is new."""

    def update(self, view: SwarmView) -> None:
        """Take the newest view."""

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        """Take the held-out loss after round `number`; `view` knows it already."""

    def close(self) -> None:
        """Write what is pending and let go. Idempotent."""


class SinkError(SpesError):
    """A sink takes no more."""


class Sinks:
    """A watch's sinks as one: who fails is dropped, loudly, and the others go on.

    A full disk or another's service shall not cost the run its monitor, which takes the model home.
    """

    def __init__(self) -> None:
        self._sinks: list[Sink] = []

    def add(self, sink: Sink) -> None:
        """Show it all that comes from now on."""
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


class JsonlSink:
    """Appends events to a file, each at once.

    Args:
        path: The file; one that exists is continued.
        facts: Fields of the `run` event.
        start: What the file tells already, as `replay` returned it.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: Path, facts: Mapping[str, Any], start: SwarmView) -> None:
        self._reports, self._rounds = set(start.reports), start.published
        self._evaluations = set(start.held_out)
        self._members = {peer.peer_id: (peer.state, peer.slots) for peer in start.peers.values()}
        try:
            if path.exists():
                drop_unfinished_line(path)
            self._file = path.open("a", encoding="utf-8")
            append_line(self._file, "run", start.now, facts)
        except OSError as error:
            raise ConfigError(f"cannot write {path}: {error.strerror}; choose a writable --output") from error

    def update(self, view: SwarmView) -> None:
        for peer in view.peers.values():
            self._write_membership(view, peer.peer_id)
        for key in sorted(view.reports.keys() - self._reports):
            append_line(self._file, "report", view.now, view.reports[key].model_dump())
        self._reports |= view.reports.keys()
        for number in sorted(view.rounds):
            if number > self._rounds:
                append_line(self._file, "round", view.now, round_fields(view, number))
                self._rounds = number

    def evaluated(self, view: SwarmView, number: int, loss: float) -> None:
        if number not in self._evaluations:
            self._evaluations.add(number)
            fields = {"round": number, "loss": loss, "total_tokens": view.tokens_until(number)}
            append_line(self._file, "evaluation", view.now, fields)

    def close(self) -> None:
        self._file.close()

    def _write_membership(self, view: SwarmView, peer_id: str) -> None:
        peer, known = view.peers[peer_id], self._members.get(peer_id)
        if known == (peer.state, peer.slots):
            return
        self._members[peer_id] = (peer.state, peer.slots)
        was_here = known is not None and known[0] != "left"
        change = "left" if peer.state == "left" else "changed" if was_here else "joined"
        fields = {"peer_id": peer_id, "change": change, "state": peer.state, "slots": list(peer.slots)}
        append_line(self._file, "membership", view.now, fields)


class WandbSink:
    """Logs curves to Weights & Biases, offline unless the user set WANDB_MODE: no account is needed.

    Args:
        directory: Where W&B keeps its files.
        project: W&B project.
        name: Name of the W&B run.
        config: The run's settings, shown beside the curves.

    Raises:
        ConfigError: wandb is not installed, or refuses to start.
    """

    def __init__(self, directory: Path, *, project: str, name: str, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError("--wandb needs the wandb package; run: pip install wandb") from error
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                config=dict(config),
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
            self._ask(self._run.finish)

    def _log(self, values: Mapping[str, float]) -> None:
        self._ask(lambda: self._run.log(dict(values)))

    def _ask(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # its own, its mailbox's, its process's: all mean that it is lost
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


def _swarm_values(view: SwarmView, number: int) -> dict[str, float]:
    summary = view.rounds[number]
    return {
        "swarm/loss": summary.loss,
        "swarm/tokens_per_second": summary.tokens_per_second,
        "swarm/tokens": summary.tokens,
        "swarm/peers": summary.num_peers,
        "swarm/covered_slots": sum(holders > 0 for holders in view.coverage),
        "swarm/agreement": summary.agreement,
        "swarm/sync_share": summary.sync_share,
    }
