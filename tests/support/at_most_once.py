"""At most once: of the windows that peers share, none is dealt twice in an epoch, while peers join, die and leave.

    .venv/bin/python tests/support/at_most_once.py [SEED]

The peers are the simulator's, with the real trainer, rounds and certificates, on windows that are numbers. What they
really draw is noted when they draw it, and compared with the rounds that were certified.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import LongTensor

from spes_p2p.config import DataConfig, ModelConfig, RoundConfig, RunConfig, TrainConfig
from spes_p2p.data.shared import SharedSource
from spes_p2p.data.windows import TokenFile
from spes_p2p.errors import SimulationError
from spes_p2p.presentation import say
from spes_p2p.sim.network import VirtualNetwork, VirtualNode
from spes_p2p.sim.peer import Dies, Leaves, VirtualMachine, VirtualPeer, VirtualSwarm
from spes_p2p.swarm.averaging.encoding import Contribution
from spes_p2p.swarm.averaging.outcome import RoundResult, Staged
from spes_p2p.swarm.certificate import MAX_SEATS, Body, genesis
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.training.build import build_initial
from spes_p2p.training.loss_gate import public_text

VOCAB, T = 64, 64
NUM_WINDOWS = 1500
MODEL = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8, num_experts=4, top_k=2
)
PEERS, SEGMENTS, SEGMENT_SECONDS, SHARE = 8, 4, 600.0, 0.3
"""Peers; starts of all of them, so that there are three restarts; length of each; share replaced in that time."""


class Numbers:
    """Windows of random, but fixed, tokens."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows

    def __len__(self) -> int:
        return self._num_windows

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        rows = [np.random.default_rng(int(index)).integers(0, VOCAB, T + 1) for index in indices_B]
        return torch.from_numpy(np.stack(rows))  # type: ignore[return-value]


Window = tuple[int, int, bool]
"""Epoch, window, and whether it was dealt; otherwise it is of the peer's own order."""


class NotingSource(SharedSource):
    """Notes all that it draws, by the name of the own order that it was dealt, which has peer and round in it."""

    def __init__(self) -> None:
        self.notes: dict[str, list[Window]] = {}
        data = DataConfig(source="files", fingerprint="0" * 64, sequence_length=T)
        super().__init__(TokenFile(np.empty(0, "<u2"), "numbers"), Numbers(NUM_WINDOWS), data)

    def deal(self, share: range, own: str) -> None:
        super().deal(share, own)
        self.notes[own] = []

    def places(self, numbers_I: np.ndarray, own: str = "") -> np.ndarray:
        found = super().places(numbers_I, own)
        epochs = (numbers_I // self.epoch_windows).tolist()
        self.notes[self._own] += [(*each, not own) for each in zip(epochs, found.tolist(), strict=True)]
        return found


Brought = dict[tuple[int, str], list[Window]]
"""By round and peer, what the peer had drawn when it brought its work to the round."""


class WatchedSwarm(VirtualSwarm):
    """A virtual peer's swarm; notes what the peer brings to each round."""

    def __init__(self, network: VirtualNode, folder: Path, brought: Brought) -> None:
        super().__init__(network, folder)
        self.source = NotingSource()
        self._brought = brought

    def agree(
        self, contribution: Contribution, stage: Callable[[RoundResult], Staged | None], **when: Any
    ) -> Body | None:
        member = contribution.member
        drawn = self.source.notes.get(f"{self.peer_id}:{member.round + 1}", []) if member.tokens else []
        self._brought[member.round + 1, self.peer_id] = list(drawn)
        return super().agree(contribution, stage, **when)


class Peer(VirtualPeer):
    """A virtual peer on shared data.

    Args:
        run: The run's settings.
        swarm: Its view.
        start: The run's genesis.
        speed: Tokens per virtual second.
    """

    def __init__(self, run: RunConfig, swarm: WatchedSwarm, start: Body, speed: float) -> None:
        probe_BT1 = public_text(lambda seed: NotingSource(), T)
        super().__init__(run, swarm, start, swarm.source, probe_BT1, VirtualMachine(2, speed), vocab_size=VOCAB)
        self._run = run

    def begin(self) -> None:
        """Enter the run, and train until the peer dies or leaves, or the run ends."""
        swarm = self.swarm
        is_new = not swarm.versions()
        initial = (
            (lambda: dict(build_initial(self._run, VOCAB, self.sync.anchors, self.trainer.layouts))) if is_new else None
        )
        try:
            self.loop.open(initial)
            self.loop.run(self.reports.append)
            self.sync.held.leave()
        except Leaves:
            self.sync.held.leave()
        except Dies:
            pass
        swarm.close()

    def leave_after(self, seconds: float) -> None:
        """Leave at the end of the first batch after so many seconds."""
        ends_at, step = self.swarm.now() + seconds, self.trainer.step

        def last(*rates: float):
            if self.swarm.now() >= ends_at:
                raise Leaves
            return step(*rates)

        self.trainer.step = last  # type: ignore[method-assign, assignment]


@dataclass(frozen=True)
class Outcome:
    """What a history has come to.

    Attributes:
        rounds: Certified rounds.
        epochs: Epochs of which all windows are dealt.
        twice: Windows that were dealt, and that committed rounds contain twice in an epoch.
        trained: Share of these epochs' windows that committed rounds contain.
        own: Share of the windows of committed rounds, after the first, that peers read in orders of their own.
    """

    rounds: int
    epochs: int
    twice: int
    trained: float
    own: float


def settings(**rounds) -> RunConfig:
    """Return the run's settings: rounds of about a minute."""
    fields = {
        **{"mode": "tokens", "tokens": 60 * PEERS * 35, "min_seconds": 20.0, "max_seconds": 120.0, "total": 10**5},
        **{"min_peers": PEERS, "lease_seconds": 30.0, "heartbeat_seconds": 10.0, "shrink_seconds": 60.0},
    }
    return RunConfig(
        model=MODEL,
        data=DataConfig(source="files", fingerprint="0" * 64, sequence_length=T, vocab_size=VOCAB),
        train=TrainConfig(batch_size=4, lr=1e-3),
        round=RoundConfig(**{**fields, **rounds}),
        frozen_storage="fp32",
    )


def history(
    seed: int,
    run: RunConfig | None = None,
    *,
    num_peers: int = PEERS,
    min_peers: int | None = None,
    segments: int = SEGMENTS,
    seconds: float = SEGMENT_SECONDS,
    share: float = SHARE,
) -> Outcome:
    """Run a history to its end.

    Args:
        seed: Of the peers' speeds and fates.
        run: The run's settings.
        num_peers: Peers at a time.
        min_peers: Peers with which the run begins; half of them by default.
        segments: Starts of all peers together; each but the last ends when all are killed.
        seconds: Virtual length of a segment.
        share: Share of the peers that is replaced in a segment; half of them die, half leave.
    """
    generator, run = random.Random(f"at most once {seed}"), run or settings()
    times = run.round.model_copy(update={"min_peers": min_peers or num_peers // 2})
    run = run.model_copy(update={"round": times})
    network, brought, peers = VirtualNetwork(seed), Brought(), dict[str, Peer]()
    present = [hashed_peer_id(f"{seed}:{index}".encode()) for index in range(num_peers)]
    founder = present[0]  # it alone can certify the first round
    friends = [hashed_peer_id(f"{seed}:{index}".encode()) for index in range(1, MAX_SEATS)]
    genesis_body = genesis("run", founder, "0" * 64, run.num_slots, friends)
    speeds: dict[str, float] = {}

    def life(peer_id: str, start: float, fate: str, end: float) -> Callable[[], None]:
        def live() -> None:
            network.loop.advance(start)
            before, swarm = peers.get(peer_id), WatchedSwarm(network.node(peer_id, "run"), folder, brought)
            speed = speeds.setdefault(peer_id, generator.uniform(15, 60))
            peer = peers[peer_id] = Peer(run, swarm, genesis_body, speed)
            if before is not None:  # the rest is on its disk
                peer.sync.held.resume(before.sync.held.slots)
            (peer.leave_after if fate == "leaves" else peer.interrupt)(end - start)
            peer.begin()

        return live

    newcomers = (hashed_peer_id(f"{seed}:{index}".encode()) for index in itertools.count(num_peers))
    with tempfile.TemporaryDirectory() as name, contextlib.closing(network):
        folder = Path(name)
        for segment in range(segments):
            kept = {founder} if segment == 0 else set[str]()
            fates = draw_fates(generator, present, newcomers, kept, math.ceil(share * num_peers), seconds)
            began = network.loop.time()
            try:
                network.loop.live([life(peer, *fate) for peer, fate in fates.items() if fate[0] < seconds])
            except SimulationError:  # some wait for peers that were killed; now all are
                if network.loop.time() < began + seconds:
                    raise
            for node in network.nodes.values():
                node.close()
            present = [peer for peer, (start, fate, _) in fates.items() if fate == "stops" and start < seconds]
            network.loop.advance(generator.uniform(1.0, 40.0))
        return outcome(max((peer.swarm for peer in peers.values()), key=lambda swarm: swarm.last().round), brought, run)


Fate = tuple[float, str, float]
"""When a peer starts, whether it `dies`, `leaves` or `stops` with all others, and when; in seconds of a segment."""


def draw_fates(
    generator: random.Random,
    present: Sequence[str],
    newcomers: Iterator[str],
    kept: Collection[str],
    num_replaced: int,
    seconds: float,
) -> dict[str, Fate]:
    """Return the fates of a segment's peers; those in `kept` stay until its end."""
    fates: dict[str, Fate] = {peer: (0.0, "stops", seconds) for peer in present}
    for index in range(num_replaced):
        leaver = generator.choice([peer for peer, fate in fates.items() if fate[1] == "stops" and peer not in kept])
        end = max(generator.uniform(0.1, 0.9) * seconds, fates[leaver][0] + 60.0)
        fates[leaver] = (fates[leaver][0], ("dies", "leaves")[index % 2], end)
        fates[next(newcomers)] = (end + generator.uniform(0, 60), "stops", seconds)
    return fates


def outcome(swarm: VirtualSwarm, brought: Brought, run: RunConfig) -> Outcome:
    """Compare what the peers have drawn with the certified rounds, of which this swarm knows all."""
    last = swarm.last()
    bodies = [body for round in range(1, last.round + 1) if (body := swarm.consensus.body_at(round)) is not None]
    rounds = [
        [window for member in body.members if member.tokens for window in brought[body.round, member.peer_id]]
        for body in bodies
    ]
    dealt = Counter((epoch, window) for each in rounds for epoch, window, is_dealt in each if is_dealt)
    size = NotingSource().epoch_windows
    epochs = last.cursor * run.train.batch_size // size
    later = [is_dealt for each in rounds[1:] for *_, is_dealt in each]
    return Outcome(
        rounds=len(rounds),
        epochs=epochs,
        twice=sum(count > 1 for count in dealt.values()),
        trained=sum(epoch < epochs for epoch, _ in dealt) / max(1, epochs * size),
        own=1 - sum(later) / max(1, len(later)),
    )


def steady(seed: int, num_rounds: int = 20, round_seconds: float = 60.0) -> Outcome:
    """Run four peers that stay, for about so many rounds: all are voters after the first."""
    run, seconds = settings(tokens=int(round_seconds * 4 * 35)), num_rounds * round_seconds
    run = run.model_copy(update={"train": run.train.model_copy(update={"batch_size": 1})})
    return history(seed, run, num_peers=4, min_peers=4, segments=1, seconds=seconds, share=0.0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed = int(sys.argv[-1]) if len(sys.argv) > 1 else 0
    found = steady(seed)
    say(f"windows of an epoch that a steady run of four trains; twice: {found.trained:.2f}; {found.twice} ({found})")
    say(f"with churn and restarts: {history(seed)}")
