"""How long a peer waits for others before it averages with those that are there."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.swarm.averaging.matchmaking import Declarations, Leaders, SwarmMatchmaking

MEETING_SECONDS = 0.5


def test_no_time_is_up_when_a_peer_declares_for_the_first_time():
    """A follower that was there by then would be the only one: its leader began at once."""

    async def search() -> tuple[float, float]:
        me = PeerID(b"me")
        leaders = Leaders(me, MEETING_SECONDS, 4)
        known = Declarations(SimpleNamespace(peer_id=me), "", "", 4)
        known.survivors, known.leaders = {}, leaders
        now = get_dht_time()
        step = SimpleNamespace(scheduled_time=now + MEETING_SECONDS, deadline=now + 60)
        async with leaders.begin_search(step, known):
            with pytest.raises(TimeoutError):
                await leaders.pop_next_leader()
        return now, get_dht_time()

    began, ended = asyncio.run(search())
    assert ended - began >= MEETING_SECONDS, "the peer gave the others no time"


def test_when_a_round_is_redone_a_peer_leads_only_if_the_others_can_call_it():
    """The smallest id led, also where it was behind a router: the others took the next one, and it was left out."""
    first, second, third = (PeerID(b"survivor %d" % number) for number in range(3))
    can_be_called = {first: False, second: True, third: True}

    def followed(me: PeerID) -> list[PeerID]:
        known = Declarations(SimpleNamespace(peer_id=me, client_mode=not can_be_called[me]), "", "", 3)
        known.survivors = {peer: can for peer, can in can_be_called.items() if peer != me}
        return [peer for peer, _ in asyncio.run(known.get_averagers("", only_active=True))]

    assert [followed(me) for me in (first, second, third)] == [[second, third], [], [second]]


def test_a_peer_that_sees_few_others_closes_no_group_below_the_smallest_size():
    """One whose p2pd had stood still for some seconds led four of eight, which five have to certify: 27 s were lost."""
    matchmaking = SwarmMatchmaking.__new__(SwarmMatchmaking)
    matchmaking.group_key_manager, matchmaking.potential_leaders = SimpleNamespace(), SimpleNamespace()
    matchmaking.prepare(4, 5, None)
    assert matchmaking.target_group_size == matchmaking.group_key_manager.target_group_size == 5


@pytest.mark.parametrize("waits_for", [[], [math.inf], [1e308], [8.0, 4.0]], ids=str)
def test_whoever_says_to_wait_for_long_keeps_nobody_from_looking_on(waits_for, monkeypatch):
    """`waits_for`: declared waiting times, in seconds from now; the real leader is declared a moment later."""
    me, leader, now = PeerID(b"me"), PeerID(b"another that leads"), get_dht_time()
    liars = [PeerID(b"one that lies, %d" % number) for number in range(len(waits_for))]
    monkeypatch.setattr("spes_p2p.swarm.averaging.matchmaking.owner_of", lambda peer: peer.to_base58())

    class Found(SimpleNamespace):
        looks = 0

        async def get(self, *_, **__):
            self.looks += 1
            await asyncio.sleep(0.01)
            until = {liar: now + seconds for liar, seconds in zip(liars, waits_for, strict=True)}
            until |= {leader: now + 2.5} if self.looks > 3 else {}
            return SimpleNamespace(value={peer: SimpleNamespace(value=time) for peer, time in until.items()})

        def store(self, **_): ...

    async def search() -> PeerID:
        leaders, dht = Leaders(me, 3.0, 4), Found(peer_id=me, subkey=b"")
        known = Declarations(dht, "run", "", 4)
        known.leaders = leaders
        step = SimpleNamespace(scheduled_time=now + 3.0, deadline=now + 10.0)
        async with leaders.begin_search(step, known):
            while True:
                try:
                    return await asyncio.wait_for(leaders.pop_next_leader(), 2.0)
                except TimeoutError:
                    assert dht.looks > 3, "it does not look any further"

    assert asyncio.run(search()) == leader
