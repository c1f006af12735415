"""Quorum and majorities: which peers vote, and which of several states a peer takes over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Claim

State = tuple[int, str]
"""Round and digest of a version."""
Having = Mapping[str, Mapping[VectorName, Version]]
"""The versions of each peer."""
MAX_VOTERS = 1024
"""Voters that a roster entry may name; they fill three quarters of the longest entry."""


def quorum(electorate: int) -> int:
    """Return how many voters must meet for a round to count: more than half of them."""
    return electorate // 2 + 1


def active_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the peers that take part in rounds."""
    return [peer for peer, claim in claims.items() if claim.state == "active"]


def has_begun(claims: Mapping[str, Claim]) -> bool:
    """Tell whether any live peer has committed a round of this run."""
    return any(claim.votes for claim in claims.values())


def voters_of(claims: Mapping[str, Claim]) -> list[str]:
    """Return the active peers with a vote, ascending: those that committed a round, or all if none did."""
    active = sorted(active_of(claims))
    return ([peer for peer in active if claims[peer].votes] or active)[:MAX_VOTERS]


def majority_of(states: Sequence[State]) -> State:
    """Select the state of `shared`, or of its moments, to take over: the most frequent one.

    The run's start, which all peers of a new run bring, loses to any trained state. Ties go as in a roster, so that two
    halves of a swarm with different anchors select the same one.
    """
    votes = Counter(states)
    return min(votes, key=lambda state: (state[0] == 0, -votes[state], -state[0], state[1]))


def newest(states: Sequence[State], model_round: int) -> State | None:
    """Select the version of a slot that training continues from; None if no version qualifies.

    The latest round wins; within a round the most frequent digest, then the smaller one. A version ahead of the model
    does not qualify, because it stems from the losing side of a partition. Therefore a round's result has a higher
    number than its start, and no version wins over its own successor.

    Args:
        states: The version of each of several peers.
        model_round: Round of the `shared` version that the slot is to go with.
    """
    votes = Counter(state for state in states if state[0] <= model_round)  # guard: slot-ahead
    return min(votes, key=lambda state: (-state[0], -votes[state], state[1]), default=None)


def latest(states: Sequence[State], model_round: int) -> State:
    """Select the version of a slot, or of its moments, to take over: the newest, even if it is only ahead of the model.

    Not the most frequent one: old versions remain with many peers that kept them once.

    Args:
        states: The version of each of several peers, at least one.
        model_round: Round of the `shared` version that the slot is to go with.
    """
    state = newest(states, model_round) or newest(states, max(round for round, _ in states))
    assert state is not None
    return state


def state_of(version: Version) -> State:
    """Return a version's round and digest."""
    return version.round, version.digest


def heard(having: Having, voters: Collection[str], min_round: int) -> Having:
    """Select the peers whose offers count: voters, or those of them at `min_round` or later if they are a majority.

    Otherwise several peers that join or return at once would outvote those that trained meanwhile, or one peer that
    claims a high round would outvote all others.
    """
    present = {peer: having[peer] for peer in voters if SHARED in having.get(peer, {})}
    newer = {peer: offers for peer, offers in present.items() if offers[SHARED].round >= min_round}
    return (newer if 2 * len(newer) > len(present) else present) or _after_a_stop(having)  # guard: far-ahead


def _after_a_stop(having: Having) -> Having:
    """Select the peers whose offers count after the whole swarm stopped: those one round ahead of the majority, or all.

    A quorum committed that round, and the others stopped before they published it. A peer that is further ahead has
    trained on without the others, and counts like any other.
    """
    shared = [state_of(offers[SHARED]) for offers in having.values() if SHARED in offers]
    most = majority_of(shared)[0] if shared else 0
    ahead = {peer: offers for peer, offers in having.items() if SHARED in offers and offers[SHARED].round == most + 1}
    return ahead if most and ahead else having
