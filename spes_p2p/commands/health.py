"""The command by which a container's keeper asks whether its peer gets on: `scripts/health.py`."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

from pydantic_settings import SettingsConfigDict

from spes_p2p.config import CommandConfig, PositiveFloat
from spes_p2p.presentation import say


class HealthConfig(CommandConfig):
    """When a peer last joined, or saved what it had trained; it does so after every round that it commits."""

    model_config = SettingsConfigDict(env_prefix="SPES_HEALTH_", cli_prog_name="health.py")

    output: Path
    """The peer's --output."""
    minutes: PositiveFloat = 30.0
    """For how long nothing may happen: several rounds of the run."""
    log_level: str = "warning"
    """Least severe event to log."""


def main(config: HealthConfig) -> int:
    """Say it; return 1 if it was too long ago."""
    # Named by joining and recovery, whose import takes seconds: too long for what is asked every minute.
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
