"""The page in a real Chromium: drawn, kept up to date, legible on a phone, accessible, and deaf to markup."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import segno
from browser import Tab, browser

from benchmarks.page import peer_id, views
from spes_p2p.monitor.events import EventLog, JsonlSink
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, PageState
from spes_p2p.monitor.page.verbs import Verbs
from spes_p2p.monitor.report import write_report
from spes_p2p.monitor.sinks import Sinks
from spes_p2p.monitor.view import Sample, SwarmView
from spes_p2p.peer.controls import Controls
from tests.unit.monitor.swarms import empty_view

pytestmark = pytest.mark.browser

AXE = Path(__file__).parents[2] / "support" / "axe" / "axe.min.js"
RUN = {"run_id": "run", "config": {"model": {"family": "olmoe", "num_layers": 2}}}
HOSTILE = "<img src=x onerror=window.spesOwned=1><script>window.spesOwned=1</script>"
MAX_WIRE_BYTES = 90_000
IS_DRAWN = "window.spesTicks && spesTicks.length > 0"
OVERFLOW = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
INJECT = (
    "const s = document.createElement('script'); s.textContent = 'window.spesOwned = 1'; document.body.append(s); 0"
)
COUNT_CELLS = """
const fill = matrix.pen.fillRect.bind(matrix.pen);
window.painted = 0;
matrix.pen.fillRect = (...a) => { painted += 1; fill(...a) };
0"""
SIZES = {"wide": (1400, 900), "phone": (390, 844)}


def history(num_peers: int = 4, num_slots: int = 16, num_rounds: int = 44) -> list[SwarmView]:
    return list(views(num_peers, num_slots, num_rounds, total=num_rounds + 20))


def shown(directory: Path, seen: list[SwarmView], own: Own | None = None) -> Page:
    """Serve a page that has seen these views."""
    page, log = Page("127.0.0.1", PageState(seen[0], RUN, own), directory), EventLog(empty_view())
    for view in seen:
        for event in log.of(view):
            page.take(event)
    page.show(PageState(seen[-1], RUN, own))
    return page


def in_browser(directory: Path, work: Callable[[Callable[[], Awaitable[Tab]]], Awaitable[None]]) -> None:
    """Run `work`, which gets a function that opens tabs."""

    async def run() -> None:
        async with browser(directory) as tab:
            await work(tab)

    asyncio.run(run())


async def axe_violations(tab: Tab) -> list[str]:
    """Return the rules of axe-core that the page breaks, and where."""
    await tab.evaluate(AXE.read_text() + "; 0")
    found: list[dict[str, Any]] = json.loads(await tab.evaluate("axe.run().then(r => JSON.stringify(r.violations))"))
    return [f"{rule['id']}: {node['html'][:150]}" for rule in found for node in rule["nodes"]]


def test_the_page_is_drawn_follows_a_commit_fits_a_phone_and_runs_no_markup(tmp_path):
    seen = history()
    own = Own(peer_id(1), HOSTILE, HOSTILE, reachability=HOSTILE, sent_bytes=10, ways={peer_id(0): "through others"})
    own = replace(own, votes={peer_id(0): "eBthumXyeBthumXy", peer_id(1): ""})
    bad = seen[-2]
    bad = bad.evaluated(43, 3.0, (Sample(HOSTILE, HOSTILE, HOSTILE),))
    peers = dict(bad.peers) | {HOSTILE: replace(bad.peers[peer_id(0)], peer_id=HOSTILE, state=HOSTILE)}  # type: ignore[arg-type]
    run = {"run_id": HOSTILE, "config": {"model": {"family": HOSTILE, "num_layers": HOSTILE}}}
    more = {"facts": {HOSTILE: HOSTILE}, "baselines": {HOSTILE: [(0, 6.0), (10**6, 5.0)]}}
    page = shown(tmp_path, seen[:-1], own)
    page.show(PageState(replace(bad, peers=peers), run, own, **more))  # type: ignore[arg-type]

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address, width=390, height=844)
        await tab.wait_for(IS_DRAWN)
        await tab.wait_for("performance.getEntriesByName('first-contentful-paint').length")
        words = await tab.evaluate("document.body.textContent")
        assert words.count(HOSTILE) >= 8 and "round 43 of 64" not in words.split("Events")[0]
        assert await tab.evaluate("document.title.includes('<img')")
        assert await tab.evaluate("document.querySelectorAll('main img, main script').length") == 0
        assert await tab.evaluate(OVERFLOW) <= 0
        page.show(PageState(seen[-1], RUN, replace(own, stage="", why=""), baselines=more["baselines"]))
        await tab.wait_for("document.title.includes('round 45 of 64 · run')", seconds=20)
        assert await tab.evaluate("Object.keys(data.rounds).length") == 44
        words = await tab.evaluate("document.querySelector('#peers').innerText")
        assert "link" in words and "through others" in words and "invite eBthum" in words
        assert await tab.evaluate("at('peers-words').textContent") == "voters by invite: 1 by eBthum"
        assert await tab.evaluate(OVERFLOW) <= 0
        assert await tab.evaluate("window.spesOwned") is None and tab.faults() == []
        assert tab.bytes_received() <= MAX_WIRE_BYTES

    in_browser(tmp_path, work)
    page.close()


def test_the_link_and_its_qr_code_are_those_of_the_run(tmp_path):
    link, flags = f"spes:run.{'eNqVzMEOgiAY' * 20}", " --data web=PATH code=PATH --invite ..."
    page = Page("127.0.0.1", PageState(history()[-1], RUN, link=link + flags), tmp_path)
    matrix = segno.make(link, error="l", micro=False, boost_error=False).matrix

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address, width=390, height=844)
        await tab.wait_for(IS_DRAWN)
        await tab.evaluate("document.getElementById('join-box').open = true")
        assert await tab.evaluate("document.getElementById('link').textContent") == f"spes join {link}{flags}"
        dots = await tab.evaluate(
            "(() => { const c = document.getElementById('code'), p = c.getContext('2d'); return Array.from({length: "
            "c.height / 4}, (_, y) => Array.from({length: c.width / 4}, (_, x) => "
            "p.getImageData(4 * x + 2, 4 * y + 2, 1, 1).data[0])); })()"
        )
        light = [255] * 4
        inside = [[255 * (1 - dot) for dot in row] for row in matrix]
        blank = [[255] * (len(matrix) + 8)] * 4
        assert dots == [*blank, *([*light, *row, *light] for row in inside), *blank]
        assert await tab.evaluate(OVERFLOW) <= 0 and tab.faults() == [] and await axe_violations(tab) == []

    in_browser(tmp_path, work)
    page.close()


@pytest.mark.full
@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_axe_finds_nothing(tmp_path, size, is_dark):
    seen = history(num_peers=24, num_slots=64)
    pages = []
    for name, own in (("monitor", None), ("peer", Own(peer_id(1), reachability="yes; 3 near"))):
        (tmp_path / name).mkdir()
        pages.append(shown(tmp_path / name, seen, own))

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        for page in pages:
            tab = await open_tab()
            await tab.open(page.address, width=SIZES[size][0], height=SIZES[size][1], dark=is_dark)
            await tab.wait_for(IS_DRAWN)
            assert await axe_violations(tab) == []
            await tab.evaluate("for (const box of document.querySelectorAll('details')) box.open = true")
            await tab.wait_for("document.getElementById('names').children.length === 25")
            await tab.evaluate("document.querySelector('.what').focus()")
            assert await axe_violations(tab) == [], "with all open"
            assert await tab.evaluate(OVERFLOW) <= 0 and tab.faults() == []

    in_browser(tmp_path, work)
    for page in pages:
        page.close()


@pytest.mark.full
def test_every_figure_explains_itself_by_keyboard_and_by_tap(tmp_path):
    page = shown(tmp_path, history(), Own(peer_id(1)))
    balloon = "document.getElementById('balloon')"

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        seen = "[...document.querySelectorAll('.what')].filter(button => button.offsetParent)"
        count = await tab.evaluate(f"{seen}.length")
        assert count >= 16
        for number in range(count):
            await tab.evaluate(f"{seen}[{number}].focus()")
            await tab.wait_for(f"{balloon}.matches(':popover-open') && {balloon}.textContent.length > 20")
            box = await tab.evaluate(f"JSON.stringify({balloon}.getBoundingClientRect())")
            edges = json.loads(box)
            assert edges["left"] >= 0 and edges["right"] <= 1400
        await tab.press("Escape")
        await tab.wait_for(f"!{balloon}.matches(':popover-open')")
        await tab.evaluate("document.activeElement.blur(); {seen}[0].click()".replace("{seen}", seen))
        await tab.wait_for(f"{balloon}.matches(':popover-open')")
        missing = "[...document.querySelectorAll('.what')].filter(b => !HELP[b.dataset.help]).length"
        assert await tab.evaluate(missing) == 0

    in_browser(tmp_path, work)
    page.close()


@pytest.mark.full
def test_slots_cells_and_curves_are_read_with_the_arrow_keys(tmp_path):
    page = shown(tmp_path, history(), Own(peer_id(1)))

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        await tab.evaluate("document.getElementById('coverage').focus()")
        for _ in range(3):
            await tab.press("ArrowRight")
        assert (await tab.evaluate("document.getElementById('slot-words').textContent")).startswith("slot 2: held by …")
        await tab.evaluate("document.getElementById('matrix-box').open = true")
        await tab.wait_for("matrix.rows.length === 4")
        await tab.evaluate("document.getElementById('matrix').focus()")
        for key in ("ArrowDown", "ArrowRight", "ArrowRight"):
            await tab.press(key)
        words = await tab.evaluate("document.getElementById('cell-words').textContent")
        assert words.startswith(f"peer …{peer_id(1)[-6:]}, slot 2: ")
        await tab.evaluate("document.querySelector('.chart').focus()")
        await tab.press("End")
        key = "document.querySelector('#charts .key').textContent"
        assert (await tab.evaluate(key)).startswith("round 44:")
        await tab.press("ArrowLeft")
        assert (await tab.evaluate(key)).startswith("round 43:")
        assert (await tab.evaluate("document.getElementById('spoken').textContent")).startswith("round 43:")
        await tab.evaluate("[...document.querySelectorAll('.choice button')].at(-1).click()")
        assert "over tokens" in await tab.evaluate("document.querySelector('.chart').getAttribute('aria-label')")

    in_browser(tmp_path, work)
    page.close()


def test_the_labels_of_an_axis_tell_neighbours_apart(tmp_path):
    page = shown(tmp_path, history())
    cases = {
        (3.1, 3.15, 3.2): ["3.10", "3.15", "3.20"],
        (12500, 15000, 17500): ["12.5k", "15.0k", "17.5k"],
        (0, 500_000, 1_000_000): ["0", "0.5M", "1.0M"],
        (2000, 2020): ["2.00k", "2.02k"],
    }

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        for splits, words in cases.items():
            assert json.loads(await tab.evaluate(f"JSON.stringify(labels({list(splits)}))")) == words
        for value, words in {999.6: "1.00k", 999_600: "1.00M", 999: "999", 1000: "1k", 0.5: "0.500"}.items():
            assert await tab.evaluate(f"short({value})") == words

    in_browser(tmp_path, work)
    page.close()


def test_a_page_whose_process_shows_nothing_new_says_so(tmp_path, monkeypatch):
    page = shown(tmp_path, history())

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        monkeypatch.setattr(page, "_shown_at", page._shown_at - 61.0)  # as if it had hung for a minute
        await tab.wait_for("document.title.startsWith('offline')")
        assert "says nothing" in await tab.evaluate("document.getElementById('why').textContent")

    in_browser(tmp_path, work)
    page.close()


@pytest.mark.full
@pytest.mark.parametrize("is_over", [False, True])
def test_a_page_whose_process_has_gone_says_so_and_comes_back(tmp_path, is_over):
    seen = history()
    seen = [*seen, replace(seen[-1], total_rounds=seen[-1].published)] if is_over else seen
    page = shown(tmp_path, seen)

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        page.close()
        if is_over:
            await tab.wait_for("document.getElementById('why').textContent.includes('this page can be closed')")
            assert await tab.evaluate("document.title.startsWith('finished')"), "the run, not the page, has ended"
            return
        await tab.wait_for("document.title.startsWith('offline')")
        assert "no connection" in await tab.evaluate("document.getElementById('why').textContent")
        again = shown(tmp_path, seen)
        assert again.address == page.address
        await tab.wait_for("!document.title.startsWith('offline')")
        again.close()

    in_browser(tmp_path, work)


@pytest.mark.full
def test_a_row_of_the_matrix_is_painted_again_only_where_it_changed(tmp_path):
    *seen, last = history(num_peers=64, num_slots=128, num_rounds=6)
    page = shown(tmp_path, seen)

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        await tab.evaluate("document.getElementById('matrix-box').open = true")
        await tab.wait_for("matrix.rows.length === 64 && Boolean(matrix.pen)")
        await tab.evaluate(COUNT_CELLS)
        peers = dict(seen[-1].peers)
        mover = sorted(peers)[7]
        kept = peers[mover].slots[:-1]
        peers[mover] = replace(peers[mover], slots=kept)
        page.show(PageState(replace(seen[-1], now=seen[-1].now + 1, peers=peers), RUN))
        await tab.wait_for("spesTicks.length > 1")
        assert 1 <= await tab.evaluate("painted") <= 2
        page.show(PageState(last, RUN))
        await tab.wait_for("document.title.includes('round 7 ')")
        assert await tab.evaluate("painted") < 400

    in_browser(tmp_path, work)
    page.close()


@pytest.mark.full
def test_the_report_shows_everything_from_a_file_without_a_server(tmp_path):
    sinks = Sinks(empty_view())
    facts = RUN | {"run_id": f"run {HOSTILE}", "num_slots": 16, "total_rounds": 60}
    sinks.add("metrics", lambda: JsonlSink(tmp_path / "metrics.jsonl", facts, 0.0))
    for view in history():
        sinks.update(view)
    sinks.close()
    path = write_report(tmp_path, facts={"run": "finished"}, baselines={"one process": [(0, 8.0), (2_000_000, 4.0)]})

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        for width, height in SIZES.values():
            await tab.open(path.as_uri(), width=width, height=height)
            await tab.wait_for(IS_DRAWN)
            assert await tab.evaluate("document.querySelectorAll('.chart canvas').length") == 4
            assert "one process" in await tab.evaluate("document.querySelector('#charts .key').textContent")
            assert HOSTILE in await tab.evaluate("document.body.textContent")
            assert await tab.evaluate(OVERFLOW) <= 0 and tab.faults() == []
            assert await tab.evaluate("window.spesOwned") is None
        assert await axe_violations(tab) == []
        await tab.evaluate(INJECT)
        assert await tab.evaluate("window.spesOwned") is None, "the policy takes the report's own scripts alone"

    in_browser(tmp_path, work)


def test_the_owner_pauses_resumes_and_limits_by_buttons_that_need_the_links_token(tmp_path):
    controls = Controls(tmp_path)
    verbs = Verbs(controls.act, tmp_path)
    state = PageState(history()[-1], RUN, Own(peer_id(1)), control=controls.view())
    page = Page("127.0.0.1", state, tmp_path, verbs)
    buttons = "[...document.querySelectorAll('#controls button')].map(b => b.textContent).join()"

    def press(label: str) -> str:
        return f"[...document.querySelectorAll('#controls button')].find(b => b.textContent === '{label}').click()"

    def told() -> dict[str, Any]:
        page.show(replace(state, control=controls.view()))
        return controls.view()

    async def work(open_tab: Callable[[], Awaitable[Tab]]) -> None:
        tab = await open_tab()
        await tab.open(page.address)
        await tab.wait_for(IS_DRAWN)
        await tab.wait_for("document.getElementById('controls').hidden && !document.getElementById('settings').hidden")
        assert "spes ctl link" in await tab.evaluate("document.getElementById('answer').textContent")
        await tab.open(f"{page.address}#token={verbs.token}", width=390, height=844)  # in the same tab
        await tab.wait_for(f"{buttons} === 'Pause,Pause 1 h,Finish,Leave'")
        assert await tab.evaluate("location.href") == page.address, "the token is in no history"
        await tab.evaluate("document.querySelector('#controls button').focus()")
        await tab.evaluate(press("Pause"))
        await tab.wait_for(f"{buttons} === 'Resume,Finish,Leave'")
        assert await tab.evaluate("document.activeElement.textContent") == "Resume"
        assert told()["wish"] == "pause"
        await tab.evaluate("document.getElementById('limits').open = true")
        assert await tab.evaluate(OVERFLOW) <= 0 and await axe_violations(tab) == []
        await tab.evaluate(press("Resume"))
        await tab.wait_for(f"{buttons} === 'Pause,Pause 1 h,Finish,Leave'")
        for name, value in (("duty", "50%"), ("hours", "22:00-07:00"), ("on_battery", "no")):
            field = f"document.getElementById('field-{name}')"
            await tab.evaluate(f"{field}.value = '{value}'; {field}.dispatchEvent(new Event('change'))")
            await tab.wait_for("document.getElementById('answer').textContent.includes(': ')")
        await tab.wait_for("data.control.rules.on_battery === false")
        assert (told()["limits"]["duty"], told()["rules"]["hours"]) == (0.5, "22:00-07:00")
        await tab.evaluate(
            "const f = document.getElementById('field-threads'); f.value = 'no'; f.dispatchEvent(new Event('change'))"
        )
        await tab.wait_for("document.getElementById('answer').textContent.includes('valid integer')")
        await tab.wait_for("document.getElementById('field-threads').getAttribute('aria-invalid') === 'true'")
        await tab.evaluate("showControls()")
        assert await tab.evaluate("document.getElementById('field-threads').value") == "no", "it stays, to be mended"
        assert await axe_violations(tab) == []
        assert not [event for event in tab.events if "exception" in str(event.get("method", "")).lower()]

    in_browser(tmp_path, work)
    page.close()
