"""`spes health`: tell a container's supervisor whether its peer makes progress."""

from __future__ import annotations

import contextlib
import time

from spes_p2p.config.commands import HealthConfig
from spes_p2p.presentation import say


def main(config: HealthConfig) -> int:
    """Print the age of the last sign of life; return 1 if it exceeds `minutes`."""
    # The names are those of joining and checkpoints, which this does not import: that takes seconds, once a minute.
    signs = [config.output / "address", *(config.output / "checkpoint").glob("round-*/state.json")]
    times = []
    for sign in signs:
        with contextlib.suppress(FileNotFoundError):  # an old checkpoint may go meanwhile
            times.append(sign.stat().st_mtime)
    if not times:
        say("has not joined yet")
        return 1
    minutes = (time.time() - max(times)) / 60
    say(f"last sign of life {minutes:.1f} minutes ago")
    return 0 if minutes <= config.minutes else 1
