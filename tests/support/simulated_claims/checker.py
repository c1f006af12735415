"""What must never happen to claims, and how long things take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from spes_p2p.swarm.claims import coverage

MOST_ORPHANED_SECONDS = 120.0
"""Three leases and as many heartbeats: the peer to which an orphan falls may die as well."""


@dataclass
class Report:
    """What came of one swarm.

    Attributes:
        violations: What must not have happened, in words.
        orphaned_seconds: How long each slot that lost its last holder waited for another while capacity sufficed, by
            what took the holder.
        adoptions: Slots that active peers took over.
        peer_seconds: Time of all active peers together.
    """

    violations: list[str] = field(default_factory=list)
    orphaned_seconds: dict[str, list[float]] = field(default_factory=dict)
    adoptions: int = 0
    peer_seconds: float = 0.0


def unsettled(num_slots: int, held: Mapping[str, Sequence[int]], capacity: Mapping[str, int]) -> list[str]:
    """Return the faults of an allocation of slots, if it were final."""
    counts = coverage({peer: tuple(slots) for peer, slots in held.items()}, num_slots)
    can, most = sum(counts), sum(min(slots, num_slots) for slots in capacity.values())
    faults = [f"{peer} holds more than its {capacity[peer]} slots" for peer in held if len(held[peer]) > capacity[peer]]
    if can < most:
        faults.append(f"capacity lies idle: {can} of {most} slots")
    if counts.count(0) > max(0, num_slots - most):
        faults.append(f"{counts.count(0)} slots are orphans at a capacity of {most}: {counts}")
    if max(counts) - min(counts) > 1:
        faults.append(f"coverage is uneven: {counts}")
    return faults


class Checker:
    """Watches everything that happens in one simulated swarm, from outside of it.

    Args:
        num_slots: Experts per layer.
        cooldown_seconds: Time in which no peer may undo its own change, unless it sees an orphan.
    """

    def __init__(self, num_slots: int, cooldown_seconds: float) -> None:
        self.report = Report()
        self._num_slots = num_slots
        self._cooldown = cooldown_seconds
        self._orphaned: dict[tuple[int, int], tuple[float, str]] = {}
        self._changed: dict[tuple[str, int, bool], float] = {}

    # ------------------------------------------------------------------ allocation of slots

    def look(self, now: float, side: int, held: Collection[Sequence[int]], sufficient: bool, cause: str) -> None:
        """Note the orphans among what one side's live peers hold.

        Args:
            now: Virtual time in seconds.
            side: Of a partition; 0 where there is none.
            held: Slots of each of its peers.
            sufficient: Whether these peers could hold every slot.
            cause: What has just happened.
        """
        covered = set().union(*held)
        for slot in range(self._num_slots):
            if slot in covered or not sufficient:
                since, why = self._orphaned.pop((side, slot), (now, ""))
                if why and slot in covered:
                    self._covered_again(now, slot, now - since, why)
            else:
                self._orphaned.setdefault((side, slot), (now, cause))

    def _covered_again(self, now: float, slot: int, waited: float, why: str) -> None:
        self.report.orphaned_seconds.setdefault(why, []).append(waited)
        if waited > MOST_ORPHANED_SECONDS:
            self._violated(now, f"slot {slot} has been an orphan for {waited:.0f} s after a {why}")

    def forget_side(self, side: int) -> None:
        """Stop waiting for the orphans of a side that is no more."""
        self._orphaned = {key: value for key, value in self._orphaned.items() if key[0] != side}

    def change(self, now: float, peer: str, old: Sequence[int], new: Sequence[int], saw_orphan: bool) -> None:
        """Note that a peer holds other slots than before.

        Args:
            now: Virtual time in seconds.
            peer: The peer.
            old: Slots before.
            new: Slots after.
            saw_orphan: Whether it saw a slot without a holder.
        """
        moved = [(slot, True) for slot in set(new) - set(old)] + [(slot, False) for slot in set(old) - set(new)]
        for slot, is_adopted in moved:
            since = now - self._changed.get((peer, slot, not is_adopted), float("-inf"))
            if since < self._cooldown and not saw_orphan:
                self._violated(now, f"{peer} changes its mind about slot {slot} after {since:.0f} s")
            self._changed[peer, slot, is_adopted] = now
            self.report.adoptions += is_adopted

    def restarted(self, peer: str) -> None:
        """Forget what a process has changed before it died."""
        self._changed = {key: at for key, at in self._changed.items() if key[0] != peer}

    def settled(self, now: float, faults: Sequence[str]) -> None:
        """Note what is wrong with a swarm that nothing has happened to for a while."""
        for fault in faults:
            self._violated(now, fault)

    def _violated(self, now: float, what: str) -> None:
        self.report.violations.append(f"at {now:.0f} s: {what}")
