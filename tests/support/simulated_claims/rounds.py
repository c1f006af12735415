"""Rounds of a simulated swarm: between two of them, peers look at the claims."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from simulated_claims.peer import VirtualPeer

if TYPE_CHECKING:
    from simulated_claims.simulation import Simulation

LATE = 0.03
"""Share of the peers that miss a roster, and catch up."""


class Rounds:
    """The rounds of one swarm, on each side of a partition by themselves."""

    def __init__(self, simulation: Simulation, seconds: float) -> None:
        self._simulation = simulation
        self._seconds = seconds
        self._generation = 0

    def restart(self) -> None:
        """Begin rounds anew on all sides."""
        self._generation += 1
        for side in range(self._simulation.sides):
            self._schedule(side, 0.0)

    def _schedule(self, side: int, delay: float) -> None:
        generation = self._generation
        seconds = self._seconds * self._simulation.random.uniform(0.8, 1.2)
        self._simulation.schedule(delay + seconds, lambda: self._end(side, generation))

    def _end(self, side: int, generation: int) -> None:
        if generation != self._generation:
            return
        simulation, draw = self._simulation, self._simulation.random
        awake = [
            peer
            for peer in simulation.peers.values()
            if peer.side == side
            and peer.state == "active"
            and simulation.now >= max(peer.busy_until, peer.stalled_until)
        ]
        present = [peer for peer in awake if draw.random() >= LATE]
        took = draw.uniform(2, 8) if draw.random() < 0.9 else draw.uniform(8, 40)
        self._schedule(side, took + 3.0)
        if not present:
            return
        view = simulation.view(draw.choice(present))
        is_held = 2 * len(present) >= sum(claim.state == "active" for claim in view.values())
        round = max(peer.round for peer in present) + is_held  # fewer than half certify nothing
        for peer in awake:
            is_late = peer not in present
            self._stand(peer, took + draw.uniform(0, 1) + 2.0 * is_late, self._ending(peer, round), 2.0)

    def _ending(self, peer: VirtualPeer, round: int) -> Callable[[], None]:
        """Return what ends a round on a peer."""

        def end() -> None:
            peer.round = round
            self._simulation.rebalance(peer)

        return end

    def _stand(self, peer: VirtualPeer, seconds: float, then: Callable[[], None], more: float = 0.0) -> None:
        peer.busy_until = self._simulation.now + seconds + more
        self._simulation.schedule(seconds, then, peer)
