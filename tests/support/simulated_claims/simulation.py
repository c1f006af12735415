"""One swarm's claims in virtual time: peers, their records and rounds, and what befalls them."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from simulated_claims.checker import Checker, unsettled
from simulated_claims.dht import LossyDht
from simulated_claims.peer import VirtualPeer
from simulated_claims.rounds import Rounds

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.claims import Claimant, orphans
from spes_p2p.swarm.records import Claim

ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
SETTLE_SECONDS = 3.0
MOST_SKEW_SECONDS = 3.0
MOST_JOINING_SECONDS = 20.0
"""Longest that a newcomer downloads before it holds anything."""
STALE_READS = 0.03
"""Share of the reads that take too long: the peer goes by what it read before."""


class Simulation:
    """Peers that claim slots and average them, on a virtual clock; the decisions are the library's own.

    Args:
        draw: Decides everything.
        settings: Lease, heartbeat, rotation.
        num_slots: Experts per layer.
        round_seconds: Training time of a round.
        cooldown_seconds: The claimants'; None: their own choice.
    """

    def __init__(
        self,
        draw: random.Random,
        settings: RoundConfig,
        num_slots: int,
        *,
        round_seconds: float = 20.0,
        cooldown_seconds: float | None = None,
    ) -> None:
        self.random = draw
        self.settings = settings
        self.num_slots = num_slots
        self.now = 0.0
        self.peers: dict[str, VirtualPeer] = {}
        self.checker = Checker(num_slots, settings.lease_seconds)
        self.disks: dict[str, VirtualPeer] = {}
        self.sides = 1
        self._cooldown = cooldown_seconds
        self._dht = LossyDht(draw)
        self._events: list[tuple[float, int, VirtualPeer | None, Callable[[], None]]] = []
        self._count = itertools.count()
        self._rounds = Rounds(self, round_seconds)
        self._rounds.restart()

    # ------------------------------------------------------------------ time

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by then."""
        while self._events and self._events[0][0] <= end:
            before = self.now
            self.now, _, peer, happen = heapq.heappop(self._events)
            self.checker.report.peer_seconds += (self.now - before) * len(self.peers)
            if peer is None or not peer.is_gone:
                happen()
        self.now = end

    def schedule(self, delay: float, happen: Callable[[], None], peer: VirtualPeer | None = None) -> None:
        """Have something happen later, unless the peer is gone by then."""
        heapq.heappush(self._events, (self.now + delay, next(self._count), peer, happen))

    # ------------------------------------------------------------------ life and death

    def join(self, max_slots: int) -> str:
        """Have a newcomer come; return its name."""
        peer_id = "Qm" + "".join(self.random.choices(ALPHABET, k=44))
        skew = self.random.uniform(-MOST_SKEW_SECONDS, MOST_SKEW_SECONDS)
        self._arrive(VirtualPeer(peer_id, max_slots, skew, self._claimant(peer_id)))
        return peer_id

    def restart(self, peer_id: str) -> None:
        """Have a peer that has died come back with what is on its disk."""
        old = self.disks.pop(peer_id)
        peer = VirtualPeer(peer_id, old.max_slots, old.skew, self._claimant(peer_id), old.round)
        peer.hold(old.slots)
        self.checker.restarted(peer_id)
        self._arrive(peer)

    def _claimant(self, peer_id: str) -> Claimant:
        claimant = Claimant("run", peer_id, self.num_slots, self.settings)
        if self._cooldown is not None:
            claimant.cooldown_seconds = self._cooldown
        return claimant

    def _arrive(self, peer: VirtualPeer) -> None:
        peer.side = self.random.randrange(self.sides)
        self.peers[peer.peer_id] = peer
        self._store(peer)
        self.schedule(SETTLE_SECONDS + self.random.uniform(0, MOST_JOINING_SECONDS), lambda: self._settle(peer), peer)
        self.schedule(self.settings.heartbeat_seconds, lambda: self._renew(peer), peer)
        self.look_around()

    def _settle(self, peer: VirtualPeer) -> None:
        self.rebalance(peer)
        peer.state = "active"
        self._store(peer)
        self.look_around()
        self.schedule(self.random.uniform(0, self.settings.heartbeat_seconds), lambda: self._heartbeat(peer), peer)

    def crash(self, peer_id: str, cause: str = "death") -> None:
        """Have a peer die; its claim lasts on."""
        peer = self.disks[peer_id] = self.peers.pop(peer_id)
        peer.is_gone = True
        self.look_around(cause)

    def leave(self, peer_id: str) -> None:
        """Have a peer give its slots back and go, as `HeldSlots.leave` does."""
        peer = self.peers[peer_id]
        peer.slots = ()
        peer.max_slots = 0
        peer.state = "joining"
        self._store(peer)
        self.crash(peer_id, "leave")

    def stall(self, peer_id: str, seconds: float) -> None:
        """Have a peer stand still while its claim is renewed."""
        self.peers[peer_id].stalled_until = self.now + seconds
        self.schedule(seconds, self.look_around)
        self.look_around()

    def split(self, num_sides: int) -> None:
        """Cut the peers off from each other."""
        self.sides = num_sides
        for peer in self.peers.values():
            peer.side = self.random.randrange(num_sides)
        self._dht.split(num_sides)
        self._rounds.restart()
        self.look_around("partition")

    def heal(self) -> None:
        """Reconnect them."""
        for side in range(1, self.sides):
            self.checker.forget_side(side)
        self.sides = 1
        for peer in self.peers.values():
            peer.side = 0
        self._dht.heal()
        self._rounds.restart()
        self.look_around()

    # ------------------------------------------------------------------ claims

    def _renew(self, peer: VirtualPeer) -> None:
        self._store(peer)
        self.schedule(self.settings.heartbeat_seconds, lambda: self._renew(peer), peer)

    def _store(self, peer: VirtualPeer) -> None:
        expires_at = self.now + peer.skew + self.settings.lease_seconds
        for event in self._dht.store(peer.side, peer.claim(), expires_at):
            self.schedule(event.delay, event.deliver)

    def view(self, peer: VirtualPeer) -> dict[str, Claim]:
        """Return the claims as a peer sees them."""
        if self.random.random() >= STALE_READS:
            peer.last_read = self._dht.read(peer.side, self.now + peer.skew)
        return {**peer.last_read, peer.peer_id: peer.claim()}

    def _heartbeat(self, peer: VirtualPeer) -> None:
        if self.now >= max(peer.busy_until, peer.stalled_until):
            view = self.view(peer)
            self._hold(peer, peer.claimant.target(self.now, view, in_round=True), view)
        self.schedule(self.settings.heartbeat_seconds, lambda: self._heartbeat(peer), peer)

    def rebalance(self, peer: VirtualPeer) -> None:
        """Have a peer look at the claims between two rounds."""
        view = self.view(peer)
        self._hold(peer, peer.claimant.target(self.now, view), view)

    def _hold(self, peer: VirtualPeer, target: tuple[int, ...], view: dict[str, Claim]) -> None:
        if target == peer.slots:
            return
        if peer.state == "active":
            saw_orphan = bool(orphans(view, self.num_slots))
            self.checker.change(self.now, peer.peer_id, peer.slots, target, saw_orphan)
        peer.hold(target)
        self._store(peer)
        self.look_around()

    # ------------------------------------------------------------------ the checker's view

    def unsettled(self) -> list[str]:
        """Return the faults of the current allocation of slots, if it were final."""
        held = {peer.peer_id: peer.slots for peer in self.peers.values()}
        return unsettled(self.num_slots, held, {peer.peer_id: peer.max_slots for peer in self.peers.values()})

    def look_around(self, cause: str = "change") -> None:
        """Show the checker the current allocation of slots."""
        for side in range(self.sides):
            peers = [peer for peer in self.peers.values() if peer.side == side and peer.state == "active"]
            awake = sum(peer.max_slots for peer in peers if self.now >= peer.stalled_until)
            asleep = {slot for peer in peers if self.now < peer.stalled_until for slot in peer.slots}
            holding = [peer.slots for peer in self.peers.values() if peer.side == side]
            self.checker.look(self.now, side, holding, awake + len(asleep) >= self.num_slots, cause)
