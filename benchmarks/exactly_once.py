"""Exactly once: peers that share data, and join, die, leave and stop together, train each window once an epoch.

    .venv/bin/python -m benchmarks.exactly_once [--seed 0]

The peers are the simulator's, with the real trainer, rounds and ledger, on windows that are numbers. What they really
draw is noted when they draw it, and compared with the rounds that were certified: the ledger's own word counts for
nothing here.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import LongTensor

from spes_p2p.config import DataConfig, ModelConfig, RoundConfig, RunConfig, SourceConfig, TrainConfig
from spes_p2p.data.mixture import MixedSource
from spes_p2p.data.shared import SharedSource
from spes_p2p.data.windows import TokenFile
from spes_p2p.errors import SimulationError
from spes_p2p.presentation import say
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.simulator import Dies, Leaves, VirtualMachine, VirtualPeer
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.interface import Contribution, RoundResult
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.training.build import build_initial
from spes_p2p.training.loss_gate import public_text
from spes_p2p.training.round_work import Dealt

VOCAB, T = 64, 64
NUM_WINDOWS = 1500
MIXED_WINDOWS = 1500, 200
"""Windows of the sources of `mixture`."""
ANNEALED_TOKENS = 1000 * T
"""Tokens after which its second weights count."""
MODEL = ModelConfig(
    hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=8, num_experts=4, top_k=2
)
PEERS, SEGMENTS, SEGMENT_SECONDS, SHARE = 8, 4, 600.0, 0.3
"""Peers; starts of all of them, so that there are three restarts; length of each; share replaced in that time."""


class Numbers:
    """Windows whose first token tells nothing, and whose index is noted by the source: random, but fixed, tokens."""

    def __init__(self, num_windows: int) -> None:
        self._num_windows = num_windows

    def __len__(self) -> int:
        return self._num_windows

    def gather(self, indices_B: np.ndarray) -> LongTensor:
        rows = [np.random.default_rng(int(index)).integers(0, VOCAB, T + 1) for index in indices_B]
        return torch.from_numpy(np.stack(rows))  # type: ignore[return-value]


Drawn = list[tuple[tuple[str, int], int]]
"""Source, epoch and window of all that was drawn."""


class NotingSource(SharedSource):
    """Notes the epoch and the window of all that it draws, by deal.

    Args:
        name: Of the source.
        num_windows: Its windows.
        drawn: Where to note; a list of its own by default.
    """

    def __init__(self, name: str = "numbers", num_windows: int | None = None, drawn: Drawn | None = None) -> None:
        data = DataConfig(source="files", fingerprint="0" * 64, sequence_length=T)
        windows = Numbers(NUM_WINDOWS if num_windows is None else num_windows)
        self._name = name
        self.drawn: Drawn = [] if drawn is None else drawn
        super().__init__(TokenFile(np.empty(0, "<u2"), name), windows, data)

    def deal(self, ranges: Sequence[range]) -> None:
        super().deal(ranges)
        self.drawn = []

    def places(self, numbers_I: np.ndarray) -> np.ndarray:
        found = super().places(numbers_I)
        keys = ((self._name, epoch) for epoch in (numbers_I // self.epoch_windows).tolist())
        self.drawn += list(zip(keys, found.tolist(), strict=True))
        return found

    def numbers_below(self, position: int) -> dict[str, int]:
        """Return, for each source, how many of its first numbers belong to positions below this one."""
        return {self._name: position}

    def sizes(self) -> dict[str, int]:
        """Return the windows of an epoch of each source."""
        return {self._name: self.epoch_windows}


class NotingMixture(MixedSource):
    """Notes source, epoch and window of all that it draws, by deal."""

    def __init__(self, data: DataConfig) -> None:
        self.drawn: Drawn = []
        parts = zip(data.mixture, MIXED_WINDOWS, strict=True)
        self._parts = {each.name: NotingSource(each.name, windows, self.drawn) for each, windows in parts}
        super().__init__(self._parts, data)

    def deal(self, ranges: Sequence[range]) -> None:
        super().deal(ranges)
        self.drawn = []
        for part in self._parts.values():
            part.drawn = self.drawn

    def numbers_below(self, position: int) -> dict[str, int]:
        sources_I, numbers_I = self._schedule(np.arange(position))
        found = {}
        for at, name in enumerate(self._parts):
            # Within a block numbers come in any order: the first positions may have numbers beyond their count.
            there = np.zeros(int(numbers_I.max(initial=0)) + 2, bool)
            there[numbers_I[sources_I == at]] = True
            found[name] = int(np.argmin(there))
        return found

    def sizes(self) -> dict[str, int]:
        return {name: part.epoch_windows for name, part in self._parts.items()}


def source_of(data: DataConfig) -> NotingSource | NotingMixture:
    """Return the source of a run's windows."""
    return NotingMixture(data) if data.mixture else NotingSource()


@dataclass
class Witness:
    """What the peers have brought to rounds.

    Attributes:
        brought: By round and peer: the draws that its roster entry states, and what it has really drawn.
    """

    brought: dict[tuple[int, str], tuple[int, Drawn]] = field(default_factory=dict)


class WatchedSwarm(MemorySwarm):
    """A peer's view of the hub; tells the witness what the peer brings to each round."""

    def __init__(self, hub: MemoryHub, peer_id: str, witness: Witness) -> None:
        super().__init__(hub, peer_id)
        self._witness = witness
        self.by_round: dict[int, Drawn] = {}
        """Lists of the draws of each round, which the source extends."""

    def average(self, contribution: Contribution, *, expected: int, closes_from: float) -> RoundResult:
        member = contribution.member
        drawn = list(self.by_round.get(member.round + 1, ())) if member.tokens else []
        self._witness.brought[member.round + 1, self.peer_id] = member.drawn, drawn
        return super().average(contribution, expected=expected, closes_from=closes_from)


class Peer(VirtualPeer):
    """A virtual peer on shared data.

    Args:
        run: The run's settings.
        swarm: Its view.
        speed: Tokens per virtual second.
    """

    def __init__(self, run: RunConfig, swarm: WatchedSwarm, speed: float) -> None:
        self.source = source_of(run.data)
        probe_BT1 = public_text(lambda seed: source_of(run.data), T)
        super().__init__(run, swarm, self.source, probe_BT1, VirtualMachine(2, speed), vocab_size=VOCAB)
        dealer = self.sync.dealer
        assert dealer is not None
        deal = dealer.deal

        def noted(round: int) -> Dealt:
            found = deal(round)
            self._next = round
            return found

        taken = self.source.deal

        def taken_and_noted(ranges: Sequence[range]) -> None:
            taken(ranges)
            swarm.by_round[self._next] = self.source.drawn

        dealer.deal = noted  # type: ignore[method-assign]
        self.source.deal = taken_and_noted  # type: ignore[method-assign]
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
        epochs: Epochs of which no window is left, of all sources together.
        twice: Windows that committed rounds contain twice in an epoch.
        never: Windows of these epochs that no committed round contains.
        misstated: Members whose roster entry states other draws than theirs.
        lost: Draws of members that no mean contained, because two had one spare range.
        max_ledger_bytes: Size of the largest ledger.
        deaths, leaves, joins: Events.
    """

    rounds: int
    epochs: int
    twice: int
    never: int
    misstated: int
    lost: int
    max_ledger_bytes: int
    deaths: int
    leaves: int
    joins: int


def mixture() -> DataConfig:
    """Return two sources, of which the smaller is drawn far more often once the run is annealed."""
    sources = [
        SourceConfig(name="web", fingerprint="0" * 64, weights=[9, 1]),
        SourceConfig(name="math", fingerprint="1" * 64, weights=[1, 3]),
    ]
    return DataConfig(source="files", sequence_length=T, vocab_size=VOCAB, mixture=sources, phases=[ANNEALED_TOKENS])


def settings(data: DataConfig | None = None, **rounds) -> RunConfig:
    """Return the run's settings: rounds of about a minute."""
    fields = {
        **{"mode": "tokens", "tokens": 60 * PEERS * 35, "min_seconds": 20.0, "max_seconds": 120.0, "total": 10**5},
        **{"min_peers": PEERS, "lease_seconds": 30.0, "heartbeat_seconds": 10.0, "shrink_seconds": 60.0},
    }
    return RunConfig(
        model=MODEL,
        data=data or DataConfig(source="files", fingerprint="0" * 64, sequence_length=T, vocab_size=VOCAB),
        train=TrainConfig(batch_size=4, lr=1e-3),
        round=RoundConfig(**{**fields, **rounds}),
        frozen_storage="fp32",
    )


def history(
    seed: int,
    run: RunConfig | None = None,
    *,
    num_peers: int = PEERS,
    segments: int = SEGMENTS,
    seconds: float = SEGMENT_SECONDS,
    share: float = SHARE,
) -> Outcome:
    """Run a history to its end.

    Args:
        seed: Of the peers' speeds and fates.
        run: The run's settings.
        num_peers: Peers at a time.
        segments: Starts of all peers together; each but the last ends when all are killed.
        seconds: Virtual length of a segment.
        share: Share of the peers that is replaced in a segment; half of them die, half leave.
    """
    generator, run = random.Random(f"exactly once {seed}"), run or settings()
    run = run.model_copy(update={"round": run.round.model_copy(update={"min_peers": num_peers // 2})})
    times = run.round
    hub = MemoryHub(
        *("run", times.matchmaking_seconds, times.lease_seconds),
        min_peers=num_peers // 2,
        num_slots=run.model.num_experts,
        shrink_seconds=times.shrink_seconds,
    )
    witness, peers = Witness(), dict[str, Peer]()
    speeds: dict[str, float] = {}
    counts = Counter[str]()

    def life(peer_id: str, start: float, fate: str, end: float) -> Callable[[], None]:
        def live() -> None:
            hub.clock.advance(start)
            before, swarm = peers.get(peer_id), WatchedSwarm(hub, peer_id, witness)
            speed = speeds.setdefault(peer_id, generator.uniform(15, 60))
            peer = peers[peer_id] = Peer(run, swarm, speed)
            if before is not None:  # as from its disk
                swarm._keep(before.swarm._before)
                swarm._keep(before.swarm._mine)
                peer.sync.held.resume(before.sync.held.slots)
            (peer.leave_after if fate == "leaves" else peer.interrupt)(end - start)
            counts[fate] += 1
            peer.begin()

        return live

    present = [hashed_peer_id(f"{seed}:{index}".encode()) for index in range(num_peers)]
    founder = present[0]  # it alone can certify the first round
    newcomers = (hashed_peer_id(f"{seed}:{index}".encode()) for index in itertools.count(num_peers))
    for segment in range(segments):
        kept = {founder} if segment == 0 else set[str]()
        fates = draw_fates(generator, present, newcomers, kept, math.ceil(share * num_peers), seconds)
        counts["joins"] += len(fates) - len(present)
        began = hub.clock.now()
        try:
            hub.clock.run([life(peer, *fate) for peer, fate in fates.items() if fate[0] < seconds])
        except SimulationError:  # some wait for peers that were killed; now all are
            if hub.clock.now() < began + seconds:
                raise
        present = [peer for peer, (start, fate, _) in fates.items() if fate == "stops" and start < seconds]
        hub.clock.advance(generator.uniform(1.0, 40.0))
    return outcome(hub, witness, counts, run)


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


def outcome(hub: MemoryHub, witness: Witness, counts: Mapping[str, int], run: RunConfig) -> Outcome:
    """Compare what the peers have drawn with the certified rounds."""
    trained, misstated, lost = Counter[tuple[tuple[str, int], int]](), 0, 0
    num_sequences, source = run.train.batch_size, source_of(run.data)
    for body in hub.bodies[1:]:
        for member in body.members:
            said, drawn = witness.brought[body.round, member.peer_id]
            if not member.tokens:
                lost += len(drawn)
                continue
            misstated += said * num_sequences != len(drawn)
            trained.update(drawn)
    ledger = hub.bodies[-1].ledger
    assert ledger is not None
    first_free = min(start for start, _ in [*ledger.stream.intervals(), (ledger.stream.next, 0)])
    below, done = source.numbers_below(first_free * num_sequences), Counter(key for key, _ in trained)
    whole = [(name, epoch) for name, size in source.sizes().items() for epoch in range(below[name] // size)]
    return Outcome(
        rounds=hub.bodies[-1].round,
        epochs=len(whole),
        twice=sum(count > 1 for count in trained.values()),
        never=sum(source.sizes()[name] - done[name, epoch] for name, epoch in whole),
        misstated=misstated,
        lost=lost,
        max_ledger_bytes=max(len(body.ledger.model_dump_json()) for body in hub.bodies if body.ledger),
        deaths=counts["dies"] + counts["stops"],
        leaves=counts["leaves"],
        joins=counts["joins"],
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(str(history(int(sys.argv[-1]) if len(sys.argv) > 1 else 0)))
