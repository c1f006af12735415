"""Views of swarms that exist only on a page: seeded, in any size, one round after another."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator

from spes_p2p.monitor.view import Sample, Snapshot, SwarmView, fold
from spes_p2p.swarm.records import Claim, Metrics, Progress

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
    tokens = dict.fromkeys(slots, 0)
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
            progress[me] = Progress(peer_id=me, round=number + 1, ends_at=now + 20.0)
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
        view = fold(view, Snapshot(now, claims, progress, reports))
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
    progress = {peer: Progress(peer_id=peer, round=known.round, ends_at=known.ends_at) for peer, known in here.items()}
    return fold(view, Snapshot(view.now + 1.0, claims, progress, {}))
