"""What a machine's owner has asked of its training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Intent:
    """What the owner's wish and rules amount to at this moment.

    Attributes:
        trains: Whether the peer may hold slots and make steps.
        ends: Whether it ends after this round.
        leaves: Whether it is to leave now.
        threads: CPU threads of each rank; None leaves them.
        slots: Most slots to train; None for as many as it was started with.
    """

    trains: bool = True
    ends: bool = False
    leaves: bool = False
    threads: int | None = None
    slots: int | None = None


class Controls(Protocol):
    """The owner's controls."""

    def intent(self, step_seconds: float, rest_seconds: float) -> Intent:
        """Return what to do next, after a rest that keeps to the duty cycle.

        Args:
            step_seconds: Duration of the last step; 0 if none has been made since the last call.
            rest_seconds: Longest rest; 0 for none.
        """
