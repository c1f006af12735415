"""What a machine's owner has asked of its training, as the training loop sees it: step, wait, or give its place up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Intent:
    """What the owner's wish and rules amount to at this moment.

    Attributes:
        trains: Whether the peer may make steps.
        ends: Whether it ends after this round.
        leaves: Whether it is to leave now.
        held_seconds: Time for which it has been kept from training.
        threads: CPU threads of each rank; None leaves them.
        slots: Most slots to train; None for as many as it was started with.
    """

    trains: bool = True
    ends: bool = False
    leaves: bool = False
    held_seconds: float = 0.0
    threads: int | None = None
    slots: int | None = None


class Controls(Protocol):
    """The owner's controls."""

    def intent(self, step_seconds: float, wait_seconds: float) -> Intent:
        """Return what to do next: after a rest that keeps to the duty cycle, or a short wait if the peer is held.

        Args:
            step_seconds: Duration of the last step; 0 if none has been made since the last call.
            wait_seconds: Longest rest or wait; 0 for none.
        """

    def tell(self, place: str) -> None:
        """Take what a held peer does with its slots, in words."""


Act = Literal["step", "wait", "bring", "stand aside", "end", "leave"]
"""What a peer does next: a step; no step for a moment; bring what was trained to the round's end; give its slots to
others; end before the round's end, with nothing to bring; leave the run now."""


def decide(
    intent: Intent,
    *,
    has_trained: bool,
    is_due: bool,
    has_others: bool,
    has_voters: bool,
    lease_seconds: float,
) -> Act:
    """Return what a peer does next in its round.

    A held peer keeps its place: it meets the others at the round's end with what it has trained, so that they neither
    wait for it nor lack its vote. Once it has been held for a lease, and has nothing to bring, it stands aside, but not
    as the only voter, without which no round is certified. Without another peer there is no one to meet and nothing to
    lose by waiting.

    Args:
        intent: What the owner wants.
        has_trained: Whether this round has a step of this peer.
        is_due: Whether the round's training is over, or ends by steps, which this peer does not make.
        has_others: Whether another peer takes part in rounds.
        has_voters: Whether one that votes does.
        lease_seconds: Time for which a peer may keep its slots without training them.
    """
    if intent.leaves:
        return "leave"
    if intent.trains:
        return "step"
    if not has_trained and intent.ends:
        return "end"
    if not has_others:
        return "bring" if intent.ends and is_due else "wait"
    if not has_trained and has_voters and intent.held_seconds >= lease_seconds:
        return "stand aside"
    return "bring" if is_due else "wait"
