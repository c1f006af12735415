"""When one peer changes what it holds: at once for an orphan, otherwise rarely, so that claims come to rest.

Neither clock, network nor randomness in here; peers, and the simulator in `benchmarks/claims/`, ask it the same way.
"""

from __future__ import annotations

from collections.abc import Mapping

from spes_p2p.config import RoundConfig
from spes_p2p.swarm.claims import allocate, level, orphans, rotate
from spes_p2p.swarm.records import Claim

PATIENCE_HEARTBEATS = 2
"""Heartbeats for which an orphan is left to the peer that it falls to, before it is given to another."""


class Claimant:
    """One peer's decisions about its slots.

    All peers see nearly the same records and allocate by the same function, so most of the time they agree. Where
    their records differ, two of them may act at once, and each would then undo what it has done. Hence the cool-down:
    a peer that has adopted or given up a slot changes nothing more for a while, unless for an orphan; and whoever has
    just appeared has no weight in evening out the coverage until it has stayed for as long.

    Args:
        run_id: Seeds the lots.
        peer_id: This peer's.
        num_slots: Experts per layer.
        settings: The run's; lease, heartbeat and rotation are used.
        cooldown_seconds: None: one lease.
    """

    def __init__(
        self,
        run_id: str,
        peer_id: str,
        num_slots: int,
        settings: RoundConfig,
        *,
        cooldown_seconds: float | None = None,
    ) -> None:
        self._run_id, self._peer_id, self._num_slots, self._settings = run_id, peer_id, num_slots, settings
        self._cooldown = settings.lease_seconds if cooldown_seconds is None else cooldown_seconds
        self._changed_at = float("-inf")
        self._rotated = 0
        self._seen_since: dict[str, float] = {}
        self._orphaned_since: dict[int, float] = {}
        self._passed_over: set[str] = set()

    def at_heartbeat(self, now: float, claims: Mapping[str, Claim]) -> tuple[int, ...]:
        """Return the slots to hold in the middle of a round: nothing changes but for orphans.

        Args:
            now: Seconds, by any clock that does not go back.
            claims: Everybody's unexpired claims, this peer's as it is now.
        """
        self._look(now, claims)
        held = claims[self._peer_id].slots
        target = self._allocated(now, claims) if self._orphaned_since else held
        return self._change(now, held, target) if set(target) & set(self._orphaned_since) else held

    def after_round(self, now: float, claims: Mapping[str, Claim], round: int) -> tuple[int, ...]:
        """Return the slots to hold from here on, when nothing is being trained.

        Args:
            now: Seconds, by the same clock.
            claims: Everybody's unexpired claims, this peer's as it is now.
            round: The one that begins.
        """
        self._look(now, claims)
        held = claims[self._peer_id].slots
        interval = self._settings.rotate_rounds
        if interval and held and round > self._rotated and round % interval == 0:
            self._rotated = round
            turn = rotate(self._run_id, self._num_slots, claims, round // interval)
            return self._change(now, held, turn[self._peer_id])
        has_room = len(held) < min(claims[self._peer_id].max_slots, self._num_slots)
        # A full peer changes only for an orphan; most are full, and to allocate for 1 000 peers takes a while.
        target = self._allocated(now, claims) if has_room or self._orphaned_since else held
        if set(target) & set(self._orphaned_since):
            return self._change(now, held, target)
        if now - self._changed_at < self._cooldown:
            return held
        if target == held:
            settled = {peer: claims[peer] for peer, since in self._seen_since.items() if now - since >= self._cooldown}
            target = level(self._run_id, self._num_slots, settled).get(self._peer_id, held)
        return self._change(now, held, target)

    def _look(self, now: float, claims: Mapping[str, Claim]) -> None:
        self._seen_since = {peer: self._seen_since.get(peer, now) for peer in claims}
        orphaned = orphans(claims, self._num_slots)
        self._orphaned_since = {slot: self._orphaned_since.get(slot, now) for slot in orphaned}
        if not orphaned:
            self._passed_over.clear()

    def _allocated(self, now: float, claims: Mapping[str, Claim]) -> tuple[int, ...]:
        """Return what is allocated to this peer, once those are passed over to whom an orphan has fallen in vain.

        They have died, or wait for something else; the others find that out at different times and may act twice,
        which costs less than a slot that nobody trains.
        """
        allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        patience = PATIENCE_HEARTBEATS * self._settings.heartbeat_seconds
        overdue = {slot for slot, since in self._orphaned_since.items() if now - since >= patience}
        late = {peer for peer, slots in allocation.items() if peer != self._peer_id and overdue & set(slots)}
        if late:
            self._passed_over |= late
            allocation = allocate(self._run_id, self._num_slots, claims, self._passed_over)
        return allocation[self._peer_id]

    def _change(self, now: float, held: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
        if target != held:
            self._changed_at = now
        return target
