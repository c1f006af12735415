"""Until when a peer waits for others before it averages with those who are there."""

import asyncio
from types import SimpleNamespace

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.timed_storage import get_dht_time

from spes_p2p.swarm.averaging.meeting import Declarations, Leaders

MEETING_SECONDS = 0.5


def test_no_time_is_up_when_a_peer_declares_for_the_first_time():
    """A follower that was there by then would be the only one: its leader began at once."""

    async def search() -> tuple[float, float]:
        me = PeerID(b"me")
        leaders = Leaders(me, MEETING_SECONDS, 4)
        known = Declarations(SimpleNamespace(peer_id=me), "", "", 4)
        known.survivors = []
        now = get_dht_time()
        step = SimpleNamespace(scheduled_time=now + MEETING_SECONDS, deadline=now + 60)
        async with leaders.begin_search(step, known):
            with pytest.raises(TimeoutError):
                await leaders.pop_next_leader()
        return now, get_dht_time()

    began, ended = asyncio.run(search())
    assert ended - began >= MEETING_SECONDS, "the peer gave the others no time"
