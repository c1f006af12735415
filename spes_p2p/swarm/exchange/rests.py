"""Peers that have said BUSY are left in peace, by all downloads together."""

from __future__ import annotations

import random
from dataclasses import dataclass

LEAST_PAUSE_SECONDS, MOST_PAUSE_SECONDS = 0.25, 5.0
"""Pauses after BUSY double, and are drawn at random, so that those turned away do not return together."""
PROBE_SECONDS = 1.0
"""How long the one that asks first after a pause is awaited before another does."""


class Rests:
    """When busy peers may be asked again; times are the event loop's seconds.

    A peer that has no time for one download has none for the others either: one of them asks again, and once that gets
    something, they all do.
    """

    def __init__(self) -> None:
        self._rests: dict[str, _Rest] = {}

    def until(self, peer: str) -> float:
        """Return when a peer may be asked; 0 for one that was not busy."""
        return self._rests[peer].until if peer in self._rests else 0.0

    def was_busy(self, peer: str, now: float) -> None:
        """Note that it said BUSY."""
        rest = self._rests.setdefault(peer, _Rest())
        if rest.is_asked or now >= rest.until:  # else it has said so to several downloads at once
            rest.is_asked, rest.until = False, now + rest.pause * random.uniform(0.5, 1.0)
            rest.pause = min(2 * rest.pause, MOST_PAUSE_SECONDS)

    def asks(self, peer: str, now: float) -> None:
        """Note that a download asks it."""
        if peer in self._rests:
            self._rests[peer].is_asked, self._rests[peer].until = True, now + PROBE_SECONDS

    def was_free(self, peer: str) -> None:
        """Note that it sends something."""
        self._rests.pop(peer, None)


@dataclass
class _Rest:
    until: float = 0.0
    pause: float = LEAST_PAUSE_SECONDS
    is_asked: bool = False
