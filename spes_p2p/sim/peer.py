"""A virtual peer: the real trainer, rounds, swarm and codecs, over a virtual network in virtual time."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

from torch import LongTensor, Tensor

from spes_p2p.config import RunConfig
from spes_p2p.data.packing import TokenSource
from spes_p2p.errors import SimulationError
from spes_p2p.fs import link_file
from spes_p2p.model.adapted import Base
from spes_p2p.sim.network import VirtualNode
from spes_p2p.swarm.averaging.audit import Evidence
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.bans import Bans
from spes_p2p.swarm.certificate import Body
from spes_p2p.swarm.exchange.blocks import Unfinished
from spes_p2p.swarm.exchange.store import VersionStore, write_whole
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.hivemind_swarm import HivemindSwarm
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Metrics
from spes_p2p.training.build import build_synchroniser, build_trainer
from spes_p2p.training.loss_gate import LossGate
from spes_p2p.training.ranks import Ranks
from spes_p2p.training.round import TrainingLoop

MAX_FRUITLESS_ATTEMPTS = 20
"""Attempts without a mean of `shared` in a row after which the swarm counts as unable to continue."""
SERVE_SECONDS = 30.0
"""Time for which a peer serves the run's last versions, equal to the default of real peers."""
POOL = "pool"
"""Folder of the versions of all virtual peers, by digest."""


class Leaves(Exception):
    """Raised in a peer's thread when it leaves; a real peer gets KeyboardInterrupt."""


class Dies(Exception):
    """Raised in a peer's thread when it is killed."""


class VirtualKeys:
    """The key of a virtual peer, which every other one can check: signatures that cost nothing. No peer forges one."""

    held: Collection[str] = frozenset()

    def __init__(self, peer_id: str) -> None:
        self.peer_id = peer_id

    def sign(self, data: bytes) -> str:
        return hashlib.sha256(self.peer_id.encode() + data).hexdigest()

    def is_signed_by(self, peer_id: str, data: bytes, signature: str) -> bool:
        return hashlib.sha256(peer_id.encode() + data).hexdigest() == signature

    def learn(self, public_key: bytes) -> str:
        raise ValueError("virtual peers have no public keys")

    def public_key(self, peer_id: str) -> str:
        return ""


class SharedStore(VersionStore):
    """A virtual peer's versions; peers with the same version share its bytes.

    Args:
        directory: Folder of the store; the folder above it, which all peers share, has the pool.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self._pool = directory.parent.parent / POOL
        self._pool.mkdir(exist_ok=True)

    def _write(self, version: Version, data: bytes | memoryview) -> None:
        path, shared = self.path(version), self._pool / version.digest
        if path.exists() or (shared.exists() and link_file(shared, path)):
            return
        write_whole(path, data)
        link_file(path, shared)

    def finish(self, unfinished: Unfinished) -> None:
        shared = self._pool / unfinished.version.digest
        if shared.exists():
            unfinished.path.unlink()
            link_file(shared, unfinished.path)
        super().finish(unfinished)

    def _forget(self, version: Version) -> None:
        super()._forget(version)
        shared = self._pool / version.digest
        if shared.exists() and shared.stat().st_nlink == 1:
            shared.unlink()


class NotedBans(Bans):
    """Bans that note who was accused of what round.

    Attributes:
        accused: Rounds and peers for which there was evidence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.accused: set[tuple[int, str]] = set()

    def record(self, round: int, evidence: Mapping[str, Evidence]) -> None:
        self.accused |= {(round, peer) for peer in evidence}
        super().record(round, evidence)


class VirtualSwarm(HivemindSwarm):
    """A virtual peer's swarm.

    Args:
        network: This peer's network; closed with the swarm.
        folder: Shared by all peers.
    """

    bans: NotedBans

    def __init__(self, network: VirtualNode, folder: Path) -> None:
        directory = folder / network.peer_id / "versions"
        super().__init__(network, directory, keys=VirtualKeys(network.peer_id), store=SharedStore(directory))
        self.network = network
        self.bans = NotedBans()
        self._num_fruitless = 0

    def close(self) -> None:
        super().close()
        self.network.close()

    def agree(
        self, contribution: Contribution, stage: Callable[[RoundResult], Staged | None], **when: Any
    ) -> Body | None:
        return super().agree(contribution, partial(self._stage, stage), **when)

    def _stage(self, stage: Callable[[RoundResult], Staged | None], result: RoundResult) -> Staged | None:
        """Return what would follow from a result; end a simulation that goes nowhere."""
        self._num_fruitless = 0 if SHARED in result.means else self._num_fruitless + 1
        if self._num_fruitless >= MAX_FRUITLESS_ATTEMPTS:
            raise SimulationError(
                f"round {result.roster.round + 1} was dropped {self._num_fruitless} times in a row: "
                f"{result.dropped.get(SHARED, 'no peer trained a token')}; lower run.train.lr if the loss diverged, "
                f"or see the attacks and events"
            )
        return stage(result)


class PacedTokens:
    """A token source whose batches take virtual time: `spend` is called with the number of tokens of each."""

    def __init__(self, source: TokenSource, spend: Callable[[int], None]) -> None:
        self._source = source
        self._spend = spend

    def next_batch(self, num_sequences: int) -> LongTensor:
        tokens_BT1 = self._source.next_batch(num_sequences)
        self._spend(tokens_BT1[:, 1:].numel())
        return tokens_BT1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)


class VirtualMachine(NamedTuple):
    """What a virtual peer runs on: slots that it can train, tokens per virtual second, and where it really computes."""

    max_slots: int
    tokens_per_second: float = 1000.0
    device: str = "cpu"


class VirtualPeer:
    """A peer of a simulation: a real peer's trainer, training loop and synchroniser, in virtual time.

    Args:
        start: The run's genesis.
        probe_BT1: Public sequences that the loss gate measures.
        base: The frozen weights under the run's adapters, if it has any.
    """

    def __init__(
        self,
        run: RunConfig,
        swarm: VirtualSwarm,
        start: Body,
        data: TokenSource,
        probe_BT1: LongTensor,
        machine: VirtualMachine,
        *,
        vocab_size: int,
        base: Base | None = None,
    ) -> None:
        self.swarm = swarm
        self._tokens_per_second = machine.tokens_per_second
        self._exchange_seconds = run.round.exchange_seconds
        paced = cast(TokenSource, PacedTokens(data, self._spend))
        self.trainer = build_trainer(run, vocab_size, paced, Ranks(machine.device), clock=swarm.now, base=base)
        self.sync = build_synchroniser(
            swarm, run, self.trainer, run_id=swarm.network.run_id, max_slots=machine.max_slots
        )
        is_new = not swarm.versions()  # otherwise it starts again, with what is on its disk
        swarm.enter(run.round, self.sync.anchors.vectors(), start, max_slots=machine.max_slots, is_new=is_new)
        gate = LossGate(self.trainer, self.sync, probe_BT1)
        self.loop = TrainingLoop(run, self.trainer, self.sync, gate=gate)
        self.reports: list[Metrics] = []
        self._interruption: tuple[float, float] | None = None

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots that the peer trains, or trained last."""
        return self.trainer.slots

    def live(self, initial: Callable[[], Mapping[VectorName, Tensor]], on_round: Callable[[Metrics], None]) -> None:
        """Join, train to the run's end, leave.

        Args:
            on_round: Called with the report of each round; may raise `Leaves` or call `interrupt`.
        """

        def report(metrics: Metrics) -> None:
            self.reports.append(metrics)
            on_round(metrics)

        try:
            self.loop.open(initial)
            self.loop.run(report)
            self.swarm.network.advance(SERVE_SECONDS)
            self.sync.held.leave()
        except Leaves:
            self.sync.held.hand_over(self._exchange_seconds)
        except Dies:
            pass
        self.swarm.close()

    def interrupt(self, after_seconds: float, seconds: float = math.inf) -> None:
        """Kill or pause the peer in the middle of training.

        Args:
            after_seconds: The interruption comes at the end of the first batch that ends this much later, or more.
            seconds: Length of a pause, in which the peer neither works nor answers; infinite kills it.
        """
        self._interruption = self.swarm.now() + after_seconds, seconds

    def _spend(self, tokens: int) -> None:
        """Let a batch take its time, and interrupt the peer if that is due."""
        node = self.swarm.network
        node.advance(tokens / self._tokens_per_second)
        if self._interruption is None or node.now() < self._interruption[0]:
            return
        (_, seconds), self._interruption = self._interruption, None
        if math.isinf(seconds):
            node.close()
            raise Dies
        node.stand_still(seconds)
