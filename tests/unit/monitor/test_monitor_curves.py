"""W&B, TensorBoard, Prometheus and metrics.jsonl tell the same numbers."""

import json
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from spes_p2p.cli import load_settings
from spes_p2p.commands import monitor
from spes_p2p.config import RunConfig
from spes_p2p.config.commands import MonitorConfig
from spes_p2p.errors import ConfigError
from spes_p2p.monitor.curves import Prometheus, TensorboardSink, WandbSink
from spes_p2p.monitor.events import Event, JsonlSink, read_events
from spes_p2p.monitor.sinks import SinkError, Sinks
from spes_p2p.monitor.view import SwarmView, fold, short_id
from tests.unit.monitor.swarms import (
    NUM_SLOTS,
    TOTAL_ROUNDS,
    claim,
    empty_view,
    peer_id,
    report,
    small_history,
    snapshot,
)

FACTS = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}


@pytest.fixture
def no_account(tmp_path, monkeypatch):
    """A home in which W&B finds no account; return a directory for its runs."""
    pytest.importorskip("wandb")
    home, runs = tmp_path / "home", tmp_path / "runs"
    home.mkdir()
    runs.mkdir()
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("NETRC", str(home / "netrc"))
    for folder in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{folder}_DIR", str(tmp_path / folder.lower()))
    return runs


def wandb_sink(runs: Path) -> WandbSink:
    return WandbSink(runs, project="test", name="run", watch="abc12345", config={"train": {"lr": 0.1}})


def odd_history(last_round: int = 3) -> list[SwarmView]:
    """Two peers whose losses have more digits than single precision."""
    views = [fold(empty_view(), snapshot(1.0, [claim(0, [0, 1]), claim(1, [1, 2])]))]
    for number in range(1, last_round + 1):
        reports = [report(i, number, loss=5 / (number + 1 + i / 7), tokens=1000 + i) for i in range(2)]
        views.append(fold(views[-1], snapshot(1.0 + 5 * number, [claim(0, [0, 1]), claim(1, [1, 2])], reports)))
    return views


def tensorboard_entries(directory: Path) -> Iterator[tuple[int, str, float]]:
    """Yield step, tag and value of each entry, read by the format of TFRecord files."""
    from tensorboardX.proto.event_pb2 import Event as Entry

    for path in sorted(directory.glob("events*")):
        data = path.read_bytes()
        at = 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            entry = Entry.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            for value in entry.summary.value:
                yield entry.step, value.tag, value.simple_value


def wandb_values(log: Path, key: str) -> list[float]:
    """Return all values of a curve in a run's file; W&B's own process writes it, a moment after the run's end."""
    deadline = time.monotonic() + 60.0
    while not (values := wandb_values_now(log.read_bytes(), key)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return values


def wandb_values_now(data: bytes, key: str) -> list[float]:
    """Return all values of a curve, by the format of LevelDB's logs."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, parts, values = 7, b"", []
    while at + 7 <= len(data):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + length > len(data):
            break  # W&B's process is still writing this part
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            record, parts = Record.FromString(parts), b""
            items = record.history.item
            values += [json.loads(i.value_json) for i in items if (i.key or "/".join(i.nested_key)) == key]
    return values


def test_all_four_agree_on_the_last_rounds_loss(tmp_path, no_account):
    pytest.importorskip("tensorboardX")
    texts = Prometheus()

    class Scraped:
        def take(self, event: Event, view: SwarmView) -> None:
            texts.take(event)

        def update(self, view: SwarmView) -> None: ...

        def close(self) -> None: ...

    views = odd_history()
    sinks = Sinks(empty_view())
    sinks.add("metrics", lambda: JsonlSink(tmp_path / "metrics.jsonl", FACTS, 0.0))
    sinks.add("TensorBoard", lambda: TensorboardSink(tmp_path / "tensorboard"))
    sinks.add("W&B", lambda: wandb_sink(no_account))
    sinks.add("Prometheus", Scraped)
    for view in views:
        sinks.update(view.evaluated(view.published, 1 / (3 + view.published)))
    sinks.close()

    expected = views[-1].rounds[3].loss
    assert len(repr(expected)) > 14, "a number that single precision would change"
    told = [event for event in read_events(tmp_path / "metrics.jsonl") if event["kind"] == "round"]
    boards = {(step, tag): value for step, tag, value in tensorboard_entries(tmp_path / "tensorboard")}
    (log,) = no_account.glob("wandb/offline-run-*/*.wandb")
    text = texts.render(views[-1], None).decode()
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    everywhere = {
        "metrics.jsonl": told[-1]["loss"],
        "W&B": wandb_values(log, "swarm/loss")[-1],
        "Prometheus": float(lines["spes_loss"]),
    }
    assert everywhere == dict.fromkeys(everywhere, expected)
    assert boards[3, "swarm/loss"] == np.float32(expected), "TensorBoard's numbers have single precision"
    assert boards[3, "swarm/held_out_loss"] == np.float32(1 / 6) and float(lines["spes_held_out_loss"]) == 1 / 6
    assert lines["spes_round"] == "3.0" and lines["spes_tokens_trained_total"] == "6003.0"
    assert lines['spes_slot_holders{slot="1"}'] == "2.0" and lines['spes_round_seconds{phase="train"}'] == "8.0"


def test_a_restarted_monitor_goes_on_in_the_same_run_of_wandb(tmp_path, no_account):
    views = odd_history()
    for start, shown in ((views[0], views[:3]), (views[2], views)):
        sinks = Sinks(start)
        sinks.add("W&B", lambda: wandb_sink(no_account))
        for view in shown:
            sinks.update(view)
        sinks.close()
    runs = sorted((no_account / "wandb").glob("offline-run-*"))
    # W&B numbers a second folder of one second: offline-run-<date>-<id>-1.
    assert len(runs) == 2 and {run.name.split("-")[3] for run in runs} == {"abc12345"}
    logs = b"".join(log.read_bytes() for run in runs for log in run.glob("*.wandb"))
    for key in ("swarm/loss", "swarm/covered_slots", f"peer/{short_id(peer_id(0))}/loss"):
        assert key.encode() in logs


def test_no_word_of_the_command_line_reaches_wandb(no_account, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["spes", "monitor", "spes:run.eNqSECRET", "--output", "SECRET"])
    sink = wandb_sink(no_account)
    sink.take({"kind": "evaluation", "round": 1, "loss": 2.0, "total_tokens": 3}, empty_view())
    sink.close()
    (log,) = no_account.glob("wandb/offline-run-*/*.wandb")
    assert wandb_values(log, "swarm/held_out_loss") == [2.0]
    files = [file for file in no_account.rglob("*") if file.is_file()]
    assert len(files) > 3 and not any(b"SECRET" in file.read_bytes() for file in files)


@pytest.mark.parametrize("first_flags", [["--resume"], ["--resume", "--tensorboard"]], ids=["without", "with"])
def test_a_monitor_that_resumes_with_tensorboard_shows_the_rounds_before_each_once(tmp_path, monkeypatch, first_flags):
    pytest.importorskip("tensorboardX")
    views = odd_history(4)
    swarm = SimpleNamespace(now=lambda: 1.0)
    run = RunConfig.model_validate({"model": {"num_experts": NUM_SLOTS}, "round": {"total": TOTAL_ROUNDS}})
    manifest = SimpleNamespace(config=run, run_id="run", founder=peer_id(0), software="1", vocab_size=9)

    class Watched:
        """Stands for the swarm: it shows two rounds in each watch."""

        def __init__(self, *arguments: Any, **more: Any) -> None:
            self.update, self.view = arguments[3], arguments[4]

        def run(self) -> monitor.Ending:
            for view in views[self.view.published + 1 : self.view.published + 3]:
                self.update(view.evaluated(view.published, 1.0))
            return monitor.Ending.STOPPED

    monkeypatch.setattr(monitor, "Watch", Watched)
    for flags in (first_flags, ["--resume", "--tensorboard"]):
        words = ["--run-id", "run", "--initial-peers", "x", "--output", str(tmp_path), "--console", "none", *flags]
        settings = load_settings(MonitorConfig, words)
        revisions = SimpleNamespace(swarm=swarm)
        monitor._watch(
            settings, tmp_path, revisions, manifest, None, SimpleNamespace(save=print, evaluated=print), None
        )  # type: ignore[arg-type]
    found = [(step, tag) for step, tag, _ in tensorboard_entries(tmp_path / "tensorboard")]
    assert sorted(step for step, tag in found if tag == "swarm/loss") == [1, 2, 3, 4]
    assert sorted(step for step, tag in found if tag == "swarm/held_out_loss") == [1, 2, 3, 4]


@pytest.mark.parametrize("package", ["wandb", "tensorboardX"])
def test_a_missing_package_is_a_line_with_the_remedy_before_anything_is_joined(tmp_path, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    flags = {"wandb": package == "wandb", "tensorboard": package == "tensorboardX"}
    settings = MonitorConfig(run_id="run", initial_peers=["/ip4/127.0.0.1/tcp/1"], output=tmp_path / "out", **flags)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        monitor.main(settings)
    assert not (tmp_path / "out").exists()


class Lost:
    """Stands for a W&B run whose process has died: its calls raise what no `except` of ours names."""

    def log(self, values: dict) -> None:
        raise RuntimeError("mailbox closed")

    def finish(self) -> None:
        raise RuntimeError("mailbox closed")


def test_whatever_wandb_raises_is_a_failed_sink(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "disabled")
    sink = wandb_sink(tmp_path)
    monkeypatch.setattr(sink, "_run", Lost())
    with pytest.raises(SinkError, match="mailbox closed"):
        sink.take({"kind": "evaluation", "round": 1, "loss": 2.0, "total_tokens": 3}, empty_view())
    with pytest.raises(SinkError, match="mailbox closed"):
        sink.close()


def test_a_full_disk_is_a_failed_tensorboard_and_no_endless_wait(tmp_path):
    pytest.importorskip("tensorboardX")
    sink = TensorboardSink(tmp_path)
    sink.close()
    with Path("/dev/full").open("wb", buffering=0) as full:
        sink._writer._py_recordio_writer._writer = full
        with pytest.raises(OSError, match="No space left"):
            sink.take({"kind": "evaluation", "time": 1.0, "round": 1, "loss": 2.0, "total_tokens": 3}, empty_view())


def test_prometheus_text_before_the_first_round_has_no_loss_and_each_family_its_type():
    text = Prometheus().render(small_history(0)[-1], (5, 6)).decode()
    assert "spes_loss " not in text and "spes_sent_bytes_total 5.0\n" in text
    names = [line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")]
    assert {line.split(" ")[2] for line in text.splitlines() if line.startswith("# TYPE")} == set(names)
    of_all = Prometheus().render(small_history(2)[-1], None).decode()  # a sum over peers falls when one starts again
    assert "# TYPE spes_peers_sent_bytes gauge\nspes_peers_sent_bytes 40.0\n" in of_all and "bytes_total" not in of_all
