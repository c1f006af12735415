"""Curves of a run in other people's programs: Weights & Biases, TensorBoard, Prometheus. All show the same events."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from spes_p2p.errors import ConfigError
from spes_p2p.monitor.events import Event, Sink
from spes_p2p.monitor.sinks import SinkError
from spes_p2p.monitor.view import SwarmView, short_id
from spes_p2p.presentation import MAX_QUOTE_CHARS, printable

MAX_CURVES = 100
"""Peers with curves of their own; the swarm's curves include the others."""
ROUND_CURVES = ("loss", "tokens_per_second", "tokens", "total_tokens", "covered_slots", "agreement", "sync_share")


def check_packages(*, wandb: bool, tensorboard: bool) -> None:
    """Raise ConfigError if a package of the curves that are asked for is missing."""
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


class _CurveSink(Sink):
    """Passes on the points of the swarm, and of the first `MAX_CURVES` peers."""

    def __init__(self) -> None:
        self._peers: set[str] = set()

    def take(self, event: Event, view: SwarmView) -> None:
        if event["kind"] == "report" and event["peer_id"] not in self._peers:
            if len(self._peers) >= MAX_CURVES:
                return
            self._peers.add(event["peer_id"])
        if points := curves_of(event):
            self._add(event, points)

    def _add(self, event: Event, points: Mapping[str, float]) -> None:
        raise NotImplementedError


class WandbSink(_CurveSink):
    """Logs curves to Weights & Biases, offline unless WANDB_MODE is set: no account is needed.

    `watch` is the id of the W&B run: a monitor that starts again continues the run of its first start. ConfigError if
    W&B does not start.
    """

    def __init__(self, directory: Path, *, project: str, name: str, watch: str, config: Mapping[str, Any]) -> None:
        import wandb

        super().__init__()
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
                    x_disable_meta=True,  # the command line, which may have an invite  # guard: meta=True -> meta=False
                ),
            )
        except (wandb.Error, OSError) as error:
            raise ConfigError(f"W&B does not start: {error}; set WANDB_MODE=offline or drop --wandb") from error
        for pattern in ("swarm/*", "peer/*"):
            self._run.define_metric(pattern, step_metric="round")
        self._is_open = True

    def _add(self, event: Event, points: Mapping[str, float]) -> None:
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
    return printable(value, MAX_QUOTE_CHARS) if isinstance(value, str) else value  # guard: never


class TensorboardSink(_CurveSink):
    """Writes curves for TensorBoard.

    Not by tensorboardX's SummaryWriter, which waits for ever once a write has failed, but by the writer under it. Each
    start adds a file; ConfigError if the directory cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        super().__init__()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            # Without the suffix two starts within a second would write one file.
            self._writer = EventsWriter(str(directory / "events"), filename_suffix=f".{time.time_ns()}")
        except OSError as error:
            raise ConfigError(f"cannot write {directory}: {error.strerror}; choose a writable --output") from error

    def _add(self, event: Event, points: Mapping[str, float]) -> None:
        from tensorboardX.proto.event_pb2 import Event as Entry
        from tensorboardX.summary import scalar

        for name, point in points.items():
            entry = Entry(wall_time=event["time"], step=event["round"], summary=scalar(name, point))
            self._writer.write_event(entry)

    def update(self, view: SwarmView) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """The swarm's figures in Prometheus's text format, for the page's `/metrics`."""

    def __init__(self) -> None:
        self._round: Event = {}
        self._evaluation: Event = {}

    def take(self, event: Event) -> None:
        """Remember the newest round and evaluation."""
        if event["kind"] == "round":
            self._round = event
        elif event["kind"] == "evaluation":
            self._evaluation = event

    def render(self, view: SwarmView, own_bytes: tuple[int, int] | None) -> bytes:
        """Return the text for a view; `own_bytes` are those that this peer has sent and received, None on a monitor."""
        from prometheus_client import generate_latest
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
        from prometheus_client.registry import Collector

        families: list[Metric] = []

        def add(name: str, help: str, values: float | Mapping[str, float | None] | None, label: str = "") -> None:
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            made = family(f"spes_{name}", help, labels=[label])
            for key, value in (values if isinstance(values, Mapping) else {"": values}).items():
                if value is not None:
                    made.add_metric([key] if key else [], value)
            if made.samples:
                families.append(made)

        newest, held_out = self._round, self._evaluation
        add("round", "Newest round with an event.", newest.get("round", 0))
        add("tokens_trained_total", "Tokens of all rounds that this page knows.", newest.get("total_tokens", 0))
        add("loss", "Training loss of the round, nats per token.", newest.get("loss"))
        add("tokens_per_second", "Of the round.", newest.get("tokens_per_second"))
        add("round_seconds", "Median time of the round by phase.", newest.get("phases", {}), "phase")
        add("agreement_ratio", "Share of equal digests.", newest.get("agreement"))
        losses = {"": held_out.get("loss"), **held_out.get("sources", {})}
        add("held_out_loss", "Newest held-out loss, nats per token.", losses, "source")
        add("peers", "Peers that train.", len(view.active))
        holders = {str(slot): holders for slot, holders in enumerate(view.coverage)}
        add("slot_holders", "Peers that hold a slot.", holders, "slot")
        reports = [peer.report for peer in view.peers.values() if peer.report is not None]
        of_all = sum(report.bytes_out for report in reports), sum(report.bytes_in for report in reports)
        for kind, own, total in zip(("sent", "received"), own_bytes or (None, None), of_all, strict=True):
            if own is not None:
                add(f"{kind}_bytes_total", f"Bytes {kind}.", own)
            else:  # a sum over peers falls when one starts again: no counter
                add(f"peers_{kind}_bytes", f"Bytes that all peers have {kind}, each since it started.", total)

        return generate_latest(cast(Collector, SimpleNamespace(collect=lambda: families)))
