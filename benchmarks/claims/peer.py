"""A peer without tensors: versions are names, and a model is the name of its shared version."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from spes_p2p.swarm.claims import Claimant
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.quorum import State, latest, majority_of
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import Member, lag_of


def version_name(*parts: object) -> str:
    """Return a name that looks like a digest, and is as impartial."""
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()[:16]


@dataclass(eq=False)
class VirtualPeer:
    """What one peer knows and holds.

    Attributes:
        peer_id: Its name.
        max_slots: Slots it can train.
        skew: Seconds by which its clock is ahead.
        claimant: Decides what it holds.
        versions: Newest version it has of each slot.
        shared: Its model, by round and name.
        slots: What it holds.
        anchors: Version that it trains on from, by held slot.
        side: Of a partition; 0 where there is none.
        state: As in its claim.
        busy_until: It averages or stands still until then, and looks at no claims.
        stalled_until: It stands still until then, though its claim is renewed.
        last_read: Claims as it has read them last.
        is_gone: Dead, or has left.
    """

    peer_id: str
    max_slots: int
    skew: float
    claimant: Claimant
    versions: dict[int, State]
    shared: State
    slots: tuple[int, ...] = ()
    anchors: dict[int, str] = field(default_factory=dict)
    side: int = 0
    state: str = "joining"
    busy_until: float = 0.0
    stalled_until: float = 0.0
    last_read: dict[str, Claim] = field(default_factory=dict)
    is_gone: bool = False
    _claimed: tuple[tuple[object, ...], Claim | None] = ((), None)

    def claim(self) -> Claim:
        """Return its claim as it is now."""
        said = (self.state, self.slots, self.max_slots)
        if self._claimed[0] != said:
            claim = Claim(
                peer_id=self.peer_id,
                state=self.state,  # type: ignore[arg-type]
                slots=self.slots,
                max_slots=self.max_slots,
                since=1.0,
            )
            self._claimed = (said, claim)
        assert self._claimed[1] is not None
        return self._claimed[1]

    def hold(self, slots: Iterable[int]) -> None:
        """Train these slots, each from the newest version it has."""
        self.slots = tuple(slots)
        self.anchors = {slot: self.anchors.get(slot, self.versions[slot][1]) for slot in self.slots}

    def member(self) -> Member:
        """Return its roster entry, not validated: no virtual peer lies."""
        return Member.model_construct(
            peer_id=self.peer_id,
            round=self.shared[0],
            tokens=1,
            slots=self.slots,
            slot_rounds=tuple(self.versions[slot][0] for slot in self.slots),
            lags=tuple(lag_of(self.versions[slot][0], self.shared[0]) for slot in sorted(self.versions)),
            anchors={SHARED: self.shared[1]} | {VectorName.of_slot(slot): name for slot, name in self.anchors.items()},
        )

    def adopt(self, slot: int, offers: Iterable[State]) -> None:
        """Take the newest version of a slot that goes with its model, as `HeldSlots` does."""
        self.versions[slot] = latest([self.versions[slot], *offers], self.shared[0])

    def catch_up(self, shared: Iterable[State], offers: Mapping[int, Iterable[State]]) -> None:
        """Take over the model of most peers, and the newest version of each slot that belongs to it.

        Args:
            shared: All peers' models.
            offers: Available versions, by slot.
        """
        self.shared = majority_of(list(shared))
        for slot, versions in offers.items():
            self.adopt(slot, versions)
        self.anchors = {slot: self.versions[slot][1] for slot in self.slots}
