"""Who averages what: groups that every member derives from one snapshot, identically.

The leader of a matchmaking broadcasts what each member says of itself; from then on nobody needs to talk.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spes_p2p.config import LEAST_MBIT
from spes_p2p.errors import RecordError
from spes_p2p.swarm.invites import MAX_SHOWN_CHARS
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import MAX_SLOTS, Count, PeerId, Seconds, Slot

MAX_MEMBER_BYTES = 64 * 1024
MOST_DISTRUSTED = 16
"""Peers that a member may want left out."""
MOST_NEWCOMERS = 64
"""Peers that a member may call new."""
NEWCOMERS_CREDIT = 0.25
"""What a token of somebody counts whom most others call new: identities are free, and a liar's next one is new."""
MOST_VOTERS = 1024
"""Peers that a member may know to have a vote; an entry with so many is three quarters of the longest."""
MOST_LAG = 99
"""Rounds that a version lies behind its member's model, or more; said of none, too, and nothing to go on from."""
LEAST_VOTERS = 5
"""Members below which nobody is left out: of four, two could outvote one."""
MOST_TOKENS = 2**34
"""More than any one peer can train between two rounds; a larger weight is a lie, or an accident."""
ShortDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def slot_name(slot: int) -> VectorName:
    """Return the name of a slot's group and version."""
    return VectorName.of_slot(slot)


def moments_name(group: str) -> VectorName:
    """Return the name of the version that holds a group's averaged optimizer moments."""
    return VectorName(f"moments-{group}")


def is_bundle(name: str) -> bool:
    """Tell whether a version's name is that of model weights."""
    return isinstance(name, VectorName) and name.is_weights


def kind_of(name: str) -> str:
    """Return whose size a vector has: `shared`, `slot`, `moments-shared` or `moments-slot`."""
    return name.split("slot-")[0] + "slot" if "slot-" in name else name


class Member(BaseModel):
    """What a peer says of itself when it enters a round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peer_id: PeerId
    round: Count
    """Round of the anchor that the deltas start from."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]  # guard: token-bounds
    """Tokens trained since the anchor: the weight of this member's deltas, by its `credits`; 0 only receives."""
    slots: tuple[Slot, ...] = Field(max_length=128)
    """Slots it brings deltas of."""
    slot_rounds: tuple[Count, ...] = Field(default=(), max_length=128)
    """Round of the version that each of them starts from, in their order; one that was an orphan may lag behind, and
    one of the losing side of a partition may be ahead of the member's model."""
    lags: tuple[Annotated[int, Field(ge=0, le=MOST_LAG)], ...] = Field(default=(), max_length=MAX_SLOTS)
    """Rounds by which the newest version that it has of each of the model's slots lies behind its model, by slot; empty
    where it says nothing of them."""
    anchors: dict[Annotated[str, Field(pattern=r"^(shared|slot-(0|[1-9][0-9]{0,3}))$")], ShortDigest] = Field(
        max_length=129  # guard: anchor-name
    )
    """Digest of each anchor, by group."""
    tokens_per_second: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
    ready_at: Seconds
    """DHT time of entering."""
    sync_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
    """What synchronising took it last time, from entering to training again."""
    uplink_mbit: Annotated[float, Field(ge=LEAST_MBIT, le=1e7, allow_inf_nan=False)] | None = None  # guard: uplink-min
    """What it may send, in 10^6 bits per second, if that is limited."""
    refreshes: bool = False
    """It fetches some of the others' slots in a round, not all, so that nobody counts on it to pass them on."""
    calls_only: bool = False
    """Nobody can call it, though whomever it has called can talk to it: it reduces nothing, and passes nothing on."""
    invite: Annotated[str, Field(max_length=MAX_SHOWN_CHARS)] = ""
    """What it shows of its invite, where the run is closed."""
    distrusts: tuple[PeerId, ...] = Field(default=(), max_length=MOST_DISTRUSTED)
    """Whom it has banned, by what it has seen itself."""
    newcomers: tuple[PeerId, ...] = Field(default=(), max_length=MOST_NEWCOMERS)
    """With whom it has committed few rounds yet, though it has been here for longer itself."""
    voters: tuple[PeerId, ...] = Field(default=(), max_length=MOST_VOTERS)
    """Whose part in a round decides whether that counts, as far as it knows: who has committed one since joining, or
    all if nobody has; empty where it says nothing of it."""
    electorate: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Peers that have a vote, as far as it knows; 0 for as many as it expects to meet."""

    @model_validator(mode="after")
    def _check_rounds(self) -> Member:
        if self.slot_rounds and len(self.slot_rounds) != len(self.slots):
            raise ValueError("slot_rounds must name a round for each slot, or none")
        return self

    def starts(self) -> dict[int, tuple[int, str]]:
        """Return round and digest of the anchor of each slot."""
        rounds = self.slot_rounds or (0,) * len(self.slots)
        return {
            slot: (round, self.anchors.get(slot_name(slot), "")) for slot, round in zip(self.slots, rounds, strict=True)
        }

    @classmethod
    def decode(cls, peer_id: str, data: str | bytes) -> Member:
        """Return the member whose authenticated id is `peer_id`.

        Raises:
            RecordError: malformed, oversized, or it names another peer.
        """
        if not isinstance(data, str | bytes) or len(data) > MAX_MEMBER_BYTES:
            raise RecordError(f"{peer_id} sent no roster entry")
        try:
            member = cls.model_validate_json(data)
        except ValidationError as error:
            raise RecordError(f"{peer_id} sent a malformed roster entry: {error.errors()[0]['msg']}") from error
        if member.peer_id != peer_id:  # guard: entry-sender
            raise RecordError(f"{peer_id} sent a roster entry of {member.peer_id}")
        return member


@dataclass(frozen=True)
class Groups:
    """The derived groups of one roster.

    Attributes:
        round: The anchor's round that the majority holds.
        behind: Members whose shared anchor is not the majority's, or whom the others distrust; they catch up, their
            deltas do not count.
        members: Member ids by group name, ascending, at least one each.
    """

    round: int
    behind: tuple[str, ...]
    members: Mapping[str, tuple[str, ...]]


def uplinks(members: Sequence[Member]) -> dict[str, float]:
    """Return what each member may send; who states nothing is taken to be as fast as the fastest that does.

    Nothing is asked of those who cannot be called: two of them could not even talk to each other.
    """
    stated = [member.uplink_mbit for member in members if member.uplink_mbit is not None]
    fastest = max(stated, default=1.0)
    rates = {member.peer_id: fastest if member.uplink_mbit is None else member.uplink_mbit for member in members}
    return {member.peer_id: 0.0 if member.calls_only else rates[member.peer_id] for member in members}


def credits(roster: Sequence[Member]) -> dict[str, float]:
    """Return what a token of each member counts in means: less of one that is new to most others."""
    new = _named_by_most(roster, lambda member: member.newcomers)
    return {
        member.peer_id: NEWCOMERS_CREDIT if member.peer_id in new else 1.0  # guard: newcomer-credit
        for member in roster
    }


def usual_tokens(roster: Sequence[Member]) -> float:
    """Return what a roster's members usually have trained: the middle one of those with a vote, if any such has.

    Of two in the middle the lower one, so that one of up to four cannot raise it above what an honest one has trained.
    A newcomer's first round may be a step long, which is nothing to measure the others' by.
    """
    trained = [member for member in roster if member.tokens]
    voters = [member for member in _with_a_vote(roster) if member.tokens] or trained
    return float(statistics.median_low(member.tokens for member in voters)) if voters else 0.0  # guard: usual-tokens


def missing_votes(roster: Sequence[Member]) -> str:
    """Return what keeps a roster's round from counting; nothing if more than half of those who have a vote are on it.

    How many have one is what members know from records, by the median: peers that saw different records must not decide
    differently, or some would commit what the others make again. And whoever has committed nothing yet has no vote: two
    newcomers, with two who are left of five, would make a second version of what the other three have committed.
    Only those count whose anchor is the majority's: they confirm each other's results over their own connections, and
    whom a leader has invented cannot. Nor does anybody's own word for it that it has a vote.
    """
    if not roster:
        return "nobody is left"
    confirming = derive_groups(roster).members[SHARED]
    present = [member for member in roster if member.peer_id in confirming]  # guard: invented-members
    electorate = statistics.median_high(member.electorate for member in present)  # guard: electorate-median
    votes = len(
        _with_a_vote(present)  # guard: newcomer-votes
    )
    return "" if votes >= quorum(electorate) else f"only {votes} of {electorate} peers with a vote met"


def _with_a_vote(members: Sequence[Member]) -> list[Member]:
    """Return those who have a vote by what more than half of them know; all, where nobody says anything of it."""
    named = Counter(peer for member in members for peer in set(member.voters))
    return [
        member
        for member in members
        if not named or 2 * named[member.peer_id] > len(members)  # guard: self-made-voter
    ]


def quorum(electorate: int) -> int:
    """Return how many must meet for a round to count: more than half of the peers that have a vote."""
    return electorate // 2 + 1


def distrusted(roster: Sequence[Member]) -> frozenset[str]:
    """Return the members that more than half of the others want left out; nobody if that were half of the roster."""
    out = _named_by_most(roster, lambda member: member.distrusts)
    return out if 2 * len(out) < len(roster) else frozenset()  # guard: half-left-out


def _named_by_most(roster: Sequence[Member], named: Callable[[Member], Sequence[str]]) -> frozenset[str]:
    """Return the members whom more than half of the others name; nobody in a small roster.

    Those who cannot be called have no vote: they reduce nothing, and so see nothing of what members bring.
    """
    if len(roster) < LEAST_VOTERS:  # guard: small-roster
        return frozenset()
    ids = {member.peer_id for member in roster}
    voters = [member for member in roster if not member.calls_only]  # guard: blind-votes
    votes = Counter(
        peer
        for member in voters
        for peer in set(named(member)) & (ids - {member.peer_id})  # guard: vote-once
    )
    others = {peer: sum(member.peer_id != peer for member in voters) for peer in votes}
    return frozenset(peer for peer, count in votes.items() if 2 * count > max(others[peer], LEAST_VOTERS - 1))


def derive_groups(roster: Sequence[Member]) -> Groups:
    """Return the groups of a roster.

    `shared` is everyone whose shared anchor is the majority's, of those who have a vote if any has; a tie goes to the
    later round, then to the smaller digest. `slot-e` is every one of those that brings slot e with the `newest` anchor:
    whoever has adopted it without reaching its newest version sits it out. Where all anchors are ahead of the model, or
    most others have a newer version, there is no such group. Of holders none of whom can be called, only the first
    counts, since they could not average. Whoever is distrusted is in none.
    """
    out = distrusted(roster)
    trusted = [member for member in roster if member.peer_id not in out]  # guard: distrusted-out
    voters = _with_a_vote(trusted) or trusted  # guard: majority-voters
    majority = _majority([(member.round, member.anchors.get(SHARED, "")) for member in voters])
    current = sorted(
        (member for member in trusted if (member.round, member.anchors.get(SHARED, "")) == majority),
        key=lambda member: member.peer_id,
    )
    groups = {SHARED: tuple(member.peer_id for member in current)}
    holders: dict[int, dict[str, tuple[int, str]]] = {}
    for member in current:
        for slot, start in member.starts().items():
            holders.setdefault(slot, {})[member.peer_id] = start
    callable_ids = {member.peer_id for member in current if not member.calls_only}
    for slot, starts in sorted(holders.items()):
        chosen = newest(list(starts.values()), majority[0])
        if chosen is None:
            continue
        lag = majority[0] - chosen[0]
        if (  # guard: slot-not-older
            not lag or not _is_outdated(slot, lag, [member for member in current if member.peer_id not in starts])
        ):
            agreed = tuple(peer for peer, (_, digest) in starts.items() if digest == chosen[1])
            groups[slot_name(slot)] = agreed if callable_ids & set(agreed) else agreed[:1]
    behind = tuple(sorted({member.peer_id for member in roster} - set(groups[SHARED])))
    return Groups(round=majority[0], behind=behind, members=groups)


def lag_of(round: int | None, model_round: int) -> int:
    """Return what a roster entry says of a slot's newest version there, of some round or none."""
    return MOST_LAG if round is None or round > model_round else min(model_round - round, MOST_LAG)


def _is_outdated(slot: int, lag: int, others: Sequence[Member]) -> bool:
    """Tell whether most who do not hold a slot have a version of it that lies less far behind the model than `lag`.

    Else what all have taken would be lost with its holder, where the next one begins without having reached anybody.
    """
    newer = sum(slot < len(member.lags) and member.lags[slot] < min(lag, MOST_LAG) for member in others)
    return 2 * newer > len(others)  # guard: one-newer-slot


def newest(states: Sequence[tuple[int, str]], model_round: int) -> tuple[int, str] | None:
    """Return the (round, digest) of a slot's version that goes on, of several; None if none may.

    The latest counts; of several of one round what most have, then the smaller digest. A version that is ahead of the
    model may not: it is of the side of a partition that the majority has not followed. So whatever a round makes has a
    higher number than what it was made from, and no version wins over its own successor.

    Args:
        states: Versions as several peers have them.
        model_round: Round of the `shared` version that the slot is to go with.
    """
    votes = Counter(state for state in states if state[0] <= model_round)  # guard: slot-ahead
    return min(votes, key=lambda state: (-state[0], -votes[state], state[1]), default=None)


def _majority(states: Sequence[tuple[int, str]]) -> tuple[int, str]:
    counts = Counter(states)
    best = max((count, state[0]) for state, count in counts.items())
    return min(state for state, count in counts.items() if (count, state[0]) == best)
