"""A peer without tensors: what it holds, and when it may look at claims."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from spes_p2p.swarm.claims import Claimant
from spes_p2p.swarm.records import Claim


@dataclass(eq=False)
class VirtualPeer:
    """What one peer knows and holds.

    Attributes:
        peer_id: Its name.
        max_slots: Slots it can train.
        skew: Seconds by which its clock is ahead.
        claimant: Decides what it holds.
        round: Rounds that it knows to be committed.
        slots: What it holds.
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
    round: int = 0
    slots: tuple[int, ...] = ()
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
        """Train these slots."""
        self.slots = tuple(slots)
