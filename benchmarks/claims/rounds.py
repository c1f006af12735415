"""Rounds of a simulated swarm: rosters, groups and commits are the library's, everything in between takes its time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.claims.peer import VirtualPeer, version_name
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.quorum import State
from spes_p2p.swarm.roster import Member, Roster

if TYPE_CHECKING:
    from benchmarks.claims.simulation import Simulation

LATE, DROPPED, UNPULLED = 0.03, 0.01, 0.03
"""Shares of the members that miss a roster, of those that drop what the others commit, and of versions not pulled."""


@dataclass
class Averaged:
    """A round's result.

    Attributes:
        roster: The members' entries.
        old: Model before the round.
        new: Model after the round.
        made: Version of each slot that a peer has committed.
    """

    roster: Roster
    old: str
    new: State
    made: dict[int, str] = field(default_factory=dict)


class Rounds:
    """The rounds of one swarm, on each side of a partition by themselves.

    Args:
        simulation: The swarm.
        seconds: Training time of a round.
        derive: Makes a roster of its entries.
    """

    def __init__(self, simulation: Simulation, seconds: float, derive: Callable[[Sequence[Member]], Roster]) -> None:
        self._simulation = simulation
        self._seconds = seconds
        self._derive = derive
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
        if 2 * len(present) < sum(claim.state == "active" for claim in view.values()):
            for peer in present:  # fewer than half never form a group
                self._stand(peer, took, partial(simulation.rebalance, peer))
            return
        result = self._average(present)
        for peer in awake:
            if peer in present and peer.peer_id not in result.roster.behind:
                self._stand(peer, took + draw.uniform(0, 1), partial(self._commit, peer, result), 2.0)
            else:
                self._stand(peer, took + 2.0, partial(self._return, peer))

    def _stand(self, peer: VirtualPeer, seconds: float, then: Callable[[], None], more: float = 0.0) -> None:
        peer.busy_until = self._simulation.now + seconds + more
        self._simulation.schedule(seconds, then, peer)

    def _average(self, present: Sequence[VirtualPeer]) -> Averaged:
        roster = self._derive([peer.member() for peer in present])
        self._simulation.checker.roster(self._simulation.now, roster)
        old = next(member.anchors[SHARED] for member in roster if member.peer_id in roster.groups[SHARED])
        # The same members may average the same model again, after a partition; what they have trained is not the same.
        new = (roster.round + 1, version_name(old, self._simulation.now, *roster.groups[SHARED]))
        return Averaged(roster, old, new)

    def _commit(self, peer: VirtualPeer, result: Averaged) -> None:
        """Commit the result on a peer, unless it drops the round and is behind in the next one."""
        simulation = self._simulation
        if simulation.random.random() >= DROPPED:
            groups = result.roster.groups
            mine = [slot for slot in peer.slots if peer.peer_id in groups.get(VectorName.of_slot(slot), ())]
            after = {slot: version_name(result.new[1], slot, peer.anchors[slot]) for slot in mine}
            changes = {slot: (peer.anchors[slot], name) for slot, name in after.items()}
            simulation.checker.commit(simulation.now, result.old, result.new[1], changes)
            result.made.update(after)
            peer.shared = result.new
            peer.anchors.update(after)
            peer.versions.update((slot, (peer.shared[0], name)) for slot, name in after.items())
        simulation.schedule(1.5, lambda: self._pull(peer, result), peer)

    def _pull(self, peer: VirtualPeer, result: Averaged) -> None:
        """Fetch what others have committed; a peer that sat a slot out continues from their version."""
        draw = self._simulation.random
        if peer.shared == result.new:
            groups = result.roster.groups
            mine = {slot for slot in peer.slots if peer.peer_id in groups.get(VectorName.of_slot(slot), ())}
            for slot, name in result.made.items():
                if slot not in mine and draw.random() >= UNPULLED:
                    peer.versions[slot] = (result.new[0], name)
                    if slot in peer.anchors:
                        peer.anchors[slot] = name
            for slot in [slot for slot in peer.slots if VectorName.of_slot(slot) not in groups]:
                peer.adopt(slot, [other.versions[slot] for other in self._simulation.reachable(peer)])
                peer.anchors[slot] = peer.versions[slot][1]
        self._simulation.rebalance(peer)

    def _return(self, peer: VirtualPeer) -> None:
        self._simulation.catch_up(peer)
        self._simulation.rebalance(peer)
