"""The roster of a round: its members' entries, and what every member derives from them identically.

The leader of the meeting sends all entries to all members. Together with the body of the last certificate they say
who averages what: no further message is needed to agree on the groups.
"""

from __future__ import annotations

import hashlib
import logging
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Annotated

from pydantic import Field, model_validator

from spes_p2p.config import MAX_PEER_TOKENS, MIN_MBIT
from spes_p2p.swarm.certificate import MAX_REPLICATED, Batches, Body, MemberEntry, max_strangers, strangers
from spes_p2p.swarm.invites import GuestList, Invite, ShownInvite
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Count, Digest, PeerId, Seconds, Slot, Strict

log = logging.getLogger(__name__)

MAX_DISTRUSTED = 16
MAX_STATED_LINKS = 128
LINK_BYTES, MAX_LINKS_BYTES = 49, 2**17
"""Size of a stated link, and of all that the members of one roster state: the leader sends every entry to every
member."""
MAX_TIMES_MEDIAN = 4.0
"""Cap of a member's tokens, in medians of the members' tokens, and of a peer's that may not vote, in medians of the
voters': for weights, and for the length of vectors."""
MIN_VOTERS = 5
"""Members below which no vote excludes a member: of four, two could outvote one."""
Start = tuple[Count, Digest]
"""Round and digest of a version that is not the certified one."""


class Member(Strict):
    """A peer's entry in the roster of a round."""

    peer_id: PeerId
    round: Count
    """Round of the last certificate that the member knows; its deltas start from what that certificate names."""
    previous: Digest
    """Digest of that certificate's body."""
    tokens: Annotated[int, Field(ge=0, le=MAX_PEER_TOKENS)]  # guard: first
    """Tokens trained since then, which weight the member's deltas; a member with 0 only receives."""
    slots: tuple[Slot, ...] = Field(max_length=128)
    """Slots that the member brings deltas of."""
    replicates: tuple[Slot, ...] = Field(default=(), max_length=MAX_REPLICATED)
    """Slots whose certified weights the member has as a replica: it receives their means."""
    batches: Batches = 0
    """Batches of shared data that it asks for in the next round."""
    starts: dict[Annotated[str, Field(pattern=r"^(shared|slot-(0|[1-9][0-9]{0,3}))$")], Start] = Field(
        default={},
        max_length=129,  # guard: (0|[1-9][0-9]{0,3}) -> \d{1,4}
    )
    """What its deltas start from in place of a certified version that no peer has any more, by name."""
    tokens_per_second: Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]
    ready_at: Seconds
    """DHT time at which the member entered the round."""
    sync_seconds: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)]
    """Duration of the member's last synchronisation, from entering to training again."""
    # guard: ge=MIN_MBIT -> gt=0
    uplink_mbit: Annotated[float, Field(ge=MIN_MBIT, le=1e7, allow_inf_nan=False)] | None = None
    """Upload limit in 10^6 bits per second."""
    calls_only: bool = False
    """The member runs in client mode: it takes no calls, so it reduces only for peers that it is connected to."""
    links: tuple[PeerId, ...] = Field(default=(), max_length=MAX_STATED_LINKS)
    """Peers that a member in client mode is connected to."""
    invite: ShownInvite = ""
    """Proof of the member's invite."""
    distrusts: tuple[PeerId, ...] = Field(default=(), max_length=MAX_DISTRUSTED)
    """Peers that the member has banned on its own evidence."""

    @model_validator(mode="after")
    def _has_each_once(self) -> Member:
        slots = (*self.slots, *self.replicates)
        if len(set(slots)) < len(slots):  # guard: never
            raise ValueError("a slot is named twice")
        return self


class Roster(tuple[Member, ...]):
    """The members of one round, and everything that follows from their entries, identically on all of them.

    Build it once per round and pass it on: each property is computed at its first use and kept.

    Args:
        members: Their entries.
        last: Body of the last certificate; None for an empty roster.
        invites: The members' invites to vote.
    """

    last: Body | None
    invites: Mapping[str, Invite]

    def __new__(
        cls, members: Iterable[Member] = (), last: Body | None = None, invites: Mapping[str, Invite] | None = None
    ) -> Roster:
        roster = super().__new__(cls, members)
        roster.last = last
        roster.invites = invites or {}
        return roster

    @property
    def round(self) -> int:
        """Round of the last certificate."""
        return self.last.round if self.last is not None else 0

    @cached_property
    def groups(self) -> Mapping[VectorName, tuple[str, ...]]:
        """Ids of the members that average each vector, ascending, at least one per group.

        `shared` holds every trusted member that starts from the last certificate. `slot-e` holds those of them that
        bring slot e from its certified version, or, if none has it any more, from the newest other version. If no
        holder or replica of a slot can be reached by all the others, only the first holder counts, because they could
        not average.
        """
        return {name: peers for name, (peers, _) in self._groups.items()}

    @cached_property
    def replicas(self) -> Mapping[VectorName, tuple[str, ...]]:
        """Ids of the members that receive the mean of each slot's group without being counted in it, ascending."""
        return {name: peers for name, (_, peers) in self._groups.items() if peers}

    @cached_property
    def _groups(self) -> Mapping[VectorName, tuple[tuple[str, ...], tuple[str, ...]]]:
        """The groups, each with its replicas."""
        current = sorted(self._current, key=lambda member: member.peer_id)
        agreed = set(_with_one_start(current, SHARED))
        current = [member for member in current if member.peer_id in agreed]
        groups: dict[VectorName, tuple[tuple[str, ...], tuple[str, ...]]] = {
            SHARED: (tuple(member.peer_id for member in current), ())
        }
        holders: dict[int, list[Member]] = {}
        for member in current:
            for slot in member.slots:
                holders.setdefault(slot, []).append(member)
        for slot, holding in sorted(holders.items()):
            name = VectorName.of_slot(slot)
            peers = _with_one_start(holding, name)
            is_certified = any(name not in member.starts for member in holding)
            replicas = tuple(member.peer_id for member in current if slot in member.replicates and is_certified)
            groups[name] = self._meeting(peers, replicas)
        return groups

    def _meeting(self, peers: tuple[str, ...], replicas: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the holders and replicas of a slot that can average: one of them must be reached by all others."""
        called = tuple(peer for peer in replicas if peer not in self._links)
        for some in (replicas, called):
            everybody = (*peers, *some)
            if any(self.is_reached(peer, everybody) for peer in everybody):
                return peers, some
        return peers[:1], ()

    @cached_property
    def behind(self) -> tuple[str, ...]:
        """Ids of the members in no group, ascending: distrusted, too many strangers, or of another certificate.

        Their deltas do not count; they catch up.
        """
        return tuple(sorted({member.peer_id for member in self} - set(self.groups[SHARED])))

    @cached_property
    def entries(self) -> tuple[MemberEntry, ...]:
        """The members as a certificate names them, by ascending id."""
        members = {member.peer_id: member for member in self}
        held: dict[str, list[int]] = {peer: [] for peer in self.groups[SHARED]}
        for name, peers in self.groups.items():
            if (slot := name.slot) is not None:
                for peer in peers:
                    held[peer].append(slot)
        return tuple(
            MemberEntry(
                peer_id=peer,
                tokens=members[peer].tokens,
                slots=tuple(sorted(held[peer])),
                replicates=tuple(sorted(slot for slot in members[peer].replicates if self._keeps(peer, slot))),
                calls_only=members[peer].calls_only,
                batches=members[peer].batches,
            )
            for peer in self.groups[SHARED]
        )

    def _keeps(self, peer: str, slot: int) -> bool:
        """Return whether a member replicates a slot: it is in the slot's group, or there is none."""
        name = VectorName.of_slot(slot)
        return name not in self.groups or peer in self.replicas.get(name, ())

    @cached_property
    def distrusted(self) -> frozenset[str]:
        """Ids of the members that more than half of the other voters want left out.

        None if that were half of all, or in a small roster. Members in client mode are not asked: they rarely reduce,
        and so see little of what others send.
        """
        if len(self) < MIN_VOTERS:  # guard: never
            return frozenset()
        ids = {member.peer_id for member in self}
        voters = [member for member in self._voters if not member.calls_only]  # guard: always
        votes = Counter(
            peer
            for member in voters
            # guard: set(member.distrusts) & (ids - {member.peer_id}) -> member.distrusts if peer in ids
            for peer in set(member.distrusts) & (ids - {member.peer_id})
        )
        others = {peer: sum(member.peer_id != peer for member in voters) for peer in votes}
        out = frozenset(peer for peer, count in votes.items() if 2 * count > max(others[peer], MIN_VOTERS - 1))
        return out if 2 * len(out) < len(self) else frozenset()  # guard: always

    @cached_property
    def guests(self) -> frozenset[str]:
        """Ids of the members that may not vote: they have no seat, nor an invite to one."""
        seats = dict(self.last.seats) if self.last is not None else {}
        for peer in sorted(self.invites.keys() - seats.keys()):  # it has no seat yet
            if self.invites[peer].has_place(seats):  # guard: always
                seats[peer] = self.invites[peer].id
        return frozenset(member.peer_id for member in self) - seats.keys()

    @property
    def is_small(self) -> bool:
        """Whether fewer than five members have trained, so that none of them can be outvoted."""
        return sum(member.tokens > 0 for member in self) < MIN_VOTERS

    @property
    def suspect(self) -> str:
        """The guest that claims most tokens: the one to go on without if a mean does harm; empty without guests."""
        return max(self.guests, key={m.peer_id: (m.tokens, m.peer_id) for m in self}.__getitem__, default="")

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """Tokens with which each member's deltas count: those of peers that may not vote are bounded by the voters'.

        Where fewer than five members have trained, each counts at most the lower median of the voters' tokens, and if a
        voter has trained, all together at most as much as the voters; elsewhere each four times that median.
        """
        tokens = {member.peer_id: float(member.tokens) for member in self}
        of_voters = sum(count for peer, count in tokens.items() if peer not in self.guests)
        most = self.usual_tokens if self.is_small else MAX_TIMES_MEDIAN * self.usual_tokens
        # guard: min(count, most) -> count
        others = {p: min(count, most) for p, count in tokens.items() if p in self.guests}
        if self.is_small and of_voters and sum(others.values()) > of_voters:  # guard: never
            share = of_voters / sum(others.values())
            others = {peer: share * count for peer, count in others.items()}
        return tokens | others

    @cached_property
    def _rates(self) -> Mapping[str, float]:
        stated = [member.uplink_mbit for member in self if member.uplink_mbit is not None]
        fastest = max(stated, default=1.0)
        return {member.peer_id: fastest if member.uplink_mbit is None else member.uplink_mbit for member in self}

    @cached_property
    def _links(self) -> Mapping[str, frozenset[str]]:
        """What each member in client mode states to be connected to."""
        return {member.peer_id: frozenset(member.links) for member in self if member.calls_only}

    @cached_property
    def uplinks(self) -> Mapping[str, float]:
        """Upload rate of each member, in 10^6 bits per second; the fastest stated one for members that state none.

        Members in client mode have 0: some others cannot connect to them.
        """
        return {peer: 0.0 if peer in self._links else rate for peer, rate in self._rates.items()}

    def uplinks_to(self, me: str) -> Mapping[str, float]:
        """Return the upload rates that count for what a member fetches: also those in client mode that it reaches."""
        met = {peer: self._rates[peer] for peer in self._links if self._is_linked(peer, me)}
        return {**self.uplinks, **met}

    def _is_linked(self, hidden: str, other: str) -> bool:
        """Check whether a member in client mode is connected to another one; of two such members both must state it."""
        links = self._links
        # guard: return other in links[hidden]
        return other in links[hidden] and (other not in links or hidden in links[other])

    def is_reached(self, peer: str, peers: Sequence[str]) -> bool:
        """Check whether all other members of a group can open streams to a member of it."""
        return peer not in self._links or all(other == peer or self._is_linked(peer, other) for other in peers)

    def reducing(self, peers: Sequence[str], replicas: Collection[str] = ()) -> list[float]:
        """Return the uplinks that count for the reduced shares of a group of these members.

        A member that some other cannot reach reduces nothing. Nor do replicas, and members that no certificate knows,
        so that they cannot stop a round, and in a small roster those that may not vote, whose means nobody can check;
        unless only they could.

        Args:
            peers: The group's members, its replicas among them.
            replicas: Its replicas.
        """
        able = [self._rates[peer] if self.is_reached(peer, peers) else 0.0 for peer in peers]
        # guard: self.guests if self.is_small else () -> ()
        for spared in (replicas, {*self._strangers, *(self.guests if self.is_small else ())}):
            links = [
                0.0 if peer in spared else link  # guard: never
                for peer, link in zip(peers, able, strict=True)
            ]
            able = links if any(links) else able
        return able

    @cached_property
    def usual_tokens(self) -> float:
        """Median of the tokens that voters have trained, or that all members have if no voter has; 0 if none has.

        The lower of two medians, so that one of up to four members cannot raise it above what an honest one trained.
        Newcomers are left out, because their first round may be a single step.
        """
        trained = [member for member in self if member.tokens]
        voters = [member for member in self._voters if member.tokens] or trained
        return (
            float(statistics.median_low(member.tokens for member in voters)) if voters else 0.0
        )  # guard: median_low -> median_high

    def members_of(self, name: str) -> tuple[str, ...]:
        """Return the ids of the members that average a vector, ascending; empty if it has no group."""
        return self.groups.get(VectorName(name), ())

    def without(self, peers: Collection[str]) -> Roster:
        """Return the roster that the other members would form."""
        return Roster((member for member in self if member.peer_id not in peers), self.last, self.invites)

    @cached_property
    def _voters(self) -> list[Member]:
        voters = self.last.voters if self.last is not None else ()
        return [member for member in self if member.peer_id in voters]

    @cached_property
    def _strangers(self) -> tuple[str, ...]:
        """Members that no certificate knows, in the order that the last one draws."""
        last = self.last
        return tuple(strangers(last, [member.peer_id for member in self])) if last is not None and last.round else ()

    @cached_property
    def _current(self) -> list[Member]:
        last = self.last
        excess = set(self._strangers[max_strangers(len(last.voters)) :]) if last is not None else set()
        out = self.distrusted | excess  # guard: self.distrusted | excess -> excess
        return [
            member
            for member in self
            if member.peer_id not in out and (last is None or member.previous == last.digest)  # guard: operand
        ]


def _with_one_start(members: Sequence[Member], name: VectorName) -> tuple[str, ...]:
    """Return the members that start from the certified version of a vector; if there is none, from one other version.

    That is the newest, of equally new ones the most frequent, then the one with the smaller digest.
    """
    certified = tuple(member.peer_id for member in members if name not in member.starts)
    if certified or not members:
        return certified  # guard: skip
    starts = Counter(member.starts[name] for member in members)
    chosen = min(starts, key=lambda start: (-start[0], -starts[start], start[1]))
    return tuple(member.peer_id for member in members if member.starts[name] == chosen)


def invited(roster: Roster, guests: GuestList | None) -> Roster:
    """Return the roster of those that may take part; the same on all members.

    Args:
        roster: Those that met.
        guests: Checks invites; None where none is asked for.
    """
    if guests is None or not roster:  # guard: always
        return roster
    shown = {member.peer_id: member.invite for member in roster}
    roster = Roster(roster, roster.last, guests.voting(shown, roster.last.ends_at if roster.last is not None else 0.0))
    ever_invited = roster.without(guests.refusals(shown, now=0.0))
    # The members' clocks, not this peer's own: all members must agree which invite has expired.
    now = statistics.median([member.ready_at for member in ever_invited] or [0.0])  # guard: ever_invited -> roster
    refused = guests.refusals(shown, now)
    for peer, reason in refused.items():
        log.warning("round %d: refused %s: %s", roster.round + 1, peer[-6:], reason)
    return roster.without(refused)


def stated_links(me: str, linked: Collection[str], last: Body) -> tuple[str, ...]:
    """Return the links that a member in client mode states, ascending: all of them in a swarm of up to 52.

    In a larger one those to members that have a slot in common with it come first: these average together. The others
    are ranked by both ids, because a link counts only where both ends state it.

    Args:
        me: The member.
        linked: Peers that it is connected to.
        last: Body of the last certificate.
    """
    slots = {member.peer_id: set(member.slots) for member in last.members}
    most = min(MAX_STATED_LINKS, MAX_LINKS_BYTES // (LINK_BYTES * max(1, len(slots))))

    def rank(peer: str) -> tuple[bool, str]:
        pair = hashlib.sha256("".join(sorted((me, peer))).encode()).hexdigest()
        return slots.get(me, set()).isdisjoint(slots.get(peer, ())), pair

    return tuple(sorted(sorted(linked, key=rank)[:most]))
