"""Peers behind routers without a run: nodes that are introduced to each other and send bytes over their links."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Collection, Sequence
from pathlib import Path

from benchmarks.routers import Router
from benchmarks.testbed import TestBed
from benchmarks.wan.actor import Actor, Actors, call_all
from spes_p2p.swarm.exchange.protocol import DATA
from spes_p2p.swarm.p2p.channel import FRAME_BYTES, Channel
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.introductions import Introducer, Links
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.p2p.port_map import EVERY_INTERFACE

CALL_SECONDS = 60.0
LOOK_SECONDS = 0.05
RUN_ID, SERVICE = "routed", "bytes"


class RoutedPeer:
    """A node that introduces others if it can be called, and is introduced if it cannot.

    Args:
        folder: For its key.
        host: Address to listen on; None for a peer behind a router.
        initial_peers: Addresses of peers that can be called.
    """

    def __init__(self, folder: Path, host: str | None, initial_peers: Sequence[str]) -> None:
        listen = ListenConfig(host or EVERY_INTERFACE, client_mode=host is None)
        self.node = Node(Identity(folder / "key"), RUN_ID, initial_peers=initial_peers, listen=listen)
        self.links = Links(self.node)
        if not self.node.client_mode:
            Introducer(self.node)
        self.node.run(self.node.serve(SERVICE, CALL_SECONDS, self._take), CALL_SECONDS)

    def introduce(self) -> tuple[str, list[str]]:
        """Return this peer's id and addresses."""
        return self.node.peer_id, [] if self.node.client_mode else self.node.addresses()

    def kind(self) -> str:
        """Return what the router does, as the introducers tell."""
        return self.links.learn_kind()

    def seek(self, wanted: Collection[str], introducers: Collection[str], seconds: float) -> dict[str, float]:
        """Seek links for so long, or until all are there; return the seconds that each one took."""
        began, found = time.monotonic(), dict[str, float]()
        while time.monotonic() < began + seconds and len(found) < len(set(wanted) - {self.node.peer_id}):
            self.links.seek(wanted, introducers)  # as each heartbeat does: the other may not have known this one yet
            for peer, way in self.links.ways().items():
                if way == "met":
                    found.setdefault(peer, time.monotonic() - began)
            time.sleep(LOOK_SECONDS)
        return found

    def send(self, peer: str, num_bytes: int) -> float:
        """Send a peer bytes; return the seconds until it had all of them."""
        return self.node.run(self._send(peer, num_bytes), CALL_SECONDS)

    async def _send(self, peer: str, num_bytes: int) -> float:
        channel = await self.node.open(peer, SERVICE, CALL_SECONDS)
        with contextlib.closing(channel):
            frame, began = bytes(FRAME_BYTES), time.monotonic()
            await channel.send_text(str(num_bytes))
            for _ in range(num_bytes // FRAME_BYTES):
                await channel.send(DATA, frame)
            await channel.receive_text()
            return time.monotonic() - began

    async def _take(self, channel: Channel, peer: str) -> None:
        for _ in range(int(await channel.receive_text()) // FRAME_BYTES):
            await channel.receive({DATA: FRAME_BYTES})
        await channel.send_last("all")

    def close(self) -> None:
        self.node.close()


class RoutedPeers(Actors):
    """Peers that can be called, the first ones, and peers behind routers, each in its place of a bed.

    Args:
        bed: The places; those with routers come last.
        folder: For the peers' keys.
        num_called: Peers that can be called.
        num_routed: Peers behind routers.
    """

    def __init__(self, bed: TestBed, folder: Path, num_called: int, num_routed: int) -> None:
        super().__init__()
        self._bed = bed
        self._folder = folder
        self._num_called = num_called
        self._num_routed = num_routed
        self.ids: list[str] = []

    def _start_all(self) -> None:
        addresses: list[str] = []
        for place in range(self._num_called):
            self.members.append(self._start(place, addresses).ready())
            addresses += self.members[-1].call("introduce", seconds=CALL_SECONDS)[1][:1]
        for place in range(self._num_called, self._num_called + self._num_routed):
            self.members.append(self._start(place, addresses))
        for member in self.routed:
            member.ready()
        self.ids = [peer_id for peer_id, _ in call_all(self.members, "introduce", seconds=CALL_SECONDS)]

    def _start(self, place: int, addresses: Sequence[str]) -> Actor:
        folder = self._folder / str(place)
        folder.mkdir(parents=True, exist_ok=True)
        host = self._bed.address(place) if place < self._num_called else None
        start = functools.partial(self._bed.run_in, place)
        return Actor(f"peer {place}", RoutedPeer, folder, host, tuple(addresses), start=start)

    @property
    def routed(self) -> list[Actor]:
        """The peers behind routers."""
        return self.members[self._num_called :]

    @property
    def routed_ids(self) -> list[str]:
        """Their ids."""
        return self.ids[self._num_called :]

    def seek(self, seconds: float, which: Sequence[int] | None = None) -> list[dict[str, float]]:
        """Have peers behind routers, by default all, seek links to each other; return for each the seconds they took.

        Args:
            seconds: Time after which they give up.
            which: Places among the peers behind routers.
        """
        chosen = range(self._num_routed) if which is None else which
        called, wanted = self.ids[: self._num_called], [self.routed_ids[place] for place in chosen]
        seekers = [self.routed[place] for place in chosen]
        return call_all(seekers, "seek", wanted, called, seconds, seconds=CALL_SECONDS)


def bed_of(num_called: int, routers: Sequence[Router], **links: float) -> TestBed:
    """Return a bed with peers that can be called and peers behind routers of these kinds."""
    kinds = {num_called + number: kind for number, kind in enumerate(routers)}
    return TestBed(num_called + len(routers), routers=kinds, **links)  # type: ignore[arg-type]
