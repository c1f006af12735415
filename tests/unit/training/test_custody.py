"""A slot outlives its last holder, because other peers keep it."""

from collections.abc import Mapping, Sequence

from virtual import VirtualPeer, World, make_peer, peer_id, run_peers, tiny_run

from spes_p2p.config import RoundConfig
from spes_p2p.sim.peer import Leaves
from spes_p2p.swarm.certificate import Body, MemberEntry, SlotState, genesis
from spes_p2p.swarm.names import VectorName
from spes_p2p.training.holdings import replicas

PEERS = tuple(peer_id(index) for index in range(5))


def body(
    holders: Mapping[int, Sequence[str]],
    *,
    current: Sequence[str] = PEERS,
    replicates: Mapping[str, Sequence[int]] | None = None,
    hidden: Sequence[str] = (),
    voters: Sequence[str] = PEERS,
) -> Body:
    """Return the body of a round in which these peers hold and replicate these slots."""
    members = [
        MemberEntry(
            peer_id=peer,
            tokens=1,
            slots=tuple(slot for slot in sorted(holders) if peer in holders[slot]),
            replicates=tuple((replicates or {}).get(peer, ())),
            calls_only=peer in hidden,
        )
        for peer in sorted(current)
    ]
    states = (SlotState(round=3, digest="a" * 64),) * (1 + max(holders))
    start = genesis("run", PEERS[0], "0" * 64, len(states))
    return start.model_copy(update={"round": 3, "members": tuple(members), "slots": states, "voters": tuple(voters)})


def test_every_slot_with_too_few_holders_is_kept_by_others_and_the_burden_is_even():
    sole = {slot: (PEERS[slot % 5],) for slot in range(20)}
    kept = replicas(body(sole), 3)
    assert set(kept) == set(range(20))
    for slot, holders in sole.items():
        assert len(set(kept[slot])) == 2 and not set(kept[slot]) & set(holders)
    burdens = [sum(peer in peers for peers in kept.values()) for peer in PEERS]
    assert max(burdens) - min(burdens) <= 2


def test_who_is_not_of_the_round_keeps_nothing_and_nobody_keeps_what_enough_hold():
    kept = replicas(body({0: PEERS[:1], 1: PEERS[:2]}, current=PEERS[:3]), 2)
    assert set(kept) == {0} and set(kept[0]) <= set(PEERS[1:3])


def test_a_lone_peer_has_nobody_to_keep_anything():
    assert replicas(body({0: PEERS[:1]}, current=PEERS[:1]), 2) == {}


def test_replicas_stay_while_they_are_needed_and_a_slot_without_a_holder_has_all_its_copies():
    sole = {slot: (PEERS[0],) for slot in range(8)}
    first = replicas(body(sole), 2)
    replicates = {peer: [slot for slot, peers in first.items() if peer in peers] for peer in PEERS}
    assert replicas(body(sole, replicates=replicates), 2) == first
    left = [peer for peer in PEERS if peer != first[0][0]]
    again = replicas(body(sole, current=left, replicates=replicates), 2)
    assert {slot for slot in sole if again[slot] != first[slot]} == set(replicates[first[0][0]])
    orphaned = replicas(body({**sole, 3: ()}, replicates=replicates), 2)
    assert len(orphaned[3]) == 2 and orphaned[3][0] == first[3][0]


def test_peers_that_can_be_called_and_then_voters_keep_first():
    sole = {slot: (PEERS[1 + slot % 4],) for slot in range(8)}
    assert set(replicas(body(sole, hidden=PEERS[1:]), 2).values()) == {PEERS[:1]}
    assert {kept[0] for kept in replicas(body(sole, hidden=PEERS[1:]), 3).values()} == {PEERS[0]}
    few = replicas(body({0: PEERS[:1], 1: PEERS[:1]}, voters=PEERS[:3]), 2)
    assert {peer for kept in few.values() for peer in kept} == set(PEERS[1:3])


def test_two_peers_that_nobody_can_call_have_each_others_slots():
    rounds = RoundConfig(mode="steps", steps=2, total=3, min_peers=3, max_seconds=60, exchange_seconds=20)
    run, world, slots = tiny_run(round=rounds), World(), [2, 1, 1]
    peers = [
        VirtualPeer(run, world, world.swarm(i, client_mode=i > 0), index=i, max_slots=count)
        for i, count in enumerate(slots)
    ]
    run_peers(peers)
    assert [len(peer.slots) for peer in peers] == slots
    for peer in peers:
        assert {peer.swarm.versions()[f"slot-{slot}"].round for slot in range(4)} == {rounds.total}
        assert not any(report.dropped for report in peer.reports)


def test_a_full_peer_keeps_what_both_holders_of_a_slot_leave_behind():
    """They leave one right after the other, and the third has no room for the slot."""
    rounds = RoundConfig(mode="steps", steps=2, total=4, min_peers=3, max_seconds=60, exchange_seconds=20)
    run, world = tiny_run(round=rounds), World()
    peers = [make_peer(run, 2, world) for _ in range(3)]
    lacking: dict[int, list[VectorName]] = {}
    shared_by_two: list[VectorName] = []

    def leave(peer: VirtualPeer, report) -> None:
        if report.round == 2 and not shared_by_two:
            holders = {slot: [each.index for each in peers if slot in each.slots] for slot in range(4)}
            slot = next(slot for slot, found in holders.items() if len(found) == 2)
            shared_by_two.append(VectorName.of_slot(slot))
            lacking.update({index: [] for index in holders[slot]})
        if report.round == 2 and peer.index in lacking:
            lacking[peer.index] = peer.sync.held.hand_over(60.0)
            raise Leaves

    run_peers(peers, leave)
    (left,) = (peer for peer in peers if peer.index not in lacking)
    assert len(lacking) == 2 and list(lacking.values()) == [[], []]
    assert len(left.reports) == rounds.total and shared_by_two[0].slot not in left.slots
    assert left.sync.held.is_certified(shared_by_two[0])
