"""Real peers that hold a model's slots between them, and the time of their rounds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.testbed import Place
from benchmarks.wan.actor import Actor, Actors, call_all, finish_all
from benchmarks.wan.floors import Payload
from benchmarks.wan.swarm_peer import CALL_SECONDS, PeerRound, start_peer
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.config import CodecConfig
from spes_p2p.swarm.names import SHARED, VectorName

INTRODUCTION_SECONDS = 30.0


@dataclass(frozen=True)
class ClusterRound:
    """A round of all peers together.

    Attributes:
        matchmaking_seconds: Time of the slowest peer.
        averaging_seconds: From the first roster to the last confirmed digest.
        seconds: From the first roster to the last slot pulled, verified and stored, wherever that was.
        cpu_seconds: CPU time of all processes of all peers, including matchmaking.
    """

    matchmaking_seconds: float
    averaging_seconds: float
    seconds: float
    cpu_seconds: float


class SwarmCluster(Actors):
    """Peers that hold all slots between them, one holder each.

    Args:
        place: Runs peer i in namespace i.
        folder: Receives the peers' files.
        peers: Number of peers.
        payload: The model's size.
        codecs: Codecs of the deltas.
        kept: The form in which peers keep the others' slots; None for fp32.
        uplinks: Uplinks that peers state, by peer.
    """

    def __init__(
        self,
        place: Place,
        folder: Path,
        peers: int,
        payload: Payload,
        *,
        codecs: CodecConfig | None = None,
        kept: KeptForm | None = None,
        uplinks: dict[int, float] | None = None,
    ) -> None:
        super().__init__()
        self._place = place
        self._folder = folder
        self._peers = peers
        self._payload = payload
        self._codecs = codecs
        self._kept = kept
        self._uplinks = uplinks or {}
        self.number = 0
        """The round of the newest versions."""
        self._cpu_before = 0.0
        self._addresses: list[str] = []
        self.ids: list[str] = []
        """The members' peer ids."""

    def _start_all(self) -> None:
        for peer in range(self._peers):
            self.members.append(self._start(peer))
            if peer == 0:
                _, self._addresses = self.members[0].ready().call("introduce", seconds=INTRODUCTION_SECONDS)
        for member in self.members[1:]:
            member.ready()
        answers = call_all(self.members, "introduce", seconds=INTRODUCTION_SECONDS)
        self.ids = [peer_id for peer_id, _ in answers]
        routed = [member for member, (_, addresses) in zip(self.members, answers, strict=True) if not addresses]
        hidden = [peer_id for peer_id, addresses in answers if not addresses]
        call_all(routed, "wait_for_links", hidden, seconds=CALL_SECONDS)

    def _start(self, peer: int) -> Actor:
        return start_peer(
            self._place,
            peer,
            self._folder,
            self._payload,
            initial_peers=self._addresses,
            slots=range(peer, self._payload.slots, self._peers),
            codecs=self._codecs,
            kept=self._kept,
            uplink_mbit=self._uplinks.get(peer),
        )

    def start_joiner(self, peer: int) -> Actor:
        """Start another peer, without slots."""
        return start_peer(
            self._place, peer, self._folder, self._payload, initial_peers=self._addresses, codecs=self._codecs
        )

    @property
    def names(self) -> list[str]:
        """All names that a newcomer fetches."""
        return [SHARED, *map(VectorName.of_slot, range(self._payload.slots))]

    def kill(self, peer: int) -> None:
        """End a peer without notice; the rounds go on without it."""
        self.members.pop(peer).kill()

    def begin_round(self) -> None:
        """Start a round on all peers; `finish_round` waits for it."""
        self._cpu_before = sum(member.cpu_seconds() for member in self.members)
        for member in self.members:
            member.begin("round", self.number, len(self.members))

    def finish_round(self) -> ClusterRound:
        """Wait for all peers; return the round's figures."""
        rounds: list[PeerRound] = finish_all(self.members, CALL_SECONDS)
        cpu_seconds = sum(member.cpu_seconds() for member in self.members) - self._cpu_before
        self.number += 1
        met_at = min(each.met_at for each in rounds)
        return ClusterRound(
            matchmaking_seconds=max(each.matchmaking_seconds for each in rounds),
            averaging_seconds=max(each.averaged_at for each in rounds) - met_at,
            seconds=max(each.ended_at for each in rounds) - met_at,
            cpu_seconds=cpu_seconds,
        )

    def round(self) -> ClusterRound:
        """Run a round on all peers."""
        self.begin_round()
        return self.finish_round()
