"""Who has a vote, and which of several states a peer takes over that has none, or another than most."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import MAX_VOTERS, SHARED, newest

State = tuple[int, str]
"""Round and digest of a version."""
Having = Mapping[str, Mapping[str, Version]]
"""What peers have, by peer and name."""


def active_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the peers that take part in rounds."""
    return [peer for peer, claim in claims.items() if claim.state == "active"]


def has_begun(claims: Mapping[str, Claim]) -> bool:
    """Tell whether anybody has committed a round of this run, and is still here."""
    return any(claim.votes for claim in claims.values())


def voters_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the active peers that have a vote: all, while none has committed a round; no more than an entry names."""
    active = sorted(active_of(claims))
    return ([peer for peer in active if claims[peer].votes] or active)[:MAX_VOTERS]


def majority_of(states: Sequence[State]) -> State:
    """Return the state of `shared`, or of its moments, to take over: as most have it.

    The run's start, which all bring who begin together, has no vote where anybody has trained. Ties go as in a roster,
    so that two halves of a swarm with different anchors agree whose are kept.
    """
    votes = Counter(states)
    return min(votes, key=lambda state: (state[0] == 0, -votes[state], -state[0], state[1]))


def latest(states: Sequence[State], model_round: int) -> State:
    """Return the version of a slot, or of its moments, to take over: as late as anybody has it, as in a roster.

    Old ones lie with many who kept them once. One that is ahead of the model is taken only if there is no other.

    Args:
        states: Versions as several peers have them, one at least.
        model_round: Round of the `shared` version that the slot is to go with.
    """
    state = newest(states, model_round) or newest(states, max(round for round, _ in states))
    assert state is not None
    return state


def state_of(version: Version) -> State:
    """Return round and digest."""
    return version.round, version.digest


def heard(having: Having, voters: Collection[str], min_round: int) -> Having:
    """Return who is listened to: whoever has a vote, and of those whoever is at `min_round`, if anybody is.

    Several who join or come back at once must not outvote those who have trained meanwhile; nor may one that says to be
    there outvote all others, so that most of those with a vote must be.
    """
    present = {peer: having[peer] for peer in voters if SHARED in having.get(peer, {})}
    newer = {peer: offers for peer, offers in present.items() if offers[SHARED].round >= min_round}
    return (newer if 2 * len(newer) > len(present) else present) or _returning(having)  # guard: far-ahead


def _returning(having: Having) -> Having:
    """Return who is listened to where a whole swarm stopped at once: all, or who is one round ahead of most.

    That round was committed, by a quorum, and the others have not lived to publish it. Who is further ahead has
    trained on without them, and counts like any other.
    """
    shared = [state_of(offers[SHARED]) for offers in having.values() if SHARED in offers]
    most = majority_of(shared)[0] if shared else 0
    ahead = {peer: offers for peer, offers in having.items() if SHARED in offers and offers[SHARED].round == most + 1}
    return ahead if most and ahead else having
