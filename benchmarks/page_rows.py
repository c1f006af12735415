"""The page's scoreboard beyond the browser: a first run, export, upload, and promises that tests hold."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cluster import ROOT
from benchmarks.passing import passing
from benchmarks.tables import Row
from spes_p2p.monitor.events import METRICS_FILE

Seen = dict[str, Any]
START_SECONDS, ROUND_SECONDS, STOP_SECONDS = 300.0, 240.0, 120.0
NUM_PAIRS = 3
NUM_BYTES = 300_000_000
UNIT = "tests/unit/"
REFUSALS = [
    "test_link.py::test_what_is_no_link_is_refused_in_one_printable_line",
    "test_link.py::test_a_bad_link_on_the_command_line_names_the_remedy",
    "test_controls.py::test_what_does_not_fit_is_one_line_with_the_remedy_and_changes_nothing",
    "test_controls.py::test_a_file_that_does_not_fit_is_one_line_with_the_remedy",
    "test_service.py::test_a_command_that_a_service_could_not_repeat_is_refused",
    "monitor/test_monitor_uploads.py::test_a_place_of_another_form_is_refused_with_what_there_is",
]
VERBS = [
    "test_controls.py::test_a_verb_wakes_a_held_training_at_once",
    "test_controls.py::test_a_duty_cycle_rests_after_a_step_for_its_share",
]


def refused(seen: Seen) -> Iterator[Row]:
    """Yield what the page and the command line refuse."""
    server = f"{UNIT}monitor/test_monitor_page_server.py::test_what_no_page_of_ours_asks_is_refused"
    yield passing("requests that a page refuses, by raw HTTP", "all, 25 or more", [server], seen, 25)
    verbs = [f"{UNIT}monitor/test_monitor_page_verbs.py"]
    yield passing("- a peer's verbs: who may use them, and what they do", "all", verbs, seen)
    what = "bad links, settings, rules, places, in one line with value and remedy, exit 2"
    yield passing(what, "all, 30 or more", [UNIT + test for test in REFUSALS], seen, 30)


def promises(seen: Seen) -> Iterator[Row]:
    """Yield what tests hold of sinks, verbs, pauses and rules."""
    sinks = [f"{UNIT}monitor/test_monitor_curves.py::test_all_four_agree_on_the_last_rounds_loss_to_the_last_digit"]
    yield passing("W&B, TensorBoard, Prometheus and JSONL on the last round's loss", "to the last digit", sinks, seen)
    yield passing("a verb takes effect", "within one step, or 2 s", [UNIT + test for test in VERBS], seen)
    pause = ["tests/swarm/test_peer_controls.py", f"{UNIT}training/test_rounds_paused.py"]
    what = "pause for 3 rounds and resume: rounds and versions that the others lose; rounds until the peer counts again"
    yield passing(what, "0; 0; 2", pause, seen)
    day = [f"{UNIT}test_controls.py::test_a_peer_does_what_the_table_says"]
    yield passing("states by hours, battery and programs", "a table of 20", day, seen, 20)


def upload(seen: Seen) -> Iterator[Row]:
    """Yield what an upload costs that is killed again and again."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    from s3_server import interrupted_upload

    with tempfile.TemporaryDirectory(prefix="upload-") as folder:
        found = interrupted_upload(Path(folder), NUM_BYTES, secrets.randbits(31))
    seen["upload"] = asdict(found)
    share = found.sent_bytes / found.num_bytes
    what = f"upload of {NUM_BYTES / 1e6:.0f} MB killed five times at random, server twice: read back"
    yield Row(what, "equal" if found.is_equal else "DIFFERENT", "equal", found.is_equal)
    yield Row("- bytes sent in all", f"{share:.2f} x in {found.seconds:.0f} s", "1.3 x", share <= 1.3)


def first_run(seen: Seen) -> Iterator[Row]:
    """Yield the time of the first command until its page shows round 1, and what an export costs that run."""
    with tempfile.TemporaryDirectory(prefix="first-") as name:
        home = Path(name)
        output = home / "run"
        environment = {**os.environ, "HOME": name, "PYTHONPATH": str(ROOT)}
        words = [sys.executable, "-m", "spes_p2p", "local", "--output", str(output), "--cache", str(home / "cache")]
        began = time.monotonic()
        with (home / "log").open("wb") as log:
            local = subprocess.Popen(words, cwd=home, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            _wait(local, lambda: 1 in _seconds_of_rounds(output), START_SECONDS)
            seconds = time.monotonic() - began
            seen["first round"] = seconds
            yield Row("first command, environment made, until round 1 shows", f"{seconds:.0f} s", "60 s", seconds <= 60)
            yield from _exports(local, output, home, environment, seen)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(local.pid, signal.SIGTERM)
            local.wait(STOP_SECONDS)


def _exports(
    local: subprocess.Popen[bytes], output: Path, home: Path, environment: dict[str, str], seen: Seen
) -> Iterator[Row]:
    """Export once one whole round has been without an export; compare the next round with that one."""
    times, slower = list[float](), list[float]()
    for pair in range(NUM_PAIRS):
        number = max(_seconds_of_rounds(output)) + 3
        _wait(local, lambda number=number: number - 1 in _seconds_of_rounds(output), ROUND_SECONDS)  # type: ignore[misc]
        began = time.monotonic()
        words = ["export", str(output / "peer-0"), "--output", str(home / f"model-{pair}")]
        command = [sys.executable, "-m", "spes_p2p", *words]
        subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True, timeout=ROUND_SECONDS)
        times.append(time.monotonic() - began)
        _wait(local, lambda number=number: number in _seconds_of_rounds(output), ROUND_SECONDS)  # type: ignore[misc]
        rounds = _seconds_of_rounds(output)
        slower.append(rounds[number] / rounds[number - 1] - 1.0)
    seen["exports"] = {"seconds": times, "slower": slower}
    longest = max(times)
    yield Row("spes export of that run, during a round", f"{longest:.1f} s", "20 s", longest <= 20)
    share = median(slower)
    yield Row("- that round slower by, median of pairs", f"{share:+.1%}", "under 2 %", share < 0.02)


def _seconds_of_rounds(output: Path) -> dict[int, float]:
    path = output / METRICS_FILE
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return {event["round"]: event["seconds"] for event in map(json.loads, lines) if event["kind"] == "round"}


def _wait(local: subprocess.Popen[bytes], condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if local.poll() is not None or time.monotonic() > deadline:
            raise TimeoutError(f"the experiment ended with {local.poll()}, or took longer than {seconds:.0f} s")
        time.sleep(0.2)
