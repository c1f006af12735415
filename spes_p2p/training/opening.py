"""How a peer finds its place in a run: at its start, as a newcomer, and after it has missed a round."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from spes_p2p.errors import AbsentError
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.roster import Roster
from spes_p2p.training.slots import HeldSlots, active_of
from spes_p2p.training.synchroniser import POLL_SECONDS, PUNCTUAL, Synchroniser

log = logging.getLogger(__name__)

REJOIN_SECONDS = 120.0
"""Longest that a newcomer, or a peer that has fallen behind, waits for a place between two rounds of the others."""
SETTLE_SECONDS = 3.0
"""Time between announcing and acting if all peers start together: longer than a record takes to reach everyone."""
ENTERING_TRIES = 8
"""Times that a newcomer asks for the swarm's state: in short rounds the others may move on before the download ends."""

Initial = Callable[[], Mapping[VectorName, Tensor]]
"""Makes the published vectors of the run's start."""


def enter(sync: Synchroniser, initial: Initial | None) -> None:
    """Announce this peer, take over the swarm's state, and claim slots.

    Args:
        initial: None if this peer has been in the run before.

    Raises:
        AbsentError: the swarm's state could not be fetched.
    """
    swarm, held = sync.swarm, sync.held
    received = swarm.traffic()[0]
    held.announce("joining")
    _wait_for_peers(sync)
    swarm.catch_up()
    names = (SHARED, *map(VectorName.of_slot, range(sync.run.num_slots)))
    if initial and not swarm.last().round:
        _publish_initial(held, names, initial)
    _fetch(sync)
    _publish_initial(held, names, initial)
    held.rebalance()
    _fetch(sync)
    sync.round = held.model_round()
    log.info("entered the run at round %d: fetched %.1f MB", sync.round, (swarm.traffic()[0] - received) / 1e6)
    sync.announce(0.0)
    sync.expected_since = swarm.now()
    held.unloaded.update(names)


def _wait_for_peers(sync: Synchroniser) -> None:
    """Wait until `round.min_peers` peers have announced themselves, or others go on with a certified run.

    If no peer trains yet, it is `SETTLE_SECONDS` at the least.
    """
    swarm, held, needed = sync.swarm, sync.held, sync.run.round.min_peers
    started, announced = held.clock(), 0
    while True:
        claims = held.claims()
        present = len(claims)
        others = set(active_of(claims)) - {swarm.peer_id}
        if present >= needed and (others or held.clock() - started >= SETTLE_SECONDS):
            return
        if others:
            swarm.catch_up()
            if swarm.last().round and others & held.trusted(claims).keys():
                return
        if present < needed and present != announced:
            log.info("waiting for peers: %d of %d are here (docs/trouble.md#waiting)", present, needed)
            announced = present
        swarm.wait(POLL_SECONDS)


def _publish_initial(held: HeldSlots, names: Sequence[VectorName], initial: Initial | None) -> None:
    """Publish the run's initial version, or kept form, of each name that this peer lacks; or raise AbsentError."""
    missing = [name for name in names if not held.has(name)]
    if missing and initial is None:
        raise AbsentError(
            f"{', '.join(missing)}: neither this peer nor any that it reached has it whole; give more --initial-peers"
        )
    vectors = initial() if missing and initial is not None else {}
    for name in missing:
        held.publish_initial(name, vectors[name])


def _fetch(sync: Synchroniser) -> None:
    """Fetch what the last certificate names; if the others have gone on meanwhile, what the next one names."""
    for left in reversed(range(ENTERING_TRIES)):
        try:
            return sync.held.fetch()
        except AbsentError:
            if not left or sync.swarm.wait(POLL_SECONDS):
                raise
            sync.swarm.catch_up()


def rejoin(sync: Synchroniser, routed: Mapping[int, int] | None = None) -> float | None:
    """Follow the others to their next round; return the end of the round under way, None if no other peer trains.

    A peer that trained by itself while the others synchronise would only be late for their next round, too.

    Args:
        routed: Tokens routed to each slot, as `HeldSlots.fetch` takes them.
    """
    swarm, held, times = sync.swarm, sync.held, sync.run.round
    deadline, recent = held.clock() + REJOIN_SECONDS, 2 * times.matchmaking_seconds + times.averaging_seconds
    while held.clock() < deadline:
        # An expected peer is waited for after the round's end: one step is better than none.
        since = max(sync.expected_since, swarm.now() - PUNCTUAL * times.matchmaking_seconds)
        num_active, last = len(active_of(held.claims())), swarm.last()
        announced = last.ends_at if last.ends_at > since else sync.announced_end(sync.round, since)
        if not last.round and num_active < times.min_peers:
            pass
        elif last.round > sync.round and num_active > 1:
            try_to_fetch(sync, routed)
        elif times.mode == "steps" or announced:
            return sync.bounded(announced)
        elif not any(record.ends_at > swarm.now() - recent for record in sync.records(last.voters)):
            break  # none of them synchronises
        if swarm.wait(POLL_SECONDS):  # the next round's end is known soon
            break
    return None


def try_to_fetch(sync: Synchroniser, routed: Mapping[int, int] | None = None, roster: Roster | None = None) -> None:
    """Take over the swarm's state; nothing changes if `shared` cannot be fetched."""
    try:
        sync.held.fetch(roster, routed)
    except AbsentError as error:
        log.warning("round %d: %s", sync.round + 1, error, extra={"heals": True})
        return
    sync.round = sync.held.model_round()
