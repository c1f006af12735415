"""Waiting for as many as a run begins with."""

from __future__ import annotations

import logging

from spes_p2p.swarm.base import Swarm
from spes_p2p.training.holdings import Holdings

log = logging.getLogger(__name__)

SETTLE_SECONDS = 3.0
"""Between announcing and acting where all start together: longer than a record needs to reach everybody."""
POLL_SECONDS = 0.5


def wait_for_peers(holdings: Holdings, swarm: Swarm, needed: int) -> None:
    """Return once so many peers have announced themselves, and a moment later if all of them are new."""
    started, told = holdings.clock(), 0
    while True:
        swarm.wait(POLL_SECONDS)
        claims = holdings.claims()
        present = len(claims)
        is_under_way = any(c.state == "active" for peer, c in claims.items() if peer != swarm.peer_id)
        if present >= needed and (is_under_way or holdings.clock() - started >= SETTLE_SECONDS):
            return
        if present < needed and present != told:
            log.info("waiting for peers: %d of %d are here", present, needed)
            told = present
