"""The roster of a round: its members' entries, and what every member derives from them identically.

The leader of the matchmaking sends all entries to all members. No further message is needed to agree on the groups.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spes_p2p.config import MAX_PEER_TOKENS, MIN_MBIT
from spes_p2p.errors import RecordError
from spes_p2p.presentation import problem_of
from spes_p2p.swarm.invites import ShownInvite
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.quorum import MAX_VOTERS, newest, quorum
from spes_p2p.swarm.records import MAX_SLOTS, Count, PeerId, Seconds, Slot

MAX_MEMBER_BYTES = 64 * 1024
MAX_DISTRUSTED = 16
MAX_NEWCOMERS = 64
NEWCOMER_WEIGHT = 0.25
"""Aggregation weight of a newcomer's tokens: identities are free, so a banned liar can return with a new one."""
MAX_LAG = 99
"""Largest lag. Also stated for a version ahead of the model, and for a missing one; training starts from neither."""
MIN_VOTERS = 5
"""Members below which no vote excludes a member: of four, two could outvote one."""
ShortDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class Member(BaseModel):
    """A peer's entry in the roster of a round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peer_id: PeerId
    round: Count
    """Round of the shared anchor that the deltas start from."""
    tokens: Annotated[int, Field(ge=0, le=MAX_PEER_TOKENS)]  # guard: token-bounds
    """Tokens trained since the anchor, which weight the member's deltas; a member with 0 only receives."""
    slots: tuple[Slot, ...] = Field(max_length=128)
    """Slots that the member brings deltas of."""
    slot_rounds: tuple[Count, ...] = Field(default=(), max_length=128)
    """Round of the version that each of `slots` starts from: earlier than `round` for a slot that was an orphan, later
    for one from the losing side of a partition."""
    lags: tuple[Annotated[int, Field(ge=0, le=MAX_LAG)], ...] = Field(default=(), max_length=MAX_SLOTS)
    """Rounds by which the member's newest version of each of the model's slots lags behind its model; empty if it does
    not state them."""
    anchors: dict[Annotated[str, Field(pattern=r"^(shared|slot-(0|[1-9][0-9]{0,3}))$")], ShortDigest] = Field(
        max_length=129  # guard: anchor-name
    )
    """Digest of each anchor."""
    tokens_per_second: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
    ready_at: Seconds
    """DHT time at which the member entered the round."""
    sync_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
    """Duration of the member's last synchronisation, from entering to training again."""
    uplink_mbit: Annotated[float, Field(ge=MIN_MBIT, le=1e7, allow_inf_nan=False)] | None = None  # guard: uplink-min
    """Upload limit in 10^6 bits per second."""
    refreshes: bool = False
    """The member fetches only some of the others' slots per round, so others do not count on it as a relay."""
    calls_only: bool = False
    """The member runs in client mode: it opens connections but accepts none, so it reduces and relays nothing."""
    invite: ShownInvite = ""
    """Proof of the member's invite, in a closed run."""
    distrusts: tuple[PeerId, ...] = Field(default=(), max_length=MAX_DISTRUSTED)
    """Peers that the member has banned on its own evidence."""
    newcomers: tuple[PeerId, ...] = Field(default=(), max_length=MAX_NEWCOMERS)
    """Peers that have committed few rounds with the member, which is no newcomer itself."""
    voters: tuple[PeerId, ...] = Field(default=(), max_length=MAX_VOTERS)
    """Peers that the member counts for a quorum: those that committed a round since they joined, or all if none did.
    Empty if it does not state them."""
    electorate: Annotated[int, Field(ge=0, le=2**16)] = 0
    """Number of voters that the member knows of; 0 if it takes the number of peers that it expects to meet."""

    @model_validator(mode="after")
    def _check_rounds(self) -> Member:
        if self.slot_rounds and len(self.slot_rounds) != len(self.slots):
            raise ValueError("slot_rounds must name a round for each slot, or none")
        return self

    def starts(self) -> dict[int, tuple[int, str]]:
        """Return the round and digest of each slot's anchor."""
        rounds = self.slot_rounds or (0,) * len(self.slots)
        return {
            slot: (round, self.anchors.get(VectorName.of_slot(slot), ""))
            for slot, round in zip(self.slots, rounds, strict=True)
        }

    @classmethod
    def decode(cls, peer_id: str, data: str | bytes) -> Member:
        """Return the entry that a peer with this authenticated id has sent.

        Raises:
            RecordError: the entry is malformed or oversized, or names another peer.
        """
        if not isinstance(data, str | bytes) or len(data) > MAX_MEMBER_BYTES:
            raise RecordError(f"{peer_id} sent no roster entry")
        try:
            member = cls.model_validate_json(data)
        except ValidationError as error:
            raise RecordError(f"{peer_id} sent a malformed roster entry: {problem_of(error)}") from error
        if member.peer_id != peer_id:  # guard: entry-sender
            raise RecordError(f"{peer_id} sent a roster entry of {member.peer_id}")
        return member


class Roster(tuple[Member, ...]):
    """The members of one round, and everything that follows from their entries, identically on all of them.

    Build it once per round and pass it on: each property is computed at its first use and kept.
    """

    @cached_property
    def round(self) -> int:
        """Round of the anchor that the majority holds."""
        return self._majority[0]

    @cached_property
    def groups(self) -> Mapping[VectorName, tuple[str, ...]]:
        """Ids of the members that average each vector, ascending, at least one per group.

        `shared` holds every trusted member with the majority's shared anchor. `slot-e` holds those of them that bring
        slot e with its `newest` anchor; a member that adopted the slot without its newest version sits the round out.
        A slot has no group if all its anchors are ahead of the model, or if most other members have a newer version.
        If no holder of a slot can be called, only the first counts, because they could not average.
        """
        current = sorted(
            (member for member in self._trusted if _shared_anchor(member) == self._majority),
            key=lambda member: member.peer_id,
        )
        groups = {SHARED: tuple(member.peer_id for member in current)}
        holders: dict[int, dict[str, tuple[int, str]]] = {}
        for member in current:
            for slot, start in member.starts().items():
                holders.setdefault(slot, {})[member.peer_id] = start
        callable_ids = {member.peer_id for member in current if not member.calls_only}
        for slot, starts in sorted(holders.items()):
            chosen = newest(list(starts.values()), self.round)
            if chosen is None:
                continue
            lag = self.round - chosen[0]
            if (  # guard: slot-not-older
                not lag or not _is_outdated(slot, lag, [member for member in current if member.peer_id not in starts])
            ):
                agreed = tuple(peer for peer, (_, digest) in starts.items() if digest == chosen[1])
                groups[VectorName.of_slot(slot)] = agreed if callable_ids & set(agreed) else agreed[:1]
        return groups

    @cached_property
    def behind(self) -> tuple[str, ...]:
        """Ids of the members in no group, ascending: distrusted, or without the majority's shared anchor.

        Their deltas do not count; they catch up.
        """
        return tuple(sorted({member.peer_id for member in self} - set(self.groups[SHARED])))

    @cached_property
    def distrusted(self) -> frozenset[str]:
        """Ids of the members that more than half of the others want left out; none if that were half of the roster."""
        out = _named_by_most(self, lambda member: member.distrusts)
        return out if 2 * len(out) < len(self) else frozenset()  # guard: half-left-out

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Aggregation weight of one token of each member: lower for members that are new to most others."""
        new = _named_by_most(self, lambda member: member.newcomers)
        return {
            member.peer_id: NEWCOMER_WEIGHT if member.peer_id in new else 1.0  # guard: newcomer-credit
            for member in self
        }

    @cached_property
    def uplinks(self) -> Mapping[str, float]:
        """Upload rate of each member, in 10^6 bits per second; the fastest stated one for members that state none.

        Members in client mode have 0: two of them could not even connect to each other.
        """
        stated = [member.uplink_mbit for member in self if member.uplink_mbit is not None]
        fastest = max(stated, default=1.0)
        rates = {member.peer_id: fastest if member.uplink_mbit is None else member.uplink_mbit for member in self}
        return {member.peer_id: 0.0 if member.calls_only else rates[member.peer_id] for member in self}

    @cached_property
    def usual_tokens(self) -> float:
        """Median of the tokens that voters have trained, or that all members have if no voter has; 0 if none has.

        The lower of two medians, so that one of up to four members cannot raise it above what an honest one trained.
        Newcomers are left out, because their first round may be a single step.
        """
        trained = [member for member in self if member.tokens]
        voters = [member for member in _with_a_vote(self) if member.tokens] or trained
        return (
            float(statistics.median_low(member.tokens for member in voters)) if voters else 0.0
        )  # guard: usual-tokens

    @cached_property
    def missing_quorum(self) -> str:
        """Why this roster has no quorum; empty if more than half of the voters are on it.

        The electorate is the median of what members know from records: peers that saw different records must decide
        alike, otherwise some would commit a round that others repeat. A peer that has committed nothing has no vote:
        otherwise two newcomers and two of five peers would make a second version of what the other three committed.
        Only members with the majority's anchor count. They confirm each other's results over their own connections,
        which members that a leader has invented cannot. No member has a vote by its own word.
        """
        if not self:
            return "no member is left"
        confirming = self.groups[SHARED]
        present = [member for member in self if member.peer_id in confirming]  # guard: invented-members
        electorate = statistics.median_high(member.electorate for member in present)  # guard: electorate-median
        votes = len(
            _with_a_vote(present)  # guard: newcomer-votes
        )
        return "" if votes >= quorum(electorate) else f"only {votes} of {electorate} peers with a vote met"

    def members_of(self, name: str) -> tuple[str, ...]:
        """Return the ids of the members that average a vector, ascending; empty if it has no group."""
        return self.groups.get(VectorName(name), ())

    def without(self, peers: Collection[str]) -> Roster:
        """Return the roster that the other members would form."""
        return Roster(member for member in self if member.peer_id not in peers)

    @cached_property
    def _trusted(self) -> list[Member]:
        return [member for member in self if member.peer_id not in self.distrusted]  # guard: distrusted-out

    @cached_property
    def _majority(self) -> tuple[int, str]:
        """Round and digest of the shared anchor that most voters hold; a tie: later round, then smaller digest."""
        voters = _with_a_vote(self._trusted) or self._trusted  # guard: majority-voters
        counts = Counter(_shared_anchor(member) for member in voters)
        best = max((count, state[0]) for state, count in counts.items())
        return min(state for state, count in counts.items() if (count, state[0]) == best)


def lag_of(round: int | None, model_round: int) -> int:
    """Return what an entry's `lags` states of a slot whose newest version is of this round, or of none."""
    return MAX_LAG if round is None or round > model_round else min(model_round - round, MAX_LAG)


def _shared_anchor(member: Member) -> tuple[int, str]:
    return member.round, member.anchors.get(SHARED, "")


def _with_a_vote(members: Sequence[Member]) -> list[Member]:
    """Return the members that more than half of them name as voters; all of them if none names any."""
    named = Counter(peer for member in members for peer in set(member.voters))
    return [
        member
        for member in members
        if not named or 2 * named[member.peer_id] > len(members)  # guard: self-made-voter
    ]


def _named_by_most(roster: Sequence[Member], named: Callable[[Member], Sequence[str]]) -> frozenset[str]:
    """Return the members that more than half of the others name; none in a small roster.

    Members in client mode have no vote: they reduce nothing, and so see nothing of what others send.
    """
    if len(roster) < MIN_VOTERS:  # guard: small-roster
        return frozenset()
    ids = {member.peer_id for member in roster}
    voters = [member for member in roster if not member.calls_only]  # guard: blind-votes
    votes = Counter(
        peer
        for member in voters
        for peer in set(named(member)) & (ids - {member.peer_id})  # guard: vote-once
    )
    others = {peer: sum(member.peer_id != peer for member in voters) for peer in votes}
    return frozenset(peer for peer, count in votes.items() if 2 * count > max(others[peer], MIN_VOTERS - 1))


def _is_outdated(slot: int, lag: int, others: Sequence[Member]) -> bool:
    """Tell whether most members that do not hold a slot have a version of it that lags less than `lag` rounds.

    Otherwise a new holder that has not reached those members would discard the progress of the old one.
    """
    newer = sum(slot < len(member.lags) and member.lags[slot] < min(lag, MAX_LAG) for member in others)
    return 2 * newer > len(others)  # guard: one-newer-slot
