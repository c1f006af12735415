"""Real peers that hold a model's slots between them: rounds of averaging and exchange without training."""

from __future__ import annotations

import functools
import logging
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.testbed import TestBed
from benchmarks.wan.actor import Actor, Actors, call_all, finish_all
from benchmarks.wan.floors import Payload
from spes_p2p.codecs.format import Segment
from spes_p2p.codecs.kept import KeptForm
from spes_p2p.codecs.vectors import digest
from spes_p2p.config import CodecConfig, RoundConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.swarm.averaging.encoding import Contribution, Vectors
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import genesis
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.identity import Identity
from spes_p2p.swarm.p2p.node import ListenConfig, Node
from spes_p2p.swarm.records import Claim
from spes_p2p.swarm.roster import Member

RUN_ID = "network"
ROUNDS = RoundConfig(min_peers=64, averaging_seconds=120.0, exchange_seconds=120.0)
MEETING_SECONDS = 30.0
"""Time for all peers to arrive; a complete group does not wait for it."""
CALL_SECONDS = MEETING_SECONDS + 2 * ROUNDS.averaging_seconds + ROUNDS.exchange_seconds
NAMES = {SHARED: "shared", "slot": "slots"}
"""Which setting of the codecs is a kind's."""
DELTA = 1e-3
"""Standard deviation of the deltas."""


@dataclass(frozen=True)
class PeerRound:
    """One peer's account of a round, in seconds of the machine's monotonic clock.

    Attributes:
        matchmaking_seconds: Until the roster stood, and from the mean to the certificate.
        met_at: When the roster stood; encoding counts as matchmaking.
        averaged_at: When the mean was in this peer's hands.
        ended_at: When the last pulled slot was verified and stored, less the time of the decision.
    """

    matchmaking_seconds: float
    met_at: float
    averaged_at: float
    ended_at: float


class SwarmPeer:
    """A `HivemindSwarm` with random anchors and deltas.

    Args:
        directory: Holds its identity and versions.
        host: Address to listen on.
        initial_peers: Addresses to join.
        payload: The model's size.
        slots: What it holds.
        codecs: How deltas travel.
        kept: The form in which it fetches the others' slots; None for fp32.
        uplink_mbit: What it says that it can send.
    """

    def __init__(
        self,
        directory: Path,
        host: str,
        initial_peers: Sequence[str],
        payload: Payload,
        slots: Sequence[int],
        codecs: CodecConfig,
        kept: KeptForm | None,
        uplink_mbit: float | None,
    ) -> None:
        torch.set_num_threads(1)
        logging.disable(logging.INFO)
        self._slots = tuple(slots)
        self._kept = kept
        self._uplink_mbit = uplink_mbit
        self._names = [SHARED, *map(VectorName.of_slot, slots)]
        self._random = torch.Generator()
        self._random.seed()
        self._numels = {SHARED: payload.shared_numel, "slot": payload.slot_numel}
        self._anchors = {name: self._bundle(name) for name in self._names}
        self._deltas = {name: DELTA * torch.randn(self._numel(name), generator=self._random) for name in self._names}
        node = Node(Identity(directory / "key"), RUN_ID, initial_peers=initial_peers, listen=ListenConfig(host))
        self._swarm = HivemindSwarm(node, directory / "versions", uplink_mbit=uplink_mbit)
        segments = {kind: (Segment(numel, getattr(codecs, NAMES[kind])),) for kind, numel in self._numels.items()}
        vectors = Vectors(self._numels, segments, payload.slots, kept=kept)
        founder = initial_peers[0].rpartition("/p2p/")[2] if initial_peers else self._swarm.peer_id
        start = genesis(RUN_ID, founder, "0" * 64, payload.slots)
        self._swarm.enter(ROUNDS, vectors, start, max_slots=len(slots))
        if slots:  # a peer with a claim is a member, and is served before newcomers
            me = self._swarm.peer_id
            claim = Claim(peer_id=me, state="active", slots=tuple(slots), max_slots=len(slots), since=self._swarm.now())
            self._swarm.announce(claim)

    def introduce(self) -> tuple[str, list[str]]:
        """Return its id and addresses."""
        node = self._swarm.node
        return self._swarm.peer_id, node.addresses()

    def round(self, number: int, expected: int) -> PeerRound:
        """Average, step the anchors, publish them, and pull what others hold.

        Args:
            number: Of the anchors before the round.
            expected: Peers in all.

        Raises:
            ExchangeError: something was dropped, or could not be had.
        """
        peers = self._swarm.read(Claim).keys()
        began, tried = time.monotonic(), list[tuple[RoundResult, float]]()

        def stage(result: RoundResult) -> Staged:
            tried.append((result, time.monotonic()))
            stepped = {name: digest(self._anchors[name] - mean) for name, mean in result.means.items()}
            return stepped, self._swarm.now() + 1.0

        contribution, closes_from = Contribution(self._member(), self._deltas), self._swarm.now() + MEETING_SECONDS
        body = self._swarm.agree(contribution, stage, expected=peers, closes_from=closes_from)
        decided_at, (result, averaged_at) = time.monotonic(), tried[-1]
        if body is None or len(result.roster) < expected or result.dropped:
            raise ExchangeError(f"{len(result.roster)} of {expected} peers met, dropped: {dict(result.dropped)}")
        for name, mean in result.means.items():
            self._anchors[name] = self._anchors[name] - mean
        self._swarm.keep_residuals(result, result.means)
        slots = [name for name in self._names if name != SHARED]
        forms = {name.kept: self._kept.encode(self._anchors[name]) for name in slots} if self._kept else {}
        self._swarm.publish(number + 1, self._anchors | forms)
        self._pull_slots(result, number + 1)
        met_at, deciding = began + result.matchmaking_seconds, decided_at - averaged_at
        return PeerRound(result.matchmaking_seconds + deciding, met_at, averaged_at, time.monotonic() - deciding)

    def _member(self) -> Member:
        return Member(
            peer_id=self._swarm.peer_id,
            round=self._swarm.last().round,
            previous=self._swarm.last().digest,
            tokens=1,
            slots=self._slots,
            tokens_per_second=1.0,
            ready_at=self._swarm.now(),
            sync_seconds=0.0,
            uplink_mbit=self._uplink_mbit,
        )

    def _pull_slots(self, result: RoundResult, round: int) -> None:
        """Fetch the others' slots as `training.slots` does."""
        names = [name.kept if self._kept else name for name in result.roster.groups if name not in self._names]
        self.pull(names, [member.peer_id for member in result.roster], round)

    def catch_up(self, names: Sequence[str], peers: Sequence[str], min_round: int) -> float:
        """Pull versions from peers, as newcomers do; return how long it took.

        A round that ends meanwhile replaces what was listed, and the newest is pulled then.
        """
        began = time.monotonic()
        while True:
            try:
                self.pull(list(map(VectorName, names)), peers, min_round)
            except ExchangeError:
                if time.monotonic() > began + 4 * ROUNDS.exchange_seconds:
                    raise
            else:
                return time.monotonic() - began

    def pull(self, names: Sequence[VectorName], peers: Sequence[str], min_round: int) -> float:
        """Pull versions; return how long it took.

        No certificate names their digests here, so the peers are asked for them.

        Raises:
            ExchangeError: something could not be had.
        """
        began, others = time.monotonic(), [peer for peer in peers if peer != self._swarm.peer_id]
        wanted: dict[VectorName, tuple[int, str]] = {}
        while len(wanted) < len(names):
            if time.monotonic() > began + ROUNDS.exchange_seconds:
                raise ExchangeError(f"no peer lists {sorted(set(names) - wanted.keys())}")
            for versions in self._swarm.inventory(others).values():
                listed = {name: versions[name] for name in names if name in versions}
                wanted |= {name: (each.round, each.digest) for name, each in listed.items() if each.round >= min_round}
        failed = self._swarm.pull(wanted, others, timeout=ROUNDS.exchange_seconds)
        if failed:
            raise ExchangeError(f"could not pull {dict(failed)}")
        return time.monotonic() - began

    def _bundle(self, name: str, round: int = 0) -> Tensor:
        """Return a vector that all peers draw alike: versions of one name and round have one digest."""
        seed = zlib.crc32(f"{name} {round}".encode())
        return torch.randn(self._numel(name), generator=torch.Generator().manual_seed(seed))

    def _numel(self, name: str) -> int:
        return self._numels[VectorName(name).kind]

    def close(self) -> None:
        """Leave the swarm."""
        self._swarm.close()


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
        place: TestBed,
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
                _, self._addresses = self.members[0].ready().call("introduce", seconds=MEETING_SECONDS)
        for member in self.members[1:]:
            member.ready()
        self.ids = [peer_id for peer_id, _ in call_all(self.members, "introduce", seconds=MEETING_SECONDS)]

    def _start(self, peer: int, is_joiner: bool = False) -> Actor:
        slots = () if is_joiner else range(peer, self._payload.slots, self._peers)
        uplink = None if is_joiner else self._uplinks.get(peer)
        arguments = (
            self._addresses,
            self._payload,
            slots,
            self._codecs or CodecConfig(),
            None if is_joiner else self._kept,
            uplink,
        )
        folder, start = self._folder / f"peer{peer}", functools.partial(self._place.run_in, peer)
        return Actor(f"peer {peer}", SwarmPeer, folder, self._place.address(peer), *arguments, start=start)

    def start_joiner(self, peer: int) -> Actor:
        """Start another peer, without slots."""
        return self._start(peer, is_joiner=True)

    @property
    def names(self) -> list[str]:
        """All names that a newcomer fetches."""
        return [SHARED, *map(VectorName.of_slot, range(self._payload.slots))]

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
