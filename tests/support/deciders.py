"""Peers that decide rounds without averaging: the same consensus over a virtual network, or over p2pd."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Collection
from pathlib import Path

from spes_p2p.codecs.vectors import digest
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.consensus import CERTIFICATES, Consensus
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.network import Network
from spes_p2p.swarm.p2p.identity import Identity, IdentityKeys
from spes_p2p.swarm.part import Outcome, Part, Rules
from spes_p2p.swarm.roster import Member, Roster

RULES = Rules(
    min_peers=3,
    round_seconds=60.0,
    meeting_seconds=3.0,
    averaging_seconds=3.0,
    results_seconds=2.0,
    shrink_seconds=600.0,
)
SLOT = VectorName.of_slot(0)

log = logging.getLogger(__name__)


class Decider:
    """A peer's consensus, and what it brings to a round: vectors that are the same on all.

    Args:
        network: Its network.
        identity: Its key.
        folder: Holds its files.
        start: Body before the first round.
        is_gone: Tells whether another peer's lease has run out.
        is_new: Whether it can have made no promise yet.
        finds: Whether it follows no chain before `find`.
    """

    def __init__(
        self,
        network: Network,
        identity: Identity,
        folder: Path,
        start: Body,
        is_gone: Callable[[str], bool] = lambda peer: False,
        *,
        is_new: bool = True,
        finds: bool = False,
    ) -> None:
        self.network = network
        self.peer_id = identity.peer_id
        self.keys = IdentityKeys(identity)
        self.path = folder / CERTIFICATES
        self.others: Collection[str] = start.voters
        """Peers that follow the run, as it knows from their records."""
        self.consensus = Consensus(
            network,
            self.keys,
            folder,
            start,
            RULES,
            peers=lambda: self.others,
            is_gone=is_gone,
            is_new=is_new,
            finds=finds,
        )

    @property
    def last(self) -> Body:
        return self.consensus.last()

    def decide(self, expected: Collection[str], gives_up: Callable[[], bool] = lambda: False) -> Body | None:
        """Take part in the next round until it is decided, or `gives_up` says so."""
        last, now = self.last, self.network.now()
        member = Member(
            peer_id=self.peer_id,
            round=last.round,
            previous=last.digest,
            tokens=1,
            slots=(0,),
            tokens_per_second=1.0,
            ready_at=now,
            sync_seconds=1.0,
            calls_only=self.network.client_mode,
        )
        vectors = {name: digest(f"{name} {last.round + 1}".encode()) for name in (SHARED, SLOT)}

        async def average(roster: Roster, attempt: int) -> Outcome:
            return Outcome(vectors, self.network.now() + 1.0)

        body = self.consensus.settle(Part(member, average, lambda: expected, now), on_wait=gives_up)
        assert body is None or (body.shared, body.slots[0].digest) == (vectors[SHARED], vectors[SLOT])
        return body

    def rounds(self) -> list[int]:
        """Return the rounds of the certificates on disk."""
        return [json.loads(line)["certificate"]["body"]["round"] for line in self.path.read_text().splitlines()]
