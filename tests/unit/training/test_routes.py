"""Slots come from those who can send them, and no slow holder has to send to everybody."""

from __future__ import annotations

from collections import Counter

import pytest
from virtual import peer_id

from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.training.fetch_plan import moment_sources, plan_fetch, preferred, relays, replicas
from tests.support.certificates import last_body

PEERS = [peer_id(i) for i in range(5)]
LAST = last_body(PEERS)


def member(index: int, uplink: float | None, slots: tuple[int, ...], **changes) -> Member:
    settings = {
        "round": LAST.round,
        "previous": LAST.digest,
        "tokens": 10,
        "tokens_per_second": 1.0,
        "ready_at": 0.0,
        "sync_seconds": 0.0,
    }
    entry = {**settings, "peer_id": PEERS[index], "slots": slots, "uplink_mbit": uplink, **changes}
    return Member(**entry)


def chains(*roster: Member) -> dict[str, tuple[str, ...]]:
    met = Roster(roster, LAST)
    return relays(met, replicas(met.groups, 2, met.uplinks))


def sorted_peers(*indices: int) -> tuple[str, ...]:
    return tuple(sorted(PEERS[index] for index in indices))


def test_others_pass_on_the_slots_of_a_holder_with_less_than_half_the_median_uplink() -> None:
    others = [member(1, 100.0, (1,)), member(2, 100.0, (2,)), member(3, None, (3,))]
    assert chains(member(0, 49.0, (0, 4)), *others) == dict.fromkeys(("slot-0", "slot-4"), sorted_peers(1, 2, 3))
    assert chains(member(0, 50.0, (0, 4)), *others) == {}


def test_nobody_passes_on_what_a_faster_holder_has_too() -> None:
    roster = [member(0, 20.0, (0,)), member(1, 100.0, (0,)), member(2, 100.0, (2,)), member(3, 100.0, (3,))]
    assert chains(*roster) == {}


def test_where_nobody_says_what_it_may_send_nothing_is_passed_on() -> None:
    assert chains(*(member(i, None, (i,)) for i in range(4))) == {}


def test_only_those_who_fetch_a_slot_for_certain_are_counted_on() -> None:
    slow = member(0, 1.0, (0,))
    others = [member(1, 100.0, (1,)), member(2, 100.0, (2,)), member(3, 100.0, (3,), refreshes=True)]
    behind = member(4, 100.0, (), previous="7" * 64)
    assert chains(slow, *others, behind) == {"slot-0": sorted_peers(1, 2)}
    assert chains(slow, others[0], others[2]) == {}, "one alone has nobody to pass it on to"


@pytest.mark.parametrize("refreshes", [False, True], ids=["takes all", "takes some"])
def test_one_alone_passes_on_the_slots_of_holders_whom_nobody_can_call(refreshes: bool) -> None:
    """Else two of them would never have each other's; who takes few slots keeps these, and so has them."""
    called = member(0, None, (0, 1), refreshes=refreshes)
    hidden = [member(1, None, (2, 3), calls_only=True), member(2, None, (4, 5), calls_only=True)]
    assert chains(called, *hidden) == dict.fromkeys(("slot-2", "slot-3", "slot-4", "slot-5"), (PEERS[0],))
    assert chains(*hidden) == {}, "nobody is there who could"
    assert "slot-2" not in chains(called, hidden[1], member(1, None, (2,), calls_only=True), member(3, None, (2,)))


def test_a_peer_asks_a_holder_that_it_has_met_before_one_that_passes_the_slot_on() -> None:
    called = member(0, None, (0,))
    first, second = member(1, 10.0, (1,), calls_only=True), member(2, 10.0, (2,), calls_only=True)
    name = VectorName.of_slot(1)

    def asked(*roster: Member) -> list[str]:
        return list(
            plan_fetch(PEERS[2], Roster(roster, LAST), {name: [PEERS[1]]}, [name], {}, with_moments=False).wanted[name]
        )

    assert asked(called, first, second) == [PEERS[0], PEERS[1]]
    met = [each.model_copy(update={"links": (other.peer_id,)}) for each, other in ((first, second), (second, first))]
    assert asked(called, *met) == [PEERS[1], PEERS[0]]


def test_moments_come_from_who_trains_them_unless_neither_side_can_be_called() -> None:
    links = {"called": 1.0, "other": 1.0, "hidden": 0.0, "puller": 0.0}
    keepers = ("puller", "called", "hidden")
    assert moment_sources("puller", ["hidden"], keepers, links) == ["called"]
    assert moment_sources("puller", ["hidden", "other"], keepers, links) == ["hidden", "other"]
    assert moment_sources("called", ["hidden"], keepers, links) == ["hidden"]
    assert moment_sources("puller", ["hidden"], ("puller",), links) == ["hidden"], "no other peer has them"


def test_pullers_spread_over_holders_by_what_these_can_send() -> None:
    links = {PEERS[0]: 100.0, PEERS[1]: 300.0}
    firsts = Counter(preferred(f"puller-{i}", "slot-1", links, links)[0] for i in range(4000))
    assert firsts[PEERS[1]] / 4000 == pytest.approx(0.75, abs=0.03)
    even = Counter(preferred(f"puller-{i}", "slot-1", PEERS)[0] for i in range(5000))
    assert all(count / 5000 == pytest.approx(0.2, abs=0.03) for count in even.values())


def test_an_order_is_the_same_whenever_it_is_asked_for() -> None:
    first = preferred("me", "slot-1", PEERS)
    assert first == preferred("me", "slot-1", reversed(PEERS)) and sorted(first) == sorted(PEERS)
    assert len({tuple(preferred("me", f"slot-{i}", PEERS)) for i in range(20)}) > 5
