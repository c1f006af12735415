"""Which batches of shared data a peer trains in a round, and how many it asks for."""

from __future__ import annotations

import math

from spes_p2p.config import RunConfig
from spes_p2p.swarm.certificate import MAX_BATCHES
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.next_body import shares

RESERVE = 1.25
"""Batches that a peer asks for, per batch that it has trained: rounds vary in length."""


def deal(swarm: HivemindSwarm, round: int) -> tuple[range, str]:
    """Return a peer's share of the round after this one, and the name of the order that it reads beyond its share.

    The share belongs to the round: a peer that is killed, or whose round fails, begins it again, because no certified
    mean contains it. The other order is the peer's and the round's own.
    """
    last = swarm.consensus.body_at(round) or swarm.last()
    nothing = range(last.cursor, last.cursor)
    return shares(last).get(swarm.peer_id, nothing), f"{swarm.peer_id}:{last.round + 1}"


def batches_to_ask(run: RunConfig, round: int, trained: int) -> int:
    """Return the batches that a peer asks for in the round after this one, in which it has trained some.

    In mode `steps` these are the steps that it will make. A peer that has trained nothing asks for nothing.
    """
    if not (run.data.is_shared and trained):
        return 0
    if run.round.mode == "steps":
        return run.round.steps_of(round + 1)
    growth = run.round.share(round + 1) / run.round.share(round)
    return min(MAX_BATCHES, math.floor(RESERVE * growth * trained))
