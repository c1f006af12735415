"""N virtual peers in one process: the real trainer, rounds, codecs and swarm, over a virtual network.

Solo training is a scenario with one peer, centralised training is one peer with N times the batch, and DiLoCo is a
scenario whose peers hold every slot: none is a special case.
"""

from __future__ import annotations

import asyncio
import functools
import math
import random
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import RunConfig
from spes_p2p.data.packing import held_out_batches, train_sources
from spes_p2p.data.sources import Part
from spes_p2p.data.tokenizer import load_tokenizer, resolve_tokenizer
from spes_p2p.errors import ConfigError, SimulationError
from spes_p2p.model.adapted import Base
from spes_p2p.model.build import outline
from spes_p2p.model.loss import held_out_loss
from spes_p2p.model.start import StartWeights, over_checkpoint
from spes_p2p.planner.size import ModelSize, run_size
from spes_p2p.sim.attacks import AttackingSwarm, Spoiler
from spes_p2p.sim.network import VirtualNetwork
from spes_p2p.sim.peer import Leaves, VirtualMachine, VirtualPeer, VirtualSwarm
from spes_p2p.sim.scenario import Scenario
from spes_p2p.swarm.certificate import MAX_SEATS, genesis
from spes_p2p.swarm.exchange.versions import Version
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.records import Metrics
from spes_p2p.training.anchors import start_digests
from spes_p2p.training.build import StartBundles, WholeModel, build_initial, with_digests
from spes_p2p.training.loss_gate import public_text
from spes_p2p.training.ranks import Ranks

T = TypeVar("T")

EVALUATION_BATCH = 16
"""Sequences per forward pass."""
PARTS: Mapping[str, Part] = {"held_out": "reported", "tuning": "tuning"}
RAM = "/dev/shm"
"""Where versions lie, if it is there."""
DELAY_SECONDS = 0.02
"""From each virtual peer to each other one."""


def certified(swarm: VirtualSwarm, others: Iterable[VirtualSwarm]) -> dict[str, tuple[Version, VirtualSwarm]]:
    """Return a peer's versions, and the fp32 ones of others' slots that the certificate names, each with its holder."""
    mine = swarm.versions()
    found = {name: (version, swarm) for name, version in mine.items()}
    stored = [(other, other.versions()) for other in others if not other.network.is_closed]
    for slot, state in enumerate(swarm.last().slots):
        name = VectorName.of_slot(slot)
        for other, versions in stored if name not in mine and name.kept in mine else ():
            if name in versions and versions[name].digest == state.digest:
                found[name] = versions[name], other
    return found


class Evaluation(NamedTuple):
    """The swarm's model after one round."""

    round: int
    """Rounds committed."""
    tokens_per_peer: int
    """Tokens trained until then, the mean over all peers of the scenario."""
    loss: float
    """Held-out loss, nats per token."""


@dataclass(frozen=True)
class SimulationResult:
    """Outcome of a scenario; lists with one entry for each peer are in the order of its index."""

    run: RunConfig
    """The run's settings, with those of the checkpoint that it starts from."""
    size: ModelSize
    evaluations: Sequence[Evaluation]
    """Ascending by round; the last is of the last committed round, before the run's end if all peers were gone."""
    reports: Sequence[Sequence[Metrics]]
    """For each peer, a report of each round in which it took part."""
    digests: Mapping[int, Mapping[str, str]]
    """By round and version (`shared` and every slot), as the first peer to finish the round had them."""
    left_out: Mapping[int, Sequence[int]]
    """By round, the peers that the others' majority excluded from all groups."""
    accused: Mapping[int, Sequence[int]]
    """By round, the peers against which an honest peer has evidence about that round."""
    begun_rounds: Sequence[int]
    """For each peer, the number of times it began to train a round, with any outcome."""
    slots: Sequence[tuple[int, ...]]
    """For each peer, the slots it held at the end."""
    bytes_in: Sequence[int]
    """For each peer, payload received: pulls, and its share of each all-reduce."""
    bytes_out: Sequence[int]
    virtual_seconds: float
    """From the first peer's start to the last peer's end."""
    wall_seconds: float
    forms: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    """As `digests`, of the kept forms."""


def simulate(
    scenario: Scenario,
    *,
    cache: Path = Path("~/.cache/spes_p2p"),
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> SimulationResult:
    """Run a scenario to its end.

    Args:
        cache: Folder of tokenizers and tokenised text.
        on_evaluation: Called with each evaluation at once.

    Raises:
        ConfigError, DataError: the scenario's settings or text cannot be used.
        SpesError: the scenario cannot continue: every peer waits for an event that cannot happen.
    """
    threads, drawn = torch.get_num_threads(), random.getstate()
    torch.set_num_threads(scenario.threads or threads)
    random.seed(scenario.seed)  # of the order in which blocks are fetched
    with tempfile.TemporaryDirectory(dir=RAM if Path(RAM).is_dir() else None, prefix="spes-p2p-sim-") as folder:
        try:
            return _Simulation(scenario, cache.expanduser(), Path(folder), on_evaluation).run()
        finally:
            torch.set_num_threads(threads)
            random.setstate(drawn)


class _Simulation:
    """A running scenario; the peers' threads run one at a time, so no data here needs a lock."""

    def __init__(
        self, scenario: Scenario, cache: Path, folder: Path, on_evaluation: Callable[[Evaluation], None] | None
    ) -> None:
        self._began = time.monotonic()
        self._folder = folder
        rounds = scenario.run.round.model_copy(update={"min_peers": len(scenario.founders)})
        self._scenario = scenario
        self._run = scenario.run.model_copy(update={"round": rounds})
        self._on_evaluation = on_evaluation
        if scenario.start_from is not None and scenario.run.data.tokenizer is None:
            tokenizer = load_tokenizer(scenario.start_from)
        else:
            tokenizer = resolve_tokenizer(scenario.run.data, scenario.text, cache)
        self._vocab_size = len(tokenizer)
        self._base: Base | None = None
        if scenario.start_from is not None:
            run = over_checkpoint(self._run, scenario.start_from)
            self._run = with_digests(run, self._vocab_size, scenario.start_from)
            if any(slot >= self._run.num_slots for held in scenario.slots for slot in held):
                raise ConfigError(f"slots: {scenario.start_from} has {self._run.num_slots}; number them from 0")
        if self._run.adapter is not None:
            assert scenario.start_from is not None
            model = outline(self._run.model, self._vocab_size, self._run.data.sequence_length)
            self._base = StartWeights(scenario.start_from, model)
        texts = scenario.peer_text or [scenario.text]
        sources = [train_sources(self._run.data, tokenizer, paths=paths, cache=cache) for paths in texts]
        self._texts = [(source, public_text(source, self._run.data.sequence_length)) for source in sources]
        self._network = VirtualNetwork(scenario.seed)
        self._network.delay = lambda sender, receiver: DELAY_SECONDS
        self._loop = self._network.loop
        run_id, founder = scenario.run_id, self._peer_id(scenario.founders[0])
        seats = [self._peer_id(peer) for peer in range(scenario.voters or scenario.peers)][:MAX_SEATS]
        self._genesis = genesis(run_id, founder, digest(run_id.encode()), self._run.num_slots, seats)
        self._changed = asyncio.Event()
        """Set when peers that wait to join must look again."""
        self._peers: dict[int, VirtualPeer] = {}
        self._present = set(scenario.founders)
        events = sorted(scenario.schedule, key=lambda event: event.round)
        self._interruptions = [event for event in events if event.kind in ("kill", "pause")]
        self._initial: Mapping[VectorName, Tensor] = {}
        self._model = WholeModel(self._run, self._vocab_size, Ranks(scenario.device).device, self._base)
        self._batches = held_out_batches(
            self._run.data,
            tokenizer,
            paths=scenario.text,
            cache=cache,
            num_sequences=max(1, scenario.held_out_tokens // self._run.data.sequence_length),
            batch_size=EVALUATION_BATCH,
            seed=0,
            part=PARTS[scenario.split],
        )
        self._round = 0
        self._ended_at = self._loop.time()
        self._evaluations: list[Evaluation] = []
        self._digests: dict[int, dict[str, str]] = {}
        self._forms: dict[int, dict[str, str]] = {}
        self._attackers = {attack.peer for attack in scenario.attacks}
        self._left_out: dict[int, list[int]] = {}

    def run(self) -> SimulationResult:
        """Run to the end."""
        started_at = self._loop.time()
        try:
            self._loop.live([functools.partial(self._live, peer) for peer in range(self._scenario.peers)])
        finally:
            self._network.close()
        if self._round and not (self._evaluations and self._evaluations[-1].round == self._round):
            self._evaluate()
        peers = [self._peers.get(peer) for peer in range(self._scenario.peers)]
        traffic = [peer.swarm.traffic() if peer else (0, 0) for peer in peers]
        return SimulationResult(
            run=self._run,
            size=run_size(self._run, self._vocab_size),
            evaluations=self._evaluations,
            reports=[peer.reports if peer else [] for peer in peers],
            digests=self._digests,
            left_out=self._left_out,
            accused=self._accused(),
            begun_rounds=[peer.loop.begun_rounds if peer else 0 for peer in peers],
            slots=[peer.slots if peer else () for peer in peers],
            bytes_in=[received for received, _ in traffic],
            bytes_out=[sent for _, sent in traffic],
            virtual_seconds=self._ended_at - started_at,
            wall_seconds=time.monotonic() - self._began,
            forms=self._forms,
        )

    # ------------------------------------------------------------------ peers

    def _peer_id(self, peer: int) -> str:
        ids, seed = self._scenario.peer_ids, self._scenario.seed
        return ids[peer] if ids else hashed_peer_id(f"{seed}:{peer}".encode())

    def _swarm(self, peer: int) -> VirtualSwarm:
        scenario, size = self._scenario, run_size(self._run, self._vocab_size)
        node = self._network.node(self._peer_id(peer), scenario.run_id, uplink_mbit=scenario.uplink_mbit or 0.0)
        attacks = [attack for attack in scenario.attacks if attack.peer == peer]
        if not attacks:
            return VirtualSwarm(node, self._folder)
        numels = {SHARED: size.shared_params, "slot": size.slot_params}
        return AttackingSwarm(node, self._folder, Spoiler(attacks, numels))

    def _live(self, index: int) -> None:
        """One peer's life, in its own thread."""
        self._loop.advance(self._scenario.starts[index] if self._scenario.starts else 0.0)
        if (join := self._scenario.event_round(index, "join")) is not None:
            while self._present and self._round < join:
                self._loop.call(self._changed.wait(), math.inf)
            if not self._present:  # there is no peer to join
                return
        self._present.add(index)
        self._take_part(index)
        self._present.remove(index)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _take_part(self, index: int) -> None:
        scenario = self._scenario
        source, probe_BT1 = self._texts[index if scenario.peer_text else 0]
        peer = self._peers[index] = VirtualPeer(
            self._run,
            self._swarm(index),
            self._genesis,
            source(scenario.data_seeds[index] if scenario.data_seeds else 10_000 * scenario.seed + index),
            probe_BT1,
            VirtualMachine(_of(scenario.max_slots, index), _of(scenario.speeds, index), scenario.device),
            vocab_size=self._vocab_size,
            base=self._base,
        )
        if scenario.slots:
            peer.sync.held.resume(scenario.slots[index])
        peer.live(functools.partial(self._start, peer), functools.partial(self._on_round, index))

    def _start(self, peer: VirtualPeer) -> Mapping[VectorName, Tensor]:
        """Return the vectors of the run's start, which are the same for all peers."""
        if not self._initial and start_digests(self._run):
            assert self._scenario.start_from is not None
            self._initial = dict(StartBundles(self._run, self._vocab_size, self._scenario.start_from))
        elif not self._initial:
            self._initial = dict(build_initial(self._run, self._vocab_size, peer.sync.anchors, peer.trainer.layouts))
        return self._initial

    def _on_round(self, index: int, report: Metrics) -> None:
        """Record a round that a peer has finished; make the peer leave, pause or die if that is due."""
        join, leave = (self._scenario.event_round(index, kind) for kind in ("join", "leave"))
        if join is not None and report.round <= join:
            raise SimulationError(
                f"peer {index} joined after round {join} when no peer was left to give it the model, and began anew; "
                f"let another peer stay longer, or let this one join earlier"
            )
        if report.round > self._round and index not in self._attackers:
            self._conclude(index, report.round)
        if leave is not None and report.round >= leave:
            raise Leaves
        for event in [each for each in self._interruptions if each.peer == index and report.round >= each.round]:
            self._interruptions.remove(event)
            self._peers[index].interrupt(event.after_seconds, event.seconds or math.inf)

    # ------------------------------------------------------------------ rounds

    def _conclude(self, index: int, round: int) -> None:
        """Record the swarm's model of a round, as the first peer to finish the round has it."""
        self._round = round
        self._ended_at = self._loop.time()
        total = self._run.round.total
        swarms = {peer: each.swarm for peer, each in self._peers.items()}
        found = certified(swarms.pop(index), swarms.values())
        versions = {name: version for name, (version, _) in found.items()}
        digests = {VectorName(name): version.digest for name, version in versions.items()}
        self._digests[round] = {name: digest for name, digest in digests.items() if name.is_weights}
        self._forms[round] = {name: digest for name, digest in digests.items() if name.is_kept}
        self._left_out[round] = self._indices(self._peers[index].sync.held.distrusted)
        # In every round, since any may be the last, after which no peer is left to load it from.
        self._model.load(versions, lambda name: found[name][1].load(name))
        if round % self._scenario.evaluate_rounds == 0 or round >= total:
            self._evaluate()
        self._wake()

    def _indices(self, peer_ids: Collection[str]) -> list[int]:
        return [index for index in range(self._scenario.peers) if self._peer_id(index) in peer_ids]

    def _accused(self) -> dict[int, list[int]]:
        honest = [peer.swarm for index, peer in self._peers.items() if index not in self._attackers]
        seen = {accusation for swarm in honest for accusation in swarm.bans.accused}
        return {round + 1: self._indices({p for r, p in seen if r == round}) for round in sorted({r for r, _ in seen})}

    def _evaluate(self) -> None:
        """Measure the held-out loss of the last round's model."""
        tokens = sum(peer.loop.brought_steps for peer in self._peers.values())
        tokens *= self._run.train.batch_size * self._run.data.sequence_length
        loss = held_out_loss(self._model.module, self._batches)
        self._evaluations.append(Evaluation(self._round, tokens // self._scenario.peers, loss))
        if self._on_evaluation is not None:
            self._on_evaluation(self._evaluations[-1])


def _of(values: T | list[T], peer: int) -> T:
    """Return a peer's value from one for all peers, or one for each."""
    return values[peer] if isinstance(values, list) else values
