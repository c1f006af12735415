"""What a round's agreement needs of its peer: the run's numbers, a wire, and its part in the round."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spes_p2p.swarm.certificate import Certificates, Question
from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.proposal import Message
from spes_p2p.swarm.roster import Member, Roster

LACKING_SECONDS = 1.0
"""Time that voters have to send a leader the results that it lacks."""


@dataclass(frozen=True)
class Rules:
    """The numbers of a run that its decisions depend on.

    Attributes:
        min_peers: Members with which the run begins.
        round_seconds: Longest time from the certificate of a round until the end of the next one's training.
        meeting_seconds: Time that a leader waits for late peers.
        averaging_seconds: Longest time that averaging takes.
        results_seconds: Time that a leader waits for results once it has its own.
        shrink_seconds: Time after the end of a round's training after which voters may be named absent.
    """

    min_peers: int
    round_seconds: float
    meeting_seconds: float
    averaging_seconds: float
    results_seconds: float
    shrink_seconds: float

    @property
    def mute_seconds(self) -> float:
        """Time without a word after which a voter that is here may be named absent: not while it still trains."""
        # guard: return self.shrink_seconds
        return max(self.shrink_seconds, self.round_seconds + 2 * self.meeting_seconds)

    @property
    def decision_seconds(self) -> float:
        """Time from a peer's own result to the certificate, in the first attempt."""
        return 2 * self.results_seconds + LACKING_SECONDS


class Wire(Protocol):
    """What an agreement needs of the swarm; no call waits for an answer."""

    def post(self, peer: str, message: Message | Certificates | Question) -> None:
        """Send a message, which may be lost, to another peer."""

    def peers(self) -> Collection[str]:
        """Return the other peers that follow the run."""

    def now(self) -> float:
        """Return the DHT time."""

    def is_gone(self, peer: str) -> bool:
        """Return whether a peer's lease has run out, as far as this peer knows."""


@dataclass(frozen=True)
class Outcome:
    """What an attempt's averaging brought a member.

    Attributes:
        digests: Of the versions that it would commit; none of `shared` if its averaging failed. None if there is
            nothing to decide, as no member has trained.
        ends_at: DHT time at which the next round's training should end.
        lost: The member whose fault a failure was; empty if none is known.
    """

    digests: Mapping[VectorName, str] | None = field(default_factory=dict)
    ends_at: float = 0.0
    lost: str = ""


@dataclass(frozen=True)
class Part:
    """What a peer brings to a round.

    Attributes:
        member: Its entry in the roster.
        average: Averages with a roster's members in an attempt; raises nothing for another peer's fault.
        expected: Returns the peers that complete a meeting.
        closes_from: DHT time from which a meeting may be closed without the rest.
    """

    member: Member
    average: Callable[[Roster, int], Awaitable[Outcome]]
    expected: Callable[[], Collection[str]]
    closes_from: float
