"""What a real peer does beside its run: it stays connected, meets peers behind routers, watches p2pd and the DHT."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from spes_p2p.swarm.p2p.introductions import Introducer, Links, dial_back
from spes_p2p.swarm.p2p.node import Node
from spes_p2p.swarm.p2p.watchdog import Watchdog
from spes_p2p.swarm.records import Contact


class Machine:
    """Keeps a node in touch with other peers; a virtual peer has none.

    Attributes:
        watchdog: Dials lost peers again, once it is started, and notices when p2pd or the DHT has died.
        links: Direct connections to peers that take no calls.
    """

    def __init__(self, node: Node) -> None:
        self.node = node
        self.watchdog = Watchdog(node)
        self.links = Links(node)
        if not node.client_mode:
            dial_back(node)
            Introducer(node)

    def met_before(self) -> frozenset[str]:
        """Return the peers that were known before a restart, if none of them has answered since."""
        known = () if self.node.has_met_peers else self.node.peerstore.addresses()
        return frozenset(known) - {self.node.peer_id}

    def remember(self, contacts: Mapping[str, Contact], first: Collection[str]) -> None:
        """Keep the addresses that other peers state, first those of some."""
        others = {peer: contact.addresses for peer, contact in contacts.items() if peer != self.node.peer_id}
        self.node.remember(others, first=first)

    def meet(self, contacts: Mapping[str, Contact], claimants: Collection[str]) -> None:
        """Seek links to the claimants that take no calls."""
        hidden = {peer for peer, contact in contacts.items() if not contact.addresses}
        self.links.seek(hidden.intersection(claimants), contacts.keys() - hidden)

    def close(self) -> None:
        """End the watch, and shut the node down. Idempotent."""
        self.watchdog.stop()
        self.node.close()
