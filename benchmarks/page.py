"""The pictures of docs/page: a made-up swarm on the live page, in Chromium.

.venv/bin/python benchmarks/page.py
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.cluster import ROOT, support
from spes_p2p.monitor.events import EventLog
from spes_p2p.monitor.page.server import Page
from spes_p2p.monitor.page.snapshot import Own, PageState
from spes_p2p.monitor.view import Sample, Snapshot, SwarmView, fold
from spes_p2p.presentation import say
from spes_p2p.swarm.certificate import MemberEntry, genesis
from spes_p2p.swarm.records import Claim, Metrics, Progress

PICTURES = ROOT / "docs" / "page"
RUN = {
    "run_id": "demo",
    "config": {"model": {"family": "olmoe", "num_layers": 4, "hidden_size": 128, "num_experts": 16, "top_k": 2}},
}
IS_DRAWN = "window.spesTicks && spesTicks.length > 0"
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
ROUND_SECONDS, BEGINNING = 30.0, 1_800_000_000.0


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


def shown(num_peers: int, num_slots: int, num_rounds: int, own: Own | None) -> Page:
    """Return a page that has seen so many rounds of a made-up swarm; of a peer, if `own` tells of its machine."""
    began = time.time() - ROUND_SECONDS * num_rounds
    seen = list(views(num_peers, num_slots, num_rounds, total=num_rounds + 60, began=began))
    log = EventLog(replace(seen[0], reports={}, peers={}, published=0))
    page = Page("127.0.0.1", PageState(seen[0], RUN, own), Path(tempfile.mkdtemp()))
    for view in seen:
        for event in log.of(view):
            page.take(event)
        page.show(PageState(view, RUN, own))
    return page


async def take_pictures() -> None:
    """Take the pictures of the four views."""
    own = Own(
        peer_id(1),
        uptime_seconds=11520,
        memory_bytes=5_100_000_000,
        sent_bytes=1_240_000_000,
        received_bytes=1_130_000_000,
        reachability="yes; 3 near",
    )
    browser = support("browser").browser
    async with browser(Path(tempfile.mkdtemp())) as open_tab:
        for name, size, machine, width, height, dark in (
            ("monitor", (6, 32, 140), None, 1400, 900, False),
            ("monitor-dark", (64, 128, 140), None, 1400, 900, True),
            ("phone", (6, 32, 140), None, 390, 844, False),
            ("peer", (6, 32, 140), own, 1400, 900, False),
        ):
            page, tab = shown(*size, machine), await open_tab()
            await tab.open(page.address, width=width, height=height, dark=dark)
            await tab.wait_for(IS_DRAWN)
            if dark:
                await tab.evaluate("document.getElementById('matrix-box').open = true")
                await tab.wait_for("Boolean(matrix.pen)")
            await asyncio.sleep(1.5)
            picture = await tab.picture()
            (PICTURES / f"{name}.png").write_bytes(picture)
            say(f"{name}.png  {len(picture) / 1000:.0f} kB")
            page.close()


if __name__ == "__main__":
    asyncio.run(take_pictures())
