"""What a sink was given can be read back, once, also after a crash."""

import io
import json
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from spes_p2p.errors import ConfigError, DataError
from spes_p2p.monitor.curves import curves_of
from spes_p2p.monitor.events import Event, JsonlSink, replay
from spes_p2p.monitor.page.snapshot import PageState, in_words, sections_of
from spes_p2p.monitor.sinks import ConsoleSink, Sink, SinkError, Sinks, render
from spes_p2p.monitor.view import Sample, SwarmView, fold, short_id
from spes_p2p.swarm.names import slot_ranges
from tests.unit.monitor.swarms import (
    NUM_SLOTS,
    TOTAL_ROUNDS,
    body,
    claim,
    empty_view,
    peer_id,
    report,
    small_history,
    snapshot,
)

FACTS = {"run_id": "run", "num_slots": NUM_SLOTS, "total_rounds": TOTAL_ROUNDS}


def shown_by(sink: Sink, start: SwarmView | None = None) -> Sinks:
    """Return a watch's sinks, of which `sink` is the only one."""
    sinks = Sinks(start or empty_view())
    sinks.add("sink", lambda: sink)
    return sinks


def feed(sinks: Sinks, views: list[SwarmView]) -> SwarmView:
    """Show every view twice, as polling does, and an evaluation of each round."""
    view = views[0]
    for new in views:
        view = replace(new, held_out=view.held_out, samples=view.samples)
        sinks.update(view)
        number = view.published
        view = view.evaluated(number, 5.5 - number / 2, (Sample("def ", f"text {number}", "truth"),))
        sinks.update(view)
        sinks.update(view)
    sinks.close()
    return view


def test_a_console_whose_reader_has_gone_does_not_end_the_watch():
    program = """
from spes_p2p.monitor.sinks import ConsoleSink
from tests.unit.monitor.test_monitor_sinks import feed, shown_by, small_history
feed(shown_by(ConsoleSink("run", "plain")), small_history(3))
raise SystemExit(7)
"""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 7, done.stderr


def test_held_out_losses_by_source_are_kept_printed_and_replayed(tmp_path, capsys):
    path, sources = tmp_path / "metrics.jsonl", {"web": 3.5, "math": 2.5}
    sinks = jsonl(path)
    sinks.add("console", lambda: ConsoleSink("run", "plain"))
    view = small_history(2)[-1].evaluated(1, 4.0, sources={"web": math.nan, "math": 4.0}).evaluated(2, 3.0, (), sources)
    sinks.update(view)
    sinks.close()
    found = [event for event in events(path) if event["kind"] == "evaluation"]
    assert [event["sources"] for event in found] == [{"web": None, "math": 4.0}, sources]
    assert "held-out loss 3.0000 (web 3.5000, math 2.5000)" in capsys.readouterr().out
    again, _ = replay(path)
    assert again.held_out_sources[2] == sources and math.isnan(again.held_out_sources[1]["web"])
    assert [curves_of(event).get("swarm/held_out_loss/web") for event in found] == [None, 3.5]


def jsonl(path: Path, start: SwarmView | None = None) -> Sinks:
    return shown_by(JsonlSink(path, FACTS, 0.0), start)


def events(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def kinds(path: Path) -> dict[str, int]:
    names = [event["kind"] for event in events(path)]
    return {name: names.count(name) for name in names}


def test_jsonl_holds_one_line_per_event_and_replays_to_the_same_view(tmp_path):
    path = tmp_path / "metrics.jsonl"
    view = feed(jsonl(path), small_history(3))
    assert kinds(path) == {"run": 1, "membership": 2, "evaluation": 4, "sample": 4, "report": 6, "round": 3}
    again, facts = replay(path)
    assert facts["run_id"] == "run"
    assert again.reports == view.reports and again.held_out == view.held_out and again.samples == view.samples
    assert again.published == view.published and again.rounds == view.rounds and again.coverage == view.coverage


def test_the_tokens_of_rounds_before_a_monitor_came_survive_its_restart(tmp_path, capsys):
    path, chain = tmp_path / "metrics.jsonl", [body(1, {0: 1000}), body(2, {0: 500, 1: 500})]
    sinks = jsonl(path)
    sinks.add("console", lambda: ConsoleSink("run", "plain"))
    sinks.update(fold(empty_view(), snapshot(1.0, [claim(0, [0])], [], None, *chain)))
    sinks.close()
    assert "round 2/20  2 peers  loss -" in capsys.readouterr().out
    told = [in_words(event) for event in events(path)]
    assert told[-2:] == ["round 1: 1 peers, loss -", "round 2: 2 peers, loss -"]
    again, _ = replay(path)
    assert again.tokens == 2000 and again.rounds[2].num_peers == 2 and math.isnan(again.rounds[2].loss)
    assert json.loads(json.dumps(sections_of(PageState(again, FACTS)), allow_nan=False))["figures"]["rounds"] == 0


def test_a_resumed_watch_repeats_no_line(tmp_path):
    path, views = tmp_path / "metrics.jsonl", small_history(3)
    feed(jsonl(path), views[:3])
    start, _ = replay(path, empty_view())
    feed(jsonl(path, start), views)
    assert kinds(path) == {"run": 2, "membership": 2, "evaluation": 4, "sample": 4, "report": 6, "round": 3}


def test_a_line_cut_short_by_a_crash_is_written_anew(tmp_path):
    path, views = tmp_path / "metrics.jsonl", small_history(2)
    feed(jsonl(path), views)
    path.write_bytes(path.read_bytes()[:-9])
    start, _ = replay(path, empty_view())
    assert 2 not in start.held_out
    feed(jsonl(path, start), views)
    assert kinds(path) == {"run": 2, "membership": 2, "evaluation": 3, "sample": 3, "report": 4, "round": 2}


@pytest.mark.parametrize("line", ["nonsense", "[]", '{"kind": "report", "time": 1.0}', '{"kind": "round", "time": 1}'])
def test_a_damaged_line_is_named_with_its_number(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    feed(jsonl(path), small_history(1))
    path.write_text(path.read_text() + line + "\n" + '{"kind": "run", "time": 1.0}\n')
    with pytest.raises(DataError, match=rf"metrics.jsonl:{len(path.read_text().splitlines()) - 1} "):
        replay(path)


def test_a_file_without_a_run_or_without_a_file_is_refused(tmp_path):
    (tmp_path / "empty").write_text("")
    with pytest.raises(DataError, match="names no run"):
        replay(tmp_path / "empty")
    with pytest.raises(DataError, match="cannot read"):
        replay(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot write"):
        JsonlSink(tmp_path / "no" / "such" / "folder", FACTS, 0.0)


def test_a_loss_that_is_not_finite_is_null_in_json_and_nan_again_when_read(tmp_path):
    path, view = tmp_path / "metrics.jsonl", empty_view()
    sinks = jsonl(path)
    sinks.update(view.evaluated(1, math.nan))
    sinks.close()
    assert events(path)[-1]["loss"] is None and math.isnan(replay(path)[0].held_out[1])


def test_joins_leaves_and_changed_claims_are_told_apart(tmp_path):
    path, view = tmp_path / "metrics.jsonl", empty_view()
    sinks = jsonl(path)
    for now, claims in ((1.0, [claim(0, [0])]), (2.0, [claim(0, [0, 1])]), (50.0, []), (60.0, [claim(0, [2])])):
        view = fold(view, snapshot(now, claims))
        sinks.update(view)
    sinks.close()
    changes = [(e["change"], e["slots"]) for e in events(path) if e["kind"] == "membership"]
    assert changes == [("joined", [0]), ("changed", [0, 1]), ("left", [0, 1]), ("joined", [2])]


def plain(width: int = 40) -> tuple[Sinks, io.StringIO]:
    stream = io.StringIO()
    return shown_by(ConsoleSink("run", "auto", Console(file=stream, width=width, markup=False))), stream


def test_a_console_tells_of_old_slots_where_there_are_any():
    sink, stream = plain()
    view = small_history(1)[-1]
    sink.update(view)
    assert "rounds old" not in stream.getvalue()
    sink.update(fold(view, snapshot(9.0, [claim(0), claim(1)], [report(i, 2, stale_rounds=2) for i in range(2)])))
    assert "slots up to 2 rounds old" in stream.getvalue().splitlines()[-1]


def test_a_console_that_is_no_terminal_gets_one_line_per_round_and_per_evaluation_however_narrow():
    sink, stream = plain()
    feed(sink, small_history(3))
    lines = stream.getvalue().splitlines()
    rounds = [line for line in lines if "tokens/s" in line]
    assert len(rounds) == 3 and len(lines) == 7
    assert rounds[2].startswith("round 3/20  2 peers  200 tokens/s  loss 4.3")
    assert "coverage 3/8, orphans 3-7" in rounds[2]
    for index, slots in ((0, "0-1"), (1, "1-2")):
        assert f"{short_id(peer_id(index))}: {slots}" in rounds[2]
    assert [line for line in lines if "held-out" in line] == [
        f"round {number}/20: held-out loss {5.5 - number / 2:.4f}" for number in range(4)
    ]
    assert "\x1b" not in stream.getvalue()


def test_a_rounds_line_waits_for_the_reports_of_all_its_members():
    sink, stream = plain(width=200)
    claims = [claim(index) for index in range(3)]
    first, of_round = [report(index, 1) for index in range(2)], body(1, dict.fromkeys(range(3), 1000))
    view = fold(empty_view(), snapshot(1.0, claims, first, None, of_round))
    assert view.published == 1
    sink.update(view)
    assert not stream.getvalue()
    sink.update(fold(view, snapshot(2.0, claims, [report(2, 1)], None, of_round)))
    assert stream.getvalue().startswith("round 1/20  3 peers")


def test_a_round_whose_last_report_never_comes_is_shown_in_the_end():
    sink, stream = plain(width=200)
    claims = [claim(index) for index in range(3)]
    of_round = body(1, dict.fromkeys(range(3), 1000))
    sink.update(fold(empty_view(), snapshot(1.0, claims, [report(i, 1) for i in range(2)], None, of_round)))
    assert not stream.getvalue()
    sink.close()
    assert stream.getvalue().startswith("round 1/20  3 peers")


def test_a_resumed_console_repeats_no_round():
    stream = io.StringIO()
    sinks = shown_by(ConsoleSink("run", "plain", Console(file=stream)), small_history(2)[-1])
    sinks.update(small_history(3)[-1])
    assert [line[:7] for line in stream.getvalue().splitlines()] == ["round 3"]


def test_the_live_table_has_a_dash_for_a_loss_that_nobody_has():
    taken = snapshot(1.0, [claim(0)], [report(0, 1, tokens=0, loss=None)])
    stream = io.StringIO()
    Console(file=stream, width=200).print(render("run", fold(empty_view(), taken)))
    (line,) = [line for line in stream.getvalue().splitlines() if short_id(peer_id(0)) in line]
    assert " - " in line


def test_the_live_table_draws_markup_and_control_characters_as_text():
    hostile = "[bold red]\x1b]0;owned\x07[/]"
    view = small_history(1)[-1]
    peer = replace(view.peers[peer_id(0)], peer_id="Qm" + hostile)
    view = replace(view, peers={peer.peer_id: peer})
    stream = io.StringIO()
    Console(file=stream, width=200).print(render(hostile, view))
    text = stream.getvalue()
    assert "[bold red]" in text and "\x1b" not in text and "\x07" not in text


@pytest.mark.parametrize("variable", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {}], ids=["dumb", "no-color", "terminal"])
def test_a_terminal_that_takes_no_escape_codes_gets_plain_lines(variable, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variable.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    feed(shown_by(ConsoleSink("run", "auto", Console(file=stream, width=99, force_terminal=True))), small_history(3))
    assert ("\x1b" in stream.getvalue()) != bool(variable)
    assert stream.getvalue().startswith("round 0/20: held-out") == bool(variable)


def test_a_live_console_draws_and_stops():
    stream = io.StringIO()
    sink = ConsoleSink("run", "live", Console(file=stream, width=120, force_terminal=True))
    feed(shown_by(sink), small_history(2))
    sink.close()
    assert short_id(peer_id(1)) in stream.getvalue()


@pytest.mark.parametrize(("slots", "text"), [((), "none"), ((3,), "3"), ((0, 1, 2, 7, 9, 10), "0-2,7,9-10")])
def test_slots_are_written_as_ranges(slots, text):
    assert slot_ranges(slots) == text


def test_reports_of_a_late_peer_are_written_when_they_come(tmp_path):
    path, view = tmp_path / "metrics.jsonl", small_history(2)[-1]
    sinks = jsonl(path)
    sinks.update(view)
    sinks.update(fold(view, snapshot(30.0, [claim(i) for i in range(3)], [report(2, 1)])))
    sinks.close()
    assert kinds(path)["report"] == 5 and kinds(path)["round"] == 2


class Faulty:
    """A sink that fails while `is_broken`; a part of its file cannot be taken back."""

    def __init__(self, taken: list[Event], breaks_after: int) -> None:
        self.taken = taken
        self.breaks_after = breaks_after
        self.is_closed = False

    def take(self, event: Event, view: SwarmView) -> None:
        if len(self.taken) == self.breaks_after:
            raise SinkError("the service is gone")
        self.taken.append(event)

    def update(self, view: SwarmView) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def test_a_sink_that_fails_is_dropped_with_one_warning_and_takes_all_it_missed_when_it_is_back(tmp_path, caplog):
    caplog.set_level("INFO")
    taken: list[Event] = []
    made: list[Faulty] = []
    times = iter((5, 5, 999))

    def open_again() -> Faulty:
        made.append(Faulty(taken, next(times)))
        return made[-1]

    sinks = Sinks(empty_view(), retry_seconds=0.0)
    sinks.add("the service", open_again)
    sinks.add("metrics.jsonl", lambda: JsonlSink(tmp_path / "metrics.jsonl", FACTS, 0.0))
    feed(sinks, small_history(3))
    expected = [event for event in events(tmp_path / "metrics.jsonl") if event["kind"] != "run"]
    assert json.loads(json.dumps(taken)) == expected, "each event once, in order"
    assert len(made) == 3 and made[0].is_closed and made[1].is_closed
    told = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert told == ["dropping the service: the service is gone; trying again every 0 s"] * 2
    assert [record.message for record in caplog.records if record.levelno == logging.INFO] == [
        "the service goes on"
    ] * 2


def test_several_replies_of_a_round_are_events_of_their_own_and_come_back(tmp_path):
    path, replies = tmp_path / "metrics.jsonl", tuple(Sample(f"{n}? ", f"reply {n}", "yes") for n in range(3))
    view = empty_view().evaluated(0, 5.0, replies)
    sinks = jsonl(path)
    sinks.update(view)
    sinks.update(view)
    sinks.close()
    assert [event["text"] for event in events(path) if event["kind"] == "sample"] == ["reply 0", "reply 1", "reply 2"]
    assert replay(path)[0].samples == {0: replies}
    shown = sections_of(PageState(view, FACTS))["samples"]
    assert shown["prompt.2"] == "2? " and shown["0"] == "reply 0" and shown["0.1"] == "reply 1"


def test_a_sink_that_does_not_open_again_is_asked_for_quietly_and_named_in_the_end(caplog):
    sinks, opened = Sinks(empty_view(), retry_seconds=0.0), []

    def open_once() -> Faulty:
        opened.append(True)
        if len(opened) > 1:
            raise ConfigError("no such service")
        return Faulty([], 0)

    sinks.add("the service", open_once)
    feed(sinks, small_history(3))
    assert len(opened) > 3
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert caplog.records[1].message == "the service lacks the last 19 events of this watch"


def test_a_full_disk_ends_no_watch_and_leaves_no_half_event(tmp_path, caplog):
    """/dev/full stands for the disk: every write there says that there is no space left."""
    path, views = tmp_path / "metrics.jsonl", small_history(3)
    with Path("/dev/full").open("wb", buffering=0) as full:
        broken = JsonlSink(path, FACTS, 0.0)
        broken.close()
        broken._file = full
        opened = iter((broken,))
        sinks = Sinks(empty_view(), retry_seconds=0.0)
        sinks.add("metrics.jsonl", lambda: next(opened, None) or JsonlSink(path, FACTS, 0.0))
        feed(sinks, views)
    assert "No space left" in caplog.text
    assert kinds(path) == {"run": 2, "membership": 2, "evaluation": 4, "sample": 4, "report": 6, "round": 3}
