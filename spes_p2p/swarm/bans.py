"""Which peers this peer distrusts, from what it has observed itself: strikes, and bans that expire.

Hearsay has no effect: what other peers say of a peer counts only as their vote, in the roster entry that they send
under their own authenticated ids (`Roster.distrusted`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.roster import MAX_DISTRUSTED

log = logging.getLogger(__name__)

STRIKES = 2
"""Rounds with evidence that ban a peer; one round with proof is enough."""
MEMORY_ROUNDS = 8
"""A strike expires after this many rounds, because a rare event may be an accident."""
BAN_ROUNDS = 16
"""Length of a peer's first ban; each further ban is twice as long as the one before."""
MAX_BAN_ROUNDS = 1024


@dataclass
class _Case:
    """What is known of one peer: rounds with evidence, number of bans, and the round in which the last ban ends."""

    strikes: tuple[int, ...] = ()
    bans: int = 0
    until: int = 0


class Bans:
    """One peer's strikes and bans of other peers, by authenticated id. Time is counted in the run's rounds."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}

    def record(self, round: int, evidence: Mapping[str, Evidence]) -> None:
        """Record the evidence of an attempt at a round: at most one strike per peer and round.

        Args:
            round: Round of the anchors that it started from.
            evidence: Evidence by peer.
        """
        for peer, item in evidence.items():
            self._strike(round, peer, item)

    def suspect(self, round: int, reasons: Mapping[str, str]) -> None:
        """Give peers a strike for versions that they published in a round; reasons by peer."""
        self.record(round, {peer: Evidence(reason, is_proof=False) for peer, reason in reasons.items()})

    def _strike(self, round: int, peer: str, evidence: Evidence) -> None:
        case = self._cases.setdefault(peer, _Case())
        recent = {strike for strike in case.strikes if strike > round - MEMORY_ROUNDS}  # guard: always
        case.strikes = tuple(sorted(recent | {round}))
        log.warning("round %d: %s: %s", round + 1, peer[-6:], evidence.reason)
        if round >= case.until and (
            evidence.is_proof  # guard: operand
            or len(case.strikes) >= STRIKES  # guard: >= STRIKES -> > STRIKES
        ):
            length = min(BAN_ROUNDS * 2**case.bans, MAX_BAN_ROUNDS)  # guard: 2** -> 1**
            case.bans += 1
            case.until = round + 1 + length
            case.strikes = ()
            log.warning("round %d: not averaging with %s for %d rounds", round + 1, peer[-6:], length)

    def banned(self, round: int) -> tuple[str, ...]:
        """Return the peers banned from the averaging that starts at `round`, ascending."""
        # guard: round < case.until -> case.bans
        return tuple(sorted(peer for peer, case in self._cases.items() if round < case.until))

    def distrusted(self, round: int) -> tuple[str, ...]:
        """Return the banned peers that this peer's roster entry names."""
        return self.banned(round)[:MAX_DISTRUSTED]
