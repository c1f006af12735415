"""N virtual peers in one process: the real trainer, rounds and codecs, over a swarm without a network, in virtual time.

Solo training is a scenario of one peer, centralised training one peer with N times the batch, and DiLoCo one whose
peers hold every slot: none is a special case.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from spes_p2p.data.packing import held_out_batches, train_sources
from spes_p2p.data.sources import Part
from spes_p2p.data.tokenizer import resolve_tokenizer
from spes_p2p.errors import SimulationError
from spes_p2p.model.loss import held_out_loss
from spes_p2p.planner import model_size
from spes_p2p.sim.attacks import Attack, AttackingSwarm
from spes_p2p.sim.clock import VirtualClock
from spes_p2p.sim.peer import Leaves, VirtualPeer
from spes_p2p.sim.scenario import Event, Scenario
from spes_p2p.sim.swarm import MemoryHub, MemorySwarm
from spes_p2p.swarm.p2p.identity import hashed_peer_id
from spes_p2p.swarm.records import Metrics
from spes_p2p.swarm.roster import SHARED, is_bundle
from spes_p2p.training.build import WholeModel, build_initial
from spes_p2p.training.loss_gate import public_text
from spes_p2p.training.process_group import ProcessGroup

__all__ = ["Attack", "Evaluation", "Event", "Scenario", "SimulationResult", "simulate"]

T = TypeVar("T")

EVALUATION_BATCH = 16
"""Sequences per forward pass."""
PARTS: Mapping[str, Part] = {"held_out": "reported", "tuning": "tuning"}


@dataclass(frozen=True)
class Evaluation:
    """The swarm's model after one round.

    Attributes:
        round: Rounds committed.
        tokens_per_peer: Trained until then, the mean over all peers of the scenario.
        loss: Held-out loss, nats per token.
    """

    round: int
    tokens_per_peer: int
    loss: float


@dataclass(frozen=True)
class SimulationResult:
    """What came of a scenario.

    Attributes:
        evaluations: By round, ascending; the last is of the last round that was committed, which is the run's last
            unless everybody was gone before.
        reports: Of each peer, by its index: one for every round it took part in, none if it came too late for any.
        digests: By round, and by name of the version: `shared` and every slot, as the first peer to finish the round
            had them.
        left_out: By round, the peers that the others' majority wanted in none of its groups.
        accused: By round, the peers of which some honest one held something against what they did in it.
        begun_rounds: Times that each peer began to train a round, whatever came of it.
        slots: Held in the end, by peer.
        bytes_in: Payload received, by peer: pulls, and its share of an all-reduce.
        bytes_out: Payload sent, by peer.
        virtual_seconds: From the first peer's start to the last one's end.
        wall_seconds: What it really took.
    """

    evaluations: Sequence[Evaluation]
    reports: Sequence[Sequence[Metrics]]
    digests: Mapping[int, Mapping[str, str]]
    left_out: Mapping[int, Sequence[int]]
    accused: Mapping[int, Sequence[int]]
    begun_rounds: Sequence[int]
    slots: Sequence[tuple[int, ...]]
    bytes_in: Sequence[int]
    bytes_out: Sequence[int]
    virtual_seconds: float
    wall_seconds: float


def simulate(
    scenario: Scenario,
    *,
    cache: Path = Path("~/.cache/spes_p2p"),
    on_evaluation: Callable[[Evaluation], None] | None = None,
) -> SimulationResult:
    """Run a scenario to its end.

    Args:
        scenario: What to simulate.
        cache: Where tokenizers and tokenised text are kept.
        on_evaluation: Called with each evaluation when it is made.

    Raises:
        ConfigError, DataError: the scenario's settings or text cannot be used.
        SpesError: the scenario cannot go on: everybody waits for somebody who will never come.
    """
    began, threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(scenario.threads or threads)
    try:
        return _Simulation(scenario, cache.expanduser(), on_evaluation).run(began)
    finally:
        torch.set_num_threads(threads)


class _Simulation:
    """One scenario under way; peers' threads run one at a time, so nothing here needs a lock."""

    def __init__(self, scenario: Scenario, cache: Path, on_evaluation: Callable[[Evaluation], None] | None) -> None:
        rounds = scenario.run.round.model_copy(update={"min_peers": len(scenario.founders)})
        self._scenario, self._run = scenario, scenario.run.model_copy(update={"round": rounds})
        self._on_evaluation = on_evaluation
        tokenizer = resolve_tokenizer(self._run.data, scenario.text, cache)
        self._vocab_size = len(tokenizer)
        self._source = train_sources(self._run.data, tokenizer, paths=scenario.text, cache=cache)
        self._probe_BT1 = public_text(self._source, self._run.data.sequence_length)
        self._clock = VirtualClock()
        self._hub = MemoryHub(scenario.run_id, rounds.matchmaking_seconds, rounds.lease_seconds, self._clock)
        self._peers: dict[int, VirtualPeer] = {}
        self._present = set(scenario.founders)
        self._strikes = [scenario.strikes(peer) for peer in range(scenario.peers)]
        self._swarms = [self._swarm(peer) for peer in range(scenario.peers)]
        self._initial: Mapping[str, Tensor] = {}
        self._model = WholeModel(self._run, self._vocab_size, ProcessGroup(scenario.device).device)
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
        self._round, self._ended_at = 0, self._clock.now()
        self._evaluations: list[Evaluation] = []
        self._digests: dict[int, dict[str, str]] = {}
        self._attackers = {attack.peer for attack in scenario.attacks}
        self._left_out: dict[int, list[int]] = {}

    def run(self, began: float) -> SimulationResult:
        """Run to the end; `began` is when that was asked for, in real seconds."""
        started_at = self._clock.now()
        self._clock.run([functools.partial(self._live, peer) for peer in range(self._scenario.peers)])
        if self._round and not self._is_evaluated:
            self._evaluate()
        traffic = [swarm.traffic() for swarm in self._swarms]
        peers = [self._peers.get(peer) for peer in range(self._scenario.peers)]
        return SimulationResult(
            evaluations=self._evaluations,
            reports=[peer.reports if peer else [] for peer in peers],
            digests=self._digests,
            left_out=self._left_out,
            accused=self._accused(),
            begun_rounds=[peer.rounds.begun_rounds if peer else 0 for peer in peers],
            slots=[peer.slots if peer else () for peer in peers],
            bytes_in=[received for received, _ in traffic],
            bytes_out=[sent for _, sent in traffic],
            virtual_seconds=self._ended_at - started_at,
            wall_seconds=time.monotonic() - began,
        )

    # ------------------------------------------------------------------ peers

    def _swarm(self, peer: int) -> MemorySwarm:
        scenario = self._scenario
        peer_id = scenario.peer_ids[peer] if scenario.peer_ids else hashed_peer_id(f"{scenario.seed}:{peer}".encode())
        attacks = [attack for attack in scenario.attacks if attack.peer == peer]
        if not attacks:
            return MemorySwarm(self._hub, peer_id)
        size = model_size(self._run.model, self._vocab_size)
        return AttackingSwarm(self._hub, peer_id, attacks, {SHARED: size.shared_params, "slot": size.slot_params})

    def _live(self, index: int) -> None:
        """One peer's life, in its own thread."""
        self._clock.advance(self._scenario.starts[index] if self._scenario.starts else 0.0)
        if self._awaits_its_turn(index):
            self._present.add(index)
            self._take_part(index)
            self._present.remove(index)
            self._clock.notify_all()  # whoever waits to join somebody

    def _awaits_its_turn(self, index: int) -> bool:
        """Wait until a peer is to join; return whether anybody is there whom it could join."""
        join = self._scenario.event_round(index, "join")
        while join is not None and self._present and self._round < join:
            self._clock.wait(math.inf)
        return join is None or bool(self._present)

    def _take_part(self, index: int) -> None:
        scenario = self._scenario
        peer = self._peers[index] = VirtualPeer(
            self._run,
            self._swarms[index],
            self._source(scenario.data_seeds[index] if scenario.data_seeds else 10_000 * scenario.seed + index),
            self._probe_BT1,
            vocab_size=self._vocab_size,
            max_slots=_of(scenario.max_slots, index),
            tokens_per_second=_of(scenario.speeds, index),
            run_id=scenario.run_id,
            device=scenario.device,
        )
        if scenario.slots:
            peer.sync.holdings.resume(scenario.slots[index])
        peer.live(functools.partial(self._start, peer), functools.partial(self._on_round, index))

    def _start(self, peer: VirtualPeer) -> Mapping[str, Tensor]:
        """Return the bundles of the run's start, the same for all peers."""
        if not self._initial:
            self._initial = build_initial(self._run, self._vocab_size, peer.sync, peer.trainer)
        return self._initial

    def _on_round(self, index: int, report: Metrics) -> None:
        """Take note of a round that a peer has finished, and let the peer go if its time has come."""
        join, leave = (self._scenario.event_round(index, kind) for kind in ("join", "leave"))
        if join is not None and report.round <= join:
            raise SimulationError(
                f"peer {index} joined after round {join} when nobody was left to give it the model, and began anew; "
                f"let somebody stay longer, or let it join earlier"
            )
        if report.round > self._round and index not in self._attackers:
            self._conclude(index, report.round)
        if leave is not None and report.round >= leave:
            raise Leaves
        while self._strikes[index] and report.round >= self._strikes[index][0].round:
            event = self._strikes[index].pop(0)
            self._peers[index].strike(event.after_seconds, event.seconds or math.inf)

    # ------------------------------------------------------------------ rounds

    def _conclude(self, index: int, round: int) -> None:
        """Look at the swarm's model as the first peer to finish a round has it: its own versions and all others'."""
        self._round, self._ended_at = round, self._clock.now()
        swarm, total = self._swarms[index], self._run.round.total
        self._digests[round] = {n: version.digest for n, version in swarm.versions().items() if is_bundle(n)}
        self._left_out[round] = self._indices(self._peers[index].sync.holdings.distrusted)
        self._model.load(swarm)  # in every round: any may turn out to be the last, and then nobody has it any more
        if round % self._scenario.evaluate_rounds == 0 or round >= total:
            self._evaluate()
        self._clock.notify_all()

    def _indices(self, peer_ids: Collection[str]) -> list[int]:
        return [index for index, swarm in enumerate(self._swarms) if swarm.peer_id in peer_ids]

    def _accused(self) -> dict[int, list[int]]:
        honest = [swarm for index, swarm in enumerate(self._swarms) if index not in self._attackers]
        seen = {accusation for swarm in honest for accusation in swarm.accused}
        return {round + 1: self._indices({p for r, p in seen if r == round}) for round in sorted({r for r, _ in seen})}

    def _evaluate(self) -> None:
        """Measure the model of the last round."""
        loss = held_out_loss(self._model.module, self._batches)
        self._evaluations.append(Evaluation(self._round, self._tokens_per_peer(), loss))
        if self._on_evaluation is not None:
            self._on_evaluation(self._evaluations[-1])

    @property
    def _is_evaluated(self) -> bool:
        return bool(self._evaluations) and self._evaluations[-1].round == self._round

    def _tokens_per_peer(self) -> int:
        steps = sum(peer.rounds.brought_steps for peer in self._peers.values())
        return steps * self._run.train.batch_size * self._run.data.sequence_length // self._scenario.peers


def _of(values: T | list[T], peer: int) -> T:
    """Return a peer's value, of one for all or one for each."""
    return values[peer] if isinstance(values, list) else values
