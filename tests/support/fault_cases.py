"""Which faults strike a peer in which moments of a round, and what there is to say of one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import misbehaving
from peer_server import ATTEMPTS, ROUNDS

from spes_p2p.swarm.agreement import OUT_ROUNDS
from spes_p2p.swarm.hivemind_swarm import rules_of

Fault = Literal["kill", "freeze", "cut", "lie"]
PHASES: Mapping[str, tuple[str, ...]] = {
    "with the roster": (misbehaving.ROSTER,),
    "before its first byte": (misbehaving.FIRST_BYTE,),
    "in the middle of sending": (misbehaving.SENDING,),
    "as a reducer": (misbehaving.REDUCING,),
    "before it confirms": (misbehaving.DECIDING,),
}
"""The moments in which a victim may be struck, by phase; repeats take turns."""
SLOTS = [(0, 1), (1,), (2,), (0, 1, 2)]
"""The last is the victim's: it shares every slot with somebody."""
MEETING_SECONDS = 2.0
ATTEMPT_SECONDS = 2 * ROUNDS.matchmaking_seconds + ROUNDS.averaging_seconds + rules_of(ROUNDS).decision_seconds
"""Twice the time to meet, the time to average, and the time to decide."""
DEADLINE_SECONDS = MEETING_SECONDS + ATTEMPTS * ATTEMPT_SECONDS
"""Of a round."""
ROUND_SECONDS = MEETING_SECONDS + ATTEMPT_SECONDS
TRIES = 3
SPARE_SECONDS = 30.0
MOST_ROUNDS_TO_HEAL = OUT_ROUNDS + 4
"""A peer that was lost before it voted is out for some rounds."""


@dataclass
class Case:
    """What one fault did.

    Attributes:
        fault: What was done to the victim.
        phase: When.
        moment: Exactly when.
        codec: How deltas travelled.
        is_reached: Whether the victim came to that moment; nothing else counts if not.
        seconds: From the fault to the last survivor's result.
        wrong: What the referee found, in this round and until the swarm was whole: must be empty.
        committed: Survivors that committed the round.
        attempts: Most attempts that a survivor made.
        reasons: Why survivors dropped it.
        named: Survivors that named the victim, as lost or as refused.
        notes: What survivors saw in each attempt.
        victim: What became of its own round.
        healing_rounds: Rounds from there until everybody averaged together again.
        healing_seconds: Time of them.
    """

    fault: Fault
    phase: str
    moment: str
    codec: str
    is_reached: bool = True
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    committed: int = 0
    attempts: int = 0
    reasons: list[str] = field(default_factory=list)
    named: int = 0
    notes: list[str] = field(default_factory=list)
    victim: str = ""
    healing_rounds: int = 0
    healing_seconds: float = 0.0
