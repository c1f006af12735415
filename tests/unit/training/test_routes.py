"""Slots come from peers that can send them."""

from __future__ import annotations

from collections import Counter

import pytest
from virtual import peer_id

from spes_p2p.swarm.names import VectorName
from spes_p2p.swarm.roster import Member, Roster
from spes_p2p.training.holdings import preferred, sources
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


def test_a_peer_asks_a_holder_that_it_has_met_before_others_that_can_be_called() -> None:
    called = member(0, None, (0,))
    first, second = member(1, 10.0, (1,), calls_only=True), member(2, 10.0, (2,), calls_only=True)
    name = VectorName.of_slot(1)

    def asked(*roster: Member) -> list[str]:
        met = Roster(roster, LAST)
        body = LAST.model_copy(update={"members": met.entries})
        return sources(PEERS[2], name, [PEERS[1]], body, met.uplinks_to(PEERS[2]))

    assert asked(called, first, second) == [PEERS[0], PEERS[1]]
    met = [each.model_copy(update={"links": (other.peer_id,)}) for each, other in ((first, second), (second, first))]
    assert asked(called, *met) == [PEERS[1], PEERS[0]]


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
