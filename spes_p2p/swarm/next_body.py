"""The body of a round, as it follows from the last one and the members' results: slots, voters, seats, shares of data.

Pure functions, identical on all peers.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import accumulate

from spes_p2p.swarm.certificate import (
    MAX_SEATS,
    MAX_TIMES_MEDIAN,
    MAX_VOTERS,
    Body,
    MemberEntry,
    Result,
    Revision,
    SlotState,
    is_enough,
    max_leaving,
)
from spes_p2p.swarm.invites import Invite
from spes_p2p.swarm.names import SHARED


def make_body(
    last: Body,
    members: Sequence[MemberEntry],
    results: Sequence[Result],
    *,
    ends_at: float,
    min_peers: int,
    invites: Mapping[str, Invite] | None = None,
    removed: Collection[str] = (),
    guilty: Collection[str] = (),
    shrunk: Sequence[str] = (),
    revoked: Collection[str] = (),
) -> Body | None:
    """Return the body that these results justify.

    It has seats for those that members show invites to, and none for the `revoked`; of these as many voters as may
    leave at once go first, then those that are removed or proven guilty. None if too few voters confirm one digest of
    `shared`, or no voter would be left.
    """
    digest = confirmed_shared(last, results, shrunk)
    if not digest:
        return None
    confirmed = {each.peer_id for each in results if each.digests.get(SHARED) == digest}
    confirmed -= set(last.banned)  # guard: skip
    ids = [member.peer_id for member in members]
    revoked = [peer for peer in last.seats if peer in revoked]
    leaving = [peer for peer in last.voters if peer in revoked][: max_leaving(len(last.voters))]
    removed = {*leaving, *removed, *guilty, *shrunk}  # guard: *leaving, ->
    voters, seats = next_voters(last, confirmed, removed, min_peers, invites or {}, revoked)
    if not voters:
        return None
    return Body(
        run=last.run,
        founder=last.founder,
        generation=last.generation,
        round=last.round + 1,
        previous=last.digest,
        ends_at=ends_at,
        members=tuple(members),
        voters=voters,
        seats=seats,
        absent={p: last.absent.get(p, 0) + 1 for p in last.voters if p not in ids and p not in removed},
        banned=(*last.banned, *sorted(guilty)),
        shared=digest,
        slots=decide_slots(last, members, results),
        shrunk=tuple(shrunk),
        cursor=last.cursor + sum(map(len, shares(last).values())),
        revision=newest_read(last, results),
    )


def next_voters(
    last: Body,
    confirmed: Collection[str],
    removed: Collection[str],
    min_peers: int,
    invites: Mapping[str, Invite],
    revoked: Collection[str] = (),
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the next round's voters, and the seats.

    Those that have a seat and confirm the certificate vote again, then those that show an invite to vote: a quarter of
    the voters at most, but in certificate 1 as many members as the run begins with.

    Args:
        last: The last body.
        confirmed: Members whose result for `shared` is the certified one.
        removed: Voters that leave.
        min_peers: Members with which the run begins.
        invites: Invites to vote, by the members that show them.
        revoked: Peers whose seats the founder has revoked.
    """
    room = max_leaving(len(last.voters)) if last.round else min_peers - 1
    room = min(room, MAX_VOTERS - len(last.voters) + len(removed))
    voters = [peer for peer in last.voters if peer not in removed]
    seats = {peer: each for peer, each in last.seats.items() if peer not in revoked or peer in voters}
    for peer in (*sorted(seats), *sorted(invites.keys() - seats.keys())):
        if room <= 0:  # guard: never
            break
        if peer not in confirmed or peer in last.voters:
            continue
        if peer not in seats:
            if not invites[peer].has_place(seats) or len(seats) >= MAX_SEATS:  # guard: never
                continue
            seats[peer] = invites[peer].id
        voters.append(peer)
        room -= 1
    return tuple(voters), seats


def decide_slots(last: Body, members: Sequence[MemberEntry], results: Iterable[Result]) -> tuple[SlotState, ...]:
    """Return the slots after a round.

    A slot changes if more than half of the voters among its holders and replicas confirm the same digests; without any
    such voter, more than half of its holders. Otherwise it keeps its version, and its holders return to it.
    """
    confirmed = {each.peer_id: each.digests for each in results}
    holders: dict[int, list[str]] = defaultdict(list)
    voters: dict[int, list[str]] = defaultdict(list)
    for member in members:
        for slot in member.slots:
            holders[slot].append(member.peer_id)
        if member.peer_id in last.voters:
            for slot in (*member.slots, *member.replicates):
                voters[slot].append(member.peer_id)
    slots = list(last.slots)
    for slot in range(len(slots)):
        counted = (voters[slot] or holders[slot]) if holders[slot] else []
        found = [confirmed[peer] for peer in counted if f"slot-{slot}" in confirmed.get(peer, {})]
        votes = Counter((each[f"slot-{slot}"], each.get(f"kept-slot-{slot}")) for each in found)
        (digest, kept), count = max(votes.items(), key=lambda item: item[1], default=(("", None), 0))
        if 2 * count > len(counted):  # guard: always
            slots[slot] = SlotState(round=last.round + 1, digest=digest, kept=kept)
    return tuple(slots)


def confirmed_shared(last: Body, results: Iterable[Result], shrunk: Collection[str] = ()) -> str:
    """Return the digest of `shared` that enough voters confirm; empty if none is."""
    confirmed: dict[str, set[str]] = defaultdict(set)
    for each in results:
        confirmed[each.digests.get(SHARED, "")].add(each.peer_id)
    enough = (each for each, peers in confirmed.items() if is_enough(last, peers, shrunk))  # guard: always
    return next(enough, "")


def newest_read(last: Body, results: Iterable[Result]) -> Revision:
    """Return the newest revision of the manifest that a quorum has read; the last body's if that is the newest.

    A revision that fewer voters have read may be withheld from the others.
    """
    stated: dict[Revision, set[str]] = defaultdict(set)
    for each in results:
        stated[each.revision].add(each.peer_id)
    read = [revision for revision, peers in stated.items() if last.is_quorum(peers)]  # guard: always
    return max([last.revision, *read], key=lambda each: each.number)  # guard: return [last.revision, *read][-1]


def shares(body: Body) -> dict[str, range]:
    """Return the batches of shared data that each voter trains in the round after a body.

    From the body's cursor on, in the order of voters, each voter is dealt what it asked for as a member of the body's
    round, and no batch is dealt again until the next epoch. Other peers are dealt nothing.
    """
    asked = {member.peer_id: member.batches for member in body.members if member.batches}
    voters = [peer for peer in body.voters if peer in asked]
    most = MAX_TIMES_MEDIAN * statistics.median_high(asked[peer] for peer in voters) if voters else 0
    ends = list(accumulate((min(asked[peer], most) for peer in voters), initial=body.cursor))  # guard: most) -> 2**53)
    return {peer: range(*ends[at : at + 2]) for at, peer in enumerate(voters)}
