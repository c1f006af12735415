"""Curves of a run in other people's programs: Weights & Biases, TensorBoard, Prometheus. All show a round's event."""

from __future__ import annotations

import importlib.util
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spes_p2p.errors import ConfigError
from spes_p2p.monitor.events import Event, Sink
from spes_p2p.monitor.sinks import SinkError
from spes_p2p.monitor.view import PHASES, SwarmView, short_id
from spes_p2p.presentation import MAX_QUOTE_CHARS, printable

MAX_CURVES = 100
"""Peers with curves of their own; the swarm's curves include the others."""
ROUND_CURVES = ("loss", "tokens_per_second", "tokens", "total_tokens", "covered_slots", "agreement", "sync_share")


def check_packages(*, wandb: bool, tensorboard: bool) -> None:
    """Check that the packages of the curves that are asked for are there.

    Raises:
        ConfigError: one is not installed.
    """
    for is_asked, flag, package in ((wandb, "--wandb", "wandb"), (tensorboard, "--tensorboard", "tensorboardX")):
        if is_asked and importlib.util.find_spec(package) is None:
            raise ConfigError(f"{flag} needs {package}; run: pip install {package}")


def curves_of(event: Event) -> dict[str, float]:
    """Return the points that an event adds to curves over rounds, by name; numbers as the event has them."""
    match event["kind"]:
        case "round":
            points = {f"swarm/{name}": event[name] for name in ROUND_CURVES} | {"swarm/peers": event["num_peers"]}
        case "evaluation":
            points = {"swarm/held_out_loss": event["loss"], "swarm/total_tokens": event["total_tokens"]}
            points |= {f"swarm/held_out_loss/{name}": loss for name, loss in event.get("sources", {}).items()}
        case "report":
            names = "loss", "tokens_per_second", "tokens"
            points = {f"peer/{short_id(event['peer_id'])}/{name}": event[name] for name in names}
        case _:
            return {}
    return {name: value for name, value in points.items() if value is not None}


class _Curves:
    """Keeps to the curves of the swarm and of the first `MAX_CURVES` peers."""

    def __init__(self) -> None:
        self._peers: set[str] = set()

    def points(self, event: Event) -> dict[str, float]:
        if event["kind"] == "report" and event["peer_id"] not in self._peers:
            if len(self._peers) >= MAX_CURVES:
                return {}
            self._peers.add(event["peer_id"])
        return curves_of(event)


class WandbSink(Sink):
    """Logs curves to Weights & Biases, offline unless WANDB_MODE is set: no account is needed.

    Args:
        directory: Where W&B keeps its files.
        project: W&B project.
        name: Name of the W&B run.
        watch: Id of the W&B run: a monitor that starts again goes on in the run of its first start.
        config: The run's settings, shown beside the curves.

    Raises:
        ConfigError: W&B does not start.
    """

    def __init__(self, directory: Path, *, project: str, name: str, watch: str, config: Mapping[str, Any]) -> None:
        import wandb

        mode = os.environ.get("WANDB_MODE", "offline")
        try:
            self._run = wandb.init(
                project=project,
                name=printable(name, MAX_QUOTE_CHARS),
                id=watch,
                resume=None if mode == "offline" else "allow",  # offline, files of one id are synced into one run
                config=_shown(config),
                dir=str(directory),
                mode=mode,  # type: ignore[arg-type]
                settings=wandb.Settings(
                    console="off",
                    silent=True,
                    save_code=False,
                    disable_git=True,
                    x_disable_stats=True,
                    x_disable_meta=True,  # the command line, which may have an invite  # guard: wandb-command-line
                ),
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(f"W&B does not start: {error}; set WANDB_MODE=offline or drop --wandb") from error
        for pattern in ("swarm/*", "peer/*"):
            self._run.define_metric(pattern, step_metric="round")
        self._curves = _Curves()
        self._is_open = True

    def take(self, event: Event, view: SwarmView) -> None:
        if points := self._curves.points(event):
            self._call(lambda: self._run.log({"round": event["round"], **points}))

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._call(self._run.finish)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as error:  # W&B raises errors of its own, its mailbox and its process: all are fatal to it
            raise SinkError(f"W&B: {error!r}") from error


def _shown(value: Any) -> Any:
    """Return settings with every string in them printable."""
    if isinstance(value, Mapping):
        return {printable(key, MAX_QUOTE_CHARS): _shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shown(item) for item in value]
    return printable(value, MAX_QUOTE_CHARS) if isinstance(value, str) else value  # guard: settings-shown


class TensorboardSink(Sink):
    """Writes curves for TensorBoard, in double precision: tensorboardX's own scalars are single.

    Uses tensorboardX's plain writer. Its asynchronous one waits for ever after a failed write.

    Args:
        directory: Log directory; each start adds a file.

    Raises:
        ConfigError: the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Without the suffix two starts within a second would write one file.
            self._writer = EventsWriter(str(directory / "events"), filename_suffix=f".{time.time_ns()}")
        except OSError as error:
            raise ConfigError(f"cannot write {directory}: {error.strerror}; choose a writable --output") from error
        self._curves = _Curves()
        self._is_dirty = True

    def take(self, event: Event, view: SwarmView) -> None:
        from tensorboardX.proto.event_pb2 import Event as Entry
        from tensorboardX.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboardX.proto.tensor_pb2 import TensorProto

        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"))
        values = [
            Summary.Value(tag=name, metadata=kind, tensor=TensorProto(dtype="DT_DOUBLE", double_val=[float(point)]))
            for name, point in self._curves.points(event).items()
        ]
        if values:
            entry = Entry(wall_time=event["time"], step=event["round"], summary=Summary(value=values))
            self._writer.write_event(entry)
            self._is_dirty = True

    def update(self, view: SwarmView) -> None:
        if self._is_dirty:
            self._is_dirty = False
            self._writer.flush()

    def close(self) -> None:
        self._writer.close()


# ------------------------------------------------------------------ Prometheus


class PrometheusText:
    """The swarm's figures in Prometheus's text format, for the page's `/metrics`.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats.
    """

    def __init__(self) -> None:
        self._round: Event = {}
        self._evaluation: Event = {}

    def take(self, event: Event) -> None:
        """Remember the newest round and evaluation."""
        if event["kind"] == "round":
            self._round = event
        elif event["kind"] == "evaluation":
            self._evaluation = event

    def render(self, view: SwarmView, own_bytes: tuple[int, int] | None) -> str:
        """Return the text for a view.

        Args:
            view: The newest view.
            own_bytes: Sent and received by this peer; None on a monitor.
        """
        done, held_out = self._round, self._evaluation
        phases = [(f'{{phase="{phase}"}}', done["phases"][phase]) for phase in PHASES] if done else []
        by_source = {name: loss for name, loss in held_out.get("sources", {}).items() if loss is not None}
        losses = [*_one(held_out.get("loss")), *((f'{{source="{name}"}}', loss) for name, loss in by_source.items())]
        slots = [(f'{{slot="{slot}"}}', holders) for slot, holders in enumerate(view.coverage)]
        return "".join(
            (
                _family("round", "gauge", "Newest round with an event.", [("", done.get("round", 0))]),
                _family(
                    "tokens_trained_total",
                    "counter",
                    "Tokens of all rounds that this page knows.",
                    [("", done.get("total_tokens", 0))],
                ),
                _family("loss", "gauge", "Training loss of the round, nats per token.", _one(done.get("loss"))),
                _family("held_out_loss", "gauge", "Newest held-out loss, nats per token.", losses),
                _family("tokens_per_second", "gauge", "Of the round.", _one(done.get("tokens_per_second"))),
                _family("round_seconds", "gauge", "Median time of the round by phase.", phases),
                _family("agreement_ratio", "gauge", "Share of equal digests.", _one(done.get("agreement"))),
                _family("peers", "gauge", "Peers that train.", [("", len(view.active))]),
                _family("slot_holders", "gauge", "Peers that hold a slot.", slots),
                *_traffic(view, own_bytes),
            )
        )


def _traffic(view: SwarmView, own_bytes: tuple[int, int] | None) -> list[str]:
    """Return this peer's counters, or the sums over all peers, which fall when a peer starts again."""
    kinds = ("sent", "received")
    if own_bytes is not None:
        return [
            _family(f"{kind}_bytes_total", "counter", f"Bytes {kind}.", [("", number)])
            for kind, number in zip(kinds, own_bytes, strict=True)
        ]
    newest = [peer.report for peer in view.peers.values() if peer.report is not None]
    sums = (sum(report.bytes_out for report in newest), sum(report.bytes_in for report in newest))
    help = "Bytes that all peers have {}, each since it started, as they report it."
    return [
        _family(f"peers_{kind}_bytes", "gauge", help.format(kind), [("", number)])
        for kind, number in zip(kinds, sums, strict=True)
    ]


def _one(value: float | None) -> list[tuple[str, float]]:
    return [] if value is None else [("", value)]


def _family(name: str, kind: str, help: str, samples: Sequence[tuple[str, float]]) -> str:
    """Return one metric's lines; a number has all its digits."""
    lines = [f"# HELP spes_{name} {help}", f"# TYPE spes_{name} {kind}"]
    lines += [f"spes_{name}{labels} {'NaN' if math.isnan(value) else repr(value)}" for labels, value in samples]
    return "\n".join(lines) + "\n" if samples else ""
