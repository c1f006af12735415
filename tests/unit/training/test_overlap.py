"""A round that is synchronised while the next one trains: what is applied when, and that nothing is lost or hidden."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import Tensor
from virtual import VOCAB, RandomTokens, VirtualPeer, peer_id, run_virtual, tiny_run

from spes_p2p.codecs.vectors import digest
from spes_p2p.config import MachineConfig, OuterConfig, RoundConfig, RunConfig
from spes_p2p.errors import ExchangeError
from spes_p2p.monitor.view import sync_share, wall_seconds
from spes_p2p.peer.life import _hand_over
from spes_p2p.sim.hub import MemoryHub
from spes_p2p.sim.swarm import MemorySwarm
from spes_p2p.swarm.averaging.partition import weighted_mean
from spes_p2p.swarm.names import SHARED, VectorName
from spes_p2p.swarm.records import Metrics
from spes_p2p.training import loop as rounds_module
from spes_p2p.training.build import build_initial, build_synchroniser, build_trainer
from spes_p2p.training.checkpoint import PeerCheckpoint, PeerState
from spes_p2p.training.checkpointer import Checkpointer
from spes_p2p.training.loop import TrainingLoop
from spes_p2p.training.process_group import ProcessGroup
from spes_p2p.training.round_work import Correction, PendingSync, RoundWork, StateUpdate, ThreadTask
from spes_p2p.training.trainer import Trainer

STEPS, STEP_TOKENS = 3, 4 * 16
STEP_SECONDS = STEP_TOKENS / 1000.0
RANKS = 2


class Stop(Exception):
    """Ends a test's run."""


def overlapping(delay: int, *, outer: OuterConfig | None = None, **changes: Any) -> RunConfig:
    fields = {"mode": "steps", "steps": STEPS, "total": 4, "min_peers": 1, "min_seconds": 0.1, "max_seconds": 60}
    return tiny_run(round=RoundConfig(overlap=delay, **(fields | changes)), outer=outer or OuterConfig())


def digests(peers: list[VirtualPeer]) -> list[tuple[str, ...]]:
    return [tuple(report.shared_digest for report in peer.reports) for peer in peers]


def alone(run: RunConfig, max_slots: int = 3, index: int = 0) -> VirtualPeer:
    """A peer that has opened its run and may do as it likes with time."""
    peer = VirtualPeer(run, MemorySwarm(MemoryHub("run"), peer_id(index)), index=index, max_slots=max_slots)
    peer.loop.open(peer.initial)
    return peer


def watch_landings(trainer: Trainer) -> list[tuple[int, dict[str, Tensor]]]:
    """Note the steps made, and the parameters, right before each correction."""
    seen: list[tuple[int, dict[str, Tensor]]] = []
    shift = trainer.shift

    def watched(shifts: Mapping[str, Tensor] | None) -> None:
        seen.append((trainer.steps, trainer.all_vectors()))
        shift(shifts)

    trainer.shift = watched  # type: ignore[method-assign]
    return seen


def slow_down(peer: VirtualPeer, wait: Callable[[], object]) -> None:
    """Let every synchronisation of a peer's begin with a wait."""
    synchronise = peer.sync.synchronise

    def slow(trained: RoundWork, *, closes_from: float) -> StateUpdate:
        wait()
        return synchronise(trained, closes_from=closes_from)

    peer.sync.synchronise = slow  # type: ignore[method-assign]


# ---------------------------------------------------------------------- whole runs


@pytest.mark.full  # statistics; a golden run with overlap shows with each commit that runs repeat
@pytest.mark.parametrize(
    ("mode", "delay", "optimizer", "cost"),
    [
        ("steps", 1, "mean", 0.02),
        ("tokens", 2, "mean", 0.03),
        ("steps", 9, "mean", 0.05),
        ("tokens", 1, "nesterov", 0.1),
    ],
)
def test_members_agree_each_round_learn_much_as_blocking_and_repeat_themselves(mode, delay, optimizer, cost):
    """A delay of the whole round is a peer's own work alone for one round more."""
    outer = OuterConfig(optimizer=optimizer)
    changes = {"mode": mode, "steps": 6, "tokens": 3 * 6 * STEP_TOKENS, "total": 5, "outer": outer}
    peers, again, blocking = (
        run_virtual(overlapping(steps, **changes), num_peers=3, max_slots=3) for steps in (delay, delay, 0)
    )
    assert len(set(digests(peers))) == 1 and len(set(digests(peers)[0])) == 5
    assert digests(peers) == digests(again)
    assert [peer.reports for peer in peers] == [peer.reports for peer in again]
    for slot in range(4):
        assert (
            len({digest(peer.anchors.weights(VectorName.of_slot(slot))) for peer in peers if slot in peer.slots}) == 1
        )
    for peer, other in zip(peers, blocking, strict=True):
        assert peer.reports[-1].loss < 0.8 * peer.reports[0].loss
        assert peer.reports[-1].loss == pytest.approx(other.reports[-1].loss, rel=cost)
        assert not any(report.dropped for report in peer.reports)


def test_without_overlap_nothing_is_started_beside_the_training(monkeypatch):
    def refuse(*_: object) -> None:
        raise AssertionError("started")

    expected = digests(run_virtual(overlapping(0), num_peers=2, max_slots=3))
    monkeypatch.setattr("spes_p2p.sim.clock.VirtualClock.start", refuse)
    monkeypatch.setattr(rounds_module, "PendingSync", refuse)
    monkeypatch.setattr(Trainer, "shift", refuse)
    peers = run_virtual(overlapping(0), num_peers=2, max_slots=3)
    assert digests(peers) == expected
    assert all(report.waited_seconds is None for peer in peers for report in peer.reports)
    with pytest.raises(AssertionError, match="started"):
        run_virtual(overlapping(1), num_peers=2, max_slots=3)


# ---------------------------------------------------------------------- by hand


def replayed(run: RunConfig, peer: VirtualPeer) -> tuple[Trainer, dict[str, Tensor]]:
    """A trainer at the run's start, with a peer's slots and data."""
    other = VirtualPeer(run, peer.swarm, index=peer.index, max_slots=len(peer.slots))
    initial = other.initial()
    other.trainer.load(initial)
    other.trainer.set_slots(
        peer.slots, {VectorName.of_slot(slot): initial[VectorName.of_slot(slot)] for slot in peer.slots}
    )
    return other.trainer, initial


def stepped(anchors: Mapping[str, Tensor], brought: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The plain mean step of every group by what its members bring; all have trained alike."""
    after = {}
    for name, anchor in anchors.items():
        deltas = [anchor - brought[id][name] for id in sorted(brought) if name in brought[id]]
        after[name] = anchor - weighted_mean(deltas, [192.0] * len(deltas))
    return after


def carry(trainer: Trainer, before: Mapping[str, Tensor], averaged: Mapping[str, Tensor]) -> None:
    """Replace the state of one step ago by what was averaged then: `b (a - m_0)` on top of what it has become."""
    state = trainer.optimizer.state_tensors()
    for key in state:
        group, name, kind = key.split("/")
        if kind == "step":
            state[key].fill_(1e6)
            continue
        layout = trainer.layouts[SHARED if group == SHARED else "slot"]
        halves = averaged[group].split(layout.numel)
        mean = layout.unflatten(halves[0 if kind == "exp_avg" else 1])[name]
        beta = trainer._train.beta1 if kind == "exp_avg" else trainer._train.beta2
        state[key] += beta * (mean - before[key])
    trainer.optimizer.load_state_tensors(state)


@pytest.mark.parametrize("moments", ["both", "local"])
def test_a_late_result_moves_what_was_trained_on_by_anchor_minus_snapshot(moments):
    """Compared with a plain replay: each peer alone, averaged and corrected by hand after the first step of round 2."""
    run = overlapping(1, total=2, outer=OuterConfig(moments=moments))
    peers = run_virtual(run, num_peers=2, max_slots=3)
    trainers, snapshots, states, kept = {}, {}, {}, {}
    for peer in peers:
        id = peer.swarm.peer_id
        trainers[id], initial = replayed(run, peer)
        for step in range(STEPS):
            trainers[id].step(*peer.loop._rates(step / STEPS))
        snapshots[id], states[id] = trainers[id].all_vectors(), trainers[id].optimizer.state_tensors()
        kept[id] = trainers[id].all_moments(run.kept_moments)
    first = stepped(initial, snapshots)
    for peer in peers:
        id = peer.swarm.peer_id
        trainer = trainers[id]
        trainer.step(*peer.loop._rates(1.0))
        now = trainer.all_vectors()
        shifted = {name: now[name] + (first[name] - snapshots[id][name]) for name in now}
        trainer.load({name: first[name] for name in first.keys() - now.keys()} | shifted)
        if moments == "both":
            groups = {name: [kept[i][name] for i in sorted(kept) if name in kept[i]] for name in now}
            carry(trainer, states[id], {n: weighted_mean(own, [192.0] * len(own)) for n, own in groups.items()})
        for step in (1, 2):
            trainer.step(*peer.loop._rates(1.0 + step / STEPS))
    second = stepped(first, {id: trainer.all_vectors() for id, trainer in trainers.items()})
    for peer in peers:
        for name in peer.anchors.names:
            torch.testing.assert_close(peer.anchors.weights(name), second[name], rtol=1e-5, atol=2e-6, msg=name)
            assert not torch.allclose(second[name], first[name], atol=1e-4), "it did move"


# ---------------------------------------------------------------------- when


@pytest.mark.parametrize("delay", [1, 2, 9])
def test_a_result_is_applied_after_the_delay_or_at_the_rounds_end(delay):
    peer = alone(overlapping(delay))
    landings = watch_landings(peer.trainer)
    peer.loop.run()
    assert [steps for steps, _ in landings] == [STEPS * number + min(delay, STEPS) for number in (1, 2, 3)]


def test_a_result_that_comes_later_is_waited_for_at_the_rounds_end_and_the_wait_is_reported():
    """Every synchronisation takes ten seconds, a round's steps take 0.2: all the rest is told as not training."""
    run, late = overlapping(1), 10.0
    hub, reports = MemoryHub("run"), []
    peer = VirtualPeer(run, MemorySwarm(hub, peer_id(0)), index=0, max_slots=4)
    slow_down(peer, lambda: hub.clock.advance(late))
    began = hub.clock.now()
    landings = watch_landings(peer.trainer)
    hub.clock.run([lambda: peer.live(peer.initial, reports.append)])
    assert [steps for steps, _ in landings] == [6, 9, 12]
    training = STEPS * STEP_SECONDS
    waits = [0.0, late - training, late - training, 2 * late - training]
    # Opening has no steps and no work, and waits as well: its time is the first round's.
    assert [report.waited_seconds for report in reports] == pytest.approx(waits)
    assert [report.train_seconds for report in reports] == pytest.approx([training] * 4)
    assert [wall_seconds(report) for report in reports[1:]] == pytest.approx([late, late, 2 * late])
    assert sync_share(reports[1]) == pytest.approx(1.0 - training / late)
    served = 30.0
    assert sum(map(wall_seconds, reports)) == pytest.approx(hub.clock.now() - began - served, abs=1e-3)


@pytest.mark.full
def test_in_rounds_by_the_clock_training_goes_on_until_the_next_rounds_end_is_known():
    run, late = overlapping(1, mode="tokens", tokens=1000), 10.0
    hub, reports = MemoryHub("run"), []
    peer = VirtualPeer(run, MemorySwarm(hub, peer_id(0)), index=0, max_slots=4)
    slow_down(peer, lambda: hub.clock.advance(late))
    hub.clock.run([lambda: peer.live(peer.initial, reports.append)])
    assert [report.waited_seconds for report in reports[:3]] == [0.0, 0.0, 0.0]
    assert reports[0].tokens == pytest.approx(1000, abs=2 * STEP_TOKENS)
    for report in reports[1:]:
        assert report.train_seconds == pytest.approx(late, abs=1.2) and report.tokens > 9 * reports[0].tokens


def test_out_of_reach_a_peer_trains_no_longer_than_the_longest_round_and_then_waits():
    """Else what it had trained in hours would come as one delta."""
    run, late, longest = overlapping(1, mode="tokens", tokens=1000, max_seconds=2.0), 100.0, 2.0
    hub, reports = MemoryHub("run"), []
    peer = VirtualPeer(run, MemorySwarm(hub, peer_id(0)), index=0, max_slots=4)
    slow_down(peer, lambda: hub.clock.advance(late))
    hub.clock.run([lambda: peer.live(peer.initial, reports.append)])
    for report in reports[1:]:
        assert report.train_seconds == pytest.approx(longest, abs=2 * STEP_SECONDS)
        assert report.tokens == pytest.approx(1000 * longest, abs=2 * STEP_TOKENS)
    assert reports[1].waited_seconds == pytest.approx(late - longest, abs=1.2)


class Outage:
    """A task that ends when the swarm is back."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def wait(self, seconds: float) -> bool:
        self._seconds -= seconds
        return self._seconds <= 0

    def result(self) -> str:
        return "back"


def test_a_synchronisation_is_waited_for_as_long_as_the_swarm_is_out_of_reach():
    day = 24 * 3600.0
    assert PendingSync(None, 1, Outage(day)).land() == "back"


def test_a_delay_longer_than_a_round_by_the_clock_does_not_prolong_it():
    settings = {"mode": "tokens", "tokens": 1000}
    long, short = (alone(overlapping(delay, **settings)) for delay in (1000, 1))
    for peer in (long, short):
        peer.loop.run(peer.reports.append)
    assert [r.tokens for r in long.reports] == pytest.approx([r.tokens for r in short.reports], abs=2 * STEP_TOKENS)


def test_orphans_are_not_rescued_while_a_synchronisation_is_under_way():
    peer = alone(overlapping(2))
    looked: list[int] = []
    peer.sync.rescue_orphans = lambda: looked.append(peer.trainer.steps)  # type: ignore[method-assign]
    peer.loop.run()
    assert looked == [1, 2, 3, 6, 9, 12], "in flight are the steps 4, 5, 7, 8, 10 and 11"


# ---------------------------------------------------------------------- what


def script(peer: VirtualPeer, *outcomes: Callable[[RoundWork], StateUpdate]) -> list[RoundWork]:
    """Let synchronisations come to these outcomes, one after the other, and the one after them stop the run."""
    brought: list[RoundWork] = []
    left = list(outcomes)

    def synchronise(trained: RoundWork, *, closes_from: float) -> StateUpdate:
        brought.append(trained)
        if not left:
            raise Stop
        return left.pop(0)(trained)

    peer.sync.synchronise = synchronise  # type: ignore[method-assign]
    return brought


def anchors_of(peer: VirtualPeer) -> dict[str, Tensor]:
    return {name: peer.anchors.weights(name) for name in peer.anchors.names}


def test_a_dropped_round_takes_its_work_back_and_keeps_the_steps_since():
    peer = alone(overlapping(2))
    landings, start = watch_landings(peer.trainer), anchors_of(peer)
    brought = script(peer, lambda trained: StateUpdate(peer.slots, start))
    loaded: list[dict[str, Tensor]] = []
    late = peer.trainer.load_moments_late
    peer.trainer.load_moments_late = lambda *args: (loaded.append(peer.trainer.all_vectors()), late(*args))  # type: ignore
    with pytest.raises(Stop):
        peer.loop.run(peer.reports.append)
    (steps, before), after = landings[0], loaded[0]
    assert steps == STEPS + 2 and not peer.reports
    for name, anchor in start.items():
        assert torch.equal(after[name], before[name] + (anchor - brought[0].vectors[name]))
        since = before[name] - brought[0].vectors[name]
        assert since.abs().max() > 1e-3
        torch.testing.assert_close(after[name] - anchor, since, rtol=0, atol=1e-6)
    assert [trained.tokens for trained in brought] == [STEPS * STEP_TOKENS] * 2, "the next round's are its own alone"


def test_slots_that_come_and_go_meanwhile_are_taken_and_dropped_as_they_are(seed):
    torch.manual_seed(seed)
    peer = alone(overlapping(1))
    numel, old = peer.trainer.layouts["slot"].numel, peer.slots
    gone, new = old[0], next(slot for slot in range(4) if slot not in old)
    slots = tuple(sorted({*old, new} - {gone}))
    vectors = {name: torch.randn_like(flat) for name, flat in anchors_of(peer).items()}
    vectors |= {VectorName.of_slot(slot): torch.randn(numel) for slot in (gone, new)}
    moments = {name: torch.rand(2 * vectors[name].numel()) for name in (SHARED, *map(VectorName.of_slot, slots))}
    landings, shown = watch_landings(peer.trainer), []
    update = StateUpdate(slots, vectors | {name.moments: flat for name, flat in moments.items()})
    brought = script(peer, lambda trained: update)
    late = peer.trainer.load_moments_late

    def load_late(*args: Any) -> None:
        late(*args)
        weights = peer.trainer.model.slot_weights(gone)
        shown.append((peer.trainer.all_vectors(), peer.trainer.all_moments(peer.loop._run.averaged_moments), weights))

    peer.trainer.load_moments_late = load_late  # type: ignore[method-assign]
    with pytest.raises(Stop):
        peer.loop.run()
    (_, before), (after, own_moments, frozen) = landings[0], shown[0]
    assert peer.slots == slots
    assert torch.equal(after[VectorName.of_slot(new)], vectors[VectorName.of_slot(new)])
    assert torch.equal(own_moments[VectorName.of_slot(new)], moments[VectorName.of_slot(new)])
    assert torch.equal(peer.trainer.layouts["slot"].flatten(frozen), vectors[VectorName.of_slot(gone)])
    for name in (SHARED, *map(VectorName.of_slot, set(slots) - {new})):
        assert torch.equal(after[name], before[name] + (vectors[name] - brought[0].vectors[name]))
        assert not torch.equal(own_moments[name], moments[name]), "a step was made since"


def test_what_was_not_finite_is_replaced_for_it_would_stay_so():
    of_slot = VectorName.of_slot
    trained = RoundWork(
        {SHARED: torch.tensor([1.0, float("nan")]), of_slot(1): torch.ones(2), of_slot(2): torch.ones(2)},
        *(1, 1.0, 1.0),
        moments={SHARED: torch.ones(2), of_slot(1): torch.ones(2)},
    )
    vectors = {SHARED: torch.zeros(2), of_slot(1): torch.zeros(2), of_slot(0): torch.zeros(2)}
    vectors |= {SHARED.moments: torch.zeros(2), of_slot(1).moments: torch.zeros(2)}
    correction = Correction.of(StateUpdate((1,), vectors, 5.0), trained)
    assert set(correction.update.vectors) == {SHARED, of_slot(0), "moments-shared"}
    assert (correction.update.slots, correction.update.ends_at) == ((1,), 5.0)
    assert correction.shifts[of_slot(1)].tolist() == [-1.0, -1.0] and set(correction.shifts) == {of_slot(1)}
    assert set(correction.moments) == set(correction.before) == {of_slot(1)}


def test_who_lands_in_a_run_that_is_over_stops():
    peer = alone(overlapping(1, total=9))

    def behind(trained: RoundWork) -> StateUpdate:
        peer.sync.round = 9
        return StateUpdate(peer.slots, anchors_of(peer))

    brought = script(peer, behind)
    peer.loop.run(peer.reports.append)
    assert len(brought) == 1 and peer.trainer.steps == STEPS + 1


def test_a_checkpoint_is_of_the_round_that_was_committed_not_of_the_steps_since(tmp_path):
    peer, states, reports = alone(overlapping(2)), list[PeerState](), list[Metrics]()
    checkpoint = PeerCheckpoint(tmp_path, tmp_path)
    checkpoint.save = lambda state, tensors: states.append(state)  # type: ignore[method-assign]
    peer.loop._checkpointer = Checkpointer(checkpoint, peer.trainer, ProcessGroup("cpu"), peer.sync)
    peer.loop.run(reports.append)
    assert len(states) == len(reports)
    for number, (report, state) in enumerate(zip(reports, states, strict=True), 1):
        assert state.round == report.round == number
        assert state.steps == report.step == STEPS * number == state.data["position"]
        assert state.total_tokens == report.total_tokens == STEPS * STEP_TOKENS * number


# ---------------------------------------------------------------------- threads


def test_training_does_not_wait_for_the_network():
    """The synchronisation ends only because steps are made meanwhile."""
    peer = alone(overlapping(1, steps=6, total=2))
    reached, landings = threading.Event(), watch_landings(peer.trainer)
    peer.loop._start = ThreadTask
    in_thread: list[bool] = []
    slow_down(peer, lambda: in_thread.append(reached.wait(60.0)))
    step = peer.trainer.step

    def watched(*rates: float) -> Any:
        if peer.trainer.steps == 6 + 3:
            reached.set()
        return step(*rates)

    peer.trainer.step = watched  # type: ignore[method-assign]
    peer.loop.run(peer.reports.append)
    assert in_thread == [True, True] and landings[0][0] > 6 + 3
    assert [report.round for report in peer.reports] == [1, 2]


@pytest.mark.parametrize("start", [None, ThreadTask], ids=["virtual", "thread"])
def test_a_failure_beside_the_training_ends_it_before_the_delay_is_over(start):
    peer = alone(overlapping(50, steps=100))
    if start is not None:
        peer.loop._start = start

    def fail(trained: RoundWork) -> StateUpdate:
        raise ExchangeError("the whole network is gone; call somebody")

    script(peer, fail)
    with pytest.raises(ExchangeError, match="call somebody"):
        peer.loop.run()
    assert peer.trainer.steps < 100 + 50


def test_who_is_interrupted_does_not_stay_for_a_synchronisation(monkeypatch):
    monkeypatch.setattr(rounds_module, "LEAVING_SECONDS", 0.1)
    peer, released = alone(overlapping(1)), threading.Event()
    peer.loop._start = ThreadTask
    slow_down(peer, lambda: released.wait(60.0))
    interrupt(peer, STEPS + 2)
    with pytest.raises(KeyboardInterrupt):
        peer.loop.run()
    assert any(thread.name == "synchronisation" for thread in threading.enumerate())
    released.set()
    for thread in threading.enumerate():
        if thread.name == "synchronisation":
            thread.join(60.0)


def interrupt(peer: VirtualPeer, steps: int) -> None:
    """Have a Ctrl-C come before the step after so many."""
    step = peer.trainer.step

    def interrupted(*rates: float) -> Any:
        if peer.trainer.steps == steps:
            raise KeyboardInterrupt
        return step(*rates)

    peer.trainer.step = interrupted  # type: ignore[method-assign]


@pytest.mark.parametrize("others", [["somebody"], []])
def test_who_leaves_lets_a_synchronisation_end_before_it_hands_over(others, monkeypatch):
    """What it commits is the others' too; unless nobody is there."""
    monkeypatch.setattr(rounds_module, "LEAVING_SECONDS", 0.0)
    peer, released = alone(overlapping(1)), threading.Event()
    peer.loop._start, holdings = ThreadTask, peer.sync.held
    slow_down(peer, lambda: released.wait(60.0))
    interrupt(peer, STEPS + 2)
    with pytest.raises(KeyboardInterrupt):
        peer.loop.run()
    flight = peer.loop._pending
    assert flight is not None and not flight._task.done()

    def read() -> list[str]:
        if others:
            released.set()
        return others

    handed: list[tuple[float, int]] = []
    holdings.others = read  # type: ignore[method-assign]
    holdings.hand_over = lambda seconds: handed.append((seconds, peer.sync.round)) or []  # type: ignore
    rounds = RoundConfig(exchange_seconds=60.0)
    _hand_over(peer.sync, lambda: peer.loop, rounds, 600.0)
    assert handed == [(60.0, 1 if others else 0)]
    released.set()
    assert flight._task.wait(60.0)


# ---------------------------------------------------------------------- ranks


def rank_main(rank: int, port: int, folder: str, shard: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group = ProcessGroup("cpu")
    group.connect()
    try:
        rank_run(group, Path(folder), shard)
    finally:
        group.close()


def rank_run(group: ProcessGroup, folder: Path, shard: str) -> None:
    """A function of its own, so that the trainer's DDP wrapper is gone before its process group is."""
    run = overlapping(1, total=5)
    trainer = build_trainer(run, VOCAB, RandomTokens(0, 16), group, machine=MachineConfig(shard=shard))  # type: ignore
    landings: list[int] = []
    shift = trainer.shift
    trainer.shift = lambda shifts: (landings.append(trainer.steps), shift(shifts))[1]  # type: ignore[method-assign]
    sync, initial = None, None
    if group.is_leader:
        swarm = MemorySwarm(MemoryHub("run"), peer_id(0))
        sync = build_synchroniser(swarm, run, trainer, run_id="run", max_slots=3)
        swarm.enter(sync.anchors.vectors())
        initial = partial(build_initial, run, VOCAB, sync.anchors, trainer.layouts)
    rounds = TrainingLoop(run, trainer, group, sync)
    rounds.open(initial)
    rounds.run()
    vectors = {name: trainer.vector(name) for name in trainer.names}
    state = {name: tensor.tolist() for name, tensor in (vectors | trainer.optimizer.state_tensors()).items()}
    told = {"landings": landings, "steps": trainer.steps, "state": state}
    (folder / f"{group.rank}.json").write_text(json.dumps(told))


@pytest.mark.parametrize("shard", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_two_ranks_apply_a_result_at_the_same_step_and_stay_equal(shard, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    run_ranks(rank_main, (port, str(tmp_path), shard), RANKS)
    one, other = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS))
    assert one["steps"] == 5 * STEPS and len(one["landings"]) == 4
    assert one == other
