"""What one peer has seen of the attempts at the open round."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from spes_p2p.swarm.certificate import Body, Result, Vote, is_enough
from spes_p2p.swarm.names import SHARED
from spes_p2p.swarm.proposal import Entered, Meeting, Proposal
from spes_p2p.swarm.roster import Roster

OLD_ATTEMPTS = 8
"""Attempts back of which votes still certify."""
MUTE_ATTEMPTS = 2
"""Attempts whose correct bodies a voter leaves unvoted before it counts as absent."""


@dataclass
class Attempt:
    """What this peer has seen of one attempt."""

    entered: dict[str, Entered] = field(default_factory=dict)
    """Entries, by peer; if this peer leads it."""
    meeting: Meeting | None = None
    """As this peer has closed it."""
    roster: Roster | None = None
    results: dict[str, list[Result]] = field(default_factory=dict)
    """One of each peer, or two different ones."""
    came_at: dict[str, float] = field(default_factory=dict)
    """Loop time at which each peer's first result came."""
    lacking: frozenset[str] = frozenset()
    """Members whose results its leader lacks."""
    ends_at: float = 0.0
    """DHT time at which the next round's training should end, as this peer has averaged."""
    proposals: dict[str, Proposal] = field(default_factory=dict)
    """Those without a fault, by body."""
    votes: dict[str, dict[str, Vote]] = field(default_factory=lambda: defaultdict(dict))
    """Votes by peer and body; two of a peer prove it guilty."""

    @property
    def has_met(self) -> bool:
        """Whether there is something to average, or to vote for."""
        return self.roster is not None or bool(self.proposals)

    def has_member(self, peer: str) -> bool:
        """Return whether a peer averages `shared`, as far as the roster is known here."""
        return self.roster is not None and peer in self.roster.groups[SHARED]

    def lacks(self, result: Result) -> bool:
        """Return whether a result says something new; two of a peer are enough, as neither counts."""
        known = self.results.get(result.peer_id, [])
        return len(known) < 2 and all(each.signed_part != result.signed_part for each in known)

    def add(self, result: Result, loop_time: float) -> None:
        """Keep a signed result."""
        self.results.setdefault(result.peer_id, []).append(result)
        self.came_at.setdefault(result.peer_id, loop_time)

    def results_before(self, loop_time: float) -> list[Result]:
        """Return the results of peers whose first one came before some time."""
        return [each for peer, of in self.results.items() if self.came_at[peer] <= loop_time for each in of]


class Attempts:
    """What one peer has seen of the attempts at the round after a body.

    Args:
        last: The body.
        me: This peer.
        number: The attempt that is open here.
        loop_time: Of now, when the round begins.
    """

    def __init__(self, last: Body, me: str, number: int, loop_time: float) -> None:
        self.number = number
        self.num_slow = 0
        """Attempts at whose end this peer had waited in vain."""
        self._last = last
        self._me = me
        self._seen: dict[int, Attempt] = {}
        self._stated: dict[str, int] = {}
        """The newest attempt that each voter is known to be in."""
        self._heard_at = dict.fromkeys(last.voters, loop_time)
        """Loop time at which each voter last entered an attempt, or voted; before, that of the round's beginning."""
        self._lost: set[frozenset[str]] = set()
        """Pairs of a voter and a peer that it has lost in one of the round's attempts."""

    def of(self, number: int) -> Attempt | None:
        """Return what was seen of an attempt; None if it matters no more, or not yet: a liar can state any."""
        is_near = self.number - OLD_ATTEMPTS <= number <= self.number + 1
        return self._seen.setdefault(number, Attempt()) if is_near else None

    def go_to(self, number: int) -> None:
        """Open a later attempt."""
        self.number = number
        self._seen = {each: of for each, of in self._seen.items() if each >= number - OLD_ATTEMPTS}

    def state(self, peer: str, number: int, loop_time: float) -> None:
        """Note that a voter is in an attempt."""
        if peer in self._last.voters:
            self._heard_at[peer] = loop_time
            self._stated[peer] = max(number, self._stated.get(peer, 0))

    def of_quorum(self, is_quorum: Callable[[Collection[str]], bool]) -> int:
        """Return the newest attempt that a quorum is in, or past, as far as this peer knows."""
        stated = {**dict.fromkeys(self._last.voters, 0), **self._stated}
        if self._me in stated:
            stated[self._me] = self.number
        attempts = sorted(set(stated.values()), reverse=True)
        return next((each for each in attempts if is_quorum({p for p in stated if stated[p] >= each})), 0)

    def mute(self, since: float) -> set[str]:
        """Return the other voters that have entered no attempt since some loop time, or that left two bodies unvoted
        that this peer has voted for."""
        voted = [of.votes for number, of in self._seen.items() if number < self.number and of.votes[self._me]]
        left = Counter(peer for votes in voted for peer in self._last.voters if not votes[peer])
        is_heard = {peer for peer, at in self._heard_at.items() if at >= since and left[peer] < MUTE_ATTEMPTS}
        return set(self._last.voters) - is_heard - {self._me}

    # ------------------------------------------------------------------ members that were lost

    def lose(self, peer: str, voter: str) -> bool:
        """Note that a voter has lost a peer in averaging; return whether more than a quarter of the voters have."""
        self._lost.add(frozenset((peer, voter)))
        return 4 * sum(peer in link for link in self._lost) > len(self._last.voters)

    def without_lost(self, entered: list[Entered], absent: Collection[str]) -> list[Entered]:
        """Return a meeting without one end of each lost link between voters, as long as enough of them are left.

        The voter with the most lost links goes first: one that reduces nothing, or that states to have lost others.
        """
        links = [link for link in self._lost if link <= set(self._last.voters)]
        while links:
            count = Counter(peer for link in links for peer in link)
            for worst in sorted(count, key=lambda peer: (-count[peer], peer)):
                rest = [each for each in entered if each.entry.peer_id != worst]
                if is_enough(self._last, {each.entry.peer_id for each in rest}, absent):
                    break
            else:
                break
            # guard: entered, links = rest, -> links =
            entered, links = rest, [link for link in links if worst not in link]
        return entered
