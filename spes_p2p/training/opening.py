"""Before the first round: waiting for as many as a run begins with, and what it begins with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from spes_p2p.errors import JoinError
from spes_p2p.swarm.base import Swarm
from spes_p2p.swarm.records import Claim
from spes_p2p.training.holdings import Holdings

log = logging.getLogger(__name__)

OPENING_SECONDS = 120.0
"""Longest that a newcomer, or one that has fallen behind, waits for the others to be between two rounds."""
SETTLE_SECONDS = 3.0
"""Between announcing and acting where all start together: longer than a record needs to reach everybody."""
POLL_SECONDS = 0.5


def wait_for_peers(holdings: Holdings, swarm: Swarm, needed: int) -> dict[str, Claim]:
    """Return the claims once so many peers have announced themselves, and a moment later if all of them are new."""
    started, told = holdings.clock(), 0
    while True:
        claims = holdings.claims()
        present = len(claims)
        is_under_way = any(c.state == "active" for peer, c in claims.items() if peer != swarm.peer_id)
        if present >= needed and (is_under_way or holdings.clock() - started >= SETTLE_SECONDS):
            return claims
        if present < needed and present != told:
            log.info("waiting for peers: %d of %d are here", present, needed)
            told = present
        swarm.wait(POLL_SECONDS)


def begin(swarm: Swarm, names: Sequence[str], initial: Callable[[], Mapping[str, Tensor]] | None) -> None:
    """Publish the run's start of what is lacking here.

    Args:
        swarm: To publish in.
        names: Of all that belongs to the model.
        initial: Makes the bundles of all names; None where only what others have trained will do.

    Raises:
        JoinError: something is lacking that only others have.
    """
    lacking = [name for name in names if name not in swarm.versions()]
    if not lacking:
        return
    if initial is None:
        raise JoinError(f"{', '.join(lacking)}: not whole here, nor with any peer reached; give more --initial-peers")
    bundles = initial()
    swarm.publish(0, {name: bundles[name] for name in lacking})
