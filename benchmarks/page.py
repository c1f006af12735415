"""The live page's figures, and those of what stands around it: a first run, export, refusals, verbs.

    .venv/bin/python benchmarks/page.py [--only browser viewers ...] [--write] [--pictures]

The parts `browser`, `axe` and `markup` need Chromium.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from benchmarks.cluster import ROOT
from benchmarks.passing import passing
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig, LogLevel
from spes_p2p.monitor.events import METRICS_FILE, EventLog
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, PageState
from spes_p2p.monitor.view import Sample, Snapshot, SwarmView, fold
from spes_p2p.presentation import say
from spes_p2p.swarm.certificate import MemberEntry, genesis
from spes_p2p.swarm.records import Claim, Metrics, Progress

RESULTS, PICTURES = ROOT / "benchmarks/results/page.json", ROOT / "docs/page"
TESTS = "tests/unit/monitor/test_monitor_page"
AXE = f"{TESTS}_browser.py::test_axe_finds_nothing"
MARKUP = f"{TESTS}_browser.py::test_the_page_is_drawn_follows_a_commit_fits_a_phone_and_runs_no_markup"
RUN = {
    "run_id": "demo",
    "config": {"model": {"family": "olmoe", "num_layers": 4, "hidden_size": 128, "num_experts": 16, "top_k": 2}},
}
IS_DRAWN = "window.spesTicks && spesTicks.length > 0"
NUM_VIEWERS, VIEWER_SECONDS, NUM_PAIRS = 50, 20, 15
STEP_SECONDS = 3.0
Seen = dict[str, Any]
START_SECONDS, MAX_ROUND_SECONDS, STOP_SECONDS = 300.0, 240.0, 120.0
NUM_EXPORTS = 3
UNIT = "tests/unit/"
REFUSALS = [
    "test_link.py::test_what_is_no_link_is_refused_in_one_printable_line",
    "test_link.py::test_a_bad_link_on_the_command_line_names_the_remedy",
    "test_controls.py::test_what_does_not_fit_is_one_line_with_the_remedy_and_changes_nothing",
    "test_controls.py::test_a_file_that_does_not_fit_is_one_line_with_the_remedy",
    "monitor/test_monitor_uploads.py::test_a_place_of_another_form_is_refused_with_what_there_is",
]
VERBS = [
    "test_controls.py::test_a_verb_wakes_a_training_that_rests",
    "test_controls.py::test_a_duty_cycle_rests_after_a_step_for_its_share",
]
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ROUND_SECONDS = 30.0
BEGINNING = 1_800_000_000.0


def peer_id(index: int) -> str:
    """Return a valid peer id, another for every index."""
    return "Qm" + "".join(ALPHABET[byte % 58] for byte in hashlib.sha512(f"page {index}".encode()).digest()[:44])


def views(
    num_peers: int, num_slots: int, num_rounds: int, *, total: int, seed: int = 0, began: float = BEGINNING
) -> Iterator[SwarmView]:
    """Yield the view after each round of a swarm in which peers come, go and change their slots.

    Args:
        num_peers: Peers of a full swarm.
        num_slots: Slots; each has two or three holders, some one or none.
        num_rounds: Rounds to yield.
        total: Rounds of the run.
        seed: Seed of all draws.
        began: DHT time at which round 1 begins.
    """
    draw = random.Random(seed)
    each = max(1, round(2.3 * num_slots / num_peers))
    slots = {index: set(draw.sample(range(num_slots), min(each, num_slots))) for index in range(num_peers)}
    view = SwarmView(num_slots, total, absence_seconds=120.0)
    tokens, start = dict.fromkeys(slots, 0), genesis("demo", peer_id(0), "0" * 64, num_slots)
    for number in range(1, num_rounds + 1):
        now = began + ROUND_SECONDS * number
        for index in draw.sample(sorted(slots), min(3, num_peers)):
            free = sorted(set(range(num_slots)) - slots[index])
            if free:
                slots[index].remove(draw.choice(sorted(slots[index])))
                slots[index].add(draw.choice(free))
        here = sorted(slots)[: num_peers - (number // 7) % 2]
        claims, reports, progress = {}, {}, {}
        for index in here:
            me, own = peer_id(index), tuple(sorted(slots[index]))
            speed = 900.0 + 400 * (index % 5) + draw.uniform(-60, 60)
            tokens[index] += int(speed * 20)
            loss = 3.2 + 5.0 * math.exp(-number / 60) + draw.uniform(-0.06, 0.06)
            claims[me] = Claim(peer_id=me, state="active", slots=own, max_slots=128, since=1.0)
            progress[me] = Progress(peer_id=me, round=number, ends_at=now + 20.0)
            reports[me] = Metrics(
                peer_id=me,
                round=number,
                step=10 * number,
                tokens=int(speed * 20),
                total_tokens=tokens[index],
                loss=loss,
                tokens_per_second=speed,
                slots=own[: max(1, len(own) - number % 2)],
                num_members=len(here),
                committed=len(own) + 1,
                dropped=0,
                shared_digest="a" * 16,
                train_seconds=20.0 + draw.uniform(-1, 1),
                matchmaking_seconds=1.2 + draw.uniform(0, 0.6),
                averaging_seconds=3.0 + draw.uniform(0, 0.8),
                exchange_seconds=2.4 + draw.uniform(0, 0.5),
                other_seconds=0.4,
                bytes_in=41_000_000 * number,
                bytes_out=43_000_000 * number,
            )
        members = tuple(MemberEntry(peer_id=peer, tokens=reports[peer].tokens) for peer in sorted(reports))
        body = start.model_copy(update={"round": number, "ends_at": now + 20.0, "members": members})
        view = fold(view, Snapshot(now, claims, progress, reports, {number: body}))
        text = "return the list of names that a module exports\n    for name in names:"
        sample = Sample("def names(module):\n    ", text[: 8 + number], '"""Names of a module."""')
        if number % 5 == 0:
            view = view.evaluated(number, 3.35 + 5.0 * math.exp(-number / 58), (sample,))
        yield view


def moved(view: SwarmView, number: int) -> SwarmView:
    """Return the view a second later, when three peers, others for each number, have claimed another slot."""
    here = {peer: known for peer, known in sorted(view.peers.items()) if known.state == "active"}
    slots, ids = {peer: set(known.slots) for peer, known in here.items()}, list(here)
    for offset in range(3):
        peer = ids[(3 * number + offset) % len(ids)]
        slots[peer] = set(here[peer].slots[1:]) | {(7 * number + offset) % view.num_slots}
    claims = {
        peer: Claim(peer_id=peer, state="active", slots=tuple(sorted(own)), max_slots=128, since=1.0)
        for peer, own in slots.items()
    }
    return fold(view, Snapshot(view.now + 1.0, claims))


class Shown:
    """A page of a made-up swarm, which goes on round by round.

    Args:
        num_peers: Its peers.
        num_slots: Its slots.
        num_rounds: Rounds that the page begins with.
        own: The machine, for a peer's page.
    """

    def __init__(self, num_peers: int, num_slots: int, num_rounds: int, own: Own | None = None) -> None:
        self._own = own
        began = time.time() - ROUND_SECONDS * num_rounds
        self._views = views(num_peers, num_slots, num_rounds + 200, total=num_rounds + 60, began=began)
        seen = [next(self._views) for _ in range(num_rounds)]
        self._log = EventLog(replace(seen[0], reports={}, peers={}, published=0))
        self.view = seen[-1]
        self.page = Page("127.0.0.1", self._state(seen[0]), Path(tempfile.mkdtemp()))
        for view in seen:
            self._take(view)

    def _state(self, view: SwarmView) -> PageState:
        return PageState(view, RUN, self._own)

    def _take(self, view: SwarmView) -> None:
        self.view = view
        for event in self._log.of(view):
            self.page.take(event)
        self.page.show(self._state(view))

    def advance(self) -> None:
        """Show the next round."""
        self._take(next(self._views))

    def move(self, number: int) -> None:
        """Let three peers have claimed another slot, a second later."""
        self.view = moved(self.view, number)
        self.page.show(self._state(self.view))


def in_browser(seen: Seen) -> Iterator[Row]:
    """Yield what the page costs a browser."""
    sys.path.insert(0, str(ROOT / "tests" / "support"))
    found = seen["browser"] = asyncio.run(_in_browser())
    wire = max(each["wire_bytes"] for each in found.values())
    yield Row(
        "bytes received to draw the page, largest of three sizes (64 peers, 300 rounds)",
        f"{wire / 1000:.0f} kB",
        "90 kB",
        wire <= 90_000,
    )
    paint = [each["paint_ms"] for each in found.values()]
    yield Row("first paint, each of three sizes", ", ".join(f"{ms:.0f} ms" for ms in paint), "0.5 s", max(paint) <= 500)
    update = max(each["update_seconds"] for each in found.values())
    yield Row("update after a commit, once its record is read", f"{update:.2f} s", "2 s", update <= 2)
    overflow = found["phone"]["overflow_px"]
    yield Row("sideways overflow at 390 px", f"{overflow} px", "none", overflow <= 0)
    tick, size = found["large"]["tick_ms"], found["large"]["tick_bytes"]
    what = "128 x 64 matrix, script time of an update (three peers change a slot), median"
    yield Row(what, f"{tick:.1f} ms", "5 ms", tick <= 5)
    yield Row("- bytes of an update", f"{size / 1000:.2f} kB", "1.5 kB", size <= 1500)


def viewers(seen: Seen) -> Iterator[Row]:
    """Yield what 50 viewers cost."""
    found = seen["viewers"] = asyncio.run(_viewers())
    share, slower = found["core_share"], found["slower"]
    yield Row("50 viewers, a round a second: share of one core", f"{share:.2%}", "1 %", share <= 0.01)
    yield Row("- training slower by, median of pairs", f"{slower:+.1%}", "under 1 %", slower < 0.01)


def marked_up(seen: Seen) -> Iterator[Row]:
    """Yield what axe-core finds, and what injected markup does."""
    yield passing("axe-core violations, light and dark, wide and phone", "0", [AXE], seen)
    yield passing("injected markup that ran, in every string of a peer", "none", [MARKUP], seen)


async def _in_browser() -> dict[str, Any]:
    from browser import browser

    found: dict[str, Any] = {}
    async with browser(Path(tempfile.mkdtemp())) as open_tab:
        for name, size, width, height in (
            ("wide", (4, 16, 140), 1400, 900),
            ("phone", (4, 16, 140), 390, 844),
            ("large", (64, 128, 300), 1400, 900),
        ):
            shown, tab = Shown(*size), await open_tab()
            await tab.open(shown.page.address, width=width, height=height)
            await tab.wait_for(IS_DRAWN)
            paint = "performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)[0]"
            found[name] = {"paint_ms": await tab.wait_for(paint), "wire_bytes": tab.bytes_received()}
            found[name]["overflow_px"] = await tab.evaluate(
                "document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            began = time.monotonic()
            shown.advance()
            await tab.wait_for(f"'{shown.view.published}' in data.rounds")
            found[name]["update_seconds"] = time.monotonic() - began
            if name == "large":
                found[name] |= await _ticks(tab, shown)
            shown.page.close()
    return found


async def _ticks(tab: Any, shown: Shown) -> dict[str, float]:
    """Return the script time and the bytes of a tick in which three peers change a slot, the matrix open."""
    await tab.evaluate("document.getElementById('matrix-box').open = true")
    await tab.wait_for("matrix.rows.length > 0 && Boolean(matrix.pen)")
    await tab.evaluate("spesTicks.length = 0; 0")
    before = tab.bytes_received()
    for number in range(30):
        shown.move(number)
        await tab.wait_for(f"spesTicks.length > {number}")
    times = await tab.evaluate("spesTicks")
    return {"tick_ms": median(times), "tick_ms_worst": max(times), "tick_bytes": (tab.bytes_received() - before) / 30}


async def _viewers() -> dict[str, Any]:
    """Return the share of a core that 50 viewers cost at one round a second, and how much slower a step becomes."""
    shown = Shown(8, 32, 100)
    port = int(shown.page.address.rstrip("/").rpartition(":")[2])
    code = VIEWERS_CODE.format(port=port, count=NUM_VIEWERS)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    await process.stdout.readline()
    began, spent = time.monotonic(), time.process_time()
    made = 0.0
    for _ in range(VIEWER_SECONDS):
        before = time.thread_time()
        shown.advance()
        made += time.thread_time() - before
        await asyncio.sleep(1.0)
    share = (time.process_time() - spent - made) / (time.monotonic() - began)
    slower = []
    for number in range(NUM_PAIRS):
        paces = {}
        for watched in (True, False) if number % 2 else (False, True):
            paces[watched] = await asyncio.to_thread(_pace, shown if watched else None)
        slower.append(paces[True] / paces[False] - 1.0)
    process.terminate()
    await process.wait()
    shown.page.close()
    return {"core_share": share, "slower": median(slower), "slower_all": slower}


VIEWERS_CODE = """
import asyncio, itertools
from aiohttp import ClientSession, ClientTimeout, TCPConnector
async def view(session, started):
    tag = ""
    for number in itertools.count():
        async with session.get("http://127.0.0.1:{port}/state.json", headers={{"If-None-Match": tag}}) as answer:
            await answer.read()
            tag = answer.headers["ETag"]
        if not number: started.release()
        await asyncio.sleep(2)
async def main():
    async with ClientSession(connector=TCPConnector(limit=0)) as session:
        started = asyncio.Semaphore(0)
        views = [asyncio.create_task(view(session, started)) for _ in range({count})]
        for _ in views: await started.acquire()
        print("all are here", flush=True)
        await asyncio.gather(*views)
asyncio.run(main())
"""


def _pace(shown: Shown | None) -> float:
    """Return the CPU seconds of a training-like step in this thread, while a page is shown a round a second or not."""
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(384, 384, generator=generator)
    steps, deadline, told = 0, time.monotonic() + STEP_SECONDS, 0.0
    while time.monotonic() < deadline:
        if shown is not None and time.monotonic() - told > 1.0:
            told = time.monotonic()
            shown.move(int(told))
        (weight @ weight).tanh_().sum()
        steps += 1
    return STEP_SECONDS / steps


async def take_pictures() -> None:
    """Take the pictures of the four views."""
    from browser import browser

    own = Own(
        peer_id(1),
        uptime_seconds=11520,
        memory_bytes=5_100_000_000,
        sent_bytes=1_240_000_000,
        received_bytes=1_130_000_000,
        reachability="yes; 3 near",
    )
    PICTURES.mkdir(exist_ok=True)
    async with browser(Path(tempfile.mkdtemp())) as open_tab:
        for name, size, machine, width, height, dark in (
            ("monitor", (6, 32, 140), None, 1400, 900, False),
            ("monitor-dark", (64, 128, 140), None, 1400, 900, True),
            ("phone", (6, 32, 140), None, 390, 844, False),
            ("peer", (6, 32, 140), own, 1400, 900, False),
        ):
            shown, tab = Shown(*size, own=machine), await open_tab()
            await tab.open(shown.page.address, width=width, height=height, dark=dark)
            await tab.wait_for(IS_DRAWN)
            if dark:
                await tab.evaluate("document.getElementById('matrix-box').open = true")
                await tab.wait_for("Boolean(matrix.pen)")
            await asyncio.sleep(1.5)
            picture = await tab.picture()
            (PICTURES / f"{name}.png").write_bytes(picture)
            say(f"{name}.png  {len(picture) / 1000:.0f} kB")
            shown.page.close()


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
    sinks = [f"{UNIT}monitor/test_monitor_curves.py::test_all_four_agree_on_the_last_rounds_loss"]
    yield passing("W&B, TensorBoard, Prometheus and JSONL on the last round's loss", "to the last digit", sinks, seen)
    yield passing("a verb takes effect", "within one step, or 2 s", [UNIT + test for test in VERBS], seen)
    pause = ["tests/swarm/test_peer_controls.py", f"{UNIT}training/test_rounds_paused.py"]
    what = "pause for 3 rounds and resume: rounds and versions that the others lose; rounds until the peer counts again"
    yield passing(what, "0; 0; 2", pause, seen)
    day = [f"{UNIT}test_controls.py::test_a_peer_does_what_the_table_says"]
    yield passing("states by hours, battery and programs", "a table of 20", day, seen, 20)


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
    for pair in range(NUM_EXPORTS):
        number = max(_seconds_of_rounds(output)) + 3
        _wait(local, lambda number=number: number - 1 in _seconds_of_rounds(output), MAX_ROUND_SECONDS)  # type: ignore[misc]
        began = time.monotonic()
        words = ["export", str(output / "peer-0"), "--output", str(home / f"model-{pair}")]
        command = [sys.executable, "-m", "spes_p2p", *words]
        subprocess.run(command, cwd=home, env=environment, check=True, capture_output=True, timeout=MAX_ROUND_SECONDS)
        times.append(time.monotonic() - began)
        _wait(local, lambda number=number: number in _seconds_of_rounds(output), MAX_ROUND_SECONDS)  # type: ignore[misc]
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


Part = Literal["first", "browser", "viewers", "markup", "refused", "promises"]
PARTS: dict[str, Callable[[Seen], Iterator[Row]]] = {
    "first": first_run,
    "browser": in_browser,
    "viewers": viewers,
    "markup": marked_up,
    "refused": refused,
    "promises": promises,
}
BOARD = Scoreboard(RESULTS, RESULTS.with_suffix(".md"), "PAGE", PARTS)


class PageConfig(CommandConfig):
    """Measure the live page and what stands around it, and print the figures beside what they had to reach."""

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    write: bool = False
    """Leave what was measured in benchmarks/results/page.json, and in page.md beside it."""
    pictures: bool = False
    """Take the pictures of docs/page anew."""
    log_level: LogLevel = "warning"


def main(config: PageConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    if config.pictures:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        asyncio.run(take_pictures())
    details = (lambda seen: {"seen": seen}) if config.write else None
    return 0 if BOARD.run(config.only, lambda name: {}, details) else 1


if __name__ == "__main__":
    entry_point(PageConfig, main)
