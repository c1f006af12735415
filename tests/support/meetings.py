"""Peers that come to a round at different times, and the rosters that they met on."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from real_peers import PeerProcess, begin_average, contribution, start_swarm

JITTER_SECONDS = 1.0
MEETING_SECONDS = 20.0
"""A complete group does not wait for it."""
SHARED_NUMEL = 4096


@dataclass(frozen=True)
class MeetingNote:
    """One round's meeting.

    Attributes:
        sizes: Of the rosters that peers were on, ascending; one number if all met in one.
        seconds: From the last arrival until the last peer had a roster.
        dropped: Why peers dropped the round.
    """

    sizes: tuple[int, ...]
    seconds: float
    dropped: tuple[str, ...]


def start_meeting(directory: Path, count: int) -> list[PeerProcess]:
    """Return peers with little to average."""
    return start_swarm(directory, count, shared_numel=SHARED_NUMEL)


def meet(peers: Sequence[PeerProcess], seed: int) -> MeetingNote:
    """Let all peers come to a round within a second of each other."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    arrivals = sorted((draw.uniform(0.0, JITTER_SECONDS), place) for place in range(len(peers)))
    never = threading.Event()
    before = 0.0
    for at, place in arrivals:
        never.wait(at - before)
        before = at
        item = contribution(peers[place].peer_id, generator, shared_numel=SHARED_NUMEL)
        begin_average([peers[place]], [item], expected=len(peers), meeting_seconds=MEETING_SECONDS - at)
    results = {place: peers[place].finish() for place in range(len(peers))}
    rosters = {tuple(sorted(member.peer_id for member in result.roster)) for result in results.values()}
    return MeetingNote(
        sizes=tuple(sorted(map(len, rosters))),
        seconds=max(at + results[place].matchmaking_seconds for at, place in arrivals) - arrivals[-1][0],
        dropped=tuple(sorted({reason for result in results.values() for reason in result.dropped.values()})),
    )
