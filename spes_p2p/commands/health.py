"""`spes health`: tell a container's supervisor whether its peer makes progress."""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.request
from pathlib import Path
from typing import Any

from spes_p2p.config.commands import HealthConfig
from spes_p2p.presentation import say

ROUNDS = 3
"""Number of longest rounds within which a peer must save one."""
LEAST_MINUTES, UNKNOWN_MINUTES = 5.0, 30.0
PHASES = ("max_seconds", "matchmaking_seconds", "averaging_seconds", "exchange_seconds")


def main(config: HealthConfig) -> int:
    """Print the age of the last sign of life; return 1 if it is too old and the peer is not paused."""
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
    limit = config.minutes or longest_minutes(config.output)
    if minutes <= limit:
        say(f"last sign of life {minutes:.1f} minutes ago, of {limit:.1f} allowed")
        return 0
    if is_paused(config.output):
        say("paused by its owner")
        return 0
    say(f"last sign of life {minutes:.1f} minutes ago, more than {limit:.1f}")
    return 1


def longest_minutes(output: Path) -> float:
    """Return the time in which a peer must have saved a round, by the run's settings.

    The manifest in the folder was verified when the peer joined. Rounds of mode `steps` have no longest time.
    """
    for file in output.glob("versions/manifest.*.bin"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            rounds: dict[str, Any] = json.loads(file.read_bytes())["config"]["round"]
            if rounds["mode"] == "tokens":
                return max(LEAST_MINUTES, ROUNDS * sum(float(rounds[phase]) for phase in PHASES) / 60)
    return UNKNOWN_MINUTES


def is_paused(output: Path) -> bool:
    """Tell whether the peer's page answers that its owner, or a rule of theirs, has paused it."""
    try:
        address = (output / "page").read_text().strip()
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # no proxy knows this machine's page
        with opener.open(f"{address}state.json", timeout=5.0) as answer:
            return bool(json.load(answer)["now"]["state"] == "paused")
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return False
