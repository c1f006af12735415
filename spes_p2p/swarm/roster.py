"""Who averages what: groups that every member derives from one snapshot, identically.

The leader of a matchmaking broadcasts what each member says of itself; from then on nobody needs to talk.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spes_p2p.errors import RecordError
from spes_p2p.swarm.records import Count, PeerId, Seconds, Slot

SHARED = "shared"
MAX_MEMBER_BYTES = 64 * 1024
MOST_TOKENS = 2**34
"""More than any one peer can train between two rounds; a larger weight is a lie, or an accident."""
ShortDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


def slot_name(slot: int) -> str:
    """Return the name of a slot's group and version."""
    return f"slot-{slot}"


def moments_name(group: str) -> str:
    """Return the name of the version that holds a group's averaged optimizer moments."""
    return f"moments-{group}"


def kind_of(name: str) -> str:
    """Return whose size a vector has: `shared`, `slot`, `moments-shared` or `moments-slot`."""
    return name.split("slot-")[0] + "slot" if "slot-" in name else name


class Member(BaseModel):
    """What a peer says of itself when it enters a round."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    peer_id: PeerId
    round: Count
    """Round of the anchor that the deltas start from."""
    tokens: Annotated[int, Field(ge=0, le=MOST_TOKENS)]
    """Tokens trained since the anchor: the weight of this member's deltas; 0 only receives."""
    slots: tuple[Slot, ...] = Field(max_length=128)
    """Slots it brings deltas of."""
    anchors: dict[Annotated[str, Field(pattern=r"^(shared|slot-\d{1,4})$")], ShortDigest] = Field(max_length=129)
    """Digest of each anchor, by group."""
    tokens_per_second: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
    ready_at: Seconds
    """DHT time of entering."""
    sync_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
    """What synchronising took it last time, from entering to training again."""
    uplink_mbit: Annotated[float, Field(gt=0, le=1e7, allow_inf_nan=False)] | None = None
    """What it may send, in 10^6 bits per second, if that is limited."""
    refreshes: bool = False
    """It fetches some of the others' slots in a round, not all, so that nobody counts on it to pass them on."""

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
        if member.peer_id != peer_id:
            raise RecordError(f"{peer_id} sent a roster entry of {member.peer_id}")
        return member


@dataclass(frozen=True)
class Groups:
    """The derived groups of one roster.

    Attributes:
        round: The anchor's round that the majority holds.
        behind: Members whose shared anchor is not the majority's; they catch up, their deltas do not count.
        members: Member ids by group name, ascending, at least one each.
    """

    round: int
    behind: tuple[str, ...]
    members: Mapping[str, tuple[str, ...]]


def uplinks(members: Sequence[Member]) -> dict[str, float]:
    """Return what each member may send; who states nothing is taken to be as fast as the fastest that does."""
    stated = [member.uplink_mbit for member in members if member.uplink_mbit is not None]
    fastest = max(stated, default=1.0)
    return {member.peer_id: fastest if member.uplink_mbit is None else member.uplink_mbit for member in members}


def derive_groups(roster: Sequence[Member]) -> Groups:
    """Return the groups of a roster.

    `shared` is everyone whose shared anchor is the majority's; `slot-e` is every one of those that brings slot e with
    the majority's anchor of it. A tie goes to the later round, then to the smaller digest.
    """
    majority = _majority([(member.round, member.anchors.get(SHARED, "")) for member in roster])
    current = sorted(
        (member for member in roster if (member.round, member.anchors.get(SHARED, "")) == majority),
        key=lambda member: member.peer_id,
    )
    groups = {SHARED: tuple(member.peer_id for member in current)}
    for slot in sorted({slot for member in current for slot in member.slots}):
        name = slot_name(slot)
        holders = [member for member in current if slot in member.slots]
        _, anchor = _majority([(0, member.anchors.get(name, "")) for member in holders])
        groups[name] = tuple(member.peer_id for member in holders if member.anchors.get(name, "") == anchor)
    behind = tuple(sorted({member.peer_id for member in roster} - set(groups[SHARED])))
    return Groups(round=majority[0], behind=behind, members=groups)


def _majority(states: Sequence[tuple[int, str]]) -> tuple[int, str]:
    counts = Counter(states)
    best = max((count, state[0]) for state, count in counts.items())
    return min(state for state, count in counts.items() if (count, state[0]) == best)
