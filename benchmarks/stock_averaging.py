"""Hivemind's own averager on the whole model, for comparison: what a swarm does that has no slots.

All peers average all vectors in fp32, with `hivemind.DecentralizedAverager` as it comes.
"""

from __future__ import annotations

import functools
import threading
import time

import hivemind
import torch
from hivemind.averaging.control import AveragingStage

from benchmarks.testbed import Place
from benchmarks.wan.actor import Actor, Actors, call_all
from benchmarks.wan.floors import Payload
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.hivemind_fixes.processes import ChildDHT

MATCHMAKING_SECONDS = 5.0
REQUEST_SECONDS = 2.0
ROUND_SECONDS = 300.0
STAGE_SECONDS = 0.01
"""Interval of polling the averager's stage; it announces no completed group."""


class StockPeer:
    """A peer that averages everything."""

    def __init__(self, host: str, initial_peers: list[str], payload: Payload, peers: int) -> None:
        torch.set_num_threads(1)
        sizes = [payload.shared_numel] + [payload.slot_numel] * payload.slots
        self._dht = ChildDHT(
            initial_peers=initial_peers,
            start=True,
            host_maddrs=[f"/ip4/{host}/tcp/0"],
            use_relay=False,
            auto_nat=False,
            nat_port_map=False,
        )
        self._peers = peers
        self._averager = hivemind.DecentralizedAverager(
            [torch.randn(size) for size in sizes],
            self._dht,
            start=True,
            prefix="stock",
            target_group_size=peers,
            min_matchmaking_time=MATCHMAKING_SECONDS,
            request_timeout=REQUEST_SECONDS,
        )

    def addresses(self) -> list[str]:
        """Return where it can be reached."""
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def round(self) -> tuple[float, float, float]:
        """Average once; return when it began, when the group stood and when the averaging had ended.

        Raises:
            ExchangeError: a peer was not in the group.
        """
        began = time.monotonic()
        control = self._averager.step(wait=False, timeout=ROUND_SECONDS, allow_retries=False)
        pause = threading.Event()
        while not control.done() and control.stage.value < AveragingStage.RUNNING_ALLREDUCE.value:
            pause.wait(STAGE_SECONDS)
        met_at = time.monotonic()
        group = control.result(timeout=ROUND_SECONDS) or {}
        if len(group) != self._peers:
            raise ExchangeError(f"{len(group)} of {self._peers} peers met")
        return began, met_at, time.monotonic()

    def checksum(self) -> float:
        """Return the mean of all its numbers, as they are after its rounds."""
        with self._averager.get_tensors() as tensors:
            return float(torch.cat([tensor.flatten() for tensor in tensors]).double().mean())

    def close(self) -> None:
        """Leave."""
        self._averager.shutdown()
        self._dht.shutdown()


class StockCluster(Actors):
    """Peers that average everything.

    Args:
        place: Where they live: peer i in namespace i.
        peers: How many.
        payload: The model's size.
    """

    def __init__(self, place: Place, peers: int, payload: Payload) -> None:
        super().__init__()
        self._place = place
        self._payload = payload
        self._peers = peers

    def _start_all(self) -> None:
        addresses: list[str] = []
        for peer in range(self._peers):
            arguments = (self._place.address(peer), addresses, self._payload, self._peers)
            start = functools.partial(self._place.run_in, peer)
            self.members.append(Actor(f"stock peer {peer}", StockPeer, *arguments, start=start))
            self.members[-1].ready()
            addresses = addresses or self.members[0].call("addresses", seconds=30)

    def round(self) -> float:
        """Make a round; return the seconds from the first group that stood to the last end, matchmaking apart."""
        times = call_all(self.members, "round", seconds=2 * ROUND_SECONDS)
        return max(ended for _, _, ended in times) - min(met_at for _, met_at, _ in times)

    def checksums(self) -> list[float]:
        """Return the mean of each peer's numbers."""
        return call_all(self.members, "checksum", seconds=ROUND_SECONDS)
