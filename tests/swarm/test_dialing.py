"""Two peers that dial each other within a round trip are connected: real p2pd hosts in network namespaces."""

from __future__ import annotations

import asyncio
import functools
import time

import pytest
from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from benchmarks.testbed import TestBed, available
from benchmarks.wan.actor import Actor, close_all, finish_all
from spes_p2p.swarm.hivemind_fixes.processes import DaemonP2P

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(available() is not None, reason=f"no test bed: {available()}"),
]


class Dialer:
    """A p2pd that connects when told to."""

    def __init__(self, host: str) -> None:
        self._loop = asyncio.new_event_loop()
        asyncio.set_event_loop(self._loop)
        reach = {"host_maddrs": [f"/ip4/{host}/tcp/0"], "dht_mode": "client", "use_relay": False}
        self._p2p = self._loop.run_until_complete(DaemonP2P.create(auto_nat=False, nat_port_map=False, **reach))

    def introduce(self) -> tuple[str, list[str]]:
        addresses = self._loop.run_until_complete(self._p2p.get_visible_maddrs())
        return self._p2p.peer_id.to_base58(), [str(address).split("/p2p/")[0] for address in addresses]

    def dial(self, peer_id: str, addresses: list[str], at: float) -> None:
        async def connect() -> None:
            await asyncio.sleep(at - time.monotonic())
            await self._p2p._client.connect(PeerID.from_base58(peer_id), [Multiaddr(each) for each in addresses])

        self._loop.run_until_complete(connect())

    def close(self) -> None:
        self._loop.run_until_complete(self._p2p.shutdown())


def test_two_peers_that_dial_each_other_within_a_round_trip_are_connected() -> None:
    """With libp2p's default they are not, and everybody dials everybody when a swarm's first roster stands."""
    with TestBed(peers=2, rtt_ms=200) as bed:
        actors = [Actor(f"{i}", Dialer, bed.address(i), start=functools.partial(bed.run_in, i)) for i in range(2)]
        try:
            one, other = (actor.ready().call("introduce", seconds=30) for actor in actors)
            at = time.monotonic() + 0.5
            actors[0].begin("dial", *other, at)
            actors[1].begin("dial", *one, at)
            finish_all(actors, 30)
        finally:
            close_all(actors)
