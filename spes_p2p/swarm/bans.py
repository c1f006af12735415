"""Whom a peer does not want to average with, by what it has seen itself: strikes, and bans that run out; who is new.

No hearsay: what others say of somebody only counts as their vote, in the roster that they have entered under their own
authenticated ids (`roster.distrusted`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.roster import MAX_DISTRUSTED, MAX_NEWCOMERS, SHARED

log = logging.getLogger(__name__)

STRIKES = 2
"""Rounds with evidence against a peer until it is banned; one is enough where there is proof."""
MEMORY_ROUNDS = 8
"""A strike is forgotten after so many rounds: whatever is done once in a while may be an accident."""
BAN_ROUNDS = 16
"""The first ban's length; each further one of the same peer is twice as long as the last."""
MAX_BAN_ROUNDS = 1024
PROBATION_ROUNDS = 4
"""Rounds that a peer must have committed with another until that one is not new to it."""


@dataclass
class _Case:
    """What this peer knows of another: rounds with evidence, bans so far, and until which round the last one is."""

    strikes: tuple[int, ...] = ()
    bans: int = 0
    until: int = 0


class Bans:
    """One peer's own judgement of the others, by authenticated id. The clock is the run's rounds."""

    def __init__(self) -> None:
        self._cases: dict[str, _Case] = {}
        self._met, self._rounds = Counter[str](), 0

    def meet(self, result: RoundResult) -> None:
        """Take note of whose work has gone into a round with this peer's."""
        if SHARED in result.committed and len(result.roster) > 1:
            self._rounds += 1
            self._met.update(member.peer_id for member in result.roster if member.tokens)

    def new_among(self, peers: Iterable[str]) -> tuple[str, ...]:
        """Return those with whom this peer has committed few rounds, ascending; nobody while it is new itself."""
        if self._rounds < PROBATION_ROUNDS:
            return ()
        return tuple(sorted(peer for peer in peers if self._met[peer] < PROBATION_ROUNDS))

    def note(self, round: int, evidence: Iterable[Mapping[str, Evidence]]) -> None:
        """Take note of a round's evidence; a peer gets one strike for a round, whatever it did in it.

        Args:
            round: Of the anchors it started from.
            evidence: Of each of its attempts, by peer.
        """
        seen: dict[str, Evidence] = {}
        for found in evidence:
            seen |= {peer: item for peer, item in found.items() if peer not in seen or item.is_proof}
        for peer, item in seen.items():
            self._strike(round, peer, item)

    def suspect(self, round: int, reasons: Mapping[str, str]) -> None:
        """Give peers a strike for a round in which they published what nobody should have; reasons by peer."""
        self.note(round, [{peer: Evidence(reason, is_proof=False) for peer, reason in reasons.items()}])

    def _strike(self, round: int, peer: str, evidence: Evidence) -> None:
        case = self._cases.setdefault(peer, _Case())
        recent = {strike for strike in case.strikes if strike > round - MEMORY_ROUNDS}  # guard: old-strike
        case.strikes = tuple(sorted(recent | {round}))
        log.warning("round %d: %s: %s", round + 1, peer[-6:], evidence.reason)
        if round >= case.until and (
            evidence.is_proof  # guard: ban-proof
            or len(case.strikes) >= STRIKES  # guard: ban-strikes
        ):
            length = min(BAN_ROUNDS * 2**case.bans, MAX_BAN_ROUNDS)  # guard: ban-doubling
            case.bans, case.until, case.strikes = case.bans + 1, round + 1 + length, ()
            del self._met[peer]  # guard: banned-newcomer
            log.warning("round %d: not averaging with %s for %d rounds", round + 1, peer[-6:], length)

    def banned(self, round: int) -> tuple[str, ...]:
        """Return who is banned in the averaging that starts from `round`, ascending."""
        return tuple(sorted(peer for peer, case in self._cases.items() if round < case.until))  # guard: ban-end

    def enter(self, contribution: Contribution, present: Iterable[str] = ()) -> Contribution:
        """Return a contribution whose roster entry says whom this peer distrusts, and who of `present` is new to it."""
        member = contribution.member
        distrusts = self.banned(member.round)[:MAX_DISTRUSTED]
        newcomers = self.new_among(set(present) - {member.peer_id})[:MAX_NEWCOMERS]
        said = {"distrusts": distrusts, "newcomers": newcomers}
        return replace(contribution, member=member.model_copy(update=said))
